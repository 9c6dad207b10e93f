//! What the program does about signals: noted, because whether a call goes on after a handler is the handler's to say.
#![allow(unsafe_code)] // functions that C calls

use crate::{attach, real};
use core::ffi::{c_int, c_void};
use libc::sighandler_t;

/// After a change, which the next call that waits looks at.
fn changed<T>(result: T) -> T {
    if let Some(ops) = attach::ops() {
        ops.handlers_changed();
    }
    result
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sigaction(signal: c_int, action: *const c_void, old: *mut c_void) -> c_int {
    // SAFETY: passed on as it came.
    changed(unsafe { real::sigaction(signal, action, old) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __sigaction(signal: c_int, action: *const c_void, old: *mut c_void) -> c_int {
    // SAFETY: the same by another name.
    unsafe { sigaction(signal, action, old) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    // SAFETY: passed on as it came.
    changed(unsafe { real::signal(signal, handler) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn bsd_signal(number: c_int, handler: sighandler_t) -> sighandler_t {
    // SAFETY: the same by another name.
    unsafe { signal(number, handler) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    // SAFETY: passed on as it came.
    changed(unsafe { real::__sysv_signal(signal, handler) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    // SAFETY: the same by another name.
    unsafe { __sysv_signal(signal, handler) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn siginterrupt(signal: c_int, on: c_int) -> c_int {
    // SAFETY: passed on as it came.
    changed(unsafe { real::siginterrupt(signal, on) })
}
