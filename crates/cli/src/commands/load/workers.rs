//! Configurations of the generator's workers.
//!
//! A worker is a thread with a stack of its own, so each needs a device and addresses. With a server in the
//! same process a worker gets a cable to it, in a network of its own; otherwise the configuration has a link
//! for each worker.

use crate::failure::Failure;
use crate::stack_options::OwnStackOptions;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use ginnel::Config;
use ginnel::config::Prefix;
use ginnel_apps::load;

/// Connections per source address of a worker: fewer than there are ephemeral ports.
const CONNECTIONS_PER_ADDRESS: u32 = 20_000;

/// The two ends of a worker's cable.
#[derive(Debug)]
pub struct CableEnds {
    /// Configuration of the worker.
    pub worker: Config,
    /// Address and prefix length of the server on this cable.
    pub server: Prefix,
}

/// Splits a configuration into one for each worker: one link with its device. `can_serve` tells whether the
/// kind of load has the option --serve, which the error then names.
pub fn split_config(config: &Config, workers: u32, can_serve: bool) -> Result<Vec<Config>, Failure> {
    if workers == 1 {
        return Ok(vec![config.clone()]);
    }
    let apart = |i: usize| config.links[..i].iter().all(|other| other.device != config.links[i].device);
    if config.links.len() != workers as usize || !(0..config.links.len()).all(apart) {
        let serve = if can_serve { "--serve ROOT, or " } else { "" };
        return Err(Failure::usage(format!(
            "--workers {workers} needs {serve}a --config FILE with {workers} [[link]] tables, each on a [[device]] of its own"
        )));
    }
    let parts = config.links.iter().zip(0..).map(|(link, worker)| {
        let mut part = config.clone();
        part.devices.retain(|device| device.name == link.device);
        part.links = vec![link.clone()];
        part.routes.retain(|route| route.link == link.name);
        part.shard.cpu = part.shard.cpu.map(|cpu| cpu + worker);
        part
    });
    Ok(parts.collect())
}

/// Returns the cable between the only worker and the server with address `server`.
pub fn sole_cable(stack: &OwnStackOptions, server: IpAddr) -> Result<CableEnds, Failure> {
    let mut stack = stack.clone();
    if stack.address.is_empty() && stack.config.is_none() {
        stack.address.push(adjacent_address(server));
    }
    let worker = stack.to_config()?;
    let known = worker.links.iter().flat_map(|l| &l.addresses);
    let Some(prefix) = known.clone().find(|p| p.address.is_ipv4() == server.is_ipv4()) else {
        return Err(Failure::usage(format!(
            "--address: the stack has no address of the same family as the server {server}"
        )));
    };
    let server = Prefix { address: server, len: prefix.len };
    Ok(CableEnds { worker, server })
}

/// Returns a cable for each worker, each in a network of its own. All workers reach the server by the address
/// `server`. Chooses the source addresses and adds them to `load`, as many as the connections need.
pub fn worker_cables(
    stack: &OwnStackOptions,
    load: &mut load::CommonOptions,
    server: IpAddr,
) -> Result<Vec<CableEnds>, Failure> {
    let given = [
        ("--config", stack.config.is_some()),
        ("--address", !stack.address.is_empty()),
        ("--gateway", !stack.gateway.is_empty()),
        ("--capture", stack.capture.is_some()),
        ("--source", !load.source.is_empty()),
    ];
    if let Some((option, _)) = given.into_iter().find(|(_, given)| *given) {
        return Err(Failure::usage(format!(
            "{option} cannot be combined with --serve and --workers {}, which choose devices and addresses themselves",
            load.workers()
        )));
    }
    let addresses = load.connections.div_ceil(load.workers()).div_ceil(CONNECTIONS_PER_ADDRESS);
    let mut cables = Vec::new();
    for worker in 0..load.workers() {
        let prefix =
            Prefix { address: in_nth_network(server, worker), len: if server.is_ipv4() { 16 } else { 64 } };
        let mut own = stack.clone();
        own.address.push(Prefix { address: client_address(prefix.address, 0), len: prefix.len });
        if worker > 0 {
            own.gateway.push(prefix.address);
        }
        own.cpu = stack.cpu.map(|cpu| cpu + worker);
        own.link_seed = stack.link_seed.map(|seed| seed.wrapping_add(worker.into()));
        let (first, last) =
            (client_address(prefix.address, 0), client_address(prefix.address, addresses - 1));
        load.source.push(format!("{first}-{last}").parse().map_err(Failure::usage)?);
        cables.push(CableEnds { worker: own.to_config()?, server: prefix });
    }
    Ok(cables)
}

/// Returns the address with the network part moved to the `n`-th following network (/16 or /64).
fn in_nth_network(address: IpAddr, n: u32) -> IpAddr {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, c, d] = v4.octets();
            [a, b.wrapping_add(n as u8), c, d].into()
        }
        IpAddr::V6(v6) => {
            let mut segments = v6.segments();
            segments[3] = segments[3].wrapping_add(n as u16);
            segments.into()
        }
    }
}

/// Returns the `n`-th address (`n` below 32,000) of the half of the network that does not contain `address`.
fn client_address(address: IpAddr, n: u32) -> IpAddr {
    const HALF: u32 = 1 << 15;
    match address {
        IpAddr::V4(v4) => Ipv4Addr::from_bits(((v4.to_bits() ^ HALF) & !(HALF - 1)) + 1 + n).into(),
        IpAddr::V6(v6) => {
            let half = u128::from(HALF);
            Ipv6Addr::from_bits(((v6.to_bits() ^ half) & !(half - 1)) + 1 + u128::from(n)).into()
        }
    }
}

/// Returns another address of the network of `address`, with a prefix length that covers both.
fn adjacent_address(address: IpAddr) -> Prefix {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, c, d] = v4.octets();
            Prefix { address: [a, b, c, if d < 254 { d + 1 } else { d - 1 }].into(), len: 8 }
        }
        IpAddr::V6(v6) => {
            let mut octets = v6.octets();
            octets[15] ^= 0x80;
            Prefix { address: octets.into(), len: 64 }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{client_address, in_nth_network, split_config};
    use ginnel::Config;
    use ginnel::config::{DeviceConfig, DeviceKind, LinkConfig, RouteConfig};

    #[test]
    fn workers_of_a_server_have_separate_networks() {
        let table = [
            ("10.0.0.1", 1, "10.1.0.1", "10.1.128.1", "10.1.128.3"),
            ("10.255.200.9", 2, "10.1.200.9", "10.1.0.1", "10.1.0.3"),
            ("fd00::1", 3, "fd00:0:0:3::1", "fd00:0:0:3::8001", "fd00:0:0:3::8003"),
        ];
        for (server, worker, prefix, first, third) in table {
            let address = in_nth_network(server.parse().unwrap(), worker);
            assert_eq!(address.to_string(), prefix);
            assert_eq!([0, 2].map(|n| client_address(address, n).to_string()), [first, third]);
        }
    }

    #[test]
    fn each_worker_gets_one_link_of_the_configuration() {
        let mut config = Config::default();
        config.shard.cpu = Some(2);
        for name in ["a", "b"] {
            config.devices.push(DeviceConfig::new(name, DeviceKind::Tap));
            config.links.push(LinkConfig::new(format!("on-{name}"), name, Vec::new()));
            config.routes.push(RouteConfig {
                destination: "10.0.0.0/8".parse().unwrap(),
                gateway: None,
                link: format!("on-{name}"),
                metric: 0,
            });
        }
        let parts = split_config(&config, 2, true).unwrap();
        for (part, (name, cpu)) in parts.iter().zip([("a", 2), ("b", 3)]) {
            assert_eq!((part.devices.len(), part.links.len(), part.routes.len()), (1, 1, 1));
            assert_eq!((part.devices[0].name.as_str(), part.links[0].device.as_str()), (name, name));
            assert_eq!((&part.routes[0].link, part.shard.cpu), (&part.links[0].name, Some(cpu)));
        }
        assert_eq!(split_config(&config, 1, true).unwrap(), [config.clone()]);
        assert!(split_config(&config, 3, true).is_err());
        config.links[1].device = "a".into();
        assert!(split_config(&config, 2, true).is_err(), "two stacks cannot have one device");
    }
}
