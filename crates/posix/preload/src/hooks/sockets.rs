//! Hooks that create, bind, connect and query sockets.
#![allow(unsafe_code)] // functions that C calls

use super::stack_ops;
use crate::{attach, real};
use core::ffi::{c_int, c_void};
use ginnel_posix_ops::ffi::{self, IntoC};
use ginnel_posix_ops::{Ops, SignalDeferred};
use libc::{sockaddr, socklen_t};
use rustix::io::Errno;

#[unsafe(no_mangle)]
unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    if Ops::supports_socket(domain, kind, protocol)
        && let Some(ops) = attach::ops_for_new_socket()
    {
        return ops.socket(domain, kind, protocol).into_c();
    }
    // SAFETY: the program's arguments, unchanged.
    unsafe { real::socket(domain, kind, protocol) }
}

hook! {
    fn bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int = |ops| {
        // SAFETY: the program's address is as long as it says.
        unsafe { ffi::address(address, len) }.and_then(|address| ops.bind(fd, address))
    };
    fn listen(fd: c_int, backlog: c_int) -> c_int = |ops| ops.listen(fd, backlog);
    fn accept4(fd: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int = |ops| {
        ops.accept4(fd, flags).and_then(|(accepted, peer)| {
            // SAFETY: the program's buffer is as long as it says.
            unsafe { ffi::write_address(&peer, address, len) }.map(|()| accepted)
        })
    };
    fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int = |ops| {
        // SAFETY: the program's address is as long as it says.
        unsafe { ffi::address(address, len) }.and_then(|address| ops.connect(fd, address))
    };
    fn shutdown(fd: c_int, how: c_int) -> c_int = |ops| ops.shutdown(fd, how);
    fn getsockname(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int = |ops| {
        // SAFETY: the program's buffer is as long as it says.
        ops.getsockname(fd).and_then(|name| unsafe { ffi::write_value(name.bytes(), address.cast(), len) })
    };
    fn getpeername(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int = |ops| {
        // SAFETY: the program's buffer is as long as it says.
        ops.getpeername(fd).and_then(|name| unsafe { ffi::write_value(name.bytes(), address.cast(), len) })
    };
    fn getsockopt(
        fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t,
    ) -> c_int = |ops| {
        // Allocates the value, so signals are deferred.
        *SignalDeferred::new(|| {
            // SAFETY: the program's buffer is as long as it says.
            unsafe { ffi::write_option(value, len, |space| ops.getsockopt(fd, level, name, space)) }
        })
    };
    fn setsockopt(
        fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t,
    ) -> c_int = |ops| {
        match len.cast_signed() {
            ..0 => Err(Errno::INVAL),
            // SAFETY: the program's value is as long as it says.
            _ => unsafe { ffi::bytes(value, len as usize) }
                .and_then(|value| ops.setsockopt(fd, level, name, value)),
        }
    };
}

alias! {
    fn __socket = socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int;
    fn __connect = connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int;
}

#[unsafe(no_mangle)]
unsafe extern "C" fn accept(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: the program's arguments, unchanged.
    unsafe { accept4(fd, address, len, 0) }
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
    let target = given.unwrap_or(&mut own);
    for port in RESERVED_PORTS.rev() {
        target.sin_port = port.to_be();
        let target: *const libc::sockaddr_in = target;
        // SAFETY: the address has this length.
        let result = unsafe { bind(fd, target.cast(), size_of::<libc::sockaddr_in>() as socklen_t) };
        // SAFETY: libc's variable of this thread.
        if result == 0 || unsafe { *libc::__errno_location() } != libc::EADDRINUSE {
            return result;
        }
    }
    Err::<(), _>(Errno::ADDRINUSE).into_c()
}
