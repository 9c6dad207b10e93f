//! Intercepts the libc functions that packetdrill calls outside of the interface: `getsockopt` (the code in a
//! script reads `TCP_INFO` by it), `sendfile`, and `close` (for descriptors that a script leaves open). The
//! kernel has no socket for the stack's descriptors. These calls are redirected by changing the program's
//! references to the three functions ([`got`]).
#![allow(unsafe_code)] // functions that C calls, and functions by name

use crate::got;
use crate::instance::Instance;
use crate::session::Session;
use core::ffi::{CStr, c_char, c_int, c_void};
use ginnel_posix_ops::ffi::{self, IntoC};
use libc::{off_t, size_t, socklen_t, ssize_t};
use rustix::io::Errno;
use std::sync::{Once, PoisonError, RwLock};

/// All sessions, from `packetdrill_interface_init` to `free`.
static SESSIONS: RwLock<Vec<SessionPtr>> = RwLock::new(Vec::new());

struct SessionPtr(*const Session);

// SAFETY: any thread may use the session, which exists until it has been removed from the list.
unsafe impl Send for SessionPtr {}
// SAFETY: as above.
unsafe impl Sync for SessionPtr {}

/// Registers a session. From now on, calls on its descriptors are intercepted.
pub fn register(session: &Session) {
    static INSTALL_HOOKS: Once = Once::new();
    INSTALL_HOOKS.call_once(|| {
        let replacement = |name: &CStr| -> Option<*mut c_void> {
            match name.to_bytes() {
                b"getsockopt" => Some(getsockopt as *mut c_void),
                b"sendfile" | b"sendfile64" => Some(sendfile as *mut c_void),
                b"close" => Some(close as *mut c_void),
                _ => None,
            }
        };
        pin_library();
        got::replace(&replacement);
    });
    SESSIONS.write().unwrap_or_else(PoisonError::into_inner).push(SessionPtr(session));
}

/// Removes a session.
pub fn unregister(session: &Session) {
    let mut sessions = SESSIONS.write().unwrap_or_else(PoisonError::into_inner);
    sessions.retain(|entry| !core::ptr::eq(entry.0, session));
}

/// Prevents the library from being unloaded, because the program refers to its functions.
fn pin_library() {
    // SAFETY: all-zero bytes are a valid `Dl_info`; the function belongs to this library.
    let mut info: libc::Dl_info = unsafe { core::mem::zeroed() };
    // SAFETY: `info` is writable, and the file name that it returns is a string of the dynamic loader.
    unsafe {
        if libc::dladdr(close as *const c_void, &raw mut info) != 0 {
            libc::dlopen(info.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE);
        }
    }
}

/// Returns the instance that owns a descriptor.
fn owner(fd: c_int) -> Option<&'static Instance> {
    let sessions = SESSIONS.read().unwrap_or_else(PoisonError::into_inner);
    let mut instances = sessions.iter().filter_map(|entry| {
        // SAFETY: the session is in the list; and no function, including these, may run during `free`.
        unsafe { &*entry.0 }.used_instance()
    });
    instances.find(|instance| instance.ops.owns(fd))
}

/// Returns the address of libc's function `name`.
fn libc_function(name: &CStr) -> *mut c_void {
    // SAFETY: the name is a C string.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr().cast::<c_char>()) }
}

unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    type Function = unsafe extern "C" fn(c_int, c_int, c_int, *mut c_void, *mut socklen_t) -> c_int;
    let Some(instance) = owner(fd) else {
        // SAFETY: libc's function of this name has this type, and gets the caller's arguments.
        return unsafe {
            core::mem::transmute::<*mut c_void, Function>(libc_function(c"getsockopt"))(
                fd, level, name, value, len,
            )
        };
    };
    // SAFETY: the buffer has the length that the caller states.
    unsafe {
        ffi::write_option(value, len, |space| match space {
            Some(space) => instance.ops.getsockopt(fd, level, name, space),
            None => instance.ops.getsockopt_without_length(fd, level, name),
        })
    }
    .into_c()
}

unsafe extern "C" fn sendfile(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t {
    type Function = unsafe extern "C" fn(c_int, c_int, *mut off_t, size_t) -> ssize_t;
    let Some(instance) = owner(to) else {
        // SAFETY: libc's function of this name has this type, and gets the caller's arguments.
        return unsafe {
            core::mem::transmute::<*mut c_void, Function>(libc_function(c"sendfile"))(to, from, offset, count)
        };
    };
    // SAFETY: null or writable, by the caller's promise.
    let offset = unsafe { offset.as_mut() };
    instance.settle(instance.ops.sendfile(to, from, offset, count)).into_c()
}

unsafe extern "C" fn close(fd: c_int) -> c_int {
    type Function = unsafe extern "C" fn(c_int) -> c_int;
    let Some(instance) = owner(fd) else {
        // SAFETY: libc's function of this name has this type.
        return unsafe { core::mem::transmute::<*mut c_void, Function>(libc_function(c"close"))(fd) };
    };
    let closed: Result<(), Errno> = instance.settle(instance.ops.close(fd));
    closed.into_c()
}
