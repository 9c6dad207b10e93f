//! Processes of the programs: their ids, children and signals.

pub use ginnel_testkit::processes::{signal, wait_until};

use ginnel_testkit::interop::ProgramFixture;
use std::process::Command;
use std::time::{Duration, Instant};

/// Repeats a signal until it has an effect: some programs lose signals before they are ready.
#[track_caller]
pub fn request_until(asked: &str, name: &str, what: &str, mut so: impl FnMut() -> bool) {
    let mut last = None;
    wait_until(what, || {
        if last.is_none_or(|at: Instant| at.elapsed() > Duration::from_secs(2)) {
            signal(asked, name);
            last = Some(Instant::now());
        }
        so()
    });
}

/// Returns the process id that a program wrote into a file.
pub fn pid(fixture: &ProgramFixture, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(fixture.folder().join(name)).ok()?;
    Some(text.trim().to_string()).filter(|pid| !pid.is_empty())
}

/// Waits for the process id: some programs begin to serve before they write it.
#[track_caller]
pub fn pid_in_time(fixture: &ProgramFixture, name: &str) -> String {
    wait_until("it says which process it is", || pid(fixture, name).is_some());
    pid(fixture, name).unwrap()
}

/// Returns the child processes of a process.
pub fn children(pid: &str) -> Vec<String> {
    let output = Command::new("pgrep").args(["-P", pid]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_string).collect()
}

/// Returns whether a process runs; a zombie does not.
pub fn is_alive(pid: &str) -> bool {
    // A zombie does nothing any more.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim().starts_with('Z'))
}
