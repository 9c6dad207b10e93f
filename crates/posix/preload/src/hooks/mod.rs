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
mod signals;
mod sockets;
mod spawn_actions;
mod syscall;
mod user_memory;

use crate::attach;
use core::ffi::{c_int, c_long};
use ginnel_posix_ops::Ops;
use libc::ssize_t;
use rustix::io::Errno;

/// Returns the operations if the descriptor belongs to the stack, or belonged to it until it was closed.
#[inline]
fn stack_ops(fd: c_int) -> Option<&'static Ops> {
    attach::ops().filter(|ops| ops.handles(fd))
}

/// Converts a result to C: -1 with the error number in `errno`.
trait ToC<T> {
    fn to_c(self) -> T;
}

fn fail_with<T>(error: Errno, minus_one: T) -> T {
    user_memory::set_errno(error.raw_os_error());
    minus_one
}

impl ToC<c_int> for Result<(), Errno> {
    fn to_c(self) -> c_int {
        self.map_or_else(|error| fail_with(error, -1), |()| 0)
    }
}

impl ToC<c_int> for Result<c_int, Errno> {
    fn to_c(self) -> c_int {
        self.unwrap_or_else(|error| fail_with(error, -1))
    }
}

impl ToC<c_int> for Result<usize, Errno> {
    fn to_c(self) -> c_int {
        self.map_or_else(|error| fail_with(error, -1), |value| c_int::try_from(value).unwrap_or(c_int::MAX))
    }
}

impl ToC<ssize_t> for Result<usize, Errno> {
    fn to_c(self) -> ssize_t {
        self.map_or_else(|error| fail_with(error, -1), usize::cast_signed)
    }
}

impl ToC<c_long> for c_int {
    fn to_c(self) -> c_long {
        self.into()
    }
}
