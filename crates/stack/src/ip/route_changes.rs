//! Routes of a running stack: their list, and their removal.

use super::Network;
use super::route::{RouteEntry, RouteOrigin};
use crate::handle::LinkId;
use core::net::IpAddr;

/// A route as it is shown in listings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteView {
    /// Destination network.
    pub destination: IpAddr,
    /// Length of the prefix in bits.
    pub prefix: u8,
    /// The router; `None` if the destinations are on the link.
    pub gateway: Option<IpAddr>,
    /// The link that packets leave by.
    pub link: LinkId,
    /// The metric.
    pub metric: u32,
    /// Where the route comes from.
    pub origin: RouteOrigin,
}

/// Selects routes. A field that is `None` accepts all routes.
#[derive(Clone, Copy, Debug)]
pub struct RouteFilter {
    /// Destination network. Bits beyond the prefix are ignored.
    pub destination: IpAddr,
    /// Length of the prefix in bits.
    pub prefix: u8,
    /// The router.
    pub gateway: Option<IpAddr>,
    /// The link.
    pub link: Option<LinkId>,
    /// The metric.
    pub metric: Option<u32>,
}

impl RouteFilter {
    fn accepts(&self, entry: &RouteEntry) -> bool {
        self.gateway.is_none_or(|gateway| entry.gateway == Some(gateway))
            && self.link.is_none_or(|link| entry.link == link)
            && self.metric.is_none_or(|metric| entry.metric == metric)
    }
}

impl Network {
    /// Returns all routes, those of IPv4 first, longest prefixes first.
    pub fn routes(&self) -> impl Iterator<Item = RouteView> + '_ {
        self.routes.entries().map(|(destination, prefix, entry)| RouteView {
            destination,
            prefix,
            gateway: entry.gateway,
            link: entry.link,
            metric: entry.metric,
            origin: entry.origin,
        })
    }

    /// Returns the first route that the filter selects, of those with the lowest metric.
    pub fn find_route_entry(&self, filter: &RouteFilter) -> Option<RouteView> {
        let (destination, prefix) = (filter.destination, filter.prefix);
        let entry = self.routes.find(destination, prefix, |entry| filter.accepts(entry))?;
        let &RouteEntry { gateway, link, metric, origin, .. } = entry;
        Some(RouteView { destination, prefix, gateway, link, metric, origin })
    }

    /// Removes the first static route that the filter selects, as `ip route del` does. Connections that use
    /// the route look up another one. Returns false if there is no such route.
    pub fn remove_route(&mut self, filter: &RouteFilter) -> bool {
        let (destination, prefix) = (filter.destination, filter.prefix);
        let is_wanted = |entry: &RouteEntry| entry.origin == RouteOrigin::Static && filter.accepts(entry);
        let Some(found) = self.routes.find(destination, prefix, is_wanted).copied() else { return false };
        self.routes.remove(destination, prefix, |entry| *entry == found);
        self.bump_epoch();
        true
    }

    /// Returns the link on which a neighbour is according to the routes; `None` if it is on none.
    pub fn link_of_neighbour(&self, address: IpAddr) -> Option<LinkId> {
        self.routes.lookup(address, |entry| entry.gateway.is_none()).map(|entry| entry.link)
    }
}
