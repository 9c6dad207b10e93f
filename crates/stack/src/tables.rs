//! Memory of large tables.

/// Returns the memory that a vector has reserved, for owners that can request huge pages for it.
pub(crate) fn memory_of<T>(vec: &Vec<T>) -> *const [u8] {
    core::ptr::slice_from_raw_parts(vec.as_ptr().cast(), vec.capacity() * size_of::<T>())
}
