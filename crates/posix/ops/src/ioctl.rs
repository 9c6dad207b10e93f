//! `ioctl` on sockets.

use crate::Ops;
use crate::file::Shape;
use crate::options::Flag;
use rustix::fd::RawFd;
use rustix::io::Errno;

impl Ops {
    /// `FIONREAD`, which is `SIOCINQ`: bytes that can be read.
    ///
    /// # Errors
    /// `EINVAL` for a listener and for an epoll set, as on Linux.
    pub fn bytes_readable(&self, fd: RawFd) -> Result<i32, Errno> {
        let mut lane = self.lock()?;
        let file = self.file(&mut lane, fd)?;
        match lane.files.socket(file).map_err(|_| Errno::INVAL)?.shape {
            Shape::Fresh { .. } => Ok(0),
            Shape::Listening(_) => Err(Errno::INVAL),
            // Bytes of the next datagram (`udp_ioctl`).
            Shape::Datagrams(dgram) => {
                let next = lane.client.udp_next_bytes(dgram.conn).unwrap_or(0);
                Ok(i32::try_from(next).unwrap_or(i32::MAX))
            }
            Shape::Stream(_) => {
                let Some((conn, status)) = lane.status(file) else { return Ok(0) };
                let mut readable = status.readable;
                if status.notices != 0
                    && let (Some(mark), there) = lane.mark_and_bytes(conn)
                {
                    let inline = lane.files.socket(file)?.options.flag(Flag::OobInline);
                    // As far as reads go (`tcp_inq`).
                    readable = if mark.ahead < there && !inline { mark.ahead } else { there };
                }
                Ok(i32::try_from(readable).unwrap_or(i32::MAX))
            }
        }
    }

    /// `TIOCOUTQ`, which is `SIOCOUTQ`: bytes that were written and not acknowledged by the peer.
    ///
    /// # Errors
    /// `EINVAL` for a listener and for an epoll set, as on Linux.
    pub fn bytes_unacknowledged(&self, fd: RawFd) -> Result<i32, Errno> {
        let mut lane = self.lock()?;
        let file = self.file(&mut lane, fd)?;
        match lane.files.socket(file).map_err(|_| Errno::INVAL)?.shape {
            Shape::Fresh { .. } => Ok(0),
            Shape::Listening(_) => Err(Errno::INVAL),
            Shape::Datagrams(dgram) => {
                let waiting = lane.client.status(dgram.conn).map_or(0, |status| status.unsent);
                Ok(i32::try_from(waiting).unwrap_or(i32::MAX))
            }
            Shape::Stream(_) => {
                let waiting = lane.status(file).map_or(0, |(_, status)| status.unsent);
                let engine = lane.info(file).map_or(0, |info| info.send_queued as usize);
                Ok(i32::try_from(waiting + engine).unwrap_or(i32::MAX))
            }
        }
    }

    /// `SIOCOUTQNSD`: bytes that were written and have not been sent.
    ///
    /// # Errors
    /// `EINVAL` for a listener and for an epoll set, `ENOTTY` for a socket of UDP, as on Linux.
    pub fn bytes_not_sent(&self, fd: RawFd) -> Result<i32, Errno> {
        let mut lane = self.lock()?;
        let file = self.file(&mut lane, fd)?;
        let socket = lane.files.socket(file).map_err(|_| Errno::INVAL)?;
        if socket.datagrams {
            return Err(Errno::NOTTY);
        }
        match socket.shape {
            Shape::Listening(_) => Err(Errno::INVAL),
            Shape::Stream(_) => {
                let info = lane.info(file);
                // Behind the answer, by which the stack has taken what it has room for.
                let Some((_, status)) = lane.status(file) else { return Ok(0) };
                let waiting = status.unsent;
                let engine = info
                    .filter(|_| status.standing.is_connected())
                    .map_or(0, |info| info.notsent_bytes as usize);
                Ok(i32::try_from(waiting + engine).unwrap_or(i32::MAX))
            }
            Shape::Fresh { .. } | Shape::Datagrams(_) => Ok(0),
        }
    }
}
