//! Senders that found no memory in the pool, in the order in which they came.
//!
//! The last quarter of the pool is for connections that hold hardly anything (see
//! [`ChunkPool::spare`](crate::chunk_pool::ChunkPool::spare)). So there are two queues: who has much queued already is told
//! when there is memory besides that quarter, and who has hardly anything when there is any.

use super::Tcp;
use super::conn::{Flags, Life};
use crate::chunk_pool::ChunkPool;
use crate::events::Event;
use crate::handle::Conn;
use std::collections::VecDeque;

/// Bytes that a connection may hold, each way, when only the last quarter of the pool is left.
pub(super) const HELD_WHEN_SCARCE: usize = 8 << 10;

/// Handles whose connections have ended meanwhile stay in a queue until it is this long, and longer than there are busy connections.
const QUEUE_MIN: usize = 64;

/// The queues.
#[derive(Debug, Default)]
pub(crate) struct Starved {
    poor: VecDeque<Conn>,
    rich: VecDeque<Conn>,
}

impl Starved {
    /// Whether there is memory for somebody who waits.
    pub fn can_be_woken(&self, chunks: &ChunkPool) -> bool {
        !self.poor.is_empty() && chunks.available() > 0 || !self.rich.is_empty() && chunks.spare() > 0
    }
}

impl Tcp {
    /// A sender that has `queued` bytes found no memory for more: it will be told when there is some.
    pub fn starve(&mut self, idx: u32, queued: u64) {
        let conn = self.conns.handle(idx);
        let Some((_, b)) = self.both(idx) else { return };
        if core::mem::replace(&mut b.starved, true) {
            return;
        }
        let rich = queued >= HELD_WHEN_SCARCE as u64;
        let queue = if rich { &mut self.starved.rich } else { &mut self.starved.poor };
        if queue.len() >= 2 * self.busy.in_use() + QUEUE_MIN {
            // Only handles of connections that have ended can be so many.
            queue.retain(|c| self.conns.lookup(*c).is_some());
        }
        queue.push_back(conn);
    }

    /// Tells senders that found no memory that there is some, no more of them than can have a chunk.
    #[inline]
    pub fn wake_starved(&mut self) {
        if !(self.starved.poor.is_empty() && self.starved.rich.is_empty()) {
            self.wake_some();
        }
    }

    #[inline(never)]
    fn wake_some(&mut self) {
        for _ in 0..self.chunks.available() {
            let Some(conn) = self.starved.poor.pop_front() else { break };
            self.wake(conn);
        }
        for _ in 0..self.chunks.spare() {
            let Some(conn) = self.starved.rich.pop_front() else { break };
            self.wake(conn);
        }
    }

    fn wake(&mut self, conn: Conn) {
        let Some(idx) = self.conns.lookup(conn) else { return };
        if let Some((_, b)) = self.both(idx) {
            b.starved = false;
        }
        let c = &mut self.conns[idx];
        let writes = c.has(Flags::WANT_WRITABLE) && !c.has(Flags::ORPHAN | Flags::FIN_QUEUED);
        if c.life == Life::Open && writes {
            c.flags.clear(Flags::WANT_WRITABLE);
            self.events.push_back(Event::Writable { conn });
        }
    }
}
