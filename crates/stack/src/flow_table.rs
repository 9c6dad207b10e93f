//! Maps the hash of an address pair to the index of a connection: a linear-hashing table.
//!
//! ```text
//!              split                 mask + 1
//!                ▼                       ▼
//! buckets  [0][1][2][3][4][5][6][7]│[8][9]         64 bytes each, one cache line:
//!           └──────────────────────┼─►┘             7 hashes · count · 7 values · link
//!           8 and 9 took over half of 0 and 1             │
//!                                                         ▼
//! overflow           [first: maybe partly full] ─► [full] ─► [full]
//! ```
//!
//! A hash table that doubles stops the shard while everything is moved, and one that is sized in advance
//! touches all its pages at once. This table grows by one bucket at a time: bucket `split` is divided between
//! itself and a new bucket at the end, by one more bit of the 32-bit hash that every entry stores. The two
//! vectors reserve address space only; pages are touched as the table grows.
//!
//! * Growth is triggered by memory: a bucket is added when all buckets together take less than 32 bytes per
//!   entry, so that hardly any bucket overflows.
//! * An insertion splits at most one bucket and moves at most `REDISTRIBUTED_BUCKETS_MAX` overflow buckets
//!   of it. The rest of a long chain (only equal hashes cause one) stays in `pending`, where lookups find it,
//!   for further insertions.
//! * A bucket has overflow buckets only if it is full, and of its overflow buckets only the first one is
//!   partly full. So insertion and removal touch the ends of a chain only, and at most one overflow bucket
//!   per seven entries exists.
//!
//! The table mixes the hash: a device's receive hash selects queues by its low bits, so that in one shard
//! they are all equal. The hash must still be keyed by the caller; an attacker who can produce equal hashes
//! makes chains long (visible in [`FlowTable::overflow_buckets`]), though only the search of that chain gets
//! slower.

use crate::prefetch::prefetch;
use crate::simd::equal_mask;
use crate::tables::memory_of;

/// Entries of a bucket: as many as fit a cache line beside count and link.
const BUCKET_ENTRIES: usize = 7;
/// Buckets of an empty table: one page. A power of two.
const INITIAL_BUCKETS: usize = 64;
/// Overflow buckets redistributed by one insertion while a bucket is split. Chains of random hashes are
/// hardly ever longer.
const REDISTRIBUTED_BUCKETS_MAX: usize = 4;
/// Bytes of memory per entry below which the table grows.
const DENSITY_BYTES: usize = 32;
/// Largest number of entries that a table can be created for.
const ENTRIES_LIMIT: usize = 1 << 30;

/// The table has as many entries as it was created for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

impl core::fmt::Display for Full {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("the flow table is full")
    }
}

impl core::error::Error for Full {}

/// A bucket. Hashes are contiguous so that they are compared at once, together with the count, whose lane has
/// no entry. A link is the index of an overflow bucket + 1, or 0.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
struct FlowBucket {
    /// Seven hashes, then the number of entries.
    hashes_and_count: [u32; BUCKET_ENTRIES + 1],
    values: [u32; BUCKET_ENTRIES],
    link: u32,
}

const _: () = assert!(size_of::<FlowBucket>() == 64);

impl FlowBucket {
    #[inline(always)]
    const fn count(&self) -> u32 {
        self.hashes_and_count[BUCKET_ENTRIES]
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.count() as usize == BUCKET_ENTRIES
    }

    /// Returns the hash and the value in a slot.
    fn entry(&self, slot: usize) -> (u32, u32) {
        (self.hashes_and_count[slot], self.values[slot])
    }

    fn push(&mut self, hash: u32, value: u32) {
        self.set(self.count() as usize, hash, value);
        self.hashes_and_count[BUCKET_ENTRIES] += 1;
    }

    fn set(&mut self, slot: usize, hash: u32, value: u32) {
        self.hashes_and_count[slot] = hash;
        self.values[slot] = value;
    }

    /// Removes and returns the last entry. The bucket must not be empty.
    fn pop(&mut self) -> (u32, u32) {
        self.hashes_and_count[BUCKET_ENTRIES] -= 1;
        self.entry(self.count() as usize)
    }

    /// Returns a mask in which bit `i` is set if the entry in slot `i` has this hash.
    #[inline(always)]
    fn match_mask(&self, hash: u32) -> u32 {
        equal_mask(&self.hashes_and_count, hash) & ((1 << self.count()) - 1)
    }

    /// Returns the slot of the first entry with this hash for whose value `accepts` returns true.
    #[inline(always)]
    fn position(&self, hash: u32, mut accepts: impl FnMut(u32) -> bool) -> Option<usize> {
        let mut equal = self.match_mask(hash);
        while equal != 0 {
            let slot = equal.trailing_zeros() as usize;
            if accepts(self.values[slot]) {
                return Some(slot);
            }
            equal &= equal - 1;
        }
        None
    }
}

/// Position of an entry.
#[derive(Clone, Copy)]
struct EntryPosition {
    /// Overflow link of the entry's bucket; 0 for the primary bucket.
    link: u32,
    slot: usize,
    /// True if the bucket belongs to the chain that is being redistributed.
    pending: bool,
}

/// Maps hashes to values, see the module documentation.
#[derive(Debug)]
pub struct FlowTable {
    buckets: Vec<FlowBucket>,
    overflow: Vec<FlowBucket>,
    /// Free overflow buckets, as a linked list.
    free: u32,
    overflow_in_use: usize,
    /// Number of buckets of this round of growth, less one. Buckets below `split` use one more bit.
    mask: u32,
    split: u32,
    /// The rest of the overflow chain of bucket `pending_bucket` (under `pending_mask`), which was split
    /// last.
    pending: u32,
    pending_bucket: u32,
    pending_mask: u32,
    len: usize,
    entries_max: usize,
}

impl FlowTable {
    /// Bytes of a bucket, which a search touches.
    pub const BUCKET_BYTES: usize = size_of::<FlowBucket>();

    /// Returns a table for at most `entries_max` entries (and at most 2^30). Reserves address space, touches
    /// one page.
    pub fn with_capacity(entries_max: usize) -> Self {
        let entries_max = entries_max.min(ENTRIES_LIMIT);
        let [buckets_max, overflow_max] = Self::buckets_max(entries_max);
        let mut buckets = Vec::with_capacity(buckets_max);
        buckets.resize(INITIAL_BUCKETS, FlowBucket::default());
        Self {
            buckets,
            overflow: Vec::with_capacity(overflow_max),
            free: 0,
            overflow_in_use: 0,
            mask: INITIAL_BUCKETS as u32 - 1,
            split: 0,
            pending: 0,
            pending_bucket: 0,
            pending_mask: 0,
            len: 0,
            entries_max,
        }
    }

    /// Returns the maximum numbers of buckets and of overflow buckets.
    const fn buckets_max(entries_max: usize) -> [usize; 2] {
        let buckets = INITIAL_BUCKETS + 1 + entries_max * DENSITY_BYTES / size_of::<FlowBucket>();
        // Chains have at most one overflow bucket per seven entries; a few more exist while one is
        // redistributed.
        [buckets, entries_max / BUCKET_ENTRIES + 2 * REDISTRIBUTED_BUCKETS_MAX]
    }

    /// Returns how many bytes [`with_capacity`](Self::with_capacity) reserves.
    pub fn reserved_bytes(entries_max: usize) -> usize {
        Self::buckets_max(entries_max.min(ENTRIES_LIMIT)).iter().sum::<usize>() * size_of::<FlowBucket>()
    }

    /// Returns the memory that is reserved: buckets and overflow buckets.
    pub fn memory(&self) -> [*const [u8]; 2] {
        [memory_of(&self.buckets), memory_of(&self.overflow)]
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes of memory touched so far.
    pub fn bytes_used(&self) -> usize {
        (self.buckets.len() + self.overflow.len()) * size_of::<FlowBucket>()
    }

    /// Returns the number of overflow buckets in use. Many more than a quarter of all buckets indicate
    /// colliding hashes.
    pub fn overflow_buckets(&self) -> usize {
        self.overflow_in_use
    }

    /// Prefetches the bucket of `hash`.
    #[inline]
    pub fn prefetch(&self, hash: u32) {
        prefetch(&self.buckets[self.address(mix(hash))]);
    }

    /// Returns the first value stored under `hash` in its bucket, which is nearly always the only one in the
    /// table.
    #[inline(always)]
    pub fn find_likely(&self, hash: u32) -> Option<u32> {
        let hash = mix(hash);
        let bucket = &self.buckets[self.address(hash)];
        let equal = bucket.match_mask(hash);
        if equal == 0 {
            return self.find_likely_in_overflow(bucket.link, hash);
        }
        Some(bucket.values[equal.trailing_zeros() as usize])
    }

    #[inline(always)]
    fn find_likely_in_overflow(&self, link: u32, hash: u32) -> Option<u32> {
        if link == 0 && self.pending == 0 {
            return None;
        }
        let position = self.locate_in_overflow(link, hash, &mut |_| true)?;
        Some(self.overflow[position.link as usize - 1].values[position.slot])
    }

    /// Returns the first value stored under `hash` for which `accepts` returns true. `accepts` is called only
    /// with values of this exact hash.
    #[inline]
    pub fn find(&self, hash: u32, mut accepts: impl FnMut(u32) -> bool) -> Option<u32> {
        let hash = mix(hash);
        let bucket = &self.buckets[self.address(hash)];
        let mut equal = bucket.match_mask(hash);
        while equal != 0 {
            let value = bucket.values[equal.trailing_zeros() as usize];
            if accepts(value) {
                return Some(value);
            }
            equal &= equal - 1;
        }
        if bucket.link == 0 && self.pending == 0 {
            return None;
        }
        let position = self.locate_in_overflow(bucket.link, hash, &mut accepts)?;
        Some(self.overflow[position.link as usize - 1].values[position.slot])
    }

    /// Adds an entry. The caller ensures that the pair is not in the table already.
    ///
    /// # Errors
    /// [`Full`] if the table has as many entries as it was created for; it is unchanged then.
    pub fn insert(&mut self, hash: u32, value: u32) -> Result<(), Full> {
        if self.len == self.entries_max {
            return Err(Full);
        }
        self.add(mix(hash), value);
        self.len += 1;
        if self.pending != 0 {
            self.redistribute();
        } else if self.bytes_used() < self.len * DENSITY_BYTES {
            self.split_bucket();
        }
        Ok(())
    }

    /// Removes one entry with this hash and value. Returns whether there was one.
    pub fn remove(&mut self, hash: u32, value: u32) -> bool {
        let hash = mix(hash);
        let index = self.address(hash);
        let Some(position) = self.locate(index, hash, value) else { return false };
        self.len -= 1;
        if position.pending {
            // Buckets of the pending chain need not be compact: they will be freed.
            let bucket = &mut self.overflow[position.link as usize - 1];
            let (hash, value) = bucket.pop();
            bucket.set(position.slot, hash, value);
            return true;
        }
        let first = self.buckets[index].link;
        if first == 0 {
            let bucket = &mut self.buckets[index];
            let (hash, value) = bucket.pop();
            bucket.set(position.slot, hash, value);
            return true;
        }
        // The gap is filled from the only bucket of the chain that may be partly full.
        let bucket = &mut self.overflow[first as usize - 1];
        let (hash, value) = bucket.pop();
        let (rest, next) = (bucket.count(), bucket.link);
        let was_popped = position.link == first && position.slot == rest as usize;
        if rest == 0 {
            self.buckets[index].link = next;
            self.release(first);
        }
        if !was_popped {
            self.bucket_at(index, position.link).set(position.slot, hash, value);
        }
        true
    }

    /// Changes the value of one entry from `old` to `new`. Returns whether there was one.
    pub fn replace(&mut self, hash: u32, old: u32, new: u32) -> bool {
        let hash = mix(hash);
        let index = self.address(hash);
        let Some(position) = self.locate(index, hash, old) else { return false };
        self.bucket_at(index, position.link).set(position.slot, hash, new);
        true
    }

    /// Returns the primary bucket of a mixed hash.
    #[inline]
    fn address(&self, hash: u32) -> usize {
        let address = hash & self.mask;
        if address < self.split { (hash & (self.mask << 1 | 1)) as usize } else { address as usize }
    }

    fn bucket_at(&mut self, index: usize, link: u32) -> &mut FlowBucket {
        if link == 0 { &mut self.buckets[index] } else { &mut self.overflow[link as usize - 1] }
    }

    fn locate(&self, index: usize, hash: u32, value: u32) -> Option<EntryPosition> {
        let mut accepts = |stored| stored == value;
        match self.buckets[index].position(hash, accepts) {
            Some(slot) => Some(EntryPosition { link: 0, slot, pending: false }),
            None => self.locate_in_overflow(self.buckets[index].link, hash, &mut accepts),
        }
    }

    /// Searches the chain that begins with `link`, then the pending chain if it may contain `hash`.
    #[inline(never)]
    fn locate_in_overflow(
        &self,
        mut link: u32,
        hash: u32,
        accepts: &mut dyn FnMut(u32) -> bool,
    ) -> Option<EntryPosition> {
        let mut pending = false;
        loop {
            if link == 0 {
                if pending || self.pending == 0 || hash & self.pending_mask != self.pending_bucket {
                    return None;
                }
                pending = true;
                link = self.pending;
            }
            let bucket = &self.overflow[link as usize - 1];
            if let Some(slot) = bucket.position(hash, &mut *accepts) {
                return Some(EntryPosition { link, slot, pending });
            }
            link = bucket.link;
        }
    }

    /// Adds an entry to its chain.
    fn add(&mut self, hash: u32, value: u32) {
        let index = self.address(hash);
        if !self.buckets[index].is_full() {
            self.buckets[index].push(hash, value);
            return;
        }
        let mut link = self.buckets[index].link;
        if link == 0 || self.overflow[link as usize - 1].is_full() {
            let next = link;
            link = self.acquire();
            self.overflow[link as usize - 1].link = next;
            self.buckets[index].link = link;
        }
        self.overflow[link as usize - 1].push(hash, value);
    }

    /// Adds a bucket and divides bucket `split` between itself and the new one.
    fn split_bucket(&mut self) {
        let index = self.split;
        let old = core::mem::take(&mut self.buckets[index as usize]);
        self.buckets.push(FlowBucket::default());
        (self.pending, self.pending_bucket, self.pending_mask) = (old.link, index, self.mask);
        self.split += 1;
        if self.split > self.mask {
            self.mask = self.mask << 1 | 1;
            self.split = 0;
        }
        for slot in 0..old.count() as usize {
            let (hash, value) = old.entry(slot);
            self.add(hash, value);
        }
        self.redistribute();
        self.prefetch_next_split();
    }

    /// Prefetches what the next split moves. Primary buckets are contiguous, so that the processor prefetches
    /// them itself; overflow buckets are not.
    #[inline]
    fn prefetch_next_split(&self) {
        let next = self.buckets[self.split as usize].link;
        if next != 0 {
            prefetch(&self.overflow[next as usize - 1]);
        }
    }

    /// Moves entries of the pending chain to the buckets that they belong to, a bounded number of them.
    fn redistribute(&mut self) {
        for _ in 0..REDISTRIBUTED_BUCKETS_MAX {
            if self.pending == 0 {
                return;
            }
            let link = self.pending;
            let bucket = self.overflow[link as usize - 1];
            self.pending = bucket.link;
            self.release(link);
            for slot in 0..bucket.count() as usize {
                let (hash, value) = bucket.entry(slot);
                self.add(hash, value);
            }
        }
    }

    /// Returns an empty overflow bucket.
    fn acquire(&mut self) -> u32 {
        self.overflow_in_use += 1;
        if self.free == 0 {
            self.overflow.push(FlowBucket::default());
            return self.overflow.len() as u32;
        }
        let link = self.free;
        self.free = core::mem::take(&mut self.overflow[link as usize - 1]).link;
        link
    }

    fn release(&mut self, link: u32) {
        self.overflow_in_use -= 1;
        self.overflow[link as usize - 1] = FlowBucket { link: self.free, ..FlowBucket::default() };
        self.free = link;
    }
}

/// Spreads every bit of the hash over the low bits, which select the bucket. A bijection, so that equality is
/// preserved.
#[inline]
const fn mix(hash: u32) -> u32 {
    let hash = (hash ^ hash >> 16).wrapping_mul(0x9E37_79B1);
    hash ^ hash >> 15
}

#[cfg(test)]
mod tests;
