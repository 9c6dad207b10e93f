//! `getsockname` and `getpeername`.

use crate::Ops;
use crate::file::SocketRole;
use crate::sockaddr::{self, SockaddrBytes};
use rustix::fd::RawFd;
use rustix::io::Errno;

impl Ops {
    /// `getsockname`.
    ///
    /// # Errors
    /// `EBADF`, `ENOTSOCK`.
    pub fn getsockname(&self, fd: RawFd) -> Result<SockaddrBytes, Errno> {
        let mut lane = self.lock()?;
        let file = self.file_of(&mut lane, fd)?;
        let socket = lane.files.socket(file)?;
        let family = socket.family;
        let local = match socket.role {
            SocketRole::Unconnected { bound } => bound.map(|b| b.address()).or(socket.last_address),
            SocketRole::Listening(listening) => Some(listening.bound.address()),
            SocketRole::Udp(dgram) => lane.udp_local(dgram, family),
            SocketRole::Stream(stream) => lane.endpoints(stream.conn).map(|[local, _]| local),
        };
        Ok(sockaddr::encode(local.unwrap_or(family.unspecified()), family))
    }

    /// `getpeername`.
    ///
    /// # Errors
    /// `ENOTCONN`, `EBADF`, `ENOTSOCK`.
    pub fn getpeername(&self, fd: RawFd) -> Result<SockaddrBytes, Errno> {
        let mut lane = self.lock()?;
        let file = self.file_of(&mut lane, fd)?;
        let family = lane.files.socket(file)?.family;
        if let SocketRole::Udp(dgram) = lane.files.socket(file)?.role {
            return dgram.peer.map(|peer| sockaddr::encode(peer, family)).ok_or(Errno::NOTCONN);
        }
        let (conn, standing) = lane.socket_state(file).ok_or(Errno::NOTCONN)?;
        // There is no peer before and after the connection (`inet_getname`).
        if !standing.is_connected() || standing.is_closed() {
            return Err(Errno::NOTCONN);
        }
        let [_, peer] = lane.client.endpoints(conn).map_err(|_| Errno::NOTCONN)?;
        Ok(sockaddr::encode(peer, family))
    }
}
