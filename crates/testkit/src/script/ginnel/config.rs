//! Translates a script's sysctls to the engine's configuration.

use crate::script::ast::Directives;
use ginnel_stack::stack::StackConfig;
use ginnel_stack::tcp::config::{
    CongestionControl, EcnMode, FASTOPEN_MASK, MtuProbing, SynCookies, TcpConfig,
};

/// Returns the configuration that corresponds to Linux's defaults with the script's sysctls applied.
///
/// # Errors
/// A message about a sysctl or value that the engine does not have.
pub fn from_directives(directives: &Directives) -> Result<StackConfig, String> {
    let mut config = StackConfig::default();
    // The neighbour entry is static, so without these packets only TCP appears on the wire.
    config.network.dad_transmits = 0;
    config.network.router_solicitations = 0;
    config.tcp.connections_max = 64;
    config.tcp.time_wait_max = 64;
    config.tcp.buffer_pool_bytes = 64 << 20;
    for (name, value) in &directives.sysctls {
        set(&mut config.tcp, name, value).map_err(|problem| format!("{name}={value}: {problem}"))?;
    }
    Ok(config)
}

/// Sysctls of the kernel without a key of the engine, with the value of the engine's behaviour. `*` stands
/// for sysctls of what the engine does not have: it never defers a segment to send a longer packet later.
pub const FIXED: [(&str, &str); 7] = [
    ("dsack", "1"),
    ("fack", "0"),
    ("recovery", "1"),
    ("pacing_ss_ratio", "200"),
    ("pacing_ca_ratio", "120"),
    ("notsent_lowat", "4294967295"),
    ("tso_win_divisor", "*"),
];

fn set(tcp: &mut TcpConfig, name: &str, value: &str) -> Result<(), String> {
    let number = || value.parse::<u32>().map_err(|e| e.to_string());
    let small = || value.parse::<u8>().map_err(|e| e.to_string());
    let bytes = || value.parse::<u16>().map_err(|e| e.to_string());
    let flag = || Ok::<_, String>(number()? != 0);
    match name.strip_prefix("net.ipv4.tcp_").unwrap_or(name) {
        "timestamps" => tcp.timestamps = flag()?,
        "sack" => tcp.sack = flag()?,
        "window_scaling" => tcp.window_scaling = flag()?,
        // Minimum, default and maximum size; the kernel uses half of a buffer for its own metadata.
        "rmem" => {
            let sizes: Vec<u32> = value
                .split_whitespace()
                .map(str::parse)
                .collect::<Result<_, _>>()
                .map_err(|_| "not three sizes")?;
            let [_, usual, largest] = sizes[..] else { return Err("not three sizes".into()) };
            tcp.recv_window_first_bytes = usual / 2;
            tcp.recv_buffer_bytes = largest;
        }
        "wmem" => {
            let largest = value.split_whitespace().nth(2).and_then(|word| word.parse().ok());
            tcp.send_buffer_bytes = largest.ok_or("not three sizes")?;
        }
        "synack_retries" => tcp.synack_retries = small()?,
        "syn_retries" => tcp.syn_retries = small()?,
        "retries2" => tcp.retries = small()?,
        "orphan_retries" => tcp.orphan_retries = small()?,
        "fin_timeout" => tcp.fin_timeout_seconds = number()?,
        "keepalive_time" => tcp.keepalive_time_seconds = number()?,
        "keepalive_intvl" => tcp.keepalive_interval_seconds = number()?,
        "keepalive_probes" => tcp.keepalive_probes = small()?,
        "challenge_ack_limit" => tcp.challenge_acks_per_second = number()?,
        "slow_start_after_idle" => tcp.slow_start_after_idle = flag()?,
        // The engine has no switch for this: it always reuses TIME_WAIT entries when timestamps prove that it
        // is safe.
        "tw_reuse" => {}
        "frto" => tcp.frto = flag()?,
        "early_retrans" => tcp.tail_loss_probes = flag()?,
        "min_tso_segs" => tcp.push_segments_min = number()?.try_into().map_err(|_| "too many segments")?,
        "rto_min_us" => tcp.rto_min_ms = number()?.div_ceil(1000),
        "reordering" => tcp.reordering_segments = number()?,
        // The kernel's slack follows from its clock granularity.
        "ginnel.reordering_slack_ms" => tcp.reordering_slack_ms = number()?,
        // The kernel ignores bits without a meaning.
        "fastopen" => tcp.fastopen = number()? & FASTOPEN_MASK,
        "fastopen_blackhole_timeout_sec" => tcp.fastopen_blackhole_timeout_seconds = number()?,
        "fastopen_key" => tcp.fastopen_key = value.into(),
        "mtu_probing" => {
            tcp.mtu_probing = match value {
                "0" => MtuProbing::Off,
                "1" => MtuProbing::BlackHole,
                "2" => MtuProbing::Always,
                _ => return Err("not a mode of the engine".into()),
            }
        }
        "base_mss" => tcp.mtu_base_segment_bytes = bytes()?,
        "mtu_probe_floor" => tcp.mtu_floor_segment_bytes = bytes()?,
        "probe_threshold" => tcp.mtu_probe_threshold_bytes = bytes()?,
        "probe_interval" => tcp.mtu_probe_interval_seconds = number()?,
        "tw_reuse_delay" => tcp.time_wait_reuse_ms = number()?,
        "retries1" => tcp.mtu_black_hole_retries = small()?,
        "congestion_control" => {
            tcp.congestion_control = CongestionControl::from_linux_name(value.as_bytes())
                .ok_or("not a congestion control of the engine")?;
        }
        "ecn" => {
            tcp.ecn = match value {
                "0" => EcnMode::Off,
                "1" => EcnMode::Active,
                "2" => EcnMode::Passive,
                _ => return Err("not a mode of the engine".into()),
            }
        }
        "syncookies" => {
            tcp.syn_cookies = match value {
                "0" => SynCookies::Off,
                "1" => SynCookies::Auto,
                "2" => SynCookies::Always,
                _ => return Err("not a mode of the engine".into()),
            }
        }
        name => match FIXED.iter().find(|(fixed, _)| *fixed == name) {
            Some((_, always)) if *always == "*" || *always == value => {}
            Some((_, always)) => return Err(format!("the engine always behaves as with {always}")),
            None => return Err("the engine has no such key".into()),
        },
    }
    Ok(())
}
