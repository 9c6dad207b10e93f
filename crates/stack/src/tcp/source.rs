//! Data that are sent without being copied into a buffer first: the application registers a source once and
//! queues slices of it on any number of connections.
//!
//! A retransmission reads a slice again, so a source must not change. A source is dropped when its owner has
//! released it and no queued slice refers to it.

pub(super) mod image;

use crate::wire::checksum::Sum;
use core::sync::atomic::AtomicU8;
use serde::{Deserialize, Serialize};

/// A producer of bytes that yields equal bytes each time. It is called on the shard's thread while segments
/// are built, so it must neither block nor be slow.
pub trait Source: Send {
    /// Returns the number of bytes, which is constant.
    fn len(&self) -> u64;

    /// Returns whether the source has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes the bytes from `offset` on to all of `out`. The caller stays within [`Source::len`].
    fn fill(&self, offset: u64, out: &mut [u8]);

    /// Returns the checksum of `len` bytes from `offset` on, if it is known without reading them. It must be
    /// that of what [`Source::fill`] writes, or the peer drops the segment.
    fn sum(&self, offset: u64, len: usize) -> Option<Sum> {
        let _ = (offset, len);
        None
    }

    /// Returns whether another process can make the source again from its id, so that a stack with slices of
    /// it can be saved ([`Stack::save`](crate::stack::Stack::save)).
    fn can_be_restored(&self) -> bool {
        false
    }

    /// Returns up to `len` contiguous bytes from `offset` on in place, if they are in memory that others may
    /// write concurrently. Either all bytes of a source are accessible this way or none.
    fn shared(&self, offset: u64, len: usize) -> Option<&[AtomicU8]> {
        let _ = (offset, len);
        None
    }
}

/// Identifies a source of a [`SourceTable`]. Stale after the source was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SourceId {
    /// Slot in the table.
    pub index: u32,
    /// Number of sources that were in the slot before.
    pub generation: u32,
}

struct SourceEntry {
    source: Option<Box<dyn Source>>,
    generation: u32,
    /// Queued slices that refer to the source.
    refs: u32,
    released: bool,
}

/// The sources of a shard.
#[derive(Default)]
pub struct SourceTable {
    entries: Vec<SourceEntry>,
    free: Vec<u32>,
}

impl core::fmt::Debug for SourceTable {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("SourceTable").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl SourceTable {
    /// Returns an empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers a source and returns its id.
    pub fn add(&mut self, source: Box<dyn Source>) -> SourceId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(SourceEntry { source: None, generation: 0, refs: 0, released: false });
            (self.entries.len() - 1) as u32
        });
        let entry = &mut self.entries[index as usize];
        entry.source = Some(source);
        entry.released = false;
        SourceId { index, generation: entry.generation }
    }

    /// Releases a source: no new slices of it can be queued, and it is dropped when the last queued slice is
    /// acknowledged. Returns false if it was released before.
    pub fn release(&mut self, id: SourceId) -> bool {
        if self.get(id).is_none() {
            return false;
        }
        self.entries[id.index as usize].released = true;
        self.drop_if_unused(id.index);
        true
    }

    /// Returns the source; `None` if it was released.
    pub fn get(&self, id: SourceId) -> Option<&dyn Source> {
        let entry = self.entries.get(id.index as usize)?;
        if entry.generation != id.generation || entry.released { None } else { entry.source.as_deref() }
    }

    /// Returns the number of sources, including released ones that are still being sent.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Returns whether no source exists.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a reference for a queued slice. The id must be valid. Until [`SourceTable::release_ref`] the
    /// source exists, released or not.
    pub fn add_ref(&mut self, id: SourceId) {
        let entry = &mut self.entries[id.index as usize];
        entry.refs = entry.refs.checked_add(1).expect("the reference count of a source overflows");
    }

    /// Drops the reference of a slice that is no longer queued.
    pub fn release_ref(&mut self, id: SourceId) {
        self.entries[id.index as usize].refs -= 1;
        self.drop_if_unused(id.index);
    }

    /// Returns the source of a queued slice, released or not.
    pub fn get_referenced(&self, id: SourceId) -> &dyn Source {
        let entry = &self.entries[id.index as usize];
        debug_assert!(entry.generation == id.generation && entry.refs > 0);
        entry.source.as_deref().expect("a referenced source was dropped")
    }

    fn drop_if_unused(&mut self, index: u32) {
        let entry = &mut self.entries[index as usize];
        if entry.released && entry.refs == 0 {
            entry.source = None;
            entry.generation = entry.generation.wrapping_add(1);
            self.free.push(index);
        }
    }
}

/// Bytes for each prefix sum: two bytes of sums for 64 bytes, and the sum of any range reads less than 128
/// bytes.
const BLOCK_BYTES: usize = 64;

/// Bytes in memory with prefix sums, so that the checksum of any slice has a small cost that does not depend
/// on its length.
///
/// ```text
/// bytes   │ block 0 │ block 1 │ block 2 │ block 3 │
/// sums    0        s0      s0+s1    s0+s1+s2            one's complement, 16 bits
/// range        ├──────────────────────┤    =  (sums[3] − sums[1])  +  its ends in blocks 0 and 3
/// ```
#[derive(Clone, Debug)]
pub struct PreloadedSource {
    bytes: Box<[u8]>,
    /// `sums[i]` is the sum of the first `i` blocks.
    sums: Box<[u16]>,
}

impl PreloadedSource {
    /// Takes bytes and computes their sums.
    pub fn new(bytes: impl Into<Box<[u8]>>) -> Self {
        let bytes = bytes.into();
        let mut total = Sum::ZERO;
        let prefixes = bytes.chunks_exact(BLOCK_BYTES).map(|block| {
            total = total.add(Sum::of(block));
            total.fold()
        });
        let sums = core::iter::once(0).chain(prefixes).collect();
        Self { bytes, sums }
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the sum of `bytes[start..end]`. A slice of zeros only may have either representation of zero.
    fn range_sum(&self, start: usize, end: usize) -> Sum {
        let first = start.div_ceil(BLOCK_BYTES);
        let last = end / BLOCK_BYTES;
        if first >= last {
            return Sum::of(&self.bytes[start..end]);
        }
        let prefix = |block: usize| Sum::ZERO.add_u16(self.sums[block]);
        let (inner_start, inner_end) = (first * BLOCK_BYTES, last * BLOCK_BYTES);
        Sum::of(&self.bytes[start..inner_start])
            .add_at(inner_start - start, prefix(last).sub(prefix(first)))
            .add_at(inner_end - start, Sum::of(&self.bytes[inner_end..end]))
    }
}

impl Source for PreloadedSource {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn fill(&self, offset: u64, out: &mut [u8]) {
        let offset = offset as usize;
        out.copy_from_slice(&self.bytes[offset..offset + out.len()]);
    }

    fn sum(&self, offset: u64, len: usize) -> Option<Sum> {
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(len).filter(|&end| end <= self.bytes.len())?;
        Some(self.range_sum(start, end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// Holds a reference whose count shows when the source is dropped.
    struct Tracked {
        _alive: Arc<()>,
    }

    impl Source for Tracked {
        fn len(&self) -> u64 {
            8
        }

        fn fill(&self, _offset: u64, out: &mut [u8]) {
            out.fill(0);
        }
    }

    /// Returns the one's complement sum of big-endian words, as RFC 1071 defines it.
    fn naive(bytes: &[u8]) -> u16 {
        let mut sum = 0u32;
        for word in bytes.chunks(2) {
            sum += u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0));
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    fn same_number(a: u16, b: u16) -> bool {
        a % 0xffff == b % 0xffff
    }

    #[test]
    fn sum_of_every_range_matches_its_bytes() {
        let bytes: Vec<u8> = (0..5 * BLOCK_BYTES as u32 + 7).map(|i| (i * i * 31 + i / 3) as u8).collect();
        let source = PreloadedSource::new(bytes.clone());
        for start in 0..=bytes.len() {
            for end in start..=bytes.len() {
                let sum = source.sum(start as u64, end - start).unwrap().fold();
                assert!(same_number(sum, naive(&bytes[start..end])), "{start}..{end}");
            }
        }
    }

    #[test]
    fn ranges_of_zeros_or_ones_sum_to_zero() {
        for byte in [0x00, 0xff] {
            let source = PreloadedSource::new(vec![byte; 4 * BLOCK_BYTES]);
            for (start, end) in [(0, 256), (1, 255), (64, 128), (63, 193), (10, 10)] {
                let naive = naive(&source.bytes()[start..end]);
                assert!(same_number(source.sum(start as u64, end - start).unwrap().fold(), naive));
            }
        }
    }

    #[test]
    fn a_range_outside_has_no_sum() {
        let source = PreloadedSource::new(&b"abc"[..]);
        assert_eq!(source.sum(0, 4), None);
        assert_eq!(source.sum(4, 0), None);
        assert_eq!(source.sum(u64::MAX, 1), None);
        assert!(source.sum(3, 0).is_some());
    }

    #[test]
    fn source_is_dropped_when_released_and_unreferenced() {
        let (alive, mut table) = (Arc::new(()), SourceTable::new());
        let id = table.add(Box::new(Tracked { _alive: alive.clone() }));
        table.add_ref(id);
        table.add_ref(id);
        assert!(table.release(id));
        assert!(!table.release(id));
        assert!(table.get(id).is_none());
        table.release_ref(id);
        assert_eq!((Arc::strong_count(&alive), table.get_referenced(id).len()), (2, 8));
        table.release_ref(id);
        assert_eq!((Arc::strong_count(&alive), table.len()), (1, 0));
    }

    #[test]
    fn stale_source_id_is_rejected_after_reuse() {
        let mut table = SourceTable::new();
        let old = table.add(Box::new(PreloadedSource::new(&b"old"[..])));
        assert!(table.release(old));
        let new = table.add(Box::new(PreloadedSource::new(&b"new!"[..])));
        assert!(table.get(old).is_none() && !table.release(old));
        assert_eq!(table.get(new).map(|source| source.len()), Some(4));
    }
}
