//! An open port, which both halves of all its queues share.

use super::config::DpdkConfig;
use super::ffi::{self, Pool, PortOptions};
use super::link::{self, PortLink};
use super::membership::Membership;
use super::offload::Offloads;
use super::rss::{self, RssReport};
use super::{DpdkStats, eal, errors, host, log, sizes};
use crate::interface::InterfaceInfo;
use ginnel_stack::device::Capabilities;
use ginnel_stack::steering::toeplitz::KEY;
use std::ffi::CString;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

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
    /// The driver refused a super-frame, so all are cut here.
    pub refuses_super_frames: AtomicBool,
    /// The groups that the interface of the host below the port is in for the port.
    _membership: Option<Membership>,
}

impl Port {
    /// Starts EAL if it does not run, finds or creates the port, and starts it with `queues` queues.
    pub fn open(config: &DpdkConfig, queues: u16) -> io::Result<Self> {
        let _control = CONTROL.lock().unwrap_or_else(PoisonError::into_inner);
        errors::missing_capabilities(&config.port, errors::effective_capabilities())?;
        let interface = host::read(config)?;
        eal::start(config)?;
        let number = probe(config)?;
        if link::is_open(number) {
            let problem = "the port is open already: another device of this process uses it";
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, problem));
        }
        let mut pools = vec![Pool::NONE; queues.into()];
        let membership = |interface: &InterfaceInfo| Membership::join(interface.index, config.mac.is_some());
        let started = start(config, number, queues, interface.as_ref(), &mut pools)
            .and_then(|port| Ok((port, interface.as_ref().map(membership).transpose()?)));
        match started {
            Ok((StartedPort { driver, capabilities, offloads, rss, buffer_bytes }, membership)) => Ok(Self {
                number,
                driver,
                pools,
                capabilities,
                offloads,
                rss,
                buffer_bytes,
                link: PortLink::watch(number, &config.port, host::name(config)),
                stats: Arc::default(),
                refuses_super_frames: AtomicBool::new(false),
                _membership: membership,
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

fn probe(config: &DpdkConfig) -> io::Result<u16> {
    let name = CString::new(config.port.as_str())?;
    let arguments = CString::new(config.options.device_arguments(&config.port))?;
    let is_pci = DpdkConfig::is_pci(&config.port);
    log::clear();
    ffi::probe(if is_pci { c"pci" } else { c"vdev" }, &name, &arguments)
        .map_err(|error| errors::probe(&config.port, is_pci, error, &log::take(), ffi::port_count()))
}

fn invalid(problem: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, problem)
}

/// Configures and starts a port. The caller closes it after an error, and frees the pools.
fn start(
    config: &DpdkConfig,
    number: u16,
    queues: u16,
    interface: Option<&InterfaceInfo>,
    pools: &mut [Pool],
) -> io::Result<StartedPort> {
    let info = ffi::info(number)
        .map_err(|error| errors::open("reading its properties", error, &log::take(), 0, 0))?;
    let queues_max = info.rx_queues_max.min(info.tx_queues_max);
    if queues > queues_max {
        return Err(invalid(format!(
            "the port has {queues_max} queues, and {queues} are needed: some drivers have an argument for their number (qpairs=, queue_count=)"
        )));
    }
    let mtu = sizes::mtu(config, &info, interface)?;
    let driver = info.driver();
    let buffer_bytes = sizes::buffer_bytes(mtu, &driver);
    let rings = ffi::rings(number, config.options.ring)
        .map_err(|error| errors::open("choosing the sizes of the rings", error, &log::take(), 0, 0))?;
    let buffers = sizes::buffers(config.options.buffers, &driver, rings)?;
    let offloads = Offloads::choose(&info, config.offload, buffer_bytes, mtu);
    let hash_types = rss::hash_types(&info, queues);
    let options = PortOptions {
        queues,
        // The casts do not truncate: the MTU has an upper limit.
        mtu: mtu as u16,
        rx_ring: rings.0,
        tx_ring: rings.1,
        frame_bytes: buffer_bytes as u16,
        buffers,
        is_umem: sizes::is_umem(&driver).into(),
        // An interface of the host is left as it is.
        sets_mtu: (config.mtu.is_some() && interface.is_none()).into(),
        sets_multicast: interface.is_none().into(),
        sets_mac: (config.mac.is_some() && interface.is_none()).into(),
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
        let buffers_mib = sizes::buffers_mib(buffer_bytes, &driver, queues, options.buffers);
        errors::open(step, error, &log::take(), buffers_mib, config.options.eal.memory_mib)
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
    Ok(StartedPort { driver, capabilities, offloads, rss, buffer_bytes })
}
