//! When a shard leaves its CPU to other threads by yielding.
//!
//! A thread that yields runs again as soon as the others sleep, and none of them has to wake it: that saves
//! three system calls compared to a sleep. But a frame does not wake a thread that has not slept: it waits
//! for as long as the others work, up to the kernel's time slice. So a shard yields only where the others are
//! known to work for short times. Yielding does not help threads that wait for something else than the CPU,
//! or that are in another scheduling group, to which the kernel does not yield.

use core::time::Duration;

/// Longest duration of a yield that counts as short, even if the others may take longer.
const SHORT_MAX: Duration = Duration::from_micros(100);
/// Number of yields in a row without work after which yielding is considered futile.
const FUTILE_YIELDS_MAX: u32 = 4;
/// Number of sleeps after which yielding is tried again.
const SLEEPS_BEFORE_RETRY: u32 = 64;

/// Results of the last yields.
#[derive(Debug, Default)]
pub(crate) struct YieldPolicy {
    /// Sleeps before the next yield.
    sleeps_left: u32,
    /// Yields since there was work.
    futile_yields: u32,
}

impl YieldPolicy {
    /// Returns whether to yield. If not, the caller sleeps.
    pub fn may_yield(&mut self) -> bool {
        let may = self.sleeps_left == 0;
        self.sleeps_left = self.sleeps_left.saturating_sub(1);
        may
    }

    /// Records that a yield took `time`, and that it should have taken at most `limit`.
    pub fn record_yield(&mut self, time: Duration, limit: Duration) {
        self.futile_yields += 1;
        if time > limit.min(SHORT_MAX) || self.futile_yields >= FUTILE_YIELDS_MAX {
            (self.sleeps_left, self.futile_yields) = (SLEEPS_BEFORE_RETRY, 0);
        }
    }

    /// Records that there was work.
    pub fn record_work(&mut self) {
        self.futile_yields = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TURN: Duration = Duration::from_millis(1);

    fn sleeps(yields: &mut YieldPolicy) -> u32 {
        (0..1000).take_while(|_| !yields.may_yield()).count() as u32
    }

    #[test]
    fn long_yield_disables_yielding_for_a_while() {
        let mut yields = YieldPolicy::default();
        assert!(yields.may_yield());
        yields.record_yield(SHORT_MAX, TURN);
        assert!(yields.may_yield());
        yields.record_yield(SHORT_MAX + Duration::from_nanos(1), TURN);
        assert_eq!(sleeps(&mut yields), SLEEPS_BEFORE_RETRY);
        yields.record_yield(Duration::ZERO, TURN);
        assert!(yields.may_yield());
        yields.record_yield(SHORT_MAX / 2, SHORT_MAX / 4);
        assert_eq!(sleeps(&mut yields), SLEEPS_BEFORE_RETRY);
    }

    #[test]
    fn futile_yields_disable_yielding_for_a_while() {
        let mut yields = YieldPolicy::default();
        for _ in 0..10 * FUTILE_YIELDS_MAX {
            assert!(yields.may_yield());
            yields.record_yield(Duration::from_micros(1), TURN);
            yields.record_work();
        }
        for _ in 0..FUTILE_YIELDS_MAX {
            assert!(yields.may_yield());
            yields.record_yield(Duration::from_micros(1), TURN);
        }
        assert_eq!(sleeps(&mut yields), SLEEPS_BEFORE_RETRY);
    }
}
