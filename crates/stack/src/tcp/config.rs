//! Keys of the `[tcp]` table.

use crate::error::ConfigError;
use core::ops::RangeInclusive;
use serde::{Deserialize, Serialize};

/// Algorithm that controls the congestion window.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Ord, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CongestionControl {
    /// RFC 9438, with HyStart++ (RFC 9406).
    #[default]
    Cubic,
    /// RFC 5681 and 6582.
    NewReno,
    /// draft-cardwell-iccrg-bbr-congestion-control-00 (version 1), with pacing.
    Bbr,
}

impl CongestionControl {
    /// Returns the algorithm's name in Linux.
    pub const fn linux_name(self) -> &'static str {
        match self {
            Self::Cubic => "cubic",
            Self::NewReno => "reno",
            Self::Bbr => "bbr",
        }
    }

    /// Returns the algorithm that has this name in Linux.
    pub fn from_linux_name(name: &[u8]) -> Option<Self> {
        [Self::Cubic, Self::NewReno, Self::Bbr].into_iter().find(|kind| kind.linux_name().as_bytes() == name)
    }
}

/// When explicit congestion notification is negotiated (RFC 3168).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EcnMode {
    /// Never.
    Off,
    /// If the peer asks for it.
    #[default]
    Passive,
    /// It is requested, and accepted if the peer requests it.
    Active,
}

/// When SYN cookies (RFC 4987 §3.6) replace half-open connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SynCookies {
    /// Never: SYNs over the limit are dropped.
    Off,
    /// When the limit of half-open connections or a listener's backlog is reached.
    #[default]
    Auto,
    /// For every SYN.
    Always,
}

/// When the path MTU is found by probing (RFC 4821), in addition to ICMP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MtuProbing {
    /// Never.
    #[default]
    Off,
    /// On connections whose segments do not arrive for long: the path may drop large ones without an ICMP
    /// error.
    BlackHole,
    /// On every connection: it begins with small segments.
    Always,
}

/// TCP parameters. The defaults are those of Linux where Linux has the parameter.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TcpConfig {
    /// Maximum number of connections, including half-open ones, without TIME-WAIT. Memory is reserved, not
    /// touched. 1 … 1,073,741,823, default 1,000,000.
    pub connections_max: u32,
    /// Maximum number of listeners. 1 … 1,000,000, default 65,536.
    pub listeners_max: u32,
    /// Maximum number of half-open connections (SYN-RECEIVED) over all listeners. 1 … 1,073,741,823, default
    /// 65,536.
    pub half_open_max: u32,
    /// Maximum number of entries in TIME-WAIT; beyond it the oldest one is removed and counted. 1 …
    /// 1,073,741,823, default 1,000,000.
    pub time_wait_max: u32,
    /// Bytes in receive and send buffers of all connections together; the last quarter is reserved for
    /// connections that use no more than 8 KiB in each direction. 65,536 … 2^42, default 1 GiB.
    pub buffer_pool_bytes: u64,
    /// Largest receive buffer of a connection in bytes. 2,048 … 2^30, default 6 MiB.
    pub recv_buffer_bytes: u32,
    /// Largest initial receive window of a connection in bytes, unless its socket requested a receive buffer
    /// size: the window is rounded down to whole segments and limited to the 65,535 that a SYN can announce.
    /// As data arrive it grows to twice this size or to 131,072, whichever is larger, and up to
    /// `recv_buffer_bytes` while the application keeps up with what arrives. 2,048 … 2^30, default 65,536.
    pub recv_window_first_bytes: u32,
    /// Largest send buffer of a connection in bytes. 2,048 … 2^30, default 4 MiB.
    pub send_buffer_bytes: u32,
    /// Send buffer of a connection in bytes before it grows with the congestion window, unless its socket
    /// requested a size. The buffer has room for at least twenty segments with their overhead, as on Linux,
    /// and at most `send_buffer_bytes`. 2,048 … 2^30, default 16,384.
    pub send_buffer_first_bytes: u32,
    /// Congestion control: `cubic` (RFC 9438, with HyStart++), `newreno` (RFC 5681 and 6582) or `bbr`
    /// (version 1, with pacing; an idle connection keeps its model and with it about 2 KiB). Default
    /// `cubic`.
    pub congestion_control: CongestionControl,
    /// Explicit congestion notification (RFC 3168): `off`, `passive` (if the peer requests it) or `active`
    /// (requests it, too). Default `passive`.
    pub ecn: EcnMode,
    /// SYN cookies (RFC 4987 §3.6): `off` (SYNs over the limit are dropped), `auto` (when `half_open_max` or
    /// a listener's backlog is reached) or `always` (for every SYN). Default `auto`.
    pub syn_cookies: SynCookies,
    /// Offer and accept timestamps (RFC 7323 §3). Default true.
    pub timestamps: bool,
    /// Offer and accept selective acknowledgements (RFC 2018). Default true.
    pub sack: bool,
    /// Offer and accept window scaling (RFC 7323 §2). Default true.
    pub window_scaling: bool,
    /// Initial congestion window in segments (RFC 6928). 1 … 1,000, default 10.
    pub initial_window_segments: u32,
    /// Reduce the congestion window towards the initial one while nothing is sent (RFC 5681 §4.1). Default
    /// true.
    pub slow_start_after_idle: bool,
    /// Retransmission time-out before the first round-trip time sample (RFC 6298 §2.1), in milliseconds. 1 …
    /// 120,000, default 1,000.
    pub rto_initial_ms: u32,
    /// Smallest retransmission time-out, in milliseconds. 1 … 120,000, default 200.
    pub rto_min_ms: u32,
    /// Largest retransmission time-out, in seconds. 1 … 120, default 120.
    pub rto_max_seconds: u32,
    /// Retransmissions of SYN before `connect` fails. 1 … 127, default 6.
    pub syn_retries: u8,
    /// Retransmissions of SYN+ACK before a half-open connection is removed. 0 … 127, default 5.
    pub synack_retries: u8,
    /// Retransmission time-outs before a connection is given up (RFC 1122 §4.2.3.5, R2), counted in time as
    /// Linux does. 1 … 127, default 15.
    pub retries: u8,
    /// Retransmission time-outs before a connection that the application has closed is given up. 0 … 127,
    /// default 8.
    pub orphan_retries: u8,
    /// Time in TIME-WAIT, in seconds. 1 … 3,600, default 60.
    pub time_wait_seconds: u32,
    /// Time a closed connection waits in FIN-WAIT-2 for the peer's FIN, in seconds. 1 … 3,600, default 60.
    pub fin_timeout_seconds: u32,
    /// Idle time before the first keepalive probe, in seconds. 1 … 32,767, default 7,200.
    pub keepalive_time_seconds: u32,
    /// Time between keepalive probes, in seconds. 1 … 32,767, default 75.
    pub keepalive_interval_seconds: u32,
    /// Unanswered keepalive probes before the connection is given up. 1 … 127, default 9.
    pub keepalive_probes: u8,
    /// Longest delay of an acknowledgement, in milliseconds (RFC 9293 §3.8.6.3: below 500). 1 … 499, default
    /// 40.
    pub delayed_ack_ms: u32,
    /// Challenge acknowledgements per second over all connections (RFC 5961 §7). 1 … 2^32-1, default 1,000.
    pub challenge_acks_per_second: u32,
    /// Minimum time between two answers to invalid segments of one connection, in milliseconds. 0 … 60,000,
    /// default 500.
    pub invalid_ack_interval_ms: u32,
    /// Probe for a lost tail before the retransmission time-out (RFC 8985 §7). Requires SACK. Default true.
    pub tail_loss_probes: bool,
    /// Detect spurious retransmission time-outs before retransmitting everything (F-RTO, RFC 5682). Default
    /// true.
    pub frto: bool,
    /// Initial reordering degree: segments by which a segment may be late before it counts as lost. 1 … 300,
    /// default 3.
    pub reordering_segments: u32,
    /// Time that the reordering timer waits beyond that of RFC 8985 §6.2, in milliseconds. Linux waits 2 ms
    /// and up to two timer ticks. 0 … 200, default 0.
    pub reordering_slack_ms: u32,
    /// Minimum number of segments that are sent as one packet within a burst: the last of them has PSH, as on
    /// Linux (`tcp_min_tso_segs`). 1 … 65,535, default 2.
    pub push_segments_min: u16,
    /// Path MTU discovery by probing (RFC 4821): `off`, `black-hole` (on connections whose segments do not
    /// arrive for long) or `always` (begins with small segments). Default `off`.
    pub mtu_probing: MtuProbing,
    /// Segment size that probing begins with, in bytes (RFC 4821 §7.2). 48 … 9,000, default 1,024.
    pub mtu_base_segment_bytes: u16,
    /// Smallest segment size that is used on a path without acknowledgements, in bytes. 48 … 9,000, default
    /// 48.
    pub mtu_floor_segment_bytes: u16,
    /// Accuracy in bytes with which probing finds the path MTU. 1 … 9,000, default 8.
    pub mtu_probe_threshold_bytes: u16,
    /// Time after which probing begins again, in seconds. 1 … 86,400, default 600.
    pub mtu_probe_interval_seconds: u32,
    /// Retransmission time-outs after which segments are made smaller, counted in time as Linux does. 1 …
    /// 127, default 3.
    pub mtu_black_hole_retries: u8,
    /// Time after which `connect` may choose a port that is in TIME-WAIT towards the same peer, if timestamps
    /// distinguish old segments from new ones, in ms. 0 … 60,000, default 1,000.
    pub time_wait_reuse_ms: u32,
    /// First local port that `connect` chooses. 1 … 65,535, default 32,768.
    pub local_port_first: u16,
    /// Last local port that `connect` chooses. 1 … 65,535, default 60,999.
    pub local_port_last: u16,
    /// TCP Fast Open (RFC 7413), with the bits of Linux's `net.ipv4.tcp_fastopen`: 1 for clients that ask for
    /// it, 4 to send data without a cookie; 2 for servers, 0x200 to accept data without a cookie, 0x400 for
    /// listeners without `TCP_FASTOPEN`. 0 … 4,095, default 1.
    pub fastopen: u32,
    /// Maximum number of peers whose fast open cookie and MSS a client remembers; beyond it the one that
    /// changed least recently is dropped and counted. 1 … 1,000,000, default 4,096.
    pub fastopen_cookies_max: u32,
    /// Time for which clients of a shard do not use fast open after a path has dropped everything that
    /// followed it, in seconds (Linux's `tcp_fastopen_blackhole_timeout_sec`). It doubles with each further
    /// time, up to 64 times, until data arrive again. 0 uses fast open regardless. 0 … 86,400, default 0.
    pub fastopen_blackhole_timeout_seconds: u32,
    /// Key of fast open cookies: four hexadecimal words as in `net.ipv4.tcp_fastopen_key`, and perhaps after
    /// a comma a second key, whose cookies are accepted, too. If it is empty, the key is random.
    pub fastopen_key: String,
    /// Hop limit (TTL) of the packets that are sent. 1 … 255, default 64.
    pub hop_limit: u8,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            connections_max: 1_000_000,
            listeners_max: 65_536,
            half_open_max: 65_536,
            time_wait_max: 1_000_000,
            buffer_pool_bytes: 1 << 30,
            recv_buffer_bytes: 6 << 20,
            recv_window_first_bytes: 1 << 16,
            send_buffer_bytes: 4 << 20,
            send_buffer_first_bytes: 1 << 14,
            congestion_control: CongestionControl::Cubic,
            ecn: EcnMode::Passive,
            syn_cookies: SynCookies::Auto,
            timestamps: true,
            sack: true,
            window_scaling: true,
            initial_window_segments: 10,
            slow_start_after_idle: true,
            rto_initial_ms: 1000,
            rto_min_ms: 200,
            rto_max_seconds: 120,
            syn_retries: 6,
            synack_retries: 5,
            retries: 15,
            orphan_retries: 8,
            time_wait_seconds: 60,
            fin_timeout_seconds: 60,
            keepalive_time_seconds: 7200,
            keepalive_interval_seconds: 75,
            keepalive_probes: 9,
            delayed_ack_ms: 40,
            challenge_acks_per_second: 1000,
            invalid_ack_interval_ms: 500,
            tail_loss_probes: true,
            frto: true,
            reordering_segments: 3,
            reordering_slack_ms: 0,
            push_segments_min: 2,
            mtu_probing: MtuProbing::Off,
            mtu_base_segment_bytes: 1024,
            mtu_floor_segment_bytes: 48,
            mtu_probe_threshold_bytes: 8,
            mtu_probe_interval_seconds: 600,
            mtu_black_hole_retries: 3,
            time_wait_reuse_ms: 1000,
            local_port_first: 32_768,
            local_port_last: 60_999,
            fastopen: 1,
            fastopen_cookies_max: 4096,
            fastopen_blackhole_timeout_seconds: 0,
            fastopen_key: String::new(),
            hop_limit: 64,
        }
    }
}

/// Bits of [`TcpConfig::fastopen`] that may be set.
pub const FASTOPEN_MASK: u32 = 0xfff;

impl TcpConfig {
    /// Checks every range. The error names the key.
    pub fn validate(&self) -> Result<(), ConfigError> {
        fn within<T: PartialOrd + core::fmt::Display>(
            key: &str,
            value: T,
            range: RangeInclusive<T>,
        ) -> Result<(), ConfigError> {
            if range.contains(&value) {
                return Ok(());
            }
            let problem = format!("{value} is outside {} to {}", range.start(), range.end());
            Err(ConfigError::new(format!("tcp.{key}"), problem))
        }
        within("connections_max", self.connections_max, 1..=0x3fff_ffff)?;
        within("listeners_max", self.listeners_max, 1..=1_000_000)?;
        within("half_open_max", self.half_open_max, 1..=0x3fff_ffff)?;
        within("time_wait_max", self.time_wait_max, 1..=0x3fff_ffff)?;
        within("buffer_pool_bytes", self.buffer_pool_bytes, 1 << 16..=1 << 42)?;
        within("recv_buffer_bytes", self.recv_buffer_bytes, 2048..=1 << 30)?;
        within("recv_window_first_bytes", self.recv_window_first_bytes, 2048..=1 << 30)?;
        within("send_buffer_bytes", self.send_buffer_bytes, 2048..=1 << 30)?;
        within("send_buffer_first_bytes", self.send_buffer_first_bytes, 2048..=1 << 30)?;
        within("initial_window_segments", self.initial_window_segments, 1..=1000)?;
        within("rto_initial_ms", self.rto_initial_ms, 1..=120_000)?;
        within("rto_min_ms", self.rto_min_ms, 1..=120_000)?;
        within("rto_max_seconds", self.rto_max_seconds, 1..=120)?;
        if u64::from(self.rto_min_ms) > u64::from(self.rto_max_seconds) * 1000 {
            return Err(ConfigError::new("tcp.rto_min_ms", "exceeds tcp.rto_max_seconds"));
        }
        within("syn_retries", self.syn_retries, 1..=127)?;
        within("synack_retries", self.synack_retries, 0..=127)?;
        within("retries", self.retries, 1..=127)?;
        within("orphan_retries", self.orphan_retries, 0..=127)?;
        within("time_wait_seconds", self.time_wait_seconds, 1..=3600)?;
        within("fin_timeout_seconds", self.fin_timeout_seconds, 1..=3600)?;
        within("keepalive_time_seconds", self.keepalive_time_seconds, 1..=32_767)?;
        within("keepalive_interval_seconds", self.keepalive_interval_seconds, 1..=32_767)?;
        within("keepalive_probes", self.keepalive_probes, 1..=127)?;
        within("delayed_ack_ms", self.delayed_ack_ms, 1..=499)?;
        within("challenge_acks_per_second", self.challenge_acks_per_second, 1..=u32::MAX)?;
        within("invalid_ack_interval_ms", self.invalid_ack_interval_ms, 0..=60_000)?;
        within("reordering_segments", self.reordering_segments, 1..=300)?;
        within("reordering_slack_ms", self.reordering_slack_ms, 0..=200)?;
        within("push_segments_min", self.push_segments_min.into(), 1..=65_535)?;
        within("mtu_base_segment_bytes", self.mtu_base_segment_bytes, 48..=9000)?;
        within("mtu_floor_segment_bytes", self.mtu_floor_segment_bytes, 48..=9000)?;
        if self.mtu_floor_segment_bytes > self.mtu_base_segment_bytes {
            return Err(ConfigError::new(
                "tcp.mtu_floor_segment_bytes",
                "exceeds tcp.mtu_base_segment_bytes",
            ));
        }
        within("mtu_probe_threshold_bytes", self.mtu_probe_threshold_bytes, 1..=9000)?;
        within("mtu_probe_interval_seconds", self.mtu_probe_interval_seconds, 1..=86_400)?;
        within("mtu_black_hole_retries", self.mtu_black_hole_retries, 1..=127)?;
        within("time_wait_reuse_ms", self.time_wait_reuse_ms, 0..=60_000)?;
        within("local_port_first", self.local_port_first, 1..=u16::MAX)?;
        if self.local_port_last < self.local_port_first {
            return Err(ConfigError::new("tcp.local_port_last", "is below tcp.local_port_first"));
        }
        within("fastopen", self.fastopen, 0..=FASTOPEN_MASK)?;
        within("fastopen_cookies_max", self.fastopen_cookies_max, 1..=1_000_000)?;
        within("fastopen_blackhole_timeout_seconds", self.fastopen_blackhole_timeout_seconds, 0..=86_400)?;
        if !self.fastopen_key.is_empty() && super::fastopen::parse_keys(&self.fastopen_key).is_none() {
            let problem = format!("{:?} is not four hexadecimal words such as 1-2-3-4", self.fastopen_key);
            return Err(ConfigError::new("tcp.fastopen_key", problem));
        }
        within("hop_limit", self.hop_limit, 1..=255)
    }
}
