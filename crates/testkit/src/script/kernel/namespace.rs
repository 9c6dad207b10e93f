//! A network namespace with one TUN device and explicit settings.

use super::sys;
use crate::script::ast::{CONGESTION_CONTROL, Directives, IpVersion};
use crate::script::wire::addresses;
use core::net::IpAddr;
use core::time::Duration;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::io;
use std::os::fd::{AsFd, OwnedFd};

const DEVICE: &str = "script0";

/// All sysctls that scripts depend on, so that the host's or distribution's settings do not matter. The
/// values are Linux's defaults, except for `tcp_no_metrics_save` (no memory of earlier runs),
/// `tcp_comp_sack_nr` (duplicate ACKs leave at once, RFC 5681 §4.2), `tcp_syn_linear_timeouts` (a SYN's
/// time-out doubles, RFC 6298 §5.5) and `icmp_ratelimit`.
const SYSCTLS: &[(&str, &str)] = &[
    ("net.ipv4.tcp_timestamps", "1"),
    ("net.ipv4.tcp_sack", "1"),
    ("net.ipv4.tcp_dsack", "1"),
    ("net.ipv4.tcp_window_scaling", "1"),
    ("net.ipv4.tcp_ecn", "2"),
    ("net.ipv4.tcp_ecn_fallback", "1"),
    ("net.ipv4.tcp_fastopen", "0"),
    ("net.ipv4.tcp_rmem", "4096 131072 6291456"),
    ("net.ipv4.tcp_wmem", "4096 16384 4194304"),
    ("net.ipv4.tcp_moderate_rcvbuf", "1"),
    ("net.ipv4.tcp_adv_win_scale", "1"),
    ("net.ipv4.tcp_shrink_window", "0"),
    ("net.ipv4.tcp_no_metrics_save", "1"),
    ("net.ipv4.tcp_comp_sack_nr", "0"),
    ("net.ipv4.tcp_recovery", "1"),
    ("net.ipv4.tcp_early_retrans", "3"),
    ("net.ipv4.tcp_frto", "2"),
    ("net.ipv4.tcp_reordering", "3"),
    ("net.ipv4.tcp_slow_start_after_idle", "1"),
    ("net.ipv4.tcp_syn_retries", "6"),
    ("net.ipv4.tcp_synack_retries", "5"),
    ("net.ipv4.tcp_syncookies", "1"),
    ("net.ipv4.tcp_max_syn_backlog", "512"),
    ("net.ipv4.tcp_abort_on_overflow", "0"),
    ("net.ipv4.tcp_fin_timeout", "60"),
    ("net.ipv4.tcp_retries1", "3"),
    ("net.ipv4.tcp_retries2", "15"),
    ("net.ipv4.tcp_orphan_retries", "0"),
    ("net.ipv4.tcp_keepalive_time", "7200"),
    ("net.ipv4.tcp_keepalive_intvl", "75"),
    ("net.ipv4.tcp_keepalive_probes", "9"),
    ("net.ipv4.tcp_tw_reuse", "2"),
    ("net.ipv4.tcp_rfc1337", "0"),
    ("net.ipv4.tcp_stdurg", "0"),
    ("net.ipv4.tcp_mtu_probing", "0"),
    ("net.ipv4.tcp_base_mss", "1024"),
    ("net.ipv4.tcp_mtu_probe_floor", "48"),
    ("net.ipv4.tcp_min_snd_mss", "48"),
    ("net.ipv4.tcp_probe_threshold", "8"),
    ("net.ipv4.tcp_probe_interval", "600"),
    ("net.ipv4.tcp_invalid_ratelimit", "500"),
    ("net.ipv4.tcp_autocorking", "1"),
    ("net.ipv4.tcp_thin_linear_timeouts", "0"),
    ("net.ipv4.ip_no_pmtu_disc", "0"),
    ("net.ipv4.ip_default_ttl", "64"),
    ("net.ipv4.ip_local_port_range", "32768 60999"),
    ("net.ipv4.icmp_ratelimit", "0"),
    ("net.core.somaxconn", "4096"),
];

/// Sysctls that older kernels lack.
const OPTIONAL_SYSCTLS: &[(&str, &str)] =
    &[("net.ipv4.tcp_syn_linear_timeouts", "0"), ("net.ipv4.tcp_rto_min_us", "200000")];

/// Sets a sysctl in the calling thread's namespace, given by its dotted name.
pub(crate) fn set_sysctl(name: &str, value: &str) -> io::Result<()> {
    // No component of a name (an interface name) contains a dot: the device's name has none.
    let path = format!("/proc/sys/{}", name.replace('.', "/"));
    std::fs::write(&path, value).map_err(|e| io::Error::new(e.kind(), format!("{path} = {value}: {e}")))
}

/// Sets all sysctls that tests depend on in the calling thread's namespace.
pub(crate) fn apply_defaults() -> io::Result<()> {
    for (name, value) in SYSCTLS {
        set_sysctl(name, value)?;
    }
    for (name, value) in OPTIONAL_SYSCTLS {
        match set_sysctl(name, value) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Ok(())
}

/// Moves the calling thread into a new namespace. Returns its TUN device, which is up and has the run's local
/// address.
pub fn create(ip: IpVersion, directives: &Directives) -> io::Result<OwnedFd> {
    sys::enter_new_network_namespace()?;
    apply_defaults()?;
    // Congestion control is set on each socket: by sysctl, a namespace may only name algorithms that the host
    // allows to everyone.
    for (name, value) in directives.sysctls.iter().filter(|(name, _)| name != CONGESTION_CONTROL) {
        set_sysctl(name, value)?;
    }
    let tun = sys::open_tun(DEVICE)?;
    let family = if ip == IpVersion::V4 { AddressFamily::INET } else { AddressFamily::INET6 };
    let control = socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    sys::set_mtu(control.as_fd(), DEVICE, directives.mtu)?;
    if ip == IpVersion::V6 {
        // Without a link-local address the kernel sends no router solicitations and no listener reports.
        set_sysctl(&format!("net.ipv6.conf.{DEVICE}.addr_gen_mode"), "1")?;
        set_sysctl(&format!("net.ipv6.conf.{DEVICE}.accept_dad"), "0")?;
    }
    match addresses(ip).0 {
        IpAddr::V4(address) => {
            sys::add_ipv4(control.as_fd(), DEVICE, address)?;
            sys::set_up(control.as_fd(), DEVICE)?;
        }
        IpAddr::V6(address) => {
            sys::set_up(control.as_fd(), DEVICE)?;
            sys::add_ipv6(control.as_fd(), DEVICE, address)?;
            wait_until_usable(address.into())?;
        }
    }
    Ok(tun)
}

/// Waits until the kernel's own thread has decided that the IPv6 address needs no duplicate address
/// detection.
fn wait_until_usable(address: IpAddr) -> io::Result<()> {
    let mut attempt = 0;
    loop {
        match std::net::UdpSocket::bind((address, 0)) {
            Ok(_) => return Ok(()),
            Err(e) if attempt == 1000 => return Err(e),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
        attempt += 1;
    }
}
