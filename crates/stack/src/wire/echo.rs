//! Echo requests and replies ("ping"), whose format ICMP for IPv4 (RFC 792) and for IPv6 (RFC 4443 §4) share.

use super::be16;

/// An echo request or reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Echo<'a> {
    /// Identifier, chosen by the sender of the request; a reply returns it, like the other fields, unchanged.
    pub ident: u16,
    /// Sequence number of the request.
    pub seq: u16,
    /// Arbitrary data.
    pub data: &'a [u8],
}

impl<'a> Echo<'a> {
    /// Creates a message from the eight bytes of an ICMP header and the bytes after them.
    pub(super) fn new(header: &[u8; 8], data: &'a [u8]) -> Self {
        Self { ident: be16(header, 4), seq: be16(header, 6), data }
    }

    /// Returns the four bytes after the checksum.
    pub(super) const fn word(&self) -> u32 {
        (self.ident as u32) << 16 | self.seq as u32
    }
}
