//! How a thread that waits for the stack usually sleeps: on one descriptor of the kernel's that collects all that wakes it, by edges. So what woke it need
//! not be read, and a batch of the stack's news costs one system call here, where `poll` takes two.

use crate::descriptor::{HiddenFd, borrow};
use crate::syscall;
use libc::epoll_event;
use rustix::event::epoll;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use rustix::io::Errno;
use std::sync::LazyLock;

/// What an event is of. The kernel's parts of epoll sets have their numbers, which are higher.
const THREAD_EVENT: u64 = 0;
const STACK_EVENT: u64 = 1;
const FIRST_KERNEL_EPOLL: u64 = 2;

/// The kernel's part of an epoll set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelEpoll {
    pub fd: RawFd,
    /// No other set of the process has or had it.
    pub number: u64,
}

/// What ended a sleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WakeCause {
    /// The stack has news.
    pub stack_event: bool,
    /// Nobody holds the other end of what wakes this process.
    pub hung_up: bool,
    /// Descriptors of the kernel in the set are ready.
    pub kernel_event: bool,
}

/// What one thread at a time sleeps on.
pub(crate) struct WaitSet {
    set: HiddenFd,
    kernel_epoll: Option<KernelEpoll>,
    /// Events come that nobody asked for: of a set that is closed here and open in another process.
    pub is_stale: bool,
}

impl WaitSet {
    /// `own`: how other threads wake this one. `stack`: how the stack wakes the process.
    pub fn new(own: &HiddenFd, stack: BorrowedFd<'_>) -> Result<Self, Errno> {
        let set = HiddenFd::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        let edges = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        epoll::add(&set, own, epoll::EventData::new_u64(THREAD_EVENT), edges)?;
        epoll::add(&set, stack, epoll::EventData::new_u64(STACK_EVENT), edges)?;
        Ok(Self { set, kernel_epoll: None, is_stale: false })
    }

    /// From now on this part wakes, too, and no other. As long as something in it is ready it wakes at once.
    pub fn set_kernel_epoll(&mut self, part: Option<KernelEpoll>) -> Result<(), Errno> {
        if part == self.kernel_epoll {
            return Ok(());
        }
        if let Some(old) = self.kernel_epoll.take()
            && let Ok(fd) = borrow(old.fd)
        {
            // It may be closed, and out of the set with that.
            let _ = epoll::delete(&self.set, fd);
        }
        if let Some(new) = part {
            let data = epoll::EventData::new_u64(FIRST_KERNEL_EPOLL + new.number);
            epoll::add(&self.set, borrow(new.fd)?, data, epoll::EventFlags::IN)?;
        }
        self.kernel_epoll = part;
        Ok(())
    }

    /// The descriptor itself.
    pub fn epoll_fd(&self) -> &HiddenFd {
        &self.set
    }

    /// Its number, to be slept on while nobody has the lock.
    pub fn fd(&self) -> RawFd {
        self.set.as_fd().as_raw_fd()
    }

    /// What these events say.
    pub fn wake_cause(&mut self, events: &[epoll_event]) -> WakeCause {
        let mut woke = WakeCause::default();
        let part = self.kernel_epoll.map(|part| FIRST_KERNEL_EPOLL + part.number);
        for event in events {
            let (of, bits) = (event.u64, event.events);
            match of {
                THREAD_EVENT => {}
                STACK_EVENT => {
                    woke.stack_event = true;
                    woke.hung_up = bits & (libc::EPOLLHUP | libc::EPOLLRDHUP) as u32 != 0;
                }
                of if Some(of) == part => woke.kernel_event = true,
                _ => self.is_stale = true,
            }
        }
        woke
    }
}

/// Whether the kernel knows the call, and nobody forbids it.
pub(crate) fn is_supported() -> bool {
    static KNOWN: LazyLock<bool> = LazyLock::new(|| {
        syscall::epoll_pwait2(-1, &mut [epoll_event { events: 0, u64: 0 }], None, None, 0) == Err(Errno::BADF)
    });
    *KNOWN
}
