//! The timer on which a receiving half sleeps. Drivers without an adapter have no interrupts, so a sleeping
//! shard looks at its port from time to time.

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::io;
use std::time::Duration;

/// Length of the first sleep after a frame; each further one is twice as long.
const FIRST: Duration = Duration::from_micros(50);

/// A timer that makes a descriptor readable.
#[derive(Debug)]
pub(super) struct PollTimer {
    fd: OwnedFd,
    /// Length of the next sleep, and of the longest one.
    next: Duration,
    longest: Duration,
}

impl PollTimer {
    /// Creates a timer for sleeps of at most `longest`.
    pub fn new(longest: Duration) -> io::Result<Self> {
        let fd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        Ok(Self { fd, next: FIRST.min(longest), longest })
    }

    /// Makes the next sleep a short one, because a frame arrived.
    pub fn shorten(&mut self) {
        self.next = FIRST.min(self.longest);
    }

    /// Starts the timer again: the descriptor is unreadable until the timer expires. Returns whether that
    /// worked.
    pub fn start(&mut self) -> bool {
        let it_value =
            Timespec { tv_sec: self.next.as_secs() as i64, tv_nsec: self.next.subsec_nanos().into() };
        self.next = (2 * self.next).min(self.longest);
        let setting = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value };
        timerfd_settime(&self.fd, TimerfdTimerFlags::empty(), &setting).is_ok()
    }

    /// Returns the descriptor.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns the number of the descriptor.
    pub fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn sleeps_grow_until_a_frame_arrives() {
        let mut timer = PollTimer::new(Duration::from_micros(300)).expect("a timer");
        let mut lengths = |count| -> Vec<u128> {
            let next = |_| {
                let length = timer.next.as_micros();
                assert!(timer.start());
                length
            };
            (0..count).map(next).collect()
        };
        assert_eq!(lengths(5), [50, 100, 200, 300, 300]);
        timer.shorten();
        assert_eq!(timer.next, FIRST);
        let short = PollTimer::new(Duration::from_micros(10)).expect("a timer");
        assert_eq!(short.next.as_micros(), 10);
    }
}
