//! Timers and kernel descriptors of the calling thread's shard, and queries about the shard.
#![allow(unsafe_code)] // functions that C calls

use crate::current::{is_callback, with_context};
use crate::failure::{Failure, STALE, call};
use crate::handles::{KernelFdHandle, TimerHandle};
use crate::{address, memory};
use core::ffi::{c_char, c_int};
use core::time::Duration;
use ginnel::{Context, Instant, Interest, KernelFd, Timer};
use libc::{sockaddr, socklen_t};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;

/// `GINNEL_FD_READ`.
pub const READ: u32 = 1;
/// `GINNEL_FD_WRITE`.
pub const WRITE: u32 = 1 << 1;
/// `GINNEL_FD_EDGES`.
pub const EDGES: u32 = 1 << 2;

/// Sets a timer that expires after `after_ns` nanoseconds; `ENOBUFS` if `shard.timers_max` timers are set.
///
/// # Safety
/// `out` is null or points to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_timer_set(after_ns: u64, token: u64, out: *mut TimerHandle) -> c_int {
    call(|| {
        memory::check_optional(out)?;
        let timer = with_context(|cx| Ok(cx.set_timer(Duration::from_nanos(after_ns), token)))?;
        // SAFETY: as the caller says.
        unsafe { give_timer(timer, out) }
    })
}

/// Gives C the handle of a timer, if `out` is not null; `ENOBUFS` if there is no timer.
///
/// # Safety
/// `out` is null or points to a variable.
unsafe fn give_timer(timer: Option<Timer>, out: *mut TimerHandle) -> Result<c_int, Failure> {
    let timer = timer.ok_or(Failure::new(Errno::NOBUFS, "shard.timers_max timers are set"))?;
    if !out.is_null() {
        // SAFETY: as the caller says.
        unsafe { memory::write(out, TimerHandle { id: timer.to_bits() }) }?;
    }
    Ok(0)
}

/// Sets a timer that expires at `at_ns` nanoseconds of `CLOCK_MONOTONIC`, without rounding.
///
/// # Safety
/// `out` is null or points to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_timer_set_exact(at_ns: u64, token: u64, out: *mut TimerHandle) -> c_int {
    call(|| {
        memory::check_optional(out)?;
        let timer = with_context(|cx| Ok(cx.set_exact_timer(Instant::from_nanos(at_ns), token)))?;
        // SAFETY: as the caller says.
        unsafe { give_timer(timer, out) }
    })
}

/// Cancels a timer; `EBADF` if it has expired or was cancelled.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_timer_cancel(timer: TimerHandle) -> c_int {
    call(|| {
        let was_set = with_context(|cx| Ok(cx.cancel_timer(Timer::from_bits(timer.id))))?;
        if was_set { Ok(0) } else { Err(STALE) }
    })
}

fn interest(bits: u32) -> Result<Interest, Failure> {
    if bits & !(READ | WRITE | EDGES) != 0 {
        return Err(Failure::new(Errno::INVAL, "an unknown interest"));
    }
    Ok(Interest { read: bits & READ != 0, write: bits & WRITE != 0, edge_triggered: bits & EDGES != 0 })
}

/// Watches a kernel descriptor.
///
/// # Safety
/// `out` is null or points to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_fd_add(
    fd: c_int,
    interests: u32,
    token: u64,
    out: *mut KernelFdHandle,
) -> c_int {
    call(|| {
        if fd < 0 {
            return Err(Failure::new(Errno::BADF, "a negative descriptor"));
        }
        let interest = interest(interests)?;
        // SAFETY: as the caller says.
        let out = unsafe { memory::object_mut(out) }?;
        // SAFETY: the number is not -1, and epoll returns EBADF if it is no descriptor.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let watched = with_context(|cx| {
            cx.register_kernel_fd(fd, interest, token)
                .map_err(|e| Failure::about(ginnel::errno::of_io(&e), format!("descriptor: {e}")))
        })?;
        out.id = watched.to_bits();
        Ok(0)
    })
}

/// Changes the interest in a kernel descriptor; `EBADF` if it is not watched.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_fd_modify(fd: KernelFdHandle, interests: u32) -> c_int {
    call(|| {
        let interest = interest(interests)?;
        with_context(|cx| {
            cx.modify_kernel_fd(KernelFd::from_bits(fd.id), interest).map_err(|e| match ginnel::errno::of_io(
                &e,
            ) {
                Errno::NOENT => STALE,
                errno => Failure::about(errno, format!("descriptor: {e}")),
            })
        })?;
        Ok(0)
    })
}

/// Stops watching a kernel descriptor.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_fd_remove(fd: KernelFdHandle) -> c_int {
    call(|| {
        with_context(|cx| Ok(cx.deregister_kernel_fd(KernelFd::from_bits(fd.id))?))?;
        Ok(0)
    })
}

/// Returns what `read` says about the shard; on a thread without a shard, a negative error number.
fn ask(read: impl FnOnce(&mut Context<'_>) -> c_int) -> c_int {
    call(|| with_context(|cx| Ok(read(cx))))
}

/// Returns the priority class of the event that is being delivered.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_class() -> c_int {
    ask(|cx| cx.event_class().into())
}

/// Returns the index of the shard.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_shard() -> c_int {
    // There are at most 64 shards.
    ask(|cx| cx.shard() as c_int)
}

/// Returns the index of the worker.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_worker() -> c_int {
    // There are at most 4,096 workers.
    ask(|cx| cx.worker() as c_int)
}

/// Returns whether the shard serves the device of a local address: 1 or 0.
///
/// # Safety
/// `len` bytes at `local` are readable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_serves(local: *const sockaddr, len: socklen_t) -> c_int {
    call(|| {
        // SAFETY: as the caller says.
        let local = unsafe { address::read(local, len) }?.ip();
        with_context(|cx| Ok(cx.serves(local).into()))
    })
}

/// Stores a random number.
///
/// # Safety
/// `number` is null or points to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_random(number: *mut u64) -> c_int {
    call(|| {
        let random = with_context(|cx| Ok(cx.random_u64()))?;
        // SAFETY: as the caller says.
        unsafe { memory::write(number, random) }?;
        Ok(0)
    })
}

/// Returns the value of a counter of the shard, TCP or the network layer; `None` if there is no such counter.
fn counter(cx: &Context<'_>, name: &str) -> Option<u64> {
    let (group, item) = name.split_once('.')?;
    let network = cx.network_stats();
    let mut entries: &mut dyn Iterator<Item = (&str, u64)> = match group {
        "shard" => &mut cx.stats().iter(),
        "tcp" => &mut cx.tcp_stats().entries(),
        "ip" => &mut network.entries(),
        "drop" => &mut cx.network_drops().entries(),
        _ => return None,
    };
    Iterator::find(&mut entries, |(name, _)| *name == item).map(|(_, value)| value)
}

/// Stores the value of a counter; `ENOENT` if there is no such counter.
///
/// # Safety
/// `name` is null or a C string; `value` is null or points to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_counter(name: *const c_char, value: *mut u64) -> c_int {
    call(|| {
        // SAFETY: as the caller says.
        let name = unsafe { memory::text(name) }?;
        let found = with_context(|cx| Ok(counter(cx, name)))?;
        let found = found.ok_or_else(|| Failure::about(Errno::NOENT, format!("no counter {name:?}")))?;
        // SAFETY: as the caller says.
        unsafe { memory::write(value, found) }?;
        Ok(0)
    })
}

/// Ends the shard after this turn.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_exit() -> c_int {
    if !is_callback() {
        return call(|| Err(Failure::new(Errno::PERM, "no callback is running: ginnel_leave ends a shard")));
    }
    ask(|cx| {
        cx.stop();
        0
    })
}

/// Stores the time of the current burst, in nanoseconds of `CLOCK_MONOTONIC`.
///
/// # Safety
/// `nanos` is null or points to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_now(nanos: *mut u64) -> c_int {
    call(|| {
        let now = with_context(|cx| Ok(cx.now().as_nanos()))?;
        // SAFETY: as the caller says.
        unsafe { memory::write(nanos, now) }?;
        Ok(0)
    })
}
