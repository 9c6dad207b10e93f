//! Passes the stack and sockets on to the program that `exec` starts next, by variables of its environment
//! and by descriptors (docs/adr/0012-owners-and-proxy-descriptors.md).
//!
//! The library completes the environment that a program passes on, so that the next program is preloaded and
//! finds the stack, too, even if a program like nginx passes on only the variables that it knows. `ginnel run
//! --stack kernel` starts a program with the kernel's network instead.
#![allow(unsafe_code)] // arrays of C

use crate::attach;
use core::ffi::{CStr, c_char};
use core::sync::atomic::{AtomicPtr, Ordering};
use ginnel_posix_ops::{ExecGuard, Inheritance, write_line};
use rustix::fd::RawFd;
use std::ffi::CString;

/// Numbers of the two descriptors that the previous program has left for its sockets, joined by a colon.
pub const INHERITED_SOCKETS_VARIABLE: &str = "GINNEL_INHERITED_SOCKETS";
/// Number of the control connection that the previous program has left.
pub const INHERITED_CONNECTION_VARIABLE: &str = "GINNEL_INHERITED_CONNECTION";
const PRELOAD_VARIABLE: &str = "LD_PRELOAD";

/// Parts of the environment when this program began.
struct OwnEnvironment {
    /// Path of the library.
    library: String,
    /// Names and values of the variables that it reads.
    variables: Vec<(&'static str, String)>,
}

static OWN_ENVIRONMENT: AtomicPtr<OwnEnvironment> = AtomicPtr::new(core::ptr::null_mut());

/// Saves the variables that must be passed on. Must be called once, before `main`.
pub fn save_environment() {
    let variables =
        attach::VARIABLES.into_iter().filter_map(|name| Some((name, std::env::var(name).ok()?))).collect();
    let preload = std::env::var(PRELOAD_VARIABLE).unwrap_or_default();
    let library = preload.split([':', ' ']).find(|path| path.rsplit('/').next() == Some(attach::LIBRARY));
    let own = OwnEnvironment { library: library.unwrap_or_default().into(), variables };
    OWN_ENVIRONMENT.store(Box::into_raw(Box::new(own)), Ordering::Release);
}

/// The environment of the next program.
pub struct Environment {
    // Owns the strings that were added.
    _added: Vec<CString>,
    pointers: Vec<*mut c_char>,
}

impl Environment {
    /// Returns the environment as an array of C strings.
    pub fn as_ptr(&self) -> *const *mut c_char {
        self.pointers.as_ptr()
    }
}

/// Returns the value of `GINNEL_STACK` when this program began: the path of a control socket, or `fd:N`.
pub fn stack() -> Option<&'static str> {
    // SAFETY: set once, and never freed.
    let own = unsafe { OWN_ENVIRONMENT.load(Ordering::Acquire).as_ref() }?;
    own.variables.iter().find(|(name, _)| *name == attach::STACK_VARIABLE).map(|(_, value)| value.as_str())
}

/// Completes an environment with the library and its variables. `variable` is a further one, with its name
/// and value.
///
/// # Safety
/// `environment` must be null or a null-terminated array of C strings, which must live as long as the result
/// is used.
pub unsafe fn complete_environment(
    environment: *const *mut c_char,
    variable: Option<(&str, String)>,
) -> Environment {
    // SAFETY: set once, and never freed.
    let own = unsafe { OWN_ENVIRONMENT.load(Ordering::Acquire).as_ref() };
    let (mut pointers, mut added) = (Vec::new(), Vec::new());
    let mut preload = None;
    let mut known: Vec<&str> = Vec::new();
    let mut at = environment;
    // SAFETY: the array is null-terminated, and a null pointer is no array.
    while let Some(&entry) = unsafe { at.as_ref() }
        && !entry.is_null()
    {
        // SAFETY: a string of the array, which lives long enough.
        let text = unsafe { CStr::from_ptr(entry) }.to_bytes();
        // An entry without `=` is no variable: libc and the loader ignore the entry.
        let name = text.iter().position(|byte| *byte == b'=').map_or(&b""[..], |end| &text[..end]);
        let own = attach::VARIABLES.iter().find(|own| own.as_bytes() == name);
        if name == PRELOAD_VARIABLE.as_bytes() {
            preload = Some(text);
        } else if name != INHERITED_SOCKETS_VARIABLE.as_bytes()
            && name != INHERITED_CONNECTION_VARIABLE.as_bytes()
        {
            known.extend(own);
            pointers.push(entry);
        }
        // SAFETY: this was not the terminator.
        at = unsafe { at.add(1) };
    }
    let mut add = |text: Vec<u8>| {
        // The parts are C strings, which contain no zeros.
        if let Ok(text) = CString::new(text) {
            pointers.push(text.as_ptr().cast_mut());
            added.push(text);
        }
    };
    match (own.filter(|own| !own.library.is_empty()), preload) {
        (None, Some(text)) => add(text.into()),
        (None, None) => {}
        (Some(own), preload) => {
            let other_libraries = preload.map_or(&b""[..], |text| &text[PRELOAD_VARIABLE.len() + 1..]);
            let is_listed =
                other_libraries.split(|b| b": ".contains(b)).any(|path| path == own.library.as_bytes());
            let parts = [own.library.as_bytes(), other_libraries];
            let parts = parts.into_iter().skip(usize::from(is_listed)).filter(|part| !part.is_empty());
            let all: Vec<&[u8]> = parts.collect();
            add([PRELOAD_VARIABLE.as_bytes(), b"=", &all.join(&b':')].concat());
        }
    }
    for (name, value) in own.iter().flat_map(|own| &own.variables) {
        if !known.contains(name) {
            add(format!("{name}={value}").into());
        }
    }
    if let Some((name, value)) = variable {
        add(format!("{name}={value}").into());
    }
    pointers.push(core::ptr::null_mut());
    Environment { _added: added, pointers }
}

/// Prepares that the next program inherits the sockets of these descriptors: pairs of the number in the next
/// program and the number in this process. Returns the inheritance and the numbers of its two descriptors. If
/// the stack has no room for the next program, prints a warning and returns `None`; the program then runs
/// without the sockets.
pub fn leave_sockets(
    exec_guard: &mut ExecGuard<'_>,
    fds_to_keep: &[(RawFd, RawFd)],
) -> Option<(Inheritance, [RawFd; 2])> {
    if fds_to_keep.is_empty() {
        return None;
    }
    let inheritance = exec_guard
        .prepare_inheritance(fds_to_keep)
        .map_err(|error| error.to_string())
        .and_then(|inheritance| match inheritance.clear_cloexec() {
            Ok(fds) => Ok((inheritance, fds)),
            Err(errno) => Err(errno.to_string()),
        });
    match inheritance {
        Ok(inheritance) => Some(inheritance),
        Err(cause) => {
            warn_sockets_lost(fds_to_keep, &cause);
            None
        }
    }
}

/// Warns that the next program does not find these sockets, if there are any.
pub fn warn_sockets_lost(fds_to_keep: &[(RawFd, RawFd)], cause: &str) {
    if !fds_to_keep.is_empty() {
        write_line(&format!("ginnel: the next program inherits none of this program's sockets: {cause}\n"));
    }
}
