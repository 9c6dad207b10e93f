//! Devices in memory and memif devices allocate no memory in steady state.
#![allow(unsafe_code)] // counts in the global allocator

use ginnel_devices::memif::{self, MemifConfig, Role, SocketName};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::{Device, RxBurst, TxMeta};
use ginnel_stack::time::Instant;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: all calls are forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller fulfils the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller fulfils the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn turn(from: &mut Device, to: &mut Device, frames: usize, bytes: usize) {
    for _ in 0..frames {
        let Some(room) = from.tx.reserve(bytes) else { break };
        room[0] = 1;
        from.tx.commit(bytes, TxMeta::default());
    }
    from.tx.flush(Instant::ZERO);
    let mut burst = RxBurst::new();
    to.rx.rx_burst(Instant::ZERO, &mut burst);
    assert!(!burst.is_empty());
    drop(burst);
    to.rx.arm();
}

fn assert_no_allocation(mut a: Device, mut b: Device) {
    turn(&mut a, &mut b, 1, 60);
    turn(&mut b, &mut a, 1, 60);
    let before = ALLOCATIONS.with(Cell::get);
    for round in 0..20_000 {
        turn(&mut a, &mut b, 1 + round % 70, 60 + round % 1400);
        turn(&mut b, &mut a, 1 + round % 3, 65_000);
    }
    assert_eq!(ALLOCATIONS.with(Cell::get) - before, 0);
}

#[test]
fn memory_device_does_not_allocate() {
    let (a, b) = pair(MemoryConfig::default());
    assert_no_allocation(a, b);
}

#[test]
fn memif_device_does_not_allocate() {
    for offload in [true, false] {
        let name = format!("ginnel-allocations-{}-{offload}", std::process::id());
        let [server, client] = [Role::Server, Role::Client].map(|role| {
            let socket = SocketName::Abstract(name.clone());
            memif::open(&MemifConfig { offload, ..MemifConfig::new(socket, role) }).expect("a device")
        });
        assert!(client.link.wait_for(true, Duration::from_secs(10)));
        let [a, b] = [server, client].map(|mut memif| memif.queues.remove(0));
        assert_no_allocation(a, b);
    }
}
