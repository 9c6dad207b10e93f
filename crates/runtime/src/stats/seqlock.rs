//! A sequence lock: one writer that never waits, and readers that see whole snapshots or try again.
//!
//! The first word counts publications, and is odd during one.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};

/// A publication that was begun. There is one writer, so plain stores between two numbers do.
pub(crate) struct Publication<'a> {
    sequence: &'a AtomicU64,
    rest: core::slice::Iter<'a, AtomicU64>,
    number: u64,
}

/// Begins to publish into `words`, of which the first is the sequence. One that was begun and never finished, by a thread that died, is overwritten.
pub(crate) fn begin(words: &[AtomicU64]) -> Option<Publication<'_>> {
    let (sequence, rest) = words.split_first()?;
    let number = sequence.load(Ordering::Relaxed) | 1;
    sequence.store(number, Ordering::Relaxed);
    // What is stored from here on is not seen before the odd number is.
    fence(Ordering::Release);
    Some(Publication { sequence, rest: rest.iter(), number })
}

impl Publication<'_> {
    /// The next word. There is nothing behind the last one.
    #[inline]
    pub(crate) fn put(&mut self, value: u64) {
        if let Some(word) = self.rest.next() {
            word.store(value, Ordering::Relaxed);
        }
    }

    /// Shows it to readers.
    pub(crate) fn finish(self) {
        self.sequence.store(self.number.wrapping_add(1), Ordering::Release);
    }
}

/// Reads once: `sequence` loads the first word, `copy` copies the others, in whatever way. False if the copy may be of two publications.
pub(crate) fn read_once<E>(
    mut sequence: impl FnMut() -> Result<u64, E>,
    copy: impl FnOnce() -> Result<(), E>,
) -> Result<bool, E> {
    let before = sequence()?;
    // The copy is not made before that was read, ...
    fence(Ordering::Acquire);
    if before % 2 == 1 {
        return Ok(false);
    }
    copy()?;
    // ... and what was copied was there before this is read.
    fence(Ordering::Acquire);
    Ok(sequence()? == before)
}

/// Reads words of this process once.
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

    /// In every order of steps, and with every stale value that the memory model permits, a reader sees a whole publication or none.
    #[test]
    fn nobody_sees_half_a_publication() {
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
