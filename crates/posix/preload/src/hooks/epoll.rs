//! Hooks of epoll. All epoll sets of the program are the stack's, because a thread may already wait when the
//! first stack socket is added.
#![allow(unsafe_code)] // functions that C calls

use super::stack_ops;
use crate::{attach, real};
use core::ffi::c_int;
use ginnel_posix_ops::ffi::{self, IntoC};
use ginnel_posix_ops::{EpollEvent, Ops, Timeout, user_memory};
use libc::{epoll_event, sigset_t, timespec};
use rustix::io::Errno;

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_create(size: c_int) -> c_int {
    match attach::ops_or_attach() {
        Ok(Some(_)) if size <= 0 => Err::<c_int, _>(Errno::INVAL).into_c(),
        Ok(Some(ops)) => ops.epoll_create1(0).into_c(),
        // SAFETY: the program's arguments, unchanged.
        Ok(None) => unsafe { real::epoll_create(size) },
        Err(error) => Err::<c_int, _>(error).into_c(),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_create1(flags: c_int) -> c_int {
    match attach::ops_or_attach() {
        Ok(Some(ops)) => ops.epoll_create1(flags).into_c(),
        // SAFETY: the program's arguments, unchanged.
        Ok(None) => unsafe { real::epoll_create1(flags) },
        Err(error) => Err::<c_int, _>(error).into_c(),
    }
}

hook! {
    fn epoll_ctl(set: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int = |ops| {
        // SAFETY: any bytes are an event.
        let event = (op != libc::EPOLL_CTL_DEL).then(|| unsafe { user_memory::read(event) }).transpose();
        event.and_then(|event| {
            let event = event.map(|event| EpollEvent { events: event.events, data: event.u64 });
            ops.epoll_ctl(set, op, fd, event)
        })
    };
}

/// # Safety
/// `events` must be the argument of a call that writes to it.
unsafe fn wait(
    ops: &Ops,
    set: c_int,
    events: *mut epoll_event,
    max_events: c_int,
    timeout: Timeout,
    mask: *const sigset_t,
) -> c_int {
    // `EP_MAX_EVENTS`; 0 is refused.
    let limit = c_int::MAX as usize / size_of::<epoll_event>();
    let max_events = usize::try_from(max_events).ok().filter(|max| *max <= limit).unwrap_or(0);
    let checked = user_memory::check_list(events, max_events);
    let result = checked.and_then(|()| ffi::signal_mask(mask)).and_then(|mask| {
        ops.epoll_wait_with(set, max_events, timeout, mask.as_ref(), |at, event| {
            let event = epoll_event { events: event.events, u64: event.data };
            // SAFETY: the caller's promise.
            unsafe { user_memory::write(events.wrapping_add(at), &event) }
        })
    });
    result.into_c()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_wait(
    set: c_int,
    events: *mut epoll_event,
    max_events: c_int,
    timeout: c_int,
) -> c_int {
    // SAFETY: the program's buffer is as long as it says.
    unsafe {
        match stack_ops(set) {
            Some(ops) => wait(ops, set, events, max_events, Timeout::from_millis(timeout), core::ptr::null()),
            None => real::epoll_wait(set, events, max_events, timeout),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_pwait(
    set: c_int,
    events: *mut epoll_event,
    max_events: c_int,
    timeout: c_int,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's buffer is as long as it says.
    unsafe {
        match stack_ops(set) {
            Some(ops) => wait(ops, set, events, max_events, Timeout::from_millis(timeout), mask),
            None => real::epoll_pwait(set, events, max_events, timeout, mask),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn epoll_pwait2(
    set: c_int,
    events: *mut epoll_event,
    max_events: c_int,
    timeout: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: the program's buffer is as long as it says.
    unsafe {
        let Some(ops) = stack_ops(set) else {
            return real::epoll_pwait2(set, events, max_events, timeout, mask);
        };
        match ffi::timeout(timeout) {
            Ok(timeout) => wait(ops, set, events, max_events, Timeout::after(timeout), mask),
            Err(error) => Err::<usize, _>(error).into_c(),
        }
    }
}
