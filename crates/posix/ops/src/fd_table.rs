//! Maps the descriptors of the process to the stack's open file descriptions. Every hooked call looks up its
//! descriptor here, also calls on files, so a look-up is one load.
#![allow(unsafe_code)] // the allocator's zeros are the entries

use core::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use ginnel::resource_limit::resource_limit;
use rustix::fd::RawFd;
use rustix::process::Resource;

/// Largest size of the table, in descriptors.
const FDS_MAX: u64 = 1 << 20;

/// Number of an open file description.
pub(crate) type FileId = u32;

/// The table: for each descriptor the number of its open file description plus one, or 0.
pub(crate) struct FdTable {
    entries: Box<[AtomicU32]>,
    /// No entry from here on was ever set. Iteration stops here, so that it does not visit up to a million
    /// unused entries.
    end: AtomicI32,
}

impl FdTable {
    /// Creates a table for as many descriptors as the hard limit of `RLIMIT_NOFILE` permits, at most
    /// [`FDS_MAX`].
    pub fn new() -> Self {
        let limit = resource_limit(Resource::Nofile).maximum.unwrap_or(FDS_MAX).min(FDS_MAX);
        Self::with_len(limit as usize)
    }

    /// Creates a table for `len` descriptors. A page of entries takes memory once one of them is set.
    pub fn with_len(len: usize) -> Self {
        // SAFETY: zeros are an `AtomicU32`.
        let entries = unsafe { Box::<[AtomicU32]>::new_zeroed_slice(len).assume_init() };
        Self { entries, end: AtomicI32::new(0) }
    }

    /// Returns how many descriptors the table has room for.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    fn entry(&self, fd: RawFd) -> Option<&AtomicU32> {
        self.entries.get(usize::try_from(fd).ok()?)
    }

    /// Returns the open file description of a descriptor if it belongs to the stack.
    #[inline]
    pub fn get(&self, fd: RawFd) -> Option<FileId> {
        self.entry(fd)?.load(Ordering::Acquire).checked_sub(1)
    }

    /// Assigns a descriptor to an open file description. Returns false if the number is beyond the table.
    pub fn set(&self, fd: RawFd, file: FileId) -> bool {
        let Some(entry) = self.entry(fd) else { return false };
        if fd >= self.end.load(Ordering::Relaxed) {
            // Stored before the entry, so that a thread that sees the entry also iterates that far.
            self.end.fetch_max(fd + 1, Ordering::Relaxed);
        }
        entry.store(file + 1, Ordering::Release);
        true
    }

    /// Removes a descriptor and returns the open file description that it had.
    pub fn take(&self, fd: RawFd) -> Option<FileId> {
        self.entry(fd)?.swap(0, Ordering::AcqRel).checked_sub(1)
    }

    /// Iterates over the stack's descriptors from `first` to `last`.
    pub fn range(&self, first: RawFd, last: RawFd) -> impl Iterator<Item = RawFd> + '_ {
        let last = last.min(self.end.load(Ordering::Relaxed) - 1);
        (first.max(0)..=last).filter(|fd| self.get(*fd).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_range_descriptors_are_not_in_table() {
        let table = FdTable::new();
        assert_eq!(table.get(-1), None);
        assert_eq!(table.get(RawFd::MAX), None);
        assert!(!table.set(RawFd::MAX, 1));
        assert!(table.set(3, 0));
        assert_eq!(table.get(3), Some(0));
        assert_eq!(table.range(-5, RawFd::MAX).collect::<Vec<_>>(), [3]);
        assert_eq!(table.end.load(Ordering::Relaxed), 4, "iteration stops here");
        assert!(table.set(1, 0));
        assert_eq!(table.range(0, RawFd::MAX).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(table.take(3), Some(0));
        assert_eq!((table.take(3), table.get(3)), (None, None));
    }

    #[test]
    fn unused_entries_take_no_memory() {
        // 64 MiB, which every allocator maps.
        const ENTRIES: usize = 1 << 24;
        let page = rustix::param::page_size();
        let table = FdTable::with_len(ENTRIES);
        assert!(table.set(3, 0) && table.get(ENTRIES as RawFd / 2).is_none());
        let all = table.entries.as_ptr_range();
        let start = all.start.addr().next_multiple_of(page);
        let mut pages = vec![0u8; (all.end.addr() - start) / page];
        // SAFETY: asks about whole pages of the table, and writes one byte for each of them.
        let status = unsafe { libc::mincore(start as *mut _, pages.len() * page, pages.as_mut_ptr()) };
        assert_eq!(status, 0);
        let resident = pages.iter().filter(|page| **page & 1 != 0).count();
        // One huge page at most.
        assert!(resident * page <= 2 << 20, "{resident} pages");
    }
}
