//! IPv4 headers (RFC 791).

use super::checksum::Sum;
use super::{WireError, array, be16, header_buffer, header_bytes};
use core::net::Ipv4Addr;

/// The fields of an IPv4 header, without options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Differentiated services code point: 0 … 63 (RFC 2474).
    pub dscp: u8,
    /// Explicit congestion notification: 0 … 3 (RFC 3168).
    pub ecn: u8,
    /// Length of the packet in bytes, header included. The buffer may be longer, because short frames are
    /// padded.
    pub total_len: u16,
    /// Identification, which all fragments of a packet share.
    pub ident: u16,
    /// True if the packet must not be fragmented.
    pub dont_fragment: bool,
    /// True if more fragments follow this one.
    pub more_fragments: bool,
    /// Offset of the payload within the payload of the original packet, in bytes (a multiple of 8).
    pub fragment_offset: u16,
    /// Time to live.
    pub ttl: u8,
    /// Protocol of the payload: see [`protocol`](super::protocol).
    pub protocol: u8,
    /// Source address.
    pub src: Ipv4Addr,
    /// Destination address.
    pub dst: Ipv4Addr,
    /// Length of the header in bytes, options included: 20 … 60. Set by the parser; [`Header::emit`] writes
    /// no options.
    pub header_len: u8,
}

impl Header {
    /// Length of a header without options in bytes.
    pub const LEN: usize = 20;

    /// Parses the header of a packet. The checksum is verified by [`Header::checksum_ok`] only.
    ///
    /// # Errors
    /// `Truncated` if the buffer ends before the packet does, `BadVersion`, `BadLength` for contradictory
    /// lengths, for malformed options, and for fragments that reach beyond the longest possible packet.
    #[inline]
    pub fn parse(packet: &[u8]) -> Result<Self, WireError> {
        let header = Self::read(packet)?;
        if packet.len() < usize::from(header.total_len) {
            return Err(WireError::Truncated);
        }
        if header.total_len < u16::from(header.header_len) {
            return Err(WireError::BadLength);
        }
        // A fragment beyond byte 65,535 would overflow the reassembled packet ("ping of death").
        if header.fragment_offset != 0
            && u32::from(header.fragment_offset) + u32::from(header.total_len) > u32::from(u16::MAX)
        {
            return Err(WireError::BadLength);
        }
        Ok(header)
    }

    /// Parses the header of a packet that an ICMP error quotes. Returns the header and the bytes after it:
    /// the packet is usually cut off (RFC 792: 8 bytes after the header). Total length and checksum are not
    /// checked, because some senders quote them modified.
    ///
    /// # Errors
    /// `Truncated` if the header is incomplete, `BadVersion`, `BadLength`.
    pub fn parse_quoted(quote: &[u8]) -> Result<(Self, &[u8]), WireError> {
        let header = Self::read(quote)?;
        let rest = quote.get(usize::from(header.header_len)..).ok_or(WireError::Truncated)?;
        Ok((header, rest))
    }

    #[inline(always)]
    fn read(packet: &[u8]) -> Result<Self, WireError> {
        let bytes = header_bytes::<{ Self::LEN }>(packet)?;
        if bytes[0] != 0x45 {
            check_options(packet)?;
        }
        let flags = be16(bytes, 6);
        Ok(Self {
            dscp: bytes[1] >> 2,
            ecn: bytes[1] & 3,
            total_len: be16(bytes, 2),
            ident: be16(bytes, 4),
            dont_fragment: flags & 0x4000 != 0,
            more_fragments: flags & 0x2000 != 0,
            fragment_offset: (flags & 0x1fff) << 3,
            ttl: bytes[8],
            protocol: bytes[9],
            src: Ipv4Addr::from_octets(array(bytes, 12)),
            dst: Ipv4Addr::from_octets(array(bytes, 16)),
            header_len: (bytes[0] & 0x0f) << 2,
        })
    }

    /// Returns whether the checksum of the header this was parsed from is correct (RFC 1122 §3.2.1.2:
    /// otherwise the packet must be dropped).
    #[inline]
    pub fn checksum_ok(&self, packet: &[u8]) -> bool {
        match packet.get(..usize::from(self.header_len)) {
            Some(header) => Sum::of(header).is_valid(),
            None => false,
        }
    }

    /// Returns the payload of the packet this was parsed from, without padding. The result is empty for a
    /// shorter packet.
    #[inline]
    pub fn payload<'a>(&self, packet: &'a [u8]) -> &'a [u8] {
        packet.get(usize::from(self.header_len)..usize::from(self.total_len)).unwrap_or(&[])
    }

    /// Returns whether the packet is a fragment; the first fragment is one, too.
    #[inline]
    pub const fn is_fragment(&self) -> bool {
        self.more_fragments || self.fragment_offset != 0
    }

    /// Writes the header with its checksum, without options, and returns its length (20).
    ///
    /// # Panics
    /// If `out` is shorter than the header.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let out = header_buffer::<{ Self::LEN }>(out);
        let flags = u16::from(self.dont_fragment) << 14
            | u16::from(self.more_fragments) << 13
            | (self.fragment_offset >> 3) & 0x1fff;
        out[0] = 0x45;
        out[1] = self.dscp << 2 | self.ecn & 3;
        out[2..4].copy_from_slice(&self.total_len.to_be_bytes());
        out[4..6].copy_from_slice(&self.ident.to_be_bytes());
        out[6..8].copy_from_slice(&flags.to_be_bytes());
        out[8] = self.ttl;
        out[9] = self.protocol;
        out[10..12].fill(0);
        out[12..16].copy_from_slice(&self.src.octets());
        out[16..20].copy_from_slice(&self.dst.octets());
        let checksum = Sum::of(out).finish();
        out[10..12].copy_from_slice(&checksum.to_be_bytes());
        Self::LEN
    }

    /// Length of a header with the router alert option in bytes.
    pub const LEN_ROUTER_ALERT: usize = 24;

    /// Writes the header with the router alert option (RFC 2113) and its checksum, and returns its length
    /// (24).
    ///
    /// # Panics
    /// If `out` is shorter than the header.
    pub fn emit_router_alert(&self, out: &mut [u8]) -> usize {
        self.emit(out);
        let out = header_buffer::<{ Self::LEN_ROUTER_ALERT }>(out);
        out[0] = 0x46;
        out[10..12].fill(0);
        out[20..].copy_from_slice(&[148, 4, 0, 0]);
        let checksum = Sum::of(out).finish();
        out[10..12].copy_from_slice(&checksum.to_be_bytes());
        Self::LEN_ROUTER_ALERT
    }
}

/// Checks a header whose first byte is unusual: another version, no space for the fixed part, or options.
#[cold]
fn check_options(packet: &[u8]) -> Result<(), WireError> {
    if packet[0] >> 4 != 4 {
        return Err(WireError::BadVersion);
    }
    let header_len = usize::from(packet[0] & 0x0f) * 4;
    if header_len < Header::LEN {
        return Err(WireError::BadLength);
    }
    let mut options = packet.get(Header::LEN..header_len).ok_or(WireError::Truncated)?;
    // RFC 791 §3.1: every option except end-of-list (0) and no-operation (1) has a length byte, which counts
    // type and length bytes, too.
    while let Some((&kind, rest)) = options.split_first() {
        match kind {
            0 => break,
            1 => options = rest,
            _ => {
                let len = usize::from(*rest.first().ok_or(WireError::BadLength)?);
                if len < 2 {
                    return Err(WireError::BadLength);
                }
                options = options.get(len..).ok_or(WireError::BadLength)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The header of a SYN sent by a Linux host, in a packet of 60 bytes.
    const SYN: [u8; 20] = [
        0x45, 0x00, 0x00, 0x3c, 0x1c, 0x46, 0x40, 0x00, 0x40, 0x06, 0xb1, 0xe6, 0xac, 0x10, 0x0a, 0x63, 0xac,
        0x10, 0x0a, 0x0c,
    ];

    fn packet(header: &[u8], len: usize) -> Vec<u8> {
        let mut packet = header.to_vec();
        packet.resize(len, 0);
        packet
    }

    #[test]
    fn known_header_round_trips() {
        let bytes = packet(&SYN, 60);
        let header = Header::parse(&bytes).unwrap();
        assert_eq!((header.total_len, header.ident, header.ttl, header.protocol), (60, 0x1c46, 64, 6));
        assert!(header.dont_fragment && !header.is_fragment());
        assert_eq!(
            (header.src, header.dst),
            (Ipv4Addr::new(172, 16, 10, 99), Ipv4Addr::new(172, 16, 10, 12))
        );
        assert!(header.checksum_ok(&bytes));
        let mut out = [0xee; 20];
        assert_eq!(header.emit(&mut out), 20);
        assert_eq!(out, SYN);
    }

    #[test]
    fn any_flipped_bit_breaks_the_checksum() {
        for bit in 0..160 {
            let mut bytes = packet(&SYN, 60);
            bytes[bit / 8] ^= 1 << (bit % 8);
            if let Ok(header) = Header::parse(&bytes) {
                assert!(!header.checksum_ok(&bytes), "{bit}");
            }
        }
    }

    #[test]
    fn padding_is_not_payload() {
        let mut bytes = packet(&SYN, 80);
        bytes[3] = 24;
        let header = Header::parse(&bytes).unwrap();
        assert_eq!(header.payload(&bytes).len(), 4);
    }

    #[test]
    fn contradictory_lengths_are_rejected() {
        let with = |at: usize, value: u8| {
            let mut bytes = packet(&SYN, 60);
            bytes[at] = value;
            Header::parse(&bytes)
        };
        assert_eq!(with(0, 0x44), Err(WireError::BadLength));
        assert_eq!(with(0, 0x65), Err(WireError::BadVersion));
        assert_eq!(with(3, 19), Err(WireError::BadLength));
        assert_eq!(with(3, 61), Err(WireError::Truncated));
        assert_eq!(Header::parse(&SYN[..19]), Err(WireError::Truncated));
        // The packet has space for the fixed header only, but there are options.
        let mut bytes = packet(&SYN, 60);
        (bytes[0], bytes[3]) = (0x46, 23);
        assert_eq!(Header::parse(&bytes), Err(WireError::BadLength));
    }

    #[test]
    fn options_are_skipped_and_their_lengths_checked() {
        let with = |options: &[u8]| {
            let mut bytes = packet(&SYN, 60);
            bytes[0] = 0x40 | (5 + options.len() as u8 / 4);
            bytes[20..20 + options.len()].copy_from_slice(options);
            Header::parse(&bytes).map(|header| header.payload(&bytes).len())
        };
        assert_eq!(with(&[1, 1, 1, 0]), Ok(36));
        assert_eq!(with(&[0x94, 4, 0, 0]), Ok(36));
        assert_eq!(with(&[7, 7, 4, 0, 0, 0, 0, 0]), Ok(32));
        assert_eq!(with(&[7, 9, 4, 0, 0, 0, 0, 0]), Err(WireError::BadLength));
        assert_eq!(with(&[1, 1, 7, 1]), Err(WireError::BadLength));
        assert_eq!(with(&[1, 1, 1, 7]), Err(WireError::BadLength));
        assert_eq!(with(&[0, 9, 9, 9]), Ok(36));
    }

    #[test]
    fn quote_of_header_and_8_bytes_is_parsed() {
        let bytes = packet(&SYN, 28);
        let (header, rest) = Header::parse_quoted(&bytes).unwrap();
        assert_eq!((header.total_len, rest), (60, &[0; 8][..]));
        assert_eq!(Header::parse_quoted(&bytes[..19]), Err(WireError::Truncated));
    }

    #[test]
    fn fragment_beyond_65535_bytes_is_rejected() {
        let mut bytes = packet(&SYN, 60);
        bytes[6..8].copy_from_slice(&[0x1f, 0xff]);
        assert_eq!(Header::parse(&bytes), Err(WireError::BadLength));
        for (offset, refused) in [(65_472u16, false), (65_480, true)] {
            bytes[6..8].copy_from_slice(&(offset / 8).to_be_bytes());
            assert_eq!(Header::parse(&bytes).is_err(), refused, "{offset}");
        }
        bytes[6..8].copy_from_slice(&[0x20, 0xb9]);
        let header = Header::parse(&bytes).unwrap();
        assert_eq!((header.fragment_offset, header.more_fragments), (1480, true));
    }
}
