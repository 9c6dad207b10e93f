//! Everything that must not be guessed: flow hash, initial sequence numbers, timestamp offsets, port choice, cookies.
//! Keyed with SipHash-1-3 from the seed that the owner gave.

use super::demux::FlowKey;
use crate::time::Instant;
use core::hash::Hasher;
use core::net::IpAddr;
use siphasher::sip::SipHasher13;

/// Keys of a stack.
pub(crate) struct Secrets {
    flow: SipHasher13,
    sequence: SipHasher13,
    cookie: SipHasher13,
    port: SipHasher13,
    random: u64,
}

fn write_address(hasher: &mut SipHasher13, address: IpAddr) {
    match address {
        IpAddr::V4(a) => hasher.write(&a.octets()),
        IpAddr::V6(a) => hasher.write(&a.octets()),
    }
}

impl Secrets {
    pub fn new(seed: &[u8; 32]) -> Self {
        let word = |i: usize| u64::from_le_bytes(core::array::from_fn(|k| seed[i * 8 + k]));
        let key = |purpose: u64| SipHasher13::new_with_keys(word(0) ^ purpose, word(1).wrapping_add(purpose));
        Self {
            flow: key(0x666c_6f77),
            sequence: key(0x6973_6e00),
            cookie: key(0x636f_6f6b),
            port: key(0x706f_7274),
            random: word(2) ^ word(3).rotate_left(32) | 1,
        }
    }

    fn with_key(mut hasher: SipHasher13, key: &FlowKey) -> SipHasher13 {
        match (key.remote, key.local) {
            (IpAddr::V4(r), IpAddr::V4(l)) => {
                let mut bytes = [0; 12];
                bytes[..4].copy_from_slice(&r.octets());
                bytes[4..8].copy_from_slice(&l.octets());
                bytes[8..10].copy_from_slice(&key.remote_port.to_be_bytes());
                bytes[10..].copy_from_slice(&key.local_port.to_be_bytes());
                hasher.write(&bytes);
            }
            (remote, local) => {
                write_address(&mut hasher, remote);
                write_address(&mut hasher, local);
                hasher.write_u16(key.remote_port);
                hasher.write_u16(key.local_port);
            }
        }
        hasher
    }

    /// Where a connection stands in the flow table. Keyed, so that nobody can choose colliding ports.
    #[inline]
    pub fn flow_hash(&self, key: &FlowKey) -> u32 {
        Self::with_key(self.flow, key).finish() as u32
    }

    /// Initial sequence number (RFC 6528): a clock of 64 ns plus a hash of the connection.
    pub fn initial_sequence(&self, key: &FlowKey, now: Instant) -> u32 {
        let hash = Self::with_key(self.sequence, key).finish() as u32;
        hash.wrapping_add((now.as_nanos() >> 6) as u32)
    }

    /// Offset of our timestamps towards a peer (RFC 7323 §5.4). The same for all connections between two addresses, so that
    /// TIME_WAIT can compare old and new ones.
    pub fn timestamp_offset(&self, local: IpAddr, remote: IpAddr) -> u32 {
        let mut hasher = self.sequence;
        hasher.write_u8(1);
        write_address(&mut hasher, local);
        write_address(&mut hasher, remote);
        hasher.finish() as u32
    }

    /// Hash for a SYN cookie.
    pub fn cookie(&self, key: &FlowKey, peer_sequence: u32, period: u32, mss_index: u32) -> u32 {
        let mut hasher = Self::with_key(self.cookie, key);
        hasher.write_u32(peer_sequence);
        hasher.write_u32(period);
        hasher.write_u32(mss_index);
        hasher.finish() as u32
    }

    /// Where the search for a free port begins for a destination (RFC 6056 §3.3.3).
    pub fn port_offset(&self, local: IpAddr, remote: IpAddr, remote_port: u16) -> u32 {
        let mut hasher = self.port;
        write_address(&mut hasher, local);
        write_address(&mut hasher, remote);
        hasher.write_u16(remote_port);
        hasher.finish() as u32
    }

    /// A pseudo-random number (splitmix64), for what need not resist an attacker who sees others of them.
    pub fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
