//! `vfork`, whose parent waits until the child has executed another program or has ended.
//!
//! The child holds the write end of a pipe, which `exec` closes. A child that another thread forks meanwhile
//! must not hold it, too, so all write ends are listed, and each child closes those of the others.
#![allow(unsafe_code)] // functions that C calls

use core::cell::Cell;
use core::ffi::c_int;
use core::sync::atomic::{AtomicI32, Ordering};
use libc::pid_t;
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use rustix::io::{self, Errno, fcntl_dupfd_cloexec};
use rustix::pipe::{PipeFlags, pipe_with};

/// Threads that can wait in `vfork` at the same time; a further one returns before its child has executed.
const WRITERS_MAX: usize = 64;
/// Value of a vacant entry of the list.
const NONE: c_int = -1;

/// The write ends of pipes that are meant for one child each.
static WRITERS: [AtomicI32; WRITERS_MAX] = [const { AtomicI32::new(NONE) }; WRITERS_MAX];

thread_local! {
    /// The write end that the child of this thread will hold.
    static OWN_WRITER: Cell<c_int> = const { Cell::new(NONE) };
}

/// Adds a write end to the list. Returns its entry, or `None` if the list is full.
fn add_to_list(writer: &OwnedFd) -> Option<&'static AtomicI32> {
    let fd = writer.as_raw_fd();
    WRITERS
        .iter()
        .find(|entry| entry.compare_exchange(NONE, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok())
}

/// Closes the write ends of other threads. Called in a child.
pub fn close_other_writers() {
    let own = OWN_WRITER.try_with(Cell::get).unwrap_or(NONE);
    for entry in &WRITERS {
        let fd = entry.swap(NONE, Ordering::Relaxed);
        if fd != NONE && fd != own {
            // SAFETY: the threads that own the listed descriptors do not exist in this process.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
    }
}

/// Forks, and returns in the parent when the child has executed another program or has ended. A child that
/// shared this process's memory would change its tables, so it gets a copy.
#[unsafe(no_mangle)]
unsafe extern "C" fn vfork() -> pid_t {
    // Without a free descriptor or entry the parent does not wait.
    let pipe = pipe_with(PipeFlags::CLOEXEC).ok();
    let pipe = pipe.and_then(|(reader, writer)| add_to_list(&writer).map(|entry| (reader, writer, entry)));
    let own = pipe.as_ref().map_or(NONE, |(_, writer, _)| writer.as_raw_fd());
    // `try_with` fails only in a thread that has destroyed its thread-local values.
    let _ = OWN_WRITER.try_with(|writer| writer.set(own));
    // SAFETY: POSIX permits `vfork` to be `fork`.
    let child_id = unsafe { libc::fork() };
    let _ = OWN_WRITER.try_with(|writer| writer.set(NONE));
    let Some((reader, writer, entry)) = pipe else { return child_id };
    if child_id == 0 {
        drop(reader);
        keep_until_exec(writer);
        return 0;
    }
    // The entry is vacant before the descriptor's number can be used again.
    entry.store(NONE, Ordering::Relaxed);
    drop(writer);
    // Ends when all copies of the other end are closed: the child has none after `exec` or its end. Signal
    // handlers may run meanwhile.
    while child_id > 0 && io::read(&reader, &mut [0u8; 1]) == Err(Errno::INTR) {}
    child_id
}

/// Keeps a descriptor open in the child, under a number that the program is unlikely to use.
fn keep_until_exec(writer: OwnedFd) {
    const LOWEST: c_int = 512;
    let moved = fcntl_dupfd_cloexec(&writer, LOWEST);
    // The kernel closes the descriptor at `exec` or at the end of the child.
    core::mem::forget(moved.unwrap_or(writer));
}

alias! {
    fn __vfork = vfork() -> pid_t;
}
