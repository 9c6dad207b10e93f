//! Descriptors in messages over Unix sockets (`SCM_RIGHTS`): a socket of the stack's travels as something that tells the receiver's library what it is.
#![allow(unsafe_code)] // control messages of C

use crate::attach;
use core::ffi::c_int;
use ginnel_posix_ops::{Ops, PassedFd, SignalDeferred};
use libc::{cmsghdr, msghdr};
use rustix::fd::RawFd;
use rustix::io::Errno;

/// The descriptors of each control message that carries some, one after the other, to be changed.
///
/// # Safety
/// The message is as it says, and its control messages are writable.
unsafe fn for_each_fd(
    message: *const msghdr,
    mut act: impl FnMut(&mut RawFd) -> Result<(), Errno>,
) -> Result<(), Errno> {
    // SAFETY: the caller's promise: the library's own functions for going through control messages stay within them.
    unsafe {
        let mut header: *mut cmsghdr = libc::CMSG_FIRSTHDR(message);
        while let Some(control) = header.as_ref() {
            if (control.cmsg_level, control.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let data: *mut RawFd = libc::CMSG_DATA(header).cast();
                let bytes = control.cmsg_len.saturating_sub(data.addr() - header.addr());
                for at in 0..bytes / size_of::<RawFd>() {
                    // They need not be aligned.
                    let mut fd = data.add(at).read_unaligned();
                    act(&mut fd)?;
                    data.add(at).write_unaligned(fd);
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
    Ok(())
}

/// Sends a message by `send` with what is to travel in the place of the stack's sockets. `None`: there are none in it, or it cannot be told; it is sent as it is.
///
/// # Safety
/// The message is null or as it says.
pub unsafe fn send_passing_fds<T>(
    message: *const msghdr,
    send: impl FnOnce(*const msghdr) -> T,
) -> Option<Result<T, Errno>> {
    // SAFETY: the caller's promise.
    let known = unsafe { message.as_ref() }?;
    let ops = attach::ops()?;
    if known.msg_control.is_null() || known.msg_controllen < size_of::<cmsghdr>() {
        return None;
    }
    let mut any = false;
    let look = |fd: &mut RawFd| {
        any |= ops.owns(*fd);
        Ok(())
    };
    // SAFETY: the caller's promise; nothing is changed, and what is written is what was there.
    let copied = unsafe {
        let control: *const u8 = known.msg_control.cast();
        core::slice::from_raw_parts(control, known.msg_controllen)
    };
    // As aligned as a control message has to be.
    let mut words = SignalDeferred::new(|| vec![0u64; copied.len().div_ceil(size_of::<u64>())]);
    // SAFETY: there is room for as many bytes.
    unsafe { core::ptr::copy_nonoverlapping(copied.as_ptr(), words.as_mut_ptr().cast(), copied.len()) };
    let mut other = *known;
    other.msg_control = words.as_mut_ptr().cast();
    // SAFETY: a copy of control messages that are as they say.
    unsafe { for_each_fd(&raw const other, look) }.ok()?;
    if !any {
        return None;
    }
    let travelling = SignalDeferred::new(|| {
        let mut travellers: Vec<PassedFd> = Vec::new();
        let replace = |fd: &mut RawFd| {
            if ops.owns(*fd) {
                let traveller = ops.pass_fd(*fd)?;
                *fd = traveller.number(*fd);
                travellers.push(traveller);
            }
            Ok(())
        };
        // SAFETY: as above.
        let replaced = unsafe { for_each_fd(&raw const other, replace) };
        (replaced, travellers)
    });
    Some(travelling.0.map(|()| send(&raw const other)))
}

/// A message came: descriptors in it may stand for sockets of the stack's.
///
/// # Safety
/// The message is as the kernel has filled it in.
pub unsafe fn import_received_fds(message: *const msghdr) {
    if !attach::is_on_a_stack() {
        return;
    }
    let arrived = |fd: c_int| {
        if fd >= 0
            && attach::ops().is_none_or(|ops| !ops.owns(fd))
            && Ops::may_be_stack_socket(fd)
            && let Some(ops) = attach::ops_or_attach()
        {
            ops.receive_fd(fd);
        }
    };
    // SAFETY: the caller's promise; nothing is changed.
    let _ = unsafe {
        for_each_fd(message, |fd| {
            arrived(*fd);
            Ok(())
        })
    };
}
