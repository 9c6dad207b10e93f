//! Bytes that the application has sent and the peer has not acknowledged: a queue of items at their positions
//! in the stream.
//!
//! ```text
//!         snd_una                    snd_nxt                 end
//!            ▼                          ▼                     ▼
//! stream     ├──────────┬─────┬─────────┴───────┬─────────────┤
//! items      │ bytes    │bytes│ slice of source │ bytes       │
//! memory      chunk 4    chunk 9  (source)       chunk 9, continued
//! ```
//!
//! Bytes are copied into chunks of a pool. Small writes fill the last chunk, even across a slice of a source,
//! so that many short headers between slices do not take a chunk each. A slice takes no memory except its
//! item.
//!
//! Bounds: bytes by the limit that the caller passes, slices by [`SLICES_MAX`]; a chunk is freed with its
//! last byte.

mod image;
mod messages;

use super::footprint::BufferMemory;
use super::source::{SourceId, SourceTable};
use crate::chunk_pool::{CHUNK_BYTES, ChunkId, ChunkPool};
use crate::device::PayloadPiece;
use crate::ip::PayloadSum;
use crate::wire::checksum::{Sum, copy_and_sum};
use messages::QueuedMessages;
pub use messages::{MESSAGES_MAX, NoMessageRoom};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Slices of sources that one connection may queue: together with the copied items between them, 64 KiB of
/// items.
// limit: source slices in a send buffer
pub const SLICES_MAX: usize = 1024;

/// Items for which an empty queue keeps memory: 512 KiB of copied bytes.
const KEPT_ITEMS: usize = 256;

/// Why a slice was not queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushSourceError {
    /// The source was released.
    Stale,
    /// The range exceeds the source.
    OutOfRange,
    /// [`SLICES_MAX`] slices are queued: try again after some were acknowledged.
    Full,
}

impl core::fmt::Display for PushSourceError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Stale => "the source was released",
            Self::OutOfRange => "the slice reaches beyond the end of its source",
            Self::Full => "too many slices are queued",
        })
    }
}

impl core::error::Error for PushSourceError {}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum ItemContent {
    Bytes {
        chunk: ChunkId,
        /// Position of the first byte in the chunk.
        start: u16,
        /// True if a later item has bytes in the chunk and frees it.
        is_continued: bool,
    },
    Slice {
        source: SourceId,
        /// Position of the first byte in the source.
        offset: u64,
        /// True if the bytes are accessible in place ([`Source::shared`](super::source::Source::shared)).
        is_shared: bool,
    },
}

/// An item of the stream. It ends where the next one begins.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct StreamItem {
    position: u64,
    content: ItemContent,
}

const _: () = assert!(size_of::<StreamItem>() == 32);

/// The chunk that has room for more bytes.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct TailChunk {
    chunk: ChunkId,
    used: usize,
    /// Number of the last item with bytes in the chunk, counted from the first item ever.
    item: u64,
}

/// The send buffer of one connection, see the module documentation.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct SendBuffer {
    /// Position of the first unacknowledged byte, counted from the first byte of the stream.
    start: u64,
    end: u64,
    items: VecDeque<StreamItem>,
    /// Number of items that were discarded, which is the number of the first item in the queue.
    discarded: u64,
    slices: usize,
    /// Slices whose bytes are not accessible in place.
    unshared_slices: usize,
    /// True if slices were copied or messages were inserted: chunks in the middle may be partly used, and two
    /// items may share one.
    has_partial_chunks: bool,
    tail: Option<TailChunk>,
    messages: QueuedMessages,
}

impl SendBuffer {
    /// Returns an empty buffer. Allocates nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the bytes queued: not sent, or sent and not acknowledged.
    pub fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Returns whether nothing is queued.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Releases the memory of the list of items if it is empty.
    pub fn release_memory(&mut self) {
        if self.items.is_empty() {
            self.items = VecDeque::new();
        }
    }

    /// Returns the memory of the buffer; bytes of sources do not count. Visits every item if there are
    /// slices, or were: not for the path of a packet.
    pub(crate) fn memory(&self) -> BufferMemory {
        let list_bytes = self.items.capacity() * size_of::<StreamItem>() + self.messages.list_bytes();
        if self.slices == 0 && !self.has_partial_chunks {
            // Two items share a chunk only if there is a slice between them.
            return BufferMemory {
                bytes: self.len(),
                chunks: self.items.len(),
                list_bytes,
                entries_visited: 0,
            };
        }
        let mut memory =
            BufferMemory { list_bytes, entries_visited: self.items.len(), ..BufferMemory::default() };
        for (index, item) in self.items.iter().enumerate() {
            if let ItemContent::Bytes { is_continued, .. } = item.content {
                memory.bytes += self.item_end(index) - item.position;
                memory.chunks += usize::from(!is_continued);
            }
        }
        memory
    }

    /// Copies bytes to the end, as many as fit before `limit` bytes are queued and as memory is available
    /// for. Returns how many.
    pub fn push_bytes(&mut self, pool: &mut ChunkPool, bytes: &[u8], limit: u64) -> usize {
        self.push_with(pool, bytes.len(), limit, |at, out| out.copy_from_slice(&bytes[at..at + out.len()]))
    }

    /// Appends `len` bytes that `fill` writes, as many as fit. `fill` is called with the number of preceding
    /// bytes and must fill all of its slice. Returns how many bytes fit.
    #[inline]
    pub fn push_with(
        &mut self,
        pool: &mut ChunkPool,
        len: usize,
        limit: u64,
        mut fill: impl FnMut(usize, &mut [u8]),
    ) -> usize {
        if self.is_empty() && len > 0 && len <= CHUNK_BYTES && len as u64 <= limit {
            // A single short message, the most frequent case.
            let Some(chunk) = self.begin_chunk(pool) else { return 0 };
            fill(0, &mut pool.bytes_mut(chunk)[..len]);
            self.end += len as u64;
            self.tail = Some(TailChunk { chunk, used: len, item: self.discarded });
            return len;
        }
        let room = usize::try_from(limit.saturating_sub(self.len())).unwrap_or(usize::MAX);
        let len = len.min(room);
        let mut done = 0;
        while done < len {
            let Some((chunk, used)) = self.chunk_with_room(pool) else { break };
            let n = (CHUNK_BYTES - used).min(len - done);
            fill(done, &mut pool.bytes_mut(chunk)[used..used + n]);
            self.end += n as u64;
            if let Some(tail) = &mut self.tail {
                tail.used += n;
            }
            done += n;
        }
        done
    }

    /// Queues `len` bytes of a source from `offset` on.
    ///
    /// # Errors
    /// See [`PushSourceError`]; nothing is queued then.
    pub fn push_source(
        &mut self,
        sources: &mut SourceTable,
        source: SourceId,
        offset: u64,
        len: u64,
    ) -> Result<(), PushSourceError> {
        let available = sources.get(source).ok_or(PushSourceError::Stale)?;
        if offset.checked_add(len).is_none_or(|end| end > available.len()) {
            return Err(PushSourceError::OutOfRange);
        }
        if len == 0 {
            return Ok(());
        }
        let continues = self.items.back().is_some_and(|last| match last.content {
            ItemContent::Slice { source: queued, offset: from, .. } => {
                queued == source && from + (self.end - last.position) == offset
            }
            ItemContent::Bytes { .. } => false,
        });
        if !continues {
            if self.slices == SLICES_MAX {
                return Err(PushSourceError::Full);
            }
            let is_shared = available.shared(offset, 1).is_some();
            sources.add_ref(source);
            self.slices += 1;
            self.unshared_slices += usize::from(!is_shared);
            let content = ItemContent::Slice { source, offset, is_shared };
            self.items.push_back(StreamItem { position: self.end, content });
        }
        self.end += len;
        Ok(())
    }

    /// Writes the bytes that begin `offset` bytes after the first unacknowledged one to all of `out`. Returns
    /// their sum if it is required.
    ///
    /// # Panics
    /// If fewer bytes are queued.
    #[inline(always)]
    pub fn fill(
        &self,
        pool: &ChunkPool,
        sources: &SourceTable,
        offset: u64,
        out: &mut [u8],
        summing: PayloadSum,
    ) -> Sum {
        assert!(offset <= self.len() && out.len() as u64 <= self.len() - offset, "more than is queued");
        if summing == PayloadSum::Ignored
            && self.items.len() == 1
            && let Some(StreamItem { position, content: ItemContent::Bytes { chunk, start, .. } }) =
                self.items.front()
        {
            // A single short message, the most frequent case.
            let from = usize::from(*start) + (self.start + offset - position) as usize;
            out.copy_from_slice(&pool.bytes(*chunk)[from..from + out.len()]);
            return Sum::ZERO;
        }
        self.fill_pieces(pool, sources, offset, out, summing)
    }

    #[inline(never)]
    fn fill_pieces(
        &self,
        pool: &ChunkPool,
        sources: &SourceTable,
        offset: u64,
        out: &mut [u8],
        summing: PayloadSum,
    ) -> Sum {
        if out.is_empty() {
            return Sum::ZERO;
        }
        let mut position = self.start + offset;
        let mut index = self.index_at(position);
        let mut done = 0;
        let mut sum = Sum::ZERO;
        while done < out.len() {
            let item = self.items[index];
            let n =
                usize::try_from(self.item_end(index) - position).unwrap_or(usize::MAX).min(out.len() - done);
            let within = position - item.position;
            let piece = &mut out[done..done + n];
            let piece_sum = match item.content {
                ItemContent::Bytes { chunk, start, .. } => {
                    let from = usize::from(start) + within as usize;
                    let bytes = &pool.bytes(chunk)[from..from + n];
                    match summing {
                        PayloadSum::Required => copy_and_sum(bytes, piece),
                        PayloadSum::Ignored => {
                            piece.copy_from_slice(bytes);
                            Sum::ZERO
                        }
                    }
                }
                ItemContent::Slice { source, offset, .. } => {
                    let source = sources.get_referenced(source);
                    source.fill(offset + within, piece);
                    match summing {
                        PayloadSum::Required => {
                            source.sum(offset + within, n).unwrap_or_else(|| Sum::of(piece))
                        }
                        PayloadSum::Ignored => Sum::ZERO,
                    }
                }
            };
            sum = sum.add_at(done, piece_sum);
            done += n;
            position += n as u64;
            index += 1;
        }
        sum
    }

    /// Returns whether all bytes are available as [`pieces`](Self::pieces), including those of sources.
    #[inline]
    pub fn is_gatherable(&self) -> bool {
        self.unshared_slices == 0
    }

    /// Returns the `len` bytes that begin `offset` bytes after the first unacknowledged one, in place. Must
    /// be called only if [`is_gatherable`](Self::is_gatherable).
    ///
    /// # Panics
    /// If fewer bytes are queued, or `len` is 0.
    pub fn pieces<'a>(
        &'a self,
        pool: &'a ChunkPool,
        sources: &'a SourceTable,
        offset: u64,
        len: usize,
    ) -> GatherPieces<'a> {
        assert!(len > 0 && offset <= self.len() && len as u64 <= self.len() - offset, "more than is queued");
        let position = self.start + offset;
        GatherPieces { buffer: self, pool, sources, index: self.index_at(position), position, left: len }
    }

    /// Drops the first `n` bytes, which were acknowledged.
    ///
    /// # Panics
    /// If fewer are queued.
    #[inline]
    pub fn discard_front(&mut self, pool: &mut ChunkPool, sources: &mut SourceTable, n: u64) {
        assert!(n <= self.len(), "more than is queued");
        if n == self.len() {
            return self.clear(pool, sources);
        }
        self.discard_part(pool, sources, n);
    }

    #[inline(never)]
    fn discard_part(&mut self, pool: &mut ChunkPool, sources: &mut SourceTable, n: u64) {
        self.start += n;
        while !self.items.is_empty() && self.item_end(0) <= self.start {
            self.discard_item(pool, sources);
        }
        if let Some(first) = self.items.front_mut() {
            let dropped = self.start - first.position;
            first.position = self.start;
            match &mut first.content {
                // Fewer bytes are dropped than the chunk has.
                ItemContent::Bytes { start, .. } => *start += dropped as u16,
                ItemContent::Slice { offset, .. } => *offset += dropped,
            }
        }
    }

    /// Copies slices of sources whose bytes others may write into chunks, from the front on: until the first
    /// `len` bytes are private copies, all bytes are, or memory is exhausted. Returns how many bytes at the
    /// front are private.
    pub fn privatize_front(&mut self, pool: &mut ChunkPool, sources: &mut SourceTable, len: u64) -> u64 {
        let until = self.start + len.min(self.len());
        let mut index = 0;
        while let Some(item) = self.items.get(index).copied()
            && item.position < until
        {
            let ItemContent::Slice { source, offset, is_shared: true } = item.content else {
                index += 1;
                continue;
            };
            let end = self.item_end(index);
            let n = (end - item.position).min(CHUNK_BYTES as u64);
            let Some(chunk) = pool.alloc() else { return item.position - self.start };
            sources.get_referenced(source).fill(offset, &mut pool.bytes_mut(chunk)[..n as usize]);
            self.has_partial_chunks = true;
            self.items[index].content = ItemContent::Bytes { chunk, start: 0, is_continued: false };
            if item.position + n < end {
                let content = ItemContent::Slice { source, offset: offset + n, is_shared: true };
                self.items.insert(index + 1, StreamItem { position: item.position + n, content });
                // Items after the copied one have moved by one.
                self.on_items_inserted(index + 1, 1);
            } else {
                sources.release_ref(source);
                self.slices -= 1;
            }
            index += 1;
        }
        until - self.start
    }

    /// Drops everything.
    #[inline(always)]
    pub fn clear(&mut self, pool: &mut ChunkPool, sources: &mut SourceTable) {
        if self.is_empty() {
            return;
        }
        self.start = self.end;
        self.has_partial_chunks = false;
        self.discarded += self.items.len() as u64;
        self.tail = None;
        if let (1, Some(StreamItem { content: ItemContent::Bytes { chunk, .. }, .. })) =
            (self.items.len(), self.items.front())
        {
            // A single short message, the most frequent case.
            pool.free(*chunk);
            self.items.clear();
        } else {
            self.clear_items(pool, sources);
        }
        if self.items.capacity() > KEPT_ITEMS {
            self.items.shrink_to(KEPT_ITEMS);
        }
    }

    #[inline(never)]
    fn clear_items(&mut self, pool: &mut ChunkPool, sources: &mut SourceTable) {
        (self.slices, self.unshared_slices) = (0, 0);
        for item in self.items.drain(..) {
            match item.content {
                ItemContent::Bytes { is_continued: true, .. } => {}
                ItemContent::Bytes { chunk, is_continued: false, .. } => pool.free(chunk),
                ItemContent::Slice { source, .. } => sources.release_ref(source),
            }
        }
    }

    /// Returns a chunk with room at the end of the stream, and how much of it is used. An item exists for the
    /// bytes that are written there.
    fn chunk_with_room(&mut self, pool: &mut ChunkPool) -> Option<(ChunkId, usize)> {
        let next = self.discarded + self.items.len() as u64;
        if let Some(tail) = &mut self.tail
            && tail.used < CHUNK_BYTES
        {
            if tail.item + 1 < next {
                // A slice was queued in between: another item continues in the same chunk.
                let before = &mut self.items[(tail.item - self.discarded) as usize];
                if let ItemContent::Bytes { is_continued, .. } = &mut before.content {
                    *is_continued = true;
                }
                tail.item = next;
                let content =
                    ItemContent::Bytes { chunk: tail.chunk, start: tail.used as u16, is_continued: false };
                self.items.push_back(StreamItem { position: self.end, content });
            }
            return Some((tail.chunk, tail.used));
        }
        let chunk = self.begin_chunk(pool)?;
        self.tail = Some(TailChunk { chunk, used: 0, item: next });
        Some((chunk, 0))
    }

    /// Appends an item with a new chunk at the end of the stream.
    #[inline]
    fn begin_chunk(&mut self, pool: &mut ChunkPool) -> Option<ChunkId> {
        let chunk = pool.alloc()?;
        let content = ItemContent::Bytes { chunk, start: 0, is_continued: false };
        self.items.push_back(StreamItem { position: self.end, content });
        Some(chunk)
    }

    /// Drops the first item.
    fn discard_item(&mut self, pool: &mut ChunkPool, sources: &mut SourceTable) {
        let Some(item) = self.items.pop_front() else { return };
        match item.content {
            ItemContent::Bytes { is_continued: true, .. } => {}
            ItemContent::Bytes { chunk, is_continued: false, .. } => {
                pool.free(chunk);
                if self.tail.is_some_and(|tail| tail.item == self.discarded) {
                    self.tail = None;
                }
            }
            ItemContent::Slice { source, is_shared, .. } => {
                sources.release_ref(source);
                self.slices -= 1;
                self.unshared_slices -= usize::from(!is_shared);
            }
        }
        self.discarded += 1;
    }

    fn item_end(&self, index: usize) -> u64 {
        self.items.get(index + 1).map_or(self.end, |next| next.position)
    }

    /// Returns the index of the item with the byte at `position`.
    #[inline(always)]
    fn index_at(&self, position: u64) -> usize {
        // Without slices all chunks except the last one are full, so that a division finds the item.
        let skipped = match self.items[0].content {
            ItemContent::Bytes { start, .. } => u64::from(start),
            ItemContent::Slice { .. } => 0,
        };
        let guess =
            usize::try_from((position - self.start + skipped) / CHUNK_BYTES as u64).unwrap_or(usize::MAX);
        if let Some(item) = self.items.get(guess)
            && item.position <= position
            && position < self.item_end(guess)
        {
            return guess;
        }
        self.items.partition_point(|item| item.position <= position) - 1
    }
}

/// Bytes of a send buffer in place and in order, see [`SendBuffer::pieces`].
#[derive(Debug)]
pub struct GatherPieces<'a> {
    buffer: &'a SendBuffer,
    pool: &'a ChunkPool,
    sources: &'a SourceTable,
    index: usize,
    position: u64,
    left: usize,
}

impl<'a> Iterator for GatherPieces<'a> {
    type Item = PayloadPiece<'a>;

    #[inline]
    fn next(&mut self) -> Option<PayloadPiece<'a>> {
        let item = self.buffer.items.get(self.index).filter(|_| self.left > 0)?;
        let end = self.buffer.item_end(self.index);
        let within = self.position - item.position;
        let mut count = usize::try_from(end - self.position).unwrap_or(usize::MAX).min(self.left);
        let piece = match item.content {
            ItemContent::Bytes { chunk, start, .. } => {
                let from = usize::from(start) + within as usize;
                PayloadPiece::Private(&self.pool.bytes(chunk)[from..from + count])
            }
            ItemContent::Slice { source, offset, .. } => {
                let bytes = self.sources.get_referenced(source).shared(offset + within, count)?;
                count = count.min(bytes.len());
                PayloadPiece::Shared(&bytes[..count])
            }
        };
        self.position += count as u64;
        self.left -= count;
        if self.position == end {
            self.index += 1;
        }
        Some(piece)
    }
}

#[cfg(test)]
mod message_tests;
#[cfg(test)]
mod tests;
