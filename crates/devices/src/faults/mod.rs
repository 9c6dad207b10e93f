//! An impaired link around any device: delay, rate, loss, duplication, reordering and corruption, determined
//! by a seed.
//!
//! The link acts on wire frames, like a real link: super-frames are segmented and partial checksums completed
//! first. Each direction has a pipeline (`pipeline.rs`): `up` for frames that the wrapped device sends,
//! `down` for frames that it receives. Equal seeds and frames give equal faults.

mod pipeline;
mod spec;
mod stats;

pub use spec::{Impairment, LinkSpec, LinkSpecError, Probability};
pub use stats::{FaultStats, LinkCounters};

use crate::offload::{WireFrames, meta_of};
use ginnel_stack::device::{
    BURST_FRAMES_MAX, Capabilities, Device, RxBurst, RxFrame, RxQueue, TxClass, TxMeta, TxQueue,
};
use ginnel_stack::time::Instant;
use pipeline::Pipeline;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Maximum number of frames between two flushes, after which `reserve` returns `None`. Ten bursts.
const UNFLUSHED_MAX: usize = 10 * BURST_FRAMES_MAX;
/// Maximum number of bursts taken from the device in one call, so that a flood cannot occupy the caller.
const BURSTS_MAX: usize = 16;
/// Retry interval while the device below accepts no frame.
const RETRY: Duration = Duration::from_micros(100);

/// Wraps a device in an impaired link.
#[must_use]
pub fn wrap(device: Device, spec: &LinkSpec, seed: u64) -> Device {
    wrap_counted(device, spec, seed).0
}

/// Wraps a device in an impaired link, and returns the counters of the link, too.
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
        unflushed_wire_frames: 0,
        backlog_ends: None,
        spare_buffers: Vec::new(),
        blocked_until: None,
    };
    let rx = FaultsRx {
        inner: device.rx,
        // The two directions use different random streams.
        pipeline: Pipeline::new(spec.down.clone(), seed ^ 0xd0f1_c3a5_7e2b_9648, stats.down.clone()),
        counters: stats.down.clone(),
        tx_counters: stats.up.clone(),
        wire: WireFrames::new(),
        lent: Vec::with_capacity(BURST_FRAMES_MAX),
        has_more: false,
    };
    (Device { rx: Box::new(rx), tx: Box::new(tx) }, stats)
}

/// Returns the number of wire frames into which a frame of `len` bytes is segmented.
fn wire_frames(len: usize, meta: TxMeta) -> usize {
    let Some(gso) = meta.gso else { return 1 };
    let payload = len.saturating_sub(gso.header_len.into());
    payload.div_ceil(usize::from(gso.size).max(1)).max(1)
}

struct FaultsTx {
    inner: Box<dyn TxQueue + Send>,
    pipeline: Pipeline,
    counters: Arc<LinkCounters>,
    wire: WireFrames,
    /// Buffer that `reserve` lends.
    buffer: Vec<u8>,
    /// Committed frames. They enter the link at the time of the flush.
    unflushed: Vec<(Vec<u8>, TxMeta)>,
    /// Number of wire frames into which `unflushed` will be segmented.
    unflushed_wire_frames: usize,
    /// Earliest end of the backlogs that `has_backlog` has reported since the last flush.
    backlog_ends: Option<Instant>,
    spare_buffers: Vec<Vec<u8>>,
    /// If the device below is full, the time of the next attempt.
    blocked_until: Option<Instant>,
}

impl FaultsTx {
    /// Passes on frames that have arrived at the other end of the link.
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
    /// Returns the capabilities of the device below, whose offloads are performed in software here. Labels
    /// are not transmitted on a wire.
    fn capabilities(&self) -> Capabilities {
        Capabilities { labels: false, ..self.inner.capabilities() }
    }

    /// Returns `None` while the device below is full, so that a link without a queue of its own exerts the
    /// back-pressure of the device.
    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        if self.blocked_until.is_some() || self.unflushed.len() >= UNFLUSHED_MAX {
            return None;
        }
        self.buffer.resize(len, 0);
        Some(&mut self.buffer)
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        self.buffer.truncate(len);
        self.unflushed_wire_frames += wire_frames(len, meta);
        let next = self.spare_buffers.pop().unwrap_or_default();
        self.unflushed.push((std::mem::replace(&mut self.buffer, next), meta));
    }

    fn has_backlog(&mut self, frames: usize) -> bool {
        let waiting = self.unflushed_wire_frames + self.pipeline.waiting();
        if waiting >= frames {
            // The engine sends nothing while there is a backlog, so `next_deadline` has to ask for a flush.
            let ends = self.pipeline.sent_at(waiting - frames);
            self.backlog_ends = self.backlog_ends.into_iter().chain(ends).min();
            return true;
        }
        self.inner.has_backlog(frames)
    }

    fn select_class(&mut self, class: Option<TxClass>) {
        self.inner.select_class(class);
    }

    fn flush(&mut self, now: Instant) {
        self.pipeline.remove_sent(now);
        (self.unflushed_wire_frames, self.backlog_ends) = (0, None);
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
        own.into_iter().chain(self.backlog_ends).chain(self.inner.next_deadline()).min()
    }
}

struct FaultsRx {
    inner: Box<dyn RxQueue + Send>,
    pipeline: Pipeline,
    counters: Arc<LinkCounters>,
    /// Counters of the other direction, for reports.
    tx_counters: Arc<LinkCounters>,
    wire: WireFrames,
    /// The frames of the last burst.
    lent: Vec<Vec<u8>>,
    /// True if the last call left frames for the next one.
    has_more: bool,
}

impl FaultsRx {
    fn recycle(&mut self) {
        for buffer in self.lent.drain(..) {
            self.pipeline.recycle(buffer);
        }
    }

    /// Moves received frames of the device into the link. Returns false if more may be waiting.
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
        let is_drained = self.drain_device(now);
        while self.lent.len() < burst.remaining_capacity() {
            let Some(frame) = self.pipeline.pop(now) else { break };
            self.lent.push(frame);
        }
        self.has_more = !is_drained || self.pipeline.next_arrival().is_some_and(|arrival| arrival <= now);
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

    // The link drops labels, so no frame has a hash that would have to be checked.
    fn computes_hashes(&self) -> bool {
        true
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
