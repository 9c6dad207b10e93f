//! The network between a stack and the kernel's sockets, and the thread that runs the stack.

use crate::case::{Case, Family};
use ginnel::config::{DeviceConfig, DeviceKind, Prefix};
use ginnel::{Commander, Config, Handler, Shard, StopFlag};
use ginnel_devices::capture::{self, CaptureConfig, FileRing};
use ginnel_devices::faults::{self, FaultStats, LinkSpec};
use ginnel_devices::tap::TapConfig;
use ginnel_stack::device::Device;
use ginnel_testkit::interop::Namespace;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Number of bytes that a capture keeps of each frame: all headers.
const SNAPLEN: u32 = 160;
/// A capture keeps the last frames of a case, about 300,000.
const RING: FileRing = FileRing { file_bytes: 32 << 20, files: 2 };

/// The namespaces of a case with their addresses.
pub struct Network {
    /// Namespace of the kernel's sockets.
    pub host: Arc<Namespace>,
    /// Address of the kernel's sockets.
    pub kernel: IpAddr,
    /// Address of the stack.
    pub ginnel: IpAddr,
    pub faults: FaultStats,
    gateway: Option<IpAddr>,
    prefix: u8,
    /// Namespaces of routers, kept for the lifetime of the network.
    _routers: Vec<Namespace>,
}

/// Returns an address: 10.9.`network`.`host` or fd09:0:0:`network`::`host`.
fn address(family: Family, network: u8, host: u8) -> IpAddr {
    match family {
        Family::V4 => [10, 9, network, host].into(),
        Family::V6 => [0xfd09, 0, 0, network.into(), 0, 0, 0, host.into()].into(),
    }
}

impl Network {
    /// Builds the network of a case and the device of its stack.
    pub fn new(case: &Case) -> Result<(Self, Device), String> {
        Self::build(case).map_err(|e| e.to_string())
    }

    fn build(case: &Case) -> io::Result<(Self, Device)> {
        let near = Namespace::new()?;
        let ginnel = address(case.family, 0, 2);
        let first = address(case.family, 0, 1);
        let prefix = if case.family == Family::V4 { 24 } else { 64 };
        let tap = TapConfig {
            mtu: Some(case.mtu),
            kernel_addresses: vec![(first, prefix)],
            without_offloads: !case.offload,
            ..TapConfig::default()
        };
        if case.narrow.is_none() {
            set_sysctls(&near, case)?;
        }
        let device = near.open_tap(&tap, case.congestion)?;
        let (device, faults) = layers(case, device)?;
        let network = match case.narrow {
            None => {
                let host = Arc::new(near);
                Self { host, kernel: first, ginnel, faults, gateway: None, prefix, _routers: Vec::new() }
            }
            Some(mtu) => {
                let (host, far) = behind_routers(case, &near, mtu, prefix)?;
                let (kernel, gateway) = (address(case.family, 2, 2), Some(first));
                let host = Arc::new(host);
                Self { host, kernel, ginnel, faults, gateway, prefix, _routers: vec![near, far] }
            }
        };
        Ok((network, device))
    }

    /// Returns the stack's configuration in this network.
    fn config(&self, case: &Case) -> Config {
        let prefix = Prefix { address: self.ginnel, len: self.prefix };
        let gateways: Vec<_> = self.gateway.into_iter().collect();
        let mut config = Config::single(DeviceConfig::new("tap", DeviceKind::Tap), &[prefix], &gateways);
        // Many shards run concurrently in these tests, so none spins.
        config.shard.spin_us = 0;
        // The link has no other hosts, so duplicate address detection would only delay the test.
        config.network.dad_transmits = 0;
        (case.config)(&mut config);
        config
    }
}

fn set_sysctls(namespace: &Namespace, case: &Case) -> io::Result<()> {
    case.sysctls.iter().try_for_each(|(name, value)| namespace.sysctl(name, value))
}

/// Makes `near` a router to a second router, over a link with a smaller MTU. Returns the kernel's host beyond
/// the second router, and the second router.
fn behind_routers(
    case: &Case,
    near: &Namespace,
    narrow: u32,
    prefix: u8,
) -> io::Result<(Namespace, Namespace)> {
    let (far, host) = (Namespace::new()?, Namespace::new()?);
    set_sysctls(&host, case)?;
    near.connect("middle", &far, "middle", narrow)?;
    far.connect("last", &host, "last", case.mtu as u32)?;
    let at = |network, host| address(case.family, network, host);
    let without_dad = if case.family == Family::V4 { "" } else { "nodad" };
    for (namespace, address, device) in [
        (near, at(1, 1), "middle"),
        (&far, at(1, 2), "middle"),
        (&far, at(2, 1), "last"),
        (&host, at(2, 2), "last"),
    ] {
        namespace.ip(&format!("addr add {address}/{prefix} dev {device} {without_dad}"))?;
    }
    for router in [near, &far] {
        router.sysctl("net.ipv4.ip_forward", "1")?;
        router.sysctl("net.ipv6.conf.all.forwarding", "1")?;
    }
    near.ip(&format!("route add {}/{prefix} via {}", at(2, 0), at(1, 2)))?;
    far.ip(&format!("route add {}/{prefix} via {}", at(0, 0), at(1, 1)))?;
    host.ip(&format!("route add {}/{prefix} via {} congctl {}", at(0, 0), at(2, 1), case.congestion))?;
    host.wait_until_local(at(2, 2))?;
    host.wait_until_reachable(at(0, 1))?;
    Ok((host, far))
}

/// Wraps the device in the fault and capture layers of the case.
fn layers(case: &Case, mut device: Device) -> io::Result<(Device, FaultStats)> {
    let mut stats = FaultStats::default();
    if !case.link.is_empty() {
        let spec = LinkSpec::parse(case.link).map_err(io::Error::other)?;
        (device, stats) = faults::wrap_counted(device, &spec, case.seed());
    }
    if case.capture {
        let folder = case.capture_folder();
        std::fs::create_dir_all(&folder)?;
        let path = folder.join("frames.pcapng");
        let config = CaptureConfig { snaplen: SNAPLEN, ring: Some(RING), ..CaptureConfig::new(path) };
        device = capture::wrap(device, &config)?;
    }
    Ok((device, stats))
}

/// A shard that runs on a thread of its own.
pub struct Node {
    pub commander: Commander,
    stop: StopFlag,
    thread: JoinHandle<Result<(), String>>,
}

impl Node {
    /// Starts a shard with this application.
    pub fn start<H: Handler + Send + 'static>(
        case: &Case,
        network: &Network,
        device: Device,
        application: H,
    ) -> Result<Self, String> {
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&case.seed().to_le_bytes());
        let shard =
            Shard::builder(network.config(case)).handler(application).device("tap", device).seed(seed);
        let mut shard = shard.build().map_err(|e| e.to_string())?;
        let commander = shard.commander();
        let stop = StopFlag::new().map_err(|e| e.to_string())?;
        let flag = stop.clone();
        let run = move || shard.run(&flag).map_err(|e| e.to_string());
        let thread = thread::Builder::new().name(case.name.clone()).spawn(run).map_err(|e| e.to_string())?;
        Ok(Self { commander, stop, thread })
    }

    /// Stops the shard.
    ///
    /// # Errors
    /// If the shard panicked, failed, or does not stop within 30 seconds.
    pub fn stop(self) -> Result<(), String> {
        self.stop.stop();
        let (done, wait): (Sender<()>, _) = channel();
        let thread = self.thread;
        let joiner = thread::spawn(move || {
            let result = thread.join().unwrap_or_else(|_| Err("the shard panicked".into()));
            drop(done);
            result
        });
        if wait.recv_timeout(Duration::from_secs(30)) == Err(RecvTimeoutError::Timeout) {
            return Err("the shard did not stop".into());
        }
        joiner.join().unwrap_or_else(|_| Err("the shard panicked".into()))
    }
}
