//! `getsockopt` and `setsockopt`. An option is honoured or refused with `ENOPROTOOPT`; which are only kept, and why that is enough, the table says.

mod get;
mod ports;
mod set;
mod stamps;
pub mod table;
mod tcp_info;
mod times;
mod values;
mod words;

use crate::fd_table::FileId;
use crate::file::Shape;
use crate::lane::Lane;
use crate::sleep::Patience;
use crate::sockaddr::Family;
use core::ffi::c_int;
use core::time::Duration;
pub use get::OptionValue;
use ginnel::channel::{Arrived, Sharing};
use ginnel::{CongestionControl, OptionError, SocketOptions, TcpInfo, TcpOption};
use rustix::io::Errno;
use stamps::Stamps;
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
    Inq,
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
    MinHops,
    RtoMin,
    RtoMax,
    DelayedAckMax,
    Priority,
    NotSentLowWater,
}

/// Those that connections of a listener, and connections that are opened, begin with.
const AT_BIRTH: u32 = bit(Told::NoDelay)
    | bit(Told::KeepAlive)
    | bit(Told::MaxSegment)
    | bit(Told::RecvBuffer)
    | bit(Told::SendBuffer)
    | bit(Told::MinHops)
    | bit(Told::RtoMin)
    | bit(Told::RtoMax)
    | bit(Told::DelayedAckMax)
    | bit(Told::Priority);

const fn bit(told: Told) -> u32 {
    1 << told as u32
}

/// Smallest buffers, as `getsockopt` shows them (`SOCK_MIN_RCVBUF`, `SOCK_MIN_SNDBUF`).
const RCVBUF_MIN: u32 = 2304;
const SNDBUF_MIN: u32 = 4608;
/// Smallest receive buffer that the stack takes.
const WINDOW_MIN: u32 = 2048;
/// Bits of `SO_BUF_LOCK`.
const SNDBUF_LOCK: u8 = 1;
const RCVBUF_LOCK: u8 = 2;
/// Largest that may be asked for (`net.core.rmem_max`), before Linux doubles it.
const BUFFER_MAX: u32 = 212_992;
/// Largest that may be had by `SO_RCVBUFFORCE`, before Linux doubles it: what the stack takes.
const FORCED_MAX: u32 = 1 << 29;
/// What a socket begins with (`net.ipv4.tcp_rmem`, `tcp_wmem`).
const RCVBUF_DEFAULT: u32 = 131_072;
const SNDBUF_DEFAULT: u32 = 16_384;
/// What the kernel needs for a segment beside its payload (`MAX_TCP_HEADER` and `struct skb_shared_info`, `struct sk_buff`), and the segments that a send buffer has room for twice.
const SEGMENT_OVERHEAD: u32 = 640;
const BUFFER_OVERHEAD: u32 = 256;
const SEGMENTS_MIN: u32 = 10;
/// What `TCP_LINGER2` is at first (`net.ipv4.tcp_fin_timeout`), and at the most (`TCP_FIN_TIMEOUT_MAX`), in seconds.
const LINGER2_DEFAULT: i32 = 60;
const LINGER2_MAX: i32 = 120;
/// The highest priority of a packet (IEEE 802.1Q).
const PRIORITY_MAX: u8 = 7;
/// `IP_TTL` and its like at first.
const HOPS_DEFAULT: u32 = 64;
/// Numbers that libc has no names for.
const BINDTOIFINDEX: c_int = 62;
const BUF_LOCK: c_int = 72;
pub(crate) const TCP_INQ: c_int = 36;
const IPV6_PATHMTU: c_int = 61;
const MINHOPCOUNT: c_int = 73;
const RCVTIMEO_NEW: c_int = 66;
const SNDTIMEO_NEW: c_int = 67;
/// Longest time of `SO_RCVTIMEO` that is not endless, in seconds (`MAX_SCHEDULE_TIMEOUT / HZ`).
const TIMEOUT_MAX_S: i64 = i64::MAX / 1000;

/// What a program told a socket.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    flags: u16,
    /// What the program set, and what the connection has been told already.
    set: u32,
    told: u32,
    linger: Option<Duration>,
    recv_timeout: Option<Duration>,
    send_timeout: Option<Duration>,
    recv_low_water: u32,
    recv_buffer: u32,
    send_buffer: u32,
    /// Which of the two the program has fixed (`SOCK_RCVBUF_LOCK`, `SOCK_SNDBUF_LOCK`).
    buf_lock: u8,
    /// Largest window, 0 for as large as the buffer (`TCP_WINDOW_CLAMP`).
    window_clamp: u32,
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
    /// `SO_PRIORITY`, also what `IP_TOS` has made it.
    priority: c_int,
    /// -1: the stack's.
    hops: i16,
    hops_v6: i16,
    defer_accept_s: u32,
    quick_ack: bool,
    stamps: Stamps,
    /// `IP_LOCAL_PORT_RANGE`.
    port_range: u32,
    /// Who set `SO_REUSEPORT`.
    user: u32,
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
    buf_lock,
    window_clamp,
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
    priority,
    hops,
    hops_v6,
    defer_accept_s,
    quick_ack,
    stamps,
    port_range,
    user,
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
            buf_lock: 0,
            window_clamp: 0,
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
            priority: 0,
            hops: -1,
            hops_v6: -1,
            defer_accept_s: 0,
            quick_ack: true,
            stamps: Stamps::default(),
            port_range: 0,
            user: 0,
            words: Words::default(),
            told_datagrams: None,
            as_set: Vec::new(),
        }
    }

    /// Lets go of memory: the socket is closed.
    pub fn forget_memory(&mut self) {
        (self.words, self.as_set, self.told_datagrams) = (Words::default(), Vec::new(), None);
    }

    /// What processes that share the socket have in common.
    pub fn common(&self) -> Self {
        Self { as_set: Vec::new(), ..self.clone() }
    }

    /// Another process that has the socket, too, has set these.
    pub fn take_over(&mut self, theirs: Self) {
        let as_set = core::mem::take(&mut self.as_set);
        *self = Self { as_set, ..theirs };
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
            user: self.user,
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

    /// What a send buffer begins with.
    pub fn begin_send_buffer(&mut self, bytes: u32) {
        self.send_buffer = bytes;
    }

    /// The send buffer, which grows with the connection up to `most` unless the program has fixed it (`tcp_sndbuf_expand`); `again`: not for the first time.
    pub fn grow_send_buffer(&mut self, info: &TcpInfo, most: u32, again: bool) -> u32 {
        if self.buf_lock & SNDBUF_LOCK == 0 {
            let options = if info.timestamps { 12 } else { 0 };
            let segment = (info.snd_mss + options + SEGMENT_OVERHEAD).next_power_of_two() + BUFFER_OVERHEAD;
            let window = if again { info.snd_cwnd } else { 0 };
            let segments = window.max(SEGMENTS_MIN).max(info.reordering + 1);
            self.send_buffer = self.send_buffer.max((2 * segments).saturating_mul(segment).min(most));
        }
        self.send_buffer
    }

    /// Bytes that may be on their way to a socket, of its receive buffer: the other half is for what the kernel needs itself (`tcp_win_from_space`).
    fn window_bytes(&self) -> u32 {
        let clamp = if self.window_clamp == 0 { u32::MAX } else { self.window_clamp };
        (self.recv_buffer / 2).min(clamp).max(WINDOW_MIN)
    }

    /// Close sends RST.
    pub fn resets_at_close(&self) -> bool {
        self.linger == Some(Duration::ZERO)
    }

    /// How long a close waits, if it does.
    pub fn lingers(&self) -> Option<Duration> {
        self.linger
    }

    /// What connections of this family begin with. `None`: it is not known yet of which they will be, and they are told their class and hop limit later.
    pub fn at_birth(&self, v4: Option<bool>) -> SocketOptions {
        let (tos, hops) = match v4 {
            Some(true) => (self.class, self.hops),
            Some(false) => (self.class_v6, self.hops_v6),
            None => (0, -1),
        };
        let set = |told, value: u32| (self.set & bit(told) != 0).then_some(value);
        SocketOptions {
            recv_buffer_bytes: set(Told::RecvBuffer, self.window_bytes()),
            send_buffer_bytes: set(Told::SendBuffer, self.send_buffer),
            mss: set(Told::MaxSegment, self.max_segment.into()).map(|_| self.max_segment),
            nodelay: self.flag(Flag::NoDelay),
            keepalive: self.flag(Flag::KeepAlive),
            ack_events: false,
            // Bits of ECN are TCP's own.
            tos: tos & 0xfc,
            hop_limit: u8::try_from(hops).ok().filter(|hops| *hops > 0),
            min_hops_v4: self.min_hops(true),
            min_hops_v6: self.min_hops(false),
            rto_min: set(Told::RtoMin, 0).map(|_| self.time(times::RTO_MIN)),
            rto_max: set(Told::RtoMax, 0).map(|_| self.time(times::RTO_MAX)),
            delayed_ack_max: set(Told::DelayedAckMax, 0).map(|_| self.time(times::DELACK_MAX)),
            save_syn: self.save_syn(),
            priority: self.link_priority(),
        }
    }

    /// Connections begin with what is set now, and are the stack's.
    pub fn born(&mut self, v4: Option<bool>) {
        let service = if v4.is_some() { bit(Told::Class) | bit(Told::HopLimit) } else { 0 };
        self.told = self.set & (AT_BIRTH | service);
        self.as_set = Vec::new();
    }

    /// The same where the connection began with none of them.
    pub fn born_untold(&mut self) {
        self.told = 0;
        self.as_set = Vec::new();
    }

    /// What the program has set, in its order.
    pub fn as_set(&self) -> &[(c_int, c_int, Box<[u8]>)] {
        &self.as_set
    }

    /// What an accepted socket has of its listener.
    pub fn inherited(&self) -> Self {
        // Not this one (`sk_clone_lock`).
        let mut options = self.clone();
        if options.priority != 0 {
            options.set_priority(0);
        }
        options
    }

    fn set_priority(&mut self, priority: c_int) {
        self.priority = priority;
        self.note(Told::Priority);
    }

    /// The priority as the stack knows it: there are no more than eight, and what Linux takes beyond them is the highest. It compares them without a sign.
    fn link_priority(&self) -> u8 {
        u8::try_from(self.priority).map_or(PRIORITY_MAX, |priority| priority.min(PRIORITY_MAX))
    }

    /// The control message that says when a datagram came, if it is asked for.
    pub fn stamp(&self, arrived: &Arrived) -> Option<(c_int, [u8; 16])> {
        self.stamps.message(arrived.came_us)
    }

    /// The same for `SO_TIMESTAMPING`.
    pub fn detailed_stamp(&self, arrived: &Arrived) -> Option<(c_int, [u8; 48])> {
        self.stamps.detailed(arrived.came_us)
    }

    /// How long connections that bring nothing wait to be accepted (`TCP_DEFER_ACCEPT`).
    pub fn defers_accept(&self) -> Option<Duration> {
        (self.defer_accept_s > 0).then(|| Duration::from_secs(self.defer_accept_s.into()))
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
            (Told::MinHops, TcpOption::MinHops(self.min_hops(v4))),
            (Told::RtoMin, TcpOption::RtoMin(self.time(times::RTO_MIN))),
            (Told::RtoMax, TcpOption::RtoMax(self.time(times::RTO_MAX))),
            (Told::DelayedAckMax, TcpOption::DelayedAckMax(self.time(times::DELACK_MAX))),
            (Told::Priority, TcpOption::Priority(self.link_priority())),
            (Told::NotSentLowWater, TcpOption::NotSentLowWater(self.not_sent_low_water().unwrap_or(0))),
        ];
        all.into_iter().filter(move |(told, _)| untold & bit(*told) != 0).map(|(_, option)| option)
    }

    fn note(&mut self, told: Told) {
        self.set |= bit(told);
        self.told &= !bit(told);
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

fn refusal(error: OptionError) -> Errno {
    match error {
        OptionError::Stale | OptionError::Invalid => Errno::INVAL,
        OptionError::TooMany => Errno::NOBUFS,
    }
}

impl Lane {
    /// Tells the stack what a UDP socket was told, if it is the stack's concern.
    pub(crate) fn apply_datagram_options(&mut self, file: FileId) -> Result<(), Errno> {
        let socket = self.files.socket(file)?;
        let Shape::Datagrams(dgram) = socket.shape else { return Ok(()) };
        if socket.options.stamps.are_on() {
            // If the stack is gone nothing comes that could have one.
            let _ = self.client.udp_stamp(dgram.conn);
        }
        let socket = self.files.socket(file)?;
        let options = socket.options.of_datagrams(socket.family);
        socket.options.for_outbox(socket.family, socket.outbox.get_or_insert_default());
        if socket.options.told_datagrams != Some(options) {
            socket.options.told_datagrams = Some(options);
            self.client.udp_set_options(dgram.conn, options).map_err(ginnel::errno::udp)?;
        }
        Ok(())
    }

    /// `IP_MTU`, of what is connected.
    fn path_mtu(&mut self, file: FileId) -> Result<u32, Errno> {
        if let Shape::Datagrams(dgram) = self.files.socket(file)?.shape {
            return self.client.udp_path_mtu(dgram.conn).map(u32::from).map_err(|_| Errno::NOTCONN);
        }
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
        let v4 = self.client.ends(stream.conn).is_ok_and(|[_, peer]| peer.is_ipv4());
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

    /// Tells the stack what connections of a listener begin with from now on, if that is something else than `before`.
    fn amend(&mut self, file: FileId, number: u32, before: &SocketOptions) -> Result<(), Errno> {
        let socket = self.files.socket(file)?;
        let v4 = socket.will_be_v4();
        let now = socket.options.at_birth(v4);
        if now != *before {
            // A listener that is gone has no connections.
            let _ = self.client.amend(number, now);
        }
        Ok(())
    }

    /// `TCP_SAVED_SYN`.
    fn saved_syn(&mut self, file: FileId, room: usize) -> Result<OptionValue, Errno> {
        let bytes = match self.files.socket(file)?.shape {
            Shape::Stream(stream) => self.client.saved_syn(stream.conn, room).unwrap_or_default(),
            _ => Vec::new(),
        };
        Ok(OptionValue::whole(bytes))
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
