//! Counts the heap allocations of each thread, for tests that prove that a code path allocates nothing in
//! steady state.
//!
//! A test binary installs the counting allocator:
//!
//! ```
//! use ginnel_testkit::alloc_counter::{CountingAllocator, count_allocations};
//!
//! #[global_allocator]
//! static ALLOCATOR: CountingAllocator = CountingAllocator;
//!
//! fn main() {
//!     let (vector, made) = count_allocations(|| vec![1u8; 100]);
//!     assert_eq!((vector.len(), made.count, made.bytes), (100, 1, 100));
//! }
//! ```
//!
//! Each thread has its own counters, so tests on other threads do not disturb a measurement.
#![allow(unsafe_code)] // Reason: an allocator is an unsafe trait; this one only counts and passes on.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    // Constant and without a destructor: an access allocates nothing and works until the thread has ended.
    static ALLOCATIONS: Cell<Allocations> = const { Cell::new(Allocations { count: 0, bytes: 0, freed: 0 }) };
}

/// Counters of the allocator calls of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocations {
    /// Calls of `alloc`, `alloc_zeroed` and `realloc`.
    pub count: u64,
    /// Bytes requested by those calls.
    pub bytes: u64,
    /// Calls of `dealloc`.
    pub freed: u64,
}

/// The system allocator with counters; see the module documentation.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

fn record(count: u64, bytes: usize, freed: u64) {
    // A thread that is ending may have lost its counters already; nothing reads them any more.
    _ = ALLOCATIONS.try_with(|made| {
        let before = made.get();
        made.set(Allocations {
            count: before.count + count,
            bytes: before.bytes + bytes as u64,
            freed: before.freed + freed,
        });
    });
}

// SAFETY: every call is passed to `System` unchanged, which keeps the contract of `GlobalAlloc`; counting
// neither allocates nor unwinds.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        record(1, layout.size(), 0);
        // SAFETY: the caller keeps the contract of `alloc`, which is that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        record(1, layout.size(), 0);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        record(1, new_size, 0);
        // SAFETY: as above; `ptr` came from `System`, because all allocations do.
        unsafe { System.realloc(ptr, layout, new_size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        record(0, 0, 1);
        // SAFETY: as above; `ptr` came from `System`, because all allocations do.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Returns what this thread has allocated since it started.
pub fn allocations() -> Allocations {
    ALLOCATIONS.get()
}

/// Runs `f` and returns its result together with what it allocated on this thread.
///
/// # Panics
/// If [`CountingAllocator`] is not the global allocator: a count of 0 would prove nothing.
pub fn count_allocations<R>(f: impl FnOnce() -> R) -> (R, Allocations) {
    let probe = allocations();
    drop(std::hint::black_box(Box::new(0u8)));
    let before = allocations();
    assert!(before.count > probe.count, "CountingAllocator is not the global allocator of this program");
    let result = f();
    let after = allocations();
    let made = Allocations {
        count: after.count - before.count,
        bytes: after.bytes - before.bytes,
        freed: after.freed - before.freed,
    };
    (result, made)
}
