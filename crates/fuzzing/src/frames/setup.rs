//! The stack under test, configured by the first word of the input, and its device.

use super::build::{self, GATEWAY, HOSTS, LOCAL_MAC, LOCAL_V4, LOCAL_V6};
use super::word::Word;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use ginnel_stack::device::{Capabilities, TxMeta, TxQueue};
use ginnel_stack::handle::{LinkId, PortId};
use ginnel_stack::ip::{NetworkConfig, RouteConfig};
use ginnel_stack::link::LinkConfig;
use ginnel_stack::stack::{Stack, StackConfig};
use ginnel_stack::tcp::config::{CongestionControl, EcnMode, SynCookies, TcpConfig};
use ginnel_stack::time::Instant;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bits of the first word's bytes `a`, `b` and `c` that select deviations from the default setup.
pub mod variant {
    /// `a`: small limits for connections, half-open connections, TIME_WAIT entries and listeners.
    pub const SMALL_TABLES: u8 = 1;
    /// `a`: SYN cookies always.
    pub const COOKIES_ALWAYS: u8 = 2;
    /// `a`: SYN cookies never.
    pub const COOKIES_NEVER: u8 = 4;
    /// `a`: minimum buffer pool.
    pub const SMALL_POOL: u8 = 8;
    /// `a`: minimum socket buffers.
    pub const SMALL_BUFFERS: u8 = 16;
    /// `a`: few retries, and short TIME_WAIT and FIN time-outs.
    pub const SHORT_TIMEOUTS: u8 = 32;
    /// `b`: no timestamps.
    pub const NO_TIMESTAMPS: u8 = 1;
    /// `b`: no SACK.
    pub const NO_SACK: u8 = 2;
    /// `b`: no window scaling.
    pub const NO_SCALING: u8 = 4;
    /// `b`: ECN is requested.
    pub const ECN: u8 = 8;
    /// `b`: NewReno.
    pub const NEW_RENO: u8 = 16;
    /// `b`: ACKs of invalid segments are not rate-limited.
    pub const NO_ACK_RATE_LIMIT: u8 = 32;
    /// `b`: BBR, unless `NEW_RENO` is set.
    pub const BBR: u8 = 64;
    /// `c`: MTU 1,500, 576 (IPv4 only), 1,280 or 9,000.
    pub const MTU: u8 = 3;
    /// `c`: the device completes checksums and segments super-frames.
    pub const OFFLOAD: u8 = 4;
    /// `c`: the link is a VLAN.
    pub const VLAN: u8 = 8;
    /// `c`: no static neighbour entries.
    pub const RESOLVE_NEIGHBOURS: u8 = 16;
    /// `c`: duplicate address detection and router solicitations.
    pub const AUTOCONF: u8 = 32;
    /// `c`: minimum limits of the network layer.
    pub const SMALL_NETWORK: u8 = 64;
}

/// State of the device.
#[derive(Default)]
pub struct DeviceState {
    /// Frames sent and not yet inspected.
    pub sent: Vec<(Vec<u8>, TxMeta)>,
    /// Number of frames that the device takes until the next turn; `None` is unlimited.
    pub capacity: Option<usize>,
}

struct FuzzTx {
    device: Arc<Mutex<DeviceState>>,
    capabilities: Capabilities,
    frame: Vec<u8>,
}

fn lock(device: &Mutex<DeviceState>) -> MutexGuard<'_, DeviceState> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

impl TxQueue for FuzzTx {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        let bytes_max = (self.capabilities.mtu + 18).max(self.capabilities.gso_bytes_max);
        assert!(len <= bytes_max, "{len} bytes requested, the device accepts {bytes_max}");
        if lock(&self.device).capacity == Some(0) {
            return None;
        }
        // A device's buffer contains arbitrary old bytes.
        self.frame.clear();
        self.frame.resize(len, 0xa5);
        Some(&mut self.frame)
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        let mut device = lock(&self.device);
        if let Some(capacity) = &mut device.capacity {
            *capacity -= 1;
        }
        device.sent.push((self.frame[..len].to_vec(), meta));
    }

    fn flush(&mut self, _now: Instant) {}
}

/// A stack with its device and configuration.
pub struct Setup {
    /// The stack.
    pub stack: Stack,
    /// The device.
    device: Arc<Mutex<DeviceState>>,
    /// The port of the device.
    pub port: PortId,
    /// VLAN of the link.
    pub vlan: Option<u16>,
    /// MTU of the link in bytes.
    pub mtu: usize,
    /// Offloads of the device.
    pub capabilities: Capabilities,
    /// Configured limits of TCP.
    pub tcp: TcpConfig,
    /// Configured limits of the network layer.
    pub network: NetworkConfig,
    /// The simulated time.
    pub now: Instant,
}

fn tcp_config(word: &Word) -> TcpConfig {
    let (a, b) = (word.a, word.b);
    let small_tables = a & variant::SMALL_TABLES != 0;
    let buffer = if a & variant::SMALL_BUFFERS != 0 { 4096 } else { 1 << 20 };
    let short_timeouts = a & variant::SHORT_TIMEOUTS != 0;
    TcpConfig {
        connections_max: if small_tables { 6 } else { 64 },
        half_open_max: if small_tables { 2 } else { 32 },
        time_wait_max: if small_tables { 2 } else { 32 },
        listeners_max: if small_tables { 2 } else { 16 },
        buffer_pool_bytes: if a & variant::SMALL_POOL != 0 { 1 << 16 } else { 4 << 20 },
        recv_buffer_bytes: buffer,
        send_buffer_bytes: buffer,
        syn_cookies: match a & (variant::COOKIES_ALWAYS | variant::COOKIES_NEVER) {
            variant::COOKIES_ALWAYS => SynCookies::Always,
            variant::COOKIES_NEVER => SynCookies::Off,
            _ => SynCookies::Auto,
        },
        fastopen: 3,
        timestamps: b & variant::NO_TIMESTAMPS == 0,
        sack: b & variant::NO_SACK == 0,
        window_scaling: b & variant::NO_SCALING == 0,
        ecn: if b & variant::ECN == 0 { EcnMode::Passive } else { EcnMode::Active },
        congestion_control: match b & (variant::NEW_RENO | variant::BBR) {
            0 => CongestionControl::Cubic,
            variant::BBR => CongestionControl::Bbr,
            _ => CongestionControl::NewReno,
        },
        invalid_ack_interval_ms: if b & variant::NO_ACK_RATE_LIMIT == 0 { 500 } else { 0 },
        time_wait_seconds: if short_timeouts { 1 } else { 60 },
        fin_timeout_seconds: if short_timeouts { 2 } else { 60 },
        retries: if short_timeouts { 3 } else { 15 },
        syn_retries: if short_timeouts { 2 } else { 6 },
        synack_retries: if short_timeouts { 1 } else { 5 },
        ..TcpConfig::default()
    }
}

fn network_config(word: &Word) -> NetworkConfig {
    let autoconf = word.c & variant::AUTOCONF != 0;
    let small = word.c & variant::SMALL_NETWORK != 0;
    let config = NetworkConfig {
        dad_transmits: autoconf.into(),
        router_solicitations: if autoconf { 3 } else { 0 },
        ..NetworkConfig::default()
    };
    if !small {
        return config;
    }
    NetworkConfig {
        neighbours_max: 16,
        neighbour_pending_bytes: 2048,
        neighbour_pending_total_bytes: 4096,
        fragment_bytes: 65_536,
        path_mtu_entries: 1,
        icmp_errors_per_second: 10,
        icmp_errors_burst: 1,
        errors_max: 1,
        autoconf_addresses_max: 1,
        autoconf_routes_max: 1,
        udp_sockets_max: 3,
        udp_receive_bytes: 2048,
        udp_receive_total_bytes: 65_536,
        udp_port_first: 50_000,
        udp_port_last: 50_001,
        ..config
    }
}

impl Setup {
    /// Locks the state of the device.
    pub fn device(&self) -> MutexGuard<'_, DeviceState> {
        lock(&self.device)
    }

    /// Creates the stack that the first word selects.
    pub fn new(word: &Word) -> Self {
        let c = word.c;
        let mtu = [1500, 576, 1280, 9000][usize::from(c & variant::MTU)];
        let offload = c & variant::OFFLOAD != 0;
        let capabilities = Capabilities {
            mac: LOCAL_MAC.0,
            mtu,
            tx_checksum: offload,
            gso_bytes_max: if offload { 65_550 } else { 0 },
            uso: offload,
            labels: offload,
        };
        let tcp = tcp_config(word);
        let network = network_config(word);
        let config = StackConfig { network: network.clone(), tcp: tcp.clone() };
        let now = Instant::from_millis(word.x.into());
        let mut seed = [7; 32];
        seed[..4].copy_from_slice(&word.y.to_le_bytes());
        let mut stack = Stack::new(config, seed, now).expect("the configuration is valid");
        let device = Arc::new(Mutex::new(DeviceState::default()));
        let port =
            stack.add_port(Box::new(FuzzTx { device: device.clone(), capabilities, frame: Vec::new() }));
        let vlan = (c & variant::VLAN != 0).then_some(5);
        add_link(&mut stack, port, vlan, mtu >= 1280, c);
        Self { stack, device, port, vlan, mtu, capabilities, tcp, network, now }
    }
}

fn add_link(stack: &mut Stack, port: PortId, vlan: Option<u16>, v6: bool, c: u8) {
    let mut link = LinkConfig {
        name: "fuzz".into(),
        addresses: vec![(LOCAL_V4.into(), 24)],
        vlan,
        accept_ra: v6 && c & variant::AUTOCONF != 0,
        ..LinkConfig::default()
    };
    if v6 {
        link.addresses.push((LOCAL_V6.into(), 64));
    }
    if c & variant::RESOLVE_NEIGHBOURS == 0 {
        for host in 0..=HOSTS {
            let (v4_address, v6_address) = build::on_link(host);
            link.static_neighbours.push((v4_address.into(), build::mac(host)));
            if v6 {
                link.static_neighbours.push((v6_address.into(), build::mac(host)));
            }
        }
    }
    let id = stack.add_link(port, &link).expect("the link is valid");
    let (v4_gateway, v6_gateway) = build::on_link(GATEWAY);
    default_route(stack, id, Ipv4Addr::UNSPECIFIED.into(), v4_gateway.into());
    if v6 {
        default_route(stack, id, Ipv6Addr::UNSPECIFIED.into(), v6_gateway.into());
    }
}

fn default_route(stack: &mut Stack, link: LinkId, destination: IpAddr, gateway: IpAddr) {
    let route = RouteConfig { destination, prefix: 0, gateway: Some(gateway), link, metric: 0 };
    stack.add_route(route).expect("the route is valid");
}
