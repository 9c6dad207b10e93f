use super::*;
use crate::wire::{ipv4, protocol};
use core::net::Ipv4Addr;
use proptest::prelude::*;

const SRC: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const DST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

fn key(ident: u32) -> ReassemblyKey {
    ReassemblyKey { src: SRC.into(), dst: DST.into(), protocol: protocol::UDP, ident, link: None }
}

fn header(offset: u16, more_fragments: bool, len: usize) -> Vec<u8> {
    let header = ipv4::Header {
        dscp: 4,
        ecn: 0,
        total_len: (20 + len) as u16,
        ident: 1,
        dont_fragment: false,
        more_fragments,
        fragment_offset: offset,
        ttl: 60,
        protocol: protocol::UDP,
        src: SRC,
        dst: DST,
        header_len: 20,
    };
    let mut out = vec![0; 20];
    header.emit(&mut out);
    out
}

fn fragment<'b>(
    ident: u32,
    offset: u16,
    more_fragments: bool,
    headers: &'b [u8],
    payload: &'b [u8],
) -> ReceivedFragment<'b> {
    ReceivedFragment {
        key: key(ident),
        offset,
        more_fragments,
        headers,
        payload,
        ecn: 0,
        broadcast: false,
        rebuild: HeaderRebuild::V4,
    }
}

const EXPIRES: Instant = Instant::from_millis(30_000);

fn table(cost_max: usize) -> Reassembly {
    Reassembly::new(cost_max, KeyedHash::new(&[1; 32]))
}

/// Asserts that no datagram is incomplete and all memory is free.
#[track_caller]
fn assert_empty(table: &Reassembly) {
    assert_eq!((table.cost, table.index.len()), (0, 0));
    assert_eq!((table.slots.len() - table.free.len(), table.store.in_use()), (0, (0, 0)));
    assert_eq!((table.next_deadline(), table.oldest().count()), (None, 0));
}

fn insert(
    table: &mut Reassembly,
    ident: u32,
    offset: u16,
    more_fragments: bool,
    payload: &[u8],
) -> ReassemblyOutcome {
    table.insert(
        &fragment(ident, offset, more_fragments, &header(offset, more_fragments, payload.len()), payload),
        EXPIRES,
    )
}

#[test]
fn fragments_in_any_order_are_reassembled() {
    let orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    for order in orders {
        let mut table = table(100_000);
        let fragments = [(0, true, [1; 16]), (16, true, [2; 16]), (32, false, [3; 16])];
        for (step, at) in order.into_iter().enumerate() {
            let (offset, more_fragments, payload) = fragments[at];
            let outcome = insert(&mut table, 1, offset, more_fragments, &payload);
            match step {
                0 | 1 => assert_eq!(outcome, ReassemblyOutcome::Incomplete),
                _ => {
                    let ReassemblyOutcome::Complete(packet) = outcome else { panic!("{outcome:?}") };
                    let header = ipv4::Header::parse(&packet).unwrap();
                    assert!(header.checksum_ok(&packet) && !header.is_fragment());
                    assert_eq!((header.total_len, header.dscp, header.ttl), (68, 4, 60));
                    assert_eq!(header.payload(&packet), [[1; 16], [2; 16], [3; 16]].concat());
                }
            }
        }
        assert_empty(&table);
    }
}

#[test]
fn overlapping_fragments_discard_the_datagram() {
    // Overlaps the fragment before, the fragment after, both, and contains one.
    for (offset, len) in [(8, 16), (24, 16), (8, 40), (16, 40)] {
        let mut table = table(100_000);
        insert(&mut table, 1, 0, true, &[1; 16]);
        insert(&mut table, 1, 32, true, &[2; 16]);
        assert_eq!(
            insert(&mut table, 1, offset, true, &vec![9; len]),
            ReassemblyOutcome::Overlap,
            "{offset} {len}"
        );
        assert_empty(&table);
        // A later fragment begins a new datagram, which stays incomplete.
        assert_eq!(insert(&mut table, 1, 16, true, &[3; 16]), ReassemblyOutcome::Incomplete);
    }
}

#[test]
fn duplicate_fragment_is_ignored() {
    let mut table = table(100_000);
    insert(&mut table, 1, 0, true, &[1; 16]);
    assert_eq!(insert(&mut table, 1, 0, true, &[9; 16]), ReassemblyOutcome::Duplicate);
    assert_eq!(insert(&mut table, 1, 8, true, &[9; 8]), ReassemblyOutcome::Duplicate);
    let ReassemblyOutcome::Complete(packet) = insert(&mut table, 1, 16, false, &[2; 3]) else { panic!() };
    assert_eq!(packet[20..], [&[1; 16][..], &[2; 3]].concat());
}

#[test]
fn contradictory_fragments_discard_the_datagram() {
    let mut table = table(100_000);
    insert(&mut table, 1, 16, false, &[1; 8]);
    assert_eq!(insert(&mut table, 1, 32, false, &[1; 8]), ReassemblyOutcome::Malformed, "two different ends");
    insert(&mut table, 1, 16, false, &[1; 8]);
    assert_eq!(insert(&mut table, 1, 24, true, &[1; 8]), ReassemblyOutcome::Malformed, "beyond the end");
    insert(&mut table, 1, 24, true, &[1; 8]);
    assert_eq!(
        insert(&mut table, 1, 0, false, &[1; 8]),
        ReassemblyOutcome::Malformed,
        "end before another fragment"
    );
    assert_empty(&table);
}

#[test]
fn empty_fragments_and_unaligned_lengths_are_rejected() {
    let mut table = table(100_000);
    assert_eq!(insert(&mut table, 1, 0, true, &[]), ReassemblyOutcome::Malformed);
    assert_eq!(insert(&mut table, 1, 8, false, &[]), ReassemblyOutcome::Malformed);
    assert_eq!(insert(&mut table, 1, 0, true, &[1; 15]), ReassemblyOutcome::Malformed);
    assert_empty(&table);
}

#[test]
fn datagram_beyond_65535_bytes_is_rejected() {
    let mut table = table(1_000_000);
    // The last fragment fits with its own header of 20 bytes; with the first fragment's header of 60 bytes
    // the datagram is too long.
    let mut long = header(0, true, 32_768);
    long[0] = 0x4f;
    long.resize(60, 1);
    table.insert(&fragment(1, 0, true, &long, &vec![1; 32_768]), EXPIRES);
    let rest = 65_535 - 20 - 32_768;
    assert_eq!(insert(&mut table, 1, 32_768, false, &vec![2; rest]), ReassemblyOutcome::Malformed);
    assert_empty(&table);
}

#[test]
fn oldest_datagram_is_evicted_at_the_limit() {
    let mut table = table(3 * (8 + 20 + 2 * OVERHEAD));
    for ident in 0..3 {
        assert_eq!(insert(&mut table, ident, 0, true, &[1; 8]), ReassemblyOutcome::Incomplete);
        assert!(!table.evict());
    }
    assert_eq!(insert(&mut table, 3, 0, true, &[1; 8]), ReassemblyOutcome::Incomplete);
    assert!(table.evict());
    assert!(!table.evict());
    assert_eq!(insert(&mut table, 0, 8, false, &[1; 8]), ReassemblyOutcome::Incomplete);
    assert!(matches!(insert(&mut table, 1, 8, false, &[1; 8]), ReassemblyOutcome::Complete(_)));
}

#[test]
fn ce_of_one_fragment_marks_the_datagram() {
    // ECN of two fragments and of the datagram; `None` if they contradict each other (RFC 3168 §5.3).
    let cases = [
        (0, 0, Some(0)),
        (1, 1, Some(1)),
        (2, 2, Some(2)),
        (1, 3, Some(3)),
        (3, 2, Some(3)),
        (3, 3, Some(3)),
        (1, 2, Some(1)),
        (0, 1, None),
        (0, 3, None),
    ];
    for (first, second, expected) in cases {
        let mut table = table(100_000);
        let headers = header(0, true, 8);
        table.insert(&ReceivedFragment { ecn: first, ..fragment(1, 0, true, &headers, &[1; 8]) }, EXPIRES);
        let outcome = table
            .insert(&ReceivedFragment { ecn: second, ..fragment(1, 8, false, &headers, &[1; 8]) }, EXPIRES);
        match expected {
            None => assert_eq!(outcome, ReassemblyOutcome::Malformed),
            Some(ecn) => {
                let ReassemblyOutcome::Complete(packet) = outcome else { panic!("{outcome:?}") };
                assert_eq!(packet[1], 4 << 2 | ecn);
            }
        }
    }
}

#[test]
fn expired_datagram_returns_its_first_fragment() {
    let mut table = table(100_000);
    let at = |ident, offset, payload: &[u8], table: &mut Reassembly, expires| {
        let headers = header(offset, true, payload.len());
        table.insert(&fragment(ident, offset, true, &headers, payload), Instant::from_millis(expires))
    };
    at(1, 0, &[7; 8], &mut table, 100);
    at(2, 16, &[8; 8], &mut table, 200);
    // Only the first received fragment sets the expiry.
    at(1, 16, &[8; 8], &mut table, 300);
    let six = ReassemblyKey { src: core::net::Ipv6Addr::LOCALHOST.into(), ..key(1) };
    table.insert(
        &ReceivedFragment { key: six, ..fragment(1, 8, true, &[], &[9; 8]) },
        Instant::from_millis(150),
    );
    assert_eq!(table.next_deadline(), Some(Instant::from_millis(100)));
    assert!(table.expire(Instant::from_millis(99)).is_none());
    let first = table.expire(Instant::from_millis(100)).unwrap().first_fragment.unwrap();
    assert_eq!(first, [&header(0, true, 8)[..], &[7; 8]].concat());
    table.recycle(first);
    assert_eq!(table.next_deadline(), Some(Instant::from_millis(150)));
    assert_eq!(table.expire(Instant::from_millis(200)).unwrap().first_fragment, None);
    assert_eq!(table.expire(Instant::from_millis(200)).unwrap().first_fragment, None);
    assert!(table.expire(Instant::MAX).is_none());
    assert_empty(&table);
}

#[test]
fn flood_uses_no_more_memory_than_charged() {
    // The smallest fragments, and fragments that use an additional, nearly empty block.
    for len in [8, 72, 1480] {
        let mut table = table(1 << 20);
        for ident in 0..20_000 {
            insert(&mut table, ident, 8, true, &vec![1; len]);
            while table.evict() {}
        }
        let (blocks, fragments) = table.store.capacity();
        assert!(blocks * 64 <= (1 << 20) + 2 * len, "{blocks} blocks for fragments of {len} bytes");
        assert!(fragments <= blocks && table.slots.len() == fragments);
    }
}

proptest! {
    /// A datagram is complete exactly when the accepted fragments cover it, and consists of exactly their
    /// bytes.
    #[test]
    fn reassembly_matches_a_byte_array_model(
        fragments in prop::collection::vec((0_u16..24, 1_usize..6, any::<bool>(), any::<u8>()), 1..60)
    ) {
        let mut table = table(1 << 20);
        let mut model: Model = Model::default();
        for (unit, units, more_fragments, fill) in fragments {
            let payload = vec![fill; units * 8 - usize::from(!more_fragments) * 3];
            let offset = unit * 8;
            let outcome = insert(&mut table, 1, offset, more_fragments, &payload);
            let expected = model.insert(usize::from(offset), more_fragments, &payload);
            match (&outcome, &expected) {
                (ReassemblyOutcome::Incomplete, Expected::Incomplete)
                | (ReassemblyOutcome::Duplicate, Expected::Duplicate)
                | (ReassemblyOutcome::Overlap | ReassemblyOutcome::Malformed, Expected::Discarded) => {}
                (ReassemblyOutcome::Complete(packet), Expected::Complete(bytes)) => {
                    prop_assert_eq!(&packet[20..], &bytes[..]);
                }
                _ => prop_assert!(false, "{:?} but {:?}", outcome, expected),
            }
            if !matches!(expected, Expected::Incomplete | Expected::Duplicate) {
                model = Model::default();
                assert_empty(&table);
            }
        }
    }
}

#[derive(Debug)]
enum Expected {
    Incomplete,
    Duplicate,
    Discarded,
    Complete(Vec<u8>),
}

/// A byte array that also records which fragment each byte came from.
#[derive(Default)]
struct Model {
    bytes: Vec<Option<(usize, u8)>>,
    fragments: usize,
    end: Option<usize>,
}

impl Model {
    fn insert(&mut self, offset: usize, more_fragments: bool, payload: &[u8]) -> Expected {
        let end = offset + payload.len();
        let end_max = self.bytes.iter().rposition(Option::is_some).map_or(0, |at| at + 1);
        let contradiction = match self.end {
            Some(total) => end > total || (!more_fragments && end != total),
            None => !more_fragments && end < end_max,
        };
        if contradiction {
            return Expected::Discarded;
        }
        if self.bytes.len() < end {
            self.bytes.resize(end, None);
        }
        let range = &mut self.bytes[offset..end];
        if range.iter().any(Option::is_some) {
            let owner = range[0].map(|(owner, _)| owner);
            let inside_one = range.iter().all(|byte| byte.is_some() && byte.map(|(owner, _)| owner) == owner);
            return if inside_one { Expected::Duplicate } else { Expected::Discarded };
        }
        self.fragments += 1;
        for (byte, &value) in range.iter_mut().zip(payload) {
            *byte = Some((self.fragments, value));
        }
        if !more_fragments {
            self.end = Some(end);
        }
        match self.end {
            Some(total) if self.bytes[..total].iter().all(Option::is_some) => {
                Expected::Complete(self.bytes[..total].iter().map(|byte| byte.unwrap().1).collect())
            }
            _ => Expected::Incomplete,
        }
    }
}
