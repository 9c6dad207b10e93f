//! The fields of a frame that rules refer to.

use crate::flow::FlowKey;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Protocol number of TCP.
pub const TCP: u8 = 6;
/// Protocol number of UDP.
pub const UDP: u8 = 17;

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPE_VLAN: u16 = 0x8100;
const ETHERTYPE_SERVICE_VLAN: u16 = 0x88a8;

/// VLAN tags that are skipped.
const VLAN_TAGS_MAX: usize = 2;
/// IPv6 extension headers that are skipped. In a packet with more, the protocol is unknown.
const EXTENSION_HEADERS_MAX: usize = 8;

/// A parsed frame. Fields that the frame lacks are `None`: those above Ethernet of a packet that is not IP or
/// has a malformed IP header, and ports and payload of a fragment other than the first.
///
/// Of a super-frame, the payload is that of all its segments.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    bytes: &'a [u8],
    /// Start of the IP header.
    ip_at: usize,
    version: Option<IpVersion>,
    traffic_class: u8,
    protocol: Option<u8>,
    ports: Option<(u16, u16)>,
    payload: Option<&'a [u8]>,
    tcp_flags: Option<u8>,
    is_fragment: bool,
    /// True if the headers between Ethernet and the ports have the shape of [`FlowKey`].
    is_plain: bool,
}

/// Version of an IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IpVersion {
    /// IPv4.
    Four,
    /// IPv6.
    Six,
}

impl<'a> Packet<'a> {
    /// Parses a frame, from the destination MAC address on, without FCS. The frame may consist of any bytes.
    #[must_use]
    pub fn parse(bytes: &'a [u8]) -> Self {
        let mut packet = Self {
            bytes,
            ip_at: 14,
            version: None,
            traffic_class: 0,
            protocol: None,
            ports: None,
            payload: None,
            tcp_flags: None,
            is_fragment: false,
            is_plain: false,
        };
        let mut ethertype = be16(bytes, 12);
        for _ in 0..VLAN_TAGS_MAX {
            if !matches!(ethertype, Some(ETHERTYPE_VLAN | ETHERTYPE_SERVICE_VLAN)) {
                break;
            }
            ethertype = be16(bytes, packet.ip_at + 2);
            packet.ip_at += 4;
        }
        match ethertype {
            Some(ETHERTYPE_IPV4) => packet.parse_ipv4(),
            Some(ETHERTYPE_IPV6) => packet.parse_ipv6(),
            _ => None,
        };
        packet
    }

    fn parse_ipv4(&mut self) -> Option<()> {
        let header = self.bytes.get(self.ip_at..)?.first_chunk::<20>()?;
        let header_len = usize::from(header[0] & 0xf) * 4;
        let total_len = usize::from(u16::from_be_bytes([header[2], header[3]]));
        let is_valid = header[0] >> 4 == 4 && header_len >= 20 && total_len >= header_len;
        if !is_valid || self.bytes.len() - self.ip_at < header_len {
            return None;
        }
        self.version = Some(IpVersion::Four);
        self.traffic_class = header[1];
        self.protocol = Some(header[9]);
        let fragment = u16::from_be_bytes([header[6], header[7]]);
        // More fragments, and the offset.
        self.is_fragment = fragment & 0x3fff != 0;
        if fragment & 0x1fff != 0 {
            return None;
        }
        let ip = self.bytes.get(..self.ip_at + total_len).unwrap_or(self.bytes);
        self.parse_transport(ip, self.ip_at + header_len)?;
        self.is_plain = header_len == 20 && !self.is_fragment && self.ip_at <= 18;
        Some(())
    }

    fn parse_ipv6(&mut self) -> Option<()> {
        let header = self.bytes.get(self.ip_at..)?.first_chunk::<40>()?;
        if header[0] >> 4 != 6 {
            return None;
        }
        self.version = Some(IpVersion::Six);
        self.traffic_class = header[0] << 4 | header[1] >> 4;
        let payload_len = usize::from(u16::from_be_bytes([header[4], header[5]]));
        let first = self.ip_at + 40;
        let ip = self.bytes.get(..first + payload_len).unwrap_or(self.bytes);
        let (mut next, mut at) = (header[6], first);
        for _ in 0..EXTENSION_HEADERS_MAX {
            let extension_len =
                |unit: usize, extra: usize| Some((usize::from(*ip.get(at + 1)?) + extra) * unit);
            let len = match next {
                // Hop-by-hop and destination options, routing, mobility, HIP, Shim6.
                0 | 43 | 60 | 135 | 139 | 140 => extension_len(8, 1)?,
                // Authentication.
                51 => extension_len(4, 2)?,
                44 => {
                    let fragment = be16(ip, at + 2)?;
                    self.is_fragment = fragment & 0xfff9 != 0;
                    if fragment & 0xfff8 != 0 {
                        self.protocol = Some(ip[at]);
                        return None;
                    }
                    8
                }
                protocol => {
                    self.protocol = Some(protocol);
                    self.parse_transport(ip, at)?;
                    self.is_plain = at == first && self.ip_at <= 18;
                    return Some(());
                }
            };
            next = ip[at];
            at += len;
        }
        None
    }

    /// Parses ports and payload. `ip` is the frame up to the end of the IP packet, `at` the end of the IP
    /// headers. Returns `None` if there are no ports.
    fn parse_transport(&mut self, ip: &'a [u8], at: usize) -> Option<()> {
        let protocol = self.protocol.filter(|protocol| [TCP, UDP].contains(protocol))?;
        self.ports = Some((be16(ip, at)?, be16(ip, at + 2)?));
        if protocol == TCP {
            self.tcp_flags = ip.get(at + 13).copied();
        }
        self.payload = match protocol {
            TCP => ip
                .get(at + 12)
                .map(|byte| usize::from(byte >> 4) * 4)
                .filter(|len| *len >= 20)
                .and_then(|len| ip.get(at + len..)),
            _ => be16(ip, at + 4).map(usize::from).and_then(|len| match len {
                // An unusable length.
                0..8 => ip.get(at + 8..),
                len => ip.get(at + 8..at + len).or_else(|| ip.get(at + 8..)),
            }),
        };
        Some(())
    }

    /// Returns the bytes of the frame.
    #[must_use]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the source address.
    #[must_use]
    pub fn source(&self) -> Option<IpAddr> {
        self.address(12, 8)
    }

    /// Returns the destination address.
    #[must_use]
    pub fn destination(&self) -> Option<IpAddr> {
        self.address(16, 24)
    }

    /// Returns the address at one of the offsets in an IPv4 and an IPv6 header.
    fn address(&self, at_ipv4: usize, at_ipv6: usize) -> Option<IpAddr> {
        let ip = self.bytes.get(self.ip_at..)?;
        match self.version? {
            IpVersion::Four => Some(Ipv4Addr::from(*ip.get(at_ipv4..)?.first_chunk::<4>()?).into()),
            IpVersion::Six => Some(Ipv6Addr::from(*ip.get(at_ipv6..)?.first_chunk::<16>()?).into()),
        }
    }

    /// Returns the protocol number above IP, after extension headers.
    #[must_use]
    pub fn protocol(&self) -> Option<u8> {
        self.protocol
    }

    /// Returns source and destination port of TCP and UDP.
    #[must_use]
    pub fn ports(&self) -> Option<(u16, u16)> {
        self.ports
    }

    /// Returns the differentiated services code point: 0 to 63.
    #[must_use]
    pub fn dscp(&self) -> Option<u8> {
        self.version.map(|_| self.traffic_class >> 2)
    }

    /// Returns the payload of TCP or UDP. Of the first fragment of a packet, it is the part in that fragment.
    #[must_use]
    pub fn payload(&self) -> Option<&'a [u8]> {
        self.payload
    }

    /// Returns the byte of the TCP header with FIN, SYN, RST, PSH, ACK, URG, ECE and CWR, FIN in the lowest
    /// bit (RFC 9293 §3.1).
    #[must_use]
    pub fn tcp_flags(&self) -> Option<u8> {
        self.tcp_flags
    }

    /// Returns whether the packet is a fragment, the first one or another.
    #[must_use]
    pub fn is_fragment(&self) -> bool {
        self.is_fragment
    }

    /// Returns the flow of a packet with headers of the usual shape: at most one VLAN tag, no IPv4 options,
    /// no IPv6 extension headers, no fragment, TCP or UDP. `None` for any other packet.
    pub(crate) fn flow_key(&self) -> Option<FlowKey> {
        let version = self.version.filter(|_| self.is_plain)?;
        let tag = if self.ip_at == 18 { be32(self.bytes, 12)? } else { 0 };
        Some(FlowKey::new(
            version,
            (self.source()?, self.destination()?),
            self.ports?,
            (self.protocol?, self.traffic_class),
            tag,
        ))
    }

    /// Returns the version of the IP header, and where it starts.
    pub(crate) fn ip_header(&self) -> Option<(IpVersion, usize)> {
        Some((self.version?, self.ip_at))
    }
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().copied().map(u16::from_be_bytes)
}

fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_be_bytes)
}

#[cfg(test)]
mod tests;
