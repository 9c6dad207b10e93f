//! A private network namespace: the program executes itself in one, which ends with it.

use std::fs;
use std::process::{Command, ExitStatus};

/// An environment variable that is set in the process inside of the namespace.
const INSIDE: &str = "GINNEL_INSIDE_NAMESPACE";

/// Settings of the kernel's end, so that results do not depend on the distribution: no cached metrics of
/// earlier connections, and buffers for 1 Gbit/s at 100 ms. Congestion control is set on each socket or
/// route, because it cannot be chosen for a namespace.
const SYSCTLS: &[(&str, &str)] = &[
    ("net/ipv4/tcp_no_metrics_save", "1"),
    ("net/ipv4/tcp_wmem", "4096 16384 33554432"),
    ("net/ipv4/tcp_rmem", "4096 131072 33554432"),
    ("net/ipv4/ip_local_port_range", "1024 65535"),
    ("net/ipv4/tcp_max_tw_buckets", "1000000"),
];

/// Returns whether this process runs inside of the namespace.
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Runs this program with these arguments inside of a new namespace.
///
/// # Errors
/// The reason why this machine does not permit it.
pub fn run<A: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = A>) -> Result<ExitStatus, String> {
    // Root needs no user namespace; other users become root of one.
    let mut flags = vec!["--net", "--mount"];
    if !rustix::process::geteuid().is_root() {
        flags.extend(["--user", "--map-root-user"]);
    }
    let allowed = Command::new("unshare").args(&flags).arg("true").output();
    let allowed = allowed.map_err(|e| format!("unshare: {e}"))?;
    if !allowed.status.success() {
        return Err(String::from_utf8_lossy(&allowed.stderr).trim().into());
    }
    let program = std::env::current_exe().map_err(|e| format!("cannot find this program: {e}"))?;
    let mut command = Command::new("unshare");
    command.args(&flags).arg("--").arg(program).args(arguments).env(INSIDE, "1");
    command.status().map_err(|e| format!("unshare: {e}"))
}

/// Prepares the namespace. It must be called inside of the namespace, before the first connection.
///
/// # Errors
/// If the kernel does not permit a setting.
pub fn prepare() -> Result<(), String> {
    for (name, value) in SYSCTLS {
        let path = format!("/proc/sys/{name}");
        fs::write(&path, value).map_err(|e| format!("{path} = {value}: {e}"))?;
    }
    Ok(())
}
