//! Socket operations of the kernel that std does not offer.

use crate::script::kernel::{sys, tcp_info};
use std::io;
use std::os::fd::AsFd;

/// Fields of `struct tcp_info` by name, as far as this kernel fills them.
pub type KernelInfo = crate::script::assertion::Info;

/// Reads `TCP_INFO` of a kernel socket.
///
/// # Errors
/// The kernel's error.
pub fn kernel_info(socket: impl AsFd) -> io::Result<KernelInfo> {
    let mut bytes = [0; 512];
    let len = sys::socket_option(socket.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, &mut bytes)?;
    Ok(tcp_info::parse(&bytes[..len]))
}

/// Makes the next `close` of a TCP socket send RST (`SO_LINGER` with time 0).
///
/// # Errors
/// The kernel's error.
pub fn reset_on_close(socket: impl AsFd) -> io::Result<()> {
    let linger = std::time::Duration::ZERO;
    Ok(rustix::net::sockopt::set_socket_linger(socket, Some(linger))?)
}
