//! Parses Linux's `struct tcp_info` into fields by name.

use crate::script::assertion::Info;

/// Name, offset and size of each field. Kernels only append to the struct, so an older kernel fills a prefix.
const FIELDS: &[(&str, usize, usize)] = &[
    ("tcpi_state", 0, 1),
    ("tcpi_ca_state", 1, 1),
    ("tcpi_retransmits", 2, 1),
    ("tcpi_probes", 3, 1),
    ("tcpi_backoff", 4, 1),
    ("tcpi_options", 5, 1),
    ("tcpi_rto", 8, 4),
    ("tcpi_ato", 12, 4),
    ("tcpi_snd_mss", 16, 4),
    ("tcpi_rcv_mss", 20, 4),
    ("tcpi_unacked", 24, 4),
    ("tcpi_sacked", 28, 4),
    ("tcpi_lost", 32, 4),
    ("tcpi_retrans", 36, 4),
    ("tcpi_last_data_recv", 52, 4),
    ("tcpi_pmtu", 60, 4),
    ("tcpi_rcv_ssthresh", 64, 4),
    ("tcpi_rtt", 68, 4),
    ("tcpi_rttvar", 72, 4),
    ("tcpi_snd_ssthresh", 76, 4),
    ("tcpi_snd_cwnd", 80, 4),
    ("tcpi_advmss", 84, 4),
    ("tcpi_reordering", 88, 4),
    ("tcpi_total_retrans", 100, 4),
    ("tcpi_pacing_rate", 104, 8),
    ("tcpi_max_pacing_rate", 112, 8),
    ("tcpi_bytes_acked", 120, 8),
    ("tcpi_bytes_received", 128, 8),
    ("tcpi_segs_out", 136, 4),
    ("tcpi_segs_in", 140, 4),
    ("tcpi_notsent_bytes", 144, 4),
    ("tcpi_min_rtt", 148, 4),
    ("tcpi_data_segs_in", 152, 4),
    ("tcpi_data_segs_out", 156, 4),
    ("tcpi_delivery_rate", 160, 8),
    ("tcpi_busy_time", 168, 8),
    ("tcpi_rwnd_limited", 176, 8),
    ("tcpi_sndbuf_limited", 184, 8),
    ("tcpi_delivered", 192, 4),
    ("tcpi_delivered_ce", 196, 4),
    ("tcpi_bytes_sent", 200, 8),
    ("tcpi_bytes_retrans", 208, 8),
    ("tcpi_dsack_dups", 216, 4),
    ("tcpi_reord_seen", 220, 4),
    ("tcpi_rcv_ooopack", 224, 4),
    ("tcpi_snd_wnd", 228, 4),
    ("tcpi_rcv_wnd", 232, 4),
];

/// Offset of the byte with both window scales.
const WSCALE_OFFSET: usize = 6;
/// Offset of the byte with `tcpi_fastopen_client_fail`, in its bits 1 and 2.
const FASTOPEN_OFFSET: usize = 7;

/// Parses the fields that `bytes` contains.
pub fn parse(bytes: &[u8]) -> Info {
    let mut info = Info::new();
    for &(name, offset, size) in FIELDS {
        let Some(field) = bytes.get(offset..offset + size) else { break };
        let mut wide = [0; 8];
        wide[..size].copy_from_slice(field);
        info.insert(name, i64::from_le_bytes(wide));
    }
    if let Some(shifts) = bytes.get(WSCALE_OFFSET) {
        info.insert("tcpi_snd_wscale", (shifts & 15).into());
        info.insert("tcpi_rcv_wscale", (shifts >> 4).into());
    }
    if let Some(bits) = bytes.get(FASTOPEN_OFFSET) {
        info.insert("tcpi_fastopen_client_fail", (bits >> 1 & 3).into());
    }
    info
}
