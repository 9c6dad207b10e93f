//! Events about processes that attach, end and are refused: at most [`EVENTS_MAX`] in [`WINDOW`], because a
//! server may fork a process for each connection.

use super::Refusal;
use std::time::{Duration, Instant};

/// Events of one window; the next event after it tells how many were left out.
// limit: entries about processes in 10 s
const EVENTS_MAX: u32 = 20;
/// Length of a window.
const WINDOW: Duration = Duration::from_secs(10);

/// Counts the events of the current window.
#[derive(Debug)]
pub(super) struct ProcessLog {
    window_start: Instant,
    events: u32,
    omitted: u64,
}

impl ProcessLog {
    pub fn new() -> Self {
        Self { window_start: Instant::now(), events: 0, omitted: 0 }
    }

    /// Returns whether an event at `now` may be written.
    fn admit(&mut self, now: Instant) -> bool {
        if now - self.window_start >= WINDOW {
            self.report_omitted();
            (self.window_start, self.events) = (now, 0);
        }
        let is_admitted = self.events < EVENTS_MAX;
        if is_admitted {
            self.events += 1;
        } else {
            self.omitted += 1;
        }
        is_admitted
    }

    /// Writes how many events were left out.
    fn report_omitted(&mut self) {
        let omitted = core::mem::take(&mut self.omitted);
        if omitted > 0 {
            tracing::info!(
                "{omitted} further attachments, ends and refusals of processes are not in the log (at most {EVENTS_MAX} in {WINDOW:?} are)"
            );
        }
    }

    /// Writes that a process has attached. Returns its name, for [`ProcessLog::ended`], if it was written.
    pub fn attached(&mut self, pid: u32, uid: u32, is_forked: bool) -> Option<Box<str>> {
        // The stack's own process attaches to find out whether its addresses are ready.
        if pid == std::process::id() || !self.admit(Instant::now()) {
            return None;
        }
        let name = command_of(pid);
        let way = if is_forked { "was forked" } else { "attached" };
        tracing::info!("{name:?} (process {pid}, user {uid}) {way}");
        Some(name)
    }

    /// Writes that a process whose attachment was written has ended or closed its connection.
    pub fn ended(&mut self, name: &str, pid: u32) {
        if self.admit(Instant::now()) {
            tracing::info!("{name:?} (process {pid}) ended");
        }
    }

    /// Writes that a process was refused. Process 0 is an unknown one.
    pub fn refused(&mut self, pid: u32, uid: u32, refusal: Refusal) {
        if self.admit(Instant::now()) {
            match pid {
                0 => tracing::warn!("a process of user {uid} was refused: {refusal}"),
                pid => {
                    tracing::warn!("{:?} (process {pid}, user {uid}) was refused: {refusal}", command_of(pid))
                }
            }
        }
    }
}

impl Drop for ProcessLog {
    fn drop(&mut self) {
        self.report_omitted();
    }
}

/// Returns the name of the program that a process runs, or "?" if the process is gone or in another PID
/// namespace.
fn command_of(pid: u32) -> Box<str> {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
    name.as_deref().map_or("?", str::trim_end).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    // limit: entries about processes in 10 s
    #[test]
    fn events_of_a_window_are_limited() {
        let mut log = ProcessLog::new();
        let start = log.window_start;
        let admitted = |log: &mut ProcessLog, seconds| log.admit(start + Duration::from_secs(seconds));
        assert_eq!((0..100).filter(|_| admitted(&mut log, 9)).count(), EVENTS_MAX as usize);
        assert_eq!(log.omitted, 100 - u64::from(EVENTS_MAX));
        assert!(admitted(&mut log, 10));
        assert_eq!((log.events, log.omitted), (1, 0));
    }
}
