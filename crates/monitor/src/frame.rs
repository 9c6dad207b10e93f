//! Finds the TCP segment in a captured packet. Packets may consist of any bytes, and captures may have cut
//! their ends off.

/// VLAN tags that are skipped.
const VLAN_TAGS_MAX: usize = 2;
/// IPv6 extension headers that are skipped. A packet with more is not examined.
const EXTENSION_HEADERS_MAX: usize = 8;

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const TCP: u8 = 6;

/// Flag FIN of a TCP segment (RFC 9293 §3.1).
pub const FIN: u8 = 0x01;
/// Flag SYN of a TCP segment.
pub const SYN: u8 = 0x02;
/// Flag RST of a TCP segment.
pub const RST: u8 = 0x04;
/// Flag ACK of a TCP segment.
pub const ACK: u8 = 0x10;

/// Kind of the header before the IP header of a packet, by the names of the capture formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkType {
    /// An Ethernet header, with up to two VLAN tags.
    Ethernet,
    /// Nothing.
    Raw,
    /// Four bytes with an address family (BSD loopback).
    Null,
    /// The 16 bytes of Linux's "any" interface.
    LinuxSll,
    /// The 20 bytes of Linux's "any" interface, version 2.
    LinuxSll2,
}

/// Source and destination address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Addresses {
    /// IPv4.
    V4 {
        /// Source address.
        source: u32,
        /// Destination address.
        destination: u32,
    },
    /// IPv6.
    V6 {
        /// Source address.
        source: u128,
        /// Destination address.
        destination: u128,
    },
}

/// A TCP segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpSegment<'a> {
    /// Addresses of the IP header.
    pub addresses: Addresses,
    /// Source port.
    pub source_port: u16,
    /// Destination port.
    pub destination_port: u16,
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number, which is valid with the flag ACK.
    pub ack: u32,
    /// Flags, FIN in the lowest bit.
    pub flags: u8,
    /// Bytes of the payload that were captured: its beginning.
    pub payload: &'a [u8],
    /// Length of the complete payload.
    pub payload_len: u32,
}

/// A parsed packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// TCP in IPv4 or IPv6.
    Tcp(TcpSegment<'a>),
    /// A fragment of an IP packet, or another protocol.
    Other,
    /// The headers contradict themselves, or do not fit into the packet.
    Malformed,
}

impl<'a> Frame<'a> {
    /// Parses a packet.
    #[inline]
    #[must_use]
    pub fn parse(link: LinkType, bytes: &'a [u8]) -> Self {
        parse(link, bytes).unwrap_or(Self::Malformed)
    }
}

/// Parses a packet. Returns `None` if it is malformed.
#[inline]
fn parse(link: LinkType, bytes: &[u8]) -> Option<Frame<'_>> {
    let (ethertype, at) = match link {
        LinkType::Ethernet => {
            let (mut ethertype, mut at) = (be16(bytes, 12)?, 14);
            for _ in 0..VLAN_TAGS_MAX {
                if !matches!(ethertype, 0x8100 | 0x88a8) {
                    break;
                }
                (ethertype, at) = (be16(bytes, at + 2)?, at + 4);
            }
            (ethertype, at)
        }
        LinkType::Raw => (of_version(bytes, 0)?, 0),
        LinkType::Null => (of_version(bytes, 4)?, 4),
        LinkType::LinuxSll => (be16(bytes, 14)?, 16),
        LinkType::LinuxSll2 => (be16(bytes, 0)?, 20),
    };
    let packet = bytes.get(at..)?;
    match ethertype {
        ETHERTYPE_IPV4 => parse_ipv4(packet),
        ETHERTYPE_IPV6 => parse_ipv6(packet),
        _ => Some(Frame::Other),
    }
}

/// Returns the EtherType that belongs to the version of the IP header at `at`; 0 for another version.
fn of_version(bytes: &[u8], at: usize) -> Option<u16> {
    Some(match bytes.get(at)? >> 4 {
        4 => ETHERTYPE_IPV4,
        6 => ETHERTYPE_IPV6,
        _ => 0,
    })
}

#[inline]
fn parse_ipv4(packet: &[u8]) -> Option<Frame<'_>> {
    let header = packet.first_chunk::<20>()?;
    let header_len = usize::from(header[0] & 0xf) * 4;
    if header[0] >> 4 != 4 || header_len < 20 {
        return None;
    }
    // "More fragments", and the offset.
    let is_fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0;
    if header[9] != TCP || is_fragment {
        return Some(Frame::Other);
    }
    let total_len = match usize::from(u16::from_be_bytes([header[2], header[3]])) {
        // A super-frame that is longer than 65,535 bytes.
        0 => packet.len(),
        len => len,
    };
    let addresses = Addresses::V4 { source: be32(packet, 12)?, destination: be32(packet, 16)? };
    parse_tcp(addresses, packet, header_len, total_len)
}

fn parse_ipv6(packet: &[u8]) -> Option<Frame<'_>> {
    let header = packet.first_chunk::<40>()?;
    if header[0] >> 4 != 6 {
        return None;
    }
    let total_len = match usize::from(u16::from_be_bytes([header[4], header[5]])) {
        // A super-frame that is longer than 65,535 bytes.
        0 => packet.len(),
        len => 40 + len,
    };
    let (mut next, mut at) = (header[6], 40);
    for _ in 0..EXTENSION_HEADERS_MAX {
        let len = match next {
            TCP => {
                let addresses = Addresses::V6 { source: be128(packet, 8)?, destination: be128(packet, 24)? };
                return parse_tcp(addresses, packet, at, total_len);
            }
            // Hop-by-hop and destination options, routing.
            0 | 43 | 60 => (usize::from(*packet.get(at + 1)?) + 1) * 8,
            // Authentication.
            51 => (usize::from(*packet.get(at + 1)?) + 2) * 4,
            // A fragment header of a packet that is not fragmented.
            44 if be16(packet, at + 2)? & 0xfff9 == 0 => 8,
            _ => return Some(Frame::Other),
        };
        next = *packet.get(at)?;
        at += len;
    }
    Some(Frame::Other)
}

/// Parses the TCP header at `at` of an IP packet of `total_len` bytes, of which `packet` was captured.
#[inline]
fn parse_tcp(addresses: Addresses, packet: &[u8], at: usize, total_len: usize) -> Option<Frame<'_>> {
    let header = packet.get(at..)?.first_chunk::<20>()?;
    let payload_at = at + usize::from(header[12] >> 4) * 4;
    if payload_at < at + 20 || payload_at > total_len {
        return None;
    }
    // Options may have been cut off, and Ethernet may have padded the packet.
    let payload = packet.get(payload_at..packet.len().min(total_len)).unwrap_or(&[]);
    Some(Frame::Tcp(TcpSegment {
        addresses,
        source_port: be16(header, 0)?,
        destination_port: be16(header, 2)?,
        seq: be32(header, 4)?,
        ack: be32(header, 8)?,
        flags: header[13],
        payload,
        payload_len: u32::try_from(total_len - payload_at).ok()?,
    }))
}

#[inline]
fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().copied().map(u16::from_be_bytes)
}

#[inline]
fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_be_bytes)
}

fn be128(bytes: &[u8], at: usize) -> Option<u128> {
    bytes.get(at..)?.first_chunk().copied().map(u128::from_be_bytes)
}

#[cfg(test)]
mod tests;
