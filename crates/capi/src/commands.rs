//! Calls for other threads: they stop shards, and send them commands.
#![allow(unsafe_code)] // functions that C calls

use crate::current::with_context;
use crate::failure::{Failure, call};
use crate::memory;
use core::ffi::c_int;
use ginnel::{CommandError, Commander, StopFlag};
use rustix::io::Errno;

/// Creates a flag that stops shards.
///
/// # Safety
/// `out` is null or points to a writable variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_stop_new(out: *mut *mut StopFlag) -> c_int {
    call(|| {
        let flag = StopFlag::new().map_err(|e| Failure::about(ginnel::errno::of_io(&e), e))?;
        // SAFETY: as the caller says.
        unsafe { memory::give(out, flag) }?;
        Ok(0)
    })
}

/// Sets a flag. Does nothing but an atomic store and a write to an event descriptor, so that signal handlers
/// may call it.
///
/// # Safety
/// `stop` is null or a flag of this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_stop_set(stop: *const StopFlag) {
    // SAFETY: as the caller says.
    if let Ok(stop) = unsafe { memory::object(stop) } {
        stop.stop();
    }
}

/// Frees a flag. Shards that run with it keep it.
///
/// # Safety
/// `stop` is null or a flag of this library that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_stop_free(stop: *mut StopFlag) {
    // SAFETY: as the caller says.
    unsafe { memory::free(stop) };
}

/// Creates a sender of commands to the calling thread's shard.
///
/// # Safety
/// `out` is null or points to a writable variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_commander_new(out: *mut *mut Commander) -> c_int {
    call(|| {
        let commander = with_context(|cx| Ok(cx.commander()))?;
        // SAFETY: as the caller says.
        unsafe { memory::give(out, commander) }?;
        Ok(0)
    })
}

/// Sends a command, from any thread, and wakes the shard. Never waits.
///
/// # Safety
/// `commander` is null or a sender of this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_command(commander: *const Commander, token: u64) -> c_int {
    call(|| {
        // SAFETY: as the caller says.
        let commander = unsafe { memory::object(commander) }?;
        commander.send(Box::new(token)).map_err(|e| match e {
            CommandError::Full(_) => Failure::new(Errno::AGAIN, "the mailbox of the shard is full"),
            CommandError::Gone(_) => Failure::new(Errno::SRCH, "the shard is gone"),
        })?;
        Ok(0)
    })
}

/// Frees a sender.
///
/// # Safety
/// `commander` is null or a sender of this library that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_commander_free(commander: *mut Commander) {
    // SAFETY: as the caller says.
    unsafe { memory::free(commander) };
}
