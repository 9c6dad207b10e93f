//! Values that must not be predictable: flow hash, initial sequence numbers, timestamp offsets, port choice,
//! cookies.
//!
//! Values that a peer sees are keyed with SipHash-1-3 from the seed that the owner provides. The flow hash,
//! which is never sent and which every segment needs, is a keyed product instead (docs/adr/0007).

pub(super) mod image;

use super::demux::{FlowKey, HostAddr};
use crate::time::Instant;
use core::hash::Hasher;
use core::net::IpAddr;
use siphasher::sip::SipHasher13;

/// Timestamp offsets that are cached: a power of two.
const TIMESTAMP_OFFSET_CACHE_LEN: usize = 256;

/// Keys of a stack.
pub(crate) struct Secrets {
    flow: [u64; 3],
    sequence: (u64, u64),
    timestamp: SipHasher13,
    /// Cached timestamp offsets, each with the addresses that it belongs to.
    timestamp_offset_cache: Box<[(u64, u32); TIMESTAMP_OFFSET_CACHE_LEN]>,
    cookie: SipHasher13,
    port: (u64, u64),
    random: u64,
}

fn write_address(hasher: &mut SipHasher13, address: HostAddr) {
    match address.ip() {
        IpAddr::V4(a) => hasher.write(&a.octets()),
        IpAddr::V6(a) => hasher.write(&a.octets()),
    }
}

/// Returns both halves of a product, folded: every bit of the factors affects every bit of the result.
#[inline(always)]
const fn folded_multiply(a: u64, b: u64) -> u64 {
    let product = a as u128 * b as u128;
    product as u64 ^ (product >> 64) as u64
}

/// Returns SipHash-1-3 of `LEN` bytes, 8 … 12, without the buffering that input of any length needs. The
/// first eight are `first`, the others `last`, both with the lowest byte first.
#[inline]
fn siphash13<const LEN: u8>((k0, k1): (u64, u64), first: u64, last: u32) -> u64 {
    // The last block ends with the length of the input.
    let last = u64::from(last) | (LEN as u64) << 56;
    let mut v = [
        k0 ^ 0x736f_6d65_7073_6575,
        k1 ^ 0x646f_7261_6e64_6f6d,
        k0 ^ 0x6c79_6765_6e65_7261,
        k1 ^ 0x7465_6462_7974_6573,
    ];
    for word in [first, last] {
        v[3] ^= word;
        sip_round(&mut v);
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    for _ in 0..3 {
        sip_round(&mut v);
    }
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

#[inline(always)]
fn sip_round([v0, v1, v2, v3]: &mut [u64; 4]) {
    *v0 = v0.wrapping_add(*v1);
    *v2 = v2.wrapping_add(*v3);
    *v1 = v1.rotate_left(13) ^ *v0;
    *v3 = v3.rotate_left(16) ^ *v2;
    *v0 = v0.rotate_left(32);
    *v2 = v2.wrapping_add(*v1);
    *v0 = v0.wrapping_add(*v3);
    *v1 = v1.rotate_left(17) ^ *v2;
    *v3 = v3.rotate_left(21) ^ *v0;
    *v2 = v2.rotate_left(32);
}

/// Returns two IPv4 addresses as one number.
#[inline(always)]
fn pair_v4(remote: HostAddr, local: HostAddr) -> u64 {
    u64::from(remote.v4_bits()) << 32 | u64::from(local.v4_bits())
}

impl Secrets {
    pub fn new(seed: &[u8; 32]) -> Self {
        let word = |i: usize| u64::from_le_bytes(core::array::from_fn(|k| seed[i * 8 + k]));
        let key = |purpose: u64| SipHasher13::new_with_keys(word(0) ^ purpose, word(1).wrapping_add(purpose));
        let flow = key(0x666c_6f77);
        Self {
            flow: [flow.hash(&[0]), flow.hash(&[1]), flow.hash(&[2])],
            sequence: key(0x6973_6e00).keys(),
            timestamp: key(0x7473_0000),
            // No peer has the address 0.0.0.0.
            timestamp_offset_cache: Box::new([(0, 0); TIMESTAMP_OFFSET_CACHE_LEN]),
            cookie: key(0x636f_6f6b),
            port: key(0x706f_7274).keys(),
            random: word(2) ^ word(3).rotate_left(32) | 1,
        }
    }

    /// Returns the key of fast open cookies for a stack whose configuration has none.
    pub fn fastopen_key(seed: &[u8; 32]) -> (u64, u64) {
        let word = |i: usize| u64::from_le_bytes(core::array::from_fn(|k| seed[i * 8 + k]));
        let hash = SipHasher13::new_with_keys(word(0) ^ 0x7466_6f00, word(1));
        (hash.hash(&[0]), hash.hash(&[1]))
    }

    fn with_key(mut hasher: SipHasher13, key: &FlowKey) -> SipHasher13 {
        write_address(&mut hasher, key.remote);
        write_address(&mut hasher, key.local);
        hasher.write_u16(key.remote_port);
        hasher.write_u16(key.local_port);
        hasher
    }

    /// Returns the hash of a connection for the flow table. It is keyed, so that no peer can choose colliding
    /// ports.
    #[inline]
    pub fn flow_hash(&self, key: &FlowKey) -> u32 {
        let [k0, k1, k2] = self.flow;
        if key.remote.is_v4() {
            return self.flow_hash_v4(key);
        }
        let ((r0, r1), (l0, l1)) = (key.remote.halves(), key.local.halves());
        self.with_ports(
            folded_multiply(r0 ^ k2, r1 ^ k0).wrapping_add(folded_multiply(l0 ^ k1, l1 ^ k2)),
            key,
        )
    }

    /// Returns the hash of a key that is known to be IPv4.
    #[inline(always)]
    pub fn flow_hash_v4(&self, key: &FlowKey) -> u32 {
        self.with_ports(pair_v4(key.remote, key.local), key)
    }

    #[inline(always)]
    fn with_ports(&self, addresses: u64, key: &FlowKey) -> u32 {
        let [k0, k1, k2] = self.flow;
        let hash = folded_multiply(addresses ^ k0, u64::from(key.ports()) ^ k1);
        let hash = folded_multiply(hash ^ k2, k1);
        hash as u32
    }

    /// Returns an initial sequence number (RFC 6528): a clock of 64 ns plus a hash of the connection.
    pub fn initial_sequence(&self, key: &FlowKey, now: Instant) -> u32 {
        let hash = if key.remote.is_v4() {
            siphash13::<12>(self.sequence, pair_v4(key.remote, key.local), key.ports())
        } else {
            let (k0, k1) = self.sequence;
            Self::with_key(SipHasher13::new_with_keys(k0, k1), key).finish()
        };
        (hash as u32).wrapping_add((now.as_nanos() >> 6) as u32)
    }

    /// Returns the offset of the timestamps that are sent to a peer (RFC 7323 §5.4). It is equal for all
    /// connections between two addresses, so that TIME-WAIT can compare old and new timestamps.
    pub fn timestamp_offset(&mut self, local: HostAddr, remote: HostAddr) -> u32 {
        if remote.is_v4() {
            let pair = pair_v4(remote, local);
            let index =
                remote.v4_bits().wrapping_mul(0x9E37_79B1) >> (32 - TIMESTAMP_OFFSET_CACHE_LEN.ilog2());
            let cached = &mut self.timestamp_offset_cache[index as usize];
            if cached.0 != pair {
                *cached = (pair, self.timestamp.hash(&pair.to_le_bytes()) as u32);
            }
            return cached.1;
        }
        let mut hasher = self.timestamp;
        write_address(&mut hasher, local);
        write_address(&mut hasher, remote);
        hasher.finish() as u32
    }

    /// Returns the hash for a SYN cookie.
    pub fn cookie(&self, key: &FlowKey, peer_sequence: u32, period: u32, mss_index: u32) -> u32 {
        let mut hasher = Self::with_key(self.cookie, key);
        hasher.write_u32(peer_sequence);
        hasher.write_u32(period);
        hasher.write_u32(mss_index);
        hasher.finish() as u32
    }

    /// Returns where the search for a free port begins for a destination (RFC 6056 §3.3.3).
    pub fn port_offset(&self, local: HostAddr, remote: HostAddr, remote_port: u16) -> u32 {
        if remote.is_v4() {
            // Both addresses in the order of their bytes.
            return siphash13::<10>(self.port, pair_v4(local, remote).swap_bytes(), remote_port.into())
                as u32;
        }
        let (k0, k1) = self.port;
        let mut hasher = SipHasher13::new_with_keys(k0, k1);
        write_address(&mut hasher, local);
        write_address(&mut hasher, remote);
        hasher.write_u16(remote_port);
        hasher.finish() as u32
    }

    /// Returns a pseudo-random number (splitmix64), for uses that need not resist an attacker who sees other
    /// outputs.
    pub fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::Ipv6Addr;

    #[test]
    fn hash_of_few_bytes_is_siphash_1_3() {
        let mut number = 1u64;
        let mut next = || {
            number = number.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            number
        };
        for _ in 0..1000 {
            let (k0, k1, first, last) = (next(), next(), next(), next() as u32);
            let bytes = [&first.to_le_bytes()[..], &last.to_le_bytes()].concat();
            let hasher = SipHasher13::new_with_keys(k0, k1);
            assert_eq!(siphash13::<12>((k0, k1), first, last), hasher.hash(&bytes));
            assert_eq!(siphash13::<10>((k0, k1), first, last & 0xffff), hasher.hash(&bytes[..10]));
            assert_eq!(siphash13::<8>((k0, k1), first, 0), hasher.hash(&bytes[..8]));
        }
    }

    #[test]
    fn port_offset_hashes_addresses_and_port_in_order() {
        let secrets = Secrets::new(&[7; 32]);
        let (k0, k1) = secrets.port;
        let v4 = [HostAddr::v4(0x0a00_0001), HostAddr::v4(0xc000_0202)];
        let v6 = [1, 2].map(|host| HostAddr::v6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, host)));
        for [local, remote] in [v4, v6] {
            let mut hasher = SipHasher13::new_with_keys(k0, k1);
            write_address(&mut hasher, local);
            write_address(&mut hasher, remote);
            hasher.write_u16(443);
            assert_eq!(secrets.port_offset(local, remote, 443), hasher.finish() as u32);
        }
    }
}
