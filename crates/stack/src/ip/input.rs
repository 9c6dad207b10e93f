//! Input of packets that are neither TCP nor UDP: dispatches to ARP and ICMP, and reassembles fragments.

use super::Network;
use super::parse::{Ipv4Packet, Ipv6Packet, OtherFrame, OtherFrameKind, ParsedFrame};
use super::reassembly::{HeaderRebuild, ReassemblyKey, ReassemblyOutcome, ReceivedFragment};
use super::stats::DropReason;
use super::timers::NetworkTimer;
use crate::handle::LinkId;
use crate::icmp::error::TransportError;
use crate::ip::Ipv6ParameterProblem;
use crate::time::Instant;
use crate::wire::{MacAddr, icmpv6, ipv6, protocol};
use core::net::{Ipv4Addr, Ipv6Addr};
use core::time::Duration;

/// The result of [`Network::input`].
#[derive(Debug)]
pub enum InputResult {
    /// The packet was handled; the transport has nothing to do.
    Handled,
    /// An ICMP message reports that a packet of this host could not be delivered. Its origin is not
    /// authenticated: see [`TransportError`].
    Error(TransportError),
    /// A packet was reassembled: see [`Network::parse_reassembled`].
    Reassembled(Reassembled),
}

/// A packet reassembled from fragments.
#[derive(Debug)]
pub struct Reassembled {
    link: LinkId,
    packet: Vec<u8>,
}

impl Reassembled {
    /// Returns the packet from its IP header on.
    pub fn bytes(&self) -> &[u8] {
        &self.packet
    }

    pub(super) fn link(&self) -> LinkId {
        self.link
    }

    /// Returns whether the destination is a broadcast or multicast address.
    pub(super) fn has_group_destination(&self, net: &Network) -> bool {
        match self.packet.as_slice() {
            [version, rest @ ..] if version >> 4 == 4 => match rest.get(15..19) {
                Some(&[a, b, c, d]) => {
                    let to = Ipv4Addr::new(a, b, c, d);
                    to.is_multicast() || net.link(self.link).is_broadcast(to)
                }
                _ => false,
            },
            packet => packet.get(24) == Some(&0xff),
        }
    }
}

impl Network {
    /// Handles an ARP, NDP or ICMP packet, a fragment, or a packet of an unknown protocol.
    pub fn input(&mut self, now: Instant, other: &OtherFrame<'_>) -> InputResult {
        match &other.kind {
            OtherFrameKind::Arp(packet) => {
                self.arp_input(now, other.link, packet, other.group_frame);
                InputResult::Handled
            }
            OtherFrameKind::Ipv4(packet) if packet.header.protocol == protocol::ICMP => {
                self.icmpv4_input(now, packet)
            }
            OtherFrameKind::Ipv4(packet) if packet.header.protocol == protocol::IGMP => {
                self.igmp_input(now, other.link, packet);
                InputResult::Handled
            }
            OtherFrameKind::Ipv4(packet) => {
                self.reject_protocol_v4(now, packet);
                InputResult::Handled
            }
            OtherFrameKind::Ipv6(packet) if packet.chain.protocol == protocol::ICMPV6 => {
                let source_mac = (other.source_mac != MacAddr::ZERO).then_some(other.source_mac);
                self.icmpv6_input(now, other.link, source_mac, packet)
            }
            OtherFrameKind::Ipv6(packet) => {
                self.reject_protocol_v6(now, packet);
                InputResult::Handled
            }
            OtherFrameKind::Ipv4Fragment(packet) => self.fragment_v4_input(now, other.link, packet),
            OtherFrameKind::Ipv6Fragment(packet) => self.fragment_v6_input(now, other.link, packet),
            OtherFrameKind::ParameterProblem(problem) => {
                self.count_drop(DropReason::BadExtensionHeaders);
                self.send_parameter_problem(now, problem);
                InputResult::Handled
            }
        }
    }

    /// Parses a reassembled packet as [`Network::parse`] parses a frame. Afterwards the caller returns the
    /// buffer with [`Network::recycle`].
    pub fn parse_reassembled<'b>(&self, reassembled: &'b Reassembled) -> ParsedFrame<'b> {
        self.parse_packet(reassembled.link, &reassembled.packet)
    }

    /// Takes back the buffer of a reassembled packet for reuse.
    pub fn recycle(&mut self, reassembled: Reassembled) {
        self.reassembly.recycle(reassembled.packet);
    }

    fn fragment_v4_input(&mut self, now: Instant, link: LinkId, packet: &Ipv4Packet<'_>) -> InputResult {
        let header = &packet.header;
        let received = ReceivedFragment {
            key: ReassemblyKey {
                src: header.src.into(),
                dst: header.dst.into(),
                protocol: header.protocol,
                ident: header.ident.into(),
                link: None,
            },
            offset: header.fragment_offset,
            more_fragments: header.more_fragments,
            headers: &packet.bytes[..usize::from(header.header_len)],
            payload: packet.payload,
            ecn: header.ecn,
            broadcast: packet.broadcast,
            rebuild: HeaderRebuild::V4,
        };
        self.fragment_input(now, link, &received, self.config.fragment_timeout_v4_seconds)
    }

    fn fragment_v6_input(&mut self, now: Instant, link: LinkId, packet: &Ipv6Packet<'_>) -> InputResult {
        let Some(fragment) = packet.chain.fragment else { return InputResult::Handled };
        let header = &packet.header;
        if fragment.header.offset == 0
            && !has_complete_header_chain(fragment.header.next_header, packet.payload)
        {
            // RFC 7112 §5: the header chain must be complete in the first fragment, so that packet filters
            // can inspect it.
            self.stats.reassembly_malformed += 1;
            let problem = Ipv6ParameterProblem {
                header: packet.header,
                bytes: packet.bytes,
                code: icmpv6::parameter_problem::INCOMPLETE_HEADER_CHAIN,
                pointer: 0,
                even_if_multicast: false,
            };
            self.send_parameter_problem(now, &problem);
            return InputResult::Handled;
        }
        let scoped = |address: Ipv6Addr| address.is_unicast_link_local();
        let received = ReceivedFragment {
            key: ReassemblyKey {
                src: header.src.into(),
                dst: header.dst.into(),
                protocol: 0,
                ident: fragment.header.ident,
                link: (scoped(header.src) || scoped(header.dst)).then_some(link),
            },
            offset: fragment.header.offset,
            more_fragments: fragment.header.more_fragments,
            headers: &packet.bytes[..packet.chain.offset],
            payload: packet.payload,
            ecn: header.ecn,
            broadcast: header.dst.is_multicast(),
            rebuild: HeaderRebuild::V6 {
                header_offset: fragment.header_offset,
                next_header_offset: fragment.next_header_offset,
                next_header: fragment.header.next_header,
            },
        };
        self.fragment_input(now, link, &received, self.config.fragment_timeout_v6_seconds)
    }

    fn fragment_input(
        &mut self,
        now: Instant,
        link: LinkId,
        fragment: &ReceivedFragment<'_>,
        timeout_seconds: u32,
    ) -> InputResult {
        self.stats.fragments_in += 1;
        let until = now + Duration::from_secs(timeout_seconds.into());
        match self.reassembly.insert(fragment, until) {
            // One timer serves all datagrams. It is not cancelled: the handler finds out which datagrams have
            // expired.
            ReassemblyOutcome::Incomplete => self.timers.arm_no_later(NetworkTimer::Reassembly, until),
            ReassemblyOutcome::Duplicate => self.stats.reassembly_duplicates += 1,
            ReassemblyOutcome::Complete(packet) => {
                self.stats.reassembled += 1;
                return InputResult::Reassembled(Reassembled { link, packet });
            }
            ReassemblyOutcome::Overlap => self.stats.reassembly_overlaps += 1,
            ReassemblyOutcome::Malformed => self.stats.reassembly_malformed += 1,
        }
        while self.reassembly.evict() {
            self.stats.reassembly_evicted += 1;
        }
        InputResult::Handled
    }

    /// Discards the datagrams whose fragments did not arrive in time.
    pub(super) fn on_reassembly_timeout(&mut self, now: Instant) {
        while let Some(expired) = self.reassembly.expire(now) {
            self.stats.reassembly_timeouts += 1;
            let Some(first) = expired.first_fragment else { continue };
            // RFC 1122 §3.3.2, RFC 8200 §4.5: the error is sent only if the first fragment arrived, because
            // it quotes the first fragment.
            if !expired.broadcast {
                self.send_reassembly_timeout(now, &first);
            }
            self.reassembly.recycle(first);
        }
        if let Some(at) = self.reassembly.next_deadline() {
            self.timers.arm(NetworkTimer::Reassembly, at);
        }
    }
}

/// Returns whether the headers after a fragment header, up to and including the transport header, are
/// complete in `rest`.
fn has_complete_header_chain(mut next: u8, mut rest: &[u8]) -> bool {
    for _ in 0..ipv6::EXTENSION_HEADERS_MAX {
        let len = match next {
            protocol::HOP_BY_HOP | protocol::ROUTING | protocol::DESTINATION_OPTIONS => match rest {
                [_, units, ..] => 8 + usize::from(*units) * 8,
                _ => return false,
            },
            protocol::TCP => return rest.len() >= 20,
            protocol::UDP | protocol::ICMPV6 => return rest.len() >= 8,
            _ => return true,
        };
        if rest.len() < len {
            return false;
        }
        next = rest[0];
        rest = &rest[len..];
    }
    true
}

#[cfg(test)]
#[path = "input_tests.rs"]
mod tests;
