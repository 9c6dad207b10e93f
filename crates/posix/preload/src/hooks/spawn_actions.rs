//! Records of file actions of `posix_spawn`. libc's lists are opaque, so the library keeps its own record of
//! what happens to descriptors.
#![allow(unsafe_code)] // functions that C calls

use crate::real;
use core::ffi::{c_char, c_int, c_void};
use libc::mode_t;
use rustix::fd::RawFd;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A file action.
#[derive(Clone, Copy)]
enum FileAction {
    /// The descriptor is closed, or replaced by a file.
    Close(RawFd),
    /// The first descriptor is duplicated to the second.
    Dup2(RawFd, RawFd),
    /// All descriptors from some number on are closed, and with them the connection to the stack.
    CloseFrom,
}

/// File actions by the address of the program's list.
static LISTS: Mutex<BTreeMap<usize, Vec<FileAction>>> = Mutex::new(BTreeMap::new());

fn lists() -> MutexGuard<'static, BTreeMap<usize, Vec<FileAction>>> {
    // A list is consistent after each change.
    LISTS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn record(list: *const c_void, result: c_int, action: FileAction) -> c_int {
    if result == 0 {
        lists().entry(list.addr()).or_default().push(action);
    }
    result
}

/// Returns the stack's descriptors that a program spawned with this list keeps, as pairs of the number in the
/// new program and the number in this process. `inherited` are those that are not close-on-exec.
pub fn surviving_fds(
    list: *const c_void,
    inherited: Vec<RawFd>,
    is_stack_fd: impl Fn(RawFd) -> bool,
) -> Vec<(RawFd, RawFd)> {
    let mut surviving: BTreeMap<RawFd, RawFd> = inherited.into_iter().map(|fd| (fd, fd)).collect();
    let lists = lists();
    for action in lists.get(&list.addr()).into_iter().flatten() {
        match *action {
            FileAction::Close(fd) => {
                surviving.remove(&fd);
            }
            // Also if the original is close-on-exec: the duplicate is not.
            FileAction::Dup2(from, to) => {
                match surviving.get(&from).copied().or_else(|| is_stack_fd(from).then_some(from)) {
                    Some(local) => {
                        surviving.insert(to, local);
                    }
                    None => {
                        surviving.remove(&to);
                    }
                }
            }
            FileAction::CloseFrom => surviving.clear(),
        }
    }
    surviving.into_iter().collect()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawn_file_actions_init(list: *mut c_void) -> c_int {
    lists().remove(&list.addr());
    // SAFETY: the program's arguments, unchanged.
    unsafe { real::posix_spawn_file_actions_init(list) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawn_file_actions_destroy(list: *mut c_void) -> c_int {
    lists().remove(&list.addr());
    // SAFETY: the program's arguments, unchanged.
    unsafe { real::posix_spawn_file_actions_destroy(list) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawn_file_actions_addclose(list: *mut c_void, fd: c_int) -> c_int {
    // SAFETY: the program's arguments, unchanged.
    record(list, unsafe { real::posix_spawn_file_actions_addclose(list, fd) }, FileAction::Close(fd))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawn_file_actions_adddup2(list: *mut c_void, from: c_int, to: c_int) -> c_int {
    // SAFETY: the program's arguments, unchanged.
    record(
        list,
        unsafe { real::posix_spawn_file_actions_adddup2(list, from, to) },
        FileAction::Dup2(from, to),
    )
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawn_file_actions_addopen(
    list: *mut c_void,
    fd: c_int,
    path: *const c_char,
    flags: c_int,
    mode: mode_t,
) -> c_int {
    // SAFETY: the program's arguments, unchanged.
    let result = unsafe { real::posix_spawn_file_actions_addopen(list, fd, path, flags, mode) };
    record(list, result, FileAction::Close(fd))
}

/// Closes the library's internal descriptors, too, which normally have higher numbers. The new program
/// inherits no sockets, as the caller requested.
#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawn_file_actions_addclosefrom_np(list: *mut c_void, first: c_int) -> c_int {
    // SAFETY: the program's arguments, unchanged.
    let result = unsafe { real::posix_spawn_file_actions_addclosefrom_np(list, first) };
    record(list, result, FileAction::CloseFrom)
}
