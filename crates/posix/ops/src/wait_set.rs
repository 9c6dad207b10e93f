//! The epoll instance on which the leader, the thread that waits for all (`sleep.rs`), normally sleeps. It
//! contains every descriptor that wakes the thread. Most are edge-triggered, so wake-ups need not be read: a
//! batch of the stack's events costs one system call, where `poll` takes two.

use crate::descriptor::{HiddenFd, borrow};
use crate::syscall;
use libc::epoll_event;
use rustix::event::epoll;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use rustix::io::Errno;
use std::sync::LazyLock;

/// The sources of an event, in its data. The kernel's instances of epoll sets have numbers from
/// `FIRST_KERNEL_EPOLL` on.
const THREAD_EVENT: u64 = 0;
const STACK_EVENT: u64 = 1;
const FIRST_KERNEL_EPOLL: u64 = 2;

/// The kernel's epoll instance that has the kernel descriptors of one of the program's epoll sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelEpoll {
    pub fd: RawFd,
    /// Unique among all sets that the process has or had.
    pub number: u64,
}

/// Events that ended a sleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WakeCause {
    /// True if the stack has events.
    pub stack_event: bool,
    /// True if the other end of the descriptor that wakes the process is closed.
    pub hung_up: bool,
    /// True if kernel descriptors in the program's epoll set are ready.
    pub kernel_event: bool,
}

/// The epoll instance on which a leader sleeps.
pub(crate) struct WaitSet {
    set: HiddenFd,
    kernel_epoll: Option<KernelEpoll>,
    /// True if a new set must replace this one: it reports events of an epoll set that is closed here but
    /// open in another process, or another descriptor wakes the process now.
    pub is_stale: bool,
}

impl WaitSet {
    /// Creates a wait set. `thread_event` is the eventfd by which other threads wake this one; the stack
    /// wakes the process by `wake_fd`.
    ///
    /// # Errors
    /// The process has no descriptor left, or the kernel no memory.
    pub fn new(thread_event: &HiddenFd, wake_fd: BorrowedFd<'_>) -> Result<Self, Errno> {
        let set = HiddenFd::new(epoll::create(epoll::CreateFlags::CLOEXEC)?)?;
        let edges = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        epoll::add(&set, thread_event, epoll::EventData::new_u64(THREAD_EVENT), edges)?;
        epoll::add(&set, wake_fd, epoll::EventData::new_u64(STACK_EVENT), edges)?;
        Ok(Self { set, kernel_epoll: None, is_stale: false })
    }

    /// Replaces the kernel's epoll instance that also wakes the thread. It is level-triggered.
    pub fn set_kernel_epoll(&mut self, kernel_epoll: Option<KernelEpoll>) -> Result<(), Errno> {
        if kernel_epoll == self.kernel_epoll {
            return Ok(());
        }
        if let Some(old) = self.kernel_epoll.take()
            && let Ok(fd) = borrow(old.fd)
        {
            // The descriptor may be closed, which has removed it from the instance.
            let _ = epoll::delete(&self.set, fd);
        }
        if let Some(new) = kernel_epoll {
            let data = epoll::EventData::new_u64(FIRST_KERNEL_EPOLL + new.number);
            epoll::add(&self.set, borrow(new.fd)?, data, epoll::EventFlags::IN)?;
        }
        self.kernel_epoll = kernel_epoll;
        Ok(())
    }

    /// Returns the descriptor of the epoll instance.
    pub fn epoll_fd(&self) -> &HiddenFd {
        &self.set
    }

    /// Returns the number of the descriptor, to sleep on while the lock is released.
    pub fn fd(&self) -> RawFd {
        self.set.as_fd().as_raw_fd()
    }

    /// Returns the sources of these events. An event of an unknown source makes the wait set stale.
    pub fn wake_cause(&mut self, events: &[epoll_event]) -> WakeCause {
        let mut cause = WakeCause::default();
        let kernel_epoll = self.kernel_epoll.map(|kernel_epoll| FIRST_KERNEL_EPOLL + kernel_epoll.number);
        for event in events {
            let (source, bits) = (event.u64, event.events);
            match source {
                THREAD_EVENT => {}
                STACK_EVENT => {
                    cause.stack_event = true;
                    cause.hung_up = bits & (libc::EPOLLHUP | libc::EPOLLRDHUP) as u32 != 0;
                }
                source if Some(source) == kernel_epoll => cause.kernel_event = true,
                _ => self.is_stale = true,
            }
        }
        cause
    }
}

/// Returns whether the kernel has `epoll_pwait2`, and no seccomp filter forbids it.
pub(crate) fn is_supported() -> bool {
    static KNOWN: LazyLock<bool> = LazyLock::new(|| {
        syscall::epoll_pwait2(-1, &mut [epoll_event { events: 0, u64: 0 }], None, None, 0) == Err(Errno::BADF)
    });
    *KNOWN
}
