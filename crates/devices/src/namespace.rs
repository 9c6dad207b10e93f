//! Runs a test in a network namespace of its own.

use std::process::Command;

const INSIDE: &str = "GINNEL_TEST_NAMESPACE";
/// If set, a test that cannot run fails instead of being skipped.
pub(crate) const REQUIRED: &str = "GINNEL_REQUIRE_PRIVILEGED";

/// Runs `body` in a new network namespace, by running the test `name` (its full path) of this program again inside of one, which
/// vanishes with it. Where that is not possible the test is skipped and says why.
pub(crate) fn in_namespace(name: &str, body: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() {
        return body();
    }
    let Err(reason) = run_inside(name) else { return };
    assert!(std::env::var_os(REQUIRED).is_none(), "{name} cannot run: {reason}");
    eprintln!("skipped {name}: {reason}");
}

fn run_inside(name: &str) -> Result<(), String> {
    let tun = std::fs::OpenOptions::new().read(true).write(true).open("/dev/net/tun");
    tun.map_err(|e| format!("/dev/net/tun: {e}"))?;
    // Root needs no user namespace; others become root of one.
    let flags: &[&str] = if rustix::process::geteuid().is_root() {
        &["--net"]
    } else {
        &["--net", "--user", "--map-root-user"]
    };
    let allowed =
        Command::new("unshare").args(flags).arg("true").output().map_err(|e| format!("unshare: {e}"))?;
    if !allowed.status.success() {
        return Err(String::from_utf8_lossy(&allowed.stderr).trim().to_string());
    }
    let program = std::env::current_exe().map_err(|e| format!("the path of the test program: {e}"))?;
    let status = Command::new("unshare")
        .args(flags)
        .arg(program)
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(INSIDE, "1")
        .status()
        .map_err(|e| format!("unshare: {e}"))?;
    assert!(status.success(), "{name} failed in its namespace");
    Ok(())
}
