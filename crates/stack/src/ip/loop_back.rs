//! Datagrams to groups and broadcast addresses that come back to this host: their way to members on other
//! shards. Members on the sending shard get them directly.

use super::parse::{L4, ParsedFrame};
use super::stats::DropReason;
use super::{IpHeader, Network};
use crate::device::RxChecksum;
use crate::handle::{LinkId, PortId};
use crate::steering::{FrameOwner, MisroutedPacket};
use crate::wire::ethernet::{self, EtherType};
use crate::wire::{MacAddr, ipv4, ipv6, protocol, udp};
use core::net::{IpAddr, SocketAddr};
use std::collections::VecDeque;

/// Marks the number of a device: the frame was sent by another shard of this host on that device. No frame
/// from a device has the mark, because a stack has fewer devices.
const LOOPED_BACK: u16 = 1 << 15;
/// Largest number of bytes of datagrams that await being passed on to other shards. They are passed on in
/// every turn.
// limit: bytes of looped-back datagrams of a turn
const LOOPED_BACK_BYTES_MAX: usize = 1 << 20;
/// Bytes charged for a datagram in addition to its frame.
const LOOPED_BACK_OVERHEAD: usize = 64;

/// Datagrams of this shard to groups, for members on other shards.
#[derive(Debug, Default)]
pub(crate) struct LoopedBack {
    datagrams: VecDeque<MisroutedPacket>,
    /// Bytes charged for `datagrams`.
    bytes: usize,
}

impl LoopedBack {
    fn cost(frame_len: usize) -> usize {
        frame_len + LOOPED_BACK_OVERHEAD
    }

    fn has_room(&self, frame_len: usize) -> bool {
        self.bytes + Self::cost(frame_len) <= LOOPED_BACK_BYTES_MAX
    }

    fn push(&mut self, datagram: MisroutedPacket) {
        self.bytes += Self::cost(datagram.frame.len());
        self.datagrams.push_back(datagram);
    }

    /// Takes the oldest datagram.
    pub(crate) fn pop(&mut self) -> Option<MisroutedPacket> {
        let datagram = self.datagrams.pop_front()?;
        self.bytes -= Self::cost(datagram.frame.len());
        Some(datagram)
    }
}

impl Network {
    /// Passes a datagram that this shard sends on a link to the other shards whose sockets have its port.
    pub(crate) fn loop_back_to_other_shards(
        &mut self,
        link: LinkId,
        header: &IpHeader,
        [src_port, dst_port]: [u16; 2],
        payload: &[u8],
    ) {
        let Some(steering) = &self.steering else { return };
        let (src, dst) = (SocketAddr::new(header.src, src_port), SocketAddr::new(header.dst, dst_port));
        let Some(owner) = steering.group_owner(src, dst) else { return };
        if owner == FrameOwner::Shard(steering.shard()) {
            return;
        }
        let len = udp::Header::LEN + payload.len();
        let Ok(len) = u16::try_from(len) else { return };
        let link = &self.links[usize::from(link.0)];
        let (dscp, ecn, ttl) = (header.tos >> 2, header.tos & 3, header.hop_limit);
        let (ethertype, mac) = match header.dst {
            IpAddr::V4(dst) if dst.is_multicast() => (EtherType::IPV4, MacAddr::from_ipv4_multicast(dst)),
            IpAddr::V4(_) => (EtherType::IPV4, MacAddr::BROADCAST),
            IpAddr::V6(dst) => (EtherType::IPV6, MacAddr::from_ipv6_multicast(dst)),
        };
        let (ethernet, ethernet_len) = link.header_bytes(mac, ethertype);
        let ip_len = if header.dst.is_ipv4() { ipv4::Header::LEN } else { ipv6::Header::LEN };
        let frame_len = usize::from(ethernet_len) + ip_len + usize::from(len);
        if !self.looped_back.has_room(frame_len) {
            self.stats.looped_back_dropped += 1;
            return;
        }
        let mut frame = Vec::with_capacity(frame_len);
        frame.extend_from_slice(&ethernet[..usize::from(ethernet_len)]);
        match (header.src, header.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let mut bytes = [0; ipv4::Header::LEN];
                let header = ipv4::Header {
                    dscp,
                    ecn,
                    total_len: len.saturating_add(ipv4::Header::LEN as u16),
                    ident: 0,
                    dont_fragment: true,
                    more_fragments: false,
                    fragment_offset: 0,
                    ttl,
                    protocol: protocol::UDP,
                    src,
                    dst,
                    header_len: ipv4::Header::LEN as u8,
                };
                header.emit(&mut bytes);
                frame.extend_from_slice(&bytes);
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let mut bytes = [0; ipv6::Header::LEN];
                let header = ipv6::Header {
                    dscp,
                    ecn,
                    flow_label: header.flow_label,
                    payload_len: len,
                    next_header: protocol::UDP,
                    hop_limit: ttl,
                    src,
                    dst,
                };
                header.emit(&mut bytes);
                frame.extend_from_slice(&bytes);
            }
            // Both addresses are of one route.
            _ => return,
        }
        let mut bytes = [0; udp::Header::LEN];
        udp::Header { src_port, dst_port, len, checksum: 0 }.emit(&mut bytes);
        frame.extend_from_slice(&bytes);
        frame.extend_from_slice(payload);
        let port = PortId(link.port.0 | LOOPED_BACK);
        self.looped_back.push(MisroutedPacket { owner, port, frame });
    }

    /// Parses a frame that another shard has looped back. Its checksum was never computed, and its source is
    /// this host.
    #[cold]
    pub(super) fn parse_looped_back<'b>(
        &self,
        port: PortId,
        ethernet: &ethernet::Header,
        frame: &'b [u8],
    ) -> Result<ParsedFrame<'b>, DropReason> {
        let real = self.ports.get(usize::from(port.0 & !LOOPED_BACK)).filter(|_| port.0 & LOOPED_BACK != 0);
        let real = real.ok_or(DropReason::UnknownVlan)?;
        let id = real.link_of(ethernet.vlan).ok_or(DropReason::UnknownVlan)?;
        let packet = frame.get(usize::from(ethernet.len)..).ok_or(DropReason::BadEthernet)?;
        let (src, dst, ecn, hop_limit, at): (IpAddr, IpAddr, _, _, _) = match ethernet.ethertype {
            EtherType::IPV4 => {
                let header = ipv4::Header::parse(packet).map_err(|_| DropReason::BadIpHeader)?;
                let at = usize::from(header.header_len);
                (header.src.into(), header.dst.into(), header.ecn, header.ttl, at)
            }
            _ => {
                let header = ipv6::Header::parse(packet).map_err(|_| DropReason::BadIpHeader)?;
                (header.src.into(), header.dst.into(), header.ecn, header.hop_limit, ipv6::Header::LEN)
            }
        };
        let bytes = packet.get(at..).ok_or(DropReason::BadIpHeader)?;
        let header = udp::Header::parse(bytes).map_err(|_| DropReason::BadTransportLength)?;
        Ok(ParsedFrame::Udp(L4 {
            src,
            dst,
            link: id,
            ecn,
            hop_limit,
            bytes: header.datagram(bytes),
            checksum: RxChecksum::Verified,
            gso: None,
            ip_packet: packet,
            broadcast: true,
        }))
    }
}
