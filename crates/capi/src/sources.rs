//! Memory of the program that connections send without copying it into a buffer first.
#![allow(unsafe_code)] // memory and functions of C

use crate::current::with_context;
use crate::failure::{Failure, STALE, call};
use crate::handles::SourceHandle;
use crate::memory;
use core::ffi::{c_int, c_void};
use ginnel::{Source, SourceId};
use rustix::io::Errno;

/// `ginnel_release`: tells the program that nothing reads the memory of a source any more.
pub type Release = unsafe extern "C" fn(*mut c_void, *const c_void, usize);

/// Memory of the program, which does not change until it is released.
struct CSource {
    data: *const u8,
    len: usize,
    release: Option<Release>,
    argument: *mut c_void,
}

// SAFETY: `Source` requires `Send`, but a source is added, read and dropped on one thread: that of the
// application whose callback or loop added it.
unsafe impl Send for CSource {}

impl Source for CSource {
    fn len(&self) -> u64 {
        self.len as u64
    }

    fn fill(&self, offset: u64, out: &mut [u8]) {
        // SAFETY: the program keeps the memory unchanged until it is released, which happens when this value
        // is dropped. The length was checked when the source was added.
        let bytes = unsafe { core::slice::from_raw_parts(self.data, self.len) };
        // The engine stays within the length.
        let offset = offset as usize;
        out.copy_from_slice(&bytes[offset..offset + out.len()]);
    }
}

impl Drop for CSource {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: `ginnel_source_add` got the function for this memory, and this is its only call.
            unsafe { release(self.argument, self.data.cast(), self.len) };
        }
    }
}

/// Returns the engine's handle. A number that was never a handle becomes a stale handle.
pub fn source_id(source: SourceHandle) -> SourceId {
    // Index 0 of C is no source; it becomes an index that no table has.
    SourceId { index: (source.id as u32).wrapping_sub(1), generation: (source.id >> 32) as u32 }
}

/// Registers memory as a source.
///
/// # Safety
/// `len` bytes at `data` stay readable and unchanged until `release` is called, or for ever if that is null.
/// `out` is null or points to a variable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ginnel_source_add(
    data: *const c_void,
    len: usize,
    release: Option<Release>,
    argument: *mut c_void,
    out: *mut SourceHandle,
) -> c_int {
    call(|| {
        // SAFETY: as the caller says.
        let (bytes, out) = unsafe { (memory::bytes(data, len)?, memory::object_mut(out)?) };
        if bytes.is_empty() {
            return Err(Failure::new(Errno::INVAL, "a source without bytes"));
        }
        let id = with_context(|cx| {
            let source = CSource { data: data.cast(), len, release, argument };
            Ok(cx.add_source(Box::new(source)))
        })?;
        out.id = u64::from(id.generation) << 32 | u64::from(id.index.wrapping_add(1));
        Ok(0)
    })
}

/// Releases a source.
#[unsafe(no_mangle)]
pub extern "C" fn ginnel_source_release(source: SourceHandle) -> c_int {
    call(|| {
        if source.id as u32 == 0 {
            return Err(STALE);
        }
        let is_released = with_context(|cx| Ok(cx.release_source(source_id(source))))?;
        if is_released { Ok(0) } else { Err(STALE) }
    })
}
