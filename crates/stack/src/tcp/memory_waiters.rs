//! Senders that found no memory in the pool, in the order in which they asked.
//!
//! The last quarter of the pool is reserved for connections that use little memory (see
//! [`ChunkPool::spare`](crate::chunk_pool::ChunkPool::spare)). So there are two queues: senders with much
//! queued data are notified when memory outside of that quarter is available, and senders with little queued
//! data when any memory is available.

use super::Tcp;
use super::conn::{Flags, SlotState};
use crate::chunk_pool::ChunkPool;
use crate::events::Event;
use crate::handle::Conn;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Bytes that a connection may use in each direction under memory pressure, that is, when only the last
/// quarter of the pool is left.
pub(super) const BYTES_UNDER_PRESSURE_MAX: usize = 8 << 10;

/// Handles of ended connections are removed from a queue when it has this many entries more than twice the
/// number of active connections.
const QUEUE_MIN: usize = 64;

/// Queues of senders that wait for memory.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct MemoryWaiters {
    small: VecDeque<Conn>,
    large: VecDeque<Conn>,
}

impl MemoryWaiters {
    /// Returns whether memory is available for a waiting sender.
    pub fn can_wake(&self, chunks: &ChunkPool) -> bool {
        !self.small.is_empty() && chunks.available() > 0 || !self.large.is_empty() && chunks.spare() > 0
    }
}

impl Tcp {
    /// Queues a sender with `queued` queued bytes that found no memory; it is notified when memory is
    /// available.
    pub fn wait_for_memory(&mut self, idx: u32, queued: u64) {
        let conn = self.conns.handle(idx);
        let Some((_, b)) = self.tcb_and_active(idx) else { return };
        if core::mem::replace(&mut b.is_waiting_for_memory, true) {
            return;
        }
        let has_much = queued >= BYTES_UNDER_PRESSURE_MAX as u64;
        let queue = if has_much { &mut self.memory_waiters.large } else { &mut self.memory_waiters.small };
        if queue.len() >= 2 * self.active.in_use() + QUEUE_MIN {
            // Only handles of ended connections can be that many.
            queue.retain(|c| self.conns.lookup(*c).is_some());
        }
        queue.push_back(conn);
    }

    /// Notifies waiting senders that memory is available, at most one for each available chunk.
    #[inline]
    pub fn wake_memory_waiters(&mut self) {
        if !(self.memory_waiters.small.is_empty() && self.memory_waiters.large.is_empty()) {
            self.wake_while_available();
        }
    }

    #[inline(never)]
    fn wake_while_available(&mut self) {
        for _ in 0..self.chunks.available() {
            let Some(conn) = self.memory_waiters.small.pop_front() else { break };
            self.wake_memory_waiter(conn);
        }
        for _ in 0..self.chunks.spare() {
            let Some(conn) = self.memory_waiters.large.pop_front() else { break };
            self.wake_memory_waiter(conn);
        }
    }

    fn wake_memory_waiter(&mut self, conn: Conn) {
        let Some(idx) = self.conns.lookup(conn) else { return };
        if let Some((_, b)) = self.tcb_and_active(idx) {
            b.is_waiting_for_memory = false;
        }
        let c = &mut self.conns[idx];
        let writes = c.has(Flags::WANT_WRITABLE) && !c.has(Flags::ORPHAN | Flags::FIN_QUEUED);
        if c.slot_state == SlotState::Open && writes {
            c.flags.clear(Flags::WANT_WRITABLE);
            self.events.push_back(Event::Writable { conn });
        }
    }
}
