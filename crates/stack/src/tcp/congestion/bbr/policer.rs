//! Detection of token-bucket policers: a policer passes bursts at any rate, then drops what exceeds its rate.
//! If the losses of two consecutive intervals are high and their rates are equal, that rate is used for a
//! time and is not probed beyond.

use super::{BW_SCALE, RateSample};
use crate::time::Instant;
use serde::{Deserialize, Serialize};

/// Smallest number of rounds of an interval. An interval more than four times as long is discarded.
const INTERVAL_ROUNDS_MIN: u32 = 4;
/// Rounds for which a detected rate is used.
const USE_ROUNDS: u32 = 48;
/// Lost segments for 256 delivered ones, 20 %: with fewer losses an interval reveals no policer.
const LOSS_THRESHOLD: u64 = 50;
/// Rates are equal if they differ by at most an eighth, or by 4 kbit/s.
const RATIO: u64 = 8;
const DIFFERENCE_BYTES: u64 = 500;

/// State of the detection.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Policer {
    /// Rate of the last interval, later the mean rate of two; 0 if there is none.
    bw: u64,
    /// True if the rate of a policer is known.
    pub is_in_use: bool,
    is_sampling: bool,
    rounds: u32,
    /// Beginning of the interval, and the counters at that time.
    start: Instant,
    start_delivered: u32,
    start_lost: u32,
}

/// Counters of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Totals {
    pub delivered_mstamp: Instant,
    pub delivered: u32,
    pub lost: u32,
    pub mss: u32,
}

impl Policer {
    /// Returns the rate of a detected policer.
    pub fn bw(&self) -> Option<u64> {
        self.is_in_use.then_some(self.bw)
    }

    fn begin_interval(&mut self, totals: &Totals) {
        self.start = totals.delivered_mstamp;
        (self.start_delivered, self.start_lost) = (totals.delivered, totals.lost);
        self.rounds = 0;
    }

    /// Forgets what is known.
    pub fn reset(&mut self, totals: &Totals) {
        *self = Self::default();
        self.begin_interval(totals);
    }

    /// Processes an acknowledgement. Returns true if a detected rate was used long enough, so that the path
    /// is probed again.
    pub fn on_sample(
        &mut self,
        sample: &RateSample,
        round_start: bool,
        is_probing: bool,
        totals: &Totals,
    ) -> bool {
        if self.is_in_use {
            if is_probing && round_start {
                self.rounds += 1;
                if self.rounds >= USE_ROUNDS {
                    self.reset(totals);
                    return true;
                }
            }
            return false;
        }
        if !self.is_sampling {
            if sample.losses == 0 {
                return false;
            }
            // The bucket is empty now: the interval begins.
            self.begin_interval(totals);
            self.is_sampling = true;
        }
        if sample.is_app_limited {
            self.reset(totals);
            return false;
        }
        self.rounds += u32::from(round_start);
        if self.rounds < INTERVAL_ROUNDS_MIN {
            return false;
        }
        if self.rounds > 4 * INTERVAL_ROUNDS_MIN {
            self.reset(totals);
            return false;
        }
        // An interval ends with a loss, when the bucket is empty again.
        if sample.losses == 0 {
            return false;
        }
        let lost = totals.lost.wrapping_sub(self.start_lost);
        let delivered = totals.delivered.wrapping_sub(self.start_delivered);
        if delivered == 0 || u64::from(lost) << 8 < LOSS_THRESHOLD * u64::from(delivered) {
            return false;
        }
        let us = totals.delivered_mstamp.micros_since(self.start);
        if us < 1000 {
            return false;
        }
        let bw = ((u128::from(delivered) << BW_SCALE) / u128::from(us)) as u64;
        self.end_interval(bw, totals);
        false
    }

    fn end_interval(&mut self, bw: u64, totals: &Totals) {
        if self.bw != 0 {
            let difference = bw.abs_diff(self.bw);
            let bytes = (u128::from(difference) * u128::from(totals.mss) * 1_000_000) >> BW_SCALE;
            if difference * RATIO <= self.bw || bytes <= u128::from(DIFFERENCE_BYTES) {
                self.bw = u64::midpoint(bw, self.bw);
                self.is_in_use = true;
                self.rounds = 0;
                return;
            }
        }
        self.bw = bw;
        self.begin_interval(totals);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds of 20 ms at 1 segment per ms, with losses in each if `lost` says so.
    fn run(policer: &mut Policer, rounds: u32, delivered: u32, lost: u32, totals: &mut Totals) -> u32 {
        let mut used = 0;
        for _ in 0..rounds {
            totals.delivered_mstamp = totals.delivered_mstamp.after_micros(20_000);
            totals.delivered += delivered;
            totals.lost += lost;
            let sample = RateSample { losses: lost, ..RateSample::default() };
            policer.on_sample(&sample, true, true, totals);
            used += u32::from(policer.is_in_use);
        }
        used
    }

    fn totals() -> Totals {
        Totals { delivered_mstamp: Instant::from_millis(1), delivered: 0, lost: 0, mss: 1448 }
    }

    #[test]
    fn equal_rates_with_heavy_loss_reveal_a_policer() {
        let (mut policer, mut totals) = (Policer::default(), totals());
        assert!(run(&mut policer, 12, 20, 6, &mut totals) > 0);
        let bw = policer.bw().unwrap();
        let expected = (20u64 << BW_SCALE) / 20_000;
        assert!(bw.abs_diff(expected) < expected / 4, "{bw} {expected}");
        // After 48 rounds, of which some have passed, the path is probed again.
        assert!(run(&mut policer, 100, 20, 0, &mut totals) < USE_ROUNDS);
        assert_eq!(policer.bw(), None);
    }

    #[test]
    fn light_or_uneven_loss_is_no_policer() {
        let (mut policer, mut totals) = (Policer::default(), totals());
        assert_eq!(run(&mut policer, 200, 100, 2, &mut totals), 0);
        let (mut policer, mut totals) = (Policer::default(), self::totals());
        for factor in [1, 3, 1, 3, 1, 3] {
            assert_eq!(run(&mut policer, 4, 20 * factor, 6 * factor, &mut totals), 0);
        }
    }
}
