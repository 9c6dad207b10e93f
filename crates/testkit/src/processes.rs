//! Signals to processes that a test has started, and conditions that it waits for.

use std::fmt::Display;
use std::process::Command;
use std::time::{Duration, Instant};

/// Longest wait for a condition.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Interval at which a condition is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Sends a signal, given by its name without "SIG".
///
/// # Panics
/// If the signal cannot be sent, for example because the process does not exist.
#[track_caller]
pub fn signal(pid: impl Display, name: &str) {
    let status = Command::new("kill").args([format!("-{name}"), pid.to_string()]).status();
    assert!(status.expect("kill runs").success(), "{pid}");
}

/// Waits until a condition holds. `what` names the condition in the panic's message.
///
/// # Panics
/// If that takes longer than a minute.
#[track_caller]
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !holds() {
        assert!(Instant::now() < end, "{what}: not in time");
        std::thread::sleep(POLL_INTERVAL);
    }
}
