//! The lock around a process's sockets, and handlers of signals: one that interrupts a call in the middle may itself call functions of sockets
//! (signal-safety(7)), and must not wait for what its own thread holds, or is about to.
//!
//! Such a call is `EAGAIN`, as on a socket that does not wait and has nothing at the moment; a `close` is done when the interrupted call lets go.

use crate::Ops;
use crate::lane::Lane;
use core::cell::Cell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicBool, AtomicI32, Ordering, compiler_fence};
use rustix::fd::RawFd;
use rustix::io::Errno;
use std::sync::{Mutex, MutexGuard, PoisonError};

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
    has_closes: AtomicBool,
}

impl Lock {
    pub fn new(lane: Lane) -> Self {
        let closes = [const { AtomicI32::new(NONE) }; CLOSES_MAX];
        Self { lane: Mutex::new(lane), closes, has_closes: AtomicBool::new(false) }
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
        if self.0.lane.has_closes.load(Ordering::Relaxed) {
            self.0.close_what_was_left();
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
        self.lane.has_closes.store(true, Ordering::Relaxed);
        Some(place.map(|_| ()).ok_or(Errno::INTR))
    }

    #[cold]
    fn close_what_was_left(&self) {
        self.lane.has_closes.store(false, Ordering::Relaxed);
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
