//! A TAP device: the other end of the cable is an Ethernet interface of the Linux kernel.
//!
//! Each frame has a virtio-net header, so that checksums stay partial and super-frames whole in both directions; that is
//! worth a factor of seven in bulk transfers. The kernel drops what its queues cannot hold, so the sender is never held back.

mod ioctl;
pub(crate) mod vnet;

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

/// Bytes of the largest frame with its header: a super-frame with a VLAN tag.
const SLOT_BYTES_MAX: usize = vnet::LEN + GSO_BYTES_MAX + 4;
/// Bytes of the received frames of one burst: eight of the largest. Frames lie close together there, so that a burst of small ones stays
/// in the cache; a burst that ends for lack of room goes on with the next call.
const ARENA_BYTES: usize = 8 * SLOT_BYTES_MAX.next_multiple_of(64);
/// Linux's limit for TAP devices: 65,535 less an Ethernet header.
const MTU_MAX: usize = 65_521;

/// What [`open`] opens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TapConfig {
    /// Name of the kernel's interface: 1 to 15 bytes; `%d` stands for a free number. It is created if it does not exist, and then
    /// vanishes with the device. `None` is `ginnel%d`.
    pub name: Option<String>,
    /// MTU of both sides, 68 to 65,521 bytes. `None` takes what the interface has, 1500 for a new one.
    pub mtu: Option<usize>,
    /// MAC address of this side. `None` is the kernel's with its last bit flipped.
    pub mac: Option<[u8; 6]>,
    /// MAC address of the kernel's side. `None` leaves what it is.
    pub kernel_mac: Option<[u8; 6]>,
    /// Addresses and prefix lengths that the kernel's side gets.
    pub kernel_addresses: Vec<(IpAddr, u8)>,
    /// Leaves the interface down if it is. It must be up before frames can pass.
    pub leave_down: bool,
    /// Does without checksum and segmentation offloads.
    pub without_offloads: bool,
}

/// Errors that frames met. Counted because a queue has nobody to return them to.
#[derive(Debug, Default)]
pub struct TapStats {
    /// Frames that the kernel did not take: interface down (EIO), or no memory.
    pub tx_dropped: AtomicU64,
    /// Frames with a virtio-net header that contradicts them.
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
    /// One device for each queue; the kernel spreads flows over them.
    pub queues: Vec<Device>,
    /// Shared by all queues.
    pub stats: Arc<TapStats>,
}

/// Opens a TAP device with one queue.
///
/// # Errors
/// See [`open_queues`].
pub fn open(config: &TapConfig) -> io::Result<Device> {
    let mut tap = open_queues(config, 1)?;
    tap.queues.pop().ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// Opens a TAP device with `queues` queues (at least one), in the network namespace of the calling thread.
///
/// # Errors
/// `InvalidInput` for a value outside its range. Otherwise what the kernel answered, with the step that failed: `NotFound` without
/// /dev/net/tun, `PermissionDenied` without CAP_NET_ADMIN unless the interface exists, belongs to the user and needs no change,
/// `ResourceBusy` if somebody else has it open.
pub fn open_queues(config: &TapConfig, queues: usize) -> io::Result<Tap> {
    let name = config.name.as_deref().unwrap_or("ginnel%d");
    validate(config, name, queues)?;
    let context =
        |step: &str, error: io::Error| io::Error::new(error.kind(), format!("TAP {name}: {step}: {error}"));
    let (first, name) =
        ioctl::open_queue(name, queues > 1).map_err(|error| context("opening /dev/net/tun", error.into()))?;
    let mut fds = vec![first];
    for _ in 1..queues {
        fds.push(ioctl::open_queue(&name, true).map_err(|error| context("adding a queue", error.into()))?.0);
    }
    let mut uso = true;
    for fd in &fds {
        ioctl::set_header_len(fd, vnet::LEN)
            .map_err(|error| context("setting the header length", error.into()))?;
        uso &= set_offloads(fd, config).map_err(|error| context("setting offloads", error.into()))?;
    }
    let kernel =
        configure_interface(&name, config).map_err(|error| context("configuring the interface", error))?;
    let mut mac = kernel.mac;
    mac[5] ^= 1;
    let capabilities = Capabilities {
        mac: config.mac.unwrap_or(mac),
        mtu: kernel.mtu,
        tx_checksum: !config.without_offloads,
        gso_bytes_max: if config.without_offloads { 0 } else { GSO_BYTES_MAX },
        uso: uso && !config.without_offloads,
        labels: false,
    };
    if capabilities.mac == kernel.mac {
        return Err(invalid("both sides of a TAP device have the same MAC address".into()));
    }
    let stats = Arc::new(TapStats::default());
    let queues =
        fds.into_iter().enumerate().map(|(n, fd)| new_queue(fd, capabilities, &stats, n == 0)).collect();
    Ok(Tap { name, kernel_mac: kernel.mac, queues, stats })
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
            "{name:?} is no name of an interface: 1 to 15 bytes without blanks, / and :"
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
        return Err(invalid(format!("TAP {name} needs a queue")));
    }
    Ok(())
}

/// Returns whether UDP super-frames were agreed on, which Linux knows since 6.2.
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

/// Asks only for what differs, so that an interface which is ready needs no privilege.
fn configure_interface(name: &str, config: &TapConfig) -> io::Result<netlink::LinkInfo> {
    let mut netlink = Netlink::open()?;
    let link = netlink.link(name)?;
    let change = LinkChange {
        up: !config.leave_down && !link.up,
        mtu: config.mtu.filter(|&mtu| mtu != link.mtu),
        mac: config.kernel_mac.filter(|&mac| mac != link.mac),
    };
    netlink.change_link(link.index, change)?;
    for &(address, prefix) in &config.kernel_addresses {
        netlink.add_address(link.index, address, prefix)?;
    }
    netlink.link(name)
}

/// `reports`: whether it is the queue that reports what all have counted.
fn new_queue(fd: OwnedFd, capabilities: Capabilities, stats: &Arc<TapStats>, reports: bool) -> Device {
    let fd = Arc::new(fd);
    let tx = TapTx {
        fd: fd.clone(),
        capabilities,
        buffer: vec![0; SLOT_BYTES_MAX].into_boxed_slice(),
        stats: stats.clone(),
    };
    let arena = vec![0; ARENA_BYTES].into_boxed_slice();
    let rx = TapRx { fd, arena, gone: false, stats: stats.clone(), reports_stats: reports };
    Device { rx: Box::new(rx), tx: Box::new(tx) }
}

/// The kernel takes one frame per system call, so frames leave at `commit` and `flush` has nothing to do.
struct TapTx {
    fd: Arc<OwnedFd>,
    capabilities: Capabilities,
    /// Header and frame.
    buffer: Box<[u8]>,
    stats: Arc<TapStats>,
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
                Ok(_) => return,
                Err(_) => {
                    self.stats.tx_dropped.fetch_add(1, Ordering::Relaxed);
                    return;
                }
            }
        }
    }

    fn flush(&mut self, _now: Instant) {}
}

struct TapRx {
    fd: Arc<OwnedFd>,
    /// The frames of the last burst with their headers, each at a multiple of 64.
    arena: Box<[u8]>,
    /// Somebody deleted the interface.
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
    /// Reads a frame to `at`. `Ok(None)` if it was none.
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
                    // From then on nothing comes, and the descriptor is readable for ever.
                    self.gone = error == Errno::BADFD;
                    if self.stats.rx_errors.fetch_add(1, Ordering::Relaxed) == 0 {
                        tracing::error!(%error, "reading from a TAP device; further errors are only counted");
                    }
                    break;
                }
            }
        }
        for TapFrame { bytes, checksum, gso } in filled {
            burst.push(RxFrame { checksum, gso, ..RxFrame::new(&self.arena[bytes]) });
        }
    }

    // The descriptor is readable as long as frames wait, so there is nothing to arm.

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
