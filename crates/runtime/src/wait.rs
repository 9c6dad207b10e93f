//! Sleeping in the kernel until there is work, and waking a sleeping thread from another one.
#![allow(unsafe_code)] // descriptors by number (`RxQueue::wake_fd`), and a system call that rustix lacks

use crate::internal_fd::InternalFd;
use core::time::Duration;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;

/// Most file descriptors that one sleep watches.
const WAIT_FDS_MAX: usize = 64;
/// Most descriptors besides those of the mailbox and the stop flag: one for each device, two through which
/// other threads wake the shard, and one for the kernel descriptors of the application.
pub(crate) const DEVICE_FDS_MAX: usize = WAIT_FDS_MAX - 2;

/// Bytes read at a time: an eventfd returns eight, a socket as many as it has.
const DRAIN_BYTES: usize = 256;

/// An eventfd, or a socket that is used like one.
#[derive(Debug)]
pub(crate) struct EventFd(InternalFd);

impl EventFd {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self(InternalFd::in_place(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    /// Wraps a descriptor from another process, and moves it out of the range that this process's program
    /// uses.
    pub(crate) fn from_fd(fd: OwnedFd) -> Result<Self, Errno> {
        InternalFd::new(fd).map(Self)
    }

    /// Wraps a descriptor that is already out of that range.
    pub(crate) fn from_internal(fd: InternalFd) -> Self {
        Self(fd)
    }

    /// Returns the descriptor.
    pub(crate) fn internal_fd(&self) -> &InternalFd {
        &self.0
    }

    /// Makes it readable. A full counter (never in practice) is readable already.
    pub(crate) fn signal(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Makes it unreadable.
    pub(crate) fn clear(&self) {
        while rustix::io::read(&self.0, &mut [0; DRAIN_BYTES]) == Ok(DRAIN_BYTES) {}
    }

    /// Makes it unreadable, and returns whether it is a socket whose other end is closed.
    pub(crate) fn drain_and_check_hangup(&self) -> bool {
        matches!(rustix::io::read(&self.0, &mut [0; DRAIN_BYTES]), Ok(0))
    }

    /// Returns whether it is a socket whose other end is closed. It stays readable, so that no wake-up of a
    /// thread that sleeps on it is lost.
    pub(crate) fn is_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::empty())];
        let immediately = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&immediately)) == Ok(1) && fds[0].revents().contains(PollFlags::HUP)
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The descriptors that ended a sleep: a bit for each, in the order of the arguments of [`sleep`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReadyFds(u64);

impl ReadyFds {
    /// Returns whether the descriptor of this index is among them.
    pub(crate) fn contains(self, index: usize) -> bool {
        self.0 & 1 << index != 0
    }
}

/// The descriptors on which one thread sleeps repeatedly. The kernel keeps the list in an epoll instance,
/// which saves half of the cost of a sleep.
#[derive(Debug, Default)]
pub(crate) struct WaitSet {
    epoll: Option<OwnedFd>,
    watched: arrayvec::ArrayVec<RawFd, WAIT_FDS_MAX>,
    /// True if the kernel does not have the system call, or a filter forbids it.
    is_unsupported: bool,
}

impl WaitSet {
    /// Sleeps like [`sleep`]. A descriptor must not be closed before a later sleep leaves it out, or this
    /// value is dropped.
    pub(crate) fn sleep(
        &mut self,
        wake_fds: [BorrowedFd<'_>; 2],
        devices: &[RawFd],
        timeout: Option<Duration>,
    ) -> std::io::Result<ReadyFds> {
        if !self.is_unsupported {
            let list = wake_fds.iter().map(AsRawFd::as_raw_fd).chain(devices.iter().copied());
            let list: arrayvec::ArrayVec<RawFd, WAIT_FDS_MAX> = list.take(WAIT_FDS_MAX).collect();
            match self.epoll_of(&list).and_then(|set| epoll_pwait2(set, timeout)) {
                Ok(readable) => return Ok(readable),
                Err(Errno::INTR) => return Ok(ReadyFds::default()),
                Err(_) => (self.is_unsupported, self.epoll) = (true, None),
            }
        }
        sleep(wake_fds, devices, timeout)
    }

    /// Returns the epoll instance with these descriptors.
    fn epoll_of(&mut self, list: &[RawFd]) -> Result<BorrowedFd<'_>, Errno> {
        if self.epoll.is_none() || *self.watched != *list {
            let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
            for (index, &fd) in list.iter().enumerate() {
                // SAFETY: as in `sleep`.
                let fd = unsafe { BorrowedFd::borrow_raw(fd) };
                match epoll::add(&set, fd, epoll::EventData::new_u64(index as u64), epoll::EventFlags::IN) {
                    // The descriptor is in the list at an earlier index.
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(error) => return Err(error),
                }
            }
            self.watched = list.iter().copied().collect();
            self.epoll = Some(set);
        }
        Ok(self.epoll.as_ref().ok_or(Errno::BADF)?.as_fd())
    }
}

/// Events that one sleep returns; further ones end the next sleep.
const EPOLL_EVENTS_MAX: usize = 8;

/// Calls `epoll_pwait2` (since Linux 5.11), whose timeout has a resolution of nanoseconds.
fn epoll_pwait2(set: BorrowedFd<'_>, timeout: Option<Duration>) -> Result<ReadyFds, Errno> {
    let timeout = timeout.map(|t| libc::timespec {
        tv_sec: libc::time_t::try_from(t.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: t.subsec_nanos().into(),
    });
    let timeout = timeout.as_ref().map_or(core::ptr::null(), core::ptr::from_ref);
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; EPOLL_EVENTS_MAX];
    // SAFETY: the buffer and the timeout outlive the call, the length is the buffer's, and there is no signal
    // mask.
    let count = unsafe {
        libc::syscall(
            libc::SYS_epoll_pwait2,
            set.as_raw_fd(),
            events.as_mut_ptr(),
            EPOLL_EVENTS_MAX,
            timeout,
            core::ptr::null::<libc::sigset_t>(),
            0,
        )
    };
    match usize::try_from(count) {
        Ok(count) => Ok(ReadyFds(events[..count].iter().fold(0, |bits, event| bits | 1 << event.u64))),
        Err(_) => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
    }
}

/// Borrows a descriptor that an application has registered by its number. If the application has closed it
/// meanwhile, a call with it fails, or is about another file.
pub(crate) fn borrow_registered(fd: &RawFd) -> BorrowedFd<'_> {
    // SAFETY: the number is only passed to `epoll_ctl`, which touches no memory of this process. The caller
    // has checked that no later registration has the number.
    unsafe { BorrowedFd::borrow_raw(*fd) }
}

/// Sleeps until one of the descriptors is readable, a signal arrives, or `timeout` expires (`None`: never).
/// Returns the readable ones: first those of `wake_fds`, then those of `devices`, which the caller owns and
/// keeps open meanwhile.
pub(crate) fn sleep(
    wake_fds: [BorrowedFd<'_>; 2],
    devices: &[RawFd],
    timeout: Option<Duration>,
) -> std::io::Result<ReadyFds> {
    let mut watched = arrayvec::ArrayVec::<PollFd<'_>, WAIT_FDS_MAX>::new();
    for fd in wake_fds {
        watched.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
    }
    for &fd in devices.iter().take(watched.remaining_capacity()) {
        // SAFETY: the caller owns the device for the duration of this call, and a device keeps its descriptor
        // open as long as it lives. At worst a wrong descriptor is polled, which touches no memory.
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
            Ok(ReadyFds(readable.fold(0, |bits, (index, _)| bits | 1 << index)))
        }
        Err(Errno::INTR) => Ok(ReadyFds::default()),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::{EventFd, ReadyFds, WaitSet, sleep};
    use core::time::Duration;
    use std::os::fd::AsRawFd;

    #[test]
    fn signal_before_the_sleep_is_not_lost() {
        let (a, b) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        b.signal();
        let readable = sleep([a.as_fd(), b.as_fd()], &[], None).unwrap();
        assert!(!readable.contains(0) && readable.contains(1));
    }

    #[test]
    fn device_descriptor_ends_the_sleep() {
        let (a, b) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        let device = EventFd::new().unwrap();
        device.signal();
        let readable = sleep([a.as_fd(), b.as_fd()], &[device.as_fd().as_raw_fd()], None).unwrap();
        assert!(readable.contains(2) && !readable.contains(0));
    }

    #[test]
    fn timeout_ends_sleep_and_cleared_signal_does_not() {
        let (a, b) = (EventFd::new().unwrap(), EventFd::new().unwrap());
        b.signal();
        b.clear();
        let readable = sleep([a.as_fd(), b.as_fd()], &[], Some(Duration::from_millis(1))).unwrap();
        assert_eq!(readable, ReadyFds::default());
    }

    #[test]
    fn hang_up_is_found_without_reading() {
        let (own, other) = std::os::unix::net::UnixStream::pair().unwrap();
        let [own, other] = [own, other].map(|end| EventFd::from_fd(end.into()).unwrap());
        let is_readable =
            || sleep([own.as_fd(), own.as_fd()], &[], Some(Duration::ZERO)).unwrap().contains(0);
        assert!(!own.is_hung_up() && !is_readable());
        other.signal();
        assert!(!own.is_hung_up() && is_readable());
        drop(other);
        assert!(own.is_hung_up() && is_readable());
        assert!(!EventFd::new().unwrap().is_hung_up());
    }

    #[test]
    fn epoll_and_poll_report_the_same_descriptors() {
        let fds: Vec<EventFd> = (0..5).map(|_| EventFd::new().unwrap()).collect();
        let raw = |of: &[usize]| of.iter().map(|&n| fds[n].as_fd().as_raw_fd()).collect::<Vec<_>>();
        let mut watch = WaitSet::default();
        // The same list twice, another one, a shorter one, one with a descriptor at two indices, and the
        // first one again.
        for (wake_fds, devices) in [
            ([0, 1], vec![2]),
            ([0, 1], vec![2]),
            ([0, 1], vec![3, 4]),
            ([0, 1], vec![]),
            ([0, 0], vec![2]),
            ([0, 1], vec![2]),
        ] {
            for index in 0..fds.len() {
                fds[index].signal();
                let (wake_fds, devices) = (wake_fds.map(|n| fds[n].as_fd()), raw(&devices));
                let from_set = watch.sleep(wake_fds, &devices, Some(Duration::ZERO)).unwrap();
                let from_poll = sleep(wake_fds, &devices, Some(Duration::ZERO)).unwrap();
                // A descriptor at two indices is reported at the first one.
                let first = if wake_fds[0].as_raw_fd() == wake_fds[1].as_raw_fd() {
                    from_poll.0 & !2
                } else {
                    from_poll.0
                };
                assert_eq!(from_set, ReadyFds(first));
                fds[index].clear();
            }
        }
        let started = std::time::Instant::now();
        let idle =
            watch.sleep([fds[0].as_fd(), fds[1].as_fd()], &[], Some(Duration::from_micros(300))).unwrap();
        assert_eq!(idle, ReadyFds::default());
        assert!(started.elapsed() >= Duration::from_micros(300));
    }
}
