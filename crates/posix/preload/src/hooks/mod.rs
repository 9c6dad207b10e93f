//! The hooks: functions that replace libc's. Each passes the call on to libc unless it concerns a stack
//! socket.

mod descriptors;
mod epoll;
mod exec;
mod interfaces;
mod poll;
mod sandbox;
mod scm_rights;
mod send_recv;
mod signal_masks;
mod signals;
mod sockets;
mod spawn_actions;
mod syscall;

use crate::attach;
use core::ffi::c_int;
use ginnel_posix_ops::Ops;

/// Returns the operations if they must answer for the descriptor: it belongs to the stack, belonged to it
/// until the program closed it, or is internal to the library. In the last two cases the operations return
/// `EBADF`.
#[inline]
fn stack_ops(fd: c_int) -> Option<&'static Ops> {
    attach::ops().filter(|ops| ops.handles(fd))
}
