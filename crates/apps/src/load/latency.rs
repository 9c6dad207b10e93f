//! Histogram of latencies. A generator records several values per request, so recording costs only a dozen
//! instructions. Quantiles are computed once, from a [`Histogram`] with the same buckets.

use core::time::Duration;
use ginnel::Instant;
use hdrhistogram::Histogram;

/// Largest latency that is distinguished; larger ones count as this value.
const LATENCY_MAX: Duration = Duration::from_secs(3600);
const NANOS_MAX: u64 = LATENCY_MAX.as_nanos() as u64;
/// Significant decimal digits of a latency.
const DIGITS: u8 = 3;
/// Values below this have a bucket of their own, which gives three digits. Above, each power of two has half
/// as many buckets.
const EXACT: u64 = 2048;
const HALF_BITS: u32 = (EXACT / 2).ilog2();

/// Recorded latencies in nanoseconds. They are serialized as pairs of a bucket and its count.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
#[serde(into = "Vec<(u32, u64)>", try_from = "Vec<(u32, u64)>")]
pub struct Latency {
    /// Number of values in each bucket. 270 KB, of which a run touches the buckets between its fastest and
    /// its slowest response.
    counts: Box<[u64]>,
}

impl Default for Latency {
    fn default() -> Self {
        Self { counts: vec![0; bucket(NANOS_MAX) + 1].into_boxed_slice() }
    }
}

impl From<Latency> for Vec<(u32, u64)> {
    fn from(latency: Latency) -> Self {
        (0..).zip(latency.counts).filter(|(_, count)| *count > 0).collect()
    }
}

impl TryFrom<Vec<(u32, u64)>> for Latency {
    type Error = String;

    fn try_from(pairs: Vec<(u32, u64)>) -> Result<Self, String> {
        let mut latency = Self::default();
        for (bucket, count) in pairs {
            let of_bucket = latency.counts.get_mut(bucket as usize);
            *of_bucket.ok_or_else(|| format!("{bucket} is no bucket of a histogram"))? += count;
        }
        Ok(latency)
    }
}

/// Returns the bucket of a value.
const fn bucket(nanos: u64) -> usize {
    let shift = (nanos | (EXACT - 1)).ilog2() - HALF_BITS;
    (((shift as u64) << HALF_BITS) + (nanos >> shift)) as usize
}

/// Returns the smallest value of a bucket.
const fn value(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < EXACT {
        return bucket;
    }
    let shift = (bucket >> HALF_BITS) - 1;
    (bucket - (shift << HALF_BITS)) << shift
}

impl Latency {
    /// Records the time between two instants.
    #[inline]
    pub fn record(&mut self, from: Instant, to: Instant) {
        let nanos = to.as_nanos().saturating_sub(from.as_nanos()).min(NANOS_MAX);
        self.counts[bucket(nanos)] += 1;
    }

    /// Adds the values of another histogram.
    pub fn add(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(mine, theirs)| *mine += theirs);
    }

    /// Returns the recorded values as a [`Histogram`], for quantiles.
    pub fn histogram(&self) -> Histogram<u64> {
        let mut histogram =
            Histogram::new_with_bounds(1, NANOS_MAX, DIGITS).expect("constant bounds are valid");
        for (bucket, count) in self.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            histogram.saturating_record_n(value(bucket), *count);
        }
        histogram
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn latencies_above_the_maximum_count_as_the_maximum() {
        let mut latency = Latency::default();
        latency.record(Instant::ZERO, Instant::MAX);
        let longest = latency.histogram().max() as f64;
        assert!((longest / NANOS_MAX as f64 - 1.0).abs() < 1e-3);
    }

    #[test]
    fn unknown_buckets_are_refused() {
        let error = serde_json::from_str::<Latency>("[[4000000, 1]]").unwrap_err().to_string();
        assert!(error.contains("4000000 is no bucket"), "{error}");
    }

    #[test]
    fn buckets_are_contiguous() {
        for n in 0..=bucket(NANOS_MAX) {
            assert_eq!(bucket(value(n)), n);
            assert_eq!(bucket(value(n + 1) - 1), n);
        }
    }

    proptest! {
        #[test]
        fn quantiles_equal_those_of_a_histogram(
            values in proptest::collection::vec((0u32..44, any::<u64>()), 1..300),
            split in 0usize..300,
        ) {
            let nanos: Vec<u64> = values.iter().map(|(bits, random)| (random >> (63 - bits)).min(NANOS_MAX)).collect();
            let mut expected = Histogram::<u64>::new_with_bounds(1, NANOS_MAX, DIGITS).unwrap();
            let mut parts = [Latency::default(), Latency::default()];
            for (i, nanos) in nanos.iter().enumerate() {
                expected.saturating_record(*nanos);
                let to = Instant::from_nanos(1_000 + nanos);
                parts[usize::from(i < split)].record(Instant::from_nanos(1_000), to);
            }
            let [mut all, rest] = parts;
            all.add(&rest);
            let read = all.histogram();
            prop_assert_eq!(read.len(), expected.len());
            prop_assert_eq!((read.min(), read.max()), (expected.min(), expected.max()));
            for quantile in [0.0, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0] {
                prop_assert_eq!(read.value_at_quantile(quantile), expected.value_at_quantile(quantile));
            }
            prop_assert_eq!(read.mean(), expected.mean());
            let json = serde_json::to_string(&all).unwrap();
            prop_assert_eq!(serde_json::from_str::<Latency>(&json).unwrap().counts, all.counts);
        }
    }
}
