//! Devices in memory: a cable between two devices of one process ([`pair`]) and a switch ([`switch`]).
//!
//! Each direction is a ring of records (`ring.rs`): frames are written where they are read, without a copy, and indices
//! cross once per burst. Super-frames and partial checksums pass as they are, so neither side segments or sums.

mod multi_queue;
mod ring;
pub mod spsc;
mod sync;

pub use multi_queue::{RssMode, multi_queue};

use crate::offload::GSO_BYTES_MAX;
use crate::switch::Switch;
use ginnel_stack::device::{Capabilities, Device, RxBurst, RxQueue, TxMeta, TxQueue};
use ginnel_stack::time::Instant;
use ring::{RecordConsumer, RecordProducer};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, OnceLock};

/// Bytes that a frame can be longer than the MTU: an Ethernet header with a VLAN tag.
const LINK_HEADER_BYTES_MAX: usize = 18;

/// Bytes of the longest packet of [`to_itself`] that is no super-frame.
pub const LOOPBACK_MTU: usize = 16 << 10;

/// What [`pair`] makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryConfig {
    /// MAC addresses of the first and the second device.
    pub macs: [[u8; 6]; 2],
    /// Largest IP packet in bytes, both ways.
    pub mtu: usize,
    /// Whether frames may pass with partial checksums.
    pub tx_checksum: bool,
    /// Largest super-frame in bytes; 0 for none. Needs `tx_checksum`.
    pub gso_bytes_max: usize,
    /// Whether UDP super-frames pass too.
    pub uso: bool,
    /// Whether senders are to label frames. Labels that they have anyway pass in any case.
    pub labels: bool,
    /// Bytes of the ring of each direction. Rounded up to a power of two that holds at least two of the largest frames.
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
    /// The same without any offload: each frame is a wire frame with a complete checksum.
    #[must_use]
    pub fn without_offloads(self) -> Self {
        Self { tx_checksum: false, gso_bytes_max: 0, uso: false, ..self }
    }
}

/// Two devices joined by a cable: what one sends the other receives, in order, without loss.
///
/// They may be used from two threads. If one is dropped, what the other sends vanishes, as on an unplugged cable.
#[must_use]
pub fn pair(config: MemoryConfig) -> (Device, Device) {
    let [first, second] = config.macs;
    let (tx_a, rx_b) = direction(&config, first);
    let (tx_b, rx_a) = direction(&config, second);
    (Device { rx: Box::new(rx_a), tx: Box::new(tx_a) }, Device { rx: Box::new(rx_b), tx: Box::new(tx_b) })
}

/// A device whose frames come back to it, as Linux's `lo`: checksums are not computed, super-frames are not cut, and nothing is lost but what finds no room in a ring of so many
/// bytes. Packets are no longer than [`LOOP_MTU`], so that what depends on the size of segments (when to acknowledge, how much of a window is worth telling) stays lively; as
/// super-frames they are up to four times as long.
#[must_use]
pub fn loopback(ring_bytes: usize) -> Device {
    let config = MemoryConfig { mtu: LOOPBACK_MTU, ring_bytes, ..MemoryConfig::default() };
    let (tx, rx) = direction(&config, config.macs[0]);
    Device { rx: Box::new(rx), tx: Box::new(tx) }
}

/// A switch and `ports` devices on it, with the MAC addresses 02:00:00:00:00:01 and so on; those of `config` are not used.
///
/// Nobody forwards a frame but [`Switch::poll`]: a thread of its own calls it, or whoever polls the devices.
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
    let bell = Arc::new(OnceLock::new());
    let tx = MemoryTx { ring: producer, capabilities, doorbell: bell.clone() };
    (tx, MemoryRx { ring: consumer, doorbell: bell, armed: false, unread: 0 })
}

/// The eventfd that wakes the receiver. It exists from the first time that the receiver wants to sleep, so that
/// simulations with thousands of devices need no file descriptors. `None` inside: the kernel refused.
type Doorbell = Arc<OnceLock<Option<OwnedFd>>>;

struct MemoryTx {
    ring: RecordProducer,
    capabilities: Capabilities,
    doorbell: Doorbell,
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

    fn flush(&mut self, _now: Instant) {
        if self.ring.publish() {
            ring_doorbell(&self.doorbell);
        }
    }
}

#[cold]
fn ring_doorbell(bell: &Doorbell) {
    if let Some(Some(fd)) = bell.get() {
        // Fails only when the counter is full: then the receiver is awake anyway.
        let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
    }
}

struct MemoryRx {
    ring: RecordConsumer,
    doorbell: Doorbell,
    /// A wake-up was asked for and not taken back.
    armed: bool,
    /// Wake-ups that came, or are on their way, and were not taken from the bell.
    unread: u64,
}

impl MemoryRx {
    fn doorbell_fd(&self) -> Option<&OwnedFd> {
        use rustix::event::{EventfdFlags, eventfd};
        self.doorbell.get_or_init(|| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()).as_ref()
    }

    /// After a sleep: the next wake-up must not come from this one.
    #[cold]
    fn disarm(&mut self) {
        self.armed = false;
        self.unread += u64::from(self.ring.disarm());
        let mut count = [0; 8];
        // Would-block if it is on its way still: then the next sleep ends at once, and it is taken after that.
        if self.unread > 0
            && let Some(fd) = self.doorbell_fd()
            && rustix::io::read(fd, &mut count).is_ok()
        {
            self.unread = self.unread.saturating_sub(u64::from_ne_bytes(count));
        }
    }
}

impl RxQueue for MemoryRx {
    fn rx_burst<'a>(&'a mut self, _now: Instant, burst: &mut RxBurst<'a>) {
        if self.armed {
            self.disarm();
        }
        self.ring.burst(burst);
    }

    /// False too if the kernel refused an eventfd: then the caller must poll, as nothing could wake it.
    fn arm(&mut self) -> bool {
        self.ring.release();
        if self.doorbell_fd().is_none() {
            return false;
        }
        self.armed = true;
        let quiet = self.ring.arm();
        if !quiet {
            self.disarm();
        }
        quiet
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

    const PROMISES: Guarantees =
        Guarantees { back_pressure: true, uncut_super_frame_bytes: usize::MAX, labels: true };

    #[test]
    fn the_pair_conforms() {
        conformance::run("memory", PROMISES, &mut || pair(MemoryConfig::default()));
    }

    #[test]
    fn the_pair_conforms_without_offloads_and_with_any_mtu() {
        for mtu in [68, 576, 9000, 65_535] {
            let config = MemoryConfig { mtu, ..MemoryConfig::default() }.without_offloads();
            conformance::run("memory without offloads", PROMISES, &mut || pair(config.clone()));
        }
    }

    /// Two devices on a switch that a thread of its own drives until the test is over.
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
        conformance::run("switch", Guarantees { back_pressure: false, ..PROMISES }, &mut || {
            stop.store(true, Ordering::Relaxed);
            stop = Arc::new(AtomicBool::new(false));
            switched_pair(&stop)
        });
        stop.store(true, Ordering::Relaxed);
    }

    #[test]
    fn a_ring_too_small_for_a_super_frame_is_made_larger() {
        let config = MemoryConfig { ring_bytes: 0, ..MemoryConfig::default() };
        let (mut a, _b) = pair(config);
        assert_eq!(a.tx.reserve(GSO_BYTES_MAX).map(|room| room.len()), Some(GSO_BYTES_MAX));
    }

    #[test]
    fn no_file_descriptor_is_opened_before_somebody_wants_to_sleep() {
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
    fn a_signal_that_comes_after_the_sleep_ends_one_sleep_and_not_all() {
        let (mut tx, mut rx) = direction(&MemoryConfig::default(), [2, 0, 0, 0, 0, 1]);
        let is_readable = |rx: &MemoryRx| {
            use rustix::event::{PollFd, PollFlags, Timespec, poll};
            let mut fd = [PollFd::new(rx.doorbell_fd().unwrap(), PollFlags::IN)];
            poll(&mut fd, Some(&Timespec::default())).unwrap() > 0
        };
        assert!(rx.arm());
        tx.reserve(60).expect("the ring is empty");
        tx.commit(60, TxMeta::default());
        // The sender was interrupted between the two halves of `flush`.
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
