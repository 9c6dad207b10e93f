//! Router discovery (RFC 4861 §6.3) and stateless address autoconfiguration (RFC 4862 §5.5).

use super::ndp::{SOLICITATION_RETRY, with_interface_id};
use super::neighbour::NeighbourUpdate;
use super::{AddressState, InterfaceAddress};
use crate::handle::LinkId;
use crate::ip::Network;
use crate::ip::path_mtu::IPV6_MTU_MIN;
use crate::ip::route::{RouteEntry, RouteOrigin};
use crate::ip::timers::NetworkTimer;
use crate::time::Instant;
use crate::wire::ndp::{NdpMessage, PrefixInfo, RouterAdvertisement, solicited_node};
use core::net::{IpAddr, Ipv6Addr};
use core::time::Duration;

/// The all-routers group (RFC 4291 §2.7.1).
const ALL_ROUTERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2);
/// Time between router solicitations (RTR_SOLICITATION_INTERVAL of RFC 4861 §10).
const RTR_SOLICITATION_INTERVAL: Duration = Duration::from_secs(4);
/// An advertisement may not shorten the remaining lifetime of an address below this (RFC 4862 §5.5.3 (e)),
/// because advertisements are not authenticated.
const VALID_LIFETIME_MIN: Duration = Duration::from_secs(2 * 3600);
/// Range to which advertised reachable times are clamped, in milliseconds. With shorter ones this host would
/// solicit permanently.
const REACHABLE_TIME_MS: core::ops::RangeInclusive<u32> = 100..=3_600_000;
/// Range to which advertised retransmission timers are clamped, in milliseconds.
const RETRANS_TIMER_MS: core::ops::RangeInclusive<u32> = 10..=60_000;
/// Metric of advertised routes, as on Linux: configured routes take precedence.
const ADVERTISED_METRIC: u32 = 1024;

impl Network {
    /// Starts router solicitation when the link-local address has become valid.
    pub(crate) fn on_link_local_address(&mut self, id: LinkId) {
        let link = self.link(id);
        if link.accept_ra && link.router_solicitations_left > 0 && !self.is_secondary_shard(id) {
            self.timers.arm(NetworkTimer::RouterSolicitation(id), Instant::ZERO);
        }
    }

    /// Sends a router solicitation, and arms the timer for the next one.
    pub(crate) fn on_router_solicitation(&mut self, now: Instant, id: LinkId) {
        let link = self.link_mut(id);
        let Some(source) = link.link_local() else { return };
        let Some(left) = link.router_solicitations_left.checked_sub(1) else { return };
        let message = NdpMessage::RouterSolicitation { source_mac: Some(link.mac) };
        if !self.send_ndp(id, source, ALL_ROUTERS, None, &message) {
            return self.timers.arm(NetworkTimer::RouterSolicitation(id), now + SOLICITATION_RETRY);
        }
        self.link_mut(id).router_solicitations_left = left;
        if left > 0 {
            self.timers.arm(NetworkTimer::RouterSolicitation(id), now + RTR_SOLICITATION_INTERVAL);
        }
    }

    /// Processes a router advertisement (RFC 4861 §6.3.4).
    pub(crate) fn on_router_advertisement(
        &mut self,
        now: Instant,
        id: LinkId,
        router: Ipv6Addr,
        advertisement: &RouterAdvertisement,
    ) {
        if !self.link(id).accept_ra {
            return;
        }
        self.stats.ndp_router_advertisements_in += 1;
        self.apply_link_parameters(id, advertisement);
        self.set_default_router(now, id, router, advertisement.router_lifetime_s);
        if let Some(mac) = advertisement.source_mac.filter(|mac| mac.is_unicast()) {
            let update =
                NeighbourUpdate { mac: Some(mac), solicited: false, overrides: true, makes_stale: true };
            if let Some(slot) = self.update_neighbour(now, id, router.into(), update, true)
                && let Some(neighbour) = self.neighbours.neighbour_mut(slot)
            {
                neighbour.is_router = true;
            }
        }
        for prefix in &advertisement.prefixes {
            // RFC 4861 §6.3.4, RFC 4862 §5.5.3 (b), (c).
            if prefix.prefix.is_unicast_link_local()
                || prefix.prefix.is_multicast()
                || prefix.preferred_lifetime_s > prefix.valid_lifetime_s
            {
                continue;
            }
            if prefix.on_link {
                self.set_on_link_prefix(now, id, prefix);
            }
            if prefix.autonomous && prefix.prefix_len == 64 {
                self.autoconfigure_address(now, id, prefix);
            }
        }
        self.on_lifetimes(now, id);
    }

    fn apply_link_parameters(&mut self, id: LinkId, advertisement: &RouterAdvertisement) {
        let reachable = advertisement.reachable_time_ms;
        let link = &mut self.links[usize::from(id.0)];
        if advertisement.router_lifetime_s != 0 {
            link.router_solicitations_left = 0;
            self.timers.cancel(NetworkTimer::RouterSolicitation(id));
        }
        if advertisement.hop_limit != 0 {
            link.hop_limit = advertisement.hop_limit;
        }
        if advertisement.retrans_timer_ms != 0 {
            let time =
                advertisement.retrans_timer_ms.clamp(*RETRANS_TIMER_MS.start(), *RETRANS_TIMER_MS.end());
            link.retrans_timer = Duration::from_millis(time.into());
        }
        if let Some(mtu) = advertisement.mtu
            && let Ok(mtu) = u16::try_from(mtu)
            && (IPV6_MTU_MIN..=link.mtu).contains(&mtu)
            && mtu != link.mtu_v6
        {
            link.mtu_v6 = mtu;
            self.bump_epoch();
        }
        if reachable != 0 && reachable != self.link(id).advertised_reachable_time_ms {
            let time = reachable.clamp(*REACHABLE_TIME_MS.start(), *REACHABLE_TIME_MS.end());
            let drawn = self.randomize_reachable_time(Duration::from_millis(time.into()));
            let link = self.link_mut(id);
            link.advertised_reachable_time_ms = reachable;
            link.reachable_time = drawn;
        }
    }

    fn set_default_router(&mut self, now: Instant, id: LinkId, router: Ipv6Addr, lifetime_s: u16) {
        if lifetime_s == 0 {
            self.remove_default_router(id, router);
            return;
        }
        let expires = now + Duration::from_secs(lifetime_s.into());
        self.set_advertised_route(id, Ipv6Addr::UNSPECIFIED, 0, Some(router.into()), expires);
    }

    /// Removes the default route via a router.
    pub(crate) fn remove_default_router(&mut self, id: LinkId, router: Ipv6Addr) {
        let is_removed = |entry: &RouteEntry| {
            entry.origin == RouteOrigin::Advertised
                && entry.link == id
                && entry.gateway == Some(router.into())
        };
        if self.routes.remove(Ipv6Addr::UNSPECIFIED.into(), 0, is_removed) > 0 {
            self.bump_epoch();
        }
    }

    fn set_on_link_prefix(&mut self, now: Instant, id: LinkId, prefix: &PrefixInfo) {
        if prefix.valid_lifetime_s == 0 {
            let is_removed = |entry: &RouteEntry| {
                entry.origin == RouteOrigin::Advertised && entry.link == id && entry.gateway.is_none()
            };
            if self.routes.remove(prefix.prefix.into(), prefix.prefix_len, is_removed) > 0 {
                self.bump_epoch();
            }
            return;
        }
        let expires = expiry(now, prefix.valid_lifetime_s);
        self.set_advertised_route(id, prefix.prefix, prefix.prefix_len, None, expires);
    }

    fn set_advertised_route(
        &mut self,
        id: LinkId,
        destination: Ipv6Addr,
        prefix: u8,
        gateway: Option<IpAddr>,
        expires: Instant,
    ) {
        let is_same_route = |entry: &RouteEntry| entry.link == id && entry.gateway == gateway;
        let entry = RouteEntry {
            gateway,
            link: id,
            metric: ADVERTISED_METRIC,
            origin: RouteOrigin::Advertised,
            expires,
        };
        match self.routes.find(destination.into(), prefix, is_same_route) {
            // Router advertisements do not change configured routes.
            Some(existing) if existing.origin != RouteOrigin::Advertised => {}
            Some(_) => self.routes.add(destination.into(), prefix, entry),
            None if self.routes.advertised_count(id) < usize::from(self.config.autoconf_routes_max) => {
                self.routes.add(destination.into(), prefix, entry);
                self.bump_epoch();
            }
            None => self.stats.router_advertisement_limits += 1,
        }
    }

    /// Adds the address that a prefix gives, or renews its lifetimes (RFC 4862 §5.5.3 (d), (e)).
    fn autoconfigure_address(&mut self, now: Instant, id: LinkId, prefix: &PrefixInfo) {
        let limit = usize::from(self.config.autoconf_addresses_max);
        let link = self.link_mut(id);
        let address = with_interface_id(prefix.prefix, link.mac);
        let valid_until = expiry(now, prefix.valid_lifetime_s);
        let preferred_until = expiry(now, prefix.preferred_lifetime_s);
        if let Some(entry) = link.address_mut(address.into()) {
            if !entry.autoconfigured {
                return;
            }
            entry.preferred_until = preferred_until;
            let floor = now + VALID_LIFETIME_MIN;
            entry.valid_until = if valid_until > floor || valid_until > entry.valid_until {
                valid_until
            } else {
                entry.valid_until.min(floor)
            };
            return;
        }
        if prefix.valid_lifetime_s == 0 {
            return;
        }
        if link.addresses.iter().filter(|entry| entry.autoconfigured).count() >= limit {
            self.stats.router_advertisement_limits += 1;
            return;
        }
        let state = AddressState::Tentative { probes: 0 };
        let address = InterfaceAddress {
            autoconfigured: true,
            preferred_until,
            valid_until,
            ..InterfaceAddress::permanent(address.into(), 64, state)
        };
        self.stats.slaac_addresses += 1;
        self.add_ipv6_address(id, address);
    }

    /// Removes expired routes and addresses of a link and arms the timer for the next expiry.
    pub(crate) fn on_lifetimes(&mut self, now: Instant, id: LinkId) {
        let (removed, next_route) = self.routes.expire(now, id);
        if removed > 0 {
            self.bump_epoch();
        }
        let link = self.link_mut(id);
        let expired: Vec<_> =
            link.addresses.iter().filter(|entry| entry.valid_until <= now).copied().collect();
        link.addresses.retain(|entry| entry.valid_until > now);
        let next_address = link.addresses.iter().map(|entry| entry.valid_until).min();
        for entry in expired {
            if let IpAddr::V6(address) = entry.address {
                self.forget_ipv6_address(id, address);
            }
        }
        let next = next_address.unwrap_or(Instant::MAX).min(next_route);
        if next < Instant::MAX {
            self.timers.arm(NetworkTimer::Lifetimes(id), next);
        }
    }

    fn forget_ipv6_address(&mut self, id: LinkId, address: Ipv6Addr) {
        self.timers.cancel(NetworkTimer::DadStart(id, address));
        self.timers.cancel(NetworkTimer::Dad(id, address));
        self.local.remove_v6(address);
        self.bump_epoch();
        self.update_steered_addresses();
        let group = solicited_node(address);
        let shared = self
            .link(id)
            .addresses
            .iter()
            .any(|entry| matches!(entry.address, IpAddr::V6(other) if solicited_node(other) == group));
        if !shared {
            self.leave_group(id, group.into());
        }
    }
}

/// Returns the end of a lifetime in seconds; the largest number means infinity (RFC 4861 §4.6.2).
fn expiry(now: Instant, seconds: u32) -> Instant {
    if seconds == u32::MAX { Instant::MAX } else { now + Duration::from_secs(seconds.into()) }
}
