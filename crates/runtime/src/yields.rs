//! When a shard leaves its CPU to others by yielding.
//!
//! Whoever yields comes back as soon as the others sleep, and none of them has to wake it: that is three system calls less than a sleep. But whoever has not slept is
//! not woken by a frame either, and waits for as long as the others work, up to the time slice of the kernel. So it is done where they are known to
//! work for short times only. And it does not help those who wait for something else than the CPU, or are in another group of the scheduler's, which is not yielded to.

use core::time::Duration;

/// What others may take for a yield to have been right, if they may take as long.
const SHORT: Duration = Duration::from_micros(100);
/// After so many that nothing came of, in a row, they are in vain.
const IN_VAIN: u32 = 4;
/// So many sleeps after yields that were wrong, or in vain, it is tried again.
const SLEEPS: u32 = 64;

/// How the last yields went.
#[derive(Debug, Default)]
pub(crate) struct Yields {
    /// Sleeps before the next one.
    sleeps: u32,
    /// Yields since there was something to do.
    in_a_row: u32,
}

impl Yields {
    /// Whether to yield. If not, the caller sleeps.
    pub fn may(&mut self) -> bool {
        let may = self.sleeps == 0;
        self.sleeps = self.sleeps.saturating_sub(1);
        may
    }

    /// One took so long, and should have taken `turn` at the most.
    pub fn took(&mut self, time: Duration, turn: Duration) {
        self.in_a_row += 1;
        if time > turn.min(SHORT) || self.in_a_row >= IN_VAIN {
            (self.sleeps, self.in_a_row) = (SLEEPS, 0);
        }
    }

    /// There was something to do.
    pub fn worked(&mut self) {
        self.in_a_row = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TURN: Duration = Duration::from_millis(1);

    fn sleeps(yields: &mut Yields) -> u32 {
        (0..1000).take_while(|_| !yields.may()).count() as u32
    }

    #[test]
    fn after_a_long_one_it_sleeps_for_a_while() {
        let mut yields = Yields::default();
        assert!(yields.may());
        yields.took(SHORT, TURN);
        assert!(yields.may());
        yields.took(SHORT + Duration::from_nanos(1), TURN);
        assert_eq!(sleeps(&mut yields), SLEEPS);
        yields.took(Duration::ZERO, TURN);
        assert!(yields.may());
        yields.took(SHORT / 2, SHORT / 4);
        assert_eq!(sleeps(&mut yields), SLEEPS);
    }

    #[test]
    fn in_vain_are_so_many_in_a_row_and_not_those_that_something_came_of() {
        let mut yields = Yields::default();
        for _ in 0..10 * IN_VAIN {
            assert!(yields.may());
            yields.took(Duration::from_micros(1), TURN);
            yields.worked();
        }
        for _ in 0..IN_VAIN {
            assert!(yields.may());
            yields.took(Duration::from_micros(1), TURN);
        }
        assert_eq!(sleeps(&mut yields), SLEEPS);
    }
}
