//! Support for C callers: results with `errno`, and access to the memory that their arguments point to:
//! buffers, addresses, messages. A null pointer is reported as `EFAULT`; any other invalid pointer crashes
//! the program, as in any library.
#![allow(unsafe_code)] // pointers of C

use crate::{OptionValue, SignalDeferred, SockaddrBytes};
use core::ffi::{c_int, c_long, c_void};
use libc::{iovec, msghdr, size_t, sockaddr, socklen_t, ssize_t, timespec};
use rustix::io::Errno;
use std::io::{IoSlice, IoSliceMut};
use std::time::Duration;

/// Maximum number of buffers in a call (`IOV_MAX`).
const BUFFERS_MAX: usize = 1024;

/// Converts a result to C: -1 with the error number in `errno`.
pub trait IntoC<T> {
    /// Returns the value for C.
    fn into_c(self) -> T;
}

/// Implements [`IntoC`] for results: `value type => C type: conversion`.
macro_rules! into_c {
    ($($value:ty => $c:ty: $convert:expr;)*) => { $(
        impl IntoC<$c> for Result<$value, Errno> {
            #[inline]
            fn into_c(self) -> $c {
                self.map_or_else(|error| fail_with(error, -1), $convert)
            }
        }
    )* };
}
into_c! {
    () => c_int: |()| 0;
    c_int => c_int: |value| value;
    usize => c_int: |value| c_int::try_from(value).unwrap_or(c_int::MAX);
    usize => ssize_t: usize::cast_signed;
}

impl IntoC<c_long> for c_int {
    #[inline]
    fn into_c(self) -> c_long {
        self.into()
    }
}

/// Sets `errno` and returns `minus_one`.
pub fn fail_with<T>(error: Errno, minus_one: T) -> T {
    set_errno(error.raw_os_error());
    minus_one
}

/// Sets `errno` of this thread.
pub fn set_errno(value: c_int) {
    // SAFETY: libc's variable of this thread.
    unsafe { *libc::__errno_location() = value };
}

/// Returns bytes of the program to read.
///
/// # Safety
/// `pointer` must be null or readable for `len` bytes.
#[inline]
pub unsafe fn bytes<'a>(pointer: *const c_void, len: size_t) -> Result<&'a [u8], Errno> {
    if len == 0 {
        return Ok(&[]);
    }
    if pointer.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise; like the kernel, limits the length to `MAX_RW_COUNT`.
    Ok(unsafe { core::slice::from_raw_parts(pointer.cast(), len.min(0x7fff_f000)) })
}

/// Returns bytes of the program to write.
///
/// # Safety
/// `pointer` must be null or writable for `len` bytes.
#[inline]
pub unsafe fn writable_bytes<'a>(pointer: *mut c_void, len: size_t) -> Result<&'a mut [u8], Errno> {
    if len == 0 {
        return Ok(&mut []);
    }
    if pointer.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise; like the kernel, limits the length to `MAX_RW_COUNT`.
    Ok(unsafe { core::slice::from_raw_parts_mut(pointer.cast(), len.min(0x7fff_f000)) })
}

/// Returns the total length of the program's buffers.
///
/// # Safety
/// The list must have `count` elements.
pub unsafe fn total_len(buffers: *const iovec, count: size_t) -> usize {
    // SAFETY: the caller's promise.
    (0..count).map(|at| unsafe { (*buffers.add(at)).iov_len }).sum()
}

/// Returns an address of the program.
///
/// # Safety
/// `pointer` must be null or readable for `len` bytes.
#[inline]
pub unsafe fn address<'a>(pointer: *const sockaddr, len: socklen_t) -> Result<&'a [u8], Errno> {
    if len as usize > 128 {
        return Err(Errno::INVAL);
    }
    // SAFETY: the caller's promise.
    unsafe { bytes(pointer.cast(), len as usize) }
}

/// Returns an address of the program, or `None` if it is absent.
///
/// # Safety
/// `pointer` must be null or readable for `len` bytes.
#[inline]
pub unsafe fn optional_address<'a>(
    pointer: *const sockaddr,
    len: socklen_t,
) -> Result<Option<&'a [u8]>, Errno> {
    if pointer.is_null() || len == 0 {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    unsafe { address(pointer, len) }.map(Some)
}

/// Writes as much of an address as fits, and its full length.
///
/// # Safety
/// Each pointer must be null or writable, `to` for `*len` bytes.
pub unsafe fn write_address(
    name: &SockaddrBytes,
    to: *mut sockaddr,
    len: *mut socklen_t,
) -> Result<(), Errno> {
    if to.is_null() {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { write_value(name.bytes(), to.cast(), len) }
}

/// Writes as much of a value as fits, and its full length.
///
/// # Safety
/// Each pointer must be null or writable, `to` for `*len` bytes.
pub unsafe fn write_value(value: &[u8], to: *mut c_void, len: *mut socklen_t) -> Result<(), Errno> {
    if len.is_null() || to.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    let room = usize::try_from(unsafe { *len }.cast_signed()).map_err(|_| Errno::INVAL)?;
    let count = room.min(value.len());
    // SAFETY: `to` is writable for that many bytes.
    unsafe { core::ptr::copy_nonoverlapping(value.as_ptr(), to.cast(), count) };
    // SAFETY: the caller's promise.
    unsafe { *len = value.len() as socklen_t };
    Ok(())
}

/// Writes the value of an option. `ask` gets the space in bytes and returns the value. Stores the length that
/// was written, or that would be needed.
///
/// # Safety
/// Each pointer must be null or writable, `to` for `*len` bytes.
pub unsafe fn write_option(
    to: *mut c_void,
    len: *mut socklen_t,
    ask: impl FnOnce(usize) -> Result<OptionValue, Errno>,
) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    let said = if len.is_null() { 0 } else { unsafe { *len } };
    let room = usize::try_from(said.cast_signed()).unwrap_or(0);
    let option = ask(room)?;
    let fits = option.fits(room);
    let value = if fits.is_ok() { option.bytes() } else { &[] };
    // SAFETY: the caller's promise.
    unsafe {
        write_value(value, to, len)?;
        let needed = option.bytes().len();
        *len = if fits.is_ok() { room.min(needed) } else { needed } as socklen_t;
    }
    fits
}

fn checked_count(count: usize) -> Result<usize, Errno> {
    if count <= BUFFERS_MAX { Ok(count) } else { Err(Errno::INVAL) }
}

/// Runs a closure with the buffers of a call that sends.
///
/// # Safety
/// The list must have `len` elements, and each buffer must be readable.
pub unsafe fn with_buffers<T>(
    list: *const iovec,
    len: usize,
    run: impl FnOnce(&[IoSlice<'_>]) -> Result<T, Errno>,
) -> Result<T, Errno> {
    let len = checked_count(len)?;
    // SAFETY: `IoSlice` has the layout of `iovec` (its documentation), and the list has `len` elements.
    let list = if len == 0 { &[] } else { unsafe { core::slice::from_raw_parts(list.cast(), len) } };
    run(list)
}

/// Runs a closure with the buffers of a call that receives.
///
/// # Safety
/// The list must have `len` elements, and each buffer must be writable.
pub unsafe fn with_buffers_mut<T>(
    list: *const iovec,
    len: usize,
    run: impl FnOnce(&mut [IoSliceMut<'_>]) -> Result<T, Errno>,
) -> Result<T, Errno> {
    let len = checked_count(len)?;
    if len == 0 {
        return run(&mut []);
    }
    // The closure may change the list, so it gets a copy.
    let mut copy = [const { std::mem::MaybeUninit::<iovec>::uninit() }; 16];
    let mut long = (len > copy.len()).then(|| SignalDeferred::new(|| Vec::with_capacity(len)));
    let place: *mut iovec = match &mut long {
        Some(long) => long.as_mut_ptr(),
        None => copy.as_mut_ptr().cast(),
    };
    // SAFETY: the copy has space for `len` elements, and the list has as many.
    unsafe { core::ptr::copy_nonoverlapping(list, place, len) };
    // SAFETY: `IoSliceMut` has the layout of `iovec`, and `len` elements were copied.
    run(unsafe { core::slice::from_raw_parts_mut(place.cast(), len) })
}

/// Returns a message of the program.
///
/// # Safety
/// `pointer` must be null or point to a message.
#[inline]
pub unsafe fn message<'a>(pointer: *const msghdr) -> Result<&'a msghdr, Errno> {
    // SAFETY: the caller's promise.
    unsafe { pointer.as_ref() }.ok_or(Errno::FAULT)
}

/// Returns a time-out; `None` is infinite.
///
/// # Safety
/// `pointer` must be null or point to a time.
#[inline]
pub unsafe fn timeout(pointer: *const timespec) -> Result<Option<Duration>, Errno> {
    // SAFETY: the caller's promise.
    let Some(time) = (unsafe { pointer.as_ref() }) else { return Ok(None) };
    let seconds = u64::try_from(time.tv_sec).map_err(|_| Errno::INVAL)?;
    let nanos = u32::try_from(time.tv_nsec).ok().filter(|n| *n < 1_000_000_000).ok_or(Errno::INVAL)?;
    Ok(Some(Duration::new(seconds, nanos)))
}
