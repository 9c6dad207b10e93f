//! The destination cache (RFC 4861 §5.1, here for IPv4): the most recently used routes, so that the next
//! connection to a peer needs no lookup of routes, neighbours and path MTUs.
//!
//! An entry is valid as long as nothing it was computed from has changed; invalid entries are overwritten,
//! never removed. Destinations with a known path MTU are not cached here, because that MTU expires.

use super::routing::Route;

/// Number of entries: a power of two.
const ENTRIES: usize = 256;

#[derive(Clone, Copy)]
struct DestinationCacheEntry {
    dst: u32,
    src: u32,
    /// Sum of learnt path MTUs and evicted neighbours when the entry was made; see
    /// `Network::route_generation`.
    generation: u64,
    route: Route,
}

/// A direct-mapped cache: each destination has one slot for a route from a given source address, which a
/// route from another address replaces, and one slot for the route that selects its source address.
pub(crate) struct DestinationCache {
    entries: Box<[Option<DestinationCacheEntry>; ENTRIES]>,
    /// The routes that have selected their source address. Their entries have 0 as `src`.
    selected: Box<[Option<DestinationCacheEntry>; ENTRIES]>,
}

impl DestinationCache {
    pub(crate) fn new() -> Self {
        Self { entries: Box::new([None; ENTRIES]), selected: Box::new([None; ENTRIES]) }
    }

    fn index_of(dst: u32) -> usize {
        (dst.wrapping_mul(0x9E37_79B1) >> (32 - ENTRIES.ilog2())) as usize
    }

    /// Returns the cached route from `src` to `dst`, if it was cached in this generation. The caller checks
    /// that its hop is current.
    #[inline(always)]
    pub(crate) fn get(&self, dst: u32, src: u32, generation: u64) -> Option<&Route> {
        let entry = self.entries[Self::index_of(dst)].as_ref()?;
        (entry.dst == dst && entry.src == src && entry.generation == generation).then_some(&entry.route)
    }

    /// As [`DestinationCache::get`], for the route to `dst` that has selected its source address.
    #[inline(always)]
    pub(crate) fn get_selected(&self, dst: u32, generation: u64) -> Option<&Route> {
        let entry = self.selected[Self::index_of(dst)].as_ref()?;
        (entry.dst == dst && entry.generation == generation).then_some(&entry.route)
    }

    /// Caches the route to `dst`, from `src` or with a selected source address.
    pub(crate) fn put(&mut self, dst: u32, src: Option<u32>, generation: u64, route: Route) {
        let entries = if src.is_some() { &mut self.entries } else { &mut self.selected };
        let src = src.unwrap_or(0);
        entries[Self::index_of(dst)] = Some(DestinationCacheEntry { dst, src, generation, route });
    }
}

#[cfg(test)]
mod tests {
    use crate::handle::LinkId;
    use crate::ip::testbench::*;
    use crate::ip::{RouteConfig, RouteError};
    use core::net::{IpAddr, Ipv4Addr};

    #[test]
    fn new_path_mtu_or_eviction_invalidates_cached_routes() {
        let mut fixture = NetworkFixture::new();
        let (to, from) = (PEER_V4.to_bits(), OUR_V4.to_bits());
        let lookup = |fixture: &mut NetworkFixture| {
            let route = fixture.network.route(fixture.now, PEER_V4.into(), Some(OUR_V4.into())).unwrap();
            let generation = fixture.network.path_mtu.generation() + fixture.network.stats.neighbours_evicted;
            assert_eq!(fixture.network.destination_cache.get(to, from, generation), Some(&route));
            generation
        };
        let first = lookup(&mut fixture);
        assert_eq!(lookup(&mut fixture), first);
        fixture.network.stats.neighbours_evicted += 1;
        assert_eq!(fixture.network.destination_cache.get(to, from, first + 1), None);
        lookup(&mut fixture);
        let other = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 77));
        assert!(fixture.network.path_mtu.learn(fixture.now, other, 600, 1500));
        assert_eq!(fixture.network.destination_cache.get(to, from, first + 2), None);
        lookup(&mut fixture);
    }

    #[test]
    fn route_with_selected_source_is_cached_separately() {
        let mut fixture = NetworkFixture::new();
        let (now, peer) = (fixture.now, IpAddr::V4(PEER_V4));
        let network = &mut fixture.network;
        let route = network.route(now, peer, None).unwrap();
        assert_eq!(route.src, IpAddr::V4(OUR_V4));
        assert_eq!(network.cached_selected_route(PEER_V4.to_bits()), Some(&route));
        assert_eq!(network.cached_route(PEER_V4.to_bits(), OUR_V4.to_bits()), None);
        assert_eq!(network.route(now, peer, Some(OUR_V4.into())), Ok(route));
        assert_eq!(network.cached_route(PEER_V4.to_bits(), OUR_V4.to_bits()), Some(&route));
        assert_eq!(network.cached_selected_route(PEER_V4.to_bits()), Some(&route), "both have a slot");
        // The address 0.0.0.0 is no address of this host, and does not stand for all.
        let unspecified = Ipv4Addr::UNSPECIFIED.into();
        assert_eq!(network.route(now, peer, Some(unspecified)), Err(RouteError::SourceNotLocal));
    }

    #[test]
    fn new_route_replaces_one_with_selected_source() {
        let mut fixture = NetworkFixture::new();
        let (now, peer) = (fixture.now, IpAddr::V4(PEER_V4));
        let network = &mut fixture.network;
        let direct = network.route(now, peer, None).unwrap();
        let gateway = Some(ROUTER_V4.into());
        let by_router = RouteConfig { destination: peer, prefix: 32, gateway, link: LinkId(0), metric: 0 };
        network.add_route(by_router).unwrap();
        assert_eq!(network.cached_selected_route(PEER_V4.to_bits()), None);
        let route = network.route(now, peer, None).unwrap();
        assert_ne!(route.hop.neighbour, direct.hop.neighbour);
        assert_eq!(network.cached_selected_route(PEER_V4.to_bits()), Some(&route));
    }
}
