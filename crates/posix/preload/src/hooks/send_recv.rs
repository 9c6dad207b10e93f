//! Hooks that transfer data.
#![allow(unsafe_code)] // functions that C calls

use super::{scm_rights, stack_ops};
use crate::{attach, real};
use core::ffi::{c_int, c_uint, c_void};
use ginnel_posix_ops::ffi::{self, IntoC};
use ginnel_posix_ops::{Ops, SendArgs, SignalDeferred};
use libc::{iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t, timespec};
use rustix::io::Errno;
use std::io::{IoSlice, IoSliceMut};

/// Sends one buffer.
///
/// # Safety
/// `bytes` must be readable for `len` bytes.
unsafe fn send_one(
    ops: &Ops,
    fd: c_int,
    bytes: *const c_void,
    len: size_t,
    flags: c_int,
) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    unsafe { ffi::bytes(bytes, len) }.and_then(|bytes| ops.send(fd, &[IoSlice::new(bytes)], flags))
}

/// Receives into one buffer.
///
/// # Safety
/// `bytes` must be null or writable for `len` bytes.
unsafe fn recv_one(
    ops: &Ops,
    fd: c_int,
    bytes: *mut c_void,
    len: size_t,
    flags: c_int,
) -> Result<usize, Errno> {
    if flags & libc::MSG_TRUNC != 0 && bytes.is_null() {
        let mut discarded = SignalDeferred::new(|| vec![0; len.min(1 << 20)]);
        return ops.recv(fd, &mut [IoSliceMut::new(&mut discarded)], flags);
    }
    if bytes.is_null() && len > 0 {
        return ops.recv_to_null(fd, flags);
    }
    // SAFETY: the caller's promise.
    unsafe { ffi::writable_bytes(bytes, len) }
        .and_then(|buffer| ops.recv(fd, &mut [IoSliceMut::new(buffer)], flags))
}

hook! {
    fn send(fd: c_int, bytes: *const c_void, len: size_t, flags: c_int) -> ssize_t = |ops| {
        // SAFETY: the program's buffer is as long as it says.
        unsafe { send_one(ops, fd, bytes, len, flags) }
    };
    fn sendto(
        fd: c_int, bytes: *const c_void, len: size_t, flags: c_int, to: *const sockaddr, to_len: socklen_t,
    ) -> ssize_t = |ops| {
        // SAFETY: the program's buffer and address are as long as it says.
        unsafe { ffi::bytes(bytes, len) }.and_then(|bytes| {
            // SAFETY: the program's address is as long as it says.
            let to = unsafe { ffi::optional_address(to, to_len) }?;
            ops.send_to(fd, &[IoSlice::new(bytes)], &SendArgs { flags, to, control: &[] })
        })
    };
    fn write(fd: c_int, bytes: *const c_void, len: size_t) -> ssize_t = |ops| {
        // SAFETY: the program's buffer is as long as it says.
        unsafe { send_one(ops, fd, bytes, len, 0) }
    };
    fn writev(fd: c_int, buffers: *const iovec, count: c_int) -> ssize_t = |ops| {
        buffer_count(count).and_then(|count| {
            // SAFETY: the program's list and buffers are as long as it says.
            unsafe { ffi::with_buffers(buffers, count, |buffers| ops.send(fd, buffers, 0)) }
        })
    };
    fn recv(fd: c_int, bytes: *mut c_void, len: size_t, flags: c_int) -> ssize_t = |ops| {
        // SAFETY: the program's buffer is as long as it says.
        unsafe { recv_one(ops, fd, bytes, len, flags) }
    };
    fn read(fd: c_int, bytes: *mut c_void, len: size_t) -> ssize_t = |ops| {
        // The kernel does not call the socket either (`sock_read_iter`).
        if len == 0 && ops.owns(fd) {
            Ok(0)
        } else {
            // SAFETY: the program's buffer is as long as it says.
            unsafe { recv_one(ops, fd, bytes, len, 0) }
        }
    };
    fn readv(fd: c_int, buffers: *const iovec, count: c_int) -> ssize_t = |ops| {
        buffer_count(count).and_then(|count| {
            // SAFETY: the program's list and buffers are as long as it says.
            unsafe { ffi::with_buffers_mut(buffers, count, |buffers| ops.recv(fd, buffers, 0)) }
        })
    };
    fn sendfile(out: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t = |ops| {
        // SAFETY: the program's offset, which may be null.
        ops.sendfile(out, from, unsafe { offset.as_mut() }, count)
    };
}

alias! {
    fn __send = send(fd: c_int, bytes: *const c_void, len: size_t, flags: c_int) -> ssize_t;
    fn __sendmmsg = sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int;
    fn __write = write(fd: c_int, bytes: *const c_void, len: size_t) -> ssize_t;
    fn __recv = recv(fd: c_int, bytes: *mut c_void, len: size_t, flags: c_int) -> ssize_t;
    fn __read = read(fd: c_int, bytes: *mut c_void, len: size_t) -> ssize_t;
    fn sendfile64 = sendfile(out: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t;
    fn preadv64v2 = preadv2(
        fd: c_int, buffers: *const iovec, count: c_int, offset: off_t, flags: c_int,
    ) -> ssize_t;
    fn pwritev64v2 = pwritev2(
        fd: c_int, buffers: *const iovec, count: c_int, offset: off_t, flags: c_int,
    ) -> ssize_t;
}

/// Returns the number of buffers of `readv` or `writev`.
fn buffer_count(count: c_int) -> Result<usize, Errno> {
    usize::try_from(count).map_err(|_| Errno::INVAL)
}

/// Sends a message. A stack socket cannot carry control messages for the kernel, such as descriptors.
///
/// # Safety
/// The message must be null or valid.
unsafe fn send_message(ops: &Ops, fd: c_int, message: *const msghdr, flags: c_int) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    unsafe {
        let message = ffi::message(message)?;
        let buffers = message.msg_iov.cast_const();
        let to = ffi::optional_address(message.msg_name.cast_const().cast(), message.msg_namelen)?;
        let control = ffi::bytes(message.msg_control, message.msg_controllen)?;
        let sending = SendArgs { flags, to, control };
        ffi::with_buffers(buffers, message.msg_iovlen, |buffers| ops.send_to(fd, buffers, &sending))
    }
}

/// Receives a message, with its sender's address and as many control messages as fit.
///
/// # Safety
/// The message must be null or valid.
unsafe fn recv_message(ops: &Ops, fd: c_int, message: *mut msghdr, flags: c_int) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    unsafe {
        let message = message.as_mut().ok_or(Errno::FAULT)?;
        let buffers = message.msg_iov.cast_const();
        let control_space = if message.msg_control.is_null() { 0 } else { message.msg_controllen };
        let received = ffi::with_buffers_mut(buffers, message.msg_iovlen, |buffers| {
            ops.recv_from(fd, buffers, flags, control_space)
        })?;
        match received.from.filter(|_| !message.msg_name.is_null()) {
            Some(from) => ffi::write_value(from.bytes(), message.msg_name, &raw mut message.msg_namelen)?,
            None => message.msg_namelen = 0,
        }
        let control = received.control.bytes();
        // The operations were told how much space there is.
        core::ptr::copy_nonoverlapping(control.as_ptr(), message.msg_control.cast(), control.len());
        message.msg_controllen = control.len() as _;
        let truncation = if received.control.is_truncated() { libc::MSG_CTRUNC } else { 0 };
        message.msg_flags = received.flags | truncation;
        Ok(received.count)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    match stack_ops(fd) {
        // SAFETY: the program's message is valid.
        Some(ops) => unsafe { send_message(ops, fd, message, flags) }.into_c(),
        // SAFETY: the program's arguments, except for stack sockets in the message.
        None => unsafe {
            match scm_rights::send_passing_fds(message, |message| real::sendmsg(fd, message, flags)) {
                Some(Ok(sent)) => sent,
                Some(Err(error)) => Err::<usize, _>(error).into_c(),
                None => real::sendmsg(fd, message, flags),
            }
        },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    let Some(ops) = stack_ops(fd) else {
        // SAFETY: the program's arguments, one message after the other if they may contain stack sockets.
        return unsafe {
            let has_control = |at: usize| (*messages.add(at)).msg_hdr.msg_controllen > 0;
            if attach::ops().is_none() || !(0..count as usize).any(has_control) {
                return real::sendmmsg(fd, messages, count, flags);
            }
            for at in 0..count as usize {
                let message = &mut *messages.add(at);
                match sendmsg(fd, &raw const message.msg_hdr, flags) {
                    ..0 => return if at == 0 { -1 } else { at as c_int },
                    sent => message.msg_len = sent as c_uint,
                }
            }
            count as c_int
        };
    };
    let sent = ops.sendmmsg(count as usize, |number| {
        // SAFETY: the program's list has `count` elements, each with valid buffers.
        unsafe {
            let message = &mut *messages.add(number);
            let sent = send_message(ops, fd, &raw const message.msg_hdr, flags)?;
            message.msg_len = sent as c_uint;
            Ok((sent, ffi::total_len(message.msg_hdr.msg_iov, message.msg_hdr.msg_iovlen)))
        }
    });
    sent.map_or_else(|error| Err::<usize, _>(error).into_c(), |count| count as c_int)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __recv_chk(
    fd: c_int,
    bytes: *mut c_void,
    len: size_t,
    buffer: size_t,
    flags: c_int,
) -> ssize_t {
    match stack_ops(fd).filter(|_| len <= buffer) {
        // SAFETY: the program's buffer is as long as it says.
        Some(ops) => unsafe { recv_one(ops, fd, bytes, len, flags) }.into_c(),
        // SAFETY: the program's arguments, unchanged; libc aborts a program that claims too much space.
        None => unsafe { real::__recv_chk(fd, bytes, len, buffer, flags) },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn recvfrom(
    fd: c_int,
    bytes: *mut c_void,
    len: size_t,
    flags: c_int,
    from: *mut sockaddr,
    from_len: *mut socklen_t,
) -> ssize_t {
    let Some(ops) = stack_ops(fd) else {
        // SAFETY: the program's arguments, unchanged.
        return unsafe { real::recvfrom(fd, bytes, len, flags, from, from_len) };
    };
    // SAFETY: the program's buffer is as long as it says.
    unsafe {
        if flags & libc::MSG_TRUNC != 0 && bytes.is_null() {
            return recv_one(ops, fd, bytes, len, flags).into_c();
        }
        let received = ffi::writable_bytes(bytes, len)
            .and_then(|buffer| ops.recv_from(fd, &mut [IoSliceMut::new(buffer)], flags, 0))
            .and_then(|received| {
                match received.from.filter(|_| !from.is_null()) {
                    Some(name) => ffi::write_value(name.bytes(), from.cast(), from_len)?,
                    // A stream does not report a sender.
                    None if !from.is_null() && !from_len.is_null() => *from_len = 0,
                    None => {}
                }
                Ok(received.count)
            });
        received.into_c()
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    bytes: *mut c_void,
    len: size_t,
    buffer: size_t,
    flags: c_int,
    from: *mut sockaddr,
    from_len: *mut socklen_t,
) -> ssize_t {
    if stack_ops(fd).is_some() && len <= buffer {
        // SAFETY: the program's arguments, unchanged.
        return unsafe { recvfrom(fd, bytes, len, flags, from, from_len) };
    }
    // SAFETY: the program's arguments, unchanged; libc aborts a program that claims too much space.
    unsafe { real::__recvfrom_chk(fd, bytes, len, buffer, flags, from, from_len) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __read_chk(fd: c_int, bytes: *mut c_void, len: size_t, buffer: size_t) -> ssize_t {
    if stack_ops(fd).is_some() && len <= buffer {
        // SAFETY: the program's arguments, unchanged.
        return unsafe { read(fd, bytes, len) };
    }
    // SAFETY: the program's arguments, unchanged; libc aborts a program that claims too much space.
    unsafe { real::__read_chk(fd, bytes, len, buffer) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    match stack_ops(fd) {
        // SAFETY: the program's message is valid.
        Some(ops) => unsafe { recv_message(ops, fd, message, flags) }.into_c(),
        // SAFETY: the program's arguments, unchanged.
        None => unsafe {
            let count = real::recvmsg(fd, message, flags);
            if count >= 0 {
                scm_rights::import_received_fds(message);
            }
            count
        },
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    let Some(ops) = stack_ops(fd) else {
        // SAFETY: the program's arguments, unchanged.
        return unsafe {
            let count = real::recvmmsg(fd, messages, count, flags, timeout);
            (0..usize::try_from(count).unwrap_or(0))
                .for_each(|at| scm_rights::import_received_fds(&raw const (*messages.add(at)).msg_hdr));
            count
        };
    };
    // SAFETY: the program's time-out, which may be null.
    let limit = match unsafe { ffi::timeout(timeout) } {
        Ok(limit) => limit,
        Err(error) => return Err::<usize, _>(error).into_c(),
    };
    let received = ops.recvmmsg(fd, count as usize, flags, limit, |number, flags| {
        // SAFETY: the program's list has `count` elements, each a valid message.
        unsafe {
            let message = &mut *messages.add(number);
            message.msg_len = recv_message(ops, fd, &raw mut message.msg_hdr, flags)? as c_uint;
            Ok(message.msg_hdr.msg_flags)
        }
    });
    match received {
        Ok((count, remaining)) => {
            if let Some(remaining) = remaining {
                // SAFETY: the time-out was read from there.
                let stored = unsafe { &mut *timeout };
                stored.tv_sec = remaining.as_secs().cast_signed();
                stored.tv_nsec = remaining.subsec_nanos().into();
            }
            count as c_int
        }
        Err(error) => Err::<usize, _>(error).into_c(),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn splice(
    from: c_int,
    from_offset: *mut i64,
    to: c_int,
    to_offset: *mut i64,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    let result = match (stack_ops(from), stack_ops(to)) {
        (Some(_), Some(_)) => Err(Errno::INVAL),
        (Some(_), None) | (None, Some(_)) if !from_offset.is_null() && stack_ops(from).is_some() => {
            Err(Errno::SPIPE)
        }
        (None, Some(_)) if !to_offset.is_null() => Err(Errno::SPIPE),
        (Some(ops), None) => ops.splice_to_pipe(from, to, len, flags),
        (None, Some(ops)) => ops.splice_from_pipe(from, to, len, flags),
        // SAFETY: the program's arguments, unchanged.
        (None, None) => return unsafe { real::splice(from, from_offset, to, to_offset, len, flags) },
    };
    result.into_c()
}

/// Checks that `preadv2` or `pwritev2` is the same as `readv` or `writev`: without a position, and without
/// flags. (A socket could honour `RWF_NOWAIT`.)
fn check_no_position(offset: off_t, flags: c_int) -> Result<(), Errno> {
    match (offset, flags) {
        (-1, 0) => Ok(()),
        (-1, _) => Err(Errno::OPNOTSUPP),
        _ => Err(Errno::SPIPE),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn preadv2(
    fd: c_int,
    buffers: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    match stack_ops(fd).map(|_| check_no_position(offset, flags)) {
        // SAFETY: the program's arguments, unchanged.
        None => unsafe { real::preadv2(fd, buffers, count, offset, flags) },
        // SAFETY: the program's arguments, unchanged.
        Some(Ok(())) => unsafe { readv(fd, buffers, count) },
        Some(Err(error)) => Err::<usize, _>(error).into_c(),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pwritev2(
    fd: c_int,
    buffers: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    match stack_ops(fd).map(|_| check_no_position(offset, flags)) {
        // SAFETY: the program's arguments, unchanged.
        None => unsafe { real::pwritev2(fd, buffers, count, offset, flags) },
        // SAFETY: the program's arguments, unchanged.
        Some(Ok(())) => unsafe { writev(fd, buffers, count) },
        Some(Err(error)) => Err::<usize, _>(error).into_c(),
    }
}
