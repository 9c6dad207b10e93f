//! Echo requests and replies ("ping"), which ICMP for IPv4 (RFC 792) and for IPv6 (RFC 4443 §4) share.

use super::be16;

/// A request, or the reply to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Echo<'a> {
    /// Chosen by the sender of the request, like all of it; a reply is to bring it back unchanged.
    pub ident: u16,
    /// Of this request among those of the sender.
    pub seq: u16,
    /// Anything.
    pub data: &'a [u8],
}

impl<'a> Echo<'a> {
    /// From the eight bytes of an ICMP header and what follows them.
    pub(super) fn new(header: &[u8; 8], data: &'a [u8]) -> Self {
        Self { ident: be16(header, 4), seq: be16(header, 6), data }
    }

    /// The four bytes after the checksum.
    pub(super) const fn word(&self) -> u32 {
        (self.ident as u32) << 16 | self.seq as u32
    }
}
