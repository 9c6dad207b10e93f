//! Signal handlers and the calls that they interrupt, and `SIGPIPE`.
//!
//! A blocked system call continues after a handler with `SA_RESTART`, and fails with `EINTR` after one
//! without. `ppoll` tells only that some handler ran. Trampolines record which one it was
//! (`signal_handlers`). For handlers without a trampoline the dispositions decide: if all handlers are of one
//! kind, so was the one that ran. If both kinds are installed, the mask of `ppoll` blocks the signals with
//! `SA_RESTART`, and a signalfd reports when one of them is pending: its handler runs when the mask is
//! restored.
#![allow(unsafe_code)] // raise

use crate::{signal_handlers, syscall};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Sends `SIGPIPE` to this thread, as the kernel does after a write without a reader.
pub(crate) fn raise_sigpipe() {
    // SAFETY: `raise` has no preconditions; the signal goes to this thread.
    unsafe { libc::raise(libc::SIGPIPE) };
}

/// A set of signals: bit 0 stands for signal 1.
pub(crate) type SignalSet = u64;

/// Signals that have handlers, by their effect on blocked calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HandlerSets {
    /// The call continues (`SA_RESTART`).
    pub restarting: SignalSet,
    /// The call fails with `EINTR`.
    pub interrupting: SignalSet,
    /// The handler has no trampoline, so its runs are not recorded.
    pub unhooked: SignalSet,
}

/// Signals that a thread causes itself.
pub(crate) const SYNCHRONOUS_SIGNALS: [i32; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGSYS];
/// Signals that libc uses for its threads.
pub(crate) const LIBC_SIGNALS: [i32; 2] = [32, 33];
pub(crate) const SIGNALS: core::ops::RangeInclusive<i32> = 1..=64;

pub(crate) const fn bit(signal: i32) -> SignalSet {
    1 << (signal - 1)
}

impl HandlerSets {
    /// Asks the kernel for the dispositions of all signals.
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

    /// Returns whether there are handlers of both kinds, so that an interruption does not tell which kind
    /// ran.
    pub fn is_mixed(self) -> bool {
        self.restarting != 0 && self.interrupting != 0
    }
}

/// The last known dispositions of the program's signals.
#[derive(Debug, Default)]
pub(crate) struct HandlerCache {
    restarting: AtomicU64,
    interrupting: AtomicU64,
    unhooked: AtomicU64,
    is_valid: AtomicBool,
}

impl HandlerCache {
    /// Must be called when the program changes a disposition.
    pub fn invalidate(&self) {
        self.is_valid.store(false, Ordering::Release);
    }

    /// Returns the last known dispositions, asking the kernel if they may have changed.
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
        // Stored first, so that a concurrent change invalidates the result.
        self.is_valid.store(true, Ordering::Release);
        let now = HandlerSets::query();
        self.restarting.store(now.restarting, Ordering::Relaxed);
        self.interrupting.store(now.interrupting, Ordering::Relaxed);
        self.unhooked.store(now.unhooked, Ordering::Relaxed);
        now
    }

    /// Returns whether every handler that was installed `before`, or is installed now, has a trampoline.
    pub fn are_all_hooked(&self, before: HandlerSets) -> bool {
        before.unhooked | self.refresh().unhooked == 0
    }

    /// Returns whether a call continues that was interrupted while the handlers `before` were installed.
    /// `ran` holds the signals whose handlers are known to have run. If `ran` is empty, the call continues
    /// only if all handlers have `SA_RESTART`.
    pub fn restarts_after(&self, before: HandlerSets, ran: SignalSet) -> bool {
        if ran != 0 && ran & !(before.restarting | before.interrupting) == 0 {
            return ran & before.interrupting == 0;
        }
        let now = self.refresh();
        // A one-shot handler (`SA_RESETHAND`) is no longer installed.
        before.restarting | now.restarting != 0 && before.interrupting | now.interrupting == 0
    }
}
