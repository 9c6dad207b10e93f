//! Signals of the threads that EAL starts.
#![allow(unsafe_code)] // the signal mask of a thread

/// Blocks all signals in the calling thread, and in the threads that it starts from now on.
pub(super) fn block_all() {
    // SAFETY: the set is initialized by `sigfillset` before it is read.
    unsafe {
        let mut set = core::mem::MaybeUninit::uninit();
        libc::sigfillset(set.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), core::ptr::null_mut());
    }
}
