//! `struct tcp_info` (`<linux/tcp.h>`). Fields that the stack does not know are 0.

use core::time::Duration;
use ginnel::{CaState, State, TcpInfo};

/// Bytes of the structure of Linux 6.18, up to and including `tcpi_accecn_opt_seen`. Old programs read it up
/// to `tcpi_total_retrans`.
const BYTES: usize = 280;

/// Bytes that a connection has transferred.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Transferred {
    /// Bytes that the peer has acknowledged.
    pub acked: u64,
    /// Bytes that have arrived in order.
    pub received: u64,
}

/// Bits of `tcpi_options`.
const TIMESTAMPS: u8 = 1;
const SACK: u8 = 2;
const WSCALE: u8 = 4;
const ECN: u8 = 8;
const SYN_DATA: u8 = 32;

/// Returns the structure for a connection, for a listener, or for a socket that is neither. `max_pacing_rate`
/// is the socket's, in bytes per second; a rate without a limit is `u64::MAX`.
pub(super) fn bytes(
    info: Option<&TcpInfo>,
    transferred: Option<Transferred>,
    is_listening: bool,
    max_pacing_rate: u64,
) -> Vec<u8> {
    let mut out = vec![0; BYTES];
    let pacing_rate = info.map_or(u64::MAX, |info| info.pacing_rate).min(max_pacing_rate);
    // tcpi_pacing_rate, tcpi_max_pacing_rate
    for (at, value) in [(104, pacing_rate), (112, max_pacing_rate)] {
        out[at..at + 8].copy_from_slice(&value.to_ne_bytes());
    }
    let Some(info) = info else {
        let state = if is_listening { State::Listen } else { State::Closed };
        out[0] = state.linux_number();
        return out;
    };
    let options = [
        (info.timestamps, TIMESTAMPS),
        (info.sack, SACK),
        (info.wscale, WSCALE),
        (info.ecn, ECN),
        (info.syn_data, SYN_DATA),
    ];
    out[0] = info.state.linux_number();
    out[1] = match info.ca_state {
        CaState::Open => 0,
        CaState::Disorder => 1,
        CaState::Cwr => 2,
        CaState::Recovery => 3,
        CaState::Loss => 4,
    };
    out[2] = info.retransmits;
    out[3] = info.probes;
    out[4] = info.backoff;
    out[5] = options.iter().filter(|(on, _)| *on).fold(0, |bits, (_, bit)| bits | bit);
    out[6] = info.snd_wscale & 15 | info.rcv_wscale << 4;
    out[7] = u8::from(info.delivery_rate_app_limited) | (info.fastopen_failure as u8) << 1;
    let us = |time: Duration| u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    // From byte 8 on: tcpi_rto, tcpi_ato, tcpi_snd_mss, tcpi_rcv_mss, tcpi_unacked, tcpi_sacked, tcpi_lost,
    // tcpi_retrans, tcpi_fackets; tcpi_last_data_sent, tcpi_last_ack_sent, tcpi_last_data_recv,
    // tcpi_last_ack_recv; tcpi_pmtu, tcpi_rcv_ssthresh, tcpi_rtt, tcpi_rttvar, tcpi_snd_ssthresh,
    // tcpi_snd_cwnd, tcpi_advmss, tcpi_reordering, tcpi_rcv_rtt, tcpi_rcv_space, tcpi_total_retrans.
    let words = [
        (8, us(info.rto)),
        (12, us(info.ato)),
        (16, info.snd_mss),
        (20, info.rcv_mss),
        (24, info.unacked),
        (28, info.sacked),
        (32, info.lost),
        (36, info.retrans),
        (52, u32::try_from(info.last_data_recv.as_millis()).unwrap_or(u32::MAX)),
        (60, info.pmtu),
        (64, info.rcv_wnd),
        (68, us(info.rtt)),
        (72, us(info.rttvar)),
        (76, info.snd_ssthresh.min(0x7fff_ffff)),
        (80, info.snd_cwnd),
        (84, info.advmss),
        (88, info.reordering),
        (100, info.total_retrans),
        // tcpi_notsent_bytes, tcpi_min_rtt
        (144, info.notsent_bytes),
        (148, us(info.min_rtt)),
        // tcpi_reord_seen, tcpi_snd_wnd, tcpi_rcv_wnd
        (220, info.reord_seen),
        (228, info.snd_wnd),
        (232, info.rcv_wnd),
    ];
    for (at, value) in words {
        out[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }
    // tcpi_bytes_acked, tcpi_bytes_received, tcpi_delivery_rate
    let Transferred { acked, received } = transferred.unwrap_or_default();
    for (at, value) in [(120, acked), (128, received), (160, info.delivery_rate)] {
        out[at..at + 8].copy_from_slice(&value.to_ne_bytes());
    }
    // tcpi_busy_time, tcpi_rwnd_limited, tcpi_sndbuf_limited
    for (at, time) in [(168, info.busy_time), (176, info.rwnd_limited), (184, info.sndbuf_limited)] {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        out[at..at + 8].copy_from_slice(&us.to_ne_bytes());
    }
    out
}
