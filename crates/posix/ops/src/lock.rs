//! The lock around a process's sockets, and handlers of signals: those that come while this thread holds it are put off until it lets go (`handlers`), as a
//! system call does its work between handlers or sleeps in them.
//!
//! Handlers that were installed past the library cannot be put off. Such a one may itself call functions of sockets (signal-safety(7)), and must not wait for
//! what its own thread holds, or is about to: its call is `EAGAIN`, as on a socket that does not wait and has nothing at the moment; a `close` is done when the
//! interrupted call lets go.

use crate::process::ProcessState;
use crate::signal::SignalSet;
use crate::{Ops, syscall, urgent};
use core::cell::Cell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, AtomicI32, Ordering, compiler_fence};
use ginnel::broker::Attachment;
use ginnel::channel::{ChannelMapping, Client};
use rustix::fd::{AsRawFd, RawFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Closes that handlers may ask for during one call.
const DEFERRED_CLOSES_MAX: usize = 16;
/// In a place that no descriptor waits in.
const NO_FD: i32 = -1;

/// What a thread has of the sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LockState {
    Unlocked,
    /// It holds them, waits for them, or has let go of them a moment ago.
    Held,
    /// It holds them while it becomes another program, which would get the signals that are put off: handlers come as they come.
    HeldForExec,
}

/// What is known of a thread, also to handlers that interrupt it.
struct ThreadState {
    lock_state: Cell<LockState>,
    /// Something is to be done when it lets go of the sockets: a descriptor is to be closed, somebody to be told of urgent data, or a handler was put off.
    has_deferred_work: Cell<bool>,
    /// Things that it does as a whole.
    defer_depth: Cell<u32>,
    /// A handler was put off, and this is what the thread blocked then.
    has_deferred_signal: Cell<bool>,
    program_mask: Cell<SignalSet>,
    /// Signals whose handlers ran since its call began to wait.
    handlers_ran: Cell<SignalSet>,
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
        }
    };
}

/// Does something as a whole: handlers come before it or behind it.
fn with_signals_deferred<T>(run: impl FnOnce() -> T) -> T {
    THREAD.with(|here| here.defer_depth.set(here.defer_depth.get() + 1));
    compiler_fence(Ordering::SeqCst);
    let result = run();
    compiler_fence(Ordering::SeqCst);
    THREAD.with(|here| here.defer_depth.set(here.defer_depth.get() - 1));
    compiler_fence(Ordering::SeqCst);
    deliver();
    result
}

/// What is made and goes as a whole, as memory that is taken and given back while the sockets are not held: a handler in the middle of that may leave by
/// `siglongjmp`, and nobody would have any memory afterwards.
pub struct SignalDeferred<T>(Option<T>);

impl<T> SignalDeferred<T> {
    /// Made by `make`, without interruption.
    pub fn new(make: impl FnOnce() -> T) -> Self {
        Self(Some(with_signals_deferred(make)))
    }

    /// Taken by `take`, without interruption.
    pub(crate) fn drop_with(mut self, take: impl FnOnce(T)) {
        with_signals_deferred(|| self.0.take().map(take));
    }
}

impl<T> Deref for SignalDeferred<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("it has not gone")
    }
}

impl<T> DerefMut for SignalDeferred<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("it has not gone")
    }
}

impl<T> Drop for SignalDeferred<T> {
    fn drop(&mut self) {
        with_signals_deferred(|| self.0 = None);
    }
}

/// A filter of system calls may not admit what puts off handlers.
static DEFERRAL_DISABLED: AtomicBool = AtomicBool::new(false);

/// From now on handlers come as they come: the program gives up system calls. Those of the library's are admitted, but a program that has confined itself is not to send signals because of
/// the library.
pub(crate) fn disable_deferral() {
    DEFERRAL_DISABLED.store(true, Ordering::Relaxed);
}

/// Whether a handler that comes now is put off.
pub(crate) fn defers_signals() -> bool {
    THREAD.with(|here| here.lock_state.get() == LockState::Held || here.defer_depth.get() > 0)
        && !DEFERRAL_DISABLED.load(Ordering::Relaxed)
}

/// A handler was put off in a thread that blocked these signals; it blocks all from now on.
pub(crate) fn note_deferred(blocked: SignalSet) {
    THREAD.with(|here| {
        // Of several that came at once the last is told first, and what the others block as well. One that comes all the same, as if it were a fault, finds all blocked.
        let others =
            if here.has_deferred_signal.replace(true) { here.program_mask.get() } else { SignalSet::MAX };
        here.program_mask.set(others & blocked);
        here.has_deferred_work.set(true);
    });
}

/// Lets handlers come that were put off.
#[cold]
fn deliver() {
    let is_between =
        THREAD.with(|here| here.lock_state.get() != LockState::Held && here.defer_depth.get() == 0);
    if is_between
        && let Some(blocked) =
            THREAD.with(|here| here.has_deferred_signal.replace(false).then_some(here.program_mask.get()))
    {
        syscall::set_signal_mask(blocked);
    }
}

/// Signals that the program has this thread block.
pub(crate) fn blocked_signals() -> Result<SignalSet, Errno> {
    let now = syscall::blocked_signals()?;
    Ok(THREAD.with(|here| if here.has_deferred_signal.get() { here.program_mask.get() } else { now }))
}

/// The handlers of these signals ran.
pub(crate) fn set_handlers_ran(signals: SignalSet) {
    THREAD.with(|here| here.handlers_ran.set(signals));
}

/// Signals whose handlers ran in this thread since it asked to begin anew.
pub(crate) fn handlers_ran() -> SignalSet {
    THREAD.with(|here| here.handlers_ran.get())
}

/// Where that stands, as long as the thread lives.
pub(crate) fn handlers_ran_ptr() -> *const SignalSet {
    THREAD.with(|here| here.handlers_ran.as_ptr().cast_const())
}

/// Begins anew, while handlers are put off.
pub(crate) fn clear_handlers_ran() {
    set_handlers_ran(0);
}

/// The sockets, locked by one thread at a time.
pub(crate) struct ProcessLock {
    state: Mutex<ProcessState>,
    /// Descriptors that are to be closed.
    deferred_closes: [AtomicI32; DEFERRED_CLOSES_MAX],
    deferred: Arc<DeferredWork>,
    /// The connection to the stack.
    connection_fd: AtomicI32,
    memories: Vec<ChannelMapping>,
}

impl ProcessLock {
    pub fn new(lane: ProcessState) -> Self {
        let memories = lane.client.all().iter().map(Client::mapping).collect();
        let deferred = lane.deferred.clone();
        let deferred_closes = [const { AtomicI32::new(NO_FD) }; DEFERRED_CLOSES_MAX];
        Self {
            state: Mutex::new(lane),
            deferred_closes,
            deferred,
            connection_fd: AtomicI32::new(NO_FD),
            memories,
        }
    }
}

/// What is to be done when the sockets are let go of.
#[derive(Debug, Default)]
pub(crate) struct DeferredWork {
    /// Who is to be told of urgent data (`F_SETOWN`), or 0.
    sigurg_owner: AtomicI32,
}

impl DeferredWork {
    /// Leaves a signal for later: its handler is likely to read.
    #[cold]
    pub fn defer_sigurg(&self, owner: i32) {
        self.sigurg_owner.store(owner, Ordering::Relaxed);
        note_deferred_work();
    }
}

fn note_deferred_work() {
    THREAD.with(|here| here.has_deferred_work.set(true));
}

/// The sockets while they are locked.
pub(crate) struct LockGuard<'a> {
    // In this order they go: the lock is opened, then handlers may lock, then what was left is done.
    state: MutexGuard<'a, ProcessState>,
    _call: CallGuard<'a>,
}

struct CallGuard<'a>(&'a Ops);

/// False in a handler that interrupted this thread there.
#[inline]
fn enter() -> bool {
    let entered = THREAD.with(|here| {
        let enters = here.lock_state.get() == LockState::Unlocked;
        if enters {
            here.lock_state.set(LockState::Held);
        }
        enters
    });
    // A handler that comes from here on finds it so.
    compiler_fence(Ordering::SeqCst);
    entered
}

/// Whether something is to be done.
#[inline]
fn leave() -> bool {
    compiler_fence(Ordering::SeqCst);
    THREAD.with(|here| {
        here.lock_state.set(LockState::Unlocked);
        // No handler leaves anything from here on.
        compiler_fence(Ordering::SeqCst);
        here.has_deferred_work.get()
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
    /// Locks the sockets.
    ///
    /// # Errors
    /// `EAGAIN` in a handler that interrupted this thread while it held them, and could not be put off.
    #[inline]
    pub(crate) fn lock(&self) -> Result<LockGuard<'_>, Errno> {
        if !enter() {
            return Err(Errno::AGAIN);
        }
        let inside = CallGuard(self);
        // Nothing panics while it is locked; if it did, the state of other sockets would still be what it was.
        let lane = self.lock.state.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(LockGuard { state: lane, _call: inside })
    }

    /// The same where there is no way to say no, and no handler comes.
    ///
    /// # Panics
    /// In a handler that interrupted this thread while it held them.
    pub(crate) fn lock_or_panic(&self) -> LockGuard<'_> {
        self.lock().expect("what handlers may not do (signal-safety(7))")
    }

    /// Whether this thread is in the middle of a call: then this is a handler that interrupted it.
    pub fn is_in_call() -> bool {
        THREAD.with(|here| here.lock_state.get() != LockState::Unlocked)
    }

    /// Signals that the program has this thread block, also while others are because handlers were put off.
    ///
    /// # Errors
    /// None that a thread could do anything about.
    pub fn blocked_signals() -> Result<SignalSet, Errno> {
        blocked_signals()
    }

    /// This thread, which holds the sockets, is about to become another program: that must not begin with signals blocked that were put off here.
    pub(crate) fn stop_deferring_signals() {
        THREAD.with(|here| here.lock_state.set(LockState::HeldForExec));
        compiler_fence(Ordering::SeqCst);
        deliver();
    }

    /// The connection to the stack is this one from now on.
    pub(crate) fn note_connection_fd(&self, lane: &ProcessState) {
        let line = lane.attachment.as_ref().map_or(NO_FD, Attachment::connection_fd);
        self.lock.connection_fd.store(line, Ordering::Relaxed);
    }

    /// In a child that was forked by a handler, in the middle of a call of the same thread. That call goes on here, too, when the handler returns: nothing that it does reaches the
    /// parent, the stack or others, and it ends as if the stack were gone.
    ///
    /// # Errors
    /// No memory or descriptors: the process must not go on.
    pub fn fork_child_in_call(&self) -> Result<(), Errno> {
        for memory in &self.lock.memories {
            memory.make_private().map_err(|_| Errno::NOMEM)?;
        }
        let line = self.lock.connection_fd.load(Ordering::Relaxed);
        if line == NO_FD {
            return Ok(());
        }
        // A connection that has ended.
        let (ended, _) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        crate::syscall::dup3(ended.as_raw_fd(), line, libc::O_CLOEXEC)
    }

    /// Leaves a descriptor to be closed when this thread lets go of the sockets. `None` if it does not hold them.
    pub(crate) fn defer_close(&self, fd: RawFd) -> Option<Result<(), Errno>> {
        if !Self::is_in_call() {
            return None;
        }
        let place =
            self.lock.deferred_closes.iter().find(|place| {
                place.compare_exchange(NO_FD, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            });
        note_deferred_work();
        Some(place.map(|_| ()).ok_or(Errno::INTR))
    }

    #[cold]
    fn run_deferred_work(&self) {
        THREAD.with(|here| here.has_deferred_work.set(false));
        match self.lock.deferred.sigurg_owner.swap(0, Ordering::Relaxed) {
            0 => {}
            owner => urgent::send_sigurg(owner),
        }
        for place in &self.lock.deferred_closes {
            let fd = place.swap(NO_FD, Ordering::Relaxed);
            if fd != NO_FD {
                // Whoever asked was told that it is done.
                let _ = self.close(fd);
            }
        }
        // At last, as a handler may jump away.
        deliver();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_enters_once_and_others_as_well() {
        assert!(enter() && !enter());
        assert!(std::thread::spawn(enter).join().unwrap());
        assert!(!leave() && enter());
        note_deferred_work();
        assert!(leave());
    }
}
