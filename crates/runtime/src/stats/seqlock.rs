//! A sequence lock: the writer never waits, and readers get consistent snapshots or retry.
//!
//! The first word counts publications; it is odd during a publication.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A publication in progress. There is only one writer, so plain stores between the two sequence numbers
/// suffice.
pub(crate) struct Publication<'a> {
    sequence: &'a AtomicU64,
    rest: core::slice::Iter<'a, AtomicU64>,
    number: u64,
}

/// Begins a publication into `words`, the first of which is the sequence number. Overwrites a publication
/// that a thread left unfinished when it died.
pub(crate) fn begin(words: &[AtomicU64]) -> Option<Publication<'_>> {
    let (sequence, rest) = words.split_first()?;
    let number = sequence.load(Ordering::Relaxed) | 1;
    sequence.store(number, Ordering::Relaxed);
    // Orders the odd sequence number before the stores that follow.
    fence(Ordering::Release);
    Some(Publication { sequence, rest: rest.iter(), number })
}

impl Publication<'_> {
    /// Stores the next word. Does nothing after the last one.
    #[inline]
    pub(crate) fn put(&mut self, value: u64) {
        if let Some(word) = self.rest.next() {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Completes the publication.
    pub(crate) fn finish(self) {
        self.sequence.store(self.number.wrapping_add(1), Ordering::Release);
    }
}

/// Tries to read once: `sequence` loads the first word, and `copy` copies the others. Returns false if the
/// copy may be inconsistent.
pub(crate) fn read_once<E>(
    mut sequence: impl FnMut() -> Result<u64, E>,
    copy: impl FnOnce() -> Result<(), E>,
) -> Result<bool, E> {
    let before = sequence()?;
    // Orders the load of the sequence number before the copy.
    fence(Ordering::Acquire);
    if before % 2 == 1 {
        return Ok(false);
    }
    copy()?;
    // Orders the copy before the second load of the sequence number.
    fence(Ordering::Acquire);
    Ok(sequence()? == before)
}

/// Tries to read words of this process once.
pub(crate) fn read_words(words: &[AtomicU64], out: &mut [u64]) -> bool {
    let Some((sequence, rest)) = words.split_first() else { return false };
    let load = || Ok::<_, core::convert::Infallible>(sequence.load(Ordering::Relaxed));
    let copy = || {
        for (out, word) in out.iter_mut().zip(rest) {
            *out = word.load(Ordering::Relaxed);
        }
        Ok(())
    };
    let Ok(is_consistent) = read_once(load, copy);
    is_consistent
}

/// Run with `RUSTFLAGS="--cfg loom" cargo test -p ginnel --lib stats::`.
#[cfg(all(test, loom))]
mod model {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    /// In every interleaving, and with every stale value that the memory model permits, a reader sees a
    /// complete publication or none.
    #[test]
    fn no_reader_sees_a_torn_publication() {
        loom::model(|| {
            let words: Arc<[AtomicU64; 3]> = Arc::new(core::array::from_fn(|_| AtomicU64::new(0)));
            let written = words.clone();
            let writer = thread::spawn(move || {
                for value in 1..=2 {
                    let mut publication = begin(&written[..]).expect("there are words");
                    publication.put(value);
                    publication.put(value);
                    publication.finish();
                }
            });
            let mut seen = [0; 2];
            if read_words(&words[..], &mut seen) {
                assert_eq!(seen[0], seen[1]);
            }
            writer.join().expect("no panic");
            assert!(read_words(&words[..], &mut seen));
            assert_eq!(seen, [2, 2]);
        });
    }
}
