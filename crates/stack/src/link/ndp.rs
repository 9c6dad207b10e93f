//! Neighbour discovery (RFC 4861 §7) and duplicate address detection (RFC 4862 §5.4).

use super::neighbour::NeighbourUpdate;
use super::{ALL_NODES_V6, AddressState, InterfaceAddress, is_unicast};
use crate::handle::LinkId;
use crate::ip::Network;
use crate::ip::timers::NetworkTimer;
use crate::steering::ControlUpdate;
use crate::time::Instant;
use crate::wire::ethernet::EtherType;
use crate::wire::ndp::{self, NdpMessage, solicited_node};
use crate::wire::{MacAddr, ipv6, protocol};
use core::net::{IpAddr, Ipv6Addr};
use core::time::Duration;

/// The first solicitation for a new address is delayed by up to this time, so that hosts that start
/// simultaneously do not send simultaneously (RFC 4862 §5.4.2).
const DAD_DELAY_MS_MAX: u32 = 1000;
/// A solicitation for duplicate address detection, or for routers, that found the device full is retried
/// after this time.
pub(super) const SOLICITATION_RETRY: Duration = Duration::from_millis(100);

/// A packet that carries a neighbour discovery message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NdpPacket<'a> {
    pub link: LinkId,
    pub source_mac: MacAddr,
    pub src: Ipv6Addr,
    pub dst: Ipv6Addr,
    pub hop_limit: u8,
    /// The ICMPv6 message. Its checksum has been verified.
    pub message: &'a [u8],
}

impl Network {
    /// Enables IPv6 on a link, if its configuration asks for it.
    pub(crate) fn start_ipv6(&mut self, id: LinkId) {
        if !self.link(id).ipv6 || self.link(id).loopback {
            return;
        }
        let [_, _, nonce @ ..] = self.entropy.next_u64().to_be_bytes();
        let link = self.link_mut(id);
        link.dad_nonce = nonce;
        let has_link_local = link
            .addresses
            .iter()
            .any(|entry| matches!(entry.address, IpAddr::V6(address) if address.is_unicast_link_local()));
        if !has_link_local {
            let address = with_interface_id(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), link.mac);
            let state = AddressState::Tentative { probes: 0 };
            self.add_ipv6_address(id, InterfaceAddress::permanent(address.into(), 64, state));
        }
    }

    /// Adds an address and starts duplicate address detection, after which the address is used.
    pub(crate) fn add_ipv6_address(&mut self, id: LinkId, mut address: InterfaceAddress) {
        let IpAddr::V6(v6) = address.address else { return };
        let checked = self.config.dad_transmits == 0;
        if checked {
            address.state = AddressState::Valid;
        }
        if !self.link_mut(id).add_address(address) {
            return;
        }
        self.join_group(id, solicited_node(v6).into());
        if checked {
            self.on_dad_completed(id, v6);
        } else if !self.is_secondary_shard(id) {
            // The current time is not known here: the first call of [`Network::run_timers`] draws the delay.
            self.timers.arm(NetworkTimer::DadStart(id, v6), Instant::ZERO);
        }
    }

    pub(crate) fn on_dad_start(&mut self, now: Instant, id: LinkId, address: Ipv6Addr) {
        let delay = Duration::from_millis(self.entropy.below(DAD_DELAY_MS_MAX).into());
        self.timers.arm(NetworkTimer::Dad(id, address), now + delay);
    }

    /// Sends the next solicitation of duplicate address detection, or makes the address valid after enough of
    /// them were not answered.
    pub(crate) fn on_dad_timer(&mut self, now: Instant, id: LinkId, address: Ipv6Addr) {
        let transmits = self.config.dad_transmits;
        let link = self.link_mut(id);
        let (retransmit, nonce) = (link.retrans_timer, link.dad_nonce);
        let Some(entry) = link.address_mut(address.into()) else { return };
        let AddressState::Tentative { probes } = &mut entry.state else { return };
        if *probes >= transmits {
            entry.state = AddressState::Valid;
            self.on_dad_completed(id, address);
            self.broadcast_update(ControlUpdate::DadResult { link: id.0, address, valid: true });
            return;
        }
        *probes += 1;
        // RFC 7527: the nonce identifies this host's own solicitation if the network loops it back.
        let message =
            NdpMessage::NeighbourSolicitation { target: address, source_mac: None, nonce: Some(nonce) };
        let sent = self.send_ndp(id, Ipv6Addr::UNSPECIFIED, solicited_node(address), None, &message);
        let mut after = retransmit;
        if !sent {
            // A solicitation that was not sent cannot be objected to, so it does not count.
            after = after.min(SOLICITATION_RETRY);
            if let Some(InterfaceAddress { state: AddressState::Tentative { probes }, .. }) =
                self.link_mut(id).address_mut(address.into())
            {
                *probes -= 1;
            }
        }
        self.timers.arm(NetworkTimer::Dad(id, address), now + after);
    }

    pub(crate) fn on_dad_completed(&mut self, id: LinkId, address: Ipv6Addr) {
        self.activate_ipv6_address(id, address);
        if address.is_unicast_link_local() {
            self.on_link_local_address(id);
        }
    }

    fn on_dad_failure(&mut self, id: LinkId, address: Ipv6Addr) {
        if self.is_secondary_shard(id) {
            // This shard sent no solicitation: the primary shard broadcasts the result.
            return;
        }
        self.broadcast_update(ControlUpdate::DadResult { link: id.0, address, valid: false });
        self.stats.dad_duplicates += 1;
        self.timers.cancel(NetworkTimer::Dad(id, address));
        self.timers.cancel(NetworkTimer::DadStart(id, address));
        if let Some(entry) = self.link_mut(id).address_mut(address.into()) {
            entry.state = AddressState::Duplicate;
        }
    }

    /// Handles a neighbour discovery message.
    pub(crate) fn ndp_input(&mut self, now: Instant, packet: &NdpPacket<'_>) {
        match NdpMessage::parse(packet.message, packet.src, packet.dst, packet.hop_limit) {
            Ok(NdpMessage::NeighbourSolicitation { target, source_mac, nonce }) => {
                self.stats.ndp_solicitations_in += 1;
                self.on_solicitation(now, packet, target, source_mac, nonce);
            }
            Ok(NdpMessage::NeighbourAdvertisement { target, router, solicited, overrides, target_mac }) => {
                self.stats.ndp_advertisements_in += 1;
                let update = NeighbourUpdate { mac: target_mac, solicited, overrides, makes_stale: true };
                self.on_advertisement(now, packet.link, target, router, update);
            }
            Ok(NdpMessage::RouterAdvertisement(advertisement)) => {
                self.on_router_advertisement(now, packet.link, packet.src, &advertisement);
            }
            // Hosts ignore router solicitations.
            Ok(NdpMessage::RouterSolicitation { .. }) => {}
            Err(_) if packet.message.first() == Some(&ndp::REDIRECT) => self.stats.redirects_ignored += 1,
            Err(_) => self.stats.ndp_invalid += 1,
        }
    }

    /// Handles a neighbour solicitation (RFC 4861 §7.2.3, RFC 4862 §5.4.3).
    fn on_solicitation(
        &mut self,
        now: Instant,
        packet: &NdpPacket<'_>,
        target: Ipv6Addr,
        source_mac: Option<MacAddr>,
        nonce: Option<[u8; 6]>,
    ) {
        let link = self.link(packet.link);
        let Some(entry) = link.address(target.into()) else { return };
        let is_dad = packet.src.is_unspecified();
        match entry.state {
            AddressState::Duplicate => return,
            AddressState::Tentative { .. } => {
                // Another host performs duplicate address detection for the address at this moment: neither
                // host may use it.
                if is_dad && nonce != Some(link.dad_nonce) {
                    self.on_dad_failure(packet.link, target);
                }
                return;
            }
            AddressState::Valid => {}
        }
        let own_mac = link.mac;
        let is_responder = !self.is_secondary_shard(packet.link);
        let advertisement = |solicited| NdpMessage::NeighbourAdvertisement {
            target,
            router: false,
            solicited,
            overrides: true,
            target_mac: Some(own_mac),
        };
        if is_dad {
            if is_responder {
                self.send_ndp(packet.link, target, ALL_NODES_V6, None, &advertisement(false));
            }
        } else {
            let source_mac = source_mac.filter(|mac| mac.is_unicast());
            let update =
                NeighbourUpdate { mac: source_mac, solicited: false, overrides: true, makes_stale: true };
            self.update_neighbour(now, packet.link, packet.src.into(), update, true);
            let to = source_mac.unwrap_or(packet.source_mac);
            if is_responder {
                self.send_ndp(packet.link, target, packet.src, Some(to), &advertisement(true));
            }
        }
    }

    /// Handles a neighbour advertisement (RFC 4861 §7.2.5, RFC 4862 §5.4.4).
    fn on_advertisement(
        &mut self,
        now: Instant,
        id: LinkId,
        target: Ipv6Addr,
        router: bool,
        update: NeighbourUpdate,
    ) {
        if let Some(entry) = self.link(id).address(target.into()) {
            match entry.state {
                AddressState::Tentative { .. } => self.on_dad_failure(id, target),
                AddressState::Valid if update.mac != Some(self.link(id).mac) => self.stats.ndp_conflicts += 1,
                AddressState::Valid | AddressState::Duplicate => {}
            }
            return;
        }
        if update.mac.is_some_and(|mac| !mac.is_unicast()) || !is_unicast(target.into()) {
            self.stats.ndp_invalid += 1;
            return;
        }
        let Some(slot) = self.update_neighbour(
            now,
            id,
            target.into(),
            update,
            self.accepts_answer_to_other_shard(&update),
        ) else {
            return;
        };
        let Some(neighbour) = self.neighbours.neighbour_mut(slot) else { return };
        let was_router = core::mem::replace(&mut neighbour.is_router, router);
        if was_router && !router {
            // RFC 4861 §7.2.5: the neighbour has ceased to be a router.
            self.remove_default_router(id, target);
        }
    }

    /// Sends a neighbour solicitation for `target`, to its solicited-node group or only to the MAC address
    /// `to`. Returns false if the device is full.
    pub(crate) fn send_neighbour_solicitation(
        &mut self,
        id: LinkId,
        source: Ipv6Addr,
        target: Ipv6Addr,
        to: Option<MacAddr>,
    ) -> bool {
        let message =
            NdpMessage::NeighbourSolicitation { target, source_mac: Some(self.link(id).mac), nonce: None };
        let dst = if to.is_some() { target } else { solicited_node(target) };
        self.send_ndp(id, source, dst, to, &message)
    }

    /// Sends a neighbour discovery message. `mac` is required unless `dst` is a multicast address. Returns
    /// false if the device is full.
    pub(crate) fn send_ndp(
        &mut self,
        id: LinkId,
        src: Ipv6Addr,
        dst: Ipv6Addr,
        mac: Option<MacAddr>,
        message: &NdpMessage,
    ) -> bool {
        let mac = mac.unwrap_or_else(|| MacAddr::from_ipv6_multicast(dst));
        let len_max = ipv6::Header::LEN + ndp::MESSAGE_LEN_MAX;
        let sent = self.send_control(id, mac, EtherType::IPV6, len_max, |out| {
            let len = message.emit(src, dst, &mut out[ipv6::Header::LEN..]);
            let header = ipv6::Header {
                dscp: 0,
                ecn: 0,
                flow_label: 0,
                // Cannot truncate: at most MESSAGE_LEN_MAX.
                payload_len: len as u16,
                next_header: protocol::ICMPV6,
                hop_limit: ndp::HOP_LIMIT,
                src,
                dst,
            };
            header.emit(out) + len
        });
        if sent {
            match message {
                NdpMessage::NeighbourSolicitation { .. } => self.stats.ndp_solicitations_out += 1,
                NdpMessage::NeighbourAdvertisement { .. } => self.stats.ndp_advertisements_out += 1,
                NdpMessage::RouterSolicitation { .. } => self.stats.ndp_router_solicitations_out += 1,
                NdpMessage::RouterAdvertisement(_) => {}
            }
        }
        sent
    }
}

/// Forms an address from a 64-bit prefix and a MAC address (RFC 4862 §5.3, RFC 2464 §4).
pub(crate) fn with_interface_id(prefix: Ipv6Addr, mac: MacAddr) -> Ipv6Addr {
    let mut octets = prefix.octets();
    octets[8..].copy_from_slice(&mac.interface_id());
    octets.into()
}

#[cfg(test)]
#[path = "ndp_tests.rs"]
mod tests;
