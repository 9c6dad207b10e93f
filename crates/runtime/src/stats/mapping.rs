//! Words in a file that this process writes and others read.
#![allow(unsafe_code)] // maps a file

use super::seqlock::AtomicU64;
use core::ptr::NonNull;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::io;

/// A part of a file, mapped.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: it is a slice of atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `words` words of `file` from `offset` on, a multiple of the page size.
    ///
    /// The file must have all of them, and room for them on its file system: otherwise whoever touches them is killed.
    pub(super) fn new(file: &File, offset: u64, words: usize) -> io::Result<Self> {
        let bytes = words * size_of::<u64>();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, unmapped when the value is dropped, which nobody who borrows from it outlives.
        let base = unsafe { mmap(core::ptr::null_mut(), bytes, protection, MapFlags::SHARED, file, offset)? };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Self { base, words })
    }

    /// The words.
    pub(super) fn words(&self) -> &[AtomicU64] {
        // SAFETY: so many words are mapped there as long as `self` lives, aligned to a page, and all access to them is by atomics.
        unsafe { core::slice::from_raw_parts(self.base.as_ptr(), self.words) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: it was mapped by `new` with this length, and nobody borrows from it any more.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.words * size_of::<u64>()) };
    }
}
