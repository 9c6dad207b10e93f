//! An open port, which both halves of all its queues share.

use super::config::DpdkConfig;
use super::ffi::{self, Pool, PortInfo, PortOptions};
use super::link::PortLink;
use super::offload::Offloads;
use super::rss::{self, RssReport};
use super::{DpdkStats, eal, errors, log};
use crate::interface;
use ginnel_stack::device::Capabilities;
use ginnel_stack::steering::toeplitz::KEY;
use std::ffi::CString;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of an Ethernet header with a VLAN tag.
const LINK_HEADER_BYTES: usize = 18;
/// Smallest size of the frame in a buffer: some adapters take no less.
const BUFFER_BYTES_MIN: usize = 2048;
/// Largest MTU in bytes: a buffer holds a whole frame.
const MTU_MAX: usize = 16_000;
/// Assumed bytes of a buffer besides its frame: its description, and headroom.
const BUFFER_OVERHEAD_BYTES: u64 = 448;

/// Ports are opened and closed one after another.
static CONTROL: Mutex<()> = Mutex::new(());
/// Number of ports that were opened.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// A started port. The port is stopped when its last half is dropped.
pub(super) struct Port {
    pub number: u16,
    pub driver: String,
    pub pools: Vec<Pool>,
    pub capabilities: Capabilities,
    pub offloads: Offloads,
    pub rss: Option<RssReport>,
    pub link: Arc<PortLink>,
    pub stats: Arc<DpdkStats>,
    /// Bytes of a frame that one buffer holds.
    pub buffer_bytes: usize,
}

impl Port {
    /// Starts EAL if it does not run, finds or creates the port, and starts it with `queues` queues.
    pub fn open(config: &DpdkConfig, queues: u16) -> io::Result<Self> {
        let _control = CONTROL.lock().unwrap_or_else(PoisonError::into_inner);
        errors::missing_capabilities(&config.port, errors::effective_capabilities())?;
        check_interface(config)?;
        eal::start(config)?;
        let number = probe(config)?;
        let mut pools = vec![Pool::NONE; queues.into()];
        match start(config, number, queues, &mut pools) {
            Ok(StartedPort { driver, capabilities, offloads, rss, buffer_bytes }) => Ok(Self {
                number,
                driver,
                pools,
                capabilities,
                offloads,
                rss,
                buffer_bytes,
                link: PortLink::watch(number, &config.port, interface_of(config)),
                stats: Arc::default(),
            }),
            Err(error) => {
                ffi::close(number, &mut pools);
                Err(error)
            }
        }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        let _control = CONTROL.lock().unwrap_or_else(PoisonError::into_inner);
        self.link.forget();
        ffi::close(self.number, &mut self.pools);
    }
}

/// Properties of a port after its start.
struct StartedPort {
    driver: String,
    capabilities: Capabilities,
    offloads: Offloads,
    rss: Option<RssReport>,
    buffer_bytes: usize,
}

/// Returns whether the driver of a port uses an interface of the kernel.
fn uses_interface(config: &DpdkConfig) -> bool {
    config.port.starts_with("net_af_packet") || config.port.starts_with("net_af_xdp")
}

/// Returns the interface of the kernel below a port.
fn interface_of(config: &DpdkConfig) -> Option<&str> {
    config.driver_argument("iface").filter(|_| uses_interface(config))
}

/// Checks that the interface exists that a driver without an adapter uses.
fn check_interface(config: &DpdkConfig) -> io::Result<()> {
    if !uses_interface(config) {
        return Ok(());
    }
    let Some(name) = config.driver_argument("iface") else {
        let problem = "the driver needs the name of an interface, as in args=iface=eth0";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, problem));
    };
    let info = interface::read(name).map_err(|error| match error.raw_os_error() {
        Some(libc::ENODEV) => {
            let problem = format!("the interface {name} does not exist (\"ip link\" lists interfaces)");
            io::Error::new(io::ErrorKind::NotFound, problem)
        }
        _ => error,
    })?;
    if !info.up {
        let problem = format!("the interface {name} is down: set it up with \"ip link set {name} up\"");
        return Err(io::Error::new(io::ErrorKind::NetworkDown, problem));
    }
    Ok(())
}

fn probe(config: &DpdkConfig) -> io::Result<u16> {
    let mut arguments = vec![config.port.clone()];
    arguments.extend(config.options.driver_arguments.iter().cloned());
    let arguments = CString::new(arguments.join(","))?;
    log::clear();
    ffi::probe(&arguments).map_err(|error| {
        let is_pci = DpdkConfig::is_pci(&config.port);
        errors::probe(&config.port, is_pci, error, &log::take(), ffi::port_count())
    })
}

fn invalid(problem: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, problem)
}

/// Returns the MTU of the configuration or of the port, in bytes.
fn choose_mtu(config: &DpdkConfig, info: &PortInfo) -> io::Result<usize> {
    let most = match info.mtu_max {
        0 => MTU_MAX,
        most => MTU_MAX.min(most.into()),
    };
    let least = usize::from(info.mtu_min).max(68);
    match config.mtu {
        None => Ok(usize::from(info.mtu).min(most)),
        Some(mtu) if (least..=most).contains(&mtu) => Ok(mtu),
        Some(mtu) => {
            Err(invalid(format!("the MTU {mtu} is outside {least} to {most}, which the port can have")))
        }
    }
}

/// Configures and starts a port. The caller closes it after an error, and frees the pools.
fn start(config: &DpdkConfig, number: u16, queues: u16, pools: &mut [Pool]) -> io::Result<StartedPort> {
    let info = ffi::info(number)
        .map_err(|error| errors::open("reading its properties", error, &log::take(), 0, 0))?;
    let queues_max = info.rx_queues_max.min(info.tx_queues_max);
    if queues > queues_max {
        return Err(invalid(format!(
            "the port has {queues_max} queues, and {queues} are needed: some drivers have an argument for their number (qpairs=, queue_count=)"
        )));
    }
    let mtu = choose_mtu(config, &info)?;
    let buffer_bytes = (mtu + LINK_HEADER_BYTES).next_multiple_of(64).max(BUFFER_BYTES_MIN);
    let offloads = Offloads::choose(&info, config.offload, buffer_bytes, mtu);
    let hash_types = rss::hash_types(&info, queues);
    let options = PortOptions {
        queues,
        mtu: config.mtu.map_or(0, |_| mtu as u16),
        ring: config.options.ring,
        // The cast does not truncate: the MTU has an upper limit.
        frame_bytes: buffer_bytes as u16,
        buffers: config.options.buffers,
        sets_mac: config.mac.is_some().into(),
        mac: config.mac.unwrap_or_default(),
        // A port that does not hash has no hashes to tell.
        rx_offloads: if hash_types == 0 { offloads.rx_without_hash() } else { offloads.rx },
        tx_offloads: offloads.tx,
        hash_types,
        key: KEY,
        generation: GENERATION.fetch_add(1, Ordering::Relaxed),
    };
    log::clear();
    ffi::open(number, &options, pools).map_err(|(step, error)| {
        let buffer = buffer_bytes as u64 + BUFFER_OVERHEAD_BYTES;
        let bytes = u64::from(queues) * u64::from(options.buffers) * buffer;
        errors::open(step, error, &log::take(), bytes >> 20, config.options.eal.memory_mib)
    })?;
    let capabilities = Capabilities {
        mac: config.mac.unwrap_or(info.mac),
        mtu,
        tx_checksum: offloads.has_checksum(),
        gso_bytes_max: offloads.super_frame_bytes,
        uso: false,
        labels: false,
    };
    let rss = rss::set(number, &info, queues);
    Ok(StartedPort { driver: info.driver(), capabilities, offloads, rss, buffer_bytes })
}
