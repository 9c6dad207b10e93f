//! How many ICMP errors may leave: a budget for all and one for each destination, as on Linux (`icmp_msgs_per_sec`,
//! `icmp_msgs_burst`, `icmp_ratelimit`; RFC 1812 §4.3.2.8, RFC 4443 §2.4 (f)).

use crate::ip::entropy::KeyedHash;
use crate::time::Instant;
use core::net::IpAddr;
use core::time::Duration;

/// Buckets of destinations. Destinations that share one share its budget; which do is not predictable.
const BUCKETS: usize = 256;
/// Errors one destination gets at once after silence.
const DESTINATION_BURST: u32 = 6;

/// Tokens that come back with time, counted in the time they take to come back.
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

/// The budgets.
#[derive(Debug)]
pub(crate) struct IcmpRateLimiter {
    global: TokenBucket,
    destinations: Box<[TokenBucket; BUCKETS]>,
    /// Time one error costs of the common budget; `None` if none may leave.
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

    /// Takes one error to `destination` out of the budgets. False if it must not be sent.
    pub(crate) fn allow(&mut self, now: Instant, destination: IpAddr) -> bool {
        let Some(interval) = self.interval else { return false };
        let at = self.hash.of(destination) as usize % BUCKETS;
        // The destination's budget first: what it refuses must not use up the others'.
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
    fn one_destination_gets_six_at_once_and_then_one_a_second() {
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
    fn all_destinations_together_keep_to_the_rate() {
        let mut limiter = limiter(1000, 50);
        let mut allowed = |millis: u64| {
            (0..1000).filter(|&low| limiter.allow(Instant::from_millis(millis), destination(low))).count()
        };
        assert_eq!(allowed(0), 50);
        assert_eq!(allowed(10), 10);
    }

    #[test]
    fn a_rate_of_zero_allows_nothing() {
        assert!(!limiter(0, 50).allow(Instant::from_millis(5), destination(1)));
    }
}
