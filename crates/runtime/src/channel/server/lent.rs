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
use super::domain::{Domain, Socket};
use super::large::place;
use crate::context::Context;
use core::sync::atomic::AtomicU8;
use ginnel_stack::error::SendError;
use ginnel_stack::handle::Conn;
use ginnel_stack::tcp::source::{Source, SourceId};
use std::sync::Arc;

/// Fewer bytes are copied: they would keep room for longer than copying them takes.
const LENT_BYTES_MIN: usize = 16 << 10;

/// So many turns those wait at the most that want room while there is always something to do for others: about a millisecond.
const CRAMPED_TURNS_MAX: u32 = 32;

/// What a socket has lent to the engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lent {
    source: SourceId,
    /// Position behind the last byte that was lent.
    end: u64,
    /// Position before which room was given back.
    given: u64,
    /// It stands among those that have little room.
    is_cramped: bool,
}

/// A large buffer.
struct LargeBuffer {
    region: Arc<Region>,
    number: u32,
}

impl Source for LargeBuffer {
    fn len(&self) -> u64 {
        self.region.large().1 as u64
    }

    fn fill(&self, offset: u64, out: &mut [u8]) {
        self.region.copy_of_large(self.number, offset as usize, out);
    }

    fn shared(&self, offset: u64, len: usize) -> Option<&[AtomicU8]> {
        let bytes = &self.region.large_ring(self.number)[offset as usize..];
        Some(&bytes[..len.min(bytes.len())])
    }
}

/// Lends the engine up to `count` bytes that wait from position `taken` on: how many it took, and of how many. `None`: they are to be copied.
#[inline]
pub(super) fn lend(
    cx: &mut Context<'_>,
    region: &Arc<Region>,
    known: &mut Socket,
    stream: &Stream<'_>,
    stats: &mut ChannelStats,
    (conn, taken, count): (Conn, u64, usize),
) -> Option<(Result<usize, SendError>, usize)> {
    let number = known.large[place(Direction::Outgoing)]?;
    if count < LENT_BYTES_MIN || !cx.engine_is_here() {
        return None;
    }
    // Another ring than its own a client can only have by writing what it must not.
    let (_, at, together) = stream.place_in_large(taken).filter(|(of, ..)| *of == number)?;
    let lent = match &mut known.lent {
        Some(lent) => lent,
        none => {
            let source = cx.add_source(Box::new(LargeBuffer { region: region.clone(), number }));
            none.insert(Lent { source, end: 0, given: taken, is_cramped: false })
        }
    };
    let count = count.min(together);
    let sent = cx.send_lent(conn, lent.source, at as u64, count);
    if let Ok(sent @ 1..) = sent {
        lent.end = taken + sent as u64;
        stats.lent_bytes += sent as u64;
    }
    Some((sent, count))
}

impl Domain {
    /// Gives back the room of what the peer has acknowledged. Whether it is worth while to tell a writer.
    pub(super) fn give_back(&mut self, cx: &mut Context<'_>, socket: u32, conn: Conn) -> bool {
        let known = &mut self.sockets[socket as usize];
        let Some(lent) = &mut known.lent else { return false };
        let acked = known.taken.saturating_sub(cx.queued(conn));
        // Behind what was lent nothing has to stay.
        let back = if acked.max(lent.given) >= lent.end { known.taken } else { acked.max(lent.given) };
        let moved = back > lent.given;
        if moved {
            lent.given = back;
            self.region.stream(socket, Direction::Outgoing).give_back(back);
        }
        if back < known.taken {
            cx.await_acked(conn);
        }
        let is_cramped = known.taken - back > self.region.large().1 as u64 / 2;
        if is_cramped && !lent.is_cramped {
            lent.is_cramped = true;
            self.cramped.push(socket);
        }
        moved && !is_cramped
    }

    /// Makes room if there was nothing else to do in this turn, or has been for long. `done`: how much there was.
    #[cold]
    pub(super) fn make_room_in_time(&mut self, cx: &mut Context<'_>, done: usize) -> usize {
        self.cramped_turns += 1;
        if done > 0 && self.cramped_turns < CRAMPED_TURNS_MAX {
            return 0;
        }
        self.cramped_turns = 0;
        self.make_room(cx)
    }

    /// Copies what was lent where a client wants more room than there is, until half of the buffer is free. Returns for how many.
    fn make_room(&mut self, cx: &mut Context<'_>) -> usize {
        let (mut count, half) = (0, self.region.large().1 as u64 / 2);
        while let Some(socket) = self.cramped.pop() {
            let known = &mut self.sockets[socket as usize];
            let (Some(conn), Some(lent)) = (known.conn, &mut known.lent) else { continue };
            lent.is_cramped = false;
            // Pairs with the fence of a client that found no room, and then rings.
            fence(Ordering::SeqCst);
            let wants = &self.region.socket(socket).wants_space;
            if known.taken - lent.given <= half || wants.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let acked = known.taken.saturating_sub(cx.queued(conn));
            let owned = cx.own(conn, (known.taken - half).saturating_sub(acked));
            let back = (acked + owned).min(known.taken);
            if back > lent.given {
                self.stats.lent_bytes_copied += back - lent.given.max(acked);
                lent.given = back;
                self.region.stream(socket, Direction::Outgoing).give_back(back);
                self.tell_of_space(socket);
                count += 1;
            }
        }
        count
    }

    /// The socket is nobody's any more, and its connection over: nothing is sent from there.
    pub(super) fn take_lent_back(&mut self, cx: &mut Context<'_>, socket: u32) {
        if let Some(lent) = self.sockets[socket as usize].lent.take() {
            cx.release_source(lent.source);
        }
    }
}
