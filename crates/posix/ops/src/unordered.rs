//! Unordered receive and unordered send (docs/unordered.md): two socket options of Ginnel's own, and the
//! control messages that come with them. The kernel knows neither: on a kernel socket the options fail with
//! `ENOPROTOOPT`.

use crate::Ops;
use crate::datagram::{ReceivedMessage, SendArgs, cmsgs_of};
use crate::fd_table::FileId;
use crate::file::SocketRole;
use crate::lock::LockGuard;
use crate::options::BoolOption;
use crate::process::ProcessState;
use crate::signal;
use crate::sleep::{Timeout, Wait};
use crate::sockaddr::Family;
use crate::socket_cmsgs::SocketCmsgs;
use crate::stream::{self, RecvArgs};
use crate::user_memory::{UserSlice, UserSliceMut, efault};
use core::cell::Cell;
use core::ffi::c_int;
use ginnel::channel::control::UnorderedReply;
use ginnel::channel::{RecvBuffer, gather, scatter};
use ginnel::{Conn, SendError};
use rustix::fd::RawFd;
use rustix::io::Errno;

/// Level of the options and of the control message.
pub const SOL_GINNEL: c_int = 18_254;
/// Option: bytes of high priority are received at once, even if earlier bytes of the stream are missing.
pub const GINNEL_UNORDERED_RECV: c_int = 1;
/// Option: messages with a priority overtake queued ones of lower priority.
pub const GINNEL_UNORDERED_SEND: c_int = 2;
/// Control message of `recvmsg`: the offset in the stream of the first received byte, 64 bits.
pub const GINNEL_STREAM_OFFSET: c_int = 1;

/// Space that the control message with the offset needs (`CMSG_SPACE(8)`).
const OFFSET_SPACE: usize = 24;
/// Flags of `recvmsg` with which bytes are received in order and without an offset.
const IN_ORDER_FLAGS: c_int = libc::MSG_OOB | libc::MSG_ERRQUEUE | libc::MSG_PEEK | libc::MSG_TRUNC;
/// Flags of `sendmsg` that a message with a priority may have. `MSG_MORE` is none of them, because a message
/// is sent whole and at once, nor is `MSG_OOB`.
const MESSAGE_FLAGS: c_int = stream::SEND_FLAGS & !(libc::MSG_MORE | libc::MSG_OOB);

/// The result of `recvmsg`.
struct Received {
    count: usize,
    /// `None` at the end of the stream.
    offset: Option<u64>,
}

impl Ops {
    /// Implements `recvmsg` of a socket with unordered receive, if the program has space for the offset.
    /// Returns `None` if it has none, or if the flags ask for bytes in order.
    pub(crate) fn recv_unordered(
        &self,
        fd: RawFd,
        buffers: &mut [UserSliceMut<'_>],
        flags: c_int,
        control_space: usize,
    ) -> Option<Result<ReceivedMessage, Errno>> {
        (flags & IN_ORDER_FLAGS == 0 && control_space >= OFFSET_SPACE)
            .then(|| self.recv_with_offset(fd, buffers, flags, control_space))
    }

    fn recv_with_offset(
        &self,
        fd: RawFd,
        buffers: &mut [UserSliceMut<'_>],
        flags: c_int,
        control_space: usize,
    ) -> Result<ReceivedMessage, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file)?;
        let dont_wait = socket.nonblocking || flags & libc::MSG_DONTWAIT != 0;
        let timeout = if dont_wait { Timeout::Zero } else { socket.options.recv_timeout() };
        let done = Cell::new(0);
        let wait = Wait::restarting(timeout, &done);
        let (mut state, result) = self.block_until(state, &[file], &mut [], &wait, |state, _| {
            state.recv_unordered_step(file, buffers, flags)
        });
        state.client.flush();
        let Received { count, offset } = result?;
        let mut message = ReceivedMessage::from_stream(count);
        if let Some(offset) = offset {
            message.put_stream_offset(offset, control_space);
        }
        Ok(message)
    }

    /// Implements `sendmsg` of a TCP socket with control messages: with a priority (`SO_PRIORITY`) if the
    /// socket has unordered send, and otherwise without effect.
    ///
    /// # Errors
    /// As [`Ops::send`]; `EINVAL` for control messages that Linux refuses.
    pub(crate) fn send_with_cmsgs(
        &self,
        fd: RawFd,
        buffers: &[UserSlice<'_>],
        args: &SendArgs<'_>,
    ) -> Result<usize, Errno> {
        if args.flags & libc::MSG_FASTOPEN != 0 {
            return self.send_fastopen(fd, buffers, args);
        }
        if args.control.is_empty() {
            return self.send(fd, buffers, args.flags);
        }
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file)?;
        let (family, is_unordered) = (socket.family, socket.options.flag(BoolOption::UnorderedSend));
        let may_have_time = socket.options.has_departures();
        drop(state);
        match socket_cmsgs_of(args.control, family, may_have_time) {
            Ok(SocketCmsgs { priority: Some(priority), .. }) if is_unordered => {
                self.send_message(fd, buffers, args.flags, priority)
            }
            Ok(cmsgs) if cmsgs.has_tx() => self.send_with_tx_cmsgs(fd, buffers, args.flags, cmsgs),
            Ok(_) => self.send(fd, buffers, args.flags),
            Err(error) => {
                // The state of the connection is looked at first (`tcp_sendmsg_locked`).
                self.send(fd, &[], args.flags & (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL))?;
                Err(error)
            }
        }
    }

    /// Sends with control messages that concern timestamps.
    fn send_with_tx_cmsgs(
        &self,
        fd: RawFd,
        buffers: &[UserSlice<'_>],
        flags: c_int,
        cmsgs: SocketCmsgs,
    ) -> Result<usize, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        // Under the lock of the send, so that another thread's send does not take them.
        state.set_stream_cmsgs(file, cmsgs);
        let socket = state.files.socket(file)?;
        let dont_wait = socket.nonblocking || flags & libc::MSG_DONTWAIT != 0;
        let timeout = if dont_wait { Timeout::Zero } else { socket.options.send_timeout() };
        let sent = self.send_rest(state, (fd, file), buffers, flags, timeout, &Cell::new(0));
        // Urgent data and data in a SYN have no timestamps.
        let mut state = self.lock()?;
        if let Ok(file) = self.file_of(&mut state, fd) {
            state.drop_stream_cmsgs(file);
        }
        sent
    }

    fn send_message(
        &self,
        fd: RawFd,
        buffers: &[UserSlice<'_>],
        flags: c_int,
        priority: u8,
    ) -> Result<usize, Errno> {
        if flags & !MESSAGE_FLAGS != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file)?;
        let dont_wait = socket.nonblocking || flags & libc::MSG_DONTWAIT != 0;
        let timeout = if dont_wait { Timeout::Zero } else { socket.options.send_timeout() };
        let mut bytes = Vec::new();
        gather(buffers, usize::MAX, &mut bytes).map_err(efault)?;
        let result = self.send_message_bytes(state, file, &bytes, (priority, timeout));
        if result == Err(Errno::PIPE) && flags & libc::MSG_NOSIGNAL == 0 {
            signal::raise_sigpipe();
        }
        result
    }

    fn send_message_bytes(
        &self,
        state: LockGuard<'_>,
        file: FileId,
        bytes: &[u8],
        (priority, timeout): (u8, Timeout),
    ) -> Result<usize, Errno> {
        let done = Cell::new(0);
        let wait = Wait::restarting(timeout, &done);
        let (mut state, result) = self.block_until(state, &[file], &mut [], &wait, |state, _| {
            let (conn, _) = match state.sendable(file, false) {
                Err(Errno::AGAIN) => {
                    // A message is sent whole, on an established connection.
                    state.send_deferred_syn(file);
                    return Err(Errno::AGAIN);
                }
                sendable => sendable?,
            };
            match state.client.send_message(conn, bytes.to_vec(), priority) {
                Ok(()) => Ok(bytes.len()),
                Err(SendError::Full) => {
                    state.set_message_blocked(file, true);
                    Err(Errno::AGAIN)
                }
                Err(SendError::TooLong) => Err(Errno::MSGSIZE),
                Err(_) => Err(state.ended_send_error(file, false)),
            }
        });
        state.client.flush();
        result
    }
}

impl ProcessState {
    /// Receives bytes that arrived early, or else bytes in order.
    fn recv_unordered_step(
        &mut self,
        file: FileId,
        buffers: &mut [UserSliceMut<'_>],
        flags: c_int,
    ) -> Result<Received, Errno> {
        let total: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        loop {
            let socket = self.files.socket(file)?;
            let SocketRole::Stream(stream) = socket.role else {
                // The connection ended with an earlier stack.
                let is_lost = matches!(socket.role, SocketRole::Unconnected { .. }) && socket.shutdown.read;
                let error = if is_lost { socket.shutdown.error.take() } else { Some(Errno::NOTCONN) };
                return error.map_or(Ok(Received { count: 0, offset: None }), Err);
            };
            let max = u32::try_from(total).unwrap_or(u32::MAX);
            // A connection that is gone has neither early bytes nor offsets.
            let reply = self.client.recv_unordered(stream.conn, max);
            let (offset, len) = match reply {
                Ok(UnorderedReply::Early { offset, bytes }) => {
                    let Ok(count) = scatter(&bytes, buffers) else {
                        // As on Linux, bytes that could not be copied stay readable. A stack that is gone
                        // has none.
                        let _ = self.client.return_unordered(stream.conn, offset, bytes);
                        return Err(Errno::FAULT);
                    };
                    return Ok(Received { count, offset: Some(offset) });
                }
                Ok(UnorderedReply::InOrder { offset, len }) => (offset, len as usize),
                Err(_) => (0, 0),
            };
            let copied = Cell::new(0);
            let mut args = RecvArgs { total, target: 1, flags, offset: 0, for_pipe: false, copied: &copied };
            if len > 0 && total > 0 {
                let Some(len) = self.len_to_mark(file, stream.conn, len.min(total))? else { continue };
                let result = self.recv_chunk(stream.conn, buffers, &args, 0, len);
                match (copied.get(), result) {
                    (0, Err(error)) => return Err(error),
                    // Another thread has read the bytes.
                    (0, _) => continue,
                    (count, _) => return Ok(Received { count, offset: Some(offset) }),
                }
            }
            // Nothing is consumed without its offset: bytes that have arrived since the reply are asked for
            // again. After the end of the stack there are no offsets.
            let is_known = reply.is_ok();
            if is_known {
                args.flags |= libc::MSG_PEEK;
            }
            match self.recv_step(file, buffers, &args) {
                Ok(count) if count > 0 && is_known => {}
                result => return result.map(|count| Received { count, offset: None }),
            }
        }
    }

    /// Returns how many of the next `len` bytes of a connection a read may consume: none beyond the urgent
    /// mark. Returns `None` if the next byte was an urgent one that reads skip: the byte after it has another
    /// offset.
    fn len_to_mark(&mut self, file: FileId, conn: Conn, len: usize) -> Result<Option<usize>, Errno> {
        if self.client.status(conn).is_ok_and(|status| status.oob_events == 0) {
            return Ok(Some(len));
        }
        let limit = self.read_limit(file, conn, 0, len, false);
        if limit.skip > 0 {
            self.discard_bytes(conn, limit.skip)?;
            return Ok(None);
        }
        Ok(Some(limit.len))
    }

    /// Records whether the last message found no room: the socket is not writable then.
    pub(crate) fn set_message_blocked(&mut self, file: FileId, is_blocked: bool) {
        if let Some(stream) = self.files.stream(file) {
            stream.message_blocked = is_blocked;
        }
    }
}

/// Returns what the control messages of `sendmsg` ask for on the level of the socket.
///
/// # Errors
/// `EINVAL` for a malformed control message, and for one of the level `SOL_SOCKET` that a stream does not
/// have or the program may not send (`sock_cmsg_send`).
fn socket_cmsgs_of(control: &[u8], family: Family, may_have_time: bool) -> Result<SocketCmsgs, Errno> {
    let mut cmsgs = SocketCmsgs::default();
    for cmsg in cmsgs_of(control) {
        let (level, kind, value) = cmsg?;
        if level != libc::SOL_SOCKET {
            // Other levels are not looked at.
            continue;
        }
        // `tcp_sendmsg_locked` replaces the error.
        cmsgs.read(kind, value, (family, false, may_have_time)).map_err(|_| Errno::INVAL)?;
    }
    Ok(cmsgs)
}
