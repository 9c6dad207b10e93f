use super::*;
use proptest::prelude::*;

const NO_LIMIT: usize = 1 << 20;

fn pool() -> ChunkPool {
    ChunkPool::new(4 << 20)
}

fn read_all(buffer: &mut RecvBuffer, pool: &mut ChunkPool) -> Vec<u8> {
    let mut out = vec![0; buffer.readable()];
    assert_eq!(buffer.read(pool, &mut out), out.len());
    out
}

/// Returns a byte that depends on its position.
fn byte_at(position: u64) -> u8 {
    (position.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

fn stream(range: core::ops::Range<u64>) -> Vec<u8> {
    range.map(byte_at).collect()
}

/// Checks what the module documentation promises about lists and chunks.
fn check(buffer: &RecvBuffer, pool: &ChunkPool, capacity: usize) {
    assert!(buffer.base <= buffer.contiguous_end && buffer.base - buffer.origin < CHUNK_BYTES as u64);
    let mut end = buffer.contiguous_end;
    for range in &buffer.ranges {
        assert!(range.start > end && range.end > range.start, "sorted, disjoint, not adjacent");
        end = range.end;
    }
    assert!(buffer.ranges.len() <= RANGES_MAX);
    assert!((end - buffer.base) as usize <= capacity);
    let held = buffer.chunks.iter().filter(|&&chunk| chunk != ABSENT).count();
    assert_eq!((held, buffer.memory().chunks), (pool.in_use(), pool.in_use()));
    assert!(held <= capacity / CHUNK_BYTES + 2);
    let needed = ((end - buffer.origin) as usize).div_ceil(CHUNK_BYTES);
    assert!(buffer.chunks.iter().skip(needed).all(|&chunk| chunk == ABSENT), "a chunk beyond all data");
    assert!(!buffer.is_empty() || held == 0);
    let there = |position: u64| buffer.chunks[((position - buffer.origin) as usize) / CHUNK_BYTES] != ABSENT;
    let contiguous = buffer.base..buffer.contiguous_end;
    for range in core::iter::once(&contiguous).chain(&buffer.ranges) {
        assert!(range.clone().step_by(CHUNK_BYTES).chain(range.clone().last()).all(there));
    }
}

#[test]
fn bytes_after_gap_become_readable_when_it_closes() {
    let (mut pool, mut buffer) = (pool(), RecvBuffer::new());
    let late = buffer.write(&mut pool, 3, b"defg", 100);
    assert_eq!(late, WriteOutcome { accepted: 4, stored: 4, newly_contiguous: 0, duplicate: None });
    assert_eq!((buffer.readable(), buffer.ranges().as_slice()), (0, &[(3, 7)][..]));
    let closing = buffer.write(&mut pool, 0, b"abcXY", 100);
    assert_eq!(
        closing,
        WriteOutcome { accepted: 5, stored: 3, newly_contiguous: 7, duplicate: Some((3, 5)) }
    );
    assert_eq!(read_all(&mut buffer, &mut pool), b"abcdefg");
    assert!(buffer.is_empty());
    assert_eq!(pool.in_use(), 0);
}

#[test]
fn empty_data_changes_nothing() {
    let (mut pool, mut buffer) = (pool(), RecvBuffer::new());
    assert_eq!(buffer.write(&mut pool, 5, b"", 100), WriteOutcome::default());
    assert_eq!(buffer.peek(&pool), b"");
    assert_eq!(buffer.read(&mut pool, &mut [0; 4]), 0);
    buffer.consume(&mut pool, 0);
    assert!(buffer.is_empty() && buffer.ranges().is_empty());
}

#[test]
fn bytes_beyond_capacity_are_refused() {
    let (mut pool, mut buffer) = (pool(), RecvBuffer::new());
    assert_eq!(buffer.write(&mut pool, 8, b"xyz", 10).accepted, 2);
    assert_eq!(buffer.write(&mut pool, 10, b"xyz", 10).accepted, 0);
    assert_eq!(buffer.write(&mut pool, 50, b"xyz", 10), WriteOutcome::default());
    assert_eq!(buffer.write(&mut pool, 0, &[b'a'; 20], 10).newly_contiguous, 10);
    assert_eq!(read_all(&mut buffer, &mut pool), b"aaaaaaaaxy");
}

#[test]
fn first_version_of_overlapping_data_is_kept() {
    let (mut pool, mut buffer) = (pool(), RecvBuffer::new());
    buffer.write(&mut pool, 2, b"cd", 100);
    buffer.write(&mut pool, 1, b"XYZ!", 100);
    buffer.write(&mut pool, 0, b"a????", 100);
    assert_eq!(read_all(&mut buffer, &mut pool), b"aXcd!");
}

#[test]
fn the_first_run_of_duplicates_is_reported() {
    let (mut pool, mut buffer) = (pool(), RecvBuffer::new());
    buffer.write(&mut pool, 0, b"0123", 100);
    buffer.write(&mut pool, 6, b"67", 100);
    buffer.write(&mut pool, 10, b"ab", 100);
    for (offset, len, expected) in
        [(1, 2, Some((1, 3))), (2, 2, Some((2, 4))), (6, 2, Some((6, 8))), (11, 1, Some((11, 12)))]
    {
        let outcome = buffer.write(&mut pool, offset, &vec![0; len], 100);
        assert_eq!((outcome.duplicate, outcome.stored, outcome.accepted), (expected, 0, len));
    }
    assert_eq!(buffer.write(&mut pool, 5, &[0; 4], 100).duplicate, Some((6, 8)));
    assert_eq!(buffer.write(&mut pool, 13, &[0; 1], 100).duplicate, None);
    assert_eq!(buffer.write(&mut pool, 2, &[0; 11], 100).duplicate, Some((2, 4)));
}

#[test]
fn ranges_are_reported_most_recently_changed_first() {
    let (mut pool, mut buffer) = (pool(), RecvBuffer::new());
    for offset in [10, 20, 30, 40, 50] {
        buffer.write(&mut pool, offset, b"ab", 100);
    }
    // RFC 2018 §4: the block with the segment that arrived last, then those reported before it.
    assert_eq!(buffer.ranges().as_slice(), [(50, 52), (40, 42), (30, 32), (20, 22)]);
    buffer.write(&mut pool, 12, b"cd", 100);
    assert_eq!(buffer.ranges().as_slice(), [(10, 14), (50, 52), (40, 42), (30, 32)]);
    buffer.write(&mut pool, 42, &[0; 8], 100);
    assert_eq!(buffer.ranges().as_slice(), [(40, 52), (10, 14), (30, 32), (20, 22)]);
    // A duplicate moves its block to the front, too.
    buffer.write(&mut pool, 31, b"b", 100);
    assert_eq!(buffer.ranges()[0], (30, 32));
    // Blocks that became readable are removed, and reading shifts the others.
    buffer.write(&mut pool, 0, &[0; 12], 100);
    buffer.consume(&mut pool, 14);
    assert_eq!(buffer.ranges().as_slice(), [(16, 18), (26, 38), (6, 8)]);
}

// limit: out-of-order ranges of a connection
#[test]
fn farthest_range_is_dropped_at_limit() {
    let (mut pool, mut buffer) = (ChunkPool::new(64 << 20), RecvBuffer::new());
    for n in 1..=RANGES_MAX {
        assert_eq!(buffer.write(&mut pool, n * 4000, b"ab", 64 << 20).accepted, 2);
    }
    let held = pool.in_use();
    let beyond = buffer.write(&mut pool, (RANGES_MAX + 1) * 4000, b"ab", 64 << 20);
    assert_eq!((beyond, pool.in_use(), buffer.dropped_ranges()), (WriteOutcome::default(), held, 1));
    assert_eq!(buffer.write(&mut pool, 10, b"ab", 64 << 20).accepted, 2);
    assert_eq!((buffer.range_count(), buffer.dropped_ranges()), (RANGES_MAX, 2));
    check(&buffer, &pool, 64 << 20);
    // Data that touch an existing range need no entry in the list.
    assert_eq!(buffer.write(&mut pool, (RANGES_MAX - 1) * 4000 + 2, b"ab", 64 << 20).accepted, 2);
    assert_eq!(buffer.dropped_ranges(), 2);
}

#[test]
fn in_order_data_displaces_out_of_order_data() {
    let mut pool = ChunkPool::new(3 * CHUNK_BYTES);
    let mut buffer = RecvBuffer::new();
    let other = pool.alloc().unwrap();
    for n in [4, 3] {
        buffer.write(&mut pool, n * CHUNK_BYTES, &[7; CHUNK_BYTES], NO_LIMIT);
    }
    assert_eq!(pool.in_use(), 3);
    let outcome = buffer.write(&mut pool, 0, &stream(0..2 * CHUNK_BYTES as u64), NO_LIMIT);
    assert_eq!((outcome.accepted, outcome.newly_contiguous), (2 * CHUNK_BYTES, 2 * CHUNK_BYTES));
    assert_eq!(read_all(&mut buffer, &mut pool), stream(0..2 * CHUNK_BYTES as u64));
    pool.free(other);
}

#[test]
fn out_of_order_data_leaves_reserved_memory() {
    let mut pool = ChunkPool::new(8 * CHUNK_BYTES);
    let mut hoarder = RecvBuffer::new();
    let outcome = hoarder.write(&mut pool, 100, &[1; 16 * CHUNK_BYTES], NO_LIMIT);
    assert_eq!(outcome.accepted, 6 * CHUNK_BYTES - 100);
    let mut other = RecvBuffer::new();
    assert_eq!(other.write(&mut pool, 0, b"hello", NO_LIMIT).accepted, 5);
    assert_eq!(hoarder.drop_out_of_order(&mut pool), 6 * CHUNK_BYTES - 100);
    assert_eq!((pool.in_use(), hoarder.is_empty(), hoarder.dropped_ranges()), (1, true, 1));
    // Bytes after a FIN were not lost.
    assert!(hoarder.write(&mut pool, 100, &[1; 100], NO_LIMIT).accepted > 0);
    hoarder.discard_out_of_order(&mut pool);
    assert_eq!((hoarder.range_count(), hoarder.dropped_ranges()), (0, 1));
}

#[test]
fn only_front_of_data_is_accepted_without_memory() {
    let mut pool = ChunkPool::new(2 * CHUNK_BYTES);
    let mut buffer = RecvBuffer::new();
    let outcome = buffer.write(&mut pool, 0, &stream(0..6000), NO_LIMIT);
    assert_eq!((outcome.accepted, outcome.stored, outcome.newly_contiguous), (4096, 4096, 4096));
    assert_eq!(buffer.write(&mut pool, 4096, b"more", NO_LIMIT).accepted, 0);
    buffer.consume(&mut pool, 2048);
    assert_eq!(buffer.write(&mut pool, 2048, b"more", NO_LIMIT).accepted, 4);
    check(&buffer, &pool, NO_LIMIT);
}

#[test]
fn bytes_of_other_streams_are_never_exposed() {
    let mut pool = ChunkPool::new(CHUNK_BYTES);
    let mut first = RecvBuffer::new();
    first.write(&mut pool, 0, &[b'S'; CHUNK_BYTES], NO_LIMIT);
    first.clear(&mut pool);
    let mut second = RecvBuffer::new();
    second.write(&mut pool, 0, b"abc", NO_LIMIT);
    assert_eq!(second.peek(&pool), b"abc");
}

#[test]
fn chunk_can_be_lent_in_place() {
    let (mut pool, mut buffer) = (pool(), RecvBuffer::new());
    buffer.write(&mut pool, 0, &stream(0..3000), NO_LIMIT);
    buffer.consume(&mut pool, 100);
    let (chunk, within) = buffer.peek_chunk().unwrap();
    let lent = pool.lend(chunk);
    assert_eq!(lent[within.clone()], stream(100..2048));
    pool.return_lent(chunk, lent);
    buffer.consume(&mut pool, within.len());
    assert_eq!(buffer.peek(&pool), stream(2048..3000));
}

#[test]
fn lists_keep_memory_unless_huge() {
    let mut pool = ChunkPool::new(8 << 20);
    let mut buffer = RecvBuffer::new();
    buffer.write(&mut pool, 0, &[0; 64 * CHUNK_BYTES], 8 << 20);
    let capacity = buffer.chunks.capacity();
    buffer.consume(&mut pool, 64 * CHUNK_BYTES);
    assert_eq!(buffer.chunks.capacity(), capacity);
    buffer.write(&mut pool, 0, &vec![0; 1024 * CHUNK_BYTES], 8 << 20);
    buffer.clear(&mut pool);
    assert!(buffer.chunks.capacity() <= 2 * KEPT_CHUNK_ENTRIES);
    assert_eq!(pool.in_use(), 0);
}

#[derive(Clone, Debug)]
enum Step {
    Write {
        offset: usize,
        len: usize,
        version: u8,
    },
    /// Writes at the front of the first gap.
    WriteNext {
        len: usize,
        version: u8,
    },
    Read {
        len: usize,
    },
    Consume {
        percent: usize,
    },
    DropOutOfOrder,
    Clear,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        10 => (0..12_000usize, 0..3000usize, any::<u8>())
            .prop_map(|(offset, len, version)| Step::Write { offset, len, version }),
        6 => (0..40usize, 0..8usize, any::<u8>())
            .prop_map(|(offset, len, version)| Step::Write { offset, len, version }),
        4 => (0..3000usize, any::<u8>()).prop_map(|(len, version)| Step::WriteNext { len, version }),
        3 => (0..5000usize).prop_map(|len| Step::Read { len }),
        2 => (0..=100usize).prop_map(|percent| Step::Consume { percent }),
        1 => Just(Step::DropOutOfOrder),
        1 => Just(Step::Clear),
    ];
    proptest::collection::vec(step, 1..60)
}

/// A stream as a list of optional bytes, from the first unread one on.
#[derive(Default)]
struct Oracle {
    bytes: Vec<Option<u8>>,
}

impl Oracle {
    fn readable(&self) -> usize {
        self.bytes.iter().take_while(|byte| byte.is_some()).count()
    }

    fn write(&mut self, offset: usize, data: &[u8]) -> WriteOutcome {
        let before = self.readable();
        if !data.is_empty() && self.bytes.len() < offset + data.len() {
            self.bytes.resize(offset + data.len(), None);
        }
        let place = self.bytes.get_mut(offset..).unwrap_or_default();
        let there: Vec<bool> = place.iter().take(data.len()).map(Option::is_some).collect();
        let duplicate = there.iter().position(|&there| there).map(|first| {
            let run = there[first..].iter().take_while(|&&there| there).count();
            (offset + first, offset + first + run)
        });
        for (byte, &new) in place.iter_mut().zip(data) {
            byte.get_or_insert(new);
        }
        WriteOutcome {
            accepted: data.len(),
            stored: there.iter().filter(|&&there| !there).count(),
            newly_contiguous: self.readable() - before,
            duplicate,
        }
    }

    fn ranges(&self) -> Vec<(usize, usize)> {
        let mut ranges = Vec::new();
        let mut at = self.readable();
        while at < self.bytes.len() {
            let there = self.bytes[at..].iter().take_while(|byte| byte.is_some()).count();
            if there > 0 {
                ranges.push((at, at + there));
            }
            at += there.max(1);
        }
        ranges
    }
}

proptest! {
    #[test]
    fn agrees_with_a_list_of_bytes(steps in steps(), capacity in 1..16_000usize) {
        let (mut pool, mut buffer, mut oracle) = (pool(), RecvBuffer::new(), Oracle::default());
        for step in steps {
            let mut changed = None;
            match step {
                Step::Write { .. } | Step::WriteNext { .. } => {
                    let (offset, len, version) = match step {
                        Step::Write { offset, len, version } => (offset, len, version),
                        Step::WriteNext { len, version } => (oracle.readable(), len, version),
                        _ => unreachable!(),
                    };
                    // Different versions of a byte show which one is kept.
                    let data: Vec<u8> = (0..len).map(|i| version.wrapping_add(i as u8)).collect();
                    let fitting = &data[..len.min(capacity.saturating_sub(offset))];
                    let outcome = buffer.write(&mut pool, offset, &data, capacity);
                    if fitting.is_empty() {
                        prop_assert_eq!(outcome, WriteOutcome::default());
                    } else {
                        prop_assert_eq!(outcome, oracle.write(offset, fitting));
                        changed = Some(offset);
                    }
                }
                Step::Read { len } => {
                    let mut out = vec![0; len];
                    let n = buffer.read(&mut pool, &mut out);
                    prop_assert_eq!(n, len.min(oracle.readable()));
                    let expected: Vec<u8> = oracle.bytes.drain(..n).flatten().collect();
                    prop_assert_eq!(&out[..n], &expected);
                }
                Step::Consume { percent } => {
                    let n = buffer.readable() * percent / 100;
                    buffer.consume(&mut pool, n);
                    oracle.bytes.drain(..n);
                }
                Step::DropOutOfOrder => {
                    let ranges = oracle.ranges();
                    let bytes: usize = ranges.iter().map(|(start, end)| end - start).sum();
                    prop_assert_eq!(buffer.drop_out_of_order(&mut pool), bytes);
                    oracle.bytes.truncate(oracle.readable());
                }
                Step::Clear => {
                    buffer.clear(&mut pool);
                    oracle.bytes.clear();
                }
            }
            check(&buffer, &pool, capacity);
            prop_assert_eq!(buffer.readable(), oracle.readable());
            let readable: Vec<u8> = oracle.bytes.iter().map_while(|&byte| byte).collect();
            prop_assert!(readable.starts_with(buffer.peek(&pool)));
            prop_assert_eq!(buffer.peek(&pool).is_empty(), readable.is_empty());
            let (ranges, reported) = (oracle.ranges(), buffer.ranges());
            prop_assert_eq!(buffer.range_count(), ranges.len());
            let waiting: usize = ranges.iter().map(|(start, end)| end - start).sum();
            prop_assert_eq!(buffer.memory().bytes, (oracle.readable() + waiting) as u64);
            prop_assert_eq!(reported.len(), ranges.len().min(REPORTED_RANGES_MAX));
            prop_assert!(reported.iter().all(|range| ranges.contains(range)));
            if let Some(offset) = changed && offset > buffer.readable() {
                prop_assert!(reported[0].0 <= offset && offset < reported[0].1);
            }
        }
        prop_assert_eq!(read_all(&mut buffer, &mut pool), oracle.bytes.iter().map_while(|&b| b).collect::<Vec<_>>());
        buffer.clear(&mut pool);
        prop_assert_eq!(pool.in_use(), 0);
    }

    #[test]
    fn stream_arrives_complete_despite_little_memory(
        chunks in 1..12usize,
        steps in steps(),
    ) {
        let mut pool = ChunkPool::new(chunks * CHUNK_BYTES);
        let mut buffer = RecvBuffer::new();
        let mut read = 0u64;
        for step in steps {
            let was_readable = buffer.readable();
            match step {
                Step::Write { offset, len, .. } => {
                    let first = read + offset as u64;
                    let outcome = buffer.write(&mut pool, offset, &stream(first..first + len as u64), NO_LIMIT);
                    prop_assert!(outcome.accepted <= len && outcome.stored <= outcome.accepted);
                    prop_assert_eq!(buffer.readable(), was_readable + outcome.newly_contiguous);
                }
                Step::WriteNext { len, .. } => {
                    let first = read + was_readable as u64;
                    let outcome = buffer.write(&mut pool, was_readable, &stream(first..first + len as u64), NO_LIMIT);
                    prop_assert!(outcome.newly_contiguous >= outcome.accepted);
                    let stuck = outcome.accepted == 0 && len > 0;
                    prop_assert!(!stuck || pool.available() == 0 && was_readable > 0, "no progress");
                }
                Step::Read { len } => {
                    let mut out = vec![0; len];
                    let n = buffer.read(&mut pool, &mut out) as u64;
                    prop_assert_eq!(&out[..n as usize], stream(read..read + n));
                    read += n;
                }
                Step::Consume { percent } => {
                    let n = was_readable * percent / 100;
                    buffer.consume(&mut pool, n);
                    read += n as u64;
                }
                Step::DropOutOfOrder => _ = buffer.drop_out_of_order(&mut pool),
                Step::Clear => {
                    read += was_readable as u64;
                    buffer.clear(&mut pool);
                }
            }
            check(&buffer, &pool, NO_LIMIT);
        }
        let rest = read_all(&mut buffer, &mut pool);
        prop_assert_eq!(&rest, &stream(read..read + rest.len() as u64));
    }
}
