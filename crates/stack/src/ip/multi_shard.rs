//! Cooperation of the network layers of several shards: what the primary shard does for the others, and the
//! updates they exchange.
//!
//! The primary shard of a device alone acts on its links: it answers ARP requests and neighbour
//! solicitations, performs duplicate address detection, solicits routers and reports multicast groups. ARP
//! packets, neighbour discovery and router advertisements are passed to the other shards as frames, so that
//! all tables follow the same rules; other state is broadcast as a [`ControlUpdate`].

use super::{Network, Reassembled};
use crate::handle::{LinkId, PortId};
use crate::link::AddressState;
use crate::link::neighbour::NeighbourUpdate;
use crate::steering::{ControlUpdate, FrameOwner, MisroutedPacket, Steering};
use crate::time::Instant;
use crate::wire::ethernet::EtherType;
use core::net::IpAddr;

/// Largest number of updates that await being fetched. They originate from timers, from errors about
/// connections, and from SYN+ACKs that tell something new about their sender. They are fetched in every turn.
const CONTROL_UPDATES_MAX: usize = 1024;

impl Network {
    /// Makes this network layer one of several shards.
    pub fn set_steering(&mut self, steering: Steering) {
        self.steering = Some(Box::new(steering));
    }

    /// Returns the steering, which decides the owner shard of frames, if this is one of several shards.
    pub fn steering(&self) -> Option<&Steering> {
        self.steering.as_deref()
    }

    /// Returns the steering for modification.
    pub fn steering_mut(&mut self) -> Option<&mut Steering> {
        self.steering.as_deref_mut()
    }

    /// Returns whether another shard, the primary one, acts on a link for this shard.
    pub(crate) fn is_secondary_shard(&self, link: LinkId) -> bool {
        self.steering.as_ref().is_some_and(|steering| steering.is_secondary(self.link(link).port))
    }

    /// Returns whether this shard serves the device of a local address: always, unless devices have shards of
    /// their own.
    pub fn serves(&self, local: IpAddr) -> bool {
        self.steering.as_ref().is_none_or(|steering| steering.serves(local))
    }

    /// Returns whether this shard serves the device whose address packets to `to` have as their source. True
    /// if there is no route.
    pub fn serves_route(&self, now: Instant, to: IpAddr) -> bool {
        self.serves_connection(now, to, None)
    }

    /// Returns whether this shard may open a connection to `to`, from `source` if given: whether it serves
    /// the device of the source address. True if there is no route.
    #[inline]
    pub(crate) fn serves_connection(&self, now: Instant, to: IpAddr, source: Option<IpAddr>) -> bool {
        match &self.steering {
            Some(steering) if !steering.serves_all_devices() => {
                let source = source.map_or_else(|| self.route_source(now, to), Ok);
                source.map_or(true, |source| steering.serves(source))
            }
            _ => true,
        }
    }

    /// Tells the steering which addresses are local, if it depends on them.
    pub(crate) fn update_steered_addresses(&mut self) {
        if let Some(steering) = self.steering.as_mut().filter(|steering| steering.has_device_shards()) {
            let ports = self.links.iter().map(|link| link.port).collect();
            steering.set_local_addresses(self.local.clone(), ports);
        }
    }

    /// Sends a frame on a device for a shard that does not serve the device. Returns false if the device is
    /// full. The network layer of that shard has counted the frame; here it counts for the device.
    pub fn send_relayed(&mut self, port: PortId, frame: &[u8]) -> bool {
        let Some(port) = self.ports.get_mut(usize::from(port.0)) else { return false };
        let Some(room) = port.tx.reserve(frame.len()) else { return false };
        room[..frame.len()].copy_from_slice(frame);
        port.commit_relayed(frame.len());
        true
    }

    /// Returns whether an answer creates a neighbour although this shard did not ask for it: another shard
    /// has asked, and every shard sees every answer.
    pub(crate) fn accepts_answer_to_other_shard(&self, claim: &NeighbourUpdate) -> bool {
        self.steering.is_some() && claim.solicited
    }

    /// Queues an update for the other shards, if there are any.
    pub(crate) fn broadcast_update(&mut self, update: ControlUpdate) {
        if self.steering.is_none() {
            return;
        }
        self.control_updates.retain(|earlier| !earlier.is_superseded_by(&update));
        if self.control_updates.len() == CONTROL_UPDATES_MAX {
            self.control_updates.pop_front();
        }
        self.control_updates.push_back(update);
    }

    /// Takes the next update to broadcast to the other shards.
    pub fn next_control_update(&mut self) -> Option<ControlUpdate> {
        self.control_updates.pop_front()
    }

    /// Applies an update from another shard.
    pub fn apply_control_update(&mut self, now: Instant, update: &ControlUpdate) {
        match *update {
            ControlUpdate::DadResult { link, address, valid } => {
                let Some(entry) =
                    self.links.get_mut(usize::from(link)).and_then(|link| link.address_mut(address.into()))
                else {
                    return;
                };
                if !matches!(entry.state, AddressState::Tentative { .. }) {
                    return;
                }
                entry.state = if valid { AddressState::Valid } else { AddressState::Duplicate };
                if valid {
                    self.activate_ipv6_address(LinkId(link), address);
                }
            }
            ControlUpdate::PathMtu { destination, mtu } => {
                let Ok(current) = self.route(now, destination, None) else { return };
                if self.path_mtu.learn(now, destination, mtu, current.mtu) {
                    self.stats.path_mtu_learnt += 1;
                    self.stats.path_mtu_evicted = self.path_mtu.evicted();
                }
            }
            // TCP applies it.
            ControlUpdate::FastOpenPeer(_) => {}
        }
    }

    /// Returns the owner of a packet that was reassembled here; `None` if there is only one shard.
    pub(crate) fn owner_of_reassembled(&self, packet: &Reassembled) -> Option<FrameOwner> {
        Some(self.steering.as_ref()?.owner_of_packet(
            self.link(packet.link()).port,
            packet.bytes(),
            packet.has_group_destination(self),
            None,
        ))
    }

    /// Wraps a packet that was reassembled here into a frame for its owner, with this link's address as
    /// source and destination.
    pub(crate) fn misrouted_packet(&self, owner: FrameOwner, packet: &Reassembled) -> MisroutedPacket {
        let link = self.link(packet.link());
        let ethertype = if packet.bytes().first().is_some_and(|byte| byte >> 4 == 4) {
            EtherType::IPV4
        } else {
            EtherType::IPV6
        };
        let (header, len) = link.header_bytes(link.mac, ethertype);
        let mut frame = Vec::with_capacity(usize::from(len) + packet.bytes().len());
        frame.extend_from_slice(&header[..usize::from(len)]);
        if packet.has_group_destination(self) {
            // The fragments were sent to a group, so the frame is marked as a group frame, too.
            frame[0] = 0xff;
            frame[1..6].fill(0xff);
        }
        frame.extend_from_slice(packet.bytes());
        MisroutedPacket { owner, port: link.port, frame }
    }
}
