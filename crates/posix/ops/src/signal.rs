//! Signals: what calls send, and what handlers do to calls that wait.
//!
//! A system call that waits goes on after a handler that was installed with `SA_RESTART`, and is `EINTR` after another. Who sleeps in `ppoll` is told
//! only that some handler ran. Which it was is known of those in front of which the library stands (`handlers`). For others it is looked at what handlers
//! there are: if all are of one kind, that answers it. If there are both, those that restart are kept back by the mask of `ppoll`, and a signalfd tells when one of
//! them waits: it runs when the mask is taken off.
#![allow(unsafe_code)] // raise

use crate::{signal_handlers, syscall};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What the kernel does to a thread that writes where nobody reads.
pub(crate) fn raise_sigpipe() {
    // SAFETY: raise has no preconditions; the signal goes to this thread.
    unsafe { libc::raise(libc::SIGPIPE) };
}

/// Signals by number, a bit each, from 1 on.
pub(crate) type SignalSet = u64;

/// Signals that have handlers, by what these do to calls that wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HandlerSets {
    /// The call goes on (`SA_RESTART`).
    pub restarting: SignalSet,
    /// The call is `EINTR`.
    pub interrupting: SignalSet,
    /// The library does not stand in front of them, and does not see them run.
    pub unhooked: SignalSet,
}

/// Signals of what a thread does itself.
pub(crate) const SYNCHRONOUS_SIGNALS: [i32; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];
/// Those that libc keeps for its threads.
pub(crate) const LIBC_SIGNALS: [i32; 2] = [32, 33];
pub(crate) const SIGNALS: core::ops::RangeInclusive<i32> = 1..=64;

pub(crate) const fn bit(signal: i32) -> SignalSet {
    1 << (signal - 1)
}

impl HandlerSets {
    /// What the kernel says now.
    fn query() -> Self {
        let mut found = Self::default();
        for signal in
            SIGNALS.filter(|signal| !SYNCHRONOUS_SIGNALS.contains(signal) && !LIBC_SIGNALS.contains(signal))
        {
            let Ok(action) = syscall::sigaction(signal) else { continue };
            if action.handler == libc::SIG_DFL || action.handler == libc::SIG_IGN {
                continue;
            }
            if signal_handlers::handler_of(action.handler).is_none() {
                found.unhooked |= bit(signal);
            }
            match action.flags & libc::SA_RESTART as u64 != 0 {
                true => found.restarting |= bit(signal),
                false => found.interrupting |= bit(signal),
            }
        }
        found
    }

    /// Both kinds, so that an interruption alone does not say which it was.
    pub fn is_mixed(self) -> bool {
        self.restarting != 0 && self.interrupting != 0
    }
}

/// What is known of the program's handlers.
#[derive(Debug, Default)]
pub(crate) struct HandlerCache {
    restarting: AtomicU64,
    interrupting: AtomicU64,
    unhooked: AtomicU64,
    is_valid: AtomicBool,
}

impl HandlerCache {
    /// The program changes its handlers.
    pub fn invalidate(&self) {
        self.is_valid.store(false, Ordering::Release);
    }

    /// As they were when they were looked at last.
    pub fn handlers(&self) -> HandlerSets {
        if !self.is_valid.load(Ordering::Acquire) {
            return self.refresh();
        }
        HandlerSets {
            restarting: self.restarting.load(Ordering::Relaxed),
            interrupting: self.interrupting.load(Ordering::Relaxed),
            unhooked: self.unhooked.load(Ordering::Relaxed),
        }
    }

    fn refresh(&self) -> HandlerSets {
        // First: a change meanwhile is looked at the next time.
        self.is_valid.store(true, Ordering::Release);
        let now = HandlerSets::query();
        self.restarting.store(now.restarting, Ordering::Relaxed);
        self.interrupting.store(now.interrupting, Ordering::Relaxed);
        self.unhooked.store(now.unhooked, Ordering::Relaxed);
        now
    }

    /// Whether no handler can have run that nobody has seen, of those that there were `before` or are now.
    pub fn are_all_hooked(&self, before: HandlerSets) -> bool {
        before.unhooked | self.refresh().unhooked == 0
    }

    /// Whether a call goes on that was interrupted while there were these handlers, of which some `ran`, as far as that is known. If nothing is, handlers of one kind alone could run.
    pub fn restarts_after(&self, before: HandlerSets, ran: SignalSet) -> bool {
        if ran != 0 && ran & !(before.restarting | before.interrupting) == 0 {
            return ran & before.interrupting == 0;
        }
        let now = self.refresh();
        // A handler may have been for one time only (`SA_RESETHAND`).
        before.restarting | now.restarting != 0 && before.interrupting | now.interrupting == 0
    }
}
