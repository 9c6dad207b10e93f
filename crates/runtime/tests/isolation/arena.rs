//! An allocator with an arena for each shard. During a turn of one shard nobody can touch the arenas of the
//! others: the kernel stops the process, which reports both shards and the stack.
#![allow(unsafe_code)] // an allocator, and a handler of a signal

use core::alloc::{GlobalAlloc, Layout};
use core::cell::Cell;
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::alloc::System;
use std::backtrace::Backtrace;

/// Number of arenas.
pub const ARENAS: usize = 4;
/// Addresses of an arena; memory is used as far as it is touched.
const ARENA_BYTES: usize = 16 << 30;
/// Blocks up to this size are used again after they are freed.
const REUSED_BYTES_MAX: usize = 1 << 20;
const CLASSES: usize = REUSED_BYTES_MAX.ilog2() as usize + 1;
const BLOCK_BYTES_MIN: usize = 16;
const PAGE_BYTES: usize = 4096;
/// Exit status after a touch.
pub const TOUCHED: c_int = 101;
/// Tag of memory that belongs to no shard.
const NOBODY: usize = usize::MAX;

thread_local! {
    // Constant and without a destructor: an access allocates nothing.
    static TAG: Cell<usize> = const { Cell::new(NOBODY) };
}

/// The memory of one shard.
struct Arena {
    /// First address; zero before the arena is mapped.
    base: AtomicUsize,
    /// Bytes that have been used.
    used: AtomicUsize,
    /// First free block of each power of two. A free block begins with the address of the next one.
    free: [AtomicUsize; CLASSES],
}

impl Arena {
    const fn new() -> Self {
        Self {
            base: AtomicUsize::new(0),
            used: AtomicUsize::new(0),
            free: [const { AtomicUsize::new(0) }; CLASSES],
        }
    }

    fn contains(&self, address: usize) -> bool {
        let base = self.base.load(Ordering::Relaxed);
        base != 0 && (base..base + ARENA_BYTES).contains(&address)
    }

    fn map(&self) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the kernel chooses an address that nothing uses.
        let at = unsafe { libc::mmap(core::ptr::null_mut(), ARENA_BYTES, protection, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED, "an arena is mapped");
        self.base.store(at as usize, Ordering::Relaxed);
    }

    fn protect(&self, protection: c_int) {
        let (base, used) = (self.base.load(Ordering::Relaxed), self.used.load(Ordering::Relaxed));
        // SAFETY: pages of the arena. Whoever touches them while they are protected ends in `report_touch`.
        unsafe { libc::mprotect(base as *mut c_void, used.next_multiple_of(PAGE_BYTES), protection) };
    }

    /// Returns a block, and whether it has never been used.
    fn take(&self, layout: Layout) -> (*mut u8, bool) {
        let bytes = block_bytes(layout);
        if bytes <= REUSED_BYTES_MAX {
            let free = &self.free[bytes.ilog2() as usize];
            let first = free.load(Ordering::Relaxed);
            if first != 0 {
                // SAFETY: a free block of the arena begins with the address of the next one.
                free.store(unsafe { *(first as *const usize) }, Ordering::Relaxed);
                return (first as *mut u8, false);
            }
        }
        let align = layout.align().max(bytes.min(PAGE_BYTES));
        let (base, used) = (self.base.load(Ordering::Relaxed), self.used.load(Ordering::Relaxed));
        let at = (base + used).next_multiple_of(align);
        if at + bytes > base + ARENA_BYTES {
            return (core::ptr::null_mut(), false);
        }
        self.used.store(at + bytes - base, Ordering::Relaxed);
        (at as *mut u8, true)
    }

    fn put_back(&self, block: *mut u8, layout: Layout) {
        let bytes = block_bytes(layout);
        if bytes <= REUSED_BYTES_MAX {
            let free = &self.free[bytes.ilog2() as usize];
            // SAFETY: the block is aligned, has room for an address, and nobody uses it any more.
            unsafe { *block.cast::<usize>() = free.load(Ordering::Relaxed) };
            free.store(block as usize, Ordering::Relaxed);
        }
    }
}

fn block_bytes(layout: Layout) -> usize {
    layout.size().max(layout.align()).max(BLOCK_BYTES_MIN).next_power_of_two()
}

static SHARDS: [Arena; ARENAS] = [const { Arena::new() }; ARENAS];
/// Held while an arena is used: a block may be freed by another thread.
static IS_LOCKED: AtomicBool = AtomicBool::new(false);

fn locked<R>(action: impl FnOnce() -> R) -> R {
    while IS_LOCKED.swap(true, Ordering::Acquire) {
        core::hint::spin_loop();
    }
    let result = action();
    IS_LOCKED.store(false, Ordering::Release);
    result
}

/// The allocator: memory that is allocated within [`in_shard`] is in the arena of the shard, all other memory
/// is the system's.
pub struct ShardAllocator;

// SAFETY: blocks of arenas are disjoint and aligned as the layout says, and stay mapped; the rest is the
// system's allocator.
unsafe impl GlobalAlloc for ShardAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match SHARDS.get(TAG.get()) {
            Some(arena) => locked(|| arena.take(layout).0),
            // SAFETY: the caller's promise.
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some(arena) = SHARDS.get(TAG.get()) else {
            // SAFETY: the caller's promise.
            return unsafe { System.alloc_zeroed(layout) };
        };
        let (block, is_new) = locked(|| arena.take(layout));
        if !is_new && !block.is_null() {
            // SAFETY: the block has this size. A new one is zero as the kernel has mapped it.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        match SHARDS.iter().find(|arena| arena.contains(block as usize)) {
            Some(arena) => locked(|| arena.put_back(block, layout)),
            // SAFETY: the caller's promise.
            None => unsafe { System.dealloc(block, layout) },
        }
    }
}

/// Maps the arenas, and installs the handler of touches.
pub fn set_up() {
    SHARDS.iter().for_each(Arena::map);
    // SAFETY: an all-zero structure is valid.
    let mut action: libc::sigaction = unsafe { core::mem::zeroed() };
    action.sa_sigaction = report_touch as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
    // SAFETY: the handler has the type that `SA_SIGINFO` says.
    assert_eq!(unsafe { libc::sigaction(libc::SIGSEGV, &raw const action, core::ptr::null_mut()) }, 0);
}

/// Runs `action`, whose memory is allocated in the arena of a shard.
pub fn in_shard<R>(shard: usize, action: impl FnOnce() -> R) -> R {
    let before = TAG.replace(shard);
    let result = action();
    TAG.set(before);
    result
}

/// Sets the shard in whose arena memory is allocated from now on; `None` for the system's.
pub fn set_shard(shard: Option<usize>) {
    TAG.set(shard.unwrap_or(NOBODY));
}

/// Runs a turn of a shard, during which nobody can touch the arenas of the others. It is not inlined, so that
/// stacks name it also in builds without debug information.
#[inline(never)]
pub fn alone<R>(shard: usize, turn: impl FnOnce() -> R) -> R {
    let others = || SHARDS.iter().enumerate().filter(|(index, _)| *index != shard);
    others().for_each(|(_, arena)| arena.protect(libc::PROT_NONE));
    let result = in_shard(shard, turn);
    others().for_each(|(_, arena)| arena.protect(libc::PROT_READ | libc::PROT_WRITE));
    result
}

/// Returns how many bytes of its arena a shard has used.
pub fn used(shard: usize) -> usize {
    SHARDS[shard].used.load(Ordering::Relaxed)
}

/// Reports which shard has touched whose memory, with the stack, and ends the process.
extern "C" fn report_touch(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel passes the structure.
    let address = unsafe { (*info).si_addr() } as usize;
    let toucher = TAG.replace(NOBODY);
    SHARDS.iter().for_each(|arena| arena.protect(libc::PROT_READ | libc::PROT_WRITE));
    match SHARDS.iter().position(|arena| arena.contains(address)) {
        Some(owner) => eprintln!("shard {toucher} touched memory of shard {owner} at {address:#x}"),
        None => eprintln!("shard {toucher}: invalid address {address:#x}"),
    }
    eprintln!("{}", Backtrace::force_capture());
    // SAFETY: ends the process without any destructor.
    unsafe { libc::_exit(TOUCHED) }
}
