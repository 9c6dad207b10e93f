//! UDP headers (RFC 768).

use super::{WireError, be16, header_buffer, header_bytes};

/// A UDP header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Source port.
    pub src_port: u16,
    /// Destination port.
    pub dst_port: u16,
    /// Length of the datagram in bytes, header included.
    pub len: u16,
    /// The checksum; 0 if there is none, which only IPv4 permits (RFC 8200 §8.1). The parser does not verify
    /// it.
    pub checksum: u16,
}

impl Header {
    /// Length of the header in bytes.
    pub const LEN: usize = 8;
    /// Offset of the checksum field within the header.
    pub const CHECKSUM_OFFSET: usize = 6;

    /// Parses the header of a datagram.
    ///
    /// # Errors
    /// `Truncated` if the buffer ends before the datagram does, `BadLength` for a length below 8.
    #[inline]
    pub fn parse(datagram: &[u8]) -> Result<Self, WireError> {
        let bytes = header_bytes::<{ Self::LEN }>(datagram)?;
        let len = be16(bytes, 4);
        // A length of 0 indicates a jumbogram (RFC 2675), which is not supported.
        if usize::from(len) < Self::LEN {
            return Err(WireError::BadLength);
        }
        if datagram.len() < usize::from(len) {
            return Err(WireError::Truncated);
        }
        Ok(Self { src_port: be16(bytes, 0), dst_port: be16(bytes, 2), len, checksum: be16(bytes, 6) })
    }

    /// Returns the datagram this was parsed from, header included, without the bytes after it in the buffer:
    /// the range of the checksum. The result is empty for a shorter datagram.
    #[inline]
    pub fn datagram<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        bytes.get(..usize::from(self.len)).unwrap_or(&[])
    }

    /// Returns the payload of the datagram this was parsed from. The result is empty for a shorter datagram.
    #[inline]
    pub fn payload<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        bytes.get(Self::LEN..usize::from(self.len)).unwrap_or(&[])
    }

    /// Writes the header unchanged and returns its length (8).
    ///
    /// # Panics
    /// If `out` is shorter than the header.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let out = header_buffer::<{ Self::LEN }>(out);
        out[..2].copy_from_slice(&self.src_port.to_be_bytes());
        out[2..4].copy_from_slice(&self.dst_port.to_be_bytes());
        out[4..6].copy_from_slice(&self.len.to_be_bytes());
        out[6..].copy_from_slice(&self.checksum.to_be_bytes());
        Self::LEN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_round_trips_and_length_bounds_the_payload() {
        let header = Header { src_port: 0x1234, dst_port: 53, len: 11, checksum: 0xabcd };
        let mut out = [0xee; 20];
        assert_eq!(header.emit(&mut out), 8);
        assert_eq!(out[..8], [0x12, 0x34, 0, 53, 0, 11, 0xab, 0xcd]);
        assert_eq!(Header::parse(&out), Ok(header));
        assert_eq!((header.payload(&out), header.datagram(&out)), (&out[8..11], &out[..11]));
    }

    #[test]
    fn impossible_lengths_are_rejected() {
        let mut out = [0; 20];
        for len in 0..=21 {
            Header { len, ..Default::default() }.emit(&mut out);
            let expected = match len {
                0..8 => Err(WireError::BadLength),
                8..=20 => Ok(len),
                _ => Err(WireError::Truncated),
            };
            assert_eq!(Header::parse(&out).map(|h| h.len), expected);
        }
        assert_eq!(Header::parse(&out[..7]), Err(WireError::Truncated));
    }
}
