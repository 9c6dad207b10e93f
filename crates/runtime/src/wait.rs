//! Sleeping in the kernel until there is something to do, and waking a sleeper from another thread.
#![allow(unsafe_code)] // devices name what to sleep on by its number: `RxQueue::wake_fd`

use crate::own_fd::OwnFd;
use core::time::Duration;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;

/// Most file descriptors one sleep watches.
const WATCHED_MAX: usize = 64;
/// Most of them that are neither the mailbox's nor the stop flag's: one for each device, and two that others ring.
pub(crate) const DEVICES_MAX: usize = WATCHED_MAX - 2;

/// Of a counter eight are read at once; of a socket as many as there are.
const UNREAD_BYTES: usize = 256;

/// A counter in the kernel that a thread can sleep on.
#[derive(Debug)]
pub(crate) struct EventFd(OwnFd);

impl EventFd {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self(OwnFd::in_place(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// One that another process made, out of the way of this one's program.
    pub(crate) fn from_fd(fd: OwnedFd) -> Self {
        Self(OwnFd::new(fd))
    }

    /// The descriptor itself.
    pub(crate) fn own(&self) -> &OwnFd {
        &self.0
    }

    /// Makes it readable. A full counter (never in practice) is readable already.
    pub(crate) fn signal(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes it unreadable again.
    pub(crate) fn clear(&self) {
        while rustix::io::read(&self.0, &mut [0; UNREAD_BYTES]) == Ok(UNREAD_BYTES) {}
    }

    /// Makes it unreadable, too, and says whether it is a socket whose other end is gone.
    pub(crate) fn hung_up(&self) -> bool {
        matches!(rustix::io::read(&self.0, &mut [0; UNREAD_BYTES]), Ok(0))
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Which of the descriptors of a sleep ended it: a bit for each, in the order of [`sleep`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Readable(u64);

impl Readable {
    /// Whether the `index`-th is.
    pub(crate) fn has(self, index: usize) -> bool {
        self.0 & 1 << index != 0
    }
}

/// Sleeps until one of the descriptors is readable, a signal comes, or `timeout` is over (`None`: no limit). Says which are: first `own`, then `devices`,
/// descriptors of devices that the caller owns and keeps open meanwhile.
pub(crate) fn sleep(
    own: [BorrowedFd<'_>; 2],
    devices: &[RawFd],
    timeout: Option<Duration>,
) -> std::io::Result<Readable> {
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
        Ok(_) => {
            let readable = watched.iter().enumerate().filter(|(_, fd)| !fd.revents().is_empty());
            Ok(Readable(readable.fold(0, |bits, (index, _)| bits | 1 << index)))
        }
        Err(Errno::INTR) => Ok(Readable::default()),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::{EventFd, Readable, sleep};
    use core::time::Duration;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_signal_before_the_sleep_is_not_lost() {
        let (a, b) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        b.signal();
        let readable = sleep([a.as_fd(), b.as_fd()], &[], None).unwrap();
        assert!(!readable.has(0) && readable.has(1));
    }

    #[test]
    fn the_descriptor_of_a_device_ends_the_sleep() {
        let (a, b) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        let device = EventFd::new().unwrap();
        device.signal();
        let readable = sleep([a.as_fd(), b.as_fd()], &[device.as_fd().as_raw_fd()], None).unwrap();
        assert!(readable.has(2) && !readable.has(0));
    }

    #[test]
    fn the_timeout_ends_the_sleep_and_a_cleared_signal_does_not() {
        let (a, b) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        b.signal();
        b.clear();
        let readable = sleep([a.as_fd(), b.as_fd()], &[], Some(Duration::from_millis(1))).unwrap();
        assert_eq!(readable, Readable::default());
    }
}
