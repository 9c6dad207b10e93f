use super::*;
use proptest::prelude::*;

/// The algorithm of RFC 1071, literally: one word at a time.
fn naive(bytes: &[u8]) -> u16 {
    let mut sum = 0u64;
    for pair in bytes.chunks(2) {
        sum += u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[test]
fn example_of_rfc_1071() {
    let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
    assert_eq!(Sum::of(&bytes).fold(), 0xddf2);
    assert_eq!(Sum::of(&bytes).finish(), !0xddf2);
}

#[test]
fn every_length_and_alignment_matches_naive_sum() {
    let bytes: Vec<u8> = (0..400u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let mut copy = vec![0; 400];
    for start in 0..16 {
        for end in start..bytes.len() {
            let part = &bytes[start..end];
            assert_eq!(Sum::of(part).fold(), naive(part), "{start}..{end}");
            let out = &mut copy[start..];
            assert_eq!(copy_and_sum(part, out).fold(), naive(part), "{start}..{end}");
            assert_eq!(&out[..part.len()], part);
        }
    }
}

#[test]
fn extreme_bytes_keep_their_carries() {
    for len in [0, 1, 2, 3, 31, 32, 33, 1499, 1500, 65_535, 1 << 20] {
        for byte in [0x00, 0x01, 0xfe, 0xff] {
            let bytes = vec![byte; len];
            assert_eq!(Sum::of(&bytes).fold(), naive(&bytes), "{len} × {byte:#x}");
        }
    }
}

#[test]
fn carry_out_of_the_last_fold_comes_back() {
    // Two words of ones and one more word: the low half of the accumulator is full when the high half is
    // added.
    for at in [16, 23] {
        let mut bytes = [0xff; 24];
        bytes[16..].fill(0);
        bytes[at] = 1;
        assert_eq!(Sum::of(&bytes).fold(), naive(&bytes));
    }
}

#[test]
fn copy_of_many_blocks_yields_one_sum() {
    let bytes: Vec<u8> =
        (0..3 * COPY_BLOCK as u32 + 77).map(|i| (i.wrapping_mul(40_503) >> 7) as u8).collect();
    for len in [COPY_BLOCK - 1, COPY_BLOCK, COPY_BLOCK + 1, 2 * COPY_BLOCK, bytes.len()] {
        let mut copy = vec![0; len + 3];
        assert_eq!(copy_and_sum(&bytes[..len], &mut copy).fold(), naive(&bytes[..len]), "{len}");
        assert_eq!((&copy[..len], &copy[len..]), (&bytes[..len], &[0; 3][..]));
    }
}

#[test]
fn pseudo_header_sums_match_their_bytes() {
    let (a, b) = (Ipv4Addr::new(192, 168, 0, 255), Ipv4Addr::new(10, 255, 255, 1));
    let mut bytes = [a.octets(), b.octets()].concat();
    bytes.extend([0, 6, 0x12, 0x34]);
    assert_eq!(pseudo_v4(a, b, 6, 0x1234).fold(), naive(&bytes));

    let (a, b): (Ipv6Addr, Ipv6Addr) =
        ("fe80::ffff:ffff:1".parse().unwrap(), "2001:db8:ffff:ffff:ffff::2".parse().unwrap());
    let mut bytes = [a.octets(), b.octets()].concat();
    bytes.extend([0, 1, 0x12, 0x34, 0, 0, 0, 17]);
    assert_eq!(pseudo_v6(a, b, 17, 0x1_1234).fold(), naive(&bytes));
}

#[test]
fn udp_checksum_is_never_zero() {
    assert_eq!(Sum::of(&[0xff, 0xff]).finish(), 0);
    assert_eq!(Sum::of(&[0xff, 0xff]).finish_udp(), 0xffff);
    assert_eq!(Sum::of(&[0x12, 0x34]).finish_udp(), !0x1234);
}

proptest! {
    #[test]
    fn sums_of_parts_add_up_at_any_split(bytes in prop::collection::vec(any::<u8>(), 0..300), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6)) {
        let mut cuts: Vec<usize> = cuts.iter().map(|c| c.index(bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let sum = cuts.windows(2).fold(Sum::ZERO, |sum, cut| sum.add_at(cut[0], Sum::of(&bytes[cut[0]..cut[1]])));
        prop_assert_eq!(sum.fold(), naive(&bytes));
    }

    #[test]
    fn a_range_is_the_difference_of_two_prefixes(bytes in prop::collection::vec(any::<u8>(), 1..300), a in any::<prop::sample::Index>(), b in any::<prop::sample::Index>(), header in 1u16..) {
        let (a, b) = (a.index(bytes.len()), b.index(bytes.len()));
        let (a, b) = (a.min(b), a.max(b));
        let range = Sum::of(&bytes[..b]).sub(Sum::of(&bytes[..a]));
        let range = if a & 1 == 0 { range } else { range.swap() };
        // Combined with any non-zero field, both representations of zero are equivalent.
        prop_assert_eq!(range.add_u16(header).finish(), Sum::of(&bytes[a..b]).add_u16(header).finish());
    }

    #[test]
    fn any_number_of_additions_stays_exact(fields in prop::collection::vec(any::<u32>(), 0..64)) {
        let bytes: Vec<u8> = fields.iter().flat_map(|f| f.to_be_bytes()).collect();
        let sum = fields.iter().fold(Sum::ZERO, |sum, &f| sum.add(Sum(f)));
        prop_assert_eq!(sum.fold(), naive(&bytes));
    }

    #[test]
    fn bytes_with_their_checksum_are_valid(mut bytes in prop::collection::vec(any::<u8>(), 2..100)) {
        bytes[0] = 0;
        bytes[1] = 0;
        let checksum = Sum::of(&bytes).finish();
        bytes[..2].copy_from_slice(&checksum.to_be_bytes());
        prop_assert!(Sum::of(&bytes).is_valid());
    }
}
