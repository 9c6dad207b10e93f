//! Urgent data that arrive, with Linux's interpretation: one byte, the one before the position of the urgent
//! pointer (RFC 6093 §3.2).
//!
//! The application must be notified of the byte before it reads up to it, so no data can be read while an
//! event about the byte is queued.

use super::Tcp;
use super::active::{ActiveConn, UrgentState};
use super::conn::{Flags, NONE, Tcb};
use super::input::Segment;
use crate::error::RecvError;
use crate::events::Event;
use crate::handle::Conn;
use crate::options::UrgentMark;
use crate::wire::tcp::{SeqNumber, TcpFlags};

impl Tcp {
    /// Processes a segment with URG, or any segment of a connection on which an urgent byte is expected.
    #[cold]
    pub fn on_urgent(&mut self, idx: u32, seg: &Segment<'_>) {
        let is_announced = seg.header.flags.contains(TcpFlags::URG) && self.check_urg(idx, seg);
        let arrived = self.take_urgent_byte(idx, seg);
        if is_announced || arrived {
            self.report_urgent(idx);
        }
    }

    /// Processes the urgent pointer (Linux's `tcp_check_urg`). Returns whether it announces a new byte.
    fn check_urg(&mut self, idx: u32, seg: &Segment<'_>) -> bool {
        let at = seg.header.seq + u32::from(seg.header.urgent.max(1)) - 1;
        let c = &self.conns[idx];
        if !c.state.may_receive() || at.lt(c.rcv_nxt) || at.gt(c.rcv_edge) {
            return false;
        }
        let rcv_nxt = c.rcv_nxt;
        let active = self.ensure_active(idx);
        let b = &mut self.active[active];
        if b.recv.is_taken(b.recv.contiguous() + (at - rcv_nxt) as usize) {
            // The application has received the byte early, as ordinary data.
            return false;
        }
        let newer = match b.urg_data {
            UrgentState::None => true,
            UrgentState::NotYet(s) | UrgentState::Valid(s, _) | UrgentState::Read(s) => at.gt(s),
        };
        if newer {
            b.urg_data = UrgentState::NotYet(at);
            self.conns[idx].flags.set(Flags::URGENT_OR_FILTERED);
        }
        newer
    }

    /// Takes the urgent byte, which may arrive in a later segment than its announcement, even in one without
    /// URG. Returns whether it arrived.
    fn take_urgent_byte(&mut self, idx: u32, seg: &Segment<'_>) -> bool {
        let Some((_, b)) = self.tcb_and_active(idx) else { return false };
        if let UrgentState::NotYet(at) = b.urg_data
            && let Ok(into) = usize::try_from(at - seg.header.seq)
            && let Some(byte) = seg.payload.get(into)
        {
            b.urg_data = UrgentState::Valid(at, *byte);
            return true;
        }
        false
    }

    /// Reports to the owner what is known of the urgent byte, if there is one that was not read.
    pub(super) fn report_urgent(&mut self, idx: u32) {
        let conn = self.conns.handle(idx);
        let Some((c, b)) = self.tcb_and_active(idx) else { return };
        let (at, byte) = match b.urg_data {
            UrgentState::NotYet(at) => (at, None),
            UrgentState::Valid(at, byte) => (at, Some(byte)),
            UrgentState::None | UrgentState::Read(_) => return,
        };
        if c.has(Flags::ACCEPTED) {
            b.urgent_events_queued += 1;
            self.events.push_back(Event::Urgent { conn, at, byte });
        }
    }

    /// Accounts for an event about urgent data that the owner takes. Data that could not be read before that
    /// become readable.
    #[cold]
    pub(super) fn on_urgent_event_taken(&mut self, conn: Conn) {
        let Some((idx, (c, b))) = self.index(conn).and_then(|idx| Some((idx, self.tcb_and_active(idx)?)))
        else {
            return;
        };
        b.urgent_events_queued = b.urgent_events_queued.saturating_sub(1);
        if b.urgent_events_queued == 0 && b.recv.readable() > 0 && !c.has(Flags::READABLE_QUEUED) {
            self.conns[idx].flags.set(Flags::READABLE_QUEUED);
            self.events.push_front(Event::Readable { conn });
        }
    }

    /// Takes the urgent byte, if it has arrived and is out of band.
    pub fn recv_urgent(&mut self, conn: Conn) -> Result<u8, RecvError> {
        let idx = self.index(conn).ok_or(RecvError::Stale)?;
        let inline = self.conns[idx].has(Flags::OOB_INLINE);
        let Some((_, b)) = self.tcb_and_active(idx) else { return Err(RecvError::WouldBlock) };
        match b.urg_data {
            UrgentState::Valid(at, byte) if !inline => {
                b.urg_data = UrgentState::Read(at);
                Ok(byte)
            }
            _ => Err(RecvError::WouldBlock),
        }
    }

    /// Returns the position of the urgent byte that was announced last, unless reading has passed it.
    pub fn urgent_mark(&self, conn: Conn) -> Option<UrgentMark> {
        let c = &self.conns[self.index(conn)?];
        if c.active == NONE {
            return None;
        }
        let (at, ready) = match self.active[c.active].urg_data {
            UrgentState::None => return None,
            UrgentState::NotYet(at) | UrgentState::Read(at) => (at, false),
            UrgentState::Valid(at, _) => (at, true),
        };
        let ahead = usize::try_from(self.urgent_ahead(conn, at)).ok()?;
        Some(UrgentMark { ahead, ready })
    }

    /// Returns the number of unread bytes before sequence number `at`; negative if reading has passed it, or
    /// if the handle is stale.
    pub fn urgent_ahead(&self, conn: Conn, at: SeqNumber) -> i32 {
        let Some(idx) = self.index(conn) else { return -1 };
        let first_unread = self.conns[idx].data_end() - self.unread(idx) as u32;
        at - first_unread
    }

    /// Reads past the urgent byte, if it is the first unread byte.
    pub(super) fn pass_urgent_mark(&mut self, idx: u32, span: &ReadSpan) {
        if !span.is_at_mark {
            return;
        }
        // Data may be delivered inline again, unless the socket has a filter.
        let is_filtered = self.is_filtered(idx);
        self.conns[idx].flags.assign(Flags::URGENT_OR_FILTERED, is_filtered);
        let active = self.conns[idx].active;
        let b = &mut self.active[active];
        b.urg_data = UrgentState::None;
        b.recv.consume(&mut self.chunks, span.skip);
    }
}

/// The bytes that a read may return. A read stops before the urgent byte; the next read passes it, and unless
/// it is delivered in the stream, the byte is skipped (Linux's `tcp_recvmsg`; RFC 6093 §3.2).
pub(super) struct ReadSpan {
    /// True if the urgent byte is the first unread byte.
    is_at_mark: bool,
    /// Bytes to skip first: the urgent byte, or none.
    pub skip: usize,
    /// Bytes to read after those, at most.
    pub max: usize,
}

impl ReadSpan {
    #[inline]
    pub fn of(c: &Tcb, b: &ActiveConn) -> Self {
        match b.urg_data {
            UrgentState::None => Self { is_at_mark: false, skip: 0, max: usize::MAX },
            _ => Self::with_urgent(c, b),
        }
    }

    #[cold]
    fn with_urgent(c: &Tcb, b: &ActiveConn) -> Self {
        if b.urgent_events_queued > 0 {
            return Self { is_at_mark: false, skip: 0, max: 0 };
        }
        match urgent_offset(b, c.data_end()) {
            Some(0) if b.recv.readable() > 0 => {
                Self { is_at_mark: true, skip: usize::from(!c.has(Flags::OOB_INLINE)), max: usize::MAX }
            }
            mark => Self { is_at_mark: false, skip: 0, max: mark.unwrap_or(usize::MAX) },
        }
    }
}

/// Returns the offset of the urgent byte from the first unread byte.
fn urgent_offset(b: &ActiveConn, data_end: SeqNumber) -> Option<usize> {
    let at = match b.urg_data {
        UrgentState::Valid(at, _) | UrgentState::Read(at) => at,
        UrgentState::NotYet(_) | UrgentState::None => return None,
    };
    let first_unread = data_end - b.recv.contiguous() as u32;
    usize::try_from(at - first_unread).ok()
}
