//! Unordered receive and unordered send of clients (docs/unordered.md). Both pass through requests: bytes
//! that arrived before bytes which precede them stay in the engine until a client asks for them, and a
//! message with a priority takes its place in the engine's queue at once. The rings of the region carry bytes
//! in order.

use super::domain::Domain;
use crate::channel::control::UnorderedReply;
use crate::channel::sync::Ordering;
use crate::context::Context;
use ginnel_stack::error::{SendError, Stale};
use ginnel_stack::handle::Conn;
use ginnel_stack::stream_position::StreamPosition;
use std::collections::VecDeque;

/// Most bytes of one reply, which has to fit into a message of the broker.
const REPLY_BYTES_MAX: usize = 64 << 10;

/// Places in the unread bytes of a stream before which bytes were taken early. At the limit, bytes are
/// received in order.
// limit: places of a program's stream where bytes were taken early
const SEGMENTS_MAX: usize = 4096;

/// The offsets of the bytes of a stream of which clients take some early.
#[derive(Clone, Debug)]
pub(super) struct UnorderedStream {
    position: StreamPosition,
    /// Where the offsets in the stream continue after bytes that were taken early: positions in the region,
    /// and the offsets of the bytes there. The first entry begins at or before the read position.
    segments: VecDeque<(u64, u64)>,
    /// True if clients were told that bytes can be taken early.
    is_announced: bool,
}

impl UnorderedStream {
    /// Creates the state of a stream of which no byte was taken early, and `received` bytes in order.
    fn new(received: u64) -> Self {
        let position = StreamPosition::starting_at(received);
        Self { position, segments: VecDeque::from([(0, 0)]), is_announced: false }
    }

    /// Counts `len` bytes in order, which follow position `at` in the region.
    fn on_data(&mut self, at: u64, len: usize) {
        if len == 0 {
            return;
        }
        let offset = self.position.on_data(len);
        let follows = self.segments.back().is_some_and(|(start, first)| offset - at == first - start);
        if !follows {
            self.segments.push_back((at, offset));
        }
    }

    /// Returns the offset of the byte at position `at`, and how many bytes from there on have consecutive
    /// offsets if `received` is the end of what was received.
    fn offset_at(&mut self, at: u64, received: u64) -> (u64, u64) {
        self.forget_before(at);
        let (start, offset) = self.segments.front().copied().unwrap_or((0, 0));
        let end = self.segments.get(1).map_or(received, |(start, _)| *start);
        (offset.saturating_add(at.saturating_sub(start)), end.saturating_sub(at))
    }

    /// Returns whether bytes can be taken early, and their place remembered.
    fn may_take_early(&self) -> bool {
        self.is_announced && self.segments.len() < SEGMENTS_MAX
    }

    /// Forgets the offsets before position `at`, which clients have read.
    fn forget_before(&mut self, at: u64) {
        while self.segments.get(1).is_some_and(|(start, _)| *start <= at) {
            self.segments.pop_front();
        }
    }
}

impl Domain {
    /// Tells clients that bytes can be taken before bytes which precede them.
    pub fn unordered_readable(&mut self, socket: u32) {
        let entry = &mut self.sockets[socket as usize];
        let received = entry.received;
        let unordered = entry.unordered.get_or_insert_with(|| Box::new(UnorderedStream::new(received)));
        unordered.is_announced = true;
        let class = self.event_class.unwrap_or(ginnel_stack::priority::BEST_EFFORT);
        // One more than the class, because 0 says that there are none.
        self.region.socket(socket).unordered.store(u32::from(class) + 1, Ordering::Release);
        self.notify_owners(socket);
    }

    /// Counts bytes in order that were put into the region, and tells clients if nothing can be taken early
    /// any more. Called for sockets with unordered bytes.
    #[cold]
    pub(super) fn count_ordered(&mut self, cx: &Context<'_>, conn: Conn, socket: u32, len: usize) {
        let entry = &mut self.sockets[socket as usize];
        let Some(unordered) = &mut entry.unordered else { return };
        unordered.on_data(entry.received - len as u64, len);
        if unordered.is_announced && !cx.has_unordered(conn) {
            unordered.is_announced = false;
            self.region.socket(socket).unordered.store(0, Ordering::Release);
        }
    }

    /// Takes up to `max` bytes of a connection that arrived before bytes which precede them, if there are
    /// any. Otherwise says which offset the byte at position `read` of the region has. Fails only if the
    /// engine does not know the connection.
    pub(super) fn recv_unordered(
        &mut self,
        cx: &mut Context<'_>,
        (socket, read, max): (u32, u64, u32),
    ) -> Result<UnorderedReply, Stale> {
        let entry = &mut self.sockets[socket as usize];
        let Some(unordered) = &mut entry.unordered else {
            // No byte was taken early, so positions in the region are offsets.
            let len = entry.received.saturating_sub(read);
            return Ok(UnorderedReply::InOrder { offset: read, len: u32::try_from(len).unwrap_or(u32::MAX) });
        };
        unordered.forget_before(read);
        // Without a connection there are only bytes in the region.
        if let Some(conn) = entry.conn.filter(|_| unordered.may_take_early()) {
            let mut bytes = vec![0; (max as usize).min(REPLY_BYTES_MAX)];
            let taken = cx.recv_unordered(conn, &mut bytes)?;
            if !cx.has_unordered(conn) {
                unordered.is_announced = false;
                self.region.socket(socket).unordered.store(0, Ordering::Release);
            }
            if let Some(taken) = taken {
                bytes.truncate(taken.len);
                return Ok(UnorderedReply::Early { offset: unordered.position.on_unordered(taken), bytes });
            }
        }
        let (offset, len) = unordered.offset_at(read, entry.received);
        Ok(UnorderedReply::InOrder { offset, len: u32::try_from(len).unwrap_or(u32::MAX) })
    }

    /// Queues a message with a priority after all that clients wrote before.
    pub(super) fn send_message(
        &mut self,
        cx: &mut Context<'_>,
        conn: Conn,
        socket: u32,
        (bytes, priority): (&[u8], u8),
    ) -> Result<(), SendError> {
        // What was written before is queued before.
        let sent = if self.forward(cx, socket, conn, usize::MAX) {
            cx.send_message(conn, bytes, priority)
        } else {
            Err(SendError::Full)
        };
        if sent == Err(SendError::Full) {
            self.socket(socket).awaits_acked = true;
            cx.request_writable(conn);
        }
        sent
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use ginnel_stack::tcp::UnorderedBytes;

    // limit: places of a program's stream where bytes were taken early
    #[test]
    fn places_of_bytes_taken_early_are_limited() {
        let mut stream = UnorderedStream { is_announced: true, ..UnorderedStream::new(0) };
        let mut received = 0;
        while stream.may_take_early() {
            stream.position.on_unordered(UnorderedBytes { ahead: 1, len: 1 });
            stream.on_data(received, 1);
            stream.on_data(received + 1, 1);
            received += 2;
            assert!(stream.segments.len() <= SEGMENTS_MAX);
        }
        assert_eq!(stream.segments.len(), SEGMENTS_MAX);
        // A program that has read them may take bytes early again.
        stream.forget_before(received);
        assert!(stream.may_take_early());
        // Positions are numbers of the client.
        stream.offset_at(u64::MAX, received);
    }

    #[test]
    fn offsets_continue_after_bytes_taken_early() {
        let mut stream = UnorderedStream::new(100);
        assert_eq!(stream.offset_at(40, 100), (40, 60));
        // 150 to 159 and 170 to 174 are taken early.
        assert_eq!(stream.position.on_unordered(UnorderedBytes { ahead: 50, len: 10 }), 150);
        stream.on_data(100, 20);
        assert_eq!(stream.position.on_unordered(UnorderedBytes { ahead: 50, len: 5 }), 170);
        stream.on_data(120, 30);
        stream.on_data(150, 10);
        stream.on_data(160, 7);
        assert_eq!(stream.offset_at(40, 167), (40, 110));
        assert_eq!(stream.offset_at(149, 167), (149, 1));
        assert_eq!(stream.offset_at(150, 167), (160, 10));
        assert_eq!(stream.offset_at(160, 167), (175, 7));
        assert_eq!((stream.offset_at(167, 167), stream.segments.len()), ((182, 0), 1));
    }
}
