//! What happens to descriptors between `posix_spawn` and the program that it starts. libc keeps the list to itself, so it is written down here, too.
#![allow(unsafe_code)] // functions that C calls

use crate::real;
use core::ffi::{c_char, c_int, c_void};
use libc::mode_t;
use rustix::fd::RawFd;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One step.
#[derive(Clone, Copy)]
enum FileAction {
    /// This one is closed, or something of the kernel's opened there.
    Close(RawFd),
    /// The first becomes the second.
    Dup2(RawFd, RawFd),
    /// All from some number on are closed, and with them the way to the stack.
    CloseFrom,
}

/// By the address of the program's list.
static LISTS: Mutex<BTreeMap<usize, Vec<FileAction>>> = Mutex::new(BTreeMap::new());

fn lists() -> MutexGuard<'static, BTreeMap<usize, Vec<FileAction>>> {
    // A list is whole after each step.
    LISTS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn record(list: *const c_void, result: c_int, action: FileAction) -> c_int {
    if result == 0 {
        lists().entry(list.addr()).or_default().push(action);
    }
    result
}

/// What of ours a program keeps that is started with this list: the numbers there and here. `inherited` are those without close-on-exec.
pub fn surviving_fds(
    list: *const c_void,
    inherited: Vec<RawFd>,
    ours: impl Fn(RawFd) -> bool,
) -> Vec<(RawFd, RawFd)> {
    let mut there: BTreeMap<RawFd, RawFd> = inherited.into_iter().map(|fd| (fd, fd)).collect();
    let lists = lists();
    for action in lists.get(&list.addr()).into_iter().flatten() {
        match *action {
            FileAction::Close(fd) => {
                there.remove(&fd);
            }
            // Also of one that would be closed: its copy is not.
            FileAction::Dup2(from, to) => {
                match there.get(&from).copied().or_else(|| ours(from).then_some(from)) {
                    Some(here) => {
                        there.insert(to, here);
                    }
                    None => {
                        there.remove(&to);
                    }
                }
            }
            FileAction::CloseFrom => there.clear(),
        }
    }
    there.into_iter().collect()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawn_file_actions_init(list: *mut c_void) -> c_int {
    lists().remove(&list.addr());
    // SAFETY: passed on as it came.
    unsafe { real::posix_spawn_file_actions_init(list) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawn_file_actions_destroy(list: *mut c_void) -> c_int {
    lists().remove(&list.addr());
    // SAFETY: passed on as it came.
    unsafe { real::posix_spawn_file_actions_destroy(list) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawn_file_actions_addclose(list: *mut c_void, fd: c_int) -> c_int {
    // SAFETY: passed on as it came.
    record(list, unsafe { real::posix_spawn_file_actions_addclose(list, fd) }, FileAction::Close(fd))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawn_file_actions_adddup2(list: *mut c_void, from: c_int, to: c_int) -> c_int {
    // SAFETY: passed on as it came.
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
    // SAFETY: passed on as it came.
    let result = unsafe { real::posix_spawn_file_actions_addopen(list, fd, path, flags, mode) };
    record(list, result, FileAction::Close(fd))
}

/// All of the library's own are beyond it, as a rule, and closed with the others: such a program finds none of our sockets, which it asked for.
#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawn_file_actions_addclosefrom_np(list: *mut c_void, first: c_int) -> c_int {
    // SAFETY: passed on as it came.
    let result = unsafe { real::posix_spawn_file_actions_addclosefrom_np(list, first) };
    record(list, result, FileAction::CloseFrom)
}
