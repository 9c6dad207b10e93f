//! Isolation of a child that a handler forked in the middle of a call. When the handler returns, that call
//! continues in the child, too: nothing that it does may reach the parent, the stack or other processes. It
//! ends as if the stack were gone, and does not wait.
//!
//! The child isolates itself in the handler, where it can neither take locks nor allocate memory. So a list
//! of what the process shares is kept ready, which is replaced as a whole.
#![allow(unsafe_code)] // a list that a signal handler reads without a lock

use crate::channels::Channels;
use crate::{descriptor, syscall};
use core::ptr;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr};
use ginnel::channel::{ChannelMapping, Client, SharedMapping};
use rustix::fd::{AsRawFd, RawFd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::sync::Arc;

/// Marks a descriptor that is not open.
const NO_FD: RawFd = -1;

/// Memory of which the kernel refused this process a copy: each page is copied when it is written. Null in
/// all other processes. Never freed once set.
static READ_ONLY: AtomicPtr<SharedParts> = AtomicPtr::new(ptr::null_mut());

/// Memory and descriptors that a process shares with the stack and with readers of its descriptor report.
struct SharedParts {
    channels: Vec<ChannelMapping>,
    report: Option<Arc<SharedMapping>>,
}

/// The state of isolation of a process.
#[derive(Debug)]
pub(crate) struct Isolation {
    /// Never null once set; owned by this value.
    parts: AtomicPtr<SharedParts>,
    is_isolated: AtomicBool,
    /// The descriptors of the control connection and of the descriptor report, or [`NO_FD`].
    connection_fd: AtomicI32,
    report_fd: AtomicI32,
}

impl Default for Isolation {
    fn default() -> Self {
        Self {
            parts: AtomicPtr::default(),
            is_isolated: AtomicBool::new(false),
            connection_fd: AtomicI32::new(NO_FD),
            report_fd: AtomicI32::new(NO_FD),
        }
    }
}

impl Isolation {
    /// Sets what the process shares: these channels, and the memory of the report. Only the thread that holds
    /// the process's lock may call this.
    pub fn set_shared<'a>(
        &self,
        channels: impl IntoIterator<Item = &'a Channels>,
        report: Option<Arc<SharedMapping>>,
    ) {
        let channels =
            channels.into_iter().flat_map(|channels| channels.all().iter().map(Client::mapping)).collect();
        let parts = Box::into_raw(Box::new(SharedParts { channels, report }));
        let before = self.parts.swap(parts, AcqRel);
        if self.is_isolated() {
            // A call that continues in an isolated child has made these. A fault handler may look at the
            // previous ones, which are never freed.
            self.make_private();
        } else if !before.is_null() {
            // SAFETY: set by this function, and replaced. The only readers are handlers that interrupt this
            // thread, or another thread of a parent: they see the new list.
            drop(unsafe { Box::from_raw(before) });
        }
    }

    /// Stores the descriptors of the control connection and of the report.
    pub fn set_fds(&self, connection: Option<RawFd>, report: Option<RawFd>) {
        self.connection_fd.store(connection.unwrap_or(NO_FD), Relaxed);
        self.report_fd.store(report.unwrap_or(NO_FD), Relaxed);
    }

    /// Returns whether this process is an isolated child.
    #[inline]
    pub fn is_isolated(&self) -> bool {
        self.is_isolated.load(Relaxed)
    }

    /// Isolates this process, a child. May be called in a signal handler.
    pub fn isolate(&self) {
        self.is_isolated.store(true, Relaxed);
        self.make_private();
        // A connection whose other end is closed.
        let closed_end = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map(|(closed_end, _)| closed_end);
        let wake_fds = self.parts().map_or(&[][..], |parts| &parts.channels);
        let wake_fds = wake_fds.iter().map(|channel| channel.wake_fd().as_raw_fd());
        let others = [&self.connection_fd, &self.report_fd].map(|fd| fd.load(Relaxed));
        for fd in others.into_iter().filter(|fd| *fd != NO_FD).chain(wake_fds) {
            let replaced = closed_end
                .as_ref()
                .is_ok_and(|end| syscall::dup3(end.as_raw_fd(), fd, libc::O_CLOEXEC).is_ok());
            if !replaced {
                // No number is free, or this one is above the limit: requests fail with `EBADF`. `close` of
                // the C library is the program's, which knows no internal descriptors.
                descriptor::unregister_internal(fd);
                // SAFETY: the number is this library's, whose calls on it fail from now on.
                unsafe { rustix::io::close(fd) };
            }
        }
    }

    fn parts(&self) -> Option<&SharedParts> {
        // SAFETY: null, or set by `set_shared`, which frees a list after it has replaced it. The list that is
        // set is not freed while this thread reads it: only this thread may replace it, or this process is a
        // child, in which no other thread does.
        unsafe { self.parts.load(Acquire).as_ref() }
    }

    fn make_private(&self) {
        let Some(parts) = self.parts() else { return };
        // All parts, even if one of them cannot be copied.
        let refused = parts.channels.iter().filter(|channel| !channel.make_private()).count()
            + parts.report.iter().filter(|report| !report.make_private(None)).count();
        if refused > 0 {
            READ_ONLY.store(ptr::from_ref(parts).cast_mut(), Release);
        }
    }
}

impl Drop for Isolation {
    fn drop(&mut self) {
        let parts = *self.parts.get_mut();
        if !parts.is_null() && READ_ONLY.load(Relaxed).is_null() {
            // SAFETY: set by `set_shared`, and not shared any more.
            drop(unsafe { Box::from_raw(parts) });
        }
    }
}

/// Makes memory at an address writable if it is read-only because the kernel refused a copy of all of it.
/// Called by the handler of a fault.
#[inline]
pub(crate) fn make_page_writable(address: usize) -> bool {
    let parts = READ_ONLY.load(Acquire);
    !parts.is_null() && copy_page(parts, address)
}

#[cold]
fn copy_page(parts: *const SharedParts, address: usize) -> bool {
    // SAFETY: not null, and lists in `READ_ONLY` are never freed.
    let parts = unsafe { &*parts };
    parts.channels.iter().any(|channel| channel.make_page_writable(address))
        || parts.report.iter().any(|report| report.make_page_writable(address))
}
