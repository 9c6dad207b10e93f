//! Errors about packets of ours, as transports see them.

use super::extensions::IcmpExtensions;
use crate::wire::{icmpv4, icmpv6, ipv4, ipv6, protocol, udp};
use core::net::{IpAddr, SocketAddr};

/// What went wrong with a packet of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IcmpErrorKind {
    /// No route to the network (`ENETUNREACH`). Soft: it may pass.
    NetUnreachable,
    /// The host does not answer (`EHOSTUNREACH`). Soft.
    HostUnreachable,
    /// The host does not speak the protocol (`ENOPROTOOPT`). Hard.
    ProtocolUnreachable,
    /// Nobody has the port (`ECONNREFUSED`). Hard.
    PortUnreachable,
    /// The packet was larger than a link of the path takes (`EMSGSIZE`). `mtu` is what the router reported, not checked in any way.
    PacketTooBig {
        /// Bytes of the largest IP packet that fits.
        mtu: u16,
    },
    /// Administratively prohibited (`EHOSTUNREACH`; `EACCES` for IPv6). Hard.
    Prohibited,
    /// Other codes of "destination unreachable" that are final.
    Unreachable,
    /// The hop limit was used up on the way, or fragments did not arrive in time (`EHOSTUNREACH`). Soft.
    TimeExceeded,
    /// Somebody did not understand our header (`EPROTO`). Hard.
    ParameterProblem,
}

impl IcmpErrorKind {
    /// True if the error ends a connection attempt at once (RFC 1122 §4.2.3.9 as Linux reads it); false if it may pass.
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

/// The ICMP message that told of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcmpErrorOrigin {
    /// Who sent it; we ourselves, if a neighbour did not answer.
    pub offender: IpAddr,
    /// Its type.
    pub icmp_type: u8,
    /// Its code.
    pub icmp_code: u8,
    /// Bytes of the largest packet that fits, or which byte was not understood; else 0.
    pub info: u32,
    /// What is behind the packet that it quotes, for datagrams.
    pub extensions: Option<IcmpExtensions>,
    /// Hop limit that it arrived with; that of the packet, if it is ours.
    pub hop_limit: u8,
}

/// An error about a packet of ours. That the quoted packet has our address as its source is checked; anybody can know that much, so
/// the transport must check what else it can (RFC 5927 §4: for TCP, that the sequence number is in flight) before it believes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransportError {
    /// Protocol of the packet.
    pub protocol: u8,
    /// Our end.
    pub local: SocketAddr,
    /// The end the packet was for.
    pub remote: SocketAddr,
    /// TCP's sequence number.
    pub seq: Option<u32>,
    /// What went wrong.
    pub kind: IcmpErrorKind,
    /// What `IP_MINTTL` and `IPV6_MINHOPCOUNT` are compared with.
    pub hop_limit: u8,
    /// The message that says so.
    pub origin: IcmpErrorOrigin,
}

/// Reads who sent a packet to whom, from its IP header on: a quote in an ICMP error, or a packet of ours that never left. It may be cut
/// off after 8 bytes of transport header (RFC 792), and its lengths and checksums need not be right. The kind of the result, and who
/// says so, are what we would say ourselves: its neighbour does not answer.
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

/// What a UDP packet that [`describe_own_packet`] reads says behind its header; nothing of others.
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

/// From whom and to whom, protocol, hop limit, and what follows the headers of IP.
type QuotedHeaders<'a> = (IpAddr, IpAddr, u8, u8, &'a [u8]);

fn quoted_headers_v4(packet: &[u8]) -> Option<QuotedHeaders<'_>> {
    let (header, rest) = ipv4::Header::parse_quoted(packet).ok()?;
    // Only the first fragment has the transport's header.
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
