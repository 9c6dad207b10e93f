//! Checks of a receive buffer that was read from an image of a stack.

use super::{ABSENT, CHUNK_BYTES, EARLY_RANGES_MAX, RANGES_MAX, RecvBuffer};
use crate::chunk_pool::image::UnclaimedChunks;
use core::ops::Range;

/// Positions in a stream stay below this, so that sums do not overflow.
const POSITION_MAX: u64 = 1 << 62;

/// Returns whether ranges are sorted, disjoint, not empty and within `within`.
fn are_disjoint(ranges: &[Range<u64>], within: &Range<u64>) -> bool {
    let is_within = |range: &Range<u64>| {
        range.start < range.end && within.start <= range.start && range.end <= within.end
    };
    ranges.iter().all(is_within) && ranges.is_sorted_by(|a, b| a.end < b.start)
}

impl RecvBuffer {
    /// Claims the chunks of the buffer, and checks that its lists agree.
    ///
    /// # Errors
    /// The lists disagree, or a chunk is not in the image.
    pub(crate) fn check(&self, chunks: &mut UnclaimedChunks) -> Result<(), &'static str> {
        let Self { base, origin, contiguous_end, read_end, .. } = *self;
        let is_ordered = [origin, base, read_end, contiguous_end, POSITION_MAX].is_sorted();
        if !is_ordered || base - origin >= CHUNK_BYTES as u64 {
            return Err("the positions of a receive buffer are out of range");
        }
        let covered = origin..origin + (self.chunks.len() * CHUNK_BYTES) as u64;
        if contiguous_end > base && contiguous_end > covered.end
            || self.ranges.len() > RANGES_MAX
            || !are_disjoint(&self.ranges, &(contiguous_end + 1..covered.end))
        {
            return Err("the ranges of a receive buffer are not in its chunks");
        }
        self.chunks.iter().filter(|chunk| **chunk != ABSENT).try_for_each(|chunk| chunks.claim(*chunk))?;
        let Some(early) = self.early.as_deref() else {
            if read_end != contiguous_end {
                return Err("a receive buffer ends before its bytes");
            }
            let received = core::iter::once(&(base..contiguous_end)).chain(&self.ranges).all(|r| self.has(r));
            return if received { Ok(()) } else { Err("received bytes have no chunk") };
        };
        if !self.has(&(base..read_end)) {
            return Err("received bytes have no chunk");
        }
        let beyond = contiguous_end..covered.end;
        let is_within = |range: &Range<u64>| {
            range.start < range.end && beyond.start <= range.start && range.end <= beyond.end
        };
        let is_valid = are_disjoint(&early.taken, &(base..POSITION_MAX))
            && early.unreported.iter().all(is_within)
            && early.pending.iter().all(|range| is_within(range) && self.has(range))
            && early.pending.len() + early.taken.len() <= 2 * EARLY_RANGES_MAX;
        if is_valid { Ok(()) } else { Err("the early ranges of a receive buffer are wrong") }
    }

    /// Returns whether bytes have chunks.
    fn has(&self, range: &Range<u64>) -> bool {
        if range.is_empty() {
            return true;
        }
        let index = |position: u64| ((position - self.origin) / CHUNK_BYTES as u64) as usize;
        let mut chunks = index(range.start)..index(range.end - 1) + 1;
        chunks.all(|index| self.chunks.get(index).is_some_and(|chunk| *chunk != ABSENT))
    }
}
