//! The receive fast path: an untagged frame to this host that carries an unfragmented TCP segment after an IP
//! header without options. All other frames, valid or not, take the slow path, [`Network::parse`], which
//! determines the drop reason.

use super::Network;
use crate::device::{RxChecksum, RxFrame};
use crate::handle::{LinkId, PortId};
use crate::tcp::demux::{FlowKey, HostAddr};
use crate::wire::checksum::{Sum, pseudo_v4, pseudo_v6};
use crate::wire::tcp::{TcpFlags, TcpHeader};
use crate::wire::{array, be16, be32, protocol};
use core::net::{Ipv4Addr, Ipv6Addr};

/// Bytes of an Ethernet header without tag.
const ETHERNET: usize = 14;
/// Offset of the segment, and of the end of its fixed header, within the frame.
const L4_V4: usize = ETHERNET + 20;
const END_V4: usize = L4_V4 + TcpHeader::LEN;
const L4_V6: usize = ETHERNET + 40;
const END_V6: usize = L4_V6 + TcpHeader::LEN;
/// Offset of the flags within a segment.
const FLAGS: usize = 13;

/// A segment accepted by the fast path. Its checksum and addresses have been checked.
pub(crate) struct FastPathSegment<'b> {
    pub key: FlowKey,
    /// Explicit congestion notification field (RFC 3168): 0 … 3.
    pub ecn: u8,
    /// Hop limit, or time to live, with which the packet arrived.
    pub hop_limit: u8,
    /// Flow label of a packet over IPv6, otherwise 0.
    pub flow_label: u32,
    /// The fixed part of the TCP header, unparsed.
    pub header: &'b [u8; TcpHeader::LEN],
    pub options: &'b [u8],
    /// The payload without padding.
    pub payload: &'b [u8],
    /// Offset of the payload within the frame.
    pub payload_at: u32,
}

/// Pattern that IPv4 frames of a link are compared with. It is computed once for many frames and valid as
/// long as links and addresses do not change.
pub(crate) struct FastPathFilter {
    link: LinkId,
    /// The Ethernet address of the link, shifted as the first eight bytes of a frame are.
    mac: u64,
    /// The only local address and the only subnet broadcast address, if there is exactly one of each and the
    /// link is not loopback.
    sole_addresses: Option<(u32, u32)>,
}

impl<'b> FastPathSegment<'b> {
    /// Returns the segment that begins at offset `l4` of a packet; `None` if its header is incomplete.
    #[inline(always)]
    fn new(
        packet: &'b [u8],
        l4: usize,
        key: FlowKey,
        [ecn, hop_limit]: [u8; 2],
        flow_label: u32,
    ) -> Option<Self> {
        let header = packet.get(l4..)?.first_chunk()?;
        let payload_at = l4 + TcpHeader::data_offset_bytes(header);
        let (headers, payload) = packet.split_at_checked(payload_at)?;
        let options = headers.get(l4 + TcpHeader::LEN..)?;
        let payload_at = payload_at as u32;
        Some(Self { key, ecn, hop_limit, flow_label, header, options, payload, payload_at })
    }
}

/// Returns whether a frame may carry a SYN. It only guides prefetching, so nothing is validated.
#[inline(always)]
pub(crate) fn may_be_syn(frame: &[u8]) -> bool {
    let flags = match frame.get(12) {
        Some(0x86) => frame.get(L4_V6 + FLAGS),
        _ => frame.get(L4_V4 + FLAGS),
    };
    flags.is_some_and(|flags| flags & TcpFlags::SYN.0 != 0)
}

/// Returns the flow of a frame that may carry a TCP segment. It only guides prefetching, so no more is
/// validated than is needed to find the fields.
#[inline(always)]
pub(crate) fn peek_flow_key(frame: &[u8]) -> Option<FlowKey> {
    let head = frame.first_chunk::<END_V4>()?;
    if head[12..15] == [0x08, 0x00, 0x45] && head[23] == protocol::TCP {
        return Some(FlowKey {
            remote: HostAddr::v4(be32(head, 26)),
            local: HostAddr::v4(be32(head, 30)),
            remote_port: be16(head, L4_V4),
            local_port: be16(head, L4_V4 + 2),
        });
    }
    let head = frame.first_chunk::<END_V6>()?;
    if head[12..14] == [0x86, 0xdd] && head[20] == protocol::TCP {
        return Some(FlowKey {
            remote: HostAddr::v6(v6(head, 22)),
            local: HostAddr::v6(v6(head, 38)),
            remote_port: be16(head, L4_V6),
            local_port: be16(head, L4_V6 + 2),
        });
    }
    None
}

#[inline(always)]
fn v6<const N: usize>(head: &[u8; N], at: usize) -> Ipv6Addr {
    Ipv6Addr::from_octets(array(head, at))
}

impl Network {
    /// Returns the link of a device's untagged frames.
    pub(crate) fn untagged_link(&self, port: PortId) -> Option<LinkId> {
        self.ports.get(usize::from(port.0))?.untagged
    }

    /// Returns the segment in a frame of either family that the fast path accepts.
    #[cfg(test)]
    pub(crate) fn parse_fast<'b>(&self, port: PortId, frame: &RxFrame<'b>) -> Option<FastPathSegment<'b>> {
        let link = self.untagged_link(port)?;
        self.parse_fast_v4(&self.fast_path_filter(link), frame).or_else(|| self.parse_fast_v6(link, frame))
    }

    /// Computes what IPv4 frames of a link are compared with.
    pub(crate) fn fast_path_filter(&self, link: LinkId) -> FastPathFilter {
        let at = self.link(link);
        let sole_addresses = match (self.local.v4.sole_address(), at.sole_broadcast()) {
            (Some(local), Some(broadcast)) if !at.loopback && !is_loopback_v4(local) => {
                Some((local, broadcast.to_bits()))
            }
            _ => None,
        };
        let [m0, m1, m2, m3, m4, m5] = at.mac.0;
        FastPathFilter { link, mac: u64::from_le_bytes([0, 0, m0, m1, m2, m3, m4, m5]), sole_addresses }
    }

    /// Returns the segment in an IPv4 frame that the fast path accepts; `None` for every other frame.
    #[inline(always)]
    pub(crate) fn parse_fast_v4<'b>(
        &self,
        gate: &FastPathFilter,
        frame: &RxFrame<'b>,
    ) -> Option<FastPathSegment<'b>> {
        let head = frame.bytes.first_chunk::<END_V4>()?;
        // EtherType, version 4 without options, and neither a fragment offset nor "more fragments".
        let kind = be32(head, 12) & 0xffff_ff00;
        if u64::from_le_bytes(array(head, 0)) << 16 != gate.mac
            || kind != 0x0800_4500
            || be16(head, 20) & 0x3fff != 0
            || head[23] != protocol::TCP
        {
            return None;
        }
        // In ones' complement arithmetic, a correct checksum makes the sum of the header a multiple of
        // 0xffff, in either byte order (RFC 1071 §2 (B)).
        let word = |at| u64::from(u32::from_ne_bytes(array(head, at)));
        if !(word(14) + word(18) + word(22) + word(26) + word(30)).is_multiple_of(0xffff) {
            return None;
        }
        let (src, dst) = (be32(head, 26), be32(head, 30));
        let is_accepted = match gate.sole_addresses {
            Some((local, broadcast)) => {
                dst == local && src != local && src != broadcast && is_ordinary_unicast_v4(src)
            }
            None => self.accepts_addresses_v4(gate.link, src, dst),
        };
        if !is_accepted {
            return None;
        }
        let packet = frame.bytes.get(..ETHERNET + usize::from(be16(head, 16)))?;
        if !is_checksum_verified(frame, L4_V4) {
            let l4 = packet.get(L4_V4..)?;
            let (src, dst) = (Ipv4Addr::from_bits(src), Ipv4Addr::from_bits(dst));
            if !pseudo_v4(src, dst, protocol::TCP, l4.len()).add(Sum::of(l4)).is_valid() {
                return None;
            }
        }
        let key = FlowKey {
            remote: HostAddr::v4(src),
            local: HostAddr::v4(dst),
            remote_port: be16(head, L4_V4),
            local_port: be16(head, L4_V4 + 2),
        };
        FastPathSegment::new(packet, L4_V4, key, [head[15] & 3, head[22]], 0)
    }

    /// Returns whether the fast path accepts a packet with these addresses on a link.
    #[inline(never)]
    fn accepts_addresses_v4(&self, link: LinkId, src: u32, dst: u32) -> bool {
        let link = self.link(link);
        // On the loopback link both addresses are local.
        if !self.local.v4.contains(dst) || self.local.v4.contains(src) != link.loopback {
            return false;
        }
        link.loopback
            || is_ordinary_unicast_v4(src)
                && !is_loopback_v4(dst)
                && !link.is_broadcast(Ipv4Addr::from_bits(src))
    }

    /// Returns the segment in an IPv6 frame that the fast path accepts; `None` for every other frame.
    #[inline]
    pub(crate) fn parse_fast_v6<'b>(&self, link: LinkId, frame: &RxFrame<'b>) -> Option<FastPathSegment<'b>> {
        let link = self.link(link);
        let head = frame.bytes.first_chunk::<END_V6>()?;
        if head[..6] != link.mac.0
            || be16(head, 12) != 0x86dd
            || head[14] >> 4 != 6
            || head[20] != protocol::TCP
            || !link.ipv6
        {
            return None;
        }
        let (src, dst) = (v6(head, 22), v6(head, 38));
        // Global unicast addresses (RFC 4291 §2.4) and unique local addresses (RFC 4193), which have the same
        // meaning on every link.
        let is_global_or_ula = |first: u8| first >> 5 == 1 || first >> 1 == 0x7e;
        if !link.loopback && (!is_global_or_ula(head[22]) || !is_global_or_ula(head[38])) {
            return None;
        }
        if !self.local.v6.contains(dst.to_bits()) || self.local.v6.contains(src.to_bits()) != link.loopback {
            return None;
        }
        let packet = frame.bytes.get(..L4_V6 + usize::from(be16(head, 18)))?;
        let l4 = packet.get(L4_V6..)?;
        if !is_checksum_verified(frame, L4_V6)
            && !pseudo_v6(src, dst, protocol::TCP, l4.len()).add(Sum::of(l4)).is_valid()
        {
            return None;
        }
        let key = FlowKey {
            remote: HostAddr::v6(src),
            local: HostAddr::v6(dst),
            remote_port: be16(head, L4_V6),
            local_port: be16(head, L4_V6 + 2),
        };
        let flow_label = be32(head, ETHERNET) & super::FLOW_LABEL_MAX;
        FastPathSegment::new(packet, L4_V6, key, [head[15] >> 4 & 3, head[21]], flow_label)
    }
}

/// Returns whether an address is neither in network 0, nor loopback, nor multicast or reserved.
#[inline(always)]
const fn is_ordinary_unicast_v4(address: u32) -> bool {
    let first = address >> 24;
    first != 0 && first != 127 && first < 224
}

#[inline(always)]
const fn is_loopback_v4(address: u32) -> bool {
    address >> 24 == 127
}

/// Returns whether the device has verified the checksum of the segment at offset `at`.
#[inline(always)]
fn is_checksum_verified(frame: &RxFrame<'_>, at: usize) -> bool {
    match frame.checksum {
        RxChecksum::Unverified => false,
        RxChecksum::Verified => true,
        RxChecksum::Partial { start, .. } => usize::from(start) == at,
    }
}

#[cfg(test)]
#[path = "rx_fast_path_tests.rs"]
mod tests;
