use super::{RECV_WINDOW_MAX, SegmentBytes, StageTimes, canonical, new_bytes};
use core::time::Duration;
use ginnel_devices::random::Random;

#[test]
fn mean_moves_an_eighth_towards_each_sample() {
    let mut times = StageTimes::default();
    for us in [80, 80, 160, 0] {
        times.add(Duration::from_micros(us));
    }
    // 80, 80, 90, 78.75
    let expected =
        StageTimes { count: 4, mean: Duration::from_nanos(78_750), max: Duration::from_micros(160) };
    assert_eq!(times, expected);
}

#[test]
fn bytes_that_were_seen_do_not_count_again() {
    let mut end = u32::MAX - 4;
    let counts = [(u32::MAX - 4, 10), (u32::MAX - 4, 10), (0, 5), (0, 20), (100, 1)]
        .map(|(seq, len)| new_bytes(&mut end, seq, len, RECV_WINDOW_MAX));
    assert_eq!((counts, end), ([10, 0, 0, 15, 81], 101));
    // A keepalive probe, and a segment beyond every window.
    let counts = [(100, 1), (102 + RECV_WINDOW_MAX, 1)]
        .map(|(seq, len)| new_bytes(&mut end, seq, len, RECV_WINDOW_MAX));
    assert_eq!((counts, end), ([0, 0], 101));
}

#[test]
fn mapped_addresses_are_those_of_ipv4() {
    let mapped = "[::ffff:10.0.0.1]:80".parse().unwrap();
    assert_eq!(canonical(mapped), "10.0.0.1:80".parse().unwrap());
}

/// Returns frames with 5 bytes of TCP payload: of IPv4, IPv4 with a VLAN tag and padding, and IPv6.
fn valid_frames() -> [Vec<u8>; 3] {
    // Ports 80 and 1000, sequence number 0x01020304, a header of 24 bytes with a maximum segment size.
    let mut segment = vec![0, 80, 3, 232, 1, 2, 3, 4, 0, 0, 0, 9, 0x60, 0x18, 1, 0, 0, 0, 0, 0, 2, 4, 5, 180];
    segment.extend(b"hello");
    let mut v4 = vec![0x45, 0, 0, 49, 0, 1, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    let sum: u32 = v4.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
    v4[10..12].copy_from_slice(&(!(sum + (sum >> 16)) as u16).to_be_bytes());
    let mut v6 = vec![0x60, 0, 0, 0, 0, 29, 6, 64];
    v6.extend([[0xfd; 16], [0xfe; 16]].concat());
    let frame = |head: &[u8], ip: &[u8], tail: &[u8]| [&[2; 12][..], head, ip, &segment, tail].concat();
    [frame(&[8, 0], &v4, &[]), frame(&[0x81, 0, 0, 7, 8, 0], &v4, &[0; 6]), frame(&[0x86, 0xdd], &v6, &[])]
}

#[test]
fn payload_of_each_kind_of_frame_is_found() {
    let ends = [["10.0.0.1:80", "10.0.0.2:1000"]; 2].into_iter().chain([[
        "[fdfd:fdfd:fdfd:fdfd:fdfd:fdfd:fdfd:fdfd]:80",
        "[fefe:fefe:fefe:fefe:fefe:fefe:fefe:fefe]:1000",
    ]]);
    for (frame, ends) in valid_frames().iter().zip(ends) {
        let SegmentBytes { src, dst, seq, len } = SegmentBytes::parse(frame).expect(ends[0]);
        assert_eq!(([src, dst], seq, len), (ends.map(|end| end.parse().unwrap()), 0x0102_0304, 5));
    }
    let [mut fragment, ..] = valid_frames();
    fragment[14 + 6] = 0x20;
    // The checksum follows the flag.
    let sum = u16::from_be_bytes([fragment[24], fragment[25]]);
    fragment[24..26].copy_from_slice(&(sum - 0x2000).to_be_bytes());
    assert!(SegmentBytes::parse(&fragment).is_none(), "a part of a segment");
}

#[test]
fn damaged_frames_are_harmless() {
    let (mut random, mut parsed) = (Random::new(1), 0);
    for frame in valid_frames() {
        for _ in 0..5_000 {
            let mut damaged = frame.clone();
            for _ in 0..random.next_u64() % 3 {
                let at = random.next_u64() as usize % damaged.len();
                damaged[at] = random.next_u64() as u8;
            }
            damaged.truncate(damaged.len() - (random.next_u64() % 40).saturating_sub(30) as usize);
            if let Some(segment) = SegmentBytes::parse(&damaged) {
                parsed += 1;
                assert!((1..=frame.len() as u32).contains(&segment.len));
            }
        }
    }
    assert!(parsed > 3_000, "{parsed} of them have payload");
}
