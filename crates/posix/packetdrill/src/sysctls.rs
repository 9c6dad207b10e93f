//! Linux's TCP sysctls, with which packetdrill's scripts state what they test, as keys of the stack's
//! configuration.

use ginnel::config::TcpConfig;
use ginnel_stack::tcp::config::{CongestionControl, EcnMode, FASTOPEN_MASK, MtuProbing, SynCookies};
use std::path::Path;

/// Directory in which the kernel shows the sysctls.
pub const PROC_DIR: &str = "/proc/sys/net/ipv4";

/// Settings that result from sysctls.
#[derive(Clone, Debug, PartialEq)]
pub struct StackSettings {
    /// Configuration of the stack.
    pub tcp: TcpConfig,
    /// Initial size of a send buffer in bytes.
    pub send_buffer_first: u32,
}

/// Sets the configuration key that corresponds to a sysctl; `name` is that of its file, for example
/// `tcp_sack`. Returns `Ok(false)` if no key corresponds to it.
///
/// # Errors
/// The stack does not support the value.
pub fn set_sysctl(settings: &mut StackSettings, name: &str, value: &str) -> Result<bool, String> {
    let StackSettings { tcp, send_buffer_first } = settings;
    let words: Vec<&str> = value.split_whitespace().collect();
    let first = words.first().copied().unwrap_or_default();
    fn parse<T: core::str::FromStr>(word: &str) -> Result<T, String> {
        word.parse().map_err(|_| format!("{word:?} is not a number in range"))
    }
    let number = || parse::<u32>(first);
    let byte = || parse::<u8>(first);
    let short = || parse::<u16>(first);
    let flag = || number().map(|number| number != 0);
    // `tcp_rmem` and `tcp_wmem` have a minimum, a default and a maximum. The minimum is not used.
    let default = || parse::<u32>(words.get(1).copied().unwrap_or_default());
    let largest = || parse::<u32>(words.get(2).copied().unwrap_or_default());
    let unsupported = || format!("the stack does not support {value:?}");
    match name {
        "tcp_sack" => tcp.sack = flag()?,
        "tcp_timestamps" => tcp.timestamps = flag()?,
        "tcp_window_scaling" => tcp.window_scaling = flag()?,
        "tcp_syn_retries" => tcp.syn_retries = byte()?,
        "tcp_synack_retries" => tcp.synack_retries = byte()?,
        "tcp_retries1" => tcp.mtu_black_hole_retries = byte()?,
        "tcp_retries2" => tcp.retries = byte()?,
        // 0 means 8 in the kernel.
        "tcp_orphan_retries" => tcp.orphan_retries = Some(byte()?).filter(|n| *n > 0).unwrap_or(8),
        "tcp_fin_timeout" => tcp.fin_timeout_seconds = number()?,
        "tcp_keepalive_time" => tcp.keepalive_time_seconds = number()?,
        "tcp_keepalive_intvl" => tcp.keepalive_interval_seconds = number()?,
        "tcp_keepalive_probes" => tcp.keepalive_probes = byte()?,
        // The maximum means no limit, which is the default of newer kernels.
        "tcp_challenge_ack_limit" => {
            tcp.challenge_acks_per_second = number()?.clamp(1, i32::MAX.unsigned_abs())
        }
        "tcp_invalid_ratelimit" => tcp.invalid_ack_interval_ms = number()?,
        "tcp_slow_start_after_idle" => tcp.slow_start_after_idle = flag()?,
        "tcp_frto" => tcp.frto = flag()?,
        // Other values send no probe in the kernel (`tcp_schedule_loss_probe`).
        "tcp_early_retrans" => tcp.tail_loss_probes = matches!(number()?, 3 | 4),
        "tcp_min_tso_segs" => tcp.push_segments_min = short()?,
        "tcp_reordering" => tcp.reordering_segments = number()?,
        "tcp_base_mss" => tcp.mtu_base_segment_bytes = short()?,
        "tcp_mtu_probe_floor" => tcp.mtu_floor_segment_bytes = short()?,
        "tcp_probe_threshold" => tcp.mtu_probe_threshold_bytes = short()?,
        "tcp_probe_interval" => tcp.mtu_probe_interval_seconds = number()?,
        "tcp_tw_reuse_delay" => tcp.time_wait_reuse_ms = number()?,
        "tcp_rto_min_us" => tcp.rto_min_ms = number()?.div_ceil(1000),
        "tcp_rto_max_ms" => tcp.rto_max_seconds = number()? / 1000,
        "tcp_max_syn_backlog" => tcp.half_open_max = number()?,
        // The maximum sizes apply to all sockets without their own sizes. The kernel uses half of a buffer
        // for its overhead (`tcp_win_from_space`).
        "tcp_rmem" => {
            tcp.recv_buffer_bytes = largest()?;
            tcp.recv_window_first_bytes = default()? / 2;
        }
        "tcp_wmem" => {
            tcp.send_buffer_bytes = largest()?;
            *send_buffer_first = default()?;
        }
        "ip_default_ttl" => tcp.hop_limit = byte()?,
        "ip_local_port_range" => {
            tcp.local_port_first = short()?;
            tcp.local_port_last = parse(words.get(1).copied().unwrap_or_default())?;
        }
        // The kernel ignores bits without a meaning, which the settings of its own scripts have.
        "tcp_fastopen" => tcp.fastopen = number()? & FASTOPEN_MASK,
        "tcp_fastopen_blackhole_timeout_sec" => tcp.fastopen_blackhole_timeout_seconds = number()?,
        // The kernel shows zeros until it has a key.
        "tcp_fastopen_key" if first == "00000000-00000000-00000000-00000000" => {}
        "tcp_fastopen_key" => tcp.fastopen_key = first.into(),
        "tcp_congestion_control" => {
            tcp.congestion_control =
                CongestionControl::from_linux_name(first.as_bytes()).ok_or_else(unsupported)?;
        }
        "tcp_ecn" => {
            tcp.ecn = match first {
                "0" => EcnMode::Off,
                "1" => EcnMode::Active,
                "2" => EcnMode::Passive,
                _ => return Err(unsupported()),
            }
        }
        "tcp_syncookies" => {
            tcp.syn_cookies = match first {
                "0" => SynCookies::Off,
                "1" => SynCookies::Auto,
                "2" => SynCookies::Always,
                _ => return Err(unsupported()),
            }
        }
        "tcp_mtu_probing" => {
            tcp.mtu_probing = match first {
                "0" => MtuProbing::Off,
                "1" => MtuProbing::BlackHole,
                "2" => MtuProbing::Always,
                _ => return Err(unsupported()),
            }
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// Reads all sysctls in a directory. Sysctls and values that the stack does not support leave the settings
/// unchanged; returns the unsupported values, with the reason.
pub fn read_all(folder: &Path, settings: &mut StackSettings) -> Vec<String> {
    let mut unsupported = Vec::new();
    let Ok(entries) = std::fs::read_dir(folder) else { return unsupported };
    let mut names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    for name in names {
        // Some files are not readable by all users.
        let Ok(value) = std::fs::read_to_string(folder.join(&name)) else { continue };
        let mut changed = settings.clone();
        let value = value.trim();
        let result = set_sysctl(&mut changed, &name, value).and_then(|known| match known {
            true => changed.tcp.validate().map_err(|error| error.to_string()),
            false => Ok(()),
        });
        match result {
            Ok(()) => *settings = changed,
            Err(problem) => unsupported.push(format!("{name}={}: {problem}", value)),
        }
    }
    unsupported
}

#[cfg(test)]
mod tests {
    use super::*;

    fn defaults() -> StackSettings {
        StackSettings { tcp: TcpConfig::default(), send_buffer_first: 16_384 }
    }

    #[test]
    fn sysctls_become_settings() {
        let folder = tempfile::tempdir().unwrap();
        for (name, value) in [
            ("tcp_sack", "0\n"),
            ("tcp_rmem", "4096\t540000\t500000\n"),
            ("tcp_wmem", "4096\t50000\t4194304\n"),
            ("tcp_congestion_control", "reno\n"),
            ("tcp_orphan_retries", "0\n"),
            ("ip_local_port_range", "1000\t2000\n"),
            ("tcp_tw_reuse_delay", "1\n"),
            ("tcp_ecn", "7\n"),
            ("tcp_fastopen", "459779\n"),
            ("tcp_syn_retries", "255\n"),
            ("tcp_something_new", "1\n"),
        ] {
            std::fs::write(folder.path().join(name), value).unwrap();
        }
        let mut settings = defaults();
        let unsupported = read_all(folder.path(), &mut settings);
        let StackSettings { tcp, send_buffer_first } = settings;
        assert_eq!((send_buffer_first, tcp.send_buffer_bytes), (50_000, 4_194_304));
        assert_eq!((tcp.sack, tcp.recv_buffer_bytes, tcp.orphan_retries), (false, 500_000, 8));
        assert_eq!(tcp.recv_window_first_bytes, 270_000);
        assert_eq!((tcp.local_port_first, tcp.local_port_last), (1000, 2000));
        assert_eq!(tcp.time_wait_reuse_ms, 1);
        assert_eq!(tcp.fastopen, 0x403, "bits without a meaning are ignored");
        assert_eq!(tcp.congestion_control, CongestionControl::NewReno);
        assert_eq!((tcp.ecn, tcp.syn_retries), (EcnMode::Passive, 6), "unsupported values change nothing");
        assert_eq!(unsupported.len(), 2, "{unsupported:?}");
    }

    #[test]
    fn sysctls_of_this_machine_are_readable() {
        let mut settings = defaults();
        read_all(Path::new(PROC_DIR), &mut settings);
        settings.tcp.validate().unwrap();
    }
}
