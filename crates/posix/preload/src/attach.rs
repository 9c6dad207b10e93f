//! How the program finds its stack: `GINNEL_STACK` names it, or the number of a descriptor that leads to it.
#![allow(unsafe_code)] // runs before main, and writes to the terminal without libc's streams

use crate::real;
use core::ffi::{c_int, c_uint};
use core::sync::atomic::{AtomicPtr, Ordering};
use ginnel_posix_ops::{ListenSpawn, Ops, OpsConfig};
use runtime::door::Process;
use rustix::fd::{FromRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// Names the stack: a path of a control socket, or `fd:N`.
const STACK: &str = "GINNEL_STACK";
/// What to do without one: `fail`, the default, or `kernel`.
const ON_MISSING: &str = "GINNEL_ON_MISSING";
/// Whether listeners on all addresses take connections of the kernel, too: `auto`, the default, or `off`.
const KERNEL_LISTEN: &str = "GINNEL_KERNEL_LISTEN";
/// Which shard a worker's listener takes from first: `auto`, the default, `bound` or `off`.
const LISTEN_SPAWN: &str = "GINNEL_LISTEN_SPAWN";
/// What the library reads, and hands on to the programs that this one starts.
pub const VARIABLES: [&str; 4] = [STACK, ON_MISSING, KERNEL_LISTEN, LISTEN_SPAWN];
/// Name of the library.
pub const LIBRARY: &str = "libginnel.so";
/// Addresses are checked before they are used (RFC 4862 §5.4); a stack that has just begun is waited for, but not longer than this.
const READY_WITHIN: Duration = Duration::from_secs(5);
/// Placeholders of closed sockets that are kept for the next.
const DESCRIPTORS_KEPT: usize = 256;
/// Exit status of a program that was to run on a stack and has none.
const NO_STACK: c_int = 125;

static OPS: AtomicPtr<Ops> = AtomicPtr::new(core::ptr::null_mut());

/// The operations, once the program is attached.
#[inline]
pub fn ops() -> Option<&'static Ops> {
    // SAFETY: null, or leaked by `attach`, and never taken back.
    unsafe { OPS.load(Ordering::Acquire).as_ref() }
}

/// Before `main`, as the program may give up its rights or its root directory there.
#[unsafe(link_section = ".init_array")]
#[used]
static AT_START: extern "C" fn() = at_start;

extern "C" fn at_start() {
    let Ok(stack) = std::env::var(STACK) else { return };
    crate::heritage::remember();
    let left = std::env::var(crate::heritage::HEIR).ok();
    // SAFETY: before `main` there are no other threads. The numbers mean nothing to programs that come of this one.
    unsafe { std::env::remove_var(crate::heritage::HEIR) };
    let resumed = left.as_deref().and_then(resume);
    match resumed.map_or_else(|| attach(&stack), Ok) {
        Ok(ops) => {
            ops.wait_until_ready(READY_WITHIN);
            OPS.store(Box::into_raw(Box::new(ops)), Ordering::Release);
            crate::process::watch_forks();
        }
        Err(cause) => {
            let on_kernel = std::env::var(ON_MISSING).is_ok_and(|policy| policy == "kernel");
            let end = if on_kernel { "; it goes on with the kernel's network" } else { "" };
            say(&["ginnel: this program was to run on the stack ", &stack, ", but: ", &cause, end]);
            if !on_kernel {
                // SAFETY: ends the process without running what the program has not set up yet.
                unsafe { libc::_exit(NO_STACK) };
            }
        }
    }
}

fn attach(stack: &str) -> Result<Ops, String> {
    let process = match stack.strip_prefix("fd:") {
        None => Process::connect(Path::new(stack), ""),
        Some(number) => {
            let number: c_int = number.parse().map_err(|_| format!("{stack}: not a number"))?;
            // SAFETY: whoever started this program left the descriptor to it.
            Process::over(unsafe { OwnedFd::from_raw_fd(number) })
        }
    };
    let process = process.map_err(|error| error.to_string())?;
    let config = config(&process);
    Ops::over(process, config).map_err(|error| error.to_string())
}

/// What the program before left. `None`: it is gone, or none of ours.
fn resume(left: &str) -> Option<Ops> {
    let (line, table) = left.split_once(':')?;
    let own = |number: &str| -> Option<OwnedFd> {
        let number: c_int = number.parse().ok().filter(|number| *number > 2)?;
        // SAFETY: only asks whether it is open.
        let open = unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0;
        // SAFETY: the program before left the descriptor to this library, and nobody else knows of it.
        open.then(|| unsafe { OwnedFd::from_raw_fd(number) })
    };
    Ops::resume(own(line)?, own(table)?, config).ok()
}

fn config(process: &Process) -> OpsConfig {
    let terms = process.terms();
    OpsConfig {
        takes: if terms.loopback { |_| true } else { |address| !address.is_loopback() },
        unprivileged_port_start: terms.unprivileged_port_start,
        listen_spawn: match std::env::var(LISTEN_SPAWN).as_deref() {
            Ok("off" | "0") => ListenSpawn::Off,
            Ok("bound" | "1") => ListenSpawn::Bound,
            _ => ListenSpawn::Auto,
        },
        kernel_listen: std::env::var(KERNEL_LISTEN).map_or(true, |value| value != "off"),
        descriptors_kept: DESCRIPTORS_KEPT,
        ..OpsConfig::default()
    }
}

/// From now on everything is the kernel's.
pub fn detach() {
    OPS.store(core::ptr::null_mut(), Ordering::Release);
}

/// One line to the terminal, past libc, whose `write` is ours.
pub fn say(parts: &[&str]) {
    let mut line = parts.concat();
    line.push('\n');
    // SAFETY: the program's standard error, which is open or not.
    let terminal = unsafe { rustix::fd::BorrowedFd::borrow_raw(2) };
    let _ = rustix::io::write(terminal, line.as_bytes());
}

/// Ends the program with a line that says why.
pub fn fail(parts: &[&str]) -> ! {
    say(&[&["ginnel: "], parts].concat());
    // SAFETY: ends the process.
    unsafe { libc::_exit(NO_STACK) }
}

/// `close_range`, but for the library's own descriptors.
///
/// # Safety
/// As libc's.
pub unsafe fn close_range_but_own(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let mut from = first;
    let limit = |number: c_uint| c_int::try_from(number).unwrap_or(c_int::MAX);
    while let Some(own) = Ops::next_internal(limit(from), limit(last)) {
        let own = own.unsigned_abs();
        if own > from {
            // SAFETY: the caller's promise.
            let result = unsafe { real::close_range(from, own - 1, flags) };
            if result != 0 {
                return result;
            }
        }
        if own == last {
            return 0;
        }
        from = own + 1;
    }
    // SAFETY: the caller's promise.
    unsafe { real::close_range(from, last, flags) }
}
