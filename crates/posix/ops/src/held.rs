//! The lock around a process's sockets, and handlers of signals: one that interrupts a call in the middle may itself call functions of sockets
//! (signal-safety(7)), and must not wait for what its own thread holds, or is about to.
//!
//! Such a call is `EAGAIN`, as on a socket that does not wait and has nothing at the moment; a `close` is done when the interrupted call lets go.

use crate::lane::Lane;
use crate::{Ops, urgent};
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

thread_local! {
    /// This thread holds the sockets, waits for them, or has let go of them a moment ago.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
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
    /// There is something: a descriptor is to be closed, or somebody to be told of urgent data.
    has_more: AtomicBool,
    /// Who (`F_SETOWN`), or 0.
    owner: AtomicI32,
}

impl Left {
    /// Leaves a signal for later: its handler is likely to read.
    #[cold]
    pub fn leave_signal(&self, owner: i32) {
        self.owner.store(owner, Ordering::Relaxed);
        self.has_more.store(true, Ordering::Relaxed);
    }
}

/// The sockets while they are locked.
pub(crate) struct Locked<'a> {
    // In this order they go: the lock is opened, then handlers may lock, then what they left is done.
    lane: MutexGuard<'a, Lane>,
    _inside: Inside,
    _after: After<'a>,
}

struct Inside;

impl Inside {
    /// `None` in a handler that interrupted this thread there.
    #[inline]
    fn enter() -> Option<Self> {
        if INSIDE.replace(true) {
            return None;
        }
        // A handler that comes from here on finds it so.
        compiler_fence(Ordering::SeqCst);
        Some(Self)
    }
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        compiler_fence(Ordering::SeqCst);
        INSIDE.set(false);
    }
}

struct After<'a>(&'a Ops);

impl Drop for After<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.0.lane.left.has_more.load(Ordering::Relaxed) {
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
    /// `EAGAIN` in a handler that interrupted this thread while it held them.
    #[inline]
    pub(crate) fn lock(&self) -> Result<Locked<'_>, Errno> {
        let inside = Inside::enter().ok_or(Errno::AGAIN)?;
        // Nothing panics while it is locked; if it did, the state of other sockets would still be what it was.
        let lane = self.lane.lane.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Locked { lane, _inside: inside, _after: After(self) })
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
        INSIDE.get()
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
        if !INSIDE.get() {
            return None;
        }
        let place = self
            .lane
            .closes
            .iter()
            .find(|place| place.compare_exchange(NONE, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok());
        self.lane.left.has_more.store(true, Ordering::Relaxed);
        Some(place.map(|_| ()).ok_or(Errno::INTR))
    }

    #[cold]
    fn do_what_was_left(&self) {
        self.lane.left.has_more.store(false, Ordering::Relaxed);
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_enters_once_and_others_as_well() {
        let inside = Inside::enter();
        assert!(inside.is_some() && Inside::enter().is_none());
        assert!(std::thread::spawn(|| Inside::enter().is_some()).join().unwrap());
        drop(inside);
        assert!(Inside::enter().is_some());
    }
}
