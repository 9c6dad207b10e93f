//! Calls on the kernel socket of a UDP socket that is both the stack's and the kernel's.

use super::{ControlMessages, ReceivedMessage, SendArgs};
use crate::sockaddr::{self, Family};
use crate::syscall;
use core::ffi::c_int;
use rustix::fd::RawFd;
use rustix::io::Errno;
use std::io::{IoSlice, IoSliceMut};

/// `sendmsg` on the kernel socket.
pub(super) fn send(half: RawFd, buffers: &[IoSlice<'_>], sending: &SendArgs<'_>) -> Result<usize, Errno> {
    syscall::sendmsg(half, buffers, sending.to.unwrap_or_default(), sending.control, sending.flags)
}

/// `recvmsg` on the kernel socket.
pub(super) fn recv(
    half: RawFd,
    buffers: &mut [IoSliceMut<'_>],
    flags: c_int,
    control_room: usize,
    family: Family,
) -> Result<ReceivedMessage, Errno> {
    let mut name = [0u8; 128];
    let mut control = ControlMessages::none();
    let got = syscall::recvmsg(half, buffers, &mut name, control.buffer(control_room), flags)?;
    control.set_len(got.control_len);
    let from = name.get(..got.name_len).and_then(|bytes| sockaddr::decode(bytes, family).ok());
    let from = from.map(|from| sockaddr::encode(from, family));
    Ok(ReceivedMessage { count: got.count, from, control, flags: got.flags })
}
