//! Hooks of sandboxing calls: limits and seccomp filters apply to the program, and leave the library what it
//! needs.
//!
//! A prologue before a seccomp filter admits the system calls that the library makes. The sandbox is still
//! stricter than none, but weaker than the program intended (docs/posix.md).
#![allow(unsafe_code)] // functions that C calls

use crate::{attach, real};
use core::ffi::{c_int, c_long, c_ulong, c_void};
use ginnel_posix_ops::{Ops, user_memory};
use libc::{pid_t, rlimit, sock_filter, sock_fprog};

/// Maximum length of a filter in instructions (`BPF_MAXINSNS`).
const INSTRUCTIONS_MAX: usize = 4096;
/// `AUDIT_ARCH_X86_64`, `AUDIT_ARCH_AARCH64`.
const ARCHITECTURE: u32 = if cfg!(target_arch = "x86_64") { 0xc000_003e } else { 0xc000_00b7 };
/// Offsets of the system call number and the architecture in `struct seccomp_data`.
const NUMBER_AT: u32 = 0;
const ARCHITECTURE_AT: u32 = 4;
/// `BPF_LD|BPF_W|BPF_ABS`, `BPF_JMP|BPF_JEQ|BPF_K`, `BPF_RET|BPF_K`.
const LOAD: u16 = 0x20;
const IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;

/// Returns the prologue for the program's filter.
fn preamble() -> Vec<sock_filter> {
    let calls = Ops::system_calls();
    let line = |code, k, jt, jf| sock_filter { code, jt, jf, k };
    let mut lines = vec![line(LOAD, ARCHITECTURE_AT, 0, 0)];
    // Cannot truncate: there are few calls. Jumps over the load, all comparisons, and the return.
    lines.push(line(IF_EQUAL, ARCHITECTURE, 0, calls.len() as u8 + 2));
    lines.push(line(LOAD, NUMBER_AT, 0, 0));
    for (at, call) in calls.iter().enumerate() {
        let left = (calls.len() - 1 - at) as u8;
        // The last comparison jumps over the return to the program's filter.
        lines.push(line(IF_EQUAL, *call as u32, left, u8::from(left == 0)));
    }
    lines.push(line(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0));
    lines
}

/// Returns the filter with the prologue, or `None` if it is too long or cannot be read.
fn with_preamble(filter: *const sock_fprog) -> Option<Vec<sock_filter>> {
    // SAFETY: any bytes are a filter.
    let filter = unsafe { user_memory::read(filter) }.ok()?;
    let (mut lines, own) = (preamble(), usize::from(filter.len));
    if own == 0 || lines.len() + own > INSTRUCTIONS_MAX {
        return None;
    }
    lines.reserve_exact(own);
    // SAFETY: any bytes are instructions, and the vector has space for `own` more.
    unsafe {
        user_memory::read_list(filter.filter.cast_const(), &mut lines.spare_capacity_mut()[..own]).ok()?;
        lines.set_len(lines.len() + own);
    }
    Some(lines)
}

/// Calls `install` with the filter, with the prologue if that fits.
pub(super) fn install_filter<T>(filter: *const c_void, install: impl FnOnce(*const c_void) -> T) -> T {
    let Some(ops) = attach::ops() else { return install(filter) };
    ops.prepare_for_seccomp();
    match with_preamble(filter.cast()) {
        Some(mut lines) => {
            // Cannot truncate: the length is at most INSTRUCTIONS_MAX.
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
    set(&raw const limit)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn setrlimit(resource: c_int, limit: *const rlimit) -> c_int {
    // SAFETY: a valid limit or the program's.
    set_limit(resource, limit, |limit| unsafe { real::setrlimit(resource, limit) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn prlimit(pid: pid_t, resource: c_int, limit: *const rlimit, old: *mut rlimit) -> c_int {
    // SAFETY: a valid limit or the program's, and the program's other arguments, unchanged.
    let call = |limit| unsafe { real::prlimit(pid, resource, limit, old) };
    if pid == 0 { set_limit(resource, limit, call) } else { call(limit) }
}

alias! {
    fn setrlimit64 = setrlimit(resource: c_int, limit: *const rlimit) -> c_int;
    fn prlimit64 = prlimit(pid: pid_t, resource: c_int, limit: *const rlimit, old: *mut rlimit) -> c_int;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs these instructions for a system call. Returns the index after the last one, and the value that it
    /// returned.
    fn run(lines: &[sock_filter], architecture: u32, number: u32) -> (usize, Option<u32>) {
        let (mut at, mut value) = (0, 0);
        while let Some(line) = lines.get(at) {
            at += 1;
            match line.code {
                LOAD => value = if line.k == NUMBER_AT { number } else { architecture },
                IF_EQUAL => at += usize::from(if value == line.k { line.jt } else { line.jf }),
                _ => return (at, Some(line.k)),
            }
        }
        (at, None)
    }

    #[test]
    fn prologue_admits_only_the_librarys_calls() {
        let lines = preamble();
        for call in Ops::system_calls() {
            assert_eq!(run(&lines, ARCHITECTURE, *call as u32).1, Some(libc::SECCOMP_RET_ALLOW));
            // Numbers of another architecture are different calls.
            assert_eq!(run(&lines, 0x4000_0003, *call as u32), (lines.len(), None));
        }
        for call in [libc::SYS_openat, libc::SYS_execve, libc::SYS_socket, libc::SYS_connect, 9999] {
            assert_eq!(run(&lines, ARCHITECTURE, call as u32), (lines.len(), None));
        }
    }

    #[test]
    fn oversized_filter_is_left_unchanged() {
        let mut own = vec![sock_filter { code: RETURN, jt: 0, jf: 0, k: 0 }; INSTRUCTIONS_MAX];
        let mut filter = |len: usize| sock_fprog { len: len as u16, filter: own.as_mut_ptr() };
        let most = INSTRUCTIONS_MAX - preamble().len();
        let lines =
            |len: usize, filter: sock_fprog| with_preamble(&raw const filter).map(|lines| lines.len() - len);
        assert_eq!(lines(most, filter(most)), Some(preamble().len()));
        assert_eq!(lines(most + 1, filter(most + 1)), None);
    }
}
