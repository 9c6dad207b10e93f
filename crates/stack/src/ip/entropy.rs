//! Unpredictable numbers and keyed hashes. Both are derived from the seed the stack is created with, so equal
//! seeds and inputs give equal runs.

use core::hash::{BuildHasher, Hash};
use siphasher::sip::SipHasher13;

/// A pseudorandom number stream that is unpredictable without the key: SipHash-1-3 of a counter.
#[derive(Clone, Debug)]
pub(crate) struct Entropy {
    key: KeyedHash,
    counter: u64,
}

impl Entropy {
    pub(crate) fn new(seed: &[u8; 32]) -> Self {
        Self { key: KeyedHash::from_bytes(&seed[..16]), counter: 0 }
    }

    /// Returns the next 64 pseudorandom bits.
    pub(crate) fn next_u64(&mut self) -> u64 {
        self.counter += 1;
        self.key.hash_one(self.counter)
    }

    /// Returns a number below `limit`, or 0 if `limit` is 0. The bias is below 2^-32 for the small limits
    /// used here.
    pub(crate) fn below(&mut self, limit: u32) -> u32 {
        let wide = (self.next_u64() >> 32) * u64::from(limit);
        // Cannot truncate: both factors are below 2^32, so the upper half is below 2^32, too.
        (wide >> 32) as u32
    }
}

/// Builds SipHash hashers with a secret key, so that a remote host cannot provoke collisions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyedHash {
    hasher: SipHasher13,
}

impl KeyedHash {
    /// Takes the key from the second half of the seed; [`Entropy`] uses the first half.
    pub(crate) fn new(seed: &[u8; 32]) -> Self {
        Self::from_bytes(&seed[16..])
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let mut key = [0; 16];
        key.copy_from_slice(&bytes[..16]);
        Self { hasher: SipHasher13::new_with_key(&key) }
    }

    /// Returns the hash of one value.
    pub(crate) fn of(&self, value: impl Hash) -> u64 {
        self.hash_one(value)
    }
}

impl BuildHasher for KeyedHash {
    type Hasher = SipHasher13;

    fn build_hasher(&self) -> SipHasher13 {
        self.hasher
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_determines_the_number_sequence() {
        let draw = |seed: u8| {
            let mut entropy = Entropy::new(&[seed; 32]);
            [entropy.next_u64(), entropy.next_u64(), entropy.next_u64()]
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn below_reaches_every_value_under_the_limit() {
        let mut entropy = Entropy::new(&[7; 32]);
        let mut seen = [false; 5];
        for _ in 0..200 {
            seen[entropy.below(5) as usize] = true;
        }
        assert_eq!(seen, [true; 5]);
        assert_eq!(entropy.below(0), 0);
    }
}
