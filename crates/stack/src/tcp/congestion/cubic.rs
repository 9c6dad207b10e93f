//! CUBIC (RFC 9438): the window is a cubic function of the time since the last congestion.

use crate::tcp::conn::Tcb;
use crate::time::Instant;
use serde::{Deserialize, Serialize};

/// Multiplicative decrease.
const BETA: f64 = 0.7;
/// Aggressiveness in segments per cubic second.
const C: f64 = 0.4;
/// RFC 9438 §4.3: α_cubic = 3 (1 − β) / (1 + β).
const ALPHA: f64 = 3.0 * (1.0 - BETA) / (1.0 + BETA);

/// State of CUBIC, windows in segments.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Cubic {
    /// Window before the last reduction, or less (fast convergence).
    w_max: f64,
    /// True if the last reduction was a time-out, so that its window is not a target.
    timed_out: bool,
    /// The current congestion avoidance epoch.
    epoch: Option<Epoch>,
    /// `w_max` before the last reduction, for an undo.
    prior_w_max: f64,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Epoch {
    start: Instant,
    /// Time to reach `w_max` again, in seconds.
    k: f64,
    /// Window of the plateau.
    origin: f64,
    /// Window that a Reno flow would have.
    w_est: f64,
}

/// Returns the cube root by Newton's method: that of the standard library depends on the platform, and
/// simulations are compared byte by byte.
fn cube_root(x: f64) -> f64 {
    if x <= 0.0 {
        return 0.0;
    }
    let mut r = if x > 1.0 { x.sqrt() } else { 1.0 };
    for _ in 0..40 {
        let next = (2.0 * r + x / (r * r)) / 3.0;
        if (next - r).abs() < 1e-9 * next {
            return next;
        }
        r = next;
    }
    r
}

impl Cubic {
    fn begin(&self, cwnd: f64, now: Instant) -> Epoch {
        let (k, origin) = if cwnd < self.w_max && !self.timed_out {
            (cube_root((self.w_max - cwnd) / C), self.w_max)
        } else {
            (0.0, cwnd)
        };
        Epoch { start: now, k, origin, w_est: cwnd }
    }

    /// Grows the window (RFC 9438 §4.2 to §4.5).
    pub fn on_ack(&mut self, c: &mut Tcb, snd_cwnd_cnt: &mut u32, now: Instant, acked: u32) {
        let cwnd = f64::from(c.cwnd);
        let mut epoch = self.epoch.unwrap_or_else(|| self.begin(cwnd, now));
        let t = (now - epoch.start).as_secs_f64();
        let rtt = f64::from(c.srtt >> 3) / 1e6;
        let w_cubic = |t: f64| C * (t - epoch.k).powi(3) + epoch.origin;
        let target = w_cubic(t + rtt).clamp(cwnd, 1.5 * cwnd);
        // §4.3: the Reno-friendly estimate grows as Reno would after it has regained the former window.
        let alpha = if epoch.w_est >= self.w_max { 1.0 } else { ALPHA };
        epoch.w_est += alpha * f64::from(acked) / cwnd;
        let friendly = epoch.w_est;
        let now_cubic = w_cubic(t);
        self.epoch = Some(epoch);
        if now_cubic < friendly && friendly >= cwnd + 1.0 {
            c.cwnd = friendly as u32;
            *snd_cwnd_cnt = 0;
            return;
        }
        // The window grows by (target − cwnd) / cwnd for each acknowledged segment, so by one for each cwnd /
        // (target − cwnd) segments.
        let gap = target - cwnd;
        let per_segment = if gap > 0.0 { cwnd / gap } else { 100.0 * cwnd };
        *snd_cwnd_cnt += acked;
        let step = (per_segment.max(1.0)) as u32;
        if *snd_cwnd_cnt >= step {
            c.cwnd += (*snd_cwnd_cnt / step).min(acked.max(1));
            *snd_cwnd_cnt %= step;
        }
    }

    /// Returns the slow start threshold (§4.6) and applies fast convergence (§4.7).
    pub fn on_congestion(&mut self, c: &Tcb) -> u32 {
        let cwnd = f64::from(c.cwnd);
        self.prior_w_max = self.w_max;
        self.timed_out = false;
        self.w_max = if cwnd < self.w_max { cwnd * (1.0 + BETA) / 2.0 } else { cwnd };
        self.epoch = None;
        ((cwnd * BETA) as u32).max(2)
    }

    /// Undoes a spurious reduction (§4.9).
    pub fn on_undo(&mut self) {
        self.w_max = self.prior_w_max;
        self.timed_out = false;
        self.epoch = None;
    }

    /// Processes the collapse of the window (§4.8): its former size is no target any more.
    pub fn on_timeout(&mut self) {
        self.timed_out = true;
        self.epoch = None;
    }

    /// Starts a new epoch after an idle time, which must not count.
    pub fn on_idle(&mut self) {
        self.epoch = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::time::Duration;

    #[test]
    fn cube_roots_are_exact_enough() {
        for x in [0.001, 0.5, 1.0, 27.0, 1e6, 12_345.678] {
            assert!((cube_root(x).powi(3) - x).abs() < 1e-6 * x);
        }
    }

    /// After a reduction from 100 segments the window is 100 again after K = cbrt(30 / 0.4) = 4.2 s, and flat
    /// there.
    #[test]
    fn window_returns_to_w_max_after_k_seconds() {
        let mut cubic = Cubic::default();
        let mut c = Tcb { cwnd: 100, ..Tcb::vacant() };
        c.srtt = 100_000 << 3;
        c.ssthresh = cubic.on_congestion(&c);
        assert_eq!(c.ssthresh, 70);
        c.cwnd = 70;
        let mut snd_cwnd_cnt = 0;
        let mut now = Instant::from_millis(1);
        let mut at_k = 0;
        for _ in 0..60 {
            let cwnd = c.cwnd;
            cubic.on_ack(&mut c, &mut snd_cwnd_cnt, now, cwnd);
            now += Duration::from_millis(100);
            if now.as_millis() / 100 == 42 {
                at_k = c.cwnd;
            }
        }
        assert!((97..=101).contains(&at_k), "window after K: {at_k}");
    }

    #[test]
    fn short_rtt_grows_at_least_like_reno() {
        let mut cubic = Cubic::default();
        let mut c = Tcb { cwnd: 20, ..Tcb::vacant() };
        c.srtt = 1000 << 3;
        c.ssthresh = cubic.on_congestion(&c);
        c.cwnd = 14;
        let mut snd_cwnd_cnt = 0;
        let mut now = Instant::from_millis(1);
        for _ in 0..100 {
            let cwnd = c.cwnd;
            cubic.on_ack(&mut c, &mut snd_cwnd_cnt, now, cwnd);
            now += Duration::from_millis(1);
        }
        assert!(c.cwnd > 60, "0.53 segments a round until 20, then one: {}", c.cwnd);
    }

    #[test]
    fn fast_convergence_leaves_room_for_newcomers() {
        let mut cubic = Cubic::default();
        let c = Tcb { cwnd: 100, ..Tcb::vacant() };
        cubic.on_congestion(&c);
        let c = Tcb { cwnd: 80, ..Tcb::vacant() };
        cubic.on_congestion(&c);
        assert!((cubic.w_max - 68.0).abs() < 1e-9);
    }
}
