//! Mutates inputs by whole operations, which mutation of bytes rarely does.

use super::word::{Op, PeerAction, WORD_BYTES, Word, segment_bits};
use ginnel_devices::random::Random;

/// Mutates `data` in place. Returns its new length, at most `max`. The buffer must have at least `max` bytes.
pub fn mutate(data: &mut [u8], len: usize, max: usize, seed: u32) -> usize {
    let mut rng = Random::new(seed.into());
    let mut words: Vec<Word> = data[..len].chunks(WORD_BYTES).map(Word::decode).collect();
    if words.is_empty() {
        words.push(Word::default());
    }
    for _ in 0..1 + rng.below(4) {
        change(&mut words, &mut rng);
    }
    words.truncate(max / WORD_BYTES);
    for (word, out) in words.iter().zip(data.chunks_mut(WORD_BYTES)) {
        out.copy_from_slice(&word.encode());
    }
    words.len() * WORD_BYTES
}

/// Applies one random mutation. The first word selects the stack, so it stays in its place; only its operands
/// change.
fn change(words: &mut Vec<Word>, rng: &mut Random) {
    let count = words.len() as u64;
    let at = rng.below(count) as usize;
    match rng.below(10) {
        0..=3 => {
            let word = random(rng);
            words.insert((at + 1).min(words.len()), word);
        }
        4 if count > 2 && at > 0 => drop(words.remove(at)),
        5 if at > 0 => {
            let other = 1 + rng.below(count - 1) as usize;
            words.swap(at, other);
        }
        6 => {
            // Copies a part of the input to another position.
            let end = (at + 1 + rng.below(6) as usize).min(words.len());
            let piece = words[at.max(1).min(end)..end].to_vec();
            let to = 1 + rng.below(count) as usize;
            let to = to.min(words.len());
            words.splice(to..to, piece);
        }
        _ => {
            let mut bytes = words[at].encode();
            for _ in 0..1 + rng.below(3) {
                let i = rng.below(WORD_BYTES as u64) as usize;
                bytes[i] = match rng.below(4) {
                    0 => bytes[i] ^ 1 << rng.below(8),
                    1 => [0, 1, 0x7f, 0x80, 0xff][rng.below(5) as usize],
                    2 => bytes[i].wrapping_add(rng.below(9) as u8).wrapping_sub(4),
                    _ => rng.next_u64() as u8,
                };
            }
            words[at] = Word::decode(&bytes);
        }
    }
}

/// Returns an operation whose operands are likely to be meaningful.
fn random(rng: &mut Random) -> Word {
    let small = |rng: &mut Random| rng.below(4) as u8;
    let amount = |rng: &mut Random| {
        let bits = rng.below(18);
        rng.below(1 << bits) as u32
    };
    let op = Op::ALL[rng.below(Op::ALL.len() as u64) as usize];
    let mut word = Word {
        code: op as u8,
        a: small(rng),
        b: rng.next_u64() as u8,
        c: small(rng),
        x: amount(rng),
        y: amount(rng),
        z: if rng.below(2) == 0 { 0xffff } else { rng.next_u64() as u32 },
    };
    match op {
        Op::Segment => {
            // Mostly acknowledgements near the expected numbers.
            word.b = [0x10, 0x10, 0x18, 0x11, 0x02, 0x12, 0x04, 0x14, word.b][rng.below(9) as usize];
            word.c = if rng.below(3) == 0 { rng.next_u64() as u8 } else { segment_bits::ADVANCE_SEQ };
            let offset = |rng: &mut Random| if rng.below(2) == 0 { 0 } else { rng.next_u64() as u32 % 5000 };
            word.x = offset(rng) | offset(rng) << 16;
            let window = [0u32, 1, 500, 5000, 0xffff][rng.below(5) as usize];
            word.y = (amount(rng) % 3000) | window << 16;
        }
        Op::PeerAction => word.b = rng.below(PeerAction::ALL.len() as u64) as u8,
        Op::Open => word.b = if rng.below(2) == 0 { 15 } else { word.b },
        Op::Advance => word.a = rng.below(4) as u8,
        Op::Repeat => word.a = rng.below(12) as u8,
        Op::TxCapacity => word.a = if rng.below(2) == 0 { 255 } else { word.a },
        _ => {}
    }
    word
}
