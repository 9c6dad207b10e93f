//! The backlog of a port: frames that it has not taken precede an urgent frame, and are bounded.

use super::*;
use crate::backlog_limit;
use crate::memif::{self, MemifConfig, Role, SocketName};
use ginnel_stack::device::{Device, RxBurst, TxClass, TxMeta, TxQueue};
use ginnel_stack::priority::BEST_EFFORT;
use ginnel_stack::time::Instant;
use std::time::Duration;

/// Frames of the usual class that may wait, and those that are sent before the urgent one.
const BOUND: usize = 64;
const USUAL: usize = 300;
const USUAL_BYTE: u8 = 1;
const URGENT_BYTE: u8 = 2;
const URGENT_CLASS: u8 = 6;
/// Slots of the ring of net_memif: 2^6.
const MEMIF_RING: usize = 64;

/// Sends a frame of a class. Returns false if the device refuses it.
fn send(tx: &mut dyn TxQueue, class: u8, byte: u8) -> bool {
    tx.select_class(Some(TxClass::Connections(class)));
    let Some(room) = tx.reserve(60) else { return false };
    room.fill(byte);
    tx.commit(60, TxMeta::default());
    true
}

/// Receives a burst, and returns the first byte of each frame.
fn receive(device: &mut Device) -> Vec<u8> {
    let mut burst = RxBurst::new();
    device.rx.rx_burst(Instant::ZERO, &mut burst);
    burst.iter().map(|frame| frame.bytes[0]).collect()
}

/// Returns a port of net_memif with a small ring, and its peer.
fn memif_pair() -> (Device, Device) {
    let number = unique();
    let socket = std::env::temp_dir().join(format!("ginnel-dpdk-backlog-{}-{number}", std::process::id()));
    let peer = memif::open(&MemifConfig::new(SocketName::Path(socket.clone()), Role::Server)).expect("memif");
    let keys = format!("args=role=client+socket={}+socket-abstract=no+id=0+rsize=6", socket.display());
    let mut port = open(&format!("net_memif{number}"), &keys).into_single_device().expect("one queue");
    assert!(peer.link.wait_for(true, Duration::from_secs(10)), "no connection");
    let mut peer = peer.into_single_device().expect("one queue");
    // The port offers its first buffers when it receives.
    let until = std::time::Instant::now() + Duration::from_secs(10);
    while peer.tx.reserve(60).is_none() {
        assert!(std::time::Instant::now() < until, "the port offers no buffers");
        port.rx.arm();
    }
    let _ = std::fs::remove_file(&socket);
    (port, peer)
}

/// Sends usual frames and then an urgent one while the peer does not receive. The usual ones that are refused
/// are tried again in each turn. Returns how many frames are received before the urgent one.
fn frames_before_urgent(has_limit: bool) -> usize {
    let (port, mut peer) = memif_pair();
    let mut tx = if has_limit { backlog_limit::wrap_tx(port.tx, BOUND) } else { port.tx };
    let mut usual = USUAL;
    let send_usual = |tx: &mut dyn TxQueue, usual: &mut usize| {
        while *usual > 0 && send(tx, BEST_EFFORT, USUAL_BYTE) {
            *usual -= 1;
        }
    };
    for _ in 0..10 {
        send_usual(&mut *tx, &mut usual);
        tx.flush(Instant::ZERO);
    }
    assert!(send(&mut *tx, URGENT_CLASS, URGENT_BYTE), "{usual} usual frames are left");
    let mut received = Vec::new();
    for turn in 1.. {
        assert!(turn < 10_000, "{} frames of {USUAL} arrived", received.len());
        send_usual(&mut *tx, &mut usual);
        tx.flush(Instant::ZERO);
        received.extend(receive(&mut peer));
        if received.len() > USUAL {
            break;
        }
    }
    assert_eq!((usual, received.len()), (0, USUAL + 1));
    received.iter().position(|byte| *byte == URGENT_BYTE).expect("it arrived")
}

#[test]
fn urgent_frame_leaves_first_on_memif() {
    in_namespace("dpdk::tests::backlog::urgent_frame_leaves_first_on_memif", || {
        assert_eq!(frames_before_urgent(false), USUAL, "all in the order in which they were sent");
        assert_eq!(frames_before_urgent(true), MEMIF_RING + BOUND, "what waits is bounded");
    });
}

/// Sends frames, one in each turn, until 10 wait. Returns how many were sent.
fn fill(ring: &mut Device) -> usize {
    let mut sent = 0;
    while !ring.tx.has_backlog(10) {
        assert!(sent < 2000 && send(&mut *ring.tx, BEST_EFFORT, USUAL_BYTE));
        ring.tx.flush(Instant::ZERO);
        sent += 1;
    }
    assert!(!ring.tx.has_backlog(11));
    sent
}

#[test]
fn backlog_is_what_the_port_has_not_taken() {
    in_namespace("dpdk::tests::backlog::backlog_is_what_the_port_has_not_taken", || {
        let mut ring = open("net_ring0", "").into_single_device().expect("one queue");
        assert!(ring.tx.has_backlog(0) && !ring.tx.has_backlog(1));
        let sent = fill(&mut ring);
        assert!(sent > 1000, "the ring takes many frames, and has taken {}", sent - 10);
        assert_eq!(receive(&mut ring).len(), 64);
        assert!(ring.tx.has_backlog(10), "the port was offered them in this turn");
        ring.tx.flush(Instant::ZERO);
        assert!(!ring.tx.has_backlog(1), "the port has taken them");
        // In a new turn, `has_backlog` offers the waiting frames to the port first.
        assert_eq!(fill(&mut ring), 64);
        ring.tx.flush(Instant::ZERO);
        assert_eq!(receive(&mut ring).len(), 64);
        assert!(!ring.tx.has_backlog(10));
        let mut received = 128;
        while received < sent + 64 {
            let burst = receive(&mut ring).len();
            assert!(burst > 0, "{received} of {sent} and 64");
            received += burst;
        }
    });
}

#[test]
fn port_without_limits_has_no_backlog() {
    in_namespace("dpdk::tests::backlog::port_without_limits_has_no_backlog", || {
        let null = open("net_null0", "").into_single_device().expect("one queue");
        let mut tx = backlog_limit::wrap_tx(null.tx, 1);
        for _ in 0..1000 {
            assert!(send(&mut *tx, BEST_EFFORT, USUAL_BYTE));
            tx.flush(Instant::ZERO);
        }
    });
}
