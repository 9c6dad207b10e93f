//! Sockets: how they come to be, and what is asked about them.
#![allow(unsafe_code)] // functions that C calls

use super::{ToC, memory, ours};
use crate::{attach, real};
use core::ffi::{c_int, c_void};
use ginnel_posix_ops::Ops;
use libc::{sockaddr, socklen_t};
use rustix::io::Errno;

#[unsafe(no_mangle)]
unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    if Ops::takes_socket(domain, kind, protocol)
        && let Some(ops) = attach::ops()
    {
        return ops.socket(domain, kind, protocol).to_c();
    }
    // SAFETY: passed on as it came.
    unsafe { real::socket(domain, kind, protocol) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn bind(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    match ours(fd) {
        Some(ops) => {
            // SAFETY: the program's address is as long as it says.
            unsafe { memory::address(address, len) }.and_then(|address| ops.bind(fd, address)).to_c()
        }
        // SAFETY: passed on as it came.
        None => unsafe { real::bind(fd, address, len) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn listen(fd: c_int, backlog: c_int) -> c_int {
    match ours(fd) {
        Some(ops) => ops.listen(fd, backlog).to_c(),
        // SAFETY: passed on as it came.
        None => unsafe { real::listen(fd, backlog) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn accept(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    // SAFETY: passed on as it came.
    unsafe { accept4(fd, address, len, 0) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn accept4(fd: c_int, address: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int {
    let Some(ops) = ours(fd) else {
        // SAFETY: passed on as it came.
        return unsafe { real::accept4(fd, address, len, flags) };
    };
    let accepted = ops.accept4(fd, flags).and_then(|(new, peer)| {
        // SAFETY: the program's room is as much as it says.
        unsafe { memory::put_address(&peer, address, len) }.map(|()| new)
    });
    accepted.to_c()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    match ours(fd) {
        Some(ops) => {
            // SAFETY: the program's address is as long as it says.
            unsafe { memory::address(address, len) }.and_then(|address| ops.connect(fd, address)).to_c()
        }
        // SAFETY: passed on as it came.
        None => unsafe { real::connect(fd, address, len) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __connect(fd: c_int, address: *const sockaddr, len: socklen_t) -> c_int {
    // SAFETY: the same by another name.
    unsafe { connect(fd, address, len) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    match ours(fd) {
        Some(ops) => ops.shutdown(fd, how).to_c(),
        // SAFETY: passed on as it came.
        None => unsafe { real::shutdown(fd, how) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn getsockname(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let Some(ops) = ours(fd) else {
        // SAFETY: passed on as it came.
        return unsafe { real::getsockname(fd, address, len) };
    };
    // SAFETY: the program's room is as much as it says.
    ops.getsockname(fd).and_then(|name| unsafe { memory::put(name.bytes(), address.cast(), len) }).to_c()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn getpeername(fd: c_int, address: *mut sockaddr, len: *mut socklen_t) -> c_int {
    let Some(ops) = ours(fd) else {
        // SAFETY: passed on as it came.
        return unsafe { real::getpeername(fd, address, len) };
    };
    // SAFETY: the program's room is as much as it says.
    ops.getpeername(fd).and_then(|name| unsafe { memory::put(name.bytes(), address.cast(), len) }).to_c()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    let Some(ops) = ours(fd) else {
        // SAFETY: passed on as it came.
        return unsafe { real::getsockopt(fd, level, name, value, len) };
    };
    let result = ops.getsockopt(fd, level, name);
    // SAFETY: the program's room is as much as it says.
    result.and_then(|option| unsafe { memory::put_option(option.bytes(), value, len) }).to_c()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let Some(ops) = ours(fd) else {
        // SAFETY: passed on as it came.
        return unsafe { real::setsockopt(fd, level, name, value, len) };
    };
    if len.cast_signed() < 0 {
        return Err::<(), _>(Errno::INVAL).to_c();
    }
    // SAFETY: the program's value is as long as it says.
    unsafe { memory::bytes(value, len as usize) }
        .and_then(|value| ops.setsockopt(fd, level, name, value))
        .to_c()
}
