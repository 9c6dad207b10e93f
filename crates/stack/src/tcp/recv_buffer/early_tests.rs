use super::*;
use proptest::prelude::*;

const NO_LIMIT: usize = 1 << 20;

fn byte_at(position: u64) -> u8 {
    (position.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

fn stream(range: Range<u64>) -> Vec<u8> {
    range.map(byte_at).collect()
}

/// Checks what the module documentation promises.
fn check(buffer: &RecvBuffer, pool: &ChunkPool) {
    let early = buffer.early.as_deref().unwrap();
    assert!(buffer.base <= buffer.read_end && buffer.read_end <= buffer.contiguous_end);
    assert!(buffer.readable() > 0 || buffer.contiguous() == 0, "the first unread byte was taken");
    let mut end = None;
    for taken in &early.taken {
        assert!(!taken.is_empty() && end.is_none_or(|end| end < taken.start), "sorted, not adjacent");
        end = Some(taken.end);
        let contiguous = buffer.base..buffer.contiguous_end;
        let mut all = buffer.ranges.iter().chain([&contiguous]);
        assert!(all.any(|range| range.start <= taken.start && taken.end <= range.end));
    }
    for pending in &early.pending {
        assert!(buffer.ranges.iter().any(|r| r.start <= pending.start && pending.end <= r.end));
        assert_eq!(early.taken_bytes(pending), 0);
    }
    assert!(early.pending.len() + early.taken.len() <= EARLY_RANGES_MAX + 1);
    let held = buffer.chunks.iter().filter(|&&chunk| chunk != ABSENT).count();
    assert_eq!(held, pool.in_use());
    assert!(!buffer.is_empty() || held == 0 && early.taken.is_empty() && early.pending.is_empty());
}

#[test]
fn taken_bytes_need_no_memory_and_are_never_dropped() {
    let (mut pool, mut buffer) = (ChunkPool::new(1 << 20), RecvBuffer::new());
    let at = 2 * CHUNK_BYTES;
    buffer.write(&mut pool, at, &stream(at as u64..at as u64 + 3000), NO_LIMIT);
    assert_eq!(buffer.add_early(at, 3000).added, 1);
    let mut out = [0; 4096];
    assert_eq!(buffer.take_early(&mut pool, &mut out), Some(EarlyBytes { ahead: at, len: 3000 }));
    assert_eq!((&out[..3000], pool.in_use()), (&stream(at as u64..at as u64 + 3000)[..], 0));
    assert_eq!((buffer.drop_out_of_order(&mut pool), buffer.range_count()), (0, 1));
    assert_eq!(buffer.write(&mut pool, at, &[0; 3000], NO_LIMIT).stored, 0);
    let filled = buffer.write(&mut pool, 0, &stream(0..at as u64), NO_LIMIT);
    assert_eq!((filled.newly_contiguous, buffer.readable(), buffer.unread_bytes()), (at + 3000, at, at));
    assert_eq!(buffer.read(&mut pool, &mut out), at);
    assert!(buffer.is_empty() && pool.in_use() == 0);
}

#[test]
fn unreported_ranges_are_left_out() {
    let (mut pool, mut buffer) = (ChunkPool::new(1 << 20), RecvBuffer::new());
    buffer.write(&mut pool, 10, &[1; 10], NO_LIMIT);
    buffer.add_unreported(10, 10);
    assert_eq!((buffer.reported_range_count(), buffer.ranges().len(), buffer.range_count()), (0, 0, 1));
    buffer.write(&mut pool, 5, &[1; 20], NO_LIMIT);
    assert_eq!(buffer.ranges().as_slice(), [(5, 10), (20, 25)]);
    buffer.report_from(9);
    assert_eq!(buffer.ranges().as_slice(), [(5, 10), (20, 25)]);
    buffer.report_from(10);
    assert_eq!(buffer.ranges().as_slice(), [(5, 25)]);
}

#[derive(Clone, Debug)]
enum Step {
    Write { offset: usize, len: usize, is_early: bool, is_unreported: bool },
    WriteNext { len: usize },
    Take { len: usize },
    Read { len: usize },
    DropOutOfOrder,
    Report { offset: usize },
    Cancel,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => (0..20_000usize, 1..3000usize, any::<bool>(), any::<bool>()).prop_map(
            |(offset, len, is_early, is_unreported)| Step::Write { offset, len, is_early, is_unreported }),
        4 => (0..3000usize).prop_map(|len| Step::WriteNext { len }),
        6 => (0..4000usize).prop_map(|len| Step::Take { len }),
        4 => (0..5000usize).prop_map(|len| Step::Read { len }),
        1 => Just(Step::DropOutOfOrder),
        1 => (0..20_000usize).prop_map(|offset| Step::Report { offset }),
        1 => Just(Step::Cancel),
    ];
    proptest::collection::vec(step, 1..80)
}

proptest! {
    /// With any amount of memory every byte is read or taken once, and the stream can be completed.
    #[test]
    fn bytes_are_taken_or_read_once(chunks in 1..16usize, steps in steps()) {
        let mut pool = ChunkPool::new(chunks * CHUNK_BYTES);
        let mut buffer = RecvBuffer::new();
        buffer.add_unreported(0, 0);
        let mut seen = vec![0u8; 200_000];
        let mut count = |first: u64, bytes: &[u8]| {
            assert_eq!(bytes, stream(first..first + bytes.len() as u64));
            for at in 0..bytes.len() {
                seen[first as usize + at] += 1;
            }
        };
        let complete = (0..400).flat_map(|_| {
            [Step::WriteNext { len: 1000 }, Step::Read { len: 2000 }, Step::Take { len: 0 }]
        });
        let mut end = 0;
        for (number, step) in steps.clone().into_iter().chain(complete).enumerate() {
            match step {
                Step::Write { offset, len, is_early, is_unreported } => {
                    let offset = buffer.contiguous() + offset + 1;
                    let first = buffer.base + offset as u64;
                    let bytes = stream(first..first + len as u64);
                    let outcome = buffer.write(&mut pool, offset, &bytes, NO_LIMIT);
                    prop_assert_eq!(outcome.newly_contiguous, 0);
                    if is_early && outcome.accepted > 0 {
                        buffer.add_early(offset, outcome.accepted);
                    }
                    if is_unreported && outcome.accepted > 0 {
                        buffer.add_unreported(offset, outcome.accepted);
                    }
                }
                Step::WriteNext { len } => {
                    let (offset, first) = (buffer.contiguous(), buffer.contiguous_end);
                    if number >= steps.len() && first > 60_000 && buffer.ranges.is_empty() {
                        continue;
                    }
                    let bytes = stream(first..first + len as u64);
                    let outcome = buffer.write(&mut pool, offset, &bytes, NO_LIMIT);
                    let stuck = outcome.accepted == 0 && len > 0;
                    prop_assert!(!stuck || pool.available() == 0 && offset > 0, "no progress");
                }
                Step::Take { len } => {
                    let mut out = vec![0; len];
                    if let Some(taken) = buffer.take_early(&mut pool, &mut out) {
                        count(buffer.base + taken.ahead as u64, &out[..taken.len]);
                    }
                }
                Step::Read { len } => {
                    let (first, mut out) = (buffer.base, vec![0; len]);
                    let readable = buffer.readable();
                    let n = buffer.read(&mut pool, &mut out);
                    prop_assert_eq!(n, len.min(readable));
                    count(first, &out[..n]);
                }
                Step::DropOutOfOrder => _ = buffer.drop_out_of_order(&mut pool),
                Step::Report { offset } => buffer.report_from(offset),
                Step::Cancel => buffer.cancel_early(),
            }
            check(&buffer, &pool);
            let reported: usize = buffer.ranges().iter().map(|(start, end)| end - start).sum();
            let all: u64 = buffer.ranges.iter().map(|range| range.end - range.start).sum();
            prop_assert!(reported as u64 <= all);
            end = buffer.base;
        }
        prop_assert!(buffer.is_empty(), "not complete");
        prop_assert!(seen[..end as usize].iter().all(|&count| count == 1));
        prop_assert!(seen[end as usize..].iter().all(|&count| count == 0));
        prop_assert_eq!(pool.in_use(), 0);
    }
}
