//! Copies the frames that pass a device, for a monitor or a recorder that observes the traffic.
//!
//! The layers are put around the halves of a device while somebody observes it, and removed afterwards: a
//! device that nobody observes costs nothing. Each half has a sink of its own, so no lock is needed.

pub mod ring;

use crate::offload::meta_of;
use crate::staged::StagedTx;
use ginnel_stack::device::{Capabilities, Device, RxBurst, RxQueue, TxClass, TxMeta, TxQueue};
use ginnel_stack::time::Instant;
use std::os::fd::RawFd;

/// Gets copies of the frames of one direction.
pub trait FrameSink: Send {
    /// Gets a frame, with the checksum and the segmentation that were left to the device.
    fn put(&mut self, frame: &[u8], meta: TxMeta);

    /// Ends a burst: frames were received, or have been passed to the device, in the turn that began at
    /// `now`. There may have been none.
    fn end_burst(&mut self, now: Instant);
}

/// Copies both directions of a device: what it receives to the first sink, what it sends to the second one.
#[must_use]
pub fn wrap(device: Device, received: impl FrameSink + 'static, sent: impl FrameSink + 'static) -> Device {
    Device { rx: wrap_rx(device.rx, received), tx: wrap_tx(device.tx, sent) }
}

/// Copies received frames. [`RxQueue::remove_layer`] returns `inner`.
#[must_use]
pub fn wrap_rx(inner: Box<dyn RxQueue + Send>, sink: impl FrameSink + 'static) -> Box<dyn RxQueue + Send> {
    Box::new(MirrorRx { inner, sink })
}

/// Copies sent frames, each once: from where it was built. [`TxQueue::remove_layer`] returns `inner`.
#[must_use]
pub fn wrap_tx(inner: Box<dyn TxQueue + Send>, sink: impl FrameSink + 'static) -> Box<dyn TxQueue + Send> {
    let is_staged = !inner.can_read_reserved();
    let inner = if is_staged { Box::new(StagedTx::new(inner)) } else { inner };
    Box::new(MirrorTx { inner, is_staged, sink })
}

struct MirrorRx<S> {
    inner: Box<dyn RxQueue + Send>,
    sink: S,
}

impl<S: FrameSink> RxQueue for MirrorRx<S> {
    fn rx_burst<'a>(&'a mut self, now: Instant, burst: &mut RxBurst<'a>) {
        let before = burst.len();
        self.inner.rx_burst(now, burst);
        if burst.len() > before {
            for frame in &burst[before..] {
                self.sink.put(frame.bytes, meta_of(frame));
            }
            self.sink.end_burst(now);
        }
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

    fn computes_hashes(&self) -> bool {
        self.inner.computes_hashes()
    }

    fn is_gone(&self) -> bool {
        self.inner.is_gone()
    }

    fn counters(&self, report: &mut dyn FnMut(&'static str, u64)) {
        self.inner.counters(report);
    }

    fn remove_layer(self: Box<Self>) -> Option<Box<dyn RxQueue + Send>> {
        Some(self.inner)
    }
}

struct MirrorTx<S> {
    /// Queue whose room can be read.
    inner: Box<dyn TxQueue + Send>,
    /// True if `inner` is a layer that was put around the queue for that.
    is_staged: bool,
    sink: S,
}

impl<S: FrameSink> TxQueue for MirrorTx<S> {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.inner.reserve(len)
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        self.sink.put(self.inner.reserved(len), meta);
        self.inner.commit(len, meta);
    }

    fn can_read_reserved(&self) -> bool {
        true
    }

    fn reserved(&mut self, len: usize) -> &[u8] {
        self.inner.reserved(len)
    }

    fn has_backlog(&mut self, frames: usize) -> bool {
        self.inner.has_backlog(frames)
    }

    fn select_class(&mut self, class: Option<TxClass>) {
        self.inner.select_class(class);
    }

    fn flush(&mut self, now: Instant) {
        self.inner.flush(now);
        self.sink.end_burst(now);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.inner.next_deadline()
    }

    fn remove_layer(self: Box<Self>) -> Option<Box<dyn TxQueue + Send>> {
        if self.is_staged { self.inner.remove_layer() } else { Some(self.inner) }
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
