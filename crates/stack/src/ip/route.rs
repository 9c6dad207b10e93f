//! The routing table. The longest prefix wins, then the lowest metric, then the route added first.

use crate::handle::LinkId;
use crate::time::Instant;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::collections::BTreeMap;

/// A static route from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteConfig {
    /// Destination network. Bits beyond the prefix are ignored.
    pub destination: IpAddr,
    /// Length of the prefix in bits: 0 … 32 for IPv4, 0 … 128 for IPv6.
    pub prefix: u8,
    /// The router, which must be on the link. `None` if the destinations themselves are on the link.
    pub gateway: Option<IpAddr>,
    /// The link that packets leave by.
    pub link: LinkId,
    /// Among routes with equal prefixes the lowest metric wins. Linux's default is 0 for IPv4.
    pub metric: u32,
}

/// Where a route comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteOrigin {
    /// The network of a configured address.
    Connected,
    /// The configuration.
    Static,
    /// A router advertisement.
    Advertised,
}

/// One route to a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RouteEntry {
    pub gateway: Option<IpAddr>,
    pub link: LinkId,
    pub metric: u32,
    pub origin: RouteOrigin,
    /// [`Instant::MAX`] for routes that do not expire.
    pub expires: Instant,
}

/// Returns an address as 128 bits, with an IPv4 address in the upper 32, so that one mask serves both
/// families.
fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()) << 96,
        IpAddr::V6(address) => address.to_bits(),
    }
}

/// Returns the address with these bits.
fn address(bits: u128, is_v4: bool) -> IpAddr {
    if is_v4 { Ipv4Addr::from_bits((bits >> 96) as u32).into() } else { Ipv6Addr::from_bits(bits).into() }
}

fn mask(prefix: u8) -> u128 {
    u128::MAX.checked_shl(128 - u32::from(prefix.min(128))).unwrap_or(0)
}

/// Returns whether two addresses are of one family and agree in the first `prefix` bits.
pub(crate) fn same_network(a: IpAddr, b: IpAddr, prefix: u8) -> bool {
    a.is_ipv4() == b.is_ipv4() && (bits(a) ^ bits(b)) & mask(prefix) == 0
}

/// Returns the number of leading bits in which two addresses of one family agree.
pub(crate) fn common_bits(a: IpAddr, b: IpAddr) -> u32 {
    (bits(a) ^ bits(b)).leading_zeros()
}

/// All routes of one prefix length.
#[derive(Debug)]
struct PrefixLevel {
    prefix: u8,
    networks: BTreeMap<u128, Vec<RouteEntry>>,
}

/// The routes of both families, longest prefixes first.
#[derive(Debug, Default)]
pub(crate) struct RouteTable {
    v4: Vec<PrefixLevel>,
    v6: Vec<PrefixLevel>,
}

impl RouteTable {
    fn levels(&mut self, family: IpAddr) -> &mut Vec<PrefixLevel> {
        if family.is_ipv4() { &mut self.v4 } else { &mut self.v6 }
    }

    /// Adds a route. A route with equal network, gateway and link is replaced.
    pub(crate) fn add(&mut self, destination: IpAddr, prefix: u8, entry: RouteEntry) {
        let levels = self.levels(destination);
        let at = levels.partition_point(|level| level.prefix > prefix);
        if levels.get(at).is_none_or(|level| level.prefix != prefix) {
            levels.insert(at, PrefixLevel { prefix, networks: BTreeMap::new() });
        }
        let entries = levels[at].networks.entry(bits(destination) & mask(prefix)).or_default();
        entries.retain(|existing| (existing.gateway, existing.link) != (entry.gateway, entry.link));
        let position = entries.partition_point(|existing| existing.metric <= entry.metric);
        entries.insert(position, entry);
    }

    /// Removes the routes of a network that `unwanted` selects. Returns how many were removed.
    pub(crate) fn remove(
        &mut self,
        destination: IpAddr,
        prefix: u8,
        unwanted: impl Fn(&RouteEntry) -> bool,
    ) -> usize {
        let network = bits(destination) & mask(prefix);
        let levels = self.levels(destination);
        let Some(at) = levels.iter().position(|level| level.prefix == prefix) else { return 0 };
        let Some(entries) = levels[at].networks.get_mut(&network) else { return 0 };
        let before = entries.len();
        entries.retain(|entry| !unwanted(entry));
        let removed = before - entries.len();
        if entries.is_empty() {
            levels[at].networks.remove(&network);
            if levels[at].networks.is_empty() {
                levels.remove(at);
            }
        }
        removed
    }

    /// Returns a route of exactly this network that `wanted` selects.
    pub(crate) fn find(
        &self,
        destination: IpAddr,
        prefix: u8,
        wanted: impl Fn(&RouteEntry) -> bool,
    ) -> Option<&RouteEntry> {
        let levels = if destination.is_ipv4() { &self.v4 } else { &self.v6 };
        let level = levels.iter().find(|level| level.prefix == prefix)?;
        level.networks.get(&(bits(destination) & mask(prefix)))?.iter().find(|entry| wanted(entry))
    }

    /// Returns the best route to `destination` that `usable` accepts; shorter prefixes are tried if none of
    /// the longest is accepted.
    pub(crate) fn lookup(
        &self,
        destination: IpAddr,
        usable: impl Fn(&RouteEntry) -> bool,
    ) -> Option<&RouteEntry> {
        let levels = if destination.is_ipv4() { &self.v4 } else { &self.v6 };
        let key = bits(destination);
        levels.iter().find_map(|level| {
            level.networks.get(&(key & mask(level.prefix)))?.iter().find(|entry| usable(entry))
        })
    }

    /// Removes the expired routes of `link`. Returns how many were removed and when the next one expires.
    pub(crate) fn expire(&mut self, now: Instant, link: LinkId) -> (usize, Instant) {
        let mut removed = 0;
        let mut next = Instant::MAX;
        for levels in [&mut self.v4, &mut self.v6] {
            for level in levels.iter_mut() {
                for entries in level.networks.values_mut() {
                    let before = entries.len();
                    entries.retain(|entry| entry.link != link || entry.expires > now);
                    removed += before - entries.len();
                    let later = entries.iter().filter(|entry| entry.link == link).map(|entry| entry.expires);
                    next = later.fold(next, Instant::min);
                }
                level.networks.retain(|_, entries| !entries.is_empty());
            }
            levels.retain(|level| !level.networks.is_empty());
        }
        (removed, next)
    }

    /// Returns all routes with their destinations, those of IPv4 first, longest prefixes first.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (IpAddr, u8, &RouteEntry)> {
        let levels = [(true, &self.v4), (false, &self.v6)];
        levels.into_iter().flat_map(|(is_v4, levels)| {
            levels.iter().flat_map(move |level| {
                level.networks.iter().flat_map(move |(&network, entries)| {
                    entries.iter().map(move |entry| (address(network, is_v4), level.prefix, entry))
                })
            })
        })
    }

    /// Returns the number of routes on `link` that come from router advertisements.
    pub(crate) fn advertised_count(&self, link: LinkId) -> usize {
        self.v6
            .iter()
            .flat_map(|level| level.networks.values().flatten())
            .filter(|entry| entry.link == link && entry.origin == RouteOrigin::Advertised)
            .count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(gateway: Option<&str>, link: u16, metric: u32) -> RouteEntry {
        RouteEntry {
            gateway: gateway.map(|text| text.parse().unwrap()),
            link: LinkId(link),
            metric,
            origin: RouteOrigin::Static,
            expires: Instant::MAX,
        }
    }

    fn parse(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn link_of(table: &RouteTable, destination: &str) -> Option<u16> {
        table.lookup(parse(destination), |_| true).map(|entry| entry.link.0)
    }

    #[test]
    fn longest_prefix_wins_regardless_of_metric() {
        let mut table = RouteTable::default();
        table.add(parse("0.0.0.0"), 0, entry(Some("10.0.0.1"), 1, 0));
        table.add(parse("10.0.0.0"), 8, entry(None, 2, 5));
        table.add(parse("10.1.2.3"), 32, entry(None, 3, 9));
        assert_eq!(link_of(&table, "192.0.2.1"), Some(1));
        assert_eq!(link_of(&table, "10.1.2.4"), Some(2));
        assert_eq!(link_of(&table, "10.1.2.3"), Some(3));
        assert_eq!(link_of(&table, "2001:db8::1"), None);
    }

    #[test]
    fn lowest_metric_among_usable_routes_wins() {
        let mut table = RouteTable::default();
        table.add(parse("::"), 0, entry(Some("fe80::1"), 1, 10));
        table.add(parse("::"), 0, entry(Some("fe80::2"), 2, 5));
        assert_eq!(link_of(&table, "2001:db8::1"), Some(2));
        let other = table.lookup(parse("2001:db8::1"), |entry| entry.link.0 != 2);
        assert_eq!(other.map(|entry| entry.link.0), Some(1));
        assert_eq!(table.remove(parse("::"), 0, |entry| entry.link.0 == 2), 1);
        assert_eq!(link_of(&table, "2001:db8::1"), Some(1));
        assert_eq!(table.remove(parse("::"), 0, |_| true), 1);
        assert!(table.v6.is_empty());
    }

    #[test]
    fn expire_removes_routes_and_returns_next_expiry() {
        let mut table = RouteTable::default();
        for (gateway, seconds) in [("fe80::1", 1), ("fe80::2", 2)] {
            let expires = Instant::from_millis(seconds * 1000);
            table.add(parse("::"), 0, RouteEntry { expires, ..entry(Some(gateway), 1, 0) });
        }
        assert_eq!(table.expire(Instant::from_millis(1000), LinkId(1)), (1, Instant::from_millis(2000)));
        assert_eq!(table.expire(Instant::from_millis(2000), LinkId(2)), (0, Instant::MAX));
        assert_eq!(table.expire(Instant::from_millis(2000), LinkId(1)), (1, Instant::MAX));
    }

    #[test]
    fn same_network_compares_prefixes_of_every_length() {
        assert!(same_network(parse("10.0.0.1"), parse("11.0.0.1"), 0));
        assert!(same_network(parse("10.0.0.1"), parse("10.0.0.2"), 30));
        assert!(!same_network(parse("10.0.0.1"), parse("10.0.0.2"), 32));
        assert!(!same_network(parse("10.0.0.1"), parse("::"), 0));
        assert!(same_network(parse("fe80::1"), parse("fe80::1"), 128));
        assert_eq!(common_bits(parse("10.0.0.0"), parse("10.0.0.1")), 31);
    }
}
