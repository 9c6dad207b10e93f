//! Hooks that create, bind, connect and query sockets.
#![allow(unsafe_code)] // functions that C calls

use super::{ToC, stack_ops, user_memory};
use crate::{attach, real};
use core::ffi::{c_int, c_void};
use ginnel_posix_ops::{Ops, SignalDeferred};
use libc::{sockaddr, socklen_t};
use rustix::io::Errno;

#[unsafe(no_mangle)]
unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    if Ops::supports_socket(domain, kind, protocol)
        && let Some(ops) = attach::ops_for_new_socket()
    {
        return ops.socket(domain, kind, protocol).to_c();
    }
    // SAFETY: the program's arguments, unchanged.
    unsafe { real::socket(domain, kind, protocol) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    match stack_ops(fd) {
        Some(ops) => {
            // SAFETY: the program's address is as long as it says.
            unsafe { user_memory::address(address, len) }.and_then(|address| ops.bind(fd, address)).to_c()
        }
        // SAFETY: the program's arguments, unchanged.
        None => unsafe { real::bind(fd, address, len) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    match stack_ops(fd) {
        Some(ops) => ops.listen(fd, backlog).to_c(),
        // SAFETY: the program's arguments, unchanged.
        None => unsafe { real::listen(fd, backlog) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn accept(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the program's arguments, unchanged.
    unsafe { accept4(fd, address, len, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn accept4(fd: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int {
    let Some(ops) = stack_ops(fd) else {
        // SAFETY: the program's arguments, unchanged.
        return unsafe { real::accept4(fd, address, len, flags) };
    };
    let accepted = ops.accept4(fd, flags).and_then(|(new, peer)| {
        // SAFETY: the program's buffer is as long as it says.
        unsafe { user_memory::write_address(&peer, address, len) }.map(|()| new)
    });
    accepted.to_c()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    match stack_ops(fd) {
        Some(ops) => {
            // SAFETY: the program's address is as long as it says.
            unsafe { user_memory::address(address, len) }.and_then(|address| ops.connect(fd, address)).to_c()
        }
        // SAFETY: the program's arguments, unchanged.
        None => unsafe { real::connect(fd, address, len) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: an alias.
    unsafe { connect(fd, address, len) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    match stack_ops(fd) {
        Some(ops) => ops.shutdown(fd, how).to_c(),
        // SAFETY: the program's arguments, unchanged.
        None => unsafe { real::shutdown(fd, how) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn getsockname(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let Some(ops) = stack_ops(fd) else {
        // SAFETY: the program's arguments, unchanged.
        return unsafe { real::getsockname(fd, address, len) };
    };
    // SAFETY: the program's buffer is as long as it says.
    ops.getsockname(fd)
        .and_then(|name| unsafe { user_memory::write_value(name.bytes(), address.cast(), len) })
        .to_c()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn getpeername(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let Some(ops) = stack_ops(fd) else {
        // SAFETY: the program's arguments, unchanged.
        return unsafe { real::getpeername(fd, address, len) };
    };
    // SAFETY: the program's buffer is as long as it says.
    ops.getpeername(fd)
        .and_then(|name| unsafe { user_memory::write_value(name.bytes(), address.cast(), len) })
        .to_c()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    let Some(ops) = stack_ops(fd) else {
        // SAFETY: the program's arguments, unchanged.
        return unsafe { real::getsockopt(fd, level, name, value, len) };
    };
    // Allocates the value, so signals are deferred.
    let given = SignalDeferred::new(|| {
        // SAFETY: the program's buffer is as long as it says.
        unsafe { user_memory::write_option(value, len, |room| ops.getsockopt(fd, level, name, room)) }
    });
    given.to_c()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let Some(ops) = stack_ops(fd) else {
        // SAFETY: the program's arguments, unchanged.
        return unsafe { real::setsockopt(fd, level, name, value, len) };
    };
    if len.cast_signed() < 0 {
        return Err::<(), _>(Errno::INVAL).to_c();
    }
    // SAFETY: the program's value is as long as it says.
    unsafe { user_memory::bytes(value, len as usize) }
        .and_then(|value| ops.setsockopt(fd, level, name, value))
        .to_c()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    // SAFETY: an alias.
    unsafe { socket(domain, kind, protocol) }
}

/// Ports that old protocols take for a sign of privilege (bindresvport(3)).
const RESERVED_PORTS: core::ops::RangeInclusive<u16> = 600..=1023;

#[unsafe(no_mangle)]
unsafe extern "C" fn bindresvport(fd: c_int, address: *mut libc::sockaddr_in) -> c_int {
    if stack_ops(fd).is_none() {
        // SAFETY: the program's arguments, unchanged.
        return unsafe { real::bindresvport(fd, address) };
    }
    // SAFETY: the program's address is null or an IPv4 address.
    let given = unsafe { address.as_mut() };
    // SAFETY: an all-zero address is valid.
    let mut own: libc::sockaddr_in = unsafe { core::mem::zeroed() };
    own.sin_family = libc::AF_INET as libc::sa_family_t;
    let place = given.unwrap_or(&mut own);
    for port in RESERVED_PORTS.rev() {
        place.sin_port = port.to_be();
        let place: *const libc::sockaddr_in = place;
        // SAFETY: the address has this length.
        let result = unsafe { bind(fd, place.cast(), size_of::<libc::sockaddr_in>() as socklen_t) };
        // SAFETY: libc's variable of this thread.
        if result == 0 || unsafe { *libc::__errno_location() } != libc::EADDRINUSE {
            return result;
        }
    }
    Err::<(), _>(Errno::ADDRINUSE).to_c()
}
