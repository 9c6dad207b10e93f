//! Several queues: key and table, and what each queue sends and receives.

use super::*;
use crate::conformance;
use crate::dpdk::{RssReport, ffi, rss};
use ginnel_stack::device::{RxBurst, TxMeta};
use ginnel_stack::steering::toeplitz::KEY;
use ginnel_stack::time::Instant;
use std::time::Duration;

/// The key that net_null has at first is the stack's.
#[test]
fn another_key_is_replaced() {
    in_namespace("dpdk::tests::queues::another_key_is_replaced", || {
        let _null = open("net_null0", "queues=2");
        let info = ffi::info(0).expect("the only port");
        ffi::set_key(0, &[0x6d; 40], info.key_bytes, info.hash_types).expect("another key");
        assert_eq!(ffi::key(0).expect("a key").0, [0x6d; 40]);
        ffi::set_table(0, info.table_entries, 1).expect("another table");
        assert_eq!(ffi::table(0, info.table_entries), Ok(vec![0; 128]));
        let report = rss::set(0, &info, 2).expect("two queues");
        assert!(report.is_exact(), "{report:?}");
        assert_eq!(ffi::key(0).expect("a key").0, KEY);
        let turns: Vec<u16> = (0..128).map(|entry| entry % 2).collect();
        assert_eq!(ffi::table(0, info.table_entries), Ok(turns));
    });
}

/// net_null keeps the key and the table that it gets.
#[test]
fn key_and_table_are_read_back() {
    in_namespace("dpdk::tests::queues::key_and_table_are_read_back", || {
        for queues in [2, 3, 4] {
            let null = open(&format!("net_null{queues}"), &format!("queues={queues}"));
            assert_eq!((null.driver.as_str(), null.queues.len()), ("net_null", queues));
            let exact = RssReport { has_key: true, table_entries: 128, hashes_ports: true };
            assert_eq!(null.rss, Some(exact));
            assert!(exact.is_exact() && null.queues.iter().all(|queue| queue.rx.computes_hashes()));
        }
        let one = open("net_null1", "");
        assert!(one.rss.is_none() && !one.queues[0].rx.computes_hashes());
    });
}

/// net_ring has no hash.
#[test]
fn port_without_a_hash_has_no_report() {
    in_namespace("dpdk::tests::queues::port_without_a_hash_has_no_report", || {
        let ring = open("net_ring0", "queues=3");
        assert!(ring.rss.is_none() && ring.queues.iter().all(|queue| !queue.rx.computes_hashes()));
    });
}

/// Queue N of net_ring receives what queue N sends.
#[test]
fn queues_are_separate() {
    in_namespace("dpdk::tests::queues::queues_are_separate", || {
        let mut ring = open("net_ring0", "queues=3");
        for (number, queue) in ring.queues.iter_mut().enumerate() {
            for _ in 0..=number {
                queue.tx.reserve(60).expect("room").fill(number as u8);
                queue.tx.commit(60, TxMeta::default());
            }
            queue.tx.flush(Instant::ZERO);
        }
        for (number, queue) in ring.queues.iter_mut().enumerate() {
            let mut burst = RxBurst::new();
            queue.rx.rx_burst(Instant::ZERO, &mut burst);
            assert_eq!(burst.len(), number + 1);
            assert!(burst.iter().all(|frame| frame.bytes == [number as u8; 60]));
        }
    });
}

/// A single shard sleeps on one descriptor, and receives from all queues.
#[test]
fn joined_queues_are_one_device() {
    in_namespace("dpdk::tests::queues::joined_queues_are_one_device", || {
        let mut device = open("net_ring0", "queues=2,poll_us=1000").into_single_device().expect("joined");
        assert!(device.rx.arm());
        assert!(conformance::sleep(device.rx.wake_fd(), Duration::from_secs(10)), "the timer wakes");
        device.tx.reserve(60).expect("room").fill(7);
        device.tx.commit(60, TxMeta::default());
        device.tx.flush(Instant::ZERO);
        assert!(!device.rx.arm(), "a frame waits");
        let mut burst = RxBurst::new();
        device.rx.rx_burst(Instant::ZERO, &mut burst);
        assert_eq!(burst.len(), 1);
    });
}

/// net_null receives as many frames as it is asked for, and sends everything.
#[test]
fn null_receives_and_sends_without_end() {
    in_namespace("dpdk::tests::queues::null_receives_and_sends_without_end", || {
        let mut null = open("net_null0", "args=size=100").into_single_device().expect("one queue");
        let mut frames = 0;
        for _ in 0..1000 {
            let mut burst = RxBurst::new();
            null.rx.rx_burst(Instant::ZERO, &mut burst);
            assert!(burst.is_full() && burst.iter().all(|frame| frame.bytes.len() == 100));
            frames += burst.len();
            for _ in 0..frames % 100 {
                null.tx.reserve(1514).expect("the port takes everything");
                null.tx.commit(1514, TxMeta::default());
            }
            null.tx.flush(Instant::ZERO);
            drop(burst);
            assert!(!null.rx.arm());
        }
        let mut errors = Vec::new();
        null.rx.counters(&mut |name, count| errors.extend((count > 0).then(|| name.to_owned())));
        assert!(errors.is_empty(), "{errors:?}");
    });
}
