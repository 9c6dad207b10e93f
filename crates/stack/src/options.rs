//! Per-socket options, and information about connections.

use crate::device::Label;
use crate::ip::FlowLabel;
use crate::tcp::config::CongestionControl;
pub use crate::tcp::fastopen::FastOpenKeys;
pub use crate::tcp::port_use::PortSharing;
use crate::tcp::profile::{RTO_MAX_RANGE, RTO_MIN_RANGE, checked_buffer, checked_mss};
use crate::tcp::state::State;
use core::net::SocketAddr;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Options of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenOptions {
    /// Connections that may be queued for accept, as Linux counts them (one more than this number fits).
    /// Default 4,096.
    // limit: backlog of a listener
    pub backlog: u32,
    /// A listener on an IPv6 address does not accept IPv4 connections (`IPV6_V6ONLY`). Default false, as on
    /// Linux.
    pub v6_only: bool,
    /// True if other listeners with this option and an equal `user` may listen at the address of this one;
    /// connections are distributed over them by flow (`SO_REUSEPORT`). With several shards, each shard that
    /// accepts connections opens a listener of its own.
    pub reuse_port: bool,
    /// True if every segment to the listener is dropped until its filter is set
    /// ([`Stack::set_listener_filter`](crate::stack::Stack::set_listener_filter)).
    pub awaits_filter: bool,
    /// Owner of the listener: listeners of several users do not share an address (on Linux, effective users).
    pub user: u32,
    /// Options that accepted connections begin with.
    pub socket: SocketOptions,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self {
            backlog: 4096,
            v6_only: false,
            reuse_port: false,
            awaits_filter: false,
            user: 0,
            socket: SocketOptions::default(),
        }
    }
}

impl ListenOptions {
    /// Returns whether a listener at `own` with these options keeps another one with the options `others`
    /// from being opened at `at`, and vice versa.
    pub fn conflicts_with(&self, addr: SocketAddr, other_addr: SocketAddr, others: &Self) -> bool {
        let shared = self.reuse_port && others.reuse_port && self.user == others.user;
        if addr.port() != other_addr.port() || shared {
            return false;
        }
        let all = |a: SocketAddr| a.ip().is_unspecified();
        let dual = |a: SocketAddr, only: bool| a.is_ipv6() && all(a) && !only;
        addr.ip() == other_addr.ip()
            || dual(addr, self.v6_only) && other_addr.is_ipv4() && all(other_addr)
            || dual(other_addr, others.v6_only) && addr.is_ipv4() && all(addr)
    }
}

/// Options of a connection that is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectOptions {
    /// Source address; with port 0 the stack chooses one (RFC 6056). With `None` the stack chooses both.
    pub local: Option<SocketAddr>,
    /// True if the port was chosen for the application, not by it: if the port is in TIME-WAIT towards the
    /// destination, it is reused only after `tcp.time_wait_reuse_ms`.
    pub is_ephemeral_port: bool,
    /// Options that the connection begins with.
    pub socket: SocketOptions,
}

/// Options of a socket before it has a connection. `None` takes the value of the configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketOptions {
    /// Receive buffer in bytes (`SO_RCVBUF`, but exactly this size).
    pub recv_buffer_bytes: Option<u32>,
    /// Send buffer in bytes (`SO_SNDBUF`, but exactly this size).
    pub send_buffer_bytes: Option<u32>,
    /// Largest segment to announce and to send (`TCP_MAXSEG`): 88 … 32,767.
    pub mss: Option<u16>,
    /// True if small segments are sent at once (`TCP_NODELAY`).
    pub nodelay: bool,
    /// True if an idle peer is probed (`SO_KEEPALIVE`).
    pub keepalive: bool,
    /// True if acknowledged bytes are reported as events.
    pub ack_events: bool,
    /// Type of service, or traffic class, from the SYN on, without the ECN bits (`IP_TOS`, `IPV6_TCLASS`).
    pub tos: u8,
    /// Hop limit from the SYN on (`IP_TTL`, `IPV6_UNICAST_HOPS`).
    pub hop_limit: Option<u8>,
    /// Segments that arrive over IPv4 with a smaller time to live are dropped, including SYNs (`IP_MINTTL`);
    /// 0 accepts all.
    pub min_ttl: u8,
    /// Segments that arrive over IPv6 with a smaller hop limit are dropped, including SYNs
    /// (`IPV6_MINHOPCOUNT`); 0 accepts all.
    pub min_hop_count: u8,
    /// Minimum retransmission time-out: see [`TcpOption::RtoMin`].
    pub rto_min: Option<Duration>,
    /// Maximum retransmission time-out: see [`TcpOption::RtoMax`].
    pub rto_max: Option<Duration>,
    /// Maximum delay of an acknowledgement: see [`TcpOption::DelayedAckMax`].
    pub delayed_ack_max: Option<Duration>,
    /// For a listener: which headers of the SYNs of its connections are saved (`TCP_SAVE_SYN`).
    pub save_syn: SaveSyn,
    /// Priority from the SYN on: 0, the default, to 7 ([`crate::priority`], `SO_PRIORITY`).
    pub priority: u8,
    /// True if the socket receives unordered: see [`TcpOption::Unordered`].
    pub unordered: bool,
    /// Options that let other sockets be bound to the local port (`SO_REUSEADDR`, `SO_REUSEPORT`); those of a
    /// listener are converted by [`PortSharing::of_listener`].
    pub port_sharing: PortSharing,
    /// For a listener: time-outs of the SYN+ACK during which an acknowledgement without data does not create
    /// a connection (`TCP_DEFER_ACCEPT`, see [`defer_accept_timeouts`]); 0 creates it at once.
    pub defer_accept: u8,
    /// True if routers may fragment packets over IPv4: see [`TcpOption::MayFragment`].
    pub may_fragment: bool,
    /// For a listener: connections that may be opened fast and whose handshake is not complete
    /// (`TCP_FASTOPEN`, RFC 7413); 0 opens none.
    pub fastopen_queue: u32,
    /// For a listener: keys of the cookies that it sends and accepts, and of cookies that it accepts, too
    /// (`TCP_FASTOPEN_KEY`). Without the first one those of the configuration are used.
    pub fastopen_keys: FastOpenKeys,
    /// Data of SYNs are accepted, by a listener, or sent without a cookie (`TCP_FASTOPEN_NO_COOKIE`).
    pub fastopen_no_cookie: bool,
    /// Flow label of packets over IPv6 (`IPV6_FLOWLABEL_MGR`, `IPV6_AUTOFLOWLABEL`).
    pub flow_label: FlowLabel,
    /// For a connection: it is opened fast (`TCP_FASTOPEN_CONNECT`, RFC 7413), if the configuration allows
    /// clients to do so. Without a cookie of the peer, the SYN requests one. With a cookie, the SYN is
    /// deferred until data are queued, and carries as many as fit.
    pub fastopen_connect: bool,
}

/// Returns how many time-outs of a SYN+ACK a time in seconds lasts, rounded up (`secs_to_retrans`): the first
/// one is 1 s, each further one twice as long as the previous one, up to 120 s.
pub fn defer_accept_timeouts(seconds: u32) -> u8 {
    let (mut timeout, mut period, mut count) = (1, 1, u8::from(seconds > 0));
    while seconds > period && count < u8::MAX {
        count += 1;
        timeout = (timeout * 2).min(120);
        period += timeout;
    }
    count
}

/// Headers of a SYN that are saved for the application that accepts the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveSyn {
    /// No headers.
    #[default]
    Off,
    /// The headers of IP and TCP.
    Packet,
    /// The headers of the link, IP and TCP.
    Frame,
}

/// An option of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TcpOption {
    /// Sends small segments at once (`TCP_NODELAY`). Off by default: Nagle's algorithm holds them back (RFC
    /// 1122 §4.2.3.4).
    NoDelay(bool),
    /// Holds back partial segments until the option is switched off, for at most 200 ms (`TCP_CORK`).
    Cork(bool),
    /// More data follow the next send (`MSG_MORE`): its last partial segment is held back until they are
    /// sent, the peer acknowledges data, or 200 ms have passed, and it does not push. Must be set before each
    /// such send; off means that the next send completes the data.
    More(bool),
    /// Acknowledges the next segments at once, or switches to delayed acknowledgements (`TCP_QUICKACK`). Not
    /// permanent.
    QuickAck(bool),
    /// Probes an idle peer (`SO_KEEPALIVE`, RFC 1122 §4.2.3.6).
    KeepAlive(bool),
    /// Idle time before the first probe, in whole seconds (`TCP_KEEPIDLE`): 1 … 32,767 s.
    KeepIdle(Duration),
    /// Time between probes, in whole seconds (`TCP_KEEPINTVL`): 1 … 32,767 s.
    KeepInterval(Duration),
    /// Unanswered probes before the connection is given up (`TCP_KEEPCNT`): 1 … 127.
    KeepCount(u8),
    /// Longest time for which data may stay unacknowledged (`TCP_USER_TIMEOUT`, RFC 5482), in milliseconds; 0
    /// uses the configured retries.
    UserTimeout(Duration),
    /// `SO_LINGER` with time 0: `close` sends RST.
    LingerZero(bool),
    /// Longest time for which an orphan may stay in FIN-WAIT-2 (`TCP_LINGER2`).
    Linger2(Duration),
    /// Urgent data stay in the stream (`SO_OOBINLINE`).
    OobInline(bool),
    /// Reports acknowledged bytes as events.
    AckEvents(bool),
    /// Receive buffer in bytes. A smaller buffer never takes back a window that was offered (RFC 9293
    /// §3.8.6).
    RecvBuffer(u32),
    /// Send buffer in bytes.
    SendBuffer(u32),
    /// After each transmission that leaves less than half of this number of bytes unsent,
    /// [`Event::Writable`](crate::events::Event::Writable) follows (`TCP_NOTSENT_LOWAT`); 0 switches it off.
    /// Sends remain bounded by the send buffer alone:
    /// [`Stack::sendable_within`](crate::stack::Stack::sendable_within) returns what Linux would accept.
    NotSentLowat(u32),
    /// Largest segment to send (`TCP_MAXSEG`, which on Linux has no effect after the handshake).
    MaxSegment(u16),
    /// Congestion control algorithm (`TCP_CONGESTION`).
    Congestion(CongestionControl),
    /// Largest rate in bytes per second at which the connection sends (`SO_MAX_PACING_RATE`); `u64::MAX`, the
    /// default, has no limit, and 0 has none either, as on Linux. Once a limit was set, the connection is
    /// paced; after the limit was removed, its congestion window determines the rate.
    MaxPacingRate(u64),
    /// Type of service, or traffic class, of sent packets, without the ECN bits, which TCP sets itself
    /// (`IP_TOS`, `IPV6_TCLASS`).
    Tos(u8),
    /// Hop limit of sent packets (`IP_TTL`, `IPV6_UNICAST_HOPS`); `None` uses that of the configuration.
    HopLimit(Option<u8>),
    /// Retransmissions of a SYN (`TCP_SYNCNT`): 1 … 127.
    SynRetries(u8),
    /// Segments that arrive with a smaller hop limit are dropped (`IP_MINTTL`, `IPV6_MINHOPCOUNT`, RFC 5082);
    /// 0 accepts all.
    MinHopLimit(u8),
    /// Minimum by which the retransmission time-out exceeds the round-trip time (`TCP_RTO_MIN_US`): 1 … 200
    /// ms.
    RtoMin(Duration),
    /// Maximum retransmission time-out (`TCP_RTO_MAX_MS`): 1 … 120 s.
    RtoMax(Duration),
    /// Maximum delay of an acknowledgement (`TCP_DELACK_MAX_US`): 1 … 200 ms. It never exceeds that of the
    /// configuration, nor [`TcpOption::RtoMin`] less one millisecond.
    DelayedAckMax(Duration),
    /// Priority among the connections that have something to send and, at the receiver, among its frames, if
    /// the device carries it: 0, the default, to 7, in the order that [`crate::priority`] defines
    /// (`SO_PRIORITY`). It also applies to acknowledgements, retransmissions and FIN.
    Priority(u8),
    /// Unordered receive: data of a frame with a priority above best effort ([`crate::priority`]) are given
    /// to the application while data before them are missing, by
    /// [`Event::Unordered`](crate::events::Event::Unordered). Off by default. Switching it off delivers in
    /// order what the application has not taken yet.
    Unordered(bool),
    /// Sends packets over IPv4 without DF, except SYN+ACKs, so that routers may fragment them
    /// (`IP_MTU_DISCOVER` other than `IP_PMTUDISC_WANT` and `IP_PMTUDISC_DO`). Off by default.
    MayFragment(bool),
    /// Flow label of packets over IPv6 (`IPV6_FLOWLABEL_MGR`, `IPV6_AUTOFLOWLABEL`).
    FlowLabel(FlowLabel),
    /// Records when data arrive (`SO_TIMESTAMP`). Implemented by channels; without effect on the engine.
    ArrivalTimes(bool),
}

impl TcpOption {
    /// Returns whether the value is within its range.
    pub fn is_valid(self) -> bool {
        let seconds = |time: Duration| (1..=32_767).contains(&time.as_secs());
        match self {
            Self::KeepIdle(time) | Self::KeepInterval(time) | Self::Linger2(time) => seconds(time),
            Self::KeepCount(count) => (1..=127).contains(&count),
            Self::UserTimeout(time) => u32::try_from(time.as_millis()).is_ok(),
            Self::RecvBuffer(bytes) | Self::SendBuffer(bytes) => checked_buffer(bytes).is_some(),
            Self::MaxSegment(bytes) => checked_mss(bytes).is_some(),
            Self::Tos(tos) => tos & 3 == 0,
            Self::SynRetries(count) => (1..=127).contains(&count),
            Self::HopLimit(hops) => hops != Some(0),
            Self::RtoMin(time) | Self::DelayedAckMax(time) => RTO_MIN_RANGE.contains(&time),
            Self::RtoMax(time) => RTO_MAX_RANGE.contains(&time),
            Self::Priority(priority) => priority <= Label::PRIORITY_MAX,
            Self::FlowLabel(choice) => choice.is_valid(),
            _ => true,
        }
    }
}

/// Sizes of the buffers of a connection in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BufferLimits {
    /// Largest size of the receive buffer.
    pub recv_max: u32,
    /// Largest size of the send buffer.
    pub send_max: u32,
    /// Size of the send buffer now.
    pub send: u64,
}

/// Information about a connection, in the terms of Linux's `struct tcp_info`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TcpInfo {
    /// State.
    pub state: State,
    /// Local address.
    pub local: SocketAddr,
    /// Remote address.
    pub remote: SocketAddr,
    /// Congestion state.
    pub ca_state: CaState,
    /// Consecutive retransmission time-outs.
    pub retransmits: u8,
    /// Unanswered probes.
    pub probes: u8,
    /// Back-off exponent.
    pub backoff: u8,
    /// Retransmission time-out.
    pub rto: Duration,
    /// Delayed acknowledgement time.
    pub ato: Duration,
    /// Payload bytes of the segments that are sent, without options.
    pub snd_mss: u32,
    /// Estimate of the peer's segment size.
    pub rcv_mss: u32,
    /// Largest segment that was announced.
    pub advmss: u32,
    /// Path MTU in use: below that of the route while it is searched for by probing.
    pub pmtu: u32,
    /// Segments in flight.
    pub unacked: u32,
    /// Segments that the peer has received after a gap.
    pub sacked: u32,
    /// Segments considered lost.
    pub lost: u32,
    /// Retransmitted segments in flight.
    pub retrans: u32,
    /// Retransmitted segments since the connection was last idle for a time-out, when the counter is reset.
    pub total_retrans: u32,
    /// Smoothed round-trip time.
    pub rtt: Duration,
    /// Variation of the round-trip time.
    pub rttvar: Duration,
    /// Smallest round-trip time.
    pub min_rtt: Duration,
    /// Slow start threshold in segments (`u32::MAX` before the first reduction).
    pub snd_ssthresh: u32,
    /// Congestion window in segments.
    pub snd_cwnd: u32,
    /// Reordering degree in segments.
    pub reordering: u32,
    /// Number of times that reordering was observed.
    pub reord_seen: u32,
    /// Window of the peer in bytes.
    pub snd_wnd: u32,
    /// Window that is offered, in bytes.
    pub rcv_wnd: u32,
    /// Shift of the peer's window.
    pub snd_wscale: u8,
    /// Shift of the local window.
    pub rcv_wscale: u8,
    /// True if timestamps are in use.
    pub timestamps: bool,
    /// True if SACK is in use.
    pub sack: bool,
    /// True if window scaling is in use.
    pub wscale: bool,
    /// True if ECN was negotiated.
    pub ecn: bool,
    /// True if data of the SYN were acknowledged (`TCPI_OPT_SYN_DATA`).
    pub syn_data: bool,
    /// Why the connection was not opened fast (`tcpi_fastopen_client_fail`).
    pub fastopen_failure: FastOpenFailure,
    /// Bytes queued and not sent yet.
    pub notsent_bytes: u32,
    /// Time since data were last received, or since any segment was last received if nothing has been queued
    /// or in flight for a time-out.
    pub last_data_recv: Duration,
    /// Time in which data were queued or in flight; this and the times below are counted since the connection
    /// was last idle for a time-out.
    pub busy_time: Duration,
    /// Part of `busy_time` in which the peer's window was too small.
    pub rwnd_limited: Duration,
    /// Part of `busy_time` in which the send buffer was full of data in flight, and the application had more.
    pub sndbuf_limited: Duration,
    /// Congestion control algorithm.
    pub congestion: CongestionControl,
    /// Rate in bytes per second at which the connection is paced, or would be paced; `u64::MAX` is no limit.
    pub pacing_rate: u64,
    /// Largest value of `pacing_rate` (`SO_MAX_PACING_RATE`).
    pub max_pacing_rate: u64,
    /// Delivery rate in bytes per second; 0 without a sample. Samples are taken only on connections that are
    /// paced.
    pub delivery_rate: u64,
    /// True if the application limited the delivery rate, or there is no sample.
    pub delivery_rate_app_limited: bool,
    /// The model of the path, if the congestion control is BBR.
    pub bbr: Option<BbrInfo>,
    /// Bytes queued and not yet acknowledged.
    pub send_queued: u32,
    /// Bytes that can be read.
    pub recv_queued: u32,
}

/// BBR's model of the path (Linux's `struct tcp_bbr_info`). All zeros before the first segment is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BbrInfo {
    /// Bandwidth in bytes per second.
    pub bandwidth: u64,
    /// Smallest round-trip time in µs; `u32::MAX` before the first sample.
    pub min_rtt_us: u32,
    /// Gain of the pacing rate in 1/256.
    pub pacing_gain: u32,
    /// Gain of the congestion window in 1/256.
    pub cwnd_gain: u32,
}

/// Position of urgent data (`SIOCATMARK`, `POLLPRI`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UrgentMark {
    /// Unread bytes before the urgent byte.
    pub ahead: usize,
    /// True if the byte has arrived and was not read yet.
    pub ready: bool,
}

/// Reason for which a connection was not opened fast (RFC 7413), with the values of Linux.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum FastOpenFailure {
    /// Nothing failed: the connection was opened fast, or that was not asked for.
    #[default]
    None,
    /// There was no cookie (`TFO_COOKIE_UNAVAILABLE`).
    CookieUnavailable,
    /// SYN+ACK has not acknowledged the data of the SYN (`TFO_DATA_NOT_ACKED`).
    DataNotAcked,
    /// The SYN was sent again, without data (`TFO_SYN_RETRANSMITTED`).
    SynRetransmitted,
}

/// Congestion state, with Linux's names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CaState {
    /// No loss or reordering is suspected.
    #[default]
    Open,
    /// Duplicate or selective acknowledgements have arrived.
    Disorder,
    /// The window is reduced because of ECN, or because a tail loss probe repaired a loss.
    Cwr,
    /// Fast recovery.
    Recovery,
    /// After a retransmission time-out.
    Loss,
}
