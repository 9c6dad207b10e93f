//! Rings whose other side writes invalid values. The kernel does not; if it did, the device would count
//! errors and continue to work.

use super::super::filter::AttachedProgram;
use super::super::rings::kernel_side::{OFFSETS, memory, set_needs_wakeup, set_producer};
use super::super::rings::{ConsumerRing, ProducerRing, XdpDescriptor};
use super::super::socket::{RxRings, TxRings};
use super::super::umem;
use super::*;
use crate::random::Random;
use ginnel_stack::device::{BURST_FRAMES_MAX, RxQueue, TxQueue};
use rustix::event::{EventfdFlags, eventfd};

const CHUNK: usize = 4096;
const RING: u32 = 16;
const MTU: usize = 9000;

fn fd() -> OwnedFd {
    eventfd(0, EventfdFlags::NONBLOCK).expect("a descriptor")
}

/// Returns an address that is often close to a valid one.
fn address(random: &mut Random) -> u64 {
    match random.below(4) {
        0 => random.next_u64(),
        1 => u64::MAX - random.below(3),
        2 => random.below(2 * u64::from(RING)) * CHUNK as u64,
        _ => random.below(2 * u64::from(RING) * CHUNK as u64 + 3),
    }
}

#[test]
fn invalid_rx_descriptors_are_counted_and_skipped() {
    let stats = Arc::new(AfXdpStats::default());
    let (_, chunks, _) = umem::create(CHUNK, RING as usize, RING as usize).expect("memory");
    let (rx_memory, fill_memory) = (memory::<XdpDescriptor>(RING), memory::<u64>(RING));
    let mut kernel = ProducerRing::<XdpDescriptor>::new(rx_memory.clone(), &OFFSETS, RING);
    let mut fill = ConsumerRing::<u64>::new(fill_memory.clone(), &OFFSETS, RING);
    set_needs_wakeup(&fill_memory, true);
    let mut rx = AfXdpRx::new(
        XdpSocket::of(fd()),
        RxRings {
            ring: ConsumerRing::new(rx_memory.clone(), &OFFSETS, RING),
            fill: ProducerRing::new(fill_memory, &OFFSETS, RING),
            chunks,
        },
        MTU + LINK_HEADER_BYTES,
        2 * 9024,
        PacketSocket::LinkWatch(fd()),
        stats.clone(),
        AttachedProgram::of(fd()),
    )
    .expect("a queue");
    rx.partial_checksums = PartialChecksumCheck::Accept;
    let mut random = Random::new(5);
    let (mut lent, mut bytes) = (0, 0);
    for _ in 0..20_000 {
        for _ in 0..random.below(u64::from(RING) + 1) {
            let len = if random.below(2) == 0 { random.next_u64() as u32 } else { random.below(4097) as u32 };
            let options =
                if random.below(3) == 0 { random.next_u64() as u32 } else { random.below(2) as u32 };
            let _ = kernel.push(XdpDescriptor { address: address(&mut random), len, options });
        }
        kernel.publish();
        let mut burst = RxBurst::new();
        rx.rx_burst(Instant::ZERO, &mut burst);
        assert!(burst.len() <= BURST_FRAMES_MAX);
        lent += burst.len();
        bytes += burst
            .iter()
            .map(|frame| frame.bytes.iter().map(|&b| usize::from(b)).sum::<usize>())
            .sum::<usize>();
        drop(burst);
        rx.arm();
        for ahead in 0..fill.available() {
            assert_eq!(fill.peek(ahead) % CHUNK as u64, 0, "an address at which no chunk begins");
        }
        fill.release(fill.available());
    }
    assert!(lent > 1000 && bytes == 0, "{lent} frames");
    assert!(stats.rx_invalid.load(Ordering::Relaxed) > 1000);
    assert!(stats.rx_dropped.load(Ordering::Relaxed) > 100);
    // A producer index with any value.
    for produced in [7, 1 << 31, u32::MAX, 0] {
        set_producer(&rx_memory, produced);
        let mut burst = RxBurst::new();
        rx.rx_burst(Instant::ZERO, &mut burst);
    }
}

/// Sends frames of one chunk until there is no chunk left. Returns their number.
fn use_all_chunks(tx: &mut AfXdpTx, sent: &mut ConsumerRing<XdpDescriptor>) -> usize {
    let mut count = 0;
    while tx.reserve(60).is_some() {
        tx.commit(60, TxMeta::default());
        count += 1;
    }
    tx.flush(Instant::ZERO);
    sent.release(sent.available());
    count
}

#[test]
fn invalid_completions_release_no_chunk() {
    let stats = Arc::new(AfXdpStats::default());
    let (_, _, chunks) = umem::create(CHUNK, RING as usize, RING as usize).expect("memory");
    let (tx_memory, completion_memory) = (memory::<XdpDescriptor>(RING), memory::<u64>(RING));
    let mut kernel = ProducerRing::<u64>::new(completion_memory.clone(), &OFFSETS, RING);
    let mut sent = ConsumerRing::<XdpDescriptor>::new(tx_memory.clone(), &OFFSETS, RING);
    let capabilities = Capabilities {
        mac: [2; 6],
        mtu: MTU,
        tx_checksum: false,
        gso_bytes_max: 0,
        uso: false,
        labels: false,
    };
    let mut tx = AfXdpTx::new(
        XdpSocket::of(fd()),
        TxRings {
            ring: ProducerRing::new(tx_memory, &OFFSETS, RING),
            completion: ConsumerRing::new(completion_memory.clone(), &OFFSETS, RING),
            chunks,
        },
        CHUNK,
        capabilities,
        stats.clone(),
        Arc::new(InterfaceState::new("test")),
        AttachedProgram::of(fd()),
    );
    let mut complete = |addresses: &[u64]| {
        assert!(addresses.iter().all(|address| kernel.push(*address)));
        kernel.publish();
    };
    let invalid = || stats.tx_invalid.load(Ordering::Relaxed);
    let (first, chunk) = (u64::from(RING) * CHUNK as u64, CHUNK as u64);
    let all: Vec<u64> = (0..u64::from(RING)).map(|at| first + at * chunk).collect();
    assert_eq!(use_all_chunks(&mut tx, &mut sent), RING as usize);
    // A receive chunk, addresses within a chunk and before and after the chunks.
    complete(&[0, first - chunk, first - 1, first + 1, 2 * first, u64::MAX]);
    assert_eq!((use_all_chunks(&mut tx, &mut sent), invalid()), (0, 6));
    complete(&[first + chunk]);
    assert_eq!((use_all_chunks(&mut tx, &mut sent), invalid()), (1, 6));
    // More completions than chunks are in use: one is free when all are completed.
    complete(&[first]);
    assert!(tx.reserve(60).is_some());
    complete(&all);
    assert!(tx.reserve(CHUNK + 1).is_some(), "two chunks are needed");
    assert_eq!((use_all_chunks(&mut tx, &mut sent), invalid()), (RING as usize, 7));
    let mut random = Random::new(6);
    let mut committed = 0;
    for _ in 0..20_000 {
        for _ in 0..random.below(8) {
            let _ = kernel.push(address(&mut random));
        }
        kernel.publish();
        for _ in 0..random.below(8) {
            let len = random.below(MTU as u64 + 18) as usize;
            let Some(room) = tx.reserve(len) else { continue };
            assert_eq!(room.len(), len);
            tx.commit(len, TxMeta::default());
            committed += 1;
        }
        tx.flush(Instant::ZERO);
        sent.release(sent.available());
    }
    assert!(committed > 1000 && stats.tx_invalid.load(Ordering::Relaxed) > 1000, "{committed}");
    set_producer(&completion_memory, 1 << 31);
    let _ = tx.reserve(MTU);
}
