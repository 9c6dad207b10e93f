//! Errors about transmitted packets, as transports receive them.

use super::extensions::IcmpExtensions;
use crate::wire::{icmpv4, icmpv6, ipv4, ipv6, protocol, udp};
use core::net::{IpAddr, SocketAddr};

/// Error about a transmitted packet.
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
    /// Kind of the error.
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
    let QuotedHeaders { src, dst, protocol, hop_limit, transport } = QuotedHeaders::parse(packet)?;
    let word = |at: usize| Some([*transport.get(at)?, *transport.get(at + 1)?]);
    let (mut ports, mut seq) = ((0, 0), None);
    if matches!(protocol, protocol::TCP | protocol::UDP) {
        ports = (u16::from_be_bytes(word(0)?), u16::from_be_bytes(word(2)?));
    }
    if protocol == protocol::TCP {
        let ([a, b], [c, d]) = (word(4)?, word(6)?);
        seq = Some(u32::from_be_bytes([a, b, c, d]));
    }
    let (icmp_type, icmp_code) = match src {
        IpAddr::V4(_) => (icmpv4::UNREACHABLE, icmpv4::unreachable::HOST),
        IpAddr::V6(_) => (icmpv6::UNREACHABLE, icmpv6::unreachable::ADDRESS),
    };
    Some(TransportError {
        protocol,
        local: SocketAddr::new(src, ports.0),
        remote: SocketAddr::new(dst, ports.1),
        seq,
        kind: IcmpErrorKind::HostUnreachable,
        hop_limit,
        origin: IcmpErrorOrigin { offender: src, icmp_type, icmp_code, info: 0, extensions: None, hop_limit },
    })
}

/// Returns the payload of a UDP packet that [`parse_quoted_packet`] parses; empty for other packets.
pub(crate) fn quoted_udp_payload(packet: &[u8]) -> &[u8] {
    QuotedHeaders::parse(packet)
        .filter(|headers| headers.protocol == protocol::UDP)
        .and_then(|headers| headers.transport.get(udp::Header::LEN..))
        .unwrap_or_default()
}

/// The fields of the IP headers of a quoted packet.
struct QuotedHeaders<'a> {
    src: IpAddr,
    dst: IpAddr,
    protocol: u8,
    hop_limit: u8,
    /// The bytes after the IP headers.
    transport: &'a [u8],
}

impl<'a> QuotedHeaders<'a> {
    /// Parses the IP headers. Returns `None` if they are incomplete, or if the packet is a fragment other
    /// than the first, which contains no transport header.
    fn parse(packet: &'a [u8]) -> Option<Self> {
        match packet.first()? >> 4 {
            4 => Self::parse_v4(packet),
            6 => Self::parse_v6(packet),
            _ => None,
        }
    }

    fn parse_v4(packet: &'a [u8]) -> Option<Self> {
        let (header, transport) = ipv4::Header::parse_quoted(packet).ok()?;
        let (src, dst) = (header.src.into(), header.dst.into());
        let headers = Self { src, dst, protocol: header.protocol, hop_limit: header.ttl, transport };
        (header.fragment_offset == 0).then_some(headers)
    }

    fn parse_v6(packet: &'a [u8]) -> Option<Self> {
        let header = ipv6::Header::parse_quoted(packet).ok()?;
        let chain = ipv6::walk_header_chain(packet, &header).ok()?;
        if chain.fragment.is_some_and(|fragment| fragment.header.offset != 0) {
            return None;
        }
        let transport = packet.get(chain.offset..)?;
        let (src, dst) = (header.src.into(), header.dst.into());
        Some(Self { src, dst, protocol: chain.protocol, hop_limit: header.hop_limit, transport })
    }
}
