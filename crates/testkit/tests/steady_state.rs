//! The engine's data structures allocate while they grow, and nothing in steady state.

use ginnel_stack::chunk_pool::ChunkPool;
use ginnel_stack::flow_table::FlowTable;
use ginnel_stack::ip::PayloadSum;
use ginnel_stack::tcp::recv_buffer::RecvBuffer;
use ginnel_stack::tcp::send_buffer::SendBuffer;
use ginnel_stack::tcp::source::{PreloadedSource, SourceTable};
use ginnel_stack::time::Instant;
use ginnel_stack::timer_wheel::{TimerNode, TimerStore, TimerWheel};
use ginnel_testkit::alloc_counter::{CountingAllocator, count_allocations};
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Runs `round` ten times, then checks that 50 further rounds allocate nothing.
fn assert_steady(mut round: impl FnMut(u32)) {
    for n in 0..10 {
        round(n);
    }
    let ((), made) = count_allocations(|| (10..60).for_each(&mut round));
    assert_eq!(made.count, 0, "{made:?}");
}

struct Nodes(Vec<TimerNode>);

impl TimerStore for Nodes {
    fn timer_node(&mut self, id: u32) -> &mut TimerNode {
        &mut self.0[id as usize]
    }
}

#[test]
fn timers_are_armed_cancelled_and_fired_without_allocation() {
    let mut store = Nodes(vec![TimerNode::default(); 1000]);
    let mut now = Instant::ZERO;
    let mut wheel = TimerWheel::new(now);
    let ((), made) = count_allocations(|| {
        for n in 0..100_000u32 {
            let after =
                Duration::from_nanos(u64::from(n).wrapping_mul(0x9E37_79B9_7F4A) & ((1 << (n % 48)) - 1));
            wheel.schedule(&mut store, n % 1000, now + after);
            wheel.cancel(&mut store, n * 7 % 1000);
            now += Duration::from_micros(50);
            while wheel.pop_expired(&mut store, now).is_some() {}
        }
    });
    assert_eq!(made.count, 0);
}

#[test]
fn flow_table_inserts_without_allocation() {
    let mut table = FlowTable::with_capacity(100_000);
    let ((), made) = count_allocations(|| {
        for n in 0..100_000u32 {
            table.insert(n.wrapping_mul(0x9E37_79B9), n).unwrap();
        }
        for n in 0..100_000u32 {
            assert!(table.remove(n.wrapping_mul(0x9E37_79B9), n));
            table.insert(n.wrapping_mul(0x85EB_CA6B), n).unwrap();
        }
    });
    assert_eq!(made.count, 0);
}

#[test]
fn equal_hashes_allocate_nothing() {
    let mut table = FlowTable::with_capacity(20_000);
    let ((), made) = count_allocations(|| {
        for n in 0..10_000u32 {
            table.insert(7, n).unwrap();
        }
        for n in 10_000..20_000u32 {
            table.insert(n, n).unwrap();
        }
    });
    assert_eq!(made.count, 0);
}

#[test]
fn out_of_order_receive_allocates_nothing() {
    let mut pool = ChunkPool::new(1 << 20);
    let mut buffer = RecvBuffer::new();
    let mut out = [0; 16 << 10];
    assert_steady(|_| {
        for segment in [3, 2, 9, 5, 6, 0, 1, 8, 7, 4] {
            buffer.write(&mut pool, segment * 1448, &[0; 1448], 64 << 10);
        }
        assert_eq!(buffer.read(&mut pool, &mut out), 10 * 1448);
    });
    assert_eq!(pool.in_use(), 0);
}

#[test]
fn sending_bytes_and_slices_allocates_nothing() {
    let mut pool = ChunkPool::new(1 << 20);
    let mut sources = SourceTable::new();
    let body = sources.add(Box::new(PreloadedSource::new(vec![1; 10_000])));
    let mut buffer = SendBuffer::new();
    let mut segment = [0; 1448];
    assert_steady(|_| {
        for _ in 0..10 {
            buffer.push_bytes(&mut pool, &[0; 200], u64::MAX);
            buffer.push_source(&mut sources, body, 100, 9_000).unwrap();
        }
        while !buffer.is_empty() {
            let n = segment.len().min(buffer.len() as usize);
            buffer.fill(&pool, &sources, 0, &mut segment[..n], PayloadSum::Required);
            buffer.discard_front(&mut pool, &mut sources, n as u64);
        }
    });
    assert_eq!(pool.in_use(), 0);
}

#[test]
fn source_table_reuses_slots_without_allocation() {
    let mut sources = SourceTable::new();
    let bytes: Vec<Box<[u8]>> = (0..60).map(|_| vec![0; 1000].into_boxed_slice()).collect();
    let mut made: Vec<Box<PreloadedSource>> =
        bytes.into_iter().map(|b| Box::new(PreloadedSource::new(b))).collect();
    assert_steady(|_| {
        let id = sources.add(made.pop().expect("one for each round"));
        assert!(sources.release(id));
    });
}
