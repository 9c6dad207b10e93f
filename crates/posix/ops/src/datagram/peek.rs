//! `MSG_PEEK` on UDP sockets, from the offset that `SO_PEEK_OFF` sets (`__skb_try_recv_from_queue`).

use super::ancillary::ReceivedMessage;
use crate::fd_table::FileId;
use crate::process::ProcessState;
use crate::user_memory::UserSliceMut;
use core::ffi::c_int;
use ginnel::channel::{Fault, PeekedDatagram, ReceivedDatagram};
use ginnel::{Conn, UdpError};

impl ReceivedMessage {
    /// Corrects the result of a peek that began `offset` bytes after the start of the datagram, into buffers
    /// of `space` bytes. As on Linux, a datagram whose rest fills the buffers exactly counts as truncated.
    pub(super) fn begin_at(
        &mut self,
        datagram: &ReceivedDatagram,
        (offset, space, flags): (usize, usize, c_int),
    ) {
        let rest = datagram.len - offset;
        if flags & libc::MSG_TRUNC == 0 {
            self.count = rest.min(space);
        }
        let is_truncated = space <= rest && space < datagram.len;
        self.flags = if is_truncated { libc::MSG_TRUNC } else { 0 };
    }
}

impl ProcessState {
    /// Copies from the queue without consuming anything, from the socket's offset on, and stores how many
    /// bytes of the datagram precede what was copied.
    #[cold]
    pub(super) fn peek_datagram(
        &mut self,
        file: FileId,
        conn: Conn,
        buffers: &mut [UserSliceMut<'_>],
        offset: &mut usize,
    ) -> Result<Result<ReceivedDatagram, Fault>, UdpError> {
        let socket = self.files.socket(file).map_err(|_| UdpError::Stale)?;
        let from = socket.options.peek_offset();
        let peeked_empty = socket.udp_send.as_ref().map_or(&[][..], |state| &state.peeked_empty);
        // Without an offset the first datagram is returned, also if it is empty.
        let peeked_empty = if from.is_some() { peeked_empty } else { &[] };
        let found = self.client.udp_peek_into(conn, buffers, from.unwrap_or(0), peeked_empty)?;
        if let Ok(PeekedDatagram { datagram, position, .. }) = found
            && datagram.len == 0
        {
            self.note_peeked_empty(file, conn, position);
        }
        Ok(found.map(|peeked| {
            *offset = peeked.offset;
            peeked.datagram
        }))
    }

    /// Records that the program has seen the empty datagram at this position: the next peek at an offset
    /// passes over it.
    fn note_peeked_empty(&mut self, file: FileId, conn: Conn, position: u64) {
        let read = self.client.read_position(conn).unwrap_or(position);
        let Ok(socket) = self.files.socket(file) else { return };
        let peeked = &mut socket.udp_send.get_or_insert_default().peeked_empty;
        peeked.retain(|at| *at >= read && *at != position);
        peeked.push(position);
    }

    /// Moves the offset of peeks forward after a peek that returned `count`.
    pub(super) fn advance_peek(&mut self, file: FileId, count: usize) {
        if let Ok(socket) = self.files.socket(file) {
            socket.options.move_peek_offset(true, count);
        }
    }
}
