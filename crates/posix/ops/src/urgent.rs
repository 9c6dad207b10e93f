//! Urgent data of a connection: one byte, the mark in front of which reads stop, and who hears of it (`tcp_recv_urg`, `tcp_recvmsg`, `sk_send_sigurg`).
//!
//! Connections that never had any never come here.

use crate::Ops;
use crate::fd_table::FileId;
use crate::file::Shape;
use crate::held::Locked;
use crate::lane::Lane;
use crate::options::Flag;
use crate::scratch;
use crate::sleep::{Patience, Wait};
use core::cell::Cell;
use core::ffi::c_int;
use ginnel::Conn;
use ginnel::channel::{Mark, Status};
use rustix::fd::RawFd;
use rustix::io::Errno;
use rustix::process::{Pid, Signal};
use std::io::{IoSlice, IoSliceMut};

/// What a read that heeds the mark may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Front {
    /// Bytes of the stream to be passed over first: the urgent one.
    pub lead: usize,
    /// Bytes to be read behind those, of which so many are there.
    pub most: usize,
    /// The next byte is the urgent one.
    pub is_at_mark: bool,
    /// The read ends there, whatever else it waits for.
    pub stops: bool,
}

impl Lane {
    /// The urgent byte that was announced last, unless reading has passed it.
    #[inline]
    pub fn mark(&mut self, conn: Conn, status: &Status) -> Option<Mark> {
        if status.notices == 0 {
            return None;
        }
        self.client.mark(conn).ok().flatten()
    }

    /// What a read finds `offset` bytes behind what was read, with `room` left and after some was `copied`.
    #[cold]
    pub fn front(&mut self, file: FileId, conn: Conn, offset: usize, room: usize, copied: bool) -> Front {
        let inline = self.is_oob_inline(file);
        let (mark, there) = self.mark_and_bytes(conn);
        let there = there.saturating_sub(offset);
        match mark.and_then(|mark| mark.ahead.checked_sub(offset)) {
            None => Front { lead: 0, most: there.min(room), is_at_mark: false, stops: false },
            Some(0) if copied => Front { lead: 0, most: 0, is_at_mark: true, stops: true },
            Some(0) => {
                let lead = usize::from(there > 0 && !inline);
                Front { lead, most: (there - lead).min(room), is_at_mark: true, stops: false }
            }
            Some(ahead) => {
                let most = there.min(room).min(ahead);
                Front { lead: 0, most, is_at_mark: false, stops: most == ahead }
            }
        }
    }

    /// The mark, and bytes that have come and were not read, the urgent one among them, and none behind another that is not known yet.
    pub fn mark_and_bytes(&mut self, conn: Conn) -> (Option<Mark>, usize) {
        let mut seen = None;
        loop {
            // This may leave out bytes.
            let mark = self.client.mark(conn).ok().flatten();
            let Ok(status) = self.client.status(conn) else { return (None, 0) };
            if seen == Some(status.notices) {
                return (mark, status.readable);
            }
            seen = Some(status.notices);
        }
    }

    fn is_oob_inline(&mut self, file: FileId) -> bool {
        self.files.socket(file).is_ok_and(|socket| socket.options.flag(Flag::OobInline))
    }

    /// Whether the next byte to be read is one that reads pass over.
    pub fn is_at_hidden_byte(&mut self, file: FileId, mark: Option<Mark>) -> bool {
        mark.is_some_and(|mark| mark.ahead == 0) && !self.is_oob_inline(file)
    }

    /// The urgent byte (`tcp_recv_urg`).
    pub fn recv_urgent(
        &mut self,
        file: FileId,
        buffers: &mut [IoSliceMut<'_>],
        flags: c_int,
    ) -> Result<usize, Errno> {
        let shut = self.files.socket(file)?.shut.read;
        let (conn, status) = self.status(file).ok_or(Errno::NOTCONN)?;
        let Some(mark) = self.mark(conn, &status).filter(|mark| !mark.taken) else {
            return Err(Errno::INVAL);
        };
        if self.is_oob_inline(file) {
            return Err(Errno::INVAL);
        }
        if status.standing.is_over() && !status.standing.peer_closed() {
            return Err(Errno::NOTCONN);
        }
        let byte = if flags & libc::MSG_PEEK != 0 { mark.byte } else { self.client.recv_urgent(conn).ok() };
        let Some(byte) = byte else {
            let no_more = status.standing.peer_closed() || status.standing.is_over() || shut;
            return if no_more { Ok(0) } else { Err(Errno::AGAIN) };
        };
        let Some(place) = buffers.iter_mut().find(|buffer| !buffer.is_empty()) else { return Ok(0) };
        if flags & libc::MSG_TRUNC == 0 {
            place[0] = byte;
        }
        Ok(1)
    }

    /// The stack has said something about urgent data. Returns whether whoever waits for bytes is to be told: an announcement alone is no byte.
    pub fn heard_of_urgent(&mut self, file: FileId) -> bool {
        let Some((conn, status)) = self.status(file) else { return false };
        let mark = self.mark(conn, &status);
        let has_come = mark.is_some_and(|mark| mark.byte.is_some());
        if let Ok(socket) = self.files.socket(file)
            && socket.urgency.heard != status.notices
        {
            // A byte that comes later than what announced it is no news of that kind.
            let announced = !(has_come && socket.urgency.awaited);
            socket.urgency.awaited = mark.is_some() && !has_come;
            socket.urgency.heard = status.notices;
            if announced && socket.urgency.owner != 0 {
                self.left.leave_signal(socket.urgency.owner);
            }
        }
        has_come
    }
}

impl Ops {
    /// `SIOCATMARK`: whether the next byte that can be read is the urgent one.
    ///
    /// # Errors
    /// `ENOTTY` for anything but a socket of TCP.
    pub fn is_at_mark(&self, fd: RawFd) -> Result<bool, Errno> {
        let mut lane = self.lock()?;
        let file = self.file(&mut lane, fd)?;
        let socket = lane.files.socket(file).map_err(|_| Errno::INVAL)?;
        if socket.datagrams {
            return Err(Errno::NOTTY);
        }
        if !matches!(socket.shape, Shape::Stream(_)) {
            return Ok(false);
        }
        let Some((conn, status)) = lane.status(file) else { return Ok(false) };
        Ok(lane.mark(conn, &status).is_some_and(|mark| mark.ahead == 0))
    }

    /// Sends bytes of which the last is urgent.
    pub(crate) fn send_urgent(
        &self,
        lane: Locked<'_>,
        file: FileId,
        buffers: &[IoSlice<'_>],
        patience: Patience,
    ) -> Result<usize, Errno> {
        let (mut lane, result) = scratch::with(|lists| {
            buffers.iter().for_each(|buffer| lists.bytes.extend_from_slice(buffer));
            self.send_urgent_bytes(lane, file, &lists.bytes, patience)
        });
        lane.client.flush();
        result
    }

    fn send_urgent_bytes<'a>(
        &'a self,
        lane: Locked<'a>,
        file: FileId,
        bytes: &[u8],
        patience: Patience,
    ) -> (Locked<'a>, Result<usize, Errno>) {
        let done = Cell::new(0);
        let wait = Wait::restarting(patience, &done);
        self.until(lane, &[file], &mut [], &wait, |lane, _| {
            let (conn, _) = lane.sendable(file)?;
            match lane.client.send_urgent(conn, bytes) {
                Ok(sent) => Ok(sent),
                Err(ginnel::SendError::Full) => Err(Errno::AGAIN),
                Err(_) => Err(Errno::PIPE),
            }
        })
    }

    /// Who gets `SIGURG` (`F_GETOWN`): a process, a group as a number below 0, or nobody.
    ///
    /// # Errors
    /// It is none of ours.
    pub fn owner(&self, fd: RawFd) -> Result<c_int, Errno> {
        let mut lane = self.lock()?;
        let file = self.file(&mut lane, fd)?;
        Ok(lane.files.socket(file).map_or(0, |socket| socket.urgency.owner))
    }

    /// `F_SETOWN` (`f_setown`).
    ///
    /// # Errors
    /// `ESRCH` if there is no such process or group, `EINVAL` for a number that has no opposite.
    pub fn set_owner(&self, fd: RawFd, owner: c_int) -> Result<(), Errno> {
        let positive = owner.checked_abs().ok_or(Errno::INVAL)?;
        if let Some(pid) = Pid::from_raw(positive) {
            let there = match owner > 0 {
                true => rustix::process::test_kill_process(pid),
                false => rustix::process::test_kill_process_group(pid),
            };
            if there == Err(Errno::SRCH) {
                return Err(Errno::SRCH);
            }
        }
        let mut lane = self.lock()?;
        let file = self.file(&mut lane, fd)?;
        if let Ok(socket) = lane.files.socket(file) {
            socket.urgency.owner = owner;
        }
        Ok(())
    }
}

/// Tells a process or a group of urgent data. Nobody may hold the sockets: the handler is likely to take the byte.
#[cold]
pub(crate) fn signal(owner: c_int) {
    let Some(pid) = owner.checked_abs().and_then(Pid::from_raw) else { return };
    // Who is gone hears nothing.
    let _ = match owner > 0 {
        true => rustix::process::kill_process(pid, Signal::URG),
        false => rustix::process::kill_process_group(pid, Signal::URG),
    };
}
