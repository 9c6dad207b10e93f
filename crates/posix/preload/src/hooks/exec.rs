//! Programs that become others, and start others: these find the stack, and the sockets that are not close-on-exec.
#![allow(unsafe_code)] // functions that C calls, and such with any number of arguments

use super::spawn_actions;
use crate::heritage::{self, Environment};
use crate::{attach, real};
use core::ffi::{c_char, c_int, c_short, c_void};
use core::mem::zeroed;
use core::ptr;
use ginnel_posix_ops::{Execing, Heir, Ops, Whole};
use libc::{pid_t, posix_spawnattr_t};
use runtime::own_fd::OwnFd;
use rustix::fd::AsRawFd;

unsafe extern "C" {
    static environ: *const *mut c_char;
}

/// What a program that takes this one's place is given. Dropped if it does not: then nothing has happened.
struct Successor(Whole<Gift>);

struct Gift {
    environment: Environment,
    _way: Option<OwnFd>,
    _heir: Option<Heir>,
    execing: Option<Execing<'static>>,
}

impl Successor {
    /// # Safety
    /// As of [`heritage::complete`].
    unsafe fn new(envp: *const *mut c_char) -> Self {
        let same = |ops: &Ops| ops.inheritable().into_iter().map(|fd| (fd, fd)).collect();
        // SAFETY: the caller's promise.
        let next = unsafe { Self::with(envp, same) };
        if let Some(execing) = &next.0.execing {
            execing.is_prepared();
        }
        next
    }

    /// It keeps the sockets of these descriptors, the numbers there and here.
    ///
    /// # Safety
    /// As of [`heritage::complete`].
    unsafe fn with(envp: *const *mut c_char, kept: impl FnOnce(&Ops) -> Vec<(c_int, c_int)>) -> Self {
        // SAFETY: the caller's promise.
        Self(Whole::new(|| unsafe { Gift::of(envp, kept) }))
    }

    fn environment(&self) -> Strings {
        self.0.environment.as_ptr()
    }
}

impl Gift {
    /// # Safety
    /// As of [`heritage::complete`].
    unsafe fn of(envp: *const *mut c_char, kept: impl FnOnce(&Ops) -> Vec<(c_int, c_int)>) -> Self {
        let (mut heir, mut fds, mut execing) = (None, None, None);
        if let Some(ops) = attach::ops() {
            let kept = kept(ops);
            match ops.before_exec() {
                Ok(begun) => (heir, fds) = heritage::leave(execing.insert(begun), &kept).unzip(),
                Err(error) => heritage::say_that_none_are_left(&kept, error),
            }
        }
        // Who is left sockets comes with them.
        let way = if heir.is_none() { attach::leave_way(execing.as_ref()) } else { None };
        let left = match (&way, fds) {
            (Some(way), _) => Some((heritage::FOLLOWS, way.as_raw_fd().to_string())),
            (None, Some([line, table])) => Some((heritage::HEIR, format!("{line}:{table}"))),
            (None, None) => None,
        };
        // SAFETY: the caller's promise.
        let environment = unsafe { heritage::complete(envp, left) };
        Self { environment, _way: way, _heir: heir, execing }
    }
}

type Strings = *const *mut c_char;

#[unsafe(no_mangle)]
unsafe extern "C" fn execve(path: *const c_char, argv: Strings, envp: Strings) -> c_int {
    // SAFETY: the program's arrays are as C wants them.
    unsafe {
        let next = Successor::new(envp);
        real::execve(path, argv, next.environment())
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execv(path: *const c_char, argv: Strings) -> c_int {
    // SAFETY: passed on with the program's environment.
    unsafe { execve(path, argv, environ) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execvpe(file: *const c_char, argv: Strings, envp: Strings) -> c_int {
    // SAFETY: the program's arrays are as C wants them.
    unsafe {
        let next = Successor::new(envp);
        real::execvpe(file, argv, next.environment())
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execvp(file: *const c_char, argv: Strings) -> c_int {
    // SAFETY: passed on with the program's environment.
    unsafe { execvpe(file, argv, environ) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fexecve(fd: c_int, argv: Strings, envp: Strings) -> c_int {
    // SAFETY: the program's arrays are as C wants them.
    unsafe {
        let next = Successor::new(envp);
        real::fexecve(fd, argv, next.environment())
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execveat(
    folder: c_int,
    path: *const c_char,
    argv: Strings,
    envp: Strings,
    flags: c_int,
) -> c_int {
    // SAFETY: the program's arrays are as C wants them.
    unsafe {
        let next = Successor::new(envp);
        real::execveat(folder, path, argv, next.environment(), flags)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawn(
    pid: *mut pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const posix_spawnattr_t,
    argv: Strings,
    envp: Strings,
) -> c_int {
    // SAFETY: the program's arrays are as C wants them.
    unsafe {
        let (started, attributes) = spawned(actions, attributes, envp);
        real::posix_spawn(pid, path, actions, attributes.as_ptr(), argv, started.environment())
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawnp(
    pid: *mut pid_t,
    file: *const c_char,
    actions: *const c_void,
    attributes: *const posix_spawnattr_t,
    argv: Strings,
    envp: Strings,
) -> c_int {
    // SAFETY: the program's arrays are as C wants them.
    unsafe {
        let (started, attributes) = spawned(actions, attributes, envp);
        real::posix_spawnp(pid, file, actions, attributes.as_ptr(), argv, started.environment())
    }
}

/// What a program that is started is given, and how. To be kept until it has been.
///
/// # Safety
/// As of [`heritage::complete`].
unsafe fn spawned(
    actions: *const c_void,
    attributes: *const posix_spawnattr_t,
    envp: Strings,
) -> (Successor, Attributes) {
    // SAFETY: the caller's promise.
    unsafe {
        let kept = |ops: &Ops| spawn_actions::kept(actions, ops.inheritable(), |fd| ops.owns(fd));
        let successor = Successor::with(envp, kept);
        // Whoever holds the sockets blocks what was put off.
        let blocked = successor.0.execing.as_ref().and_then(|_| Ops::blocked_signals().ok());
        let attributes = match blocked {
            Some(blocked) => Attributes::with(attributes, blocked),
            None => Attributes { programs: attributes, ours: None },
        };
        (successor, attributes)
    }
}

/// The attributes of a program that is started: those that were asked for, or the same and what it is to block.
struct Attributes {
    programs: *const posix_spawnattr_t,
    ours: Option<posix_spawnattr_t>,
}

impl Attributes {
    /// It blocks these signals, if nothing was said of that.
    ///
    /// # Safety
    /// The program's are null or as libc has made them.
    unsafe fn with(programs: *const posix_spawnattr_t, blocked: u64) -> Self {
        // SAFETY: the caller's promise; libc's attributes and sets are plain words, and all zero is what they begin as. A set begins with the kernel's.
        unsafe {
            let mut ours = programs.as_ref().map_or_else(|| zeroed(), |programs| *programs);
            let mut flags = 0;
            libc::posix_spawnattr_getflags(&raw const ours, &raw mut flags);
            if c_int::from(flags) & libc::POSIX_SPAWN_SETSIGMASK != 0 {
                return Self { programs, ours: None };
            }
            let mut set: libc::sigset_t = zeroed();
            (&raw mut set).cast::<u64>().write_unaligned(blocked);
            libc::posix_spawnattr_setflags(&raw mut ours, flags | libc::POSIX_SPAWN_SETSIGMASK as c_short);
            libc::posix_spawnattr_setsigmask(&raw mut ours, &raw const set);
            Self { programs, ours: Some(ours) }
        }
    }

    fn as_ptr(&self) -> *const posix_spawnattr_t {
        self.ours.as_ref().map_or(self.programs, ptr::from_ref)
    }
}

/// The arguments of `execl` and its like after the first: some in registers, which the entry below has stored, the others where the caller put them on the stack. They end
/// with null.
///
/// # Safety
/// Both point to arguments, of which one is null.
unsafe fn collect(
    registers: *const *mut c_char,
    count: usize,
    stack: Strings,
) -> (Vec<*mut c_char>, Strings) {
    let mut all = Vec::new();
    loop {
        let at = all.len();
        // SAFETY: this is not behind the last, which is null.
        let (argument, next) = unsafe {
            if at < count { (*registers.add(at), at + 1) } else { (*stack.add(at - count), at + 1) }
        };
        all.push(argument);
        if argument.is_null() {
            // SAFETY: at most one behind the last; only `execle` reads there.
            let behind = unsafe { if next < count { registers.add(next) } else { stack.add(next - count) } };
            return (all, behind);
        }
    }
}

/// Registers with arguments behind the first.
#[cfg(target_arch = "x86_64")]
const REGISTERS: usize = 5;
#[cfg(target_arch = "aarch64")]
const REGISTERS: usize = 7;

unsafe extern "C" fn ginnel_execl(path: *const c_char, registers: Strings, stack: Strings) -> c_int {
    // SAFETY: the program's arguments end with null.
    unsafe {
        let (argv, _) = collect(registers, REGISTERS, stack);
        execve(path, argv.as_ptr(), environ)
    }
}

unsafe extern "C" fn ginnel_execlp(file: *const c_char, registers: Strings, stack: Strings) -> c_int {
    // SAFETY: the program's arguments end with null.
    unsafe {
        let (argv, _) = collect(registers, REGISTERS, stack);
        execvpe(file, argv.as_ptr(), environ)
    }
}

unsafe extern "C" fn ginnel_execle(path: *const c_char, registers: Strings, stack: Strings) -> c_int {
    // SAFETY: the program's arguments end with null, and the environment follows.
    unsafe {
        let (argv, behind) = collect(registers, REGISTERS, stack);
        execve(path, argv.as_ptr(), (*behind).cast())
    }
}

// A function of C with any number of arguments cannot be written in Rust: these store the arguments that are in registers and tell where the others are.
#[cfg(target_arch = "x86_64")]
macro_rules! entry {
    ($name:ident, $function:path) => {
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() -> c_int {
            core::arch::naked_asm!(
                "sub rsp, 56",
                "mov [rsp], rsi",
                "mov [rsp + 8], rdx",
                "mov [rsp + 16], rcx",
                "mov [rsp + 24], r8",
                "mov [rsp + 32], r9",
                "mov rsi, rsp",
                "lea rdx, [rsp + 64]",
                "call {function}",
                "add rsp, 56",
                "ret",
                function = sym $function,
            )
        }
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! entry {
    ($name:ident, $function:path) => {
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() -> c_int {
            core::arch::naked_asm!(
                "stp x29, x30, [sp, #-80]!",
                "mov x29, sp",
                "stp x1, x2, [sp, #16]",
                "stp x3, x4, [sp, #32]",
                "stp x5, x6, [sp, #48]",
                "str x7, [sp, #64]",
                "add x1, sp, #16",
                "add x2, sp, #80",
                "bl {function}",
                "ldp x29, x30, [sp], #80",
                "ret",
                function = sym $function,
            )
        }
    };
}
entry!(execl, ginnel_execl);
entry!(execlp, ginnel_execlp);
entry!(execle, ginnel_execle);
