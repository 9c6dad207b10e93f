//! The hook of `syscall`: system calls by number that have a hook by name.
#![allow(unsafe_code)] // functions that C calls

use super::{poll, stack_ops};
use crate::{attach, real};
use core::ffi::{c_int, c_long};
use ginnel_posix_ops::{Ops, ffi, user_memory};
use rustix::io::Errno;

/// The hooks, declared with integer arguments as `syscall` passes them. Each is defined with the types of its
/// manual page in the module of its kind.
mod by_name {
    use core::ffi::{c_int, c_long};

    macro_rules! functions {
        ($($name:ident($($argument:ident),*) -> $result:ty;)*) => {
            unsafe extern "C" {
                $(pub fn $name($($argument: c_long),*) -> $result;)*
            }
        };
    }
    functions! {
        accept(a, b, c) -> c_int;
        accept4(a, b, c, d) -> c_int;
        bind(a, b, c) -> c_int;
        close(a) -> c_int;
        close_range(a, b, c) -> c_int;
        connect(a, b, c) -> c_int;
        dup(a) -> c_int;
        dup2(a, b) -> c_int;
        dup3(a, b, c) -> c_int;
        epoll_create1(a) -> c_int;
        epoll_ctl(a, b, c, d) -> c_int;
        epoll_pwait(a, b, c, d, e) -> c_int;
        epoll_pwait2(a, b, c, d, e) -> c_int;
        epoll_wait(a, b, c, d) -> c_int;
        execve(a, b, c) -> c_int;
        execveat(a, b, c, d, e) -> c_int;
        fcntl(a, b, c) -> c_int;
        getpeername(a, b, c) -> c_int;
        getsockname(a, b, c) -> c_int;
        getsockopt(a, b, c, d, e) -> c_int;
        ioctl(a, b, c) -> c_int;
        listen(a, b) -> c_int;
        poll(a, b, c) -> c_int;
        prctl(a, b, c, d, e) -> c_int;
        preadv2(a, b, c, d, e) -> c_long;
        prlimit64(a, b, c, d) -> c_int;
        pwritev2(a, b, c, d, e) -> c_long;
        read(a, b, c) -> c_long;
        readv(a, b, c) -> c_long;
        recvfrom(a, b, c, d, e, f) -> c_long;
        recvmmsg(a, b, c, d, e) -> c_int;
        recvmsg(a, b, c) -> c_long;
        select(a, b, c, d, e) -> c_int;
        sendfile(a, b, c, d) -> c_long;
        sendmmsg(a, b, c, d) -> c_int;
        sendmsg(a, b, c) -> c_long;
        sendto(a, b, c, d, e, f) -> c_long;
        setsockopt(a, b, c, d, e) -> c_int;
        shutdown(a, b) -> c_int;
        socket(a, b, c) -> c_int;
        splice(a, b, c, d, e, f) -> c_long;
        vfork() -> c_int;
        write(a, b, c) -> c_long;
        writev(a, b, c) -> c_long;
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    if number == libc::SYS_rt_sigaction
        // SAFETY: the program's arguments are those of the system call.
        && let Some(result) = unsafe { super::signals::rt_sigaction(a, b, c, d) }
    {
        return result;
    }
    if number == libc::SYS_rt_sigprocmask {
        // SAFETY: the program's arguments are those of the system call.
        return unsafe { super::signal_masks::rt_sigprocmask(a, b, c, d) };
    }
    if is_fork(number, a, b) {
        // SAFETY: the program's arguments, unchanged.
        return crate::fork::run_fork_syscall(|| unsafe { real::syscall(number, a, b, c, d, e, f) });
    }
    if !attach::is_on_a_stack() {
        // SAFETY: the program's arguments, unchanged.
        return unsafe { real::syscall(number, a, b, c, d, e, f) };
    }
    // An io_uring would use descriptors without these hooks. Programs that get `ENOSYS` use other calls.
    if number == libc::SYS_io_uring_setup {
        return ffi::fail_with(Errno::NOSYS, -1);
    }
    // SAFETY: the program's arguments are those of the system call.
    let done = unsafe {
        by_number(number, [a, b, c, d, e, f]).or_else(|| by_legacy_number(number, [a, b, c, d, e]))
    };
    // SAFETY: the program's arguments, unchanged.
    done.unwrap_or_else(|| unsafe { real::syscall(number, a, b, c, d, e, f) })
}

/// Returns whether a system call with these two arguments is a fork: it neither has `CLONE_VM` nor a new
/// stack. Other children are threads, or start at another place.
fn is_fork(number: c_long, first: c_long, second: c_long) -> bool {
    let clone_vm = u64::from(libc::CLONE_VM.unsigned_abs());
    match number {
        libc::SYS_clone => first as u64 & clone_vm == 0 && second == 0,
        libc::SYS_clone3 => {
            // Flags, four other words, and the stack. The kernel refuses what cannot be read.
            let arguments: *const [u64; 6] = core::ptr::with_exposed_provenance(first as usize);
            // SAFETY: any bytes are words.
            let arguments = unsafe { user_memory::read(arguments) };
            arguments.is_ok_and(|words| words[0] & clone_vm == 0 && words[5] == 0)
        }
        #[cfg(target_arch = "x86_64")]
        libc::SYS_fork => true,
        _ => false,
    }
}

/// Calls the hook of a system call that all architectures have. Returns `None` if the kernel must be called.
///
/// # Safety
/// The arguments must be those of the system call.
unsafe fn by_number(number: c_long, [a, b, c, d, e, f]: [c_long; 6]) -> Option<c_long> {
    use by_name as call;
    // SAFETY: the caller's promise; the hook has the same arguments as the system call.
    unsafe {
        // These hooks check descriptors themselves, or have none.
        let any: c_int = match number {
            libc::SYS_socket => call::socket(a, b, c),
            libc::SYS_epoll_create1 => call::epoll_create1(a),
            libc::SYS_close_range => call::close_range(a, b, c),
            libc::SYS_prctl => call::prctl(a, b, c, d, e),
            libc::SYS_prlimit64 => call::prlimit64(a, b, c, d),
            libc::SYS_seccomp => return Some(super::sandbox::seccomp(a, b, c)),
            libc::SYS_dup3 => call::dup3(a, b, c),
            libc::SYS_ppoll => {
                let [fds, timeout, mask] = [a, c, d].map(|at| at as usize);
                let mask = (core::ptr::with_exposed_provenance(mask), e as usize);
                poll::sys_ppoll(
                    core::ptr::with_exposed_provenance_mut(fds),
                    b.cast_unsigned(),
                    core::ptr::with_exposed_provenance_mut(timeout),
                    mask,
                )?
            }
            libc::SYS_pselect6 => {
                // The last argument points to the mask and its length.
                let pair: *const [usize; 2] = core::ptr::with_exposed_provenance(f as usize);
                let pair = if pair.is_null() { Ok([0; 2]) } else { user_memory::read(pair) };
                // The kernel reports a pair that cannot be read.
                let [mask, mask_len] = pair.ok()?;
                poll::sys_pselect6(
                    a as c_int,
                    [b, c, d].map(|set| core::ptr::with_exposed_provenance_mut(set as usize)),
                    core::ptr::with_exposed_provenance_mut(e as usize),
                    (core::ptr::with_exposed_provenance(mask), mask_len),
                )?
            }
            libc::SYS_epoll_ctl => call::epoll_ctl(a, b, c, d),
            libc::SYS_execve => call::execve(a, b, c),
            libc::SYS_execveat => call::execveat(a, b, c, d, e),
            libc::SYS_sendmsg => return Some(call::sendmsg(a, b, c)),
            libc::SYS_recvmsg => return Some(call::recvmsg(a, b, c)),
            libc::SYS_sendmmsg => call::sendmmsg(a, b, c, d),
            libc::SYS_recvmmsg => call::recvmmsg(a, b, c, d, e),
            libc::SYS_sendfile => return Some(call::sendfile(a, b, c, d)),
            libc::SYS_splice => return Some(call::splice(a, b, c, d, e, f)),
            _ => return by_fd_number(number, [a, b, c, d, e, f]),
        };
        Some(any.into())
    }
}

/// Calls the hook of a system call on a single descriptor. Returns `None` if the kernel must be called.
///
/// # Safety
/// The arguments must be those of the system call.
unsafe fn by_fd_number(number: c_long, [a, b, c, d, e, f]: [c_long; 6]) -> Option<c_long> {
    use by_name as call;
    if stack_ops(a as c_int).is_none() {
        // Also before the program is attached: internal descriptors must stay open and hidden.
        return Ops::is_internal(a as c_int)
            .then(|| ffi::fail_with(Errno::BADF, -1))
            .filter(|_| matches!(number, libc::SYS_close | libc::SYS_dup | libc::SYS_fcntl));
    }
    // SAFETY: the caller's promise.
    unsafe {
        let result: c_int = match number {
            libc::SYS_accept => call::accept(a, b, c),
            libc::SYS_accept4 => call::accept4(a, b, c, d),
            libc::SYS_bind => call::bind(a, b, c),
            libc::SYS_close => call::close(a),
            libc::SYS_connect => call::connect(a, b, c),
            libc::SYS_dup => call::dup(a),
            libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2
                if poll::check_mask_len(core::ptr::with_exposed_provenance(e as usize), f as usize)
                    .is_err() =>
            {
                return Some(ffi::fail_with(Errno::INVAL, -1));
            }
            libc::SYS_epoll_pwait => call::epoll_pwait(a, b, c, d, e),
            libc::SYS_epoll_pwait2 => call::epoll_pwait2(a, b, c, d, e),
            libc::SYS_fcntl => call::fcntl(a, b, c),
            libc::SYS_getpeername => call::getpeername(a, b, c),
            libc::SYS_getsockname => call::getsockname(a, b, c),
            libc::SYS_getsockopt => call::getsockopt(a, b, c, d, e),
            libc::SYS_ioctl => call::ioctl(a, b, c),
            libc::SYS_listen => call::listen(a, b),
            libc::SYS_setsockopt => call::setsockopt(a, b, c, d, e),
            libc::SYS_shutdown => call::shutdown(a, b),
            libc::SYS_read => return Some(call::read(a, b, c)),
            libc::SYS_readv => return Some(call::readv(a, b, c)),
            libc::SYS_recvfrom => return Some(call::recvfrom(a, b, c, d, e, f)),
            libc::SYS_sendto => return Some(call::sendto(a, b, c, d, e, f)),
            libc::SYS_write => return Some(call::write(a, b, c)),
            libc::SYS_writev => return Some(call::writev(a, b, c)),
            // The position is split in two arguments, of which the first holds all of it.
            libc::SYS_preadv2 => return Some(call::preadv2(a, b, c, d, f)),
            libc::SYS_pwritev2 => return Some(call::pwritev2(a, b, c, d, f)),
            _ => return None,
        };
        Some(result.into())
    }
}

/// Calls the hook of a system call that only older architectures have. Returns `None` if the kernel must be
/// called.
///
/// # Safety
/// The arguments must be those of the system call.
#[cfg(target_arch = "x86_64")]
unsafe fn by_legacy_number(number: c_long, [a, b, c, d, e]: [c_long; 5]) -> Option<c_long> {
    use by_name as call;
    // SAFETY: the caller's promise.
    let result = unsafe {
        match number {
            libc::SYS_dup2 => call::dup2(a, b),
            libc::SYS_poll => call::poll(a, b, c),
            libc::SYS_select => call::select(a, b, c, d, e),
            libc::SYS_epoll_create if a as c_int > 0 => call::epoll_create1(0),
            libc::SYS_epoll_wait if stack_ops(a as c_int).is_some() => call::epoll_wait(a, b, c, d),
            // A child that shared this process's memory would change its tables.
            libc::SYS_vfork => call::vfork(),
            _ => return None,
        }
    };
    Some(result.into())
}

/// Returns `None`: newer architectures have none of these system calls.
///
/// # Safety
/// No requirements.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn by_legacy_number(_: c_long, _: [c_long; 5]) -> Option<c_long> {
    None
}
