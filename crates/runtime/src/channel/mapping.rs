//! Memory files that a stack shares with clients, and their mappings.
//!
//! A file is sealed so that no process can shrink it: otherwise an access of another process would fail. Its
//! pages are allocated on first use, and are zero then.
#![allow(unsafe_code)] // maps memory that other processes write, and lends parts of it

use core::ffi::c_void;
use core::ptr::NonNull;
use ginnel_devices::memory_file;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat};
use rustix::mm::{
    MapFlags, MprotectFlags, MremapFlags, ProtFlags, mmap, mmap_anonymous, mprotect, mremap_fixed, munmap,
};
use std::io;

/// Bytes of a page.
pub(super) const PAGE: usize = 4096;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
const PROTECTION: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Returns an error about a memory file that another process sent.
pub(super) fn invalid(problem: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("channel: {problem}"))
}

/// Creates a sealed memory file of `bytes` bytes, all of them 0.
pub(super) fn create_sealed(name: &str, bytes: usize) -> io::Result<OwnedFd> {
    let file = memory_file::create(name, bytes, MemfdFlags::ALLOW_SEALING)?;
    fcntl_add_seals(&file, SEALS)?;
    Ok(file)
}

/// Returns the size of a file from another process, in bytes.
///
/// # Errors
/// Returns an error if the file can shrink.
pub(super) fn sealed_size(file: impl AsFd) -> io::Result<usize> {
    if !fcntl_get_seals(&file)?.contains(SEALS) {
        return Err(invalid("the memory file is not sealed against shrinking"));
    }
    Ok(usize::try_from(fstat(&file)?.st_size).unwrap_or(0))
}

/// A mapping of a memory file from its first byte on.
#[derive(Debug)]
pub struct SharedMapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory consists of atomics, and of bytes that `Stream` hands over between threads.
unsafe impl Send for SharedMapping {}
// SAFETY: as above.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps the first `bytes` bytes of a file that has at least that many and cannot shrink.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn new(file: impl AsFd, bytes: usize) -> io::Result<Self> {
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping, which is unmapped when the value is dropped and nothing borrows from it.
        let base = unsafe { mmap(core::ptr::null_mut(), bytes, PROTECTION, flags, file, 0)? };
        let base =
            NonNull::new(base.cast()).ok_or_else(|| io::Error::other("channel: mapped at address 0"))?;
        Ok(Self { base, bytes })
    }

    /// Maps another file of at least the same size instead.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn replace(&self, file: impl AsFd) -> io::Result<()> {
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: replaces the whole mapping of `new` by memory of the same size, so borrows of it, which
        // are atomics, stay valid.
        unsafe { mmap(self.base.as_ptr().cast(), self.bytes, PROTECTION, flags, file, 0)? };
        Ok(())
    }

    /// Replaces the mapping by a private copy of `file`, which is the file of the mapping, or without a file
    /// by private memory that is 0: later changes are invisible to other processes. Returns false if the
    /// kernel refuses the memory for a copy. Then the mapping can only be read, and
    /// [`make_page_writable`](Self::make_page_writable) must be called for each page that is written. May be
    /// called in a signal handler.
    pub fn make_private(&self, file: Option<&dyn AsFd>) -> bool {
        let (base, flags) =
            (self.base.as_ptr().cast(), MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE);
        let map = |protection| {
            // SAFETY: replaces the whole mapping of `new` by memory of the same size, so borrows of it stay
            // valid.
            unsafe {
                match file {
                    Some(file) => mmap(base, self.bytes, protection, flags, file.as_fd(), 0),
                    None => mmap_anonymous(base, self.bytes, protection, flags),
                }
            }
        };
        if map(PROTECTION).is_ok() {
            return true;
        }
        // The limits of memory count only what can be written.
        if map(ProtFlags::READ).is_err() {
            // SAFETY: as above; needs no memory.
            let _ = unsafe { mprotect(base, self.bytes, MprotectFlags::READ) };
        }
        false
    }

    /// Replaces the page at an address by a private copy that can be written. Returns false if the address is
    /// outside of the mapping, or the kernel refuses the memory. For a fault handler of a process with one
    /// thread that uses the mapping.
    pub fn make_page_writable(&self, address: usize) -> bool {
        let base = self.base.as_ptr();
        let Some(offset) = address.checked_sub(base.addr()).filter(|offset| *offset < self.bytes) else {
            return false;
        };
        let page = base.wrapping_add(offset / PAGE * PAGE).cast::<c_void>();
        // SAFETY: a new mapping.
        let map = |kind| unsafe { mmap_anonymous(core::ptr::null_mut(), PAGE, PROTECTION, kind) };
        // Shared memory does not count towards `RLIMIT_DATA`.
        let Ok(copy) = map(MapFlags::PRIVATE).or_else(|_| map(MapFlags::SHARED)) else { return false };
        // SAFETY: both pages are mapped. The copy has the bytes of the page that it replaces, so borrows of
        // the mapping stay valid.
        unsafe {
            core::ptr::copy_nonoverlapping(page.cast::<u8>(), copy.cast(), PAGE);
            let moved = mremap_fixed(copy, PAGE, PAGE, MremapFlags::MAYMOVE, page);
            if moved.is_err() {
                let _ = munmap(copy, PAGE);
            }
            moved.is_ok()
        }
    }

    /// Returns how many bytes are mapped.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the address of the byte at an offset, or after the last byte.
    #[inline]
    pub fn at(&self, offset: usize) -> NonNull<u8> {
        debug_assert!(offset <= self.bytes, "the offset is inside the mapping");
        // SAFETY: inside the mapping, or its end: callers have checked the offset.
        unsafe { self.base.add(offset) }
    }

    /// Returns `count` values of `T` at an offset.
    ///
    /// # Safety
    /// `T` consists of atomics, for which all bit patterns are valid, and is aligned at the offset.
    pub unsafe fn slice<T>(&self, offset: usize, count: usize) -> &[T] {
        assert!(offset + count * size_of::<T>() <= self.bytes, "range is inside the mapping");
        // SAFETY: inside the mapping; the caller guarantees the rest.
        unsafe { self.slice_unchecked(offset, count) }
    }

    /// Returns `count` values of `T` at an offset of a layout that the caller defines and whose bounds it has
    /// checked, so that they are not checked again for each call and packet.
    ///
    /// # Safety
    /// As for `slice`, and the values are inside the mapping.
    #[inline]
    pub unsafe fn slice_unchecked<T>(&self, offset: usize, count: usize) -> &[T] {
        debug_assert!(offset + count * size_of::<T>() <= self.bytes, "range is inside the mapping");
        debug_assert!(offset.is_multiple_of(align_of::<T>()));
        // SAFETY: inside the mapping, which lives as long as `self`, as the caller guarantees.
        unsafe { core::slice::from_raw_parts(self.base.add(offset).cast().as_ptr(), count) }
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: the whole mapping of `new`; nothing borrows from it any more.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert_eq!(unmapped, Ok(()));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use rustix::io::pwrite;

    #[test]
    fn copied_page_does_not_change_the_file() {
        let file = create_sealed("test", 3 * PAGE).unwrap();
        pwrite(&file, b"first", 0).unwrap();
        pwrite(&file, b"second", PAGE as u64).unwrap();
        let mapping = SharedMapping::new(&file, 3 * PAGE).unwrap();
        let bytes = |offset| {
            // SAFETY: inside the mapping, which nobody else writes.
            unsafe { mapping.at(offset).cast::<[u8; 5]>().read() }
        };
        let base = mapping.at(0).as_ptr().addr();
        assert!(!mapping.make_page_writable(base - 1) && !mapping.make_page_writable(base + 3 * PAGE));
        // The kernel allows only reading.
        // SAFETY: nobody writes to the mapping.
        unsafe { mprotect(mapping.base.as_ptr().cast(), mapping.bytes, MprotectFlags::READ) }.unwrap();
        assert!(mapping.make_page_writable(base + PAGE + 17));
        assert_eq!([bytes(0), bytes(PAGE)], [*b"first", *b"secon"]);
        // SAFETY: as above; the page is writable now.
        unsafe { mapping.at(PAGE).cast::<[u8; 5]>().write(*b"third") };
        pwrite(&file, b"later", PAGE as u64).unwrap();
        pwrite(&file, b"other", 0).unwrap();
        assert_eq!([bytes(0), bytes(PAGE)], [*b"other", *b"third"]);
    }
}
