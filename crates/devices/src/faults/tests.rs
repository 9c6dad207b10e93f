//! Links with faults between two ends of a memory pair.

use super::*;
use crate::conformance::{self, Guarantees};
use crate::memory::{MemoryConfig, pair};
use ginnel_stack::device::Label;

const GUARANTEES: Guarantees = Guarantees { back_pressure: true, uncut_super_frame_bytes: 0, labels: false };

fn wrapped(spec: &str, config: MemoryConfig) -> (Device, Device) {
    let spec = LinkSpec::parse(spec).expect("valid");
    let (left, right) = pair(config);
    (wrap(left, &spec, 1), wrap(right, &spec, 2))
}

#[test]
fn perfect_link_conforms() {
    conformance::run("faults", GUARANTEES, &mut || wrapped("", MemoryConfig::default()));
}

#[test]
fn slow_link_conforms_below_its_queue_limit() {
    let spec = "delay=300us jitter=100us rate=5gbit limit=100000000";
    let guarantees = Guarantees { back_pressure: false, ..GUARANTEES };
    conformance::run("faults with delay", guarantees, &mut || wrapped(spec, MemoryConfig::default()));
}

#[test]
fn frames_of_a_link_need_no_hash_check() {
    let (mut left, mut right) = pair(MemoryConfig::default());
    let label = Label::new(Some(7), 0);
    send(&mut right, Instant::ZERO, &[1; 60], TxMeta { label, ..TxMeta::NONE });
    left = wrap(left, &LinkSpec::parse("").expect("valid"), 1);
    let mut burst = RxBurst::new();
    left.rx.rx_burst(Instant::ZERO, &mut burst);
    assert_eq!((burst.len(), burst[0].label), (1, Label::NONE));
    drop(burst);
    assert!(left.rx.computes_hashes());
}

fn send(device: &mut Device, now: Instant, frame: &[u8], meta: TxMeta) {
    device.tx.reserve(frame.len()).expect("space").copy_from_slice(frame);
    device.tx.commit(frame.len(), meta);
    device.tx.flush(now);
}

fn receive(device: &mut Device, now: Instant) -> Vec<Vec<u8>> {
    let mut burst = RxBurst::new();
    device.rx.rx_burst(now, &mut burst);
    burst.iter().map(|frame| frame.bytes.to_vec()).collect()
}

#[test]
fn deadline_is_the_arrival_in_each_direction() {
    let spec = LinkSpec::parse("up.delay=3ms down.delay=5ms").expect("valid");
    let (left, mut right) = pair(MemoryConfig::default());
    let (mut left, stats) = wrap_counted(left, &spec, 1);
    let at = Instant::from_millis;
    assert_eq!((left.tx.next_deadline(), left.rx.next_deadline()), (None, None));

    send(&mut left, at(10), &[1; 60], TxMeta::default());
    assert_eq!(left.tx.next_deadline(), Some(at(13)));
    left.tx.flush(at(12));
    assert!(receive(&mut right, at(12)).is_empty());
    left.tx.flush(at(13));
    assert_eq!(left.tx.next_deadline(), None);
    assert_eq!(receive(&mut right, at(13)), [vec![1; 60]]);

    send(&mut right, at(20), &[2; 60], TxMeta::default());
    assert!(receive(&mut left, at(20)).is_empty());
    assert_eq!(left.rx.next_deadline(), Some(at(25)));
    assert!(left.rx.arm(), "no frame is due; the deadline is the next arrival");
    assert!(receive(&mut left, Instant::from_nanos(at(25).as_nanos() - 1)).is_empty());
    assert_eq!(receive(&mut left, at(25)), [vec![2; 60]]);
    assert_eq!(left.rx.next_deadline(), None);
    for counters in [stats.up, stats.down] {
        assert_eq!((counters.offered.load(Relaxed), counters.delivered.load(Relaxed)), (1, 1));
        assert_eq!(counters.dropped(), 0);
    }
}

#[test]
fn receiver_stays_awake_for_remaining_frames() {
    let spec = LinkSpec::parse("down.delay=1ms").expect("valid");
    let (left, mut right) = pair(MemoryConfig::default());
    let mut left = wrap(left, &spec, 1);
    (0..100).for_each(|_| send(&mut right, Instant::ZERO, &[2; 60], TxMeta::default()));
    assert!(receive(&mut left, Instant::ZERO).is_empty());
    assert_eq!(receive(&mut left, Instant::from_millis(1)).len(), BURST_FRAMES_MAX);
    assert!(!left.rx.arm());
    assert_eq!(receive(&mut left, Instant::from_millis(1)).len(), 100 - BURST_FRAMES_MAX);
    assert!(left.rx.arm());
}

#[test]
fn faults_depend_on_the_seed() {
    let run = |seed| {
        let text = "delay=2ms jitter=1ms loss=5% duplicate=5% reorder=5% corrupt=5% rate=50mbit limit=20";
        let spec = LinkSpec::parse(text).expect("valid");
        let (left, mut right) = pair(MemoryConfig::default());
        let mut left = wrap(left, &spec, seed);
        let mut seen = Vec::new();
        for step in 0..3000u32 {
            let now = Instant::from_micros(u64::from(step) * 100);
            send(&mut left, now, &[step.to_be_bytes(); 30].concat(), TxMeta::default());
            seen.extend(receive(&mut right, now).into_iter().map(|frame| (now, frame)));
        }
        seen
    };
    assert!(run(1) == run(1));
    assert!(run(1) != run(2));
}

#[test]
fn inconsistent_frame_is_counted() {
    let (left, _right) = pair(MemoryConfig::default());
    let (mut left, stats) = wrap_counted(left, &LinkSpec::default(), 1);
    send(&mut left, Instant::ZERO, &[0; 60], TxMeta { partial_checksum: Some((50, 16)), ..TxMeta::NONE });
    assert_eq!(stats.up.malformed.load(Relaxed), 1);
    assert_eq!(stats.up.offered.load(Relaxed), 0);
}
