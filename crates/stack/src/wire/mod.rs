//! Wire formats: parsers of received headers and emitters of transmitted ones. All functions are pure and
//! stateless.
//!
//! Parsers accept arbitrary bytes and return a [`WireError`] instead of panicking. Emitters write into a
//! buffer of the caller and panic if it is too short. All values are in host byte order; only the bytes are
//! in network byte order.

pub mod arp;
pub mod checksum;
pub mod echo;
pub mod ethernet;
pub mod group_record;
pub mod gso;
pub mod icmpv4;
pub mod icmpv6;
pub mod igmp;
pub mod ipv4;
pub mod ipv6;
mod mac;
pub mod mld;
pub mod ndp;
pub mod tcp;
pub mod udp;

pub use mac::MacAddr;

use core::fmt;

/// IP protocol numbers (IANA "Assigned Internet Protocol Numbers"), as in IPv4's protocol field and IPv6's
/// next-header field.
pub mod protocol {
    /// IPv6 hop-by-hop options (RFC 8200 §4.3).
    pub const HOP_BY_HOP: u8 = 0;
    /// ICMP for IPv4 (RFC 792).
    pub const ICMP: u8 = 1;
    /// IGMP (RFC 3376).
    pub const IGMP: u8 = 2;
    /// TCP (RFC 9293).
    pub const TCP: u8 = 6;
    /// UDP (RFC 768).
    pub const UDP: u8 = 17;
    /// IPv6 routing header (RFC 8200 §4.4).
    pub const ROUTING: u8 = 43;
    /// IPv6 fragment header (RFC 8200 §4.5).
    pub const FRAGMENT: u8 = 44;
    /// Encapsulating security payload (RFC 4303).
    pub const ESP: u8 = 50;
    /// Authentication header (RFC 4302).
    pub const AUTHENTICATION: u8 = 51;
    /// ICMP for IPv6 (RFC 4443).
    pub const ICMPV6: u8 = 58;
    /// No next header (RFC 8200 §4.7).
    pub const NO_NEXT_HEADER: u8 = 59;
    /// IPv6 destination options (RFC 8200 §4.6).
    pub const DESTINATION_OPTIONS: u8 = 60;
}

/// Why bytes cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WireError {
    /// There are fewer bytes than the header needs.
    Truncated,
    /// A length field contradicts itself or the surrounding bytes.
    BadLength,
    /// A version, hardware type or similar field is not that of the format.
    BadVersion,
    /// A checksum is wrong.
    BadChecksum,
    /// A field has a value that the format forbids.
    BadValue,
    /// The format is valid but deliberately not supported (a second VLAN tag, an 802.3 length field, …).
    Unsupported,
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Truncated => "truncated",
            Self::BadLength => "contradictory length field",
            Self::BadVersion => "wrong version",
            Self::BadChecksum => "wrong checksum",
            Self::BadValue => "forbidden field value",
            Self::Unsupported => "unsupported",
        })
    }
}

impl std::error::Error for WireError {}

/// Reads 16 bits in network byte order. With an array and a constant offset the bounds check is done at
/// compile time.
#[inline(always)]
pub(crate) const fn be16<const N: usize>(bytes: &[u8; N], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Reads 32 bits in network byte order.
#[inline(always)]
pub(crate) const fn be32<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Returns the first `N` bytes of a header to be parsed.
#[inline(always)]
fn header_bytes<const N: usize>(bytes: &[u8]) -> Result<&[u8; N], WireError> {
    bytes.first_chunk::<N>().ok_or(WireError::Truncated)
}

/// Returns the first `N` bytes of the buffer for a header to be emitted. Panics if the buffer is shorter.
#[inline(always)]
#[track_caller]
fn header_buffer<const N: usize>(out: &mut [u8]) -> &mut [u8; N] {
    match out.first_chunk_mut::<N>() {
        Some(buffer) => buffer,
        None => panic!("the buffer is too short for a header of {N} bytes"),
    }
}

/// Copies `N` bytes from a constant offset of an array.
#[inline(always)]
pub(crate) fn array<const N: usize, const M: usize>(bytes: &[u8; M], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}
