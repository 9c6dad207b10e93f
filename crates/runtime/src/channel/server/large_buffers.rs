//! Sockets that move much data: large buffers, and fairness among sockets.
//!
//! A direction that fills its own buffer gets a large one from a pool until the connection ends. A connection
//! that moves much data then wakes the other side once for many bytes, while the memory of other connections
//! stays small. The pool is limited and lies in the region; nothing that a client writes can enlarge it.
//!
//! Data that clients wrote are taken in chunks, one in each turn, and a domain has one budget for all its
//! sockets. Sockets that got nothing in this turn come first in the next one.

use super::super::region::Direction;
use super::domain::{Domain, DomainSocket};
use crate::context::Context;
use ginnel_stack::handle::Conn;

/// Acknowledged bytes after which a connection is known to move much data. A peer that does not read
/// acknowledges at most half as many (`tcp_rmem`).
const ACKED_BYTES_MIN: u64 = 256 << 10;

/// Refused sockets that a turn tries again. They cost less than the budget of a turn, so sockets that wait
/// for a device do not keep the shard awake.
const REFUSED_RETRIES_MAX: usize = 64;

/// Numbers of free buffers. The last one was used most recently, so its pages are allocated.
pub(super) type LargeBufferPool = Vec<u32>;

pub(super) fn direction_index(direction: Direction) -> usize {
    match direction {
        Direction::Incoming => 0,
        Direction::Outgoing => 1,
    }
}

impl DomainSocket {
    /// Returns whether the socket has a large buffer in this direction.
    fn has_large(&self, direction: Direction) -> bool {
        self.large_buffers[direction_index(direction)].is_some()
    }
}

impl Domain {
    /// Gives a direction that was full a large buffer, which the writer uses as soon as all bytes were read.
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
        let Some(limits) = cx.buffer_limits(conn) else { return };
        let limit = match direction {
            Direction::Incoming => limits.recv_max,
            Direction::Outgoing => limits.send_max,
        };
        // A program that has limited its buffers does not want more bytes to be queued (`SOCK_RCVBUF_LOCK`).
        if count == 0 || (limit as usize) < bytes {
            return;
        }
        // Nor does one whose peer may not read: the large buffer would exceed what Linux queues.
        let acked = self.sockets[socket as usize].taken.saturating_sub(cx.queued(conn));
        let is_slow = limits.send < bytes as u64 / 2 && acked < ACKED_BYTES_MIN;
        if direction == Direction::Outgoing && is_slow {
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

    /// Queues a socket of which this turn has taken a chunk.
    #[cold]
    pub(super) fn queue_chunked(&mut self, socket: u32) {
        if self.mark_unfinished(socket) {
            self.stats.sockets_deferred += 1;
            self.chunked.push(socket);
        }
    }

    /// Queues a socket of which a device has refused a datagram. The socket is tried again in one of the next
    /// turns, after those that could send nothing if this one has sent something: a socket with many
    /// datagrams must not take all the room of the device. The shard may sleep before that turn.
    #[cold]
    pub(super) fn queue_refused(&mut self, socket: u32, has_progressed: bool) {
        if self.mark_unfinished(socket) {
            let queue = if has_progressed { &mut self.refused_after_progress } else { &mut self.refused };
            queue.push(socket);
        }
    }

    /// Returns whether a device has refused a datagram of one of the sockets.
    pub(super) fn has_refused(&self) -> bool {
        !self.refused.is_empty() || !self.refused_after_progress.is_empty()
    }

    /// Queues a socket for which this turn has no budget left.
    #[cold]
    pub(super) fn queue_unstarted(&mut self, socket: u32) {
        if self.mark_unfinished(socket) {
            self.stats.sockets_deferred += 1;
            self.unfinished.push_back(socket);
        }
    }

    /// Marks a socket to be continued in the next turn. Returns whether it was not marked yet.
    fn mark_unfinished(&mut self, socket: u32) -> bool {
        !core::mem::replace(&mut self.sockets[socket as usize].is_unfinished, true)
    }

    /// Moves refused sockets to those with which this turn continues.
    #[cold]
    fn retry_refused(&mut self) {
        self.refused.append(&mut self.refused_after_progress);
        let count = self.refused.len().min(REFUSED_RETRIES_MAX);
        self.unfinished.extend(self.refused.drain(..count));
    }

    /// Continues with the sockets that the previous turn left, in the order in which it left them. Returns
    /// the number of those that could do something.
    #[inline]
    pub(super) fn resume_unfinished(&mut self, cx: &mut Context<'_>) -> usize {
        let mut continued = 0;
        self.unfinished.extend(self.chunked.drain(..));
        if self.has_refused() {
            self.retry_refused();
        }
        // Sockets that are left again wait for the next turn.
        for _ in 0..self.unfinished.len() {
            if self.turn_budget == 0 {
                break;
            }
            let Some(socket) = self.unfinished.pop_front() else { break };
            // The socket may have another connection by now, which does no harm.
            let entry = &mut self.sockets[socket as usize];
            entry.is_unfinished = false;
            let taken = entry.taken;
            self.process_socket(cx, socket);
            // A socket that a device has refused again does not keep the shard from sleeping.
            let entry = &self.sockets[socket as usize];
            continued += usize::from(!entry.is_unfinished || entry.taken != taken);
        }
        continued
    }

    /// Returns the number of large buffers in use.
    pub(super) fn large_buffers_in_use(&self) -> usize {
        self.region.large().0 as usize - self.large_buffer_pool.len()
    }

    /// Returns the large buffers of a socket that is freed to the pool.
    pub(super) fn free_large_buffers(&mut self, socket: u32) {
        let buffers = core::mem::take(&mut self.sockets[socket as usize].large_buffers);
        self.large_buffer_pool.extend(buffers.into_iter().flatten());
    }
}
