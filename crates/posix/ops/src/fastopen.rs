//! Connections whose SYN carries data (TCP Fast Open, RFC 7413): `MSG_FASTOPEN`, and the first write after
//! `connect` with `TCP_FASTOPEN_CONNECT`, as `tcp_sendmsg_fastopen` implements them.

use crate::Ops;
use crate::connect::ConnectBegun;
use crate::datagram::SendArgs;
use crate::datagram::via_kernel;
use crate::fd_table::FileId;
use crate::file::SocketRole;
use crate::process::ProcessState;
use crate::sleep::Timeout;
use crate::sockaddr;
use crate::user_memory::{UserSlice, efault};
use core::cell::Cell;
use ginnel::channel::{SendBuffer, gather};
use rustix::fd::RawFd;
use rustix::io::Errno;

impl Ops {
    /// Sends with `MSG_FASTOPEN`, or on a socket whose SYN waits for data. The SYN carries as many bytes as
    /// fit if the peer has given a cookie. A blocking call waits until the connection is established, and
    /// sends the rest.
    ///
    /// # Errors
    /// As [`Ops::connect`] and [`Ops::send`]; `EOPNOTSUPP` if the configuration does not allow it,
    /// `ENETDOWN` if the stack is gone.
    #[cold]
    #[inline(never)]
    pub(crate) fn send_fastopen(
        &self,
        fd: RawFd,
        buffers: &[UserSlice<'_>],
        args: &SendArgs<'_>,
    ) -> Result<usize, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let family = args.to.map(sockaddr::family_of);
        if family == Some(Ok(libc::AF_UNSPEC as u16)) {
            return Err(Errno::OPNOTSUPP);
        }
        if state.syn_data_max(file).is_none() && !state.can_open_fast()? {
            return Err(Errno::OPNOTSUPP);
        }
        let flags = args.flags & !libc::MSG_FASTOPEN;
        let socket = state.files.socket(file)?;
        let (role, socket_family) = (socket.role, socket.family);
        let dont_wait = socket.nonblocking || flags & libc::MSG_DONTWAIT != 0;
        let timeout = if dont_wait { Timeout::Zero } else { socket.options.send_timeout() };
        family.transpose()?;
        let pending = match role {
            SocketRole::Unconnected { bound } => {
                let to = sockaddr::decode(args.to.ok_or(Errno::INVAL)?, socket_family)?;
                state.take_peer_flow_info(file, args.to.unwrap_or_default())?;
                match self.begin_connect(&mut state, (fd, file), bound, to, true)? {
                    ConnectBegun::Sent | ConnectBegun::Deferred => Errno::INPROGRESS,
                    ConnectBegun::Kernel => {
                        drop(state);
                        return via_kernel::send(fd, buffers, args);
                    }
                }
            }
            SocketRole::Stream(stream) if stream.disconnecting => return Err(Errno::INVAL),
            SocketRole::Stream(stream) if !stream.connecting => return Err(Errno::ISCONN),
            SocketRole::Stream(_) if state.syn_data_max(file).is_some() => Errno::INPROGRESS,
            SocketRole::Stream(_) => Errno::ALREADY,
            SocketRole::Listening(_) | SocketRole::Udp(_) => return Err(Errno::ISCONN),
        };
        let total = buffers.iter().map(|buffer| buffer.len()).sum();
        let done = Cell::new(state.send_in_syn(file, buffers, total)?);
        // With a time-out of 0, even if the connection is already established, which is not checked.
        let connected = match pending == Errno::INPROGRESS && timeout == Timeout::Zero {
            true => Err(Errno::AGAIN),
            false => {
                let connected;
                (state, connected) = self.wait_for_connect(state, file, timeout);
                connected
            }
        };
        match connected {
            Err(Errno::AGAIN) if done.get() == 0 => return Err(pending),
            Err(Errno::AGAIN) => {
                if flags & libc::MSG_ZEROCOPY != 0 {
                    state.complete_zerocopy(file);
                }
                return Ok(done.get());
            }
            result => result?,
        }
        self.send_rest(state, (fd, file), buffers, flags, timeout, &done)
    }
}

impl ProcessState {
    /// Returns whether the stack uses TCP Fast Open as a client. If the shards were started again, the
    /// present ones are asked.
    ///
    /// # Errors
    /// `ENETDOWN` if the stack is gone.
    #[cold]
    pub(crate) fn can_open_fast(&mut self) -> Result<bool, Errno> {
        let can = match self.client.can_open_fast() {
            Err(_) if self.has_restarted() => self.client.can_open_fast(),
            can => can,
        };
        can.map_err(|_| Errno::NETDOWN)
    }

    /// Returns how many bytes the deferred SYN of a socket can carry; `None` if no SYN is deferred.
    #[cold]
    pub(crate) fn syn_data_max(&mut self, file: FileId) -> Option<usize> {
        let conn = self.files.stream(file)?.conn;
        self.client.syn_data_max(conn)
    }

    /// Sends the deferred SYN of a socket, if there is one, without data.
    #[cold]
    pub(crate) fn send_deferred_syn(&mut self, file: FileId) {
        if self.syn_data_max(file).is_some()
            && let Some(conn) = self.files.stream(file).map(|stream| stream.conn)
        {
            // A connection that is over is reported by the wait for it.
            let _ = self.client.send_deferred_syn(conn);
        }
    }

    /// Sends the deferred SYN of a socket, if there is one, with as many bytes as it can carry. Returns how
    /// many.
    fn send_in_syn(&mut self, file: FileId, buffers: &[UserSlice<'_>], total: usize) -> Result<usize, Errno> {
        let Some(max) = self.syn_data_max(file) else { return Ok(0) };
        let Some(conn) = self.files.stream(file).map(|stream| stream.conn) else { return Ok(0) };
        let count = max.min(total);
        // A connection that is over is reported by the wait for it.
        let sent = match count {
            0 => {
                let _ = self.client.send_deferred_syn(conn);
                0
            }
            // A copy, so that the usual path is the only one that sends from memory of the program.
            _ => {
                let mut bytes = Vec::new();
                gather(buffers, count, &mut bytes).map_err(efault)?;
                self.client.send(conn, &bytes).unwrap_or(0)
            }
        };
        self.client.flush();
        Ok(sent)
    }
}
