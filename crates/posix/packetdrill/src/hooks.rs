//! What packetdrill asks libc for, past the interface: `TCP_INFO` for a script's code, `sendfile`, and `close` of what a script leaves open. Its descriptors are numbers of the kernel's
//! behind which the kernel has no socket, so these calls are answered here: the program's own references to the three functions lead to this library ([`slots`]).
#![allow(unsafe_code)] // functions that C calls, and functions by name

use crate::calls::ToC;
use crate::got;
use crate::instance::Instance;
use crate::memory;
use crate::session::Session;
use core::ffi::{CStr, c_char, c_int, c_void};
use libc::{off_t, size_t, socklen_t, ssize_t};
use rustix::io::Errno;
use std::sync::{Once, PoisonError, RwLock};

/// Where instances are, from `packetdrill_interface_init` to `free`.
static SESSIONS: RwLock<Vec<SessionPtr>> = RwLock::new(Vec::new());

struct SessionPtr(*const Session);

// SAFETY: what it points to may be used by any thread, and is there until it has left the list.
unsafe impl Send for SessionPtr {}
// SAFETY: the same.
unsafe impl Sync for SessionPtr {}

/// An instance begins: its descriptors are answered for from now on.
pub fn register(place: &Session) {
    static LED_HERE: Once = Once::new();
    LED_HERE.call_once(|| {
        let ours = |name: &CStr| -> Option<*mut c_void> {
            match name.to_bytes() {
                b"getsockopt" => Some(getsockopt as *mut c_void),
                b"sendfile" | b"sendfile64" => Some(sendfile as *mut c_void),
                b"close" => Some(close as *mut c_void),
                _ => None,
            }
        };
        pin_library();
        got::replace(&ours);
    });
    SESSIONS.write().unwrap_or_else(PoisonError::into_inner).push(SessionPtr(place));
}

/// It ends.
pub fn unregister(place: &Session) {
    let mut places = SESSIONS.write().unwrap_or_else(PoisonError::into_inner);
    places.retain(|entered| !core::ptr::eq(entered.0, place));
}

/// The library is never unloaded from now on: the program refers to it.
fn pin_library() {
    // SAFETY: all zeros are no information; the function is one of this library.
    let mut info: libc::Dl_info = unsafe { core::mem::zeroed() };
    // SAFETY: the place is writable, and the name that comes back is a string of the loader's.
    unsafe {
        if libc::dladdr(close as *const c_void, &raw mut info) != 0 {
            libc::dlopen(info.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE);
        }
    }
}

/// The instance whose socket it is.
fn owner(fd: c_int) -> Option<&'static Instance> {
    let places = SESSIONS.read().unwrap_or_else(PoisonError::into_inner);
    let mut stacks = places.iter().filter_map(|entered| {
        // SAFETY: it has not left the list; and no function, so none of these either, may run while `free` does.
        unsafe { &*entered.0 }.used_instance()
    });
    stacks.find(|instance| instance.ops.owns(fd))
}

/// libc's function of this name.
fn libc_function(name: &CStr) -> *mut c_void {
    // SAFETY: the name is a string.
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
        // SAFETY: libc's function of this name has this type, and gets what the caller gave.
        return unsafe {
            core::mem::transmute::<*mut c_void, Function>(libc_function(c"getsockopt"))(
                fd, level, name, value, len,
            )
        };
    };
    // SAFETY: there is as much room as told.
    unsafe { memory::write_option(value, len, |room| instance.ops.getsockopt(fd, level, name, room)) }.to_c()
}

unsafe extern "C" fn sendfile(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t {
    type Function = unsafe extern "C" fn(c_int, c_int, *mut off_t, size_t) -> ssize_t;
    let Some(instance) = owner(to) else {
        // SAFETY: libc's function of this name has this type, and gets what the caller gave.
        return unsafe {
            core::mem::transmute::<*mut c_void, Function>(libc_function(c"sendfile"))(to, from, offset, count)
        };
    };
    // SAFETY: null or writable, by the caller's promise.
    let offset = unsafe { offset.as_mut() };
    instance.settle(instance.ops.sendfile(to, from, offset, count)).to_c()
}

unsafe extern "C" fn close(fd: c_int) -> c_int {
    type Function = unsafe extern "C" fn(c_int) -> c_int;
    let Some(instance) = owner(fd) else {
        // SAFETY: libc's function of this name has this type.
        return unsafe { core::mem::transmute::<*mut c_void, Function>(libc_function(c"close"))(fd) };
    };
    let closed: Result<(), Errno> = instance.settle(instance.ops.close(fd));
    closed.to_c()
}
