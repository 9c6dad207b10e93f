//! Per-socket options and what can be asked about a connection.

use crate::device::Label;
use crate::tcp::config::CongestionControl;
use crate::tcp::profile::{RTO_MAX_RANGE, RTO_MIN_RANGE, checked_buffer, checked_mss};
use crate::tcp::state::State;
use core::net::SocketAddr;
use core::time::Duration;

/// How a listener behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenOptions {
    /// Connections that may wait to be accepted, as Linux counts them (one more than this number fits). Default 4,096.
    // limit: backlog of a listener
    pub backlog: u32,
    /// A listener on an IPv6 address does not take IPv4 connections (`IPV6_V6ONLY`). Default false, as on Linux.
    pub v6_only: bool,
    /// Others that have this set too, and the same `user`, may listen at the same address; connections are spread over them by sender (`SO_REUSEPORT`).
    /// Of several shards, each that is to serve them listens for itself.
    pub reuse_port: bool,
    /// Whose it is: listeners of several users do not share an address (on Linux, effective users).
    pub user: u32,
    /// Options that accepted connections start with.
    pub socket: SocketOptions,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self { backlog: 4096, v6_only: false, reuse_port: false, user: 0, socket: SocketOptions::default() }
    }
}

impl ListenOptions {
    /// Whether a listener at `own` that was opened with these keeps another from being opened at `at`, and the other way round.
    pub fn conflicts_with(&self, own: SocketAddr, at: SocketAddr, others: &Self) -> bool {
        let shared = self.reuse_port && others.reuse_port && self.user == others.user;
        if own.port() != at.port() || shared {
            return false;
        }
        let all = |a: SocketAddr| a.ip().is_unspecified();
        let dual = |a: SocketAddr, only: bool| a.is_ipv6() && all(a) && !only;
        own.ip() == at.ip()
            || dual(own, self.v6_only) && at.is_ipv4() && all(at)
            || dual(at, others.v6_only) && own.is_ipv4() && all(own)
    }
}

/// How a connection is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectOptions {
    /// Source address; port 0 lets the stack choose one (RFC 6056). `None` lets it choose both.
    pub local: Option<SocketAddr>,
    /// The port was chosen for the application, not by it: if it is in TIME_WAIT towards the same peer it stays so for `tcp.time_wait_reuse_ms`.
    pub is_ephemeral_port: bool,
    /// Options that the connection starts with.
    pub socket: SocketOptions,
}

/// What a socket can be told before there is a connection. `None` takes the value of the configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketOptions {
    /// Receive buffer in bytes (`SO_RCVBUF`, but exactly these bytes).
    pub recv_buffer_bytes: Option<u32>,
    /// Send buffer in bytes (`SO_SNDBUF`, but exactly these bytes).
    pub send_buffer_bytes: Option<u32>,
    /// Largest segment to announce and to send (`TCP_MAXSEG`): 88 … 32,767.
    pub mss: Option<u16>,
    /// Send small segments at once (`TCP_NODELAY`).
    pub nodelay: bool,
    /// Probe an idle peer (`SO_KEEPALIVE`).
    pub keepalive: bool,
    /// Report acknowledged bytes as events.
    pub ack_events: bool,
    /// Type of service, or traffic class, from the SYN on, without the bits of ECN (`IP_TOS`, `IPV6_TCLASS`).
    pub tos: u8,
    /// Hop limit from the SYN on (`IP_TTL`, `IPV6_UNICAST_HOPS`).
    pub hop_limit: Option<u8>,
    /// Segments that arrive over IPv4 with a smaller time to live are dropped, SYNs too (`IP_MINTTL`); 0 for none.
    pub min_ttl: u8,
    /// Segments that arrive over IPv6 with a smaller hop limit, likewise (`IPV6_MINHOPCOUNT`).
    pub min_hop_count: u8,
    /// Shortest retransmission time-out: see [`TcpOption::RtoMin`].
    pub rto_min: Option<Duration>,
    /// Longest retransmission time-out: see [`TcpOption::RtoMax`].
    pub rto_max: Option<Duration>,
    /// Longest delay of an acknowledgement: see [`TcpOption::DelayedAckMax`].
    pub delayed_ack_max: Option<Duration>,
    /// Of a listener: what is kept of the SYNs that begin its connections (`TCP_SAVE_SYN`).
    pub save_syn: SaveSyn,
    /// Priority from the SYN on: 0, the usual one, to 7 ([`crate::priority`], `SO_PRIORITY`).
    pub priority: u8,
}

/// What is kept of a SYN for who accepts its connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SaveSyn {
    /// Nothing.
    #[default]
    Off,
    /// Its headers of IP and TCP.
    Packet,
    /// The same behind the link's header.
    Frame,
}

/// One option of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpOption {
    /// Send small segments at once (`TCP_NODELAY`). Off by default: Nagle's algorithm holds them back (RFC 1122 §4.2.3.4).
    NoDelay(bool),
    /// Hold back partial segments until it is taken off, for 200 ms at most (`TCP_CORK`).
    Cork(bool),
    /// More follows what is sent next (`MSG_MORE`): its last partial segment is held back until that comes, the peer acknowledges something, or 200 ms
    /// have passed, and does not push. To be said before each such send; off says that what follows is all.
    More(bool),
    /// Acknowledge at once for the next segments, or go to delayed acknowledgements (`TCP_QUICKACK`). Not permanent.
    QuickAck(bool),
    /// Probe an idle peer (`SO_KEEPALIVE`, RFC 1122 §4.2.3.6).
    KeepAlive(bool),
    /// Idle time before the first probe, in whole seconds (`TCP_KEEPIDLE`): 1 … 32,767 s.
    KeepIdle(Duration),
    /// Time between probes, in whole seconds (`TCP_KEEPINTVL`): 1 … 32,767 s.
    KeepInterval(Duration),
    /// Probes without an answer before the connection is given up (`TCP_KEEPCNT`): 1 … 127.
    KeepCount(u8),
    /// How long data may stay unacknowledged (`TCP_USER_TIMEOUT`, RFC 5482), in milliseconds; 0 takes the configured retries.
    UserTimeout(Duration),
    /// `SO_LINGER` with time 0: `close` sends RST.
    LingerZero(bool),
    /// How long an orphan may stay in FIN_WAIT_2 (`TCP_LINGER2`).
    Linger2(Duration),
    /// Urgent data stay in the stream (`SO_OOBINLINE`).
    OobInline(bool),
    /// Report acknowledged bytes as events.
    AckEvents(bool),
    /// Receive buffer in bytes. A smaller one never takes back a window already offered (RFC 9293 §3.8.6).
    RecvBuffer(u32),
    /// Send buffer in bytes.
    SendBuffer(u32),
    /// Whenever something has left and less than half of so many bytes were not sent, [`Event::Writable`](crate::events::Event::Writable) follows (`TCP_NOTSENT_LOWAT`); 0 for not. What
    /// is taken stays bounded by the send buffer alone: [`Stack::room_below`](crate::stack::Stack::room_below) says what Linux would take.
    NotSentLowat(u32),
    /// Largest segment to send (`TCP_MAXSEG`).
    MaxSegment(u16),
    /// How the congestion window grows (`TCP_CONGESTION`).
    Congestion(CongestionControl),
    /// Type of service, or traffic class, of what it sends, without the bits of ECN, which are TCP's own (`IP_TOS`, `IPV6_TCLASS`).
    Tos(u8),
    /// Hop limit of what it sends (`IP_TTL`, `IPV6_UNICAST_HOPS`); `None` takes the configuration's.
    HopLimit(Option<u8>),
    /// How often a SYN is sent again (`TCP_SYNCNT`): 1 … 127.
    SynRetries(u8),
    /// Segments that arrive with a smaller hop limit are dropped (`IP_MINTTL`, `IPV6_MINHOPCOUNT`, RFC 5082); 0 for none.
    MinHopLimit(u8),
    /// What the retransmission time-out has beyond the round trip time at the least (`TCP_RTO_MIN_US`): 1 … 200 ms.
    RtoMin(Duration),
    /// The longest retransmission time-out (`TCP_RTO_MAX_MS`): 1 … 120 s.
    RtoMax(Duration),
    /// The longest delay of an acknowledgement (`TCP_DELACK_MAX_US`): 1 … 200 ms. It never is longer than the configuration's, nor than
    /// [`TcpOption::RtoMin`] less a millisecond.
    DelayedAckMax(Duration),
    /// Which of the connections that have something to send go first, and at the receiver which of its frames, if the device carries that: 0, the usual one, to 7, in the order
    /// that [`crate::priority`] says (`SO_PRIORITY`). Also of its acknowledgements, retransmissions and FIN.
    Priority(u8),
}

impl TcpOption {
    /// Whether its value is within its range.
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
            _ => true,
        }
    }
}

/// What is known about a connection, in the terms of Linux's `struct tcp_info`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpInfo {
    /// State.
    pub state: State,
    /// Our end.
    pub local: SocketAddr,
    /// The peer's end.
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
    /// Bytes per segment we send, without options.
    pub snd_mss: u32,
    /// Estimate of the peer's segment size.
    pub rcv_mss: u32,
    /// The largest segment we announced.
    pub advmss: u32,
    /// Path MTU in use: less than what the route says while it is found by probing.
    pub pmtu: u32,
    /// Segments in flight.
    pub unacked: u32,
    /// Segments the peer has beyond a hole.
    pub sacked: u32,
    /// Segments considered lost.
    pub lost: u32,
    /// Retransmitted segments in flight.
    pub retrans: u32,
    /// All retransmitted segments since the connection was last idle for a time-out: what counts them is given back then.
    pub total_retrans: u32,
    /// Smoothed round trip time.
    pub rtt: Duration,
    /// Its variation.
    pub rttvar: Duration,
    /// Smallest round trip time seen.
    pub min_rtt: Duration,
    /// Slow start threshold in segments (`u32::MAX` ≙ none yet).
    pub snd_ssthresh: u32,
    /// Congestion window in segments.
    pub snd_cwnd: u32,
    /// Reordering degree in segments.
    pub reordering: u32,
    /// How often reordering was seen.
    pub reord_seen: u32,
    /// Peer's window in bytes.
    pub snd_wnd: u32,
    /// Window we offer in bytes.
    pub rcv_wnd: u32,
    /// Shift of the peer's window.
    pub snd_wscale: u8,
    /// Shift of our window.
    pub rcv_wscale: u8,
    /// Timestamps are in use.
    pub timestamps: bool,
    /// SACK is in use.
    pub sack: bool,
    /// Window scaling is in use.
    pub wscale: bool,
    /// ECN was negotiated.
    pub ecn: bool,
    /// Bytes queued and not yet sent.
    pub notsent_bytes: u32,
    /// Time since data came last, or since whatever came last if nothing has been queued or in flight for a time-out.
    pub last_data_recv: Duration,
    /// Time in which something was queued or in flight; like those below since the connection was last idle for a time-out.
    pub busy_time: Duration,
    /// Of that, time in which the peer's window was too small.
    pub rwnd_limited: Duration,
    /// Of that, time in which all was in flight that the send buffer takes, and the application had more.
    pub sndbuf_limited: Duration,
    /// Bytes queued and not yet acknowledged.
    pub send_queued: u32,
    /// Bytes waiting to be read.
    pub recv_queued: u32,
}

/// Where urgent data stand (`SIOCATMARK`, `POLLPRI`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UrgentMark {
    /// Unread bytes in front of the urgent byte.
    pub ahead: usize,
    /// The byte has arrived and was not taken yet.
    pub ready: bool,
}

/// Congestion state, named as Linux names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CaState {
    /// Nothing unusual.
    #[default]
    Open,
    /// Duplicate or selective acknowledgements were seen.
    Disorder,
    /// The window was reduced because of ECN.
    Cwr,
    /// Fast recovery.
    Recovery,
    /// After a retransmission time-out.
    Loss,
}
