//! The set of clients that have notified the stack since it last looked: a bit for each client, and a bit for
//! each word of those bits. The cost of a turn depends on the clients that have notified, not on those that
//! are attached.
//!
//! A client sets its bit, and then the bit of the word, after it has pushed into its ring of doorbells. The
//! stack clears both in the opposite order before it reads the ring. Each step is a read-modify-write, so a
//! bit that the stack did not see stays set for its next look.

use super::sync::{AtomicU64, Ordering};

/// Most clients of a set.
pub(super) const CLIENTS_IN_SET_MAX: usize = 1 << 16;
const WORDS: usize = CLIENTS_IN_SET_MAX / 64;
const SUMMARIES: usize = WORDS / 64;

/// The set, in shared memory. All bit patterns are valid; clients may set bits of clients that do not exist.
#[repr(C, align(128))]
pub(super) struct NotifiedClients {
    /// A bit for each word of `words`.
    summaries: [AtomicU64; SUMMARIES],
    words: [AtomicU64; WORDS],
}

/// Returns the positions of the bits that are set, in ascending order.
pub(super) fn iter_set_bits(mut bits: u64) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let number = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
        bits &= bits - 1;
        Some(number)
    })
}

impl NotifiedClients {
    #[cfg(all(test, not(loom)))]
    pub fn new() -> Self {
        let word = || AtomicU64::new(0);
        Self { summaries: core::array::from_fn(|_| word()), words: core::array::from_fn(|_| word()) }
    }

    /// Adds a client, which has pushed into its ring before.
    #[inline]
    pub fn insert(&self, client: usize) {
        // Cannot exceed the set: client numbers have 16 bits.
        let word = (client / 64) & (WORDS - 1);
        self.words[word].fetch_or(1 << (client % 64), Ordering::AcqRel);
        self.summaries[word / 64].fetch_or(1 << (word % 64), Ordering::AcqRel);
    }

    /// Returns whether a client is in the set. The answer may be outdated at once.
    pub fn contains(&self, client: usize) -> bool {
        self.words[(client / 64) & (WORDS - 1)].load(Ordering::Acquire) & 1 << (client % 64) != 0
    }

    /// Moves the clients below `limit` from the set to `taken`.
    #[inline]
    pub fn take(&self, limit: usize, taken: &mut Vec<u16>) {
        for (index, summary) in self.summaries[..limit.div_ceil(64 * 64)].iter().enumerate() {
            if summary.load(Ordering::Relaxed) == 0 {
                continue;
            }
            for word in iter_set_bits(summary.swap(0, Ordering::AcqRel)) {
                let word = 64 * index + word;
                let bits = self.words[word].swap(0, Ordering::AcqRel);
                let clients = iter_set_bits(bits).map(|bit| 64 * word + bit).filter(|client| *client < limit);
                // Cannot truncate: there are at most 2^16 clients.
                taken.extend(clients.map(|client| client as u16));
            }
        }
    }

    /// Returns whether no client below `limit` is in the set. The stack calls this after it declared that it
    /// is about to sleep: a client that is inserted later sees that.
    #[inline]
    pub fn is_empty_before_sleep(&self, limit: usize) -> bool {
        // A read-modify-write, so that a later one of a client sees what this thread stored before.
        self.summaries[..limit.div_ceil(64 * 64)]
            .iter()
            .all(|summary| summary.fetch_or(0, Ordering::AcqRel) == 0)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn clients_are_taken_once_and_in_order() {
        let set = NotifiedClients::new();
        let mut taken = Vec::new();
        assert!(set.is_empty_before_sleep(CLIENTS_IN_SET_MAX));
        for client in [65_535, 0, 4096, 63, 64, 0] {
            set.insert(client);
        }
        assert!(!set.is_empty_before_sleep(CLIENTS_IN_SET_MAX));
        set.take(CLIENTS_IN_SET_MAX, &mut taken);
        assert_eq!(taken, [0, 63, 64, 4096, 65_535]);
        taken.clear();
        set.take(CLIENTS_IN_SET_MAX, &mut taken);
        assert!(taken.is_empty() && set.is_empty_before_sleep(CLIENTS_IN_SET_MAX));
    }

    // limit: channel.clients_max
    #[test]
    fn clients_beyond_the_limit_are_ignored() {
        let (set, mut taken) = (NotifiedClients::new(), Vec::new());
        set.insert(70);
        set.insert(5000);
        set.take(70, &mut taken);
        assert!(taken.is_empty() && set.is_empty_before_sleep(70));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::super::sleep_state::SleepState;
    use super::super::sync::AtomicU32;
    use super::*;
    use std::sync::Arc;

    /// The words that a model needs: loom allows few.
    struct Memory {
        word: AtomicU64,
        summary: AtomicU64,
        tails: [AtomicU32; 2],
        sleep: SleepState,
    }

    impl Memory {
        /// As `NotifiedClients::insert`.
        fn insert(&self, client: usize) {
            self.word.fetch_or(1 << client, Ordering::AcqRel);
            self.summary.fetch_or(1, Ordering::AcqRel);
        }
    }

    /// The stack that takes the set and goes to sleep has seen what each client pushed, or is woken.
    #[test]
    fn no_notification_is_missed_before_sleep() {
        loom::model(|| {
            let memory = Arc::new(Memory {
                word: AtomicU64::new(0),
                summary: AtomicU64::new(0),
                tails: [AtomicU32::new(0), AtomicU32::new(0)],
                sleep: SleepState::new(),
            });
            let client = |number: usize| {
                let memory = memory.clone();
                loom::thread::spawn(move || {
                    memory.tails[number].store(1, Ordering::Release);
                    memory.insert(number);
                    memory.sleep.claim_wakeup()
                })
            };
            let clients = [client(0), client(1)];
            let mut seen = [0; 2];
            // As `NotifiedClients::take`, and then `is_empty_before_sleep`.
            if memory.summary.swap(0, Ordering::AcqRel) != 0 {
                for client in iter_set_bits(memory.word.swap(0, Ordering::AcqRel)) {
                    seen[client] = memory.tails[client].load(Ordering::Acquire);
                    assert_eq!(seen[client], 1, "the client pushed before it was inserted");
                }
            }
            memory.sleep.begin_sleep();
            let sleeps = memory.summary.fetch_or(0, Ordering::AcqRel) == 0;
            let woken = clients.map(|client| client.join().unwrap());
            assert!(
                !sleeps || seen == [1; 2] || woken.contains(&true),
                "the stack sleeps: {seen:?} {woken:?}"
            );
        });
    }
}
