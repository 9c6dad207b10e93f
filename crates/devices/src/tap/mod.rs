//! A TAP device: the other end of the cable is an Ethernet interface of the Linux kernel.
//!
//! Each frame has a virtio-net header, so that partial checksums and super-frames pass in both directions;
//! this speeds up bulk transfers by a factor of seven. The kernel drops frames that its queues cannot hold,
//! so there is no back-pressure.

mod ioctl;
mod steering;
pub(crate) mod vnet;

use crate::ethtool;
use crate::interface;
use crate::interface_state::InterfaceState;
use crate::netlink::{self, LinkChange, Netlink};
use crate::offload::GSO_BYTES_MAX;
use arrayvec::ArrayVec;
use ginnel_stack::device::{
    BURST_FRAMES_MAX, Capabilities, Device, Gso, RxBurst, RxChecksum, RxFrame, RxQueue, TxMeta, TxQueue,
};
use ginnel_stack::time::Instant;
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use std::io;
use std::net::IpAddr;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of the largest frame with its virtio-net header: a super-frame with a VLAN tag.
const SLOT_BYTES_MAX: usize = vnet::LEN + GSO_BYTES_MAX + 4;
/// Bytes of the buffer for the received frames of one burst: eight of the largest frames. Frames lie close
/// together in it, so that a burst of small frames stays in the cache; frames that do not fit are left for
/// the next burst.
const ARENA_BYTES: usize = 8 * SLOT_BYTES_MAX.next_multiple_of(64);
/// Linux's MTU limit of TAP devices: 65,535 minus an Ethernet header, in bytes.
const MTU_MAX: usize = 65_521;

/// Configuration of a TAP device, see [`open`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TapConfig {
    /// Name of the kernel's interface: 1 to 15 bytes; `%d` stands for a free number. An interface that does
    /// not exist is created, and is deleted with the device. `None` is `ginnel%d`.
    pub name: Option<String>,
    /// MTU of both sides, 68 to 65,521 bytes. `None` keeps the MTU of the interface, which is 1500 for a new
    /// one.
    pub mtu: Option<usize>,
    /// MAC address of the stack's side. `None` is the kernel's address with its last bit flipped.
    pub mac: Option<[u8; 6]>,
    /// MAC address of the kernel's side. `None` keeps the address of the interface.
    pub kernel_mac: Option<[u8; 6]>,
    /// Addresses and prefix lengths that are added to the kernel's side.
    pub kernel_addresses: Vec<(IpAddr, u8)>,
    /// Does not set the interface up. Frames pass only while it is up.
    pub leave_down: bool,
    /// Disables checksum and segmentation offloads.
    pub without_offloads: bool,
}

/// Counters of errors. A queue cannot return errors of single frames.
#[derive(Debug, Default)]
pub struct TapStats {
    /// Frames that the kernel did not accept because the interface is down (EIO) or memory is short.
    pub tx_dropped: AtomicU64,
    /// Frames whose virtio-net header contradicts them.
    pub rx_malformed: AtomicU64,
    /// Reads that failed.
    pub rx_errors: AtomicU64,
}

/// An open TAP device.
pub struct Tap {
    /// Name of the kernel's interface.
    pub name: String,
    /// MAC address of the kernel's side.
    pub kernel_mac: [u8; 6],
    /// One device for each queue. The kernel delivers frames to the queues of the shards that own them,
    /// unless `steering_error` says why not.
    pub queues: Vec<Device>,
    /// Counters of all queues.
    pub stats: Arc<TapStats>,
    /// The reason why the kernel does not deliver frames to the shards that own them, if there are several
    /// queues. The device works nevertheless: shards forward frames that arrive elsewhere.
    pub steering_error: Option<io::Error>,
}

/// Opens a TAP device with one queue.
///
/// # Errors
/// See [`open_queues`].
pub fn open(config: &TapConfig) -> io::Result<Device> {
    let mut tap = open_queues(config, 1)?;
    tap.queues.pop().ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Remedies for a user without the permission.
const PERMISSION_REMEDY: &str = "; let root create it for this user once (ip tuntap add NAME mode tap user USER, \
    and its addresses), or give CAP_NET_ADMIN, or use a device that needs no permission (--device memory, --memif)";

/// Returns the error of a step, with a remedy.
fn step_error(name: &str, step: &str, error: io::Error) -> io::Error {
    let remedy = match error.kind() {
        io::ErrorKind::PermissionDenied => PERMISSION_REMEDY,
        io::ErrorKind::NotFound => "; is /dev/net/tun there (modprobe tun)?",
        io::ErrorKind::ResourceBusy => {
            "; another process has the interface (ginnel stat --list): use another name"
        }
        _ => "",
    };
    io::Error::new(error.kind(), format!("TAP {name}: {step}: {error}{remedy}"))
}

/// Opens a TAP device with `queues` queues (at least one), in the network namespace of the calling thread.
///
/// # Errors
/// `InvalidInput` for a value outside its range. Otherwise the error of the kernel, with the step that
/// failed: `NotFound` without /dev/net/tun, `PermissionDenied` without CAP_NET_ADMIN unless the interface
/// exists, belongs to the user and needs no change, `ResourceBusy` if another process has it open.
pub fn open_queues(config: &TapConfig, queues: usize) -> io::Result<Tap> {
    open_with(config, open_descriptors(config, queues)?)
}

/// The descriptors of the queues of a TAP device. The interface exists, with all that is configured on it, as
/// long as one of them is open in some process.
#[derive(Debug)]
pub struct TapDescriptors {
    /// Name of the kernel's interface.
    pub name: String,
    /// A descriptor for each queue.
    pub queues: Vec<OwnedFd>,
}

impl TapDescriptors {
    /// Opens the descriptors again if the interface was deleted, because they never belong to another one. An
    /// interface that has been made again is used, otherwise one is created. Returns true if it was deleted.
    ///
    /// # Errors
    /// See [`open_queues`].
    pub fn reopen_if_deleted(&mut self) -> io::Result<bool> {
        let is_deleted = |fd| ioctl::set_header_len(fd, vnet::LEN) == Err(Errno::BADFD);
        if !self.queues.iter().any(is_deleted) {
            return Ok(false);
        }
        let config = TapConfig { name: Some(self.name.clone()), ..TapConfig::default() };
        *self = open_descriptors(&config, self.queues.len())?;
        Ok(true)
    }
}

/// Opens the descriptors of a TAP device, for [`open_with`] in this process or another one.
///
/// # Errors
/// See [`open_queues`].
pub fn open_descriptors(config: &TapConfig, queues: usize) -> io::Result<TapDescriptors> {
    let name = config.name.as_deref().unwrap_or("ginnel%d");
    validate(config, name, queues)?;
    let context = |step: &str, error: Errno| step_error(name, step, error.into());
    let (first, name) = ioctl::open_queue(name, queues > 1).map_err(|error| match error {
        Errno::INVAL if is_of_another_driver(name) => io::Error::new(
            io::ErrorKind::AlreadyExists,
            format!("TAP {name}: the interface exists and is no TAP interface: use another name"),
        ),
        error => context("opening /dev/net/tun", error),
    })?;
    let mut fds = vec![first];
    for _ in 1..queues {
        fds.push(ioctl::open_queue(&name, true).map_err(|error| context("adding a queue", error))?.0);
    }
    Ok(TapDescriptors { name, queues: fds })
}

/// Returns true if an interface has the name, and the driver of TAP interfaces has not made it.
fn is_of_another_driver(name: &str) -> bool {
    interface::read(name).is_ok() && ethtool::driver(name).is_none_or(|driver| driver != "tun")
}

/// Opens a TAP device on descriptors that [`open_descriptors`] has opened.
///
/// # Errors
/// See [`open_queues`].
pub fn open_with(config: &TapConfig, descriptors: TapDescriptors) -> io::Result<Tap> {
    let TapDescriptors { name, queues: fds } = descriptors;
    validate(config, &name, fds.len())?;
    let context = |step: &str, error: io::Error| step_error(&name, step, error);
    let mut uso = true;
    for fd in &fds {
        ioctl::set_header_len(fd, vnet::LEN)
            .map_err(|error| context("setting the header length", error.into()))?;
        uso &= set_offloads(fd, config).map_err(|error| context("setting offloads", error.into()))?;
    }
    let kernel =
        configure_interface(&name, config).map_err(|error| context("configuring the interface", error))?;
    // Each TAP device is an Ethernet interface.
    let kernel_mac = kernel.mac.unwrap_or_default();
    let mut mac = kernel_mac;
    mac[5] ^= 1;
    let capabilities = Capabilities {
        mac: config.mac.unwrap_or(mac),
        mtu: kernel.mtu,
        tx_checksum: !config.without_offloads,
        gso_bytes_max: if config.without_offloads { 0 } else { GSO_BYTES_MAX },
        uso: uso && !config.without_offloads,
        labels: false,
    };
    if capabilities.mac == kernel_mac {
        return Err(invalid("both sides of a TAP device have the same MAC address".into()));
    }
    let stats = Arc::new(TapStats::default());
    let interface = Arc::new(InterfaceState::new(&name));
    let steered = if fds.len() > 1 { steering::steer(&fds[0], fds.len()) } else { Ok(()) };
    let queue = |(n, fd)| new_queue(fd, capabilities, &stats, &interface, n == 0);
    let queues = fds.into_iter().enumerate().map(queue).collect();
    Ok(Tap { name, kernel_mac, queues, stats, steering_error: steered.err() })
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message)
}

fn validate(config: &TapConfig, name: &str, queues: usize) -> io::Result<()> {
    if name.is_empty()
        || name.len() > 15
        || name.contains(|c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control())
    {
        return Err(invalid(format!(
            "{name:?} is not an interface name: 1 to 15 bytes without blanks, / and :"
        )));
    }
    if let Some(mtu) = config.mtu.filter(|mtu| !(68..=MTU_MAX).contains(mtu)) {
        return Err(invalid(format!("MTU {mtu} of TAP {name} is not in 68..={MTU_MAX}")));
    }
    if config.mac.iter().chain(&config.kernel_mac).any(|mac| mac[0] & 1 != 0 || *mac == [0; 6]) {
        return Err(invalid(format!("the MAC address of TAP {name} is zero or a group address")));
    }
    for (address, prefix) in &config.kernel_addresses {
        let longest = if address.is_ipv4() { 32 } else { 128 };
        if *prefix > longest {
            return Err(invalid(format!("prefix length {prefix} of {address} is above {longest}")));
        }
    }
    if queues == 0 {
        return Err(invalid(format!("TAP {name} needs at least one queue")));
    }
    Ok(())
}

/// Negotiates offloads. Returns whether UDP super-frames were accepted, which Linux supports since 6.2.
fn set_offloads(fd: &OwnedFd, config: &TapConfig) -> Result<bool, Errno> {
    if config.without_offloads {
        return ioctl::set_offloads(fd, 0).map(|()| false);
    }
    let base = ioctl::TUN_F_CSUM | ioctl::TUN_F_TSO;
    match ioctl::set_offloads(fd, base | ioctl::TUN_F_USO) {
        Err(Errno::INVAL) => ioctl::set_offloads(fd, base).map(|()| false),
        result => result.map(|()| true),
    }
}

/// Configures the kernel's interface. Changes only attributes that differ, so that an interface with the
/// right configuration needs no privilege.
fn configure_interface(name: &str, config: &TapConfig) -> io::Result<netlink::LinkInfo> {
    let mut netlink = Netlink::open()?;
    let link = netlink.link(name)?;
    let change = LinkChange {
        up: !config.leave_down && !link.up,
        mtu: config.mtu.filter(|&mtu| mtu != link.mtu),
        mac: config.kernel_mac.filter(|&mac| Some(mac) != link.mac),
    };
    netlink.change_link(link.index, change)?;
    for &(address, prefix) in &config.kernel_addresses {
        netlink.add_address(link.index, address, prefix)?;
    }
    netlink.link(name)
}

/// Creates the device of one queue. `reports`: this queue reports the counters of all queues.
fn new_queue(
    fd: OwnedFd,
    capabilities: Capabilities,
    stats: &Arc<TapStats>,
    interface: &Arc<InterfaceState>,
    reports: bool,
) -> Device {
    let fd = Arc::new(fd);
    let tx = TapTx {
        fd: fd.clone(),
        capabilities,
        buffer: vec![0; SLOT_BYTES_MAX].into_boxed_slice(),
        stats: stats.clone(),
        interface: interface.clone(),
    };
    let arena = vec![0; ARENA_BYTES].into_boxed_slice();
    let rx = TapRx { fd, arena, gone: false, stats: stats.clone(), reports_stats: reports };
    Device { rx: Box::new(rx), tx: Box::new(tx) }
}

/// The kernel accepts one frame per system call, so frames leave at `commit`, and `flush` does nothing.
struct TapTx {
    fd: Arc<OwnedFd>,
    capabilities: Capabilities,
    /// Buffer of one frame with its header.
    buffer: Box<[u8]>,
    stats: Arc<TapStats>,
    interface: Arc<InterfaceState>,
}

impl TxQueue for TapTx {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.buffer.get_mut(vnet::LEN..vnet::LEN + len)
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        self.buffer[..vnet::LEN].copy_from_slice(&vnet::encode(meta));
        loop {
            match rustix::io::write(&*self.fd, &self.buffer[..vnet::LEN + len]) {
                Err(Errno::INTR) => {}
                Ok(_) => return self.interface.record_sent(),
                Err(error) => {
                    self.stats.tx_dropped.fetch_add(1, Ordering::Relaxed);
                    // Short memory concerns this frame only.
                    if !matches!(error, Errno::NOBUFS | Errno::NOMEM | Errno::AGAIN) {
                        self.interface.record_failure(error);
                    }
                    return;
                }
            }
        }
    }

    fn flush(&mut self, _now: Instant) {}
}

struct TapRx {
    fd: Arc<OwnedFd>,
    /// The frames of the last burst with their headers, each at a multiple of 64 bytes.
    arena: Box<[u8]>,
    /// True if the interface was deleted.
    gone: bool,
    stats: Arc<TapStats>,
    reports_stats: bool,
}

/// A frame in the arena.
struct TapFrame {
    bytes: Range<usize>,
    checksum: RxChecksum,
    gso: Option<Gso>,
}

impl TapRx {
    /// Reads a frame to offset `at` of the arena. Returns `Ok(None)` if it is malformed.
    fn read_frame(&mut self, at: usize) -> Result<Option<TapFrame>, Errno> {
        let slot = &mut self.arena[at..at + SLOT_BYTES_MAX];
        let len = rustix::io::read(&*self.fd, &mut *slot)?;
        let decoded = slot[..len]
            .split_first_chunk::<{ vnet::LEN }>()
            .map(|(header, frame)| vnet::decode(header, frame));
        let Some(Ok((checksum, gso))) = decoded else {
            self.stats.rx_malformed.fetch_add(1, Ordering::Relaxed);
            return Ok(None);
        };
        Ok(Some(TapFrame { bytes: at + vnet::LEN..at + len, checksum, gso }))
    }
}

impl RxQueue for TapRx {
    fn rx_burst<'a>(&'a mut self, _now: Instant, burst: &mut RxBurst<'a>) {
        let mut filled = ArrayVec::<TapFrame, BURST_FRAMES_MAX>::new();
        let mut at = 0;
        while filled.len() < burst.remaining_capacity() && at + SLOT_BYTES_MAX <= self.arena.len() {
            match self.read_frame(at) {
                Ok(Some(frame)) => {
                    at = frame.bytes.end.next_multiple_of(64);
                    filled.push(frame);
                }
                Ok(None) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(error) => {
                    // The interface was deleted: no frame will come, and the descriptor is always readable.
                    self.gone = error == Errno::BADFD;
                    if self.stats.rx_errors.fetch_add(1, Ordering::Relaxed) == 0 {
                        tracing::error!(%error, "reading from a TAP device failed; further errors are counted only");
                    }
                    break;
                }
            }
        }
        for TapFrame { bytes, checksum, gso } in filled {
            burst.push(RxFrame { checksum, gso, ..RxFrame::new(&self.arena[bytes]) });
        }
    }

    // The descriptor is readable while frames are waiting, so `arm` has nothing to do.

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.fd.as_raw_fd())
    }

    fn is_gone(&self) -> bool {
        self.gone
    }

    fn counters(&self, report: &mut dyn FnMut(&'static str, u64)) {
        if self.reports_stats {
            report("tap_tx_dropped", self.stats.tx_dropped.load(Ordering::Relaxed));
            report("tap_rx_malformed", self.stats.rx_malformed.load(Ordering::Relaxed));
            report("tap_rx_errors", self.stats.rx_errors.load(Ordering::Relaxed));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
