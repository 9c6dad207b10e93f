//! Calls on the kernel socket of a UDP socket that is both the stack's and the kernel's.

use super::{ControlMessages, ReceivedMessage, SendArgs};
use crate::sockaddr::{self, Family};
use crate::syscall;
use crate::user_memory::{UserSlice, UserSliceMut};
use core::ffi::c_int;
use rustix::fd::RawFd;
use rustix::io::Errno;

/// Calls `sendmsg` on the kernel socket.
pub(crate) fn send(kernel_fd: RawFd, buffers: &[UserSlice<'_>], args: &SendArgs<'_>) -> Result<usize, Errno> {
    syscall::sendmsg(kernel_fd, buffers, args.to.unwrap_or_default(), args.control, args.flags)
}

/// Calls `recvmsg` on the kernel socket.
pub(super) fn recv(
    kernel_fd: RawFd,
    buffers: &mut [UserSliceMut<'_>],
    flags: c_int,
    control_space: usize,
    family: Family,
) -> Result<ReceivedMessage, Errno> {
    let mut name = [0u8; 128];
    let mut control = ControlMessages::none();
    let result = syscall::recvmsg(kernel_fd, buffers, &mut name, control.buffer(control_space), flags)?;
    control.set_len(result.control_len);
    let from = name.get(..result.name_len).and_then(|bytes| sockaddr::decode(bytes, family).ok());
    let from = from.map(|from| sockaddr::encode(from, family));
    Ok(ReceivedMessage { count: result.count, from, control, flags: result.flags })
}
