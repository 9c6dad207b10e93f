//! A copy of a datagram's packet for its transmit timestamps, which Linux returns with the headers of all
//! layers. Its Ethernet addresses, its IP identification and its UDP checksum are 0, and so is the source
//! address of a socket that has none: the process does not know them.

use crate::tx_stamps::SentPacket;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Time to live, or hop limit, of a packet whose socket has none.
const HOPS_DEFAULT: u8 = 64;
const PROTOCOL_UDP: u8 = 17;
const ETHERTYPE_IPV4: [u8; 2] = [8, 0];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const UDP_HEADER_BYTES: usize = 8;

/// Returns the packet of a datagram with these addresses, hop limit, type of service and bytes.
pub(super) fn sent_packet(
    [from, to]: [SocketAddr; 2],
    (hops, tos): (Option<u8>, u8),
    payload: &[u8],
) -> SentPacket {
    let hops = hops.unwrap_or(HOPS_DEFAULT);
    // Cannot truncate: no datagram is that long.
    let udp_len = (UDP_HEADER_BYTES + payload.len()) as u16;
    let mut bytes = vec![0; 12];
    let source = match (from.ip(), to.ip()) {
        (_, IpAddr::V4(to)) if to.is_loopback() && from.ip().is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        (_, IpAddr::V6(to)) if to.is_loopback() && from.ip().is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        (IpAddr::V6(from), IpAddr::V4(_)) => from.to_ipv4_mapped().unwrap_or(Ipv4Addr::UNSPECIFIED).into(),
        (IpAddr::V4(_), IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
        (from, _) => from,
    };
    match (source, to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            bytes.extend(ETHERTYPE_IPV4);
            let mut header = [0; 20];
            (header[0], header[1]) = (0x45, tos);
            header[2..4].copy_from_slice(&udp_len.saturating_add(20).to_be_bytes());
            // Don't fragment.
            header[6] = 0x40;
            (header[8], header[9]) = (hops, PROTOCOL_UDP);
            header[12..16].copy_from_slice(&from.octets());
            header[16..20].copy_from_slice(&to.octets());
            let checksum = header_checksum(&header);
            header[10..12].copy_from_slice(&checksum.to_be_bytes());
            bytes.extend(header);
        }
        (from, to) => {
            bytes.extend(ETHERTYPE_IPV6);
            bytes.extend([0x60 | tos >> 4, tos << 4, 0, 0]);
            bytes.extend(udp_len.to_be_bytes());
            bytes.extend([PROTOCOL_UDP, hops]);
            bytes.extend(octets(from));
            bytes.extend(octets(to));
        }
    }
    bytes.extend(from.port().to_be_bytes());
    bytes.extend(to.port().to_be_bytes());
    bytes.extend(udp_len.to_be_bytes());
    bytes.extend([0, 0]);
    bytes.extend(payload);
    SentPacket { source, destination: to.ip(), bytes }
}

/// Returns the checksum of an IPv4 header whose field is 0 (RFC 791 §3.1).
fn header_checksum(header: &[u8; 20]) -> u16 {
    let words = header.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

fn octets(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv4_header_is_valid() {
        let ends = ["127.0.0.1:52525", "127.0.0.1:46935"].map(|end| end.parse().unwrap());
        let packet = sent_packet(ends, (None, 0), b"hello");
        let header = &packet.bytes[14..34];
        let sum: u32 = header.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
        assert_eq!((packet.bytes.len(), &packet.bytes[42..]), (47, &b"hello"[..]));
    }

    #[test]
    fn source_of_a_loopback_packet_is_known() {
        let ends = ["[::]:7", "[::1]:9"].map(|end| end.parse().unwrap());
        let packet = sent_packet(ends, (Some(3), 0x12), b"");
        assert_eq!(packet.source, Ipv6Addr::LOCALHOST);
        assert_eq!(packet.bytes[14..22], [0x61, 0x20, 0, 0, 0, 8, 17, 3]);
    }
}
