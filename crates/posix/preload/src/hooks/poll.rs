//! Hooks of `poll`, `select` and their variants.
#![allow(unsafe_code)] // functions that C calls

use crate::{attach, real};
use core::ffi::c_int;
use core::mem::{MaybeUninit, offset_of};
use core::sync::atomic::{AtomicU64, Ordering};
use ginnel_posix_ops::ffi::{self, IntoC};
use ginnel_posix_ops::{Ops, SignalDeferred, Timeout, user_memory};
use libc::{fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};
use runtime::resource_limit::resource_limit;
use rustix::io::Errno;
use rustix::process::Resource;
use std::time::{Duration, Instant};

/// Number of elements that are read at a time. A longer list of `poll` is copied to allocated memory.
const SHORT_LIST: usize = 32;

/// Returns the operations if they must answer for a descriptor in the list. The kernel reports a list that
/// cannot be read.
pub(super) fn any_stack_fd(fds: *const pollfd, count: nfds_t) -> Option<&'static Ops> {
    let ops = attach::ops()?;
    let count = kernel_count(count);
    let mut part = [const { MaybeUninit::<pollfd>::uninit() }; SHORT_LIST];
    for start in (0..count).step_by(SHORT_LIST) {
        let len = SHORT_LIST.min(count - start);
        // SAFETY: any bytes are an element.
        let read = unsafe { user_memory::read_list(fds.wrapping_add(start), &mut part[..len]) };
        read.ok()?;
        // SAFETY: `len` elements were read.
        if part[..len].iter().any(|fd| ops.handles(unsafe { fd.assume_init_ref() }.fd)) {
            return Some(ops);
        }
    }
    None
}

/// Returns the number of elements that the kernel reads: the number has 32 bits in the system call.
fn kernel_count(count: nfds_t) -> usize {
    count as u32 as usize
}

/// The soft limit of descriptors, as the kernel last told it; zero if it must be asked.
static DESCRIPTOR_LIMIT: AtomicU64 = AtomicU64::new(0);

/// Must be called after the program has changed a limit.
pub(super) fn forget_descriptor_limit() {
    DESCRIPTOR_LIMIT.store(0, Ordering::Relaxed);
}

/// Returns whether a number is above the soft limit of descriptors. Asks the kernel only if the number is
/// above the limit that is known.
fn exceeds_descriptor_limit(count: usize) -> bool {
    let exceeds = |limit| count as u64 > limit;
    if !exceeds(DESCRIPTOR_LIMIT.load(Ordering::Relaxed)) {
        return false;
    }
    let limit = resource_limit(Resource::Nofile).current.unwrap_or(u64::MAX);
    DESCRIPTOR_LIMIT.store(limit, Ordering::Relaxed);
    exceeds(limit)
}

/// Implements `poll` on a list with stack sockets. As the kernel does, reads the whole list first and writes
/// only `revents`. Fails with `EINVAL` for more than `RLIMIT_NOFILE` elements, as `do_sys_poll` does; unlike
/// `do_sys_poll`, does not compare a list of up to `SHORT_LIST` elements with the limit.
///
/// # Safety
/// The list must be the argument of a call that writes to it.
unsafe fn poll_stack(
    ops: &Ops,
    fds: *mut pollfd,
    count: nfds_t,
    timeout: Timeout,
    mask: *const sigset_t,
) -> c_int {
    let count = kernel_count(count);
    let mut short = [const { MaybeUninit::<pollfd>::uninit() }; SHORT_LIST];
    if count > short.len() && exceeds_descriptor_limit(count) {
        return Err::<usize, _>(Errno::INVAL).into_c();
    }
    let mut long = (count > short.len()).then(|| {
        SignalDeferred::new(|| {
            let mut list = Vec::new();
            list.try_reserve_exact(count).map(|()| list)
        })
    });
    let place = match &mut long {
        Some(list) => match &mut **list {
            Ok(list) => &mut list.spare_capacity_mut()[..count],
            Err(_) => return Err::<usize, _>(Errno::NOMEM).into_c(),
        },
        None => &mut short[..count],
    };
    // SAFETY: any bytes are an element.
    let result = unsafe { user_memory::read_list(fds, place) }.and_then(|()| {
        // SAFETY: all elements were read.
        let copy = unsafe { core::slice::from_raw_parts_mut(place.as_mut_ptr().cast::<pollfd>(), count) };
        let ready = ops.poll(copy, timeout, ffi::signal_mask(mask)?.as_ref())?;
        for (at, fd) in copy.iter().enumerate() {
            let revents = fds.wrapping_add(at).wrapping_byte_add(offset_of!(pollfd, revents));
            // SAFETY: the caller's promise.
            unsafe { user_memory::write(revents.cast(), &fd.revents) }?;
        }
        Ok(ready)
    });
    result.into_c()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the program's arguments, unchanged.
    unsafe {
        match any_stack_fd(fds, count) {
            Some(ops) => poll_stack(ops, fds, count, Timeout::from_millis(timeout), core::ptr::null()),
            None => real::poll(fds, count, timeout),
        }
    }
}

/// Returns whether a list of `count` elements fits in a buffer of `buffer_len` bytes.
fn fits(count: nfds_t, buffer_len: size_t) -> bool {
    count as usize <= buffer_len / size_of::<pollfd>()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __poll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
    buffer_len: size_t,
) -> c_int {
    // SAFETY: the program's arguments, unchanged; libc aborts a program that claims too many elements.
    unsafe {
        match any_stack_fd(fds, count).filter(|_| fits(count, buffer_len)) {
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
    // SAFETY: the program's arguments, unchanged.
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
    // SAFETY: the program's arguments, unchanged; libc aborts a program that claims too many elements.
    unsafe {
        if any_stack_fd(fds, count).is_some() && fits(count, buffer_len) {
            return ppoll(fds, count, timeout, mask);
        }
        real::__ppoll_chk(fds, count, timeout, mask, buffer_len)
    }
}

/// Implements the system call `ppoll` on a list with stack sockets. Unlike the function of libc, it stores
/// the remaining time. Returns `None` if the kernel must be called.
///
/// # Safety
/// The arguments must be those of the system call.
pub(super) unsafe fn sys_ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *mut timespec,
    (mask, mask_len): (*const sigset_t, usize),
) -> Option<c_int> {
    let ops = any_stack_fd(fds, count)?;
    let limit = match ffi::timeout(timeout).and_then(|limit| check_mask_len(mask, mask_len).map(|()| limit)) {
        Ok(limit) => limit,
        Err(error) => return Some(Err::<usize, _>(error).into_c()),
    };
    let began = Instant::now();
    // SAFETY: the caller's promise.
    let result = unsafe { poll_stack(ops, fds, count, Timeout::after(limit), mask) };
    // SAFETY: the program's time-out.
    unsafe { store_remaining(timeout, limit, began) };
    Some(result)
}

/// Checks the length that a system call gives for a signal mask (`set_user_sigmask`).
pub(super) fn check_mask_len(mask: *const sigset_t, len: usize) -> Result<(), Errno> {
    if mask.is_null() || len == KERNEL_SIGSET_BYTES { Ok(()) } else { Err(Errno::INVAL) }
}

/// Bytes of a signal mask in system calls.
const KERNEL_SIGSET_BYTES: usize = 8;

/// Stores the time that remains of a limit, as the kernel does after it has waited (`poll_select_finish`).
/// Keeps `errno`.
///
/// # Safety
/// The time-out must be the argument of a call that writes to it.
unsafe fn store_remaining(timeout: *mut timespec, limit: Option<Duration>, began: Instant) {
    if let Some(limit) = limit.filter(|limit| !limit.is_zero()) {
        let remaining = limit.saturating_sub(began.elapsed());
        let remaining =
            timespec { tv_sec: remaining.as_secs().cast_signed(), tv_nsec: remaining.subsec_nanos().into() };
        // The kernel ignores an error, too.
        // SAFETY: the caller's promise.
        let _ = unsafe { user_memory::write(timeout, &remaining) };
    }
}

/// Number of words of an `fd_set`. Longer sets are copied to allocated memory.
const SHORT_SET: usize = size_of::<fd_set>() / size_of::<u64>();

/// The sets of a call of `select`, copied as words for `count` descriptors.
struct Sets {
    short: [[u64; SHORT_SET]; 3],
    long: Option<SignalDeferred<[Vec<u64>; 3]>>,
    is_present: [bool; 3],
    words: usize,
}

impl Sets {
    /// Reads the sets of the program, which may be null.
    fn read(count: c_int, sets: [*mut fd_set; 3]) -> Result<Self, Errno> {
        let words = usize::try_from(count).unwrap_or(0).div_ceil(64);
        let long =
            (words > SHORT_SET).then(|| SignalDeferred::new(|| core::array::from_fn(|_| vec![0; words])));
        let is_present = sets.map(|set| !set.is_null());
        let mut copies = Self { short: [[0; SHORT_SET]; 3], long, is_present, words };
        for (copy, set) in copies.words().into_iter().zip(sets) {
            if let Some(copy) = copy {
                // SAFETY: any bytes are words, and initialized words may be overwritten.
                unsafe {
                    let place = core::slice::from_raw_parts_mut(copy.as_mut_ptr().cast(), copy.len());
                    user_memory::read_list(set.cast_const().cast::<u64>(), place)?;
                }
            }
        }
        Ok(copies)
    }

    /// Returns the words of the sets that are not null.
    fn words(&mut self) -> [Option<&mut [u64]>; 3] {
        let words = self.words;
        let [a, b, c] = match &mut self.long {
            Some(long) => long.each_mut().map(|set| &mut set[..words]),
            None => self.short.each_mut().map(|set| &mut set[..words]),
        };
        let [has_a, has_b, has_c] = self.is_present;
        [has_a.then_some(a), has_b.then_some(b), has_c.then_some(c)]
    }

    /// Copies the results back to the program's sets.
    ///
    /// # Safety
    /// The sets must be the arguments of a call that writes to them.
    unsafe fn write(&mut self, sets: [*mut fd_set; 3]) -> Result<(), Errno> {
        for (copy, set) in self.words().into_iter().zip(sets) {
            if let Some(copy) = copy {
                // SAFETY: the caller's promise.
                unsafe { user_memory::write_list(set.cast::<u64>(), copy) }?;
            }
        }
        Ok(())
    }

    /// Returns whether the operations must answer for a descriptor in the sets.
    fn has_stack_fd(&mut self, ops: &Ops, count: c_int) -> bool {
        self.words().into_iter().flatten().any(|words| {
            let bits = words.iter().enumerate().flat_map(|(at, word)| {
                (0..64).filter(move |bit| word & 1 << bit != 0).map(move |bit| (at * 64 + bit) as c_int)
            });
            bits.into_iter().any(|fd| fd < count && ops.handles(fd))
        })
    }
}

/// Returns how many descriptors a call of `select` looks at. Without the stack, there are no internal
/// descriptors to leave out.
fn select_count(nfds: c_int) -> c_int {
    if attach::ops().is_some() { Ops::select_count(nfds) } else { nfds }
}

/// Returns the operations and a copy of the sets if the operations must answer for a descriptor in them. The
/// kernel reports sets that cannot be read.
fn stack_sets(count: c_int, sets: [*mut fd_set; 3]) -> Option<(&'static Ops, Sets)> {
    let ops = attach::ops()?;
    let mut copies = Sets::read(count, sets).ok()?;
    copies.has_stack_fd(ops, count).then_some((ops, copies))
}

/// Calls `select` with a copy of the program's sets.
///
/// # Safety
/// The sets must be the arguments of a call that writes to them.
unsafe fn select_stack(
    ops: &Ops,
    count: c_int,
    sets: [*mut fd_set; 3],
    mut copies: Sets,
    timeout: Timeout,
    mask: Option<&sigset_t>,
) -> Result<usize, Errno> {
    let ready = ops.select(count, copies.words(), timeout, mask)?;
    // SAFETY: the caller's promise.
    unsafe { copies.write(sets) }?;
    Ok(ready)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    except: *mut fd_set,
    timeout: *mut timeval,
) -> c_int {
    let (count, sets) = (select_count(count), [read, write, except]);
    let Some((ops, copies)) = stack_sets(count, sets) else {
        // SAFETY: the program's arguments, with a count that is at most the program's.
        return unsafe { real::select(count, read, write, except, timeout) };
    };
    // SAFETY: any bytes are a time.
    let time = (!timeout.is_null()).then(|| unsafe { user_memory::read(timeout) }).transpose();
    let limit = match time {
        Err(error) => return Err::<usize, _>(error).into_c(),
        Ok(None) => None,
        Ok(Some(time)) if time.tv_sec < 0 || time.tv_usec < 0 => {
            return Err::<usize, _>(Errno::INVAL).into_c();
        }
        Ok(Some(time)) => Some(
            Duration::from_secs(time.tv_sec.unsigned_abs())
                + Duration::from_micros(time.tv_usec.unsigned_abs()),
        ),
    };
    let began = Instant::now();
    // SAFETY: the program's sets.
    let result = unsafe { select_stack(ops, count, sets, copies, Timeout::after(limit), None) };
    if let Some(limit) = limit {
        // Linux stores the remaining time, and ignores an error.
        let remaining = limit.saturating_sub(began.elapsed());
        let remaining =
            timeval { tv_sec: remaining.as_secs().cast_signed(), tv_usec: remaining.subsec_micros().into() };
        // SAFETY: the program's time-out.
        let _ = unsafe { user_memory::write(timeout, &remaining) };
    }
    result.into_c()
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
    let (count, sets) = (select_count(count), [read, write, except]);
    let Some((ops, copies)) = stack_sets(count, sets) else {
        // SAFETY: the program's arguments, with a count that is at most the program's.
        return unsafe { real::pselect(count, read, write, except, timeout, mask) };
    };
    let result = ffi::timeout(timeout).and_then(|limit| {
        let mask = ffi::signal_mask(mask)?;
        // SAFETY: the program's sets.
        unsafe { select_stack(ops, count, sets, copies, Timeout::after(limit), mask.as_ref()) }
    });
    result.into_c()
}

/// Implements the system call `pselect6` on sets with stack sockets. Unlike the function of libc, it stores
/// the remaining time. Returns `None` if the kernel must be called.
///
/// # Safety
/// The arguments must be those of the system call.
pub(super) unsafe fn sys_pselect6(
    count: c_int,
    sets: [*mut fd_set; 3],
    timeout: *mut timespec,
    (mask, mask_len): (*const sigset_t, usize),
) -> Option<c_int> {
    let count = select_count(count);
    let (ops, copies) = stack_sets(count, sets)?;
    let began = Instant::now();
    let limit = match ffi::timeout(timeout).and_then(|limit| check_mask_len(mask, mask_len).map(|()| limit)) {
        Ok(limit) => limit,
        Err(error) => return Some(Err::<usize, _>(error).into_c()),
    };
    let result = ffi::signal_mask(mask).and_then(|mask| {
        // SAFETY: the caller's promise.
        unsafe { select_stack(ops, count, sets, copies, Timeout::after(limit), mask.as_ref()) }
    });
    // SAFETY: the program's time-out.
    unsafe { store_remaining(timeout, limit, began) };
    Some(result.into_c())
}

alias! {
    fn __poll = poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int;
    fn __select = select(
        count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval,
    ) -> c_int;
}
