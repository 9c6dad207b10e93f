//! The interface of packetdrill's `packetdrill.h`, and the function that initialises it.
#![allow(unsafe_code)] // a function that C calls, and its pointers

use crate::session::Session;
use crate::{bytes, calls, network};
use core::ffi::{CStr, c_char, c_int, c_long, c_longlong, c_uint, c_ulong, c_void};
use libc::{
    epoll_event, iovec, msghdr, nfds_t, pollfd, size_t, sockaddr, socklen_t, ssize_t, timeval, timezone,
    useconds_t,
};

/// `struct packetdrill_interface`: each function takes `userdata` first, and has the result of the call of
/// its name, with the error in `errno`.
///
/// `fcntl` and `ioctl` are declared with an optional argument; the ABIs of this library's platforms pass it
/// like any other argument.
#[repr(C)]
#[allow(missing_docs)] // the calls of these names
pub struct PacketdrillInterface {
    /// Pointer of the library that all functions get back.
    pub userdata: *mut c_void,
    pub free: unsafe extern "C" fn(*mut c_void),
    pub socket: unsafe extern "C" fn(*mut c_void, c_int, c_int, c_int) -> c_int,
    pub bind: unsafe extern "C" fn(*mut c_void, c_int, *const sockaddr, socklen_t) -> c_int,
    pub listen: unsafe extern "C" fn(*mut c_void, c_int, c_int) -> c_int,
    pub accept: unsafe extern "C" fn(*mut c_void, c_int, *mut sockaddr, *mut socklen_t) -> c_int,
    pub connect: unsafe extern "C" fn(*mut c_void, c_int, *const sockaddr, socklen_t) -> c_int,
    pub read: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, size_t) -> ssize_t,
    pub readv: unsafe extern "C" fn(*mut c_void, c_int, *const iovec, c_int) -> ssize_t,
    pub recv: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, size_t, c_int) -> ssize_t,
    pub recvfrom: unsafe extern "C" fn(
        *mut c_void,
        c_int,
        *mut c_void,
        size_t,
        c_int,
        *mut sockaddr,
        *mut socklen_t,
    ) -> ssize_t,
    pub recvmsg: unsafe extern "C" fn(*mut c_void, c_int, *mut msghdr, c_int) -> ssize_t,
    pub write: unsafe extern "C" fn(*mut c_void, c_int, *const c_void, size_t) -> ssize_t,
    pub writev: unsafe extern "C" fn(*mut c_void, c_int, *const iovec, c_int) -> ssize_t,
    pub send: unsafe extern "C" fn(*mut c_void, c_int, *const c_void, size_t, c_int) -> ssize_t,
    pub sendto: unsafe extern "C" fn(
        *mut c_void,
        c_int,
        *const c_void,
        size_t,
        c_int,
        *const sockaddr,
        socklen_t,
    ) -> ssize_t,
    pub sendmsg: unsafe extern "C" fn(*mut c_void, c_int, *const msghdr, c_int) -> ssize_t,
    pub fcntl: unsafe extern "C" fn(*mut c_void, c_int, c_int, c_long) -> c_int,
    pub ioctl: unsafe extern "C" fn(*mut c_void, c_int, c_ulong, *mut c_void) -> c_int,
    pub close: unsafe extern "C" fn(*mut c_void, c_int) -> c_int,
    pub shutdown: unsafe extern "C" fn(*mut c_void, c_int, c_int) -> c_int,
    pub getsockopt:
        unsafe extern "C" fn(*mut c_void, c_int, c_int, c_int, *mut c_void, *mut socklen_t) -> c_int,
    pub setsockopt: unsafe extern "C" fn(*mut c_void, c_int, c_int, c_int, *const c_void, socklen_t) -> c_int,
    pub poll: unsafe extern "C" fn(*mut c_void, *mut pollfd, nfds_t, c_int) -> c_int,
    /// Passes an IP packet to the stack. Returns 0, or -1.
    pub netdev_send: unsafe extern "C" fn(*mut c_void, *const c_void, size_t) -> c_int,
    /// Waits for the next IP packet that leaves the stack. The second pointer holds the size of the buffer,
    /// and receives the length of the packet; the third pointer receives the time when the packet left, in
    /// microseconds of `gettimeofday`. Returns 0, or -1.
    pub netdev_receive: unsafe extern "C" fn(*mut c_void, *mut c_void, *mut size_t, *mut c_longlong) -> c_int,
    pub usleep: unsafe extern "C" fn(*mut c_void, useconds_t) -> c_int,
    pub gettimeofday: unsafe extern "C" fn(*mut c_void, *mut timeval, *mut timezone) -> c_int,
    pub epoll_create: unsafe extern "C" fn(*mut c_void, c_int) -> c_int,
    pub epoll_ctl: unsafe extern "C" fn(*mut c_void, c_int, c_int, c_int, *mut epoll_event) -> c_int,
    pub epoll_wait: unsafe extern "C" fn(*mut c_void, c_int, *mut epoll_event, c_int, c_int) -> c_int,
    pub pipe: unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int,
    pub splice:
        unsafe extern "C" fn(*mut c_void, c_int, *mut i64, c_int, *mut i64, size_t, c_uint) -> ssize_t,
}

/// Initialises the interface of a stack, which starts later (see `session.rs`). The flags may be null, and
/// are described in docs/packetdrill.md. Returns 0.
///
/// If the flags are invalid, prints the reason on standard error and returns -1; all functions of the
/// interface fail with `ENODEV` then, because packetdrill ignores the result of this function.
///
/// # Safety
/// The flags are null or a C string; the interface is writable. `userdata` is valid until `free`, which must
/// not be called while any other function runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn packetdrill_interface_init(
    flags: *const c_char,
    interface: *mut PacketdrillInterface,
) -> c_int {
    let flags = match flags.is_null() {
        true => "".into(),
        // SAFETY: the caller's promise.
        false => unsafe { CStr::from_ptr(flags) }.to_string_lossy(),
    };
    let (userdata, result) = match Session::new(&flags) {
        Ok(session) => (Box::into_raw(session).cast(), 0),
        Err(problem) => {
            eprintln!("packetdrill_ginnel: {problem}");
            (core::ptr::null_mut(), -1)
        }
    };
    let functions = PacketdrillInterface {
        userdata,
        free: calls::free,
        socket: calls::socket,
        bind: calls::bind,
        listen: calls::listen,
        accept: calls::accept,
        connect: calls::connect,
        read: bytes::read,
        readv: bytes::readv,
        recv: bytes::recv,
        recvfrom: bytes::recvfrom,
        recvmsg: bytes::recvmsg,
        write: bytes::write,
        writev: bytes::writev,
        send: bytes::send,
        sendto: bytes::sendto,
        sendmsg: bytes::sendmsg,
        fcntl: calls::fcntl,
        ioctl: calls::ioctl,
        close: calls::close,
        shutdown: calls::shutdown,
        getsockopt: calls::getsockopt,
        setsockopt: calls::setsockopt,
        poll: calls::poll,
        netdev_send: network::netdev_send,
        netdev_receive: network::netdev_receive,
        usleep: network::usleep,
        gettimeofday: network::gettimeofday,
        epoll_create: calls::epoll_create,
        epoll_ctl: calls::epoll_ctl,
        epoll_wait: calls::epoll_wait,
        pipe: calls::pipe,
        splice: bytes::splice,
    };
    // SAFETY: the caller's promise.
    unsafe { interface.write(functions) };
    result
}
