//! A private network namespace, in which the program executes itself. The namespace ends with that process.

use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus};

/// An environment variable that is set in the process inside of the namespace, to the process id of the
/// process that has created the namespace.
const INSIDE: &str = "GINNEL_INSIDE_NAMESPACE";

/// Settings of the kernel's end, so that results do not depend on the distribution: no cached metrics of
/// earlier connections, and buffers for 1 Gbit/s at 100 ms. Congestion control is set on each socket or
/// route, because the default of a namespace can only be an algorithm that the host does not restrict.
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

/// Has the kernel kill this process when the process that started it by [`run`] ends.
///
/// # Errors
/// If that process has ended already, or the kernel does not permit it.
pub fn end_with_parent() -> Result<(), String> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|e| format!("signal at the parent's death: {e}"))?;
    // From now on the signal arrives; it did not if the parent has died before.
    let parent = getppid().map(|pid| pid.as_raw_pid().to_string());
    let expected = std::env::var(INSIDE).ok();
    if parent == expected { Ok(()) } else { Err("the process that started this one has ended".into()) }
}

/// Returns the command that runs another one inside of a new namespace.
fn unshare() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount"]);
    // Root needs no user namespace; other users become root of one.
    if !rustix::process::geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.arg("--");
    command
}

/// Checks that a command, such as `true`, succeeds inside of a new namespace.
///
/// # Errors
/// The reason why this machine does not permit it.
pub fn check(command: &[&str]) -> Result<(), String> {
    let output = unshare().args(command).output().map_err(|e| format!("unshare: {e}"))?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).trim().into()) }
}

/// Returns the command that runs this program with these arguments inside of a new namespace.
fn this_program_inside<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Result<Command, String> {
    let program = std::env::current_exe().map_err(|e| format!("cannot find this program: {e}"))?;
    let mut command = unshare();
    command.arg(program).args(arguments).env(INSIDE, std::process::id().to_string());
    Ok(command)
}

/// Runs this program with these arguments inside of a new namespace.
///
/// # Errors
/// The reason why this machine does not permit it.
pub fn run<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Result<ExitStatus, String> {
    check(&["true"])?;
    this_program_inside(arguments)?.status().map_err(|e| format!("unshare: {e}"))
}

/// Executes this program with these arguments inside of a new namespace in place of this process, so that
/// signals reach it there. No destructor runs. Returns only after a failure, with its reason; [`check`] tells
/// beforehand whether this machine permits a namespace.
pub fn enter<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> String {
    match this_program_inside(arguments) {
        Ok(mut command) => format!("unshare: {}", command.exec()),
        Err(reason) => reason,
    }
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
