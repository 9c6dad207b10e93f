//! The network layer in an image of a stack: IPv6 addresses that no other host has, advertised addresses and
//! routes, neighbours and path MTUs. Everything else follows from the configuration.

use super::Network;
use super::flow_label::FlowLabelHash;
use super::path_mtu::image::PathMtuImage;
use super::route::{RouteEntry, RouteOrigin};
use super::stats::{DropStats, NetworkStats};
use super::timers::NetworkTimer;
use crate::handle::LinkId;
use crate::link::neighbour::NeighbourState;
use crate::link::{AddressState, InterfaceAddress};
use crate::time::Instant;
use crate::wire::MacAddr;
use core::net::{IpAddr, Ipv6Addr};
use serde::{Deserialize, Serialize};

/// A valid address.
#[derive(Serialize, Deserialize)]
#[serde(rename = "InterfaceAddress")]
struct AddressImage {
    link: LinkId,
    address: Ipv6Addr,
    prefix: u8,
    autoconfigured: bool,
    preferred_until: Instant,
    valid_until: Instant,
}

/// An advertised route.
#[derive(Serialize, Deserialize)]
#[serde(rename = "Route")]
struct RouteImage {
    destination: IpAddr,
    prefix: u8,
    gateway: Option<IpAddr>,
    link: LinkId,
    metric: u32,
    expires: Instant,
}

/// A neighbour whose MAC address is known.
#[derive(Serialize, Deserialize)]
#[serde(rename = "Neighbour")]
struct NeighbourImage {
    link: LinkId,
    address: IpAddr,
    mac: [u8; 6],
    is_router: bool,
}

/// The knowledge of the network layer, and its counters.
#[derive(Serialize, Deserialize)]
#[serde(rename = "Network")]
pub(crate) struct NetworkImage {
    addresses: Vec<AddressImage>,
    routes: Vec<RouteImage>,
    neighbours: Vec<NeighbourImage>,
    path_mtu: PathMtuImage,
    stats: NetworkStats,
    drops: DropStats,
    /// Flows keep their labels.
    flow_label_hash: FlowLabelHash,
}

impl Network {
    /// Returns the image.
    pub(crate) fn image(&self) -> NetworkImage {
        // Each field is listed, so that none is forgotten.
        let Self {
            config: _,
            stats: _,
            drops,
            entropy: _,
            hash: _,
            flow_label_hash,
            ports: _,
            refuses_by_class: _,
            links,
            loopback: _,
            local: _,
            neighbours,
            routes,
            path_mtu,
            destination_cache: _,
            reassembly: _,
            icmp_limit: _,
            timers: _,
            epoch: _,
            scratch: _,
            fragmentation_buffer: _,
            backlog: _,
            errors: _,
            quoted_payload: _,
            ident_counters: _,
            steering: _,
            control_updates: _,
            last_confirmed: _,
            misrouted: _,
            shard_groups: _,
            looped_back: _,
            flow_hasher: _,
            trusts_hashes: _,
        } = self;
        let of_link = |(link, address): (LinkId, &InterfaceAddress)| match address.address {
            IpAddr::V6(v6) if address.is_valid() => Some(AddressImage {
                link,
                address: v6,
                prefix: address.prefix,
                autoconfigured: address.autoconfigured,
                preferred_until: address.preferred_until,
                valid_until: address.valid_until,
            }),
            _ => None,
        };
        let links = (0..).map(LinkId).zip(links).filter(|(_, link)| !link.loopback);
        let addresses = links.flat_map(|(id, link)| link.addresses.iter().map(move |entry| (id, entry)));
        let routes = routes.entries().filter(|(.., entry)| entry.origin == RouteOrigin::Advertised);
        let neighbours = neighbours.iter().filter(|neighbour| {
            !matches!(neighbour.state, NeighbourState::Permanent | NeighbourState::NoArp)
        });
        NetworkImage {
            addresses: addresses.filter_map(of_link).collect(),
            routes: routes
                .map(|(destination, prefix, &RouteEntry { gateway, link, metric, expires, .. })| RouteImage {
                    destination,
                    prefix,
                    gateway,
                    link,
                    metric,
                    expires,
                })
                .collect(),
            neighbours: neighbours
                .filter_map(|neighbour| {
                    let (link, address, is_router) = (neighbour.link, neighbour.address, neighbour.is_router);
                    Some(NeighbourImage { link, address, mac: neighbour.mac?.0, is_router })
                })
                .collect(),
            path_mtu: path_mtu.image(),
            stats: self.stats(),
            drops: drops.clone(),
            flow_label_hash: *flow_label_hash,
        }
    }

    /// Takes over what another process has learnt, as far as it fits the links of this one.
    pub(crate) fn restore(&mut self, image: NetworkImage) {
        let NetworkImage { addresses, routes, neighbours, path_mtu, stats, drops, flow_label_hash } = image;
        addresses.into_iter().for_each(|address| self.restore_address(&address));
        for RouteImage { destination, prefix, gateway, link, metric, expires } in routes {
            let fits = prefix <= if destination.is_ipv4() { 32 } else { 128 }
                && self.accepts_advertisements(link)
                && gateway.is_none_or(|gateway| gateway.is_ipv4() == destination.is_ipv4());
            if fits {
                let entry = RouteEntry { gateway, link, metric, origin: RouteOrigin::Advertised, expires };
                self.routes.add(destination, prefix, entry);
                self.expire_by(link, expires);
            }
        }
        for NeighbourImage { link, address, mac, is_router } in neighbours {
            if self.has_link(link)
                && self.neighbours.find(link, address).is_none()
                && let Some(slot) = self.add_neighbour(link, address, MacAddr(mac), NeighbourState::Stale)
                && let Some(neighbour) = self.neighbours.neighbour_mut(slot)
            {
                neighbour.is_router = is_router;
            }
        }
        self.path_mtu.restore(path_mtu);
        (self.stats, self.drops) = (stats, drops);
        self.flow_label_hash = flow_label_hash;
        self.bump_epoch();
    }

    fn accepts_advertisements(&self, link: LinkId) -> bool {
        self.links.get(usize::from(link.0)).is_some_and(|link| link.accept_ra)
    }

    /// Visits the lifetimes of a link at this time, or before.
    fn expire_by(&mut self, link: LinkId, at: Instant) {
        let timer = NetworkTimer::Lifetimes(link);
        let at = at.min(self.timers.deadline(timer).unwrap_or(Instant::MAX));
        if at < Instant::MAX {
            self.timers.arm(timer, at);
        }
    }

    /// Makes an address valid that duplicate address detection has found to be unique before.
    fn restore_address(&mut self, image: &AddressImage) {
        let &AddressImage { link, address, prefix, autoconfigured, preferred_until, valid_until } = image;
        if autoconfigured && self.accepts_advertisements(link) && prefix <= 128 {
            let state = AddressState::Tentative { probes: 0 };
            let entry = InterfaceAddress::permanent(address.into(), prefix, state);
            let entry = InterfaceAddress { autoconfigured, preferred_until, valid_until, ..entry };
            self.add_ipv6_address(link, entry);
            self.expire_by(link, valid_until);
        }
        let entry = self.links.get_mut(usize::from(link.0)).and_then(|link| link.address_mut(address.into()));
        if let Some(entry) = entry.filter(|entry| matches!(entry.state, AddressState::Tentative { .. })) {
            entry.state = AddressState::Valid;
            self.timers.cancel(NetworkTimer::DadStart(link, address));
            self.timers.cancel(NetworkTimer::Dad(link, address));
            self.on_dad_completed(link, address);
        }
    }
}
