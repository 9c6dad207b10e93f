//! The configuration: one TOML file, or the same values built in code. Every key is documented in
//! `docs/configuration.md`.

mod device_shards;
mod file;
mod priority;
mod run;
mod shards;
mod steering;
mod values;

pub use file::{ADDRESS_PROBLEMS, FileError, ProgramKey};
pub use priority::{PayloadRule, PriorityConfig, PriorityRule};
pub use run::{ListenSpawnMode, RunConfig};
pub use shards::ShardsConfig;
pub use steering::{OpenedSteering, SteeringConfig, SteeringMode, SteeringRule};
pub use values::{Mac, Prefix};

pub use crate::channel::ChannelConfig;
use core::net::IpAddr;
use core::ops::RangeInclusive;
pub use ginnel_devices::af_xdp::AfXdpOptions;
use ginnel_devices::capture;
pub use ginnel_devices::dpdk::DpdkOptions;
pub use ginnel_devices::faults::LinkSpec;
pub use ginnel_devices::memif::MemifConfig;
use ginnel_stack::error::ConfigError;
pub use ginnel_stack::ip::config::NetworkConfig;
pub use ginnel_stack::tcp::config::TcpConfig;
use serde::Deserialize;
use std::path::PathBuf;

/// The configuration of a stack.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Each shard and its application.
    pub shard: ShardConfig,
    /// The number of shards, and what they share.
    pub shards: ShardsConfig,
    /// How other processes see the stack.
    pub run: RunConfig,
    /// Owner of 127.0.0.0/8 and ::1 for programs on the stack (`ginnel run`): `kernel`, or `stack` for a
    /// loopback inside the stack, by which a program reaches itself and the other programs on the stack.
    /// Default `kernel`. The stack's own addresses are reached inside the stack with either value.
    pub loopback: Loopback,
    /// The channel between a shard and applications on other threads or in other processes.
    pub channel: ChannelConfig,
    /// Which frames are urgent.
    pub priority: PriorityConfig,
    /// Which shard owns which connections.
    pub steering: SteeringConfig,
    /// ARP, NDP, ICMP, fragments, path MTU and UDP.
    pub network: NetworkConfig,
    /// TCP.
    pub tcp: TcpConfig,
    /// Devices, which receive and transmit frames.
    #[serde(rename = "device")]
    pub devices: Vec<DeviceConfig>,
    /// Links: a device, or one VLAN of it, with its addresses.
    #[serde(rename = "link")]
    pub links: Vec<LinkConfig>,
    /// Routes beyond the links' own networks.
    #[serde(rename = "route")]
    pub routes: Vec<RouteConfig>,
}

/// Where an application runs, relative to its shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// In the shard's thread.
    #[default]
    Inline,
    /// In a thread of its own on the shard's CPU. Neither thread polls while the other has work.
    Paired,
    /// In a thread of its own on another CPU.
    Split,
}

/// Owner of the loopback addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Loopback {
    /// The kernel.
    #[default]
    Kernel,
    /// The stack.
    Stack,
}

/// Keys of the `[shard]` table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ShardConfig {
    /// Pins the shard to this CPU, which must be in the affinity mask of the process, or isolated: 0 to
    /// 1,023. Default: not pinned.
    pub cpu: Option<u32>,
    /// Where the application runs. `inline`: in the shard's thread, which is the fastest if the application
    /// never blocks or computes for long. `paired`: in a thread of its own on the shard's CPU; neither thread
    /// polls while the other has work. `split`: in a thread of its own on another CPU. Default `inline`.
    pub placement: Placement,
    /// Pins the application to this CPU if it has a thread of its own: 0 to 1,023. Default: the shard's CPU
    /// with `paired`, not pinned with `split`.
    pub application_cpu: Option<u32>,
    /// With `paired`: gives the stack's thread the lowest real-time priority (`SCHED_RR`) if the system
    /// permits that (`CAP_SYS_NICE`, or an `RLIMIT_RTPRIO` of 1), so that an application that computes does
    /// not delay it. Default true.
    pub paired_realtime: bool,
    /// With `paired`: how long either thread works after it was woken before it yields to the other, in
    /// microseconds: 10 to 1,000,000. After that the stack's thread continues without real-time priority
    /// until it has nothing to do. Default 500.
    pub paired_work_us: u32,
    /// Worker threads, each with an application of its own: 0 to 64. Connections are distributed to the
    /// workers, and a worker that computes or waits delays only its own connections. With 0, the application
    /// runs where `placement` says. Default 0.
    pub workers: u32,
    /// Pins the workers to these CPUs, one for each, the workers of the first shard first. Default: not
    /// pinned.
    pub worker_cpus: Vec<u32>,
    /// How long an idle shard polls before it sleeps in the kernel, in microseconds: 0 to 1,000,000. With 0
    /// it sleeps at once. Default 50.
    pub spin_us: u32,
    /// Least time between the starts of two turns of a shard that has little to do, in microseconds: 0 to
    /// 10,000. The shard then works on what has arrived in the meantime at once and sleeps in between, which
    /// saves processor time at a moderate load. Each frame, timer and call waits for up to this long in each
    /// thread that serves it, and for about 50 microseconds more until the kernel wakes the thread. A shard
    /// that receives full bursts, or has work left, does not wait, nor does one that a program drives by a
    /// loop of its own; with 0 no shard does. Default 0.
    pub coalesce_us: u32,
    /// Commands from other threads that may wait: 1 to 1,048,576. Default 1,024.
    pub commands_max: u32,
    /// Timers of the application that may be set: 1 to 100,000,000. Default 1,000,000.
    pub timers_max: u32,
    /// How long the application may take to end after it was asked to stop, in milliseconds: 0 to 3,600,000.
    /// Default 2,000.
    pub stop_grace_ms: u32,
    /// Touches the tables of connections at the start, as large as `tcp.connections_max` and
    /// `tcp.time_wait_max` allow, so that no page fault delays packets later. The stack then has this memory
    /// from the start on, and does not start without it. Requires Linux 5.14. Default false.
    pub prefault: bool,
}

impl Default for ShardConfig {
    fn default() -> Self {
        Self {
            cpu: None,
            placement: Placement::Inline,
            application_cpu: None,
            paired_realtime: true,
            paired_work_us: 500,
            workers: 0,
            worker_cpus: Vec::new(),
            spin_us: 50,
            coalesce_us: 0,
            commands_max: 1024,
            timers_max: 1_000_000,
            stop_grace_ms: 2000,
            prefault: false,
        }
    }
}

/// Kind of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// A cable inside the process. The program supplies the other end.
    #[default]
    Memory,
    /// A TAP interface of the kernel.
    Tap,
    /// Shared memory with another process.
    Memif,
    /// Queues of a network interface of the kernel.
    #[serde(rename = "af_xdp")]
    AfXdp,
    /// A port of DPDK, whose drivers run in this process.
    Dpdk,
}

/// Keys of a `[[device]]` table.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceConfig {
    /// The name by which links refer to the device.
    pub name: String,
    /// `memory`, `tap`, `memif`, `af_xdp` or `dpdk`.
    pub kind: DeviceKind,
    /// Name of the interface. A `tap` attaches to the interface if it exists, and creates it otherwise; for
    /// `af_xdp` the interface must exist and be up. For `dpdk` it is the name of the port: a PCI address
    /// (`0000:03:00.0`) or a virtual device (`net_tap0`). Default: the name of the device.
    #[serde(default)]
    pub interface: Option<String>,
    /// Addresses of the kernel's side of a `tap`: `["10.1.0.1/24"]`. Default: none.
    #[serde(default)]
    pub kernel_addresses: Vec<Prefix>,
    /// Largest IP packet in bytes, without the Ethernet header: 68 to 65,521. Default: the MTU of the
    /// interface; 1,500 for a new interface, `memory` and `memif`.
    #[serde(default)]
    pub mtu: Option<u32>,
    /// How a `memif` finds its peer: `"socket=/run/lan,role=server"`. `socket` is a path, or `@` and an
    /// abstract name; `role` is `server`, which listens, or `client`, which connects and supplies the memory.
    /// Optional are `id=N` (equal at both ends; 0), `secret=WORD` (1 to 24 bytes; none), `queues=N` (one for
    /// each shard; a single shard may have several; 1) and, for a client, `ring=N` (descriptors of a ring, a
    /// power of two up to 16,384; 1,024) and `buffer=N` (bytes, a multiple of 64 up to 65,536; 2,048). Both
    /// ends need the same number of queues: what a shard sends on a queue that the other end lacks is
    /// dropped. Default: none; a `memif` requires it.
    #[serde(default, deserialize_with = "values::optional_text")]
    pub memif: Option<MemifConfig>,
    /// How an `af_xdp` device uses its interface: `"queues=0-3,take=ports,ports=80+443"`. `queues=N-M+K`
    /// are the interface's queues, one for each shard; a single shard may have several. Default: all queues
    /// for a single shard, otherwise one for each shard, from 0 on. `take=addresses`, which applies if
    /// `take` is not given, redirects the addresses of the links to the stack; the host must not have them.
    /// `take=ports` shares the addresses of the host: the stack gets `ports=N-M+K` and its ephemeral ports,
    /// TCP and UDP, which must not be ephemeral ports of the host. `take=all` redirects all frames.
    /// `mode=auto`, `copy` or `zerocopy` and `attach=auto`, `driver` or `generic` choose the support by the
    /// driver (both `auto`). `ring=N`: descriptors of a ring, a power of two from 64 to 32,768 (2,048).
    /// `need_wakeup=on` or `off`: call the kernel only when it asks for that (on). `busy_poll=N`: the
    /// driver works inside of the shard's system calls, for N microseconds each (0: off), on
    /// `busy_budget=N` packets (64). `partial_checksums=auto`, `on` or `off`: accept frames of local senders
    /// that left the checksum to the device (auto: if the interface is a veth or virtio interface).
    /// `rss=auto` or `off`: connections belong to the shards to which the interface delivers their packets
    /// by its own hash, if its driver tells that (auto). `port_filters=auto`, `on` or `off`: with
    /// `steering.opened = "port-bits"`, set filters in the adapter, and remove them at the end (auto: log if
    /// the driver refuses; on: that is an error). docs/adr/0016-af-xdp.md has the details. Default:
    /// all of these defaults.
    #[serde(default, deserialize_with = "values::optional_text")]
    pub af_xdp: Option<AfXdpOptions>,
    /// How a `dpdk` device uses its port: `"args=iface=eth0+qpairs=2,huge=off"`. `args=K=V+K=V` are
    /// arguments of the driver. `queues=N`: one for each shard; a single shard may have several (1).
    /// `ring=N`: descriptors of a ring, 64 to 32,768 within the limits of the port (1,024). `buffers=N`:
    /// buffers of a queue, up to 1,048,576, and at least 1,024 more than both rings have (8,192, or more for
    /// large rings). `poll_us=N`: an idle shard looks at the port every N microseconds at least, 1 to
    /// 1,000,000 (1,000). `partial_checksums=auto`, `on` or `off`: accept frames of local senders that left
    /// the checksum to the device (auto: if the driver marks them, or `iface=` is a veth or virtio
    /// interface). The other keys start EAL, once for all devices: `huge=auto`, `on` or `off`: memory in
    /// huge pages (auto: if enough are free). `memory_mib=N`: memory for rings and buffers, 32 to 1,048,576
    /// MiB (256). `eal=ARG+ARG`: further arguments of EAL. docs/dpdk.md has the details. Default: all of
    /// these defaults.
    #[serde(default, deserialize_with = "values::optional_text")]
    pub dpdk: Option<DpdkOptions>,
    /// MAC address of the stack's side of a `tap`, `memif` or `dpdk`: `02:00:00:00:00:01`. Default: for a
    /// `tap` that of the kernel's side with the last bit flipped; for a `memif` one derived from its socket,
    /// id and role; for `dpdk` that of the port.
    #[serde(default)]
    pub mac: Option<Mac>,
    /// Shards that serve the device, each below `shards.count`: `[0, 1]`. The device has a queue for each of
    /// them, in this order; TCP packets that it receives neither wake nor cost the others, and connections to
    /// and from the addresses of its links belong to these shards. Default: all shards.
    #[serde(default)]
    pub shards: Option<Vec<u8>>,
    /// Use checksum and segmentation offloads of the device. Default true.
    #[serde(default = "default_true")]
    pub offload: bool,
    /// Faults in both directions: `"delay=20ms loss=1%"`; `up.` or `down.` before a key restricts it to one.
    /// `delay`, `jitter` and `reorder-delay` are times, `rate` is in bits per second, `gap` is the shortest
    /// time from one frame to the next, `loss`, `duplicate`, `reorder` and `corrupt` are shares,
    /// `loss-burst` is the mean number of consecutive losses, `limit` (frames) and `limit-bytes` bound the
    /// queue in front of the link. Default: none.
    #[serde(default, deserialize_with = "values::optional_text")]
    pub faults: Option<LinkSpec>,
    /// Seed of the faults; equal seeds produce equal faults: 0 to 2^64-1. Default 1.
    #[serde(default = "default_seed")]
    pub faults_seed: u64,
    /// Captures frames to this file (pcapng). Default: none.
    #[serde(default)]
    pub capture: Option<PathBuf>,
    /// Filter of the capture, in a subset of tcpdump's language: `"tcp port 80 and not host 10.0.0.9"`.
    /// Supported are `and`, `or`, `not`, parentheses, `host`, `net` and `port` (each optionally after `src`
    /// or `dst`), `ip`, `ip6`, `arp`, `icmp`, `icmp6`, `tcp` and `udp`. Default: all frames.
    #[serde(default)]
    pub capture_filter: Option<String>,
    /// Bytes of each frame that are captured: 14 to 262,144. Default 262,144.
    #[serde(default = "default_snaplen")]
    pub capture_snaplen_bytes: u32,
    /// Captures to a ring of this many files instead of one file that grows: 2 to 1,000,000. The files of
    /// `trace.pcapng` are `trace-00001.pcapng` and so on; when one is full, the next begins and the oldest is
    /// removed. Default: one file.
    #[serde(default)]
    pub capture_files: Option<u32>,
    /// Size of a file of the ring in bytes: 65,536 to 2^40. Default 64 MiB.
    #[serde(default = "default_capture_file")]
    pub capture_file_bytes: u64,
}

impl DeviceConfig {
    /// Creates a device with default values.
    pub fn new(name: impl Into<String>, kind: DeviceKind) -> Self {
        Self {
            name: name.into(),
            kind,
            interface: None,
            kernel_addresses: Vec::new(),
            mtu: None,
            memif: None,
            af_xdp: None,
            dpdk: None,
            mac: None,
            shards: None,
            offload: true,
            faults: None,
            faults_seed: default_seed(),
            capture: None,
            capture_filter: None,
            capture_snaplen_bytes: default_snaplen(),
            capture_files: None,
            capture_file_bytes: default_capture_file(),
        }
    }
}

/// Keys of a `[[link]]` table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkConfig {
    /// The name by which routes refer to the link.
    pub name: String,
    /// The device of the link.
    pub device: String,
    /// VLAN identifier: 1 to 4,094. Default: untagged frames.
    #[serde(default)]
    pub vlan: Option<u16>,
    /// Largest IP packet in bytes, not above that of the device: 68 to 65,521. Default: that of the device.
    #[serde(default)]
    pub mtu: Option<u32>,
    /// Addresses with prefix lengths: `["10.0.0.1/24", "fd00::1/64"]`. Default: none.
    #[serde(default)]
    pub addresses: Vec<Prefix>,
    /// Networks all of whose addresses belong to the stack, as with Linux's `local` routes. Routers must
    /// route them to the stack. Default: none.
    #[serde(default)]
    pub local_networks: Vec<Prefix>,
    /// Accept IPv6 addresses and routes from router advertisements. Default true.
    #[serde(default = "default_true")]
    pub accept_ra: bool,
    /// Static neighbours, which need no ARP or NDP. Default: none.
    #[serde(default, rename = "neighbour")]
    pub neighbours: Vec<NeighbourConfig>,
}

impl LinkConfig {
    /// Creates a link with these addresses and otherwise default values.
    pub fn new(name: impl Into<String>, device: impl Into<String>, addresses: Vec<Prefix>) -> Self {
        Self {
            name: name.into(),
            device: device.into(),
            vlan: None,
            mtu: None,
            addresses,
            local_networks: Vec::new(),
            accept_ra: true,
            neighbours: Vec::new(),
        }
    }
}

/// Keys of a `[[link.neighbour]]` table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NeighbourConfig {
    /// IP address of the neighbour.
    pub address: IpAddr,
    /// MAC address of the neighbour.
    pub mac: Mac,
}

/// Keys of a `[[route]]` table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteConfig {
    /// The destination network; `"0.0.0.0/0"` or `"::/0"` for a default route.
    pub destination: Prefix,
    /// The next hop. Default: the destinations are on the link itself.
    #[serde(default)]
    pub gateway: Option<IpAddr>,
    /// The link of the route.
    pub link: String,
    /// Of the routes with the longest matching prefix, the one with the smallest metric is used: 0 to 2^32-1.
    /// Default 0.
    #[serde(default)]
    pub metric: u32,
}

fn default_true() -> bool {
    true
}

fn default_seed() -> u64 {
    1
}

fn default_snaplen() -> u32 {
    capture::SNAPLEN_MAX
}

fn default_capture_file() -> u64 {
    64 << 20
}

impl Config {
    /// Reads and validates a file. The error is one line with the file, the line and the key.
    pub fn from_file(path: &std::path::Path) -> Result<Self, FileError> {
        file::read(path)
    }

    /// As [`from_file`](Self::from_file), for a file that may also have a table with options of a program.
    /// Returns the keys of that table, which are not checked.
    pub fn from_file_with_program(
        path: &std::path::Path,
        program: &str,
    ) -> Result<(Self, Vec<ProgramKey>), FileError> {
        file::read_with_program(path, program)
    }

    /// Parses and validates a text. `name` is the name of the file in errors.
    pub fn from_toml(name: &str, text: &str) -> Result<Self, FileError> {
        file::parse(name, text)
    }

    /// Creates a configuration with one device, one link with these addresses, and a default route through
    /// each gateway.
    pub fn single(device: DeviceConfig, addresses: &[Prefix], gateways: &[IpAddr]) -> Self {
        let link = LinkConfig::new("link0", device.name.clone(), addresses.to_vec());
        let routes = gateways.iter().map(|&gateway| RouteConfig {
            destination: Prefix::everything(gateway.is_ipv4()),
            gateway: Some(gateway),
            link: "link0".into(),
            metric: 0,
        });
        Self { routes: routes.collect(), devices: vec![device], links: vec![link], ..Self::default() }
    }

    /// Validates all ranges, and all references between tables. The error names the key.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.shard.validate()?;
        self.shards.validate(&self.shard)?;
        self.channel.validate()?;
        self.run.validate()?;
        self.priority.validate()?;
        self.steering.validate(self.shards.count)?;
        self.network.validate()?;
        self.tcp.validate()?;
        for (i, device) in self.devices.iter().enumerate() {
            let key = |k: &str| format!("device[{i}].{k}");
            if device.name.is_empty() {
                return Err(ConfigError::new(key("name"), "is empty"));
            }
            if self.devices[..i].iter().any(|d| d.name == device.name) {
                let problem = format!("another device is named \"{}\"", device.name);
                return Err(ConfigError::new(key("name"), problem));
            }
            if let Some(mtu) = device.mtu {
                within(key("mtu"), mtu, 68..=65_521)?;
            }
            device.validate_kind().map_err(|(name, problem)| ConfigError::new(key(name), problem))?;
            let is_dpdk = |device: &DeviceConfig| device.kind == DeviceKind::Dpdk;
            let mut others = self.devices[..i].iter().filter(|other| is_dpdk(other) && is_dpdk(device));
            if let Some(other) = others.find(|other| other.interface() == device.interface()) {
                let port = device.interface();
                let problem = format!("the port {port} belongs to the device \"{}\" already", other.name);
                return Err(ConfigError::new(key("interface"), problem));
            }
            device.validate_capture(key)?;
        }
        for (i, link) in self.links.iter().enumerate() {
            self.validate_link(i, link)?;
        }
        self.validate_device_shards()?;
        self.validate_kernel_addresses()?;
        for (i, route) in self.routes.iter().enumerate() {
            let key = |k: &str| format!("route[{i}].{k}");
            if !self.links.iter().any(|l| l.name == route.link) {
                let problem = format!("there is no link named \"{}\"", route.link);
                return Err(ConfigError::new(key("link"), problem));
            }
            if let Some(gateway) = route.gateway {
                self.validate_gateway(gateway, route)
                    .map_err(|problem| ConfigError::new(key("gateway"), problem))?;
            }
        }
        Ok(())
    }

    fn validate_gateway(&self, gateway: IpAddr, route: &RouteConfig) -> Result<(), String> {
        if gateway.is_ipv4() != route.destination.address.is_ipv4() {
            return Err("has another address family than the destination".into());
        }
        let mut addresses = self.links.iter().flat_map(|l| &l.addresses);
        if addresses.any(|a| a.address == gateway) {
            return Err(format!("{gateway} is an address of the stack"));
        }
        let link_local = matches!(gateway, IpAddr::V6(gateway) if gateway.is_unicast_link_local());
        let link = self.links.iter().filter(|l| l.name == route.link);
        let mut networks = link.flat_map(|l| &l.addresses);
        let direct = |r: &RouteConfig| r.gateway.is_none() && r.link == route.link;
        let mut routes = self.routes.iter().filter(|r| direct(r));
        let is_neighbour = networks.any(|network| network.contains(gateway))
            || routes.any(|route| route.destination.contains(gateway));
        if link_local || is_neighbour {
            return Ok(());
        }
        Err(format!("{gateway} is in no network of link \"{}\"", route.link))
    }

    /// Validates that the kernel's side of a TAP device has other addresses than the stack: the kernel would
    /// answer in its place.
    fn validate_kernel_addresses(&self) -> Result<(), ConfigError> {
        let own: Vec<IpAddr> = self.links.iter().flat_map(|l| &l.addresses).map(|a| a.address).collect();
        for (i, device) in self.devices.iter().enumerate() {
            let mut addresses = device.kernel_addresses.iter().map(|prefix| prefix.address);
            if let Some(address) = addresses.find(|address| own.contains(address)) {
                return Err(ConfigError::new(
                    format!("device[{i}].kernel_addresses"),
                    format!("{address} is an address of the stack: the kernel needs another one"),
                ));
            }
        }
        Ok(())
    }

    fn validate_link(&self, i: usize, link: &LinkConfig) -> Result<(), ConfigError> {
        let key = |k: &str| format!("link[{i}].{k}");
        if self.links[..i].iter().any(|l| l.name == link.name) {
            let problem = format!("another link is named \"{}\"", link.name);
            return Err(ConfigError::new(key("name"), problem));
        }
        let Some(device) = self.devices.iter().find(|d| d.name == link.device) else {
            let problem = format!("there is no device named \"{}\"", link.device);
            return Err(ConfigError::new(key("device"), problem));
        };
        if self.links[..i].iter().any(|l| l.device == link.device && l.vlan == link.vlan) {
            return Err(ConfigError::new(key("vlan"), "another link has this device and VLAN"));
        }
        if let Some(vlan) = link.vlan {
            within(key("vlan"), vlan, 1..=4094)?;
        }
        if let Some(mtu) = link.mtu {
            within(key("mtu"), mtu, 68..=device.mtu.unwrap_or(65_521))?;
        }
        let mtu = link.mtu.or(device.mtu).unwrap_or(1280);
        if mtu < 1280 && link.addresses.iter().any(|a| a.address.is_ipv6()) {
            return Err(ConfigError::new(
                key("addresses"),
                format!("IPv6 requires an MTU of 1280, this link has {mtu}"),
            ));
        }
        Ok(())
    }
}

impl DeviceConfig {
    /// Validates that the keys fit the kind of the device. The error has a key and its problem.
    fn validate_kind(&self) -> Result<(), (&'static str, &'static str)> {
        let (tap, memif) = (self.kind == DeviceKind::Tap, self.kind == DeviceKind::Memif);
        let (af_xdp, dpdk) = (self.kind == DeviceKind::AfXdp, self.kind == DeviceKind::Dpdk);
        let named = tap || af_xdp;
        let misplaced = [
            (
                "interface",
                self.interface.is_some() && !named && !dpdk,
                "applies only to devices of kind \"tap\", \"af_xdp\" and \"dpdk\"",
            ),
            (
                "kernel_addresses",
                !self.kernel_addresses.is_empty() && !tap,
                "applies only to devices of kind \"tap\"",
            ),
            ("memif", self.memif.is_some() && !memif, "applies only to devices of kind \"memif\""),
            ("memif", self.memif.is_none() && memif, "is missing, as in \"socket=/run/lan,role=server\""),
            ("af_xdp", self.af_xdp.is_some() && !af_xdp, "applies only to devices of kind \"af_xdp\""),
            ("dpdk", self.dpdk.is_some() && !dpdk, "applies only to devices of kind \"dpdk\""),
            (
                "mac",
                self.mac.is_some() && !tap && !memif && !dpdk,
                "applies only to devices of kind \"tap\", \"memif\" and \"dpdk\"",
            ),
            ("interface", named && !(1..=15).contains(&self.interface().len()), "must have 1 to 15 bytes"),
        ];
        match misplaced.into_iter().find(|(_, wrong, _)| *wrong) {
            Some((key, _, problem)) => Err((key, problem)),
            None => Ok(()),
        }
    }

    /// Validates the keys of the capture.
    fn validate_capture(&self, key: impl Fn(&str) -> String) -> Result<(), ConfigError> {
        within(key("capture_snaplen_bytes"), self.capture_snaplen_bytes, 14..=capture::SNAPLEN_MAX)?;
        within(key("capture_file_bytes"), self.capture_file_bytes, 65_536..=1 << 40)?;
        if let Some(files) = self.capture_files {
            within(key("capture_files"), files, 2..=1_000_000)?;
        }
        if let Some(filter) = &self.capture_filter {
            let wrong = |e: capture::FilterError| ConfigError::new(key("capture_filter"), e.to_string());
            capture::Filter::parse(filter).map_err(wrong)?;
        }
        let defaults = Self::new("", self.kind);
        let without_file = [
            ("capture_filter", self.capture_filter.is_some()),
            ("capture_snaplen_bytes", self.capture_snaplen_bytes != defaults.capture_snaplen_bytes),
            ("capture_files", self.capture_files.is_some()),
        ];
        if self.capture.is_none()
            && let Some((name, _)) = without_file.into_iter().find(|(_, given)| *given)
        {
            return Err(ConfigError::new(key(name), "applies only to a device with a `capture`"));
        }
        if self.capture_files.is_none() && self.capture_file_bytes != defaults.capture_file_bytes {
            return Err(ConfigError::new(
                key("capture_file_bytes"),
                "applies only to a ring of `capture_files`",
            ));
        }
        Ok(())
    }

    /// Returns the name of the interface in the kernel.
    pub fn interface(&self) -> &str {
        self.interface.as_deref().unwrap_or(&self.name)
    }
}

impl ShardConfig {
    fn validate(&self) -> Result<(), ConfigError> {
        if let Some(cpu) = self.cpu {
            within("shard.cpu", cpu, 0..=1023)?;
        }
        if let Some(cpu) = self.application_cpu {
            within("shard.application_cpu", cpu, 0..=1023)?;
            if self.placement == Placement::Inline {
                let problem = "applies only to an application with a thread of its own: shard.placement \"paired\" or \"split\"";
                return Err(ConfigError::new("shard.application_cpu", problem));
            }
        }
        within("shard.paired_work_us", self.paired_work_us, 10..=1_000_000)?;
        within("shard.workers", self.workers, 0..=64)?;
        for (i, &cpu) in self.worker_cpus.iter().enumerate() {
            within(format!("shard.worker_cpus[{i}]"), cpu, 0..=1023)?;
        }
        within("shard.spin_us", self.spin_us, 0..=1_000_000)?;
        within("shard.coalesce_us", self.coalesce_us, 0..=10_000)?;
        within("shard.commands_max", self.commands_max, 1..=1 << 20)?;
        within("shard.timers_max", self.timers_max, 1..=100_000_000)?;
        within("shard.stop_grace_ms", self.stop_grace_ms, 0..=3_600_000)
    }
}

fn within<T: PartialOrd + core::fmt::Display>(
    key: impl Into<String>,
    value: T,
    range: RangeInclusive<T>,
) -> Result<(), ConfigError> {
    if range.contains(&value) {
        return Ok(());
    }
    Err(ConfigError::new(key, format!("{value} is outside {} to {}", range.start(), range.end())))
}

#[cfg(all(test, not(loom)))]
mod tests;
