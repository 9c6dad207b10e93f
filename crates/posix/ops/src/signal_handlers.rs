//! Trampolines in front of the program's signal handlers: a signal that arrives in the middle of a call is
//! deferred until the call sleeps or returns. On Linux, too, system calls do their work between handlers. So
//! handlers may use sockets without restriction, and may leave by `siglongjmp`.
//!
//! The kernel is given a trampoline instead of a handler, one for each handler that the program has ever
//! installed. Only the kernel knows the current disposition of a signal, so threads that install handlers
//! concurrently, children that share memory, and one-shot handlers (`SA_RESETHAND`) need no bookkeeping here.
//! Flags and mask are the program's, except that `SA_SIGINFO` is always set.
//!
//! A trampoline that runs while its thread holds the lock queues the signal to the same thread again with the
//! same `siginfo_t`, blocks all signals and returns. When the lock is released, the signal mask is restored,
//! and the kernel delivers the signal with the stack, mask and context that it should have.
//!
//! A sleep does not begin if a handler has run since its call checked for events. The check and the system
//! call are a few instructions (`syscall`), and a handler that interrupts them returns to the first one.
#![allow(unsafe_code)] // functions that the kernel calls

use crate::fault_mask::Interrupted;
use crate::signal::{LIBC_SIGNALS, SIGNALS, SYNCHRONOUS_SIGNALS, SignalSet, bit};
use crate::{fault_signals, lock, syscall};
use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};
use libc::{siginfo_t, ucontext_t};

/// How many handlers of each kind, with one argument and with three, have a trampoline. Programs have a few
/// dozen; further handlers are installed directly.
const TRAMPOLINES_PER_KIND: usize = 512;
/// Bytes of a trampoline.
const TRAMPOLINE_BYTES: usize = 16;

/// The handler of each trampoline, or 0: first handlers with one argument, then those with three. None is
/// ever freed.
static HANDLERS: [AtomicUsize; 2 * TRAMPOLINES_PER_KIND] =
    [const { AtomicUsize::new(0) }; 2 * TRAMPOLINES_PER_KIND];

/// The trampolines: each calls `dispatch` with its own number after the arguments of the kernel.
#[unsafe(naked)]
unsafe extern "C-unwind" fn trampolines() {
    #[cfg(target_arch = "x86_64")]
    core::arch::naked_asm!(
        ".balign {bytes}",
        ".set ginnel_trampoline, 0",
        ".rept {count}",
        // mov ecx, …
        ".byte 0xb9",
        ".long ginnel_trampoline",
        "jmp {run}",
        ".balign {bytes}",
        ".set ginnel_trampoline, ginnel_trampoline + 1",
        ".endr",
        bytes = const TRAMPOLINE_BYTES,
        count = const 2 * TRAMPOLINES_PER_KIND,
        run = sym dispatch,
    );
    #[cfg(target_arch = "aarch64")]
    core::arch::naked_asm!(
        ".balign {bytes}",
        ".set ginnel_trampoline, 0",
        ".rept {count}",
        // movz w3, …
        ".inst 0x52800003 | (ginnel_trampoline << 5)",
        "b {run}",
        ".balign {bytes}",
        ".set ginnel_trampoline, ginnel_trampoline + 1",
        ".endr",
        bytes = const TRAMPOLINE_BYTES,
        count = const 2 * TRAMPOLINES_PER_KIND,
        run = sym dispatch,
    );
}

fn first_trampoline() -> usize {
    (trampolines as *const ()).expose_provenance().next_multiple_of(TRAMPOLINE_BYTES)
}

/// Returns the trampoline to install for a handler with three arguments (`SA_SIGINFO`) or with one. Returns
/// `None` if there are too many handlers: then the handler itself must be installed.
pub fn trampoline(handler: usize, has_siginfo: bool) -> Option<usize> {
    if handler_of(handler).is_some() {
        // The program has read the trampoline by a system call that is not hooked.
        return Some(handler);
    }
    let first = if has_siginfo { TRAMPOLINES_PER_KIND } else { 0 };
    // Functions are aligned to 16 bytes.
    let wanted = handler >> 4;
    let found =
        (0..TRAMPOLINES_PER_KIND).map(|step| first + (wanted + step) % TRAMPOLINES_PER_KIND).find(|index| {
            let found = HANDLERS[*index].compare_exchange(0, handler, Ordering::Relaxed, Ordering::Relaxed);
            found.is_ok() || found == Err(handler)
        });
    found.map(|index| first_trampoline() + index * TRAMPOLINE_BYTES)
}

/// Returns the handler of a trampoline, and whether it takes three arguments. Returns `None` if the address
/// is not a trampoline's.
pub fn handler_of(address: usize) -> Option<(usize, bool)> {
    let offset =
        address.checked_sub(first_trampoline()).filter(|offset| offset.is_multiple_of(TRAMPOLINE_BYTES))?;
    let index = offset / TRAMPOLINE_BYTES;
    let handler = HANDLERS.get(index)?.load(Ordering::Relaxed);
    (handler != 0).then_some((handler, index >= TRAMPOLINES_PER_KIND))
}

/// Runs a handler or defers its signal; called by a trampoline. Handlers may leave it by `siglongjmp`,
/// `pthread_exit` or an exception.
unsafe extern "C-unwind" fn dispatch(
    signal: c_int,
    info: *mut siginfo_t,
    context: *mut ucontext_t,
    index: u32,
) {
    if fault_signals::is_fault_signal(signal) {
        // SAFETY: the kernel passes valid pointers to a handler.
        if unsafe { fault_signals::fix_up(&*info, &mut *context) } {
            rearm_one_shot(signal, index as usize);
            return;
        }
        fault_signals::before_handler(signal);
    }
    // SAFETY: the kernel passes valid pointers to a handler.
    if lock::defers_signals() && unsafe { defer(signal, &*info, &mut *context, index as usize) } {
        return;
    }
    let handler = ptr::with_exposed_provenance::<c_void>(HANDLERS[index as usize].load(Ordering::Relaxed));
    type Handler = unsafe extern "C-unwind" fn(c_int, *mut siginfo_t, *mut ucontext_t);
    // SAFETY: the program has installed it as a handler. The kernel passes three arguments to handlers with
    // one, too.
    let handler = unsafe { core::mem::transmute::<*const c_void, Handler>(handler) };
    let (others, interrupted) = (lock::handlers_ran(), Interrupted::enter());
    lock::set_handler_begun(true);
    // SAFETY: the arguments are those of the kernel.
    unsafe { handler(signal, info, context) };
    // Handlers that ran in the handler's own calls, or that interrupted it, do not concern the interrupted
    // call.
    lock::set_handlers_ran(others | bit(signal));
    // SAFETY: the context is the kernel's, and the handler has returned.
    let context = unsafe { &mut *context };
    interrupted.leave(context);
    restart_sleep(context);
}

/// Returns the signals that deferral blocks: all but synchronous ones, which are delivered all the same,
/// those that libc uses, and those that cannot be caught.
fn deferral_mask() -> SignalSet {
    const {
        let mut set = u64::MAX;
        let mut index = 0;
        while index < SYNCHRONOUS_SIGNALS.len() {
            set &= !bit(SYNCHRONOUS_SIGNALS[index]);
            index += 1;
        }
        set & !bit(LIBC_SIGNALS[0]) & !bit(LIBC_SIGNALS[1]) & !bit(libc::SIGKILL) & !bit(libc::SIGSTOP)
    }
}

/// Defers a signal until this thread has released the lock. Returns false if the signal must be handled at
/// once.
#[cold]
fn defer(signal: c_int, info: &siginfo_t, context: &mut ucontext_t, index: usize) -> bool {
    let is_synchronous = SYNCHRONOUS_SIGNALS.contains(&signal) && info.si_code > 0;
    // `abort` continues when its handler has returned.
    let is_abort = signal == libc::SIGABRT && info.si_code == libc::SI_TKILL;
    if is_synchronous || is_abort || !SIGNALS.contains(&signal) {
        return false;
    }
    let blocked = syscall::kernel_sigset(&context.uc_sigmask);
    let all = blocked | deferral_mask() | bit(signal);
    let Ok(in_handler) = syscall::blocked_signals() else { return false };
    syscall::set_signal_mask(all);
    if syscall::requeue_signal(signal, info).is_err() {
        // `RLIMIT_SIGPENDING` is reached.
        syscall::set_signal_mask(in_handler);
        return false;
    }
    rearm_one_shot(signal, index);
    syscall::set_kernel_sigset(&mut context.uc_sigmask, all);
    lock::note_deferred(blocked);
    true
}

/// Installs a one-shot handler (`SA_RESETHAND`) again, because it has not run.
fn rearm_one_shot(signal: c_int, index: usize) {
    let Ok(mut action) = syscall::sigaction(signal) else { return };
    if action.handler == libc::SIG_DFL && action.flags & libc::SA_RESETHAND as u32 as u64 != 0 {
        action.handler = first_trampoline() + index * TRAMPOLINE_BYTES;
        // SAFETY: the disposition is the one that was in force before the signal arrived.
        let _ = unsafe { syscall::set_sigaction(signal, &action) };
    }
}

/// Makes a thread that was about to sleep check for handlers again.
fn restart_sleep(context: &mut ucontext_t) {
    #[cfg(target_arch = "x86_64")]
    {
        let place = &mut context.uc_mcontext.gregs[libc::REG_RIP as usize];
        *place = syscall::resume_address(*place as usize) as i64;
    }
    #[cfg(target_arch = "aarch64")]
    {
        let place = &mut context.uc_mcontext.pc;
        *place = syscall::resume_address(*place as usize) as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicBool, AtomicI32};
    use rustix::io::Errno;
    use std::time::{Duration, Instant};

    #[test]
    fn handlers_get_trampolines_until_none_is_left() {
        // Other tests need trampolines for the handlers of the standard library.
        fault_signals::install();
        let fake_handler = |number: usize| number << 4;
        let installed: Vec<_> = (1..)
            .map(fake_handler)
            .map_while(|handler| Some((handler, trampoline(handler, true)?)))
            .collect();
        assert!(installed.len() >= TRAMPOLINES_PER_KIND - 2, "{}", installed.len());
        for (handler, address) in &installed {
            assert_eq!(handler_of(*address), Some((*handler, true)));
            assert_eq!(trampoline(*handler, true), Some(*address));
            // A trampoline is its own trampoline, whatever its kind.
            assert_eq!(trampoline(*address, false), Some(*address));
        }
        let other = trampoline(16, false).unwrap();
        assert_eq!(handler_of(other), Some((16, false)));
        for other_address in [
            0,
            other + 1,
            first_trampoline() - TRAMPOLINE_BYTES,
            first_trampoline() + 2 * TRAMPOLINES_PER_KIND * TRAMPOLINE_BYTES,
        ] {
            assert_eq!(handler_of(other_address), None);
        }
    }

    static COUNT: AtomicI32 = AtomicI32::new(0);

    extern "C" fn count(_: c_int) {
        COUNT.fetch_add(1, Ordering::Relaxed);
    }

    extern "C" fn nothing(_: c_int) {}

    fn install(signal: c_int, handler: extern "C" fn(c_int), flags: c_int) {
        // SAFETY: an all-zero action is valid, and so is the handler.
        unsafe {
            let mut action: libc::sigaction = core::mem::zeroed();
            action.sa_sigaction = trampoline(handler as *const () as usize, false).unwrap();
            action.sa_flags = flags | libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(signal, &raw const action, ptr::null_mut()), 0);
        }
    }

    fn raise(signal: c_int) {
        // SAFETY: the signal has a handler.
        unsafe { libc::raise(signal) };
    }

    #[test]
    fn signals_inside_a_section_are_deferred() {
        // No other test of this process uses these signals.
        let (first, second) = (libc::SIGRTMIN() + 5, libc::SIGRTMIN() + 6);
        install(first, count, libc::SA_RESETHAND);
        install(second, count, 0);
        let before = syscall::blocked_signals().unwrap();
        let outer = lock::SignalDeferred::new(|| {
            raise(first);
            lock::SignalDeferred::new(|| raise(second));
            raise(second);
            assert_eq!(COUNT.load(Ordering::Relaxed), 0);
            assert_eq!(lock::blocked_signals(), Ok(before));
            // Synchronous signals and those that libc uses stay unblocked.
            assert_eq!(syscall::blocked_signals().unwrap() & !before, deferral_mask() & !before);
        });
        assert_eq!(COUNT.load(Ordering::Relaxed), 3);
        assert_eq!(syscall::blocked_signals(), Ok(before));
        assert_eq!(lock::handlers_ran(), bit(first) | bit(second));
        assert_eq!(syscall::sigaction(first).unwrap().handler, libc::SIG_DFL);
        drop(outer);
    }

    #[test]
    fn handler_just_before_sleep_ends_it() {
        static ASKED: AtomicBool = AtomicBool::new(false);
        static OVER: AtomicBool = AtomicBool::new(false);
        let signal = libc::SIGRTMIN() + 7;
        install(signal, nothing, 0);
        // SAFETY: `pthread_self` always succeeds.
        let thread = unsafe { libc::pthread_self() };
        let sender = std::thread::spawn(move || {
            for round in 0u32.. {
                while !ASKED.swap(false, Ordering::Acquire) {
                    if OVER.load(Ordering::Relaxed) {
                        return;
                    }
                    core::hint::spin_loop();
                }
                // Vary the delay around the moment at which the other thread falls asleep.
                for _ in 0..round % 64 {
                    core::hint::spin_loop();
                }
                // SAFETY: that thread waits for this one.
                unsafe { libc::pthread_kill(thread, signal) };
            }
        });
        let end = Instant::now() + Duration::from_secs(2);
        let wait = Some(libc::timespec { tv_sec: 5, tv_nsec: 0 });
        let mut rounds = 0;
        while Instant::now() < end {
            lock::clear_handlers_ran();
            ASKED.store(true, Ordering::Release);
            assert_eq!(syscall::ppoll(&mut [], wait, None, bit(signal)), Err(Errno::INTR), "after {rounds}");
            // A handler of a signal outside of the set does not end the sleep.
            assert_eq!(syscall::ppoll(&mut [], Some(NOW), None, !bit(signal)), Ok(0));
            rounds += 1;
        }
        OVER.store(true, Ordering::Relaxed);
        sender.join().unwrap();
        assert!(rounds > 100, "{rounds}");
    }

    const NOW: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 0 };
}
