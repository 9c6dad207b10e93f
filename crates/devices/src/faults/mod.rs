//! A link with faults around any device: delay, rate, loss, duplication, reordering, corruption, from a seed.
//!
//! It acts on wire segments, as a real link does: super-frames are cut and partial checksums completed first. The two directions
//! have a pipeline each (`pipeline.rs`): `up` for what the wrapped device sends, `down` for what it receives. The same
//! seed and the same frames give the same faults.

mod pipeline;
mod spec;
mod stats;

pub use spec::{Impairment, LinkSpec, LinkSpecError, Probability};
pub use stats::{FaultStats, LinkCounters};

use crate::offload::{WireFrames, meta_of};
use ginnel_stack::device::{
    BURST_FRAMES_MAX, Capabilities, Device, RxBurst, RxFrame, RxQueue, TxMeta, TxQueue,
};
use ginnel_stack::time::Instant;
use pipeline::Pipeline;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Frames taken between two flushes; then `reserve` asks for one. Ten bursts.
const UNFLUSHED_MAX: usize = 10 * BURST_FRAMES_MAX;
/// Bursts taken from the device in one call, so that a flood cannot keep the caller there.
const BURSTS_MAX: usize = 16;
/// How soon to try again when the device below takes no frame.
const RETRY: Duration = Duration::from_micros(100);

/// Puts a link with faults in front of a device.
#[must_use]
pub fn wrap(device: Device, spec: &LinkSpec, seed: u64) -> Device {
    wrap_counted(device, spec, seed).0
}

/// The same, with the counters of the link.
#[must_use]
pub fn wrap_counted(device: Device, spec: &LinkSpec, seed: u64) -> (Device, FaultStats) {
    let stats = FaultStats::default();
    let tx = FaultsTx {
        inner: device.tx,
        pipeline: Pipeline::new(spec.up.clone(), seed, stats.up.clone()),
        counters: stats.up.clone(),
        wire: WireFrames::new(),
        buffer: Vec::new(),
        unflushed: Vec::new(),
        spare_buffers: Vec::new(),
        blocked_until: None,
    };
    let rx = FaultsRx {
        inner: device.rx,
        // Another stream than the other direction's.
        pipeline: Pipeline::new(spec.down.clone(), seed ^ 0xd0f1_c3a5_7e2b_9648, stats.down.clone()),
        counters: stats.down.clone(),
        tx_counters: stats.up.clone(),
        wire: WireFrames::new(),
        lent: Vec::with_capacity(BURST_FRAMES_MAX),
        has_more: false,
    };
    (Device { rx: Box::new(rx), tx: Box::new(tx) }, stats)
}

struct FaultsTx {
    inner: Box<dyn TxQueue + Send>,
    pipeline: Pipeline,
    counters: Arc<LinkCounters>,
    wire: WireFrames,
    /// Lent by `reserve`.
    buffer: Vec<u8>,
    /// Committed: the time at which they enter the link is that of the flush.
    unflushed: Vec<(Vec<u8>, TxMeta)>,
    spare_buffers: Vec<Vec<u8>>,
    /// The device below is full; when to try it again.
    blocked_until: Option<Instant>,
}

impl FaultsTx {
    /// Passes on what has arrived at the other end of the link.
    fn deliver(&mut self, now: Instant) {
        self.blocked_until = None;
        let mut flushed = false;
        while let Some(frame) = self.pipeline.peek(now) {
            let Some(room) = self.inner.reserve(frame.len()) else {
                if flushed {
                    self.blocked_until = Some(now + RETRY);
                    break;
                }
                self.inner.flush(now);
                flushed = true;
                continue;
            };
            room.copy_from_slice(frame);
            self.inner.commit(frame.len(), TxMeta::default());
            if let Some(buffer) = self.pipeline.pop(now) {
                self.pipeline.recycle(buffer);
            }
        }
        self.inner.flush(now);
    }
}

impl TxQueue for FaultsTx {
    /// Those of the device below: its offloads are done in software here. Labels do not stand on a wire.
    fn capabilities(&self) -> Capabilities {
        Capabilities { labels: false, ..self.inner.capabilities() }
    }

    /// `None` while the device below is full, so that a link without a queue of its own holds the sender back as the device would.
    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        if self.blocked_until.is_some() || self.unflushed.len() >= UNFLUSHED_MAX {
            return None;
        }
        self.buffer.resize(len, 0);
        Some(&mut self.buffer)
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        self.buffer.truncate(len);
        let next = self.spare_buffers.pop().unwrap_or_default();
        self.unflushed.push((std::mem::replace(&mut self.buffer, next), meta));
    }

    fn flush(&mut self, now: Instant) {
        for (mut frame, meta) in self.unflushed.drain(..) {
            let result = self.wire.for_each(&frame, meta, |segment| self.pipeline.offer(now, segment));
            if result.is_err() {
                self.counters.malformed.fetch_add(1, Relaxed);
            }
            frame.clear();
            self.spare_buffers.push(frame);
        }
        self.deliver(now);
    }

    fn next_deadline(&self) -> Option<Instant> {
        let own = self.blocked_until.or(self.pipeline.next_arrival());
        own.into_iter().chain(self.inner.next_deadline()).min()
    }
}

struct FaultsRx {
    inner: Box<dyn RxQueue + Send>,
    pipeline: Pipeline,
    counters: Arc<LinkCounters>,
    /// Of the other direction, to be reported.
    tx_counters: Arc<LinkCounters>,
    wire: WireFrames,
    /// The frames of the last burst.
    lent: Vec<Vec<u8>>,
    /// The last call left something for the next.
    has_more: bool,
}

impl FaultsRx {
    fn recycle(&mut self) {
        for buffer in self.lent.drain(..) {
            self.pipeline.recycle(buffer);
        }
    }

    /// Moves what the device has received into the link. Returns false if there may be more.
    fn drain_device(&mut self, now: Instant) -> bool {
        for _ in 0..BURSTS_MAX {
            let mut burst = RxBurst::new();
            self.inner.rx_burst(now, &mut burst);
            if burst.is_empty() {
                return true;
            }
            for frame in &burst {
                let result = self
                    .wire
                    .for_each(frame.bytes, meta_of(frame), |segment| self.pipeline.offer(now, segment));
                if result.is_err() {
                    self.counters.malformed.fetch_add(1, Relaxed);
                }
            }
        }
        false
    }
}

impl RxQueue for FaultsRx {
    fn rx_burst<'a>(&'a mut self, now: Instant, burst: &mut RxBurst<'a>) {
        self.recycle();
        let empty = self.drain_device(now);
        while self.lent.len() < burst.remaining_capacity() {
            let Some(frame) = self.pipeline.pop(now) else { break };
            self.lent.push(frame);
        }
        self.has_more = !empty || self.pipeline.next_arrival().is_some_and(|arrival| arrival <= now);
        for frame in &self.lent {
            burst.push(RxFrame::new(frame));
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.pipeline.next_arrival().into_iter().chain(self.inner.next_deadline()).min()
    }

    fn arm(&mut self) -> bool {
        self.recycle();
        self.inner.arm() && !self.has_more
    }

    fn wake_fd(&self) -> Option<RawFd> {
        self.inner.wake_fd()
    }

    fn is_gone(&self) -> bool {
        self.inner.is_gone()
    }

    fn counters(&self, report: &mut dyn FnMut(&'static str, u64)) {
        self.inner.counters(report);
        let LinkCounters { lost, duplicated, reordered, corrupted, queue_full, .. } = &*self.tx_counters;
        for (name, count) in [
            ("faults_tx_lost", lost),
            ("faults_tx_duplicated", duplicated),
            ("faults_tx_reordered", reordered),
            ("faults_tx_corrupted", corrupted),
            ("faults_tx_queue_full", queue_full),
        ] {
            report(name, count.load(Relaxed));
        }
        let LinkCounters { lost, duplicated, reordered, corrupted, queue_full, .. } = &*self.counters;
        for (name, count) in [
            ("faults_rx_lost", lost),
            ("faults_rx_duplicated", duplicated),
            ("faults_rx_reordered", reordered),
            ("faults_rx_corrupted", corrupted),
            ("faults_rx_queue_full", queue_full),
        ] {
            report(name, count.load(Relaxed));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
