//! Buffers of calls that block. They belong to the thread: a handler that leaves the call by `siglongjmp`
//! (see [`crate::cleanup`]) leaks none of their memory, and the next call reuses it.
#![allow(unsafe_code)] // a thread's memory is lent to the call that is left by a jump

use crate::cleanup::CleanupHandler;
use crate::fd_table::FileId;
use core::cell::{Cell, RefCell, UnsafeCell};
use core::pin::pin;
use libc::pollfd;

/// How many elements of a buffer are kept for the next call, so that one long wait does not occupy memory for
/// ever.
const CAPACITY_KEPT_MAX: usize = 1024;

/// The buffers of a call, all empty at its start.
#[derive(Default)]
pub(crate) struct ScratchBuffers {
    /// The descriptors of `select`.
    pub select_fds: Vec<pollfd>,
    /// Indices of stack descriptors in the list of the call, and their descriptions.
    pub stack_fds: Vec<(usize, FileId)>,
    /// Descriptions alone.
    pub files: Vec<FileId>,
    /// Kernel descriptors.
    pub kernel_fds: Vec<pollfd>,
    /// Descriptors on which the thread sleeps.
    pub sleep_fds: Vec<pollfd>,
    /// Bytes to send.
    pub bytes: Vec<u8>,
}

impl ScratchBuffers {
    fn clear(&mut self) {
        let Self {
            select_fds: asked,
            stack_fds: ours,
            files,
            kernel_fds: kernel,
            sleep_fds: slept_on,
            bytes,
        } = self;
        [asked, kernel, slept_on].into_iter().for_each(clear_and_shrink);
        clear_and_shrink(ours);
        clear_and_shrink(files);
        clear_and_shrink(bytes);
    }
}

fn clear_and_shrink<T>(list: &mut Vec<T>) {
    list.clear();
    list.shrink_to(CAPACITY_KEPT_MAX);
}

/// Buffers, and whether a call uses them. A handler may block in the middle of a call that blocks, so a
/// thread may need several.
#[derive(Default)]
struct ScratchSlot {
    in_use: Cell<bool>,
    buffers: UnsafeCell<ScratchBuffers>,
}

/// Boxed, because buffers must not move when the vector grows.
type ScratchSlots = RefCell<Vec<Box<ScratchSlot>>>;

thread_local! {
    static SLOTS: ScratchSlots = const { RefCell::new(Vec::new()) };
}

/// Runs a call with buffers. The caller must hold the lock, so that no handler interrupts the allocator.
pub(crate) fn with<R>(call: impl FnOnce(&mut ScratchBuffers) -> R) -> R {
    let take = |slots: &ScratchSlots| {
        let mut slots = slots.borrow_mut();
        let free = slots.iter().position(|slot| !slot.in_use.get());
        let at = free.unwrap_or_else(|| {
            slots.push(Box::default());
            slots.len() - 1
        });
        slots[at].in_use.set(true);
        &raw const *slots[at]
    };
    // A thread that exits has no slots any more.
    let Ok(slot) = SLOTS.try_with(take) else { return call(&mut ScratchBuffers::default()) };
    // SAFETY: only the exit of the thread frees the box, after all of its calls.
    let slot = unsafe { &*slot };
    let slot_guard = SlotGuard(slot);
    let cleanup_handler = pin!(CleanupHandler::new(|| slot.in_use.set(false)));
    let watched = cleanup_handler.push();
    // SAFETY: `in_use` gives the buffers to this call alone, and only this thread accesses them. A call that
    // is left by a jump does not use them again.
    let buffers = unsafe { &mut *slot.buffers.get() };
    buffers.clear();
    let result = call(buffers);
    buffers.clear();
    drop(watched);
    drop(slot_guard);
    result
}

/// Frees the slot when the call ends, even by a panic.
struct SlotGuard<'a>(&'a ScratchSlot);

impl Drop for SlotGuard<'_> {
    fn drop(&mut self) {
        self.0.in_use.set(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_calls_get_separate_reusable_buffers() {
        let at = |buffers: &mut ScratchBuffers| {
            buffers.bytes.extend([1; 100]);
            buffers.bytes.as_ptr().addr()
        };
        let (outer, inner) = with(|outer| {
            let first = at(outer);
            let inner = with(|inner| {
                assert!(inner.bytes.is_empty());
                at(inner)
            });
            assert_eq!(outer.bytes, [1; 100]);
            (first, inner)
        });
        assert_ne!(outer, inner);
        let slots = SLOTS.with_borrow(Vec::len);
        assert_eq!((with(at), with(|_| with(at))), (outer, inner));
        assert_eq!(SLOTS.with_borrow(Vec::len), slots);
    }

    #[test]
    fn oversized_buffers_are_not_kept() {
        with(|buffers| buffers.bytes.extend([1; 100_000]));
        with(|buffers| assert!(buffers.bytes.is_empty() && buffers.bytes.capacity() <= CAPACITY_KEPT_MAX));
    }

    #[test]
    fn panicking_call_releases_its_buffers() {
        with(|_| ());
        let slots = SLOTS.with_borrow(Vec::len);
        let panicked = std::panic::catch_unwind(|| with(|_| panic!("on purpose")));
        assert!(panicked.is_err());
        with(|_| ());
        assert_eq!(SLOTS.with_borrow(Vec::len), slots);
    }
}
