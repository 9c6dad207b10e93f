//! Quick acknowledgements that are deferred for a moment, so that an answer can carry them.
//!
//! In quickack mode data are acknowledged at once (as on Linux, because the sender may be in slow start). An
//! application in the shard's own turn has answered by then, and its answer carries the acknowledgement. An
//! application in another thread answers a little later: so that its answers carry acknowledgements, too,
//! these are deferred for a time that the owner sets ([`Tcp::defer_quick_acks`]). Every second segment is
//! acknowledged at once nevertheless (RFC 9293 §3.8.6.3).

use super::Tcp;
use super::conn::{Flags, Tcb};
use crate::time::Instant;
use crate::wire::tcp::SeqNumber;
use core::time::Duration;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// A deferred acknowledgement.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct DeferredAck {
    pub(super) idx: u32,
    /// Sequence number to acknowledge. It identifies the connection: the slot may have another one in the
    /// meantime.
    rcv_nxt: SeqNumber,
    deadline: Instant,
}

/// Deferred acknowledgements in order of time.
#[derive(Debug, Default)]
pub(crate) struct DeferredAcks {
    /// Time for which acknowledgements are deferred. Zero: they are not deferred.
    delay: Duration,
    pub(super) queue: VecDeque<DeferredAck>,
}

impl DeferredAcks {
    /// Returns whether a quick acknowledgement of this connection is deferred.
    #[inline]
    pub fn defers(&self, c: &Tcb) -> bool {
        !self.delay.is_zero() && !c.has(Flags::ACK_DELAYED)
    }

    /// Returns when the first deferred acknowledgement is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.queue.front().map(|deferred| deferred.deadline)
    }
}

impl Tcp {
    /// Sets the time for which quick acknowledgements are deferred from now on.
    pub fn defer_quick_acks(&mut self, time: Duration) {
        self.deferred_acks.delay = time;
    }

    /// Acknowledges data at once or defers the acknowledgement, which is quick for no other reason than
    /// quickack mode.
    #[inline]
    pub fn quick_ack_or_defer(&mut self, idx: u32) {
        if self.deferred_acks.defers(&self.conns[idx]) { self.defer_ack(idx) } else { self.ack_now(idx) }
    }

    #[inline(never)]
    pub(super) fn defer_ack(&mut self, idx: u32) {
        let delay = self.profile(idx).delayed_ack_ms;
        let c = &mut self.conns[idx];
        // If the entry is dropped, the acknowledgement remains as a delayed one.
        c.flags.set(Flags::ACK_DELAYED);
        c.ack_deadline = self.now_ms.wrapping_add(delay) as u16;
        let until = self.now + self.deferred_acks.delay;
        self.deferred_acks.queue.push_back(DeferredAck { idx, rcv_nxt: c.rcv_nxt, deadline: until });
    }

    /// Marks the deferred acknowledgements that are due, so that they are sent in this turn.
    #[inline]
    pub fn release_deferred_acks(&mut self) {
        while let Some(&deferred) = self.deferred_acks.queue.front() {
            if self.is_still_deferred(&deferred) {
                if deferred.deadline > self.now {
                    break;
                }
                self.ack_now(deferred.idx);
            }
            self.deferred_acks.queue.pop_front();
        }
    }

    /// Drops entries whose acknowledgements were sent: no wake-up is needed for them.
    #[inline]
    pub fn drop_sent_deferred_acks(&mut self) {
        while let Some(deferred) = self.deferred_acks.queue.front()
            && !self.is_still_deferred(deferred)
        {
            self.deferred_acks.queue.pop_front();
        }
    }

    fn is_still_deferred(&self, deferred: &DeferredAck) -> bool {
        // A vacant slot has no flags set.
        let c = &self.conns[deferred.idx];
        c.has(Flags::ACK_DELAYED) && c.rcv_nxt == deferred.rcv_nxt
    }
}
