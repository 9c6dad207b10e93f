//! Acknowledgements that wait a moment for an answer to ride on.
//!
//! In quick acknowledgement mode data are acknowledged at once (Linux's defence against senders that are slow to start). An application in the
//! shard's own turn has answered by then, and the acknowledgement rides on what it sends. One beside the shard answers a little later: so
//! that its answers carry acknowledgements, too, they wait as long as the owner says ([`Tcp::hold_quick_acks`]). Every second segment is acknowledged
//! at once nevertheless (RFC 9293 §3.8.6.3).

use super::Tcp;
use super::conn::{Flags, Tcb};
use crate::time::Instant;
use crate::wire::tcp::SeqNumber;
use core::time::Duration;
use std::collections::VecDeque;

/// One that waits.
#[derive(Clone, Copy, Debug)]
struct DeferredAck {
    idx: u32,
    /// What it is to acknowledge. By this it is known again: a slot may have another connection meanwhile.
    rcv_nxt: SeqNumber,
    deadline: Instant,
}

/// All of them, in order of time.
#[derive(Debug, Default)]
pub(crate) struct DeferredAcks {
    /// How long they wait. Zero: not at all.
    delay: Duration,
    queue: VecDeque<DeferredAck>,
}

impl DeferredAcks {
    /// Whether a quick acknowledgement of this connection is to wait.
    #[inline]
    pub fn defers(&self, c: &Tcb) -> bool {
        !self.delay.is_zero() && !c.has(Flags::ACK_DELAYED)
    }

    /// When the first has waited long enough.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.queue.front().map(|held| held.deadline)
    }
}

impl Tcp {
    /// How long quick acknowledgements wait from now on.
    pub fn defer_quick_acks(&mut self, time: Duration) {
        self.deferred_acks.delay = time;
    }

    /// Data came that are to be acknowledged at once, for no other reason than that acknowledgements are quick.
    #[inline]
    pub fn quick_ack_or_defer(&mut self, idx: u32) {
        if self.deferred_acks.defers(&self.conns[idx]) { self.defer_ack(idx) } else { self.ack_now(idx) }
    }

    #[inline(never)]
    pub(super) fn defer_ack(&mut self, idx: u32) {
        let delay = self.profile(idx).delayed_ack_ms;
        let c = &mut self.conns[idx];
        // If it is forgotten here it is a delayed one like any other.
        c.flags.set(Flags::ACK_DELAYED);
        c.ack_deadline = self.now_ms.wrapping_add(delay) as u16;
        let until = self.now + self.deferred_acks.delay;
        self.deferred_acks.queue.push_back(DeferredAck { idx, rcv_nxt: c.rcv_nxt, deadline: until });
    }

    /// Those that have waited long enough leave with this batch.
    #[inline]
    pub fn release_deferred_acks(&mut self) {
        while let Some(&held) = self.deferred_acks.queue.front() {
            if self.is_still_deferred(&held) {
                if held.deadline > self.now {
                    break;
                }
                self.ack_now(held.idx);
            }
            self.deferred_acks.queue.pop_front();
        }
    }

    /// Forgets those that have left: nobody has to wake for them.
    #[inline]
    pub fn drop_sent_deferred_acks(&mut self) {
        while let Some(held) = self.deferred_acks.queue.front()
            && !self.is_still_deferred(held)
        {
            self.deferred_acks.queue.pop_front();
        }
    }

    fn is_still_deferred(&self, held: &DeferredAck) -> bool {
        // What is left in a slot without a connection has no flags.
        let c = &self.conns[held.idx];
        c.has(Flags::ACK_DELAYED) && c.rcv_nxt == held.rcv_nxt
    }
}
