//! The timer on which a receiving half sleeps. Drivers without an adapter have no interrupts, so a sleeping
//! shard looks at its port from time to time.

use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};
use std::io;
use std::time::Duration;

/// A timer that makes a descriptor readable.
#[derive(Debug)]
pub(super) struct PollTimer {
    fd: OwnedFd,
    setting: Itimerspec,
}

impl PollTimer {
    /// Creates a timer that expires after `interval`, which is less than 1,000 s.
    pub fn new(interval: Duration) -> io::Result<Self> {
        let fd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        let it_value =
            Timespec { tv_sec: interval.as_secs() as i64, tv_nsec: interval.subsec_nanos().into() };
        let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        Ok(Self { fd, setting: Itimerspec { it_interval, it_value } })
    }

    /// Starts the timer again: the descriptor is unreadable until the timer expires. Returns whether that
    /// worked.
    pub fn start(&self) -> bool {
        timerfd_settime(&self.fd, TimerfdTimerFlags::empty(), &self.setting).is_ok()
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
