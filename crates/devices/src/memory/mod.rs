//! Devices in memory: a cable between two devices of one process ([`pair`]) and a switch ([`switch`]).
//!
//! Each direction is a ring of records (`ring.rs`): the sender writes a frame where the receiver reads it,
//! without a copy, and the ring indices are exchanged once per burst. Super-frames and partial checksums pass
//! unchanged, so neither side segments frames or computes checksums.

mod backlog;
mod multi_queue;
mod ring;
pub mod spsc;
mod sync;

pub use multi_queue::{ADAPTER_KEY, RssMode, adapter_table, multi_queue};

use crate::offload::GSO_BYTES_MAX;
use crate::switch::Switch;
use backlog::RingBacklog;
use ginnel_stack::device::{Capabilities, Device, RxBurst, RxQueue, TxMeta, TxQueue};
use ginnel_stack::time::Instant;
use ring::{RecordConsumer, RecordProducer};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, OnceLock};

/// Bytes by which a frame can exceed the MTU: an Ethernet header with a VLAN tag.
const LINK_HEADER_BYTES_MAX: usize = 18;

/// MTU of [`loopback`] in bytes.
pub const LOOPBACK_MTU: usize = 16 << 10;

/// Configuration of [`pair`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryConfig {
    /// MAC addresses of the first and the second device.
    pub macs: [[u8; 6]; 2],
    /// Largest IP packet in bytes, in both directions.
    pub mtu: usize,
    /// True if frames may pass with partial checksums.
    pub tx_checksum: bool,
    /// Largest super-frame in bytes; 0 for none. Needs `tx_checksum`.
    pub gso_bytes_max: usize,
    /// True if UDP super-frames pass too.
    pub uso: bool,
    /// True if senders shall label frames. Labels pass in any case.
    pub labels: bool,
    /// Bytes of the ring of each direction, rounded up to a power of two that holds at least two of the
    /// largest frames.
    // limit: bytes in a ring of the memory device
    pub ring_bytes: usize,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            macs: [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]],
            mtu: 1500,
            tx_checksum: true,
            gso_bytes_max: GSO_BYTES_MAX,
            uso: true,
            labels: false,
            ring_bytes: 1 << 20,
        }
    }
}

impl MemoryConfig {
    /// Returns the configuration without any offload: each frame is a wire frame with a complete checksum.
    #[must_use]
    pub fn without_offloads(self) -> Self {
        Self { tx_checksum: false, gso_bytes_max: 0, uso: false, ..self }
    }
}

/// Creates two devices joined by a cable: each receives the frames of the other, in order and without loss.
///
/// Two threads may use the two devices. If one device is dropped, frames of the other vanish, as on an
/// unplugged cable.
#[must_use]
pub fn pair(config: MemoryConfig) -> (Device, Device) {
    let [first, second] = config.macs;
    let (tx_a, rx_b) = direction(&config, first);
    let (tx_b, rx_a) = direction(&config, second);
    (Device { rx: Box::new(rx_a), tx: Box::new(tx_a) }, Device { rx: Box::new(rx_b), tx: Box::new(tx_b) })
}

/// Creates a device that receives its own frames, like Linux's `lo`: checksums are not computed, super-frames
/// are not segmented, and a frame is lost only if the ring of `ring_bytes` bytes has no room for it. Packets
/// have at most [`LOOPBACK_MTU`] bytes, so that algorithms that depend on the segment size (delayed
/// acknowledgements, window updates) remain responsive; super-frames are up to four times as long.
#[must_use]
pub fn loopback(ring_bytes: usize) -> Device {
    let config = MemoryConfig { mtu: LOOPBACK_MTU, ring_bytes, ..MemoryConfig::default() };
    let (tx, rx) = direction(&config, config.macs[0]);
    Device { rx: Box::new(rx), tx: Box::new(tx) }
}

/// Creates a switch and `ports` devices on it with the MAC addresses 02:00:00:00:00:01 and so on; the
/// addresses of `config` are not used.
///
/// Frames are forwarded only by [`Switch::poll`], which a thread of its own calls, or the thread that polls
/// the devices.
#[must_use]
pub fn switch(ports: u16, config: &MemoryConfig) -> (Switch, Vec<Device>) {
    let cable = |port: u16| {
        let [high, low] = (port + 1).to_be_bytes();
        let macs = [[2, 0, 0, 0, high, low], [2, 0, 0, 1, high, low]];
        pair(MemoryConfig { macs, ..config.clone() })
    };
    let (stations, ends): (Vec<_>, Vec<_>) = (0..ports).map(cable).unzip();
    (Switch::new(ends, 16 * usize::from(ports)), stations)
}

fn direction(config: &MemoryConfig, sender_mac: [u8; 6]) -> (MemoryTx, MemoryRx) {
    let gso_bytes_max = if config.tx_checksum { config.gso_bytes_max } else { 0 };
    let capabilities = Capabilities {
        mac: sender_mac,
        mtu: config.mtu,
        tx_checksum: config.tx_checksum,
        gso_bytes_max,
        uso: config.uso && gso_bytes_max > 0,
        labels: config.labels,
    };
    let frame_bytes_max = gso_bytes_max.max(config.mtu + LINK_HEADER_BYTES_MAX);
    let (producer, consumer) =
        ring::ring(config.ring_bytes.max(ring::capacity_min(frame_bytes_max)), ring::LAP_BYTES_MIN);
    let doorbell = Arc::new(OnceLock::new());
    let backlog = RingBacklog::default();
    let tx = MemoryTx { ring: producer, capabilities, doorbell: doorbell.clone(), backlog };
    (tx, MemoryRx { ring: consumer, doorbell, armed: false, computes_hashes: false, unread: 0 })
}

/// The eventfd that wakes the receiver. It is created when the receiver first wants to sleep, so that
/// simulations with thousands of devices need no file descriptors. The inner `None` means that the kernel
/// refused to create it.
type Doorbell = Arc<OnceLock<Option<OwnedFd>>>;

struct MemoryTx {
    ring: RecordProducer,
    capabilities: Capabilities,
    doorbell: Doorbell,
    backlog: RingBacklog,
}

impl TxQueue for MemoryTx {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.ring.reserve(len)
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        self.ring.commit(len, meta);
    }

    fn has_backlog(&mut self, frames: usize) -> bool {
        self.backlog.has_segments(&mut self.ring, frames)
    }

    fn flush(&mut self, _now: Instant) {
        if self.ring.publish() {
            ring_doorbell(&self.doorbell);
        }
    }
}

#[cold]
fn ring_doorbell(doorbell: &Doorbell) {
    if let Some(Some(fd)) = doorbell.get() {
        // Writing fails only if the counter is full, in which case the receiver is awake already.
        let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
    }
}

struct MemoryRx {
    ring: RecordConsumer,
    doorbell: Doorbell,
    /// True if a wake-up was requested and not withdrawn.
    armed: bool,
    /// True if the hashes of frames were computed by a simulated adapter.
    computes_hashes: bool,
    /// Wake-ups that were sent, or are about to be, and that have not been read from the eventfd.
    unread: u64,
}

impl MemoryRx {
    fn doorbell_fd(&self) -> Option<&OwnedFd> {
        use rustix::event::{EventfdFlags, eventfd};
        self.doorbell.get_or_init(|| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()).as_ref()
    }

    /// Withdraws the request for a wake-up after a sleep, so that a late signal does not end the next sleeps,
    /// too.
    #[cold]
    fn disarm(&mut self) {
        self.armed = false;
        self.unread += u64::from(self.ring.disarm());
        let mut count = [0; 8];
        // The read would block if the signal has not been written yet: the next sleep ends at once then, and
        // the signal is read after it.
        if self.unread > 0
            && let Some(fd) = self.doorbell_fd()
            && rustix::io::read(fd, &mut count).is_ok()
        {
            self.unread = self.unread.saturating_sub(u64::from_ne_bytes(count));
        }
    }
}

impl RxQueue for MemoryRx {
    fn computes_hashes(&self) -> bool {
        self.computes_hashes
    }

    fn rx_burst<'a>(&'a mut self, _now: Instant, burst: &mut RxBurst<'a>) {
        if self.armed {
            self.disarm();
        }
        self.ring.burst(burst);
    }

    /// Also returns false if the kernel refused to create an eventfd: the caller must poll then, because
    /// nothing could wake it.
    fn arm(&mut self) -> bool {
        self.ring.release();
        if self.doorbell_fd().is_none() {
            return false;
        }
        self.armed = true;
        let is_empty = self.ring.arm();
        if !is_empty {
            self.disarm();
        }
        is_empty
    }

    fn wake_fd(&self) -> Option<RawFd> {
        self.doorbell_fd().map(AsRawFd::as_raw_fd)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::conformance::{self, Guarantees};
    use std::sync::atomic::{AtomicBool, Ordering};

    const GUARANTEES: Guarantees =
        Guarantees { back_pressure: true, uncut_super_frame_bytes: usize::MAX, labels: true };

    #[test]
    fn pair_conforms() {
        conformance::run("memory", GUARANTEES, &mut || pair(MemoryConfig::default()));
    }

    #[test]
    fn pair_conforms_without_offloads() {
        for mtu in [68, 576, 9000, 65_535] {
            let config = MemoryConfig { mtu, ..MemoryConfig::default() }.without_offloads();
            conformance::run("memory without offloads", GUARANTEES, &mut || pair(config.clone()));
        }
    }

    /// Creates two devices on a switch that a separate thread drives until `stop` is set.
    fn switched_pair(stop: &Arc<AtomicBool>) -> (Device, Device) {
        let (mut switch, mut devices) = switch(3, &MemoryConfig::default());
        let stop = stop.clone();
        std::thread::spawn(move || {
            let start = std::time::Instant::now();
            while !stop.load(Ordering::Relaxed) {
                if switch.poll(Instant::from_nanos(start.elapsed().as_nanos() as u64)) == 0 {
                    std::thread::sleep(std::time::Duration::from_micros(50));
                }
            }
        });
        let right = devices.swap_remove(1);
        (devices.swap_remove(0), right)
    }

    #[test]
    fn two_devices_on_a_switch_conform() {
        let mut stop = Arc::new(AtomicBool::new(false));
        conformance::run("switch", Guarantees { back_pressure: false, ..GUARANTEES }, &mut || {
            stop.store(true, Ordering::Relaxed);
            stop = Arc::new(AtomicBool::new(false));
            switched_pair(&stop)
        });
        stop.store(true, Ordering::Relaxed);
    }

    #[test]
    fn capacity_is_raised_to_a_super_frame() {
        let config = MemoryConfig { ring_bytes: 0, ..MemoryConfig::default() };
        let (mut a, _b) = pair(config);
        assert_eq!(a.tx.reserve(GSO_BYTES_MAX).map(|room| room.len()), Some(GSO_BYTES_MAX));
    }

    #[test]
    fn eventfd_is_opened_at_the_first_sleep() {
        let (mut tx, mut rx) = direction(&MemoryConfig::default(), [2, 0, 0, 0, 0, 1]);
        tx.reserve(60).expect("the ring is empty");
        tx.commit(60, TxMeta::default());
        tx.flush(Instant::ZERO);
        rx.rx_burst(Instant::ZERO, &mut RxBurst::new());
        assert!(rx.doorbell.get().is_none());
        assert!(rx.arm());
        assert!(rx.doorbell.get().is_some());
    }

    #[test]
    fn late_signal_ends_only_one_sleep() {
        let (mut tx, mut rx) = direction(&MemoryConfig::default(), [2, 0, 0, 0, 0, 1]);
        let is_readable = |rx: &MemoryRx| {
            use rustix::event::{PollFd, PollFlags, Timespec, poll};
            let mut fd = [PollFd::new(rx.doorbell_fd().unwrap(), PollFlags::IN)];
            poll(&mut fd, Some(&Timespec::default())).unwrap() > 0
        };
        assert!(rx.arm());
        tx.reserve(60).expect("the ring is empty");
        tx.commit(60, TxMeta::default());
        // The sender was interrupted between the two steps of `flush`.
        assert!(tx.ring.publish());
        let frames = |rx: &mut MemoryRx| {
            let mut burst = RxBurst::new();
            rx.rx_burst(Instant::ZERO, &mut burst);
            burst.len()
        };
        assert_eq!(frames(&mut rx), 1);
        ring_doorbell(&tx.doorbell);
        assert!(rx.arm() && is_readable(&rx));
        assert_eq!(frames(&mut rx), 0);
        assert!(rx.arm() && !is_readable(&rx));
    }
}
