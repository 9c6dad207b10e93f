//! Processes: what std would do in its own way.
//!
//! `unsafe`: fork, exec, posix_spawn, and descriptors by number.
#![allow(unsafe_code)]

use rustix::fd::{FromRawFd, OwnedFd, RawFd};
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, getpid, kill_process, pidfd_open, waitpid};
use std::ffi::CString;
use std::io;
use std::ptr;

/// A descriptor of which only the number was handed down.
pub fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: the program before this one kept it open for this one, which takes it once.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

pub fn own_pidfd() -> io::Result<OwnedFd> {
    Ok(pidfd_open(getpid(), PidfdFlags::empty())?)
}

/// fork(2): `None` in the child.
pub fn fork() -> io::Result<Option<u32>> {
    // SAFETY: the prototype has one thread.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        child => Ok(Some(child as u32)),
    }
}

fn strings(texts: impl Iterator<Item = String>) -> Vec<CString> {
    texts.map(|text| CString::new(text).expect("no zero byte")).collect()
}

fn pointers(strings: &[CString]) -> Vec<*mut libc::c_char> {
    strings.iter().map(|s| s.as_ptr().cast_mut()).chain([ptr::null_mut()]).collect()
}

fn program_of(
    program: &str,
    arguments: &[&str],
    variable: (&str, &str),
) -> (CString, Vec<CString>, Vec<CString>) {
    let others = std::env::vars().filter(|(name, _)| name != variable.0).map(|(n, v)| format!("{n}={v}"));
    let environment = strings(others.chain([format!("{}={}", variable.0, variable.1)]));
    let arguments = strings([program].iter().chain(arguments).map(|a| (*a).to_string()));
    (CString::new(program).expect("no zero byte"), arguments, environment)
}

/// execve(2): returns why it failed.
pub fn exec(program: &str, arguments: &[&str], variable: (&str, &str)) -> io::Error {
    let (path, arguments, environment) = program_of(program, arguments, variable);
    let (arguments, environment) = (pointers(&arguments), pointers(&environment));
    // SAFETY: lists of strings that end with a null pointer.
    unsafe { libc::execve(path.as_ptr(), arguments.as_ptr().cast(), environment.as_ptr().cast()) };
    io::Error::last_os_error()
}

/// posix_spawn(3).
pub fn spawn(program: &str, arguments: &[&str], variable: (&str, &str)) -> io::Result<u32> {
    let (path, arguments, environment) = program_of(program, arguments, variable);
    let (arguments, environment) = (pointers(&arguments), pointers(&environment));
    let mut child = 0;
    // SAFETY: as for exec; no actions and no attributes.
    let error = unsafe {
        libc::posix_spawn(
            &mut child,
            path.as_ptr(),
            ptr::null(),
            ptr::null(),
            arguments.as_ptr(),
            environment.as_ptr(),
        )
    };
    if error == 0 { Ok(child as u32) } else { Err(io::Error::from_raw_os_error(error)) }
}

/// What vfork(2) does: a child that has the memory of this process, which stands still until the child is another program. Before that it closes a descriptor of its own.
pub fn vfork(unwanted: RawFd, program: &str, arguments: &[&str], variable: (&str, &str)) -> io::Result<u32> {
    struct Next {
        unwanted: RawFd,
        path: CString,
        arguments: Vec<*mut libc::c_char>,
        environment: Vec<*mut libc::c_char>,
    }
    extern "C" fn child(next: *mut libc::c_void) -> libc::c_int {
        // SAFETY: what vfork hands over, whose frame stands still. Nothing here allocates or comes back.
        unsafe {
            let next = &*next.cast::<Next>();
            libc::close(next.unwanted);
            libc::execve(
                next.path.as_ptr(),
                next.arguments.as_ptr().cast(),
                next.environment.as_ptr().cast(),
            );
            libc::_exit(127)
        }
    }
    let (path, arguments, environment) = program_of(program, arguments, variable);
    let (arguments, environment) = (pointers(&arguments), pointers(&environment));
    let mut next = Next { unwanted, path, arguments, environment };
    // Of 16 bytes each, as a stack is aligned.
    let mut stack = vec![0u128; 4096];
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the stack grows downwards from its end; it and `next` are there until the child is another program or gone, for which CLONE_VFORK waits.
    let child = unsafe {
        libc::clone(child, stack.as_mut_ptr_range().end.cast(), flags, (&raw mut next).cast::<libc::c_void>())
    };
    if child > 0 { Ok(child as u32) } else { Err(io::Error::last_os_error()) }
}

fn pid(process: u32) -> Pid {
    Pid::from_raw(process as i32).expect("a child has a number")
}

/// Ends a child of this process, which may have ended.
pub fn signal(process: u32, signal: Signal) {
    _ = kill_process(pid(process), signal);
}

/// Exit status of a child; -1 if a signal ended it.
pub fn wait(process: u32) -> io::Result<i32> {
    let status = waitpid(Some(pid(process)), WaitOptions::empty())?;
    Ok(status.and_then(|(_, s)| s.exit_status()).unwrap_or(-1))
}

/// SIGKILL to this process: nothing of it runs after that.
pub fn die() -> ! {
    signal(getpid().as_raw_nonzero().get() as u32, Signal::KILL);
    unreachable!("killed")
}

/// Ends a child of a scenario without what std does at the end of a program.
pub fn exit(status: i32) -> ! {
    // SAFETY: no argument that could be wrong.
    unsafe { libc::_exit(status) }
}
