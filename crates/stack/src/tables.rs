//! Where large tables lie in memory.

/// The memory that a vector has reserved, for whoever can ask the system to lay it out well.
pub(crate) fn memory_of<T>(vec: &Vec<T>) -> *const [u8] {
    core::ptr::slice_from_raw_parts(vec.as_ptr().cast(), vec.capacity() * size_of::<T>())
}
