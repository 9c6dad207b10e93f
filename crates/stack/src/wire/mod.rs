//! Wire formats: views of received headers and emitters of our own. Pure functions of bytes, without state.
//!
//! Everything here may be called with any bytes whatsoever: a parser answers with a [`WireError`], never with a panic.
//! Emitters write into room of the caller; too little of it is a bug of the caller and panics.
//! Numbers are in host order in every value and in network order only inside the bytes.

pub mod arp;
pub mod checksum;
pub mod echo;
pub mod ethernet;
pub mod gso;
pub mod icmpv4;
pub mod icmpv6;
pub mod ipv4;
pub mod ipv6;
mod mac;
pub mod mld;
pub mod ndp;
pub mod tcp;
pub mod udp;

pub use mac::MacAddr;

use core::fmt;

/// IP protocol numbers (IANA "Assigned Internet Protocol Numbers"), as in IPv4's protocol and IPv6's next-header field.
pub mod protocol {
    /// IPv6 hop-by-hop options (RFC 8200 §4.3).
    pub const HOP_BY_HOP: u8 = 0;
    /// ICMP for IPv4 (RFC 792).
    pub const ICMP: u8 = 1;
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
    /// Nothing follows (RFC 8200 §4.7).
    pub const NO_NEXT_HEADER: u8 = 59;
    /// IPv6 destination options (RFC 8200 §4.6).
    pub const DESTINATION_OPTIONS: u8 = 60;
}

/// Why bytes are not what they were taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WireError {
    /// Fewer bytes than the header needs.
    Truncated,
    /// A length field contradicts the bytes around it or itself.
    BadLength,
    /// A version field, hardware type or the like is not the one of this format.
    BadVersion,
    /// A checksum does not fit.
    BadChecksum,
    /// A field has a value that the format forbids.
    BadValue,
    /// Valid, but deliberately not handled (a second VLAN tag, an 802.3 length field, …).
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

/// Reads 16 bits in network order. With an array and a constant offset the bounds check is done at compile time.
#[inline(always)]
pub(crate) const fn be16<const N: usize>(bytes: &[u8; N], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Reads 32 bits in network order.
#[inline(always)]
pub(crate) const fn be32<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The first `N` bytes of a header that is to be parsed.
#[inline(always)]
fn head<const N: usize>(bytes: &[u8]) -> Result<&[u8; N], WireError> {
    bytes.first_chunk::<N>().ok_or(WireError::Truncated)
}

/// The first `N` bytes of room for a header that is to be emitted. Panics if the caller gave less.
#[inline(always)]
#[track_caller]
fn room<const N: usize>(out: &mut [u8]) -> &mut [u8; N] {
    match out.first_chunk_mut::<N>() {
        Some(room) => room,
        None => panic!("no room for a header of {N} bytes"),
    }
}

/// Copies `N` bytes from a constant offset of an array.
#[inline(always)]
pub(crate) fn array<const N: usize, const M: usize>(bytes: &[u8; M], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}
