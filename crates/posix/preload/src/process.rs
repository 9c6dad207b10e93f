//! Processes that come of this one.
#![allow(unsafe_code)] // functions that C calls

use crate::attach;
use core::cell::RefCell;
use ginnel_posix_ops::Forking;
use libc::pid_t;

thread_local! {
    /// The fork that this thread is in.
    static FORKING: RefCell<Option<Forking<'static>>> = const { RefCell::new(None) };
}

/// Tells the stack of children before there are any.
pub fn watch_forks() {
    // SAFETY: the functions live as long as the program, as this library is never unloaded.
    unsafe { libc::pthread_atfork(Some(before), Some(here), Some(child)) };
}

unsafe extern "C" fn before() {
    let Some(ops) = attach::ops() else { return };
    let forking = ops.before_fork();
    // A thread that is at its end forks no more.
    let _ = FORKING.try_with(|place| place.replace(Some(forking)));
}

fn take() -> Option<Forking<'static>> {
    FORKING.try_with(RefCell::take).ok().flatten()
}

unsafe extern "C" fn here() {
    if let (Some(ops), Some(forking)) = (attach::ops(), take()) {
        ops.forked_here(forking);
    }
}

unsafe extern "C" fn child() {
    if let (Some(ops), Some(forking)) = (attach::ops(), take())
        && ops.forked_child(forking).is_err()
    {
        attach::detach();
        attach::say(&[
            "ginnel: the stack has no room for another process (channel.clients_max): the child has the kernel's network",
        ]);
    }
}

/// A child that shared this process's memory would change its tables: it gets its own.
#[unsafe(no_mangle)]
unsafe extern "C" fn vfork() -> pid_t {
    // SAFETY: what `vfork` may be by POSIX.
    unsafe { libc::fork() }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __vfork() -> pid_t {
    // SAFETY: the same by another name.
    unsafe { vfork() }
}
