//! When a shard leaves its CPU to others by yielding.
//!
//! Whoever yields comes back as soon as the others sleep, and none of them has to wake it: that is three system calls less than a sleep. But whoever has not slept is
//! not woken by a frame either, and waits for as long as the others work, up to the time slice of the kernel. So it is done where they are known to
//! work for short times only. And it does not help those who wait for something else than the CPU, or are in another group of the scheduler's, which is not yielded to.

use core::time::Duration;

/// What others may take for a yield to have been right, if they may take as long.
const SHORT_MAX: Duration = Duration::from_micros(100);
/// After so many that nothing came of, in a row, they are in vain.
const FUTILE_YIELDS_MAX: u32 = 4;
/// So many sleeps after yields that were wrong, or in vain, it is tried again.
const SLEEPS_BEFORE_RETRY: u32 = 64;

/// How the last yields went.
#[derive(Debug, Default)]
pub(crate) struct YieldPolicy {
    /// Sleeps before the next one.
    sleeps_left: u32,
    /// Yields since there was something to do.
    futile_yields: u32,
}

impl YieldPolicy {
    /// Whether to yield. If not, the caller sleeps.
    pub fn may_yield(&mut self) -> bool {
        let may = self.sleeps_left == 0;
        self.sleeps_left = self.sleeps_left.saturating_sub(1);
        may
    }

    /// One took so long, and should have taken `turn` at the most.
    pub fn record_yield(&mut self, time: Duration, turn: Duration) {
        self.futile_yields += 1;
        if time > turn.min(SHORT_MAX) || self.futile_yields >= FUTILE_YIELDS_MAX {
            (self.sleeps_left, self.futile_yields) = (SLEEPS_BEFORE_RETRY, 0);
        }
    }

    /// There was something to do.
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
    fn after_a_long_one_it_sleeps_for_a_while() {
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
    fn in_vain_are_so_many_in_a_row_and_not_those_that_something_came_of() {
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
