//! Urgent data that arrive, as Linux understands them: one byte, the one in front of where the pointer points (RFC 6093 §3.2).
//!
//! Whoever reads must know of the byte before reading comes to it, so nothing is shown while an event about it waits.

use super::Tcp;
use super::busy::{Busy, Urgent};
use super::conn::{Flags, NONE, Tcb};
use super::input::Arrived;

use crate::error::RecvError;
use crate::events::Event;
use crate::handle::Conn;
use crate::options::UrgentMark;
use crate::wire::tcp::{SeqNumber, TcpFlags};

impl Tcp {
    /// A segment that says URG, or one of a connection on which an urgent byte is expected.
    #[cold]
    pub fn on_urgent(&mut self, idx: u32, seg: &Arrived<'_>) {
        let announced = seg.header.flags.contains(TcpFlags::URG) && self.on_announcement(idx, seg);
        let came = self.take_urgent_byte(idx, seg);
        if announced || came {
            self.tell_urgent(idx);
        }
    }

    /// Whether it is a new one.
    fn on_announcement(&mut self, idx: u32, seg: &Arrived<'_>) -> bool {
        let at = seg.header.seq + u32::from(seg.header.urgent.max(1)) - 1;
        let c = &self.conns[idx];
        if !c.state.may_receive() || at.lt(c.rcv_nxt) || at.gt(c.rcv_edge) {
            return false;
        }
        let busy = self.ensure_busy(idx);
        let b = &mut self.busy[busy];
        let newer = match b.urgent_in {
            Urgent::None => true,
            Urgent::Pending(s) | Urgent::Held(s, _) | Urgent::Taken(s) => at.gt(s),
        };
        if newer {
            b.urgent_in = Urgent::Pending(at);
            self.conns[idx].flags.set(Flags::URGENT);
        }
        newer
    }

    /// The urgent byte may come in a later segment than its announcement, and that one need not say URG. Whether it came.
    fn take_urgent_byte(&mut self, idx: u32, seg: &Arrived<'_>) -> bool {
        let Some((_, b)) = self.both(idx) else { return false };
        if let Urgent::Pending(at) = b.urgent_in
            && let Ok(into) = usize::try_from(at - seg.header.seq)
            && let Some(byte) = seg.payload.get(into)
        {
            b.urgent_in = Urgent::Held(at, *byte);
            return true;
        }
        false
    }

    /// Tells the owner what is known of the urgent byte, if there is one that was not taken.
    pub(super) fn tell_urgent(&mut self, idx: u32) {
        let conn = self.conns.handle(idx);
        let Some((c, b)) = self.both(idx) else { return };
        let (at, byte) = match b.urgent_in {
            Urgent::Pending(at) => (at, None),
            Urgent::Held(at, byte) => (at, Some(byte)),
            Urgent::None | Urgent::Taken(_) => return,
        };
        if c.has(Flags::ACCEPTED) {
            b.urgent_untold += 1;
            self.events.push_back(Event::Urgent { conn, at, byte });
        }
    }

    /// The owner is being told. What waited for that can be read behind it.
    #[cold]
    pub(super) fn urgent_is_told(&mut self, conn: Conn) {
        let Some((idx, (c, b))) = self.index(conn).and_then(|idx| Some((idx, self.both(idx)?))) else {
            return;
        };
        b.urgent_untold = b.urgent_untold.saturating_sub(1);
        if b.urgent_untold == 0 && b.recv.readable() > 0 && !c.has(Flags::READABLE_QUEUED) {
            self.conns[idx].flags.set(Flags::READABLE_QUEUED);
            self.events.push_front(Event::Readable { conn });
        }
    }

    /// The urgent byte, if it arrived and stays out of line.
    pub fn recv_urgent(&mut self, conn: Conn) -> Result<u8, RecvError> {
        let idx = self.index(conn).ok_or(RecvError::Stale)?;
        let inline = self.conns[idx].has(Flags::OOB_INLINE);
        let Some((_, b)) = self.both(idx) else { return Err(RecvError::WouldBlock) };
        match b.urgent_in {
            Urgent::Held(at, byte) if !inline => {
                b.urgent_in = Urgent::Taken(at);
                Ok(byte)
            }
            _ => Err(RecvError::WouldBlock),
        }
    }

    /// Where the urgent byte is that was announced last, if reading has not passed it.
    pub fn urgent_mark(&self, conn: Conn) -> Option<UrgentMark> {
        let c = &self.conns[self.index(conn)?];
        if c.busy == NONE {
            return None;
        }
        let (at, ready) = match self.busy[c.busy].urgent_in {
            Urgent::None => return None,
            Urgent::Pending(at) | Urgent::Taken(at) => (at, false),
            Urgent::Held(at, _) => (at, true),
        };
        let ahead = usize::try_from(self.urgent_ahead(conn, at)).ok()?;
        Some(UrgentMark { ahead, ready })
    }

    /// Unread bytes in front of the one with this sequence number; below 0 if reading has passed it.
    pub fn urgent_ahead(&self, conn: Conn, at: SeqNumber) -> i32 {
        let Some(idx) = self.index(conn) else { return -1 };
        let first_unread = self.conns[idx].data_end() - self.unread(idx) as u32;
        at - first_unread
    }

    /// Reading goes beyond the urgent byte, if it has come to it.
    pub(super) fn pass_mark(&mut self, idx: u32, front: &Front) {
        if !front.at_mark {
            return;
        }
        // Bytes may be lent from the frame again.
        self.conns[idx].flags.clear(Flags::URGENT);
        let busy = self.conns[idx].busy;
        let b = &mut self.busy[busy];
        b.urgent_in = Urgent::None;
        b.recv.consume(&mut self.chunks, front.lead);
    }
}

/// What a read finds in front of it. It stops before the urgent byte; the next one passes it, and unless it is wanted in line the byte is no
/// part of the stream (Linux's tcp_recvmsg; RFC 6093 §3.2).
pub(super) struct Front {
    /// The urgent byte is the first unread one.
    at_mark: bool,
    /// Bytes to be dropped first: the urgent one.
    pub lead: usize,
    /// Bytes to be read behind those at the most.
    pub most: usize,
}

impl Front {
    #[inline]
    pub fn of(c: &Tcb, b: &Busy) -> Self {
        match b.urgent_in {
            Urgent::None => Self { at_mark: false, lead: 0, most: usize::MAX },
            _ => Self::beside_urgent(c, b),
        }
    }

    #[cold]
    fn beside_urgent(c: &Tcb, b: &Busy) -> Self {
        if b.urgent_untold > 0 {
            return Self { at_mark: false, lead: 0, most: 0 };
        }
        match urgent_offset(b, c.data_end()) {
            Some(0) if b.recv.readable() > 0 => {
                Self { at_mark: true, lead: usize::from(!c.has(Flags::OOB_INLINE)), most: usize::MAX }
            }
            mark => Self { at_mark: false, lead: 0, most: mark.unwrap_or(usize::MAX) },
        }
    }
}

/// Where the urgent byte stands, counted from the first unread byte.
fn urgent_offset(b: &Busy, data_end: SeqNumber) -> Option<usize> {
    let at = match b.urgent_in {
        Urgent::Held(at, _) | Urgent::Taken(at) => at,
        Urgent::Pending(_) | Urgent::None => return None,
    };
    let first_unread = data_end - b.recv.readable() as u32;
    usize::try_from(at - first_unread).ok()
}
