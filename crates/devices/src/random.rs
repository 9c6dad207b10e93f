//! A small seeded random number generator: xoshiro256++ (Blackman and Vigna), seeded through SplitMix64.
//!
//! This implementation guarantees that the sequence of a seed never changes. It is not suitable for secrets.

/// A stream of pseudo-random numbers that is determined by its seed.
#[derive(Clone, Debug)]
pub struct Random {
    state: [u64; 4],
}

impl Random {
    /// Returns the stream of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut seed = seed;
        let state = std::array::from_fn(|_| {
            seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = seed;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        });
        Self { state }
    }

    /// Returns 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        let [s0, s1, s2, s3] = &mut self.state;
        let result = s0.wrapping_add(*s3).rotate_left(23).wrapping_add(*s0);
        let t = *s1 << 17;
        *s2 ^= *s0;
        *s3 ^= *s1;
        *s1 ^= *s2;
        *s0 ^= *s3;
        *s2 ^= t;
        *s3 = s3.rotate_left(45);
        result
    }

    /// Returns a number below `bound`, or 0 if `bound` is 0. The bias is below `bound` / 2^64.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// Returns a number in [0, 1) with 53 random bits.
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns an exponentially distributed number with mean 1, such as the gap between events of a Poisson
    /// process.
    pub fn exponential(&mut self) -> f64 {
        // 1 - unit() lies in (0, 1], so the logarithm is finite.
        -(1.0 - self.unit()).ln()
    }

    /// Shuffles `items` (Fisher–Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }

    /// Returns true with the given probability: always if it is 1 or more, never if it is 0 or less. Draws
    /// one number in any case, so that the stream does not depend on the probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected values are the first outputs of the authors' reference program for the state {1, 2, 3,
    /// 4}.
    #[test]
    fn output_matches_the_reference() {
        let mut random = Random { state: [1, 2, 3, 4] };
        let expected = [41_943_041, 58_720_359, 3_588_806_011_781_223, 3_591_011_842_654_386];
        assert_eq!(std::array::from_fn(|_| random.next_u64()), expected);
    }

    #[test]
    fn output_depends_on_the_seed() {
        let draw = |seed| -> Vec<u64> {
            let mut r = Random::new(seed);
            (0..8).map(|_| r.next_u64()).collect()
        };
        assert_eq!(draw(5), draw(5));
        assert_ne!(draw(5), draw(6));
    }

    #[test]
    fn bounds_and_probabilities_hold() {
        let mut random = Random::new(1);
        assert_eq!(random.below(0), 0);
        assert!((0..1000).all(|_| random.below(7) < 7));
        assert!((0..1000).all(|_| random.chance(1.0) && !random.chance(0.0)));
        let hits = (0..100_000).filter(|_| random.chance(0.01)).count();
        assert!((850..1150).contains(&hits), "{hits}");
    }

    #[test]
    fn exponential_has_mean_one() {
        let mut random = Random::new(3);
        let mean = (0..100_000).map(|_| random.exponential()).sum::<f64>() / 100_000.0;
        assert!((mean - 1.0).abs() < 0.02, "{mean}");
    }

    #[test]
    fn shuffle_keeps_the_items() {
        let mut items: Vec<u32> = (0..50).collect();
        Random::new(9).shuffle(&mut items);
        assert_ne!(items, (0..50).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
    }
}
