//! One stack with its operations.

use crate::clock::Clock;
use crate::so_flags::SoFlags;
use crate::sysctls::StackSettings;
use crate::tunnel::{NEIGHBOUR_MAC, Tunnel};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::time::Duration;
use ginnel::channel::{ChannelConfig, ChannelServer};
use ginnel::config::{
    Config, DeviceConfig, DeviceKind, Mac, NeighbourConfig, NetworkConfig, Prefix, RouteConfig, ShardConfig,
    TcpConfig,
};
use ginnel::{Shard, StopFlag};
use ginnel_posix_ops::{Ops, OpsConfig};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::thread::JoinHandle;

/// Where everything is sent: whoever plays the network answers for all addresses.
const GATEWAY_ADDRESSES: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(169, 254, 0, 1)), IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1))];
const DEVICE: &str = "packetdrill";
/// Sockets of a script, and more. packetdrill locks all memory, so tables are no larger than they need be.
const SOCKETS_MAX: u32 = 128;
const BUFFER_POOL_BYTES: u64 = 64 << 20;
/// Bytes that the channel between calls and stack holds of a socket, each way.
pub const CHANNEL_BYTES: usize = 64 << 10;
/// Descriptors beyond which none is looked for.
const FDS_MAX: u64 = 1 << 20;

/// A stack that runs, and what is asked of it.
pub struct Instance {
    pub ops: Ops,
    pub tunnel: Tunnel,
    /// What it was started with.
    pub settings: StackSettings,
    stop: StopFlag,
    thread: Option<JoinHandle<Result<(), ginnel::Error>>>,
}

/// Where settings begin, before flags and the kernel are looked at.
pub fn defaults() -> TcpConfig {
    TcpConfig {
        connections_max: 256,
        listeners_max: 64,
        time_wait_max: 256,
        buffer_pool_bytes: BUFFER_POOL_BYTES,
        ..TcpConfig::default()
    }
}

impl Instance {
    /// Starts a stack behind the tunnel.
    ///
    /// # Errors
    /// Something of the machine's is missing.
    pub fn start(
        flags: &SoFlags,
        settings: StackSettings,
        tunnel: &Tunnel,
        clock: Clock,
    ) -> Result<Self, ginnel::Error> {
        let no_descriptors = |error: Errno| ginnel::Error::application(error.to_string());
        let channel = ChannelConfig {
            sockets_max: SOCKETS_MAX,
            socket_buffer_bytes: CHANNEL_BYTES as u32,
            // As much stands between stack and program as scripts are written for.
            large_buffers_max: 0,
            ..ChannelConfig::default()
        };
        let server = ChannelServer::new(&channel)?;
        let mut shard: Shard<ChannelServer> = Shard::builder(config_of(flags, &settings.tcp))
            .handler(server)
            .device(DEVICE, tunnel.device(clock))
            .build()?;
        let commander = shard.commander();
        let client = shard.handler_mut().attach(Box::new(commander))?;
        // A call that waits sleeps at once: packetdrill looks whether it does.
        let send_buffer = Some([settings.send_buffer_first, settings.tcp.send_buffer_bytes]);
        let ops = OpsConfig { spin: Duration::ZERO, send_buffer, ..OpsConfig::default() };
        let ops = Ops::new(client, ops).map_err(no_descriptors)?;
        let stop = StopFlag::new().map_err(io_error)?;
        let until = stop.clone();
        let thread = std::thread::Builder::new().name("ginnel".into());
        let thread = thread.spawn(move || shard.run(&until)).map_err(io_error)?;
        Ok(Self { ops, tunnel: tunnel.clone(), settings, stop, thread: Some(thread) })
    }

    /// What came of a call, once the stack has done what the call asked for: in the kernel the packets that follow from a call have left when it returns.
    pub fn settle<T>(&self, result: Result<T, Errno>) -> Result<T, Errno> {
        self.tunnel.settle().and(result)
    }
}

fn io_error(error: std::io::Error) -> ginnel::Error {
    ginnel::Error::application(error.to_string())
}

impl Drop for Instance {
    fn drop(&mut self) {
        let most = getrlimit(Resource::Nofile).current.unwrap_or(FDS_MAX).min(FDS_MAX);
        for fd in (0..most as i32).filter(|fd| self.ops.owns(*fd)) {
            // It was found a moment ago, and the stack is going anyway.
            let _ = self.ops.close(fd);
        }
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            match thread.join() {
                Ok(Ok(())) => {}
                Ok(Err(error)) => eprintln!("packetdrill_ginnel: the stack ended early: {error}"),
                Err(_) => eprintln!("packetdrill_ginnel: the stack panicked"),
            }
        }
    }
}

/// The prefix of one address.
fn host_prefix(ip: &IpAddr) -> Prefix {
    let bits = if ip.is_ipv4() { 32 } else { 128 };
    format!("{ip}/{bits}").parse().expect("an address with its length")
}

fn config_of(flags: &SoFlags, tcp: &TcpConfig) -> Config {
    let local: Vec<Prefix> = flags.local.iter().map(host_prefix).collect();
    let families = |gateway: &&IpAddr| flags.local.iter().any(|ip| ip.is_ipv4() == gateway.is_ipv4());
    let gateways: Vec<IpAddr> = GATEWAY_ADDRESSES.iter().filter(families).copied().collect();
    let mut config = Config::single(DeviceConfig::new(DEVICE, DeviceKind::Memory), &local, &gateways);
    config.links[0].accept_ra = false;
    config.links[0].own_networks = flags.networks.clone();
    // First, that the gateways are on the link, though no address of the stack's is like theirs.
    let on_link = |ip: &IpAddr| RouteConfig {
        destination: host_prefix(ip),
        gateway: None,
        link: config.links[0].name.clone(),
        metric: 0,
    };
    let routes: Vec<RouteConfig> = gateways.iter().map(on_link).chain(config.routes.clone()).collect();
    config.routes = routes;
    config.links[0].neighbours =
        gateways.into_iter().map(|address| NeighbourConfig { address, mac: Mac(NEIGHBOUR_MAC) }).collect();
    config.tcp = tcp.clone();
    config.network = NetworkConfig {
        neighbours_max: 64,
        dad_transmits: 0,
        router_solicitations: 0,
        hop_limit: tcp.hop_limit,
        ..NetworkConfig::default()
    };
    config.shard = ShardConfig { timers_max: 1024, stop_grace_ms: 0, ..ShardConfig::default() };
    config
}
