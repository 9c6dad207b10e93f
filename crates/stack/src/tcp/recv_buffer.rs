//! Bytes that a connection has received and the application has not read, at their positions in the stream.
//!
//! ```text
//!            first unread                                  capacity
//!                 ▼◄─── readable ──►                           ▼
//! stream   ░░░░░░░█████████████████·······██████····███········
//! chunks  [   0       ][   1       ][  –  ][   3       ][  4  ]     – : nothing received, no memory
//! ranges                                  └────┘    └─┘             sorted, disjoint, not adjacent
//! ```
//!
//! Data out of order are written to their final position at once; nothing is moved when the gap closes. Bytes
//! that were received are never overwritten: of two versions the first one is kept.
//!
//! Bounds: nothing beyond the capacity is accepted, so a connection has at most `capacity / CHUNK_BYTES + 2`
//! chunks. At [`RANGES_MAX`] ranges the farthest one is dropped. Data out of order never use the last quarter
//! of the pool, and data in order may displace them, so that a pool full of fragments cannot block the bytes
//! that complete them. An empty buffer has no chunk.

mod early;
mod image;

use super::footprint::BufferMemory;
use crate::chunk_pool::{CHUNK_BYTES, ChunkId, ChunkPool};
use arrayvec::ArrayVec;
use core::ops::Range;
use early::EarlyRanges;
pub use early::{EARLY_RANGES_MAX, EarlyBytes};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Ranges out of order at most. A sender in slow start that overruns a queue loses every second segment of a
/// window: 4,096 gaps correspond to 8,192 segments. New ranges are usually appended to the list, where an
/// insertion costs nothing.
// limit: out-of-order ranges of a connection
pub const RANGES_MAX: usize = 4096;

/// Ranges that [`RecvBuffer::ranges`] returns at most: as many as fit into the options of a segment.
pub const REPORTED_RANGES_MAX: usize = 4;

/// Entries for which the chunk list (covers 512 KiB) and the range list keep memory while they are empty.
const KEPT_CHUNK_ENTRIES: usize = 256;
const KEPT_RANGE_ENTRIES: usize = 32;

/// Marks a chunk-sized piece of the stream without received bytes.
const ABSENT: ChunkId = ChunkId(u32::MAX);

/// Result of writing the data of one segment. Offsets are counted from the first unread byte before the call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteOutcome {
    /// Bytes from the front of the data that are in the buffer now. The rest was refused for lack of room.
    pub accepted: usize,
    /// Accepted bytes that were not in the buffer before.
    pub stored: usize,
    /// Bytes by which [`RecvBuffer::contiguous`] has grown, including those that waited after a gap.
    pub newly_contiguous: usize,
    /// Start and end of the first run of bytes that were in the buffer already (RFC 2883 §4).
    pub duplicate: Option<(usize, usize)>,
}

/// The receive buffer of one connection, see the module documentation.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct RecvBuffer {
    /// Position of the first unread byte, counted from the first byte of the stream.
    base: u64,
    /// Position of the first byte of the first chunk, at most `CHUNK_BYTES - 1` before `base`.
    origin: u64,
    /// End of the bytes that are received without a gap, from `base` on.
    contiguous_end: u64,
    /// End of the bytes that a read may return: `contiguous_end`, or the start of bytes that the application
    /// has taken before it.
    read_end: u64,
    chunks: VecDeque<ChunkId>,
    /// Ranges received beyond `contiguous_end`.
    ranges: Vec<Range<u64>>,
    /// A position in each of the ranges that changed last, the most recent first.
    recent: ArrayVec<u64, REPORTED_RANGES_MAX>,
    dropped_ranges: u64,
    /// Lists for unordered receive, allocated when they are needed first.
    early: Option<Box<EarlyRanges>>,
}

impl RecvBuffer {
    /// Returns an empty buffer. Allocates nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the bytes that can be read, up to the first ones that the application has taken early. Not 0
    /// if [`contiguous`](Self::contiguous) is not 0.
    pub fn readable(&self) -> usize {
        (self.read_end - self.base) as usize
    }

    /// Returns the bytes of the stream from the first unread one to the first gap, including those that the
    /// application has taken early.
    pub fn contiguous(&self) -> usize {
        (self.contiguous_end - self.base) as usize
    }

    /// Returns the bytes in order that were not read and not taken early.
    #[inline]
    pub fn unread_bytes(&self) -> usize {
        if self.early.is_some() { self.untaken_bytes() } else { self.contiguous() }
    }

    /// Returns whether no bytes are buffered, in order or out of order.
    pub fn is_empty(&self) -> bool {
        self.contiguous_end == self.base && self.ranges.is_empty()
    }

    /// Returns the number of ranges that wait after gaps.
    pub fn range_count(&self) -> usize {
        self.ranges.len()
    }

    /// Returns how many times a range was dropped or refused because there were too many, or to make room for
    /// data in order.
    pub fn dropped_ranges(&self) -> u64 {
        self.dropped_ranges
    }

    /// Resets the count of dropped ranges for the next connection.
    #[inline(always)]
    pub(crate) fn reset_dropped_ranges(&mut self) {
        self.dropped_ranges = 0;
    }

    /// Returns the memory of the buffer. Visits every chunk and every range: not for the path of a packet.
    pub(crate) fn memory(&self) -> BufferMemory {
        let out_of_order: u64 = self.ranges.iter().map(|range| range.end - range.start).sum();
        let early = self.early.as_deref();
        let taken = early.map_or(0, |early| early.taken_bytes(&(self.base..u64::MAX)));
        BufferMemory {
            bytes: self.contiguous() as u64 + out_of_order - taken,
            chunks: self.chunks.iter().filter(|&&chunk| chunk != ABSENT).count(),
            list_bytes: self.chunks.capacity() * size_of::<ChunkId>()
                + self.ranges.capacity() * size_of::<Range<u64>>()
                + early.map_or(0, EarlyRanges::list_bytes),
            entries_visited: self.chunks.len() + self.ranges.len(),
        }
    }

    /// Takes `data`, whose first byte is `offset` bytes after the first unread one. Bytes that would be
    /// `capacity` or more bytes after the first unread one are refused.
    pub fn write(
        &mut self,
        pool: &mut ChunkPool,
        offset: usize,
        data: &[u8],
        capacity: usize,
    ) -> WriteOutcome {
        let data = &data[..data.len().min(capacity.saturating_sub(offset))];
        if data.is_empty() {
            return WriteOutcome::default();
        }
        if offset == self.contiguous() && self.ranges.is_empty() && self.early.is_none() {
            return self.append(pool, data);
        }
        let start = self.base + offset as u64;
        let before = self.contiguous_end;
        let in_order = start <= before;
        let duplicate = self.first_overlap(start..start + data.len() as u64);
        let (reached, stored) = self.fill_gaps(pool, start, data, in_order);
        let is_kept = if in_order {
            self.extend_contiguous(reached);
            true
        } else {
            reached > start && self.add_range(pool, start..reached)
        };
        if !is_kept {
            self.release_unneeded(pool);
            return WriteOutcome::default();
        }
        let relative = |position: u64| (position - self.base) as usize;
        WriteOutcome {
            accepted: (reached - start) as usize,
            stored,
            newly_contiguous: (self.contiguous_end - before) as usize,
            duplicate: duplicate
                .filter(|run| run.end <= reached)
                .map(|run| (relative(run.start), relative(run.end))),
        }
    }

    /// Takes data that follow the contiguous bytes while nothing waits after a gap, which is the usual case.
    fn append(&mut self, pool: &mut ChunkPool, data: &[u8]) -> WriteOutcome {
        let stored = self.store(pool, self.contiguous_end, data, true);
        self.contiguous_end += stored as u64;
        self.read_end = self.contiguous_end;
        WriteOutcome { accepted: stored, stored, newly_contiguous: stored, duplicate: None }
    }

    /// Returns the first readable bytes, as many as are contiguous in memory. Empty only if nothing is
    /// readable.
    pub fn peek<'a>(&self, pool: &'a ChunkPool) -> &'a [u8] {
        self.peek_at(pool, 0)
    }

    /// Returns the readable bytes from `offset` bytes after the first unread one on, as many as are
    /// contiguous in memory.
    pub fn peek_at<'a>(&self, pool: &'a ChunkPool, offset: usize) -> &'a [u8] {
        let left = self.readable().saturating_sub(offset);
        if left == 0 {
            return &[];
        }
        let at = (self.base - self.origin) as usize + offset;
        let within = at % CHUNK_BYTES;
        &pool.bytes(self.chunks[at / CHUNK_BYTES])[within..CHUNK_BYTES.min(within + left)]
    }

    /// Returns the chunk that [`RecvBuffer::peek`] returns bytes of, and their range in it, for a caller that
    /// lends the chunk.
    pub fn peek_chunk(&self) -> Option<(ChunkId, Range<usize>)> {
        if self.readable() == 0 {
            return None;
        }
        let head = (self.base - self.origin) as usize;
        Some((self.chunks[0], head..CHUNK_BYTES.min(head + self.readable())))
    }

    /// Drops the first `n` readable bytes.
    ///
    /// # Panics
    /// If fewer are readable.
    pub fn consume(&mut self, pool: &mut ChunkPool, n: usize) {
        assert!(n <= self.readable(), "more than is readable");
        self.base += n as u64;
        if self.is_empty() {
            return self.reset(pool);
        }
        if self.base == self.read_end {
            self.skip_taken();
            if self.is_empty() {
                return self.reset(pool);
            }
        }
        while self.base - self.origin >= CHUNK_BYTES as u64 {
            self.origin += CHUNK_BYTES as u64;
            if let Some(chunk) = self.chunks.pop_front()
                && chunk != ABSENT
            {
                pool.free(chunk);
            }
        }
    }

    /// Moves readable bytes to `out`, as many as there are and fit. Returns how many.
    pub fn read(&mut self, pool: &mut ChunkPool, out: &mut [u8]) -> usize {
        let len = out.len().min(self.readable());
        let mut done = 0;
        while done < len {
            let piece = self.peek(pool);
            let n = piece.len().min(len - done);
            out[done..done + n].copy_from_slice(&piece[..n]);
            self.consume(pool, n);
            done += n;
        }
        done
    }

    /// Returns ranges that wait after gaps, as offsets from the first unread byte, in the order in which a
    /// SACK option reports them: the most recently changed one first, then those reported before it (RFC 2018
    /// §4), then any others.
    pub fn ranges(&self) -> ArrayVec<(usize, usize), REPORTED_RANGES_MAX> {
        let mut reported = ArrayVec::new();
        let recent = self.recent.iter().filter_map(|&position| self.range_at(position));
        if self.early.as_ref().is_some_and(|early| !early.unreported.is_empty()) {
            let parts = recent.chain(self.ranges.iter()).flat_map(|range| self.reported_parts(range));
            for range in parts {
                let range = ((range.start - self.base) as usize, (range.end - self.base) as usize);
                if !reported.contains(&range) && reported.try_push(range).is_err() {
                    break;
                }
            }
            return reported;
        }
        for range in recent.chain(self.ranges.iter()) {
            let range = ((range.start - self.base) as usize, (range.end - self.base) as usize);
            if !reported.contains(&range) && reported.try_push(range).is_err() {
                break;
            }
        }
        reported
    }

    /// Drops everything that waits after gaps, to make room for other data. Returns how many bytes were
    /// dropped.
    ///
    /// The peer was told that these bytes arrived; RFC 2018 §8 permits to drop them nevertheless.
    pub fn drop_out_of_order(&mut self, pool: &mut ChunkPool) -> usize {
        if self.early.is_some() {
            self.dropped_ranges += self.ranges.len() as u64;
            let bytes = self.drop_untaken(pool);
            self.release_unneeded(pool);
            return bytes;
        }
        let bytes: u64 = self.ranges.iter().map(|range| range.end - range.start).sum();
        self.dropped_ranges += self.ranges.len() as u64;
        self.ranges.clear();
        self.release_unneeded(pool);
        bytes as usize
    }

    /// As [`drop_out_of_order`](Self::drop_out_of_order) for ranges that were never in the stream, which do
    /// not count as dropped.
    pub fn discard_out_of_order(&mut self, pool: &mut ChunkPool) {
        let dropped = self.dropped_ranges;
        self.drop_out_of_order(pool);
        self.dropped_ranges = dropped;
    }

    /// Drops everything.
    #[inline]
    pub fn clear(&mut self, pool: &mut ChunkPool) {
        if !(self.is_empty() && self.chunks.is_empty()) {
            self.clear_contents(pool);
        }
    }

    #[inline(never)]
    fn clear_contents(&mut self, pool: &mut ChunkPool) {
        self.base = self.contiguous_end;
        self.read_end = self.contiguous_end;
        self.ranges.clear();
        if let Some(early) = &mut self.early {
            early.clear();
        }
        self.reset(pool);
    }

    /// Returns the first run of bytes in `new` that are in the buffer.
    fn first_overlap(&self, new: Range<u64>) -> Option<Range<u64>> {
        if new.start < self.contiguous_end {
            return Some(new.start..new.end.min(self.contiguous_end));
        }
        let range = self.ranges.get(self.ranges.partition_point(|range| range.end <= new.start))?;
        (range.start < new.end).then(|| new.start.max(range.start)..new.end.min(range.end))
    }

    /// Stores those bytes of `data` that are not in the buffer. Returns the position up to which all bytes
    /// are in the buffer now, and how many were stored. Stops without memory; for data in order it drops
    /// ranges from the far end first.
    fn fill_gaps(&mut self, pool: &mut ChunkPool, start: u64, data: &[u8], in_order: bool) -> (u64, usize) {
        let end = start + data.len() as u64;
        let mut position = end.min(start.max(self.contiguous_end));
        let mut next = self.ranges.partition_point(|range| range.end <= position);
        let mut stored = 0;
        while position < end {
            let gap_end = match self.ranges.get(next) {
                Some(range) if range.start <= position => {
                    position = end.min(range.end);
                    next += 1;
                    continue;
                }
                Some(range) => end.min(range.start),
                None => end,
            };
            let gap = &data[(position - start) as usize..(gap_end - start) as usize];
            let n = self.store(pool, position, gap, in_order);
            position += n as u64;
            stored += n;
            if n < gap.len() {
                if !in_order || next >= self.ranges.len() {
                    break;
                }
                if self.early.is_some() {
                    if !self.drop_farthest_untaken(pool, next, start..position) {
                        break;
                    }
                } else {
                    self.ranges.pop();
                    // Some stored bytes may be beyond the last range that is left: they are kept.
                    self.release_beyond(pool, position);
                }
                self.dropped_ranges += 1;
            }
        }
        (position, stored)
    }

    /// Copies `data` to its position. Returns how much of it found memory.
    fn store(&mut self, pool: &mut ChunkPool, position: u64, data: &[u8], in_order: bool) -> usize {
        let mut done = 0;
        while done < data.len() {
            let from_origin = (position - self.origin) as usize + done;
            let (index, within) = (from_origin / CHUNK_BYTES, from_origin % CHUNK_BYTES);
            if index >= self.chunks.len() {
                self.chunks.resize(index + 1, ABSENT);
            }
            if self.chunks[index] == ABSENT {
                let Some(chunk) = (if in_order { pool.alloc() } else { pool.alloc_spare() }) else { break };
                self.chunks[index] = chunk;
            }
            let n = (CHUNK_BYTES - within).min(data.len() - done);
            pool.bytes_mut(self.chunks[index])[within..within + n].copy_from_slice(&data[done..done + n]);
            done += n;
        }
        done
    }

    /// Extends the contiguous bytes up to `end`, and over the ranges that are reached.
    fn extend_contiguous(&mut self, end: u64) {
        self.contiguous_end = self.contiguous_end.max(end);
        let mut reached = 0;
        while let Some(range) = self.ranges.get(reached)
            && range.start <= self.contiguous_end
        {
            self.contiguous_end = self.contiguous_end.max(range.end);
            reached += 1;
        }
        self.ranges.drain(..reached);
        if self.early.is_some() {
            self.on_contiguous();
        } else {
            self.read_end = self.contiguous_end;
        }
    }

    /// Adds `new` and joins it with the ranges that it touches. Returns false if the list is full and `new`
    /// is beyond it.
    fn add_range(&mut self, pool: &mut ChunkPool, new: Range<u64>) -> bool {
        let first = self.ranges.partition_point(|range| range.end < new.start);
        let last = self.ranges.partition_point(|range| range.start <= new.end);
        if first < last {
            let joined = new.start.min(self.ranges[first].start)..new.end.max(self.ranges[last - 1].end);
            self.ranges[first] = joined;
            self.ranges.drain(first + 1..last);
        } else {
            if self.ranges.len() >= RANGES_MAX {
                self.dropped_ranges += 1;
                if self.early.is_some() {
                    if !self.drop_farthest_without_taken(pool, first) {
                        return false;
                    }
                } else if first == self.ranges.len() {
                    return false;
                } else {
                    self.ranges.pop();
                }
            }
            self.ranges.insert(first, new.clone());
            self.release_unneeded(pool);
        }
        self.note_change(self.ranges[first].clone());
        true
    }

    fn note_change(&mut self, changed: Range<u64>) {
        let mut recent: ArrayVec<u64, REPORTED_RANGES_MAX> = ArrayVec::new();
        recent.push(changed.start);
        for &position in &self.recent {
            if recent.is_full() {
                break;
            }
            if !changed.contains(&position) && self.range_at(position).is_some() {
                recent.push(position);
            }
        }
        self.recent = recent;
    }

    fn range_at(&self, position: u64) -> Option<&Range<u64>> {
        let index = self.ranges.partition_point(|range| range.end <= position);
        self.ranges.get(index).filter(|range| range.start <= position)
    }

    /// Frees chunks beyond the last received byte.
    fn release_unneeded(&mut self, pool: &mut ChunkPool) {
        if self.is_empty() {
            self.reset(pool);
        } else {
            self.release_beyond(pool, self.base);
        }
    }

    /// Frees chunks beyond the last received byte and beyond `position`.
    fn release_beyond(&mut self, pool: &mut ChunkPool, position: u64) {
        let end = self.ranges.last().map_or(self.contiguous_end, |range| range.end).max(position);
        let needed = ((end - self.origin) as usize).div_ceil(CHUNK_BYTES);
        while self.chunks.len() > needed {
            if let Some(chunk) = self.chunks.pop_back()
                && chunk != ABSENT
            {
                pool.free(chunk);
            }
        }
    }

    /// Frees all chunks of an empty buffer, and the memory of its lists if they have become large.
    fn reset(&mut self, pool: &mut ChunkPool) {
        for chunk in self.chunks.drain(..).filter(|&chunk| chunk != ABSENT) {
            pool.free(chunk);
        }
        self.origin = self.base;
        self.recent.clear();
        if self.chunks.capacity() > KEPT_CHUNK_ENTRIES {
            self.chunks.shrink_to(KEPT_CHUNK_ENTRIES);
        }
        if self.ranges.capacity() > KEPT_RANGE_ENTRIES {
            self.ranges.shrink_to(KEPT_RANGE_ENTRIES);
        }
    }
}

#[cfg(test)]
mod early_tests;
#[cfg(test)]
mod tests;
