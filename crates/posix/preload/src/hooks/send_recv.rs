//! Hooks that transfer data.
#![allow(unsafe_code)] // functions that C calls

use super::{scm_rights, stack_ops};
use crate::{attach, real};
use core::ffi::{c_int, c_uint, c_void};
use ginnel_posix_ops::ffi::{self, IntoC, UserAddress};
use ginnel_posix_ops::{Ops, SendArgs, SignalDeferred, SockaddrBytes, UserSlice, UserSliceMut, user_memory};
use libc::{iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t, timespec};
use rustix::io::Errno;

/// Sends one buffer.
fn send_one(ops: &Ops, fd: c_int, bytes: *const c_void, len: size_t, flags: c_int) -> Result<usize, Errno> {
    UserSlice::from_raw(bytes, len).and_then(|bytes| ops.send(fd, &[bytes], flags))
}

/// Receives into one buffer.
///
/// # Safety
/// The buffer must be the argument of a call that writes to it.
unsafe fn recv_one(
    ops: &Ops,
    fd: c_int,
    bytes: *mut c_void,
    len: size_t,
    flags: c_int,
) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    unsafe { UserSliceMut::from_raw(bytes, len) }.and_then(|buffer| ops.recv(fd, &mut [buffer], flags))
}

hook! {
    fn send(fd: c_int, bytes: *const c_void, len: size_t, flags: c_int) -> ssize_t = |ops| {
        send_one(ops, fd, bytes, len, flags)
    };
    fn sendto(
        fd: c_int, bytes: *const c_void, len: size_t, flags: c_int, to: *const sockaddr, to_len: socklen_t,
    ) -> ssize_t = |ops| {
        UserSlice::from_raw(bytes, len).and_then(|bytes| {
            let to = UserAddress::read_optional(to, to_len)?;
            let to = to.as_ref().map(UserAddress::bytes);
            ops.send_to(fd, &[bytes], &SendArgs { flags, to, control: &[] })
        })
    };
    fn write(fd: c_int, bytes: *const c_void, len: size_t) -> ssize_t = |ops| {
        send_one(ops, fd, bytes, len, 0).map_err(error_of_file)
    };
    fn writev(fd: c_int, buffers: *const iovec, count: c_int) -> ssize_t = |ops| {
        write_buffers(ops, fd, buffers, count, 0)
    };
    fn recv(fd: c_int, bytes: *mut c_void, len: size_t, flags: c_int) -> ssize_t = |ops| {
        // SAFETY: the program's buffer.
        unsafe { recv_one(ops, fd, bytes, len, flags) }
    };
    fn read(fd: c_int, bytes: *mut c_void, len: size_t) -> ssize_t = |ops| {
        // The kernel does not call the socket either (`sock_read_iter`).
        if len == 0 && is_socket(ops, fd) {
            Ok(0)
        } else {
            // SAFETY: the program's buffer.
            unsafe { recv_one(ops, fd, bytes, len, 0) }.map_err(error_of_file)
        }
    };
    fn readv(fd: c_int, buffers: *const iovec, count: c_int) -> ssize_t = |ops| {
        // SAFETY: the program's buffers.
        unsafe { read_buffers(ops, fd, buffers, count, 0) }
    };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sendfile(out: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t {
    match (stack_ops(out), stack_ops(from)) {
        (Some(ops), _) => sendfile_at(ops, out, from, offset, count).into_c(),
        (None, Some(ops)) if let Some(flags) = status_flags_of_pipe(out) => {
            // A splice, which waits for a full pipe as the pipe's descriptor says (`do_sendfile`).
            let nonblocking = if flags & libc::O_NONBLOCK != 0 { libc::SPLICE_F_NONBLOCK } else { 0 };
            let spliced = if !offset.is_null() {
                Err(Errno::SPIPE)
            } else if flags & libc::O_ACCMODE == libc::O_RDONLY {
                Err(Errno::BADF)
            } else {
                ops.splice_to_pipe(from, out, count, nonblocking)
            };
            spliced.into_c()
        }
        // SAFETY: the program's arguments, unchanged.
        _ => unsafe { real::sendfile(out, from, offset, count) },
    }
}

/// Returns the flags of `F_GETFL` if a descriptor of the kernel is a pipe.
fn status_flags_of_pipe(fd: c_int) -> Option<c_int> {
    // SAFETY: the commands have no argument.
    let [size, flags] =
        [libc::F_GETPIPE_SZ, libc::F_GETFL].map(|command| unsafe { real::fcntl64(fd, command, 0) });
    Some(flags).filter(|_| size >= 0)
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

/// Returns the number of buffers of `readv` or `writev`; `EINVAL` if it is negative.
fn buffer_count(count: c_int) -> Result<usize, Errno> {
    usize::try_from(count).map_err(|_| Errno::INVAL)
}

/// Returns the error of a call that exists for all files, where a call on sockets returns `error`: an epoll
/// set can be neither read nor written (`vfs_read`).
fn error_of_file(error: Errno) -> Errno {
    if error == Errno::NOTSOCK { Errno::INVAL } else { error }
}

/// Returns whether a descriptor is a socket of the stack, and not an epoll set.
fn is_socket(ops: &Ops, fd: c_int) -> bool {
    ops.owns(fd) && !ops.is_epoll_set(fd)
}

/// Implements `writev`, as a send with `flags`.
fn write_buffers(
    ops: &Ops,
    fd: c_int,
    buffers: *const iovec,
    count: c_int,
    flags: c_int,
) -> Result<usize, Errno> {
    let sent = buffer_count(count).and_then(|count| {
        user_memory::with_buffers(buffers, count, |buffers| {
            // The kernel does not call the socket (`vfs_writev`).
            if buffers.iter().all(|buffer| buffer.is_empty()) && is_socket(ops, fd) {
                return Ok(0);
            }
            ops.send(fd, buffers, flags)
        })
    });
    sent.map_err(error_of_file)
}

/// Implements `readv`, as a receive with `flags`.
///
/// # Safety
/// The buffers must be the arguments of a call that writes to them.
unsafe fn read_buffers(
    ops: &Ops,
    fd: c_int,
    buffers: *const iovec,
    count: c_int,
    flags: c_int,
) -> Result<usize, Errno> {
    let received = buffer_count(count).and_then(|count| {
        // SAFETY: the caller's promise.
        unsafe {
            user_memory::with_buffers_mut(buffers, count, |buffers| {
                // The kernel does not call the socket (`vfs_readv`).
                if buffers.iter().all(|buffer| buffer.is_empty()) && is_socket(ops, fd) {
                    return Ok(0);
                }
                ops.recv(fd, buffers, flags)
            })
        }
    });
    received.map_err(error_of_file)
}

/// Calls `sendfile` with the program's offset, which may be null.
fn sendfile_at(
    ops: &Ops,
    out: c_int,
    from: c_int,
    offset: *mut off_t,
    count: size_t,
) -> Result<usize, Errno> {
    if offset.is_null() {
        return ops.sendfile(out, from, None, count);
    }
    // SAFETY: any bytes are an offset.
    let mut position = unsafe { user_memory::read(offset) }?;
    let sent = ops.sendfile(out, from, Some(&mut position), count);
    // SAFETY: the program's offset.
    unsafe { user_memory::write(offset, &position) }.and(sent)
}

/// Runs a closure with a copy of the program's control messages.
fn with_control<T>(message: &msghdr, run: impl FnOnce(&[u8]) -> Result<T, Errno>) -> Result<T, Errno> {
    let len = message.msg_controllen;
    if len == 0 {
        return run(&[]);
    }
    if len > scm_rights::CONTROL_BYTES_MAX {
        return Err(Errno::NOBUFS);
    }
    let mut short = [0; 256];
    let mut long = (len > short.len()).then(|| SignalDeferred::new(|| vec![0; len]));
    let copy = long.as_mut().map_or(&mut short[..], |long| &mut long[..]);
    user_memory::read_bytes(message.msg_control.cast_const().cast(), &mut copy[..len])?;
    run(&copy[..len])
}

/// Sends a message. A stack socket cannot carry control messages for the kernel, such as descriptors.
fn send_message(ops: &Ops, fd: c_int, message: &msghdr, flags: c_int) -> Result<usize, Errno> {
    let to = UserAddress::read_of_message(message)?;
    let to = to.as_ref().map(UserAddress::bytes);
    user_memory::with_buffers(message.msg_iov, message.msg_iovlen, |buffers| {
        with_control(message, |control| ops.send_to(fd, buffers, &SendArgs { flags, to, control }))
    })
}

/// Returns the address of a field of a structure of the program.
macro_rules! field {
    ($structure:expr, $kind:ty, $field:ident) => {
        $structure.wrapping_byte_add(core::mem::offset_of!($kind, $field)).cast()
    };
}

/// Receives a message, with its sender's address and as many control messages as fit.
///
/// Returns the length of the message and its `msg_flags`.
///
/// # Safety
/// The message must be the argument of a call that writes to it.
unsafe fn recv_message(
    ops: &Ops,
    fd: c_int,
    message: *mut msghdr,
    flags: c_int,
) -> Result<(usize, c_int), Errno> {
    let header = ffi::message(message)?;
    let control_space = if header.msg_control.is_null() { 0 } else { header.msg_controllen };
    // SAFETY: the caller's promise.
    unsafe {
        let received = user_memory::with_buffers_mut(header.msg_iov, header.msg_iovlen, |buffers| {
            ops.recv_from(fd, buffers, flags, control_space)
        })?;
        if !header.msg_name.is_null() {
            let from = received.from.as_ref().map_or(&[][..], SockaddrBytes::bytes);
            ffi::write_value(from, header.msg_name, field!(message, msghdr, msg_namelen))?;
        }
        // The operations were told how much space there is. Control messages that cannot be stored are lost
        // (`put_cmsg`).
        let control = received.control.bytes();
        let is_stored = user_memory::write_list(header.msg_control.cast(), control).is_ok();
        let truncation = if received.control.is_truncated() { libc::MSG_CTRUNC } else { 0 };
        let msg_flags = received.flags | truncation | flags & libc::MSG_CMSG_CLOEXEC;
        user_memory::write(field!(message, msghdr, msg_flags), &msg_flags)?;
        let control_len: size_t = if is_stored { control.len() } else { 0 };
        user_memory::write(field!(message, msghdr, msg_controllen), &control_len)?;
        Ok((received.count, msg_flags))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    match stack_ops(fd) {
        Some(ops) => {
            ffi::message(message).and_then(|message| send_message(ops, fd, &message, flags)).into_c()
        }
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

/// Sends messages on a socket of the kernel: one after the other if they may contain stack sockets.
///
/// # Safety
/// As for libc's `sendmmsg`.
unsafe fn sendmmsg_on_kernel(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    let has_control = |number: usize| {
        // SAFETY: any bytes are a message. The kernel reports a message that cannot be read.
        unsafe { user_memory::read(messages.wrapping_add(number)) }
            .is_ok_and(|m| m.msg_hdr.msg_controllen > 0)
    };
    let considered = (count as usize).min(user_memory::UIO_MAXIOV);
    let Some(ops) = attach::ops().filter(|_| (0..considered).any(has_control)) else {
        // SAFETY: the program's arguments, unchanged.
        return unsafe { real::sendmmsg(fd, messages, count, flags) };
    };
    let sent = ops.sendmmsg(count as usize, |number| {
        let message = messages.wrapping_add(number);
        let header = ffi::message(message.cast())?;
        // SAFETY: the program's message.
        let sent = unsafe { sendmsg(fd, message.cast(), flags) };
        let sent = usize::try_from(sent).map_err(|_| ffi::errno())?;
        // SAFETY: the program's list.
        unsafe { user_memory::write(field!(message, mmsghdr, msg_len), &(sent as c_uint)) }?;
        Ok((sent, ffi::total_len(header.msg_iov, header.msg_iovlen)?))
    });
    sent.map_or_else(|error| Err::<usize, _>(error).into_c(), |count| count as c_int)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int {
    let Some(ops) = stack_ops(fd) else {
        // SAFETY: the program's arguments.
        return unsafe { sendmmsg_on_kernel(fd, messages, count, flags) };
    };
    let sent = ops.sendmmsg(count as usize, |number| {
        let message = messages.wrapping_add(number);
        let header = ffi::message(message.cast())?;
        let sent = send_message(ops, fd, &header, flags)?;
        // SAFETY: the program's list.
        unsafe { user_memory::write(field!(message, mmsghdr, msg_len), &(sent as c_uint)) }?;
        Ok((sent, ffi::total_len(header.msg_iov, header.msg_iovlen)?))
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
        // SAFETY: the program's buffer.
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
    // SAFETY: the program's buffer.
    let received = unsafe { UserSliceMut::from_raw(bytes, len) }
        .and_then(|buffer| ops.recv_from(fd, &mut [buffer], flags, 0))
        .and_then(|received| {
            if !from.is_null() {
                // A stream does not report a sender.
                let name = received.from.as_ref().map_or(&[][..], SockaddrBytes::bytes);
                // SAFETY: the program's buffer and its length.
                unsafe { ffi::write_value(name, from.cast(), from_len) }?;
            }
            Ok(received.count)
        });
    received.into_c()
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
        // SAFETY: the program's message.
        Some(ops) => unsafe { recv_message(ops, fd, message, flags) }.map(|(count, _)| count).into_c(),
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
    let limit = match ffi::timeout(timeout) {
        Ok(limit) => limit,
        Err(error) => return Err::<usize, _>(error).into_c(),
    };
    let received = ops.recvmmsg(fd, count as usize, flags, limit, |number, flags| {
        let message = messages.wrapping_add(number);
        // SAFETY: the program's list.
        unsafe {
            let (count, msg_flags) = recv_message(ops, fd, message.cast(), flags)?;
            user_memory::write(field!(message, mmsghdr, msg_len), &(count as c_uint))?;
            Ok(msg_flags)
        }
    });
    match received {
        Ok((count, remaining)) => {
            if let Some(remaining) = remaining {
                let remaining = timespec {
                    tv_sec: remaining.as_secs().cast_signed(),
                    tv_nsec: remaining.subsec_nanos().into(),
                };
                // SAFETY: the program's time-out.
                if let Err(error) = unsafe { user_memory::write(timeout, &remaining) } {
                    return Err::<usize, _>(error).into_c();
                }
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
        // SAFETY: the program's arguments, unchanged.
        (None, None) => return unsafe { real::splice(from, from_offset, to, to_offset, len, flags) },
        _ if len == 0 => Ok(0),
        _ if flags & !SPLICE_F_ALL != 0 => Err(Errno::INVAL),
        (Some(_), Some(_)) => Err(Errno::INVAL),
        (Some(ops), None) => check_no_offsets((to, to_offset), from_offset)
            .and_then(|()| ops.splice_to_pipe(from, to, len, flags)),
        (None, Some(ops)) => check_no_offsets((from, from_offset), to_offset)
            .and_then(|()| ops.splice_from_pipe(from, to, len, flags)),
    };
    result.into_c()
}

const SPLICE_F_ALL: c_uint =
    libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MORE | libc::SPLICE_F_GIFT;

/// Checks that a call of `splice` gives an offset neither for its pipe nor for its socket, which have none
/// (`__do_splice`).
///
/// # Errors
/// `ESPIPE` for an offset of the pipe; otherwise `EINVAL` for one of the socket, or `EFAULT`. The operation
/// reports a `pipe` that is none.
fn check_no_offsets(pipe: (c_int, *const i64), of_socket: *const i64) -> Result<(), Errno> {
    let (pipe, of_pipe) = pipe;
    if of_pipe.is_null() && of_socket.is_null() {
        return Ok(());
    }
    // SAFETY: the command has no argument.
    if unsafe { real::fcntl64(pipe, libc::F_GETPIPE_SZ, 0) } < 0 {
        return Ok(());
    }
    if !of_pipe.is_null() {
        return Err(Errno::SPIPE);
    }
    // SAFETY: any bytes are an offset.
    unsafe { user_memory::read(of_socket) }?;
    Err(Errno::INVAL)
}

/// Flags of `preadv2` and `pwritev2` that have no effect on a socket.
const RWF_IGNORED: c_int =
    libc::RWF_HIPRI | libc::RWF_DSYNC | libc::RWF_SYNC | libc::RWF_APPEND | libc::RWF_NOAPPEND;

/// Checks that a call of `preadv2` or `pwritev2` has the offset -1, which stands for the current position.
/// Returns the flags of a receive or send that does what the call asks for.
fn without_position(offset: off_t, flags: c_int) -> Result<c_int, Errno> {
    const APPEND_OR_NOT: c_int = libc::RWF_APPEND | libc::RWF_NOAPPEND;
    match offset {
        -1 if flags & !(RWF_IGNORED | libc::RWF_NOWAIT) != 0 => Err(Errno::OPNOTSUPP),
        -1 if flags & APPEND_OR_NOT == APPEND_OR_NOT => Err(Errno::INVAL),
        -1 if flags & libc::RWF_NOWAIT != 0 => Ok(libc::MSG_DONTWAIT),
        -1 => Ok(0),
        ..-1 => Err(Errno::INVAL),
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
    let Some(ops) = stack_ops(fd) else {
        // SAFETY: the program's arguments, unchanged.
        return unsafe { real::preadv2(fd, buffers, count, offset, flags) };
    };
    let received = without_position(offset, flags).and_then(|flags| {
        // SAFETY: the program's buffers.
        unsafe { read_buffers(ops, fd, buffers, count, flags) }
    });
    received.into_c()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pwritev2(
    fd: c_int,
    buffers: *const iovec,
    count: c_int,
    offset: off_t,
    flags: c_int,
) -> ssize_t {
    let Some(ops) = stack_ops(fd) else {
        // SAFETY: the program's arguments, unchanged.
        return unsafe { real::pwritev2(fd, buffers, count, offset, flags) };
    };
    let sent =
        without_position(offset, flags).and_then(|flags| write_buffers(ops, fd, buffers, count, flags));
    sent.into_c()
}
