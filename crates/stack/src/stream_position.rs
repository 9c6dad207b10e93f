//! Positions in a stream that is received unordered.

use crate::tcp::UnorderedBytes;
use core::ops::Range;
use serde::{Deserialize, Serialize};

/// Counts the bytes of a stream of which some are received before bytes that precede them
/// ([`TcpOption::Unordered`](crate::options::TcpOption::Unordered)), so that the receiver knows the offset of
/// all bytes, whichever way they arrive. It must be told of all bytes, in the order in which they are
/// received.
///
/// Bytes received in order skip those received before, and a single read or call of a handler never contains
/// bytes of both sides of skipped ones.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamPosition {
    /// Offset of the next byte in order.
    next: u64,
    /// Ranges that were received early, after `next`: sorted, disjoint, not adjacent. The engine limits their
    /// number.
    early: Vec<Range<u64>>,
}

impl StreamPosition {
    /// Returns the position at the first byte of the stream. Allocates nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self { next: 0, early: Vec::new() }
    }

    /// Returns the position at the byte with this offset, when none after it was received.
    #[must_use]
    pub const fn starting_at(offset: u64) -> Self {
        Self { next: offset, early: Vec::new() }
    }

    /// Returns the offset of the next byte that will be received in order.
    #[must_use]
    pub const fn next(&self) -> u64 {
        self.next
    }

    /// Returns how many bytes in order precede the first bytes that were received early; `None` if there are
    /// none.
    #[must_use]
    pub fn until_early(&self) -> Option<u64> {
        self.early.first().map(|early| early.start - self.next)
    }

    /// Counts `len` bytes that were received in order. Returns the offset of the first of them.
    pub fn on_data(&mut self, len: usize) -> u64 {
        let start = self.next;
        self.next += len as u64;
        while self.early.first().is_some_and(|early| early.start <= self.next) {
            self.next = self.next.max(self.early.remove(0).end);
        }
        start
    }

    /// Counts bytes that were received unordered. Returns the offset of the first of them.
    pub fn on_unordered(&mut self, bytes: UnorderedBytes) -> u64 {
        let start = self.next + bytes.ahead as u64;
        let new = start..start + bytes.len as u64;
        let first = self.early.partition_point(|range| range.end < new.start);
        let last = self.early.partition_point(|range| range.start <= new.end);
        let joined = self.early[first..last]
            .iter()
            .fold(new, |joined, range| joined.start.min(range.start)..joined.end.max(range.end));
        self.early.splice(first..last, [joined]);
        start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_received_early_are_skipped_once() {
        let mut position = StreamPosition::new();
        assert_eq!(position.on_data(10), 0);
        assert_eq!(position.on_unordered(UnorderedBytes { ahead: 20, len: 5 }), 30);
        assert_eq!(position.on_unordered(UnorderedBytes { ahead: 40, len: 5 }), 50);
        assert_eq!(position.on_unordered(UnorderedBytes { ahead: 25, len: 5 }), 35);
        assert_eq!(position.on_data(15), 10);
        assert_eq!((position.next(), position.on_data(5)), (25, 25));
        assert_eq!((position.next(), position.on_data(10)), (40, 40), "30 to 39 are skipped");
        assert_eq!((position.next(), position.on_data(1)), (55, 55));
    }
}
