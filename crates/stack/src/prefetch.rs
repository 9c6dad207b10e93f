//! Prefetching of cache lines.
//!
//! With millions of connections nearly every first access to a table bucket or a connection misses all
//! caches. A miss that later instructions depend on costs 160–300 ns; a line that was prefetched a few
//! packets earlier costs 10–20 ns. So a burst is processed in passes, and each pass prefetches what the next
//! one reads.
#![allow(unsafe_code)] // Reason: the prefetch instruction is only reachable through an unsafe intrinsic.

/// Prefetches the cache line at the start of `value` into the first-level cache, for reading.
///
/// This is a hint without an effect on results. It does nothing on processors other than x86-64.
#[inline(always)]
pub fn prefetch<T>(value: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: prefetching never faults and has no architectural effect, and SSE is part of x86-64. The
        // address is that of a live reference anyway.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(core::ptr::from_ref(value).cast::<i8>()) }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = value;
}

/// Prefetches the cache line at the start of `value` for writing: if another core has the line, it is
/// invalidated there.
///
/// This is a hint like [`prefetch`].
#[inline(always)]
pub fn prefetch_to_write<T>(value: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: as above. Processors without the instruction execute it as a no-op; the intrinsic for it would
    // be compiled to an ordinary prefetch, because the instruction is not part of the baseline.
    unsafe {
        core::arch::asm!("prefetchw [{}]", in(reg) core::ptr::from_ref(value), options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = value;
}

#[cfg(test)]
mod tests {
    use super::{prefetch, prefetch_to_write};

    #[test]
    fn prefetch_takes_any_reference() {
        prefetch(&7u64);
        prefetch(&());
        prefetch(&[0u8; 4096]);
        prefetch_to_write(&7u64);
        prefetch_to_write(&());
    }
}
