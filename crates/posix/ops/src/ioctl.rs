//! `ioctl` on sockets.

use crate::Ops;
use crate::fd_table::FileId;
use crate::file::SocketRole;
use crate::options::BoolOption;
use crate::options::timestamps::time_of;
use crate::process::ProcessState;
use crate::syscall;
use core::time::Duration;
use ginnel::State;
use rustix::fd::RawFd;
use rustix::io::Errno;

impl Ops {
    /// Implements `SIOCINQ` (`FIONREAD`): returns how many bytes can be read.
    ///
    /// # Errors
    /// `EINVAL` for a listener and for an epoll set, as in Linux.
    pub fn siocinq(&self, fd: RawFd) -> Result<i32, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        state.deliver_locally();
        match state.files.socket(file).map_err(|_| Errno::INVAL)?.role {
            SocketRole::Unconnected { .. } => Ok(0),
            SocketRole::Listening(_) => Err(Errno::INVAL),
            // The length of the next datagram (`udp_ioctl`).
            SocketRole::Udp(udp) => {
                let next = state.client.udp_next_len(udp.conn).unwrap_or(0);
                Ok(i32::try_from(next).unwrap_or(i32::MAX))
            }
            SocketRole::Stream(_) => {
                let Some((conn, status)) = state.status(file) else { return Ok(0) };
                let mut readable = status.readable;
                if status.oob_events != 0
                    && let (Some(mark), unread) = state.urgent_mark_and_bytes(file, conn)
                {
                    let inline = state.files.socket(file)?.options.flag(BoolOption::OobInline);
                    // Counts up to the urgent mark (`tcp_inq`).
                    readable =
                        if mark.unread_before < unread && !inline { mark.unread_before } else { unread };
                }
                Ok(i32::try_from(readable).unwrap_or(i32::MAX))
            }
        }
    }

    /// Implements `SIOCGSTAMP` and `SIOCGSTAMPNS`: returns the time at which the datagram arrived that was
    /// received last, and enables timestamps (`sock_gettstamp`).
    ///
    /// # Errors
    /// `ENOENT` if nothing was received; `ENOTTY` for an epoll set.
    pub fn siocgstamp(&self, fd: RawFd) -> Result<Duration, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file).map_err(|_| Errno::NOTTY)?;
        let SocketRole::Udp(udp) = socket.role else { return Err(Errno::NOENT) };
        let udp_send = socket.udp_send.get_or_insert_default();
        if !core::mem::replace(&mut udp_send.notes_arrival, true) {
            // If the stack is gone, no datagram arrives that could have a timestamp.
            let _ = state.client.udp_enable_timestamps(udp.conn);
        }
        if state.client.read_position(udp.conn).map_err(|_| Errno::NOENT)? == 0 {
            return Err(Errno::NOENT);
        }
        // A datagram that was received before timestamps were enabled gets the current time.
        let udp_send = state.files.socket(file)?.udp_send.get_or_insert_default();
        Ok(*udp_send.last_arrival.get_or_insert_with(|| time_of(None)))
    }

    /// Implements `EPIOCGPARAMS`: returns `struct epoll_params` of the kernel's epoll instance behind a set.
    ///
    /// # Errors
    /// `ENOTTY` for a socket, and those of the kernel.
    pub fn epoll_params(&self, fd: RawFd) -> Result<[u8; 8], Errno> {
        let mut state = self.lock()?;
        let set = self.file_of(&mut state, fd)?;
        syscall::epoll_params(state.kernel_epoll_of(set)?)
    }

    /// Implements `EPIOCSPARAMS`: sets `struct epoll_params`, which concerns the kernel's sockets in a set.
    ///
    /// # Errors
    /// As [`Ops::epoll_params`]; `EINVAL`, `EPERM`.
    pub fn set_epoll_params(&self, fd: RawFd, params: [u8; 8]) -> Result<(), Errno> {
        let mut state = self.lock()?;
        let set = self.file_of(&mut state, fd)?;
        syscall::set_epoll_params(state.kernel_epoll_of(set)?, params)
    }

    /// Returns whether a descriptor is an epoll set, which is an epoll instance of the kernel, too.
    pub fn is_epoll_set(&self, fd: RawFd) -> bool {
        self.lock().is_ok_and(|mut state| {
            let file = self.file_of(&mut state, fd);
            file.is_ok_and(|file| state.files.epoll(file).is_ok())
        })
    }

    /// Implements `SIOCOUTQ` (`TIOCOUTQ`): returns how many written bytes the peer has not acknowledged, and
    /// counts a FIN as one.
    ///
    /// # Errors
    /// `EINVAL` for a listener and for an epoll set, as in Linux.
    pub fn siocoutq(&self, fd: RawFd) -> Result<i32, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        match state.files.socket(file).map_err(|_| Errno::INVAL)?.role {
            SocketRole::Unconnected { .. } => Ok(0),
            SocketRole::Listening(_) => Err(Errno::INVAL),
            SocketRole::Udp(udp) => {
                let in_channel = state.client.status(udp.conn).map_or(0, |status| status.unsent);
                Ok(i32::try_from(in_channel).unwrap_or(i32::MAX))
            }
            SocketRole::Stream(_) => {
                let in_channel = state.status(file).map_or(0, |(_, status)| status.unsent);
                // On Linux a FIN counts as a byte that was written.
                let has_fin = |state| matches!(state, State::FinWait1 | State::Closing | State::LastAck);
                let in_engine = state
                    .info(file)
                    .map_or(0, |info| info.send_queued as usize + usize::from(has_fin(info.state)));
                Ok(i32::try_from(in_channel + in_engine).unwrap_or(i32::MAX))
            }
        }
    }

    /// Implements `SIOCOUTQNSD`: returns how many written bytes were not sent.
    ///
    /// # Errors
    /// `EINVAL` for a listener and for an epoll set, `ENOTTY` for a UDP socket, as in Linux.
    pub fn siocoutqnsd(&self, fd: RawFd) -> Result<i32, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file).map_err(|_| Errno::INVAL)?;
        if socket.is_udp {
            return Err(Errno::NOTTY);
        }
        match socket.role {
            SocketRole::Listening(_) => Err(Errno::INVAL),
            SocketRole::Stream(_) => {
                let info = state.info(file);
                // Read after the answer of `info`: until then the stack has taken what it has room for.
                let Some((_, status)) = state.status(file) else { return Ok(0) };
                let in_channel = status.unsent;
                let in_engine = info
                    .filter(|_| status.state.is_connected())
                    .map_or(0, |info| info.notsent_bytes as usize);
                Ok(i32::try_from(in_channel + in_engine).unwrap_or(i32::MAX))
            }
            SocketRole::Unconnected { .. } | SocketRole::Udp(_) => Ok(0),
        }
    }
}

impl ProcessState {
    /// Returns the kernel's epoll instance behind a set; `ENOTTY` for a socket.
    fn kernel_epoll_of(&mut self, set: FileId) -> Result<RawFd, Errno> {
        self.files.epoll(set).map(|set| set.kernel_epoll().fd).map_err(|_| Errno::NOTTY)
    }
}
