//! Limits how many frames of low priority wait in a device, so that urgent frames find few in front of them:
//! what a device has taken is not reordered any more. The others wait in the engine's connections, where
//! urgent ones precede them.

use ginnel_stack::device::{Capabilities, GatherTx, Label, TxMeta, TxQueue};
use ginnel_stack::time::Instant;

/// Limits the frames that wait in a device. While it has `frames` of them, no frames of the usual class or
/// the one below are accepted; class 2 waits while there are twice as many, class 3 three times, and so on.
/// The highest class, and frames of which no class is known ([`TxQueue::select_class`]), are accepted as long
/// as the device has room.
///
/// The device must be able to tell what waits ([`TxQueue::has_backlog`]).
#[must_use]
pub fn wrap_tx(inner: Box<dyn TxQueue + Send>, frames: usize) -> Box<dyn TxQueue + Send> {
    Box::new(LimitedTx { inner, frames, max: None })
}

struct LimitedTx {
    inner: Box<dyn TxQueue + Send>,
    frames: usize,
    /// Backlog at which frames of the current class are refused.
    max: Option<usize>,
}

impl TxQueue for LimitedTx {
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        if self.max.is_some_and(|max| self.inner.has_backlog(max)) {
            return None;
        }
        self.inner.reserve(len)
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        self.inner.commit(len, meta);
    }

    fn can_read_reserved(&self) -> bool {
        self.inner.can_read_reserved()
    }

    fn reserved(&mut self, len: usize) -> &[u8] {
        self.inner.reserved(len)
    }

    fn has_backlog(&mut self, frames: usize) -> bool {
        self.inner.has_backlog(frames)
    }

    fn select_class(&mut self, class: Option<u8>) {
        let limited = class.filter(|class| *class < Label::PRIORITY_MAX);
        self.max = limited.map(|class| self.frames * usize::from(class.max(1)));
        self.inner.select_class(class);
    }

    fn gather(&mut self) -> Option<&mut dyn GatherTx> {
        self.inner.gather()
    }

    fn flush(&mut self, now: Instant) {
        self.inner.flush(now);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.inner.next_deadline()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::conformance::{self, Guarantees};
    use crate::faults::{self, LinkSpec};
    use crate::memory::{MemoryConfig, pair};
    use core::time::Duration;
    use ginnel_stack::device::Device;
    use ginnel_stack::priority::BEST_EFFORT;

    #[test]
    fn limited_device_conforms() {
        let guarantees =
            Guarantees { back_pressure: true, uncut_super_frame_bytes: usize::MAX, labels: true };
        conformance::run("backlog limit", guarantees, &mut || {
            let (left, right) = pair(MemoryConfig::default());
            (Device { rx: left.rx, tx: wrap_tx(left.tx, 64) }, right)
        });
    }

    // limit: priority.transmit_backlog_frames
    #[test]
    fn classes_are_refused_by_what_waits() {
        let (left, _right) = pair(MemoryConfig::default().without_offloads());
        // A frame takes a millisecond.
        let slow = LinkSpec::parse("rate=8mbit").expect("valid");
        let mut tx = wrap_tx(faults::wrap(left, &slow, 1).tx, 10);
        assert!(tx.has_backlog(0), "the link can tell what waits");
        let send = |tx: &mut Box<dyn TxQueue + Send>, class, most: usize| {
            tx.select_class(class);
            let sent = (0..most).take_while(|_| {
                let Some(room) = tx.reserve(1000) else { return false };
                room.fill(0);
                tx.commit(1000, TxMeta::NONE);
                true
            });
            sent.count()
        };
        assert_eq!(send(&mut tx, Some(BEST_EFFORT), 100), 10);
        tx.flush(Instant::ZERO);
        assert_eq!(send(&mut tx, Some(0), 100), 0);
        assert_eq!([2, 2, 6].map(|class| send(&mut tx, Some(class), 100)), [10, 0, 40]);
        assert_eq!([Some(7), None].map(|class| send(&mut tx, class, 20)), [20, 20]);
        tx.flush(Instant::ZERO);
        // 100 frames wait; when 95 of them have been sent, five more may wait.
        tx.flush(Instant::ZERO + Duration::from_millis(90));
        assert_eq!(send(&mut tx, Some(BEST_EFFORT), 100), 0);
        tx.flush(Instant::ZERO + Duration::from_millis(95));
        assert_eq!(send(&mut tx, Some(BEST_EFFORT), 100), 5);
    }
}
