//! ARP (RFC 826), with Linux's policy: the sender of a request for a local address becomes a neighbour, other
//! senders do not; a reply makes a neighbour reachable, any other packet only updates a known one.

use super::is_unicast;
use super::neighbour::NeighbourUpdate;
use crate::handle::LinkId;
use crate::ip::{DropReason, Network};
use crate::time::Instant;
use crate::wire::MacAddr;
use crate::wire::arp::{ArpOperation, ArpPacket};
use crate::wire::ethernet::EtherType;
use core::net::{IpAddr, Ipv4Addr};
use core::time::Duration;

impl Network {
    /// Handles an ARP packet. `group_frame` tells whether its Ethernet destination is a group address.
    pub(crate) fn arp_input(&mut self, now: Instant, link: LinkId, packet: &ArpPacket, group_frame: bool) {
        match packet.operation {
            ArpOperation::Request => self.stats.arp_requests_in += 1,
            ArpOperation::Reply => self.stats.arp_replies_in += 1,
        }
        let target_is_ours = self.is_local_on_link(link, packet.target_ip);
        // RFC 5227 §2.1.1: a probe has no sender address. It is answered so that the prober learns of the
        // conflict, but nothing is learnt from it.
        if packet.sender_ip.is_unspecified() {
            let answered =
                packet.operation == ArpOperation::Request && target_is_ours && !self.is_secondary_shard(link);
            if answered && packet.sender_mac.is_unicast() {
                self.send_arp_reply(link, packet);
            }
            return;
        }
        let known_link = self.link(link);
        if !packet.sender_mac.is_unicast()
            || !is_unicast(packet.sender_ip.into())
            || known_link.is_broadcast(packet.sender_ip)
        {
            self.count_drop(DropReason::BadArp);
            return;
        }
        if self.local.v4.link_of(packet.sender_ip.to_bits()).is_some() {
            // Either this host's own packet, looped back, or a host with a conflicting address: nothing is
            // learnt from either.
            if packet.sender_mac != known_link.mac {
                self.stats.arp_conflicts += 1;
            }
            return;
        }
        let for_us = packet.operation == ArpOperation::Request && target_is_ours;
        self.learn_from_arp(now, link, packet, for_us, group_frame);
        if for_us && !self.is_secondary_shard(link) {
            self.send_arp_reply(link, packet);
        }
    }

    /// Returns whether `address` is a local address of this link. Addresses of other links are not answered
    /// for, as with Linux's `arp_ignore=1`; its default is 0.
    fn is_local_on_link(&self, link: LinkId, address: Ipv4Addr) -> bool {
        self.local.v4.link_of(address.to_bits()) == Some(link)
    }

    fn learn_from_arp(
        &mut self,
        now: Instant,
        link: LinkId,
        packet: &ArpPacket,
        for_us: bool,
        group_frame: bool,
    ) {
        let address = IpAddr::V4(packet.sender_ip);
        let lock = Duration::from_millis(self.config.neighbour_lock_ms.into());
        let locked =
            match self.neighbours.find(link, address).and_then(|slot| self.neighbours.neighbour_mut(slot)) {
                Some(neighbour) => neighbour.is_locked(now, lock),
                None => false,
            };
        // An announcement replaces the MAC address at once (RFC 5227 §3). Other updates wait for the lock
        // time, so that the first of several replies wins. A request for a local address always counts, as on
        // Linux: the reply is about to be sent to its sender.
        let gratuitous = packet.sender_ip == packet.target_ip;
        let update = NeighbourUpdate {
            mac: Some(packet.sender_mac),
            solicited: packet.operation == ArpOperation::Reply && !group_frame && !gratuitous,
            overrides: for_us || gratuitous || !locked,
            makes_stale: false,
        };
        self.update_neighbour(
            now,
            link,
            address,
            update,
            for_us || self.accepts_answer_to_other_shard(&update),
        );
    }

    fn send_arp_reply(&mut self, link: LinkId, request: &ArpPacket) {
        let reply = ArpPacket {
            operation: ArpOperation::Reply,
            sender_mac: self.link(link).mac,
            sender_ip: request.target_ip,
            target_mac: request.sender_mac,
            target_ip: request.sender_ip,
        };
        if self.send_arp(link, request.sender_mac, &reply) {
            self.stats.arp_replies_out += 1;
        }
    }

    /// Sends a request for `target`, to all hosts or only to the MAC address `to`. Returns false if the
    /// device is full.
    pub(crate) fn send_arp_request(
        &mut self,
        link: LinkId,
        source: Ipv4Addr,
        target: Ipv4Addr,
        to: Option<MacAddr>,
    ) -> bool {
        let request = ArpPacket {
            operation: ArpOperation::Request,
            sender_mac: self.link(link).mac,
            sender_ip: source,
            target_mac: MacAddr::ZERO,
            target_ip: target,
        };
        let sent = self.send_arp(link, to.unwrap_or(MacAddr::BROADCAST), &request);
        self.stats.arp_requests_out += u64::from(sent);
        sent
    }

    fn send_arp(&mut self, link: LinkId, dst: MacAddr, packet: &ArpPacket) -> bool {
        self.send_control(link, dst, EtherType::ARP, ArpPacket::LEN, |out| packet.emit(out))
    }
}

#[cfg(test)]
#[path = "arp_tests.rs"]
mod tests;
