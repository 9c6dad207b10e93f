//! Memory whose address the program gave. The program may have given any address: the kernel then fails the
//! call with `EFAULT`, and a hook that reads the memory before the call must not end the program.
#![allow(unsafe_code)] // reads memory at the program's addresses

use ginnel_kernel_lane::ErrnoGuard;
use libc::c_void;

/// A divisor of the size of a page: the bytes between two multiples of it are readable or not as a whole.
const PAGE_BYTES: usize = 4096;

/// Returns whether the byte at an address can be read. Makes a system call that every filter permits: the
/// kernel reads a signal set before it refuses to do what is not specified with it.
fn is_readable(address: usize) -> bool {
    const NO_ACTION: libc::c_int = -1;
    // All bytes of the set are in one page.
    let set = core::ptr::without_provenance::<c_void>(address & !(size_of::<u64>() - 1));
    let none = core::ptr::null_mut::<c_void>();
    // SAFETY: the kernel checks the address, and changes nothing. libc's function would read the set itself.
    let result = unsafe { libc::syscall(libc::SYS_rt_sigprocmask, NO_ACTION, set, none, size_of::<u64>()) };
    // SAFETY: libc's variable of this thread.
    result == 0 || unsafe { *libc::__errno_location() } != libc::EFAULT
}

/// Iterates over the elements of a list of the program. Ends before the first one that cannot be read.
///
/// # Safety
/// Any bytes must be valid as a `T`.
pub unsafe fn elements<T: Copy>(list: *const T, count: usize) -> impl Iterator<Item = T> {
    let mut readable_end = list.addr();
    (0..count).map_while(move |number| {
        let element = list.wrapping_add(number);
        let end = element.addr().checked_add(size_of::<T>())?;
        if readable_end < end {
            let _errno = ErrnoGuard::new();
            while readable_end < end {
                if !is_readable(readable_end) {
                    return None;
                }
                readable_end = (readable_end | (PAGE_BYTES - 1)).checked_add(1)?;
            }
        }
        // SAFETY: all bytes of the element are readable, and the caller's promise.
        Some(unsafe { element.read_unaligned() })
    })
}
