//! Replaces the labels of received and of sent frames.

use crate::staged::StagedTx;
use ginnel_stack::device::{Capabilities, Label, RxBurst, RxQueue, TxClass, TxMeta, TxQueue};
use ginnel_stack::time::Instant;
use std::os::fd::RawFd;

/// Gives each received frame the label that `label` returns, which is called with the bytes of the frame and
/// its label. `label` must keep the hash, because the layer forwards [`RxQueue::computes_hashes`] of `rx`.
#[must_use]
pub fn wrap_rx(
    rx: Box<dyn RxQueue + Send>,
    label: impl FnMut(&[u8], Label) -> Label + Send + 'static,
) -> Box<dyn RxQueue + Send> {
    Box::new(RelabelRx { inner: rx, label })
}

struct RelabelRx<F> {
    inner: Box<dyn RxQueue + Send>,
    label: F,
}

impl<F: FnMut(&[u8], Label) -> Label> RxQueue for RelabelRx<F> {
    fn rx_burst<'a>(&'a mut self, now: Instant, burst: &mut RxBurst<'a>) {
        let Self { inner, label } = self;
        let before = burst.len();
        inner.rx_burst(now, burst);
        for frame in &mut burst[before..] {
            frame.label = label(frame.bytes, frame.label);
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
}

/// Sends each frame with the label that `label` returns, which is called with the bytes of the frame and its
/// label. Every frame is copied once more, which pays only for devices that carry labels
/// ([`Capabilities::labels`]).
#[must_use]
pub fn wrap_tx(
    tx: Box<dyn TxQueue + Send>,
    label: impl FnMut(&[u8], Label) -> Label + Send + 'static,
) -> Box<dyn TxQueue + Send> {
    Box::new(RelabelTx { staged: StagedTx::new(tx), label })
}

struct RelabelTx<F> {
    staged: StagedTx,
    label: F,
}

impl<F: FnMut(&[u8], Label) -> Label> TxQueue for RelabelTx<F> {
    fn capabilities(&self) -> Capabilities {
        self.staged.inner.capabilities()
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.staged.reserve(len)
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        let label = (self.label)(self.staged.frame(len), meta.label);
        self.staged.commit(len, TxMeta { label, ..meta });
    }

    fn has_backlog(&mut self, frames: usize) -> bool {
        self.staged.inner.has_backlog(frames)
    }

    fn select_class(&mut self, class: Option<TxClass>) {
        self.staged.inner.select_class(class);
    }

    fn flush(&mut self, now: Instant) {
        self.staged.inner.flush(now);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.staged.inner.next_deadline()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::conformance::{self, Guarantees};
    use crate::memory::{MemoryConfig, pair};
    use ginnel_stack::device::{Device, RxFrame};

    #[test]
    fn relabelled_device_conforms() {
        let guarantees =
            Guarantees { back_pressure: true, uncut_super_frame_bytes: usize::MAX, labels: true };
        conformance::run("relabel", guarantees, &mut || {
            let (left, right) = pair(MemoryConfig::default());
            let (rx, tx) = (wrap_rx(left.rx, |_, label| label), wrap_tx(left.tx, |_, label| label));
            (Device { rx, tx }, right)
        });
    }

    #[test]
    fn relabelled_device_has_hashes_of_its_origin() {
        conformance::check_hash_origin(|Device { rx, tx }| Device { rx: wrap_rx(rx, |_, label| label), tx });
    }

    #[test]
    fn frames_have_the_new_labels() {
        let new_label = |frame: &[u8], label: Label| {
            assert_eq!(frame.len(), 60);
            Label::new(label.hash(), label.priority() + frame[0])
        };
        let (left, right) = pair(MemoryConfig::default());
        let (mut tx, mut rx) = (wrap_tx(left.tx, new_label), wrap_rx(right.rx, new_label));
        for first in 0..3 {
            // The rest of the room is not part of the frame.
            tx.reserve(100).unwrap()[..60].fill(first);
            tx.commit(60, TxMeta { label: Label::new(Some(9), 3), ..TxMeta::NONE });
        }
        tx.flush(Instant::ZERO);
        let mut burst = RxBurst::new();
        burst.push(RxFrame::new(&[9]));
        rx.rx_burst(Instant::ZERO, &mut burst);
        assert_eq!(burst[0].label, Label::NONE, "a frame of another queue");
        let seen: Vec<_> = burst[1..].iter().map(|frame| frame.label).collect();
        assert_eq!(seen, [3, 5, 7].map(|priority| Label::new(Some(9), priority)));
    }
}
