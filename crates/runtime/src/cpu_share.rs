//! Sharing one CPU between the application's and the stack's thread (`shard.placement` `paired`).
//!
//! The stack's thread has real-time priority where that is allowed, so frames and timers do not wait for an
//! application that computes: when the stack's thread wakes, it preempts the application. So that the stack
//! cannot starve the application, its thread works for at most `shard.paired_work_us` after each sleep. If it
//! has not finished by then, it continues as an ordinary thread until it sleeps again. The kernel divides the
//! CPU evenly among ordinary threads.

use crate::realtime;
use core::time::Duration;
use ginnel_stack::time::Instant;
use std::io;

/// Scheduling operations on a thread.
pub(crate) trait Scheduler {
    /// Switches real-time priority on or off.
    fn set_realtime(&mut self, on: bool) -> io::Result<()>;
    /// Lets other threads on the CPU run.
    fn yield_cpu(&mut self);
}

/// Operations on the calling thread.
pub(crate) struct ThreadScheduler;

impl Scheduler for ThreadScheduler {
    fn set_realtime(&mut self, on: bool) -> io::Result<()> {
        realtime::set_realtime(on)
    }

    fn yield_cpu(&mut self) {
        std::thread::yield_now();
    }
}

/// The share of one of the two threads.
pub(crate) struct CpuShare<S> {
    scheduler: S,
    /// How long the thread works after a sleep before the other one gets the CPU.
    quantum: Duration,
    /// When the current stretch of work began.
    work_started: Option<Instant>,
    /// Real-time priority is requested and permitted.
    may_be_realtime: bool,
    /// The thread has real-time priority now.
    is_realtime: bool,
}

impl<S: Scheduler> CpuShare<S> {
    /// Creates the share of a thread. `realtime` requests real-time priority, if that is permitted.
    pub fn new(mut scheduler: S, quantum: Duration, realtime: bool) -> Self {
        let granted = realtime && {
            let granted = scheduler.set_realtime(true);
            if let Err(error) = &granted {
                tracing::warn!(
                    "shard.paired_realtime: {error}: the stack's thread runs without real-time priority"
                );
            }
            granted.is_ok()
        };
        Self { scheduler, quantum, work_started: None, may_be_realtime: granted, is_realtime: granted }
    }

    /// Records that the thread worked until `now` and continues.
    pub fn record_work(&mut self, now: Instant) {
        let since = *self.work_started.get_or_insert(now);
        if now - since < self.quantum {
            return;
        }
        if core::mem::take(&mut self.is_realtime) && self.scheduler.set_realtime(false).is_err() {
            // The priority was changed from outside.
            self.may_be_realtime = false;
        }
        self.scheduler.yield_cpu();
        self.work_started = Some(now);
    }

    /// Records that the thread slept, or would have slept if nothing had happened meanwhile.
    pub fn record_sleep(&mut self) {
        self.work_started = None;
        if self.may_be_realtime && !self.is_realtime {
            self.is_realtime = self.scheduler.set_realtime(true).is_ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{CpuShare, Scheduler};
    use core::time::Duration;
    use ginnel_stack::time::Instant;
    use std::cell::RefCell;
    use std::io;

    /// Records the calls.
    struct Notes<'a>(&'a RefCell<Vec<&'static str>>, bool);

    impl Scheduler for Notes<'_> {
        fn set_realtime(&mut self, on: bool) -> io::Result<()> {
            self.0.borrow_mut().push(if on { "raise" } else { "lower" });
            if self.1 { Ok(()) } else { Err(io::ErrorKind::PermissionDenied.into()) }
        }

        fn yield_cpu(&mut self) {
            self.0.borrow_mut().push("yield");
        }
    }

    fn at(us: u64) -> Instant {
        Instant::from_millis(1) + Duration::from_micros(us)
    }

    #[test]
    fn work_beyond_the_quantum_loses_realtime_priority() {
        let calls = RefCell::new(Vec::new());
        let taken = || core::mem::take(&mut *calls.borrow_mut());
        let mut share = CpuShare::new(Notes(&calls, true), Duration::from_micros(100), true);
        assert_eq!(taken(), ["raise"]);
        for us in [0, 50, 99] {
            share.record_work(at(us));
        }
        assert!(taken().is_empty(), "the quantum is not used up");
        share.record_work(at(100));
        assert_eq!(taken(), ["lower", "yield"]);
        share.record_work(at(199));
        share.record_work(at(200));
        share.record_work(at(310));
        assert_eq!(taken(), ["yield", "yield"], "one yield in each quantum, as an ordinary thread");
        share.record_sleep();
        assert_eq!(taken(), ["raise"]);
        share.record_sleep();
        share.record_work(at(1000));
        share.record_work(at(1090));
        share.record_sleep();
        share.record_work(at(1110));
        assert!(taken().is_empty(), "work before a sleep does not count");
    }

    #[test]
    fn quantum_applies_without_realtime_priority() {
        for (wanted, allowed, requested) in [(false, true, 0), (true, false, 1)] {
            let calls = RefCell::new(Vec::new());
            let mut share = CpuShare::new(Notes(&calls, allowed), Duration::from_micros(100), wanted);
            for us in (0..=400).step_by(50) {
                share.record_work(at(us));
            }
            share.record_sleep();
            let calls = calls.borrow();
            let count = |name| calls.iter().filter(|call| **call == name).count();
            assert_eq!((count("raise"), count("lower"), count("yield")), (requested, 0, 4));
        }
    }
}
