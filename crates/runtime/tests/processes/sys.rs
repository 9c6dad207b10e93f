//! System calls on processes for which std has no function, or one with side effects.
#![allow(unsafe_code)] // fork, and descriptors of which only the number was handed down

use rustix::fd::{FromRawFd, OwnedFd, RawFd};

/// Takes ownership of a descriptor that the executing program left open. Call this once for each descriptor.
pub fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: nothing else in this program knows the number.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// fork(2): returns the child's process ID, and `None` in the child.
pub fn fork() -> Option<u32> {
    // SAFETY: scripted processes have one thread.
    match unsafe { libc::fork() } {
        -1 => panic!("fork: {}", std::io::Error::last_os_error()),
        0 => None,
        child => Some(child as u32),
    }
}

/// Ends the process without the exit handlers of std.
pub fn exit() -> ! {
    // SAFETY: takes no pointer.
    unsafe { libc::_exit(0) }
}
