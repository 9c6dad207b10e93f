//! Ranges of a receive buffer that the application takes before the gap in front of them fills (unordered
//! receive), and ranges that the peer is not told of yet.
//!
//! ```text
//!           base    read_end        contiguous_end
//!            ▼         ▼                ▼
//! stream   ░░█████████ttttt█████████████·······██████tttt██····pppp
//!                                              └───────────┘  └──┘   ranges
//! ```
//!
//! `t`: taken by the application; memory is not needed for these bytes any more, and reading skips them. `p`:
//! pending, that is, the application may take them until the gap fills. The first unread byte is never a
//! taken one, and a read ends before taken bytes.
//!
//! Taken bytes remain received, whatever happens to the data around them: no copy of them is accepted or
//! delivered again.

use super::{ABSENT, RecvBuffer};
use crate::chunk_pool::{CHUNK_BYTES, ChunkPool};
use core::ops::Range;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Ranges of one connection that are pending or taken. At the limit a segment is delivered in order only.
// limit: ranges received early on a connection
pub const EARLY_RANGES_MAX: usize = 256;

/// Entries for which the lists keep memory while they are empty.
const KEPT_ENTRIES: usize = 16;

/// Lists of a connection that receives unordered.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct EarlyRanges {
    /// Ranges beyond `contiguous_end` that the application may take, in the order of arrival, disjoint. Each
    /// one is a part of one range of the buffer.
    pub pending: VecDeque<Range<u64>>,
    /// Ranges after `base` that the application has taken: sorted, disjoint, not adjacent.
    pub taken: Vec<Range<u64>>,
    /// Ranges beyond `contiguous_end` that no SACK option reports.
    pub unreported: Vec<Range<u64>>,
}

/// Result of [`RecvBuffer::add_early`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EarlyOutcome {
    /// Ranges that were added.
    pub added: usize,
    /// True if no range was pending before.
    pub is_first: bool,
    /// True if a range was not added because of [`EARLY_RANGES_MAX`].
    pub is_limited: bool,
}

/// Bytes that the application takes early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EarlyBytes {
    /// Number of bytes of the stream between the first unread one and these.
    pub ahead: usize,
    /// Number of bytes.
    pub len: usize,
}

impl EarlyRanges {
    /// Returns the bytes of memory of the lists.
    pub fn list_bytes(&self) -> usize {
        (self.pending.capacity() + self.taken.capacity() + self.unreported.capacity())
            * size_of::<Range<u64>>()
            + size_of::<Self>()
    }

    pub fn clear(&mut self) {
        self.pending.clear();
        self.taken.clear();
        self.unreported.clear();
        if self.pending.capacity() > KEPT_ENTRIES {
            self.pending.shrink_to(KEPT_ENTRIES);
        }
        if self.taken.capacity() > KEPT_ENTRIES {
            self.taken.shrink_to(KEPT_ENTRIES);
        }
        if self.unreported.capacity() > KEPT_ENTRIES {
            self.unreported.shrink_to(KEPT_ENTRIES);
        }
    }

    /// Adds a range to those that were taken.
    fn take(&mut self, new: Range<u64>) {
        let first = self.taken.partition_point(|range| range.end < new.start);
        let last = self.taken.partition_point(|range| range.start <= new.end);
        let mut joined = new;
        for range in &self.taken[first..last] {
            joined = joined.start.min(range.start)..joined.end.max(range.end);
        }
        self.taken.splice(first..last, [joined]);
    }

    /// Returns the parts of `range` that were taken, in order.
    fn taken_within(&self, range: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let first = self.taken.partition_point(|taken| taken.end <= range.start);
        let range = range.clone();
        self.taken[first..]
            .iter()
            .take_while({
                let end = range.end;
                move |taken| taken.start < end
            })
            .map(move |taken| taken.start.max(range.start)..taken.end.min(range.end))
    }

    /// Returns the number of bytes of `range` that were taken.
    pub fn taken_bytes(&self, range: &Range<u64>) -> u64 {
        self.taken_within(range).map(|taken| taken.end - taken.start).sum()
    }

    /// Returns the first part of `range` that is neither taken nor pending.
    fn first_new(&self, range: Range<u64>) -> Option<Range<u64>> {
        let mut start = range.start;
        let known = |at: u64| self.taken.iter().chain(&self.pending).find(|known| known.contains(&at));
        while start < range.end
            && let Some(known) = known(start)
        {
            start = known.end;
        }
        let next = self.taken.iter().chain(&self.pending).map(|known| known.start);
        let end = next.filter(|&at| at > start).min().unwrap_or(u64::MAX).min(range.end);
        (start < end).then_some(start..end)
    }

    /// Removes pending ranges within `dropped`.
    fn drop_pending(&mut self, dropped: &Range<u64>) {
        self.pending.retain(|range| range.start < dropped.start || range.start >= dropped.end);
    }
}

impl RecvBuffer {
    /// Lets the application take `len` bytes that begin `offset` bytes after the first unread one and were
    /// accepted beyond a gap, except bytes that are pending or taken already.
    #[cold]
    pub fn add_early(&mut self, offset: usize, len: usize) -> EarlyOutcome {
        let mut start = self.base + offset as u64;
        let end = start + len as u64;
        let early = self.early.get_or_insert_default();
        let mut outcome = EarlyOutcome { is_first: early.pending.is_empty(), ..EarlyOutcome::default() };
        while let Some(new) = early.first_new(start..end) {
            if early.pending.len() + early.taken.len() >= EARLY_RANGES_MAX {
                outcome.is_limited = true;
                break;
            }
            start = new.end;
            early.pending.push_back(new);
            outcome.added += 1;
        }
        outcome
    }

    /// Returns whether the application may take bytes beyond a gap.
    #[inline]
    pub fn has_early(&self) -> bool {
        self.early.as_ref().is_some_and(|early| !early.pending.is_empty())
    }

    /// Returns the bytes of the stream from the first unread one to those that the application may take next,
    /// and their number; `None` if there are none.
    pub fn next_early(&self) -> Option<EarlyBytes> {
        let range = self.early.as_ref()?.pending.front()?;
        Some(EarlyBytes {
            ahead: (range.start - self.base) as usize,
            len: (range.end - range.start) as usize,
        })
    }

    /// Moves bytes beyond a gap to `out`: those that arrived first, of one segment at most. What does not fit
    /// is left for the next call. Returns `None` if there are none, or `out` is empty.
    pub fn take_early(&mut self, pool: &mut ChunkPool, out: &mut [u8]) -> Option<EarlyBytes> {
        let early = self.early.as_mut()?;
        let range = early.pending.front_mut()?;
        let len = out.len().min((range.end - range.start) as usize);
        if len == 0 {
            return None;
        }
        let taken = range.start..range.start + len as u64;
        range.start = taken.end;
        if range.is_empty() {
            early.pending.pop_front();
        }
        early.take(taken.clone());
        let mut done = 0;
        while done < len {
            let at = (taken.start - self.origin) as usize + done;
            let within = at % CHUNK_BYTES;
            let n = (CHUNK_BYTES - within).min(len - done);
            out[done..done + n]
                .copy_from_slice(&pool.bytes(self.chunks[at / CHUNK_BYTES])[within..within + n]);
            done += n;
        }
        self.free_chunks_in(pool, &taken, 0..0);
        Some(EarlyBytes { ahead: (taken.start - self.base) as usize, len })
    }

    /// Forgets which bytes the application may take: it gets them in order.
    pub fn cancel_early(&mut self) {
        if let Some(early) = &mut self.early {
            early.pending.clear();
        }
    }

    /// Returns the bytes in order that were not read and not taken.
    #[cold]
    pub(super) fn untaken_bytes(&self) -> usize {
        let taken = self.early.as_deref().map_or(0, |e| e.taken_bytes(&(self.base..self.contiguous_end)));
        self.contiguous() - taken as usize
    }

    /// Returns whether the byte `offset` bytes after the first unread one was taken.
    pub fn is_taken(&self, offset: usize) -> bool {
        let at = self.base + offset as u64;
        self.early.as_ref().is_some_and(|early| early.taken.iter().any(|taken| taken.contains(&at)))
    }

    /// Keeps `len` accepted bytes, which begin `offset` bytes after the first unread one, out of SACK options
    /// until [`report_from`](Self::report_from).
    #[cold]
    pub fn add_unreported(&mut self, offset: usize, len: usize) {
        let start = self.base + offset as u64;
        let new = start..start + len as u64;
        let early = self.early.get_or_insert_default();
        let has_room = early.unreported.len() < EARLY_RANGES_MAX;
        match early.unreported.iter_mut().find(|range| range.start <= new.end && new.start <= range.end) {
            Some(range) => *range = range.start.min(new.start)..range.end.max(new.end),
            None if has_room => early.unreported.push(new),
            None => {}
        }
    }

    /// Lets SACK options report the ranges that begin up to `offset` bytes after the first unread one.
    pub fn report_from(&mut self, offset: usize) {
        let position = self.base + offset as u64;
        if let Some(early) = &mut self.early {
            early.unreported.retain(|range| range.start > position);
        }
    }

    /// Returns how many ranges SACK options may report. A number above `REPORTED_RANGES_MAX` may be reduced
    /// to it.
    #[inline]
    pub fn reported_range_count(&self) -> usize {
        match &self.early {
            Some(early) if !early.unreported.is_empty() => self.ranges().len(),
            _ => self.ranges.len(),
        }
    }

    /// Returns the parts of `range` that SACK options may report.
    pub(super) fn reported_parts(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut parts = vec![range.clone()];
        for hidden in self.early.iter().flat_map(|early| &early.unreported) {
            parts = parts
                .into_iter()
                .flat_map(|part| {
                    let before = part.start..part.end.min(hidden.start);
                    let after = part.start.max(hidden.end)..part.end;
                    [before, after]
                })
                .filter(|part| !part.is_empty())
                .collect();
        }
        parts
    }

    /// Updates the lists after `contiguous_end` has moved: what the application did not take early, it reads
    /// in order.
    #[cold]
    pub(super) fn on_contiguous(&mut self) {
        let end = self.contiguous_end;
        if let Some(early) = &mut self.early {
            early.pending.retain(|range| range.start >= end);
            early.unreported.retain(|range| range.end > end);
        }
        self.update_read_end();
    }

    fn update_read_end(&mut self) {
        let first = self.early.as_ref().and_then(|early| early.taken.first());
        self.read_end = first.map_or(self.contiguous_end, |taken| taken.start.min(self.contiguous_end));
    }

    /// Skips taken bytes that the read position has reached.
    #[cold]
    pub(super) fn skip_taken(&mut self) {
        if let Some(early) = &mut self.early
            && let Some(taken) = early.taken.first()
            && taken.start == self.base
            && self.base < self.contiguous_end
        {
            self.base = taken.end;
            early.taken.remove(0);
        }
        self.update_read_end();
    }

    /// Drops the farthest range with bytes that were not taken, among those from index `from` on, to make
    /// room for data in order; `kept` are stored bytes that belong to no range yet. Returns false if there is
    /// no such range.
    #[cold]
    pub(super) fn drop_farthest_untaken(
        &mut self,
        pool: &mut ChunkPool,
        from: usize,
        kept: Range<u64>,
    ) -> bool {
        let Some(early) = &mut self.early else { return false };
        for index in (from..self.ranges.len()).rev() {
            let dropped = self.ranges[index].clone();
            let parts: Vec<Range<u64>> = early.taken_within(&dropped).collect();
            if parts.first() == Some(&dropped) {
                continue;
            }
            self.ranges.splice(index..=index, parts);
            early.drop_pending(&dropped);
            self.free_chunks_in(pool, &dropped, kept);
            return true;
        }
        false
    }

    /// Drops the farthest range without taken bytes, among those from index `from` on. Returns false if there
    /// is none.
    #[cold]
    pub(super) fn drop_farthest_without_taken(&mut self, pool: &mut ChunkPool, from: usize) -> bool {
        let Some(early) = &mut self.early else { return false };
        let has_taken = |range: &Range<u64>| early.taken_within(range).next().is_some();
        let Some(index) = (from..self.ranges.len()).rev().find(|&index| !has_taken(&self.ranges[index]))
        else {
            return false;
        };
        let dropped = self.ranges.remove(index);
        early.drop_pending(&dropped);
        self.free_chunks_in(pool, &dropped, 0..0);
        true
    }

    /// Reduces the ranges to what was taken. Returns how many bytes are dropped.
    #[cold]
    pub(super) fn drop_untaken(&mut self, pool: &mut ChunkPool) -> usize {
        let Some(early) = &mut self.early else { return 0 };
        early.pending.clear();
        let mut bytes = 0;
        for dropped in core::mem::take(&mut self.ranges) {
            bytes += dropped.end - dropped.start - early.taken_bytes(&dropped);
            self.ranges.extend(early.taken_within(&dropped));
        }
        let all = self.origin..self.origin + (self.chunks.len() * CHUNK_BYTES) as u64;
        self.free_chunks_in(pool, &all, 0..0);
        bytes as usize
    }

    /// Frees the chunks that overlap `span` and hold no byte that is still needed; bytes of `kept` are.
    fn free_chunks_in(&mut self, pool: &mut ChunkPool, span: &Range<u64>, kept: Range<u64>) {
        let Some(early) = &self.early else { return };
        let first = (span.start - self.origin) as usize / CHUNK_BYTES;
        let last = ((span.end - self.origin) as usize).div_ceil(CHUNK_BYTES).min(self.chunks.len());
        for index in first..last {
            let start = self.origin + (index * CHUNK_BYTES) as u64;
            let piece = start..start + CHUNK_BYTES as u64;
            let holds = |range: &Range<u64>| {
                let part = range.start.max(piece.start)..range.end.min(piece.end);
                !part.is_empty() && early.taken_bytes(&part) < part.end - part.start
            };
            let begin = self.ranges.partition_point(|range| range.end <= piece.start);
            let within = self.ranges[begin..].iter().take_while(|range| range.start < piece.end);
            let contiguous = self.base..self.contiguous_end;
            let is_needed = [&contiguous, &kept].into_iter().chain(within).any(holds);
            if !is_needed && self.chunks[index] != ABSENT {
                pool.free(self.chunks[index]);
                self.chunks[index] = ABSENT;
            }
        }
        let needed = kept.end.max(self.base);
        self.release_beyond(pool, needed);
    }
}
