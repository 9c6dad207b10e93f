//! `sendmmsg` and `recvmmsg`, which repeat a call as `__sys_sendmmsg` and `do_recvmmsg` do.

use crate::Ops;
use crate::file::SocketRole;
use core::ffi::c_int;
use core::time::Duration;
use rustix::fd::RawFd;
use rustix::io::Errno;
use std::time::Instant;

/// Maximum number of messages that one call sends (`UIO_MAXIOV`).
const MESSAGES_MAX: usize = 1024;

impl Ops {
    /// Sends messages until one fails or is sent in part. Returns how many were sent. `send_one` sends
    /// the message of an index, and returns how many bytes were sent and the length of the message.
    ///
    /// # Errors
    /// The error of the first message.
    pub fn sendmmsg(
        &self,
        count: usize,
        mut send_one: impl FnMut(usize) -> Result<(usize, usize), Errno>,
    ) -> Result<usize, Errno> {
        let count = count.min(MESSAGES_MAX);
        for index in 0..count {
            match send_one(index) {
                Ok((sent, len)) if sent < len => return Ok(index + 1),
                Ok(_) => {}
                Err(error) if index == 0 => return Err(error),
                Err(_) => return Ok(index),
            }
        }
        Ok(count)
    }

    /// Receives messages until one fails or the time is over, which is checked after each message. Returns
    /// how many were received, and the remaining time. `recv_one` receives the message of an index with the
    /// given flags, and returns its `msg_flags`. An error after the first message is reported by the next
    /// call.
    ///
    /// # Errors
    /// The pending error, and that of the first message.
    pub fn recvmmsg(
        &self,
        fd: RawFd,
        count: usize,
        flags: c_int,
        timeout: Option<Duration>,
        mut recv_one: impl FnMut(usize, c_int) -> Result<c_int, Errno>,
    ) -> Result<(usize, Option<Duration>), Errno> {
        let end = timeout.map(|timeout| Instant::now() + timeout);
        if flags & libc::MSG_ERRQUEUE == 0 {
            self.take_pending_error(fd)?;
        }
        let mut remaining = timeout;
        let mut message_flags = flags & !libc::MSG_WAITFORONE;
        for index in 0..count {
            let msg_flags = match recv_one(index, message_flags) {
                Ok(msg_flags) => msg_flags,
                Err(error) if index == 0 => return Err(error),
                Err(error) => {
                    if error != Errno::AGAIN {
                        self.set_pending_error(fd, error)?;
                    }
                    return Ok((index, remaining));
                }
            };
            if flags & libc::MSG_WAITFORONE != 0 {
                message_flags |= libc::MSG_DONTWAIT;
            }
            remaining = end.map(|end| end.saturating_duration_since(Instant::now()));
            if remaining == Some(Duration::ZERO) || msg_flags & libc::MSG_OOB != 0 {
                return Ok((index + 1, remaining));
            }
        }
        Ok((count, remaining))
    }

    /// Returns the pending error of a socket and clears it (`sock_error`).
    fn take_pending_error(&self, fd: RawFd) -> Result<(), Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        state.files.socket(file)?;
        state.take_udp_error(file).or_else(|| state.take_error(file)).map_or(Ok(()), Err)
    }

    /// Makes an error pending for the next call.
    fn set_pending_error(&self, fd: RawFd, error: Errno) -> Result<(), Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        match &mut state.files.socket(file)?.role {
            SocketRole::Stream(stream) => stream.error = Some(error),
            SocketRole::Udp(udp) => udp.deferred_error = Some(error),
            SocketRole::Unconnected { .. } | SocketRole::Listening(_) => {}
        }
        Ok(())
    }
}
