//! The end of the stack, as calls report it: connections are reset, listeners and UDP sockets fail with
//! `ENETDOWN`, and no call waits. A listener or UDP socket with a kernel socket behind it goes on with that.

use crate::fd_table::FileId;
use crate::process::ProcessState;
use crate::sleep::Timeout;
use crate::standard_error::write_line;
use core::time::Duration;
use ginnel::broker::Refusal;
use ginnel::{Error, UdpError};
use rustix::fd::RawFd;
use rustix::io::Errno;
use std::time::Instant;

/// Interval at which listeners and UDP sockets report `ENETDOWN` again. Servers retry at once when `accept`
/// fails, and many write a line to their log each time.
const NETDOWN_INTERVAL: Duration = Duration::from_secs(1);

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

/// Rounds of `ENETDOWN` on listeners and UDP sockets of a stack that is gone. As a pending error of Linux
/// (`sk_err`) it is reported by one call, and by `poll` until then. Each round makes it pending again, so
/// that a process that has ignored it does not wait forever.
#[derive(Debug, Default)]
pub(crate) struct NetdownRounds {
    /// The present round; 0 before the first.
    number: u32,
    /// When the next round begins; `None` until the end of the stack is noticed.
    next: Option<Instant>,
}

impl NetdownRounds {
    /// Begins the next round if it is due. Returns whether it was.
    fn begin_if_due(&mut self) -> bool {
        let now = Instant::now();
        let is_due = self.next.is_none_or(|next| next <= now);
        if is_due {
            self.number = self.number.wrapping_add(1);
            self.next = Some(now + NETDOWN_INTERVAL);
        }
        is_due
    }
}

impl ProcessState {
    /// Returns whether a listener or UDP socket has `ENETDOWN` to report: the stack is gone, no kernel socket
    /// serves the socket, too, and no call has reported the error in this round.
    pub fn is_netdown_pending(&mut self, file: FileId, kernel_fd: Option<RawFd>) -> bool {
        let round = self.netdown.number;
        kernel_fd.is_none()
            && self.client.is_stack_gone()
            && self.files.socket(file).is_ok_and(|socket| socket.netdown_round != round)
    }

    /// Returns the error of a call that found nothing on a listener or UDP socket: `EAGAIN`, or `ENETDOWN` if
    /// the stack is gone, no kernel socket serves the socket, too, and the error was not reported in this
    /// round. `reported_round` is the socket's round at the begin of the call, so that all threads that wait
    /// get the error.
    pub fn wait_error(&mut self, file: FileId, kernel_fd: Option<RawFd>, reported_round: u32) -> Errno {
        let round = self.netdown.number;
        if kernel_fd.is_some() || !self.client.is_stack_gone() || reported_round == round {
            return Errno::AGAIN;
        }
        if let Ok(socket) = self.files.socket(file) {
            socket.netdown_round = round;
        }
        Errno::NETDOWN
    }

    /// Returns how long the leader sleeps. If the stack is gone, it wakes for the next round of
    /// `ENETDOWN` and for the next attempt to continue.
    pub fn bounded_by_stack_end(&self, timeout: Timeout) -> Timeout {
        if !self.client.is_stack_gone() {
            return timeout;
        }
        let next = self.netdown.next.into_iter().chain(self.next_resume).min().unwrap_or_else(Instant::now);
        match timeout {
            Timeout::Zero => Timeout::Zero,
            Timeout::Deadline(end) => Timeout::Deadline(end.min(next)),
            Timeout::Infinite => Timeout::Deadline(next),
        }
    }

    /// Checks whether the stack is gone. A process that never sleeps learns of the end only here.
    pub fn check_stack_alive(&mut self) {
        self.client.check_stack_alive();
        self.notice_stack_end();
    }

    /// Returns whether the shards of the present channels have ended.
    pub fn have_shards_ended(&mut self) -> bool {
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

    /// Makes a request of the stack. If the shards end before they have answered, waits until they were
    /// started again, and makes the request once more. A socket that the former shards had opened for it is
    /// lost with them, or was opened again.
    ///
    /// # Errors
    /// The errors of the request; `ENETDOWN` if the stack is gone.
    pub fn request_over_restarts<T>(
        &mut self,
        mut request: impl FnMut(&mut Self) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        loop {
            let before = self.restarts;
            let result = request(self);
            if !self.is_request_lost(before, &result) {
                return result;
            }
        }
    }

    /// Returns whether a request must be made once more, because the shards ended before they answered, and
    /// were started again. `restarts` is the number of restarts before the request.
    pub fn is_request_lost<T>(&mut self, restarts: u32, result: &Result<T, Errno>) -> bool {
        // The request itself may have noticed the restart.
        matches!(result, Err(Errno::NETDOWN)) && (self.restarts != restarts || self.has_restarted())
    }

    /// Returns the error of a request about a UDP socket: `ENETDOWN` if the shards have ended.
    pub fn udp_request_error(&mut self, error: UdpError) -> Errno {
        let has_ended = error == UdpError::Stale && self.have_shards_ended();
        if has_ended { Errno::NETDOWN } else { ginnel::errno::udp(error) }
    }

    /// Notices the end of the stack if it was announced. For calls that may never sleep, and that do not fail
    /// if the stack is gone: they would otherwise go on with sockets that nobody serves.
    #[inline]
    pub fn notice_announced_end(&mut self) {
        let _ = self.has_stack_ended();
    }

    /// Notices the end of the stack if it was announced. Returns whether the stack is gone then: no shards
    /// were started again.
    #[inline]
    pub fn has_stack_ended(&mut self) -> bool {
        self.client.is_stack_said_to_be_gone() && self.handle_announced_end()
    }

    #[cold]
    fn handle_announced_end(&mut self) -> bool {
        if self.client.is_stack_gone() || self.have_shards_ended() {
            self.notice_stack_end();
        }
        self.client.is_stack_gone()
    }

    /// If the stack was found to be gone, continues with shards that were started again. If there are none,
    /// begins the next round of `ENETDOWN` if that is due.
    pub fn notice_stack_end(&mut self) {
        if self.client.is_stack_gone() {
            self.handle_stack_end();
        }
    }

    #[cold]
    fn handle_stack_end(&mut self) {
        let is_first = !core::mem::replace(&mut self.is_end_noticed, true);
        if is_first || self.next_resume.is_some_and(|at| at <= Instant::now()) {
            match self.resume(if is_first { RESTART_TIMEOUT } else { Duration::ZERO }) {
                Ok(()) => {
                    self.is_end_noticed = false;
                    (self.next_resume, self.netdown.next) = (None, None);
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
        }
        if self.netdown.begin_if_due() {
            self.wake_all();
            // Of the threads that wait exclusively, too, each learns of the end.
            self.waiters.wake_all();
        }
    }
}
