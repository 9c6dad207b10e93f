//! Hooks that execute and start programs: the new program finds the stack, and the sockets that are not
//! close-on-exec.
#![allow(unsafe_code)] // functions that C calls, some of them variadic

use super::spawn_actions;
use crate::inherit::{self, Environment};
use crate::{attach, real};
use core::ffi::{c_char, c_int, c_short, c_void};
use core::mem::zeroed;
use core::ptr;
use ginnel_posix_ops::fault_signals::IgnoredForExec;
use ginnel_posix_ops::{ExecGuard, Inheritance, Ops, SignalDeferred};
use libc::{pid_t, posix_spawnattr_t};
use runtime::internal_fd::InternalFd;
use rustix::fd::AsRawFd;

unsafe extern "C" {
    static environ: *const *mut c_char;
}

/// Sockets and environment that the next program gets. If that program does not run, dropping the value
/// undoes the preparation.
struct NextProgram(SignalDeferred<NextProgramParts>);

struct NextProgramParts {
    environment: Environment,
    _connection: Option<InternalFd>,
    _inheritance: Option<Inheritance>,
    exec_guard: Option<ExecGuard<'static>>,
    _ignored: IgnoredForExec,
}

impl NextProgram {
    /// Prepares the execution of a program.
    ///
    /// # Safety
    /// As for [`inherit::complete_environment`].
    unsafe fn new(envp: *const *mut c_char) -> Self {
        let identity = |ops: &Ops| ops.inheritable().into_iter().map(|fd| (fd, fd)).collect();
        // SAFETY: the caller's promise.
        let program = unsafe { Self::with(envp, identity) };
        if let Some(exec_guard) = &program.0.exec_guard {
            exec_guard.finish_preparation();
        }
        program
    }

    /// Prepares a program that keeps the sockets of these descriptors: pairs of the number in that program
    /// and the number in this process.
    ///
    /// # Safety
    /// As for [`inherit::complete_environment`].
    unsafe fn with(envp: *const *mut c_char, fds_to_keep: impl FnOnce(&Ops) -> Vec<(c_int, c_int)>) -> Self {
        // SAFETY: the caller's promise.
        Self(SignalDeferred::new(|| unsafe { NextProgramParts::prepare(envp, fds_to_keep) }))
    }

    fn environment(&self) -> StringArray {
        self.0.environment.as_ptr()
    }
}

impl NextProgramParts {
    /// Prepares the parts, while signals are deferred.
    ///
    /// # Safety
    /// As for [`inherit::complete_environment`].
    unsafe fn prepare(
        envp: *const *mut c_char,
        fds_to_keep: impl FnOnce(&Ops) -> Vec<(c_int, c_int)>,
    ) -> Self {
        let (mut inheritance, mut fds, mut exec_guard) = (None, None, None);
        if let Some(ops) = attach::ops() {
            let fds_to_keep = fds_to_keep(ops);
            match ops.prepare_exec() {
                Ok(guard) => {
                    (inheritance, fds) =
                        inherit::leave_sockets(exec_guard.insert(guard), &fds_to_keep).unzip()
                }
                Err(error) => inherit::warn_sockets_lost(&fds_to_keep, &error.to_string()),
            }
        }
        // A program that inherits sockets has a connection already.
        let connection =
            if inheritance.is_none() { attach::leave_connection(exec_guard.as_ref()) } else { None };
        let variable = match (&connection, fds) {
            (Some(connection), _) => {
                Some((inherit::INHERITED_CONNECTION_VARIABLE, connection.as_raw_fd().to_string()))
            }
            (None, Some([connection_fd, table_fd])) => {
                Some((inherit::INHERITED_SOCKETS_VARIABLE, format!("{connection_fd}:{table_fd}")))
            }
            (None, None) => None,
        };
        // SAFETY: the caller's promise.
        let environment = unsafe { inherit::complete_environment(envp, variable) };
        let _ignored = IgnoredForExec::restore();
        Self { environment, _connection: connection, _inheritance: inheritance, exec_guard, _ignored }
    }
}

type StringArray = *const *mut c_char;

#[unsafe(no_mangle)]
unsafe extern "C" fn execve(path: *const c_char, argv: StringArray, envp: StringArray) -> c_int {
    // SAFETY: the program's arrays and strings are null-terminated.
    unsafe {
        let program = NextProgram::new(envp);
        real::execve(path, argv, program.environment())
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execv(path: *const c_char, argv: StringArray) -> c_int {
    // SAFETY: the program's arguments and environment.
    unsafe { execve(path, argv, environ) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execvpe(file: *const c_char, argv: StringArray, envp: StringArray) -> c_int {
    // SAFETY: the program's arrays and strings are null-terminated.
    unsafe {
        let program = NextProgram::new(envp);
        real::execvpe(file, argv, program.environment())
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execvp(file: *const c_char, argv: StringArray) -> c_int {
    // SAFETY: the program's arguments and environment.
    unsafe { execvpe(file, argv, environ) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fexecve(fd: c_int, argv: StringArray, envp: StringArray) -> c_int {
    // SAFETY: the program's arrays and strings are null-terminated.
    unsafe {
        let program = NextProgram::new(envp);
        real::fexecve(fd, argv, program.environment())
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn execveat(
    folder: c_int,
    path: *const c_char,
    argv: StringArray,
    envp: StringArray,
    flags: c_int,
) -> c_int {
    // SAFETY: the program's arrays and strings are null-terminated.
    unsafe {
        let program = NextProgram::new(envp);
        real::execveat(folder, path, argv, program.environment(), flags)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawn(
    pid: *mut pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const posix_spawnattr_t,
    argv: StringArray,
    envp: StringArray,
) -> c_int {
    // SAFETY: the program's arrays and strings are null-terminated.
    unsafe {
        let (program, attributes) = prepare_spawn(actions, attributes, envp);
        real::posix_spawn(pid, path, actions, attributes.as_ptr(), argv, program.environment())
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawnp(
    pid: *mut pid_t,
    file: *const c_char,
    actions: *const c_void,
    attributes: *const posix_spawnattr_t,
    argv: StringArray,
    envp: StringArray,
) -> c_int {
    // SAFETY: the program's arrays and strings are null-terminated.
    unsafe {
        let (program, attributes) = prepare_spawn(actions, attributes, envp);
        real::posix_spawnp(pid, file, actions, attributes.as_ptr(), argv, program.environment())
    }
}

/// Prepares a program to start, and its attributes. Both must be kept until the program has started.
///
/// # Safety
/// As for [`inherit::complete_environment`]; the attributes must be null or those of libc.
unsafe fn prepare_spawn(
    actions: *const c_void,
    attributes: *const posix_spawnattr_t,
    envp: StringArray,
) -> (NextProgram, SpawnAttributes) {
    // SAFETY: the caller's promise.
    unsafe {
        let fds_to_keep =
            |ops: &Ops| spawn_actions::surviving_fds(actions, ops.inheritable(), |fd| ops.owns(fd));
        let program = NextProgram::with(envp, fds_to_keep);
        // While the lock is held, the thread may block signals that the program has not blocked, in order to
        // defer them. The new program must not inherit that mask.
        let blocked = program.0.exec_guard.as_ref().and_then(|_| Ops::blocked_signals().ok());
        let attributes = match blocked {
            Some(blocked) => SpawnAttributes::with(attributes, blocked),
            None => SpawnAttributes { original: attributes, modified: None },
        };
        (program, attributes)
    }
}

/// Attributes of a program to start: those that the caller passed, or a copy with a signal mask.
struct SpawnAttributes {
    original: *const posix_spawnattr_t,
    modified: Option<posix_spawnattr_t>,
}

impl SpawnAttributes {
    /// Adds the signal mask `blocked`, unless the attributes have one.
    ///
    /// # Safety
    /// The attributes must be null or those of libc.
    unsafe fn with(original: *const posix_spawnattr_t, blocked: u64) -> Self {
        // SAFETY: the caller's promise; libc's attributes and signal sets are plain data, valid when
        // all-zero, and a signal set begins with the kernel's.
        unsafe {
            let mut modified = original.as_ref().map_or_else(|| zeroed(), |original| *original);
            let mut flags = 0;
            libc::posix_spawnattr_getflags(&raw const modified, &raw mut flags);
            if c_int::from(flags) & libc::POSIX_SPAWN_SETSIGMASK != 0 {
                return Self { original, modified: None };
            }
            let mut set: libc::sigset_t = zeroed();
            (&raw mut set).cast::<u64>().write_unaligned(blocked);
            libc::posix_spawnattr_setflags(
                &raw mut modified,
                flags | libc::POSIX_SPAWN_SETSIGMASK as c_short,
            );
            libc::posix_spawnattr_setsigmask(&raw mut modified, &raw const set);
            Self { original, modified: Some(modified) }
        }
    }

    fn as_ptr(&self) -> *const posix_spawnattr_t {
        self.modified.as_ref().map_or(self.original, ptr::from_ref)
    }
}

/// Collects the arguments of `execl` and its variants after the first one: some were in registers, which the
/// entry point below has stored, the others are on the caller's stack. Returns them with the terminating null
/// pointer, and the address after that.
///
/// # Safety
/// Both pointers must lead to arguments, one of which is null.
unsafe fn collect_varargs(
    registers: *const *mut c_char,
    count: usize,
    stack: StringArray,
) -> (Vec<*mut c_char>, StringArray) {
    let mut all = Vec::new();
    loop {
        let at = all.len();
        // SAFETY: this is not after the last argument, which is null.
        let (argument, next) = unsafe {
            if at < count { (*registers.add(at), at + 1) } else { (*stack.add(at - count), at + 1) }
        };
        all.push(argument);
        if argument.is_null() {
            // SAFETY: at most one after the last argument; only `execle` reads there.
            let after_last =
                unsafe { if next < count { registers.add(next) } else { stack.add(next - count) } };
            return (all, after_last);
        }
    }
}

/// How many registers hold arguments after the first one.
#[cfg(target_arch = "x86_64")]
const REGISTER_ARGUMENTS: usize = 5;
#[cfg(target_arch = "aarch64")]
const REGISTER_ARGUMENTS: usize = 7;

unsafe extern "C" fn ginnel_execl(path: *const c_char, registers: StringArray, stack: StringArray) -> c_int {
    // SAFETY: the program's arguments are null-terminated.
    unsafe {
        let (argv, _) = collect_varargs(registers, REGISTER_ARGUMENTS, stack);
        execve(path, argv.as_ptr(), environ)
    }
}

unsafe extern "C" fn ginnel_execlp(file: *const c_char, registers: StringArray, stack: StringArray) -> c_int {
    // SAFETY: the program's arguments are null-terminated.
    unsafe {
        let (argv, _) = collect_varargs(registers, REGISTER_ARGUMENTS, stack);
        execvpe(file, argv.as_ptr(), environ)
    }
}

unsafe extern "C" fn ginnel_execle(path: *const c_char, registers: StringArray, stack: StringArray) -> c_int {
    // SAFETY: the program's arguments are null-terminated, and the environment follows.
    unsafe {
        let (argv, after_last) = collect_varargs(registers, REGISTER_ARGUMENTS, stack);
        execve(path, argv.as_ptr(), (*after_last).cast())
    }
}

// Rust cannot define variadic functions: these entry points store the arguments in registers and pass on
// where the others are.
#[cfg(target_arch = "x86_64")]
macro_rules! variadic_entry {
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
macro_rules! variadic_entry {
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
variadic_entry!(execl, ginnel_execl);
variadic_entry!(execlp, ginnel_execlp);
variadic_entry!(execle, ginnel_execle);
