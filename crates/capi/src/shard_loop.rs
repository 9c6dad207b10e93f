//! Shards that a program's own loop drives. The loop waits for events, which have two levels.
#![allow(unsafe_code)] // functions that C calls

use crate::config::CConfig;
use crate::current::{self, Entered, with_shard};
use crate::event_queue::{Event, EventQueue, Level};
use crate::failure::{Failure, call};
use crate::memory;
use core::ffi::{c_int, c_uint};
use core::time::Duration;
use ginnel::config::Placement;
use ginnel::{Shard, StopFlag, clock};
use rustix::io::Errno;
use std::sync::{Mutex, PoisonError};

/// `struct ginnel_stack`: shards that no thread has entered yet.
pub struct CStack {
    shards: Mutex<Vec<Option<Shard<EventQueue>>>>,
}

/// `struct ginnel_events`.
#[repr(C)]
pub struct EventList {
    /// First of `max` events, which are written.
    pub events: *mut Event,
    /// Room, in events.
    pub max: usize,
    /// Number of events that were written.
    pub count: usize,
}

/// Opens the devices of a stack whose shards are driven by the program's threads.
///
/// # Safety
/// `config` is null or a configuration of this library; `out` is null or points to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_open(config: *const CConfig, out: *mut *mut CStack) -> c_int {
    call(|| {
        // SAFETY: as the caller says.
        let (config, out) = unsafe { (memory::object(config)?, memory::object_mut(out)?) };
        let shard = &config.config().shard;
        if shard.placement != Placement::Inline || shard.workers > 0 {
            let text = "shard.placement and shard.workers: a program with a loop of its own runs in the shard's \
                        thread";
            return Err(Failure::new(Errno::OPNOTSUPP, text));
        }
        let shards = config.shards()?.open()?.build(|_| Ok(EventQueue::default()))?;
        let shards = Mutex::new(shards.into_iter().map(Some).collect());
        // SAFETY: as the caller says.
        unsafe { memory::give(out, CStack { shards }) }?;
        Ok(0)
    })
}

/// Returns the number of shards of a stack.
///
/// # Safety
/// `stack` is null or a stack of this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_shards(stack: *const CStack) -> c_int {
    call(|| {
        // SAFETY: as the caller says.
        let stack = unsafe { memory::object(stack) }?;
        // There are at most 64.
        Ok(stack.shards.lock().unwrap_or_else(PoisonError::into_inner).len() as c_int)
    })
}

/// Gives a shard to the calling thread, and runs it until its addresses can be used.
///
/// # Safety
/// `stack` and `stop` are null or objects of this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_enter(stack: *const CStack, index: c_uint, stop: *const StopFlag) -> c_int {
    call(|| {
        // SAFETY: as the caller says.
        let stack = unsafe { memory::object(stack) }?;
        let stop = match stop.is_null() {
            true => None,
            // SAFETY: as the caller says.
            false => Some(unsafe { memory::object(stop) }?.clone()),
        };
        let mut shards = stack.shards.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = shards.get_mut(index as usize);
        let slot =
            slot.ok_or_else(|| Failure::about(Errno::INVAL, format!("the stack has no shard {index}")))?;
        let shard = slot.take();
        let shard =
            shard.ok_or_else(|| Failure::about(Errno::BUSY, format!("shard {index} was entered before")))?;
        current::enter(Box::new(Entered { shard, stop })).map_err(|(failure, entered)| {
            *slot = Some(entered.shard);
            failure
        })?;
        drop(shards);
        let started = with_shard(|entered| {
            entered.shard.run_until(entered.stop.as_ref(), None, |queue| queue.is_started())?;
            let is_started = entered.shard.handler_mut().is_started();
            if is_started { Ok(()) } else { Err(Failure::new(Errno::CANCELED, "the stop flag is set")) }
        });
        if started.is_err() {
            drop(current::take());
        }
        started.map(|()| 0)
    })
}

/// Returns the list that the caller passes with room for events; `None` for a null pointer.
///
/// # Safety
/// `list` is null or points to a list, which points to room for as many events as it says.
unsafe fn room<'a>(list: *mut EventList) -> Result<Option<(&'a mut [Event], &'a mut usize)>, Failure> {
    if list.is_null() {
        return Ok(None);
    }
    // SAFETY: as the caller says.
    let list = unsafe { memory::object_mut(list) }?;
    list.count = 0;
    if list.max == 0 || list.max > isize::MAX as usize / size_of::<Event>() {
        return Err(Failure::new(Errno::INVAL, "a list of events with no room, or with too much"));
    }
    memory::check(list.events)?;
    // SAFETY: the pointer is checked, and has that much room, as the caller says.
    let events = unsafe { core::slice::from_raw_parts_mut(list.events, list.max) };
    Ok(Some((events, &mut list.count)))
}

/// Checks that two lists are not the same one, and that their events do not overlap.
///
/// # Safety
/// Each is null or points to a list.
unsafe fn check_distinct(high: *const EventList, low: *const EventList) -> Result<(), Failure> {
    if high.is_null() || low.is_null() {
        return Ok(());
    }
    // SAFETY: as the caller says.
    let (one, other) = unsafe { (memory::object(high)?, memory::object(low)?) };
    let range = |list: &EventList| {
        let start = list.events.addr();
        (start, start.saturating_add(list.max.saturating_mul(size_of::<Event>())))
    };
    let ((start, end), (other_start, other_end)) = (range(one), range(other));
    if core::ptr::eq(high, low) || start < other_end && other_start < end {
        return Err(Failure::new(Errno::INVAL, "both lists have the same memory"));
    }
    Ok(())
}

/// Appends events of a level to a list until it is full. Returns the number of these events.
fn take(queue: &mut EventQueue, level: Level, events: &mut [Event], count: &mut usize) -> usize {
    let before = *count;
    while *count < events.len()
        && let Some(event) = queue.pop(level)
    {
        events[*count] = event;
        *count += 1;
    }
    *count - before
}

/// Drives the shard until there are events, and moves them to the lists. Returns their number, 0 after the
/// timeout. Fails once with `ECANCELED` when the stop flag is set and no event is left.
///
/// # Safety
/// `low`, and `high` unless it is null, point to lists with as much room as they say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_wait(high: *mut EventList, low: *mut EventList, timeout_ms: c_int) -> c_int {
    call(|| {
        // SAFETY: as the caller says.
        unsafe { check_distinct(high, low) }?;
        // SAFETY: as the caller says; the lists are distinct.
        let (high, low) = unsafe { (room(high)?, room(low)?) };
        let (low, low_count) = low.ok_or(Failure::new(Errno::FAULT, "no list for events"))?;
        let start = clock::now();
        // A negative timeout means none.
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        with_shard(|entered| {
            let Entered { shard, stop } = entered;
            if !shard.handler().is_full() {
                // With events that were left over, one turn is enough: it finds what is more urgent.
                let has_events = shard.handler().has_events();
                let until = if has_events { Some(start) } else { timeout.map(|timeout| start + timeout) };
                shard.run_until(stop.as_ref(), until, |queue| queue.has_events())?;
            }
            let queue = shard.handler_mut();
            let mut taken = 0;
            match high {
                Some((events, count)) => taken += take(queue, Level::High, events, count),
                None => taken += take(queue, Level::High, low, low_count),
            }
            taken += take(queue, Level::Low, low, low_count);
            if taken == 0 && stop.take_if(|stop| stop.is_set()).is_some() {
                return Err(Failure::new(Errno::CANCELED, "the stop flag is set"));
            }
            Ok(c_int::try_from(taken).unwrap_or(c_int::MAX))
        })
    })
}

/// Ends the calling thread's shard: what is queued is sent as far as the windows allow.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_leave() -> c_int {
    call(|| {
        let entered = current::take().ok_or(Failure::new(Errno::PERM, "this thread has entered no shard"))?;
        entered.shard.end()?;
        Ok(0)
    })
}

/// Frees a stack. Shards that threads have entered go on.
///
/// # Safety
/// `stack` is null or a stack of this library that was not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_close(stack: *mut CStack) {
    // SAFETY: as the caller says.
    unsafe { memory::free(stack) };
}
