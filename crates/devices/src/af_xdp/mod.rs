//! An AF_XDP device: queues of an interface that the stack shares with the kernel.
//!
//! A redirect program at the interface sends frames for the stack to memory that the stack shares with the
//! kernel (UMEM), and leaves all other frames to the kernel. The kernel detaches the program when the process
//! ends, also if it is killed.
//!
//! ```text
//! config       configuration, and its text form
//! redirect     which frames are redirected: the program (assembler: its instructions; bpf: the system call)
//! filter       the program with its maps, attached to the interface; changed at run time
//! neighbours   ARP and neighbour discovery that stack and kernel both need
//! socket       one queue: memory (umem), rings, and the system calls that wake the kernel
//! rx, tx       the halves of the device
//! errors       explanations of the kernel's errors
//! ```

pub(crate) mod assembler;
pub(crate) mod bpf;
mod config;
mod errors;
mod filter;
mod neighbours;
mod redirect;
mod rings;
mod rx;
mod socket;
mod tx;
mod umem;

pub use config::{
    AfXdpConfig, AfXdpOptions, Attach, CopyMode, PartialChecksums, PortFilterMode, QUEUES_MAX, RedirectScope,
};
pub use filter::{PortKind, RedirectFilter};

use crate::ethtool;
use crate::ethtool::flow_filters::InterfaceFilters;
use crate::interface_state::InterfaceState;
use crate::joined;
use crate::netlink::{LinkInfo, Netlink};
use crate::partial_checksums::PartialChecksumCheck;
use crate::port_filters::{self, PortFilters};
use bpf::AttachMode;
use ginnel_stack::device::{Capabilities, Device};
use neighbours::NeighbourSocket;
use rx::{AfXdpRx, PacketSocket};
use socket::{XdpSocket, XdpSocketOptions, XdpSocketParts};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tx::AfXdpTx;

/// Bytes of an Ethernet header with a VLAN tag.
const LINK_HEADER_BYTES: usize = 18;
/// Bytes in front of a received frame in its chunk: `XDP_PACKET_HEADROOM`.
const HEADROOM_BYTES: usize = 256;
/// Sizes of UMEM chunks in bytes: the kernel accepts powers of two from 2,048 up to a page.
const CHUNK_SIZES: [usize; 2] = [2048, 4096];
/// Largest MTU in bytes, as for TAP devices: Linux's largest IP packet minus an Ethernet header.
const MTU_MAX: usize = 65_521;
/// Size of the buffer for frames that span several chunks, in frames of the maximum length.
const REASSEMBLED_FRAMES_MAX: usize = 16;

/// Counters of the frames and calls of a queue. Only the shard of the queue adds to them.
#[derive(Debug, Default)]
pub struct AfXdpStats {
    /// Descriptors from the kernel that are outside the receive chunks.
    pub rx_invalid: AtomicU64,
    /// Received frames that were longer than the MTU allows, or incomplete.
    pub rx_dropped: AtomicU64,
    /// Received frames whose checksum was partial and that were accepted (`partial_checksums`).
    pub rx_partial_checksums: AtomicU64,
    /// Completions from the kernel that name no chunk in flight.
    pub tx_invalid: AtomicU64,
    /// Send calls that failed because the interface is down or was deleted.
    pub tx_errors: AtomicU64,
    /// Send calls.
    pub tx_calls: AtomicU64,
}

/// Adds to a counter of a queue, which has no other writer.
fn add(counter: &AtomicU64, count: u64) {
    counter.store(counter.load(Ordering::Relaxed) + count, Ordering::Relaxed);
}

/// An open AF_XDP device.
pub struct AfXdp {
    /// One device for each queue.
    pub queues: Vec<Device>,
    /// Counters of each queue.
    pub stats: Vec<Arc<AfXdpStats>>,
    /// The addresses and ports whose frames are redirected.
    pub filter: RedirectFilter,
    /// True if the redirect program runs in the driver.
    pub in_driver: bool,
    /// True if frames pass without a copy.
    pub zero_copy: bool,
    sockets: Vec<Arc<XdpSocket>>,
    /// Copies of the descriptors that the queues sleep on.
    wakers: Vec<OwnedFd>,
}

impl AfXdp {
    /// Joins all queues into one device, for a single shard. The device sends on the first queue.
    ///
    /// # Errors
    /// The process has no descriptor left for the epoll set.
    pub fn into_single_device(self) -> io::Result<Device> {
        joined::join(self.queues, self.wakers.iter().map(|waker| waker.as_fd()))
    }

    /// Returns the number of frames that the kernel could not deliver to the queues, by its own counters.
    ///
    /// # Errors
    /// The error of the kernel.
    pub fn dropped(&self) -> io::Result<u64> {
        let mut sum = 0;
        for socket in &self.sockets {
            let counted = socket.statistics()?;
            // A frame without a descriptor of the fill ring is in `rx_dropped` (`__xsk_rcv`). Kernels before
            // 5.9 have no `rx_ring_full`, and count in `rx_dropped` what it counts.
            sum += counted.rx_dropped + counted.rx_ring_full.unwrap_or_default();
        }
        Ok(sum)
    }
}

/// Memory layout of frames of an MTU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ChunkLayout {
    /// Bytes of a chunk.
    chunk: usize,
    /// True if the longest frame spans several chunks.
    multi_buffer: bool,
}

impl ChunkLayout {
    fn of(mtu: usize) -> Self {
        let longest = mtu + LINK_HEADER_BYTES;
        let fits = |chunk: usize| longest <= chunk - HEADROOM_BYTES;
        let chunk = if fits(CHUNK_SIZES[0]) { CHUNK_SIZES[0] } else { CHUNK_SIZES[1] };
        Self { chunk, multi_buffer: !fits(chunk) }
    }
}

/// Opens queues of an interface in the network namespace of the calling thread.
///
/// # Errors
/// `InvalidInput` for a value that is outside its range or does not fit the host's addresses, ports or
/// queues, `NotFound` if the interface does not exist, `NetworkDown` if it is down. Otherwise the error of
/// the kernel, with its cause and the remedy.
pub fn open(config: &AfXdpConfig) -> io::Result<AfXdp> {
    config.validate().map_err(invalid)?;
    let name = config.interface.as_str();
    open_checked(config).map_err(|error| io::Error::new(error.kind(), format!("AF_XDP on {name}: {error}")))
}

fn invalid(problem: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, problem.into())
}

fn open_checked(config: &AfXdpConfig) -> io::Result<AfXdp> {
    let options = &config.options;
    let link = find_interface(&config.interface)?;
    let Some(mac) = link.mac else {
        return Err(invalid("the interface has no MAC address: AF_XDP needs an Ethernet interface"));
    };
    let mtu_max = link.mtu.min(MTU_MAX);
    let mtu = config.mtu.unwrap_or(mtu_max);
    if !(68..=mtu_max).contains(&mtu) {
        return Err(invalid(format!(
            "the MTU {mtu} is outside 68 to {mtu_max}, the largest of the interface"
        )));
    }
    check_address_ownership(config)?;
    // Frames of the interface's MTU may arrive, even if the stack sends shorter frames.
    let layout = ChunkLayout::of(mtu_max);
    let queues = choose_queues(config)?;
    let highest = queues.iter().copied().max().unwrap_or_default();

    let filter =
        RedirectFilter::new(options.scope().clone(), u32::from(highest) + 1, config.addresses.len())?;
    fill_maps(&filter, config)?;
    let program = filter.load(layout.multi_buffer)?;
    // Drivers with zero copy require that the program is attached before the socket is bound.
    let zero_copy = options.mode == CopyMode::ZeroCopy;
    let mut program = filter::attach(&program, &config.interface, link.index, options.attach, zero_copy)?;
    program.port_filters = set_port_filters(config, &queues)?;
    let program = Arc::new(program);

    let interface = Arc::new(InterfaceState::new(&config.interface));
    let capabilities =
        Capabilities { mac, mtu, tx_checksum: false, gso_bytes_max: 0, uso: false, labels: false };
    let mut neighbours = match options.scope() {
        RedirectScope::All => None,
        RedirectScope::Addresses | RedirectScope::Ports => {
            Some(NeighbourSocket::open(link.index, &config.addresses)?)
        }
    };
    let driver = ethtool::driver(&config.interface);
    let (mut devices, mut sockets, mut wakers) = (Vec::new(), Vec::new(), Vec::new());
    let mut stats = Vec::new();
    for queue in queues {
        let queue_stats = Arc::new(AfXdpStats::default());
        stats.push(queue_stats.clone());
        let socket_options = XdpSocketOptions {
            interface: link.index,
            queue,
            ring: options.ring,
            chunk: layout.chunk,
            mode: options.mode,
            need_wakeup: options.need_wakeup,
            multi_buffer: layout.multi_buffer,
            busy_poll: (options.busy_poll_us > 0).then_some((options.busy_poll_us, options.busy_budget)),
        };
        let bytes = 2 * options.ring as usize * layout.chunk;
        let XdpSocketParts { socket, rx, tx } = socket::open(&socket_options)
            .map_err(|(step, error)| errors::socket_error(step, error, queue, options.mode, bytes))?;
        filter.add_socket(queue, socket.as_fd())?;
        sockets.push(socket.clone());
        let longest = mtu_max + LINK_HEADER_BYTES;
        let reassembly_bytes =
            if layout.multi_buffer { REASSEMBLED_FRAMES_MAX * longest.next_multiple_of(64) } else { 0 };
        let tx = AfXdpTx::new(
            socket.clone(),
            tx,
            layout.chunk,
            capabilities,
            queue_stats.clone(),
            interface.clone(),
            program.clone(),
        );
        // The shard of the first queue processes ARP and neighbour discovery.
        let packet_socket = match neighbours.take() {
            Some(neighbours) => PacketSocket::Neighbours(neighbours),
            None => PacketSocket::LinkWatch(neighbours::open_link_watch(link.index)?),
        };
        let mut rx =
            AfXdpRx::new(socket, rx, longest, reassembly_bytes, packet_socket, queue_stats, program.clone())?;
        rx.partial_checksums = PartialChecksumCheck::new(options.partial_checksums, driver.as_deref());
        wakers.push(rx.clone_wake_fd()?);
        devices.push(Device { rx: Box::new(rx), tx: Box::new(tx) });
    }
    let in_driver = program.mode == AttachMode::Driver;
    let zero_copy = sockets.iter().all(|socket| !socket.is_copy_mode);
    tracing::info!(
        interface = config.interface,
        queues = devices.len(),
        in_driver,
        zero_copy,
        take = %options.scope(),
        "AF_XDP"
    );
    Ok(AfXdp { queues: devices, stats, filter, in_driver, zero_copy, sockets, wakers })
}

/// Sets the filters for the ports of opened connections, if they are configured.
fn set_port_filters(
    config: &AfXdpConfig,
    queues: &[u16],
) -> io::Result<Option<PortFilters<InterfaceFilters>>> {
    let mode = config.options.port_filters;
    let Some(ports) = &config.opened_ports else { return Ok(None) };
    if mode == PortFilterMode::Off || queues.len() < 2 {
        return Ok(None);
    }
    let interface = config.interface.as_str();
    let set = port_filters::filters_for(ports, queues).map_err(invalid).and_then(|filters| {
        let set = PortFilters::set(InterfaceFilters::open(interface)?, &filters)?;
        tracing::info!(interface, filters = filters.len(), "filters send opened connections to their queues");
        Ok(set)
    });
    match set {
        Ok(set) => Ok(Some(set)),
        Err(error) if mode == PortFilterMode::On => Err(errors::port_filter_error(error)),
        Err(error) => {
            tracing::warn!(
                interface,
                "packets to opened connections may arrive on other queues than steering.opened = \"port-bits\" says, and cross to their shards: {}",
                errors::port_filter_error(error)
            );
            Ok(None)
        }
    }
}

/// Returns the queues to open. Fails if the interface does not have them.
fn choose_queues(config: &AfXdpConfig) -> io::Result<Vec<u16>> {
    let available = ethtool::rx_queue_count(&config.interface)?;
    let queues: Vec<u16> = match (&config.options.queues, config.queue_count) {
        (Some(queues), _) => queues.clone(),
        // The casts do not truncate: the numbers are at most 64.
        (None, 0) => (0..available.min(QUEUES_MAX) as u16).collect(),
        (None, count) => (0..count as u16).collect(),
    };
    if let Some(queue) = queues.iter().find(|&&queue| usize::from(queue) >= available) {
        return Err(invalid(format!(
            "the interface has no queue {queue}: its {available} queues are numbered from 0 (\"ethtool -L\" changes their number)"
        )));
    }
    if config.options.queues.is_none()
        && queues.len() < available
        && *config.options.scope() != RedirectScope::All
    {
        tracing::warn!(
            interface = config.interface,
            queues = available,
            used = queues.len(),
            "frames for the stack on the other queues are dropped: reduce the queues with \"ethtool -L\", or direct flows to the used ones with \"ethtool -X\""
        );
    }
    Ok(queues)
}

fn find_interface(name: &str) -> io::Result<LinkInfo> {
    let link = Netlink::open()?.link(name).map_err(|error| match error.raw_os_error() {
        Some(libc::ENODEV) => io::Error::new(
            io::ErrorKind::NotFound,
            "the interface does not exist (\"ip link\" lists interfaces)",
        ),
        _ => error,
    })?;
    if !link.up {
        return Err(io::Error::new(
            io::ErrorKind::NetworkDown,
            "the interface is down: set it up with \"ip link set … up\"",
        ));
    }
    Ok(link)
}

/// Checks that this process may load the program that redirects frames. The program is not attached.
///
/// # Errors
/// The reason why the kernel does not load it.
pub fn check_program() -> io::Result<()> {
    RedirectFilter::new(RedirectScope::Ports, 1, 0)?.load(false).map(drop)
}

/// Checks who owns the addresses: one that the stack uses alone must not be an address of the host, whose
/// services would lose it; one that is shared must be one.
fn check_address_ownership(config: &AfXdpConfig) -> io::Result<()> {
    let host_addresses = Netlink::open()?.addresses()?;
    let is_host_address = |address: IpAddr| host_addresses.iter().any(|host| host.address == address);
    for &(address, vlan) in &config.addresses {
        match config.options.scope() {
            RedirectScope::Addresses if is_host_address(address) => {
                return Err(invalid(format!(
                    "{address} belongs to the host: configure another address, or share this one with take=ports"
                )));
            }
            RedirectScope::Ports if vlan != 0 => {
                return Err(invalid(format!(
                    "take=ports does not support VLANs: {address} is in VLAN {vlan}"
                )));
            }
            RedirectScope::Ports if !is_host_address(address) => {
                return Err(invalid(format!(
                    "{address} does not belong to the host, so it cannot be shared: add it to the interface, or remove take=ports (--af-xdp-ports)"
                )));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Adds the configured addresses and ports to the maps.
fn fill_maps(filter: &RedirectFilter, config: &AfXdpConfig) -> io::Result<()> {
    for &(address, vlan) in &config.addresses {
        filter.add_address(address, vlan)?;
    }
    if *config.options.scope() != RedirectScope::Ports {
        return Ok(());
    }
    for (kind, (first, last)) in [PortKind::Tcp, PortKind::Udp].into_iter().zip(config.ephemeral) {
        for (first, last) in [(first, last)].into_iter().chain(config.options.ports.iter().copied()) {
            if let Some(range) = overlapping_kernel_ports(first, last)? {
                return Err(invalid(format!(
                    "the ports {first} to {last} overlap the host's ephemeral ports {range}: configure other ports \
                     (ports=, tcp.local_port_first, network.udp_port_first), or reserve them \
                     (net.ipv4.ip_local_reserved_ports)"
                )));
            }
            filter.set_ports(kind, first..=last, true)?;
        }
    }
    Ok(())
}

/// Returns the kernel's ephemeral port range if it contains one of the ports from `first` to `last` that is
/// not reserved.
fn overlapping_kernel_ports(first: u16, last: u16) -> io::Result<Option<String>> {
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")?;
    let mut numbers = range.split_whitespace().filter_map(|word| word.parse::<u16>().ok());
    let (Some(low), Some(high)) = (numbers.next(), numbers.next()) else { return Ok(None) };
    let reserved = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_reserved_ports")?;
    let is_reserved = |port: u16| {
        reserved.trim().split(',').any(|part| {
            let (from, to) = part.split_once('-').unwrap_or((part, part));
            matches!((from.parse::<u16>(), to.parse::<u16>()), (Ok(from), Ok(to)) if (from..=to).contains(&port))
        })
    };
    let overlap = first.max(low)..=last.min(high);
    let overlaps = overlap.into_iter().any(|port| !is_reserved(port));
    Ok(overlaps.then(|| format!("{low} to {high}")))
}

#[cfg(all(test, not(loom)))]
mod tests;
