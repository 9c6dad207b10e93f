//! `getsockopt` and `setsockopt`. An option is honoured or refused with `ENOPROTOOPT`. `table` lists the
//! options that are stored without effect, and why that suffices.

mod address_preferences;
mod extension_headers;
pub(crate) mod filter;
mod get;
mod int_options;
mod ports;
pub(crate) mod reuseport;
mod set;
pub mod table;
mod tcp_info;
mod times;
pub(crate) mod timestamps;
mod values;

use crate::fd_table::FileId;
use crate::file::SocketRole;
use crate::multicast::MulticastState;
use crate::process::ProcessState;
use crate::sleep::Timeout;
use crate::sockaddr::Family;
use crate::zerocopy::ZerocopyCalls;
use core::ffi::c_int;
use core::net::SocketAddr;
use core::time::Duration;
pub use get::OptionValue;
use ginnel::channel::{AddressSharing, ReceivedDatagram};
use ginnel::{
    CongestionControl, FastOpenKeys, OptionError, PortSharing, SocketOptions, TcpInfo, TcpOption,
    defer_accept_timeouts,
};
use int_options::IntOptions;
use rustix::io::Errno;
pub(crate) use tcp_info::Transferred;
use timestamps::TimestampOptions;

/// Boolean options.
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
    UnorderedReceive,
    UnorderedSend,
}

/// Options that are passed on to the stack. For each a bit records that the program has set it.
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
    LingerZero,
    Unordered,
    MayFragment,
    ArrivalTimes,
    MaxPacingRate,
    FlowLabel,
}

/// Options that new connections have from the start.
const INITIAL_OPTIONS: u32 = bit(StackOption::NoDelay)
    | bit(StackOption::KeepAlive)
    | bit(StackOption::MaxSegment)
    | bit(StackOption::RecvBuffer)
    | bit(StackOption::SendBuffer)
    | bit(StackOption::MinTtl)
    | bit(StackOption::RtoMin)
    | bit(StackOption::RtoMax)
    | bit(StackOption::DelayedAckMax)
    | bit(StackOption::Priority)
    | bit(StackOption::Unordered)
    | bit(StackOption::MayFragment)
    | bit(StackOption::FlowLabel);

const fn bit(option: StackOption) -> u32 {
    1 << option as u32
}

/// Minimum buffer sizes, as `getsockopt` reports them (`SOCK_MIN_RCVBUF`, `SOCK_MIN_SNDBUF`).
const RCVBUF_MIN: u32 = 2304;
const SNDBUF_MIN: u32 = 4608;
/// Linux's `CONFIG_HZ`.
const TICKS_PER_SECOND: i64 = 250;
/// Minimum receive buffer that the stack accepts.
const WINDOW_MIN: u32 = 2048;
/// Bits of `SO_BUF_LOCK`.
const SNDBUF_LOCK: u8 = 1;
const RCVBUF_LOCK: u8 = 2;
/// Maximum that a program may request (`net.core.rmem_max`, `wmem_max`), before Linux doubles it.
const BUFFER_MAX: u32 = 4 << 20;
/// Initial buffer sizes of UDP sockets (`net.core.rmem_default`, `wmem_default`).
const UDP_BUFFER_DEFAULT: u32 = 212_992;
/// Maximum of `SO_RCVBUFFORCE`, before Linux doubles it: the stack's limit.
const FORCED_MAX: u32 = 1 << 29;
/// Initial buffer sizes (`net.ipv4.tcp_rmem`, `tcp_wmem`).
const RCVBUF_DEFAULT: u32 = 131_072;
const SNDBUF_DEFAULT: u32 = 16_384;
/// Largest size to which a send buffer grows (`net.ipv4.tcp_wmem`).
const SNDBUF_GROWN_MAX: u32 = 4 << 20;
/// Kernel memory for a segment besides its payload (`MAX_TCP_HEADER`, `struct skb_shared_info`, `struct
/// sk_buff`), and the number of segments of which a send buffer holds at least twice as many.
const SEGMENT_OVERHEAD: u32 = 640;
const BUFFER_OVERHEAD: u32 = 256;
const SEGMENTS_MIN: u32 = 10;
/// Default (`net.ipv4.tcp_fin_timeout`) and maximum (`TCP_FIN_TIMEOUT_MAX`) of `TCP_LINGER2`, in seconds.
const LINGER2_DEFAULT: i32 = 60;
const LINGER2_MAX: i32 = 120;
/// Highest priority of a packet (IEEE 802.1Q).
const PRIORITY_MAX: u8 = 7;
/// Highest `SO_PRIORITY` that needs no capability.
pub(crate) const PRIORITY_FREE_MAX: c_int = 6;
/// Default of `IP_TTL` and `IPV6_UNICAST_HOPS`.
const TTL_DEFAULT: u32 = 64;
/// Option numbers for which libc has no names.
const BINDTOIFINDEX: c_int = 62;
pub(crate) const NETNS_COOKIE: c_int = 71;
const BUF_LOCK: c_int = 72;
pub(crate) const TCP_INQ: c_int = 36;
const IPV6_PATHMTU: c_int = 61;
const MINHOPCOUNT: c_int = 73;
const IP_PROTOCOL: c_int = 52;
const ADDR_PREFERENCES: c_int = 72;
const BUSY_POLL_BUDGET: c_int = 70;
const TXREHASH: c_int = 74;
/// `SO_ORIGINAL_DST` and `IP6T_SO_ORIGINAL_DST`.
const ORIGINAL_DST: c_int = 80;
const MAX_PACING_RATE: c_int = 47;
const RCVTIMEO_NEW: c_int = 66;
const SNDTIMEO_NEW: c_int = 67;
/// Seconds from which on `SO_RCVTIMEO` is infinite (`MAX_SCHEDULE_TIMEOUT / HZ - 1`, `sock_set_timeout`).
const INFINITE_TIMEOUT_S: i64 = i64::MAX / TICKS_PER_SECOND - 1;

/// An option as a program has set it: its level, its name and its value.
pub(crate) type Setting = (c_int, c_int, Box<[u8]>);

/// The options of a socket.
#[derive(Clone, Debug)]
pub(crate) struct SocketOptionState {
    flags: u16,
    /// Options that the program has set, and options that the connection has already; one bit each.
    set: u32,
    applied: u32,
    linger: Option<Duration>,
    recv_timeout: Option<Duration>,
    send_timeout: Option<Duration>,
    rcvlowat: u32,
    recv_buffer: u32,
    send_buffer: u32,
    /// Which buffer sizes the program has fixed (`SOCK_RCVBUF_LOCK`, `SOCK_SNDBUF_LOCK`).
    buf_lock: u8,
    /// Maximum window in bytes, or 0 for that of the buffer (`TCP_WINDOW_CLAMP`).
    window_clamp: u32,
    max_segment: u16,
    keep_idle_s: u16,
    keep_interval_s: u16,
    keep_count: u8,
    user_timeout_ms: u32,
    /// Maximum time in FIN-WAIT-2 after a close, in seconds; negative for none.
    linger2_s: i32,
    syn_count: u8,
    /// `None`: the stack's default.
    congestion: Option<CongestionControl>,
    /// `SO_MAX_PACING_RATE` in bytes per second.
    max_pacing_rate: u64,
    tos: u8,
    tclass: u8,
    /// `SO_PRIORITY`, which `IP_TOS` also sets.
    priority: c_int,
    /// -1: the stack's default.
    ttl: i16,
    unicast_hops: i16,
    defer_accept_s: u32,
    fastopen_keys: FastOpenKeys,
    quick_ack: bool,
    timestamps: TimestampOptions,
    /// `IP_LOCAL_PORT_RANGE`.
    port_range: u32,
    /// The user who has set `SO_REUSEPORT`.
    user: u32,
    ints: IntOptions,
    /// Calls of this process with `MSG_ZEROCOPY`.
    pub zerocopy: ZerocopyCalls,
    /// Options about groups, and memberships.
    pub multicast: MulticastState,
    /// The options that the engine has for a UDP socket.
    pub applied_udp: Option<ginnel::UdpOptions>,
    /// The options in the order in which the program set them, while the socket may still become a kernel
    /// socket.
    settings_log: Vec<Setting>,
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
    max_pacing_rate,
    tos,
    tclass,
    priority,
    ttl,
    unicast_hops,
    defer_accept_s,
    fastopen_keys,
    quick_ack,
    timestamps,
    port_range,
    user,
    ints,
    multicast,
    settings_log,
} defaults { applied_udp: None, zerocopy: ZerocopyCalls::default() });

impl SocketOptionState {
    /// Returns the options of a new socket.
    pub fn new(family: Family, is_udp: bool) -> Self {
        Self {
            flags: 0,
            set: 0,
            applied: 0,
            linger: None,
            recv_timeout: None,
            send_timeout: None,
            rcvlowat: 1,
            recv_buffer: if is_udp { UDP_BUFFER_DEFAULT } else { RCVBUF_DEFAULT },
            send_buffer: if is_udp { UDP_BUFFER_DEFAULT } else { SNDBUF_DEFAULT },
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
            max_pacing_rate: u64::MAX,
            tos: 0,
            tclass: 0,
            priority: 0,
            ttl: -1,
            unicast_hops: -1,
            defer_accept_s: 0,
            fastopen_keys: (None, None),
            quick_ack: true,
            timestamps: TimestampOptions::default(),
            port_range: 0,
            user: 0,
            ints: IntOptions::default(),
            zerocopy: ZerocopyCalls::default(),
            multicast: if is_udp { MulticastState::new(family) } else { MulticastState::default() },
            applied_udp: None,
            settings_log: Vec::new(),
        }
    }

    /// Releases heap memory, because the socket is closed.
    pub fn release_memory(&mut self) {
        (self.ints, self.settings_log, self.applied_udp) = (IntOptions::default(), Vec::new(), None);
        self.multicast = MulticastState::default();
    }

    /// Returns the options without the settings that only this process needs.
    #[inline]
    pub fn shared(&self) -> Self {
        Self { settings_log: Vec::new(), ints: self.ints.clone(), multicast: self.multicast.clone(), ..*self }
    }

    /// Takes over the options that another process has published.
    pub fn update_from_shared(&mut self, published: Self) {
        let (settings_log, zerocopy) = (core::mem::take(&mut self.settings_log), self.zerocopy);
        let known = self.ints.filter().cloned().unwrap_or_default();
        let group_program = self.ints.group_program().cloned();
        *self = Self { settings_log, zerocopy, ..published };
        self.ints.set_group_program(group_program);
        if let Some(filter) = self.ints.filter() {
            let filter = known.updated_by(filter);
            self.ints.set_filter(filter);
        }
    }

    pub fn flag(&self, flag: BoolOption) -> bool {
        self.flags & 1 << flag as u16 != 0
    }

    fn set_flag(&mut self, flag: BoolOption, on: bool) {
        self.flags = self.flags & !(1 << flag as u16) | u16::from(on) << flag as u16;
    }

    /// Sets `IPV6_V6ONLY`.
    pub fn set_v6_only(&mut self) {
        self.set_flag(BoolOption::V6Only, true);
    }

    pub fn is_v6_only(&self) -> bool {
        self.flag(BoolOption::V6Only)
    }

    /// Returns the rules by which the socket's address may be shared.
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

    /// Returns whether the program has fixed the size of the send buffer (`SOCK_SNDBUF_LOCK`).
    #[inline]
    pub fn has_fixed_send_buffer(&self) -> bool {
        self.buf_lock & SNDBUF_LOCK != 0
    }

    /// Returns whether something besides the channel's buffer limits how much may be written.
    #[inline(always)]
    pub fn limits_writing(&self) -> bool {
        self.has_fixed_send_buffer() || self.notsent_lowat().is_some()
    }

    /// Returns the size of the send buffer.
    pub fn send_buffer_bytes(&self) -> usize {
        self.send_buffer as usize
    }

    /// Returns the size of the receive buffer.
    pub fn recv_buffer_bytes(&self) -> usize {
        self.recv_buffer as usize
    }

    /// Sets the initial size of the send buffer.
    pub fn set_initial_send_buffer(&mut self, bytes: u32) {
        self.send_buffer = bytes;
    }

    /// Returns the size of the send buffer after letting it grow up to `max` bytes, unless the program has
    /// fixed it (`tcp_sndbuf_expand`). `is_repeated` tells that the buffer has grown before.
    pub fn grow_send_buffer(&mut self, info: &TcpInfo, max: u32, is_repeated: bool) -> u32 {
        if self.buf_lock & SNDBUF_LOCK == 0 {
            let options = if info.timestamps { 12 } else { 0 };
            let segment = (info.snd_mss + options + SEGMENT_OVERHEAD).next_power_of_two() + BUFFER_OVERHEAD;
            let window = if is_repeated { info.snd_cwnd } else { 0 };
            let segments = window.max(SEGMENTS_MIN).max(info.reordering + 1);
            self.send_buffer = self.send_buffer.max((2 * segments).saturating_mul(segment).min(max));
        }
        self.send_buffer
    }

    /// Returns the maximum window in bytes. Half of the receive buffer is for the kernel's own overhead
    /// (`tcp_win_from_space`).
    fn window_bytes(&self) -> u32 {
        let clamp = if self.window_clamp == 0 { u32::MAX } else { self.window_clamp };
        (self.recv_buffer / 2).min(clamp).max(WINDOW_MIN)
    }

    /// Returns whether the last close sends RST. The stack knows which one is the last.
    fn resets_at_close(&self) -> bool {
        self.linger == Some(Duration::ZERO)
    }

    /// Sets `SO_LINGER`. A negative time has no limit. A time that was set stays readable after lingering was
    /// switched off.
    fn set_linger(&mut self, on: bool, seconds: c_int) {
        let limit = u32::try_from(seconds).unwrap_or(u32::MAX);
        self.linger = on.then(|| Duration::from_secs(limit.into()));
        if on {
            // In ticks, as Linux stores it (`MAX_SCHEDULE_TIMEOUT`).
            let reported = if seconds < 0 { (i64::MAX / TICKS_PER_SECOND) as c_int } else { seconds };
            self.ints.set("SO_LINGER", reported);
        }
    }

    /// Returns how long a close lingers; `None` if `SO_LINGER` is off.
    pub fn linger_time(&self) -> Option<Duration> {
        self.linger
    }

    /// Returns the options with which connections start. `v4` is `None` if the version of IP is not known
    /// yet: then type of service and hop limit are set later.
    pub fn initial_options(&self, v4: Option<bool>) -> SocketOptions {
        let (tos, ttl) = match v4 {
            Some(true) => (self.tos, self.ttl),
            Some(false) => (self.tclass, self.unicast_hops),
            None => (0, -1),
        };
        let set = |option, value: u32| (self.set & bit(option) != 0).then_some(value);
        SocketOptions {
            recv_buffer_bytes: set(StackOption::RecvBuffer, self.window_bytes()),
            send_buffer_bytes: set(StackOption::SendBuffer, self.send_buffer),
            mss: set(StackOption::MaxSegment, self.max_segment.into()).map(|_| self.max_segment),
            nodelay: self.flag(BoolOption::NoDelay),
            keepalive: self.flag(BoolOption::KeepAlive),
            ack_events: false,
            // TCP sets the ECN bits itself.
            tos: tos & 0xfc,
            hop_limit: u8::try_from(ttl).ok().filter(|ttl| *ttl > 0),
            min_ttl: self.min_ttl(true),
            min_hop_count: self.min_ttl(false),
            rto_min: set(StackOption::RtoMin, 0).map(|_| self.duration_of(times::RTO_MIN)),
            rto_max: set(StackOption::RtoMax, 0).map(|_| self.duration_of(times::RTO_MAX)),
            delayed_ack_max: set(StackOption::DelayedAckMax, 0).map(|_| self.duration_of(times::DELACK_MAX)),
            save_syn: self.save_syn(),
            priority: self.link_priority(),
            unordered: self.flag(BoolOption::UnorderedReceive),
            port_sharing: PortSharing {
                reuse_address: self.flag(BoolOption::ReuseAddress),
                reuse_port: self.flag(BoolOption::ReusePort),
            },
            defer_accept: defer_accept_timeouts(self.defer_accept_s),
            may_fragment: self.may_fragment(),
            flow_label: self.flow_label(),
            fastopen_queue: self.fastopen_queue(),
            fastopen_keys: self.fastopen_keys,
            fastopen_no_cookie: self.is_on("TCP_FASTOPEN_NO_COOKIE"),
            fastopen_connect: self.is_on("TCP_FASTOPEN_CONNECT"),
        }
    }

    /// Records that a connection has the current options, and that the socket stays with the stack.
    pub fn mark_initial_applied(&mut self, v4: Option<bool>) {
        let service = if v4.is_some() { bit(StackOption::Tos) | bit(StackOption::HopLimit) } else { 0 };
        self.applied = self.set & (INITIAL_OPTIONS | service);
        self.settings_log = Vec::new();
    }

    /// Records that a connection has none of the options, and that the socket stays with the stack.
    pub fn mark_none_applied(&mut self) {
        self.applied = 0;
        self.settings_log = Vec::new();
    }

    /// Returns the options in the order in which the program set them.
    pub fn settings_log(&self) -> &[Setting] {
        &self.settings_log
    }

    /// Replaces the options that a later kernel socket gets.
    pub fn set_settings_log(&mut self, settings: Vec<Setting>) {
        self.settings_log = settings;
    }

    /// Returns the options that an accepted socket inherits from its listener.
    pub fn for_accepted_socket(&self) -> Self {
        // The priority is not inherited (`sk_clone_lock`).
        let mut options = self.shared();
        if options.priority != 0 {
            options.set_priority(0);
        }
        options
    }

    fn set_priority(&mut self, priority: c_int) {
        self.priority = priority;
        self.mark_set(StackOption::Priority);
    }

    /// Returns the priority for the stack, which has eight; higher values become the highest. A negative
    /// priority counts as high, since Linux compares priorities as unsigned.
    pub(crate) fn link_priority(&self) -> u8 {
        u8::try_from(self.priority).map_or(PRIORITY_MAX, |priority| priority.min(PRIORITY_MAX))
    }

    /// Returns the control message with the time of arrival, if it is enabled.
    pub fn timestamp_cmsg(&self, datagram: &ReceivedDatagram) -> Option<(c_int, [u8; 16])> {
        self.timestamps.timestamp_cmsg(datagram.received_us)
    }

    /// Returns the control message of `SO_TIMESTAMPING`, if it is enabled.
    pub fn timestamping_cmsg(&self, datagram: &ReceivedDatagram) -> Option<(c_int, [u8; 48])> {
        self.timestamps.timestamping_cmsg(datagram.received_us)
    }

    /// Returns which receive timestamps are enabled.
    pub fn timestamps(&self) -> TimestampOptions {
        self.timestamps
    }

    fn has_unapplied(&self) -> bool {
        self.set & !self.applied != 0
    }

    /// Returns the value of `SO_MEMINFO`: used and maximum memory for receiving and sending, forward
    /// allocation, queued data, option memory, backlog and drops (`SK_MEMINFO_…`).
    fn meminfo(&self) -> Vec<u8> {
        let words = [0, self.recv_buffer, 0, self.send_buffer, 0, 0, 0, 0, 0];
        words.map(u32::to_ne_bytes).concat()
    }

    /// Returns the options that the connection does not have yet, and records them as applied.
    fn take_unapplied(&mut self, v4: bool) -> impl Iterator<Item = TcpOption> + use<> {
        let (tos, ttl) = if v4 { (self.tos, self.ttl) } else { (self.tclass, self.unicast_hops) };
        let unapplied = self.set & !self.applied;
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
            // The stack has no zero time, so the shortest one stands for it.
            (StackOption::Linger2, TcpOption::Linger2(seconds(self.linger2_s.max(1).unsigned_abs()))),
            (StackOption::MaxSegment, TcpOption::MaxSegment(self.max_segment)),
            (StackOption::RecvBuffer, TcpOption::RecvBuffer(self.window_bytes())),
            (StackOption::SendBuffer, TcpOption::SendBuffer(self.send_buffer)),
            (StackOption::Congestion, TcpOption::Congestion(self.congestion.unwrap_or_default())),
            (StackOption::Tos, TcpOption::Tos(tos)),
            (StackOption::HopLimit, TcpOption::HopLimit(u8::try_from(ttl).ok().filter(|ttl| *ttl > 0))),
            (StackOption::SynCount, TcpOption::SynRetries(self.syn_count)),
            (StackOption::MinTtl, TcpOption::MinHopLimit(self.min_ttl(v4))),
            (StackOption::RtoMin, TcpOption::RtoMin(self.duration_of(times::RTO_MIN))),
            (StackOption::RtoMax, TcpOption::RtoMax(self.duration_of(times::RTO_MAX))),
            (StackOption::DelayedAckMax, TcpOption::DelayedAckMax(self.duration_of(times::DELACK_MAX))),
            (StackOption::Priority, TcpOption::Priority(self.link_priority())),
            (StackOption::NotsentLowat, TcpOption::NotSentLowat(self.notsent_lowat().unwrap_or(0))),
            (StackOption::LingerZero, TcpOption::LingerZero(self.resets_at_close())),
            (StackOption::Unordered, TcpOption::Unordered(self.flag(BoolOption::UnorderedReceive))),
            (StackOption::MayFragment, TcpOption::MayFragment(self.may_fragment())),
            (StackOption::ArrivalTimes, TcpOption::ArrivalTimes(self.timestamps.are_on())),
            (StackOption::MaxPacingRate, TcpOption::MaxPacingRate(self.max_pacing_rate)),
            (StackOption::FlowLabel, TcpOption::FlowLabel(self.flow_label())),
        ];
        all.into_iter().filter(move |(option, _)| unapplied & bit(*option) != 0).map(|(_, option)| option)
    }

    fn mark_set(&mut self, option: StackOption) {
        self.set |= bit(option);
        self.applied &= !bit(option);
    }
}

fn int(value: &[u8]) -> Result<c_int, Errno> {
    let bytes = value.get(..4).ok_or(Errno::INVAL)?;
    Ok(c_int::from_ne_bytes(bytes.try_into().expect("four bytes")))
}

/// Parses an `int` within a range.
///
/// # Errors
/// `EINVAL`.
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
    /// Records an option for the kernel socket that an unconnected socket may still become. It replaces the
    /// earlier value.
    pub(crate) fn remember_setting(&mut self, file: FileId, level: c_int, name: c_int, value: &[u8]) {
        let Ok(socket) = self.files.socket(file) else { return };
        if !matches!(socket.role, SocketRole::Unconnected { .. }) {
            return;
        }
        socket.options.settings_log.retain(|(l, n, _)| (*l, *n) != (level, name));
        socket.options.settings_log.push((level, name, value.into()));
    }

    /// Forgets what [`remember_setting`](Self::remember_setting) recorded of an option.
    pub(crate) fn forget_setting(&mut self, file: FileId, level: c_int, name: c_int) {
        if let Ok(socket) = self.files.socket(file) {
            socket.options.settings_log.retain(|(l, n, _)| (*l, *n) != (level, name));
        }
    }

    /// Passes the options of a UDP socket on to the stack.
    pub(crate) fn apply_datagram_options(&mut self, file: FileId) -> Result<(), Errno> {
        let socket = self.files.socket(file)?;
        let SocketRole::Udp(udp) = socket.role else { return Ok(()) };
        if socket.options.timestamps.are_on() {
            // If the stack is gone, no datagram arrives that could have a timestamp.
            let _ = self.client.udp_enable_timestamps(udp.conn);
        }
        let socket = self.files.socket(file)?;
        let options = socket.options.udp_options(socket.family);
        socket.options.apply_to_udp_send(socket.family, socket.udp_send.get_or_insert_default());
        if socket.options.applied_udp != Some(options) {
            socket.options.applied_udp = Some(options);
            // What was permitted before may not be now.
            self.forget_destinations(file);
            let set = self.client.udp_set_options(udp.conn, options);
            set.map_err(|error| self.udp_request_error(error))?;
        }
        Ok(())
    }

    /// Implements `IPV6_ADDRFORM`: makes an IPv6 socket that is connected to an IPv4 address an IPv4 socket.
    ///
    /// # Errors
    /// `EINVAL`, `ENOTCONN`, `EADDRNOTAVAIL` if the peer has an IPv6 address, `ENOPROTOOPT` for an IPv4
    /// socket.
    fn set_addrform(&mut self, file: FileId, value: &[u8]) -> Result<(), Errno> {
        let socket = self.files.socket(file)?;
        if socket.family == Family::V4 {
            return Err(Errno::NOPROTOOPT);
        }
        let family = value.first_chunk().map(|bytes| c_int::from_ne_bytes(*bytes));
        if family != Some(libc::AF_INET) {
            return Err(Errno::INVAL);
        }
        if self.peer_of(file).ok_or(Errno::NOTCONN)?.is_ipv6() {
            return Err(Errno::ADDRNOTAVAIL);
        }
        self.files.socket(file)?.family = Family::V4;
        Ok(())
    }

    /// Checks whether `TCP_FASTOPEN_CONNECT` can be set.
    ///
    /// # Errors
    /// `EINVAL` for a value other than 0 and 1 and for a socket that is not unconnected, `EOPNOTSUPP` if the
    /// configuration does not allow it. If the stack is gone, `connect` reports that.
    fn check_fastopen_connect(&mut self, file: FileId, value: &[u8]) -> Result<(), Errno> {
        if self.files.socket(file)?.is_udp {
            return Ok(());
        }
        within(value, 0..=1)?;
        if self.can_open_fast() == Ok(false) {
            return Err(Errno::OPNOTSUPP);
        }
        let role = self.files.socket(file)?.role;
        let mut is_closed = || self.status(file).is_some_and(|(_, status)| status.state.is_closed());
        match role {
            SocketRole::Unconnected { .. } => Ok(()),
            SocketRole::Stream(_) if is_closed() => Ok(()),
            _ => Err(Errno::INVAL),
        }
    }

    /// Returns the peer of a connected socket.
    fn peer_of(&mut self, file: FileId) -> Option<SocketAddr> {
        let socket = self.files.socket(file).ok()?;
        if socket.is_udp {
            return socket.connected_peer();
        }
        let (conn, _) =
            self.socket_state(file).filter(|(_, state)| state.is_connected() && !state.is_closed())?;
        self.client.endpoints(conn).ok().map(|[_, peer]| peer)
    }

    /// Returns the value of `IP_MTU` for a connected socket.
    fn path_mtu(&mut self, file: FileId) -> Result<u32, Errno> {
        if let SocketRole::Udp(udp) = self.files.socket(file)?.role {
            return self.client.udp_path_mtu(udp.conn).map(u32::from).map_err(|_| Errno::NOTCONN);
        }
        self.info(file).map(|info| info.pmtu).ok_or(Errno::NOTCONN)
    }

    /// Returns a number that no other socket of the process has or had.
    fn cookie(&mut self, file: FileId) -> u64 {
        let next = self.next_cookie;
        let Ok(socket) = self.files.socket(file) else { return 0 };
        if socket.cookie == 0 {
            socket.cookie = next;
            self.next_cookie += 1;
        }
        self.files.socket(file).map_or(0, |socket| socket.cookie)
    }

    /// Passes options on to the connection of a socket that does not have them yet.
    pub fn apply_options(&mut self, file: FileId) -> Result<(), Errno> {
        let socket = self.files.socket(file)?;
        let SocketRole::Stream(stream) = socket.role else { return Ok(()) };
        if !socket.options.has_unapplied() {
            return Ok(());
        }
        self.update_end_work(file);
        let v4 = self.client.endpoints(stream.conn).is_ok_and(|[_, peer]| peer.is_ipv4());
        let mut any = false;
        for option in self.files.socket(file)?.options.take_unapplied(v4) {
            self.set_stack_option(stream.conn, option)?;
            any = true;
        }
        if any {
            self.client.flush();
        }
        Ok(())
    }

    /// Passes the options for new connections of a listener on to the stack.
    pub(crate) fn renew_listener_options(&mut self, file: FileId, number: u32) -> Result<(), Errno> {
        let socket = self.files.socket(file)?;
        let now = socket.options.initial_options(socket.child_is_v4());
        // A listener that is gone has no new connections.
        let _ = self.client.set_listener_options(number, now);
        Ok(())
    }

    /// Passes the options for new connections of a listener on to the stack, if they differ from `before`.
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
            // A listener that is gone has no new connections.
            let _ = self.client.set_listener_options(number, now);
        }
        Ok(())
    }

    /// Returns the value of `TCP_SAVED_SYN`.
    fn saved_syn(&mut self, file: FileId, space: usize) -> Result<OptionValue, Errno> {
        let bytes = match self.files.socket(file)?.role {
            SocketRole::Stream(stream) => self.client.saved_syn(stream.conn, space).unwrap_or_default(),
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

    /// Returns what the stack knows about the connection of a socket.
    pub fn info(&mut self, file: FileId) -> Option<Box<ginnel::TcpInfo>> {
        let conn = self.files.stream(file)?.conn;
        self.client.info(conn).ok()
    }
}
