//! Asking the processor for a cache line before it is needed.
//!
//! With millions of connections nearly every first touch of a table bucket or a connection misses all caches. A miss that
//! something depends on costs 160–300 ns; the same line asked for a few packets earlier costs 10–20 ns. So a burst is
//! worked on in passes, and each pass prefetches what the next one reads.
#![allow(unsafe_code)] // Reason: the prefetch instruction is only reachable through an unsafe intrinsic.

/// Asks for the cache line at the start of `value`, to be read soon, into the first-level cache.
///
/// A hint: it has no effect on what the program computes, and is nothing at all on processors other than x86-64.
#[inline(always)]
pub fn prefetch<T>(value: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: prefetching never faults and has no architectural effect, and SSE is part of x86-64. The address is
        // that of a live reference anyway.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(core::ptr::from_ref(value).cast::<i8>()) }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = value;
}

/// Asks for the cache line at the start of `value`, to be written soon: if another core has it, it is taken from there.
///
/// A hint like [`prefetch`].
#[inline(always)]
pub fn prefetch_to_write<T>(value: &T) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: as above. Processors that do not know the instruction take it for one that does nothing; the intrinsic for it would be
    // compiled to an ordinary prefetch, because the instruction is not part of the baseline.
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
    fn takes_any_reference_even_to_nothing() {
        prefetch(&7u64);
        prefetch(&());
        prefetch(&[0u8; 4096]);
        prefetch_to_write(&7u64);
        prefetch_to_write(&());
    }
}
