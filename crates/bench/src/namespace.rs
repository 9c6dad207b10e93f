//! A network namespace of our own, for benches with the Linux kernel at the other end of a TAP device: the program runs itself again
//! inside of one, which vanishes with it.

use crate::benches::ALL;
use crate::harness::Failure;
use std::fs;
use std::process::Command;

/// Set in the process inside.
const INSIDE: &str = "GINNEL_BENCH_NAMESPACE";

/// Settings of the kernel's end, so that a distribution's choice does not matter: no memory of earlier connections, and buffers for a
/// gigabit at 100 ms. (Congestion control is set on each socket: a namespace may not choose it.)
const SYSCTLS: &[(&str, &str)] = &[
    ("net/ipv4/tcp_no_metrics_save", "1"),
    ("net/ipv4/tcp_wmem", "4096 16384 33554432"),
    ("net/ipv4/tcp_rmem", "4096 131072 33554432"),
    ("net/ipv4/ip_local_port_range", "1024 65535"),
    ("net/ipv4/tcp_max_tw_buckets", "1000000"),
];

/// Whether this process is inside.
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Runs this program again with the same options for one bench, inside of a namespace.
pub fn run(bench: &str) -> Result<(), Failure> {
    let skipped = |why: String| Failure::Skipped(format!("needs a network namespace and TAP: {why}"));
    let tun = fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun");
    tun.map_err(|e| skipped(format!("/dev/net/tun: {e}")))?;
    // Root needs no user namespace; others become root of one.
    let mut flags = vec!["--net", "--mount"];
    if !rustix::process::geteuid().is_root() {
        flags.extend(["--user", "--map-root-user"]);
    }
    let allowed = Command::new("unshare").args(&flags).arg("true").output();
    let allowed = allowed.map_err(|e| skipped(format!("unshare: {e}")))?;
    if !allowed.status.success() {
        return Err(skipped(String::from_utf8_lossy(&allowed.stderr).trim().into()));
    }
    let options = std::env::args().skip(1).filter(|word| ALL.iter().all(|b| b.name != word));
    let status = Command::new("unshare")
        .args(&flags)
        .arg(std::env::current_exe()?)
        .arg(bench)
        .args(options)
        .env(INSIDE, "1")
        .status()?;
    if status.success() { Ok(()) } else { Err(Failure::Failed("inside of the namespace".into())) }
}

/// Prepares the namespace. To be called inside of it, before the first connection.
pub fn prepare() -> Result<(), Failure> {
    for (name, value) in SYSCTLS {
        let path = format!("/proc/sys/{name}");
        fs::write(&path, value).map_err(|e| Failure::Skipped(format!("{path} = {value}: {e}")))?;
    }
    Ok(())
}

/// Lets the kernel do its part of receiving from `interface` on the CPU of the client, and not on ours, where the frames are written.
/// Returns whether it could be arranged.
pub fn receive_on(interface: &str, cpu: usize) -> bool {
    // The namespace's own devices are only to be seen in a view of /sys that was made inside.
    let rps = format!("/sys/class/net/{interface}/queues/rx-0/rps_cpus");
    if fs::metadata(&rps).is_err() {
        _ = Command::new("mount").args(["-t", "sysfs", "sysfs", "/sys"]).status();
    }
    fs::write(rps, format!("{:x}", 1u64 << cpu)).is_ok()
}
