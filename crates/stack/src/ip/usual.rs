//! The frame that nearly every frame is: untagged, addressed to us, with a TCP segment in one piece behind an IP header without
//! options. It is checked here at a glance. Whatever is different in any way, and be it only wrong, is left to
//! [`Network::parse`], which knows the reasons.

use super::Network;
use crate::device::{RxChecksum, RxFrame};
use crate::handle::PortId;
use crate::link::Link;
use crate::tcp::demux::{FlowKey, Host};
use crate::wire::checksum::{Sum, pseudo_v4, pseudo_v6};
use crate::wire::{array, be16, be32, protocol, tcp};
use core::net::{Ipv4Addr, Ipv6Addr};

/// Bytes of an Ethernet header without tag.
const ETHERNET: usize = 14;
/// Bytes in front of the segment, and up to the end of its shortest header.
const L4_V4: usize = ETHERNET + 20;
const END_V4: usize = L4_V4 + tcp::TcpHeader::LEN;
const L4_V6: usize = ETHERNET + 40;
const END_V6: usize = L4_V6 + tcp::TcpHeader::LEN;

/// A usual segment. Its checksum is right, and so are its addresses.
pub(crate) struct Usual<'b> {
    pub src: Host,
    pub dst: Host,
    /// Explicit congestion notification field (RFC 3168): 0 … 3.
    pub ecn: u8,
    /// The segment, without padding.
    pub l4: &'b [u8],
    /// Where it begins in the frame.
    pub at: u32,
}

/// Addresses and ports of what may be a usual segment: for hashing ahead, so nothing is checked but what tells where they are.
#[inline(always)]
pub(crate) fn ends(frame: &[u8]) -> Option<FlowKey> {
    let head = frame.first_chunk::<END_V4>()?;
    if head[12..15] == [0x08, 0x00, 0x45] && head[23] == protocol::TCP {
        return Some(FlowKey {
            remote: Host::v4(be32(head, 26)),
            local: Host::v4(be32(head, 30)),
            remote_port: be16(head, L4_V4),
            local_port: be16(head, L4_V4 + 2),
        });
    }
    let head = frame.first_chunk::<END_V6>()?;
    if head[12..14] == [0x86, 0xdd] && head[20] == protocol::TCP {
        return Some(FlowKey {
            remote: Host::v6(v6(head, 22)),
            local: Host::v6(v6(head, 38)),
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
    /// The segment in a usual frame; `None` for every other frame.
    #[inline(always)]
    pub(crate) fn usual<'b>(&self, port: PortId, frame: &RxFrame<'b>) -> Option<Usual<'b>> {
        let link = self.link(self.ports.get(usize::from(port.0))?.untagged?);
        let head = frame.bytes.first_chunk::<END_V4>()?;
        if head[..6] != link.mac.0 {
            return None;
        }
        match [head[12], head[13]] {
            [0x08, 0x00] => self.usual_v4(link, frame, head),
            [0x86, 0xdd] => self.usual_v6(link, frame),
            _ => None,
        }
    }

    #[inline(always)]
    fn usual_v4<'b>(&self, link: &Link, frame: &RxFrame<'b>, head: &[u8; END_V4]) -> Option<Usual<'b>> {
        let word = |at| be32(head, at);
        let (versions, fragment, src, dst) = (word(14), word(18), word(26), word(30));
        let total_len = (versions & 0xffff) as usize;
        // Version 4 without options; neither a fragment's offset nor more of them.
        if versions >> 24 != 0x45 || fragment & 0x3fff != 0 || head[23] != protocol::TCP {
            return None;
        }
        let sum =
            u64::from(versions) + u64::from(fragment) + u64::from(word(22)) + u64::from(src) + u64::from(dst);
        let sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32);
        if (sum & 0xffff) + (sum >> 16) != 0xffff {
            return None;
        }
        let (Some(_), None) = (self.local.v4.link_of(dst), self.local.v4.link_of(src)) else { return None };
        if !is_plain_v4(src) || link.is_broadcast(Ipv4Addr::from_bits(src)) {
            return None;
        }
        let l4 = frame.bytes.get(L4_V4..ETHERNET + total_len).filter(|l4| l4.len() >= tcp::TcpHeader::LEN)?;
        if !is_vouched_for(frame, L4_V4) {
            let (src, dst) = (Ipv4Addr::from_bits(src), Ipv4Addr::from_bits(dst));
            if !pseudo_v4(src, dst, protocol::TCP, l4.len()).add(Sum::of(l4)).is_valid() {
                return None;
            }
        }
        Some(Usual { src: Host::v4(src), dst: Host::v4(dst), ecn: head[15] & 3, l4, at: L4_V4 as u32 })
    }

    #[inline]
    fn usual_v6<'b>(&self, link: &Link, frame: &RxFrame<'b>) -> Option<Usual<'b>> {
        let head = frame.bytes.first_chunk::<END_V6>()?;
        if head[14] >> 4 != 6 || head[20] != protocol::TCP || !link.ipv6 {
            return None;
        }
        let (src, dst) = (v6(head, 22), v6(head, 38));
        // Global unicast (RFC 4291 §2.4) and unique local addresses (RFC 4193): they mean the same on every link.
        let plain = |first: u8| first >> 5 == 1 || first >> 1 == 0x7e;
        if !plain(head[22]) || !plain(head[38]) {
            return None;
        }
        let (Some(_), None) = (self.local.v6.link_of(dst.to_bits()), self.local.v6.link_of(src.to_bits()))
        else {
            return None;
        };
        let payload_len = usize::from(be16(head, 18));
        let l4 = frame.bytes.get(L4_V6..L4_V6 + payload_len).filter(|l4| l4.len() >= tcp::TcpHeader::LEN)?;
        if !is_vouched_for(frame, L4_V6)
            && !pseudo_v6(src, dst, protocol::TCP, l4.len()).add(Sum::of(l4)).is_valid()
        {
            return None;
        }
        let ecn = head[15] >> 4 & 3;
        Some(Usual { src: Host::v6(src), dst: Host::v6(dst), ecn, l4, at: L4_V6 as u32 })
    }
}

/// An address that any host can have: neither of network 0, nor loopback, nor multicast or beyond.
#[inline(always)]
const fn is_plain_v4(address: u32) -> bool {
    let first = address >> 24;
    first != 0 && first != 127 && first < 224
}

/// True if the device vouches for the checksum of the segment at `at`.
#[inline(always)]
fn is_vouched_for(frame: &RxFrame<'_>, at: usize) -> bool {
    match frame.checksum {
        RxChecksum::Unverified => false,
        RxChecksum::Verified => true,
        RxChecksum::Partial { start, .. } => usize::from(start) == at,
    }
}

#[cfg(test)]
#[path = "usual_tests.rs"]
mod tests;
