//! ARP for IPv4 over Ethernet (RFC 826).

use super::{MacAddr, WireError, array, be16, header_buffer, header_bytes};
use core::net::Ipv4Addr;

/// The operation of an ARP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ArpOperation {
    /// Asks which host has the target address.
    Request,
    /// States that the sender has its address.
    Reply,
}

/// An ARP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArpPacket {
    /// Request or reply.
    pub operation: ArpOperation,
    /// Ethernet address of the sender.
    pub sender_mac: MacAddr,
    /// IPv4 address of the sender: 0.0.0.0 in a probe (RFC 5227).
    pub sender_ip: Ipv4Addr,
    /// Ethernet address of the target; meaningless in a request.
    pub target_mac: MacAddr,
    /// IPv4 address of the target.
    pub target_ip: Ipv4Addr,
}

/// Hardware type Ethernet, protocol type IPv4, and the lengths of their addresses.
const ETHERNET_IPV4: [u8; 6] = [0, 1, 0x08, 0x00, 6, 4];

impl ArpPacket {
    /// Length of a packet in bytes.
    pub const LEN: usize = 28;

    /// Parses a packet. Bytes after it in the buffer are padding.
    ///
    /// # Errors
    /// `Truncated`; `BadVersion` if the packet is not for IPv4 over Ethernet; `Unsupported` for operations
    /// other than request and reply.
    pub fn parse(packet: &[u8]) -> Result<Self, WireError> {
        let bytes = header_bytes::<{ Self::LEN }>(packet)?;
        if array::<6, 28>(bytes, 0) != ETHERNET_IPV4 {
            return Err(WireError::BadVersion);
        }
        let operation = match be16(bytes, 6) {
            1 => ArpOperation::Request,
            2 => ArpOperation::Reply,
            _ => return Err(WireError::Unsupported),
        };
        Ok(Self {
            operation,
            sender_mac: MacAddr(array(bytes, 8)),
            sender_ip: Ipv4Addr::from_octets(array(bytes, 14)),
            target_mac: MacAddr(array(bytes, 18)),
            target_ip: Ipv4Addr::from_octets(array(bytes, 24)),
        })
    }

    /// Writes the packet and returns its length (28).
    ///
    /// # Panics
    /// If `out` is shorter than the packet.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let out = header_buffer::<{ Self::LEN }>(out);
        let operation: u16 = match self.operation {
            ArpOperation::Request => 1,
            ArpOperation::Reply => 2,
        };
        out[..6].copy_from_slice(&ETHERNET_IPV4);
        out[6..8].copy_from_slice(&operation.to_be_bytes());
        out[8..14].copy_from_slice(&self.sender_mac.0);
        out[14..18].copy_from_slice(&self.sender_ip.octets());
        out[18..24].copy_from_slice(&self.target_mac.0);
        out[24..28].copy_from_slice(&self.target_ip.octets());
        Self::LEN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> ArpPacket {
        ArpPacket {
            operation: ArpOperation::Request,
            sender_mac: MacAddr([2, 0, 0, 0, 0, 1]),
            sender_ip: Ipv4Addr::new(10, 0, 0, 1),
            target_mac: MacAddr::ZERO,
            target_ip: Ipv4Addr::new(10, 0, 0, 2),
        }
    }

    #[test]
    fn request_has_the_layout_of_rfc_826() {
        let mut out = [0; 46];
        assert_eq!(request().emit(&mut out), 28);
        let expected = [0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1, 0, 0, 0, 0, 0, 0, 10, 0, 0, 2];
        assert_eq!(out[..28], expected);
        assert_eq!(ArpPacket::parse(&out), Ok(request()));
    }

    #[test]
    fn unsupported_and_truncated_packets_are_rejected() {
        let mut out = [0; 28];
        request().emit(&mut out);
        for len in 0..28 {
            assert_eq!(ArpPacket::parse(&out[..len]), Err(WireError::Truncated));
        }
        for at in 0..6 {
            let mut bad = out;
            bad[at] ^= 1;
            assert_eq!(ArpPacket::parse(&bad), Err(WireError::BadVersion));
        }
        out[7] = 3;
        assert_eq!(ArpPacket::parse(&out), Err(WireError::Unsupported));
    }
}
