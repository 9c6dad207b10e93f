use super::*;

#[cfg(not(loom))]
mod sequential {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    fn frame(number: u64, len: usize) -> Vec<u8> {
        (0..len).map(|i| (number.wrapping_mul(0x9e37_79b9) as usize + i * 7) as u8).collect()
    }

    fn send(producer: &mut RecordProducer, bytes: &[u8], meta: TxMeta) -> bool {
        let Some(room) = producer.reserve(bytes.len()) else { return false };
        room.copy_from_slice(bytes);
        producer.commit(bytes.len(), meta);
        true
    }

    fn receive(consumer: &mut RecordConsumer) -> Vec<(Vec<u8>, RxChecksum, Option<Gso>, Label)> {
        let mut burst = RxBurst::new();
        consumer.burst(&mut burst);
        burst.iter().map(|f| (f.bytes.to_vec(), f.checksum, f.gso, f.label)).collect()
    }

    #[derive(Clone, Debug)]
    enum Op {
        Send { len: usize, gso: bool, partial: bool, label: u32 },
        ReserveOnly { len: usize },
        Shorten { reserved: usize, len: usize },
        Publish,
        Receive,
        Release,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            6 => (0usize..700, any::<bool>(), any::<bool>(), prop_oneof![Just(0), any::<u32>()])
                .prop_map(|(len, gso, partial, label)| Op::Send { len, gso, partial, label }),
            1 => (0usize..700).prop_map(|len| Op::ReserveOnly { len }),
            2 => (0usize..700, 0usize..700)
                .prop_map(|(a, b)| Op::Shorten { reserved: a.max(b), len: a.min(b) }),
            3 => Just(Op::Publish),
            2 => Just(Op::Receive),
            1 => Just(Op::Release),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 256 }, failure_persistence: None, ..Default::default() })]
        #[test]
        fn ring_behaves_like_a_queue(
            scale in 1usize..5,
            lap in 200usize..5000,
            ops in prop::collection::vec(op(), 1..400),
        ) {
            let (mut producer, mut consumer) = ring(capacity_min(700) * scale, lap);
            let mut model = VecDeque::new();
            let mut visible = 0;
            for (number, op) in ops.into_iter().enumerate() {
                match op {
                    Op::Send { len, gso, partial, label } => {
                        let meta = TxMeta {
                            partial_checksum: partial.then_some((number as u16, 65_535 - number as u16)),
                            gso: gso.then_some(Gso {
                                kind: [GsoKind::Tcp4, GsoKind::Tcp6, GsoKind::Udp][number % 3],
                                size: number as u16 ^ 0x5555,
                                header_len: number as u16 ^ 0xaaaa,
                                ecn: number % 2 == 0,
                            }),
                            label: Label::from_bits(label),
                        };
                        let bytes = frame(number as u64, len);
                        if send(&mut producer, &bytes, meta) {
                            model.push_back((bytes, meta));
                        }
                    }
                    Op::ReserveOnly { len } => {
                        if let Some(room) = producer.reserve(len) {
                            room.fill(0xee);
                        }
                    }
                    Op::Shorten { reserved, len } => {
                        if let Some(room) = producer.reserve(reserved) {
                            let bytes = frame(number as u64, len);
                            room[..len].copy_from_slice(&bytes);
                            producer.commit(len, TxMeta::default());
                            model.push_back((bytes, TxMeta::default()));
                        }
                    }
                    Op::Publish => {
                        prop_assert!(!producer.publish(), "the consumer is awake");
                        visible = model.len();
                    }
                    Op::Receive => {
                        let frames = receive(&mut consumer);
                        prop_assert_eq!(frames.len(), visible.min(64));
                        visible -= frames.len();
                        for (bytes, checksum, gso, label) in frames {
                            let (expected, meta) = model.pop_front().expect("the counted frames arrive");
                            prop_assert_eq!(bytes, expected);
                            prop_assert_eq!((gso, label), (meta.gso, meta.label));
                            let partial = match checksum {
                                RxChecksum::Partial { start, offset } => Some((start, offset)),
                                _ => None,
                            };
                            prop_assert_eq!(partial, meta.partial_checksum);
                        }
                    }
                    Op::Release => consumer.release(),
                }
            }
        }
    }

    #[test]
    fn pure_ack_uses_one_cache_line() {
        assert_eq!(record_bytes(54, 0), 64);
        assert_eq!(record_bytes(55, 0), 128);
    }

    #[test]
    fn smallest_ring_holds_the_largest_frame() {
        for shift in 0..40 {
            let (mut producer, mut consumer) = ring(capacity_min(1518), LAP_BYTES_MIN);
            for _ in 0..shift {
                assert!(send(&mut producer, &frame(1, 54), TxMeta::default()));
                let _ = producer.publish();
                assert_eq!(receive(&mut consumer).len(), 1);
            }
            consumer.release();
            assert!(send(&mut producer, &frame(2, 1518), TxMeta::default()), "after {shift} small frames");
            let _ = producer.publish();
            assert_eq!(receive(&mut consumer)[0].0, frame(2, 1518));
        }
    }

    #[test]
    fn borrowed_burst_is_not_overwritten() {
        let (mut producer, mut consumer) = ring(1024, LAP_BYTES_MIN);
        for number in 0..6 {
            assert!(send(&mut producer, &frame(number, 100), TxMeta::default()));
        }
        let _ = producer.publish();
        let mut burst = RxBurst::new();
        consumer.burst(&mut burst);
        let mut added = 0;
        while send(&mut producer, &frame(100, 100), TxMeta::default()) {
            added += 1;
        }
        assert!(added <= 2, "memory of borrowed frames was reused");
        for (number, lent) in burst.iter().enumerate() {
            assert_eq!(lent.bytes, frame(number as u64, 100));
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "thousands of frames take minutes in the interpreter")]
    fn light_traffic_reuses_a_small_part() {
        let (mut producer, mut consumer) = ring(1 << 16, 4096);
        let mut addresses = std::collections::BTreeSet::new();
        for number in 0..2000 {
            assert!(send(&mut producer, &frame(number, 500), TxMeta::default()));
            let _ = producer.publish();
            let mut burst = RxBurst::new();
            consumer.burst(&mut burst);
            addresses.insert(burst[0].bytes.as_ptr().addr());
        }
        let spread = addresses.last().unwrap() - addresses.first().unwrap();
        assert!(spread < 6000, "{spread} bytes used");
        consumer.release();
        let mut queued = 0;
        for _ in 0..6 {
            queued = 0;
            while send(&mut producer, &frame(queued, 500), TxMeta::default()) {
                queued += 1;
            }
            let _ = producer.publish();
            while !receive(&mut consumer).is_empty() {}
        }
        assert!(queued * 576 > (1 << 16) - 2048, "only {queued} frames fit");
    }

    #[test]
    fn frames_without_consumer_are_discarded() {
        let (mut producer, consumer) = ring(1024, LAP_BYTES_MIN);
        drop(consumer);
        for _ in 0..100 {
            assert!(send(&mut producer, &frame(0, 300), TxMeta::default()));
            assert!(!producer.publish());
        }
    }

    #[test]
    fn flushed_frames_survive_the_producer() {
        let (mut producer, mut consumer) = ring(1024, LAP_BYTES_MIN);
        assert!(send(&mut producer, &frame(3, 90), TxMeta::default()));
        let _ = producer.publish();
        drop(producer);
        assert_eq!(receive(&mut consumer)[0].0, frame(3, 90));
    }

    #[test]
    fn only_the_flush_after_arm_wakes() {
        let (mut producer, mut consumer) = ring(1024, LAP_BYTES_MIN);
        assert!(consumer.arm());
        assert!(!producer.publish(), "no frame was committed");
        assert!(send(&mut producer, &[1; 60], TxMeta::default()));
        assert!(producer.publish());
        assert!(send(&mut producer, &[1; 60], TxMeta::default()));
        assert!(!producer.publish(), "one wake-up per sleep");
        assert!(!consumer.arm(), "frames are queued");
        assert!(!consumer.disarm(), "no wake-up was sent");
        assert!(send(&mut producer, &[1; 60], TxMeta::default()));
        assert!(!producer.publish(), "arm failed: the consumer is awake");
    }

    /// Frames of all sizes cross between two threads of independent speed; each byte is checked.
    #[test]
    fn frames_pass_between_threads_unchanged() {
        let frames: u64 = if cfg!(miri) { 100 } else { 300_000 };
        let (mut producer, mut consumer) = ring(8192, 2048);
        let sender = std::thread::spawn(move || {
            let mut number = 0;
            while number < frames {
                for _ in 0..1 + number % 9 {
                    let len = 20 + (number * 131 % 1400) as usize;
                    let Some(room) = producer.reserve(len) else { break };
                    room.fill(number as u8);
                    room[..8].copy_from_slice(&number.to_le_bytes());
                    producer.commit(len, TxMeta::default());
                    number += 1;
                }
                if !producer.publish() && number % 64 == 0 {
                    std::thread::yield_now();
                }
            }
            let _ = producer.publish();
        });
        let mut expected = 0u64;
        while expected < frames {
            let mut burst = RxBurst::new();
            consumer.burst(&mut burst);
            if burst.is_empty() {
                std::thread::yield_now();
            }
            for frame in &burst {
                assert_eq!(frame.bytes[..8], expected.to_le_bytes());
                assert_eq!(frame.bytes.len(), 20 + (expected * 131 % 1400) as usize);
                assert!(frame.bytes[8..].iter().all(|&b| b == expected as u8), "frame {expected}");
                expected += 1;
            }
        }
        sender.join().expect("the sender does not panic");
    }
}

/// Run with `RUSTFLAGS="--cfg loom" cargo test -p ginnel-devices --lib memory::`.
#[cfg(loom)]
mod model {
    use super::*;
    use loom::thread;

    fn send(producer: &mut RecordProducer, byte: u8, len: usize) -> bool {
        let Some(room) = producer.reserve(len) else { return false };
        room.fill(byte);
        producer.commit(len, TxMeta::default());
        true
    }

    fn receive(consumer: &mut RecordConsumer, received: &mut Vec<u8>) {
        let mut burst = RxBurst::new();
        consumer.burst(&mut burst);
        received.extend(burst.iter().map(|f| f.bytes[0]));
    }

    /// Checks every interleaving of a producer that wraps and finds the ring full with a consumer that lends
    /// and releases.
    #[test]
    fn records_are_neither_read_early_nor_overwritten() {
        loom::model(|| {
            let (mut producer, mut consumer) = ring(256, 128);
            let sender = thread::spawn(move || {
                let mut sent = 0;
                for byte in 1..=4u8 {
                    if send(&mut producer, byte, if byte % 2 == 0 { 70 } else { 40 }) {
                        sent += 1;
                    }
                    let _ = producer.publish();
                }
                sent
            });
            let mut received = Vec::new();
            for _ in 0..3 {
                receive(&mut consumer, &mut received);
                consumer.release();
            }
            let sent = sender.join().expect("no panic");
            receive(&mut consumer, &mut received);
            assert_eq!(received.len(), sent);
            assert!(received.is_sorted());
        });
    }

    /// Either the consumer sees the frame when it arms, or the producer sees that it sleeps.
    #[test]
    fn no_wake_up_is_lost() {
        loom::model(|| {
            let (mut producer, mut consumer) = ring(256, 128);
            let sender = thread::spawn(move || {
                assert!(send(&mut producer, 1, 40));
                producer.publish()
            });
            let sleeps = consumer.arm();
            let woken = sender.join().expect("no panic");
            assert!(!sleeps || woken, "the consumer sleeps with a queued frame and no wake-up");
        });
    }
}
