//! One of several shards: what it leaves to the first, what it tells the others, and what it hears from them.
//!
//! The first shard speaks for all of them on the link: it answers ARP and neighbour solicitations, checks addresses for duplicates, asks for
//! routers and reports groups, each once. ARP, neighbour and router discovery reach the others as the frames they are, so that all tables
//! follow the same rules; what no frame says is told as [`News`].

use super::{Network, Reassembled};
use crate::handle::LinkId;
use crate::link::AddressState;
use crate::link::neighbour::NeighbourUpdate;
use crate::steering::{ControlUpdate, FrameOwner, MisroutedPacket, Steering};
use crate::time::Instant;
use crate::wire::ethernet::EtherType;

/// News that wait to be fetched at the most. They come from timers and from errors about connections, and are fetched each turn.
const CONTROL_UPDATES_MAX: usize = 1024;

impl Network {
    /// This is one of several shards.
    pub fn set_steering(&mut self, steering: Steering) {
        self.steering = Some(Box::new(steering));
    }

    /// Which shard is the home of what, if this is one of several.
    pub fn steering(&self) -> Option<&Steering> {
        self.steering.as_deref()
    }

    /// The same, to change it.
    pub fn steering_mut(&mut self) -> Option<&mut Steering> {
        self.steering.as_deref_mut()
    }

    /// True if another shard speaks for this one on the link.
    pub(crate) fn is_secondary_shard(&self) -> bool {
        self.steering.as_ref().is_some_and(|steering| steering.is_secondary())
    }

    /// True if a neighbour that answers is to be remembered though this shard has not asked: another of them has, and all serve each other.
    pub(crate) fn accepts_answer_to_other_shard(&self, claim: &NeighbourUpdate) -> bool {
        self.steering.is_some() && claim.solicited
    }

    /// Lets the other shards know, if there are any.
    pub(crate) fn broadcast_update(&mut self, news: ControlUpdate) {
        if self.steering.is_none() {
            return;
        }
        self.control_updates.retain(|earlier| !earlier.is_superseded_by(&news));
        if self.control_updates.len() == CONTROL_UPDATES_MAX {
            self.control_updates.pop_front();
        }
        self.control_updates.push_back(news);
    }

    /// The next thing that the other shards must be told.
    pub fn next_control_update(&mut self) -> Option<ControlUpdate> {
        self.control_updates.pop_front()
    }

    /// Another shard tells something.
    pub fn apply_control_update(&mut self, now: Instant, news: &ControlUpdate) {
        match *news {
            ControlUpdate::DadResult { link, address, valid } => {
                let Some(known) =
                    self.links.get_mut(usize::from(link)).and_then(|link| link.address_mut(address.into()))
                else {
                    return;
                };
                if !matches!(known.state, AddressState::Tentative { .. }) {
                    return;
                }
                known.state = if valid { AddressState::Valid } else { AddressState::Duplicate };
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
        }
    }

    /// Where a packet that was put together here belongs; `None` if there is only one shard.
    pub(crate) fn owner_of_reassembled(&self, packet: &Reassembled) -> Option<FrameOwner> {
        Some(self.steering.as_ref()?.owner_of_packet(
            packet.bytes(),
            packet.has_group_destination(self),
            None,
        ))
    }

    /// A packet that was put together, as a frame that its home can receive: it comes from us to us.
    pub(crate) fn misrouted_packet(&self, home: FrameOwner, packet: &Reassembled) -> MisroutedPacket {
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
            // As the fragments came: to more than us.
            frame[0] = 0xff;
            frame[1..6].fill(0xff);
        }
        frame.extend_from_slice(packet.bytes());
        MisroutedPacket { owner: home, port: link.port, frame }
    }
}
