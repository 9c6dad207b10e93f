//! A running stack with its socket operations.

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
use ginnel::resource_limit::resource_limit;
use ginnel::{Shard, StopFlag};
use ginnel_posix_ops::{Ops, OpsConfig};
use rustix::io::Errno;
use rustix::process::Resource;
use std::thread::JoinHandle;

/// Default gateways: packetdrill answers for all addresses.
const GATEWAY_ADDRESSES: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(169, 254, 0, 1)), IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1))];
const DEVICE: &str = "packetdrill";
/// Maximum number of sockets, which is more than a script has. packetdrill locks all memory, so tables are no
/// larger than necessary.
const SOCKETS_MAX: u32 = 128;
const BUFFER_POOL_BYTES: u64 = 64 << 20;
/// Bytes that the channel between calls and stack buffers for a socket in each direction.
pub const CHANNEL_BYTES: usize = 64 << 10;
/// Most descriptors that are examined at the end, to close those of the stack.
const FDS_MAX: u64 = 1 << 20;

/// A running stack and its operations.
pub struct Instance {
    pub ops: Ops,
    pub tunnel: Tunnel,
    /// The settings that the stack was started with.
    pub settings: StackSettings,
    stop: StopFlag,
    thread: Option<JoinHandle<Result<(), ginnel::Error>>>,
}

/// Returns the initial settings, before those of flags and kernel are applied.
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
    /// Starts a stack whose device is the tunnel.
    ///
    /// # Errors
    /// A resource of the machine is missing, for example a descriptor.
    pub fn start(
        flags: &SoFlags,
        settings: StackSettings,
        tunnel: &Tunnel,
        clock: Clock,
    ) -> Result<Self, ginnel::Error> {
        let ops_error = |error: Errno| ginnel::Error::application(error.to_string());
        let channel = ChannelConfig {
            sockets_max: SOCKETS_MAX,
            socket_buffer_bytes: CHANNEL_BYTES as u32,
            // Without large buffers, the amount of data between stack and program is the one that scripts
            // expect.
            large_buffers_max: 0,
            ..ChannelConfig::default()
        };
        let server = ChannelServer::new(&channel)?;
        // `Ops` limits what scripts queue, so the engine's send buffers have their maximum size at once.
        let tcp =
            TcpConfig { send_buffer_first_bytes: settings.tcp.send_buffer_bytes, ..settings.tcp.clone() };
        let mut shard: Shard<ChannelServer> = Shard::builder(config_of(flags, &tcp))
            .handler(server)
            .device(DEVICE, tunnel.device(clock))
            .build()?;
        let commander = shard.commander();
        let client = shard.handler_mut().attach(Box::new(commander))?;
        let send_buffer = Some([settings.send_buffer_first, settings.tcp.send_buffer_bytes]);
        // A blocking call sleeps at once, because packetdrill checks whether it does.
        let ops = OpsConfig { spin: Duration::ZERO, send_buffer, ..OpsConfig::default() };
        let ops = Ops::new(client, ops).map_err(ops_error)?;
        let stop = StopFlag::new().map_err(io_error)?;
        let stop_flag = stop.clone();
        let thread = std::thread::Builder::new().name("ginnel".into());
        let thread = thread.spawn(move || shard.run(&stop_flag)).map_err(io_error)?;
        Ok(Self { ops, tunnel: tunnel.clone(), settings, stop, thread: Some(thread) })
    }

    /// Returns the result of a call after the stack has processed the call: in the kernel, the packets that a
    /// call causes have been sent when it returns.
    pub fn settle<T>(&self, result: Result<T, Errno>) -> Result<T, Errno> {
        self.tunnel.settle().and(result)
    }
}

fn io_error(error: std::io::Error) -> ginnel::Error {
    ginnel::Error::application(error.to_string())
}

impl Drop for Instance {
    fn drop(&mut self) {
        let end = resource_limit(Resource::Nofile).current.unwrap_or(FDS_MAX).min(FDS_MAX);
        for fd in (0..end as i32).filter(|fd| self.ops.owns(*fd)) {
            // The descriptor was found just before; errors do not matter, because the stack ends.
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

/// Returns the prefix of a single address.
fn host_prefix(ip: &IpAddr) -> Prefix {
    let bits = if ip.is_ipv4() { 32 } else { 128 };
    format!("{ip}/{bits}").parse().expect("an address with its length")
}

fn config_of(flags: &SoFlags, tcp: &TcpConfig) -> Config {
    let local: Vec<Prefix> = flags.local.iter().map(host_prefix).collect();
    let is_local_family = |gateway: &&IpAddr| flags.local.iter().any(|ip| ip.is_ipv4() == gateway.is_ipv4());
    let gateways: Vec<IpAddr> = GATEWAY_ADDRESSES.iter().filter(is_local_family).copied().collect();
    let mut config = Config::single(DeviceConfig::new(DEVICE, DeviceKind::Memory), &local, &gateways);
    config.links[0].accept_ra = false;
    config.links[0].local_networks = flags.networks.clone();
    // The first routes state that the gateways are on the link, although the stack has no address of their
    // networks.
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
