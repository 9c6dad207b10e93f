//! Processes: what std does in its own way, or not at all.
#![allow(unsafe_code)] // fork, and descriptors of which only the number was handed down

use rustix::fd::{FromRawFd, OwnedFd, RawFd};

/// A descriptor that the program before this one kept open for this one, which takes it once.
pub fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: nobody else in this program knows the number.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// fork(2): `None` in the child.
pub fn fork() -> Option<u32> {
    // SAFETY: puppets have one thread.
    match unsafe { libc::fork() } {
        -1 => panic!("fork: {}", std::io::Error::last_os_error()),
        0 => None,
        child => Some(child as u32),
    }
}

/// Ends the process without what std does at the end of a program.
pub fn exit() -> ! {
    // SAFETY: no argument that could be wrong.
    unsafe { libc::_exit(0) }
}
