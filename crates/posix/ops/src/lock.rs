//! The lock of a process's sockets, and the deferral of signal handlers: a handler that interrupts the thread
//! that holds the lock is deferred until the lock is released (`signal_handlers`). So handlers run only where
//! they would run around a system call: before it, after it, or while it sleeps.
//!
//! Handlers that were installed without the library's hooks cannot be deferred. Such a handler may call
//! socket functions (signal-safety(7)), and must not wait for a lock that its own thread holds or is about to
//! take: the call fails with `EAGAIN`, as on a non-blocking socket that has nothing at the moment; a `close`
//! is deferred until the interrupted call releases the lock.

use crate::isolation::Isolation;
use crate::owned_mutex::{OwnedMutex, OwnedMutexGuard};
use crate::process::ProcessState;
use crate::signal::SignalSet;
use crate::{Ops, syscall, urgent};
use core::cell::Cell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, AtomicI32, Ordering, compiler_fence};
use ginnel::broker::Attachment;
use rustix::fd::{AsRawFd, RawFd};
use rustix::io::Errno;
use std::sync::Arc;

/// How many closes handlers may request during one call.
const DEFERRED_CLOSES_MAX: usize = 16;
/// Marks an unused slot.
const NO_FD: i32 = -1;

/// The relation of a thread to the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LockState {
    Unlocked,
    /// The thread holds the lock, waits for it, or has just released it.
    Held,
    /// The thread holds the lock and is about to execute another program. That program would inherit a signal
    /// mask with the deferred signals blocked, so handlers run at once.
    HeldForExec,
}

/// State of a thread, which handlers that interrupt the thread read and write, too.
struct ThreadState {
    lock_state: Cell<LockState>,
    /// Work is pending for when the thread releases the lock: a descriptor to close, a `SIGURG` to send, or a
    /// deferred signal to deliver.
    has_deferred_work: Cell<bool>,
    /// Nesting depth of signal-deferred sections.
    defer_depth: Cell<u32>,
    /// A signal was deferred; `program_mask` holds the signal mask of the thread at that time.
    has_deferred_signal: Cell<bool>,
    program_mask: Cell<SignalSet>,
    /// Signals whose handlers ran since the current call began to wait.
    handlers_ran: Cell<SignalSet>,
    /// A deferrable handler began since the thread began to sleep on the kernel's instance of an epoll set.
    has_handler_begun: Cell<bool>,
}

thread_local! {
    static THREAD: ThreadState = const {
        ThreadState {
            lock_state: Cell::new(LockState::Unlocked),
            has_deferred_work: Cell::new(false),
            defer_depth: Cell::new(0),
            has_deferred_signal: Cell::new(false),
            program_mask: Cell::new(0),
            handlers_ran: Cell::new(0),
            has_handler_begun: Cell::new(false),
        }
    };
}

/// Runs a closure as a signal-deferred section: handlers run before or after it, not inside.
fn with_signals_deferred<T>(run: impl FnOnce() -> T) -> T {
    THREAD.with(|thread| thread.defer_depth.set(thread.defer_depth.get() + 1));
    compiler_fence(Ordering::SeqCst);
    let result = run();
    compiler_fence(Ordering::SeqCst);
    THREAD.with(|thread| thread.defer_depth.set(thread.defer_depth.get() - 1));
    compiler_fence(Ordering::SeqCst);
    deliver();
    result
}

/// A value that is created and dropped in signal-deferred sections, such as heap memory that is used while
/// the lock is not held. A handler that interrupted the allocator and left by `siglongjmp` would leave the
/// allocator locked.
pub struct SignalDeferred<T>(Option<T>);

impl<T> SignalDeferred<T> {
    /// Creates the value with signals deferred.
    pub fn new(make: impl FnOnce() -> T) -> Self {
        Self(Some(with_signals_deferred(make)))
    }

    /// Passes the value to `take` with signals deferred.
    pub(crate) fn drop_with(mut self, take: impl FnOnce(T)) {
        with_signals_deferred(|| self.0.take().map(take));
    }
}

impl<T> Deref for SignalDeferred<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("the value is present until it is dropped")
    }
}

impl<T> DerefMut for SignalDeferred<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("the value is present until it is dropped")
    }
}

impl<T> Drop for SignalDeferred<T> {
    fn drop(&mut self) {
        with_signals_deferred(|| self.0 = None);
    }
}

/// Set if the program's seccomp filter may not admit the system calls that deferral needs.
static DEFERRAL_DISABLED: AtomicBool = AtomicBool::new(false);

/// Stops deferring signals, because the program restricts its system calls. The filter admits the library's
/// own calls, but a sandboxed program should not be allowed to send signals on the library's account.
pub(crate) fn disable_deferral() {
    DEFERRAL_DISABLED.store(true, Ordering::Relaxed);
}

/// Returns whether a signal that arrives now must be deferred.
pub(crate) fn defers_signals() -> bool {
    THREAD.with(|thread| thread.lock_state.get() == LockState::Held || thread.defer_depth.get() > 0)
        && !DEFERRAL_DISABLED.load(Ordering::Relaxed)
}

/// Records that a signal was deferred in a thread with the signal mask `blocked`. The thread now blocks all
/// signals.
pub(crate) fn note_deferred(blocked: SignalSet) {
    THREAD.with(|thread| {
        // If several signals arrive at once, the last handler reports first, with a mask that includes the
        // signals of the others: the intersection is the program's mask. A signal that arrives although it is
        // blocked, as if it were a fault, finds all signals blocked.
        let previous =
            if thread.has_deferred_signal.replace(true) { thread.program_mask.get() } else { SignalSet::MAX };
        thread.program_mask.set(previous & blocked);
        thread.has_deferred_work.set(true);
    });
}

/// Delivers deferred signals by restoring the signal mask.
#[cold]
fn deliver() {
    let is_between =
        THREAD.with(|thread| thread.lock_state.get() != LockState::Held && thread.defer_depth.get() == 0);
    if is_between
        && let Some(blocked) = THREAD
            .with(|thread| thread.has_deferred_signal.replace(false).then_some(thread.program_mask.get()))
    {
        syscall::set_signal_mask(blocked);
    }
}

/// Returns the signals that the program has blocked in this thread, without those that only deferral blocks.
pub(crate) fn blocked_signals() -> Result<SignalSet, Errno> {
    let now = syscall::blocked_signals()?;
    Ok(THREAD.with(|thread| if thread.has_deferred_signal.get() { thread.program_mask.get() } else { now }))
}

/// Sets the record of handlers that ran.
pub(crate) fn set_handlers_ran(signals: SignalSet) {
    THREAD.with(|thread| thread.handlers_ran.set(signals));
}

/// Returns the signals whose handlers ran in this thread since the record was cleared.
pub(crate) fn handlers_ran() -> SignalSet {
    THREAD.with(|thread| thread.handlers_ran.get())
}

/// Records whether a handler that the library has hooked began since the sleep began. Returns what was
/// recorded.
pub(crate) fn set_handler_begun(has_begun: bool) -> bool {
    THREAD.with(|thread| thread.has_handler_begun.replace(has_begun))
}

/// Returns whether such a handler began. When it returns, its signal is in [`handlers_ran`].
pub(crate) fn has_handler_begun() -> bool {
    THREAD.with(|thread| thread.has_handler_begun.get())
}

/// Returns a pointer to that record, valid as long as the thread lives.
pub(crate) fn handlers_ran_ptr() -> *const SignalSet {
    THREAD.with(|thread| thread.handlers_ran.as_ptr().cast_const())
}

/// Clears the record. Must be called while signals are deferred.
pub(crate) fn clear_handlers_ran() {
    set_handlers_ran(0);
}

/// The lock, and what handlers must reach without it.
pub(crate) struct ProcessLock {
    state: OwnedMutex<ProcessState>,
    /// Descriptors that handlers asked to close, or [`NO_FD`].
    deferred_closes: [AtomicI32; DEFERRED_CLOSES_MAX],
    deferred: Arc<DeferredWork>,
    isolation: Arc<Isolation>,
}

impl ProcessLock {
    pub fn new(state: ProcessState) -> Self {
        let (deferred, isolation) = (state.deferred.clone(), state.isolation.clone());
        let deferred_closes = [const { AtomicI32::new(NO_FD) }; DEFERRED_CLOSES_MAX];
        Self { state: OwnedMutex::new(state), deferred_closes, deferred, isolation }
    }
}

/// Owners of sockets to which `SIGURG` is deferred at a time. A signal for a further one is sent at once.
const SIGURG_OWNERS_MAX: usize = 4;

/// Work to do when the lock is released.
#[derive(Debug, Default)]
pub(crate) struct DeferredWork {
    /// The processes and process groups to which `SIGURG` must be sent (`F_SETOWN`); 0 for none.
    sigurg_owners: [AtomicI32; SIGURG_OWNERS_MAX],
}

impl DeferredWork {
    /// Defers a `SIGURG` until the lock is released, because its handler is likely to read. Returns false if
    /// signals for [`SIGURG_OWNERS_MAX`] others are deferred.
    #[cold]
    pub fn defer_sigurg(&self, owner: i32) -> bool {
        note_deferred_work();
        self.sigurg_owners.iter().any(|slot| {
            slot.load(Ordering::Relaxed) == owner
                || slot.compare_exchange(0, owner, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        })
    }
}

fn note_deferred_work() {
    THREAD.with(|thread| thread.has_deferred_work.set(true));
}

/// Grants access to the state while the lock is held.
pub(crate) struct LockGuard<'a> {
    // Fields are dropped in this order: the mutex is released, then handlers may take it, then deferred work
    // is done.
    state: OwnedMutexGuard<'a, ProcessState>,
    _call: CallGuard<'a>,
}

struct CallGuard<'a>(&'a Ops);

/// Keeps other threads from making calls while it lives.
pub struct OtherCalls<'a> {
    _state: OwnedMutexGuard<'a, ProcessState>,
}

/// Enters the critical section. Returns false in a handler that interrupted this thread inside of it.
#[inline]
fn enter() -> bool {
    let entered = THREAD.with(|thread| {
        let enters = thread.lock_state.get() == LockState::Unlocked;
        if enters {
            thread.lock_state.set(LockState::Held);
        }
        enters
    });
    // Handlers that run from here on see the new state.
    compiler_fence(Ordering::SeqCst);
    entered
}

/// Leaves the critical section. Returns whether work was deferred.
#[inline]
fn leave() -> bool {
    compiler_fence(Ordering::SeqCst);
    THREAD.with(|thread| {
        thread.lock_state.set(LockState::Unlocked);
        // Handlers that run from here on defer nothing.
        compiler_fence(Ordering::SeqCst);
        thread.has_deferred_work.get()
    })
}

impl Drop for CallGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        if leave() {
            self.0.run_deferred_work();
        }
    }
}

impl Deref for LockGuard<'_> {
    type Target = ProcessState;

    #[inline]
    fn deref(&self) -> &ProcessState {
        &self.state
    }
}

impl DerefMut for LockGuard<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut ProcessState {
        &mut self.state
    }
}

impl Ops {
    /// Takes the lock.
    ///
    /// # Errors
    /// `EAGAIN` in a handler that interrupted this thread inside the critical section and could not be
    /// deferred.
    #[inline]
    pub(crate) fn lock(&self) -> Result<LockGuard<'_>, Errno> {
        if !enter() {
            return Err(Errno::AGAIN);
        }
        let call = CallGuard(self);
        Ok(LockGuard { state: self.lock.state.lock(), _call: call })
    }

    /// Takes the lock where the caller cannot fail and no handler can have interrupted the thread.
    ///
    /// # Panics
    /// In a handler that interrupted this thread inside the critical section.
    pub(crate) fn lock_or_panic(&self) -> LockGuard<'_> {
        self.lock().expect("called in a handler that interrupted a call (signal-safety(7))")
    }

    /// Returns whether this thread is inside a call, which means that the caller runs in a handler that
    /// interrupted it.
    pub fn is_in_call() -> bool {
        THREAD.with(|thread| thread.lock_state.get() != LockState::Unlocked)
    }

    /// Returns the signals that the program has blocked in this thread, without those that only deferral
    /// blocks.
    ///
    /// # Errors
    /// The errors of `rt_sigprocmask`.
    pub fn blocked_signals() -> Result<SignalSet, Errno> {
        blocked_signals()
    }

    /// Delivers deferred signals and stops deferring them. Must be called by the thread that holds the lock
    /// before it executes another program, which must not start with the deferred signals blocked.
    pub(crate) fn stop_deferring_signals() {
        THREAD.with(|thread| thread.lock_state.set(LockState::HeldForExec));
        compiler_fence(Ordering::SeqCst);
        deliver();
    }

    /// Waits until no other thread is in the middle of a call, before a handler that interrupted a call of
    /// this thread forks. Otherwise the child would wait for a thread that does not exist in it. Returns
    /// `None` if this thread itself holds the lock.
    pub fn wait_for_other_calls(&self) -> Option<OtherCalls<'_>> {
        let state = &self.lock.state;
        (!state.is_held_by_this_thread()).then(|| OtherCalls { _state: state.lock() })
    }

    /// Stores the descriptors of the control connection and of the report where a handler can read them.
    pub(crate) fn note_internal_fds(&self, state: &ProcessState) {
        let connection = state.attachment.as_ref().map(Attachment::connection_fd);
        let report = state.report.as_ref().map(|report| report.file.as_raw_fd());
        self.lock.isolation.set_fds(connection, report);
    }

    /// Isolates a child that a handler forked in the middle of a call. When the handler returns, that call
    /// continues in the child, too: nothing that it does reaches the parent, the stack or other processes,
    /// and it ends as if the stack were gone.
    pub fn fork_child_in_call(&self) {
        self.lock.isolation.isolate();
    }

    /// Returns whether [`fork_child_in_call`](Self::fork_child_in_call) has isolated this process. Its call
    /// must not sleep: the descriptors on which it would sleep are the parent's, too.
    pub(crate) fn is_isolated(&self) -> bool {
        self.lock.isolation.is_isolated()
    }

    /// Defers the close of a descriptor until this thread releases the lock. Returns `None` if the thread
    /// does not hold it; `EINTR` if too many closes are deferred.
    pub(crate) fn defer_close(&self, fd: RawFd) -> Option<Result<(), Errno>> {
        if !Self::is_in_call() {
            return None;
        }
        let slot = self
            .lock
            .deferred_closes
            .iter()
            .find(|slot| slot.compare_exchange(NO_FD, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok());
        note_deferred_work();
        Some(slot.map(|_| ()).ok_or(Errno::INTR))
    }

    #[cold]
    fn run_deferred_work(&self) {
        THREAD.with(|thread| thread.has_deferred_work.set(false));
        for slot in &self.lock.deferred.sigurg_owners {
            match slot.swap(0, Ordering::Relaxed) {
                0 => {}
                owner => urgent::send_sigurg(owner),
            }
        }
        for slot in &self.lock.deferred_closes {
            let fd = slot.swap(NO_FD, Ordering::Relaxed);
            if fd != NO_FD {
                // The caller was told that the descriptor is closed.
                let _ = self.close(fd);
            }
        }
        // Comes last, because a handler may leave by a jump.
        deliver();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_enters_once() {
        assert!(enter() && !enter());
        assert!(std::thread::spawn(enter).join().unwrap());
        assert!(!leave() && enter());
        note_deferred_work();
        assert!(leave());
    }
}
