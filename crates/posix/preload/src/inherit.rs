//! What a program leaves to the next one: the way to the stack in the environment, and its sockets (docs/adr/0012-holders-and-placeholders.md).
//!
//! The environment that a program gives another is completed: the next program is preloaded and finds the stack as this one did, also if a program like nginx hands on only the variables it
//! knows. A program that is to have the kernel's network instead is started with `ginnel run --stack kernel`.
#![allow(unsafe_code)] // arrays of C

use crate::attach;
use core::ffi::{CStr, c_char};
use core::sync::atomic::{AtomicPtr, Ordering};
use ginnel_posix_ops::{ExecGuard, Inheritance};
use rustix::fd::RawFd;
use rustix::io::Errno;
use std::ffi::CString;

/// Two numbers of descriptors, which the program before left open.
pub const INHERITED_SOCKETS_VARIABLE: &str = "GINNEL_HEIR";
/// The number of a descriptor that leads in, which the program before left open.
pub const INHERITED_CONNECTION_VARIABLE: &str = "GINNEL_FOLLOWS";
const PRELOAD_VARIABLE: &str = "LD_PRELOAD";

/// What the environment said when this program began.
struct OwnEnvironment {
    /// The library itself.
    library: String,
    /// Name and value of what it reads.
    variables: Vec<(&'static str, String)>,
}

static OWN_ENVIRONMENT: AtomicPtr<OwnEnvironment> = AtomicPtr::new(core::ptr::null_mut());

/// Remembers what has to be handed on. To be called once, before `main`.
pub fn save_environment() {
    let variables =
        attach::VARIABLES.into_iter().filter_map(|name| Some((name, std::env::var(name).ok()?))).collect();
    let preload = std::env::var(PRELOAD_VARIABLE).unwrap_or_default();
    let library = preload.split([':', ' ']).find(|path| path.rsplit('/').next() == Some(attach::LIBRARY));
    let ours = OwnEnvironment { library: library.unwrap_or_default().into(), variables };
    OWN_ENVIRONMENT.store(Box::into_raw(Box::new(ours)), Ordering::Release);
}

/// The environment of the next program.
pub struct Environment {
    // What the pointers point to.
    _added: Vec<CString>,
    pointers: Vec<*mut c_char>,
}

impl Environment {
    /// As C has it.
    pub fn as_ptr(&self) -> *const *mut c_char {
        self.pointers.as_ptr()
    }
}

/// What the stack was called when this program began.
pub fn stack() -> Option<&'static str> {
    // SAFETY: set once, and never taken back.
    let ours = unsafe { OWN_ENVIRONMENT.load(Ordering::Acquire).as_ref() }?;
    ours.variables.iter().find(|(name, _)| *name == attach::STACK_VARIABLE).map(|(_, value)| value.as_str())
}

/// Completes an environment. `left`: a variable that is this library's word to the next program.
///
/// # Safety
/// It is null or an array of strings that ends with null; they live as long as the result is used.
pub unsafe fn complete_environment(
    environment: *const *mut c_char,
    left: Option<(&str, String)>,
) -> Environment {
    // SAFETY: set once, and never taken back.
    let ours = unsafe { OWN_ENVIRONMENT.load(Ordering::Acquire).as_ref() };
    let (mut pointers, mut added) = (Vec::new(), Vec::new());
    let mut preload = None;
    let mut known: Vec<&str> = Vec::new();
    let mut at = environment;
    // SAFETY: the array ends with null, and null is no array.
    while let Some(&entry) = unsafe { at.as_ref() }
        && !entry.is_null()
    {
        // SAFETY: a string of the array, which lives long enough.
        let text = unsafe { CStr::from_ptr(entry) }.to_bytes();
        let name = text.split(|byte| *byte == b'=').next().unwrap_or_default();
        let own = attach::VARIABLES.iter().find(|own| own.as_bytes() == name);
        if name == PRELOAD_VARIABLE.as_bytes() {
            preload = Some(text);
        } else if name != INHERITED_SOCKETS_VARIABLE.as_bytes()
            && name != INHERITED_CONNECTION_VARIABLE.as_bytes()
        {
            known.extend(own);
            pointers.push(entry);
        }
        // SAFETY: this was not the last.
        at = unsafe { at.add(1) };
    }
    let mut add = |text: Vec<u8>| {
        // A string of C has no zeros inside, and what it is made of are such strings.
        if let Ok(text) = CString::new(text) {
            pointers.push(text.as_ptr().cast_mut());
            added.push(text);
        }
    };
    match (ours.filter(|ours| !ours.library.is_empty()), preload) {
        (None, Some(text)) => add(text.into()),
        (None, None) => {}
        (Some(ours), preload) => {
            let others = preload.map_or(&b""[..], |text| &text[PRELOAD_VARIABLE.len() + 1..]);
            let has = others.split(|b| b": ".contains(b)).any(|path| path == ours.library.as_bytes());
            let parts = [ours.library.as_bytes(), others];
            let parts = parts.into_iter().skip(usize::from(has)).filter(|part| !part.is_empty());
            let all: Vec<&[u8]> = parts.collect();
            add([PRELOAD_VARIABLE.as_bytes(), b"=", &all.join(&b':')].concat());
        }
    }
    for (name, value) in ours.iter().flat_map(|ours| &ours.variables) {
        if !known.contains(name) {
            add(format!("{name}={value}").into());
        }
    }
    if let Some((name, value)) = left {
        add(format!("{name}={value}").into());
    }
    pointers.push(core::ptr::null_mut());
    Environment { _added: added, pointers }
}

/// Leaves the next program the sockets of these descriptors (the numbers there and here), if there are any. Without an heir it finds none: that the stack has no room for it is
/// told, and no reason not to run it.
pub fn leave_sockets(
    execing: &mut ExecGuard<'_>,
    kept: &[(RawFd, RawFd)],
) -> Option<(Inheritance, [RawFd; 2])> {
    if kept.is_empty() {
        return None;
    }
    let heir = execing.prepare_inheritance(kept).and_then(|heir| heir.clear_cloexec().map(|fds| (heir, fds)));
    match heir {
        Ok(heir) => Some(heir),
        Err(error) => {
            warn_sockets_lost(kept, error);
            None
        }
    }
}

/// The next program finds none of these sockets, if there are any.
pub fn warn_sockets_lost(kept: &[(RawFd, RawFd)], error: Errno) {
    if !kept.is_empty() {
        attach::write_stderr(&[
            "ginnel: the next program finds none of this one's sockets: ",
            &error.to_string(),
        ]);
    }
}
