//! `ioctl` on sockets.

use crate::Ops;
use crate::file::Shape;
use rustix::fd::RawFd;
use rustix::io::Errno;

impl Ops {
    /// `FIONREAD`, which is `SIOCINQ`: bytes that can be read.
    ///
    /// # Errors
    /// `EINVAL` for a listener and for an epoll set, as on Linux.
    pub fn bytes_readable(&self, fd: RawFd) -> Result<i32, Errno> {
        let mut lane = self.lock()?;
        let file = self.file(fd)?;
        match lane.files.socket(file).map_err(|_| Errno::INVAL)?.shape {
            Shape::Fresh { .. } => Ok(0),
            Shape::Listening(_) => Err(Errno::INVAL),
            // Bytes of the next datagram (`udp_ioctl`).
            Shape::Datagrams(dgram) => {
                let next = lane.client.udp_next_bytes(dgram.conn).unwrap_or(0);
                Ok(i32::try_from(next).unwrap_or(i32::MAX))
            }
            Shape::Stream(_) => {
                let readable = lane.status(file).map_or(0, |(_, status)| status.readable);
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
        let file = self.file(fd)?;
        match lane.files.socket(file).map_err(|_| Errno::INVAL)?.shape {
            Shape::Fresh { .. } => Ok(0),
            Shape::Listening(_) => Err(Errno::INVAL),
            Shape::Datagrams(dgram) => {
                let room = lane.client.status(dgram.conn).map_or(0, |status| status.room);
                Ok(i32::try_from(lane.client.buffer_bytes() - room).unwrap_or(i32::MAX))
            }
            Shape::Stream(_) => {
                let waiting =
                    lane.status(file).map_or(0, |(_, status)| lane.client.buffer_bytes() - status.room);
                let engine = lane.info(file).map_or(0, |info| info.send_queued as usize);
                Ok(i32::try_from(waiting + engine).unwrap_or(i32::MAX))
            }
        }
    }
}
