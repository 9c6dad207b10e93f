//! A non-blocking kernel socket to a Redis server.

use super::options::RedisAddress;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use std::io;

/// Begins to connect. Returns the socket, and whether it is connected already; otherwise it becomes writable
/// when the attempt has ended, and [`connect_result`] returns how.
pub fn connect(address: &RedisAddress) -> io::Result<(OwnedFd, bool)> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let new = |family| net::socket_with(family, SocketType::STREAM, flags, None);
    let (socket, result) = match address {
        RedisAddress::Unix(path) => {
            let socket = new(AddressFamily::UNIX)?;
            let result = net::connect(&socket, &SocketAddrUnix::new(path)?);
            (socket, result)
        }
        RedisAddress::Tcp(address) => {
            let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
            let socket = new(family)?;
            sockopt::set_tcp_nodelay(&socket, true)?;
            let result = net::connect(&socket, address);
            (socket, result)
        }
        // Names were looked up at the start, because that blocks.
        RedisAddress::Name(_) => return Err(Errno::NXIO.into()),
    };
    match result {
        Ok(()) => Ok((socket, true)),
        Err(Errno::INPROGRESS) => Ok((socket, false)),
        Err(error) => Err(error.into()),
    }
}

/// Returns how an attempt to connect has ended.
pub fn connect_result(socket: impl AsFd) -> io::Result<()> {
    Ok(sockopt::socket_error(socket)??)
}

/// Reads what has arrived; `Ok(0)` is the end of the stream.
///
/// # Errors
/// `WouldBlock` if nothing has arrived; other errors of `recv(2)`.
pub fn receive(socket: impl AsFd, out: &mut [u8]) -> io::Result<usize> {
    Ok(net::recv(socket, out, RecvFlags::empty())?.0)
}

/// Writes as much as the socket accepts, and returns the number of bytes.
///
/// # Errors
/// `WouldBlock` if the socket accepts nothing now; other errors of `send(2)`.
pub fn send(socket: impl AsFd, bytes: &[u8]) -> io::Result<usize> {
    Ok(net::send(socket, bytes, SendFlags::NOSIGNAL)?)
}
