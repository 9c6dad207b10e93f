//! Cleanup after handlers that leave a blocked call by `siglongjmp`, as old programs implement time-outs:
//! what the call has registered is undone.
//!
//! libc knows which calls such a jump leaves: it runs their cleanup buffers, those of `pthread_cleanup_push`,
//! in the handler, and then jumps.
#![allow(unsafe_code)] // libc keeps the address of a buffer in the stack

use core::ffi::{c_int, c_void};
use core::marker::PhantomPinned;
use core::pin::Pin;
use core::ptr;

/// `struct _pthread_cleanup_buffer`.
#[repr(C)]
struct CleanupBuffer {
    routine: Option<unsafe extern "C" fn(*mut c_void)>,
    argument: *mut c_void,
    cancel_type: c_int,
    previous: *mut CleanupBuffer,
}

unsafe extern "C" {
    fn _pthread_cleanup_push(
        buffer: *mut CleanupBuffer,
        routine: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    );
    fn _pthread_cleanup_pop(buffer: *mut CleanupBuffer, execute: c_int);
}

/// A handler that runs if its frame is left by a jump. It is pinned to the frame.
pub(crate) struct CleanupHandler<F: Fn()> {
    buffer: CleanupBuffer,
    handler: F,
    _stays: PhantomPinned,
}

/// Keeps a cleanup handler registered.
pub(crate) struct CleanupGuard<'a, F: Fn()>(Pin<&'a mut CleanupHandler<F>>);

impl<F: Fn()> CleanupHandler<F> {
    pub fn new(handler: F) -> Self {
        let buffer = CleanupBuffer {
            routine: None,
            argument: ptr::null_mut(),
            cancel_type: 0,
            previous: ptr::null_mut(),
        };
        Self { buffer, handler, _stays: PhantomPinned }
    }

    /// Registers the handler. Guards must be dropped in the reverse order.
    pub fn push(self: Pin<&mut Self>) -> CleanupGuard<'_, F> {
        unsafe extern "C" fn run<F: Fn()>(this: *mut c_void) {
            // SAFETY: libc passes the pointer to `handler` below, whose frame still exists: libc jumps after
            // this.
            let handler = unsafe { &*this.cast::<F>() };
            handler();
        }
        // SAFETY: nothing is moved out of it.
        let this = unsafe { self.get_unchecked_mut() };
        let argument = (&raw const this.handler).cast_mut().cast();
        // SAFETY: the buffer is pinned, and `CleanupGuard` removes it before it is freed; frames are nested,
        // so buffers are, too.
        unsafe { _pthread_cleanup_push(&raw mut this.buffer, run::<F>, argument) };
        // SAFETY: it was pinned before.
        CleanupGuard(unsafe { Pin::new_unchecked(this) })
    }
}

impl<F: Fn()> Drop for CleanupGuard<'_, F> {
    fn drop(&mut self) {
        // SAFETY: nothing is moved out of it; this thread has pushed the buffer, and it is the last one.
        unsafe {
            let this = self.0.as_mut().get_unchecked_mut();
            _pthread_cleanup_pop(&raw mut this.buffer, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::cell::Cell;
    use core::pin::pin;

    #[test]
    fn normal_return_runs_no_handler() {
        let ran = Cell::new(0);
        {
            let outer = pin!(CleanupHandler::new(|| ran.set(1)));
            let _outer = outer.push();
            let inner = pin!(CleanupHandler::new(|| ran.set(2)));
            let _inner = inner.push();
        }
        assert_eq!(ran.get(), 0);
    }
}
