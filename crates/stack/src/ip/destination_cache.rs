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

/// A direct-mapped cache: each destination has exactly one slot.
pub(crate) struct DestinationCache {
    entries: Box<[Option<DestinationCacheEntry>; ENTRIES]>,
}

impl DestinationCache {
    pub(crate) fn new() -> Self {
        Self { entries: Box::new([None; ENTRIES]) }
    }

    fn index_of(dst: u32) -> usize {
        (dst.wrapping_mul(0x9E37_79B1) >> (32 - ENTRIES.ilog2())) as usize
    }

    /// Returns the cached route from `src` to `dst`, if it was cached in this generation. The caller checks
    /// that its hop is current.
    #[inline(always)]
    pub(crate) fn get(&self, dst: u32, src: u32, changes: u64) -> Option<&Route> {
        let entry = self.entries[Self::index_of(dst)].as_ref()?;
        (entry.dst == dst && entry.src == src && entry.generation == changes).then_some(&entry.route)
    }

    pub(crate) fn put(&mut self, dst: u32, src: u32, changes: u64, route: Route) {
        self.entries[Self::index_of(dst)] =
            Some(DestinationCacheEntry { dst, src, generation: changes, route });
    }
}

#[cfg(test)]
mod tests {
    use crate::ip::testbench::*;
    use core::net::{IpAddr, Ipv4Addr};

    #[test]
    fn a_route_is_remembered_until_a_path_mtu_is_learned_or_a_neighbour_evicted() {
        let mut bench = NetworkFixture::new();
        let (to, from) = (PEER_V4.to_bits(), OUR_V4.to_bits());
        let ask = |bench: &mut NetworkFixture| {
            let route = bench.network.route(bench.now, PEER_V4.into(), Some(OUR_V4.into())).unwrap();
            let changes = bench.network.path_mtu.generation() + bench.network.stats.neighbours_evicted;
            assert_eq!(bench.network.destination_cache.get(to, from, changes), Some(&route));
            changes
        };
        let first = ask(&mut bench);
        assert_eq!(ask(&mut bench), first);
        bench.network.stats.neighbours_evicted += 1;
        assert_eq!(bench.network.destination_cache.get(to, from, first + 1), None);
        ask(&mut bench);
        let other = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 77));
        assert!(bench.network.path_mtu.learn(bench.now, other, 600, 1500));
        assert_eq!(bench.network.destination_cache.get(to, from, first + 2), None);
        ask(&mut bench);
    }
}
