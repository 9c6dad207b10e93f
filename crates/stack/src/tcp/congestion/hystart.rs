//! HyStart++ (RFC 9406): leaves slow start when the round-trip time rises, before the queue overflows.

use crate::tcp::conn::Tcb;
use crate::wire::tcp::SeqNumber;
use serde::{Deserialize, Serialize};

const MIN_RTT_THRESH_US: u32 = 4_000;
const MAX_RTT_THRESH_US: u32 = 16_000;
const MIN_RTT_DIVISOR: u32 = 8;
const RTT_SAMPLES: u32 = 8;
const CSS_GROWTH_DIVISOR: u32 = 4;
const CSS_ROUNDS: u32 = 5;

/// State of Conservative Slow Start (RFC 9406 §4.2).
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct ConservativeSlowStart {
    /// Round-trip time at which it began (cssBaselineMinRtt), in µs.
    baseline_min_rtt_us: u32,
    /// Rounds so far.
    rounds: u32,
}

/// State of HyStart++.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct HyStart {
    /// Sequence number whose acknowledgement ends the round (windowEnd). Between two rounds there is none:
    /// the next round begins with an acknowledgement and covers everything sent before it, as on Linux. Data
    /// that the last acknowledgement of a round releases were not sent yet, so a round that began with that
    /// acknowledgement and nothing in flight would end at once.
    window_end: Option<SeqNumber>,
    last_round_min_rtt_us: Option<u32>,
    current_round_min_rtt_us: Option<u32>,
    rtt_sample_count: u32,
    /// Present in Conservative Slow Start.
    css: Option<ConservativeSlowStart>,
    /// True if slow start was left once; from then on standard slow start is used (RFC 9406 §4.3).
    ended: bool,
}

impl HyStart {
    /// Restarts with a new slow start; only the first slow start of a connection is observed.
    pub fn restart(&mut self) {
        *self = Self { ended: self.ended, ..Self::default() };
    }

    pub fn end(&mut self) {
        self.ended = true;
        self.css = None;
    }

    /// Returns by how many segments the window grows when `acked` segments were acknowledged: a quarter of
    /// them in Conservative Slow Start.
    pub fn growth(&self, acked: u32, snd_cwnd_cnt: &mut u32) -> u32 {
        if self.css.is_none() {
            return acked;
        }
        *snd_cwnd_cnt += acked;
        let growth = *snd_cwnd_cnt / CSS_GROWTH_DIVISOR;
        *snd_cwnd_cnt %= CSS_GROWTH_DIVISOR;
        growth
    }

    /// Processes a round-trip time sample during slow start.
    pub fn on_sample(&mut self, c: &Tcb, rtt_us: u32) {
        if self.ended {
            return;
        }
        self.window_end.get_or_insert(c.snd_nxt);
        self.current_round_min_rtt_us = Some(self.current_round_min_rtt_us.map_or(rtt_us, |m| m.min(rtt_us)));
        self.rtt_sample_count += 1;
        if self.rtt_sample_count < RTT_SAMPLES {
            return;
        }
        let (Some(current), Some(last)) = (self.current_round_min_rtt_us, self.last_round_min_rtt_us) else {
            return;
        };
        match self.css {
            None => {
                let threshold = (last / MIN_RTT_DIVISOR).clamp(MIN_RTT_THRESH_US, MAX_RTT_THRESH_US);
                if current >= last.saturating_add(threshold) {
                    self.css = Some(ConservativeSlowStart { baseline_min_rtt_us: current, rounds: 0 });
                }
            }
            // The rise was noise: slow start continues.
            Some(css) if current < css.baseline_min_rtt_us => self.css = None,
            Some(_) => {}
        }
    }

    /// Processes a cumulative acknowledgement: a round ends when the data that were sent before its start are
    /// acknowledged.
    pub fn on_una(&mut self, una: SeqNumber, c: &mut Tcb) {
        if self.ended || !self.window_end.is_some_and(|end| una.ge(end)) {
            return;
        }
        self.window_end = None;
        self.last_round_min_rtt_us = self.current_round_min_rtt_us.take();
        self.rtt_sample_count = 0;
        if let Some(css) = &mut self.css {
            css.rounds += 1;
            if css.rounds >= CSS_ROUNDS {
                c.ssthresh = c.cwnd;
                self.end();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_round(h: &mut HyStart, c: &mut Tcb, seq: &mut u32, rtt_us: u32) {
        c.snd_nxt = SeqNumber(*seq + 1000);
        for _ in 0..10 {
            h.on_sample(c, rtt_us);
        }
        *seq += 1000;
        h.on_una(SeqNumber(*seq), c);
    }

    #[test]
    fn round_after_full_acknowledgement_covers_following_data() {
        let mut h = HyStart::default();
        let mut c = Tcb { cwnd: 20, snd_nxt: SeqNumber(10_000), ..Tcb::vacant() };
        h.on_sample(&c, 200_000);
        h.on_una(SeqNumber(10_000), &mut c);
        c.snd_nxt = SeqNumber(30_000);
        for n in 1..=8 {
            assert!(h.css.is_none(), "before acknowledgement {n}");
            h.on_sample(&c, 240_000);
            h.on_una(SeqNumber(10_000 + 2000 * n), &mut c);
        }
        assert!(h.css.is_some());
    }

    #[test]
    fn rising_rtt_ends_slow_start_after_five_rounds() {
        let mut h = HyStart::default();
        let mut c = Tcb { cwnd: 100, ..Tcb::vacant() };
        let mut seq = 0;
        run_round(&mut h, &mut c, &mut seq, 20_000);
        run_round(&mut h, &mut c, &mut seq, 20_000);
        assert!(h.css.is_none());
        for _ in 0..5 {
            run_round(&mut h, &mut c, &mut seq, 30_000);
        }
        assert_eq!(c.ssthresh, 100);
    }

    #[test]
    fn steady_rtt_never_ends_slow_start() {
        let mut h = HyStart::default();
        let mut c = Tcb { cwnd: 100, ..Tcb::vacant() };
        let mut seq = 0;
        for _ in 0..50 {
            run_round(&mut h, &mut c, &mut seq, 20_000);
        }
        assert_eq!(c.ssthresh, u32::MAX);
    }
}
