//! Hooks of the functions that block signals: the library must know when a thread blocks the signals of
//! faults (`ginnel_posix_ops::fault_mask`). The masks themselves are not changed.
#![allow(unsafe_code)] // functions that C calls

use crate::real;
use core::ffi::{c_int, c_long};
use core::ptr;
use ginnel_posix_ops::fault_mask;
use libc::{SIG_BLOCK, SIG_SETMASK, sigset_t};

/// Returns the kernel's part of a signal set, which libc's begins with; the empty set if the pointer is null.
///
/// # Safety
/// The pointer must be null or valid.
unsafe fn signals(set: *const u64) -> u64 {
    // SAFETY: the caller's promise.
    if set.is_null() { 0 } else { unsafe { set.read_unaligned() } }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sigprocmask(how: c_int, set: *const sigset_t, old: *mut sigset_t) -> c_int {
    // SAFETY: the program's arguments, unchanged; libc reads the set as well. The set is read before the
    // call, because `old` may be its address, too.
    let (signals, result) = unsafe { (signals(set.cast()), real::sigprocmask(how, set, old)) };
    fault_mask::after_change(how, signals);
    result
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_sigmask(how: c_int, set: *const sigset_t, old: *mut sigset_t) -> c_int {
    // SAFETY: as above.
    let (signals, result) = unsafe { (signals(set.cast()), real::pthread_sigmask(how, set, old)) };
    fault_mask::after_change(how, signals);
    result
}

/// Handles `rt_sigprocmask`.
///
/// # Safety
/// The arguments must be those of the system call.
pub unsafe fn rt_sigprocmask(how: c_long, set: c_long, old: c_long, len: c_long) -> c_long {
    let given = ptr::with_exposed_provenance::<u64>(set as usize);
    // SAFETY: the program's arguments, unchanged. The kernel reports a set that cannot be read.
    let result = unsafe { real::syscall(libc::SYS_rt_sigprocmask, how, set, old, len, 0, 0) };
    if result == 0 && !given.is_null() {
        // The kernel may have overwritten the set with the old one, so it is not read; all signals may be
        // blocked.
        fault_mask::after_change(how as c_int, u64::MAX);
    }
    result
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sighold(signal: c_int) -> c_int {
    // SAFETY: the program's argument, unchanged.
    let result = unsafe { real::sighold(signal) };
    after_hold(signal);
    result
}

/// Must be called after a signal has been blocked.
pub fn after_hold(signal: c_int) {
    if (1..=64).contains(&signal) {
        fault_mask::after_change(SIG_BLOCK, 1 << (signal - 1));
    }
}

/// Returns the signals of a 4.2BSD mask, whose 32 bits are the signals 1 to 32.
fn of_bsd_mask(mask: c_int) -> u64 {
    mask.cast_unsigned().into()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sigblock(mask: c_int) -> c_int {
    // SAFETY: the program's argument, unchanged.
    let before = unsafe { real::sigblock(mask) };
    fault_mask::after_change(SIG_BLOCK, of_bsd_mask(mask));
    before
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sigsetmask(mask: c_int) -> c_int {
    // SAFETY: the program's argument, unchanged.
    let before = unsafe { real::sigsetmask(mask) };
    fault_mask::after_change(SIG_SETMASK, of_bsd_mask(mask));
    before
}
