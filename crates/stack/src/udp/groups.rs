//! Groups of UDP sockets: membership, delivery to every member, and sending to groups and broadcast
//! addresses, whose datagrams come back to members on this host.

use super::filter::Arrival;
use super::queue::Datagram;
use super::send::{datagram_bytes, transmit};
use super::{CachedRoute, Udp, UdpError, UdpSendParams, UdpSocket, gso, route_error, route_for};
use crate::handle::{LinkId, UdpHandle};
use crate::ip::{IpHeader, Network, Route};
use crate::link::groups::GroupUser;
use crate::multicast::{MulticastOptions, SourceFilter};
use crate::time::Instant;
use core::net::{IpAddr, SocketAddr};
use serde::{Deserialize, Serialize};

/// Hop limit of datagrams to groups (RFC 1112 §6.1).
const HOP_LIMIT_DEFAULT: u8 = 1;

/// The membership of a socket in a group on a link.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Membership {
    pub link: LinkId,
    pub group: IpAddr,
    pub filter: SourceFilter,
}

impl Membership {
    /// Returns what a membership with this filter counts: one, and its sources.
    fn cost(filter: &SourceFilter) -> usize {
        1 + filter.sources().len()
    }
}

/// Limits of the memberships of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MembershipLimits {
    /// Largest number of IPv4 groups (`igmp_max_memberships`).
    pub igmp_max_memberships: u32,
    /// Largest number of sources in a filter of an IPv4 group (`igmp_max_msf`).
    pub igmp_max_msf: u32,
    /// Largest number of IPv6 groups.
    pub mld_max_memberships: u32,
    /// Largest number of sources in a filter of an IPv6 group (`mld_max_msf`).
    pub mld_max_msf: u32,
}

impl UdpSocket {
    /// Returns the multicast options for the family of `address`.
    fn multicast(&self, address: IpAddr) -> &MulticastOptions {
        if address.is_ipv4() { &self.options.multicast_v4 } else { &self.options.multicast_v6 }
    }

    /// Returns whether the socket receives datagrams of `source` to `group` that arrive on `link`
    /// (`ip_mc_sf_allow`, `inet6_mc_check`).
    fn receives_group(&self, link: LinkId, group: IpAddr, source: IpAddr) -> bool {
        let found = if group.is_ipv4() {
            self.memberships.iter().find(|entry| entry.group == group && entry.link == link)
        } else {
            // As on Linux, the group that was joined last counts on every link.
            self.memberships.iter().rfind(|entry| entry.group == group)
        };
        match found {
            Some(membership) => membership.filter.allows(source),
            None => !self.multicast(group).members_only,
        }
    }
}

impl Udp {
    /// Sets the filter with which a socket receives a group on a link; `None` leaves the group.
    ///
    /// # Errors
    /// [`UdpError::Stale`]; [`UdpError::InvalidAddress`] if there is no such link or groups cannot be joined
    /// on it, the group is not a multicast address, or a source is of another family;
    /// [`UdpError::NoBuffers`] if the socket, or all sockets together, have too many memberships, or the
    /// filter has too many sources.
    pub fn set_membership(
        &mut self,
        network: &mut Network,
        handle: UdpHandle,
        link: LinkId,
        group: IpAddr,
        filter: Option<SourceFilter>,
    ) -> Result<(), UdpError> {
        let limits = network.config().membership_limits();
        let (memberships_max, sources_max) = if group.is_ipv4() {
            (limits.igmp_max_memberships, limits.igmp_max_msf)
        } else {
            (limits.mld_max_memberships, limits.mld_max_msf)
        };
        let total = self.memberships;
        let total_max = self.memberships_max;
        let socket = self.socket(handle)?;
        let sources = filter.as_ref().map_or(&[][..], SourceFilter::sources);
        let is_valid = network.can_join_groups(link)
            && group.is_multicast()
            && sources.iter().all(|source| source.is_ipv4() == group.is_ipv4());
        if !is_valid {
            return Err(UdpError::InvalidAddress);
        }
        if sources.len() > sources_max as usize {
            return Err(UdpError::NoBuffers);
        }
        let at = socket.memberships.iter().position(|entry| entry.group == group && entry.link == link);
        let of_family = socket.memberships.iter().filter(|entry| entry.group.is_ipv4() == group.is_ipv4());
        let is_new = at.is_none() && filter.is_some();
        if is_new && of_family.count() >= memberships_max as usize {
            return Err(UdpError::NoBuffers);
        }
        let cost_before = at.map_or(0, |at| Membership::cost(&socket.memberships[at].filter));
        let cost = filter.as_ref().map_or(0, Membership::cost);
        let total = total - cost_before + cost;
        if cost > cost_before && total > total_max {
            self.stats.memberships_refused += 1;
            return Err(UdpError::NoBuffers);
        }
        let before = match (at, filter.clone()) {
            (Some(at), Some(filter)) => Some(core::mem::replace(&mut socket.memberships[at].filter, filter)),
            (Some(at), None) => Some(socket.memberships.remove(at).filter),
            (None, Some(filter)) => {
                socket.memberships.push(Membership { link, group, filter });
                None
            }
            (None, None) => return Ok(()),
        };
        self.memberships = total;
        network.change_group(link, group, GroupUser::Socket, before.as_ref(), filter.as_ref());
        Ok(())
    }

    /// Leaves all groups of a socket, which is to be closed.
    pub(crate) fn leave_all(&mut self, network: &mut Network, handle: UdpHandle) {
        let Ok(socket) = self.socket(handle) else { return };
        let memberships = core::mem::take(&mut socket.memberships);
        for Membership { link, group, filter } in memberships {
            self.memberships -= Membership::cost(&filter);
            network.change_group(link, group, GroupUser::Socket, Some(&filter), None);
        }
    }

    /// Gives a copy of a datagram to a group or broadcast address to every socket that receives it.
    /// `gso_size` is the length of each datagram of a super-frame.
    #[cold]
    pub(super) fn deliver_to_all(
        &mut self,
        arrival: &Arrival<'_>,
        port: u16,
        description: &Datagram,
        payload: &[u8],
        gso_size: usize,
    ) {
        let &Arrival { network, link, .. } = arrival;
        let (group, source) = (description.to, description.from.ip());
        let is_group = group.is_multicast();
        if is_group && !network.receives_group(link, group, source) {
            return;
        }
        let local = SocketAddr::new(group, port);
        let mut at = 0;
        while let Some(&index) = self.ports.get(&port).and_then(|sockets| sockets.get(at)) {
            at += 1;
            let receives = self.socket_at(index).is_some_and(|socket| {
                Self::compute_score(socket, local, description.from).is_some()
                    && (!is_group || socket.receives_group(link, group, source))
            });
            if receives {
                self.deliver(index, description, payload, gso_size, arrival);
            }
        }
    }

    /// Sends to a group or a broadcast address. The socket and the destination were checked.
    #[cold]
    #[inline(never)]
    pub(super) fn send_to_all(
        &mut self,
        now: Instant,
        network: &mut Network,
        handle: UdpHandle,
        params: &UdpSendParams,
        payload: &[u8],
    ) -> Result<(), UdpError> {
        let &UdpSendParams { to, source, .. } = params;
        let socket = self.socket(handle)?;
        let remote = to.or(socket.remote).ok_or(UdpError::NoDestination)?;
        let is_group = remote.ip().is_multicast();
        let route = match (is_group, source) {
            (true, _) => socket.group_route(now, network, remote.ip(), source)?,
            (false, Some(_)) => network.route(now, remote.ip(), source).map_err(route_error)?,
            (false, None) => route_for(now, network, socket, remote, to.is_some())?.route,
        };
        // Each receiver has another flow.
        let cached = CachedRoute::uncached(route);
        let route = &cached.route;
        let link = route.hop.link();
        let multicast = *socket.multicast(remote.ip());
        let group_hop_limit = is_group.then(|| multicast.hop_limit.unwrap_or(HOP_LIMIT_DEFAULT));
        let (header, udp) =
            socket.headers(network, params, remote, &cached, group_hop_limit, payload.len())?;
        let gso_size = datagram_bytes(params.gso_size, payload.len());
        // A datagram to a group with hop limit 0 stays on this host, and so does one to a group within the
        // host (RFC 4291 §2.7).
        let within_host = matches!(remote.ip(), IpAddr::V6(to) if is_group && to.octets()[1] & 0x0f < 2);
        let is_sent = network.is_loopback(link) || !(is_group && header.hop_limit == 0 || within_host);
        let mut count = if gso_size < payload.len() { gso::count(route, payload, gso_size)? } else { 1 };
        // The loopback link returns frames itself. Members on this host get the datagram before the device,
        // which may refuse it (`ip_mc_output`).
        let is_looped_back = !(network.is_loopback(link) || is_group && multicast.no_loop);
        if is_looped_back {
            self.loop_back(network, link, &header, [udp.src_port, udp.dst_port], payload, gso_size);
        }
        if is_sent {
            count = match transmit(now, network, route, &header, &udp, payload, params.gso_size) {
                // Sent again, it would reach the members on this host twice.
                Err(UdpError::DeviceFull) if is_looped_back => return Err(UdpError::NoBuffers),
                Err(UdpError::DeviceFull) => return Err(self.refused_by_device(now)),
                result => result?,
            };
        }
        self.stats.sent += count;
        Ok(())
    }

    /// Gives a datagram that this host sends to its own members, on all shards.
    fn loop_back(
        &mut self,
        network: &mut Network,
        link: LinkId,
        header: &IpHeader,
        ports: [u16; 2],
        payload: &[u8],
        gso_size: usize,
    ) {
        if header.dst.is_multicast() && !network.receives_group(link, header.dst, header.src) {
            return;
        }
        let description = Datagram {
            len: payload.len(),
            from: SocketAddr::new(header.src, ports[0]),
            to: header.dst,
            tos: header.tos,
            hop_limit: header.hop_limit,
            flow_label: header.flow_label,
            gso_size: 0,
        };
        let arrival = Arrival { network, link, l4: None };
        self.deliver_to_all(&arrival, ports[1], &description, payload, gso_size.max(1));
        if payload.is_empty() {
            network.loop_back_to_other_shards(link, header, ports, payload);
        }
        for datagram in payload.chunks(gso_size.max(1)) {
            network.loop_back_to_other_shards(link, header, ports, datagram);
        }
    }
}

impl UdpSocket {
    /// Returns the route to a group: by the link of `IP_MULTICAST_IF`, otherwise by the link of the source
    /// address, otherwise by the routes.
    pub(super) fn group_route(
        &self,
        now: Instant,
        network: &mut Network,
        group: IpAddr,
        source: Option<IpAddr>,
    ) -> Result<Route, UdpError> {
        let options = self.multicast(group);
        let bound = self.source_address(network).filter(|bound| bound.is_ipv4() == group.is_ipv4());
        let selected = options.source.filter(|_| group.is_ipv4()).map(IpAddr::V4);
        let selected = selected.filter(|selected| network.is_local(*selected));
        let from = source.or(bound).or(selected);
        let route = match options.link {
            Some(link) => network.route_by_link(now, group, link, from),
            None => network.route(now, group, from),
        };
        route.map_err(route_error)
    }
}

#[cfg(test)]
#[path = "groups_tests.rs"]
mod tests;
