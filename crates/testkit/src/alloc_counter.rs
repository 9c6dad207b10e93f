//! Counts the heap allocations of a thread, for tests which show that a path does none in steady state.
//!
//! A test binary that wants to count installs the allocator:
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
//! Each thread has its own count, so tests that run beside each other do not disturb each other.
#![allow(unsafe_code)] // Reason: an allocator is an unsafe trait; this one only counts and passes on.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    // Constant and without destructor: reading it allocates nothing, and works until the thread is gone.
    static ALLOCATIONS: Cell<Allocations> = const { Cell::new(Allocations { count: 0, bytes: 0, freed: 0 }) };
}

/// What a thread asked the allocator for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Allocations {
    /// Allocations, and reallocations in place or not.
    pub count: u64,
    /// Bytes asked for by these.
    pub bytes: u64,
    /// Allocations given back.
    pub freed: u64,
}

/// The system's allocator, counting. See the module's text.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

fn record(count: u64, bytes: usize, freed: u64) {
    // A thread that is ending may have lost its counter: nobody can ask for it any more.
    _ = ALLOCATIONS.try_with(|made| {
        let before = made.get();
        made.set(Allocations {
            count: before.count + count,
            bytes: before.bytes + bytes as u64,
            freed: before.freed + freed,
        });
    });
}

// SAFETY: every call is passed to `System` unchanged, which keeps the contract of `GlobalAlloc`; counting neither allocates
// nor unwinds.
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

/// What this thread has allocated since it started.
pub fn allocations() -> Allocations {
    ALLOCATIONS.get()
}

/// Runs `f` and says what it allocated on this thread.
///
/// # Panics
/// If [`CountingAllocator`] is not the global allocator, because a count of 0 would mean nothing then.
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
