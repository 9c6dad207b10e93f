//! Bytes that the engine sends from where a client has written them: those of a large buffer, in which they stay until the peer has acknowledged them. So they are copied once less.
//!
//! A client may write there at any time. What it changes before it is acknowledged is what its own peer gets; nothing here reads it.
//!
//! Room in front of bytes that are not acknowledged is given back when they are. Where that takes longer than the client takes to fill the buffer, it would wait, which it would not if they were
//! copied: so they are, as soon as a client wants room and the shard has nothing else to do for its domain. Then it costs what copying at first would have.

use super::super::ChannelStats;
use super::super::region::{Direction, Region};
use super::super::stream::Stream;
use super::super::sync::{Ordering, fence};
use super::domain::{Domain, DomainSocket};
use super::large_buffers::direction_index;
use crate::context::Context;
use core::sync::atomic::AtomicU8;
use ginnel_stack::error::SendError;
use ginnel_stack::handle::Conn;
use ginnel_stack::tcp::source::{Source, SourceId};
use std::sync::Arc;

/// Fewer bytes are copied: they would keep room for longer than copying them takes.
const LOAN_BYTES_MIN: usize = 16 << 10;

/// So many turns those wait at the most that want room while there is always something to do for others: about a millisecond.
const SEND_SPACE_WAIT_TURNS_MAX: u32 = 32;

/// What a socket has lent to the engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct ZeroCopyLoan {
    source: SourceId,
    /// Position behind the last byte that was lent.
    end: u64,
    /// Position before which room was given back.
    returned: u64,
    /// It stands among those that have little room.
    is_short_of_send_space: bool,
}

/// A large buffer.
struct LargeBufferSource {
    region: Arc<Region>,
    number: u32,
}

impl Source for LargeBufferSource {
    fn len(&self) -> u64 {
        self.region.large().1 as u64
    }

    fn fill(&self, offset: u64, out: &mut [u8]) {
        self.region.copy_from_large(self.number, offset as usize, out);
    }

    fn shared(&self, offset: u64, len: usize) -> Option<&[AtomicU8]> {
        let bytes = &self.region.large_ring(self.number)[offset as usize..];
        Some(&bytes[..len.min(bytes.len())])
    }
}

/// Lends the engine up to `count` bytes that wait from position `taken` on: how many it took, and of how many. `None`: they are to be copied.
#[inline]
pub(super) fn send_zero_copy(
    cx: &mut Context<'_>,
    region: &Arc<Region>,
    known: &mut DomainSocket,
    stream: &Stream<'_>,
    stats: &mut ChannelStats,
    (conn, taken, count): (Conn, u64, usize),
) -> Option<(Result<usize, SendError>, usize)> {
    let number = known.large_buffers[direction_index(Direction::Outgoing)]?;
    if count < LOAN_BYTES_MIN || !cx.is_engine_local() {
        return None;
    }
    // Another ring than its own a client can only have by writing what it must not.
    let (_, at, together) = stream.locate_in_large(taken).filter(|(of, ..)| *of == number)?;
    let lent = match &mut known.loan {
        Some(lent) => lent,
        none => {
            let source = cx.add_source(Box::new(LargeBufferSource { region: region.clone(), number }));
            none.insert(ZeroCopyLoan { source, end: 0, returned: taken, is_short_of_send_space: false })
        }
    };
    let count = count.min(together);
    let sent = cx.send_zero_copy(conn, lent.source, at as u64, count);
    if let Ok(sent @ 1..) = sent {
        lent.end = taken + sent as u64;
        stats.zero_copy_bytes += sent as u64;
    }
    Some((sent, count))
}

impl Domain {
    /// Gives back the room of what the peer has acknowledged. Whether it is worth while to tell a writer.
    pub(super) fn return_acked(&mut self, cx: &mut Context<'_>, socket: u32, conn: Conn) -> bool {
        let known = &mut self.sockets[socket as usize];
        let Some(lent) = &mut known.loan else { return false };
        let acked = known.taken.saturating_sub(cx.queued(conn));
        // Behind what was lent nothing has to stay.
        let back = if acked.max(lent.returned) >= lent.end { known.taken } else { acked.max(lent.returned) };
        let moved = back > lent.returned;
        if moved {
            lent.returned = back;
            self.region.stream(socket, Direction::Outgoing).advance_read(back);
        }
        if back < known.taken {
            cx.await_acked(conn);
        }
        let is_cramped = known.taken - back > self.region.large().1 as u64 / 2;
        if is_cramped && !lent.is_short_of_send_space {
            lent.is_short_of_send_space = true;
            self.short_of_send_space.push(socket);
        }
        moved && !is_cramped
    }

    /// Makes room if there was nothing else to do in this turn, or has been for long. `done`: how much there was.
    #[cold]
    pub(super) fn reclaim_send_space_in_time(&mut self, cx: &mut Context<'_>, done: usize) -> usize {
        self.send_space_wait_turns += 1;
        if done > 0 && self.send_space_wait_turns < SEND_SPACE_WAIT_TURNS_MAX {
            return 0;
        }
        self.send_space_wait_turns = 0;
        self.reclaim_send_space(cx)
    }

    /// Copies what was lent where a client wants more room than there is, until half of the buffer is free. Returns for how many.
    fn reclaim_send_space(&mut self, cx: &mut Context<'_>) -> usize {
        let (mut count, half) = (0, self.region.large().1 as u64 / 2);
        while let Some(socket) = self.short_of_send_space.pop() {
            let known = &mut self.sockets[socket as usize];
            let (Some(conn), Some(lent)) = (known.conn, &mut known.loan) else { continue };
            lent.is_short_of_send_space = false;
            // Pairs with the fence of a client that found no room, and then rings.
            fence(Ordering::SeqCst);
            let wants = &self.region.socket(socket).wants_send_space;
            if known.taken - lent.returned <= half || wants.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let acked = known.taken.saturating_sub(cx.queued(conn));
            let owned = cx.privatize(conn, (known.taken - half).saturating_sub(acked));
            let back = (acked + owned).min(known.taken);
            if back > lent.returned {
                self.stats.zero_copy_bytes_copied += back - lent.returned.max(acked);
                lent.returned = back;
                self.region.stream(socket, Direction::Outgoing).advance_read(back);
                self.notify_send_space(socket);
                count += 1;
            }
        }
        count
    }

    /// The socket is nobody's any more, and its connection over: nothing is sent from there.
    pub(super) fn end_loan(&mut self, cx: &mut Context<'_>, socket: u32) {
        if let Some(lent) = self.sockets[socket as usize].loan.take() {
            cx.release_source(lent.source);
        }
    }
}
