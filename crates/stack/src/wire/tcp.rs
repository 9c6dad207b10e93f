//! TCP segments (RFC 9293 §3.1).

mod options;

pub use options::{FastOpenCookie, OPTIONS_LEN_MAX, SACK_BLOCKS_MAX, TcpOptions, Timestamps};

use super::{WireError, be16, be32, header_buffer, header_bytes};
use core::fmt;
use core::ops::{Add, AddAssign, BitOr, BitOrAssign, Sub};
use serde::{Deserialize, Serialize};

/// A sequence number. Arithmetic and comparison wrap at 2^32 (RFC 9293 §3.4).
///
/// There is deliberately no `PartialOrd`: the order is valid only within a window of 2^31 and is not
/// transitive.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SeqNumber(pub u32);

impl SeqNumber {
    /// Returns whether this number is before `other`. Of two numbers 2^31 apart each is before the other, as
    /// with Linux's `before()`.
    #[inline(always)]
    pub const fn lt(self, other: Self) -> bool {
        (self.0.wrapping_sub(other.0) as i32) < 0
    }

    /// Returns whether this number is before `other` or equal.
    #[inline(always)]
    pub const fn le(self, other: Self) -> bool {
        !other.lt(self)
    }

    /// Returns whether this number is after `other`.
    #[inline(always)]
    pub const fn gt(self, other: Self) -> bool {
        other.lt(self)
    }

    /// Returns whether this number is after `other` or equal.
    #[inline(always)]
    pub const fn ge(self, other: Self) -> bool {
        !self.lt(other)
    }

    /// Returns the later of both numbers.
    #[inline(always)]
    #[must_use]
    pub const fn max(self, other: Self) -> Self {
        if self.lt(other) { other } else { self }
    }

    /// Returns the earlier of both numbers.
    #[inline(always)]
    #[must_use]
    pub const fn min(self, other: Self) -> Self {
        if other.lt(self) { other } else { self }
    }
}

impl Add<u32> for SeqNumber {
    type Output = Self;

    #[inline(always)]
    fn add(self, rhs: u32) -> Self {
        Self(self.0.wrapping_add(rhs))
    }
}

impl AddAssign<u32> for SeqNumber {
    #[inline(always)]
    fn add_assign(&mut self, rhs: u32) {
        *self = *self + rhs;
    }
}

impl Sub<u32> for SeqNumber {
    type Output = Self;

    #[inline(always)]
    fn sub(self, rhs: u32) -> Self {
        Self(self.0.wrapping_sub(rhs))
    }
}

impl Sub for SeqNumber {
    type Output = i32;

    /// Returns how far `self` is after `rhs`; negative if it is before `rhs`.
    #[inline(always)]
    fn sub(self, rhs: Self) -> i32 {
        self.0.wrapping_sub(rhs.0) as i32
    }
}

impl fmt::Debug for SeqNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Display for SeqNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The control bits of a segment.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct TcpFlags(pub u8);

impl TcpFlags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// The sender has no more data.
    pub const FIN: Self = Self(0x01);
    /// Synchronises sequence numbers.
    pub const SYN: Self = Self(0x02);
    /// Resets the connection.
    pub const RST: Self = Self(0x04);
    /// Push function.
    pub const PSH: Self = Self(0x08);
    /// The acknowledgement number is valid.
    pub const ACK: Self = Self(0x10);
    /// The urgent pointer is valid.
    pub const URG: Self = Self(0x20);
    /// ECN echo (RFC 3168).
    pub const ECE: Self = Self(0x40);
    /// Congestion window reduced (RFC 3168).
    pub const CWR: Self = Self(0x80);

    /// Returns whether all of `flags` are set.
    #[inline(always)]
    pub const fn contains(self, flags: Self) -> bool {
        self.0 & flags.0 == flags.0
    }

    /// Returns whether at least one of `flags` is set.
    #[inline(always)]
    pub const fn intersects(self, flags: Self) -> bool {
        self.0 & flags.0 != 0
    }

    /// Returns these flags without `flags`.
    #[inline(always)]
    #[must_use]
    pub const fn without(self, flags: Self) -> Self {
        Self(self.0 & !flags.0)
    }

    /// Returns the union of both: a `const` version of `|`.
    #[inline(always)]
    #[must_use]
    pub const fn with(self, flags: Self) -> Self {
        Self(self.0 | flags.0)
    }
}

impl BitOr for TcpFlags {
    type Output = Self;

    #[inline(always)]
    fn bitor(self, rhs: Self) -> Self {
        self.with(rhs)
    }
}

impl BitOrAssign for TcpFlags {
    #[inline(always)]
    fn bitor_assign(&mut self, rhs: Self) {
        *self = *self | rhs;
    }
}

impl fmt::Debug for TcpFlags {
    /// Formats the flags as tcpdump does: `S.` is SYN and ACK; `none` is no flag at all.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::NONE {
            return f.write_str("none");
        }
        let letters = [
            (Self::FIN, "F"),
            (Self::SYN, "S"),
            (Self::RST, "R"),
            (Self::PSH, "P"),
            (Self::ACK, "."),
            (Self::URG, "U"),
            (Self::ECE, "E"),
            (Self::CWR, "W"),
        ];
        letters
            .iter()
            .filter(|(flag, _)| self.contains(*flag))
            .try_for_each(|(_, letter)| f.write_str(letter))
    }
}

/// The fixed part of a TCP header without its checksum, which is verified and completed over whole segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TcpHeader {
    /// Source port.
    pub src_port: u16,
    /// Destination port.
    pub dst_port: u16,
    /// Sequence number of the first byte, or of SYN.
    pub seq: SeqNumber,
    /// Acknowledgement number; valid only with ACK.
    pub ack: SeqNumber,
    /// Control bits.
    pub flags: TcpFlags,
    /// Window, unscaled.
    pub window: u16,
    /// Urgent pointer; valid only with URG.
    pub urg_ptr: u16,
    /// Length of the header in bytes, options included: 20 … 60. Set by the parser; [`emit`] writes the
    /// length that its options need.
    pub header_len: u8,
}

impl TcpHeader {
    /// Length of a header without options in bytes.
    pub const LEN: usize = 20;
    /// Length of the longest header in bytes.
    pub const LEN_MAX: usize = 60;
    /// Offset of the checksum field within the header.
    pub const CHECKSUM_OFFSET: usize = 16;

    /// Parses the fixed part. Whether the segment is as long as its data offset states is not checked here.
    #[inline(always)]
    pub(crate) const fn parse(bytes: &[u8; Self::LEN]) -> Self {
        Self {
            src_port: be16(bytes, 0),
            dst_port: be16(bytes, 2),
            seq: SeqNumber(be32(bytes, 4)),
            ack: SeqNumber(be32(bytes, 8)),
            flags: TcpFlags(bytes[13]),
            window: be16(bytes, 14),
            urg_ptr: be16(bytes, 18),
            header_len: Self::data_offset_bytes(bytes) as u8,
        }
    }

    /// Returns the length of the whole header in bytes, as stated by its data offset.
    #[inline(always)]
    pub(crate) const fn data_offset_bytes(bytes: &[u8; Self::LEN]) -> usize {
        (bytes[12] as usize >> 4) << 2
    }
}

/// A received segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpSegment<'a> {
    /// The fixed part of the header.
    pub header: TcpHeader,
    /// The options, unparsed: see [`TcpOptions::parse`].
    pub options: &'a [u8],
    /// The bytes after the header.
    pub payload: &'a [u8],
}

impl<'a> TcpSegment<'a> {
    /// Splits a segment into header, options and payload. The checksum is not verified here; reserved bits
    /// are ignored (RFC 9293 §3.1).
    ///
    /// # Errors
    /// `Truncated` if the header is incomplete, `BadLength` for a data offset below 5.
    #[inline]
    pub fn parse(segment: &'a [u8]) -> Result<Self, WireError> {
        let header = TcpHeader::parse(header_bytes(segment)?);
        let (headers, payload) =
            segment.split_at_checked(usize::from(header.header_len)).ok_or(WireError::Truncated)?;
        let options = headers.get(TcpHeader::LEN..).ok_or(WireError::BadLength)?;
        Ok(Self { header, options, payload })
    }

    /// Returns the number of sequence numbers that the segment occupies: payload, SYN and FIN (SEG.LEN of RFC
    /// 9293).
    #[inline]
    pub const fn seq_len(&self) -> u32 {
        let flags = self.header.flags;
        self.payload.len() as u32
            + flags.contains(TcpFlags::SYN) as u32
            + flags.contains(TcpFlags::FIN) as u32
    }
}

/// Writes header and options, with 0 in the checksum field, and returns the length of the header.
///
/// # Panics
/// If `out` is shorter than 20 bytes plus [`TcpOptions::encoded_len`].
#[inline]
pub fn emit(header: &TcpHeader, options: &TcpOptions, out: &mut [u8]) -> usize {
    let header_len = TcpHeader::LEN + options.emit(&mut out[TcpHeader::LEN..]);
    let out = header_buffer::<{ TcpHeader::LEN }>(out);
    out[..2].copy_from_slice(&header.src_port.to_be_bytes());
    out[2..4].copy_from_slice(&header.dst_port.to_be_bytes());
    out[4..8].copy_from_slice(&header.seq.0.to_be_bytes());
    out[8..12].copy_from_slice(&header.ack.0.to_be_bytes());
    out[12] = (header_len as u8 >> 2) << 4;
    out[13] = header.flags.0;
    out[14..16].copy_from_slice(&header.window.to_be_bytes());
    out[16..18].fill(0);
    out[18..20].copy_from_slice(&header.urg_ptr.to_be_bytes());
    header_len
}

#[cfg(test)]
mod tests;
