//! Handlers of `fork` and its variants.
#![allow(unsafe_code)] // functions that C calls

use crate::attach::{self, AttachLock, SignalsBlocked};
use crate::vfork::{self, ExecPipe};
use core::cell::{Cell, RefCell};
use core::ffi::c_long;
use core::mem::ManuallyDrop;
use ginnel_posix_ops::{ForkGuard, Ops, OtherCalls, not_attached, write_line};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::LocalKey;

/// Is held by the thread that forks, from the last step of the preparation to the first step afterwards.
/// The holder of this lock waits for no other lock of the library.
static FORKS: Mutex<()> = Mutex::new(());

/// The time in which only this thread forks. Its signals are blocked: a handler that forks would wait for the
/// thread that it has interrupted.
struct ForkWindow {
    exec_pipe: Option<ExecPipe>,
    // Fields are dropped in this order.
    _forks: MutexGuard<'static, ()>,
    _signals_blocked: SignalsBlocked,
}

impl ForkWindow {
    fn open() -> Self {
        let signals_blocked = SignalsBlocked::new();
        // No code panics while it holds the lock.
        let forks = FORKS.lock().unwrap_or_else(PoisonError::into_inner);
        Self { exec_pipe: ExecPipe::for_vfork(), _forks: forks, _signals_blocked: signals_blocked }
    }
}

/// A value between the handlers before and after a fork of this thread. It is never dropped with the thread:
/// the registration of a destructor would allocate, and a handler that has interrupted `malloc` may fork.
type ForkSlot<T> = RefCell<ManuallyDrop<Option<T>>>;

thread_local! {
    static FORK_WINDOW: ForkSlot<ForkWindow> = const { RefCell::new(ManuallyDrop::new(None)) };
    /// The preparation of the fork that this thread is in.
    static FORK_GUARD: ForkSlot<ForkGuard<'static>> = const { RefCell::new(ManuallyDrop::new(None)) };
    /// Keeps other threads from attaching during the fork.
    static ATTACH_LOCK: ForkSlot<AttachLock> = const { RefCell::new(ManuallyDrop::new(None)) };
    /// True while a signal handler forks that has interrupted a call of this thread.
    static IN_CALL: Cell<bool> = const { Cell::new(false) };
    /// Keeps other threads out of their calls during such a fork, if the interrupted call did not do so.
    static OTHER_CALLS: ForkSlot<OtherCalls<'static>> = const { RefCell::new(ManuallyDrop::new(None)) };
}

fn put<T>(slot: &'static LocalKey<ForkSlot<T>>, value: Option<T>) {
    slot.with_borrow_mut(|slot| *slot = ManuallyDrop::new(value));
}

fn take<T>(slot: &'static LocalKey<ForkSlot<T>>) -> Option<T> {
    ManuallyDrop::into_inner(slot.take())
}

/// Registers the fork handlers.
pub fn register_atfork() {
    // SAFETY: the functions are valid as long as the program runs, because this library is never unloaded.
    unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
}

unsafe extern "C" fn prepare() {
    prepare_ops();
    put(&FORK_WINDOW, Some(ForkWindow::open()));
}

/// Keeps other threads out of the library, and prepares the child with the stack.
fn prepare_ops() {
    if let Some(attach_lock) = attach::block_attach() {
        put(&ATTACH_LOCK, Some(attach_lock));
    }
    let Some(ops) = attach::ops() else { return };
    if Ops::is_in_call() {
        // The interrupted call may have left the state inconsistent, so that no child could use it. But the
        // call must be able to continue in the child.
        put(&OTHER_CALLS, ops.wait_for_other_calls());
        IN_CALL.set(true);
        return;
    }
    put(&FORK_GUARD, Some(ops.prepare_fork()));
}

/// Lets other threads fork again, and passes the pipe of `vfork` on. Must come first after the fork; in a
/// child only [`vfork::close_inherited`] comes before.
fn close_window(continue_with: impl FnOnce(ExecPipe)) {
    if let Some(mut window) = take(&FORK_WINDOW) {
        window.exec_pipe.take().map(continue_with);
    }
}

fn take_guards() -> Option<ForkGuard<'static>> {
    // Allows other threads to attach again.
    drop(take(&ATTACH_LOCK));
    take(&FORK_GUARD)
}

unsafe extern "C" fn parent() {
    close_window(ExecPipe::continue_in_parent);
    if IN_CALL.replace(false) {
        drop(take(&OTHER_CALLS));
        return;
    }
    if let (Some(guard), Some(ops)) = (take_guards(), attach::ops()) {
        ops.fork_parent(guard);
    }
}

unsafe extern "C" fn child() {
    vfork::close_inherited();
    close_window(ExecPipe::continue_in_child);
    if IN_CALL.replace(false) {
        drop(take(&OTHER_CALLS));
        if let Some(ops) = attach::ops() {
            ops.fork_child_in_call();
        }
        // The child has none of the sockets: most such children execute another program, or exit.
        return attach::detach();
    }
    if let (Some(guard), Some(ops)) = (take_guards(), attach::ops())
        && let Err(error) = ops.fork_child(guard)
    {
        // The handler may have interrupted a blocked call, which continues in the child.
        ops.fork_child_in_call();
        attach::detach();
        let cause = attach::cause_of(&error);
        let cause = format!("cannot attach this child process to the stack: {cause}");
        not_attached::publish(&cause);
        write_line(&format!("ginnel: {cause}; the child uses the kernel's network\n"));
    }
}

/// Runs the fork handlers around a fork by system call, of which libc knows nothing.
pub fn run_fork_syscall(fork: impl FnOnce() -> c_long) -> c_long {
    // SAFETY: called as libc calls them.
    unsafe { prepare() };
    let child_id = fork();
    // SAFETY: called as libc calls them.
    unsafe { if child_id == 0 { child() } else { parent() } };
    child_id
}
