//! The Internet checksum (RFC 1071): the ones' complement sum of 16-bit words.

use core::fmt;
use core::net::{Ipv4Addr, Ipv6Addr};

/// An unfinished ones' complement sum: congruent modulo 65,535 to the sum of the big-endian words it was
/// computed from, and zero only if all of them were zero.
#[derive(Clone, Copy, Default)]
pub struct Sum(u32);

/// Bytes per step of the main loop.
const STEP: usize = 32;

/// Bytes that are copied before they are summed, so that source and destination stay in the first-level cache
/// in between. A multiple of [`STEP`], and more than a typical segment.
const COPY_BLOCK: usize = 4096;

/// Returns the sum of native-endian words. RFC 1071 §2 (B), (C): neither byte order nor word size matters
/// until the end.
///
/// With 128-bit accumulators the compiler emits an addition from memory and an addition of the carry for
/// every 8 bytes, which is faster than the vector instructions of the baseline CPU. Two accumulators avoid a
/// dependency between consecutive carries.
#[inline(always)]
fn native_sum(bytes: &[u8]) -> u128 {
    let word = |bytes: &[u8; 8]| u128::from(u64::from_ne_bytes(*bytes));
    let (steps, rest) = bytes.as_chunks::<STEP>();
    let (mut even, mut odd) = (0u128, 0u128);
    for step in steps {
        if let [a, b, c, d] = step.as_chunks::<8>().0 {
            even += word(a);
            odd += word(b);
            even += word(c);
            odd += word(d);
        }
    }
    let (words, rest) = rest.as_chunks::<8>();
    for bytes in words {
        even += word(bytes);
    }
    let (half, rest) = rest.as_chunks::<4>();
    if let [half] = half {
        odd += u128::from(u32::from_ne_bytes(*half));
    }
    let (pair, rest) = rest.as_chunks::<2>();
    if let [pair] = pair {
        even += u128::from(u16::from_ne_bytes(*pair));
    }
    // RFC 1071 §4.1: an odd byte at the end is padded with a zero byte.
    if let [last] = *rest {
        odd += u128::from(u16::from_ne_bytes([last, 0]));
    }
    even + odd
}

/// Folds a sum of native-endian words and converts it to network byte order.
#[inline(always)]
const fn from_native(total: u128) -> Sum {
    let (sum, carry) = (total as u64).overflowing_add((total >> 64) as u64);
    let sum = sum + carry as u64;
    // Adding the halves crosswise leaves their sum, carry included, in the upper half.
    let sum = Sum((sum.wrapping_add(sum.rotate_left(32)) >> 32) as u32);
    Sum(sum.fold().to_be() as u32)
}

impl Sum {
    /// The sum of no bytes.
    pub const ZERO: Self = Self(0);

    /// Returns the sum of bytes whose first byte is at an even offset of the checksummed range.
    #[inline]
    pub fn of(bytes: &[u8]) -> Self {
        from_native(native_sum(bytes))
    }

    /// Returns the sum of both sums. The caller need not care about end-around carries or the number of
    /// additions.
    #[inline]
    #[must_use]
    #[allow(clippy::should_implement_trait)] // ones'-complement addition must not look like arithmetic
    pub const fn add(self, other: Self) -> Self {
        // 2^32 ≡ 1 (mod 65,535), so the carry is added at the low end, where it cannot overflow again.
        let (sum, carry) = self.0.overflowing_add(other.0);
        Self(sum + carry as u32)
    }

    /// Converts a plain sum of 32-bit words.
    #[inline(always)]
    pub(crate) const fn of_words(total: u64) -> Self {
        // 2^32 ≡ 1 (mod 65,535).
        Self(total as u32).add(Self((total >> 32) as u32))
    }

    /// Adds one 16-bit field.
    #[inline]
    #[must_use]
    pub const fn add_u16(self, field: u16) -> Self {
        self.add(Self(field as u32))
    }

    /// Subtracts a sum that was added before, to update a checksum (RFC 1624) or to compute the sum of a
    /// range from two prefix sums. If only zero words remain, the result is the other representation of zero
    /// (0xffff when folded).
    #[inline]
    #[must_use]
    #[allow(clippy::should_implement_trait)]
    pub const fn sub(self, other: Self) -> Self {
        self.add(Self(!other.fold() as u32))
    }

    /// Returns the sum of the summed bytes shifted by one byte: for a part that starts at an odd offset (RFC
    /// 1071 §2 (B)).
    #[inline]
    #[must_use]
    pub const fn swap(self) -> Self {
        Self(self.fold().swap_bytes() as u32)
    }

    /// Adds the sum of a part that starts `offset` bytes after the beginning of the checksummed range.
    #[inline]
    #[must_use]
    pub const fn add_at(self, offset: usize, part: Self) -> Self {
        if offset & 1 == 0 { self.add(part) } else { self.add(part.swap()) }
    }

    /// Returns the sum as 16 bits, not inverted: the value of the checksum field of a frame whose checksum
    /// the device completes.
    #[inline]
    pub const fn fold(self) -> u16 {
        // Adding the halves crosswise leaves their sum, carry included, in the upper half.
        (self.0.wrapping_add(self.0.rotate_left(16)) >> 16) as u16
    }

    /// Returns the checksum: the inverted sum. UDP, where 0 means "no checksum", uses [`Sum::finish_udp`].
    #[inline]
    pub const fn finish(self) -> u16 {
        !self.fold()
    }

    /// Returns the checksum of a UDP datagram: 0 is sent as 0xffff (RFC 768).
    #[inline]
    pub const fn finish_udp(self) -> u16 {
        match !self.fold() {
            0 => 0xffff,
            checksum => checksum,
        }
    }

    /// Returns whether this is the sum of bytes that contain their own correct checksum.
    #[inline]
    pub const fn is_valid(self) -> bool {
        self.fold() == 0xffff
    }
}

impl PartialEq for Sum {
    /// Two sums are equal if they yield equal checksums; the two representations of zero differ.
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

/// Returns the sum of the pseudo-header of TCP and UDP over IPv4 (RFC 9293 §3.1). `len` is the length of
/// transport header and payload in bytes.
#[inline]
pub const fn pseudo_v4(src: Ipv4Addr, dst: Ipv4Addr, protocol: u8, len: usize) -> Sum {
    Sum(src.to_bits()).add(Sum(dst.to_bits())).add(Sum(protocol as u32)).add(Sum(len as u32))
}

/// Returns the sum of the pseudo-header of transports over IPv6 (RFC 8200 §8.1). `len` is the length of
/// transport header and payload in bytes.
#[inline]
pub const fn pseudo_v6(src: Ipv6Addr, dst: Ipv6Addr, protocol: u8, len: usize) -> Sum {
    sum_of_address(src).add(sum_of_address(dst)).add(Sum(protocol as u32)).add(Sum(len as u32))
}

#[inline]
const fn sum_of_address(address: Ipv6Addr) -> Sum {
    let bits = address.to_bits();
    Sum((bits >> 96) as u32).add(Sum((bits >> 64) as u32)).add(Sum((bits >> 32) as u32)).add(Sum(bits as u32))
}

/// Copies `src` to the start of `dst` and returns its sum. Each block is summed while it is in the cache.
///
/// # Panics
/// If `dst` is shorter than `src`.
#[inline]
pub fn copy_and_sum(src: &[u8], dst: &mut [u8]) -> Sum {
    let dst = &mut dst[..src.len()];
    let mut total = 0;
    for (from, to) in src.chunks(COPY_BLOCK).zip(dst.chunks_mut(COPY_BLOCK)) {
        to.copy_from_slice(from);
        total += native_sum(from);
    }
    from_native(total)
}

#[cfg(test)]
mod tests;
