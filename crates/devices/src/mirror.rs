//! Copies all frames that pass a device to a second one, for example for an intrusion detection system, a
//! recorder, or a second stack that observes the traffic.

use crate::offload::{Forwarder, meta_of};
use crate::staged::StagedTx;
use ginnel_stack::device::{Capabilities, Device, RxBurst, RxQueue, TxMeta, TxQueue};
use ginnel_stack::time::Instant;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Counters of the copies. They never decrease.
#[derive(Debug, Default)]
// limit: bytes in the ring of a mirror
pub struct MirrorStats {
    /// Frames copied. A super-frame counts once.
    pub copied: AtomicU64,
    /// Frames, or segments of super-frames, that the second device did not accept because it is full or
    /// because they are longer than it can send. The traffic itself is not affected.
    pub dropped: AtomicU64,
}

/// Copies both directions of `device` to `monitor`.
#[must_use]
pub fn wrap(device: Device, monitor: Box<dyn TxQueue + Send>) -> Device {
    wrap_counted(device, monitor).0
}

/// Copies both directions of `device` to `monitor`, and returns the counters, too.
///
/// Copies are unchanged if the second device supports the offloads of the frame; otherwise they are segmented
/// and have complete checksums. The second device is flushed after each burst and at each flush.
#[must_use]
pub fn wrap_counted(device: Device, monitor: Box<dyn TxQueue + Send>) -> (Device, Arc<MirrorStats>) {
    let stats = Arc::new(MirrorStats::default());
    let monitor =
        Monitor { tx: monitor, forwarder: Forwarder::default(), unflushed: false, stats: stats.clone() };
    let monitor = Arc::new(Mutex::new(monitor));
    let rx = MirrorRx { inner: device.rx, monitor: monitor.clone() };
    let tx = MirrorTx { staged: StagedTx::new(device.tx), monitor };
    (Device { rx: Box::new(rx), tx: Box::new(tx) }, stats)
}

/// The second device, which both halves share.
struct Monitor {
    tx: Box<dyn TxQueue + Send>,
    forwarder: Forwarder,
    unflushed: bool,
    stats: Arc<MirrorStats>,
}

impl Monitor {
    fn copy(&mut self, frame: &[u8], meta: TxMeta) {
        self.unflushed = true;
        self.stats.copied.fetch_add(1, Relaxed);
        let dropped = self.forwarder.send(frame, meta, &mut *self.tx);
        if dropped > 0 {
            self.stats.dropped.fetch_add(dropped, Relaxed);
        }
    }

    /// Flushes the second device after new copies, and when its deadline is due, for example that of an
    /// impaired link.
    fn flush(&mut self, now: Instant) {
        if self.unflushed || self.tx.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.unflushed = false;
            self.tx.flush(now);
        }
    }
}

/// Locks the second device. The lock is contended only if two threads use the halves.
fn lock(monitor: &Mutex<Monitor>) -> MutexGuard<'_, Monitor> {
    monitor.lock().unwrap_or_else(PoisonError::into_inner)
}

struct MirrorRx {
    inner: Box<dyn RxQueue + Send>,
    monitor: Arc<Mutex<Monitor>>,
}

impl RxQueue for MirrorRx {
    fn rx_burst<'a>(&'a mut self, now: Instant, burst: &mut RxBurst<'a>) {
        let before = burst.len();
        self.inner.rx_burst(now, burst);
        if burst.len() == before {
            return;
        }
        let mut monitor = lock(&self.monitor);
        for frame in &burst[before..] {
            monitor.copy(frame.bytes, meta_of(frame));
        }
        monitor.flush(now);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.inner.next_deadline()
    }

    fn arm(&mut self) -> bool {
        self.inner.arm()
    }

    fn wake_fd(&self) -> Option<RawFd> {
        self.inner.wake_fd()
    }

    fn is_gone(&self) -> bool {
        self.inner.is_gone()
    }

    fn counters(&self, report: &mut dyn FnMut(&'static str, u64)) {
        self.inner.counters(report);
        let monitor = lock(&self.monitor);
        report("mirror_copied", monitor.stats.copied.load(Relaxed));
        report("mirror_dropped", monitor.stats.dropped.load(Relaxed));
    }
}

struct MirrorTx {
    staged: StagedTx,
    monitor: Arc<Mutex<Monitor>>,
}

impl TxQueue for MirrorTx {
    fn capabilities(&self) -> Capabilities {
        self.staged.inner.capabilities()
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.staged.reserve(len)
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        if let Some(frame) = self.staged.commit(len, meta) {
            lock(&self.monitor).copy(frame, meta);
        }
    }

    fn flush(&mut self, now: Instant) {
        self.staged.inner.flush(now);
        lock(&self.monitor).flush(now);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.staged.inner.next_deadline().into_iter().chain(lock(&self.monitor).tx.next_deadline()).min()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::conformance::{self, Guarantees};
    use crate::memory::{MemoryConfig, pair};
    use ginnel_stack::device::{Gso, GsoKind};

    fn send(device: &mut Device, frame: &[u8], meta: TxMeta) {
        device.tx.reserve(frame.len()).expect("room").copy_from_slice(frame);
        device.tx.commit(frame.len(), meta);
        device.tx.flush(Instant::ZERO);
    }

    fn receive(device: &mut Device) -> Vec<Vec<u8>> {
        let mut burst = RxBurst::new();
        device.rx.rx_burst(Instant::ZERO, &mut burst);
        burst.iter().map(|frame| frame.bytes.to_vec()).collect()
    }

    #[test]
    fn mirrored_device_conforms() {
        let guarantees =
            Guarantees { back_pressure: true, uncut_super_frame_bytes: usize::MAX, labels: true };
        let mut monitors = Vec::new();
        conformance::run("mirror", guarantees, &mut || {
            let (left, right) = pair(MemoryConfig::default());
            let (monitor, watcher) = pair(MemoryConfig::default());
            // A monitor device that is never read must not affect the traffic.
            monitors.push(watcher);
            (wrap(left, monitor.tx), right)
        });
    }

    #[test]
    fn both_directions_are_mirrored() {
        let (left, mut right) = pair(MemoryConfig::default());
        let (monitor, mut watcher) = pair(MemoryConfig::default());
        let mut left = wrap(left, monitor.tx);
        send(&mut left, &[1; 60], TxMeta::default());
        send(&mut right, &[2; 70], TxMeta::default());
        assert_eq!(receive(&mut left), [vec![2; 70]]);
        assert_eq!(receive(&mut right), [vec![1; 60]]);
        assert_eq!(receive(&mut watcher), [vec![1; 60], vec![2; 70]]);
    }

    // limit: bytes in the ring of a mirror
    #[test]
    fn full_monitor_drops_without_affecting_traffic() {
        let (left, mut right) = pair(MemoryConfig::default());
        let small = MemoryConfig { ring_bytes: 4096, ..MemoryConfig::default() }.without_offloads();
        let (monitor, mut watcher) = pair(small);
        let (mut left, stats) = wrap_counted(left, monitor.tx);
        for number in 0..100 {
            send(&mut left, &[number; 1000], TxMeta::default());
            assert_eq!(receive(&mut right), [vec![number; 1000]]);
        }
        let seen = receive(&mut watcher).len() as u64;
        assert!(seen > 0);
        assert_eq!((stats.copied.load(Relaxed), stats.dropped.load(Relaxed)), (100, 100 - seen));
    }

    #[test]
    fn monitor_without_offloads_receives_segments() {
        let (left, _right) = pair(MemoryConfig::default());
        let (monitor, mut watcher) = pair(MemoryConfig::default().without_offloads());
        let mut left = wrap(left, monitor.tx);
        let mut frame = vec![0; 54 + 3000];
        frame[12..15].copy_from_slice(&[8, 0, 0x45]);
        frame[16..18].copy_from_slice(&3040u16.to_be_bytes());
        frame[22..24].copy_from_slice(&[64, 6]);
        frame[46] = 0x50;
        let gso = Gso { kind: GsoKind::Tcp4, size: 1460, header_len: 54, ecn: false };
        send(&mut left, &frame, TxMeta { partial_checksum: Some((34, 16)), gso: Some(gso), ..TxMeta::NONE });
        let lengths: Vec<usize> = receive(&mut watcher).iter().map(Vec::len).collect();
        assert_eq!(lengths, [1514, 1514, 134]);
    }
}
