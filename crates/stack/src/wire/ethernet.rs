//! Ethernet II frames, with at most one 802.1Q tag.

use super::{MacAddr, WireError, array, be16, header_buffer, header_bytes};

/// The type of an Ethernet frame's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EtherType(pub u16);

impl EtherType {
    /// IPv4 (RFC 894).
    pub const IPV4: Self = Self(0x0800);
    /// ARP (RFC 826).
    pub const ARP: Self = Self(0x0806);
    /// A customer VLAN tag (IEEE 802.1Q).
    pub const VLAN: Self = Self(0x8100);
    /// IPv6 (RFC 2464).
    pub const IPV6: Self = Self(0x86dd);
    /// A service VLAN tag (IEEE 802.1ad, QinQ).
    pub const SERVICE_VLAN: Self = Self(0x88a8);
}

/// Smallest EtherType: lower values are the length field of IEEE 802.3 frames (RFC 1122 §2.3.3).
const ETHERTYPE_MIN: u16 = 0x0600;

/// An 802.1Q tag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct VlanTag {
    /// Priority code point: 0 … 7.
    pub pcp: u8,
    /// Drop eligible indicator.
    pub dei: bool,
    /// VLAN identifier: 1 … 4,094, or 0 for a tag that only carries the priority.
    pub vid: u16,
}

/// An Ethernet header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Destination address.
    pub dst: MacAddr,
    /// Source address.
    pub src: MacAddr,
    /// The 802.1Q tag, if there is one.
    pub vlan: Option<VlanTag>,
    /// Type of the payload, after the tag if there is one.
    pub ethertype: EtherType,
    /// Length of the header in bytes: 14, or 18 with a tag. Set by the parser; [`Header::emit`] derives it
    /// from `vlan`.
    pub len: u8,
}

impl Header {
    /// Length of a header without tag in bytes.
    pub const LEN: usize = 14;
    /// Length of a header with tag in bytes.
    pub const LEN_TAGGED: usize = 18;

    /// Creates a header to be emitted.
    #[inline]
    pub const fn new(dst: MacAddr, src: MacAddr, vlan: Option<VlanTag>, ethertype: EtherType) -> Self {
        let len = if vlan.is_some() { Self::LEN_TAGGED } else { Self::LEN };
        Self { dst, src, vlan, ethertype, len: len as u8 }
    }

    /// Parses the header of a frame.
    ///
    /// # Errors
    /// `Truncated`; `Unsupported` for IEEE 802.3 length frames and for more than one tag; `BadValue` for the
    /// reserved VLAN 4,095.
    #[inline]
    pub fn parse(frame: &[u8]) -> Result<Self, WireError> {
        let bytes = header_bytes::<{ Self::LEN }>(frame)?;
        let dst = MacAddr(array(bytes, 0));
        let src = MacAddr(array(bytes, 6));
        let ethertype = be16(bytes, 12);
        if ethertype == EtherType::VLAN.0 {
            return Self::parse_tagged(frame, dst, src);
        }
        if ethertype < ETHERTYPE_MIN || ethertype == EtherType::SERVICE_VLAN.0 {
            return Err(WireError::Unsupported);
        }
        Ok(Self { dst, src, vlan: None, ethertype: EtherType(ethertype), len: Self::LEN as u8 })
    }

    fn parse_tagged(frame: &[u8], dst: MacAddr, src: MacAddr) -> Result<Self, WireError> {
        let bytes = header_bytes::<{ Self::LEN_TAGGED }>(frame)?;
        let tci = be16(bytes, 14);
        let ethertype = be16(bytes, 16);
        if ethertype < ETHERTYPE_MIN
            || matches!(EtherType(ethertype), EtherType::VLAN | EtherType::SERVICE_VLAN)
        {
            return Err(WireError::Unsupported);
        }
        let vlan = VlanTag { pcp: (tci >> 13) as u8, dei: tci & 0x1000 != 0, vid: tci & 0x0fff };
        if vlan.vid == 0x0fff {
            return Err(WireError::BadValue);
        }
        Ok(Self { dst, src, vlan: Some(vlan), ethertype: EtherType(ethertype), len: Self::LEN_TAGGED as u8 })
    }

    /// Writes the header and returns its length.
    ///
    /// # Panics
    /// If `out` is shorter than the header.
    #[inline]
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let ethertype = self.ethertype.0.to_be_bytes();
        match self.vlan {
            None => {
                let out = header_buffer::<{ Self::LEN }>(out);
                out[..6].copy_from_slice(&self.dst.0);
                out[6..12].copy_from_slice(&self.src.0);
                out[12..].copy_from_slice(&ethertype);
                Self::LEN
            }
            Some(VlanTag { pcp, dei, vid }) => {
                let out = header_buffer::<{ Self::LEN_TAGGED }>(out);
                let tci = u16::from(pcp & 7) << 13 | u16::from(dei) << 12 | vid & 0x0fff;
                out[..6].copy_from_slice(&self.dst.0);
                out[6..12].copy_from_slice(&self.src.0);
                out[12..14].copy_from_slice(&EtherType::VLAN.0.to_be_bytes());
                out[14..16].copy_from_slice(&tci.to_be_bytes());
                out[16..].copy_from_slice(&ethertype);
                Self::LEN_TAGGED
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
    const B: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);

    #[test]
    fn untagged_header_has_14_bytes() {
        let header = Header::new(A, B, None, EtherType::IPV4);
        let mut out = [0; 20];
        assert_eq!(header.emit(&mut out), 14);
        assert_eq!(out[..14], [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0]);
        assert_eq!(Header::parse(&out), Ok(header));
    }

    #[test]
    fn tag_carries_priority_and_vlan() {
        let header = Header::new(A, B, Some(VlanTag { pcp: 5, dei: true, vid: 0xabc }), EtherType::IPV6);
        let mut out = [0; 18];
        assert_eq!(header.emit(&mut out), 18);
        assert_eq!(out[12..], [0x81, 0x00, 0xba, 0xbc, 0x86, 0xdd]);
        assert_eq!(Header::parse(&out), Ok(header));
    }

    #[test]
    fn double_tag_and_reserved_vlan_are_rejected() {
        let mut out = [0; 22];
        Header::new(A, B, Some(VlanTag::default()), EtherType::VLAN).emit(&mut out);
        assert_eq!(Header::parse(&out), Err(WireError::Unsupported));
        Header::new(A, B, None, EtherType::SERVICE_VLAN).emit(&mut out);
        assert_eq!(Header::parse(&out), Err(WireError::Unsupported));
        Header::new(A, B, None, EtherType(0x05dc)).emit(&mut out);
        assert_eq!(Header::parse(&out), Err(WireError::Unsupported));
        Header::new(A, B, Some(VlanTag { pcp: 0, dei: false, vid: 4095 }), EtherType::IPV4).emit(&mut out);
        assert_eq!(Header::parse(&out), Err(WireError::BadValue));
    }

    #[test]
    fn truncated_frames_are_rejected() {
        let mut out = [0; 18];
        Header::new(A, B, Some(VlanTag::default()), EtherType::IPV4).emit(&mut out);
        for len in 0..18 {
            assert_eq!(Header::parse(&out[..len]), Err(WireError::Truncated), "{len}");
        }
    }
}
