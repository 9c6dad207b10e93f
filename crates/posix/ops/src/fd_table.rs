//! Maps the descriptors of the process to the stack's open file descriptions. Every hooked call looks up its
//! descriptor here, also calls on files, so a look-up is one load.

use core::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use rustix::fd::RawFd;
use rustix::process::{Resource, getrlimit};

/// Size of the table if `RLIMIT_NOFILE` is unlimited.
const FDS_UNLIMITED: u64 = 1 << 20;

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
    /// Creates a table for all descriptors that the hard limit of `RLIMIT_NOFILE` permits.
    pub fn new() -> Self {
        let limit = getrlimit(Resource::Nofile).maximum.unwrap_or(FDS_UNLIMITED).min(FDS_UNLIMITED);
        Self { entries: (0..limit).map(|_| AtomicU32::new(0)).collect(), end: AtomicI32::new(0) }
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
}
