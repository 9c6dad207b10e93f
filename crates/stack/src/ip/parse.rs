//! Parsing of received frames. Parsing has no side effects, so a whole burst can be parsed before its first
//! packet is processed.

use super::Network;
use super::stats::DropReason;
use crate::device::{Gso, RxChecksum, RxFrame};
use crate::handle::{LinkId, PortId};
use crate::link::{Link, is_unicast};
use crate::wire::checksum::{Sum, pseudo_v4, pseudo_v6};
use crate::wire::ethernet::{self, EtherType};
use crate::wire::{MacAddr, arp, ipv4, ipv6, protocol, tcp, udp};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A received frame after all checks of the network layer.
#[derive(Clone, Copy, Debug)]
pub enum ParsedFrame<'b> {
    /// A TCP segment for this host with a correct checksum. Its header is not parsed yet.
    Tcp(L4<'b>),
    /// A UDP datagram for this host with a correct length and checksum.
    Udp(L4<'b>),
    /// A frame for [`Network::input`].
    Other(OtherFrame<'b>),
    /// A frame to be dropped and counted.
    Drop(DropReason),
}

/// A transport segment and the fields of the headers in front of it.
#[derive(Clone, Copy, Debug)]
pub struct L4<'b> {
    /// Source address.
    pub src: IpAddr,
    /// Destination address: a local address, or a broadcast or multicast address.
    pub dst: IpAddr,
    /// The link on which the segment arrived.
    pub link: LinkId,
    /// Explicit congestion notification field (RFC 3168): 0 … 3.
    pub ecn: u8,
    /// Time to live, or hop limit.
    pub hop_limit: u8,
    /// The segment from its TCP or UDP header on, without padding.
    pub bytes: &'b [u8],
    /// The checksum status reported by the device. The checksum has been verified here if the device has not.
    pub checksum: RxChecksum,
    /// Set for a super-frame, which holds several segments.
    pub gso: Option<Gso>,
    /// The packet from its IP header on, for quoting in ICMP errors.
    pub ip_packet: &'b [u8],
    /// True if the destination is a broadcast or multicast address. Never true for TCP.
    pub broadcast: bool,
}

impl L4<'_> {
    /// Returns the type of service or traffic class of the packet, with ECN in its lowest two bits.
    pub fn tos(&self) -> u8 {
        let word = |at: usize| self.ip_packet.get(at).copied().unwrap_or(0);
        match self.src {
            IpAddr::V4(_) => word(1),
            IpAddr::V6(_) => word(0) << 4 | word(1) >> 4,
        }
    }

    /// Returns the flow label of a packet over IPv6, and 0 for IPv4.
    pub fn flow_label(&self) -> u32 {
        match (self.src, self.ip_packet.first_chunk()) {
            (IpAddr::V6(_), Some(word)) => u32::from_be_bytes(*word) & super::FLOW_LABEL_MAX,
            _ => 0,
        }
    }
}

/// A frame that carries neither a complete TCP segment nor a complete UDP datagram.
#[derive(Clone, Copy, Debug)]
pub struct OtherFrame<'b> {
    pub(crate) link: LinkId,
    /// Ethernet source address; zero for packets reassembled from fragments.
    pub(crate) source_mac: MacAddr,
    /// True if the Ethernet destination is a group address.
    pub(crate) group_frame: bool,
    pub(crate) kind: OtherFrameKind<'b>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum OtherFrameKind<'b> {
    Arp(arp::ArpPacket),
    /// An unfragmented packet of ICMP or of an unknown protocol.
    Ipv4(Ipv4Packet<'b>),
    /// The IPv6 counterpart, with its extension headers already parsed.
    Ipv6(Ipv6Packet<'b>),
    Ipv4Fragment(Ipv4Packet<'b>),
    Ipv6Fragment(Ipv6Packet<'b>),
    /// A packet with IPv6 headers that are not understood, which is reported to its sender.
    ParameterProblem(Ipv6ParameterProblem<'b>),
}

/// An IPv4 packet without padding.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ipv4Packet<'b> {
    pub header: ipv4::Header,
    pub bytes: &'b [u8],
    pub payload: &'b [u8],
    /// True if the destination is a broadcast or multicast address.
    pub broadcast: bool,
}

/// An IPv6 packet without padding.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ipv6Packet<'b> {
    pub header: ipv6::Header,
    pub bytes: &'b [u8],
    pub chain: ipv6::HeaderChain,
    /// The bytes after the last extension header; in a fragment, the bytes after the fragment header.
    pub payload: &'b [u8],
}

/// An IPv6 packet whose extension headers cannot be parsed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ipv6ParameterProblem<'b> {
    pub header: ipv6::Header,
    pub bytes: &'b [u8],
    /// The code of the ICMPv6 parameter problem message.
    pub code: u8,
    pub pointer: u32,
    pub even_if_multicast: bool,
}

/// Link-layer facts about a received packet.
#[derive(Clone, Copy)]
struct RxMeta {
    link: LinkId,
    source_mac: MacAddr,
    group_frame: bool,
    checksum: RxChecksum,
    gso: Option<Gso>,
    /// Bytes in front of the IP header.
    header_len: usize,
}

impl RxMeta {
    fn other<'b>(&self, kind: OtherFrameKind<'b>) -> ParsedFrame<'b> {
        ParsedFrame::Other(OtherFrame {
            link: self.link,
            source_mac: self.source_mac,
            group_frame: self.group_frame,
            kind,
        })
    }
}

/// A transport segment whose own checks are still to be made.
struct UncheckedSegment<'b> {
    src: IpAddr,
    dst: IpAddr,
    ecn: u8,
    hop_limit: u8,
    packet: &'b [u8],
    /// Offset of the segment within the packet.
    at: usize,
    broadcast: bool,
}

impl Network {
    /// Parses a received frame and checks everything about it except the contents of TCP segments and of
    /// packets for [`Network::input`].
    #[inline]
    pub fn parse<'b>(&self, port: PortId, frame: &RxFrame<'b>) -> ParsedFrame<'b> {
        match self.parse_frame(port, frame) {
            Ok(parsed) => parsed,
            Err(reason) => ParsedFrame::Drop(reason),
        }
    }

    #[inline]
    fn parse_frame<'b>(&self, port: PortId, frame: &RxFrame<'b>) -> Result<ParsedFrame<'b>, DropReason> {
        let ethernet = ethernet::Header::parse(frame.bytes).map_err(|_| DropReason::BadEthernet)?;
        let Some(port) = self.ports.get(usize::from(port.0)) else {
            return self.parse_looped_back(port, &ethernet, frame.bytes);
        };
        let id = port.link_of(ethernet.vlan).ok_or(DropReason::UnknownVlan)?;
        let link = self.link(id);
        let group_frame = ethernet.dst.is_multicast();
        if ethernet.dst != link.mac && !group_frame {
            return Err(DropReason::OtherHost);
        }
        let header_len = usize::from(ethernet.len);
        let meta = RxMeta {
            link: id,
            source_mac: ethernet.src,
            group_frame,
            checksum: frame.checksum,
            gso: frame.gso,
            header_len,
        };
        let packet = &frame.bytes[header_len..];
        match ethernet.ethertype {
            EtherType::IPV4 => self.parse_ipv4(link, &meta, packet),
            EtherType::IPV6 => self.parse_ipv6(link, &meta, packet),
            EtherType::ARP => {
                let packet = arp::ArpPacket::parse(packet).map_err(|_| DropReason::BadArp)?;
                Ok(meta.other(OtherFrameKind::Arp(packet)))
            }
            _ => Err(DropReason::UnknownEthertype),
        }
    }

    /// Returns the link on which a device received a frame.
    pub(crate) fn link_of_frame(&self, port: PortId, frame: &[u8]) -> Option<LinkId> {
        let ethernet = ethernet::Header::parse(frame).ok()?;
        self.ports.get(usize::from(port.0))?.link_of(ethernet.vlan)
    }

    /// Parses a packet without a frame, which was reassembled from fragments.
    pub(super) fn parse_packet<'b>(&self, link: LinkId, packet: &'b [u8]) -> ParsedFrame<'b> {
        let frame = RxMeta {
            link,
            source_mac: MacAddr::ZERO,
            group_frame: false,
            checksum: RxChecksum::Unverified,
            gso: None,
            header_len: 0,
        };
        let parsed = match packet.first().map(|byte| byte >> 4) {
            Some(4) => self.parse_ipv4(self.link(link), &frame, packet),
            Some(6) => self.parse_ipv6(self.link(link), &frame, packet),
            _ => Err(DropReason::BadIpHeader),
        };
        match parsed {
            // A fragment within a fragment (IPv6): an attacker could nest reassembly to any depth.
            Ok(ParsedFrame::Other(OtherFrame {
                kind: OtherFrameKind::Ipv4Fragment(_) | OtherFrameKind::Ipv6Fragment(_),
                ..
            })) => ParsedFrame::Drop(DropReason::NestedFragment),
            Ok(parsed) => parsed,
            Err(reason) => ParsedFrame::Drop(reason),
        }
    }

    #[inline]
    fn parse_ipv4<'b>(
        &self,
        link: &Link,
        frame: &RxMeta,
        packet: &'b [u8],
    ) -> Result<ParsedFrame<'b>, DropReason> {
        let header = ipv4::Header::parse(packet).map_err(|_| DropReason::BadIpHeader)?;
        if !header.checksum_ok(packet) {
            return Err(DropReason::BadIpChecksum);
        }
        let header_len = usize::from(header.header_len);
        let packet = &packet[..usize::from(header.total_len)];
        if header_len > ipv4::Header::LEN && has_source_route(&packet[ipv4::Header::LEN..header_len]) {
            return Err(DropReason::BadIpOptions);
        }
        let broadcast = self.check_ipv4_destination(link, frame, header.dst)?;
        // RFC 1122 §3.2.1.3. A local source address is forged or looped back, except on the loopback link.
        let is_local_src = self.local.v4.link_of(header.src.to_bits()).is_some();
        if is_local_src != link.loopback
            || !link.loopback && (!is_unicast(header.src.into()) || link.is_broadcast(header.src))
        {
            // RFC 4541 §2.1.1: switches send queries from the unspecified address.
            let is_query = broadcast && header.protocol == protocol::IGMP && header.src.is_unspecified();
            if !is_query {
                return Err(DropReason::MartianSource);
            }
        }
        let other = Ipv4Packet { header, bytes: packet, payload: &packet[header_len..], broadcast };
        if header.is_fragment() {
            return Ok(frame.other(OtherFrameKind::Ipv4Fragment(other)));
        }
        let segment = UncheckedSegment {
            src: header.src.into(),
            dst: header.dst.into(),
            ecn: header.ecn,
            hop_limit: header.ttl,
            packet,
            at: header_len,
            broadcast,
        };
        match header.protocol {
            protocol::TCP => segment.tcp(frame),
            protocol::UDP => segment.udp(frame),
            _ => Ok(frame.other(OtherFrameKind::Ipv4(other))),
        }
    }

    /// Returns whether the destination is a broadcast or multicast address. Fails if this host
    /// does not receive packets to it.
    #[inline]
    fn check_ipv4_destination(&self, link: &Link, frame: &RxMeta, dst: Ipv4Addr) -> Result<bool, DropReason> {
        // Local addresses of any link are accepted: the weak host model (RFC 1122 §3.3.4.2), as on Linux.
        // Only the addresses of the loopback link are restricted to it.
        if let Some(owner) = self.local.v4.link_of(dst.to_bits()) {
            if Some(owner) == self.loopback && owner != frame.link {
                return Err(DropReason::NotLocal);
            }
            // RFC 1122 §3.3.6.
            return if frame.group_frame { Err(DropReason::UnicastInBroadcast) } else { Ok(false) };
        }
        let is_group = dst.is_multicast() && link.groups.is_member(dst.into());
        if is_group || link.is_broadcast(dst) { Ok(true) } else { Err(DropReason::NotLocal) }
    }

    #[inline]
    fn parse_ipv6<'b>(
        &self,
        link: &Link,
        frame: &RxMeta,
        packet: &'b [u8],
    ) -> Result<ParsedFrame<'b>, DropReason> {
        if !link.ipv6 {
            return Err(DropReason::FamilyDisabled);
        }
        let header = ipv6::Header::parse(packet).map_err(|_| DropReason::BadIpHeader)?;
        let packet = &packet[..ipv6::Header::LEN + usize::from(header.payload_len)];
        let broadcast = self.check_ipv6_destination(link, frame, header.dst)?;
        let is_unspecified_src = header.src.is_unspecified();
        let is_local_src = self.local.v6.link_of(header.src.to_bits()).is_some();
        if is_local_src != link.loopback
            || !(link.loopback || is_unspecified_src || is_unicast(header.src.into()))
        {
            return Err(DropReason::MartianSource);
        }
        let chain = match ipv6::walk_header_chain(packet, &header) {
            Ok(chain) => chain,
            Err(ipv6::HeaderChainError::ParameterProblem { code, pointer, even_if_multicast })
                if !is_unspecified_src =>
            {
                let problem =
                    Ipv6ParameterProblem { header, bytes: packet, code, pointer, even_if_multicast };
                return Ok(frame.other(OtherFrameKind::ParameterProblem(problem)));
            }
            Err(_) => return Err(DropReason::BadExtensionHeaders),
        };
        let payload = packet.get(chain.offset..).ok_or(DropReason::BadExtensionHeaders)?;
        // Only a host without an address uses the unspecified source address, and only for ICMPv6 (RFC 4862
        // §5.4).
        if is_unspecified_src && (chain.fragment.is_some() || chain.protocol != protocol::ICMPV6) {
            return Err(DropReason::MartianSource);
        }
        let other = Ipv6Packet { header, bytes: packet, chain, payload };
        if chain.fragment.is_some() {
            return Ok(frame.other(OtherFrameKind::Ipv6Fragment(other)));
        }
        let segment = UncheckedSegment {
            src: header.src.into(),
            dst: header.dst.into(),
            ecn: header.ecn,
            hop_limit: header.hop_limit,
            packet,
            at: chain.offset,
            broadcast,
        };
        match chain.protocol {
            protocol::TCP => segment.tcp(frame),
            protocol::UDP => segment.udp(frame),
            _ => Ok(frame.other(OtherFrameKind::Ipv6(other))),
        }
    }

    #[inline]
    fn check_ipv6_destination(&self, link: &Link, frame: &RxMeta, dst: Ipv6Addr) -> Result<bool, DropReason> {
        match self.local.v6.link_of(dst.to_bits()) {
            // A link-local address is valid on its own link only (RFC 4291 §2.5.6), and so are the addresses
            // of the loopback link. The loopback link accepts the addresses of all links.
            Some(owner)
                if owner != frame.link
                    && (dst.is_unicast_link_local() && !link.loopback || Some(owner) == self.loopback) =>
            {
                Err(DropReason::NotLocal)
            }
            Some(_) if frame.group_frame => Err(DropReason::UnicastInBroadcast),
            Some(_) => Ok(false),
            None if dst.is_multicast() && link.groups.is_member(dst.into()) => Ok(true),
            None => Err(DropReason::NotLocal),
        }
    }
}

impl<'b> UncheckedSegment<'b> {
    #[inline]
    fn tcp(&self, frame: &RxMeta) -> Result<ParsedFrame<'b>, DropReason> {
        let bytes = &self.packet[self.at..];
        if self.broadcast {
            return Err(DropReason::TcpBroadcast);
        }
        if bytes.len() < tcp::TcpHeader::LEN {
            return Err(DropReason::BadTransportLength);
        }
        if !self.is_checksum_verified(frame) && !self.checksum_ok(protocol::TCP, bytes) {
            return Err(self.checksum_error(protocol::TCP, bytes, 16));
        }
        Ok(ParsedFrame::Tcp(self.l4(frame, bytes)))
    }

    #[inline]
    fn udp(&self, frame: &RxMeta) -> Result<ParsedFrame<'b>, DropReason> {
        let bytes = &self.packet[self.at..];
        let header = udp::Header::parse(bytes).map_err(|_| DropReason::BadTransportLength)?;
        let bytes = header.datagram(bytes);
        let ok = if header.checksum == 0 {
            // RFC 768: the sender computed no checksum. RFC 8200 §8.1: this is not allowed over IPv6.
            self.src.is_ipv4()
        } else {
            self.is_checksum_verified(frame) || self.checksum_ok(protocol::UDP, bytes)
        };
        if !ok {
            return Err(self.checksum_error(protocol::UDP, bytes, 6));
        }
        Ok(ParsedFrame::Udp(self.l4(frame, bytes)))
    }

    /// Returns whether the device has verified the checksum of this segment, as opposed to that of a segment
    /// encapsulated in it.
    #[inline]
    fn is_checksum_verified(&self, frame: &RxMeta) -> bool {
        match frame.checksum {
            RxChecksum::Unverified => false,
            RxChecksum::Verified => true,
            RxChecksum::Partial { start, .. } => usize::from(start) == frame.header_len + self.at,
        }
    }

    #[inline]
    fn checksum_ok(&self, protocol: u8, bytes: &[u8]) -> bool {
        self.pseudo_header(protocol, bytes).is_some_and(|pseudo| pseudo.add(Sum::of(bytes)).is_valid())
    }

    /// Returns the sum of the pseudo-header of a segment.
    #[inline]
    fn pseudo_header(&self, protocol: u8, bytes: &[u8]) -> Option<Sum> {
        match (self.src, self.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => Some(pseudo_v4(src, dst, protocol, bytes.len())),
            (IpAddr::V6(src), IpAddr::V6(dst)) => Some(pseudo_v6(src, dst, protocol, bytes.len())),
            // Both addresses are from one header.
            _ => None,
        }
    }

    /// Returns why a segment with a wrong checksum is dropped. The checksum is at offset `at` of the segment.
    #[cold]
    fn checksum_error(&self, protocol: u8, bytes: &[u8], at: usize) -> DropReason {
        let is_partial = self.pseudo_header(protocol, bytes).is_some_and(|pseudo| {
            bytes.get(at..at + 2).is_some_and(|field| field == pseudo.fold().to_be_bytes())
        });
        if is_partial { DropReason::PartialTransportChecksum } else { DropReason::BadTransportChecksum }
    }

    #[inline]
    fn l4(&self, frame: &RxMeta, bytes: &'b [u8]) -> L4<'b> {
        L4 {
            src: self.src,
            dst: self.dst,
            link: frame.link,
            ecn: self.ecn,
            hop_limit: self.hop_limit,
            bytes,
            checksum: frame.checksum,
            gso: frame.gso,
            ip_packet: self.packet,
            broadcast: self.broadcast,
        }
    }
}

/// Returns whether well-formed IPv4 options contain a loose or strict source route, which could bypass packet
/// filters.
#[cold]
fn has_source_route(mut options: &[u8]) -> bool {
    const LOOSE: u8 = 131;
    const STRICT: u8 = 137;
    while let Some((&kind, rest)) = options.split_first() {
        match kind {
            0 => return false,
            1 => options = rest,
            LOOSE | STRICT => return true,
            _ => {
                let len = rest.first().map_or(1, |&len| usize::from(len).max(2));
                options = options.get(len..).unwrap_or(&[]);
            }
        }
    }
    false
}

#[cfg(test)]
#[path = "parse_tests.rs"]
mod tests;
