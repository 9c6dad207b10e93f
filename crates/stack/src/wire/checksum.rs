//! The Internet checksum (RFC 1071): the ones'-complement sum of 16-bit words.

use core::fmt;
use core::net::{Ipv4Addr, Ipv6Addr};

/// A ones'-complement sum on its way: congruent modulo 65,535 to the sum of the big-endian words it was made of,
/// and zero only if all of them were zero.
#[derive(Clone, Copy, Default)]
pub struct Sum(u32);

/// Bytes per step of the main loop. Four independent pairs of accumulators, which the compiler turns into vectors.
const STEP: usize = 32;

/// Accumulators of the main loop: each takes 32-bit halves of native-endian words, so none can overflow before 2^32 steps
/// (128 GiB).
#[derive(Default)]
struct Lanes {
    low: [u64; STEP / 8],
    high: [u64; STEP / 8],
}

impl Lanes {
    #[inline(always)]
    fn add(&mut self, step: &[u8; STEP]) {
        for (lane, word) in step.as_chunks::<8>().0.iter().enumerate() {
            let word = u64::from_ne_bytes(*word);
            self.low[lane] += word & 0xffff_ffff;
            self.high[lane] += word >> 32;
        }
    }

    #[inline(always)]
    fn total(&self) -> u64 {
        self.low.iter().sum::<u64>() + self.high.iter().sum::<u64>()
    }
}

/// Native-endian sum of what is left after the main loop.
#[inline(always)]
fn tail(bytes: &[u8]) -> u64 {
    let mut total = 0u64;
    let (words, rest) = bytes.as_chunks::<4>();
    for word in words {
        total += u64::from(u32::from_ne_bytes(*word));
    }
    // RFC 1071 §4.1: an odd byte at the end counts as if a zero byte followed.
    let last = match *rest {
        [a] => [a, 0, 0, 0],
        [a, b] => [a, b, 0, 0],
        [a, b, c] => [a, b, c, 0],
        _ => [0; 4],
    };
    total + u64::from(u32::from_ne_bytes(last))
}

/// From a sum of native-endian words. RFC 1071 §2 (B): byte order does not matter until the end, where the folded sum is swapped.
#[inline(always)]
fn from_native(total: u64) -> Sum {
    let mut folded = (total & 0xffff_ffff) + (total >> 32);
    folded = (folded & 0xffff) + ((folded >> 16) & 0xffff) + (folded >> 32);
    folded = (folded & 0xffff) + (folded >> 16);
    folded = (folded & 0xffff) + (folded >> 16);
    Sum(u32::from((folded as u16).to_be()))
}

impl Sum {
    /// The sum of nothing.
    pub const ZERO: Self = Self(0);

    /// The sum of bytes whose first is at an even offset of what the checksum covers.
    #[inline]
    pub fn of(bytes: &[u8]) -> Self {
        let (steps, rest) = bytes.as_chunks::<STEP>();
        if steps.is_empty() {
            return from_native(tail(rest));
        }
        let mut lanes = Lanes::default();
        for step in steps {
            lanes.add(step);
        }
        from_native(lanes.total() + tail(rest))
    }

    /// The sum of both. Neither end-around carry nor the number of additions needs attention.
    #[inline]
    #[must_use]
    #[allow(clippy::should_implement_trait)] // ones'-complement addition must not look like arithmetic
    pub const fn add(self, other: Self) -> Self {
        // 2^32 ≡ 1 (mod 65,535), so the carry comes back at the bottom, where it cannot overflow again.
        let (sum, carry) = self.0.overflowing_add(other.0);
        Self(sum + carry as u32)
    }

    /// Adds one 16-bit field.
    #[inline]
    #[must_use]
    pub const fn add_u16(self, field: u16) -> Self {
        self.add(Self(field as u32))
    }

    /// Takes away what was added before, to update a checksum (RFC 1624) or to get a range from two prefix sums. If nothing
    /// but zero words would be left the result is the other representation of zero (0xffff folded).
    #[inline]
    #[must_use]
    #[allow(clippy::should_implement_trait)]
    pub const fn sub(self, other: Self) -> Self {
        self.add(Self(!other.fold() as u32))
    }

    /// The same bytes one byte further on: use it for a piece that starts at an odd offset (RFC 1071 §2 (B)).
    #[inline]
    #[must_use]
    pub const fn swap(self) -> Self {
        Self(self.fold().swap_bytes() as u32)
    }

    /// Adds a piece that starts `offset` bytes after the beginning of what the checksum covers.
    #[inline]
    #[must_use]
    pub const fn add_at(self, offset: usize, piece: Self) -> Self {
        if offset & 1 == 0 { self.add(piece) } else { self.add(piece.swap()) }
    }

    /// The sum as 16 bits, not inverted: what goes into the field of a frame whose checksum the device completes.
    #[inline]
    pub const fn fold(self) -> u16 {
        let sum = (self.0 & 0xffff) + (self.0 >> 16);
        ((sum & 0xffff) + (sum >> 16)) as u16
    }

    /// The checksum: the inverted sum. For UDP, where 0 means "none", see [`Sum::finish_udp`].
    #[inline]
    pub const fn finish(self) -> u16 {
        !self.fold()
    }

    /// The checksum of a UDP datagram: RFC 768 has 0 sent as 0xffff.
    #[inline]
    pub const fn finish_udp(self) -> u16 {
        match !self.fold() {
            0 => 0xffff,
            checksum => checksum,
        }
    }

    /// True for the sum of something that contains its own correct checksum.
    #[inline]
    pub const fn is_valid(self) -> bool {
        self.fold() == 0xffff
    }
}

impl PartialEq for Sum {
    /// Equal if they make the same checksum (the two representations of zero differ).
    fn eq(&self, other: &Self) -> bool {
        self.fold() == other.fold()
    }
}

impl Eq for Sum {}

impl fmt::Debug for Sum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sum({:#06x})", self.fold())
    }
}

/// The pseudo-header of TCP and UDP over IPv4 (RFC 9293 §3.1). `len` is the transport header and payload in bytes.
#[inline]
pub const fn pseudo_v4(src: Ipv4Addr, dst: Ipv4Addr, protocol: u8, len: usize) -> Sum {
    Sum(src.to_bits()).add(Sum(dst.to_bits())).add(Sum(protocol as u32)).add(Sum(len as u32))
}

/// The pseudo-header of transports over IPv6 (RFC 8200 §8.1). `len` is the transport header and payload in bytes.
#[inline]
pub const fn pseudo_v6(src: Ipv6Addr, dst: Ipv6Addr, protocol: u8, len: usize) -> Sum {
    sum_of_address(src).add(sum_of_address(dst)).add(Sum(protocol as u32)).add(Sum(len as u32))
}

#[inline]
const fn sum_of_address(address: Ipv6Addr) -> Sum {
    let bits = address.to_bits();
    Sum((bits >> 96) as u32).add(Sum((bits >> 64) as u32)).add(Sum((bits >> 32) as u32)).add(Sum(bits as u32))
}

/// Copies `src` to the start of `dst` and sums it in the same pass over memory.
///
/// # Panics
/// If `dst` is shorter than `src`.
#[inline]
pub fn copy_and_sum(src: &[u8], dst: &mut [u8]) -> Sum {
    let dst = &mut dst[..src.len()];
    let (from, from_rest) = src.as_chunks::<STEP>();
    let (to, to_rest) = dst.as_chunks_mut::<STEP>();
    let mut lanes = Lanes::default();
    for (from, to) in from.iter().zip(to) {
        *to = *from;
        lanes.add(from);
    }
    to_rest.copy_from_slice(from_rest);
    from_native(lanes.total() + tail(from_rest))
}

#[cfg(test)]
mod tests;
