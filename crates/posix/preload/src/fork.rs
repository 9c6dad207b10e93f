//! Processes that come of this one.
#![allow(unsafe_code)] // functions that C calls

use crate::attach::{self, AttachLock};
use core::cell::{Cell, RefCell};
use core::ffi::c_long;
use ginnel_posix_ops::{ForkGuard, Ops};
use libc::pid_t;

thread_local! {
    /// The fork that this thread is in.
    static FORK_GUARD: RefCell<Option<ForkGuard<'static>>> = const { RefCell::new(None) };
    /// The same of a program that has no use for its stack yet.
    static ATTACH_LOCK: RefCell<Option<AttachLock>> = const { RefCell::new(None) };
    /// A handler of a signal forks, in the middle of a call of this thread.
    static IN_CALL: Cell<bool> = const { Cell::new(false) };
}

/// Tells the stack of children before there are any.
pub fn register_atfork() {
    // SAFETY: the functions live as long as the program, as this library is never unloaded.
    unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
}

unsafe extern "C" fn prepare() {
    if let Some(still) = attach::block_attach() {
        let _ = ATTACH_LOCK.try_with(|place| place.replace(Some(still)));
    }
    let Some(ops) = attach::ops() else { return };
    if Ops::is_in_call() {
        // What that call changes is not whole, and no child could go on with it.
        IN_CALL.set(true);
        return;
    }
    let forking = ops.prepare_fork();
    // A thread that is at its end forks no more.
    let _ = FORK_GUARD.try_with(|place| place.replace(Some(forking)));
}

fn take_guards() -> Option<ForkGuard<'static>> {
    // Who was held still goes on.
    drop(ATTACH_LOCK.try_with(RefCell::take).ok().flatten());
    FORK_GUARD.try_with(RefCell::take).ok().flatten()
}

unsafe extern "C" fn parent() {
    if IN_CALL.replace(false) {
        return;
    }
    if let (Some(forking), Some(ops)) = (take_guards(), attach::ops()) {
        ops.fork_parent(forking);
    }
}

unsafe extern "C" fn child() {
    if IN_CALL.replace(false) {
        if attach::ops().is_some_and(|ops| ops.fork_child_in_call().is_err()) {
            attach::fail(&["a child that was forked in a call of its parent's could not be parted from it"]);
        }
        // It has none of the sockets: most such children become other programs, or end.
        return attach::detach();
    }
    if let (Some(forking), Some(ops)) = (take_guards(), attach::ops())
        && ops.fork_child(forking).is_err()
    {
        // A handler may have forked while its thread waited in a call, which goes on here.
        if ops.fork_child_in_call().is_err() {
            attach::fail(&["a child could not be parted from its parent"]);
        }
        attach::detach();
        attach::write_stderr(&[
            "ginnel: the stack has no room for another process (channel.clients_max): the child has the kernel's network",
        ]);
    }
}

/// A fork by a system call, of which libc's hooks hear nothing.
pub fn run_fork_syscall(fork: impl FnOnce() -> c_long) -> c_long {
    // SAFETY: as libc calls them.
    unsafe { prepare() };
    let child_id = fork();
    // SAFETY: as above.
    unsafe { if child_id == 0 { child() } else { parent() } };
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
