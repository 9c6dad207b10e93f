//! Memory for bytes of streams: a pool of equal chunks with a budget, addressed by index.
//!
//! ```text
//! slots  [ bytes ][ bytes ][ lent ][ bytes ] … grown when the free list is empty, up to the budget
//!            ▲                         ▲
//! free   [ 3, 0 ]  last freed, first used: what was just read is still in the cache
//! ```
//!
//! All streams of a shard share one pool, so that its budget bounds their total memory. A chunk from `alloc`
//! still contains the bytes of its previous user: buffers expose only bytes that they wrote.

use serde::{Deserialize, Serialize};

pub(crate) mod image;

/// Bytes of a chunk: a full-sized segment fits, and a small request wastes little.
pub const CHUNK_BYTES: usize = 2048;

/// Memory of one chunk.
pub type Chunk = [u8; CHUNK_BYTES];

/// Identifies a chunk of a [`ChunkPool`]. The owner of a chunk from `alloc` must free it once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkId(pub u32);

#[derive(Debug, Default)]
struct ChunkSlot {
    /// `None` while the memory is lent with [`ChunkPool::lend`].
    bytes: Option<Box<Chunk>>,
    in_use: bool,
}

/// A pool of chunks with a limit in bytes, see the module documentation.
#[derive(Debug)]
pub struct ChunkPool {
    slots: Vec<ChunkSlot>,
    /// Free chunks, the last freed one on top.
    free: Vec<u32>,
    /// Largest number of chunks.
    chunks_max: usize,
    /// The last chunks of the budget, for streams that use few.
    pressure_reserve: usize,
    in_use: usize,
    /// Free chunks that are reserved.
    reserved: usize,
    high_water: usize,
}

impl ChunkPool {
    /// Returns a pool of at most `budget` bytes, rounded down to whole chunks. It begins without chunks and
    /// reserves only address space for its lists.
    pub fn new(budget: usize) -> Self {
        let chunks_max = (budget / CHUNK_BYTES).min(u32::MAX as usize - 1);
        Self {
            slots: Vec::with_capacity(chunks_max),
            free: Vec::with_capacity(chunks_max),
            chunks_max,
            pressure_reserve: chunks_max / 4,
            in_use: 0,
            reserved: 0,
            high_water: 0,
        }
    }

    /// Reserves `count` chunks. The caller has checked that they are [`ChunkPool::available`].
    pub fn reserve(&mut self, count: usize) {
        self.reserved += count;
    }

    /// Releases a reservation, in whole or in part: the chunks can be allocated again.
    pub fn unreserve(&mut self, count: usize) {
        self.reserved = self.reserved.saturating_sub(count);
    }

    /// Returns the number of reserved chunks.
    pub fn reserved(&self) -> usize {
        self.reserved
    }

    /// Returns a chunk with undefined contents; `None` if the budget is exhausted or reserved.
    #[inline]
    pub fn alloc(&mut self) -> Option<ChunkId> {
        if self.available() == 0 {
            return None;
        }
        let index = match self.free.pop() {
            Some(index) => index,
            None => self.grow()?,
        };
        self.slots[index as usize].in_use = true;
        self.in_use += 1;
        self.high_water = self.high_water.max(self.in_use);
        Some(ChunkId(index))
    }

    #[inline(never)]
    fn grow(&mut self) -> Option<u32> {
        if self.slots.len() >= self.chunks_max {
            return None;
        }
        self.slots.push(ChunkSlot { bytes: Some(Box::new([0; CHUNK_BYTES])), in_use: false });
        Some((self.slots.len() - 1) as u32)
    }

    /// Like [`ChunkPool::alloc`], but never uses the last quarter of the budget.
    ///
    /// For bytes out of order, which cannot be read yet. If they filled the pool, the bytes that make them
    /// readable would find no room, and nothing would ever be freed.
    pub fn alloc_spare(&mut self) -> Option<ChunkId> {
        if self.spare() > 0 { self.alloc() } else { None }
    }

    /// Frees a chunk.
    ///
    /// # Panics
    /// If the chunk is not in use or is lent: an error of the caller that would mix two streams.
    #[inline(always)]
    pub fn free(&mut self, id: ChunkId) {
        let slot = &mut self.slots[id.0 as usize];
        assert!(slot.in_use && slot.bytes.is_some(), "chunk freed twice or while lent");
        slot.in_use = false;
        self.in_use -= 1;
        self.free.push(id.0);
    }

    /// Returns the contents of a chunk.
    ///
    /// # Panics
    /// If the chunk is lent.
    pub fn bytes(&self, id: ChunkId) -> &[u8] {
        let slot = &self.slots[id.0 as usize];
        debug_assert!(slot.in_use);
        slot.bytes.as_ref().expect("chunk is lent").as_slice()
    }

    /// Returns the contents of a chunk for changes.
    ///
    /// # Panics
    /// If the chunk is lent.
    pub fn bytes_mut(&mut self, id: ChunkId) -> &mut [u8] {
        let slot = &mut self.slots[id.0 as usize];
        debug_assert!(slot.in_use);
        slot.bytes.as_mut().expect("chunk is lent").as_mut_slice()
    }

    /// Lends the memory of a chunk, so that a handler can read it while the pool is in use. Until
    /// [`ChunkPool::return_lent`] the chunk must not be accessed.
    ///
    /// # Panics
    /// If the chunk is lent already.
    pub fn lend(&mut self, id: ChunkId) -> Box<Chunk> {
        let slot = &mut self.slots[id.0 as usize];
        debug_assert!(slot.in_use);
        slot.bytes.take().expect("chunk is lent")
    }

    /// Returns memory that [`ChunkPool::lend`] has lent.
    ///
    /// # Panics
    /// If the chunk is not lent.
    pub fn return_lent(&mut self, id: ChunkId, bytes: Box<Chunk>) {
        let slot = &mut self.slots[id.0 as usize];
        assert!(slot.bytes.is_none(), "chunk is not lent");
        slot.bytes = Some(bytes);
    }

    /// Returns the number of chunks in use.
    pub fn in_use(&self) -> usize {
        self.in_use
    }

    /// Returns the largest number of chunks that were ever in use; their memory is kept.
    pub fn high_water(&self) -> usize {
        self.high_water
    }

    /// Returns the largest number of chunks.
    pub fn limit(&self) -> usize {
        self.chunks_max
    }

    /// Returns the number of chunks that [`ChunkPool::alloc`] can still return.
    pub fn available(&self) -> usize {
        self.chunks_max.saturating_sub(self.in_use + self.reserved)
    }

    /// Returns the number of chunks that can still be used without the last quarter of the budget. That
    /// quarter is reserved for streams that use few chunks: streams that use many, because their data are not
    /// read or not acknowledged, must not stop the others.
    pub fn spare(&self) -> usize {
        self.available().saturating_sub(self.pressure_reserve)
    }

    /// Returns the number of chunks that the budget allows.
    pub fn capacity(&self) -> usize {
        self.chunks_max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_is_bounded_and_last_freed_reused_first() {
        let mut pool = ChunkPool::new(3 * CHUNK_BYTES + 100);
        let (a, b, c) = (pool.alloc().unwrap(), pool.alloc().unwrap(), pool.alloc().unwrap());
        assert_eq!((pool.alloc(), pool.in_use(), pool.available()), (None, 3, 0));
        pool.free(a);
        pool.free(c);
        assert_eq!(pool.alloc(), Some(c));
        assert_eq!(pool.alloc(), Some(a));
        assert_ne!(a, b);
        assert_eq!((pool.in_use(), pool.high_water(), pool.capacity()), (3, 3, 3));
    }

    #[test]
    fn an_empty_budget_gives_nothing() {
        let mut pool = ChunkPool::new(CHUNK_BYTES - 1);
        assert_eq!((pool.alloc(), pool.alloc_spare(), pool.high_water()), (None, None, 0));
    }

    #[test]
    fn alloc_spare_leaves_last_quarter() {
        let mut pool = ChunkPool::new(16 * CHUNK_BYTES);
        let speculative = core::iter::from_fn(|| pool.alloc_spare()).count();
        assert_eq!((speculative, pool.available(), pool.spare()), (12, 4, 0));
        assert!(pool.alloc().is_some());
    }

    #[test]
    fn lent_chunk_returns_with_its_bytes() {
        let mut pool = ChunkPool::new(1 << 20);
        let id = pool.alloc().unwrap();
        pool.bytes_mut(id)[..3].copy_from_slice(b"abc");
        let lent = pool.lend(id);
        let other = pool.alloc().unwrap();
        assert_eq!(&lent[..3], b"abc");
        pool.return_lent(id, lent);
        assert_eq!(&pool.bytes(id)[..3], b"abc");
        assert_ne!(id, other);
    }

    #[test]
    #[should_panic(expected = "freed twice")]
    fn freeing_twice_is_caught() {
        let mut pool = ChunkPool::new(1 << 20);
        let id = pool.alloc().unwrap();
        pool.free(id);
        pool.free(id);
    }

    #[test]
    #[should_panic(expected = "while lent")]
    fn freeing_a_lent_chunk_is_caught() {
        let mut pool = ChunkPool::new(1 << 20);
        let id = pool.alloc().unwrap();
        let _lent = pool.lend(id);
        pool.free(id);
    }
}
