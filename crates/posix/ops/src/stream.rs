//! Data transfer on connections: the `send` and `recv` families, as `tcp_sendmsg` and `tcp_recvmsg` implement
//! them.

use crate::Ops;
use crate::datagram::SendArgs;
use crate::fd_table::FileId;
use crate::file::{Socket, SocketRole};
use crate::lock::LockGuard;
use crate::options::{BoolOption, Transferred};
use crate::process::ProcessState;
use crate::signal;
use crate::sleep::{Timeout, Wait};
use crate::user_memory::{UserSlice, UserSliceMut, efault};
use core::cell::Cell;
use core::ffi::c_int;
use ginnel::channel::{RecvBuffer, SendBuffer, SocketState};
use ginnel::{Conn, RecvError, SendError, TcpOption};
use rustix::fd::RawFd;
use rustix::io::Errno;

/// Flags of `send` that may accompany a message with a priority. Other sends ignore further flags, as in
/// Linux.
pub(crate) const SEND_FLAGS: c_int = libc::MSG_DONTWAIT
    | libc::MSG_NOSIGNAL
    | libc::MSG_MORE
    | libc::MSG_OOB
    | libc::MSG_EOR
    | libc::MSG_CONFIRM
    | libc::MSG_DONTROUTE
    | libc::MSG_ZEROCOPY;

impl Ops {
    /// Implements `recv`, `read`, `readv`, and `recvmsg` without address and control messages, which a stream
    /// does not have.
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`, `ENOTCONN`, and the reason for which the connection ended, such as `ECONNRESET` or
    /// `ETIMEDOUT`.
    #[inline]
    pub fn recv(&self, fd: RawFd, buffers: &mut [UserSliceMut<'_>], flags: c_int) -> Result<usize, Errno> {
        self.recv_stream(fd, buffers, flags, false)
    }

    /// As [`recv`](Self::recv). Also returns when the last byte arrived, or the next one for a call without
    /// buffer space: the lowest 32 bits of the time in microseconds, or `None` if it is not known.
    pub(crate) fn recv_timed(
        &self,
        fd: RawFd,
        buffers: &mut [UserSliceMut<'_>],
        flags: c_int,
    ) -> Result<(usize, Option<u32>), Errno> {
        let has_space = buffers.iter().any(|buffer| !buffer.is_empty());
        let mut arrived_us = None;
        let count = self.recv_then(fd, buffers, flags, false, |state, file, offset, count| {
            if count == 0 && has_space {
                return;
            }
            let is_consumed = count > 0 && flags & libc::MSG_PEEK == 0;
            let ahead = if is_consumed { 0 } else { offset.saturating_add(count.max(1)) };
            arrived_us = state.arrival_time(file, ahead);
        })?;
        Ok((count, arrived_us))
    }

    /// As [`recv`](Self::recv), also for a pipe: such a read never passes an urgent byte (`tcp_read_sock`).
    pub(crate) fn recv_stream(
        &self,
        fd: RawFd,
        buffers: &mut [UserSliceMut<'_>],
        flags: c_int,
        for_pipe: bool,
    ) -> Result<usize, Errno> {
        self.recv_then(fd, buffers, flags, for_pipe, |_, _, _, _| {})
    }

    /// As [`recv_stream`](Self::recv_stream). Calls `on_received` under the lock of the read, with the offset
    /// at which the call has peeked and the number of bytes; not for urgent data.
    #[inline(always)]
    fn recv_then(
        &self,
        fd: RawFd,
        buffers: &mut [UserSliceMut<'_>],
        flags: c_int,
        for_pipe: bool,
        on_received: impl FnOnce(&mut ProcessState, FileId, usize, usize),
    ) -> Result<usize, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file)?;
        if socket.is_udp {
            drop(state);
            return self.recv_from(fd, buffers, flags, 0).map(|received| received.count);
        }
        if flags & libc::MSG_ERRQUEUE != 0 {
            return state.recv_local_error(file, buffers, 0).map(|received| received.count);
        }
        let dont_wait = socket.nonblocking || flags & libc::MSG_DONTWAIT != 0;
        let timeout = if dont_wait { Timeout::Zero } else { socket.options.recv_timeout() };
        let rcvlowat = socket.options.rcvlowat();
        let offset = socket.options.peek_offset();
        let has_offset = offset.is_some();
        let offset = offset.filter(|_| flags & libc::MSG_PEEK != 0);
        if !matches!(socket.role, SocketRole::Stream(_)) {
            return socket.recv_without_connection(flags);
        }
        if flags & libc::MSG_OOB != 0 {
            return state.recv_urgent(file, buffers, flags);
        }
        let total: usize = buffers.iter().map(|b| b.len()).sum();
        let max = state.client.buffer_bytes();
        let target = if flags & libc::MSG_WAITALL != 0 { total } else { rcvlowat.min(total).min(max) }.max(1);
        let done = Cell::new(0);
        let args = RecvArgs { total, target, flags, offset: offset.unwrap_or(0), for_pipe, copied: &done };
        let mut waited = false;
        let result = match state.recv_step(file, buffers, &args) {
            Err(Errno::AGAIN) if timeout != Timeout::Zero || state.deliver_locally() => {
                waited = true;
                let wait = Wait::restarting(timeout, &done);
                let step = |state: &mut ProcessState, _: &mut [_]| state.recv_step(file, buffers, &args);
                let result;
                (state, result) = self.block_until_from_second(state, &[file], &mut [], &wait, step);
                result
            }
            Err(Errno::AGAIN) => {
                state.note_empty_poll();
                Err(Errno::AGAIN)
            }
            result => result,
        };
        // Another thread may have set an offset while this one waited.
        if done.get() > 0
            && (has_offset || waited)
            && let Ok(socket) = state.files.socket(file)
        {
            socket.options.move_peek_offset(flags & libc::MSG_PEEK != 0, done.get());
        }
        let result = match result {
            Err(Errno::AGAIN | Errno::INTR | Errno::FAULT) if done.get() > 0 => Ok(done.get()),
            // A call without buffer space waits once and accepts whatever arrived (`tcp_recvmsg_locked`).
            Err(Errno::AGAIN | Errno::INTR) if total == 0 && timeout != Timeout::Zero => Ok(0),
            result => result,
        };
        if let Ok(count) = result {
            on_received(&mut state, file, args.offset, count);
        }
        result
    }

    /// Implements `send`, `write`, `writev`, and `sendmsg` without address, which a connection ignores, and
    /// control messages. Raises `SIGPIPE` as the kernel does.
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`, `EPIPE`, and the reason for which the connection ended, such as `ECONNRESET` or
    /// `ETIMEDOUT`.
    pub fn send(&self, fd: RawFd, buffers: &[UserSlice<'_>], flags: c_int) -> Result<usize, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file)?;
        if socket.is_udp {
            drop(state);
            return self.send_to(fd, buffers, &SendArgs { flags, ..SendArgs::default() });
        }
        if flags & libc::MSG_FASTOPEN != 0 {
            drop(state);
            return self.send_fastopen(fd, buffers, &SendArgs { flags, ..SendArgs::default() });
        }
        let dont_wait = socket.nonblocking || flags & libc::MSG_DONTWAIT != 0;
        let timeout = if dont_wait { Timeout::Zero } else { socket.options.send_timeout() };
        self.send_rest(state, (fd, file), buffers, flags, timeout, &Cell::new(0))
    }

    /// Sends what follows the first `done` bytes.
    #[inline(always)]
    pub(crate) fn send_rest<'a>(
        &'a self,
        mut state: LockGuard<'a>,
        (fd, file): (RawFd, FileId),
        buffers: &[UserSlice<'_>],
        flags: c_int,
        timeout: Timeout,
        done: &Cell<usize>,
    ) -> Result<usize, Errno> {
        let result = if flags & libc::MSG_OOB != 0 {
            if state.syn_data_max(file).is_some() {
                drop(state);
                return self.send_fastopen(fd, buffers, &SendArgs { flags, ..SendArgs::default() });
            }
            self.send_urgent(state, file, buffers, timeout, done.get())
        } else {
            let total = buffers.iter().map(|b| b.len()).sum();
            if flags & libc::MSG_MORE != 0 {
                state.set_msg_more(file, true, false);
            }
            let result = match state.send_step(file, buffers, total, done, false) {
                Err(Errno::AGAIN) if state.syn_data_max(file).is_some() => {
                    drop(state);
                    return self.send_fastopen(fd, buffers, &SendArgs { flags, ..SendArgs::default() });
                }
                Err(Errno::AGAIN) if timeout != Timeout::Zero || state.deliver_locally() => {
                    let wait = Wait::restarting(timeout, done);
                    let step = |state: &mut ProcessState, _: &mut [_]| {
                        state.send_step(file, buffers, total, done, true)
                    };
                    let result;
                    (state, result) = self.block_until_from_second(state, &[file], &mut [], &wait, step);
                    result
                }
                Err(Errno::AGAIN) => {
                    state.note_empty_poll();
                    Err(Errno::AGAIN)
                }
                result => result,
            };
            let has_written = done.get() > 0;
            // A send without bytes neither releases held data nor ends a record (`tcp_sendmsg_locked`).
            if flags & libc::MSG_MORE == 0 && has_written {
                state.set_msg_more(file, false, has_written);
            } else {
                state.stamp_stream(file, has_written);
            }
            if flags & libc::MSG_EOR != 0 && has_written && done.get() == total {
                state.end_record(file);
            }
            if flags & libc::MSG_ZEROCOPY != 0 && done.get() > 0 {
                state.complete_zerocopy(file);
            }
            state.client.flush();
            if state.has_own_connections() {
                state.await_reset(file);
            }
            match result {
                Err(_) if done.get() > 0 => Ok(done.get()),
                result => result,
            }
        };
        if result == Err(Errno::PIPE) && flags & libc::MSG_NOSIGNAL == 0 {
            signal::raise_sigpipe();
        }
        result
    }

    /// Returns how many bytes are waiting on a connection, plus one if the peer has finished, so that a
    /// program which goes by this number reads on (`tcp_inq_hint`).
    pub(crate) fn inq_hint(&self, fd: RawFd) -> Result<c_int, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let (_, status) = state.status(file).ok_or(Errno::NOTCONN)?;
        let bytes = c_int::try_from(status.readable).unwrap_or(c_int::MAX);
        let is_closed = status.state.is_closed() && bytes == 0;
        Ok(bytes.saturating_add((status.state.has_fin() || is_closed).into()))
    }

    /// Waits until a connection has send space, unless the socket or the caller is non-blocking. Returns the
    /// space in bytes.
    pub(crate) fn wait_for_send_space(&self, fd: RawFd, dont_wait: bool) -> Result<usize, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file)?;
        if socket.is_udp {
            // Sending waits for space.
            return Ok(usize::MAX);
        }
        let timeout = match dont_wait || socket.nonblocking {
            true => Timeout::Zero,
            false => socket.options.send_timeout(),
        };
        let done = Cell::new(0);
        let wait = Wait::restarting(timeout, &done);
        let (_state, result) = self.block_until(state, &[file], &mut [], &wait, |state, _| {
            let (conn, conn_state) = match state.sendable(file, false) {
                // A write sends the SYN.
                Err(Errno::AGAIN) => return state.syn_data_max(file).ok_or(Errno::AGAIN),
                sendable => sendable?,
            };
            let status = state.client.status_with_state(conn, conn_state).map_err(|_| Errno::PIPE)?;
            let space = state.send_limit(file, conn, status.send_space, true);
            if space > 0 {
                return Ok(space);
            }
            // If the connection is gone or space has become free meanwhile, the next attempt finds out.
            let _ = state.client.await_send_space(conn, 1);
            Err(Errno::AGAIN)
        });
        result
    }
}

impl Socket {
    /// Returns the result of a receive call on a socket that is not connected (`tcp_recvmsg_locked`).
    #[cold]
    fn recv_without_connection(&mut self, flags: c_int) -> Result<usize, Errno> {
        if matches!(self.role, SocketRole::Unconnected { .. }) {
            if flags & libc::MSG_OOB != 0 {
                return Err(Errno::INVAL);
            }
            if self.shutdown.read {
                return self.shutdown.error.take().map_or(Ok(0), Err);
            }
        }
        Err(self.shutdown.error.take().unwrap_or(Errno::NOTCONN))
    }
}

/// Arguments of a receive call.
pub(crate) struct RecvArgs<'a> {
    /// Space in the buffers, in bytes.
    pub total: usize,
    /// How many bytes end the call (`sock_rcvlowat`).
    pub target: usize,
    pub flags: c_int,
    /// How many bytes `MSG_PEEK` skips (`SO_PEEK_OFF`).
    pub offset: usize,
    /// True if the data goes to a pipe.
    pub for_pipe: bool,
    /// How many bytes were copied or discarded.
    pub copied: &'a Cell<usize>,
}

impl ProcessState {
    /// Returns when the byte arrived that ends `ahead` bytes after the read position: the lowest 32 bits of
    /// the time in microseconds. `None` if it has not arrived or times are not recorded.
    fn arrival_time(&mut self, file: FileId, ahead: usize) -> Option<u32> {
        let conn = self.files.stream(file)?.conn;
        let read = self.client.read_position(conn).ok()?;
        self.client.arrival_time(conn, read.saturating_add(ahead as u64)).ok()?
    }

    /// Receives what has arrived. Returns the total number of bytes once it reaches the target, or no more
    /// will arrive.
    pub(crate) fn recv_step(
        &mut self,
        file: FileId,
        buffers: &mut [UserSliceMut<'_>],
        args: &RecvArgs<'_>,
    ) -> Result<usize, Errno> {
        let socket = self.files.socket(file)?;
        let SocketRole::Stream(stream) = &socket.role else {
            // The connection was lost while the call waited.
            let end = if socket.shutdown.is_lost { Ok(args.copied.get()) } else { Err(Errno::NOTCONN) };
            return if args.copied.get() > 0 { end } else { self.take_error(file).map_or(end, Err) };
        };
        let (mut conn, end_seen) = (stream.conn, stream.end_seen);
        let (shutdown, rcvlowat) = (socket.shutdown.read, socket.options.rcvlowat());
        let &RecvArgs { total, target, flags, copied: done, .. } = args;
        let before = done.get();
        let (mut conn_state, taken);
        // The common case consumes the data as it copies.
        if flags & (libc::MSG_PEEK | libc::MSG_TRUNC) == 0 && before < total && rcvlowat <= 1 {
            let received = self.client.recv_into(conn, buffers, before);
            (conn_state, taken) = received.map_err(|error| self.recv_errno(error))?;
        } else {
            (conn_state, taken) = (self.client.socket_state(conn).map_err(|_| Errno::NOTCONN)?, Ok(None));
        }
        if conn_state.is_closed() && !end_seen {
            (conn, conn_state) = self.handle_end(file, conn_state).ok_or(Errno::NOTCONN)?;
        }
        if let Some(count) = taken.map_err(efault)? {
            done.set(before + count);
            self.client.flush();
        } else {
            if before == 0 && rcvlowat > 1 {
                // Bytes that are left do not tell whether what arrived has reached the low-water mark, and
                // bytes that arrive during this call cause no further event.
                self.process_events();
                conn_state = self.client.socket_state(conn).map_err(|_| Errno::NOTCONN)?;
            }
            if self.recv_slow_path(file, buffers, args)? {
                return Ok(done.get());
            }
        }
        let is_at_end = conn_state.has_fin() || conn_state.is_closed() || shutdown;
        if done.get() >= target || done.get() > 0 && is_at_end {
            return Ok(done.get());
        }
        if total == 0 && self.client.status(conn).is_ok_and(|status| status.readable > 0) {
            return Ok(0);
        }
        if conn_state.has_fin() {
            return Ok(0);
        }
        if let Some(error) = self.take_error(file) {
            return Err(error);
        }
        if conn_state.is_closed() || shutdown {
            return Ok(0);
        }
        Err(Errno::AGAIN)
    }

    /// Receives with `MSG_PEEK` or `MSG_TRUNC`, or on a connection that has had urgent data. Returns whether
    /// the read ends because it has reached the urgent mark.
    #[inline(never)]
    fn recv_slow_path(
        &mut self,
        file: FileId,
        buffers: &mut [UserSliceMut<'_>],
        args: &RecvArgs<'_>,
    ) -> Result<bool, Errno> {
        let &RecvArgs { total, flags, offset, copied: done, .. } = args;
        let conn = self.files.stream(file).ok_or(Errno::NOTCONN)?.conn;
        if flags & libc::MSG_PEEK != 0 {
            done.set(0);
        }
        let status = self.client.status(conn).map_err(|_| Errno::NOTCONN)?;
        if status.oob_events != 0 {
            return self.recv_around_urgent(file, buffers, args, conn);
        }
        let count = status.readable.saturating_sub(offset).min(total - done.get());
        if count > 0 {
            self.recv_chunk(conn, buffers, args, offset, count)?;
        }
        Ok(false)
    }

    /// Consumes, discards or peeks at `count` of the bytes that have arrived, starting `offset` bytes after
    /// the read position.
    #[inline]
    pub(crate) fn recv_chunk(
        &mut self,
        conn: Conn,
        buffers: &mut [UserSliceMut<'_>],
        args: &RecvArgs<'_>,
        offset: usize,
        count: usize,
    ) -> Result<(), Errno> {
        let &RecvArgs { flags, copied: done, .. } = args;
        let received = match (flags & libc::MSG_TRUNC != 0, flags & libc::MSG_PEEK != 0) {
            (false, true) => return self.peek_to_buffers(conn, buffers, offset, count, done),
            (false, false) => self.client.recv_at_most(conn, buffers, done.get(), count),
            (true, true) => Ok(Ok(count)),
            (true, false) => self.client.consume(conn, count).map(Ok),
        };
        let received = received.map_err(|error| self.recv_errno(error))?;
        done.set(done.get() + received.map_err(efault)?);
        self.client.flush();
        Ok(())
    }

    /// Copies `max` bytes, starting `from` bytes after the read position, without consuming them. Adds to
    /// `done` how many were copied.
    fn peek_to_buffers(
        &mut self,
        conn: Conn,
        buffers: &mut [UserSliceMut<'_>],
        from: usize,
        max: usize,
        done: &Cell<usize>,
    ) -> Result<(), Errno> {
        let mut copied = 0;
        for buffer in buffers {
            let wanted = buffer.len().min(max - copied);
            let peeked = self.client.peek_into(conn, from + copied, buffer, 0, wanted);
            let count = peeked.map_err(|error| self.recv_errno(error))?.map_err(efault)?;
            copied += count;
            done.set(done.get() + count);
            if count < wanted || copied == max {
                break;
            }
        }
        Ok(())
    }

    /// Consumes bytes without copying them.
    pub(crate) fn discard_bytes(&mut self, conn: Conn, count: usize) -> Result<(), Errno> {
        let consumed = self.client.consume(conn, count);
        self.client.flush();
        consumed.map(drop).map_err(|error| self.recv_errno(error))
    }

    /// Returns the error of a call that could not read. If another process has had the lock of the stream for
    /// long, all who wait for the stream are woken, so that they try again.
    #[cold]
    fn recv_errno(&mut self, error: RecvError) -> Errno {
        match error {
            RecvError::WouldBlock => {
                self.process_events();
                Errno::AGAIN
            }
            _ => Errno::NOTCONN,
        }
    }

    /// Receives on a connection that has had urgent data. Returns whether the read ends because it has
    /// reached the urgent mark.
    #[cold]
    fn recv_around_urgent(
        &mut self,
        file: FileId,
        buffers: &mut [UserSliceMut<'_>],
        args: &RecvArgs<'_>,
        conn: Conn,
    ) -> Result<bool, Errno> {
        let &RecvArgs { total, offset, copied: done, .. } = args;
        let peek = args.flags & libc::MSG_PEEK != 0;
        if done.get() == total {
            return Ok(false);
        }
        let limit = self.read_limit(file, conn, offset, total - done.get(), done.get() > 0);
        if args.for_pipe && limit.is_at_mark && limit.len + limit.skip > 0 {
            return Ok(true);
        }
        if limit.skip > 0 && !peek {
            self.discard_bytes(conn, limit.skip)?;
        }
        if limit.len > 0 {
            let from = offset + if peek { limit.skip } else { 0 };
            self.recv_chunk(conn, buffers, args, from, limit.len)?;
        }
        Ok(limit.ends_read)
    }

    /// Returns the connection if data can be sent on it.
    ///
    /// # Errors
    /// `EAGAIN` while it is being established, `EPIPE`, or the pending error. If the call has sent bytes
    /// (`has_sent`), which its result tells, the error stays pending for the next call (`sk_stream_error`).
    #[inline(always)]
    pub fn sendable(&mut self, file: FileId, has_sent: bool) -> Result<(Conn, SocketState), Errno> {
        let (conn, conn_state) = match self.socket_state(file) {
            Some(found) => found,
            None => {
                self.files.socket(file)?;
                return Err(self.take_send_error(file, has_sent));
            }
        };
        let socket = self.files.socket(file)?;
        let failed = matches!(socket.role, SocketRole::Stream(stream) if stream.error.is_some());
        if failed || conn_state.is_closed() || socket.shutdown.write {
            return Err(self.take_send_error(file, has_sent));
        }
        if conn_state.is_connected() { Ok((conn, conn_state)) } else { Err(Errno::AGAIN) }
    }

    /// Returns the error of a call that cannot send (`sk_stream_error`): the pending error, or `EPIPE`.
    #[cold]
    fn take_send_error(&mut self, file: FileId, has_sent: bool) -> Errno {
        if has_sent { Errno::PIPE } else { self.take_error(file).unwrap_or(Errno::PIPE) }
    }

    /// Returns the error of a call whose connection ended between two looks at it.
    #[cold]
    pub(crate) fn ended_send_error(&mut self, file: FileId, has_sent: bool) -> Errno {
        self.notice_announced_end();
        self.take_send_error(file, has_sent)
    }

    /// Writes what fits. Returns the total number of bytes once everything is written. `has_waited` tells
    /// that the call has waited for space.
    fn send_step(
        &mut self,
        file: FileId,
        buffers: &[UserSlice<'_>],
        total: usize,
        done: &Cell<usize>,
        has_waited: bool,
    ) -> Result<usize, Errno> {
        let (conn, _) = self.sendable(file, done.get() > 0)?;
        let end = done.get() + self.send_limit(file, conn, total - done.get(), has_waited);
        if done.get() < total {
            let range = done.get()..end;
            let sent = match self.client.send_from(conn, buffers, range) {
                Ok(sent) => sent,
                Err(SendError::Full) => {
                    // As in `recv_errno`.
                    self.process_events();
                    return Err(Errno::AGAIN);
                }
                Err(_) => return Err(self.ended_send_error(file, done.get() > 0)),
            };
            done.set(done.get() + sent.map_err(efault)?);
        }
        if done.get() == total {
            return Ok(total);
        }
        if done.get() == end {
            // If the connection is gone or the unsent data has shrunk meanwhile, the next attempt finds out.
            let _ = self.client.await_send_space(conn, 1);
        }
        Err(Errno::AGAIN)
    }

    /// Returns how many of `max` bytes may be written under `TCP_NOTSENT_LOWAT` and the send buffer. Only
    /// the stack knows how much it has sent; it is asked only if that decides.
    #[inline(always)]
    fn send_limit(&mut self, file: FileId, conn: Conn, max: usize, has_waited: bool) -> usize {
        let is_limited = self.files.socket(file).is_ok_and(|socket| socket.options.limits_writing());
        if is_limited || self.send_buffer.is_some() {
            self.send_limit_of_options(file, conn, max, has_waited)
        } else {
            max
        }
    }

    #[cold]
    fn send_limit_of_options(&mut self, file: FileId, conn: Conn, max: usize, has_waited: bool) -> usize {
        let Ok(socket) = self.files.socket(file) else { return max };
        let (notsent_lowat, is_fixed) =
            (socket.options.notsent_lowat(), socket.options.has_fixed_send_buffer());
        if self.send_buffer.is_some() {
            return self.send_buffer_limit(file, conn, max, notsent_lowat, has_waited);
        }
        let max = if is_fixed { self.fixed_buffer_limit(file, conn, max, has_waited) } else { max };
        notsent_lowat.map_or(max, |notsent_lowat| self.notsent_limit(conn, max, notsent_lowat))
    }

    /// Returns how many of `max` bytes fit in a send buffer whose size the program has fixed (`SO_SNDBUF`).
    /// The stack is asked only if more bytes than fit were written since it was asked. A writer that waited
    /// gets space when a third of the buffer is free (`sk_stream_write_space`).
    #[cold]
    fn fixed_buffer_limit(&mut self, file: FileId, conn: Conn, max: usize, has_waited: bool) -> usize {
        let Some((bound, queued)) = self.fixed_buffer_usage(file, conn, max) else { return max };
        let free = bound.saturating_sub(queued);
        if max <= free {
            return max;
        }
        self.await_acknowledgement(conn);
        // Everything may have been acknowledged in between; then no notification follows.
        let Some((bound, queued)) = self.fixed_buffer_usage(file, conn, usize::MAX) else { return max };
        let free = bound.saturating_sub(queued);
        if has_waited && free < queued / 2 { 0 } else { free.min(max) }
    }

    /// Returns the size of a fixed send buffer, and an upper limit of the unacknowledged bytes in it, which
    /// is exact if `more` bytes do not fit.
    fn fixed_buffer_usage(&mut self, file: FileId, conn: Conn, more: usize) -> Option<(usize, usize)> {
        let bound = self.files.socket(file).ok()?.options.send_buffer_bytes();
        let written = self.client.written(conn).ok()?;
        let known = self.files.stream(file)?.nospace_acked.unwrap_or(0);
        let mut queued = usize::try_from(written.saturating_sub(known)).unwrap_or(usize::MAX);
        if queued.saturating_add(more) > bound {
            let acked = self.acked(conn)?;
            self.files.stream(file)?.nospace_acked = Some(acked);
            queued = usize::try_from(written.saturating_sub(acked)).unwrap_or(usize::MAX);
        }
        Some((bound, queued))
    }

    /// Returns whether a third of a fixed send buffer is free; if not, a notification follows
    /// acknowledgements.
    #[cold]
    pub(crate) fn has_fixed_buffer_space(&mut self, file: FileId, conn: Conn) -> bool {
        let third = |(bound, queued): (usize, usize)| bound.saturating_sub(queued) >= queued / 2;
        if self.fixed_buffer_usage(file, conn, 0).is_none_or(third)
            || self.fixed_buffer_usage(file, conn, usize::MAX).is_none_or(third)
        {
            return true;
        }
        self.await_acknowledgement(conn);
        // Everything may have been acknowledged in between; then no notification follows.
        self.fixed_buffer_usage(file, conn, usize::MAX).is_none_or(third)
    }

    /// Requests a notification when the peer has acknowledged bytes.
    fn await_acknowledgement(&mut self, conn: Conn) {
        // If the connection is gone meanwhile, the next check finds out. The first call makes the
        // notification one about writing.
        let _ = self.client.await_send_space(conn, usize::MAX);
        let _ = self.client.sendable_within(conn, 1 << 30, (0, 0));
    }

    #[cold]
    fn notsent_limit(&mut self, conn: Conn, max: usize, notsent_lowat: u32) -> usize {
        let unsent = self.client.notsent(conn).unwrap_or(usize::MAX);
        if unsent.saturating_add(max) <= notsent_lowat as usize {
            return max;
        }
        let len = u32::try_from(max).unwrap_or(u32::MAX);
        // If the connection is over, the write finds out.
        self.client
            .sendable_within(conn, len, (notsent_lowat, u32::MAX))
            .map_or(max, |room| max.min(room as usize))
    }

    /// Returns how many of `max` bytes fit in the send buffer. A writer that waited gets space when a third
    /// of the buffer is free (`sk_stream_write_space`).
    #[cold]
    fn send_buffer_limit(
        &mut self,
        file: FileId,
        conn: Conn,
        max: usize,
        notsent_lowat: Option<u32>,
        has_waited: bool,
    ) -> usize {
        let Some((mut bound, queued)) = self.send_buffer_usage(file, conn) else { return max };
        let third = |bound: u32, queued: u32| bound.saturating_sub(queued) >= queued / 2;
        // Before the first acknowledgement, only the stack's own queue can have delayed the writer.
        let before = self.files.stream(file).and_then(|stream| stream.nospace_acked);
        let waits_for_peer = has_waited && before.is_some() && self.acked(conn) > before;
        if waits_for_peer && !third(bound, queued) {
            self.await_acknowledgement(conn);
            // Everything may have been acknowledged in between; then no notification follows.
            let Some(usage) = self.send_buffer_usage(file, conn) else { return max };
            if !third(usage.0, usage.1) {
                return 0;
            }
            bound = usage.0;
        }
        let len = u32::try_from(max).unwrap_or(u32::MAX).min(1 << 30);
        let room = self.client.sendable_within(conn, len, (notsent_lowat.unwrap_or(u32::MAX), bound));
        let room = room.map_or(max, |room| max.min(room as usize));
        if room < max {
            self.set_nospace(file, conn);
        } else if let Some(stream) = self.files.stream(file) {
            stream.nospace_acked = None;
        }
        room
    }

    /// Returns the size of the send buffer and how many bytes in it are not acknowledged. The buffer grows
    /// after an acknowledgement that ended a shortage (`tcp_new_space`).
    pub(crate) fn send_buffer_usage(&mut self, file: FileId, conn: Conn) -> Option<(u32, u32)> {
        let [_, max] = self.send_buffer?;
        let info = self.client.info(conn).ok()?;
        let acked = self.acked(conn)?;
        let nospace = self.files.stream(file)?.nospace_acked;
        let again = nospace.is_some_and(|before| acked > before) && info.unacked < info.snd_cwnd;
        let bound = self.files.socket(file).ok()?.options.grow_send_buffer(&info, max, again);
        let queued = self.client.written(conn).ok()?.saturating_sub(acked);
        Some((bound, u32::try_from(queued).unwrap_or(u32::MAX)))
    }

    /// Returns how many bytes of a connection the peer has acknowledged.
    pub(crate) fn acked(&mut self, conn: Conn) -> Option<u64> {
        // In this order, bytes that the stack takes in between are counted twice as queued, not left out.
        let status = self.client.status(conn).ok()?;
        let info = self.client.info(conn).ok()?;
        let queued = u64::from(info.send_queued) + status.unsent as u64;
        Some(self.client.written(conn).ok()?.saturating_sub(queued))
    }

    /// Returns the bytes that a connection has transferred, without SYN and FIN.
    pub(crate) fn transferred(&mut self, file: FileId) -> Option<Transferred> {
        let conn = self.files.stream(file)?.conn;
        // In this order, bytes that the stack delivers in between are left out, not counted twice.
        let (read, status) = (self.client.read_position(conn).ok()?, self.client.status(conn).ok()?);
        let info = self.client.info(conn).ok()?;
        let received = read + u64::from(info.recv_queued) + status.readable as u64;
        Some(Transferred { acked: self.acked(conn)?, received })
    }

    /// Records that the send buffer is full (`SOCK_NOSPACE`).
    pub(crate) fn set_nospace(&mut self, file: FileId, conn: Conn) {
        let acked = self.acked(conn);
        if let Some(stream) = self.files.stream(file) {
            stream.nospace_acked = acked;
        }
    }

    /// Marks what was sent as the end of a record (`MSG_EOR`).
    fn end_record(&mut self, file: FileId) {
        if let Some(conn) = self.files.stream(file).map(|stream| stream.conn) {
            // A connection that is over has no records.
            let _ = self.client.end_record(conn);
        }
    }

    /// Holds back the last partial segment, or releases it (`MSG_MORE`).
    #[inline(always)]
    fn set_msg_more(&mut self, file: FileId, more: bool, has_written: bool) {
        let Ok(socket) = self.files.socket(file) else { return };
        let SocketRole::Stream(stream) = &socket.role else { return };
        // Each send with `MSG_MORE` sets it again, because acknowledgements release the held segment.
        if stream.has_end_work || more {
            self.do_end_work(file, more, has_written);
        }
    }

    #[inline(never)]
    fn do_end_work(&mut self, file: FileId, more: bool, has_written: bool) {
        if !more {
            self.stamp_stream(file, has_written);
        }
        let Ok(socket) = self.files.socket(file) else { return };
        let is_stamped = socket.options.timestamps().tx_flags() != 0;
        let SocketRole::Stream(stream) = &mut socket.role else { return };
        stream.has_end_work = more || is_stamped;
        if !more && !stream.msg_more {
            return;
        }
        let begins_hold = more && !stream.msg_more && !socket.options.flag(BoolOption::Cork);
        stream.msg_more = more;
        let conn = stream.conn;
        if begins_hold {
            let _ = self.client.begin_hold(conn);
        }
        // A connection that is over holds nothing back.
        let _ = self.client.set_option(conn, TcpOption::More(more));
    }
}
