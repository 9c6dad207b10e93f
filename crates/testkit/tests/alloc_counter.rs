//! The counting allocator counts the allocations of the measured thread only.

use ginnel_testkit::alloc_counter::{Allocations, CountingAllocator, count_allocations};
use std::hint::black_box;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[test]
fn code_without_heap_counts_nothing() {
    let (sum, made) = count_allocations(|| black_box([1u64; 64]).iter().sum::<u64>());
    assert_eq!((sum, made), (64, Allocations::default()));
}

#[test]
fn allocations_reallocations_and_frees_are_counted() {
    let (_, made) = count_allocations(|| {
        let mut bytes = black_box(Vec::<u8>::with_capacity(10));
        bytes.reserve_exact(1000);
        black_box(vec![0u8; 24]);
    });
    assert_eq!(made, Allocations { count: 3, bytes: 10 + 1000 + 24, freed: 2 });
}

#[test]
fn returned_box_is_not_freed() {
    let (kept, made) = count_allocations(|| black_box(Box::new(7u32)));
    assert_eq!((*kept, made), (7, Allocations { count: 1, bytes: 4, freed: 0 }));
}

#[test]
fn other_threads_are_not_counted() {
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let other = std::thread::spawn(move || {
        let mut kept = Vec::new();
        while wait.try_recv().is_err() {
            kept = vec![black_box(kept.len()); 100];
        }
    });
    let (_, made) = count_allocations(|| std::thread::sleep(std::time::Duration::from_millis(5)));
    go.send(()).unwrap();
    other.join().unwrap();
    assert_eq!(made, Allocations::default());
}
