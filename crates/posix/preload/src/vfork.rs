//! `vfork`, whose parent waits until the child has executed another program or has ended.
//!
//! The child holds the write end of a pipe, which `exec` closes. A child that another thread makes meanwhile
//! must not hold that end, too: the parent would wait for both. So the parent has the write end only between
//! two fork handlers (`fork`), and only one thread at a time is between them. Other ways to make a child,
//! such as `posix_spawn` and `clone` without libc, run no handlers: if such a child begins in that moment,
//! the parent waits for the `exec` or the end of that child, too. If a child of `vfork` forks before it
//! executes a program, the new child closes its copy of the write end, so that the first parent does not wait
//! for it.
#![allow(unsafe_code)] // functions that C calls

use crate::attach::SignalsBlocked;
use core::cell::Cell;
use core::ffi::c_int;
use core::mem::ManuallyDrop;
use core::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use libc::pid_t;
use runtime::internal_fd::InternalFd;
use runtime::raised_limit::with_raised_limit;
use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use rustix::fs::fstat;
use rustix::io::{self, Errno};
use rustix::pipe::{PipeFlags, pipe_with};

/// No descriptor.
const NONE: c_int = -1;

thread_local! {
    /// The next fork of this thread is that of `vfork`.
    static IS_VFORK: Cell<bool> = const { Cell::new(false) };
    /// The read end for the parent, from the fork handler to the end of `vfork`.
    static READER: Cell<c_int> = const { Cell::new(NONE) };
}

/// The write end that this process holds as a child of `vfork`, and the inode of the pipe.
static KEPT: AtomicI32 = AtomicI32::new(NONE);
static KEPT_INODE: AtomicU64 = AtomicU64::new(0);

/// Closes this child's copy of the write end that its parent holds as a child of `vfork`. Must be called in
/// each child, before [`ExecPipe::continue_in_child`] stores the child's own end.
pub fn close_inherited() {
    let kept = KEPT.swap(NONE, Ordering::Relaxed);
    if kept == NONE {
        return;
    }
    // SAFETY: the library has left the descriptor open. If the program has closed it, the kernel says so.
    let inode = fstat(unsafe { BorrowedFd::borrow_raw(kept) }).map(|status| status.st_ino);
    // The program may have closed the descriptor and may use its number.
    if inode == Ok(KEPT_INODE.load(Ordering::Relaxed)) {
        // SAFETY: the descriptor is the library's, and no other code knows of it.
        drop(unsafe { OwnedFd::from_raw_fd(kept) });
    }
}

/// The pipe of a child of `vfork`, in the fork handlers.
pub struct ExecPipe {
    reader: OwnedFd,
    writer: OwnedFd,
}

impl ExecPipe {
    /// Creates the pipe if this thread is in `vfork`. If no descriptor can be had, the parent does not wait.
    pub fn for_vfork() -> Option<Self> {
        if !IS_VFORK.take() {
            return None;
        }
        let is_shortage = |errno: &Errno| *errno == Errno::MFILE;
        let ends = with_raised_limit(is_shortage, || pipe_with(PipeFlags::CLOEXEC)).ok()?;
        Some(Self { reader: ends.0, writer: ends.1 })
    }

    /// Closes the write end in the parent, and leaves the read end in [`READER`] to `vfork`, which closes it.
    /// Is also called if `fork` failed, so that there is no child.
    pub fn continue_in_parent(self) {
        READER.set(self.reader.into_raw_fd());
    }

    /// Keeps the write end open in the child, under a number that the program is unlikely to use.
    pub fn continue_in_child(self) {
        // If all other numbers are taken, the parent does not wait: the program may want those of its input
        // and output.
        let Ok(kept) = InternalFd::new(self.writer) else { return };
        if let Ok(status) = fstat(&kept) {
            KEPT_INODE.store(status.st_ino, Ordering::Relaxed);
            // The kernel closes the descriptor at `exec` or at the end of the child.
            KEPT.store(ManuallyDrop::new(kept).as_raw_fd(), Ordering::Relaxed);
        }
    }
}

/// Forks, and returns in the parent when the child has executed another program or has ended. A child that
/// shared this process's memory would change its tables, so it gets a copy.
#[unsafe(no_mangle)]
unsafe extern "C" fn vfork() -> pid_t {
    // A signal handler that calls `fork` would take the pipe.
    let signals_blocked = SignalsBlocked::new();
    IS_VFORK.set(true);
    // SAFETY: POSIX permits `vfork` to be `fork`.
    let child_id = unsafe { libc::fork() };
    IS_VFORK.set(false);
    let reader = READER.replace(NONE);
    drop(signals_blocked);
    if reader == NONE {
        return child_id;
    }
    // SAFETY: the fork handler has left the descriptor to this function.
    let reader = unsafe { OwnedFd::from_raw_fd(reader) };
    // Ends when all copies of the other end are closed: the child has none after `exec` or its end. Signal
    // handlers may run meanwhile.
    while child_id > 0 && io::read(&reader, &mut [0u8; 1]) == Err(Errno::INTR) {}
    child_id
}

alias! {
    fn __vfork = vfork() -> pid_t;
}
