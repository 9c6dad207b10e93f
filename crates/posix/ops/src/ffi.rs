//! Support for C callers: results with `errno`, and the structures that their arguments point to: addresses,
//! messages, times. A pointer that cannot be accessed is reported as `EFAULT` ([`user_memory`]).
#![allow(unsafe_code)] // pointers of C
#![allow(clippy::not_unsafe_ptr_arg_deref)] // reading any address returns bytes or an error

use crate::{OptionValue, SockaddrBytes, user_memory};
use core::ffi::{c_int, c_long, c_void};
use libc::{iovec, msghdr, pid_t, siginfo_t, sigset_t, size_t, sockaddr, socklen_t, ssize_t, timespec};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::time::Duration;

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

/// Sets `errno` and returns `failure`, the value by which the function reports an error.
pub fn fail_with<T>(error: Errno, failure: T) -> T {
    set_errno(error.raw_os_error());
    failure
}

/// Returns `errno` of this thread.
pub fn errno() -> Errno {
    // SAFETY: libc's variable of this thread.
    Errno::from_raw_os_error(unsafe { *libc::__errno_location() })
}

/// Sets `errno` of this thread.
pub fn set_errno(value: c_int) {
    // SAFETY: libc's variable of this thread.
    unsafe { *libc::__errno_location() = value };
}

/// Returns the total length of the program's buffers in bytes.
///
/// # Errors
/// `EFAULT`.
pub fn total_len(list: *const iovec, count: size_t) -> Result<usize, Errno> {
    let mut total = 0;
    for at in 0..count {
        // SAFETY: any bytes are an `iovec`.
        total += unsafe { user_memory::read(list.wrapping_add(at)) }?.iov_len;
    }
    Ok(total)
}

/// Bytes of the longest address (`struct sockaddr_storage`).
const SOCKADDR_BYTES_MAX: usize = 128;

/// An address that the program passed.
pub struct UserAddress {
    bytes: [u8; SOCKADDR_BYTES_MAX],
    len: usize,
}

impl UserAddress {
    /// Reads an address (`move_addr_to_kernel`).
    ///
    /// # Errors
    /// `EINVAL` if it is too long, `EFAULT`.
    #[inline]
    pub fn read(pointer: *const sockaddr, len: socklen_t) -> Result<Self, Errno> {
        let len = usize::try_from(len.cast_signed()).ok().filter(|len| *len <= SOCKADDR_BYTES_MAX);
        let len = len.ok_or(Errno::INVAL)?;
        let mut bytes = [0; SOCKADDR_BYTES_MAX];
        user_memory::read_bytes(pointer.cast(), &mut bytes[..len])?;
        Ok(Self { bytes, len })
    }

    /// Reads an address that may be absent, as that of `sendto`: a null pointer is no address. An address of
    /// length 0 is one, although an invalid one.
    ///
    /// # Errors
    /// As [`UserAddress::read`].
    #[inline]
    pub fn read_optional(pointer: *const sockaddr, len: socklen_t) -> Result<Option<Self>, Errno> {
        if pointer.is_null() {
            return Ok(None);
        }
        Self::read(pointer, len).map(Some)
    }

    /// Reads the address of a message, of which a null pointer and an address of length 0 are none. Bytes
    /// beyond the longest address are ignored (`__copy_msghdr`).
    ///
    /// # Errors
    /// `EFAULT`.
    #[inline]
    pub fn read_of_message(message: &msghdr) -> Result<Option<Self>, Errno> {
        if message.msg_name.is_null() || message.msg_namelen == 0 {
            return Ok(None);
        }
        let len = message.msg_namelen.min(SOCKADDR_BYTES_MAX as socklen_t);
        Self::read(message.msg_name.cast_const().cast(), len).map(Some)
    }

    /// Returns the bytes of the address.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Writes as much of an address as fits, and its full length, if the program wants the address.
///
/// # Errors
/// `EFAULT`, `EINVAL` if the program's length is negative.
///
/// # Safety
/// The pointers must be the arguments of a call that writes to them.
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

/// Writes as much of a value as fits, and its full length (`move_addr_to_user`).
///
/// # Errors
/// `EFAULT`, `EINVAL` if the program's length is negative.
///
/// # Safety
/// The pointers must be the arguments of a call that writes to them.
pub unsafe fn write_value(value: &[u8], to: *mut c_void, len: *mut socklen_t) -> Result<(), Errno> {
    // SAFETY: any bytes are a length.
    let given_len = unsafe { user_memory::read(len) }?;
    let room = usize::try_from(given_len.cast_signed()).map_err(|_| Errno::INVAL)?;
    // SAFETY: the caller's promise.
    unsafe {
        user_memory::write_list(to.cast(), &value[..room.min(value.len())])?;
        user_memory::write(len, &(value.len() as socklen_t))
    }
}

/// Writes the value of an option, and the length that was written or would be needed. `ask` gets the size of
/// the program's buffer in bytes, or `None` if it is negative, and returns the value.
///
/// # Errors
/// `EFAULT`, and those of `ask`.
///
/// # Safety
/// The pointers must be the arguments of a call that writes to them.
pub unsafe fn write_option(
    to: *mut c_void,
    len: *mut socklen_t,
    ask: impl FnOnce(Option<usize>) -> Result<OptionValue, Errno>,
) -> Result<(), Errno> {
    // SAFETY: any bytes are a length.
    let given_len = unsafe { user_memory::read(len) }?;
    let known = usize::try_from(given_len.cast_signed()).ok();
    let option = ask(known)?;
    // The value of a level whose protocol compares lengths as unsigned fits into every negative one.
    let room = known.unwrap_or(option.bytes().len());
    let fits = if option.count().is_some() { Ok(()) } else { option.fits(room) };
    let (value, needed) = (option.bytes(), option.bytes().len());
    let (value, stored) = if let Some(count) = option.count() {
        (value, count)
    } else if fits.is_ok() {
        (&value[..room.min(needed)], room.min(needed))
    } else {
        (&value[..0], needed)
    };
    // SAFETY: the caller's promise.
    unsafe {
        user_memory::write_list(to.cast(), value)?;
        user_memory::write(len, &(stored as socklen_t))?;
    }
    fits
}

/// Reads a message of the program, whose pointers are the program's.
///
/// # Errors
/// `EFAULT`; `EMSGSIZE` if it has too many buffers, `EINVAL` if the length of the address is negative
/// (`copy_msghdr_from_user`).
#[inline]
pub fn message(pointer: *const msghdr) -> Result<msghdr, Errno> {
    // SAFETY: any bytes are a message.
    let message = unsafe { user_memory::read(pointer) }?;
    if message.msg_namelen.cast_signed() < 0 && !message.msg_name.is_null() {
        return Err(Errno::INVAL);
    }
    if message.msg_iovlen > user_memory::UIO_MAXIOV {
        return Err(Errno::MSGSIZE);
    }
    Ok(message)
}

/// Reads a time-out; `None` is infinite.
///
/// # Errors
/// `EFAULT`, `EINVAL`.
#[inline]
pub fn timeout(pointer: *const timespec) -> Result<Option<Duration>, Errno> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: any bytes are a time.
    let time = unsafe { user_memory::read(pointer) }?;
    let seconds = u64::try_from(time.tv_sec).map_err(|_| Errno::INVAL)?;
    let nanos = u32::try_from(time.tv_nsec).ok().filter(|n| *n < 1_000_000_000).ok_or(Errno::INVAL)?;
    Ok(Some(Duration::new(seconds, nanos)))
}

/// Returns the process that sent a signal by `kill`, `tgkill` or `sigqueue`; `None` for any other signal.
pub fn sender_of(signal: &siginfo_t) -> Option<pid_t> {
    let is_sent = matches!(signal.si_code, libc::SI_USER | libc::SI_TKILL | libc::SI_QUEUE);
    // SAFETY: all bytes of the structure are initialized, and any bytes are a number.
    is_sent.then(|| unsafe { signal.si_pid() })
}

/// Returns the process group of a process, or of the calling one for 0; `None` if there is no such process. A
/// group that a process outside this PID namespace created is 0 (pid_namespaces(7)).
pub fn process_group(pid: pid_t) -> Option<pid_t> {
    // SAFETY: the call takes no pointer.
    Some(unsafe { libc::getpgid(pid) }).filter(|group| *group >= 0)
}

/// Returns the session of the calling process, or 0 if a process outside this PID namespace created it
/// (pid_namespaces(7)).
pub fn session() -> pid_t {
    // SAFETY: the call takes no pointer, and cannot fail for the calling process.
    unsafe { libc::getsid(0) }
}

/// Returns a child of the calling thread that has ended and that nobody has waited for, and leaves it so.
/// Processes that lose their parent become children of the first thread of process 1 (or of the next child
/// subreaper).
pub fn ended_child() -> Option<pid_t> {
    // SAFETY: an all-zero structure is valid, and lives through the call.
    let mut child: siginfo_t = unsafe { core::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WNOTHREAD;
    // SAFETY: as above.
    let result = unsafe { libc::waitid(libc::P_ALL, 0, &raw mut child, options) };
    // SAFETY: all bytes of the structure are initialized, and any bytes are a number.
    Some(unsafe { child.si_pid() }).filter(|pid| result == 0 && *pid != 0)
}

/// Tries to map a file as the dynamic loader maps a library.
///
/// # Errors
/// `EPERM`: its file system is mounted with `noexec`. `EACCES`.
pub fn map_executable(file: impl rustix::fd::AsFd) -> Result<(), Errno> {
    let (bytes, protection) = (1, ProtFlags::READ | ProtFlags::EXEC);
    // SAFETY: a new mapping, to which nothing refers.
    let base = unsafe { mmap(core::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE, file, 0) }?;
    // SAFETY: the mapping from above.
    unsafe { munmap(base, bytes) }
}

/// Reads a signal mask of the program, of which only the kernel's part is used.
///
/// # Errors
/// `EFAULT`.
#[inline]
pub fn signal_mask(pointer: *const sigset_t) -> Result<Option<sigset_t>, Errno> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: any bytes are a part of a set.
    let signals = unsafe { user_memory::read(pointer.cast::<u64>()) }?;
    // SAFETY: an all-zero set is valid and empty.
    let mut mask: sigset_t = unsafe { core::mem::zeroed() };
    crate::syscall::set_kernel_sigset(&mut mask, signals);
    Ok(Some(mask))
}
