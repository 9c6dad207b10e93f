//! The memory that holds frames and that the kernel accesses, too (UMEM): chunks of equal size, the first
//! half for receiving, the second half for sending.
//!
//! Either the kernel or this side owns a chunk, and passing its address through a ring passes ownership.
//! Chunks that this side owns can therefore be lent as ordinary slices. The kernel is trusted to follow this
//! protocol, but the addresses that it returns are checked.
#![allow(unsafe_code)] // maps memory and lends parts of it

use rustix::fd::AsFd;
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// A memory mapping that lasts as long as this value.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is not bound to a thread.
unsafe impl Send for Mapping {}
// SAFETY: `Mapping` itself gives out only addresses; the code that reads or writes there justifies its
// accesses.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps new zeroed memory. The mapping is shared, so that a child process after fork never leaves the
    /// kernel with the wrong copy.
    pub(super) fn anonymous(len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses does not affect existing memory.
        let base = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED)
        }?;
        Ok(Self { base: NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?, len })
    }

    /// Maps a part of a descriptor: a ring of a socket.
    pub(super) fn map_fd(fd: impl AsFd, offset: u64, len: usize) -> io::Result<Self> {
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: as in `anonymous`.
        let base = unsafe {
            mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, flags, fd, offset)
        }?;
        Ok(Self { base: NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?, len })
    }

    /// Returns the address of `len` bytes at `offset`.
    ///
    /// Panics if they are outside the mapping, which is a bug of the caller: offsets from the kernel are
    /// checked before.
    pub(super) fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "outside of a mapping");
        // SAFETY: checked to be inside the mapping.
        unsafe { self.base.add(offset) }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped with this length by one of the constructors, and nothing refers to the memory any
        // more.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

/// The chunks for receiving.
pub(super) struct RxChunks {
    memory: Arc<Mapping>,
    chunk: usize,
    /// Bytes of all receive chunks; they start at offset 0.
    len: usize,
}

/// The chunks for sending.
pub(super) struct TxChunks {
    memory: Arc<Mapping>,
    chunk: usize,
    /// Range of the send chunks in the mapping.
    range: Range<usize>,
}

/// Creates a UMEM of `rx` and `tx` chunks of `chunk` bytes. Returns the mapping and its two parts.
pub(super) fn create(chunk: usize, rx: usize, tx: usize) -> io::Result<(Arc<Mapping>, RxChunks, TxChunks)> {
    let memory = Arc::new(Mapping::anonymous(chunk * (rx + tx))?);
    let rx_chunks = RxChunks { memory: memory.clone(), chunk, len: chunk * rx };
    let tx_chunks = TxChunks { memory: memory.clone(), chunk, range: chunk * rx..chunk * (rx + tx) };
    Ok((memory, rx_chunks, tx_chunks))
}

impl RxChunks {
    /// Returns the addresses of all chunks.
    pub(super) fn addresses(&self) -> impl Iterator<Item = u64> + use<> {
        (0..self.len as u64).step_by(self.chunk)
    }

    /// Returns the range of a descriptor, if it lies in one chunk.
    pub(super) fn locate(&self, address: u64, len: u32) -> Option<Range<usize>> {
        let start = usize::try_from(address).ok()?;
        let end = start.checked_add(len as usize)?;
        let is_in_one_chunk = end <= self.len && start % self.chunk + len as usize <= self.chunk;
        is_in_one_chunk.then_some(start..end)
    }

    /// Returns the address of the chunk that contains byte `at`.
    pub(super) fn chunk_of(&self, at: usize) -> u64 {
        (at - at % self.chunk) as u64
    }

    /// Returns bytes of chunks that this side owns. `range` must come from [`RxChunks::locate`].
    pub(super) fn bytes(&self, range: Range<usize>) -> &[u8] {
        assert!(range.end <= self.len && range.start <= range.end);
        let start = self.memory.at(range.start, range.len());
        // SAFETY: inside the mapping, which lives as long as `self`. The kernel passed the chunk together
        // with the descriptor that names it, and writes there only after the chunk was returned, which the
        // queue does when the slice is gone (in its next call, by `&mut self`). This side never writes to
        // receive chunks.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), range.len()) }
    }
}

impl TxChunks {
    /// Returns the addresses of all chunks.
    pub(super) fn addresses(&self) -> impl Iterator<Item = u64> + use<> {
        (self.range.start as u64..self.range.end as u64).step_by(self.chunk)
    }

    /// Returns whether this is the address of a send chunk.
    pub(super) fn is_chunk(&self, address: u64) -> bool {
        usize::try_from(address).is_ok_and(|at| self.range.contains(&at) && at.is_multiple_of(self.chunk))
    }

    /// Returns the first `len` bytes of a chunk that this side owns.
    ///
    /// Panics if the address is no chunk or `len` exceeds its size; callers check both.
    pub(super) fn chunk_mut(&mut self, address: u64, len: usize) -> &mut [u8] {
        assert!(self.is_chunk(address) && len <= self.chunk);
        let start = self.memory.at(address as usize, len);
        // SAFETY: inside the mapping, which lives as long as `self`. Send chunks are lent by this method
        // only, one at a time (`&mut self`), while this side owns them; the kernel only reads them, after
        // they were put into the ring.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ranges_within_an_rx_chunk_are_located() {
        let (_, rx, tx) = create(4096, 2, 2).expect("memory");
        assert_eq!(rx.locate(256, 3840), Some(256..4096));
        assert_eq!(rx.locate(4096 + 256, 0), Some(4352..4352));
        for (address, len) in
            [(256, 3841), (8192, 1), (8191, 2), (u64::MAX, 1), (u64::MAX - 3, 4), (0, u32::MAX)]
        {
            assert_eq!(rx.locate(address, len), None, "{address} {len}");
        }
        assert_eq!(rx.chunk_of(4352), 4096);
        assert_eq!(rx.addresses().collect::<Vec<_>>(), [0, 4096]);
        assert_eq!(tx.addresses().collect::<Vec<_>>(), [8192, 12_288]);
        for (address, is) in [(8192, true), (12_288, true), (8193, false), (4096, false), (16_384, false)] {
            assert_eq!(tx.is_chunk(address), is, "{address}");
        }
    }

    #[test]
    fn tx_bytes_are_written_to_the_umem() {
        let (memory, rx, mut tx) = create(4096, 1, 1).expect("memory");
        tx.chunk_mut(4096, 3).copy_from_slice(&[1, 2, 3]);
        assert_eq!(rx.bytes(0..4), [0; 4]);
        assert_eq!(memory.len(), 8192);
        assert_eq!(tx.chunk_mut(4096, 4096)[..4], [1, 2, 3, 0]);
    }
}
