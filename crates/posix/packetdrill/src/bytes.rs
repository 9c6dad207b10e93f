//! Calls that send and receive bytes.
#![allow(unsafe_code)] // functions that C calls

use crate::calls::{bytes_of, instance, libc_size_result};
use crate::instance::{CHANNEL_BYTES, Instance};
use core::ffi::{c_int, c_uint, c_void};
use ginnel_posix_ops::ffi::{self, IntoC, UserAddress};
use ginnel_posix_ops::{SendArgs, SockaddrBytes, UserSlice, UserSliceMut, user_memory};
use libc::{iovec, msghdr, size_t, sockaddr, socklen_t, ssize_t};
use rustix::io::Errno;

/// Sends one buffer.
///
/// # Safety
/// `userdata` belongs to an interface, and the buffer has `len` bytes.
unsafe fn send_one(
    userdata: *mut c_void,
    fd: c_int,
    bytes: *const c_void,
    len: size_t,
    flags: c_int,
) -> Result<usize, Errno> {
    // SAFETY: the caller's promises.
    let instance = unsafe { instance(userdata) }?;
    if !instance.ops.owns(fd) {
        // SAFETY: the arguments are passed on unchanged.
        return libc_size_result(unsafe { libc::send(fd, bytes, len, flags) });
    }
    let buffer = UserSlice::from_raw(bytes, len)?;
    let mut sent = instance.settle(instance.ops.send(fd, &[buffer], flags))?;
    // A nonblocking call stops when the channel is full. The stack has taken those bytes meanwhile, as far as
    // its send buffer has room, so the rest is tried again.
    while sent < len {
        let rest = [UserSlice::from_raw(bytes.wrapping_byte_add(sent), len - sent)?];
        match instance.settle(instance.ops.send(fd, &rest, flags | libc::MSG_DONTWAIT)) {
            Ok(more) if more > 0 => sent += more,
            _ => break,
        }
    }
    Ok(sent)
}

/// Receives into one buffer.
///
/// # Safety
/// `userdata` belongs to an interface, and the buffer has `len` bytes.
unsafe fn recv_one(
    userdata: *mut c_void,
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    flags: c_int,
) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    let instance = unsafe { instance(userdata) }?;
    if !instance.ops.owns(fd) {
        // SAFETY: the arguments are passed on unchanged.
        return libc_size_result(unsafe { libc::recv(fd, buffer, len, flags) });
    }
    // SAFETY: the caller's promise.
    let all = unsafe { UserSliceMut::from_raw(buffer, len) }?;
    let mut received = instance.settle(instance.ops.recv(fd, &mut [all], flags))?;
    // The channel was full: the stack may have more bytes, and refills the channel.
    let mut again = received >= CHANNEL_BYTES && flags & libc::MSG_PEEK == 0;
    while again && received < len {
        // SAFETY: the caller's promise.
        let rest = unsafe { UserSliceMut::from_raw(buffer.wrapping_byte_add(received), len - received) }?;
        let more = instance.settle(instance.ops.recv(fd, &mut [rest], flags | libc::MSG_DONTWAIT));
        again = more.is_ok_and(|more| more > 0);
        received += more.unwrap_or(0);
    }
    Ok(received)
}

/// Returns whether the descriptor belongs to the kernel, for example to a pipe.
fn is_kernel_fd(instance: &Result<&Instance, Errno>, fd: c_int) -> bool {
    instance.as_ref().is_ok_and(|instance| !instance.ops.owns(fd))
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn read(userdata: *mut c_void, fd: c_int, buffer: *mut c_void, len: size_t) -> ssize_t {
    // SAFETY: the caller's promises.
    unsafe {
        if is_kernel_fd(&instance(userdata), fd) {
            return libc::read(fd, buffer, len);
        }
        // A read of zero bytes does not reach the socket (`sock_read_iter`).
        if len == 0 { Ok(0) } else { recv_one(userdata, fd, buffer, len, 0) }.into_c()
    }
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn readv(
    userdata: *mut c_void,
    fd: c_int,
    list: *const iovec,
    count: c_int,
) -> ssize_t {
    // SAFETY: the caller's promises.
    unsafe {
        let instance = instance(userdata);
        if is_kernel_fd(&instance, fd) {
            return libc::readv(fd, list, count);
        }
        let result = instance.and_then(|instance| {
            let count = usize::try_from(count).map_err(|_| Errno::INVAL)?;
            user_memory::with_buffers_mut(list, count, |buffer| {
                match buffer.iter().all(UserSliceMut::is_empty) {
                    true => Ok(0),
                    false => instance.settle(instance.ops.recv(fd, buffer, 0)),
                }
            })
        });
        result.into_c()
    }
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn recv(
    userdata: *mut c_void,
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's promises.
    unsafe { recv_one(userdata, fd, buffer, len, flags) }.into_c()
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn recvfrom(
    userdata: *mut c_void,
    fd: c_int,
    buffer: *mut c_void,
    len: size_t,
    flags: c_int,
    from: *mut sockaddr,
    from_len: *mut socklen_t,
) -> ssize_t {
    // SAFETY: the caller's promises.
    let result = unsafe { instance(userdata) }.and_then(|instance| {
        if !instance.ops.owns(fd) {
            // SAFETY: the arguments are passed on unchanged.
            return libc_size_result(unsafe { libc::recvfrom(fd, buffer, len, flags, from, from_len) });
        }
        // SAFETY: the caller's promise.
        let buffer = unsafe { UserSliceMut::from_raw(buffer, len) }?;
        let received = instance.settle(instance.ops.recv_from(fd, &mut [buffer], flags, 0))?;
        if !from.is_null() {
            // A stream does not report a sender.
            let name = received.from.as_ref().map_or(&[][..], SockaddrBytes::bytes);
            // SAFETY: the buffer has the length that the caller states.
            unsafe { ffi::write_value(name, from.cast(), from_len) }?;
        }
        Ok(received.count)
    });
    result.into_c()
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn recvmsg(
    userdata: *mut c_void,
    fd: c_int,
    message: *mut msghdr,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's promises.
    let (instance, message) = unsafe { (instance(userdata), message.as_mut()) };
    let result = instance.and_then(|instance| {
        let message = message.ok_or(Errno::FAULT)?;
        let list = message.msg_iov.cast_const();
        let control_capacity = if message.msg_control.is_null() { 0 } else { message.msg_controllen };
        // SAFETY: the caller's promise.
        let received = unsafe {
            user_memory::with_buffers_mut(list, message.msg_iovlen, |buffer| {
                instance.settle(instance.ops.recv_from(fd, buffer, flags, control_capacity))
            })
        }?;
        if !message.msg_name.is_null() {
            let from = received.from.as_ref().map_or(&[][..], SockaddrBytes::bytes);
            let len = &raw mut message.msg_namelen;
            // SAFETY: the buffer has the length that the caller states.
            unsafe { ffi::write_value(from, message.msg_name, len) }?;
        }
        let control = received.control.bytes();
        // SAFETY: the buffer has room for these bytes, because its length was passed to `recv_from`.
        unsafe {
            core::ptr::copy_nonoverlapping(control.as_ptr(), message.msg_control.cast(), control.len())
        };
        message.msg_controllen = control.len() as _;
        let truncation = if received.control.is_truncated() { libc::MSG_CTRUNC } else { 0 };
        message.msg_flags = received.flags | truncation;
        Ok(received.count)
    });
    result.into_c()
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn write(
    userdata: *mut c_void,
    fd: c_int,
    bytes: *const c_void,
    len: size_t,
) -> ssize_t {
    // SAFETY: the caller's promises.
    unsafe {
        if is_kernel_fd(&instance(userdata), fd) {
            return libc::write(fd, bytes, len);
        }
        send_one(userdata, fd, bytes, len, 0).into_c()
    }
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn writev(
    userdata: *mut c_void,
    fd: c_int,
    list: *const iovec,
    count: c_int,
) -> ssize_t {
    // SAFETY: the caller's promises.
    unsafe {
        let instance = instance(userdata);
        if is_kernel_fd(&instance, fd) {
            return libc::writev(fd, list, count);
        }
        let result = instance.and_then(|instance| {
            let count = usize::try_from(count).map_err(|_| Errno::INVAL)?;
            user_memory::with_buffers(list, count, |parts| instance.settle(instance.ops.send(fd, parts, 0)))
        });
        result.into_c()
    }
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn send(
    userdata: *mut c_void,
    fd: c_int,
    bytes: *const c_void,
    len: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's promises.
    unsafe { send_one(userdata, fd, bytes, len, flags) }.into_c()
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn sendto(
    userdata: *mut c_void,
    fd: c_int,
    bytes: *const c_void,
    len: size_t,
    flags: c_int,
    to: *const sockaddr,
    to_len: socklen_t,
) -> ssize_t {
    // SAFETY: the caller's promises.
    let result = unsafe { instance(userdata) }.and_then(|instance| {
        if !instance.ops.owns(fd) {
            // SAFETY: the arguments are passed on unchanged.
            return libc_size_result(unsafe { libc::sendto(fd, bytes, len, flags, to, to_len) });
        }
        let (bytes, to) = (UserSlice::from_raw(bytes, len)?, UserAddress::read_optional(to, to_len)?);
        let args = SendArgs { flags, to: to.as_ref().map(UserAddress::bytes), control: &[] };
        instance.settle(instance.ops.send_to(fd, &[bytes], &args))
    });
    result.into_c()
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn sendmsg(
    userdata: *mut c_void,
    fd: c_int,
    message: *const msghdr,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the caller's promises.
    unsafe {
        let result = instance(userdata).and_then(|instance| {
            let message = ffi::message(message)?;
            let list = message.msg_iov.cast_const();
            let to = UserAddress::read_of_message(&message)?;
            let control = bytes_of(message.msg_control, message.msg_controllen)?;
            let args = SendArgs { flags, to: to.as_ref().map(UserAddress::bytes), control };
            user_memory::with_buffers(list, message.msg_iovlen, |parts| {
                instance.settle(instance.ops.send_to(fd, parts, &args))
            })
        });
        result.into_c()
    }
}

/// Returns `offset`, or null if it points to 0: packetdrill passes a pointer to 0 where a script has a null
/// offset, as for pipes and sockets.
///
/// # Safety
/// The pointer is null or readable.
unsafe fn null_if_zero(offset: *mut i64) -> *mut i64 {
    // SAFETY: the caller's promise.
    let is_null = unsafe { offset.as_ref() } == Some(&0);
    if is_null { core::ptr::null_mut() } else { offset }
}

/// # Safety
/// As libc's, with the interface's `userdata`.
pub unsafe extern "C" fn splice(
    userdata: *mut c_void,
    from: c_int,
    from_offset: *mut i64,
    to: c_int,
    to_offset: *mut i64,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    // SAFETY: the caller's promise.
    let instance = unsafe { instance(userdata) };
    let result = instance.and_then(|instance| {
        let ops = &instance.ops;
        // SAFETY: null or readable.
        let (from_offset, to_offset) = unsafe { (null_if_zero(from_offset), null_if_zero(to_offset)) };
        match (ops.owns(from), ops.owns(to)) {
            (true, true) => Err(Errno::INVAL),
            (true, false) if !from_offset.is_null() => Err(Errno::SPIPE),
            (false, true) if !to_offset.is_null() => Err(Errno::SPIPE),
            (true, false) => instance.settle(ops.splice_to_pipe(from, to, len, flags)),
            (false, true) => instance.settle(ops.splice_from_pipe(from, to, len, flags)),
            (false, false) => {
                // SAFETY: the arguments are passed on unchanged.
                let count = unsafe { libc::splice(from, from_offset, to, to_offset, len, flags) };
                libc_size_result(count)
            }
        }
    });
    result.into_c()
}
