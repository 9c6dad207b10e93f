//! Hooks of sandboxing calls: limits and seccomp filters apply to the program, and leave the library what it
//! needs.
//!
//! A prologue before a seccomp filter admits the system calls that the library makes. The sandbox is still
//! stricter than none, but weaker than the program intended (docs/posix.md).
#![allow(unsafe_code)] // functions that C calls

use crate::{attach, real};
use core::ffi::{c_int, c_long, c_ulong, c_void};
use ginnel_posix_ops::{seccomp_filter, user_memory};
use libc::{pid_t, rlimit, sock_fprog};

/// Calls `install` with the filter, with the prologue if that fits.
pub(super) fn install_filter<T>(filter: *const c_void, install: impl FnOnce(*const c_void) -> T) -> T {
    let Some(ops) = attach::ops() else { return install(filter) };
    ops.prepare_for_seccomp();
    match seccomp_filter::with_prologue(filter.cast()) {
        Some(mut lines) => {
            // Cannot truncate: a filter has at most 4,096 instructions.
            let whole = sock_fprog { len: lines.len() as u16, filter: lines.as_mut_ptr() };
            install((&raw const whole).cast())
        }
        None => install(filter),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
    if option == libc::PR_SET_SECCOMP && a == c_ulong::from(libc::SECCOMP_MODE_FILTER) {
        let filter = core::ptr::with_exposed_provenance(b as usize);
        return install_filter(filter, |filter| {
            // SAFETY: the program's arguments, with a valid filter or the program's.
            unsafe { real::prctl(option, a, filter.expose_provenance() as c_ulong, c, d) }
        });
    }
    // SAFETY: the program's arguments, unchanged.
    unsafe { real::prctl(option, a, b, c, d) }
}

/// Handles `seccomp`, for which libc has no function.
///
/// # Safety
/// As in its manual page.
pub(super) unsafe fn seccomp(operation: c_long, flags: c_long, argument: c_long) -> c_long {
    // SAFETY: the program's arguments, unchanged.
    let call =
        |argument: c_long| unsafe { real::syscall(libc::SYS_seccomp, operation, flags, argument, 0, 0, 0) };
    if operation != c_long::from(libc::SECCOMP_SET_MODE_FILTER) {
        return call(argument);
    }
    let filter = core::ptr::with_exposed_provenance(argument as usize);
    install_filter(filter, |filter| call(filter.expose_provenance() as c_long))
}

/// Calls `set` with the limit, enlarged by what the library needs. The kernel reports a limit that cannot be
/// read.
fn set_limit(resource: c_int, limit: *const rlimit, set: impl FnOnce(*const rlimit) -> c_int) -> c_int {
    let Some(ops) = attach::ops() else { return set(limit) };
    // SAFETY: any bytes are a limit.
    let Ok(mut limit) = (unsafe { user_memory::read(limit) }) else { return set(limit) };
    if resource == libc::RLIMIT_NOFILE as c_int {
        ops.prepare_for_sandbox();
    }
    if resource == libc::RLIMIT_AS as c_int {
        let more = ops.address_bytes();
        for bound in [&mut limit.rlim_cur, &mut limit.rlim_max] {
            *bound = bound.saturating_add(more);
        }
    }
    let result = set(&raw const limit);
    if result == 0 && resource == libc::RLIMIT_NOFILE as c_int {
        ops.apply_descriptor_limit(limit.rlim_cur);
    }
    result
}

#[unsafe(no_mangle)]
unsafe extern "C" fn setrlimit(resource: c_int, limit: *const rlimit) -> c_int {
    // SAFETY: a valid limit or the program's.
    let result = set_limit(resource, limit, |limit| unsafe { real::setrlimit(resource, limit) });
    super::poll::forget_descriptor_limit();
    result
}

#[unsafe(no_mangle)]
unsafe extern "C" fn prlimit(pid: pid_t, resource: c_int, limit: *const rlimit, old: *mut rlimit) -> c_int {
    // SAFETY: a valid limit or the program's, and the program's other arguments, unchanged.
    let call = |limit| unsafe { real::prlimit(pid, resource, limit, old) };
    let result = if pid == 0 { set_limit(resource, limit, call) } else { call(limit) };
    super::poll::forget_descriptor_limit();
    result
}

alias! {
    fn setrlimit64 = setrlimit(resource: c_int, limit: *const rlimit) -> c_int;
    fn prlimit64 = prlimit(pid: pid_t, resource: c_int, limit: *const rlimit, old: *mut rlimit) -> c_int;
}
