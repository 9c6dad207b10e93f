//! Hooks that close and duplicate descriptors, `fcntl` and `ioctl`.
#![allow(unsafe_code)] // functions that C calls

use super::stack_ops;
use crate::{attach, real};
use core::ffi::{c_int, c_long, c_uint, c_void};
use ginnel_posix_ops::ffi::IntoC;
use ginnel_posix_ops::{Ops, user_memory};
use rustix::io::Errno;

#[unsafe(no_mangle)]
unsafe extern "C" fn close(fd: c_int) -> c_int {
    match stack_ops(fd) {
        Some(ops) => ops.close(fd).into_c(),
        // To the program an internal descriptor is not open.
        None if Ops::is_internal(fd) => Err::<(), _>(Errno::BADF).into_c(),
        None => {
            // SAFETY: the program's arguments, unchanged.
            let result = unsafe { real::close(fd) };
            Ops::note_freed(fd);
            result
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    if flags & libc::CLOSE_RANGE_CLOEXEC.cast_signed() == 0
        && let Some(ops) = attach::ops()
    {
        let limit = |number: c_uint| c_int::try_from(number).unwrap_or(c_int::MAX);
        ops.forget_range(limit(first), limit(last));
    }
    // SAFETY: as libc's function, except that internal descriptors stay open.
    unsafe { attach::close_range_except_internal(first, last, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn closefrom(first: c_int) {
    // SAFETY: `close_range` has no further requirements.
    unsafe { close_range(first.max(0).unsigned_abs(), c_uint::MAX, 0) };
}

/// Registers the duplicate `copy` that the kernel made of the proxy descriptor `fd`.
fn register_copy(fd: c_int, copy: c_int) -> c_int {
    let Some(ops) = stack_ops(fd) else { return copy };
    if copy < 0 {
        return copy;
    }
    match ops.dup(fd, copy) {
        Ok(()) => copy,
        Err(error) => {
            // SAFETY: the descriptor was made a moment ago.
            unsafe { real::close(copy) };
            Err::<c_int, _>(error).into_c()
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn dup(fd: c_int) -> c_int {
    if Ops::is_internal(fd) {
        return Err::<c_int, _>(Errno::BADF).into_c();
    }
    if let Some(done) = stack_ops(fd).and_then(|ops| ops.dup_from_pool(fd, false).transpose()) {
        return done.into_c();
    }
    // SAFETY: the program's arguments, unchanged.
    register_copy(fd, unsafe { real::dup(fd) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn dup2(fd: c_int, to: c_int) -> c_int {
    // SAFETY: the program's arguments, unchanged.
    unsafe { dup_over(fd, to, || real::dup2(fd, to)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn dup3(fd: c_int, to: c_int, flags: c_int) -> c_int {
    // SAFETY: the program's arguments, unchanged.
    unsafe { dup_over(fd, to, || real::dup3(fd, to, flags)) }
}

/// Duplicates `fd` to `to`, which may be open.
unsafe fn dup_over(fd: c_int, to: c_int, copy: impl FnOnce() -> c_int) -> c_int {
    // To the program internal descriptors are not open.
    if Ops::is_internal(fd) {
        return Err::<c_int, _>(Errno::BADF).into_c();
    }
    if fd == to {
        return copy();
    }
    if let Err(error) = attach::relocate_fd(to) {
        return Err::<c_int, _>(error).into_c();
    }
    let copy = copy();
    if copy >= 0
        && let Some(ops) = attach::ops()
    {
        // The kernel has closed the previous descriptor.
        ops.forget_fd(to);
    }
    register_copy(fd, copy)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: c_long) -> c_int {
    let Some(ops) = stack_ops(fd) else {
        if Ops::is_internal(fd) {
            return Err::<c_int, _>(Errno::BADF).into_c();
        }
        // SAFETY: the program's arguments, unchanged.
        return unsafe { real::fcntl64(fd, command, argument) };
    };
    if !ops.owns(fd) {
        return Err::<c_int, _>(Errno::BADF).into_c();
    }
    // SAFETY: the program's arguments, unchanged.
    let by_kernel = || unsafe { real::fcntl64(fd, command, argument) };
    match command {
        libc::F_GETFL => {
            let flags = |on| libc::O_RDWR | if on { libc::O_NONBLOCK } else { 0 };
            let set = ops.is_nonblocking(fd).transpose();
            set.map_or_else(by_kernel, |on| on.map(flags).into_c())
        }
        libc::F_SETFL if argument as c_int & libc::O_DIRECT != 0 => Err::<(), _>(Errno::INVAL).into_c(),
        libc::F_SETFL => {
            let set = ops.set_nonblocking(fd, argument as c_int & libc::O_NONBLOCK != 0).transpose();
            set.map_or_else(by_kernel, IntoC::into_c)
        }
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
            let cloexec = command == libc::F_DUPFD_CLOEXEC;
            let pooled = if argument as c_int == 0 { ops.dup_from_pool(fd, cloexec) } else { Ok(None) };
            // SAFETY: the program's arguments, unchanged.
            let by_kernel = || register_copy(fd, unsafe { real::fcntl64(fd, command, argument) });
            pooled.transpose().map_or_else(by_kernel, IntoC::into_c)
        }
        libc::F_GETOWN => ops.owner(fd).into_c(),
        libc::F_SETOWN => ops.set_owner(fd, argument as c_int).into_c(),
        // Flags of the descriptor itself are those of the proxy.
        _ => {
            if command == libc::F_SETFD {
                ops.note_fd_flags_changed(fd);
            }
            // SAFETY: the program's arguments, unchanged.
            unsafe { real::fcntl64(fd, command, argument) }
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ioctl(fd: c_int, request: libc::c_ulong, argument: *mut c_void) -> c_int {
    let Some(ops) = stack_ops(fd) else {
        // Interfaces belong to the process, whichever socket is asked.
        if super::interfaces::is_interface_request(request)
            && let Some(ops) = attach::ops_or_attach_quietly()
        {
            // SAFETY: the program's arguments, unchanged.
            return unsafe { super::interfaces::ioctl(ops, fd, request, argument) };
        }
        // SAFETY: the program's arguments, unchanged.
        return unsafe { real::ioctl(fd, request, argument) };
    };
    let answer = |value: Result<c_int, Errno>| {
        // SAFETY: the program passes a pointer to an `int`.
        unsafe { user_memory::write(argument.cast(), &value?) }
    };
    // SAFETY: any bytes are an `int`.
    let int = || unsafe { user_memory::read(argument.cast::<c_int>()) };
    match request {
        libc::FIONREAD => answer(ops.siocinq(fd)).into_c(),
        libc::TIOCOUTQ => answer(ops.siocoutq(fd)).into_c(),
        SIOCOUTQNSD => answer(ops.siocoutqnsd(fd)).into_c(),
        SIOCATMARK => answer(ops.is_at_mark(fd).map(c_int::from)).into_c(),
        SIOCGSTAMP | SIOCGSTAMP_NEW | SIOCGSTAMPNS | SIOCGSTAMPNS_NEW => {
            let in_micros = matches!(request, SIOCGSTAMP | SIOCGSTAMP_NEW);
            let time = ops.siocgstamp(fd).map(|time| {
                let fraction = if in_micros { time.subsec_micros() } else { time.subsec_nanos() };
                [time.as_secs(), fraction.into()]
            });
            // SAFETY: the program passes a pointer to a time of two 64-bit numbers.
            time.and_then(|time| unsafe { user_memory::write(argument.cast(), &time) }).into_c()
        }
        EPIOCGPARAMS => {
            let params = ops.epoll_params(fd);
            // SAFETY: the program passes a pointer to a `struct epoll_params`.
            params.and_then(|params| unsafe { user_memory::write(argument.cast(), &params) }).into_c()
        }
        EPIOCSPARAMS => {
            // SAFETY: any bytes are a `struct epoll_params`.
            let params = unsafe { user_memory::read(argument.cast::<[u8; 8]>()) };
            params.and_then(|params| ops.set_epoll_params(fd, params)).into_c()
        }
        SIOCGPGRP | FIOGETOWN => answer(ops.owner(fd)).into_c(),
        SIOCSPGRP | FIOSETOWN => int().and_then(|owner| ops.set_owner(fd, owner)).into_c(),
        libc::FIONBIO => {
            let set = int().and_then(|on| ops.set_nonblocking(fd, on != 0)).transpose();
            // SAFETY: the program's arguments, unchanged.
            set.map_or_else(|| unsafe { real::ioctl(fd, request, argument) }, IntoC::into_c)
        }
        libc::FIOCLEX | libc::FIONCLEX if ops.owns(fd) => {
            // Flags of the descriptor itself are those of the proxy.
            ops.note_fd_flags_changed(fd);
            // SAFETY: the program's arguments, unchanged.
            unsafe { real::ioctl(fd, request, argument) }
        }
        // Interfaces, addresses, routes and ARP entries.
        // SAFETY: the program's arguments, unchanged.
        SIOCADDRT..=SIOCDEVPRIVATE_LAST => unsafe { super::interfaces::ioctl(ops, fd, request, argument) },
        // SAFETY: the program's arguments, unchanged.
        _ if ops.is_epoll_set(fd) => unsafe { real::ioctl(fd, request, argument) },
        _ => Err::<(), _>(if ops.owns(fd) { Errno::NOTTY } else { Errno::BADF }).into_c(),
    }
}

// Requests on sockets, from `asm-generic/sockios.h` and `linux/sockios.h`.
const FIOSETOWN: libc::c_ulong = 0x8901;
const SIOCSPGRP: libc::c_ulong = 0x8902;
const FIOGETOWN: libc::c_ulong = 0x8903;
const SIOCGPGRP: libc::c_ulong = 0x8904;
const SIOCATMARK: libc::c_ulong = 0x8905;
const SIOCGSTAMP: libc::c_ulong = 0x8906;
const SIOCGSTAMPNS: libc::c_ulong = 0x8907;
const SIOCGSTAMP_NEW: libc::c_ulong = 0x8010_8906;
const SIOCGSTAMPNS_NEW: libc::c_ulong = 0x8010_8907;
const SIOCOUTQNSD: libc::c_ulong = 0x894b;
// Requests on epoll sets (linux/eventpoll.h).
const EPIOCSPARAMS: libc::c_ulong = 0x4008_8a01;
const EPIOCGPARAMS: libc::c_ulong = 0x8008_8a02;
/// The range of requests that concern the network rather than the socket, except for SIOCOUTQNSD
/// (linux/sockios.h).
const SIOCADDRT: libc::c_ulong = 0x890b;
const SIOCDEVPRIVATE_LAST: libc::c_ulong = 0x89ff;

#[unsafe(no_mangle)]
unsafe extern "C" fn sockatmark(fd: c_int) -> c_int {
    let mut at_mark: c_int = 0;
    // SAFETY: the request writes an `int`.
    let result = unsafe { ioctl(fd, SIOCATMARK, (&raw mut at_mark).cast()) };
    if result == 0 { at_mark } else { result }
}

alias! {
    fn __close = close(fd: c_int) -> c_int;
    fn __dup2 = dup2(fd: c_int, to: c_int) -> c_int;
    fn __fcntl = fcntl(fd: c_int, command: c_int, argument: c_long) -> c_int;
    fn fcntl64 = fcntl(fd: c_int, command: c_int, argument: c_long) -> c_int;
}
