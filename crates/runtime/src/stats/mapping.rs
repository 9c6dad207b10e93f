//! A shared mapping of words in a file, which this process writes and others read.
#![allow(unsafe_code)] // maps a file

use super::seqlock::AtomicU64;
use core::ptr::NonNull;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io;

/// A mapped part of a file.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the mapping is a slice of atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `words` words of `file` from `offset` on, which is a multiple of the page size.
    ///
    /// The file must have the words, and its file system must have allocated them: otherwise an access kills
    /// the process (`SIGBUS`).
    pub(super) fn new(file: &File, offset: u64, words: usize) -> io::Result<Self> {
        let bytes = words * size_of::<u64>();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping; it is unmapped when the value is dropped, which no borrow of it outlives.
        let base = unsafe { mmap(core::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, offset)? };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Self { base, words })
    }

    /// Returns the words.
    pub(super) fn words(&self) -> &[AtomicU64] {
        // SAFETY: `self.words` words are mapped at `self.base` as long as `self` lives, aligned to a page;
        // all accesses are atomic.
        unsafe { core::slice::from_raw_parts(self.base.as_ptr(), self.words) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` mapped this address with this length, and nothing borrows from it any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.words * size_of::<u64>()) };
    }
}
