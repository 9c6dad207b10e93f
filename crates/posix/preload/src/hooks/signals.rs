//! Hooks of signal dispositions: a trampoline of the library replaces each handler, and defers signals that
//! arrive in the middle of a call (`ginnel_posix_ops::signal_handlers`). The program does not see this: the
//! old disposition is reported as the program has set it.
//!
//! Every change is recorded, because the disposition decides whether a call continues after the handler.
#![allow(unsafe_code)] // functions that C calls

use crate::{attach, real};
use core::ffi::{c_int, c_long};
use core::mem::zeroed;
use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};
use ginnel_posix_ops::{fault_signals, ffi, signal_handlers, user_memory};
use libc::{SA_NODEFER, SA_RESETHAND, SA_RESTART, SA_SIGINFO, SIG_DFL, SIG_ERR, SIG_IGN, sighandler_t};

/// A flag without effect that `sysv_signal` has always set.
const SA_INTERRUPT: c_int = 0x2000_0000;
/// Argument and result of `sigset`: the signal is blocked, and its disposition is unchanged.
const SIG_HOLD: sighandler_t = 2;

/// Signals for which the program has called `siginterrupt`, which affects `signal`.
static SIGINTERRUPT_SIGNALS: AtomicU64 = AtomicU64::new(0);

/// Signals that have or had a one-shot handler with one argument. Once such a handler has run, the kernel's
/// flags no longer tell that it had one.
static ONE_SHOT_PLAIN: AtomicU64 = AtomicU64::new(0);

/// Records a change of dispositions, so that the next call that blocks asks the kernel for them. Returns
/// `result`.
fn after_change<T>(result: T) -> T {
    if let Some(ops) = attach::ops() {
        ops.invalidate_handlers();
    }
    result
}

/// Returns whether the disposition runs a function of the program.
fn is_handler(handler: sighandler_t) -> bool {
    ![SIG_DFL, SIG_IGN, SIG_ERR].contains(&handler)
}

/// Returns whether a disposition must pass through [`install`] rather than libc's function.
fn needs_install(number: c_int, handler: sighandler_t) -> bool {
    is_handler(handler) || handler != SIG_ERR && fault_signals::is_fault_signal(number)
}

/// Returns the bit of a signal in a set; 0 for an invalid number.
fn bit(number: c_int) -> u64 {
    if (1..=64).contains(&number) { 1 << (number - 1) } else { 0 }
}

fn contains(set: &AtomicU64, number: c_int) -> bool {
    set.load(Ordering::Relaxed) & bit(number) != 0
}

fn set_bit(set: &AtomicU64, number: c_int, is_in: bool) {
    match is_in {
        true => set.fetch_or(bit(number), Ordering::Relaxed),
        false => set.fetch_and(!bit(number), Ordering::Relaxed),
    };
}

/// Returns the handler and the flags to install in the kernel.
fn to_kernel(number: c_int, handler: sighandler_t, flags: c_int) -> (sighandler_t, c_int) {
    if let Some(replaced) = fault_signals::to_kernel(number, handler, flags) {
        return replaced;
    }
    let has_siginfo = flags & SA_SIGINFO != 0;
    if flags & SA_RESETHAND != 0 {
        set_bit(&ONE_SHOT_PLAIN, number, is_handler(handler) && !has_siginfo);
    }
    if is_handler(handler)
        && let Some(entry) = signal_handlers::trampoline(handler, has_siginfo)
    {
        return (entry, flags | SA_SIGINFO);
    }
    (handler, flags)
}

/// Returns the handler and the flags as the program has set them. `is_plain` tells that the signal has or had
/// a one-shot handler with one argument.
fn to_program(number: c_int, is_plain: bool, handler: sighandler_t, flags: c_int) -> (sighandler_t, c_int) {
    let (handler, flags) = fault_signals::to_program(number, handler).unwrap_or((handler, flags));
    match signal_handlers::handler_of(handler) {
        Some((handler, true)) => (handler, flags),
        Some((handler, false)) => (handler, flags & !SA_SIGINFO),
        None if handler == SIG_DFL && flags & SA_RESETHAND != 0 && is_plain => (handler, flags & !SA_SIGINFO),
        None => (handler, flags),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sigaction(
    signal: c_int,
    action: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    let is_plain = contains(&ONE_SHOT_PLAIN, signal);
    // SAFETY: the program's actions are null or valid, as libc's function requires.
    unsafe {
        let action = action.as_ref().map(|action| {
            let (handler, flags) = to_kernel(signal, action.sa_sigaction, action.sa_flags);
            libc::sigaction { sa_sigaction: handler, sa_flags: flags, ..*action }
        });
        let result = real::sigaction(signal, action.as_ref().map_or(ptr::null(), ptr::from_ref), old);
        if result == 0
            && let Some(old) = old.as_mut()
        {
            (old.sa_sigaction, old.sa_flags) = to_program(signal, is_plain, old.sa_sigaction, old.sa_flags);
        }
        if action.is_some() { after_change(result) } else { result }
    }
}

/// Handles `rt_sigaction`. Returns `None` if the system call must be made unchanged.
///
/// # Safety
/// The arguments must be those of the system call.
pub unsafe fn rt_sigaction(signal: c_long, action: c_long, old: c_long, len: c_long) -> Option<c_long> {
    /// `struct kernel_sigaction`.
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Action {
        handler: sighandler_t,
        flags: u64,
        restorer: usize,
        mask: u64,
    }
    if len != size_of::<u64>() as c_long {
        return None;
    }
    // All flags are in the lower half.
    let flags = |flags: u64| flags as c_int;
    let number = signal as c_int;
    let is_plain = contains(&ONE_SHOT_PLAIN, number);
    // SAFETY: the caller's promise; any bytes are an action.
    unsafe {
        let given = ptr::with_exposed_provenance::<Action>(action as usize);
        let given = (!given.is_null()).then(|| user_memory::read(given)).transpose();
        let given = match given {
            Ok(given) => given,
            Err(error) => return Some(ffi::fail_with(error, -1)),
        };
        let action = given.map(|action| {
            let (handler, flags) = to_kernel(number, action.handler, flags(action.flags));
            Action { handler, flags: flags.cast_unsigned().into(), ..action }
        });
        let address = action.as_ref().map_or(ptr::null(), ptr::from_ref).expose_provenance() as c_long;
        let result = real::syscall(libc::SYS_rt_sigaction, signal, address, old, len, 0, 0);
        // The kernel has written to `old`, so the address is valid.
        if result == 0
            && let Some(old) = ptr::with_exposed_provenance_mut::<Action>(old as usize).as_mut()
        {
            let (handler, flags) = to_program(number, is_plain, old.handler, flags(old.flags));
            (old.handler, old.flags) = (handler, flags.cast_unsigned().into());
        }
        Some(if action.is_some() { after_change(result) } else { result })
    }
}

/// Installs a handler for one of libc's older functions. Returns the old handler, or `SIG_ERR`.
fn install(number: c_int, handler: sighandler_t, flags: c_int, blocked: Option<c_int>) -> sighandler_t {
    // SAFETY: an all-zero action is valid, and has an empty mask; the handler is the program's.
    unsafe {
        let mut action: libc::sigaction = zeroed();
        let mut old: libc::sigaction = zeroed();
        (action.sa_sigaction, action.sa_flags) = (handler, flags);
        if let Some(blocked) = blocked
            && libc::sigaddset(&raw mut action.sa_mask, blocked) != 0
        {
            return SIG_ERR;
        }
        match sigaction(number, &raw const action, &raw mut old) {
            0 => old.sa_sigaction,
            _ => SIG_ERR,
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn signal(number: c_int, handler: sighandler_t) -> sighandler_t {
    if !needs_install(number, handler) {
        // SAFETY: the program's arguments, unchanged.
        return to_program(number, false, after_change(unsafe { real::signal(number, handler) }), 0).0;
    }
    let interrupts = contains(&SIGINTERRUPT_SIGNALS, number);
    install(number, handler, if interrupts { 0 } else { SA_RESTART }, Some(number))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __sysv_signal(number: c_int, handler: sighandler_t) -> sighandler_t {
    if !needs_install(number, handler) {
        // SAFETY: the program's arguments, unchanged.
        return to_program(number, false, after_change(unsafe { real::__sysv_signal(number, handler) }), 0).0;
    }
    install(number, handler, SA_RESETHAND | SA_NODEFER | SA_INTERRUPT, None)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sigset(number: c_int, handler: sighandler_t) -> sighandler_t {
    if !needs_install(number, handler) || handler == SIG_HOLD {
        // SAFETY: the program's arguments, unchanged.
        let old = after_change(unsafe { real::sigset(number, handler) });
        super::signal_masks::after_hold(number);
        return to_program(number, false, old, 0).0;
    }
    let old = install(number, handler, 0, None);
    if old == SIG_ERR {
        return SIG_ERR;
    }
    // SAFETY: an all-zero set is valid and empty, and both sets live through the calls.
    unsafe {
        let (mut one, mut before) = (zeroed(), zeroed());
        libc::sigaddset(&raw mut one, number);
        libc::sigprocmask(libc::SIG_UNBLOCK, &raw const one, &raw mut before);
        if libc::sigismember(&raw const before, number) == 1 { SIG_HOLD } else { old }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn siginterrupt(number: c_int, on: c_int) -> c_int {
    // SAFETY: the program's arguments, unchanged.
    let result = after_change(unsafe { real::siginterrupt(number, on) });
    if result == 0 {
        set_bit(&SIGINTERRUPT_SIGNALS, number, on != 0);
    }
    result
}

alias! {
    fn __sigaction = sigaction(
        signal: c_int, action: *const libc::sigaction, old: *mut libc::sigaction,
    ) -> c_int;
    fn bsd_signal = signal(number: c_int, handler: sighandler_t) -> sighandler_t;
    fn ssignal = signal(number: c_int, handler: sighandler_t) -> sighandler_t;
    fn sysv_signal = __sysv_signal(number: c_int, handler: sighandler_t) -> sighandler_t;
}
