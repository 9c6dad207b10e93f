//! `getsockopt` and `setsockopt`. An option is honoured or refused with `ENOPROTOOPT`; which are only kept, and why that is enough, the table says.

mod get;
mod int_options;
mod ports;
mod set;
pub mod table;
mod tcp_info;
mod times;
mod timestamps;
mod values;

use crate::fd_table::FileId;
use crate::file::SocketRole;
use crate::process::ProcessState;
use crate::sleep::Timeout;
use crate::sockaddr::Family;
use core::ffi::c_int;
use core::time::Duration;
pub use get::OptionValue;
use ginnel::channel::{AddressSharing, ReceivedDatagram};
use ginnel::{CongestionControl, OptionError, SocketOptions, TcpInfo, TcpOption};
use int_options::IntOptions;
use rustix::io::Errno;
use timestamps::TimestampOptions;

/// Options that are on or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BoolOption {
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
enum StackOption {
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
    Tos,
    HopLimit,
    SynCount,
    MinTtl,
    RtoMin,
    RtoMax,
    DelayedAckMax,
    Priority,
    NotsentLowat,
}

/// Those that connections of a listener, and connections that are opened, begin with.
const INITIAL_OPTIONS: u32 = bit(StackOption::NoDelay)
    | bit(StackOption::KeepAlive)
    | bit(StackOption::MaxSegment)
    | bit(StackOption::RecvBuffer)
    | bit(StackOption::SendBuffer)
    | bit(StackOption::MinTtl)
    | bit(StackOption::RtoMin)
    | bit(StackOption::RtoMax)
    | bit(StackOption::DelayedAckMax)
    | bit(StackOption::Priority);

const fn bit(told: StackOption) -> u32 {
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
const TTL_DEFAULT: u32 = 64;
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
pub(crate) struct SocketOptionState {
    flags: u16,
    /// What the program set, and what the connection has been told already.
    set: u32,
    applied: u32,
    linger: Option<Duration>,
    recv_timeout: Option<Duration>,
    send_timeout: Option<Duration>,
    rcvlowat: u32,
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
    tos: u8,
    tclass: u8,
    /// `SO_PRIORITY`, also what `IP_TOS` has made it.
    priority: c_int,
    /// -1: the stack's.
    ttl: i16,
    unicast_hops: i16,
    defer_accept_s: u32,
    quick_ack: bool,
    timestamps: TimestampOptions,
    /// `IP_LOCAL_PORT_RANGE`.
    port_range: u32,
    /// Who set `SO_REUSEPORT`.
    user: u32,
    ints: IntOptions,
    /// What the engine knows of a UDP socket's.
    pub applied_udp: Option<ginnel::UdpOptions>,
    /// As the program set them, while it is open whether the socket will be the kernel's.
    settings_log: Vec<(c_int, c_int, Box<[u8]>)>,
}

ginnel::codec_struct!(SocketOptionState {
    flags,
    set,
    applied,
    linger,
    recv_timeout,
    send_timeout,
    rcvlowat,
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
    tos,
    tclass,
    priority,
    ttl,
    unicast_hops,
    defer_accept_s,
    quick_ack,
    timestamps,
    port_range,
    user,
    ints,
    settings_log,
} defaults { applied_udp: None });

impl SocketOptionState {
    /// Of a new socket.
    pub fn new(_family: Family, datagrams: bool) -> Self {
        Self {
            flags: 0,
            set: 0,
            applied: 0,
            linger: None,
            recv_timeout: None,
            send_timeout: None,
            rcvlowat: 1,
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
            tos: 0,
            tclass: 0,
            priority: 0,
            ttl: -1,
            unicast_hops: -1,
            defer_accept_s: 0,
            quick_ack: true,
            timestamps: TimestampOptions::default(),
            port_range: 0,
            user: 0,
            ints: IntOptions::default(),
            applied_udp: None,
            settings_log: Vec::new(),
        }
    }

    /// Lets go of memory: the socket is closed.
    pub fn release_memory(&mut self) {
        (self.ints, self.settings_log, self.applied_udp) = (IntOptions::default(), Vec::new(), None);
    }

    /// What processes that share the socket have in common.
    pub fn shared(&self) -> Self {
        Self { settings_log: Vec::new(), ..self.clone() }
    }

    /// Another process that has the socket, too, has set these.
    pub fn update_from_shared(&mut self, theirs: Self) {
        let as_set = core::mem::take(&mut self.settings_log);
        *self = Self { settings_log: as_set, ..theirs };
    }

    pub fn flag(&self, flag: BoolOption) -> bool {
        self.flags & 1 << flag as u16 != 0
    }

    fn set_flag(&mut self, flag: BoolOption, on: bool) {
        self.flags = self.flags & !(1 << flag as u16) | u16::from(on) << flag as u16;
    }

    pub fn is_v6_only(&self) -> bool {
        self.flag(BoolOption::V6Only)
    }

    /// With whom an address may be shared.
    pub fn sharing(&self, family: Family) -> AddressSharing {
        AddressSharing {
            reuse_address: self.flag(BoolOption::ReuseAddress),
            reuse_port: self.flag(BoolOption::ReusePort),
            uid: self.user,
            v6only: family == Family::V6 && self.is_v6_only(),
        }
    }

    pub fn recv_timeout(&self) -> Timeout {
        Timeout::after(self.recv_timeout)
    }

    pub fn send_timeout(&self) -> Timeout {
        Timeout::after(self.send_timeout)
    }

    pub fn rcvlowat(&self) -> usize {
        self.rcvlowat as usize
    }

    /// What a send buffer begins with.
    pub fn set_initial_send_buffer(&mut self, bytes: u32) {
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
    pub fn linger_time(&self) -> Option<Duration> {
        self.linger
    }

    /// What connections of this family begin with. `None`: it is not known yet of which they will be, and they are told their class and hop limit later.
    pub fn initial_options(&self, v4: Option<bool>) -> SocketOptions {
        let (tos, hops) = match v4 {
            Some(true) => (self.tos, self.ttl),
            Some(false) => (self.tclass, self.unicast_hops),
            None => (0, -1),
        };
        let set = |told, value: u32| (self.set & bit(told) != 0).then_some(value);
        SocketOptions {
            recv_buffer_bytes: set(StackOption::RecvBuffer, self.window_bytes()),
            send_buffer_bytes: set(StackOption::SendBuffer, self.send_buffer),
            mss: set(StackOption::MaxSegment, self.max_segment.into()).map(|_| self.max_segment),
            nodelay: self.flag(BoolOption::NoDelay),
            keepalive: self.flag(BoolOption::KeepAlive),
            ack_events: false,
            // Bits of ECN are TCP's own.
            tos: tos & 0xfc,
            hop_limit: u8::try_from(hops).ok().filter(|hops| *hops > 0),
            min_ttl: self.min_ttl(true),
            min_hop_count: self.min_ttl(false),
            rto_min: set(StackOption::RtoMin, 0).map(|_| self.duration_of(times::RTO_MIN)),
            rto_max: set(StackOption::RtoMax, 0).map(|_| self.duration_of(times::RTO_MAX)),
            delayed_ack_max: set(StackOption::DelayedAckMax, 0).map(|_| self.duration_of(times::DELACK_MAX)),
            save_syn: self.save_syn(),
            priority: self.link_priority(),
        }
    }

    /// Connections begin with what is set now, and are the stack's.
    pub fn mark_initial_applied(&mut self, v4: Option<bool>) {
        let service = if v4.is_some() { bit(StackOption::Tos) | bit(StackOption::HopLimit) } else { 0 };
        self.applied = self.set & (INITIAL_OPTIONS | service);
        self.settings_log = Vec::new();
    }

    /// The same where the connection began with none of them.
    pub fn mark_none_applied(&mut self) {
        self.applied = 0;
        self.settings_log = Vec::new();
    }

    /// What the program has set, in its order.
    pub fn settings_log(&self) -> &[(c_int, c_int, Box<[u8]>)] {
        &self.settings_log
    }

    /// What an accepted socket has of its listener.
    pub fn for_accepted_socket(&self) -> Self {
        // Not this one (`sk_clone_lock`).
        let mut options = self.clone();
        if options.priority != 0 {
            options.set_priority(0);
        }
        options
    }

    fn set_priority(&mut self, priority: c_int) {
        self.priority = priority;
        self.mark_set(StackOption::Priority);
    }

    /// The priority as the stack knows it: there are no more than eight, and what Linux takes beyond them is the highest. It compares them without a sign.
    fn link_priority(&self) -> u8 {
        u8::try_from(self.priority).map_or(PRIORITY_MAX, |priority| priority.min(PRIORITY_MAX))
    }

    /// The control message that says when a datagram came, if it is asked for.
    pub fn timestamp_cmsg(&self, arrived: &ReceivedDatagram) -> Option<(c_int, [u8; 16])> {
        self.timestamps.timestamp_cmsg(arrived.received_us)
    }

    /// The same for `SO_TIMESTAMPING`.
    pub fn timestamping_cmsg(&self, arrived: &ReceivedDatagram) -> Option<(c_int, [u8; 48])> {
        self.timestamps.timestamping_cmsg(arrived.received_us)
    }

    /// How long connections that bring nothing wait to be accepted (`TCP_DEFER_ACCEPT`).
    pub fn defer_accept_time(&self) -> Option<Duration> {
        (self.defer_accept_s > 0).then(|| Duration::from_secs(self.defer_accept_s.into()))
    }

    fn has_unapplied(&self) -> bool {
        self.set & !self.applied != 0
    }

    /// `SO_MEMINFO`: what is allocated and may be, for receiving, sending, ahead and options; backlog and drops (`SK_MEMINFO_…`).
    fn meminfo(&self) -> Vec<u8> {
        let words = [0, self.recv_buffer, 0, self.send_buffer, 0, 0, 0, 0, 0];
        words.map(u32::to_ne_bytes).concat()
    }

    /// What the connection was not told yet.
    fn take_unapplied(&mut self, v4: bool) -> impl Iterator<Item = TcpOption> + use<> {
        let (class, hops) = if v4 { (self.tos, self.ttl) } else { (self.tclass, self.unicast_hops) };
        let untold = self.set & !self.applied;
        self.applied = self.set;
        let seconds = |s: u32| Duration::from_secs(s.into());
        let all = [
            (StackOption::NoDelay, TcpOption::NoDelay(self.flag(BoolOption::NoDelay))),
            (StackOption::Cork, TcpOption::Cork(self.flag(BoolOption::Cork))),
            (StackOption::KeepAlive, TcpOption::KeepAlive(self.flag(BoolOption::KeepAlive))),
            (StackOption::OobInline, TcpOption::OobInline(self.flag(BoolOption::OobInline))),
            (StackOption::KeepIdle, TcpOption::KeepIdle(seconds(self.keep_idle_s.into()))),
            (StackOption::KeepInterval, TcpOption::KeepInterval(seconds(self.keep_interval_s.into()))),
            (StackOption::KeepCount, TcpOption::KeepCount(self.keep_count)),
            (
                StackOption::UserTimeout,
                TcpOption::UserTimeout(Duration::from_millis(self.user_timeout_ms.into())),
            ),
            // Not to wait at all is to wait as short as possible.
            (StackOption::Linger2, TcpOption::Linger2(seconds(self.linger2_s.max(1).unsigned_abs()))),
            (StackOption::MaxSegment, TcpOption::MaxSegment(self.max_segment)),
            (StackOption::RecvBuffer, TcpOption::RecvBuffer(self.window_bytes())),
            (StackOption::SendBuffer, TcpOption::SendBuffer(self.send_buffer)),
            (StackOption::Congestion, TcpOption::Congestion(self.congestion.unwrap_or_default())),
            (StackOption::Tos, TcpOption::Tos(class)),
            (StackOption::HopLimit, TcpOption::HopLimit(u8::try_from(hops).ok().filter(|hops| *hops > 0))),
            (StackOption::SynCount, TcpOption::SynRetries(self.syn_count)),
            (StackOption::MinTtl, TcpOption::MinHopLimit(self.min_ttl(v4))),
            (StackOption::RtoMin, TcpOption::RtoMin(self.duration_of(times::RTO_MIN))),
            (StackOption::RtoMax, TcpOption::RtoMax(self.duration_of(times::RTO_MAX))),
            (StackOption::DelayedAckMax, TcpOption::DelayedAckMax(self.duration_of(times::DELACK_MAX))),
            (StackOption::Priority, TcpOption::Priority(self.link_priority())),
            (StackOption::NotsentLowat, TcpOption::NotSentLowat(self.notsent_lowat().unwrap_or(0))),
        ];
        all.into_iter().filter(move |(told, _)| untold & bit(*told) != 0).map(|(_, option)| option)
    }

    fn mark_set(&mut self, told: StackOption) {
        self.set |= bit(told);
        self.applied &= !bit(told);
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

fn option_errno(error: OptionError) -> Errno {
    match error {
        OptionError::Stale | OptionError::Invalid => Errno::INVAL,
        OptionError::TooMany => Errno::NOBUFS,
    }
}

impl ProcessState {
    /// Tells the stack what a UDP socket was told, if it is the stack's concern.
    pub(crate) fn apply_datagram_options(&mut self, file: FileId) -> Result<(), Errno> {
        let socket = self.files.socket(file)?;
        let SocketRole::Udp(dgram) = socket.role else { return Ok(()) };
        if socket.options.timestamps.are_on() {
            // If the stack is gone nothing comes that could have one.
            let _ = self.client.udp_enable_timestamps(dgram.conn);
        }
        let socket = self.files.socket(file)?;
        let options = socket.options.udp_options(socket.family);
        socket.options.apply_to_udp_send(socket.family, socket.udp_send.get_or_insert_default());
        if socket.options.applied_udp != Some(options) {
            socket.options.applied_udp = Some(options);
            self.client.udp_set_options(dgram.conn, options).map_err(ginnel::errno::udp)?;
        }
        Ok(())
    }

    /// `IP_MTU`, of what is connected.
    fn path_mtu(&mut self, file: FileId) -> Result<u32, Errno> {
        if let SocketRole::Udp(dgram) = self.files.socket(file)?.role {
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
        let SocketRole::Stream(stream) = socket.role else { return Ok(()) };
        if !socket.options.has_unapplied() {
            return Ok(());
        }
        let v4 = self.client.endpoints(stream.conn).is_ok_and(|[_, peer]| peer.is_ipv4());
        let mut told = false;
        for option in self.files.socket(file)?.options.take_unapplied(v4) {
            self.set_stack_option(stream.conn, option)?;
            told = true;
        }
        if told {
            self.client.flush();
        }
        Ok(())
    }

    /// Tells the stack what connections of a listener begin with from now on, if that is something else than `before`.
    fn update_listener_options(
        &mut self,
        file: FileId,
        number: u32,
        before: &SocketOptions,
    ) -> Result<(), Errno> {
        let socket = self.files.socket(file)?;
        let v4 = socket.child_is_v4();
        let now = socket.options.initial_options(v4);
        if now != *before {
            // A listener that is gone has no connections.
            let _ = self.client.set_listener_options(number, now);
        }
        Ok(())
    }

    /// `TCP_SAVED_SYN`.
    fn saved_syn(&mut self, file: FileId, room: usize) -> Result<OptionValue, Errno> {
        let bytes = match self.files.socket(file)?.role {
            SocketRole::Stream(stream) => self.client.saved_syn(stream.conn, room).unwrap_or_default(),
            _ => Vec::new(),
        };
        Ok(OptionValue::indivisible(bytes))
    }

    fn set_stack_option(&mut self, conn: ginnel::Conn, option: TcpOption) -> Result<(), Errno> {
        match self.client.set_option(conn, option) {
            // A connection that is over needs no options.
            Ok(()) | Err(OptionError::Stale) => Ok(()),
            Err(error) => Err(option_errno(error)),
        }
    }

    /// What the stack knows of a socket's connection.
    pub fn info(&mut self, file: FileId) -> Option<Box<ginnel::TcpInfo>> {
        let conn = self.files.stream(file)?.conn;
        self.client.info(conn).ok()
    }
}
