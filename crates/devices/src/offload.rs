//! What devices without offloads lack, done in software: segmentation and checksums.

use ginnel_stack::device::ETHERNET_HEADER_BYTES;
use ginnel_stack::wire::{ethernet, ethernet::EtherType, ipv4, ipv6, protocol, tcp::TcpHeader};

/// Largest super-frame in bytes that devices here take: the largest IP packet behind an Ethernet header.
pub const GSO_BYTES_MAX: usize = 65_535 + ETHERNET_HEADER_BYTES;

/// Where the parts of a TCP or UDP frame start, in bytes from its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TransportHeaders {
    /// Set if the packet is IPv6.
    pub(crate) six: bool,
    /// [`protocol::TCP`] or [`protocol::UDP`].
    pub(crate) protocol: u8,
    /// The IP header.
    pub(crate) ip_at: usize,
    /// The TCP or UDP header.
    pub(crate) transport_at: usize,
    /// What follows it.
    pub(crate) payload_at: usize,
}

/// Finds the headers of a TCP or UDP packet that is no fragment and has no IPv6 extension header. `None` for anything else.
pub(crate) fn transport_headers(frame: &[u8]) -> Option<TransportHeaders> {
    let link = ethernet::Header::parse(frame).ok()?;
    let ip_at = usize::from(link.len);
    let packet = frame.get(ip_at..)?;
    let (six, protocol, ip_len) = match link.ethertype {
        EtherType::IPV4 => {
            // The total length of a super-frame may be 0 or too small: only the fields that are needed are read.
            let first = *packet.first()?;
            let fragment = u16::from_be_bytes([*packet.get(6)?, *packet.get(7)?]) & 0x3fff;
            let header_len = usize::from(first & 0xf) * 4;
            (first >> 4 == 4 && fragment == 0 && header_len >= ipv4::Header::LEN).then_some(())?;
            (false, *packet.get(9)?, header_len)
        }
        EtherType::IPV6 => (true, *packet.get(6)?, ipv6::Header::LEN),
        _ => return None,
    };
    let transport_at = ip_at + ip_len;
    let transport_len = match protocol {
        protocol::TCP => usize::from(*frame.get(transport_at + 12)? >> 4) * 4,
        protocol::UDP => 8,
        _ => return None,
    };
    if protocol == protocol::TCP && transport_len < TcpHeader::LEN {
        return None;
    }
    let payload_at = transport_at + transport_len;
    (payload_at <= frame.len()).then_some(TransportHeaders { six, protocol, ip_at, transport_at, payload_at })
}
