use super::tests::Fixture;
use super::*;
use core::ops::Range;
use proptest::prelude::*;
use std::collections::VecDeque;

/// Messages as they should be queued: the bytes that were begun, then messages with their classes.
#[derive(Default)]
struct Oracle {
    begun: VecDeque<u8>,
    messages: Vec<(u8, Vec<u8>)>,
}

impl Oracle {
    fn all(&self) -> Vec<u8> {
        self.begun.iter().copied().chain(self.messages.iter().flat_map(|(_, bytes)| bytes.clone())).collect()
    }

    /// Lets no message be queued before the first `sent` bytes.
    fn begin(&mut self, sent: usize) {
        while self.begun.len() < sent {
            let (_, bytes) = self.messages.remove(0);
            self.begun.extend(bytes);
        }
    }

    fn push_message(&mut self, class: u8, bytes: &[u8]) {
        let index = self.messages.iter().position(|(other, _)| *other < class).unwrap_or(self.messages.len());
        self.messages.insert(index, (class, bytes.to_vec()));
    }

    fn push_bytes(&mut self, bytes: &[u8]) {
        self.begin(self.all().len());
        self.begun.extend(bytes);
    }
}

fn push_message(f: &mut Fixture, bytes: &[u8], class: u8, sent: u64) -> Result<Range<u64>, NoMessageRoom> {
    f.buffer.push_message(&mut f.pool, bytes, class, sent, u64::MAX)
}

#[test]
fn higher_classes_overtake_messages_that_were_not_begun() {
    let mut f = Fixture::new();
    assert_eq!(push_message(&mut f, b"begun.", 1, 0), Ok(0..6));
    assert_eq!(push_message(&mut f, b"low.", 1, 3), Ok(6..10));
    assert_eq!(push_message(&mut f, b"high.", 6, 3), Ok(6..11));
    assert_eq!(push_message(&mut f, b"higher.", 7, 3), Ok(6..13));
    assert_eq!(push_message(&mut f, b"HIGH.", 6, 3), Ok(18..23));
    assert_eq!(f.all(), b"begun.higher.high.HIGH.low.");
    // Plain bytes are no message.
    f.push(b"plain");
    assert_eq!(push_message(&mut f, b"!", 7, 3), Ok(32..33));
    assert_eq!(f.all(), b"begun.higher.high.HIGH.low.plain!");
}

// limit: queued messages of a connection
#[test]
fn message_beyond_limit_is_refused_whole() {
    let mut f = Fixture::new();
    for number in 0..MESSAGES_MAX {
        assert!(push_message(&mut f, b"ab", (number % 8) as u8, 0).is_ok());
    }
    let before = f.all();
    assert_eq!(push_message(&mut f, b"ab", 7, 0), Err(NoMessageRoom { is_memory: false }));
    assert_eq!(f.all(), before);
    assert!(push_message(&mut f, b"ab", 7, 1).is_ok(), "one was begun");
}

#[test]
fn message_without_memory_is_refused_whole() {
    let mut f = Fixture { pool: ChunkPool::new(4 * CHUNK_BYTES), ..Fixture::new() };
    assert!(push_message(&mut f, &[1; 100], 1, 0).is_ok());
    assert_eq!(push_message(&mut f, &[2; 3 * CHUNK_BYTES], 6, 0), Err(NoMessageRoom { is_memory: true }));
    assert!(push_message(&mut f, &[2; 2 * CHUNK_BYTES], 6, 0).is_ok());
    assert_eq!((f.buffer.len(), f.all()[2 * CHUNK_BYTES]), (100 + 2 * CHUNK_BYTES as u64, 1));
    let at_limit = f.buffer.push_message(&mut f.pool, b"x", 6, 0, 100 + 2 * CHUNK_BYTES as u64);
    assert_eq!(at_limit, Err(NoMessageRoom { is_memory: false }));
}

#[derive(Clone, Debug)]
enum Step {
    Message { len: usize, class: u8 },
    Plain { len: usize },
    Source { len: u64 },
    Send { percent: usize },
    Acknowledge { percent: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let len = || prop_oneof![3 => 1..100usize, 1 => 1..6000usize];
    let step = prop_oneof![
        12 => (len(), 0..8u8).prop_map(|(len, class)| Step::Message { len, class }),
        2 => len().prop_map(|len| Step::Plain { len }),
        1 => (1..3000u64).prop_map(|len| Step::Source { len }),
        3 => (0..=100usize).prop_map(|percent| Step::Send { percent }),
        3 => (0..=100usize).prop_map(|percent| Step::Acknowledge { percent }),
    ];
    proptest::collection::vec(step, 1..80)
}

proptest! {
    #[test]
    fn agrees_with_a_list_of_messages(steps in steps()) {
        let (mut f, mut oracle) = (Fixture::new(), Oracle::default());
        let source_bytes: Vec<u8> = (0..6000u32).map(|at| (at % 241) as u8).collect();
        let source = f.source(&source_bytes);
        let (mut sent, mut number) = (0, 0u8);
        for step in steps {
            number = number.wrapping_add(1);
            match step {
                Step::Message { len, class } => {
                    let bytes: Vec<u8> = (0..len).map(|at| number ^ (at >> 4) as u8).collect();
                    oracle.begin(sent);
                    oracle.push_message(class, &bytes);
                    let place = push_message(&mut f, &bytes, class, sent as u64).unwrap();
                    let all = f.all();
                    prop_assert_eq!(&all[place.start as usize..place.end as usize], &bytes[..]);
                }
                Step::Plain { len } => {
                    let bytes = vec![number; len];
                    oracle.push_bytes(&bytes);
                    prop_assert_eq!(f.push(&bytes), len);
                }
                Step::Source { len } => {
                    oracle.push_bytes(&source_bytes[..len as usize]);
                    f.push_source(source, 0, len).unwrap();
                }
                Step::Send { percent } => {
                    sent += (oracle.all().len() - sent) * percent / 100;
                    oracle.begin(sent);
                }
                Step::Acknowledge { percent } => {
                    let n = sent * percent / 100;
                    oracle.begun.drain(..n);
                    f.discard(n as u64);
                    sent -= n;
                }
            }
            let all = oracle.all();
            prop_assert_eq!(f.buffer.len(), all.len() as u64);
            prop_assert_eq!(f.all(), all.clone());
            for (at, len) in [(all.len() / 3, all.len() / 2), (all.len() / 2, 1)] {
                let len = len.min(all.len() - at);
                prop_assert_eq!(&f.filled(at as u64, len)[..], &all[at..at + len]);
            }
            prop_assert_eq!(f.buffer.memory().chunks, f.pool.in_use());
        }
        let rest = f.buffer.len();
        f.discard(rest);
        prop_assert_eq!(f.pool.in_use(), 0);
    }
}

/// Segments have the highest class of their messages, also when they are sent again.
#[test]
fn class_of_a_range_is_its_highest_message() {
    let mut f = Fixture::new();
    push_message(&mut f, b"low.", 1, 0).unwrap();
    assert_eq!((f.buffer.message_class(0, 4), f.buffer.message_class(4, 0)), (Some(1), None));
    push_message(&mut f, b"high.", 6, 2).unwrap();
    push_message(&mut f, b"higher.", 7, 4).unwrap();
    // "low." is begun, and "higher." comes before "high.".
    let classes = |f: &Fixture| {
        [(0, 4), (3, 2), (4, 7), (11, 5), (10, 2)].map(|(at, len)| f.buffer.message_class(at, len))
    };
    let expected = [Some(1), Some(7), Some(7), Some(6), Some(7)];
    assert_eq!(classes(&f), expected);
    f.buffer.push_bytes(&mut f.pool, b"bytes", u64::MAX);
    push_message(&mut f, b"next.", 2, 16).unwrap();
    assert_eq!(classes(&f), expected);
    assert_eq!([(16, 5), (20, 2)].map(|(at, len)| f.buffer.message_class(at, len)), [None, Some(2)]);
    f.buffer.discard_front(&mut f.pool, &mut f.sources, 12);
    assert_eq!([(0, 4), (4, 5)].map(|(at, len)| f.buffer.message_class(at, len)), [Some(6), None]);
}
