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

use crate::signal::{FAULTS, OF_LIBC, SIGNALS, SignalSet, bit};
use crate::{held, raw};
use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};
use libc::{siginfo_t, ucontext_t};

/// Different handlers of either kind, of one argument and of three: programs have a few dozen. Further ones are installed as they are.
const PLACES: usize = 512;
/// Bytes of an entry.
const ENTRY_BYTES: usize = 16;

/// What stands behind the entries, 0 behind those that are free: first handlers of one argument, then those of three. None is ever given back.
static HANDLERS: [AtomicUsize; 2 * PLACES] = [const { AtomicUsize::new(0) }; 2 * PLACES];

/// The entries: each calls `run` with its number behind what the kernel has told.
#[unsafe(naked)]
unsafe extern "C-unwind" fn entries() {
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
        bytes = const ENTRY_BYTES,
        count = const 2 * PLACES,
        run = sym run,
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
        bytes = const ENTRY_BYTES,
        count = const 2 * PLACES,
        run = sym run,
    );
}

fn first_entry() -> usize {
    (entries as *const ()).expose_provenance().next_multiple_of(ENTRY_BYTES)
}

/// What is to be installed for a handler, of three arguments (`SA_SIGINFO`) or of one. `None`: the handler itself, as there are too many.
pub fn entry(handler: usize, of_three: bool) -> Option<usize> {
    if behind(handler).is_some() {
        // It was asked for past the library.
        return Some(handler);
    }
    let first = if of_three { PLACES } else { 0 };
    // Handlers begin at multiples of 16.
    let wanted = handler >> 4;
    let found = (0..PLACES).map(|step| first + (wanted + step) % PLACES).find(|at| {
        let there = HANDLERS[*at].compare_exchange(0, handler, Ordering::Relaxed, Ordering::Relaxed);
        there.is_ok() || there == Err(handler)
    });
    found.map(|at| first_entry() + at * ENTRY_BYTES)
}

/// The handler behind an entry, and whether it is of three arguments. `None`: it is no entry.
pub fn behind(entry: usize) -> Option<(usize, bool)> {
    let offset = entry.checked_sub(first_entry()).filter(|offset| offset.is_multiple_of(ENTRY_BYTES))?;
    let at = offset / ENTRY_BYTES;
    let handler = HANDLERS.get(at)?.load(Ordering::Relaxed);
    (handler != 0).then_some((handler, at >= PLACES))
}

/// What the kernel calls, by an entry. Handlers leave it in whatever way they like: by `siglongjmp`, `pthread_exit`, an exception.
unsafe extern "C-unwind" fn run(signal: c_int, info: *mut siginfo_t, context: *mut ucontext_t, at: u32) {
    // SAFETY: what the kernel tells a handler.
    if held::puts_off() && unsafe { put_off(signal, &*info, &mut *context, at as usize) } {
        return;
    }
    let handler = ptr::with_exposed_provenance::<c_void>(HANDLERS[at as usize].load(Ordering::Relaxed));
    type Handler = unsafe extern "C-unwind" fn(c_int, *mut siginfo_t, *mut ucontext_t);
    // SAFETY: the program has installed it as a handler. The kernel calls those of one argument with three, too.
    let handler = unsafe { core::mem::transmute::<*const c_void, Handler>(handler) };
    let others = held::ran();
    // SAFETY: as the kernel would call it.
    unsafe { handler(signal, info, context) };
    // What ran in its own calls and its own interruptions is nothing to the call that it interrupted.
    held::note_what_ran(others | bit(signal));
    // SAFETY: as above; the handler is over.
    go_on(unsafe { &mut *context });
}

/// Signals that wait while a handler does: not those of what the thread itself does, which come all the same, libc's own, and those that have no handlers.
fn waiting() -> SignalSet {
    const {
        let mut set = u64::MAX;
        let mut at = 0;
        while at < FAULTS.len() {
            set &= !bit(FAULTS[at]);
            at += 1;
        }
        set & !bit(OF_LIBC[0]) & !bit(OF_LIBC[1]) & !bit(libc::SIGKILL) & !bit(libc::SIGSTOP)
    }
}

/// Leaves a signal for when this thread has let go of the sockets. False if it is to be handled now.
#[cold]
fn put_off(signal: c_int, info: &siginfo_t, context: &mut ucontext_t, at: usize) -> bool {
    let of_itself = FAULTS.contains(&signal) && info.si_code > 0;
    // `abort` goes on when its handler has returned.
    let ends = signal == libc::SIGABRT && info.si_code == libc::SI_TKILL;
    if of_itself || ends || !SIGNALS.contains(&signal) {
        return false;
    }
    let blocked = raw::kernel_set(&context.uc_sigmask);
    let all = blocked | waiting() | bit(signal);
    let Ok(in_handler) = raw::blocked_signals() else { return false };
    raw::block_signals(all);
    if raw::send_again(signal, info).is_err() {
        // As many signals wait as may.
        raw::block_signals(in_handler);
        return false;
    }
    be_in_force_again(signal, at);
    raw::set_kernel_set(&mut context.uc_sigmask, all);
    held::put_off(blocked);
    true
}

/// A handler that is in force once (`SA_RESETHAND`) has not run yet.
fn be_in_force_again(signal: c_int, at: usize) {
    let Ok(mut action) = raw::action(signal) else { return };
    if action.handler == libc::SIG_DFL && action.flags & libc::SA_RESETHAND as u32 as u64 != 0 {
        action.handler = first_entry() + at * ENTRY_BYTES;
        // SAFETY: as it was before this signal came.
        let _ = unsafe { raw::set_action(signal, &action) };
    }
}

/// A thread that was about to sleep looks again.
fn go_on(context: &mut ucontext_t) {
    #[cfg(target_arch = "x86_64")]
    {
        let place = &mut context.uc_mcontext.gregs[libc::REG_RIP as usize];
        *place = raw::goes_on_at(*place as usize) as i64;
    }
    #[cfg(target_arch = "aarch64")]
    {
        let place = &mut context.uc_mcontext.pc;
        *place = raw::goes_on_at(*place as usize) as u64;
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
            (1..).map(made).map_while(|handler| Some((handler, entry(handler, true)?))).collect();
        assert_eq!(entries.len(), PLACES);
        for (handler, entry_of_it) in &entries {
            assert_eq!(behind(*entry_of_it), Some((*handler, true)));
            assert_eq!(entry(*handler, true), Some(*entry_of_it));
            // Said again, in whatever way.
            assert_eq!(entry(*entry_of_it, false), Some(*entry_of_it));
        }
        let other = entry(16, false).unwrap();
        assert_eq!(behind(other), Some((16, false)));
        for no_entry in [0, other + 1, first_entry() - ENTRY_BYTES, first_entry() + 2 * PLACES * ENTRY_BYTES]
        {
            assert_eq!(behind(no_entry), None);
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
            action.sa_sigaction = entry(handler as *const () as usize, false).unwrap();
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
        let before = raw::blocked_signals().unwrap();
        let outer = held::Whole::new(|| {
            raise(first);
            held::Whole::new(|| raise(second));
            raise(second);
            assert_eq!(COUNT.load(Ordering::Relaxed), 0);
            assert_eq!(held::blocked_signals(), Ok(before));
            // Faults come, and libc's own.
            assert_eq!(raw::blocked_signals().unwrap() & !before, waiting() & !before);
        });
        assert_eq!(COUNT.load(Ordering::Relaxed), 3);
        assert_eq!(raw::blocked_signals(), Ok(before));
        assert_eq!(held::ran(), bit(first) | bit(second));
        assert_eq!(raw::action(first).unwrap().handler, libc::SIG_DFL);
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
            held::forget_what_ran();
            ASKED.store(true, Ordering::Release);
            assert_eq!(raw::ppoll(&mut [], wait, None, bit(signal)), Err(Errno::INTR), "after {rounds}");
            // The handler of one that the sleep does not heed is no reason.
            assert_eq!(raw::ppoll(&mut [], Some(NOW), None, !bit(signal)), Ok(0));
            rounds += 1;
        }
        OVER.store(true, Ordering::Relaxed);
        sender.join().unwrap();
        assert!(rounds > 100, "{rounds}");
    }

    const NOW: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 0 };
}
