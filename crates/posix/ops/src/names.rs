//! `getsockname` and `getpeername`.

use crate::Ops;
use crate::file::Shape;
use crate::sockaddr::{self, Written};
use rustix::fd::RawFd;
use rustix::io::Errno;

impl Ops {
    /// `getsockname`.
    ///
    /// # Errors
    /// `EBADF`, `ENOTSOCK`.
    pub fn getsockname(&self, fd: RawFd) -> Result<Written, Errno> {
        let mut lane = self.lock()?;
        let file = self.file(&mut lane, fd)?;
        let socket = lane.files.socket(file)?;
        let family = socket.family;
        let local = match socket.shape {
            Shape::Fresh { bound } => bound.map(|b| b.address()).or(socket.past),
            Shape::Listening(listening) => Some(listening.bound.address()),
            Shape::Datagrams(dgram) => lane.local_of_datagrams(dgram, family),
            Shape::Stream(stream) => lane.ends_of(stream.conn).map(|[local, _]| local),
        };
        Ok(sockaddr::write(local.unwrap_or(family.any()), family))
    }

    /// `getpeername`.
    ///
    /// # Errors
    /// `ENOTCONN`, `EBADF`, `ENOTSOCK`.
    pub fn getpeername(&self, fd: RawFd) -> Result<Written, Errno> {
        let mut lane = self.lock()?;
        let file = self.file(&mut lane, fd)?;
        let family = lane.files.socket(file)?.family;
        if let Shape::Datagrams(dgram) = lane.files.socket(file)?.shape {
            return dgram.connected.map(|peer| sockaddr::write(peer, family)).ok_or(Errno::NOTCONN);
        }
        let (conn, standing) = lane.standing(file).ok_or(Errno::NOTCONN)?;
        // Before and after there is none (`inet_getname`).
        if !standing.is_connected() || standing.is_over() {
            return Err(Errno::NOTCONN);
        }
        let [_, peer] = lane.client.ends(conn).map_err(|_| Errno::NOTCONN)?;
        Ok(sockaddr::write(peer, family))
    }
}
