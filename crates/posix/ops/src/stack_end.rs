//! The end of the stack, as calls report it: connections are reset, listeners and UDP sockets fail with
//! `ENETDOWN`, and no call waits. A listener or UDP socket with a kernel socket behind it goes on with that.

use crate::lock::LockGuard;
use crate::process::ProcessState;
use core::time::Duration;
use ginnel::Error;
use ginnel::broker::Refusal;
use rustix::fd::{BorrowedFd, RawFd};
use rustix::fs::fstat;
use rustix::io::Errno;
use std::sync::OnceLock;
use std::time::Instant;

/// Shortest time between two calls that fail with `ENETDOWN`. Servers retry at once when `accept` fails, and
/// many write a line to their log each time.
const NETDOWN_INTERVAL: Duration = Duration::from_millis(10);

/// How long a call waits for shards that are being started again. After that calls fail.
const RESTART_TIMEOUT: Duration = Duration::from_secs(10);

/// Shortest time between two attempts to continue with shards that were started again.
const RESUME_INTERVAL: Duration = Duration::from_millis(200);

/// Line on standard error when the shards cannot be started again at once.
const OUTAGE_MESSAGE: &str = "ginnel: the stack of this program has ended and cannot be started again yet: its connections are reset, other sockets fail with ENETDOWN until it runs\n";

/// Line on standard error when the stack has ended.
const MESSAGE: &str = "ginnel: the stack of this program has ended: its connections are reset, other sockets fail with ENETDOWN\n";

/// Line on standard error when the shards were started again.
const RESTART_MESSAGE: &str = "ginnel: the stack of this program was started again: its connections are reset, its listeners serve again\n";

/// Device and inode of standard error when the program attached.
static STANDARD_ERROR: OnceLock<Option<(u64, u64)>> = OnceLock::new();

/// Returns the identity of the file that is standard error now.
fn standard_error() -> Option<(u64, u64)> {
    fstat(rustix::stdio::stderr()).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

/// Remembers the program's standard error. A daemon may close it and get another file of that number, to
/// which no message must be written.
pub(crate) fn remember_standard_error() {
    STANDARD_ERROR.get_or_init(standard_error);
}

/// Writes a line to the program's standard error if it still is the one that the program began with.
pub(crate) fn write_line(line: &str) {
    let known = STANDARD_ERROR.get().copied().flatten();
    if known.is_some() && known == standard_error() {
        let stderr: BorrowedFd<'_> = rustix::stdio::stderr();
        let _ = rustix::io::write(stderr, line.as_bytes());
    }
}

impl ProcessState {
    /// Returns the error of a call that found nothing on a listener or UDP socket: `EAGAIN`, or `ENETDOWN` if
    /// the stack is gone and no kernel socket serves the socket, too.
    pub fn wait_error(&self, kernel_fd: Option<RawFd>) -> Errno {
        if kernel_fd.is_none() && self.client.is_stack_gone() { Errno::NETDOWN } else { Errno::AGAIN }
    }

    /// Checks whether the stack is gone. A process that never sleeps learns of the end only here.
    pub fn check_stack_alive(&mut self) {
        self.client.check_stack_alive();
        self.notice_stack_end();
    }

    /// Returns whether the shards of the present channels have ended.
    pub fn have_shards_ended(&mut self) -> bool {
        // The first check may find unread wake-ups.
        self.client.check_stack_alive();
        self.client.check_stack_alive();
        self.client.is_stack_gone()
    }

    /// Returns whether the shards were started again, after a request that they could not carry out.
    pub fn has_restarted(&mut self) -> bool {
        let before = self.restarts;
        if self.have_shards_ended() {
            self.notice_stack_end();
        }
        self.restarts != before
    }

    /// If the stack was found to be gone, continues with shards that were started again. If there are none,
    /// ends all waits, once.
    pub fn notice_stack_end(&mut self) {
        if self.client.is_stack_gone() {
            self.handle_stack_end();
        }
    }

    #[cold]
    fn handle_stack_end(&mut self) {
        let is_first = !core::mem::replace(&mut self.is_end_noticed, true);
        if !is_first && self.next_resume.is_none_or(|at| Instant::now() < at) {
            return;
        }
        match self.resume(if is_first { RESTART_TIMEOUT } else { Duration::ZERO }) {
            Ok(()) => {
                self.is_end_noticed = false;
                write_line(RESTART_MESSAGE);
                return self.wake_all();
            }
            Err(error) => {
                let is_outage = matches!(error, Error::Refused(Refusal::Restarting(_)));
                self.next_resume = is_outage.then(|| Instant::now() + RESUME_INTERVAL);
                if is_first || !is_outage {
                    write_line(if is_outage { OUTAGE_MESSAGE } else { MESSAGE });
                }
            }
        }
        self.process_events();
        if is_first {
            self.wake_all();
        }
    }
}

/// Releases the lock. Then, if a call failed with `ENETDOWN`, waits until [`NETDOWN_INTERVAL`] has passed
/// since the previous failure.
pub(crate) fn pause_after_netdown(mut state: LockGuard<'_>, error: Errno) {
    if error != Errno::NETDOWN {
        return;
    }
    state.notice_stack_end();
    let now = Instant::now();
    let next = state.last_netdown.map_or(now, |last| (last + NETDOWN_INTERVAL).max(now));
    state.last_netdown = Some(next);
    drop(state);
    // Several threads that fail at a time wait in turn, but none for long.
    std::thread::sleep((next - now).min(NETDOWN_INTERVAL));
}
