//! Signals: what calls send, and what handlers do to calls that wait.
//!
//! A system call that waits goes on after a handler that was installed with `SA_RESTART`, and is `EINTR` after another. Who sleeps in `ppoll` is told
//! only that some handler ran. Which it was is known of those in front of which the library stands (`handlers`). For others it is looked at what handlers
//! there are: if all are of one kind, that answers it. If there are both, those that restart are kept back by the mask of `ppoll`, and a signalfd tells when one of
//! them waits: it runs when the mask is taken off.
#![allow(unsafe_code)] // raise

use crate::{handlers, raw};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What the kernel does to a thread that writes where nobody reads.
pub(crate) fn broken_pipe() {
    // SAFETY: raise has no preconditions; the signal goes to this thread.
    unsafe { libc::raise(libc::SIGPIPE) };
}

/// Signals by number, a bit each, from 1 on.
pub(crate) type SignalSet = u64;

/// Signals that have handlers, by what these do to calls that wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Handlers {
    /// The call goes on (`SA_RESTART`).
    pub restarting: SignalSet,
    /// The call is `EINTR`.
    pub interrupting: SignalSet,
    /// The library does not stand in front of them, and does not see them run.
    pub unseen: SignalSet,
}

/// Signals of what a thread does itself.
pub(crate) const FAULTS: [i32; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];
/// Those that libc keeps for its threads.
pub(crate) const OF_LIBC: [i32; 2] = [32, 33];
pub(crate) const SIGNALS: core::ops::RangeInclusive<i32> = 1..=64;

pub(crate) const fn bit(signal: i32) -> SignalSet {
    1 << (signal - 1)
}

impl Handlers {
    /// What the kernel says now.
    fn look() -> Self {
        let mut found = Self::default();
        for signal in SIGNALS.filter(|signal| !FAULTS.contains(signal) && !OF_LIBC.contains(signal)) {
            let Ok(action) = raw::action(signal) else { continue };
            if action.handler == libc::SIG_DFL || action.handler == libc::SIG_IGN {
                continue;
            }
            if handlers::behind(action.handler).is_none() {
                found.unseen |= bit(signal);
            }
            match action.flags & libc::SA_RESTART as u64 != 0 {
                true => found.restarting |= bit(signal),
                false => found.interrupting |= bit(signal),
            }
        }
        found
    }

    /// Both kinds, so that an interruption alone does not say which it was.
    pub fn are_mixed(self) -> bool {
        self.restarting != 0 && self.interrupting != 0
    }
}

/// What is known of the program's handlers.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    restarting: AtomicU64,
    interrupting: AtomicU64,
    unseen: AtomicU64,
    known: AtomicBool,
}

impl Signals {
    /// The program changes its handlers.
    pub fn forget(&self) {
        self.known.store(false, Ordering::Release);
    }

    /// As they were when they were looked at last.
    pub fn handlers(&self) -> Handlers {
        if !self.known.load(Ordering::Acquire) {
            return self.look();
        }
        Handlers {
            restarting: self.restarting.load(Ordering::Relaxed),
            interrupting: self.interrupting.load(Ordering::Relaxed),
            unseen: self.unseen.load(Ordering::Relaxed),
        }
    }

    fn look(&self) -> Handlers {
        // First: a change meanwhile is looked at the next time.
        self.known.store(true, Ordering::Release);
        let now = Handlers::look();
        self.restarting.store(now.restarting, Ordering::Relaxed);
        self.interrupting.store(now.interrupting, Ordering::Relaxed);
        self.unseen.store(now.unseen, Ordering::Relaxed);
        now
    }

    /// Whether no handler can have run that nobody has seen, of those that there were `before` or are now.
    pub fn all_are_seen(&self, before: Handlers) -> bool {
        before.unseen | self.look().unseen == 0
    }

    /// Whether a call goes on that was interrupted while there were these handlers, of which some `ran`, as far as that is known. If nothing is, handlers of one kind alone could run.
    pub fn goes_on(&self, before: Handlers, ran: SignalSet) -> bool {
        if ran != 0 && ran & !(before.restarting | before.interrupting) == 0 {
            return ran & before.interrupting == 0;
        }
        let now = self.look();
        // A handler may have been for one time only (`SA_RESETHAND`).
        before.restarting | now.restarting != 0 && before.interrupting | now.interrupting == 0
    }
}
