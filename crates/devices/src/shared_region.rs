//! Memory that two processes share.
//!
//! The other process may write to any byte at any time. So this module lends no reference to bytes: they are
//! copied out or in, and words that both sides access (indices, flags, descriptors) are atomics.
//!
//! An access to the mapping of a file that was truncated would kill the process with SIGBUS. A memfd that is
//! sealed against shrinking cannot be truncated; any other file is rejected. Holes that the peer punches into
//! the file read as zeros.
#![allow(unsafe_code)] // maps memory, and copies from and to it

use crate::memory_file;
use ginnel_stack::prefetch::prefetch;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

/// `f_type` of the file system of memfds of ordinary pages. (A memfd of huge pages may lack a page when it is
/// accessed, which is a SIGBUS, too.)
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// A mapping of a memfd that lasts as long as this value.
#[derive(Debug)]
pub(crate) struct Region {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is not bound to a thread.
unsafe impl Send for Region {}
// SAFETY: the memory is only accessed through raw copies and atomics, which tolerate concurrent accesses.
unsafe impl Sync for Region {}

/// Reason why a region of the peer was not mapped.
#[derive(Debug)]
pub(crate) enum RegionError {
    /// The file can shrink, or is no memfd.
    NotSealed,
    /// The file has huge pages, or is on another file system.
    NotTmpfs,
    /// The file is smaller than the peer stated.
    TooSmall,
    /// The error of the kernel.
    Io(io::Error),
}

impl std::fmt::Display for RegionError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotSealed => f.write_str("region can shrink"),
            Self::NotTmpfs => f.write_str("region is not a memfd of ordinary pages"),
            Self::TooSmall => f.write_str("region is smaller than stated"),
            Self::Io(error) => write!(f, "region cannot be mapped: {error}"),
        }
    }
}

impl Region {
    /// Creates zeroed memory of `len` bytes, and the file to pass to the peer, whose size is sealed. The
    /// system shows the file by `name`.
    pub(crate) fn create(name: &str, len: usize) -> io::Result<(Self, OwnedFd)> {
        let fd = memory_file::create(name, len, MemfdFlags::ALLOW_SEALING)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Self::map(&fd, len)?, fd))
    }

    /// Maps the first `len` bytes of a peer's file.
    pub(crate) fn from_peer(fd: &OwnedFd, len: usize) -> Result<Self, RegionError> {
        // The seals are checked first, because only the kernel answers this call. A file of a FUSE file
        // system, whose server could block the other calls, has no seals.
        let seals = fcntl_get_seals(fd).map_err(|_| RegionError::NotSealed)?;
        if !seals.contains(SealFlags::SHRINK) {
            fcntl_add_seals(fd, SealFlags::SHRINK).map_err(|_| RegionError::NotSealed)?;
        }
        let system = |error: rustix::io::Errno| RegionError::Io(error.into());
        if fstatfs(fd).map_err(system)?.f_type as u64 != TMPFS_MAGIC {
            return Err(RegionError::NotTmpfs);
        }
        let size = fstat(fd).map_err(system)?.st_size;
        if usize::try_from(size).is_ok_and(|size| size >= len) && len > 0 {
            Self::map(fd, len).map_err(RegionError::Io)
        } else {
            Err(RegionError::TooSmall)
        }
    }

    fn map(fd: impl AsFd, len: usize) -> io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses does not affect existing memory.
        let base = unsafe {
            mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0)
        }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len })
    }

    /// Returns whether `len` bytes from `offset` on are inside the region.
    pub(crate) fn contains(&self, offset: usize, len: usize) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len)
    }

    /// Prefetches the cache line of an offset that will be read soon. Does nothing outside the mapping.
    pub(crate) fn prefetch(&self, offset: usize) {
        if offset < self.len {
            // SAFETY: inside the mapping; atomics tolerate concurrent writes.
            prefetch(unsafe { self.base.add(offset).cast::<AtomicU8>().as_ref() });
        }
    }

    /// Copies bytes out, once. The copy may or may not contain concurrent writes of the peer; afterwards it
    /// does not change any more. Returns false, and copies nothing, if the bytes are not all inside the
    /// region.
    #[must_use]
    pub(crate) fn copy_out(&self, offset: usize, to: &mut [u8]) -> bool {
        if !self.contains(offset, to.len()) {
            return false;
        }
        // SAFETY: the source is inside the mapping, which lives as long as `self` and cannot shrink; `to` is
        // private memory, so they do not overlap. No conclusion is drawn from a byte that the peer changes
        // during the copy: it is only moved here, and all checks read the copy.
        unsafe { std::ptr::copy_nonoverlapping(self.base.add(offset).as_ptr(), to.as_mut_ptr(), to.len()) };
        true
    }

    /// Copies bytes in. Returns false, and copies nothing, if they are not all inside the region.
    #[must_use]
    pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) -> bool {
        if !self.contains(offset, from.len()) {
            return false;
        }
        // SAFETY: as in `copy_out`, in the other direction.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.base.add(offset).as_ptr(), from.len()) };
        true
    }

    /// Copies bytes in from memory that others may write concurrently, too. Returns false, and copies
    /// nothing, if they are not all inside the region.
    #[must_use]
    pub(crate) fn copy_in_shared(&self, offset: usize, from: &[AtomicU8]) -> bool {
        if !self.contains(offset, from.len()) {
            return false;
        }
        // SAFETY: as in `copy_in`; no conclusion is drawn from a byte that changes during the copy: it is
        // only moved here. If source and destination are the same memory, as when a program received a file
        // of ours from elsewhere, the source is another mapping of it at another address.
        unsafe {
            std::ptr::copy_nonoverlapping(
                from.as_ptr().cast::<u8>(),
                self.base.add(offset).as_ptr(),
                from.len(),
            );
        }
        true
    }

    /// Returns the word at an offset that the caller has checked before.
    ///
    /// Panics if the word is outside the region or not aligned, which is a bug of the caller; a peer cannot
    /// cause it.
    pub(crate) fn u16(&self, offset: usize) -> &AtomicU16 {
        assert!(self.contains(offset, 2) && offset.is_multiple_of(2));
        // SAFETY: inside the mapping and aligned, because the mapping starts at a page; atomics tolerate
        // concurrent writes.
        unsafe { self.base.add(offset).cast::<AtomicU16>().as_ref() }
    }

    /// Returns the 32-bit word at an offset, as [`Region::u16`].
    pub(crate) fn u32(&self, offset: usize) -> &AtomicU32 {
        assert!(self.contains(offset, 4) && offset.is_multiple_of(4));
        // SAFETY: as in `u16`.
        unsafe { self.base.add(offset).cast::<AtomicU32>().as_ref() }
    }

    /// Returns the 64-bit word at an offset, as [`Region::u16`].
    pub(crate) fn u64(&self, offset: usize) -> &AtomicU64 {
        assert!(self.contains(offset, 8) && offset.is_multiple_of(8));
        // SAFETY: as in `u16`.
        unsafe { self.base.add(offset).cast::<AtomicU64>().as_ref() }
    }
}

/// Alignment and size of the header of the records that [`RecordWriter`] writes.
pub(crate) const RECORD_HEADER_BYTES: usize = 16;

/// Bounds of what [`RecordWriter::append_short`] copies. Nearly all frames with a request, a short response
/// or an acknowledgement are within.
const SHORT_BYTES_MIN: usize = 32;
pub(crate) const SHORT_BYTES_MAX: usize = 512;
/// Bytes of the page with the words that [`RecordWriter::control`] returns.
const CONTROL_BYTES: usize = 4096;

/// Returns the bytes of a record with `len` bytes after its header.
#[inline(always)]
pub(crate) const fn record_bytes(len: usize) -> usize {
    (RECORD_HEADER_BYTES + len + RECORD_HEADER_BYTES - 1) & !(RECORD_HEADER_BYTES - 1)
}

/// A region to which records are appended: a header of two words and bytes, padded to a multiple of the
/// header. They go into a window, which is checked when it is set, so that a record costs one comparison.
#[derive(Debug)]
pub(crate) struct RecordWriter {
    region: Region,
    /// Start of the bytes of the next record, whose header is before them, in the region or at its end.
    next: *mut u8,
    /// Largest value of `next`: a header's length after the end of the window. The window ends at the end of
    /// the region or earlier.
    end: *mut u8,
    /// Largest value of `next` for [`RecordWriter::append_short`]: `end`, or null if that method must not be
    /// used.
    short_end: *mut u8,
    has_short: bool,
}

// SAFETY: the pointers are into the region, which goes to the other thread with them.
unsafe impl Send for RecordWriter {}

impl RecordWriter {
    /// Creates a writer with an empty window at the start of the region, which must have a page at least. If
    /// `has_short` is false, [`RecordWriter::append_short`] refuses everything.
    pub(crate) fn new(region: Region, has_short: bool) -> Self {
        assert!(region.len >= CONTROL_BYTES, "the region has no page");
        let start = region.base.as_ptr().wrapping_add(RECORD_HEADER_BYTES);
        Self { region, next: start, end: start, short_end: std::ptr::null_mut(), has_short }
    }

    /// Returns the word at an offset in the first page.
    #[inline(always)]
    pub(crate) fn control<const AT: usize>(&self) -> &AtomicU64 {
        const { assert!(AT + 8 <= CONTROL_BYTES && AT.is_multiple_of(8)) };
        // SAFETY: inside the mapping, whose first page was checked, and aligned, because the mapping starts
        // at a page; atomics tolerate concurrent writes.
        unsafe { self.region.base.add(AT).cast::<AtomicU64>().as_ref() }
    }

    /// Writes a header at an offset.
    ///
    /// Panics if the header is not inside the region, which is a bug of the caller.
    #[inline(always)]
    pub(crate) fn write_header(&self, offset: usize, words: [u64; 2]) {
        assert!(self.region.contains(offset, RECORD_HEADER_BYTES), "the header is outside of the region");
        // SAFETY: inside the mapping. The words may be at any address.
        unsafe { self.region.base.add(offset).cast::<[u64; 2]>().write_unaligned(words) };
    }

    /// Returns the region.
    #[cfg(test)]
    fn region(&self) -> &Region {
        &self.region
    }

    /// Returns the offset of the next record.
    #[inline(always)]
    pub(crate) fn next(&self) -> usize {
        self.next.addr() - self.region.base.as_ptr().addr() - RECORD_HEADER_BYTES
    }

    /// Sets the window: the offset of the next record, and the offset that no record may exceed.
    ///
    /// Panics if the window is not inside the region, which is a bug of the caller.
    pub(crate) fn set_window(&mut self, next: usize, end: usize) {
        assert!(next <= end && end <= self.region.len, "the window is outside of the region");
        let start = self.region.base.as_ptr().wrapping_add(RECORD_HEADER_BYTES);
        (self.next, self.end) = (start.wrapping_add(next), start.wrapping_add(end));
        self.short_end = if self.has_short { self.end } else { std::ptr::null_mut() };
    }

    /// Leaves out room for a header, which the caller writes later. Returns false, and leaves out nothing, if
    /// the window has no room.
    #[inline(always)]
    pub(crate) fn skip_header(&mut self) -> bool {
        let next = self.next.wrapping_add(RECORD_HEADER_BYTES);
        let has_room = next <= self.end;
        if has_room {
            self.next = next;
        }
        has_room
    }

    /// Appends a record. Returns false, and writes nothing, if the window has no room.
    #[must_use]
    pub(crate) fn append(&mut self, words: [u64; 2], bytes: &[u8]) -> bool {
        let next = after_record(self.next, bytes.len());
        if next > self.end {
            return false;
        }
        // SAFETY: the record ends a header's length before `next` or earlier, which is inside the mapping,
        // since the window is; so is its header, which is before `self.next`. The bytes are private memory,
        // so they do not overlap with it; the words may be at any address.
        unsafe {
            self.next.sub(RECORD_HEADER_BYTES).cast::<[u64; 2]>().write_unaligned(words);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.next, bytes.len());
        }
        self.next = next;
        true
    }

    /// Appends a record with a few instructions and no call. Returns false, and appends nothing, if the
    /// window has no room, or if the length is not from [`SHORT_BYTES_MIN`] to [`SHORT_BYTES_MAX`]: use
    /// [`RecordWriter::append`]. The shortest records take the fewest instructions: most sent frames are
    /// acknowledgements.
    #[must_use]
    #[inline(always)]
    pub(crate) fn append_short(&mut self, words: [u64; 2], bytes: &[u8]) -> bool {
        // SAFETY: the positions are those of the window.
        let next = unsafe { write_short::<true>(self.next, self.short_end, words, bytes) };
        if let Some(next) = next {
            self.next = next;
        }
        next.is_some()
    }

    /// Appends records as [`RecordWriter::append_short`], up to the first one that it would refuse, or for
    /// which `record` returns `None`. Returns the items that were not appended.
    #[inline(always)]
    pub(crate) fn append_all_short<'a, T>(
        &mut self,
        items: &'a [T],
        record: impl Fn(&'a T) -> Option<([u64; 2], &'a [u8])>,
    ) -> &'a [T] {
        // In registers: the compiler must assume that a record overwrites `self`.
        let (mut next, end) = (self.next, self.short_end);
        let mut items = items.iter();
        let left = loop {
            let left = items.as_slice();
            let Some(item) = items.next() else { break left };
            let Some((words, bytes)) = record(item) else { break left };
            // SAFETY: the positions are those of the window.
            let Some(after) = (unsafe { write_short::<false>(next, end, words, bytes) }) else { break left };
            next = after;
        };
        self.next = next;
        left
    }
}

/// Returns the start of the bytes of the record that follows one with `len` bytes from `start` on. Memory has
/// that length.
#[inline(always)]
fn after_record(start: *mut u8, len: usize) -> *mut u8 {
    // Cannot overflow: a mapping ends below 2^63 (the kernel has the upper half), and memory is shorter.
    // Records are aligned, so the end of the record is rounded up instead of its length.
    start.map_addr(|start| record_bytes(start + len))
}

/// Writes a record whose bytes begin at `start`. Returns the start of the bytes of the next record, or `None`
/// if that would be after `end`, or if the length is not from [`SHORT_BYTES_MIN`] to [`SHORT_BYTES_MAX`].
///
/// # Safety
/// The positions are `next` of a [`RecordWriter`], and its `short_end`.
#[inline(always)]
unsafe fn write_short<const SHORTEST_FIRST: bool>(
    start: *mut u8,
    end: *mut u8,
    words: [u64; 2],
    bytes: &[u8],
) -> Option<*mut u8> {
    let next = after_record(start, bytes.len());
    if next > end {
        return None;
    }
    // SAFETY: as in `RecordWriter::append`. A header that is written in vain is after the last record.
    let is_copied = unsafe {
        start.sub(RECORD_HEADER_BYTES).cast::<[u64; 2]>().write_unaligned(words);
        copy_short::<SHORTEST_FIRST>(bytes.as_ptr(), start, bytes.len())
    };
    is_copied.then_some(next)
}

/// Copies `len` bytes in pieces of fixed size, for which the compiler needs neither a loop nor a call: the
/// first bytes and the last ones, which may overlap. With `SHORTEST_FIRST`, up to 64 bytes take two
/// instructions less, and more bytes two more. Returns false, and copies nothing, if the length is not from
/// [`SHORT_BYTES_MIN`] to [`SHORT_BYTES_MAX`].
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`].
#[inline(always)]
unsafe fn copy_short<const SHORTEST_FIRST: bool>(from: *const u8, to: *mut u8, len: usize) -> bool {
    /// Copies `N` bytes from a position on.
    ///
    /// # Safety
    /// As for [`std::ptr::copy_nonoverlapping`].
    #[inline(always)]
    unsafe fn piece<const N: usize>(from: *const u8, to: *mut u8, at: usize) {
        // SAFETY: the caller guarantees it.
        unsafe { std::ptr::copy_nonoverlapping(from.add(at), to.add(at), N) };
    }
    // SAFETY: each piece is within the `len` bytes.
    unsafe {
        if len <= if SHORTEST_FIRST { 64 } else { 128 } {
            if len > 64 {
                piece::<64>(from, to, 0);
                piece::<64>(from, to, len - 64);
                return true;
            }
            if len < SHORT_BYTES_MIN {
                return false;
            }
            piece::<32>(from, to, 0);
            piece::<32>(from, to, len - 32);
            return true;
        }
        if SHORTEST_FIRST && len <= 128 {
            piece::<64>(from, to, 0);
            piece::<64>(from, to, len - 64);
            return true;
        }
        if len > 256 {
            if len > SHORT_BYTES_MAX {
                return false;
            }
            piece::<128>(from, to, 128);
            if len > 384 {
                piece::<128>(from, to, 256);
            }
        }
        piece::<128>(from, to, 0);
        piece::<128>(from, to, len - 128);
        true
    }
}

/// Copies bytes that others may write concurrently to private memory of equal length, once.
///
/// Panics if the lengths differ.
pub(crate) fn copy_shared(from: &[AtomicU8], to: &mut [u8]) {
    assert_eq!(from.len(), to.len());
    // SAFETY: both have the same length, and `to` is borrowed exclusively. As in `Region::copy_out`, no
    // conclusion is drawn from a byte that changes during the copy.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr().cast(), to.as_mut_ptr(), to.len()) };
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and nothing refers to the memory any more.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use rustix::fs::{ftruncate, memfd_create};
    use std::sync::atomic::Ordering::Relaxed;

    fn memfd(len: u64, flags: MemfdFlags) -> OwnedFd {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC | flags).expect("a memfd");
        ftruncate(&fd, len).expect("its size");
        fd
    }

    #[test]
    fn two_mappings_share_memory() {
        let (ours, fd) = Region::create("ginnel-memif", 5000).expect("memory");
        let theirs = Region::from_peer(&fd, 5000).expect("sealed");
        assert!(ours.copy_in(4990, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]));
        let mut bytes = [0; 4];
        assert!(theirs.copy_out(4992, &mut bytes));
        assert_eq!(bytes, [3, 4, 5, 6]);
        theirs.u16(4992).store(0x0a0a, Relaxed);
        assert_eq!(ours.u16(4992).load(Relaxed), 0x0a0a);
    }

    #[test]
    fn accesses_outside_the_region_are_refused() {
        let (region, _fd) = Region::create("ginnel-memif", 100).expect("memory");
        let mut bytes = [7; 8];
        for offset in [93, 100, 4096, usize::MAX - 3, usize::MAX] {
            assert!(!region.copy_out(offset, &mut bytes), "{offset}");
            assert!(!region.copy_in(offset, &bytes), "{offset}");
        }
        assert_eq!(bytes, [7; 8]);
        assert!(region.copy_out(92, &mut bytes));
        assert!(region.copy_out(100, &mut []));
    }

    type Append = fn(&mut RecordWriter, &[u8]) -> bool;

    #[test]
    fn records_of_any_length_are_copied() {
        let (region, _fd) = Region::create("ginnel-mirror", 1 << 20).expect("memory");
        let mut writer = RecordWriter::new(region, true);
        for len in (0..600).chain([1500, 4096, 65_549]) {
            let bytes: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8 | 1).collect();
            // Any record, a short one, and the short ones among several.
            let short: Append = |writer, bytes| writer.append_short([1, 2], bytes);
            let all_short: Append =
                |writer, bytes| writer.append_all_short(&[bytes], |bytes| Some(([1, 2], *bytes))).is_empty();
            for append_short in [None, Some(short), Some(all_short)] {
                assert!(writer.region().copy_in(0, &vec![0; record_bytes(len) + 64]));
                writer.set_window(16, 16 + record_bytes(len));
                if let Some(append_short) = append_short {
                    let is_appended = append_short(&mut writer, &bytes);
                    assert_eq!(is_appended, (32..=512).contains(&len), "{len}");
                    if !is_appended {
                        continue;
                    }
                } else {
                    assert!(writer.append([1, 2], &bytes), "{len}");
                }
                assert!(!writer.append([3, 4], &[]) && !writer.skip_header(), "{len}: the window is full");
                let mut record = vec![0; record_bytes(len) + 48];
                assert!(writer.region().copy_out(0, &mut record));
                assert_eq!(record[16..32], [1u64.to_ne_bytes(), 2u64.to_ne_bytes()].concat(), "{len}");
                assert_eq!(record[32..32 + len], bytes, "{len}");
                assert!(record[..16].iter().chain(&record[32 + len..]).all(|byte| *byte == 0), "{len}");
            }
        }
    }

    #[test]
    fn record_outside_the_window_is_refused() {
        const BYTES: &[u8] = &[1; 100];
        let (region, _fd) = Region::create("ginnel-mirror", 4096).expect("memory");
        let mut writer = RecordWriter::new(region, true);
        assert!(!writer.append([1, 1], &[]) && !writer.skip_header(), "there is no window yet");
        assert!(!writer.append_short([1, 1], &[1; 32]));
        writer.set_window(4096 - 256, 4096);
        assert!(writer.append_short([1, 1], &[1; 100]) && !writer.append_short([1, 1], &[1; 125]));
        let record = |len: &usize| (*len > 0).then(|| ([1, 1], &BYTES[..*len]));
        writer.set_window(4096 - 256, 4096);
        assert_eq!(writer.append_all_short(&[32, 0, 32], record), [0, 32], "one has no record");
        assert_eq!(writer.append_all_short(&[100, 100, 32], record), [100, 32], "one has no room");
        assert_eq!(writer.next(), 4096 - 80);
        writer.set_window(4096 - 64, 4096);
        assert!(!writer.append([1, 1], &[1; 49]) && !writer.append_short([1, 1], &[1; 49]));
        assert!(writer.append([1, 1], &[1; 32]) && writer.skip_header());
        assert!(writer.next() == 4096 && !writer.skip_header() && !writer.append([1, 1], &[]));
        let mut panics = |call: fn(&mut RecordWriter)| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| call(&mut writer))).is_err()
        };
        assert!(panics(|writer| writer.set_window(4096, 4097)));
        assert!(panics(|writer| writer.set_window(4096, 4095)));
        assert!(panics(|writer| writer.write_header(4081, [1, 1])));
        assert!(!panics(|writer| writer.write_header(4080, [1, 1])));
        let (region, _fd) = Region::create("ginnel-mirror", 4096).expect("memory");
        let mut writer = RecordWriter::new(region, false);
        writer.set_window(0, 4096);
        assert!(!writer.append_short([1, 1], &[1; 64]) && writer.append([1, 1], &[1; 64]));
    }

    #[test]
    fn shrinkable_file_is_sealed_or_refused() {
        let open = memfd(8192, MemfdFlags::ALLOW_SEALING);
        let region = Region::from_peer(&open, 8192).expect("the region seals the file");
        assert!(ftruncate(&open, 0).is_err(), "shrinking fails");
        assert!(region.copy_in(8191, &[1]));
        let closed = memfd(8192, MemfdFlags::empty());
        assert!(matches!(Region::from_peer(&closed, 8192), Err(RegionError::NotSealed)));
        let file = OwnedFd::from(std::fs::File::open("/proc/self/exe").expect("a file"));
        assert!(matches!(Region::from_peer(&file, 100), Err(RegionError::NotSealed)));
    }

    #[test]
    fn too_small_file_is_refused() {
        let fd = memfd(4096, MemfdFlags::ALLOW_SEALING);
        for len in [0, 4097, usize::MAX] {
            assert!(matches!(Region::from_peer(&fd, len), Err(RegionError::TooSmall)), "{len}");
        }
        assert!(Region::from_peer(&fd, 4096).is_ok());
    }
}
