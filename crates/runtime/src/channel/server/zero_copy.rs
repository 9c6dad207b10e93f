//! Zero-copy loans: the engine sends bytes directly from the large buffer in which a client wrote them, where
//! they stay until the peer has acknowledged them. This saves one copy.
//!
//! A client may write there at any time. What it changes before the acknowledgement is what its own peer
//! receives; nothing here reads the bytes.
//!
//! The space of lent bytes is freed when they are acknowledged. If that takes longer than the client takes to
//! fill the buffer, the client would have to wait, which it would not if the bytes were copied. So they are
//! copied as soon as a client wants space and the shard has nothing else to do for its domain, at the cost
//! that copying them at first would have had.

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

/// Fewer bytes are copied: lending them would occupy space for longer than copying takes.
const LOAN_BYTES_MIN: usize = 16 << 10;

/// Turns for which clients wait for space at most while there is other work: about a millisecond.
const SEND_SPACE_WAIT_TURNS_MAX: u32 = 32;

/// A loan of a socket to the engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct ZeroCopyLoan {
    source: SourceId,
    /// Position after the last byte that was lent.
    end: u64,
    /// Position before which space was freed.
    returned: u64,
    /// It is among the sockets that are short of send space.
    is_short_of_send_space: bool,
}

/// A large buffer as a source of the engine.
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

/// Bytes of a connection that clients wrote and the engine has not taken.
pub(super) struct Untaken {
    pub conn: Conn,
    /// Position of the first byte.
    pub position: u64,
    pub len: usize,
}

/// Lends the engine untaken bytes. Returns how many it accepted, and how many it was offered. `None` if the
/// bytes have to be copied.
#[inline]
pub(super) fn send_zero_copy(
    cx: &mut Context<'_>,
    region: &Arc<Region>,
    entry: &mut DomainSocket,
    stream: &Stream<'_>,
    stats: &mut ChannelStats,
    untaken: Untaken,
) -> Option<(Result<usize, SendError>, usize)> {
    let Untaken { conn, position: taken, len: count } = untaken;
    let number = entry.large_buffers[direction_index(Direction::Outgoing)]?;
    if count < LOAN_BYTES_MIN || !cx.is_engine_local() {
        return None;
    }
    // The number differs only if a client wrote an invalid ring number.
    let (_, at, contiguous) = stream.locate_in_large(taken).filter(|(of, ..)| *of == number)?;
    let loan = match &mut entry.loan {
        Some(loan) => loan,
        none => {
            let source = cx.add_source(Box::new(LargeBufferSource { region: region.clone(), number }));
            none.insert(ZeroCopyLoan { source, end: 0, returned: taken, is_short_of_send_space: false })
        }
    };
    let count = count.min(contiguous);
    let sent = cx.send_source_partial(conn, loan.source, at as u64, count);
    if let Ok(sent @ 1..) = sent {
        loan.end = taken + sent as u64;
        stats.zero_copy_bytes += sent as u64;
    }
    Some((sent, count))
}

impl Domain {
    /// Frees the space of acknowledged bytes. Returns whether it is worthwhile to notify a writer.
    pub(super) fn return_acked(&mut self, cx: &mut Context<'_>, socket: u32, conn: Conn) -> bool {
        let entry = &mut self.sockets[socket as usize];
        let Some(loan) = &mut entry.loan else { return false };
        let acked = entry.taken.saturating_sub(cx.queued(conn));
        // After what was lent, nothing has to stay.
        let back = if acked.max(loan.returned) >= loan.end { entry.taken } else { acked.max(loan.returned) };
        let moved = back > loan.returned;
        if moved {
            loan.returned = back;
            self.region.stream(socket, Direction::Outgoing).advance_read(back);
        }
        if back < entry.taken {
            cx.request_writable(conn);
        }
        let is_short = entry.taken - back > self.region.large().1 as u64 / 2;
        if is_short && !loan.is_short_of_send_space {
            loan.is_short_of_send_space = true;
            self.short_of_send_space.push(socket);
        }
        moved && !is_short
    }

    /// Frees send space if there was no other work in this turn, or for many turns. `done` is the work of
    /// this turn. Returns the number of sockets whose space was freed.
    #[cold]
    pub(super) fn reclaim_send_space_in_time(&mut self, cx: &mut Context<'_>, done: usize) -> usize {
        self.send_space_wait_turns += 1;
        if done > 0 && self.send_space_wait_turns < SEND_SPACE_WAIT_TURNS_MAX {
            return 0;
        }
        self.send_space_wait_turns = 0;
        self.reclaim_send_space(cx)
    }

    /// Copies lent bytes of sockets whose clients want more space than there is, until half of the buffer is
    /// free. Returns the number of these sockets.
    fn reclaim_send_space(&mut self, cx: &mut Context<'_>) -> usize {
        let (mut count, half) = (0, self.region.large().1 as u64 / 2);
        while let Some(socket) = self.short_of_send_space.pop() {
            let entry = &mut self.sockets[socket as usize];
            let (Some(conn), Some(loan)) = (entry.conn, &mut entry.loan) else { continue };
            loan.is_short_of_send_space = false;
            // Pairs with the fence of a client that found no space, and then notifies.
            fence(Ordering::SeqCst);
            let wants = &self.region.socket(socket).wants_send_space;
            if entry.taken - loan.returned <= half || wants.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let acked = entry.taken.saturating_sub(cx.queued(conn));
            let owned = cx.privatize(conn, (entry.taken - half).saturating_sub(acked));
            let back = (acked + owned).min(entry.taken);
            if back > loan.returned {
                self.stats.zero_copy_bytes_copied += back - loan.returned.max(acked);
                loan.returned = back;
                self.region.stream(socket, Direction::Outgoing).advance_read(back);
                self.notify_send_space(socket);
                count += 1;
            }
        }
        count
    }

    /// Ends the loan of a socket that is freed: its connection is closed, so nothing is sent from the buffer.
    pub(super) fn end_loan(&mut self, cx: &mut Context<'_>, socket: u32) {
        if let Some(loan) = self.sockets[socket as usize].loan.take() {
            cx.release_source(loan.source);
        }
    }
}
