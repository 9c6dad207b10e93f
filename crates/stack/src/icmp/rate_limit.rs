//! The rate limit of transmitted ICMP errors: a global token bucket and one per destination, as on Linux
//! (`icmp_msgs_per_sec`, `icmp_msgs_burst`, `icmp_ratelimit`; RFC 1812 §4.3.2.8, RFC 4443 §2.4 (f)).

use crate::ip::entropy::KeyedHash;
use crate::time::Instant;
use core::net::IpAddr;
use core::time::Duration;

/// Number of destination buckets. Destinations are assigned to buckets by a keyed hash, so which destinations
/// share a bucket is not predictable.
const BUCKETS: usize = 256;
/// Number of errors that one destination may get in a burst after a pause.
const DESTINATION_BURST: u32 = 6;

/// A token bucket. Tokens are counted in the time that they take to accumulate.
#[derive(Clone, Copy, Debug)]
struct TokenBucket {
    credit: Duration,
    updated: Instant,
}

impl TokenBucket {
    const EMPTY: Self = Self { credit: Duration::ZERO, updated: Instant::ZERO };

    fn take(&mut self, now: Instant, interval: Duration, burst: u32) -> bool {
        let credit = self.credit.saturating_add(now.saturating_since(self.updated));
        self.credit = credit.min(interval.saturating_mul(burst));
        self.updated = now;
        match self.credit.checked_sub(interval) {
            Some(rest) => {
                self.credit = rest;
                true
            }
            None => false,
        }
    }
}

/// The rate limiter: the global token bucket, and those of the destinations.
#[derive(Debug)]
pub(crate) struct IcmpRateLimiter {
    global: TokenBucket,
    destinations: Box<[TokenBucket; BUCKETS]>,
    /// Time in which the global bucket accumulates one token; `None` if no error may be sent.
    interval: Option<Duration>,
    burst: u32,
    destination_interval: Duration,
    hash: KeyedHash,
}

impl IcmpRateLimiter {
    pub(crate) fn new(per_second: u32, burst: u32, destination_interval: Duration, hash: KeyedHash) -> Self {
        let interval = Duration::from_secs(1).checked_div(per_second);
        let full = TokenBucket { credit: Duration::MAX, ..TokenBucket::EMPTY };
        Self {
            global: full,
            destinations: Box::new([full; BUCKETS]),
            interval,
            burst,
            destination_interval,
            hash,
        }
    }

    /// Takes one token for an error to `destination`. Returns false if the error must not be sent.
    pub(crate) fn allow(&mut self, now: Instant, destination: IpAddr) -> bool {
        let Some(interval) = self.interval else { return false };
        let at = self.hash.of(destination) as usize % BUCKETS;
        // The destination's bucket comes first: an error that it refuses must not consume a global token.
        self.destinations[at].take(now, self.destination_interval, DESTINATION_BURST)
            && self.global.take(now, interval, self.burst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limiter(per_second: u32, burst: u32) -> IcmpRateLimiter {
        IcmpRateLimiter::new(per_second, burst, Duration::from_secs(1), KeyedHash::new(&[1; 32]))
    }

    fn destination(low: u32) -> IpAddr {
        IpAddr::from(low.to_be_bytes())
    }

    #[test]
    fn destination_gets_six_errors_then_one_per_second() {
        let mut limiter = limiter(1000, 50);
        let mut allowed = |millis: u64| {
            (0..20).filter(|_| limiter.allow(Instant::from_millis(millis), destination(1))).count()
        };
        assert_eq!(allowed(0), 6);
        assert_eq!(allowed(999), 0);
        assert_eq!(allowed(1000), 1);
        assert_eq!(allowed(60_000), 6);
    }

    #[test]
    fn global_rate_limits_all_destinations() {
        let mut limiter = limiter(1000, 50);
        let mut allowed = |millis: u64| {
            (0..1000).filter(|&low| limiter.allow(Instant::from_millis(millis), destination(low))).count()
        };
        assert_eq!(allowed(0), 50);
        assert_eq!(allowed(10), 10);
    }

    #[test]
    fn rate_of_zero_allows_nothing() {
        assert!(!limiter(0, 50).allow(Instant::from_millis(5), destination(1)));
    }
}
