use super::*;
use crate::tcp::source::{PreloadedSource, Source};
use core::sync::atomic::AtomicU8;
use proptest::prelude::*;

const NO_LIMIT: u64 = u64::MAX;

pub(super) struct Fixture {
    pub pool: ChunkPool,
    pub sources: SourceTable,
    pub buffer: SendBuffer,
}

impl Fixture {
    pub fn new() -> Self {
        Self { pool: ChunkPool::new(4 << 20), sources: SourceTable::new(), buffer: SendBuffer::new() }
    }

    pub fn source(&mut self, bytes: &[u8]) -> SourceId {
        self.sources.add(Box::new(PreloadedSource::new(bytes)))
    }

    pub fn push(&mut self, bytes: &[u8]) -> usize {
        self.buffer.push_bytes(&mut self.pool, bytes, NO_LIMIT)
    }

    pub fn push_source(&mut self, id: SourceId, offset: u64, len: u64) -> Result<(), PushSourceError> {
        self.buffer.push_source(&mut self.sources, id, offset, len)
    }

    pub fn discard(&mut self, n: u64) {
        self.buffer.discard_front(&mut self.pool, &mut self.sources, n);
    }

    pub fn filled(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        let sum = self.buffer.fill(&self.pool, &self.sources, offset, &mut out, PayloadSum::Required);
        let mut again = vec![0; out.len()];
        self.buffer.fill(&self.pool, &self.sources, offset, &mut again, PayloadSum::Ignored);
        assert_eq!(again, out, "summing does not change the bytes");
        assert_eq!(sum.fold() % 0xffff, Sum::of(&out).fold() % 0xffff);
        out
    }

    pub fn all(&self) -> Vec<u8> {
        self.filled(0, self.buffer.len() as usize)
    }
}

/// A source whose bytes others might write. Its contiguous bytes end in the middle.
struct SharedSource(Vec<AtomicU8>);

impl SharedSource {
    fn new(bytes: &[u8]) -> Self {
        Self(bytes.iter().map(|&byte| AtomicU8::new(byte)).collect())
    }
}

impl Source for SharedSource {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn fill(&self, offset: u64, out: &mut [u8]) {
        PayloadPiece::Shared(&self.0[offset as usize..offset as usize + out.len()]).copy_to(out);
    }

    fn shared(&self, offset: u64, len: usize) -> Option<&[AtomicU8]> {
        let (start, middle) = (offset as usize, self.0.len() / 2);
        let end = if start < middle { middle } else { self.0.len() };
        Some(&self.0[start..end.min(start + len)])
    }
}

/// A source with wrong sums, which shows when they are used.
struct WrongSumSource(Vec<u8>);

impl Source for WrongSumSource {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn fill(&self, offset: u64, out: &mut [u8]) {
        out.copy_from_slice(&self.0[offset as usize..offset as usize + out.len()]);
    }

    fn sum(&self, offset: u64, len: usize) -> Option<Sum> {
        (offset == 0 && len == self.0.len()).then(|| Sum::ZERO.add_u16(0x1234))
    }
}

#[test]
fn copied_bytes_and_slices_keep_call_order() {
    let mut fixture = Fixture::new();
    let page = fixture.source(b"0123456789");
    assert_eq!(fixture.push(b"head"), 4);
    fixture.push_source(page, 2, 5).unwrap();
    assert_eq!(fixture.buffer.push_bytes(&mut fixture.pool, b"tail", 12), 3);
    assert_eq!(fixture.filled(0, 12), b"head23456tai");
    assert_eq!(fixture.filled(3, 4), b"d234");
    fixture.discard(6);
    assert_eq!(fixture.all(), b"456tai");
    assert_eq!(fixture.pool.in_use(), 1);
    fixture.buffer.clear(&mut fixture.pool, &mut fixture.sources);
    assert_eq!((fixture.pool.in_use(), fixture.buffer.len()), (0, 0));
    assert!(fixture.sources.release(page) && fixture.sources.is_empty());
}

#[test]
fn small_writes_share_a_chunk_across_slices() {
    let mut fixture = Fixture::new();
    let body = fixture.source(&[b'.'; 100]);
    for _ in 0..20 {
        fixture.push(b"header");
        fixture.push_source(body, 0, 100).unwrap();
    }
    assert_eq!(fixture.pool.in_use(), 1);
    let all = fixture.all();
    assert!(all.chunks(106).all(|message| message.starts_with(b"header.") && message.ends_with(b".")));
    fixture.discard(19 * 106 + 5);
    assert_eq!((fixture.pool.in_use(), &fixture.all()[..3]), (1, &b"r.."[..]));
    fixture.discard(1);
    assert_eq!(fixture.pool.in_use(), 0, "the last byte of the chunk was acknowledged");
    fixture.push(b"again");
    assert_eq!((fixture.all().len(), fixture.pool.in_use()), (105, 1));
    assert!(fixture.all().ends_with(b".again"));
}

#[test]
fn acknowledged_chunk_with_room_is_freed() {
    let mut fixture = Fixture::new();
    for round in 0..5u8 {
        fixture.push(&[round; 10]);
        assert_eq!((fixture.all(), fixture.pool.in_use()), (vec![round; 10], 1));
        fixture.discard(10);
        assert_eq!((fixture.buffer.is_empty(), fixture.pool.in_use()), (true, 0));
    }
}

#[test]
fn write_is_bounded_by_limit_and_memory() {
    let mut pool = ChunkPool::new(2 * CHUNK_BYTES);
    let mut buffer = SendBuffer::new();
    assert_eq!(buffer.push_bytes(&mut pool, &[0; 100], 60), 60);
    assert_eq!(buffer.push_bytes(&mut pool, &[0; 100], 60), 0);
    assert_eq!(buffer.push_bytes(&mut pool, &[0; 100], 59), 0, "the limit was lowered");
    assert_eq!(buffer.push_bytes(&mut pool, &[0; 9999], NO_LIMIT), 2 * CHUNK_BYTES - 60);
    assert_eq!(buffer.push_bytes(&mut pool, &[0; 1], NO_LIMIT), 0);
    assert_eq!(buffer.len(), 2 * CHUNK_BYTES as u64);
}

#[test]
fn slices_out_of_range_or_released_are_refused() {
    let mut fixture = Fixture::new();
    let id = fixture.source(b"abc");
    assert_eq!(fixture.push_source(id, 1, 3), Err(PushSourceError::OutOfRange));
    assert_eq!(fixture.push_source(id, u64::MAX, 2), Err(PushSourceError::OutOfRange));
    assert_eq!(fixture.push_source(id, 3, 0), Ok(()));
    assert!(fixture.buffer.is_empty());
    fixture.push_source(id, 0, 2).unwrap();
    fixture.sources.release(id);
    assert_eq!(fixture.push_source(id, 2, 1), Err(PushSourceError::Stale));
    assert_eq!(fixture.all(), b"ab", "slices queued before the release are sent");
    fixture.discard(2);
    assert!(fixture.sources.is_empty());
}

#[test]
fn contiguous_slices_are_merged() {
    let mut fixture = Fixture::new();
    let id = fixture.source(b"0123456789");
    for n in 0..10 {
        fixture.push_source(id, n, 1).unwrap();
    }
    fixture.discard(3);
    assert_eq!((fixture.buffer.slices, fixture.all()), (1, b"3456789".to_vec()));
    fixture.push_source(id, 0, 1).unwrap();
    assert_eq!(fixture.buffer.slices, 2);
}

// limit: source slices in a send buffer
#[test]
fn the_number_of_slices_is_limited() {
    let mut fixture = Fixture::new();
    let id = fixture.source(b"ab");
    for _ in 0..SLICES_MAX {
        fixture.push_source(id, 0, 1).unwrap();
    }
    assert_eq!(fixture.push_source(id, 0, 1), Err(PushSourceError::Full));
    assert_eq!(fixture.push_source(id, 1, 1), Ok(()), "continues the last slice");
    fixture.discard(1);
    assert_eq!(fixture.push_source(id, 0, 1), Ok(()));
}

#[test]
fn known_sum_is_used_for_complete_piece() {
    let mut fixture = Fixture::new();
    let id = fixture.sources.add(Box::new(WrongSumSource(vec![1; 8])));
    fixture.push_source(id, 0, 8).unwrap();
    fixture.push(b"z");
    let mut out = [0; 9];
    let sum = |fixture: &Fixture, out: &mut [u8]| {
        fixture.buffer.fill(&fixture.pool, &fixture.sources, 0, out, PayloadSum::Required).fold()
    };
    assert_eq!(sum(&fixture, &mut out), Sum::ZERO.add_u16(0x1234).add(Sum::of(b"z")).fold());
    assert_eq!(sum(&fixture, &mut out[..6]), Sum::of(&[1; 6]).fold());
}

#[test]
#[should_panic(expected = "more than is queued")]
fn filling_more_than_is_queued_is_caught() {
    let mut fixture = Fixture::new();
    fixture.push(b"abc");
    fixture.filled(1, 3);
}

#[derive(Clone, Debug)]
enum Step {
    Push {
        len: usize,
        limit: u64,
    },
    PushSource {
        which: usize,
        offset: u64,
        len: u64,
    },
    /// Discards `part` ten-thousandths of the queued bytes.
    Discard {
        part: u64,
    },
    Fill {
        offset: u64,
        len: usize,
    },
    Release {
        which: usize,
    },
    Privatize {
        len: u64,
    },
    Clear,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let lens = || prop_oneof![0..20usize, 0..5000usize];
    let step = prop_oneof![
        6 => (lens(), 0..40_000u64).prop_map(|(len, limit)| Step::Push { len, limit }),
        6 => (0..3usize, 0..3000u64, 0..3000u64)
            .prop_map(|(which, offset, len)| Step::PushSource { which, offset, len }),
        3 => (0..=10_000u64).prop_map(|part| Step::Discard { part }),
        3 => (0..8000u64).prop_map(|len| Step::Privatize { len }),
        8 => (any::<u64>(), lens()).prop_map(|(offset, len)| Step::Fill { offset, len }),
        1 => (0..3usize).prop_map(|which| Step::Release { which }),
        1 => Just(Step::Clear),
    ];
    proptest::collection::vec(step, 1..80)
}

proptest! {
    #[test]
    fn agrees_with_a_list_of_bytes(steps in steps()) {
        let mut fixture = Fixture::new();
        let contents: Vec<Vec<u8>> =
            (1..4u32).map(|n| (0..n * 1000).map(|i| ((i * i * n) >> 3) as u8).collect()).collect();
        let add = |fixture: &mut Fixture, which: usize| match which {
            2 => fixture.sources.add(Box::new(SharedSource::new(&contents[2]))),
            _ => fixture.source(&contents[which]),
        };
        let mut ids: Vec<SourceId> = (0..3).map(|which| add(&mut fixture, which)).collect();
        let mut oracle: Vec<u8> = Vec::new();
        let mut counter = 0u8;
        for step in steps {
            match step {
                Step::Push { len, limit } => {
                    let bytes: Vec<u8> = (0..len).map(|i| counter.wrapping_add((i * 7) as u8)).collect();
                    counter = counter.wrapping_add(41);
                    let taken = fixture.buffer.push_bytes(&mut fixture.pool, &bytes, limit);
                    prop_assert_eq!(taken, len.min((limit as usize).saturating_sub(oracle.len())));
                    oracle.extend(&bytes[..taken]);
                }
                Step::PushSource { which, offset, len } => {
                    let bytes = &contents[which];
                    let fits = offset + len <= bytes.len() as u64;
                    prop_assert_eq!(fixture.push_source(ids[which], offset, len).is_ok(), fits);
                    if fits {
                        oracle.extend(&bytes[offset as usize..(offset + len) as usize]);
                    }
                }
                Step::Discard { part } => {
                    let n = fixture.buffer.len() * part / 10_000;
                    fixture.discard(n);
                    oracle.drain(..n as usize);
                }
                Step::Fill { offset, len } => {
                    let offset = offset % (oracle.len() as u64 + 1);
                    let len = len.min(oracle.len() - offset as usize);
                    let expected = &oracle[offset as usize..offset as usize + len];
                    prop_assert_eq!(fixture.filled(offset, len), expected);
                    if len > 0 && fixture.buffer.is_gatherable() {
                        let pieces = fixture.buffer.pieces(&fixture.pool, &fixture.sources, offset, len);
                        let copies = pieces.map(|piece| {
                            let mut copy = vec![0; piece.len()];
                            piece.copy_to(&mut copy);
                            copy
                        });
                        let copies: Vec<Vec<u8>> = copies.collect();
                        prop_assert!(copies.iter().all(|piece| !piece.is_empty()));
                        prop_assert_eq!(copies.concat(), expected);
                    }
                }
                Step::Release { which } => {
                    prop_assert!(fixture.sources.release(ids[which]));
                    ids[which] = add(&mut fixture, which);
                }
                Step::Privatize { len } => {
                    let Fixture { pool, sources, buffer } = &mut fixture;
                    let private = buffer.privatize_front(pool, sources, len);
                    prop_assert_eq!(private, len.min(oracle.len() as u64));
                    // Bytes that others might have written by now are not compared.
                    let pieces = (0..private).filter(|_| fixture.buffer.is_gatherable()).flat_map(|at| {
                        fixture.buffer.pieces(&fixture.pool, &fixture.sources, at, 1)
                    });
                    prop_assert!(pieces.into_iter().all(|piece| matches!(piece, PayloadPiece::Private(_))));
                }
                Step::Clear => {
                    fixture.buffer.clear(&mut fixture.pool, &mut fixture.sources);
                    oracle.clear();
                }
            }
            prop_assert_eq!(fixture.buffer.len(), oracle.len() as u64);
            let memory = fixture.buffer.memory();
            prop_assert_eq!(memory.chunks, fixture.pool.in_use());
            let slices = fixture.buffer.len() - memory.bytes;
            prop_assert_eq!(slices > 0, fixture.buffer.slices > 0);
            if oracle.is_empty() {
                prop_assert_eq!((fixture.pool.in_use(), fixture.sources.len()), (0, 3));
            }
        }
        prop_assert_eq!(&fixture.all(), &oracle);
        for id in ids {
            fixture.sources.release(id);
        }
        fixture.buffer.clear(&mut fixture.pool, &mut fixture.sources);
        prop_assert_eq!((fixture.pool.in_use(), fixture.sources.len()), (0, 0));
    }
}
