//! Due times of requests in an open loop. The plan fixes them, independent of the server. So a server that
//! stalls cannot make the generator omit requests (coordinated omission): they are sent late, and their
//! latency counts from their due time.

use ginnel::Instant;
use ginnel::Random;

/// A sequence of due times with a given mean rate.
#[derive(Clone, Debug)]
pub struct Arrivals {
    start: Instant,
    gap_nanos: f64,
    /// Next due time in nanoseconds from the start.
    next_nanos: f64,
    count: u64,
    poisson: Option<Random>,
}

impl Arrivals {
    /// Creates `per_second` (> 0) arrivals per second from `start` on, at equal distances or as a Poisson
    /// process drawn from `poisson`.
    pub fn new(start: Instant, per_second: f64, poisson: Option<Random>) -> Self {
        let mut arrivals = Self { start, gap_nanos: 1e9 / per_second, next_nanos: 0.0, count: 0, poisson };
        if arrivals.poisson.is_some() {
            arrivals.advance();
        }
        arrivals
    }

    /// Returns the due time of the next request.
    pub fn due(&self) -> Instant {
        Instant::from_nanos(self.start.as_nanos().saturating_add(self.next_nanos as u64))
    }

    /// Advances to the request after the next one.
    pub fn advance(&mut self) {
        self.count += 1;
        self.next_nanos = match &mut self.poisson {
            // Computed from the count instead of by addition, so that rounding errors do not accumulate.
            None => self.count as f64 * self.gap_nanos,
            Some(rng) => self.next_nanos + self.gap_nanos * rng.exponential(),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::time::Duration;

    fn times(mut arrivals: Arrivals, until: Duration) -> Vec<u64> {
        let end = Instant::from_millis(1_000) + until;
        let mut times = Vec::new();
        while arrivals.due() < end {
            times.push(arrivals.due().as_nanos() - 1_000_000_000);
            arrivals.advance();
        }
        times
    }

    #[test]
    fn constant_arrivals_keep_their_rate_without_drift() {
        let start = Instant::from_millis(1_000);
        assert_eq!(
            times(Arrivals::new(start, 4.0, None), Duration::from_secs(1)),
            [0, 250_000_000, 500_000_000, 750_000_000]
        );
        let many = times(Arrivals::new(start, 3e6, None), Duration::from_secs(1));
        assert_eq!(many.len(), 3_000_000);
        assert_eq!(many[1_500_000], 500_000_000);
    }

    #[test]
    fn poisson_arrivals_have_the_right_mean_and_variance() {
        let start = Instant::from_millis(1_000);
        let times = times(Arrivals::new(start, 10_000.0, Some(Random::new(5))), Duration::from_secs(20));
        assert!((times.len() as i64 - 200_000).abs() < 2_000, "{}", times.len());
        let gaps: Vec<f64> = times.windows(2).map(|w| (w[1] - w[0]) as f64).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.03, "an exponential gap deviates by its mean");
    }
}
