//! Which of the queues to a shard have entries. A turn visits these queues alone, so that the number of other
//! shards costs nothing.
//!
//! A writer makes its entries visible in its queue, then calls [`PendingQueues::set`]. The reader calls
//! [`PendingQueues::take`], then reads the queues of the bits that it got. If the bit of a queue is set
//! already, the writer does not write the word: the reader has not taken the bit yet, so it will find the
//! entries when it does.

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};

/// A bit for each of up to 64 queues. Two cache lines of its own: writers and the reader share nothing else
/// on them, and the prefetcher fetches pairs of lines.
#[repr(align(128))]
#[derive(Debug)]
pub(crate) struct PendingQueues(AtomicU64);

impl PendingQueues {
    /// Creates the word of queues that are all empty.
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Records that queue `index` has entries, which its writer has made visible before. One atomic
    /// read-modify-write if the bit is not set yet.
    pub(crate) fn set(&self, index: u8) {
        // Pairs with the fence in `take`: either the reader sees the entries, or this side sees that the bit
        // was taken.
        fence(Ordering::SeqCst);
        if self.0.load(Ordering::Relaxed) >> index & 1 == 0 {
            self.0.fetch_or(1 << index, Ordering::Release);
        }
    }

    /// Returns whether a queue has entries. A load.
    pub(crate) fn is_any(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    /// Takes the bits of all queues that have entries, for the reader, which reads these queues next.
    pub(crate) fn take(&self) -> u64 {
        if !self.is_any() {
            return 0;
        }
        let taken = self.0.swap(0, Ordering::Acquire);
        fence(Ordering::SeqCst);
        taken
    }
}

/// Run with `RUSTFLAGS="--cfg loom" cargo test -p ginnel --lib pending_queues::`.
#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;
    use loom::thread;

    /// Two writers publish entries while the reader takes bits: in every interleaving, a queue whose entries
    /// the reader has not seen has its bit set, and a queue with a bit that was taken is read up to what its
    /// writer had published before it skipped the word.
    #[test]
    fn entries_are_seen_or_their_bit_is_set() {
        loom::model(|| {
            let pending = Arc::new(PendingQueues::new());
            let tails = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
            let entries = [2, 1];
            let writers = [0u8, 1].map(|index| {
                let (pending, tails) = (pending.clone(), tails.clone());
                thread::spawn(move || {
                    for tail in 1..=entries[usize::from(index)] {
                        tails[usize::from(index)].store(tail, Ordering::Release);
                        pending.set(index);
                    }
                })
            });
            let mut seen = [0, 0];
            let mut read = |taken: u64| {
                for index in (0..2).filter(|index| taken >> index & 1 != 0) {
                    seen[index] = tails[index].load(Ordering::Acquire);
                }
            };
            read(pending.take());
            writers.into_iter().for_each(|writer| writer.join().expect("no panic"));
            read(pending.take());
            assert_eq!(seen, entries);
            assert!(!pending.is_any());
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::PendingQueues;

    #[test]
    fn bits_are_taken_once() {
        let pending = PendingQueues::new();
        assert!(!pending.is_any());
        [0, 63, 5, 5].into_iter().for_each(|index| pending.set(index));
        assert!(pending.is_any());
        assert_eq!(pending.take(), 1 | 1 << 63 | 1 << 5);
        assert_eq!(pending.take(), 0);
    }
}
