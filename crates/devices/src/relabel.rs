//! Replaces the labels of sent frames.

use crate::staged::StagedTx;
use ginnel_stack::device::{Capabilities, Label, TxMeta, TxQueue};
use ginnel_stack::time::Instant;

/// Sends each frame with the label that `label` returns, which is called with the bytes of the frame and its
/// label. Every frame is copied once more, so this is only for devices that carry labels
/// ([`Capabilities::labels`]).
#[must_use]
pub fn wrap(
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
    use ginnel_stack::device::{Device, RxBurst};

    #[test]
    fn relabelled_device_conforms() {
        let guarantees =
            Guarantees { back_pressure: true, uncut_super_frame_bytes: usize::MAX, labels: true };
        conformance::run("relabel", guarantees, &mut || {
            let (left, right) = pair(MemoryConfig::default());
            (Device { rx: left.rx, tx: wrap(left.tx, |_, label| label) }, right)
        });
    }

    #[test]
    fn frames_are_sent_with_the_new_label() {
        let (left, mut right) = pair(MemoryConfig::default());
        let mut tx = wrap(left.tx, |frame, label| Label::new(label.hash(), label.priority() + frame[0]));
        for first in 0..4 {
            // The rest of the room is not part of the frame.
            tx.reserve(100).unwrap()[..60].fill(first);
            tx.commit(60, TxMeta { label: Label::new(Some(9), 3), ..TxMeta::NONE });
        }
        tx.flush(Instant::ZERO);
        let mut burst = RxBurst::new();
        right.rx.rx_burst(Instant::ZERO, &mut burst);
        let seen: Vec<_> = burst.iter().map(|frame| (frame.bytes.len(), frame.label)).collect();
        assert_eq!(seen, [3, 4, 5, 6].map(|priority| (60, Label::new(Some(9), priority))));
    }
}
