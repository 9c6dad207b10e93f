//! Processes that come of this one.
#![allow(unsafe_code)] // functions that C calls

use crate::attach::{self, Still};
use core::cell::{Cell, RefCell};
use core::ffi::c_long;
use ginnel_posix_ops::{Forking, Ops};
use libc::pid_t;

thread_local! {
    /// The fork that this thread is in.
    static FORKING: RefCell<Option<Forking<'static>>> = const { RefCell::new(None) };
    /// The same of a program that has no use for its stack yet.
    static STILL: RefCell<Option<Still>> = const { RefCell::new(None) };
    /// A handler of a signal forks, in the middle of a call of this thread.
    static IN_A_CALL: Cell<bool> = const { Cell::new(false) };
}

/// Tells the stack of children before there are any.
pub fn watch_forks() {
    // SAFETY: the functions live as long as the program, as this library is never unloaded.
    unsafe { libc::pthread_atfork(Some(before), Some(here), Some(child)) };
}

unsafe extern "C" fn before() {
    if let Some(still) = attach::hold_still() {
        let _ = STILL.try_with(|place| place.replace(Some(still)));
    }
    let Some(ops) = attach::ops() else { return };
    if Ops::is_in_a_call() {
        // What that call changes is not whole, and no child could go on with it.
        IN_A_CALL.set(true);
        return;
    }
    let forking = ops.before_fork();
    // A thread that is at its end forks no more.
    let _ = FORKING.try_with(|place| place.replace(Some(forking)));
}

fn take() -> Option<Forking<'static>> {
    // Who was held still goes on.
    drop(STILL.try_with(RefCell::take).ok().flatten());
    FORKING.try_with(RefCell::take).ok().flatten()
}

unsafe extern "C" fn here() {
    if IN_A_CALL.replace(false) {
        return;
    }
    if let (Some(forking), Some(ops)) = (take(), attach::ops()) {
        ops.forked_here(forking);
    }
}

unsafe extern "C" fn child() {
    if IN_A_CALL.replace(false) {
        if attach::ops().is_some_and(|ops| ops.forked_in_a_call().is_err()) {
            attach::fail(&["a child that was forked in a call of its parent's could not be parted from it"]);
        }
        // It has none of the sockets: most such children become other programs, or end.
        return attach::detach();
    }
    if let (Some(forking), Some(ops)) = (take(), attach::ops())
        && ops.forked_child(forking).is_err()
    {
        // A handler may have forked while its thread waited in a call, which goes on here.
        if ops.forked_in_a_call().is_err() {
            attach::fail(&["a child could not be parted from its parent"]);
        }
        attach::detach();
        attach::say(&[
            "ginnel: the stack has no room for another process (channel.clients_max): the child has the kernel's network",
        ]);
    }
}

/// A fork by a system call, of which libc's hooks hear nothing.
pub fn forks(fork: impl FnOnce() -> c_long) -> c_long {
    // SAFETY: as libc calls them.
    unsafe { before() };
    let child_id = fork();
    // SAFETY: as above.
    unsafe { if child_id == 0 { child() } else { here() } };
    child_id
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
