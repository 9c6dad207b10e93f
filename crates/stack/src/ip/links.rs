//! Configuration of links, addresses and routes.

use super::Network;
use super::route::{RouteConfig, RouteEntry, RouteOrigin};
use crate::error::ConfigError;
use crate::handle::{LinkId, PortId};
use crate::link::neighbour::{NeighbourInfo, NeighbourState};
use crate::link::{AddressState, InterfaceAddress, Link, LinkConfig, subnet_broadcast};
use crate::time::Instant;
use crate::wire::MacAddr;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::time::Duration;

/// The address of the neighbour entry that stands for this host on the loopback link, in each family.
pub(super) const LOOPBACK_NEIGHBOURS: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];

/// A link as it is shown in listings.
#[derive(Clone, Copy, Debug)]
pub struct LinkView<'a> {
    /// Its name in the configuration.
    pub name: &'a str,
    /// Its Ethernet address.
    pub mac: MacAddr,
    /// Its MTU: bytes of the largest IP packet.
    pub mtu: u16,
    /// True if it is the loopback link.
    pub loopback: bool,
    /// True if sockets can join groups on it.
    pub multicast: bool,
    /// Its addresses in the order they were added, including those in state [`AddressState::Duplicate`].
    pub addresses: &'a [InterfaceAddress],
}

impl Network {
    /// Adds a link to a device. Several links may share a device if their VLANs differ.
    ///
    /// # Errors
    /// A [`ConfigError`] that names the key if the configuration contradicts itself, the device or another
    /// link.
    pub fn add_link(&mut self, port: PortId, config: &LinkConfig) -> Result<LinkId, ConfigError> {
        let key = |suffix: &str| format!("link.{}.{suffix}", config.name);
        let Some(device) = self.ports.get(usize::from(port.0)).map(|port| port.capabilities) else {
            return Err(ConfigError::new(key("port"), "no such device"));
        };
        if self.links.iter().any(|link| link.name == config.name) {
            return Err(ConfigError::new(key("name"), "another link has this name"));
        }
        if self.links.iter().any(|link| link.port == port && link.vlan == config.vlan) {
            return Err(ConfigError::new(key("vlan"), "another link of the device has this VLAN"));
        }
        let Ok(id) = u16::try_from(self.links.len()).map(LinkId) else {
            return Err(ConfigError::new(key("name"), "too many links"));
        };
        for (at, &(address, _)) in config.addresses.iter().enumerate() {
            let twice = config.addresses[..at].iter().any(|&(earlier, _)| earlier == address);
            if twice || self.links.iter().any(|link| link.address(address).is_some()) {
                return Err(ConfigError::new(key("addresses"), format!("{address} is already configured")));
            }
        }
        if config.loopback && self.loopback.is_some() {
            return Err(ConfigError::new(key("loopback"), "another link is already the loopback link"));
        }
        let static_neighbours =
            config.static_neighbours.len() + if config.loopback { LOOPBACK_NEIGHBOURS.len() } else { 0 };
        if static_neighbours > self.neighbours.permanent_slots_left() {
            return Err(ConfigError::new(key("static_neighbours"), "exceed network.neighbours_max"));
        }
        let reachable =
            self.randomize_reachable_time(Duration::from_millis(self.config.neighbour_reachable_ms.into()));
        let link = Link::new(config, port, &device, &self.config, reachable)?;
        self.links.push(link);
        let port = &mut self.ports[usize::from(port.0)];
        match config.vlan {
            None => port.untagged = Some(id),
            Some(vlan) => {
                let at = port.tagged.partition_point(|&(key, _)| key < vlan);
                port.tagged.insert(at, (vlan, id));
            }
        }
        for &(address, prefix) in &config.addresses {
            self.add_configured_address(id, address, prefix);
        }
        for &(network, prefix) in &config.local_networks {
            self.local.insert_network(network, prefix, id);
        }
        self.start_ipv6(id);
        if config.loopback {
            self.loopback = Some(id);
        }
        let own_mac = self.link(id).mac;
        let selves =
            LOOPBACK_NEIGHBOURS.iter().filter(|_| config.loopback).map(|&address| (address, own_mac));
        for (address, mac) in config.static_neighbours.iter().copied().chain(selves) {
            let added = self.add_neighbour(id, address, mac, NeighbourState::Permanent);
            debug_assert!(added.is_some(), "the capacity was checked");
        }
        self.bump_epoch();
        self.update_steered_addresses();
        Ok(id)
    }

    /// Multiplies a base reachable time by a random factor between 0.5 and 1.5 (RFC 4861 §6.3.2), so that
    /// hosts do not probe in step.
    pub(crate) fn randomize_reachable_time(&mut self, base: Duration) -> Duration {
        // Cannot overflow: 500 … 1,500.
        let per_mille = 500 + self.entropy.below(1001);
        base.saturating_mul(per_mille) / 1000
    }

    fn add_configured_address(&mut self, link: LinkId, address: IpAddr, prefix: u8) {
        match address {
            IpAddr::V4(v4) => {
                self.link_mut(link).add_address(InterfaceAddress::permanent(
                    address,
                    prefix,
                    AddressState::Valid,
                ));
                self.local.insert_v4(v4, link);
                if self.link(link).loopback {
                    // All addresses of the loopback network are local (RFC 1122 §3.2.1.3 (g)).
                    self.local.insert_network(address, prefix, link);
                    if let Some(broadcast) = subnet_broadcast(v4, prefix) {
                        self.local.v4.exclude(broadcast.to_bits());
                    }
                } else if prefix < 32 {
                    self.add_connected_route(link, address, prefix);
                }
            }
            // No other host can have an address of the loopback link, so duplicate address detection is
            // skipped.
            IpAddr::V6(v6) if self.link(link).loopback => {
                self.link_mut(link).add_address(InterfaceAddress::permanent(
                    address,
                    prefix,
                    AddressState::Valid,
                ));
                self.local.insert_v6(v6, link);
            }
            IpAddr::V6(v6) => {
                if prefix < 128 && !v6.is_unicast_link_local() {
                    self.add_connected_route(link, address, prefix);
                }
                self.add_ipv6_address(
                    link,
                    InterfaceAddress::permanent(address, prefix, AddressState::Tentative { probes: 0 }),
                );
            }
        }
    }

    fn add_connected_route(&mut self, link: LinkId, address: IpAddr, prefix: u8) {
        let entry = RouteEntry {
            gateway: None,
            link,
            metric: 0,
            origin: RouteOrigin::Connected,
            expires: Instant::MAX,
        };
        self.routes.add(address, prefix, entry);
    }

    /// Adds a static route.
    ///
    /// # Errors
    /// If the link does not exist, the prefix is too long, the families differ, or the gateway is not a host
    /// on the link.
    pub fn add_route(&mut self, route: RouteConfig) -> Result<(), ConfigError> {
        let error = |problem: &str| {
            Err(ConfigError::new(format!("route.{}/{}", route.destination, route.prefix), problem))
        };
        if usize::from(route.link.0) >= self.links.len() {
            return error("no such link");
        }
        if route.prefix > if route.destination.is_ipv4() { 32 } else { 128 } {
            return error("the prefix is longer than the address");
        }
        if let Some(gateway) = route.gateway {
            if gateway.is_ipv4() != route.destination.is_ipv4() {
                return error("destination and gateway are of different address families");
            }
            if self.local.link_of(gateway).is_some() || !crate::link::is_unicast(gateway) {
                return error("the gateway is not another host");
            }
            let on_link = |entry: &RouteEntry| entry.gateway.is_none() && entry.link == route.link;
            let link_local = matches!(gateway, IpAddr::V6(gateway) if gateway.is_unicast_link_local());
            if !link_local && self.routes.lookup(gateway, on_link).is_none() {
                return error("the gateway is not on the link");
            }
        }
        let entry = RouteEntry {
            gateway: route.gateway,
            link: route.link,
            metric: route.metric,
            origin: RouteOrigin::Static,
            expires: Instant::MAX,
        };
        self.routes.add(route.destination, route.prefix, entry);
        self.bump_epoch();
        Ok(())
    }

    /// Returns all links in the order they were added, for a listing of interfaces.
    pub fn link_views(&self) -> impl Iterator<Item = LinkView<'_>> {
        self.links.iter().map(|link| LinkView {
            name: &link.name,
            mac: link.mac,
            mtu: link.mtu,
            loopback: link.loopback,
            multicast: !link.kernel_has_groups,
            addresses: &link.addresses,
        })
    }

    /// Returns the addresses of a link in the order they were added.
    pub fn addresses(&self, link: LinkId) -> &[InterfaceAddress] {
        self.links.get(usize::from(link.0)).map_or(&[], |link| &link.addresses)
    }

    /// Returns whether `address` is 255.255.255.255 or the broadcast address of a connected network.
    pub fn is_broadcast(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => {
                address.is_broadcast() || self.links.iter().any(|link| link.is_broadcast(address))
            }
            IpAddr::V6(_) => false,
        }
    }

    /// Returns the hop limit of ICMP and UDP packets on a link: the configured one, or the one that a router
    /// advertised.
    pub fn hop_limit(&self, link: LinkId) -> u8 {
        self.links.get(usize::from(link.0)).map_or(self.config.hop_limit, |link| link.hop_limit)
    }

    /// Returns all neighbours of all links.
    pub fn neighbours(&self) -> impl Iterator<Item = NeighbourInfo> {
        self.neighbours.iter()
    }

    /// Makes an IPv6 address usable.
    pub(crate) fn activate_ipv6_address(&mut self, link: LinkId, address: Ipv6Addr) {
        self.local.insert_v6(address, link);
        self.bump_epoch();
        self.update_steered_addresses();
    }
}
