//! Errors about transmitted packets, as transports receive them.

use super::extensions::IcmpExtensions;
use crate::wire::{icmpv4, icmpv6, ipv4, ipv6, protocol, udp};
use core::net::{IpAddr, SocketAddr};

/// What went wrong with a transmitted packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IcmpErrorKind {
    /// There is no route to the network (`ENETUNREACH`). A soft error: the condition may be temporary.
    NetUnreachable,
    /// The host does not answer (`EHOSTUNREACH`). A soft error.
    HostUnreachable,
    /// The host does not support the protocol (`ENOPROTOOPT`). A hard error.
    ProtocolUnreachable,
    /// No socket has the port (`ECONNREFUSED`). A hard error.
    PortUnreachable,
    /// The packet exceeds the MTU of a link on its path (`EMSGSIZE`). `mtu` is the value that the router
    /// reported, unchecked.
    PacketTooBig {
        /// Bytes of the largest IP packet that fits.
        mtu: u16,
    },
    /// Communication is administratively prohibited (`EHOSTUNREACH`; `EACCES` for IPv6). A hard error.
    Prohibited,
    /// Another code of "destination unreachable" that is final. A hard error.
    Unreachable,
    /// The hop limit was exceeded in transit, or fragments did not arrive in time (`EHOSTUNREACH`). A soft
    /// error.
    TimeExceeded,
    /// A router or the host did not understand the header (`EPROTO`). A hard error.
    ParameterProblem,
}

impl IcmpErrorKind {
    /// Returns whether the error aborts a connection attempt at once (RFC 1122 §4.2.3.9 as Linux implements
    /// it); false if the condition may be temporary.
    pub const fn is_hard(self) -> bool {
        match self {
            Self::ProtocolUnreachable
            | Self::PortUnreachable
            | Self::Prohibited
            | Self::Unreachable
            | Self::ParameterProblem => true,
            Self::NetUnreachable | Self::HostUnreachable | Self::PacketTooBig { .. } | Self::TimeExceeded => {
                false
            }
        }
    }
}

/// Where an error comes from, as in Linux's `sock_extended_err`: the fields of the ICMP message, or those
/// this host would have sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcmpErrorOrigin {
    /// The sender of the message: this host if a neighbour did not answer.
    pub offender: IpAddr,
    /// Type of the message.
    pub icmp_type: u8,
    /// Code of the message.
    pub icmp_code: u8,
    /// Bytes of the largest packet that fits, or the offset of the byte that was not understood; otherwise 0.
    pub info: u32,
    /// The extensions after the quoted packet; set for UDP only.
    pub extensions: Option<IcmpExtensions>,
    /// Hop limit with which the message arrived; if this host is the sender, the hop limit of the packet
    /// itself.
    pub hop_limit: u8,
}

/// An error about a transmitted packet. The quoted packet is known to have a local source address, but an
/// attacker can know that much. The transport must check what else it can before it accepts the error (RFC
/// 5927 §4: for TCP, that the sequence number is in flight).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransportError {
    /// Protocol of the packet.
    pub protocol: u8,
    /// The local endpoint.
    pub local: SocketAddr,
    /// The endpoint that the packet was sent to.
    pub remote: SocketAddr,
    /// The sequence number of a TCP segment.
    pub seq: Option<u32>,
    /// What went wrong.
    pub kind: IcmpErrorKind,
    /// The hop limit that `IP_MINTTL` and `IPV6_MINHOPCOUNT` are compared with.
    pub hop_limit: u8,
    /// The message that reported the error.
    pub origin: IcmpErrorOrigin,
}

/// Parses the addresses, ports and sequence number of a packet from its IP header on: a packet quoted in an
/// ICMP error, or a transmitted packet that never left. It may be cut off after 8 bytes of transport header
/// (RFC 792), and its lengths and checksums need not be correct. The result describes the error that this
/// host itself would report: the neighbour does not answer.
pub(crate) fn parse_quoted_packet(packet: &[u8]) -> Option<TransportError> {
    let (src, dst, protocol, hops, transport) = match packet.first()? >> 4 {
        4 => quoted_headers_v4(packet)?,
        6 => quoted_headers_v6(packet)?,
        _ => return None,
    };
    let word = |at: usize| Some([*transport.get(at)?, *transport.get(at + 1)?]);
    let (mut ports, mut seq) = ((0, 0), None);
    if matches!(protocol, protocol::TCP | protocol::UDP) {
        ports = (u16::from_be_bytes(word(0)?), u16::from_be_bytes(word(2)?));
    }
    if protocol == protocol::TCP {
        let ([a, b], [c, d]) = (word(4)?, word(6)?);
        seq = Some(u32::from_be_bytes([a, b, c, d]));
    }
    let (kind, code) = match src {
        IpAddr::V4(_) => (icmpv4::UNREACHABLE, icmpv4::unreachable::HOST),
        IpAddr::V6(_) => (icmpv6::UNREACHABLE, icmpv6::unreachable::ADDRESS),
    };
    Some(TransportError {
        protocol,
        local: SocketAddr::new(src, ports.0),
        remote: SocketAddr::new(dst, ports.1),
        seq,
        kind: IcmpErrorKind::HostUnreachable,
        hop_limit: hops,
        origin: IcmpErrorOrigin {
            offender: src,
            icmp_type: kind,
            icmp_code: code,
            info: 0,
            extensions: None,
            hop_limit: hops,
        },
    })
}

/// Returns the payload of a UDP packet that [`parse_quoted_packet`] parses; empty for other packets.
pub(crate) fn quoted_udp_payload(packet: &[u8]) -> &[u8] {
    let described = match packet.first().map(|first| first >> 4) {
        Some(4) => quoted_headers_v4(packet),
        Some(6) => quoted_headers_v6(packet),
        _ => None,
    };
    described
        .filter(|(_, _, protocol, ..)| *protocol == protocol::UDP)
        .and_then(|(.., transport)| transport.get(udp::Header::LEN..))
        .unwrap_or_default()
}

/// Source, destination, protocol, hop limit, and the bytes after the IP headers.
type QuotedHeaders<'a> = (IpAddr, IpAddr, u8, u8, &'a [u8]);

fn quoted_headers_v4(packet: &[u8]) -> Option<QuotedHeaders<'_>> {
    let (header, rest) = ipv4::Header::parse_quoted(packet).ok()?;
    // Only the first fragment contains the transport header.
    (header.fragment_offset == 0).then_some((
        header.src.into(),
        header.dst.into(),
        header.protocol,
        header.ttl,
        rest,
    ))
}

fn quoted_headers_v6(packet: &[u8]) -> Option<QuotedHeaders<'_>> {
    let header = ipv6::Header::parse_quoted(packet).ok()?;
    let chain = ipv6::walk_header_chain(packet, &header).ok()?;
    if chain.fragment.is_some_and(|fragment| fragment.header.offset != 0) {
        return None;
    }
    let rest = packet.get(chain.offset..)?;
    Some((header.src.into(), header.dst.into(), chain.protocol, header.hop_limit, rest))
}
