//! Those that move much. Large buffers: a direction that fills its own gets one of a common stock, until the connection ends.
//!
//! So a connection that moves much wakes the other side once for many bytes, while the memory of one that does not stays what it was. The stock is bounded, and lies in the region,
//! where nothing that a client writes can make it larger.
//!
//! What was written is taken in portions, one in a turn, and a domain's are bounded together: whoever had no part of this turn goes first in the next.

use super::super::region::Direction;
use super::domain::{Domain, DomainSocket};
use crate::context::Context;
use ginnel_stack::handle::Conn;

/// Numbers of the buffers that nobody has, the one that was used last on top: its pages are there.
pub(super) type LargeBufferPool = Vec<u32>;

pub(super) fn direction_index(direction: Direction) -> usize {
    match direction {
        Direction::Incoming => 0,
        Direction::Outgoing => 1,
    }
}

impl DomainSocket {
    /// It has a large buffer in this direction.
    fn has_large(&self, direction: Direction) -> bool {
        self.large_buffers[direction_index(direction)].is_some()
    }
}

impl Domain {
    /// A direction was full: it may go on with more as soon as it is empty.
    #[inline]
    pub(super) fn ensure_large_buffer(
        &mut self,
        cx: &Context<'_>,
        socket: u32,
        conn: Conn,
        direction: Direction,
    ) {
        if !self.sockets[socket as usize].has_large(direction) {
            self.grant_large_buffer(cx, socket, conn, direction);
        }
    }

    #[cold]
    fn grant_large_buffer(&mut self, cx: &Context<'_>, socket: u32, conn: Conn, direction: Direction) {
        let (count, bytes) = self.region.large();
        let Some([recv, send]) = cx.buffer_limits(conn) else { return };
        let limit = match direction {
            Direction::Incoming => recv,
            Direction::Outgoing => send,
        };
        // A program that has fixed the size of its buffers does not want more to wait (`SOCK_RCVBUF_LOCK`).
        if count == 0 || (limit as usize) < bytes {
            return;
        }
        match self.large_buffer_pool.pop() {
            Some(number) => {
                self.sockets[socket as usize].large_buffers[direction_index(direction)] = Some(number);
                self.region.socket(socket).positions(direction).grant(number);
            }
            None => self.stats.large_buffers_refused += 1,
        }
    }

    /// More was written than is taken in a turn.
    #[cold]
    pub(super) fn queue_chunked(&mut self, socket: u32) {
        if self.mark_unfinished(socket) {
            self.chunked.push(socket);
        }
    }

    /// The domain had all of its turn.
    #[cold]
    pub(super) fn queue_unstarted(&mut self, socket: u32) {
        if self.mark_unfinished(socket) {
            self.unfinished.push_back(socket);
        }
    }

    /// A socket is left for the next turn. Whether it was not already.
    fn mark_unfinished(&mut self, socket: u32) -> bool {
        let is_new = !core::mem::replace(&mut self.sockets[socket as usize].is_unfinished, true);
        self.stats.chunks += u64::from(is_new);
        is_new
    }

    /// Goes on with what the turn before left, in the order in which it was left. Returns with how many sockets.
    #[inline]
    pub(super) fn resume_unfinished(&mut self, cx: &mut Context<'_>) -> usize {
        let mut continued = 0;
        self.unfinished.extend(self.chunked.drain(..));
        // What is left anew waits for the next turn.
        for _ in 0..self.unfinished.len() {
            if self.turn_budget == 0 {
                break;
            }
            let Some(socket) = self.unfinished.pop_front() else { break };
            // It may be another connection's by now, which does no harm.
            self.sockets[socket as usize].is_unfinished = false;
            self.process_socket(cx, socket);
            continued += 1;
        }
        continued
    }

    /// Large buffers that sockets have.
    pub(super) fn large_buffers_in_use(&self) -> usize {
        self.region.large().0 as usize - self.large_buffer_pool.len()
    }

    /// The socket is nobody's any more.
    pub(super) fn free_large_buffers(&mut self, socket: u32) {
        let large = core::mem::take(&mut self.sockets[socket as usize].large_buffers);
        self.large_buffer_pool.extend(large.into_iter().flatten());
    }
}
