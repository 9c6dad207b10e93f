//! Processes that come of this one.
#![allow(unsafe_code)] // functions that C calls

use libc::pid_t;

/// A child that shared this process's memory would change its tables: it gets its own.
#[unsafe(no_mangle)]
unsafe extern "C" fn vfork() -> pid_t {
    // SAFETY: what `vfork` may be by POSIX.
    unsafe { libc::fork() }
}
