//! Dispositions of `SIGSEGV` and `SIGBUS`: a handler of the library is in front of the program's, so that a
//! fault in the copy routine of [`user_memory`] becomes an error of the call. Every other fault arrives as
//! without the library.
//!
//! A handler of the program has a trampoline, as the handlers of all signals have (`signal_handlers`), which
//! keeps the program's flags and mask; the trampoline asks [`user_memory::fix_up`] first. In place of the
//! default action and of `SIG_IGN` stand two handlers of the library, which the program does not see.
#![allow(unsafe_code)] // functions that the kernel calls

use crate::{fault_mask, isolation, signal_handlers, syscall, user_memory};
use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use libc::{SIG_DFL, SIG_IGN, sighandler_t, siginfo_t, ucontext_t};
use std::sync::Once;

/// The signals of faults.
const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];
/// A memory error of the hardware that does not concern the current instruction (`asm-generic/siginfo.h`).
const BUS_MCEERR_AO: c_int = 5;

/// Set before the handlers are installed: changes by other threads are replaced from then on.
static IS_INSTALLED: AtomicBool = AtomicBool::new(false);
/// The program has installed a one-shot handler.
static HAS_ONE_SHOT: AtomicBool = AtomicBool::new(false);
/// The flags with which the program has set the default action or `SIG_IGN`.
static PROGRAM_FLAGS: [AtomicI32; 2] = [const { AtomicI32::new(0) }; 2];

/// Returns whether the signal may report a fault in the copy routine.
#[inline]
pub fn is_fault_signal(signal: c_int) -> bool {
    SIGNALS.contains(&signal)
}

/// Puts handlers in front of the program's dispositions. Later changes must pass through [`to_kernel`] and
/// [`to_program`].
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(install_handlers);
}

fn install_handlers() {
    user_memory::detect_cpu();
    IS_INSTALLED.store(true, Ordering::Release);
    for signal in SIGNALS {
        let Ok(mut action) = syscall::sigaction(signal) else { continue };
        let flags = action.flags as c_int;
        let (handler, flags) = match to_kernel(signal, action.handler, flags) {
            Some(replaced) => replaced,
            None => match signal_handlers::trampoline(action.handler, flags & libc::SA_SIGINFO != 0) {
                Some(trampoline) => (trampoline, flags | libc::SA_SIGINFO),
                None => continue,
            },
        };
        (action.handler, action.flags) = (handler, flags.cast_unsigned().into());
        action.set_restorer();
        // SAFETY: the handler passes all faults but the library's on to the previous disposition. Without
        // the handler faults remain faults.
        let _ = unsafe { syscall::set_sigaction(signal, &action) };
    }
}

/// Returns the handler and the flags to install in the kernel in place of a disposition without a handler.
/// Returns `None` if the disposition needs no replacement.
pub fn to_kernel(signal: c_int, handler: sighandler_t, flags: c_int) -> Option<(sighandler_t, c_int)> {
    let at = SIGNALS.iter().position(|fault| *fault == signal)?;
    if ![SIG_DFL, SIG_IGN].contains(&handler) {
        if flags & libc::SA_RESETHAND != 0 {
            HAS_ONE_SHOT.store(true, Ordering::Relaxed);
        }
        return None;
    }
    if !IS_INSTALLED.load(Ordering::Acquire) {
        return None;
    }
    PROGRAM_FLAGS[at].store(flags, Ordering::Relaxed);
    let handler: Handler = if handler == SIG_DFL { default_action } else { ignore };
    // A one-shot handler would be removed by a fault of the library.
    let flags = flags & !(libc::SA_RESETHAND | libc::SA_NOCLDWAIT);
    let flags = flags | libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER | libc::SA_RESTART;
    Some(((handler as *const ()).expose_provenance(), flags))
}

/// Returns the disposition as the program has set it, if one of the library's handlers stands for it.
pub fn to_program(signal: c_int, handler: sighandler_t) -> Option<(sighandler_t, c_int)> {
    let at = SIGNALS.iter().position(|fault| *fault == signal)?;
    let is = |own: Handler| (own as *const ()).addr() == handler;
    let found = if is(default_action) {
        SIG_DFL
    } else if is(ignore) {
        SIG_IGN
    } else {
        return None;
    };
    Some((found, PROGRAM_FLAGS[at].load(Ordering::Relaxed)))
}

/// Must be called before a handler of the program runs. If it was a one-shot handler (`SA_RESETHAND`), the
/// kernel has set the default action, for which the library's handler stands again.
#[inline]
pub(crate) fn before_handler(signal: c_int) {
    if HAS_ONE_SHOT.load(Ordering::Relaxed) {
        replace_default(signal);
    }
}

#[cold]
fn replace_default(signal: c_int) {
    let Ok(mut action) = syscall::sigaction(signal) else { return };
    let Some((handler, flags)) = to_kernel(signal, action.handler, action.flags as c_int) else { return };
    (action.handler, action.flags) = (handler, flags.cast_unsigned().into());
    action.set_restorer();
    // SAFETY: as in `install_handlers`.
    let _ = unsafe { syscall::set_sigaction(signal, &action) };
}

/// Lets the kernel ignore the signals that the program ignores while the value lives: a program that this one
/// executes inherits `SIG_IGN`, but no handlers.
#[derive(Debug)]
pub struct IgnoredForExec([Option<syscall::KernelSigaction>; 2]);

impl IgnoredForExec {
    /// Restores `SIG_IGN` where the library's handler stands for it.
    pub fn restore() -> Self {
        let ignore: Handler = ignore;
        Self(SIGNALS.map(|signal| {
            let own = syscall::sigaction(signal).ok()?;
            if own.handler != (ignore as *const ()).addr() {
                return None;
            }
            let mut ignored = own;
            ignored.handler = SIG_IGN;
            // SAFETY: signals may be ignored.
            unsafe { syscall::set_sigaction(signal, &ignored) }.ok()?;
            Some(own)
        }))
    }
}

impl Drop for IgnoredForExec {
    fn drop(&mut self) {
        for (signal, own) in SIGNALS.into_iter().zip(&self.0) {
            if let Some(own) = own {
                // SAFETY: the disposition was in force before.
                let _ = unsafe { syscall::set_sigaction(signal, own) };
            }
        }
    }
}

type Handler = unsafe extern "C" fn(c_int, *mut siginfo_t, *mut ucontext_t);

/// Returns whether the current instruction of the thread has caused a signal, and will cause it again.
fn is_fault(info: &siginfo_t) -> bool {
    info.si_code > 0 && !(info.si_signo == libc::SIGBUS && info.si_code == BUS_MCEERR_AO)
}

/// Handles a fault of the library, or postpones a signal that was sent. Returns true if the thread can
/// continue.
///
/// # Safety
/// The arguments must be those of a handler of a signal of [`is_fault_signal`].
#[inline]
pub(crate) unsafe fn fix_up(info: &siginfo_t, context: &mut ucontext_t) -> bool {
    if !is_fault(info) {
        return fault_mask::postpone(info.si_signo, info, context);
    }
    // SAFETY: faults have an address.
    let address = unsafe { info.si_addr() }.addr();
    isolation::make_page_writable(address) || user_memory::fix_up(context)
}

/// Stands for the default action: the process ends by the same fault.
unsafe extern "C" fn default_action(signal: c_int, info: *mut siginfo_t, context: *mut ucontext_t) {
    // SAFETY: the kernel passes valid pointers to a handler.
    let (info, context) = unsafe { (&*info, &mut *context) };
    if is_fault(info) {
        // SAFETY: as above.
        unsafe { fix_up_or_end(signal, info, context) };
        return;
    }
    // Another process, or this one, has sent the signal.
    if fault_mask::postpone(signal, info, context) {
        return;
    }
    if let Ok(mut action) = syscall::sigaction(signal) {
        (action.handler, action.flags) = (SIG_DFL, action.flags & !(libc::SA_SIGINFO as u64));
        // SAFETY: the default action is valid.
        let _ = unsafe { syscall::set_sigaction(signal, &action) };
    }
    let _ = syscall::requeue_signal(signal, info);
}

/// Stands for `SIG_IGN`, which ignores signals that are sent, but not faults.
unsafe extern "C" fn ignore(signal: c_int, info: *mut siginfo_t, context: *mut ucontext_t) {
    // SAFETY: the kernel passes valid pointers to a handler.
    let (info, context) = unsafe { (&*info, &mut *context) };
    if is_fault(info) {
        // SAFETY: as above.
        unsafe { fix_up_or_end(signal, info, context) };
    }
}

/// Handles a fault of a program that has no handler for it. If the fault is not in the copy routine, blocks
/// the signal and lets the instruction fault again: a fault whose signal is blocked has the default action,
/// with the same `siginfo_t` and registers (`force_sig_info`).
///
/// # Safety
/// As [`fix_up`].
unsafe fn fix_up_or_end(signal: c_int, info: &siginfo_t, context: &mut ucontext_t) {
    // SAFETY: the caller's promise.
    if !unsafe { fix_up(info, context) } {
        let blocked = syscall::kernel_sigset(&context.uc_sigmask) | crate::signal::bit(signal);
        syscall::set_kernel_sigset(&mut context.uc_sigmask, blocked);
    }
}
