//! Hooks of `poll`, `select` and their variants.
#![allow(unsafe_code)] // functions that C calls

use crate::{attach, real};
use core::ffi::c_int;
use ginnel_posix_ops::ffi::{self, IntoC};
use ginnel_posix_ops::{Ops, Timeout};
use libc::{fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};
use rustix::io::Errno;
use std::time::{Duration, Instant};

/// Returns the operations if a descriptor in the list belongs to the stack.
///
/// # Safety
/// The list must have `count` elements.
unsafe fn any_stack_fd(fds: *const pollfd, count: nfds_t) -> Option<&'static Ops> {
    let ops = attach::ops()?;
    let count = usize::try_from(count).ok()?;
    // SAFETY: the caller's promise.
    (0..count).any(|at| ops.owns(unsafe { (*fds.add(at)).fd })).then_some(ops)
}

/// Implements `poll` on a list with stack sockets.
///
/// # Safety
/// The list must have `count` elements, and `mask` must be null or point to a mask.
unsafe fn poll_stack(
    ops: &Ops,
    fds: *mut pollfd,
    count: nfds_t,
    timeout: Timeout,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the caller's promise; the length fits in `usize`, as `any_stack_fd` has checked.
    let fds = unsafe { core::slice::from_raw_parts_mut(fds, count as usize) };
    // SAFETY: the caller's promise.
    ops.poll(fds, timeout, unsafe { mask.as_ref() }).into_c()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the program's list is as long as it says.
    unsafe {
        match any_stack_fd(fds, count) {
            Some(ops) => poll_stack(ops, fds, count, Timeout::from_millis(timeout), core::ptr::null()),
            None => real::poll(fds, count, timeout),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __poll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
    buffer_len: size_t,
) -> c_int {
    // SAFETY: the program's list has `count` elements; libc aborts a program that claims too many.
    unsafe {
        match any_stack_fd(fds, count).filter(|_| count as usize * size_of::<pollfd>() <= buffer_len) {
            Some(ops) => poll_stack(ops, fds, count, Timeout::from_millis(timeout), core::ptr::null()),
            None => real::__poll_chk(fds, count, timeout, buffer_len),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's list is as long as it says.
    unsafe {
        let Some(ops) = any_stack_fd(fds, count) else { return real::ppoll(fds, count, timeout, mask) };
        match ffi::timeout(timeout) {
            Ok(timeout) => poll_stack(ops, fds, count, Timeout::after(timeout), mask),
            Err(error) => Err::<usize, _>(error).into_c(),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __ppoll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    buffer_len: size_t,
) -> c_int {
    // SAFETY: the program's list has `count` elements; libc aborts a program that claims too many.
    unsafe {
        if any_stack_fd(fds, count).is_some() && count as usize * size_of::<pollfd>() <= buffer_len {
            return ppoll(fds, count, timeout, mask);
        }
        real::__ppoll_chk(fds, count, timeout, mask, buffer_len)
    }
}

/// Returns a set of `select` as words for `count` descriptors.
unsafe fn words<'a>(set: *mut fd_set, count: c_int) -> Option<&'a mut [u64]> {
    let words = usize::try_from(count).unwrap_or(0).div_ceil(64);
    // SAFETY: the program's sets have `count` bits, in words.
    (!set.is_null()).then(|| unsafe { core::slice::from_raw_parts_mut(set.cast(), words) })
}

/// Returns the operations if a descriptor in the sets belongs to the stack.
unsafe fn any_stack_fd_in_sets(count: c_int, sets: [*mut fd_set; 3]) -> Option<&'static Ops> {
    let ops = attach::ops()?;
    let any = sets.iter().any(|set| {
        // SAFETY: the program's sets are as long as it says.
        let Some(words) = (unsafe { words(*set, count) }) else { return false };
        let bits = words.iter().enumerate().flat_map(|(at, word)| {
            (0..64).filter(move |bit| word & 1 << bit != 0).map(move |bit| (at * 64 + bit) as c_int)
        });
        bits.into_iter().any(|fd| fd < count && ops.owns(fd))
    });
    any.then_some(ops)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    // SAFETY: the program's sets and time-out are valid or null.
    unsafe {
        let Some(ops) = any_stack_fd_in_sets(count, [read, write, except]) else {
            return real::select(count, read, write, except, timeout);
        };
        let time = timeout.as_mut();
        let limit = match &time {
            None => None,
            Some(time) if time.tv_sec < 0 || time.tv_usec < 0 => {
                return Err::<usize, _>(Errno::INVAL).into_c();
            }
            Some(time) => Some(
                Duration::from_secs(time.tv_sec.unsigned_abs())
                    + Duration::from_micros(time.tv_usec.unsigned_abs()),
            ),
        };
        let began = Instant::now();
        let sets = [words(read, count), words(write, count), words(except, count)];
        let result = ops.select(count, sets, Timeout::after(limit), None);
        if let (Some(time), Some(limit)) = (time, limit) {
            // Linux stores the remaining time.
            let remaining = limit.saturating_sub(began.elapsed());
            time.tv_sec = remaining.as_secs().cast_signed();
            time.tv_usec = remaining.subsec_micros().into();
        }
        result.into_c()
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn pselect(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's sets and time-out are valid or null.
    unsafe {
        let Some(ops) = any_stack_fd_in_sets(count, [read, write, except]) else {
            return real::pselect(count, read, write, except, timeout, mask);
        };
        let sets = [words(read, count), words(write, count), words(except, count)];
        let limit = ffi::timeout(timeout);
        limit.and_then(|limit| ops.select(count, sets, Timeout::after(limit), mask.as_ref())).into_c()
    }
}

alias! {
    fn __poll = poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int;
    fn __select = select(
        count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval,
    ) -> c_int;
}
