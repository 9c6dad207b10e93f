//! Sleeping in the kernel until there is something to do, and waking a sleeper from another thread.
#![allow(unsafe_code)] // devices name what to sleep on by its number: `RxQueue::wake_fd`

use core::time::Duration;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;

/// Most file descriptors one sleep watches: one for each device, the mailbox and the stop flag.
pub(crate) const WATCHED_MAX: usize = 64;

/// A counter in the kernel that a thread can sleep on.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// One that another process made.
    pub(crate) fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Makes it readable. A full counter (never in practice) is readable already.
    pub(crate) fn signal(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes it unreadable again.
    pub(crate) fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    /// Makes it unreadable, too, and says whether it is a socket whose other end is gone.
    pub(crate) fn hung_up(&self) -> bool {
        matches!(rustix::io::read(&self.0, &mut [0; 8]), Ok(0))
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Sleeps until one of the descriptors is readable, a signal comes, or `timeout` is over (`None`: no limit).
/// `devices` are descriptors of devices that the caller owns and keeps open meanwhile.
pub(crate) fn sleep(
    devices: &[RawFd],
    own: [BorrowedFd<'_>; 2],
    timeout: Option<Duration>,
) -> std::io::Result<()> {
    let mut watched = arrayvec::ArrayVec::<PollFd<'_>, WATCHED_MAX>::new();
    for fd in own {
        watched.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
    }
    for &fd in devices.iter().take(watched.remaining_capacity()) {
        // SAFETY: the caller owns the device for the duration of this call, and a device keeps its descriptor open as long as
        // it lives. At worst a wrong number is polled, which touches no memory.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        watched.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
    }
    let timeout = timeout.map(|t| Timespec {
        tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: t.subsec_nanos().into(),
    });
    match poll(&mut watched, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::{EventFd, sleep};
    use core::time::Duration;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_signal_before_the_sleep_is_not_lost() {
        let (a, b) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        b.signal();
        sleep(&[], [a.as_fd(), b.as_fd()], None).unwrap();
    }

    #[test]
    fn the_descriptor_of_a_device_ends_the_sleep() {
        let (a, b) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        let device = EventFd::new().unwrap();
        device.signal();
        sleep(&[device.as_fd().as_raw_fd()], [a.as_fd(), b.as_fd()], None).unwrap();
    }

    #[test]
    fn the_timeout_ends_the_sleep_and_a_cleared_signal_does_not() {
        let (a, b) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        b.signal();
        b.clear();
        sleep(&[], [a.as_fd(), b.as_fd()], Some(Duration::from_millis(1))).unwrap();
    }
}
