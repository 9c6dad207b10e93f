//! Senders that found no memory in the pool, in the order in which they came.
//!
//! The last quarter of the pool is for connections that hold hardly anything (see
//! [`ChunkPool::spare`](crate::chunk_pool::ChunkPool::spare)). So there are two queues: who has much queued already is told
//! when there is memory besides that quarter, and who has hardly anything when there is any.

use super::Tcp;
use super::conn::{Flags, SlotState};
use crate::chunk_pool::ChunkPool;
use crate::events::Event;
use crate::handle::Conn;
use std::collections::VecDeque;

/// Bytes that a connection may hold, each way, when only the last quarter of the pool is left.
pub(super) const BYTES_UNDER_PRESSURE_MAX: usize = 8 << 10;

/// Handles whose connections have ended meanwhile stay in a queue until it is this long, and longer than there are busy connections.
const QUEUE_MIN: usize = 64;

/// The queues.
#[derive(Debug, Default)]
pub(crate) struct MemoryWaiters {
    small: VecDeque<Conn>,
    large: VecDeque<Conn>,
}

impl MemoryWaiters {
    /// Whether there is memory for somebody who waits.
    pub fn can_wake(&self, chunks: &ChunkPool) -> bool {
        !self.small.is_empty() && chunks.available() > 0 || !self.large.is_empty() && chunks.spare() > 0
    }
}

impl Tcp {
    /// A sender that has `queued` bytes found no memory for more: it will be told when there is some.
    pub fn wait_for_memory(&mut self, idx: u32, queued: u64) {
        let conn = self.conns.handle(idx);
        let Some((_, b)) = self.tcb_and_active(idx) else { return };
        if core::mem::replace(&mut b.is_waiting_for_memory, true) {
            return;
        }
        let rich = queued >= BYTES_UNDER_PRESSURE_MAX as u64;
        let queue = if rich { &mut self.memory_waiters.large } else { &mut self.memory_waiters.small };
        if queue.len() >= 2 * self.active.in_use() + QUEUE_MIN {
            // Only handles of connections that have ended can be so many.
            queue.retain(|c| self.conns.lookup(*c).is_some());
        }
        queue.push_back(conn);
    }

    /// Tells senders that found no memory that there is some, no more of them than can have a chunk.
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
