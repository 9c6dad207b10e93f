//! `getsockopt` and `setsockopt`. An option is honoured or refused with `ENOPROTOOPT`; which are only kept, and why that is enough, the table says.

pub mod table;
mod tcp_info;
mod words;

use crate::Ops;
use crate::fd_table::FileId;
use crate::file::Shape;
use crate::held::Locked;
use crate::kernel;
use crate::lane::Lane;
use crate::raw;
use crate::sleep::Patience;
use crate::sockaddr::Family;
use core::ffi::c_int;
use core::time::Duration;
use ginnel::channel::Sharing;
use ginnel::{CongestionControl, OptionError, SocketOptions, TcpOption};
use rustix::fd::RawFd;
use rustix::io::Errno;
use words::Words;

/// Options that are on or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flag {
    ReuseAddress,
    ReusePort,
    KeepAlive,
    OobInline,
    Broadcast,
    V6Only,
    NoDelay,
    Cork,
}

/// Options that have to be told to the stack, for which it is remembered that the program set them.
#[derive(Clone, Copy)]
enum Told {
    NoDelay,
    Cork,
    KeepAlive,
    OobInline,
    KeepIdle,
    KeepInterval,
    KeepCount,
    UserTimeout,
    Linger2,
    MaxSegment,
    RecvBuffer,
    SendBuffer,
    Congestion,
    Class,
    HopLimit,
    SynCount,
}

/// Those that connections of a listener, and connections that are opened, begin with.
const AT_BIRTH: u16 = bit(Told::NoDelay)
    | bit(Told::KeepAlive)
    | bit(Told::MaxSegment)
    | bit(Told::RecvBuffer)
    | bit(Told::SendBuffer);

const fn bit(told: Told) -> u16 {
    1 << told as u16
}

/// Smallest buffers, as `getsockopt` shows them (`SOCK_MIN_RCVBUF`, `SOCK_MIN_SNDBUF`).
const RCVBUF_MIN: u32 = 2304;
const SNDBUF_MIN: u32 = 4608;
/// Largest that may be asked for (`net.core.rmem_max`), before Linux doubles it.
const BUFFER_MAX: u32 = 212_992;
/// Largest that may be had by `SO_RCVBUFFORCE`, before Linux doubles it: what the stack takes.
const FORCED_MAX: u32 = 1 << 29;
/// What a socket begins with (`net.ipv4.tcp_rmem`, `tcp_wmem`).
const RCVBUF_DEFAULT: u32 = 131_072;
const SNDBUF_DEFAULT: u32 = 16_384;
/// What `TCP_LINGER2` is at first (`net.ipv4.tcp_fin_timeout`), and at the most (`TCP_FIN_TIMEOUT_MAX`), in seconds.
const LINGER2_DEFAULT: i32 = 60;
const LINGER2_MAX: i32 = 120;
/// `IP_TTL` and its like at first.
const HOPS_DEFAULT: u32 = 64;
/// Numbers that libc has no names for.
const BINDTOIFINDEX: c_int = 62;
const RCVTIMEO_NEW: c_int = 66;
const SNDTIMEO_NEW: c_int = 67;
/// Longest time of `SO_RCVTIMEO` that is not endless, in seconds (`MAX_SCHEDULE_TIMEOUT / HZ`).
const TIMEOUT_MAX_S: i64 = i64::MAX / 1000;

/// What a program told a socket.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    flags: u16,
    /// What the program set, and what the connection has been told already.
    set: u16,
    told: u16,
    linger: Option<Duration>,
    recv_timeout: Option<Duration>,
    send_timeout: Option<Duration>,
    recv_low_water: u32,
    recv_buffer: u32,
    send_buffer: u32,
    max_segment: u16,
    keep_idle_s: u16,
    keep_interval_s: u16,
    keep_count: u8,
    user_timeout_ms: u32,
    /// Negative is not at all.
    linger2_s: i32,
    syn_count: u8,
    /// `None`: the stack's.
    congestion: Option<CongestionControl>,
    class: u8,
    class_v6: u8,
    /// -1: the stack's.
    hops: i16,
    hops_v6: i16,
    defer_accept_s: u32,
    quick_ack: bool,
    words: Words,
    /// What the engine knows of a UDP socket's.
    pub told_datagrams: Option<ginnel::UdpOptions>,
    /// As the program set them, while it is open whether the socket will be the kernel's.
    as_set: Vec<(c_int, c_int, Box<[u8]>)>,
}

crate::note::fields!(Options {
    flags,
    set,
    told,
    linger,
    recv_timeout,
    send_timeout,
    recv_low_water,
    recv_buffer,
    send_buffer,
    max_segment,
    keep_idle_s,
    keep_interval_s,
    keep_count,
    user_timeout_ms,
    linger2_s,
    syn_count,
    congestion,
    class,
    class_v6,
    hops,
    hops_v6,
    defer_accept_s,
    quick_ack,
    words,
    as_set,
} anew { told_datagrams: None });

impl Options {
    /// Of a new socket.
    pub fn new(_family: Family, datagrams: bool) -> Self {
        Self {
            flags: 0,
            set: 0,
            told: 0,
            linger: None,
            recv_timeout: None,
            send_timeout: None,
            recv_low_water: 1,
            recv_buffer: if datagrams { BUFFER_MAX } else { RCVBUF_DEFAULT },
            send_buffer: if datagrams { BUFFER_MAX } else { SNDBUF_DEFAULT },
            max_segment: 0,
            keep_idle_s: 7200,
            keep_interval_s: 75,
            keep_count: 9,
            user_timeout_ms: 0,
            linger2_s: 60,
            syn_count: 6,
            congestion: None,
            class: 0,
            class_v6: 0,
            hops: -1,
            hops_v6: -1,
            defer_accept_s: 0,
            quick_ack: true,
            words: Words::default(),
            told_datagrams: None,
            as_set: Vec::new(),
        }
    }

    pub fn flag(&self, flag: Flag) -> bool {
        self.flags & 1 << flag as u16 != 0
    }

    fn set_flag(&mut self, flag: Flag, on: bool) {
        self.flags = self.flags & !(1 << flag as u16) | u16::from(on) << flag as u16;
    }

    pub fn is_v6_only(&self) -> bool {
        self.flag(Flag::V6Only)
    }

    /// With whom an address may be shared.
    pub fn sharing(&self, family: Family) -> Sharing {
        Sharing {
            reuse_address: self.flag(Flag::ReuseAddress),
            reuse_port: self.flag(Flag::ReusePort),
            v6_only: family == Family::V6 && self.is_v6_only(),
        }
    }

    pub fn recv_patience(&self) -> Patience {
        Patience::of(self.recv_timeout)
    }

    pub fn send_patience(&self) -> Patience {
        Patience::of(self.send_timeout)
    }

    pub fn recv_low_water(&self) -> usize {
        self.recv_low_water as usize
    }

    /// Bytes that may be on their way to a socket, of its receive buffer: the other half is for what the kernel needs itself (`tcp_win_from_space`).
    fn window_bytes(&self) -> u32 {
        self.recv_buffer / 2
    }

    /// Close sends RST.
    pub fn resets_at_close(&self) -> bool {
        self.linger == Some(Duration::ZERO)
    }

    /// How long a close waits, if it does.
    pub fn lingers(&self) -> Option<Duration> {
        self.linger
    }

    /// What connections begin with.
    pub fn at_birth(&self) -> SocketOptions {
        let set = |told, value: u32| (self.set & bit(told) != 0).then_some(value);
        SocketOptions {
            recv_buffer_bytes: set(Told::RecvBuffer, self.window_bytes()),
            send_buffer_bytes: set(Told::SendBuffer, self.send_buffer),
            mss: set(Told::MaxSegment, self.max_segment.into()).map(|_| self.max_segment),
            nodelay: self.flag(Flag::NoDelay),
            keepalive: self.flag(Flag::KeepAlive),
            ack_events: false,
        }
    }

    /// Connections begin with what is set now, and are the stack's.
    pub fn born(&mut self) {
        self.told = self.set & AT_BIRTH;
        self.as_set = Vec::new();
    }

    /// What the program has set, in its order.
    pub fn as_set(&self) -> &[(c_int, c_int, Box<[u8]>)] {
        &self.as_set
    }

    /// What an accepted socket has of its listener.
    pub fn inherited(&self) -> Self {
        let mut options = self.clone();
        if options.words.get("SO_PRIORITY").is_some() {
            // Not this one (`sk_clone_lock`).
            options.words.set("SO_PRIORITY", 0);
        }
        options
    }

    fn has_untold(&self) -> bool {
        self.set & !self.told != 0
    }

    /// `SO_MEMINFO`: what is allocated and may be, for receiving, sending, ahead and options; backlog and drops (`SK_MEMINFO_…`).
    fn memory(&self) -> Vec<u8> {
        let words = [0, self.recv_buffer, 0, self.send_buffer, 0, 0, 0, 0, 0];
        words.map(u32::to_ne_bytes).concat()
    }

    /// What the connection was not told yet.
    fn untold(&mut self, v4: bool) -> impl Iterator<Item = TcpOption> + use<> {
        let (class, hops) = if v4 { (self.class, self.hops) } else { (self.class_v6, self.hops_v6) };
        let untold = self.set & !self.told;
        self.told = self.set;
        let seconds = |s: u32| Duration::from_secs(s.into());
        let all = [
            (Told::NoDelay, TcpOption::NoDelay(self.flag(Flag::NoDelay))),
            (Told::Cork, TcpOption::Cork(self.flag(Flag::Cork))),
            (Told::KeepAlive, TcpOption::KeepAlive(self.flag(Flag::KeepAlive))),
            (Told::OobInline, TcpOption::OobInline(self.flag(Flag::OobInline))),
            (Told::KeepIdle, TcpOption::KeepIdle(seconds(self.keep_idle_s.into()))),
            (Told::KeepInterval, TcpOption::KeepInterval(seconds(self.keep_interval_s.into()))),
            (Told::KeepCount, TcpOption::KeepCount(self.keep_count)),
            (Told::UserTimeout, TcpOption::UserTimeout(Duration::from_millis(self.user_timeout_ms.into()))),
            // Not to wait at all is to wait as short as possible.
            (Told::Linger2, TcpOption::Linger2(seconds(self.linger2_s.max(1).unsigned_abs()))),
            (Told::MaxSegment, TcpOption::MaxSegment(self.max_segment)),
            (Told::RecvBuffer, TcpOption::RecvBuffer(self.window_bytes())),
            (Told::SendBuffer, TcpOption::SendBuffer(self.send_buffer)),
            (Told::Congestion, TcpOption::Congestion(self.congestion.unwrap_or_default())),
            (Told::Class, TcpOption::Tos(class)),
            (Told::HopLimit, TcpOption::HopLimit(u8::try_from(hops).ok().filter(|hops| *hops > 0))),
            (Told::SynCount, TcpOption::SynRetries(self.syn_count)),
        ];
        all.into_iter().filter(move |(told, _)| untold & bit(*told) != 0).map(|(_, option)| option)
    }

    fn note(&mut self, told: Told) {
        self.set |= bit(told);
        self.told &= !bit(told);
    }
}

/// The value of an option, as `getsockopt` hands it out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptionValue(Vec<u8>);

impl OptionValue {
    /// Its bytes. A program that has less room gets the first of them.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn int(value: c_int) -> Self {
        Self(value.to_ne_bytes().to_vec())
    }

    fn ints(values: &[i64]) -> Self {
        Self(values.iter().flat_map(|v| v.to_ne_bytes()).collect())
    }
}

fn int(value: &[u8]) -> Result<c_int, Errno> {
    let bytes = value.get(..4).ok_or(Errno::INVAL)?;
    Ok(c_int::from_ne_bytes(bytes.try_into().expect("four bytes")))
}

/// A number within a range, or `EINVAL`.
fn within(value: &[u8], range: core::ops::RangeInclusive<c_int>) -> Result<c_int, Errno> {
    let value = int(value)?;
    if range.contains(&value) { Ok(value) } else { Err(Errno::INVAL) }
}

/// `struct timeval`: `None` is endless (`sock_set_timeout`).
fn timeout(value: &[u8]) -> Result<Option<Duration>, Errno> {
    let bytes = value.get(..16).ok_or(Errno::INVAL)?;
    let word = |at: usize| i64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let (seconds, micros) = (word(0), word(8));
    if !(0..1_000_000).contains(&micros) {
        return Err(Errno::DOM);
    }
    if seconds < 0 {
        // Nothing is waited for at all.
        return Ok(Some(Duration::ZERO));
    }
    if seconds == 0 && micros == 0 || seconds >= TIMEOUT_MAX_S {
        return Ok(None);
    }
    Ok(Some(Duration::new(seconds.unsigned_abs(), micros as u32 * 1000)))
}

impl Ops {
    /// `setsockopt`.
    ///
    /// # Errors
    /// `ENOPROTOOPT` for what is not honoured, `EINVAL`, `EDOM`.
    pub fn setsockopt(&self, fd: RawFd, level: c_int, name: c_int, value: &[u8]) -> Result<(), Errno> {
        let mut lane = self.lock()?;
        let file = self.file(fd)?;
        if (level, name) == (libc::SOL_SOCKET, libc::SO_RCVLOWAT) {
            // What came before is judged by the mark of then.
            lane.pump();
        }
        let socket = lane.files.socket(file)?;
        let (family, shape, datagrams) = (socket.family, socket.shape, socket.datagrams);
        let options = &mut socket.options;
        if datagrams && level == libc::IPPROTO_TCP {
            return Err(Errno::NOPROTOOPT);
        }
        let mut flag = |flag: Flag, told: Option<Told>| {
            let on = int(value)? != 0;
            options.set_flag(flag, on);
            if let Some(told) = told {
                options.note(told);
            }
            Ok::<_, Errno>(())
        };
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_REUSEADDR) => flag(Flag::ReuseAddress, None)?,
            (libc::SOL_SOCKET, libc::SO_REUSEPORT) => flag(Flag::ReusePort, None)?,
            (libc::SOL_SOCKET, libc::SO_BROADCAST) => flag(Flag::Broadcast, None)?,
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => flag(Flag::KeepAlive, Some(Told::KeepAlive))?,
            (libc::SOL_SOCKET, libc::SO_OOBINLINE) => flag(Flag::OobInline, Some(Told::OobInline))?,
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => flag(Flag::NoDelay, Some(Told::NoDelay))?,
            (libc::IPPROTO_TCP, libc::TCP_CORK) => flag(Flag::Cork, Some(Told::Cork))?,
            (libc::SOL_SOCKET, libc::SO_LINGER) => {
                let seconds = int(value.get(4..8).ok_or(Errno::INVAL)?)?;
                let on = int(value)? != 0;
                options.linger = on.then(|| Duration::from_secs(u64::from(seconds.max(0).unsigned_abs())));
            }
            (libc::SOL_SOCKET, libc::SO_RCVTIMEO | RCVTIMEO_NEW) => options.recv_timeout = timeout(value)?,
            (libc::SOL_SOCKET, libc::SO_SNDTIMEO | SNDTIMEO_NEW) => options.send_timeout = timeout(value)?,
            (libc::SOL_SOCKET, libc::SO_RCVLOWAT) => {
                let bytes = int(value)?;
                // A negative one is as much as there can be, and none is one.
                let bytes = u32::try_from(bytes).unwrap_or(c_int::MAX.unsigned_abs());
                options.recv_low_water = bytes.clamp(1, options.recv_buffer / 2);
            }
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => {
                options.recv_buffer = doubled(int(value)?, RCVBUF_MIN, BUFFER_MAX);
                options.note(Told::RecvBuffer);
            }
            (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE) => {
                options.recv_buffer = doubled(int(value)?.max(0), RCVBUF_MIN, FORCED_MAX);
                options.note(Told::RecvBuffer);
            }
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => {
                options.send_buffer = doubled(int(value)?, SNDBUF_MIN, BUFFER_MAX);
                options.note(Told::SendBuffer);
            }
            (libc::SOL_SOCKET, libc::SO_SNDBUFFORCE) => {
                options.send_buffer = doubled(int(value)?.max(0), SNDBUF_MIN, FORCED_MAX);
                options.note(Told::SendBuffer);
            }
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => {
                options.keep_idle_s = within(value, 1..=32_767)? as u16;
                options.note(Told::KeepIdle);
            }
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL) => {
                options.keep_interval_s = within(value, 1..=32_767)? as u16;
                options.note(Told::KeepInterval);
            }
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT) => {
                options.keep_count = within(value, 1..=127)? as u8;
                options.note(Told::KeepCount);
            }
            (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT) => {
                options.user_timeout_ms = within(value, 0..=c_int::MAX)?.unsigned_abs();
                options.note(Told::UserTimeout);
            }
            (libc::IPPROTO_TCP, libc::TCP_LINGER2) => {
                options.linger2_s = match int(value)? {
                    0 => LINGER2_DEFAULT,
                    seconds if seconds < 0 => -1,
                    seconds => seconds.min(LINGER2_MAX),
                };
                options.note(Told::Linger2);
            }
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => {
                options.max_segment = match int(value)? {
                    0 => 0,
                    _ => within(value, 88..=32_767)? as u16,
                };
                if options.max_segment > 0 {
                    options.note(Told::MaxSegment);
                }
            }
            (libc::IPPROTO_TCP, libc::TCP_SYNCNT) => {
                options.syn_count = within(value, 1..=127)? as u8;
                options.note(Told::SynCount);
            }
            (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT) => {
                options.defer_accept_s = defer::seconds(int(value)?);
            }
            (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => {
                options.congestion = Some(congestion(value)?);
                options.note(Told::Congestion);
            }
            (libc::IPPROTO_TCP, libc::TCP_ULP) => {
                // Each would be a module of the kernel's.
                return Err(if value.is_empty() { Errno::INVAL } else { Errno::NOENT });
            }
            (libc::IPPROTO_IP, libc::IP_TOS) => options.set_class(level, value)?,
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) if family == Family::V6 => {
                options.set_class(level, value)?;
            }
            (libc::IPPROTO_IP, libc::IP_TTL) => options.set_hops(level, value)?,
            (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS) if family == Family::V6 => {
                options.set_hops(level, value)?;
            }
            (libc::IPPROTO_TCP, libc::TCP_QUICKACK) => {
                let on = int(value)? != 0;
                options.quick_ack = on;
                if let Shape::Stream(stream) = shape {
                    let result = lane.tell(stream.conn, TcpOption::QuickAck(on));
                    lane.client.flush();
                    return result;
                }
            }
            (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) if family == Family::V6 => {
                if !matches!(shape, Shape::Fresh { bound: None }) {
                    return Err(Errno::INVAL);
                }
                flag(Flag::V6Only, None)?;
            }
            (libc::IPPROTO_TCP, libc::TCP_FASTOPEN) if matches!(shape, Shape::Stream(_)) => {
                return Err(Errno::INVAL);
            }
            (libc::SOL_SOCKET, libc::SO_BINDTODEVICE | BINDTOIFINDEX) => {
                return self.bind_to_device(lane, (fd, file), name, value);
            }
            _ => options.set_word(family, level, name, value)?,
        }
        if matches!(shape, Shape::Fresh { .. }) {
            let as_set = &mut lane.files.socket(file)?.options.as_set;
            as_set.retain(|(l, n, _)| (*l, *n) != (level, name));
            as_set.push((level, name, value.into()));
        }
        if let Shape::Datagrams(dgram) = shape {
            if let Some(half) = dgram.kernel {
                // What the kernel does not take it has no use for.
                let _ = raw::setsockopt(half, level, name, value);
            }
            return lane.apply_datagram_options(file);
        }
        if (level, name) == (libc::SOL_SOCKET, libc::SO_RCVLOWAT) {
            // As much may be there already (`tcp_set_rcvlowat`).
            if lane.status(file).is_some_and(|(_, status)| status.readable > 0 || status.peer_closed) {
                lane.data_ready(file);
            }
        }
        lane.apply_options(file)
    }

    /// `getsockopt`.
    ///
    /// # Errors
    /// `ENOPROTOOPT`.
    pub fn getsockopt(&self, fd: RawFd, level: c_int, name: c_int) -> Result<OptionValue, Errno> {
        let mut lane = self.lock()?;
        let file = self.file(fd)?;
        lane.status(file);
        let socket = lane.files.socket(file)?;
        let (family, shape, datagrams) = (socket.family, socket.shape, socket.datagrams);
        if datagrams && level == libc::IPPROTO_TCP {
            return Err(Errno::NOPROTOOPT);
        }
        let options = socket.options.clone();
        let flag = |flag| OptionValue::int(options.flag(flag).into());
        let time = |time: Option<Duration>| {
            let time = time.unwrap_or_default();
            OptionValue::ints(&[time.as_secs().cast_signed(), time.subsec_micros().into()])
        };
        let number = |value: u32| OptionValue::int(value.cast_signed());
        Ok(match (level, name) {
            (libc::SOL_SOCKET, libc::SO_REUSEADDR) => flag(Flag::ReuseAddress),
            (libc::SOL_SOCKET, libc::SO_REUSEPORT) => flag(Flag::ReusePort),
            (libc::SOL_SOCKET, libc::SO_BROADCAST) => flag(Flag::Broadcast),
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => flag(Flag::KeepAlive),
            (libc::SOL_SOCKET, libc::SO_OOBINLINE) => flag(Flag::OobInline),
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => flag(Flag::NoDelay),
            (libc::IPPROTO_TCP, libc::TCP_CORK) => flag(Flag::Cork),
            (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) if family == Family::V6 => flag(Flag::V6Only),
            (libc::SOL_SOCKET, libc::SO_TYPE) if datagrams => OptionValue::int(libc::SOCK_DGRAM),
            (libc::SOL_SOCKET, libc::SO_PROTOCOL) if datagrams => OptionValue::int(libc::IPPROTO_UDP),
            (libc::SOL_SOCKET, libc::SO_TYPE) => OptionValue::int(libc::SOCK_STREAM),
            (libc::SOL_SOCKET, libc::SO_PROTOCOL) => OptionValue::int(libc::IPPROTO_TCP),
            (libc::SOL_SOCKET, libc::SO_DOMAIN) => OptionValue::int(family.number().into()),
            (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => {
                OptionValue::int(matches!(shape, Shape::Listening(_)).into())
            }
            (libc::SOL_SOCKET, libc::SO_ERROR) => {
                let error = lane.take_udp_error(file).or_else(|| lane.take_error(file));
                OptionValue::int(error.map_or(0, Errno::raw_os_error))
            }
            (libc::SOL_SOCKET, libc::SO_LINGER) => {
                let seconds = options.linger.map_or(0, |time| time.as_secs() as c_int);
                let on = c_int::from(options.linger.is_some());
                OptionValue([on.to_ne_bytes(), seconds.to_ne_bytes()].concat())
            }
            (libc::SOL_SOCKET, libc::SO_RCVTIMEO | RCVTIMEO_NEW) => time(options.recv_timeout),
            (libc::SOL_SOCKET, libc::SO_SNDTIMEO | SNDTIMEO_NEW) => time(options.send_timeout),
            (libc::SOL_SOCKET, libc::SO_RCVLOWAT) => number(options.recv_low_water),
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => number(options.recv_buffer),
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => number(options.send_buffer),
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => number(options.keep_idle_s.into()),
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL) => number(options.keep_interval_s.into()),
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT) => number(options.keep_count.into()),
            (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT) => number(options.user_timeout_ms),
            (libc::IPPROTO_TCP, libc::TCP_LINGER2) => OptionValue::int(options.linger2_s),
            (libc::IPPROTO_TCP, libc::TCP_SYNCNT) => number(options.syn_count.into()),
            (libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT) => number(options.defer_accept_s),
            (libc::IPPROTO_TCP, libc::TCP_QUICKACK) => OptionValue::int(options.quick_ack.into()),
            (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => {
                congestion_name(options.congestion.unwrap_or_default())
            }
            (libc::IPPROTO_TCP, libc::TCP_ULP) => OptionValue(Vec::new()),
            (libc::IPPROTO_IP, libc::IP_TOS) => number(options.class.into()),
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) if family == Family::V6 => {
                number(options.class_v6.into())
            }
            (libc::IPPROTO_IP, libc::IP_TTL) => number(hops(options.hops)),
            (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS) if family == Family::V6 => {
                number(hops(options.hops_v6))
            }
            (libc::IPPROTO_IP, libc::IP_MTU) => number(lane.path_mtu(file)?),
            (libc::IPPROTO_IPV6, libc::IPV6_MTU) if family == Family::V6 => number(lane.path_mtu(file)?),
            (libc::SOL_SOCKET, libc::SO_BINDTODEVICE) => OptionValue(Vec::new()),
            (libc::SOL_SOCKET, BINDTOIFINDEX) => OptionValue::int(0),
            // `struct ucred` of nobody.
            (libc::SOL_SOCKET, libc::SO_PEERCRED) => OptionValue([0, -1, -1].map(i32::to_ne_bytes).concat()),
            (libc::SOL_SOCKET, libc::SO_PEERNAME) => {
                drop(lane);
                return self.getpeername(fd).map(|name| OptionValue(name.bytes().to_vec()));
            }
            (libc::SOL_SOCKET, libc::SO_MEMINFO) => OptionValue(options.memory()),
            (libc::SOL_SOCKET, libc::SO_COOKIE) => OptionValue(lane.cookie(file).to_ne_bytes().to_vec()),
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => match lane.info(file) {
                Some(info) => number(info.snd_mss),
                None if options.max_segment > 0 => number(options.max_segment.into()),
                None => number(MSS_DEFAULT),
            },
            (libc::IPPROTO_TCP, libc::TCP_INFO) => {
                let listens = matches!(shape, Shape::Listening(_));
                OptionValue(tcp_info::bytes(lane.info(file).as_deref(), listens))
            }
            _ => options.get_word(family, level, name)?,
        })
    }
}

/// What `TCP_MAXSEG` is before there is a connection (`TCP_MSS_DEFAULT`).
const MSS_DEFAULT: u32 = 536;

/// Buffers are as large as asked for, and as much again for what the kernel needs itself: programs rely on reading back twice the value.
fn doubled(asked: c_int, least: u32, most: u32) -> u32 {
    // Negative values are compared without their sign, so they are as large as possible.
    let asked = u32::try_from(asked).unwrap_or(u32::MAX).min(most);
    (asked * 2).max(least)
}

fn hops(hops: i16) -> u32 {
    u32::try_from(hops).unwrap_or(HOPS_DEFAULT)
}

/// Bytes of a name of an algorithm (`TCP_CA_NAME_MAX`).
const CONGESTION_NAME_BYTES: usize = 16;

fn congestion(value: &[u8]) -> Result<CongestionControl, Errno> {
    if value.is_empty() {
        return Err(Errno::INVAL);
    }
    let name = value.get(..CONGESTION_NAME_BYTES - 1).unwrap_or(value);
    match name.split(|byte| *byte == 0).next().unwrap_or_default() {
        b"cubic" => Ok(CongestionControl::Cubic),
        b"reno" => Ok(CongestionControl::NewReno),
        _ => Err(Errno::NOENT),
    }
}

fn congestion_name(kind: CongestionControl) -> OptionValue {
    let mut name = match kind {
        CongestionControl::Cubic => b"cubic".to_vec(),
        CongestionControl::NewReno => b"reno".to_vec(),
    };
    name.resize(CONGESTION_NAME_BYTES, 0);
    OptionValue(name)
}

/// `TCP_DEFER_ACCEPT` is kept as a number of SYN+ACKs, so times read back as what these take.
mod defer {
    /// Time until the second SYN+ACK, and between two of them at the most, in seconds.
    const FIRST_S: u32 = 1;
    const MOST_S: u32 = 120;

    /// What a number of seconds becomes (`secs_to_retrans`, `retrans_to_secs`).
    pub fn seconds(asked: i32) -> u32 {
        let Some(asked) = u32::try_from(asked).ok().filter(|asked| *asked > 0) else { return 0 };
        let (mut time, mut period, mut count) = (FIRST_S, FIRST_S, 1);
        while asked > period && count < 255 {
            count += 1;
            time = (time * 2).min(MOST_S);
            period += time;
        }
        period
    }
}

fn refusal(error: OptionError) -> Errno {
    match error {
        OptionError::Stale | OptionError::Invalid => Errno::INVAL,
        OptionError::TooMany => Errno::NOBUFS,
    }
}

impl Ops {
    /// `SO_BINDTODEVICE` and `SO_BINDTOIFINDEX`. Devices that a program can name are the kernel's, and so is a socket that is bound to one.
    fn bind_to_device(
        &self,
        mut lane: Locked<'_>,
        (fd, file): (RawFd, FileId),
        name: c_int,
        value: &[u8],
    ) -> Result<(), Errno> {
        let none = match name {
            BINDTOIFINDEX => match int(value)? {
                index if index < 0 => return Err(Errno::INVAL),
                index => index == 0,
            },
            _ => value.first().is_none_or(|byte| *byte == 0),
        };
        if none {
            return Ok(());
        }
        let fresh = matches!(lane.files.socket(file)?.shape, Shape::Fresh { bound: None });
        if !fresh || !self.config.kernel_listen {
            return Err(Errno::NODEV);
        }
        kernel::try_option(lane.files.socket(file)?.family, libc::SOL_SOCKET, name, value)?;
        self.hand_to_kernel(&mut lane, fd, file)?;
        drop(lane);
        raw::setsockopt(fd, libc::SOL_SOCKET, name, value)
    }
}

impl Lane {
    /// Tells the stack what a UDP socket was told, if it is the stack's concern.
    fn apply_datagram_options(&mut self, file: FileId) -> Result<(), Errno> {
        let socket = self.files.socket(file)?;
        let Shape::Datagrams(dgram) = socket.shape else { return Ok(()) };
        let options = socket.options.of_datagrams(socket.family);
        if socket.options.told_datagrams != Some(options) {
            socket.options.told_datagrams = Some(options);
            self.client.udp_set_options(dgram.conn, options).map_err(crate::datagram::errno_of)?;
        }
        Ok(())
    }

    /// `IP_MTU`, of what is connected.
    fn path_mtu(&mut self, file: FileId) -> Result<u32, Errno> {
        self.info(file).map(|info| info.pmtu).ok_or(Errno::NOTCONN)
    }

    /// A number that no other socket of the process has or had.
    fn cookie(&mut self, file: FileId) -> u64 {
        let next = self.next_cookie;
        let Ok(socket) = self.files.socket(file) else { return 0 };
        if socket.cookie == 0 {
            socket.cookie = next;
            self.next_cookie += 1;
        }
        self.files.socket(file).map_or(0, |socket| socket.cookie)
    }

    /// Tells the connection of a socket, if it has one, what it does not know yet.
    pub fn apply_options(&mut self, file: FileId) -> Result<(), Errno> {
        let socket = self.files.socket(file)?;
        let Shape::Stream(stream) = socket.shape else { return Ok(()) };
        if !socket.options.has_untold() {
            return Ok(());
        }
        let v4 = self.client.ends(stream.conn).is_ok_and(|[local, _]| local.is_ipv4());
        let mut told = false;
        for option in self.files.socket(file)?.options.untold(v4) {
            self.tell(stream.conn, option)?;
            told = true;
        }
        if told {
            self.client.flush();
        }
        Ok(())
    }

    fn tell(&mut self, conn: ginnel::Conn, option: TcpOption) -> Result<(), Errno> {
        match self.client.set_option(conn, option) {
            // A connection that is over needs no options.
            Ok(()) | Err(OptionError::Stale) => Ok(()),
            Err(error) => Err(refusal(error)),
        }
    }

    /// What the stack knows of a socket's connection.
    pub fn info(&mut self, file: FileId) -> Option<Box<ginnel::TcpInfo>> {
        let conn = self.files.stream(file)?.conn;
        self.client.info(conn).ok()
    }
}
