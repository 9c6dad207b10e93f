//! Unordered receive: the application takes data of high priority while data before them are missing.
//!
//! Such data are stored and acknowledged like any others after a gap. The receive buffer remembers what the
//! application took, so that no byte is delivered twice (`recv_buffer/early.rs`).

use super::Tcp;
use super::active::UrgentState;
use super::conn::{Flags, NONE};
use super::demux::{self, FlowEntry, FlowKey};
use super::input::Segment;
use crate::device::RxBurst;
use crate::error::Stale;
use crate::events::Event;
use crate::handle::Conn;
use crate::priority;
use serde::{Deserialize, Serialize};

/// Bytes that were taken while bytes before them in the stream are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnorderedBytes {
    /// Distance in the stream, in bytes, from the first byte that was not read in order to the first of these
    /// bytes. It includes bytes in between that were taken out of order before.
    pub ahead: usize,
    /// Number of bytes.
    pub len: usize,
}

impl Tcp {
    /// Sets whether the segments that are processed from now on have overtaken earlier segments of their
    /// connections, which wait in a queue of this host. Data after a gap are then reported by no duplicate
    /// ACK and no SACK block, until a segment of the connection arrives that has overtaken none.
    pub fn set_overtaking(&mut self, on: bool) {
        self.is_overtaking = on;
    }

    /// Returns whether a connection with this flow exists and receives unordered.
    pub fn is_unordered(&self, key: &FlowKey) -> bool {
        if !priority::COMPILED || !self.is_unordered_used {
            return false;
        }
        let hash = self.secrets.flow_hash(key);
        let found = demux::lookup_flow(&self.flows, &self.conns, &self.time_wait, &self.addresses, hash, key);
        matches!(found, Some(FlowEntry::Connection(idx)) if self.profile(idx).unordered)
    }

    /// Finishes a segment of which `accepted` bytes were stored after a gap, `offset` bytes after the first
    /// unread one.
    #[cold]
    pub(super) fn on_out_of_order_stored(
        &mut self,
        idx: u32,
        seg: &Segment<'_>,
        offset: usize,
        accepted: usize,
        burst: Option<&RxBurst<'_>>,
    ) {
        if accepted > 0 {
            let label = seg.position.zip(burst).map(|(at, burst)| burst[usize::from(at.frame)].label);
            let is_high = label.is_some_and(|label| priority::class(label.priority()) > priority::class(0));
            if is_high && self.profile(idx).unordered {
                self.offer_early(idx, offset, accepted);
            }
        }
        let active = self.conns[idx].active;
        let recv = &mut self.active[active].recv;
        if self.is_overtaking {
            // The data in the gap are here, and the peer must not send them again.
            if accepted > 0 {
                recv.add_unreported(offset, accepted);
            }
            return;
        }
        recv.report_from(offset);
        self.ack_now(idx);
    }

    /// Lets the application take data after a gap.
    fn offer_early(&mut self, idx: u32, offset: usize, len: usize) {
        let c = &self.conns[idx];
        // Before `accept` nobody could take them. An urgent byte is delivered at its place in the stream.
        let is_urgent = !matches!(self.active[c.active].urg_data, UrgentState::None);
        if !c.has(Flags::ACCEPTED) || c.has(Flags::ORPHAN) || is_urgent {
            return;
        }
        let outcome = self.active[c.active].recv.add_early(offset, len);
        self.stats.unordered += outcome.added as u64;
        self.stats.unordered_limited += u64::from(outcome.is_limited);
        if outcome.is_first && outcome.added > 0 {
            let conn = self.conns.handle(idx);
            self.events.push_back(Event::Unordered { conn });
        }
    }

    /// Moves bytes that wait after a gap to `out`, in the order of their arrival and from one segment at
    /// most. Returns `None` if no such bytes wait, or `out` is empty.
    ///
    /// # Errors
    /// [`Stale::Handle`] if the handle is stale.
    pub fn recv_unordered(&mut self, conn: Conn, out: &mut [u8]) -> Result<Option<UnorderedBytes>, Stale> {
        let idx = self.index(conn).ok_or(Stale::Handle)?;
        let c = &self.conns[idx];
        if c.active == NONE {
            return Ok(None);
        }
        let taken = self.active[c.active].recv.take_early(&mut self.chunks, out);
        Ok(taken.map(|taken| UnorderedBytes { ahead: taken.ahead, len: taken.len }))
    }

    /// Returns the bytes that the next call of [`Tcp::recv_unordered`] can return.
    pub fn next_unordered(&self, conn: Conn) -> Option<UnorderedBytes> {
        let c = &self.conns[self.index(conn)?];
        if c.active == NONE {
            return None;
        }
        let next = self.active[c.active].recv.next_early()?;
        Some(UnorderedBytes { ahead: next.ahead, len: next.len })
    }
}
