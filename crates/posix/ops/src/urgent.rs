//! Urgent data of a connection: the urgent byte, the mark at which reads stop, and `SIGURG` (`tcp_recv_urg`,
//! `tcp_recvmsg`, `sk_send_sigurg`).
//!
//! Connections without urgent data never get here.

use crate::Ops;
use crate::fd_table::FileId;
use crate::file::SocketRole;
use crate::lock::LockGuard;
use crate::options::BoolOption;
use crate::process::ProcessState;
use crate::scratch;
use crate::sleep::{Timeout, Wait};
use crate::user_memory::{UserSlice, UserSliceMut, efault};
use core::cell::Cell;
use core::ffi::c_int;
use ginnel::Conn;
use ginnel::channel::{SocketStatus, UrgentMark, gather, scatter};
use rustix::fd::RawFd;
use rustix::io::Errno;
use rustix::process::{Pid, Signal};

/// Bytes that a read may consume without passing the urgent mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadLimit {
    /// Bytes to skip first: the urgent byte, which is not inline.
    pub skip: usize,
    /// Bytes to read after those, all of which have arrived.
    pub len: usize,
    /// True if the next byte is the urgent one.
    pub is_at_mark: bool,
    /// True if the read ends after these bytes, even below its target.
    pub ends_read: bool,
}

impl ProcessState {
    /// Returns the last urgent byte that was announced, unless it was read past. Its `SIGURG` is sent when
    /// the lock is released, if none was sent for it before.
    #[inline]
    pub fn urgent_mark(&mut self, file: FileId, conn: Conn, status: &SocketStatus) -> Option<UrgentMark> {
        if status.oob_events == 0 {
            return None;
        }
        self.urgent_mark_and_bytes(file, conn).0
    }

    /// Returns what a read may consume that starts `offset` bytes after the read position and has `space`
    /// bytes of space. `copied` tells that the call has copied something.
    #[cold]
    pub fn read_limit(
        &mut self,
        file: FileId,
        conn: Conn,
        offset: usize,
        space: usize,
        copied: bool,
    ) -> ReadLimit {
        let inline = self.is_oob_inline(file);
        let (mark, available) = self.urgent_mark_and_bytes(file, conn);
        let available = available.saturating_sub(offset);
        match mark.and_then(|mark| mark.unread_before.checked_sub(offset)) {
            None => ReadLimit { skip: 0, len: available.min(space), is_at_mark: false, ends_read: false },
            Some(0) if copied => ReadLimit { skip: 0, len: 0, is_at_mark: true, ends_read: true },
            Some(0) => {
                let skip = usize::from(available > 0 && !inline);
                ReadLimit { skip, len: (available - skip).min(space), is_at_mark: true, ends_read: false }
            }
            Some(ahead) => {
                let len = available.min(space).min(ahead);
                ReadLimit { skip: 0, len, is_at_mark: false, ends_read: len == ahead }
            }
        }
    }

    /// Returns the mark and the number of unread bytes. The urgent byte is included; bytes after a further
    /// urgent byte that is not known yet are not.
    pub fn urgent_mark_and_bytes(&mut self, file: FileId, conn: Conn) -> (Option<UrgentMark>, usize) {
        let mut seen = None;
        loop {
            // May drop an urgent byte that a later one has superseded (`tcp_check_urg`).
            let mark = self.client.urgent_mark(conn).ok().flatten();
            let Ok(status) = self.client.status(conn) else { return (None, 0) };
            if seen == Some(status.oob_events) {
                self.note_urgent_data(file, status.oob_events, mark);
                return (mark, status.readable);
            }
            seen = Some(status.oob_events);
        }
    }

    /// Sends `SIGURG` to the owner when the lock is released, unless it was sent for this announcement. The
    /// stack writes the mark before it notifies: the thread that sees the mark first sends the signal, since
    /// the program may wait for it without a further call (`sk_send_sigurg` comes before `sk_data_ready`).
    fn note_urgent_data(&mut self, file: FileId, oob_events: u32, mark: Option<UrgentMark>) {
        let Ok(socket) = self.files.socket(file) else { return };
        if socket.urgent.oob_events_seen == oob_events {
            return;
        }
        let has_arrived = mark.is_some_and(|mark| mark.byte.is_some());
        // The arrival of a byte that was announced before is no new announcement.
        let announced = !(has_arrived && socket.urgent.byte_pending);
        if announced && socket.urgent.owner != 0 && !self.deferred.defer_sigurg(socket.urgent.owner) {
            // A handler of this process is called with the lock held, and reads nothing: EAGAIN.
            send_sigurg(socket.urgent.owner);
        }
        socket.urgent.byte_pending = mark.is_some() && !has_arrived;
        socket.urgent.oob_events_seen = oob_events;
    }

    fn is_oob_inline(&mut self, file: FileId) -> bool {
        self.files.socket(file).is_ok_and(|socket| socket.options.flag(BoolOption::OobInline))
    }

    /// Returns whether the next byte is an urgent byte that reads skip.
    pub fn is_at_skipped_byte(&mut self, file: FileId, mark: Option<UrgentMark>) -> bool {
        mark.is_some_and(|mark| mark.unread_before == 0) && !self.is_oob_inline(file)
    }

    /// Receives the urgent byte (`tcp_recv_urg`).
    pub fn recv_urgent(
        &mut self,
        file: FileId,
        buffers: &mut [UserSliceMut<'_>],
        flags: c_int,
    ) -> Result<usize, Errno> {
        let shutdown = self.files.socket(file)?.shutdown.read;
        let (conn, status) = self.status(file).ok_or(Errno::NOTCONN)?;
        let Some(mark) = self.urgent_mark(file, conn, &status).filter(|mark| !mark.is_taken) else {
            return Err(Errno::INVAL);
        };
        if self.is_oob_inline(file) {
            return Err(Errno::INVAL);
        }
        if status.state.is_closed() && !status.state.has_fin() {
            return Err(Errno::NOTCONN);
        }
        let byte = if flags & libc::MSG_PEEK != 0 { mark.byte } else { self.client.recv_urgent(conn).ok() };
        let Some(byte) = byte else {
            let is_at_end = status.state.has_fin() || status.state.is_closed() || shutdown;
            return if is_at_end { Ok(0) } else { Err(Errno::AGAIN) };
        };
        if flags & libc::MSG_TRUNC == 0 {
            return scatter(&[byte], buffers).map_err(efault);
        }
        Ok(usize::from(buffers.iter().any(|buffer| !buffer.is_empty())))
    }

    /// Handles an urgent notification of the stack. Returns whether waiters for data must be woken: an
    /// announcement alone brings no data.
    pub fn handle_urgent_notice(&mut self, file: FileId) -> bool {
        let Some((conn, status)) = self.status(file) else { return false };
        self.urgent_mark(file, conn, &status).is_some_and(|mark| mark.byte.is_some())
    }
}

impl Ops {
    /// Implements `SIOCATMARK`: returns whether the next byte is the urgent one.
    ///
    /// # Errors
    /// `ENOTTY` for a UDP socket, `EINVAL` for an epoll set.
    pub fn is_at_mark(&self, fd: RawFd) -> Result<bool, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file).map_err(|_| Errno::INVAL)?;
        if socket.is_udp {
            return Err(Errno::NOTTY);
        }
        if !matches!(socket.role, SocketRole::Stream(_)) {
            return Ok(false);
        }
        let Some((conn, status)) = state.status(file) else { return Ok(false) };
        Ok(state.urgent_mark(file, conn, &status).is_some_and(|mark| mark.unread_before == 0))
    }

    /// Sends what follows the first `done` bytes, which the SYN has carried. The last byte is urgent, unless
    /// nothing follows. Returns how many bytes were sent, including those of the SYN.
    pub(crate) fn send_urgent(
        &self,
        state: LockGuard<'_>,
        file: FileId,
        buffers: &[UserSlice<'_>],
        timeout: Timeout,
        done: usize,
    ) -> Result<usize, Errno> {
        let (mut state, result) =
            scratch::with(|scratch| match gather(buffers, usize::MAX, &mut scratch.bytes) {
                Ok(()) => match scratch.bytes.get(done..) {
                    Some(rest) if done == 0 || !rest.is_empty() => {
                        self.send_urgent_bytes(state, file, rest, timeout, done > 0)
                    }
                    _ => (state, Ok(0)),
                },
                Err(fault) => (state, Err(efault(fault))),
            });
        state.client.flush();
        match result {
            Ok(sent) => Ok(done + sent),
            Err(_) if done > 0 => Ok(done),
            Err(error) => Err(error),
        }
    }

    fn send_urgent_bytes<'a>(
        &'a self,
        state: LockGuard<'a>,
        file: FileId,
        bytes: &[u8],
        timeout: Timeout,
        has_sent: bool,
    ) -> (LockGuard<'a>, Result<usize, Errno>) {
        let done = Cell::new(0);
        let wait = Wait::restarting(timeout, &done);
        let (state, result) = self.block_until(state, &[file], &mut [], &wait, |state, _| {
            let has_sent = has_sent || done.get() > 0;
            let (conn, _) = state.sendable(file, has_sent)?;
            match state.client.send_urgent(conn, &bytes[done.get()..]) {
                Ok(sent) => done.set(done.get() + sent),
                Err(ginnel::SendError::Full) => return Err(Errno::AGAIN),
                Err(_) => return Err(state.ended_send_error(file, has_sent)),
            }
            if done.get() == bytes.len() { Ok(()) } else { Err(Errno::AGAIN) }
        });
        match result {
            Err(error) if done.get() == 0 => (state, Err(error)),
            _ => (state, Ok(done.get())),
        }
    }

    /// Implements `F_GETOWN`: returns the process that gets `SIGURG`, the negative process group, or 0.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn owner(&self, fd: RawFd) -> Result<c_int, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        Ok(state.files.socket(file).map_or(0, |socket| socket.urgent.owner))
    }

    /// Implements `F_SETOWN` (`f_setown`).
    ///
    /// # Errors
    /// `ESRCH` if there is no such process or process group, `EINVAL` for the smallest `int`.
    pub fn set_owner(&self, fd: RawFd, owner: c_int) -> Result<(), Errno> {
        let positive = owner.checked_abs().ok_or(Errno::INVAL)?;
        if let Some(pid) = Pid::from_raw(positive) {
            let available = match owner > 0 {
                true => rustix::process::test_kill_process(pid),
                false => rustix::process::test_kill_process_group(pid),
            };
            if available == Err(Errno::SRCH) {
                return Err(Errno::SRCH);
            }
        }
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        if let Ok(socket) = state.files.socket(file) {
            socket.urgent.owner = owner;
        }
        Ok(())
    }
}

/// Sends `SIGURG` to a process or process group. The caller must not hold the lock, since the handler is
/// likely to read the byte.
#[cold]
pub(crate) fn send_sigurg(owner: c_int) {
    let Some(pid) = owner.checked_abs().and_then(Pid::from_raw) else { return };
    // A process that no longer exists needs no signal.
    let _ = match owner > 0 {
        true => rustix::process::kill_process(pid, Signal::URG),
        false => rustix::process::kill_process_group(pid, Signal::URG),
    };
}
