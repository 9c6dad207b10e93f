//! Looks up the next definition of a symbol after the preloaded library (`RTLD_NEXT`), in most cases libc's.
//! A hook replaces libc's function under its name, and calls it by this look-up.
#![allow(unsafe_code)] // functions by name

use core::ffi::{CStr, c_long, c_void};

/// Defines functions of libc, looked up once each: `real! { fn close(fd: c_int) -> c_int; }` defines `close`.
/// A function that libc does not have fails with `ENOSYS`.
#[macro_export]
macro_rules! real {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty;)*) => {
        $(
            /// Calls libc's function.
            ///
            /// # Safety
            /// As in libc's manual.
            #[inline]
            pub unsafe fn $name($($argument: $type),*) -> $result {
                type Function = unsafe extern "C" fn($($type),*) -> $result;
                static FOUND: ::core::sync::atomic::AtomicPtr<::core::ffi::c_void> =
                    ::core::sync::atomic::AtomicPtr::new(::core::ptr::null_mut());
                let mut found = FOUND.load(::core::sync::atomic::Ordering::Relaxed);
                if found.is_null() {
                    const BYTES: &[u8] = concat!(stringify!($name), "\0").as_bytes();
                    const NAME: &::core::ffi::CStr = match ::core::ffi::CStr::from_bytes_with_nul(BYTES) {
                        Ok(name) => name,
                        Err(_) => panic!("the name of a function has no NUL byte"),
                    };
                    found = $crate::find(NAME);
                    FOUND.store(found, ::core::sync::atomic::Ordering::Relaxed);
                }
                // SAFETY: libc's function of this name has this type and is never unloaded. In its place,
                // `missing` ignores all arguments, and its result is in the register of an integer.
                let function = unsafe { ::core::mem::transmute::<*mut ::core::ffi::c_void, Function>(found) };
                // SAFETY: the caller's promise.
                unsafe { function($($argument),*) }
            }
        )*
    };
}

/// Returns the next function of this name in the order of the loaded libraries, or a function that fails with
/// `ENOSYS`.
#[must_use]
pub fn find(name: &'static CStr) -> *mut c_void {
    // SAFETY: the name is a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
    // A program that tests with `dlsym` whether libc has the function finds the preloaded library's hook, and
    // calls it even if libc lacks the function.
    if found.is_null() { (missing as *const ()).cast_mut().cast() } else { found }
}

/// Stands for a function that this version of libc does not have. All hooked functions that older versions
/// lack report an error by -1, except `closefrom`, which returns nothing, and
/// `posix_spawn_file_actions_addclosefrom_np`, which returns an error number: -1 is an unknown one.
extern "C" fn missing() -> c_long {
    // SAFETY: returns the variable of this thread.
    unsafe { *libc::__errno_location() = libc::ENOSYS };
    -1
}

#[cfg(test)]
mod tests {
    #![allow(missing_docs)]
    use core::ffi::c_int;

    crate::real! {
        fn getppid() -> c_int;
        fn no_function_of_libc_has_this_name(argument: c_int) -> c_int;
    }

    #[test]
    fn functions_are_found_by_name() {
        // SAFETY: the function takes nothing and cannot fail.
        assert_eq!(unsafe { getppid() } as u32, std::os::unix::process::parent_id());
    }

    #[test]
    fn missing_functions_fail_with_enosys() {
        // SAFETY: a missing function ignores its arguments.
        assert_eq!(unsafe { no_function_of_libc_has_this_name(7) }, -1);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ENOSYS));
    }
}
