//! Memory that callers send from and receive into. Implementations for memory of the caller never fail; one
//! for memory of an unmodified program may find that the memory cannot be accessed.
#![allow(unsafe_code)] // copies from and to shared memory, which has no slices

use core::ops::{Deref, DerefMut};
use std::io::{IoSlice, IoSliceMut};

/// Memory of a buffer cannot be accessed (`EFAULT`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault;

/// Bytes to send.
pub trait SendBuffer {
    /// Returns the length in bytes.
    fn len(&self) -> usize;

    /// Returns whether there are no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies `len` bytes from offset `at` of this buffer to `to`.
    ///
    /// # Errors
    /// Returns an error if the buffer cannot be read. Any of the bytes may have been copied then.
    ///
    /// # Safety
    /// `to` must be writable for `len` bytes that are not in this buffer, and `at + len` at most the length
    /// of the buffer.
    unsafe fn copy_to(&self, at: usize, to: *mut u8, len: usize) -> Result<(), Fault>;
}

/// Space for received bytes.
pub trait RecvBuffer {
    /// Returns the space in bytes.
    fn len(&self) -> usize;

    /// Returns whether there is no space.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies `len` bytes from `from` to offset `at` of this buffer.
    ///
    /// # Errors
    /// Returns an error if the buffer cannot be written. Any of the bytes may have been copied then.
    ///
    /// # Safety
    /// `from` must be readable for `len` bytes that are not in this buffer, and `at + len` at most the length
    /// of the buffer.
    unsafe fn copy_from(&mut self, at: usize, from: *const u8, len: usize) -> Result<(), Fault>;
}

impl SendBuffer for [u8] {
    #[inline]
    fn len(&self) -> usize {
        self.len()
    }

    #[inline]
    unsafe fn copy_to(&self, at: usize, to: *mut u8, len: usize) -> Result<(), Fault> {
        // SAFETY: the caller's promise.
        unsafe { to.copy_from_nonoverlapping(self.as_ptr().add(at), len) };
        Ok(())
    }
}

impl RecvBuffer for [u8] {
    #[inline]
    fn len(&self) -> usize {
        self.len()
    }

    #[inline]
    unsafe fn copy_from(&mut self, at: usize, from: *const u8, len: usize) -> Result<(), Fault> {
        // SAFETY: the caller's promise.
        unsafe { from.copy_to_nonoverlapping(self.as_mut_ptr().add(at), len) };
        Ok(())
    }
}

impl SendBuffer for IoSlice<'_> {
    #[inline]
    fn len(&self) -> usize {
        self.deref().len()
    }

    #[inline]
    unsafe fn copy_to(&self, at: usize, to: *mut u8, len: usize) -> Result<(), Fault> {
        // SAFETY: the caller's promise.
        unsafe { self.deref().copy_to(at, to, len) }
    }
}

impl RecvBuffer for IoSliceMut<'_> {
    #[inline]
    fn len(&self) -> usize {
        self.deref().len()
    }

    #[inline]
    unsafe fn copy_from(&mut self, at: usize, from: *const u8, len: usize) -> Result<(), Fault> {
        // SAFETY: the caller's promise.
        unsafe { self.deref_mut().copy_from(at, from, len) }
    }
}

/// Returns the number of bytes in all buffers.
pub(super) fn total_len<B: SendBuffer>(buffers: &[B]) -> usize {
    buffers.iter().map(SendBuffer::len).sum()
}

/// Appends at most `max` bytes of the buffers to a vector.
///
/// # Errors
/// Returns an error if a buffer cannot be read; the vector is unchanged then.
pub fn gather<B: SendBuffer>(buffers: &[B], max: usize, bytes: &mut Vec<u8>) -> Result<(), Fault> {
    let start = bytes.len();
    let mut len = start;
    bytes.reserve(total_len(buffers).min(max));
    for buffer in buffers {
        let count = buffer.len().min(max - (len - start));
        bytes.reserve(len + count - bytes.len());
        // SAFETY: the vector has space for `count` bytes at `len`, and nobody else can access that space.
        unsafe { buffer.copy_to(0, bytes.as_mut_ptr().add(len), count) }?;
        len += count;
    }
    // SAFETY: the bytes up to `len` were copied.
    unsafe { bytes.set_len(len) };
    Ok(())
}

/// Copies bytes to the buffers as far as they have space. Returns how many were copied.
///
/// # Errors
/// Returns an error if a buffer cannot be written.
pub fn scatter<B: RecvBuffer>(bytes: &[u8], buffers: &mut [B]) -> Result<usize, Fault> {
    let mut rest = bytes;
    for buffer in buffers {
        let (head, tail) = rest.split_at(rest.len().min(buffer.len()));
        // SAFETY: a slice is readable, and the buffer has space for the part; the slice is borrowed, so it is
        // not in the buffer.
        unsafe { buffer.copy_from(0, head.as_ptr(), head.len()) }?;
        rest = tail;
    }
    Ok(bytes.len() - rest.len())
}
