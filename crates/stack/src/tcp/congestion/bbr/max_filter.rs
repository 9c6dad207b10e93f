//! The largest value of the last ten rounds.

use serde::{Deserialize, Serialize};

/// Rounds of the window: a gain cycle of eight, and two more.
const ROUNDS: usize = 10;

/// The filter.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct MaxFilter {
    /// The largest value of each round, at its number modulo [`ROUNDS`].
    values: [u64; ROUNDS],
    last_round: u32,
    max: u64,
}

impl MaxFilter {
    /// Returns the largest value. It ages only when values are added.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// Adds a value of `round`, which is not before that of the last value.
    pub fn add(&mut self, round: u32, value: u64) {
        let passed = round.wrapping_sub(self.last_round).min(ROUNDS as u32);
        for ago in 0..passed {
            self.values[slot(round.wrapping_sub(ago))] = 0;
        }
        self.last_round = round;
        let own = &mut self.values[slot(round)];
        *own = value.max(*own);
        self.max = self.values.into_iter().max().unwrap_or(0);
    }
}

fn slot(round: u32) -> usize {
    round as usize % ROUNDS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maximum_is_forgotten_after_ten_rounds() {
        let mut filter = MaxFilter::default();
        filter.add(5, 100);
        filter.add(5, 70);
        for round in 6..15 {
            filter.add(round, u64::from(round));
            assert_eq!(filter.max(), 100, "{round}");
        }
        filter.add(15, 1);
        assert_eq!(filter.max(), 14);
        filter.add(40, 2);
        assert_eq!(filter.max(), 2);
    }
}
