//! Which messages are urgent, ordinary, or heartbeats: random, with exact shares.

use super::plan::Kind;
use ginnel::Random;

/// Messages among which a share is exact.
const BLOCK: u64 = 1_000;

/// A random sequence of kinds. The number of urgent ones among the first `n` is exact if `n` is a multiple of
/// 1,000 or the end of the sequence: for a sequence that begins with message `first` it is (`first` + `n`) ×
/// share − `first` × share, both rounded. The sequences of several workers are parts of one, so the sums of
/// their counts are exact, too.
#[derive(Clone, Debug)]
pub struct Kinds {
    random: Random,
    high_share: f64,
    low_share: f64,
    /// Number of the next message, and end of the sequence.
    next: u64,
    end: u64,
    /// Messages left in the block, and how many of them are urgent and ordinary.
    left: u64,
    high: u64,
    low: u64,
}

/// Returns `count` × `share`, rounded.
fn quota(count: u64, share: f64) -> u64 {
    (count as f64 * share).round() as u64
}

impl Kinds {
    /// Creates the sequence for messages `first` to `first + count` of all workers. The sum of the shares is
    /// at most 1.
    pub fn new(seed: u64, first: u64, count: u64, high_share: f64, low_share: f64) -> Self {
        let random = Random::new(seed ^ first.rotate_left(32));
        Self { random, high_share, low_share, next: first, end: first + count, left: 0, high: 0, low: 0 }
    }

    /// Returns the next kind. After the end of the sequence its shares are no longer exact.
    #[inline]
    pub fn draw(&mut self) -> Kind {
        if self.left == 0 {
            self.begin_block();
        }
        // Selection without replacement: a message is urgent with the probability `high` / `left`.
        let draw = self.random.below(self.left);
        self.left -= 1;
        if draw < self.high {
            self.high -= 1;
            Kind::High
        } else if draw - self.high < self.low {
            self.low -= 1;
            Kind::Low
        } else {
            Kind::Heartbeat
        }
    }

    fn begin_block(&mut self) {
        let to = if self.next < self.end { self.end.min(self.next + BLOCK) } else { self.next + BLOCK };
        let count = |share| quota(to, share) - quota(self.next, share);
        // What rounding leaves of the ordinary requests is carried over.
        (self.high, self.low) = (count(self.high_share), self.low + count(self.low_share));
        (self.left, self.next) = (to - self.next, to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn count(kinds: &mut Kinds, n: u64) -> (u64, u64) {
        let (mut high, mut low) = (0, 0);
        for _ in 0..n {
            match kinds.draw() {
                Kind::High => high += 1,
                Kind::Low => low += 1,
                Kind::Heartbeat => {}
            }
        }
        (high, low)
    }

    #[test]
    fn shares_are_exact_and_positions_random() {
        let mut kinds = Kinds::new(1, 0, 172_800, 0.05, 0.1);
        for _ in 0..172 {
            assert_eq!(count(&mut kinds, 1_000), (50, 100));
        }
        assert_eq!(count(&mut kinds, 800), (40, 80));
        let sequence = |seed| {
            let mut kinds = Kinds::new(seed, 0, 1_000, 0.05, 0.0);
            (0..1_000).map(|_| kinds.draw() == Kind::High).collect::<Vec<_>>()
        };
        assert_eq!(sequence(1), sequence(1));
        assert_ne!(sequence(1), sequence(2));
    }

    proptest! {
        #[test]
        fn any_share_of_any_number_is_exact(
            counts in proptest::collection::vec(0u64..3_000, 1..4),
            high in 0.0f64..=1.0,
            rest in 0.0f64..=1.0,
            seed in any::<u64>(),
        ) {
            let low = rest * (1.0 - high);
            let (mut first, mut sum) = (0, (0, 0));
            for n in counts {
                let mut kinds = Kinds::new(seed, first, n, high, low);
                let (h, l) = count(&mut kinds, n);
                sum = (sum.0 + h, sum.1 + l);
                first += n;
            }
            prop_assert_eq!(sum.0, quota(first, high));
            prop_assert!(sum.1.abs_diff(quota(first, low)) <= 3, "{} {}", sum.1, quota(first, low));
        }
    }
}
