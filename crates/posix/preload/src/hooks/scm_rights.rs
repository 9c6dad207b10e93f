//! Passing of descriptors over Unix sockets (`SCM_RIGHTS`): a stack socket is replaced by a descriptor that
//! identifies it to the receiver's library.
#![allow(unsafe_code)] // control messages of C

use crate::attach;
use core::ffi::c_int;
use ginnel_posix_ops::{Ops, PassedFd, SignalDeferred, user_memory};
use libc::{cmsghdr, msghdr};
use rustix::fd::RawFd;
use rustix::io::Errno;

/// Maximum length of control messages, in bytes (the default of `net.core.optmem_max`).
pub const CONTROL_BYTES_MAX: usize = 128 << 10;

/// Calls `act` with each descriptor in the control messages, and stores the number that `act` makes of it.
///
/// # Errors
/// The first error of `act`, after which no further descriptor is visited; `EINVAL` if a control message is
/// longer than what is left, as on Linux.
///
/// # Safety
/// The message must be valid, and the bytes of its control messages writable; their contents may be invalid.
unsafe fn for_each_fd(
    message: *const msghdr,
    mut act: impl FnMut(&mut RawFd) -> Result<(), Errno>,
) -> Result<(), Errno> {
    // SAFETY: the caller's promise; libc's iteration stays inside of the control messages, and the length of
    // each is checked.
    unsafe {
        let end = (*message).msg_control.addr() + (*message).msg_controllen;
        let mut header: *mut cmsghdr = libc::CMSG_FIRSTHDR(message);
        while let Some(control) = header.as_ref() {
            if !(size_of::<cmsghdr>()..=end - header.addr()).contains(&control.cmsg_len) {
                return Err(Errno::INVAL);
            }
            if (control.cmsg_level, control.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let data: *mut RawFd = libc::CMSG_DATA(header).cast();
                let bytes = control.cmsg_len.saturating_sub(data.addr() - header.addr());
                for at in 0..bytes / size_of::<RawFd>() {
                    // The descriptors may be unaligned.
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

/// Calls `send` with a copy of the message in which stack sockets are replaced by what is passed. Returns
/// `None` if the message contains no stack socket, or cannot be read or parsed: it must then be sent
/// unchanged. An inner error is that of [`Ops::pass_fd`]; nothing was sent then.
pub fn send_passing_fds<T>(
    message: *const msghdr,
    send: impl FnOnce(*const msghdr) -> T,
) -> Option<Result<T, Errno>> {
    let ops = attach::ops()?;
    // SAFETY: any bytes are a message.
    let original = unsafe { user_memory::read(message) }.ok()?;
    let control_len = original.msg_controllen;
    if !(size_of::<cmsghdr>()..=CONTROL_BYTES_MAX).contains(&control_len) {
        return None;
    }
    let mut any = false;
    let check = |fd: &mut RawFd| {
        any |= ops.handles(*fd);
        Ok(())
    };
    // Aligned as control messages must be.
    let mut buffer = SignalDeferred::new(|| vec![0u64; control_len.div_ceil(size_of::<u64>())]);
    // SAFETY: the buffer is at least that long, and any bytes may be stored there.
    let bytes = unsafe { core::slice::from_raw_parts_mut(buffer.as_mut_ptr().cast(), control_len) };
    user_memory::read_bytes(original.msg_control.cast_const().cast(), bytes).ok()?;
    let mut copy = original;
    copy.msg_control = buffer.as_mut_ptr().cast();
    // SAFETY: a copy of valid control messages.
    unsafe { for_each_fd(&raw const copy, check) }.ok()?;
    if !any {
        return None;
    }
    let sending = SignalDeferred::new(|| {
        let mut passed: Vec<PassedFd> = Vec::new();
        let replace = |fd: &mut RawFd| {
            if ops.handles(*fd) {
                let passed_fd = ops.pass_fd(*fd)?;
                *fd = passed_fd.number(*fd);
                passed.push(passed_fd);
            }
            Ok(())
        };
        // SAFETY: a copy of valid control messages.
        let replaced = unsafe { for_each_fd(&raw const copy, replace) };
        (replaced, passed)
    });
    Some(sending.0.map(|()| send(&raw const copy)))
}

/// Takes over stack sockets in a received message.
///
/// # Safety
/// The message must be as the kernel has filled it in.
pub unsafe fn import_received_fds(message: *const msghdr) {
    if !attach::is_on_a_stack() {
        return;
    }
    let arrived = |fd: c_int| {
        if fd >= 0
            && attach::ops().is_none_or(|ops| !ops.owns(fd))
            && Ops::may_be_stack_socket(fd)
            && let Some(ops) = attach::ops_or_attach_quietly()
        {
            ops.receive_fd(fd);
        }
    };
    // SAFETY: the caller's promise; each descriptor is written back unchanged.
    let _ = unsafe {
        for_each_fd(message, |fd| {
            arrived(*fd);
            Ok(())
        })
    };
}
