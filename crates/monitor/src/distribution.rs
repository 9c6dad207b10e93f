//! Distributions of latencies.

use ginnel_apps::load::latency::Latency;
use ginnel_stack::time::Instant;
use hdrhistogram::Histogram;
use serde::Serialize;

/// Width of a bin of the sketch.
pub const SKETCH_BIN_NANOS: u64 = 100_000;
/// Number of the sketch's bins: 10 s. Longer latencies are in the last one.
pub const SKETCH_BINS: usize = 100_000;

/// The quantiles of reports.
pub const QUANTILES: [f64; 14] =
    [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 0.9999, 1.0];

/// Latencies of one priority. Recording costs a few additions.
#[derive(Clone, Debug)]
pub struct Distribution {
    latency: Latency,
    /// Number of latencies in each 0.1 ms. The length is 0 or a power of two.
    sketch: Vec<u64>,
    count: u64,
    sum_nanos: u128,
    min_nanos: u64,
    max_nanos: u64,
}

impl Default for Distribution {
    fn default() -> Self {
        Self {
            latency: Latency::default(),
            sketch: Vec::new(),
            count: 0,
            sum_nanos: 0,
            min_nanos: u64::MAX,
            max_nanos: 0,
        }
    }
}

impl Distribution {
    /// Records the time between two instants.
    #[inline]
    pub fn record(&mut self, from: Instant, to: Instant) {
        self.latency.record(from, to);
        let nanos = to.as_nanos().saturating_sub(from.as_nanos());
        let bin = ((nanos / SKETCH_BIN_NANOS) as usize).min(SKETCH_BINS - 1);
        match self.sketch.get_mut(bin) {
            Some(count) => *count += 1,
            None => self.add_bins(bin),
        }
        self.count += 1;
        self.sum_nanos += u128::from(nanos);
        self.min_nanos = self.min_nanos.min(nanos);
        self.max_nanos = self.max_nanos.max(nanos);
    }

    /// Records a latency beyond the last bin of the sketch.
    #[cold]
    fn add_bins(&mut self, bin: usize) {
        self.sketch.resize((bin + 1).next_power_of_two(), 0);
        self.sketch[bin] = 1;
    }

    /// Adds the latencies of another distribution.
    pub fn add(&mut self, other: &Self) {
        self.latency.add(&other.latency);
        if self.sketch.len() < other.sketch.len() {
            self.sketch.resize(other.sketch.len(), 0);
        }
        self.sketch.iter_mut().zip(&other.sketch).for_each(|(mine, theirs)| *mine += theirs);
        self.count += other.count;
        self.sum_nanos += other.sum_nanos;
        self.min_nanos = self.min_nanos.min(other.min_nanos);
        self.max_nanos = self.max_nanos.max(other.max_nanos);
    }

    /// Removes all latencies.
    pub fn clear(&mut self) {
        if self.count > 0 {
            *self = Self::default();
        }
    }

    /// Returns the number of latencies.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the sum of the latencies in nanoseconds.
    #[must_use]
    pub fn sum_nanos(&self) -> u128 {
        self.sum_nanos
    }

    /// Returns for each of the ascending bounds, in nanoseconds, how many latencies are not longer. Bounds
    /// have three significant digits.
    #[must_use]
    pub fn counts_up_to<const N: usize>(&self, bounds: &[u64; N]) -> [u64; N] {
        let histogram = self.histogram();
        let (mut values, mut count) = (histogram.iter_recorded().peekable(), 0);
        bounds.map(|bound| {
            let last = histogram.highest_equivalent(bound);
            while let Some(value) = values.next_if(|value| value.value_iterated_to() <= last) {
                count += value.count_at_value();
            }
            count
        })
    }

    /// Returns the bins of 0.1 ms up to the last one that is not empty.
    #[must_use]
    pub fn sketch(&self) -> &[u64] {
        let used = self.sketch.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1);
        &self.sketch[..used]
    }

    /// Returns the latencies with three significant digits.
    #[must_use]
    pub fn histogram(&self) -> Histogram<u64> {
        self.latency.histogram()
    }

    /// Returns mean and quantiles.
    #[must_use]
    pub fn summary(&self) -> LatencySummary {
        if self.count == 0 {
            return LatencySummary::default();
        }
        let histogram = self.histogram();
        let quantile = |quantile: f64| match quantile {
            1.0 => self.max_nanos,
            _ => histogram.value_at_quantile(quantile).clamp(self.min_nanos, self.max_nanos),
        };
        LatencySummary {
            count: self.count,
            mean_ns: (self.sum_nanos / u128::from(self.count)) as u64,
            min_ns: self.min_nanos,
            quantiles_ns: QUANTILES.map(quantile),
        }
    }
}

/// Mean and quantiles in nanoseconds. Mean, minimum and maximum are exact, the others have three digits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LatencySummary {
    /// Number of latencies. If it is 0, so are the others.
    pub count: u64,
    /// Mean.
    pub mean_ns: u64,
    /// Smallest latency.
    pub min_ns: u64,
    /// The quantiles [`QUANTILES`]; the last one is the largest latency.
    pub quantiles_ns: [u64; QUANTILES.len()],
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(millis: impl IntoIterator<Item = u64>) -> Distribution {
        let mut distribution = Distribution::default();
        for ms in millis {
            distribution.record(Instant::from_millis(5), Instant::from_millis(5 + ms));
        }
        distribution
    }

    #[test]
    fn quantiles_mean_and_extremes() {
        let (mut all, rest) = (recorded(1..=50), recorded(51..=100));
        all.add(&rest);
        let summary = all.summary();
        assert_eq!((summary.count, summary.mean_ns, summary.min_ns), (100, 50_500_000, 1_000_000));
        for (quantile, nanos) in QUANTILES.iter().zip(summary.quantiles_ns) {
            let expected = (quantile * 100.0).ceil() * 1e6;
            assert!((nanos as f64 / expected - 1.0).abs() < 2e-3, "{quantile}: {nanos}");
        }
        assert_eq!(recorded([]).summary(), LatencySummary::default());
    }

    #[test]
    fn counts_are_cumulative_up_to_each_bound() {
        let distribution = recorded([1, 2, 2, 3, 900]);
        let bounds = [500_000, 1_000_000, 2_000_000, 10_000_000, 1_000_000_000];
        assert_eq!(distribution.counts_up_to(&bounds), [0, 1, 3, 4, 5]);
        assert_eq!(recorded([]).counts_up_to(&[1]), [0]);
    }

    #[test]
    fn sketch_has_bins_of_a_tenth_of_a_millisecond() {
        let mut distribution = recorded([1, 1, 2]);
        distribution.record(Instant::ZERO, Instant::from_micros(99));
        let bins = distribution.sketch();
        assert_eq!((bins[0], bins[10], bins[20], bins.len()), (1, 2, 1, 21));
        distribution.record(Instant::ZERO, Instant::from_millis(3_600_000));
        assert_eq!(distribution.sketch().len(), SKETCH_BINS);
    }
}
