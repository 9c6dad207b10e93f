use super::*;
use proptest::prelude::*;
use std::collections::HashMap;

/// Returns a good hash of a number.
fn hash(n: u32) -> u32 {
    let wide = (u64::from(n) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((wide ^ wide >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 32) as u32
}

/// Checks that every entry is where a search finds it, and that memory is used as the module documentation
/// says.
fn check(table: &FlowTable) {
    let (mut entries, mut overflow_buckets) = (0, 0);
    for (home, bucket) in table.buckets.iter().enumerate() {
        let mut chain = vec![bucket];
        while let Some(link) = chain.last().map(|bucket| bucket.link).filter(|&link| link != 0) {
            chain.push(&table.overflow[link as usize - 1]);
        }
        for (depth, bucket) in chain.iter().enumerate() {
            assert!(bucket.is_full() || depth == 1 || chain.len() == 1, "a gap in a chain");
            assert!(bucket.count() > 0 || depth == 0);
            for slot in 0..bucket.count() as usize {
                assert_eq!(table.address(bucket.hashes_and_count[slot]), home);
            }
            entries += bucket.count() as usize;
        }
        overflow_buckets += chain.len() - 1;
    }
    let mut pending = table.pending;
    while pending != 0 {
        let bucket = &table.overflow[pending as usize - 1];
        for slot in 0..bucket.count() as usize {
            assert_eq!(bucket.hashes_and_count[slot] & table.pending_mask, table.pending_bucket);
        }
        entries += bucket.count() as usize;
        overflow_buckets += 1;
        pending = bucket.link;
    }
    assert_eq!(entries, table.len);
    assert_eq!(overflow_buckets, table.overflow_in_use);
    let (mut free, mut link) = (0, table.free);
    while link != 0 {
        free += 1;
        link = table.overflow[link as usize - 1].link;
    }
    assert_eq!(overflow_buckets + free, table.overflow.len());
}

#[test]
fn entry_is_found_until_removed() {
    let mut table = FlowTable::with_capacity(1000);
    table.insert(7, 70).unwrap();
    table.insert(7, 71).unwrap();
    assert_eq!(table.find(7, |value| value == 71), Some(71));
    assert!(table.replace(7, 71, 72));
    assert!(!table.replace(7, 71, 73));
    assert_eq!(table.find(7, |value| value > 70), Some(72));
    assert!(table.remove(7, 70));
    assert!(!table.remove(7, 70));
    table.prefetch(7);
    assert_eq!((table.len(), table.find(7, |_| true), table.find(8, |_| true)), (1, Some(72), None));
}

#[test]
fn full_table_refuses_and_is_unchanged() {
    let mut table = FlowTable::with_capacity(10);
    for n in 0..10 {
        table.insert(hash(n), n).unwrap();
    }
    assert_eq!(table.insert(hash(10), 10), Err(Full));
    assert_eq!((table.len(), table.find(hash(10), |_| true)), (10, None));
    assert!(table.remove(hash(3), 3));
    assert_eq!(table.insert(hash(10), 10), Ok(()));
    assert_eq!(FlowTable::with_capacity(0).insert(1, 1), Err(Full));
}

#[test]
fn only_values_of_exact_hash_are_offered() {
    let mut table = FlowTable::with_capacity(5000);
    for n in 0..5000 {
        table.insert(hash(n), n).unwrap();
    }
    for n in 0..5000 {
        assert_eq!(table.find(hash(n), |value| hash(value) == hash(n)), Some(n));
        assert_eq!(table.find(hash(n + 5000), |_| panic!("no entry has this hash")), None);
    }
}

#[test]
fn memory_per_entry_is_bounded_at_any_size() {
    const ENTRIES: u32 = 1_000_000;
    let mut table = FlowTable::with_capacity(ENTRIES as usize);
    let reserved = (table.buckets.capacity(), table.overflow.capacity());
    let mut worst_bytes = 0.0f64;
    let mut worst_buckets = 0.0f64;
    for n in 0..ENTRIES {
        table.insert(hash(n), n).unwrap();
        if table.len() >= 10_000 {
            worst_bytes = worst_bytes.max(table.bytes_used() as f64 / table.len() as f64);
        }
        if table.len() >= 10_000 && table.len().is_multiple_of(20_000) {
            let visited: usize = (0..1000).map(|k| buckets_visited(&table, hash(k * (n / 1000)))).sum();
            worst_buckets = worst_buckets.max(visited as f64 / 1000.0);
        }
    }
    println!("{worst_bytes:.2} bytes per entry, {worst_buckets:.2} buckets per search, at worst");
    assert!(worst_bytes <= 33.0, "{worst_bytes} bytes per entry");
    assert!(worst_buckets <= 1.05, "{worst_buckets} buckets visited in the mean");
    assert_eq!((table.buckets.capacity(), table.overflow.capacity()), reserved, "never reallocated");
    check(&table);
    for n in 0..ENTRIES {
        assert_eq!(table.find(hash(n), |value| value == n), Some(n));
    }
}

/// Returns the number of buckets that the search for an entry visits.
fn buckets_visited(table: &FlowTable, hash: u32) -> usize {
    let hash = mix(hash);
    let mut bucket = &table.buckets[table.address(hash)];
    let mut visited = 1;
    while bucket.position(hash, |_| true).is_none() && bucket.link != 0 {
        bucket = &table.overflow[bucket.link as usize - 1];
        visited += 1;
    }
    visited
}

#[test]
fn empty_table_takes_one_page() {
    let table = FlowTable::with_capacity(100_000_000);
    assert_eq!(table.bytes_used(), 4096);
}

#[test]
fn hashes_with_equal_low_or_high_bits_spread() {
    for shift in [0, 7, 12] {
        let mut table = FlowTable::with_capacity(1 << 17);
        for n in 0..1 << 17 {
            table.insert(n << shift | 5 & ((1 << shift) - 1), n).unwrap();
        }
        // Random hashes make less than a tenth of the buckets overflow.
        let total = table.bytes_used() / 64;
        assert!(table.overflow_buckets() * 10 < total, "{} of {total}", table.overflow_buckets());
    }
}

#[test]
fn growth_is_bounded_even_with_equal_hashes() {
    const EQUAL: u32 = 50_000;
    let mut table = FlowTable::with_capacity(200_000);
    for n in 0..EQUAL {
        table.insert(77, n).unwrap();
    }
    assert!(table.overflow_buckets() >= EQUAL as usize / 7 - 1, "the collision is visible");
    let mut was_pending = false;
    for n in 0..150_000 {
        let before = pending_buckets(&table);
        table.insert(hash(n), EQUAL + n).unwrap();
        let after = pending_buckets(&table);
        assert!(before == 0 || before - after == REDISTRIBUTED_BUCKETS_MAX.min(before));
        if after > 0 && !was_pending {
            // Entries of the pending chain can be found, changed and removed.
            assert_eq!(table.find(77, |value| value == 3), Some(3));
            assert!(table.replace(77, 3, 200_001) && table.replace(77, 200_001, 3));
            assert!(table.remove(77, 4) && !table.remove(77, 4));
            table.insert(77, 4).unwrap();
            check(&table);
            was_pending = true;
        }
    }
    assert!(was_pending);
    check(&table);
    assert!(table.overflow.len() <= table.overflow.capacity());
}

#[test]
fn entries_of_pending_chain_can_be_removed() {
    // Two hashes share a bucket until it is split; then the first one stays and the second one moves.
    let in_bucket = |bit: u32| (0..).find(|&n| mix(n) & 63 == 5 && mix(n) >> 6 & 1 == bit).unwrap();
    let (stays, goes) = (in_bucket(0), in_bucket(1));
    let mut table = FlowTable::with_capacity(10_000);
    // The latest entries are in front: those that move are redistributed first, and those that stay are
    // pending.
    for n in 0..300 {
        table.insert(if n < 70 { stays } else { goes }, n).unwrap();
    }
    let mut fillers = (1000..).filter(|&n| mix(hash(n)) & 63 != 5);
    while table.pending == 0 || table.pending_bucket != 5 {
        let filler = fillers.next().unwrap();
        table.insert(hash(filler), filler).unwrap();
    }
    assert_eq!(table.buckets[5].link, 0);
    for n in 0..70 {
        assert_eq!(table.find(stays, |value| value == n), Some(n));
        assert!(table.remove(stays, n));
        check(&table);
    }
    assert_eq!(table.find(stays, |_| true), None);
    assert!((70..300).all(|n| table.remove(goes, n)));
    check(&table);
}

fn pending_buckets(table: &FlowTable) -> usize {
    let next = |link: u32| (link != 0).then_some(link);
    let links =
        core::iter::successors(next(table.pending), |&link| next(table.overflow[link as usize - 1].link));
    links.count()
}

#[test]
fn removing_all_entries_makes_room_again() {
    let mut table = FlowTable::with_capacity(20_000);
    for round in 0..4 {
        for n in 0..20_000 {
            table.insert(hash(n) & 0xfff, n).unwrap();
        }
        let used = table.bytes_used();
        for n in (0..20_000).rev() {
            assert!(table.remove(hash(n) & 0xfff, n));
        }
        assert!(table.is_empty());
        assert_eq!(table.overflow_buckets(), 0);
        assert!(round == 0 || table.bytes_used() == used, "no growth without need");
        check(&table);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Insert {
        hash: u32,
        count: u32,
    },
    Remove {
        hash: u32,
        count: usize,
        from_the_front: bool,
    },
    Replace {
        hash: u32,
        which: usize,
    },
    /// Inserts many different hashes, so that the table grows.
    Fill {
        count: u32,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let hash = 0..12u32;
    let step = prop_oneof![
        4 => (hash.clone(), 1..120u32).prop_map(|(hash, count)| Step::Insert { hash, count }),
        3 => (hash.clone(), 1..200usize, any::<bool>())
            .prop_map(|(hash, count, from_the_front)| Step::Remove { hash, count, from_the_front }),
        1 => (hash, any::<usize>()).prop_map(|(hash, which)| Step::Replace { hash, which }),
        3 => (1..60u32).prop_map(|count| Step::Fill { count }),
    ];
    proptest::collection::vec(step, 1..80)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn agrees_with_a_map_of_lists(steps in steps()) {
        const ENTRIES_MAX: usize = 4000;
        let mut table = FlowTable::with_capacity(ENTRIES_MAX);
        let mut oracle: HashMap<u32, Vec<u32>> = HashMap::new();
        let (mut next, mut len) = (0u32, 0usize);
        for step in steps {
            match step {
                Step::Insert { hash, count } => for _ in 0..count {
                    let fits = len < ENTRIES_MAX;
                    prop_assert_eq!(table.insert(hash, next).is_ok(), fits);
                    if fits {
                        oracle.entry(hash).or_default().push(next);
                        (next, len) = (next + 1, len + 1);
                    }
                }
                Step::Fill { count } => for _ in 0..count.min((ENTRIES_MAX - len) as u32) {
                    let hash = hash(next) | 1 << 31;
                    table.insert(hash, next).unwrap();
                    oracle.entry(hash).or_default().push(next);
                    (next, len) = (next + 1, len + 1);
                }
                Step::Remove { hash, count, from_the_front } => {
                    let values = oracle.entry(hash).or_default();
                    for _ in 0..count.min(values.len()) {
                        let value = values.remove(if from_the_front { 0 } else { values.len() - 1 });
                        prop_assert!(table.remove(hash, value));
                        prop_assert!(!table.remove(hash, value));
                        len -= 1;
                    }
                }
                Step::Replace { hash, which } => {
                    let values = oracle.entry(hash).or_default();
                    if !values.is_empty() {
                        let which = which % values.len();
                        prop_assert!(table.replace(hash, values[which], next));
                        values[which] = next;
                        next += 1;
                    }
                }
            }
            check(&table);
            prop_assert_eq!(table.len(), len);
            for hash in 0..12 {
                prop_assert_eq!(table.find_likely(hash), table.find(hash, |_| true));
            }
        }
        for (&hash, values) in &oracle {
            let mut offered = Vec::new();
            prop_assert_eq!(table.find(hash, |value| { offered.push(value); false }), None);
            offered.sort_unstable();
            let mut expected = values.clone();
            expected.sort_unstable();
            prop_assert_eq!(offered, expected);
        }
    }
}
