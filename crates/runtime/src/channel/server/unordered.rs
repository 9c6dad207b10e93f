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
use ginnel_stack::priority::BEST_EFFORT;
use ginnel_stack::stream_position::StreamPosition;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Most bytes of one reply, which has to fit into a message of the broker.
const REPLY_BYTES_MAX: usize = 64 << 10;

/// Places in the unread bytes of a stream before which bytes were taken early. At the limit, bytes are
/// received in order.
// limit: places of a program's stream where bytes were taken early
const SEGMENTS_MAX: usize = 4096;

/// The offsets of the bytes of a stream of which clients take some early.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct UnorderedStream {
    position: StreamPosition,
    /// Where the offsets in the stream continue after bytes that were taken early: positions in the region,
    /// and the offsets of the bytes there. The first entry begins at or before the read position.
    segments: VecDeque<(u64, u64)>,
    /// True if clients were told that bytes can be taken early.
    is_announced: bool,
    /// Class of priority of the event that announced them last.
    class: u8,
    /// Offset and length of the bytes that were taken early last.
    last_taken: (u64, usize),
    /// Offset and bytes that a client took early and gave back. They are taken again first.
    returned: Option<(u64, Vec<u8>)>,
}

impl UnorderedStream {
    /// Creates the state of a stream of which no byte was taken early, and `received` bytes in order.
    fn new(received: u64) -> Self {
        let position = StreamPosition::starting_at(received);
        Self {
            position,
            segments: VecDeque::from([(0, 0)]),
            is_announced: false,
            class: BEST_EFFORT,
            last_taken: (0, 0),
            returned: None,
        }
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

    /// Takes up to `max` bytes that a client gave back.
    fn take_returned(&mut self, max: usize) -> Option<(u64, Vec<u8>)> {
        let (offset, mut bytes) = self.returned.take_if(|_| max > 0)?;
        if bytes.len() > max {
            let rest = bytes.split_off(max);
            self.returned = Some((offset + max as u64, rest));
        }
        self.last_taken = (offset, bytes.len());
        Some((offset, bytes))
    }

    /// Keeps bytes that a client gives back. Returns false, and drops them, unless they are those that were
    /// taken last: so a client has one reply's bytes here at most.
    fn give_back(&mut self, offset: u64, mut bytes: Vec<u8>) -> bool {
        if bytes.is_empty() || core::mem::take(&mut self.last_taken) != (offset, bytes.len()) {
            return false;
        }
        if let Some((_, rest)) = self.returned.take() {
            // Only a part of what was given back before was taken.
            bytes.extend(rest);
        }
        self.returned = Some((offset, bytes));
        true
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
        unordered.class = self.event_class.unwrap_or(BEST_EFFORT);
        self.announce_unordered(socket);
        self.notify_owners(socket);
    }

    /// Tells clients that bytes can be taken early.
    fn announce_unordered(&mut self, socket: u32) {
        let Some(unordered) = &mut self.sockets[socket as usize].unordered else { return };
        unordered.is_announced = true;
        // One more than the class, because 0 says that there are none.
        self.region.socket(socket).unordered.store(u32::from(unordered.class) + 1, Ordering::Release);
    }

    /// Tells clients if nothing can be taken early any more.
    fn update_announced(&mut self, cx: &Context<'_>, socket: u32) {
        let entry = &mut self.sockets[socket as usize];
        let Some(unordered) = &mut entry.unordered else { return };
        let has_early = unordered.returned.is_some() || entry.conn.is_some_and(|conn| cx.has_unordered(conn));
        if !has_early && core::mem::take(&mut unordered.is_announced) {
            self.region.socket(socket).unordered.store(0, Ordering::Release);
        }
    }

    /// Counts bytes in order that were put into the region, and tells clients if nothing can be taken early
    /// any more. Called for sockets with unordered bytes.
    #[cold]
    pub(super) fn count_ordered(&mut self, cx: &Context<'_>, socket: u32, len: usize) {
        let entry = &mut self.sockets[socket as usize];
        let Some(unordered) = &mut entry.unordered else { return };
        unordered.on_data(entry.received - len as u64, len);
        self.update_announced(cx, socket);
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
        if let Some((offset, bytes)) = unordered.take_returned((max as usize).min(REPLY_BYTES_MAX)) {
            self.update_announced(cx, socket);
            return Ok(UnorderedReply::Early { offset, bytes });
        }
        // Without a connection there are only bytes in the region.
        if let Some(conn) = entry.conn.filter(|_| unordered.may_take_early()) {
            let mut bytes = vec![0; (max as usize).min(REPLY_BYTES_MAX)];
            let taken = cx.recv_unordered(conn, &mut bytes)?;
            let early = taken.map(|taken| {
                bytes.truncate(taken.len);
                let offset = unordered.position.on_unordered(taken);
                unordered.last_taken = (offset, taken.len);
                UnorderedReply::Early { offset, bytes }
            });
            self.update_announced(cx, socket);
            if let Some(early) = early {
                return Ok(early);
            }
        }
        let entry = &mut self.sockets[socket as usize];
        let received = entry.received;
        let (offset, len) =
            entry.unordered.as_mut().map_or((0, 0), |unordered| unordered.offset_at(read, received));
        Ok(UnorderedReply::InOrder { offset, len: u32::try_from(len).unwrap_or(u32::MAX) })
    }

    /// Keeps bytes that a client took early and could not deliver.
    pub(super) fn return_unordered(&mut self, socket: u32, offset: u64, bytes: Vec<u8>) {
        let unordered = self.sockets[socket as usize].unordered.as_mut();
        if unordered.is_some_and(|unordered| unordered.give_back(offset, bytes)) {
            self.announce_unordered(socket);
            // Another process that shares the socket may have found nothing meanwhile.
            self.notify_owners(socket);
        }
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
    fn only_bytes_that_were_taken_last_are_kept() {
        let mut stream = UnorderedStream { last_taken: (70, 4), ..UnorderedStream::new(0) };
        assert!(!stream.give_back(70, vec![1; 5]) && !stream.give_back(70, vec![1; 4]), "once, and exactly");
        stream.last_taken = (70, 4);
        assert!(stream.give_back(70, b"abcd".to_vec()));
        assert_eq!(stream.take_returned(0), None);
        assert_eq!(stream.take_returned(3), Some((70, b"abc".to_vec())));
        assert!(stream.give_back(70, b"abc".to_vec()));
        assert_eq!(stream.take_returned(9), Some((70, b"abcd".to_vec())));
        assert_eq!(stream.take_returned(9), None);
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
