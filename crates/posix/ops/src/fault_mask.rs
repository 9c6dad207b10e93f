//! Threads that block `SIGSEGV` or `SIGBUS`. The kernel kills a program for a fault whose signal is blocked;
//! no handler makes the fault an error of the call then (`fault_signals`). So a copy from or to the program's
//! memory unblocks both signals while it runs, if the thread blocks one of them.
//!
//! Asking the kernel at each copy would cost a system call. A byte of each thread remembers that neither
//! signal is blocked, and the copy routine asks only if the byte does not say so: in the first copy of a
//! thread, after a hook has seen that the program blocks one of the signals, and in handlers, whose mask
//! depends on the interrupted code. A jump to a mask that was saved earlier (`siglongjmp`, `setcontext`)
//! is not seen.
#![allow(unsafe_code)] // a variable of the thread that the copy routine reads

use crate::signal::{SignalSet, bit};
use crate::syscall;
use core::ffi::c_int;
use libc::{siginfo_t, ucontext_t};

/// The signals of faults.
const FAULT_SIGNALS: SignalSet = bit(libc::SIGSEGV) | bit(libc::SIGBUS);

/// The thread may block a signal of faults. Every thread begins with this value.
const UNKNOWN: u8 = 0;
/// The thread blocks no signal of faults.
pub(crate) const UNBLOCKED: u8 = 1;
/// The thread blocks one, and a copy has unblocked it for its duration.
const LIFTED: u8 = 2;

unsafe extern "C" {
    /// Returns the address of the byte of this thread, which is valid as long as the thread lives.
    fn ginnel_fault_mask_address() -> *mut u8;
}

// The variable is in the static block of the thread (initial-exec), where two instructions reach it: the
// library is loaded at the start of the program.
#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".pushsection .tbss.ginnel_fault_mask, \"awT\", @nobits",
    ".globl ginnel_fault_mask",
    ".hidden ginnel_fault_mask",
    ".type ginnel_fault_mask, @tls_object",
    ".size ginnel_fault_mask, 1",
    "ginnel_fault_mask: .zero 1",
    ".popsection",
    ".pushsection .text.ginnel_fault_mask_address, \"ax\", @progbits",
    ".globl ginnel_fault_mask_address",
    ".hidden ginnel_fault_mask_address",
    ".type ginnel_fault_mask_address, @function",
    "ginnel_fault_mask_address:",
    ".cfi_startproc",
    "mov rax, qword ptr fs:[0]",
    "add rax, qword ptr [rip + ginnel_fault_mask@GOTTPOFF]",
    "ret",
    ".cfi_endproc",
    ".size ginnel_fault_mask_address, . - ginnel_fault_mask_address",
    ".popsection",
);

#[cfg(target_arch = "aarch64")]
core::arch::global_asm!(
    ".pushsection .tbss.ginnel_fault_mask, \"awT\", @nobits",
    ".globl ginnel_fault_mask",
    ".hidden ginnel_fault_mask",
    ".type ginnel_fault_mask, @tls_object",
    ".size ginnel_fault_mask, 1",
    "ginnel_fault_mask: .zero 1",
    ".popsection",
    ".pushsection .text.ginnel_fault_mask_address, \"ax\", @progbits",
    ".globl ginnel_fault_mask_address",
    ".hidden ginnel_fault_mask_address",
    ".type ginnel_fault_mask_address, @function",
    "ginnel_fault_mask_address:",
    ".cfi_startproc",
    "mrs x0, tpidr_el0",
    "adrp x1, :gottprel:ginnel_fault_mask",
    "ldr x1, [x1, :gottprel_lo12:ginnel_fault_mask]",
    "add x0, x0, x1",
    "ret",
    ".cfi_endproc",
    ".size ginnel_fault_mask_address, . - ginnel_fault_mask_address",
    ".popsection",
);

fn state() -> u8 {
    // SAFETY: the byte belongs to this thread; handlers that interrupt the thread access it before or after.
    unsafe { ginnel_fault_mask_address().read_volatile() }
}

fn set_state(state: u8) {
    // SAFETY: as above.
    unsafe { ginnel_fault_mask_address().write_volatile(state) };
}

/// Must be called after the program has changed the signal mask of this thread. `how` and `signals` are the
/// arguments of `sigprocmask`.
pub fn after_change(how: c_int, signals: SignalSet) {
    if how != libc::SIG_UNBLOCK && signals & FAULT_SIGNALS != 0 {
        set_state(UNKNOWN);
    }
}

/// Runs a copy that continues at its fix-up address after a fault, although this thread may block the signals
/// of faults. No handler of another signal runs while they are unblocked.
#[cold]
pub(crate) fn unblock_during<T>(copy: impl FnOnce() -> T) -> T {
    let Ok(blocked) = syscall::replace_signal_mask(SignalSet::MAX) else { return copy() };
    if blocked & FAULT_SIGNALS == 0 {
        set_state(UNBLOCKED);
        syscall::set_signal_mask(blocked);
        return copy();
    }
    set_state(LIFTED);
    syscall::set_signal_mask(!FAULT_SIGNALS);
    let result = copy();
    set_state(UNKNOWN);
    syscall::set_signal_mask(blocked);
    result
}

/// Postpones a signal of faults that another process or thread has sent, if this thread blocks the signal and
/// only a copy has unblocked it. Returns false if the signal must be handled.
pub(crate) fn postpone(signal: c_int, info: &siginfo_t, context: &mut ucontext_t) -> bool {
    if state() != LIFTED {
        return false;
    }
    // Until the handler returns; the queued signal would interrupt it otherwise.
    let Ok(in_handler) = syscall::replace_signal_mask(SignalSet::MAX) else { return false };
    if syscall::requeue_signal(signal, info).is_err() {
        syscall::set_signal_mask(in_handler);
        return false;
    }
    let blocked = syscall::kernel_sigset(&context.uc_sigmask) | bit(signal);
    syscall::set_kernel_sigset(&mut context.uc_sigmask, blocked);
    true
}

/// The state of a thread that a handler of the program has interrupted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interrupted(u8);

impl Interrupted {
    /// Must be called before the handler runs, whose mask is not known.
    pub fn enter() -> Self {
        let before = Self(state());
        set_state(UNKNOWN);
        before
    }

    /// Must be called after the handler. When the handler returns, the thread has the mask in `context`.
    pub fn leave(self, context: &ucontext_t) {
        let blocked = syscall::kernel_sigset(&context.uc_sigmask) & FAULT_SIGNALS;
        set_state(match (self.0, blocked) {
            (LIFTED, _) => LIFTED,
            (_, 0) => UNBLOCKED,
            _ => UNKNOWN,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{fault_signals, user_memory};
    use rustix::io::Errno;

    fn read_null() -> Result<u64, Errno> {
        // SAFETY: any bytes are a number.
        unsafe { user_memory::read(core::ptr::null::<u64>()) }
    }

    #[test]
    fn fault_is_an_error_while_its_signal_is_blocked() {
        fault_signals::install();
        // In a thread of its own, because the mask is the thread's.
        std::thread::spawn(|| {
            assert_eq!(state(), UNKNOWN);
            assert_eq!(read_null(), Err(Errno::FAULT));
            assert_eq!(state(), UNBLOCKED);
            let before = syscall::replace_signal_mask(FAULT_SIGNALS).unwrap();
            after_change(libc::SIG_SETMASK, FAULT_SIGNALS);
            for _ in 0..2 {
                assert_eq!(read_null(), Err(Errno::FAULT));
                assert_eq!((state(), syscall::blocked_signals()), (UNKNOWN, Ok(FAULT_SIGNALS)));
            }
            syscall::set_signal_mask(before);
            after_change(libc::SIG_SETMASK, before);
            assert_eq!(read_null(), Err(Errno::FAULT));
            assert_eq!((state(), syscall::blocked_signals()), (UNBLOCKED, Ok(before)));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn other_changes_of_the_mask_are_not_asked_about() {
        std::thread::spawn(|| {
            unblock_during(|| ());
            let others = !FAULT_SIGNALS;
            for (how, signals) in
                [(libc::SIG_BLOCK, others), (libc::SIG_SETMASK, others), (libc::SIG_UNBLOCK, FAULT_SIGNALS)]
            {
                after_change(how, signals);
                assert_eq!(state(), UNBLOCKED, "{how}");
            }
        })
        .join()
        .unwrap();
    }
}
