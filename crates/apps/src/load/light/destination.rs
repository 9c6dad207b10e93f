//! A server: its next hop, path MTU and round-trip time, which all connections to it share (RFC 9040 §7).

use super::frames::Template;
use super::locals::Locals;
use super::neighbour::PeerNeighbour;
use core::net::{IpAddr, SocketAddr};
use ginnel::Error;
use ginnel::config::{LinkConfig, Prefix, RouteConfig};
use ginnel_stack::wire::MacAddr;

/// Shift count of the window scale option (RFC 7323 §2.2).
pub(super) const WINDOW_SHIFT: u8 = 5;
/// Receive window in bytes.
pub(super) const WINDOW: u32 = 65_535 << WINDOW_SHIFT;
/// Window field of all segments.
const WINDOW_FIELD: u16 = 65_535;

/// Retransmission timeout before the first measurement (RFC 6298 §2.1), Linux's lower bound, and the smallest
/// upper bound that RFC 6298 §2.5 permits.
const RTO_INITIAL_MS: u32 = 1_000;
const RTO_MIN_MS: u32 = 200;
const RTO_MAX_MS: u32 = 60_000;

/// MTU that every IPv6 link has (RFC 8200 §5), and smallest path MTU that is accepted for IPv4.
const V6_MTU_MIN: u32 = 1_280;
const V4_PMTU_MIN: u32 = 576;

/// Returns the length of the IP and TCP headers without options, in bytes.
const fn headers(is_v4: bool) -> u32 {
    if is_v4 { 40 } else { 60 }
}

/// A server.
pub(super) struct Destination {
    pub address: SocketAddr,
    /// The headers of segments to the server; set when the next hop is resolved.
    pub template: Option<Template>,
    /// Index of the next hop.
    pub neighbour: usize,
    /// Index of the local address for connections without a source address.
    pub local: u16,
    /// Largest payload in bytes that the path carries.
    pub mss: u16,
    /// MSS that SYN advertises: what the link carries.
    pub advmss: u16,
    /// Smoothed round-trip time and its variation in microseconds (RFC 6298 §2), once measured.
    rtt: Option<(u32, u32)>,
    rto_ms: u32,
}

impl Destination {
    fn new(address: SocketAddr, neighbour: usize, local: u16, mtu: u32) -> Self {
        let mss = mtu.saturating_sub(headers(address.is_ipv4())).clamp(1, 65_495) as u16;
        Self {
            address,
            template: None,
            neighbour,
            local,
            mss,
            advmss: mss,
            rtt: None,
            rto_ms: RTO_INITIAL_MS,
        }
    }

    /// Sets or changes the Ethernet address of the next hop.
    pub fn set_next_hop(&mut self, mac: MacAddr, next_hop: MacAddr, offload: bool) {
        self.template = Some(Template::new(self.address, mac, next_hop, WINDOW_FIELD, offload));
    }

    /// Records a round-trip time in microseconds (RFC 6298 §2).
    pub fn record_rtt(&mut self, micros: u32) {
        // Larger values would not change the timeout, and the sums stay in range.
        let rtt = micros.min(RTO_MAX_MS * 1_000);
        let (srtt, var) = match self.rtt {
            None => (rtt, rtt / 2),
            Some((srtt, var)) => (srtt - srtt / 8 + rtt / 8, var - var / 4 + srtt.abs_diff(rtt) / 4),
        };
        self.rtt = Some((srtt, var));
        self.rto_ms = ((srtt + 4 * var) / 1_000).clamp(RTO_MIN_MS, RTO_MAX_MS);
    }

    /// Returns the timeout in milliseconds after `retries` retransmissions (RFC 6298 §5.5).
    pub fn rto_ms(&self, retries: u8) -> u32 {
        self.rto_ms.checked_shl(retries.into()).map_or(RTO_MAX_MS, |ms| ms.min(RTO_MAX_MS)).max(self.rto_ms)
    }

    /// Lowers the path MTU to the value that a router reported.
    pub fn lower_mtu(&mut self, mtu: u32) {
        let is_v4 = self.address.is_ipv4();
        let mtu = mtu.max(if is_v4 { V4_PMTU_MIN } else { V6_MTU_MIN });
        self.mss = self.mss.min(mtu.saturating_sub(headers(is_v4)).min(65_495) as u16);
    }
}

/// Returns true if `prefix` contains `address`.
fn prefix_contains(prefix: &Prefix, address: IpAddr) -> bool {
    match (prefix.address, address) {
        (IpAddr::V4(a), IpAddr::V4(b)) => {
            u64::from(a.to_bits() ^ b.to_bits()) >> (32 - u32::from(prefix.len.min(32))) == 0
        }
        (IpAddr::V6(a), IpAddr::V6(b)) => {
            (a.to_bits() ^ b.to_bits()).checked_shr(128 - u32::from(prefix.len.min(128))).unwrap_or(0) == 0
        }
        _ => false,
    }
}

/// Determines next hop and local address of all targets. The longest prefix that contains a target decides:
/// if it is a prefix of the link, the next hop is the target itself, otherwise the gateway of the route.
pub(super) fn resolve_destinations(
    targets: &[SocketAddr],
    link: &LinkConfig,
    routes: &[RouteConfig],
    locals: &Locals,
    mtu: u32,
) -> Result<(Vec<Destination>, Vec<PeerNeighbour>), Error> {
    let (mut destinations, mut neighbours): (Vec<Destination>, Vec<PeerNeighbour>) = (Vec::new(), Vec::new());
    for &target in targets {
        let ip = target.ip();
        if ip.is_ipv6() && mtu < V6_MTU_MIN {
            return Err(Error::application(format!(
                "IPv6 needs an MTU of at least {V6_MTU_MIN} bytes, but the link has {mtu}"
            )));
        }
        let on_link = link.addresses.iter().filter(|p| prefix_contains(p, ip)).max_by_key(|p| p.len);
        let route = routes.iter().filter(|r| prefix_contains(&r.destination, ip));
        let route = route.max_by_key(|r| (r.destination.len, u32::MAX - r.metric));
        let next = match (on_link, route) {
            (Some(own), Some(route)) if route.destination.len > own.len => route.gateway.unwrap_or(ip),
            (Some(_), _) => ip,
            (None, Some(route)) => route.gateway.unwrap_or(ip),
            (None, None) => {
                return Err(Error::application(format!(
                    "no route to {ip}: it is not on the link, and there is no --gateway for its address family"
                )));
            }
        };
        // Source address of packets to the next hop: one of its network, otherwise any of its family.
        let local_prefix = link.addresses.iter().filter(|p| prefix_contains(p, next)).max_by_key(|p| p.len);
        let any = || locals.all().find(|local| local.is_ipv4() == ip.is_ipv4());
        let own = local_prefix
            .or(on_link)
            .map(|p| p.address)
            .filter(|own| own.is_ipv4() == ip.is_ipv4())
            .or_else(any);
        let Some(local) = own.and_then(|own| locals.number(own)) else {
            return Err(Error::application(format!("no --address of the same family as {ip}")));
        };
        let neighbour = neighbours.iter().position(|n| n.address == next).unwrap_or_else(|| {
            let fixed = link.neighbours.iter().find(|n| n.address == next).map(|n| MacAddr(n.mac.0));
            neighbours.push(PeerNeighbour::new(next, fixed, local));
            neighbours.len() - 1
        });
        destinations.push(Destination::new(target, neighbour, local, mtu));
    }
    Ok((destinations, neighbours))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel::Config;
    use ginnel::config::{DeviceConfig, DeviceKind};

    fn next_hop(addresses: &[&str], gateways: &[&str], target: &str) -> Result<(String, String), String> {
        next_hop_over(1500, addresses, gateways, target)
    }

    fn next_hop_over(
        mtu: u32,
        addresses: &[&str],
        gateways: &[&str],
        target: &str,
    ) -> Result<(String, String), String> {
        let addresses: Vec<Prefix> = addresses.iter().map(|a| a.parse().unwrap()).collect();
        let gateways: Vec<IpAddr> = gateways.iter().map(|a| a.parse().unwrap()).collect();
        let config = Config::single(DeviceConfig::new("d", DeviceKind::Memory), &addresses, &gateways);
        let locals = Locals::new(addresses.iter().map(|p| p.address));
        let target = SocketAddr::new(target.parse().unwrap(), 80);
        let (targets, neighbours) =
            resolve_destinations(&[target], &config.links[0], &config.routes, &locals, mtu)
                .map_err(|e| e.to_string())?;
        let local = locals.get(targets[0].local).address.to_string();
        Ok((neighbours[targets[0].neighbour].address.to_string(), local))
    }

    #[test]
    fn the_next_hop_is_the_target_or_gateway() {
        let own = ["10.1.0.2/24", "10.2.0.2/16", "fd00::2/64"];
        let table: [(&[&str], &str, &str, &str); 6] = [
            (&[], "10.1.0.9", "10.1.0.9", "10.1.0.2"),
            (&[], "10.2.7.9", "10.2.7.9", "10.2.0.2"),
            (&["10.2.0.1"], "192.0.2.1", "10.2.0.1", "10.2.0.2"),
            (&["10.2.0.1"], "10.1.0.9", "10.1.0.9", "10.1.0.2"),
            (&["fd00::1"], "2001:db8::1", "fd00::1", "fd00::2"),
            (&["fd00::1"], "fd00::99", "fd00::99", "fd00::2"),
        ];
        for (gateways, target, next, local) in table {
            assert_eq!(next_hop(&own, gateways, target), Ok((next.into(), local.into())), "{target}");
        }
        assert!(next_hop(&own, &[], "192.0.2.1").unwrap_err().starts_with("no route to 192.0.2.1"));
        assert!(next_hop(&["10.1.0.2/24"], &["fd00::1"], "2001:db8::1").is_err());
        assert!(next_hop_over(1279, &own, &[], "fd00::1").unwrap_err().contains("1280"));
        assert!(next_hop_over(68, &own, &[], "10.1.0.9").is_ok());
    }

    fn target() -> Destination {
        Destination::new("10.0.0.1:80".parse().unwrap(), 0, 0, 1500)
    }

    #[test]
    fn the_rto_follows_the_rtt_and_doubles() {
        let mut target = target();
        assert_eq!(target.rto_ms(0), 1_000);
        target.record_rtt(100);
        assert_eq!(
            [0, 1, 2, 8, 9, 40, 255].map(|n| target.rto_ms(n)),
            [200, 400, 800, 51_200, 60_000, 60_000, 60_000]
        );
        for _ in 0..100 {
            target.record_rtt(500_000);
        }
        assert!((500..520).contains(&target.rto_ms(0)), "{}", target.rto_ms(0));
        for _ in 0..100 {
            target.record_rtt(u32::MAX);
        }
        assert_eq!(target.rto_ms(3), 60_000);
    }

    #[test]
    fn path_mtu_messages_lower_the_mss_within_bounds() {
        let mut target = target();
        assert_eq!(target.mss, 1_460);
        target.lower_mtu(9_000);
        assert_eq!(target.mss, 1_460);
        target.lower_mtu(1_400);
        assert_eq!(target.mss, 1_360);
        target.lower_mtu(0);
        assert_eq!(target.mss, 536);
    }
}
