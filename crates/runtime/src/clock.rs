//! The clock. Nothing else in this crate reads the time.

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use ginnel_stack::time::Instant;
use rustix::time::{ClockId, clock_gettime};
use std::sync::Arc;

/// Returns the time of the monotonic clock of the machine, which all threads and processes share. Takes about
/// 20 ns, without a system call.
pub fn now() -> Instant {
    let t = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(t.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(t.tv_nsec).unwrap_or(0);
    Instant::from_nanos(seconds * 1_000_000_000 + nanos)
}

/// The clock of a simulation, which stands still unless it is advanced. All clones are one clock.
#[derive(Clone, Debug)]
pub struct SimulatedClock(Arc<AtomicU64>);

impl SimulatedClock {
    /// Creates a clock that shows `now`.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self(Arc::new(AtomicU64::new(now.as_nanos())))
    }

    /// Returns the time that the clock shows.
    #[must_use]
    pub fn now(&self) -> Instant {
        Instant::from_nanos(self.0.load(Ordering::Relaxed))
    }

    /// Advances the clock, for example by the time that a handler takes.
    pub fn advance(&self, time: Duration) {
        // A simulation ends before 2^64 ns are over.
        self.0.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Advances the clock to `now`, unless it shows a later time.
    pub fn advance_to(&self, now: Instant) {
        self.0.fetch_max(now.as_nanos(), Ordering::Relaxed);
    }
}

/// The clock that a shard reads while a turn lasts.
#[derive(Clone, Debug)]
pub(crate) enum TurnClock {
    Machine,
    Simulated(SimulatedClock),
}

impl TurnClock {
    /// Begins a turn at `now` and returns the time.
    pub(crate) fn begin_turn(&self, now: Instant) -> Instant {
        match self {
            Self::Machine => now,
            Self::Simulated(clock) => {
                clock.advance_to(now);
                clock.now()
            }
        }
    }

    pub(crate) fn now(&self) -> Instant {
        match self {
            Self::Machine => now(),
            Self::Simulated(clock) => clock.now(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::now;

    #[test]
    fn time_is_monotonic() {
        let mut last = now();
        for _ in 0..1000 {
            let next = now();
            assert!(next >= last);
            last = next;
        }
    }
}
