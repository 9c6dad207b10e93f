//! What std does not tell about the kernel's sockets.

use crate::script::kernel::{sys, tcp_info};
use std::io;
use std::os::fd::AsFd;

/// `struct tcp_info` by field name, as far as this kernel fills it.
pub type KernelInfo = crate::script::assertion::Info;

/// What the kernel says about a TCP socket (`TCP_INFO`).
///
/// # Errors
/// What the kernel answered.
pub fn kernel_info(socket: impl AsFd) -> io::Result<KernelInfo> {
    let mut bytes = [0; 512];
    let len = sys::socket_option(socket.as_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, &mut bytes)?;
    Ok(tcp_info::parse(&bytes[..len]))
}

/// Makes the next `close` of a TCP socket send RST (`SO_LINGER` with time 0).
///
/// # Errors
/// What the kernel answered.
pub fn reset_on_close(socket: impl AsFd) -> io::Result<()> {
    let linger = std::time::Duration::ZERO;
    Ok(rustix::net::sockopt::set_socket_linger(socket, Some(linger))?)
}
