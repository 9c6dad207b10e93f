//! Which descriptors of the process are the stack's. Asked by every call of the program, also by those that have nothing to do with sockets, so
//! it is one load.

use core::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use rustix::fd::RawFd;
use rustix::process::{Resource, getrlimit};

/// Where the process has no limit.
const FDS_UNLIMITED: u64 = 1 << 20;

/// Number of an open file description.
pub(crate) type FileId = u32;

/// By descriptor: the number of its open file description and one, or 0.
pub(crate) struct FdTable {
    entries: Box<[AtomicU32]>,
    /// None of the entries from here on was ever written, so whoever goes through all need not touch their memory: there may be a million of them.
    end: AtomicI32,
}

impl FdTable {
    pub fn new() -> Self {
        let limit = getrlimit(Resource::Nofile).maximum.unwrap_or(FDS_UNLIMITED).min(FDS_UNLIMITED);
        Self { entries: (0..limit).map(|_| AtomicU32::new(0)).collect(), end: AtomicI32::new(0) }
    }

    /// How many descriptors can be ours.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    fn entry(&self, fd: RawFd) -> Option<&AtomicU32> {
        self.entries.get(usize::try_from(fd).ok()?)
    }

    /// The open file description of a descriptor, if it is one of ours.
    #[inline]
    pub fn get(&self, fd: RawFd) -> Option<FileId> {
        self.entry(fd)?.load(Ordering::Acquire).checked_sub(1)
    }

    /// Notes whose descriptor it is. False if the number is beyond the table.
    pub fn set(&self, fd: RawFd, file: FileId) -> bool {
        let Some(entry) = self.entry(fd) else { return false };
        if fd >= self.end.load(Ordering::Relaxed) {
            // Before the entry: who sees that goes as far.
            self.end.fetch_max(fd + 1, Ordering::Relaxed);
        }
        entry.store(file + 1, Ordering::Release);
        true
    }

    /// It is ours no longer. Returns what it was.
    pub fn take(&self, fd: RawFd) -> Option<FileId> {
        self.entry(fd)?.swap(0, Ordering::AcqRel).checked_sub(1)
    }

    /// All descriptors that are ours, from `first` to `last`.
    pub fn range(&self, first: RawFd, last: RawFd) -> impl Iterator<Item = RawFd> + '_ {
        let last = last.min(self.end.load(Ordering::Relaxed) - 1);
        (first.max(0)..=last).filter(|fd| self.get(*fd).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_beyond_the_table_and_negative_ones_are_not_ours() {
        let table = FdTable::new();
        assert_eq!(table.get(-1), None);
        assert_eq!(table.get(RawFd::MAX), None);
        assert!(!table.set(RawFd::MAX, 1));
        assert!(table.set(3, 0));
        assert_eq!(table.get(3), Some(0));
        assert_eq!(table.range(-5, RawFd::MAX).collect::<Vec<_>>(), [3]);
        assert_eq!(table.end.load(Ordering::Relaxed), 4, "nobody looks further");
        assert!(table.set(1, 0));
        assert_eq!(table.range(0, RawFd::MAX).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(table.take(3), Some(0));
        assert_eq!((table.take(3), table.get(3)), (None, None));
    }
}
