//! Large tables on large pages.
//!
//! With millions of connections the tables that segments are looked up in are hundreds of megabytes, touched at random. On pages of
//! 4 KiB nearly each touch misses the TLB, too, and its page walk costs as much again as the cache miss.
#![allow(unsafe_code)] // Reason: madvise(2) is only reachable through an unsafe function.

/// Tables below this size are left alone: a huge page would be mostly empty.
const BYTES_MIN: usize = 4 << 20;

/// An empty vector with room for `capacity` elements, on huge pages if it is large and the system gives them
/// (`/sys/kernel/mm/transparent_hugepage/enabled`). Only address space is taken; memory comes when it is touched.
pub(crate) fn vec_with_capacity<T>(capacity: usize) -> Vec<T> {
    let vec = Vec::<T>::with_capacity(capacity);
    let bytes = capacity.saturating_mul(size_of::<T>());
    if bytes >= BYTES_MIN {
        advise(vec.as_ptr().cast::<u8>().cast_mut(), bytes);
    }
    vec
}

/// Asks for huge pages in the whole pages of a range. Without them everything works as well, only slower.
#[cfg(all(target_os = "linux", not(miri)))]
fn advise(start: *mut u8, bytes: usize) {
    use rustix::mm::{Advice, madvise};
    let skip = start.align_offset(rustix::param::page_size());
    // SAFETY: the range lies within an allocation of the caller, and the advice changes nothing that a program can see.
    let _ = unsafe {
        madvise(start.wrapping_add(skip).cast(), bytes.saturating_sub(skip), Advice::LinuxHugepage)
    };
}

#[cfg(not(all(target_os = "linux", not(miri))))]
fn advise(_: *mut u8, _: usize) {}

#[cfg(test)]
mod tests {
    use super::vec_with_capacity;

    #[test]
    fn small_and_large_vectors_hold_what_was_asked_for() {
        for capacity in [0, 1, 1000, 1 << 20] {
            let mut vec = vec_with_capacity::<u64>(capacity);
            assert!(vec.is_empty() && vec.capacity() >= capacity);
            vec.resize(capacity, 7);
            assert!(vec.iter().all(|&v| v == 7));
        }
        assert_eq!(vec_with_capacity::<()>(usize::MAX).len(), 0);
    }
}
