//! The bytes of messages and answers.
//!
//! A message begins with the format of docs/iot.md. The bytes after it depend on connection and number, so
//! that an echo of another message is noticed, and are computed again when the answer arrives.

use super::plan::{Kind, MessagePlan, Service};
use crate::iot::message::{ANSWER_BYTES, ANSWER_ERROR, ANSWER_OK, HEAD_BYTES, URGENT};
use ginnel::Random;

/// Number of patterns from which a message has one.
const PATTERNS: usize = 251;
/// Position of the first byte in which the two answers differ.
const STATUS_AT: usize = 9;

/// Writes messages.
#[derive(Debug)]
pub struct MessageWriter {
    service: Service,
    /// Shortest length in bytes, and the number of lengths.
    length_min: u16,
    lengths: u32,
    pattern: Box<[u8]>,
    /// The message that was written last.
    bytes: Vec<u8>,
}

/// Mixes the bits of two numbers.
const fn mix(connection: u32, counter: u32) -> u32 {
    let mixed = (connection ^ counter.rotate_left(16)).wrapping_mul(0x9e37_79b1);
    (mixed ^ mixed >> 15).wrapping_mul(0x85eb_ca77)
}

impl MessageWriter {
    /// Creates a writer for the messages of a plan.
    pub fn new(plan: &MessagePlan) -> Self {
        let (min, max) = plan.length_bytes;
        let mut random = Random::new(plan.seed);
        let pattern = (0..usize::from(max) + PATTERNS).map(|_| random.next_u64() as u8).collect();
        Self {
            service: plan.service,
            length_min: min,
            lengths: u32::from(max - min) + 1,
            pattern,
            bytes: Vec::with_capacity(max.into()),
        }
    }

    /// Writes message `counter` of a connection and returns its bytes.
    pub fn write(&mut self, connection: u32, counter: u32, kind: Kind) -> &[u8] {
        let mixed = mix(connection, counter);
        let len =
            usize::from(self.length_min) + ((u64::from(mixed) * u64::from(self.lengths)) >> 32) as usize;
        let pattern = &self.pattern[mixed as usize % PATTERNS..];
        self.bytes.clear();
        self.bytes.extend_from_slice(&pattern[..len]);
        if let Some(head) = self.bytes.first_chunk_mut::<HEAD_BYTES>() {
            let [a, b, c, d] = counter.to_be_bytes();
            // An echo service has no heartbeats.
            let is_request = kind != Kind::Heartbeat || self.service == Service::Echo;
            *head = [a, b, c, d, 0, is_request.into(), if kind == Kind::High { URGENT } else { 0 }];
        }
        &self.bytes
    }
}

/// A part of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// All bytes belong to the answer, and more must follow.
    More,
    /// These many bytes complete the answer. It is an error of the server's if `is_error`.
    Complete {
        /// Bytes that belong to the answer.
        used: usize,
        /// True if the server could not do what was requested.
        is_error: bool,
    },
    /// The bytes are not what the service answers.
    Wrong,
}

/// Compares received bytes with an answer of `ginnel iot`, of which `received` bytes have arrived before.
/// `is_error` is the kind of the answer once byte 9 has arrived.
pub fn read_iot(received: &mut u16, is_error: &mut bool, bytes: &[u8]) -> AnswerPart {
    let from = usize::from(*received);
    let used = bytes.len().min(ANSWER_BYTES - from);
    if (from..from + used).contains(&STATUS_AT) {
        *is_error = bytes[STATUS_AT - from] == ANSWER_ERROR[STATUS_AT];
    }
    let text = if *is_error { ANSWER_ERROR } else { ANSWER_OK };
    compare(received, &bytes[..used], text, *is_error)
}

/// Compares received bytes with the echo of `message`, of which `received` bytes have arrived before.
pub fn read_echo(received: &mut u16, bytes: &[u8], message: &[u8]) -> AnswerPart {
    let used = bytes.len().min(message.len() - usize::from(*received));
    compare(received, &bytes[..used], message, false)
}

fn compare(received: &mut u16, bytes: &[u8], text: &[u8], is_error: bool) -> AnswerPart {
    let (from, to) = (usize::from(*received), usize::from(*received) + bytes.len());
    if text[from..to] != *bytes {
        return AnswerPart::Wrong;
    }
    if to < text.len() {
        *received = to as u16;
        return AnswerPart::More;
    }
    *received = 0;
    AnswerPart::Complete { used: bytes.len(), is_error }
}

#[cfg(test)]
mod tests {
    use super::super::tests::plan;
    use super::*;
    use crate::iot::message::MessageHead;
    use proptest::prelude::*;

    #[test]
    fn messages_have_the_format_of_the_server() {
        let mut writer = MessageWriter::new(&MessagePlan { length_bytes: (200, 200), ..plan() });
        for (kind, is_request, is_urgent) in
            [(Kind::Heartbeat, false, false), (Kind::Low, true, false), (Kind::High, true, true)]
        {
            let bytes = writer.write(5, 0x0102_0304, kind);
            assert_eq!(bytes.len(), 200);
            let head = MessageHead::parse(bytes.first_chunk().unwrap());
            assert_eq!(head, Some(MessageHead { counter: [1, 2, 3, 4], is_request, is_urgent }));
        }
    }

    #[test]
    fn lengths_cover_their_range_and_contents_differ() {
        let plan = MessagePlan { length_bytes: (8, 12), service: Service::Echo, ..plan() };
        let mut writer = MessageWriter::new(&plan);
        let mut seen = [0; 13];
        for counter in 0..1_000 {
            seen[writer.write(1, counter, Kind::Low).len()] += 1;
        }
        assert!(seen[8..].iter().all(|count| *count > 100) && seen[..8].iter().all(|c| *c == 0), "{seen:?}");
        let plan = MessagePlan { length_bytes: (u16::MAX, u16::MAX), ..plan };
        let mut writer = MessageWriter::new(&plan);
        let first = writer.write(1, 1, Kind::Low).to_vec();
        assert_eq!(writer.write(1, 1, Kind::Low), first);
        assert_ne!(writer.write(2, 1, Kind::Low)[8..], first[8..]);
    }

    proptest! {
        #[test]
        fn cut_answers_are_recognized(
            errors in proptest::collection::vec(any::<bool>(), 0..5),
            step in 1usize..400,
            flip in proptest::option::of(any::<prop::sample::Index>()),
        ) {
            let text = |error: &bool| if *error { ANSWER_ERROR } else { ANSWER_OK }.to_vec();
            let mut stream: Vec<u8> = errors.iter().flat_map(text).collect();
            let wrong = flip.filter(|_| !stream.is_empty()).map(|index| index.index(stream.len()));
            if let Some(at) = wrong {
                stream[at] ^= 1;
            }
            let (mut received, mut is_error, mut seen) = (0, false, Vec::new());
            let mut failed = false;
            'stream: for piece in stream.chunks(step) {
                let mut rest = piece;
                while !rest.is_empty() {
                    match read_iot(&mut received, &mut is_error, rest) {
                        AnswerPart::More => break,
                        AnswerPart::Complete { used, is_error } => {
                            seen.push(is_error);
                            rest = &rest[used..];
                        }
                        AnswerPart::Wrong => {
                            failed = true;
                            break 'stream;
                        }
                    }
                }
            }
            match wrong {
                Some(at) => {
                    prop_assert!(failed);
                    prop_assert_eq!(&seen[..], &errors[..at / ANSWER_BYTES]);
                }
                None => prop_assert_eq!(seen, errors),
            }
        }
    }
}
