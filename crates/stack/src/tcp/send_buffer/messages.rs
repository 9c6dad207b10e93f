//! Messages in a send buffer (unordered send): a message of a higher class is queued before those of lower
//! classes, unless a byte of them was sent.
//!
//! ```text
//!            snd_nxt                                    end
//!               ▼                                        ▼
//! stream  ░░░░░░░░░░┬──────────┬──────┬────────┬─────────┤
//! messages  begun   │ class 7  │  6   │   1    │    1    │
//! ```
//!
//! The messages that were not begun are the end of the stream, in the order of their classes. So every byte
//! has a position when it is queued, and nothing else needs to know of messages. Bytes that are queued in
//! another way end this part of the stream: no message is queued before them.

use super::{ItemContent, SendBuffer, StreamItem, TailChunk};
use crate::chunk_pool::{CHUNK_BYTES, ChunkPool};
use crate::priority::CLASSES;
use core::ops::Range;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Messages that a connection may have queued and not begun to send.
// limit: queued messages of a connection
pub const MESSAGES_MAX: usize = 1024;

/// Entries for which an empty list keeps memory.
const KEPT_MESSAGES: usize = 64;

/// A message at the end of the stream.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct MessageMark {
    start: u64,
    end: u64,
    class: u8,
}

/// Messages that were queued last; valid only while they end where the stream ends.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct QueuedMessages {
    marks: VecDeque<MessageMark>,
    /// Messages whose places are final, for the priority of the frames that carry them: the latest
    /// [`MESSAGES_MAX`] of those that were not acknowledged when a message was queued last.
    placed: VecDeque<MessageMark>,
    /// Chunk that was allocated last for a message which was queued before others: it has room for the next
    /// one.
    chunk: Option<TailChunk>,
}

/// The buffer has no room for the message now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoMessageRoom {
    /// True if memory is missing.
    pub is_memory: bool,
}

impl QueuedMessages {
    /// Returns the bytes of memory of the list.
    pub fn list_bytes(&self) -> usize {
        (self.marks.capacity() + self.placed.capacity()) * size_of::<MessageMark>()
    }

    /// Updates item numbers after `count` items were inserted at number `at`.
    pub fn on_items_inserted(&mut self, at: u64, count: u64) {
        if let Some(chunk) = self.chunk.as_mut().filter(|chunk| chunk.item >= at) {
            chunk.item += count;
        }
    }

    /// Fixes the places of messages that are begun at position `sent`, and of all if the stream does not end
    /// with them. Forgets those before position `start`, which are acknowledged.
    fn fix_begun(&mut self, start: u64, sent: u64, end: u64) {
        while self.placed.front().is_some_and(|first| first.end <= start) {
            self.placed.pop_front();
        }
        let ends_stream = self.marks.back().is_some_and(|last| last.end == end);
        while let Some(begun) = self.marks.pop_front_if(|first| first.start < sent || !ends_stream) {
            if begun.end <= start {
                continue;
            }
            if self.placed.len() == MESSAGES_MAX {
                self.placed.pop_front();
            }
            self.placed.push_back(begun);
        }
        for list in [&mut self.marks, &mut self.placed] {
            if list.is_empty() && list.capacity() > KEPT_MESSAGES {
                list.shrink_to(KEPT_MESSAGES);
            }
        }
    }

    /// Returns the highest class of the messages that have bytes in a range of the stream.
    #[cold]
    fn class_within(&self, range: &Range<u64>) -> Option<u8> {
        let of_list = |list: &VecDeque<MessageMark>| {
            let first = list.partition_point(|mark| mark.end <= range.start);
            list.range(first..).take_while(|mark| mark.start < range.end).map(|mark| mark.class).max()
        };
        of_list(&self.placed).max(of_list(&self.marks))
    }
}

impl QueuedMessages {
    /// Returns whether messages that were read from an image fit the stream, whose first item has the number
    /// `first_item`. `is_item` tells whether a chunk belongs to its item.
    pub fn is_valid(&self, first_item: u64, end: u64, is_item: impl Fn(&TailChunk) -> bool) -> bool {
        let is_sorted = |list: &VecDeque<MessageMark>| {
            let mut last = 0;
            list.iter().all(|mark| {
                let follows = last <= mark.start && mark.start <= mark.end && mark.end <= end;
                last = mark.end;
                follows && usize::from(mark.class) < CLASSES
            })
        };
        is_sorted(&self.marks)
            && is_sorted(&self.placed)
            && self.marks.len().max(self.placed.len()) <= MESSAGES_MAX
            // The item of a chunk that is not used any more may be gone.
            && self.chunk.as_ref().is_none_or(|chunk| {
                chunk.used <= CHUNK_BYTES && (chunk.item < first_item || is_item(chunk))
            })
    }
}

impl SendBuffer {
    /// Queues a message of class `class` before the messages of lower classes of which no byte is among the
    /// first `sent` bytes. Returns the place of its bytes, relative to the first unacknowledged one. All or
    /// nothing: `limit` bytes are queued at most.
    pub fn push_message(
        &mut self,
        pool: &mut ChunkPool,
        bytes: &[u8],
        class: u8,
        sent: u64,
        limit: u64,
    ) -> Result<Range<u64>, NoMessageRoom> {
        let (start, len) = (self.start, bytes.len() as u64);
        self.messages.fix_begun(start, start + sent, self.end);
        let marks = &self.messages.marks;
        if marks.len() >= MESSAGES_MAX || self.len() + len > limit {
            return Err(NoMessageRoom { is_memory: false });
        }
        if pool.available() < bytes.len().div_ceil(CHUNK_BYTES) + 1 {
            return Err(NoMessageRoom { is_memory: true });
        }
        let index = marks.partition_point(|mark| mark.class >= class);
        let at = marks.get(index).map_or(self.end, |next| next.start);
        if at == self.end {
            let taken = self.push_bytes(pool, bytes, u64::MAX);
            debug_assert_eq!(taken, bytes.len());
        } else {
            self.insert_bytes(pool, at, bytes);
        }
        let marks = &mut self.messages.marks;
        for later in marks.range_mut(index..) {
            later.start += len;
            later.end += len;
        }
        marks.insert(index, MessageMark { start: at, end: at + len, class });
        Ok(at - start..at + len - start)
    }

    /// Returns the highest class of the messages among `len` bytes, which begin `offset` bytes after the
    /// first unacknowledged one; `None` if there are none.
    #[inline(always)]
    pub fn message_class(&self, offset: u64, len: u64) -> Option<u8> {
        if self.messages.marks.is_empty() && self.messages.placed.is_empty() {
            return None;
        }
        self.messages.class_within(&(self.start + offset..self.start + offset + len))
    }

    /// Inserts bytes before those at `position`, which are no slice of a source.
    fn insert_bytes(&mut self, pool: &mut ChunkPool, position: u64, bytes: &[u8]) {
        let mut index = self.split_at(position);
        self.has_partial_chunks = true;
        let mut done = 0;
        let before = (self.discarded + index as u64).checked_sub(1);
        if let Some(chunk) = &mut self.messages.chunk
            && Some(chunk.item) == before
            && chunk.item >= self.discarded
        {
            // The item before is a message that was inserted, too, and its chunk has room.
            let n = (CHUNK_BYTES - chunk.used).min(bytes.len());
            pool.bytes_mut(chunk.chunk)[chunk.used..chunk.used + n].copy_from_slice(&bytes[..n]);
            chunk.used += n;
            done = n;
        }
        let first = index;
        let mut last = None;
        while done < bytes.len() {
            // The caller has checked that there is memory.
            let Some(chunk) = pool.alloc() else { break };
            let n = CHUNK_BYTES.min(bytes.len() - done);
            pool.bytes_mut(chunk)[..n].copy_from_slice(&bytes[done..done + n]);
            let content = ItemContent::Bytes { chunk, start: 0, is_continued: false };
            self.items.insert(index, StreamItem { position: position + done as u64, content });
            last = Some(TailChunk { chunk, used: n, item: self.discarded + index as u64 });
            index += 1;
            done += n;
        }
        debug_assert_eq!(done, bytes.len());
        self.on_items_inserted(first, (index - first) as u64);
        if last.is_some() {
            self.messages.chunk = last;
        }
        for later in self.items.range_mut(index..) {
            later.position += done as u64;
        }
        self.end += done as u64;
    }

    /// Makes an item begin at `position`, and returns its index.
    fn split_at(&mut self, position: u64) -> usize {
        let index = self.index_at(position);
        let item = self.items[index];
        if item.position == position {
            return index;
        }
        let within = position - item.position;
        let content = match item.content {
            ItemContent::Bytes { chunk, start, is_continued } => {
                self.items[index].content = ItemContent::Bytes { chunk, start, is_continued: true };
                // Less than the size of a chunk.
                ItemContent::Bytes { chunk, start: start + within as u16, is_continued }
            }
            ItemContent::Slice { .. } => {
                debug_assert!(false, "a message begins inside of a slice");
                return index;
            }
        };
        self.items.insert(index + 1, StreamItem { position, content });
        // The bytes that follow in the chunk, if any, belong to the second half.
        self.on_items_inserted(index, 1);
        index + 1
    }

    /// Updates item numbers after `count` items were inserted at `index`.
    pub(super) fn on_items_inserted(&mut self, index: usize, count: u64) {
        let at = self.discarded + index as u64;
        if let Some(tail) = self.tail.as_mut().filter(|tail| tail.item >= at) {
            tail.item += count;
        }
        self.messages.on_items_inserted(at, count);
    }
}
