use super::{SegmentBytes, StageTimes, canonical, new_bytes};
use core::time::Duration;
use ginnel_devices::random::Random;

#[test]
fn mean_follows_an_eighth_of_each_sample() {
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
    let mut end = None;
    let counts = [(u32::MAX - 4, 10), (u32::MAX - 4, 10), (0, 5), (0, 20), (100, 1)]
        .map(|(seq, len)| new_bytes(&mut end, seq, len));
    assert_eq!((counts, end), ([10, 0, 0, 15, 81], Some(101)));
}

#[test]
fn mapped_addresses_are_those_of_ipv4() {
    let mapped = "[::ffff:10.0.0.1]:80".parse().unwrap();
    assert_eq!(canonical(mapped), "10.0.0.1:80".parse().unwrap());
}

#[test]
fn frames_of_any_bytes_are_harmless() {
    let mut random = Random::new(1);
    for length in 0..400 {
        let mut frame: Vec<u8> = (0..length).map(|_| random.next_u64() as u8).collect();
        for (ethertype, version) in [([8, 0], 0x45), ([0x86, 0xdd], 0x60)] {
            if let Some(head) = frame.get_mut(12..15) {
                head.copy_from_slice(&[ethertype[0], ethertype[1], version]);
            }
            if let Some(segment) = SegmentBytes::parse(&frame) {
                assert!((1..400).contains(&segment.len));
            }
        }
    }
}
