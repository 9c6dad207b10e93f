//! `getsockname` and `getpeername`.

use crate::Ops;
use crate::file::SocketRole;
use crate::sockaddr::{self, Family, SockaddrBytes};
use core::net::{Ipv4Addr, SocketAddr};
use rustix::fd::RawFd;
use rustix::io::Errno;

impl Ops {
    /// Implements `getsockname`.
    ///
    /// # Errors
    /// `EBADF`, `ENOTSOCK`.
    pub fn getsockname(&self, fd: RawFd) -> Result<SockaddrBytes, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file)?;
        let (family, role) = (socket.family, socket.role);
        let local = match role {
            SocketRole::Unconnected { bound } => bound.map(|b| b.address()).or(socket.last_address),
            SocketRole::Listening(listening) => Some(listening.bound.address()),
            SocketRole::Udp(udp) => state.udp_local(udp, family),
            SocketRole::Stream(stream) if stream.is_rebound => {
                stream.bound.map(|b| b.address()).or(socket.last_address)
            }
            SocketRole::Stream(stream) => state.endpoints(stream.conn).map(|[local, _]| local),
        };
        let local = local.unwrap_or(family.unspecified());
        // A socket that is bound to all IPv4 addresses keeps the mapped address.
        let is_mapped_any = family == Family::V6
            && matches!(local, SocketAddr::V4(local) if local.ip().is_unspecified())
            && matches!(role, SocketRole::Unconnected { .. } | SocketRole::Listening(_));
        Ok(if is_mapped_any {
            let mapped = Ipv4Addr::UNSPECIFIED.to_ipv6_mapped();
            sockaddr::encode(SocketAddr::new(mapped.into(), local.port()), family)
        } else {
            sockaddr::encode(local, family)
        })
    }

    /// Implements `getpeername`.
    ///
    /// # Errors
    /// `ENOTCONN`, `EBADF`, `ENOTSOCK`.
    pub fn getpeername(&self, fd: RawFd) -> Result<SockaddrBytes, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        if let SocketRole::Udp(udp) = state.files.socket(file)?.role {
            return udp
                .peer
                .filter(|peer| peer.port() != 0)
                .map(|peer| state.files.socket(file).map(|socket| socket.peer_name(peer)))
                .transpose()?
                .ok_or(Errno::NOTCONN);
        }
        let (conn, conn_state) = state.socket_state(file).ok_or(Errno::NOTCONN)?;
        // There is no peer before and after the connection (`inet_getname`).
        if !conn_state.is_connected() || conn_state.is_closed() {
            return Err(Errno::NOTCONN);
        }
        let [_, peer] = state.client.endpoints(conn).map_err(|_| Errno::NOTCONN)?;
        Ok(state.files.socket(file)?.peer_name(peer))
    }
}
