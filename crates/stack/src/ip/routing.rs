//! Route lookup: from a destination to a next hop, with source address, neighbour and path MTU. It is done
//! once per connection, which caches the hop.

use super::Network;
use super::links::LOOPBACK_NEIGHBOURS;
use super::route::{RouteEntry, RouteOrigin, common_bits};
use crate::handle::LinkId;
use crate::link::neighbour::{NeighbourRef, NeighbourState, NewNeighbour};
use crate::link::{Link, is_unicast};
use crate::time::Instant;
use crate::wire::MacAddr;
use crate::wire::ethernet::EtherType;
use core::fmt;
use core::net::{IpAddr, Ipv6Addr};

/// The next hop of a destination: 8 bytes that a connection caches. The default value is stale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NextHop {
    pub(crate) neighbour: NeighbourRef,
    pub(crate) link: u16,
    pub(crate) epoch: u16,
}

impl NextHop {
    /// Returns the link that packets leave by.
    pub const fn link(&self) -> LinkId {
        LinkId(self.link)
    }
}

/// The result of [`Network::route`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// The next hop, which the caller may cache.
    pub hop: NextHop,
    /// Source address: the requested one, or the selected one.
    pub src: IpAddr,
    /// Path MTU as known now: bytes of the largest IP packet.
    pub mtu: u16,
    /// True if a router reported an MTU below the configured floor. Packets of `mtu` bytes are then sent
    /// without "don't fragment".
    pub mtu_locked: bool,
}

/// Why there is no route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RouteError {
    /// There is no route to the destination (`ENETUNREACH`).
    NetUnreachable,
    /// The source address is not local, not usable yet, or of another family (`EADDRNOTAVAIL`).
    SourceNotLocal,
    /// The destination is not an address that packets can be sent to (`EINVAL`).
    InvalidDestination,
    /// The destination is a local address, and this stack has no loopback link (`ENETUNREACH`).
    OwnAddress,
    /// The neighbour table is full (`ENOBUFS`).
    NeighboursExhausted,
}

impl fmt::Display for RouteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NetUnreachable => "network is unreachable",
            Self::SourceNotLocal => "cannot assign requested address",
            Self::InvalidDestination => "invalid destination address",
            Self::OwnAddress => "destination is an address of this stack",
            Self::NeighboursExhausted => "neighbour table overflow",
        })
    }
}

impl std::error::Error for RouteError {}

/// The next hop before its neighbour is looked up.
#[derive(Clone, Copy, Debug)]
struct NextHopLookup {
    link: LinkId,
    /// The router, or the destination itself.
    address: IpAddr,
    /// The MAC address, if it follows from the destination.
    fixed_mac: Option<MacAddr>,
}

impl Network {
    /// Looks up the route to `dst`, from `src` if given. Nothing is solicited before a packet is sent.
    ///
    /// # Errors
    /// See [`RouteError`].
    pub fn route(&mut self, now: Instant, dst: IpAddr, src: Option<IpAddr>) -> Result<Route, RouteError> {
        let (IpAddr::V4(to), None | Some(IpAddr::V4(_))) = (dst, src) else {
            return self.find_route(now, dst, src);
        };
        let to = to.to_bits();
        let from = match src {
            Some(IpAddr::V4(from)) => Some(from.to_bits()),
            _ => None,
        };
        let cached = match from {
            Some(from) => self.cached_route(to, from),
            None => self.cached_selected_route(to),
        };
        if let Some(route) = cached {
            return Ok(*route);
        }
        let generation = self.route_generation();
        let route = self.find_route(now, dst, src)?;
        if self.path_mtu.get(now, dst).is_none() {
            self.destination_cache.put(to, from, generation, route);
        }
        Ok(route)
    }

    /// Returns the route between two IPv4 addresses from the destination cache.
    #[inline(always)]
    pub(crate) fn cached_route(&self, to: u32, from: u32) -> Option<&Route> {
        let route = self.destination_cache.get(to, from, self.route_generation())?;
        self.hop_is_current(&route.hop).then_some(route)
    }

    /// Returns the route to an IPv4 address that has selected its source address, from the destination cache.
    #[inline(always)]
    pub(crate) fn cached_selected_route(&self, to: u32) -> Option<&Route> {
        let route = self.destination_cache.get_selected(to, self.route_generation())?;
        self.hop_is_current(&route.hop).then_some(route)
    }

    /// Returns the generation of cached routes. References to neighbours distinguish the tenants of a slot,
    /// but their generations wrap, so evictions are counted, too.
    #[inline(always)]
    fn route_generation(&self) -> u64 {
        self.path_mtu.generation().wrapping_add(self.stats.neighbours_evicted)
    }

    fn find_route(&mut self, now: Instant, dst: IpAddr, src: Option<IpAddr>) -> Result<Route, RouteError> {
        let source_link = match src {
            None => None,
            Some(src) if src.is_ipv4() != dst.is_ipv4() => return Err(RouteError::SourceNotLocal),
            Some(src) => Some(self.local.link_of(src).ok_or(RouteError::SourceNotLocal)?),
        };
        if self.local.link_of(dst).is_some() {
            return self.route_to_self(dst, src);
        }
        if source_link.is_some()
            && source_link == self.loopback
            && group_mac(dst).is_none()
            && !dst.is_loopback()
        {
            // A loopback address is meaningless to other hosts (RFC 1122 §3.2.1.3 (g)).
            return Err(RouteError::InvalidDestination);
        }
        let next = self.next_hop(dst, source_link)?;
        let src = match src {
            Some(src) => src,
            None => self
                .select_source_address(now, next.link, next.address, dst)
                .ok_or(RouteError::NetUnreachable)?,
        };
        let slot = self.neighbour_slot(next.link, next.address, next.fixed_mac)?;
        let hop =
            NextHop { neighbour: self.neighbours.reference(slot), link: next.link.0, epoch: self.epoch };
        let link_mtu = self.link(next.link).mtu_for(dst);
        let (mtu, mtu_locked) = match self.path_mtu.get(now, dst) {
            Some(path) => (path.mtu.min(link_mtu), path.locked),
            None => (link_mtu, false),
        };
        Ok(Route { hop, src, mtu, mtu_locked })
    }

    /// Returns the source address of packets to `dst`. The next hop gets no entry among the neighbours.
    ///
    /// # Errors
    /// See [`RouteError`].
    pub(crate) fn route_source(&self, now: Instant, dst: IpAddr) -> Result<IpAddr, RouteError> {
        if self.local.link_of(dst).is_some() {
            return self.loopback.map(|_| dst).ok_or(RouteError::OwnAddress);
        }
        let next = self.next_hop(dst, None)?;
        self.select_source_address(now, next.link, next.address, dst).ok_or(RouteError::NetUnreachable)
    }

    /// Returns the MTU of a route's link: bytes of the largest IP packet of the route's family.
    pub(crate) fn link_mtu(&self, route: &Route) -> u16 {
        self.link(route.hop.link()).mtu_for(route.src)
    }

    /// Looks up the route to a local address, which leads over the loopback link. The default source address
    /// is the destination itself, as on Linux.
    fn route_to_self(&mut self, dst: IpAddr, src: Option<IpAddr>) -> Result<Route, RouteError> {
        let link = self.loopback.ok_or(RouteError::OwnAddress)?;
        let [v4, v6] = LOOPBACK_NEIGHBOURS;
        let next = if dst.is_ipv4() { v4 } else { v6 };
        let default_src = if dst.is_loopback() { next } else { dst };
        let slot = self.neighbour_slot(link, next, None)?;
        let hop = NextHop { neighbour: self.neighbours.reference(slot), link: link.0, epoch: self.epoch };
        Ok(Route {
            hop,
            src: src.unwrap_or(default_src),
            mtu: self.link(link).mtu_for(dst),
            mtu_locked: false,
        })
    }

    /// Returns whether a hop is still valid: false if links, addresses or routes have changed since it was
    /// made, or its neighbour was evicted. The caller then calls [`Network::route`] again. A change of the
    /// neighbour's MAC address does not invalidate a hop.
    #[inline]
    pub fn hop_is_current(&self, hop: &NextHop) -> bool {
        hop.epoch == self.epoch && self.neighbours.is_current(hop.neighbour)
    }

    /// Forgets the last confirmed hop, so that the next confirmation is applied: at the end of a burst, and
    /// after a frame of the slow path, which may have updated the neighbour.
    #[inline]
    pub(crate) fn reset_last_confirmed(&mut self) {
        // No hop has the epoch 0.
        self.last_confirmed = NextHop::default();
    }

    /// Confirms the reachability of a hop: the transport has proof that packets sent over it arrived (RFC
    /// 4861 §7.3.1), so the neighbour need not be probed.
    #[inline]
    pub(crate) fn confirm_neighbour(&mut self, now: Instant, hop: &NextHop) {
        if *hop != self.last_confirmed {
            self.confirm_neighbour_slow(now, hop);
        }
    }

    /// Confirms a hop for the first time in a burst.
    #[inline(never)]
    fn confirm_neighbour_slow(&mut self, now: Instant, hop: &NextHop) {
        if hop.epoch != self.epoch {
            return;
        }
        self.last_confirmed = *hop;
        let reachable = self.links[usize::from(hop.link)].reachable_time;
        if let Some(neighbour) = self.neighbours.resolve(hop.neighbour) {
            neighbour.confirm(now, reachable);
        }
    }

    fn next_hop(&self, dst: IpAddr, source_link: Option<LinkId>) -> Result<NextHopLookup, RouteError> {
        if let Some(mac) = group_mac(dst) {
            let link = source_link.or_else(|| self.default_link(dst)).ok_or(RouteError::NetUnreachable)?;
            return Ok(NextHopLookup { link, address: dst, fixed_mac: Some(mac) });
        }
        if !is_unicast(dst) {
            return self.next_hop_of_loopback_broadcast(dst).ok_or(RouteError::InvalidDestination);
        }
        if let IpAddr::V6(address) = dst
            && address.is_unicast_link_local()
        {
            let link = source_link.or_else(|| self.default_link(dst)).ok_or(RouteError::NetUnreachable)?;
            return Ok(NextHopLookup { link, address: dst, fixed_mac: None });
        }
        // RFC 4861 §6.3.6: a default router that does not answer is skipped while there is another.
        let answering = |entry: &RouteEntry| {
            entry.origin != RouteOrigin::Advertised
                || entry.gateway.is_none_or(|gateway| !self.neighbour_failed(entry.link, gateway))
        };
        let entry = self
            .routes
            .lookup(dst, answering)
            .or_else(|| self.routes.lookup(dst, |_| true))
            .ok_or(RouteError::NetUnreachable)?;
        let link = self.link(entry.link);
        let broadcast = match dst {
            IpAddr::V4(dst) => entry.gateway.is_none() && link.is_broadcast(dst),
            IpAddr::V6(_) => false,
        };
        Ok(NextHopLookup {
            link: entry.link,
            address: entry.gateway.unwrap_or(dst),
            fixed_mac: broadcast.then_some(MacAddr::BROADCAST),
        })
    }

    /// Returns the next hop of the broadcast address of the loopback network.
    #[cold]
    fn next_hop_of_loopback_broadcast(&self, dst: IpAddr) -> Option<NextHopLookup> {
        let (link, IpAddr::V4(address)) = (self.loopback?, dst) else { return None };
        let is_broadcast = self.link(link).is_broadcast(address);
        is_broadcast.then_some(NextHopLookup { link, address: dst, fixed_mac: Some(MacAddr::BROADCAST) })
    }

    /// Returns the route to a group by a given link, from `src` if given.
    ///
    /// # Errors
    /// [`RouteError::InvalidDestination`] if `dst` is no group, [`RouteError::NetUnreachable`] if there is no
    /// such link or no source address, [`RouteError::SourceNotLocal`],
    /// [`RouteError::NeighboursExhausted`].
    pub(crate) fn route_by_link(
        &mut self,
        now: Instant,
        dst: IpAddr,
        link: LinkId,
        src: Option<IpAddr>,
    ) -> Result<Route, RouteError> {
        let mac = group_mac(dst).ok_or(RouteError::InvalidDestination)?;
        if !self.has_link(link) {
            return Err(RouteError::NetUnreachable);
        }
        if src.is_some_and(|src| !self.is_local(src) || src.is_ipv4() != dst.is_ipv4()) {
            return Err(RouteError::SourceNotLocal);
        }
        let src = src
            .or_else(|| self.select_source_address(now, link, dst, dst))
            .ok_or(RouteError::NetUnreachable)?;
        let slot = self.neighbour_slot(link, dst, Some(mac))?;
        let hop = NextHop { neighbour: self.neighbours.reference(slot), link: link.0, epoch: self.epoch };
        Ok(Route { hop, src, mtu: self.link(link).mtu_for(dst), mtu_locked: false })
    }

    /// Returns the link by which a group is reached if the program names none: by the routes, otherwise the
    /// first link with an address of the family. Returns `None` also if the kernel receives the groups of
    /// that link.
    pub fn link_of_group(&self, group: IpAddr) -> Option<LinkId> {
        self.default_link(group).filter(|link| !self.link(*link).kernel_has_groups)
    }

    /// Returns whether packets of `source` to a group are received on a link.
    pub(crate) fn receives_group(&self, link: LinkId, group: IpAddr, source: IpAddr) -> bool {
        self.links.get(usize::from(link.0)).is_some_and(|link| link.groups.accepts(group, source))
    }

    fn neighbour_failed(&self, link: LinkId, address: IpAddr) -> bool {
        self.neighbours
            .find(link, address)
            .is_some_and(|slot| self.neighbours.state(slot) == NeighbourState::Failed)
    }

    /// Returns the link for destinations that exist on every link: the link of the default route, otherwise
    /// the first link with an address of the family.
    fn default_link(&self, dst: IpAddr) -> Option<LinkId> {
        let routed = self.routes.lookup(dst, |_| true).map(|entry| entry.link);
        routed.or_else(|| {
            let has_family = |link: &Link| {
                !link.loopback && link.addresses.iter().any(|entry| entry.address.is_ipv4() == dst.is_ipv4())
            };
            // Cannot truncate: links are numbered with 16 bits.
            self.links.iter().position(has_family).map(|at| LinkId(at as u16))
        })
    }

    /// Selects the source address of packets to `dst` via the next hop `next` on `link`.
    pub(crate) fn select_source_address(
        &self,
        now: Instant,
        link: LinkId,
        next: IpAddr,
        dst: IpAddr,
    ) -> Option<IpAddr> {
        let others = || self.links.iter().filter(|link| !link.loopback);
        match (next, dst) {
            (IpAddr::V4(next), _) => self
                .link(link)
                .source_v4(next)
                .or_else(|| others().find_map(|link| link.source_v4(next)))
                .map(IpAddr::V4),
            (_, IpAddr::V6(dst)) => source_v6(now, self.link(link), dst)
                .or_else(|| {
                    // An address of another link is acceptable (RFC 6724 §4), but a link-local one is not.
                    let mut addresses = others().filter_map(|link| source_v6(now, link, dst));
                    addresses.find(|address| !address.is_unicast_link_local())
                })
                .map(IpAddr::V6),
            _ => None,
        }
    }

    /// Returns the slot of a neighbour, which is added if it does not exist.
    pub(crate) fn neighbour_slot(
        &mut self,
        link: LinkId,
        address: IpAddr,
        fixed_mac: Option<MacAddr>,
    ) -> Result<u32, RouteError> {
        if let Some(slot) = self.neighbours.find(link, address) {
            return Ok(slot);
        }
        let state = if fixed_mac.is_some() { NeighbourState::NoArp } else { NeighbourState::Unresolved };
        self.add_neighbour(link, address, fixed_mac.unwrap_or(MacAddr::ZERO), state)
            .ok_or(RouteError::NeighboursExhausted)
    }

    /// Adds a neighbour that does not exist yet. Returns `None` if the table is full.
    pub(crate) fn add_neighbour(
        &mut self,
        link: LinkId,
        address: IpAddr,
        mac: MacAddr,
        state: NeighbourState,
    ) -> Option<u32> {
        let ethertype = if address.is_ipv4() { EtherType::IPV4 } else { EtherType::IPV6 };
        let (header, header_len) = self.link(link).header_bytes(mac, ethertype);
        let new = NewNeighbour { link, address, header, header_len, state };
        let Ok((slot, evicted)) = self.neighbours.insert(new) else {
            self.stats.neighbours_exhausted += 1;
            return None;
        };
        self.stats.neighbours_created += 1;
        if let Some(evicted) = evicted {
            self.stats.neighbours_evicted += 1;
            self.on_neighbour_evicted(evicted);
        }
        Some(slot)
    }
}

/// Returns the MAC address of a broadcast or multicast destination.
fn group_mac(dst: IpAddr) -> Option<MacAddr> {
    match dst {
        IpAddr::V4(dst) if dst.is_broadcast() => Some(MacAddr::BROADCAST),
        IpAddr::V4(dst) if dst.is_multicast() => Some(MacAddr::from_ipv4_multicast(dst)),
        IpAddr::V6(dst) if dst.is_multicast() => Some(MacAddr::from_ipv6_multicast(dst)),
        _ => None,
    }
}

/// Selects the best IPv6 source address of a link (RFC 6724 §5): rule 2 (scope), rule 3 (not deprecated),
/// rule 8 (longest match).
fn source_v6(now: Instant, link: &Link, dst: Ipv6Addr) -> Option<Ipv6Addr> {
    let link_scope = is_link_scope(dst);
    let mut best = None;
    for entry in link.addresses.iter().filter(|entry| entry.is_valid()) {
        let IpAddr::V6(address) = entry.address else { continue };
        let fits = address.is_unicast_link_local() == link_scope;
        let preferred = now < entry.preferred_until;
        let rank = (fits, preferred, common_bits(address.into(), dst.into()));
        if best.is_none_or(|(best_rank, _)| rank > best_rank) {
            best = Some((rank, address));
        }
    }
    // A host beyond the link cannot reply to a link-local source address.
    best.filter(|((fits, _, _), address)| *fits || !address.is_unicast_link_local())
        .map(|(_, address)| address)
}

/// Returns whether a destination has link-local scope or less (RFC 4291 §2.5.6, §2.7).
fn is_link_scope(address: Ipv6Addr) -> bool {
    address.is_unicast_link_local() || (address.is_multicast() && address.octets()[1] & 0x0f <= 2)
}
