//! The error number of the calling thread.
#![allow(unsafe_code)] // a variable of C

use core::ffi::c_int;

/// Restores `errno` when it is dropped.
#[derive(Debug)]
pub struct ErrnoGuard(c_int);

impl ErrnoGuard {
    /// Remembers the current value.
    pub fn new() -> Self {
        // SAFETY: libc's variable of this thread.
        Self(unsafe { *libc::__errno_location() })
    }
}

impl Default for ErrnoGuard {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for ErrnoGuard {
    fn drop(&mut self) {
        // SAFETY: libc's variable of this thread.
        unsafe { *libc::__errno_location() = self.0 };
    }
}
