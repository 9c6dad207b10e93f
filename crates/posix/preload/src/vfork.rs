//! `vfork`, whose parent waits until the child has executed another program or has ended.
//!
//! The child holds one end of a pipe that is closed by `exec`. A child that another thread forks meanwhile
//! must not hold it, too, so the ends are listed, and each child closes those of others.
#![allow(unsafe_code)] // functions that C calls

use core::cell::Cell;
use core::ffi::c_int;
use core::sync::atomic::{AtomicI32, Ordering};
use libc::pid_t;
use rustix::fd::{AsRawFd, FromRawFd, OwnedFd};
use rustix::io::{self, Errno, fcntl_dupfd_cloexec};
use rustix::pipe::{PipeFlags, pipe_with};

/// Threads that can be in `vfork` at the same time; a further one does not wait.
const WRITERS_MAX: usize = 64;
/// In a vacant place of the list.
const NONE: c_int = -1;

/// The ends of pipes that the children of this process will hold.
static WRITERS: [AtomicI32; WRITERS_MAX] = [const { AtomicI32::new(NONE) }; WRITERS_MAX];

thread_local! {
    /// The end that the child of this thread will hold.
    static OWN_WRITER: Cell<c_int> = const { Cell::new(NONE) };
}

/// Lists an end. Returns its place, or `None` if there is none.
fn list(writer: &OwnedFd) -> Option<&'static AtomicI32> {
    let fd = writer.as_raw_fd();
    WRITERS
        .iter()
        .find(|place| place.compare_exchange(NONE, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok())
}

/// Closes the ends of other threads. Called in a child.
pub fn close_other_writers() {
    let own = OWN_WRITER.try_with(Cell::get).unwrap_or(NONE);
    for place in &WRITERS {
        let fd = place.swap(NONE, Ordering::Relaxed);
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
    // Without free descriptors or places the parent does not wait.
    let pipe = pipe_with(PipeFlags::CLOEXEC).ok();
    let pipe = pipe.and_then(|(reader, writer)| list(&writer).map(|place| (reader, writer, place)));
    let own = pipe.as_ref().map_or(NONE, |(_, writer, _)| writer.as_raw_fd());
    // A thread that exits has no handlers in its child that could close it.
    let _ = OWN_WRITER.try_with(|writer| writer.set(own));
    // SAFETY: POSIX permits `vfork` to be `fork`.
    let child_id = unsafe { libc::fork() };
    let _ = OWN_WRITER.try_with(|writer| writer.set(NONE));
    let Some((reader, writer, place)) = pipe else { return child_id };
    if child_id == 0 {
        drop(reader);
        keep_until_exec(writer);
        return 0;
    }
    // Not listed any more when its number can be used again.
    place.store(NONE, Ordering::Relaxed);
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
    // Closed by the kernel.
    core::mem::forget(moved.unwrap_or(writer));
}

alias! {
    fn __vfork = vfork() -> pid_t;
}
