//! IPv6 headers (RFC 8200).

mod extension;

pub use extension::{
    EXTENSION_HEADERS_MAX, FragmentHeader, FragmentLocation, HeaderChain, HeaderChainError, OPTIONS_MAX,
    emit_router_alert, walk_header_chain,
};

use super::{WireError, array, be16, be32, header_buffer, header_bytes};
use core::net::Ipv6Addr;

/// The fixed IPv6 header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Differentiated services code point: 0 … 63 (RFC 2474).
    pub dscp: u8,
    /// Explicit congestion notification: 0 … 3 (RFC 3168).
    pub ecn: u8,
    /// Flow label: 20 bits (RFC 6437).
    pub flow_label: u32,
    /// Length of the packet after this header in bytes. The buffer may be longer, because short frames are
    /// padded.
    pub payload_len: u16,
    /// Type of the next header, an extension header or a transport header: see [`protocol`](super::protocol).
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source address.
    pub src: Ipv6Addr,
    /// Destination address.
    pub dst: Ipv6Addr,
}

impl Header {
    /// Length of the header in bytes.
    pub const LEN: usize = 40;

    /// Parses the header of a packet.
    ///
    /// # Errors
    /// `Truncated` if the buffer ends before the packet does, `BadVersion`.
    #[inline]
    pub fn parse(packet: &[u8]) -> Result<Self, WireError> {
        let header = Self::read(packet)?;
        if packet.len() - Self::LEN < usize::from(header.payload_len) {
            return Err(WireError::Truncated);
        }
        Ok(header)
    }

    /// Parses the header of a packet that an ICMP error quotes, which is usually cut off.
    ///
    /// # Errors
    /// `Truncated` if the header is incomplete, `BadVersion`.
    pub fn parse_quoted(quote: &[u8]) -> Result<Self, WireError> {
        Self::read(quote)
    }

    #[inline(always)]
    fn read(packet: &[u8]) -> Result<Self, WireError> {
        let bytes = header_bytes::<{ Self::LEN }>(packet)?;
        let first = be32(bytes, 0);
        if first >> 28 != 6 {
            return Err(WireError::BadVersion);
        }
        Ok(Self {
            dscp: (first >> 22) as u8 & 0x3f,
            ecn: (first >> 20) as u8 & 3,
            flow_label: first & 0x000f_ffff,
            payload_len: be16(bytes, 4),
            next_header: bytes[6],
            hop_limit: bytes[7],
            src: Ipv6Addr::from_octets(array(bytes, 8)),
            dst: Ipv6Addr::from_octets(array(bytes, 24)),
        })
    }

    /// Returns the payload of the packet this was parsed from, with extension headers and without padding.
    /// The result is empty for a shorter packet.
    #[inline]
    pub fn payload<'a>(&self, packet: &'a [u8]) -> &'a [u8] {
        packet.get(Self::LEN..Self::LEN + usize::from(self.payload_len)).unwrap_or(&[])
    }

    /// Writes the header and returns its length (40).
    ///
    /// # Panics
    /// If `out` is shorter than the header.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let out = header_buffer::<{ Self::LEN }>(out);
        let first = 6 << 28
            | u32::from(self.dscp & 0x3f) << 22
            | u32::from(self.ecn & 3) << 20
            | self.flow_label & 0x000f_ffff;
        out[..4].copy_from_slice(&first.to_be_bytes());
        out[4..6].copy_from_slice(&self.payload_len.to_be_bytes());
        out[6] = self.next_header;
        out[7] = self.hop_limit;
        out[8..24].copy_from_slice(&self.src.octets());
        out[24..40].copy_from_slice(&self.dst.octets());
        Self::LEN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Header {
        Header {
            dscp: 0x2e,
            ecn: 2,
            flow_label: 0xabcde,
            payload_len: 4,
            next_header: 6,
            hop_limit: 64,
            src: "2001:db8::1".parse().unwrap(),
            dst: "fe80::2".parse().unwrap(),
        }
    }

    #[test]
    fn header_round_trips() {
        let mut out = [0; 48];
        assert_eq!(example().emit(&mut out), 40);
        assert_eq!(out[..8], [0x6b, 0xaa, 0xbc, 0xde, 0, 4, 6, 64]);
        let header = Header::parse(&out).unwrap();
        assert_eq!(header, example());
        assert_eq!(header.payload(&out).len(), 4);
    }

    #[test]
    fn wrong_version_and_truncation_are_rejected() {
        let mut out = [0; 44];
        example().emit(&mut out);
        for len in 0..44 {
            assert_eq!(Header::parse(&out[..len]), Err(WireError::Truncated), "{len}");
        }
        assert_eq!(Header::parse_quoted(&out[..40]), Ok(example()));
        assert_eq!(Header::parse_quoted(&out[..39]), Err(WireError::Truncated));
        out[0] = 0x45;
        assert_eq!(Header::parse(&out), Err(WireError::BadVersion));
        assert_eq!(Header::parse_quoted(&out), Err(WireError::BadVersion));
    }
}
