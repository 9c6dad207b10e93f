//! Handlers of the program's signals, in front of which the library stands: one that comes in the middle of a call is put off until the call sleeps or is over, as
//! on Linux, where system calls do their work between handlers. So handlers may do to sockets what they like, and may leave by `siglongjmp`.
//!
//! What the kernel is told instead of a handler is an entry of this file's, one for each handler that the program has ever installed: what is in force about a
//! signal the kernel alone knows, and threads that install handlers at the same time, children that share memory and handlers that are in force once
//! (`SA_RESETHAND`) need no thought. The entry's flags and mask are the program's, but for `SA_SIGINFO`, which is always set.
//!
//! A handler that comes while its thread holds the sockets sends its signal to the same thread again, with all that was told about it, blocks all signals and returns. When
//! the sockets are let go of, the mask is put back, and the kernel delivers the signal with the stack, mask and context that it is to have.
//!
//! A sleep is not begun when a handler ran since its call had looked for the last time. The look and the system call are a few instructions (`raw`), and a handler that
//! interrupts them returns to the first.
#![allow(unsafe_code)] // functions that the kernel calls

use crate::signal::{LIBC_SIGNALS, SIGNALS, SYNCHRONOUS_SIGNALS, SignalSet, bit};
use crate::{lock, syscall};
use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};
use libc::{siginfo_t, ucontext_t};

/// Different handlers of either kind, of one argument and of three: programs have a few dozen. Further ones are installed as they are.
const TRAMPOLINES_PER_KIND: usize = 512;
/// Bytes of an entry.
const TRAMPOLINE_BYTES: usize = 16;

/// What stands behind the entries, 0 behind those that are free: first handlers of one argument, then those of three. None is ever given back.
static HANDLERS: [AtomicUsize; 2 * TRAMPOLINES_PER_KIND] =
    [const { AtomicUsize::new(0) }; 2 * TRAMPOLINES_PER_KIND];

/// The entries: each calls `run` with its number behind what the kernel has told.
#[unsafe(naked)]
unsafe extern "C-unwind" fn trampolines() {
    #[cfg(target_arch = "x86_64")]
    core::arch::naked_asm!(
        ".balign {bytes}",
        ".set ginnel_entry, 0",
        ".rept {count}",
        // mov ecx, …
        ".byte 0xb9",
        ".long ginnel_entry",
        "jmp {run}",
        ".balign {bytes}",
        ".set ginnel_entry, ginnel_entry + 1",
        ".endr",
        bytes = const TRAMPOLINE_BYTES,
        count = const 2 * TRAMPOLINES_PER_KIND,
        run = sym dispatch,
    );
    #[cfg(target_arch = "aarch64")]
    core::arch::naked_asm!(
        ".balign {bytes}",
        ".set ginnel_entry, 0",
        ".rept {count}",
        // movz w3, …
        ".inst 0x52800003 | (ginnel_entry << 5)",
        "b {run}",
        ".balign {bytes}",
        ".set ginnel_entry, ginnel_entry + 1",
        ".endr",
        bytes = const TRAMPOLINE_BYTES,
        count = const 2 * TRAMPOLINES_PER_KIND,
        run = sym dispatch,
    );
}

fn first_trampoline() -> usize {
    (trampolines as *const ()).expose_provenance().next_multiple_of(TRAMPOLINE_BYTES)
}

/// What is to be installed for a handler, of three arguments (`SA_SIGINFO`) or of one. `None`: the handler itself, as there are too many.
pub fn trampoline(handler: usize, of_three: bool) -> Option<usize> {
    if handler_of(handler).is_some() {
        // It was asked for past the library.
        return Some(handler);
    }
    let first = if of_three { TRAMPOLINES_PER_KIND } else { 0 };
    // Handlers begin at multiples of 16.
    let wanted = handler >> 4;
    let found =
        (0..TRAMPOLINES_PER_KIND).map(|step| first + (wanted + step) % TRAMPOLINES_PER_KIND).find(|at| {
            let there = HANDLERS[*at].compare_exchange(0, handler, Ordering::Relaxed, Ordering::Relaxed);
            there.is_ok() || there == Err(handler)
        });
    found.map(|at| first_trampoline() + at * TRAMPOLINE_BYTES)
}

/// The handler behind an entry, and whether it is of three arguments. `None`: it is no entry.
pub fn handler_of(entry: usize) -> Option<(usize, bool)> {
    let offset =
        entry.checked_sub(first_trampoline()).filter(|offset| offset.is_multiple_of(TRAMPOLINE_BYTES))?;
    let at = offset / TRAMPOLINE_BYTES;
    let handler = HANDLERS.get(at)?.load(Ordering::Relaxed);
    (handler != 0).then_some((handler, at >= TRAMPOLINES_PER_KIND))
}

/// What the kernel calls, by an entry. Handlers leave it in whatever way they like: by `siglongjmp`, `pthread_exit`, an exception.
unsafe extern "C-unwind" fn dispatch(signal: c_int, info: *mut siginfo_t, context: *mut ucontext_t, at: u32) {
    // SAFETY: what the kernel tells a handler.
    if lock::defers_signals() && unsafe { defer(signal, &*info, &mut *context, at as usize) } {
        return;
    }
    let handler = ptr::with_exposed_provenance::<c_void>(HANDLERS[at as usize].load(Ordering::Relaxed));
    type Handler = unsafe extern "C-unwind" fn(c_int, *mut siginfo_t, *mut ucontext_t);
    // SAFETY: the program has installed it as a handler. The kernel calls those of one argument with three, too.
    let handler = unsafe { core::mem::transmute::<*const c_void, Handler>(handler) };
    let others = lock::handlers_ran();
    // SAFETY: as the kernel would call it.
    unsafe { handler(signal, info, context) };
    // What ran in its own calls and its own interruptions is nothing to the call that it interrupted.
    lock::set_handlers_ran(others | bit(signal));
    // SAFETY: as above; the handler is over.
    restart_sleep(unsafe { &mut *context });
}

/// Signals that wait while a handler does: not those of what the thread itself does, which come all the same, libc's own, and those that have no handlers.
fn deferral_mask() -> SignalSet {
    const {
        let mut set = u64::MAX;
        let mut at = 0;
        while at < SYNCHRONOUS_SIGNALS.len() {
            set &= !bit(SYNCHRONOUS_SIGNALS[at]);
            at += 1;
        }
        set & !bit(LIBC_SIGNALS[0]) & !bit(LIBC_SIGNALS[1]) & !bit(libc::SIGKILL) & !bit(libc::SIGSTOP)
    }
}

/// Leaves a signal for when this thread has let go of the sockets. False if it is to be handled now.
#[cold]
fn defer(signal: c_int, info: &siginfo_t, context: &mut ucontext_t, at: usize) -> bool {
    let of_itself = SYNCHRONOUS_SIGNALS.contains(&signal) && info.si_code > 0;
    // `abort` goes on when its handler has returned.
    let ends = signal == libc::SIGABRT && info.si_code == libc::SI_TKILL;
    if of_itself || ends || !SIGNALS.contains(&signal) {
        return false;
    }
    let blocked = syscall::kernel_sigset(&context.uc_sigmask);
    let all = blocked | deferral_mask() | bit(signal);
    let Ok(in_handler) = syscall::blocked_signals() else { return false };
    syscall::set_signal_mask(all);
    if syscall::requeue_signal(signal, info).is_err() {
        // As many signals wait as may.
        syscall::set_signal_mask(in_handler);
        return false;
    }
    rearm_one_shot(signal, at);
    syscall::set_kernel_sigset(&mut context.uc_sigmask, all);
    lock::note_deferred(blocked);
    true
}

/// A handler that is in force once (`SA_RESETHAND`) has not run yet.
fn rearm_one_shot(signal: c_int, at: usize) {
    let Ok(mut action) = syscall::sigaction(signal) else { return };
    if action.handler == libc::SIG_DFL && action.flags & libc::SA_RESETHAND as u32 as u64 != 0 {
        action.handler = first_trampoline() + at * TRAMPOLINE_BYTES;
        // SAFETY: as it was before this signal came.
        let _ = unsafe { syscall::set_sigaction(signal, &action) };
    }
}

/// A thread that was about to sleep looks again.
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
    fn each_handler_has_an_entry_as_long_as_there_are_any() {
        let made = |number: usize| number << 4;
        let entries: Vec<_> =
            (1..).map(made).map_while(|handler| Some((handler, trampoline(handler, true)?))).collect();
        assert_eq!(entries.len(), TRAMPOLINES_PER_KIND);
        for (handler, entry_of_it) in &entries {
            assert_eq!(handler_of(*entry_of_it), Some((*handler, true)));
            assert_eq!(trampoline(*handler, true), Some(*entry_of_it));
            // Said again, in whatever way.
            assert_eq!(trampoline(*entry_of_it, false), Some(*entry_of_it));
        }
        let other = trampoline(16, false).unwrap();
        assert_eq!(handler_of(other), Some((16, false)));
        for no_entry in [
            0,
            other + 1,
            first_trampoline() - TRAMPOLINE_BYTES,
            first_trampoline() + 2 * TRAMPOLINES_PER_KIND * TRAMPOLINE_BYTES,
        ] {
            assert_eq!(handler_of(no_entry), None);
        }
    }

    static COUNT: AtomicI32 = AtomicI32::new(0);

    extern "C" fn count(_: c_int) {
        COUNT.fetch_add(1, Ordering::Relaxed);
    }

    extern "C" fn nothing(_: c_int) {}

    fn install(signal: c_int, handler: extern "C" fn(c_int), flags: c_int) {
        // SAFETY: all zero is an action, and the handler is good.
        unsafe {
            let mut action: libc::sigaction = core::mem::zeroed();
            action.sa_sigaction = trampoline(handler as *const () as usize, false).unwrap();
            action.sa_flags = flags | libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(signal, &raw const action, ptr::null_mut()), 0);
        }
    }

    fn raise(signal: c_int) {
        // SAFETY: it has a handler.
        unsafe { libc::raise(signal) };
    }

    #[test]
    fn what_comes_in_the_middle_is_put_off() {
        // No other test of this process has them.
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
            // Faults come, and libc's own.
            assert_eq!(syscall::blocked_signals().unwrap() & !before, deferral_mask() & !before);
        });
        assert_eq!(COUNT.load(Ordering::Relaxed), 3);
        assert_eq!(syscall::blocked_signals(), Ok(before));
        assert_eq!(lock::handlers_ran(), bit(first) | bit(second));
        assert_eq!(syscall::sigaction(first).unwrap().handler, libc::SIG_DFL);
        drop(outer);
    }

    #[test]
    fn a_handler_that_runs_before_a_sleep_ends_it_whenever_it_comes() {
        static ASKED: AtomicBool = AtomicBool::new(false);
        static OVER: AtomicBool = AtomicBool::new(false);
        let signal = libc::SIGRTMIN() + 7;
        install(signal, nothing, 0);
        // SAFETY: it always succeeds.
        let thread = unsafe { libc::pthread_self() };
        let sender = std::thread::spawn(move || {
            for round in 0u32.. {
                while !ASKED.swap(false, Ordering::Acquire) {
                    if OVER.load(Ordering::Relaxed) {
                        return;
                    }
                    core::hint::spin_loop();
                }
                // Around the moment at which the other falls asleep.
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
            // The handler of one that the sleep does not heed is no reason.
            assert_eq!(syscall::ppoll(&mut [], Some(NOW), None, !bit(signal)), Ok(0));
            rounds += 1;
        }
        OVER.store(true, Ordering::Relaxed);
        sender.join().unwrap();
        assert!(rounds > 100, "{rounds}");
    }

    const NOW: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 0 };
}
