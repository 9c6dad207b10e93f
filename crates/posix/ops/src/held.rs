//! The lock around a process's sockets, and handlers of signals: those that come while this thread holds it are put off until it lets go (`handlers`), as a
//! system call does its work between handlers or sleeps in them.
//!
//! Handlers that were installed past the library cannot be put off. Such a one may itself call functions of sockets (signal-safety(7)), and must not wait for
//! what its own thread holds, or is about to: its call is `EAGAIN`, as on a socket that does not wait and has nothing at the moment; a `close` is done when the
//! interrupted call lets go.

use crate::lane::Lane;
use crate::signal::SignalSet;
use crate::{Ops, raw, urgent};
use core::cell::Cell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, AtomicI32, Ordering, compiler_fence};
use ginnel::channel::{Client, Memory};
use ginnel::door::Process;
use rustix::fd::{AsRawFd, RawFd};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Closes that handlers may ask for during one call.
const CLOSES_MAX: usize = 16;
/// In a place that no descriptor waits in.
const NONE: i32 = -1;

/// What a thread has of the sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holds {
    Nothing,
    /// It holds them, waits for them, or has let go of them a moment ago.
    Sockets,
    /// It holds them while it becomes another program, which would get the signals that are put off: handlers come as they come.
    SocketsForAnother,
}

/// What is known of a thread, also to handlers that interrupt it.
struct Here {
    holds: Cell<Holds>,
    /// Something is to be done when it lets go of the sockets: a descriptor is to be closed, somebody to be told of urgent data, or a handler was put off.
    has_more: Cell<bool>,
    /// Things that it does as a whole.
    wholes: Cell<u32>,
    /// A handler was put off, and this is what the thread blocked then.
    put_off: Cell<bool>,
    blocked: Cell<SignalSet>,
    /// Signals whose handlers ran since its call began to wait.
    ran: Cell<SignalSet>,
}

thread_local! {
    static HERE: Here = const {
        Here {
            holds: Cell::new(Holds::Nothing),
            has_more: Cell::new(false),
            wholes: Cell::new(0),
            put_off: Cell::new(false),
            blocked: Cell::new(0),
            ran: Cell::new(0),
        }
    };
}

/// Does something as a whole: handlers come before it or behind it.
fn whole<T>(run: impl FnOnce() -> T) -> T {
    HERE.with(|here| here.wholes.set(here.wholes.get() + 1));
    compiler_fence(Ordering::SeqCst);
    let result = run();
    compiler_fence(Ordering::SeqCst);
    HERE.with(|here| here.wholes.set(here.wholes.get() - 1));
    compiler_fence(Ordering::SeqCst);
    deliver();
    result
}

/// What is made and goes as a whole, as memory that is taken and given back while the sockets are not held: a handler in the middle of that may leave by
/// `siglongjmp`, and nobody would have any memory afterwards.
pub struct Whole<T>(Option<T>);

impl<T> Whole<T> {
    /// Made by `make`, without interruption.
    pub fn new(make: impl FnOnce() -> T) -> Self {
        Self(Some(whole(make)))
    }

    /// Taken by `take`, without interruption.
    pub(crate) fn end(mut self, take: impl FnOnce(T)) {
        whole(|| self.0.take().map(take));
    }
}

impl<T> Deref for Whole<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("it has not gone")
    }
}

impl<T> DerefMut for Whole<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().expect("it has not gone")
    }
}

impl<T> Drop for Whole<T> {
    fn drop(&mut self) {
        whole(|| self.0 = None);
    }
}

/// A filter of system calls may not admit what puts off handlers.
static MAY_NOT_PUT_OFF: AtomicBool = AtomicBool::new(false);

/// From now on handlers come as they come: the program gives up system calls. Those of the library's are admitted, but a program that has confined itself is not to send signals because of
/// the library.
pub(crate) fn let_handlers_come() {
    MAY_NOT_PUT_OFF.store(true, Ordering::Relaxed);
}

/// Whether a handler that comes now is put off.
pub(crate) fn puts_off() -> bool {
    HERE.with(|here| here.holds.get() == Holds::Sockets || here.wholes.get() > 0)
        && !MAY_NOT_PUT_OFF.load(Ordering::Relaxed)
}

/// A handler was put off in a thread that blocked these signals; it blocks all from now on.
pub(crate) fn put_off(blocked: SignalSet) {
    HERE.with(|here| {
        // Of several that came at once the last is told first, and what the others block as well. One that comes all the same, as if it were a fault, finds all blocked.
        let others = if here.put_off.replace(true) { here.blocked.get() } else { SignalSet::MAX };
        here.blocked.set(others & blocked);
        here.has_more.set(true);
    });
}

/// Lets handlers come that were put off.
#[cold]
fn deliver() {
    let is_between = HERE.with(|here| here.holds.get() != Holds::Sockets && here.wholes.get() == 0);
    if is_between
        && let Some(blocked) = HERE.with(|here| here.put_off.replace(false).then_some(here.blocked.get()))
    {
        raw::block_signals(blocked);
    }
}

/// Signals that the program has this thread block.
pub(crate) fn blocked_signals() -> Result<SignalSet, Errno> {
    let now = raw::blocked_signals()?;
    Ok(HERE.with(|here| if here.put_off.get() { here.blocked.get() } else { now }))
}

/// The handlers of these signals ran.
pub(crate) fn note_what_ran(signals: SignalSet) {
    HERE.with(|here| here.ran.set(signals));
}

/// Signals whose handlers ran in this thread since it asked to begin anew.
pub(crate) fn ran() -> SignalSet {
    HERE.with(|here| here.ran.get())
}

/// Where that stands, as long as the thread lives.
pub(crate) fn ran_place() -> *const SignalSet {
    HERE.with(|here| here.ran.as_ptr().cast_const())
}

/// Begins anew, while handlers are put off.
pub(crate) fn forget_what_ran() {
    note_what_ran(0);
}

/// The sockets, locked by one thread at a time.
pub(crate) struct Lock {
    lane: Mutex<Lane>,
    /// Descriptors that are to be closed.
    closes: [AtomicI32; CLOSES_MAX],
    left: Arc<Left>,
    /// The connection to the stack.
    line: AtomicI32,
    memories: Vec<Memory>,
}

impl Lock {
    pub fn new(lane: Lane) -> Self {
        let memories = lane.client.all().iter().map(Client::memory).collect();
        let left = lane.left.clone();
        let closes = [const { AtomicI32::new(NONE) }; CLOSES_MAX];
        Self { lane: Mutex::new(lane), closes, left, line: AtomicI32::new(NONE), memories }
    }
}

/// What is to be done when the sockets are let go of.
#[derive(Debug, Default)]
pub(crate) struct Left {
    /// Who is to be told of urgent data (`F_SETOWN`), or 0.
    owner: AtomicI32,
}

impl Left {
    /// Leaves a signal for later: its handler is likely to read.
    #[cold]
    pub fn leave_signal(&self, owner: i32) {
        self.owner.store(owner, Ordering::Relaxed);
        leave_more();
    }
}

fn leave_more() {
    HERE.with(|here| here.has_more.set(true));
}

/// The sockets while they are locked.
pub(crate) struct Locked<'a> {
    // In this order they go: the lock is opened, then handlers may lock, then what was left is done.
    lane: MutexGuard<'a, Lane>,
    _inside: Inside<'a>,
}

struct Inside<'a>(&'a Ops);

/// False in a handler that interrupted this thread there.
#[inline]
fn enter() -> bool {
    let entered = HERE.with(|here| {
        let enters = here.holds.get() == Holds::Nothing;
        if enters {
            here.holds.set(Holds::Sockets);
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
    HERE.with(|here| {
        here.holds.set(Holds::Nothing);
        // No handler leaves anything from here on.
        compiler_fence(Ordering::SeqCst);
        here.has_more.get()
    })
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        if leave() {
            self.0.do_what_was_left();
        }
    }
}

impl Deref for Locked<'_> {
    type Target = Lane;

    #[inline]
    fn deref(&self) -> &Lane {
        &self.lane
    }
}

impl DerefMut for Locked<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Lane {
        &mut self.lane
    }
}

impl Ops {
    /// Locks the sockets.
    ///
    /// # Errors
    /// `EAGAIN` in a handler that interrupted this thread while it held them, and could not be put off.
    #[inline]
    pub(crate) fn lock(&self) -> Result<Locked<'_>, Errno> {
        if !enter() {
            return Err(Errno::AGAIN);
        }
        let inside = Inside(self);
        // Nothing panics while it is locked; if it did, the state of other sockets would still be what it was.
        let lane = self.lane.lane.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Locked { lane, _inside: inside })
    }

    /// The same where there is no way to say no, and no handler comes.
    ///
    /// # Panics
    /// In a handler that interrupted this thread while it held them.
    pub(crate) fn lock_for_good(&self) -> Locked<'_> {
        self.lock().expect("what handlers may not do (signal-safety(7))")
    }

    /// Whether this thread is in the middle of a call: then this is a handler that interrupted it.
    pub fn is_in_a_call() -> bool {
        HERE.with(|here| here.holds.get() != Holds::Nothing)
    }

    /// Signals that the program has this thread block, also while others are because handlers were put off.
    ///
    /// # Errors
    /// None that a thread could do anything about.
    pub fn blocked_signals() -> Result<SignalSet, Errno> {
        blocked_signals()
    }

    /// This thread, which holds the sockets, is about to become another program: that must not begin with signals blocked that were put off here.
    pub(crate) fn put_off_no_more() {
        HERE.with(|here| here.holds.set(Holds::SocketsForAnother));
        compiler_fence(Ordering::SeqCst);
        deliver();
    }

    /// The connection to the stack is this one from now on.
    pub(crate) fn note_line(&self, lane: &Lane) {
        let line = lane.process.as_ref().map_or(NONE, Process::line);
        self.lane.line.store(line, Ordering::Relaxed);
    }

    /// In a child that was forked by a handler, in the middle of a call of the same thread. That call goes on here, too, when the handler returns: nothing that it does reaches the
    /// parent, the stack or others, and it ends as if the stack were gone.
    ///
    /// # Errors
    /// No memory or descriptors: the process must not go on.
    pub fn forked_in_a_call(&self) -> Result<(), Errno> {
        for memory in &self.lane.memories {
            memory.part().map_err(|_| Errno::NOMEM)?;
        }
        let line = self.lane.line.load(Ordering::Relaxed);
        if line == NONE {
            return Ok(());
        }
        // A connection that has ended.
        let (ended, _) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        crate::raw::dup3(ended.as_raw_fd(), line, libc::O_CLOEXEC)
    }

    /// Leaves a descriptor to be closed when this thread lets go of the sockets. `None` if it does not hold them.
    pub(crate) fn close_later(&self, fd: RawFd) -> Option<Result<(), Errno>> {
        if !Self::is_in_a_call() {
            return None;
        }
        let place = self
            .lane
            .closes
            .iter()
            .find(|place| place.compare_exchange(NONE, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok());
        leave_more();
        Some(place.map(|_| ()).ok_or(Errno::INTR))
    }

    #[cold]
    fn do_what_was_left(&self) {
        HERE.with(|here| here.has_more.set(false));
        match self.lane.left.owner.swap(0, Ordering::Relaxed) {
            0 => {}
            owner => urgent::signal(owner),
        }
        for place in &self.lane.closes {
            let fd = place.swap(NONE, Ordering::Relaxed);
            if fd != NONE {
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
        leave_more();
        assert!(leave());
    }
}
