//! Copies the frames that pass a device, for a monitor or a recorder that observes the traffic.
//!
//! The layers are put around the halves of a device while somebody observes it, and removed afterwards: a
//! device that nobody observes costs nothing. Each half has a sink of its own, so no lock is needed.

#![allow(unsafe_code)] // reads a frame where it was built, and calls functions with vector instructions

pub mod ring;

use crate::offload::meta_of;
use ginnel_stack::device::{Capabilities, Device, RxBurst, RxFrame, RxQueue, TxClass, TxMeta, TxQueue};
use ginnel_stack::time::Instant;
use std::cell::Cell;
use std::os::fd::RawFd;
use std::ptr::NonNull;

/// Gets copies of the frames of one direction.
pub trait FrameSink: Send {
    /// Gets a frame, with the checksum and the segmentation that were left to the device.
    fn put(&mut self, frame: &[u8], meta: TxMeta);

    /// Gets a frame if that takes only a few instructions. Returns false if [`FrameSink::put`] must get it.
    #[inline(always)]
    fn put_short(&mut self, frame: &[u8], meta: TxMeta) -> bool {
        self.put(frame, meta);
        true
    }

    /// Gets received frames.
    #[inline(always)]
    fn put_received(&mut self, frames: &[RxFrame<'_>]) {
        for frame in frames {
            self.put(frame.bytes, meta_of(frame));
        }
    }

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
    if has_wide_vectors() {
        Box::new(MirrorRx::<_, true> { inner, sink })
    } else {
        Box::new(MirrorRx::<_, false> { inner, sink })
    }
}

/// Copies sent frames, each once: from where it was built. [`TxQueue::remove_layer`] returns `inner`.
#[must_use]
pub fn wrap_tx(inner: Box<dyn TxQueue + Send>, sink: impl FrameSink + 'static) -> Box<dyn TxQueue + Send> {
    if has_wide_vectors() {
        Box::new(MirrorTx::<_, true>::new(inner, sink))
    } else {
        Box::new(MirrorTx::<_, false>::new(inner, sink))
    }
}

/// Returns whether the processor has the vectors of 32 bytes that [`wide`] uses.
fn has_wide_vectors() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx2");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Functions that the layers call for each frame, compiled for vectors of 32 bytes: half as many instructions
/// copy a frame.
mod wide {
    use super::{FrameSink, MirrorTx, RxFrame, TxMeta};

    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2"))]
    pub(super) fn put_received<S: FrameSink>(sink: &mut S, frames: &[RxFrame<'_>]) {
        sink.put_received(frames);
    }

    #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2"))]
    pub(super) fn commit<S: FrameSink, const WIDE: bool>(
        tx: &mut MirrorTx<S, WIDE>,
        len: usize,
        meta: TxMeta,
    ) {
        tx.copy_and_commit(len, meta);
    }
}

/// `WIDE` is true only if the processor has wide vectors.
struct MirrorRx<S, const WIDE: bool> {
    inner: Box<dyn RxQueue + Send>,
    sink: S,
}

impl<S: FrameSink, const WIDE: bool> RxQueue for MirrorRx<S, WIDE> {
    fn rx_burst<'a>(&'a mut self, now: Instant, burst: &mut RxBurst<'a>) {
        let before = burst.len();
        self.inner.rx_burst(now, burst);
        let frames = burst.get(before..).unwrap_or_default();
        if frames.is_empty() {
            return;
        }
        if WIDE {
            // SAFETY: the processor has the instructions.
            #[allow(unused_unsafe, reason = "the function is unsafe on x86-64 only")]
            unsafe {
                wide::put_received(&mut self.sink, frames);
            }
        } else {
            self.sink.put_received(frames);
        }
        self.sink.end_burst(now);
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

/// The room that a queue has lent last.
struct LentRoom {
    start: NonNull<u8>,
    /// Length of the room; 0 if anything else was asked of the queue since: it may have taken back the room.
    len: Cell<usize>,
}

impl LentRoom {
    /// Returns the first `len` bytes of the room, if the room can be read.
    #[inline(always)]
    fn frame(&self, len: usize) -> Option<&[u8]> {
        // SAFETY: the room is as long, and still there, since nothing was asked of the queue after it was
        // lent; the borrow from which it was written has ended with the call of a method of the layer. If
        // there is no room, no bytes are at any address.
        (len <= self.len.get()).then(|| unsafe { std::slice::from_raw_parts(self.start.as_ptr(), len) })
    }
}

/// Notes, when dropped, that the queue may have taken back the room: also if the queue panics.
struct TakenBack<'a>(&'a LentRoom);

impl Drop for TakenBack<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.len.set(0);
    }
}

/// `WIDE` is true only if the processor has wide vectors.
struct MirrorTx<S, const WIDE: bool> {
    inner: Box<dyn TxQueue + Send>,
    capabilities: Capabilities,
    room: LentRoom,
    sink: S,
}

// SAFETY: `room` belongs to `inner`, which goes to the other thread with it.
unsafe impl<S: Send, const WIDE: bool> Send for MirrorTx<S, WIDE> {}

impl<S: FrameSink, const WIDE: bool> MirrorTx<S, WIDE> {
    fn new(inner: Box<dyn TxQueue + Send>, sink: S) -> Self {
        let room = LentRoom { start: NonNull::dangling(), len: Cell::new(0) };
        Self { capabilities: inner.capabilities(), inner, room, sink }
    }

    /// Returns the queue below, which may take back the room that it has lent.
    fn inner(&self) -> &(dyn TxQueue + Send) {
        self.room.len.set(0);
        &*self.inner
    }

    /// As [`MirrorTx::inner`].
    #[inline(always)]
    fn inner_mut(&mut self) -> &mut (dyn TxQueue + Send) {
        self.room.len.set(0);
        &mut *self.inner
    }

    #[inline(always)]
    fn copy_and_commit(&mut self, len: usize, meta: TxMeta) {
        let Some(frame) = self.room.frame(len) else { return self.inner_mut().commit(len, meta) };
        if !self.sink.put_short(frame, meta) {
            return self.copy_any_and_commit(len, meta);
        }
        self.inner_mut().commit(len, meta);
    }

    /// Copies a frame that the sink does not get by [`FrameSink::put_short`]. A separate function, so that
    /// the others do not save the registers that it needs.
    #[cold]
    #[inline(never)]
    fn copy_any_and_commit(&mut self, len: usize, meta: TxMeta) {
        if let Some(frame) = self.room.frame(len) {
            self.sink.put(frame, meta);
        }
        self.inner_mut().commit(len, meta);
    }
}

impl<S: FrameSink, const WIDE: bool> TxQueue for MirrorTx<S, WIDE> {
    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        // Setting the length once, after the call, takes one instruction less than resetting it before.
        let taken_back = TakenBack(&self.room);
        let mut room = NonNull::from(self.inner.reserve(len)?);
        std::mem::forget(taken_back);
        self.room = LentRoom { start: room.cast(), len: Cell::new(room.len()) };
        // SAFETY: the queue lends the room as long as `self` is borrowed.
        Some(unsafe { room.as_mut() })
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        if WIDE {
            // SAFETY: the processor has the instructions.
            #[allow(unused_unsafe, reason = "the function is unsafe on x86-64 only")]
            unsafe {
                wide::commit(self, len, meta);
            }
        } else {
            self.copy_and_commit(len, meta);
        }
    }

    fn has_backlog(&mut self, frames: usize) -> bool {
        self.inner_mut().has_backlog(frames)
    }

    fn select_class(&mut self, class: Option<TxClass>) {
        self.inner_mut().select_class(class);
    }

    fn flush(&mut self, now: Instant) {
        self.inner_mut().flush(now);
        self.sink.end_burst(now);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.inner().next_deadline()
    }

    fn remove_layer(self: Box<Self>) -> Option<Box<dyn TxQueue + Send>> {
        Some(self.inner)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
