//! Memory of the caller. What can be checked is checked: null or misaligned pointers (`EFAULT`) and
//! impossible lengths (`EINVAL`).
#![allow(unsafe_code)] // pointers of C

use crate::failure::Failure;
use core::ffi::{CStr, c_char, c_void};
use rustix::io::Errno;

const NULL: Failure = Failure::new(Errno::FAULT, "a null or misaligned pointer");
const TOO_LONG: Failure = Failure::new(Errno::INVAL, "a length of more than half of the address space");

fn checked_len(is_null: bool, len: usize) -> Result<(), Failure> {
    match isize::try_from(len) {
        Err(_) => Err(TOO_LONG),
        Ok(_) if is_null && len > 0 => Err(NULL),
        Ok(_) => Ok(()),
    }
}

/// Returns bytes that the caller lends. The pointer may be null if `len` is 0.
///
/// # Safety
/// `len` bytes at `data` are readable and do not change during the call.
pub unsafe fn bytes<'a>(data: *const c_void, len: usize) -> Result<&'a [u8], Failure> {
    checked_len(data.is_null(), len)?;
    if len == 0 {
        return Ok(&[]);
    }
    // SAFETY: the pointer is not null, and the caller says that the bytes are readable.
    Ok(unsafe { core::slice::from_raw_parts(data.cast(), len) })
}

/// Returns a buffer that the caller lends. The pointer may be null if `len` is 0.
///
/// # Safety
/// `len` bytes at `data` are writable, and nobody else uses them during the call.
pub unsafe fn bytes_mut<'a>(data: *mut c_void, len: usize) -> Result<&'a mut [u8], Failure> {
    checked_len(data.is_null(), len)?;
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: the pointer is not null, and the caller says that the bytes are writable.
    Ok(unsafe { core::slice::from_raw_parts_mut(data.cast(), len) })
}

/// Returns objects that the caller lends. The pointer may be null if `count` is 0.
///
/// # Safety
/// `count` objects at `first` are initialised and do not change during the call.
pub unsafe fn objects<'a, T>(first: *const T, count: usize) -> Result<&'a [T], Failure> {
    checked_len(first.is_null(), count.saturating_mul(size_of::<T>()))?;
    if count == 0 {
        return Ok(&[]);
    }
    check(first)?;
    // SAFETY: the pointer and the length are checked, and the caller says that the objects are there.
    Ok(unsafe { core::slice::from_raw_parts(first, count) })
}

/// Checks that a pointer is neither null nor misaligned.
pub fn check<T>(pointer: *const T) -> Result<(), Failure> {
    if pointer.is_null() || !pointer.is_aligned() { Err(NULL) } else { Ok(()) }
}

/// Checks that a pointer that the caller may leave null is not misaligned.
pub fn check_optional<T>(pointer: *const T) -> Result<(), Failure> {
    if pointer.is_null() { Ok(()) } else { check(pointer) }
}

/// Returns a reference to an object of the caller.
///
/// # Safety
/// A pointer that is neither null nor misaligned points to an object that nobody changes during the call.
pub unsafe fn object<'a, T>(pointer: *const T) -> Result<&'a T, Failure> {
    check(pointer)?;
    // SAFETY: as the caller says.
    Ok(unsafe { &*pointer })
}

/// Returns a reference through which an object of the caller is changed.
///
/// # Safety
/// A pointer that is neither null nor misaligned points to an object that nobody else uses during the call.
pub unsafe fn object_mut<'a, T>(pointer: *mut T) -> Result<&'a mut T, Failure> {
    check(pointer)?;
    // SAFETY: as the caller says.
    Ok(unsafe { &mut *pointer })
}

/// Returns a structure of the caller that begins with its size in bytes. The program may know fewer fields
/// than this library: the others are 0. `EINVAL` if the structure is smaller than `least`, or larger than
/// here.
///
/// # Safety
/// A pointer that is neither null nor misaligned points to as many readable bytes as the first field says. A
/// `T` of all zeros is valid.
pub unsafe fn sized<T: Copy>(structure: *const T, least: usize, name: &str) -> Result<T, Failure> {
    check(structure)?;
    // SAFETY: the first field is there, as the caller says.
    let size = *unsafe { object(structure.cast::<usize>()) }?;
    if size < least || size > size_of::<T>() || size % align_of::<T>() != 0 {
        let text = format!("{name} of {size} bytes: set size to sizeof(struct {name})");
        return Err(Failure::about(Errno::INVAL, text));
    }
    let mut all = core::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: `size` bytes are there, as the caller says, and fit. The others are 0.
    unsafe {
        core::ptr::copy_nonoverlapping(structure.cast::<u8>(), all.as_mut_ptr().cast(), size);
        Ok(all.assume_init())
    }
}

/// Writes a result to a variable of the caller.
///
/// # Safety
/// As of [`object_mut`], but the variable need not be initialised.
pub unsafe fn write<T>(to: *mut T, value: T) -> Result<(), Failure> {
    check(to)?;
    // SAFETY: as the caller says.
    unsafe { to.write(value) };
    Ok(())
}

/// Returns a text of the caller; `EILSEQ` if it is not UTF-8.
///
/// # Safety
/// A pointer that is not null points to a C string that nobody changes during the call.
pub unsafe fn text<'a>(text: *const c_char) -> Result<&'a str, Failure> {
    if text.is_null() {
        return Err(NULL);
    }
    // SAFETY: as the caller says.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Failure::new(Errno::ILSEQ, "a text that is not UTF-8"))
}

/// Frees an object that this library has given to C. A null pointer has no effect.
///
/// # Safety
/// The pointer is null or from [`give`], and was not freed.
pub unsafe fn free<T>(pointer: *mut T) {
    if !pointer.is_null() {
        // SAFETY: as the caller says.
        drop(unsafe { Box::from_raw(pointer) });
    }
}

/// Gives C the ownership of an object, which C ends by a function of this library.
///
/// # Safety
/// As of [`write`].
pub unsafe fn give<T>(to: *mut *mut T, value: T) -> Result<(), Failure> {
    check(to)?;
    // SAFETY: as the caller says.
    unsafe { write(to, Box::into_raw(Box::new(value))) }
}
