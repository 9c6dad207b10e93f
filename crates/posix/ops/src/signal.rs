//! Signals that calls send.
#![allow(unsafe_code)] // raise

/// What the kernel does to a thread that writes where nobody reads.
pub(crate) fn broken_pipe() {
    // SAFETY: raise has no preconditions; the signal goes to this thread.
    unsafe { libc::raise(libc::SIGPIPE) };
}
