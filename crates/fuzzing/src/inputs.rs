//! Random inputs derived from a seed: parts of the corpus, joined and mutated. This does not replace
//! coverage-guided fuzzing, but runs anywhere and finds shallow defects.

use crate::Target;
use crate::frames;
use ginnel_devices::random::Random;

/// Returns the input of a target for a seed.
pub fn random(target: &Target, seed: u64) -> Vec<u8> {
    let mut rng = Random::new(seed);
    let seeds = (target.seeds)();
    let pick = |rng: &mut Random| seeds[rng.below(seeds.len() as u64) as usize].1.clone();
    let mut data = pick(&mut rng);
    if target.name == "frames" {
        return join_operations(data, &pick(&mut rng), &mut rng);
    }
    if rng.below(3) == 0 {
        let other = pick(&mut rng);
        let at = rng.below(data.len() as u64 + 1) as usize;
        let from = rng.below(other.len() as u64 + 1) as usize;
        data.splice(at..at, other[from..].iter().copied());
    }
    for _ in 0..rng.below(12) {
        change_bytes(&mut data, &mut rng);
    }
    data
}

fn join_operations(first: Vec<u8>, second: &[u8], rng: &mut Random) -> Vec<u8> {
    let mut data = first;
    if rng.below(3) == 0 {
        data.extend_from_slice(second.get(frames::word::WORD_BYTES..).unwrap_or(&[]));
    }
    let mut len = data.len().min(frames::INPUT_BYTES_MAX);
    data.resize(frames::INPUT_BYTES_MAX, 0);
    for _ in 0..rng.below(20) {
        len = frames::mutate(&mut data, len, frames::INPUT_BYTES_MAX, rng.next_u64() as u32);
    }
    data.truncate(len);
    data
}

fn change_bytes(data: &mut Vec<u8>, rng: &mut Random) {
    let len = data.len() as u64;
    if len == 0 {
        return data.push(rng.next_u64() as u8);
    }
    let at = rng.below(len) as usize;
    match rng.below(6) {
        0 => data[at] ^= 1 << rng.below(8),
        1 => data[at] = [0, 1, 0x7f, 0x80, 0xff, b' ', b'\r', b'\n', b':', b'='][rng.below(10) as usize],
        2 => data[at] = rng.next_u64() as u8,
        3 => data.insert(at, rng.next_u64() as u8),
        4 => drop(data.drain(at..(at + 1 + rng.below(8) as usize).min(data.len()))),
        _ => {
            let end = (at + 1 + rng.below(16) as usize).min(data.len());
            let piece = data[at..end].to_vec();
            let to = rng.below(data.len() as u64 + 1) as usize;
            data.splice(to..to, piece);
        }
    }
}

/// Shrinks a failing input as long as `fails` returns true: first in units of 8 × `step` and of `step`
/// bytes, which are whole operations of [`crate::frames`], then in bytes once fewer than 256 are left.
/// Finally makes the values of bytes smaller.
pub fn shrink(mut data: Vec<u8>, step: usize, mut fails: impl FnMut(&[u8]) -> bool) -> Vec<u8> {
    loop {
        let previous = data.clone();
        for step in [step * 8, step, 1] {
            let mut at = 0;
            while at < data.len() {
                let mut shorter = data.clone();
                shorter.drain(at..(at + step).min(data.len()));
                if (step > 1 || step == 1 && data.len() < 256) && fails(&shorter) {
                    data = shorter;
                } else {
                    at += step;
                }
            }
        }
        for at in 0..data.len() {
            for smaller in [0, 1, data[at] >> 1, data[at] & 0xf0] {
                let mut simpler = data.clone();
                simpler[at] = smaller;
                if smaller < data[at] && fails(&simpler) {
                    data = simpler;
                    break;
                }
            }
        }
        if data == previous {
            return data;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_determines_the_input() {
        for target in &crate::TARGETS {
            assert_eq!(random(target, 5), random(target, 5));
            assert!((0..20).any(|seed| random(target, seed) != random(target, seed + 1)), "{}", target.name);
        }
    }

    #[test]
    fn shrinking_keeps_the_cause() {
        let data: Vec<u8> = (0..200).collect();
        let small = shrink(data, 16, |d| d.contains(&77));
        assert_eq!(small, [77]);
    }
}
