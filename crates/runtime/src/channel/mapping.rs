//! Memory files that a stack shares with clients, and their mappings.
//!
//! A file is sealed so that no process can shrink it: otherwise an access of another process would fail. Its
//! pages are allocated on first use, and are zero then.
#![allow(unsafe_code)] // maps memory that other processes write, and lends parts of it

use core::ptr::NonNull;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
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
    let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes as u64)?;
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
pub(super) struct SharedMapping {
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

    /// Replaces the mapping by a private copy of the file: later changes are invisible to other processes.
    /// One system call; may be called in a signal handler.
    ///
    /// # Errors
    /// Returns an error if the kernel has no memory.
    pub fn make_private(&self, file: impl AsFd) -> io::Result<()> {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: replaces the whole mapping of `new` by a copy of the same bytes, so borrows of it stay
        // valid.
        unsafe { mmap(self.base.as_ptr().cast(), self.bytes, PROTECTION, flags, file, 0)? };
        Ok(())
    }

    /// Replaces the mapping by private memory that is 0. One system call; may be called in a signal handler.
    ///
    /// # Errors
    /// Returns an error if the kernel has no memory.
    pub fn make_blank(&self) -> io::Result<()> {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: replaces the whole mapping of `new` by memory of the same size, so borrows of it, which
        // are atomics, stay valid.
        unsafe { mmap_anonymous(self.base.as_ptr().cast(), self.bytes, PROTECTION, flags)? };
        Ok(())
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
