//! System calls without libc, whose functions are hooked in a preloaded program and would call this crate
//! again.
#![allow(unsafe_code)] // system calls

use crate::lock;
use crate::user_memory::{UserSlice, UserSliceMut};
use core::ffi::{c_int, c_long};
use core::sync::atomic::AtomicUsize;
use libc::{epoll_event, msghdr, pollfd, siginfo_t, sigset_t, timespec};
use rustix::fd::RawFd;
use rustix::io::Errno;

/// Makes a system call.
///
/// # Safety
/// The arguments must be what the system call of this number expects.
unsafe fn syscall<const N: usize>(number: c_long, arguments: [usize; N]) -> Result<usize, Errno> {
    const { assert!(N <= 6, "no system call has more arguments") };
    let [a, b, c, d, e, f] = core::array::from_fn(|at| arguments.get(at).copied().unwrap_or(0));
    let result: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's promise; the kernel changes no other registers.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the caller's promise; the kernel changes no other registers.
    unsafe {
        core::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a as isize => result, in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
            options(nostack),
        );
    }
    usize::try_from(result).map_err(|_| Errno::from_raw_os_error(-result as c_int))
}

fn fd(number: RawFd) -> usize {
    number as usize
}

pub(crate) fn dup3(from: RawFd, to: RawFd, flags: c_int) -> Result<(), Errno> {
    // SAFETY: no pointer is passed.
    unsafe { syscall(libc::SYS_dup3, [fd(from), fd(to), flags as usize, 0, 0]) }.map(|_| ())
}

/// Returns what a futex compares: the address of the lower half of a word, and the lower half of a value.
fn futex(word: &AtomicUsize, value: usize) -> (usize, usize) {
    const { assert!(cfg!(target_endian = "little")) };
    (word.as_ptr().expose_provenance(), value as u32 as usize)
}

/// Sleeps until [`futex_wake`], if the lower half of the word is that of `value`. May return spuriously.
pub(crate) fn futex_wait(word: &AtomicUsize, value: usize) {
    let (address, value) = futex(word, value);
    let operation = (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG) as usize;
    // SAFETY: the kernel reads a word that lives through the call; there is no time-out.
    let _ = unsafe { syscall(libc::SYS_futex, [address, operation, value, 0]) };
}

/// Wakes one thread that sleeps in [`futex_wait`].
pub(crate) fn futex_wake(word: &AtomicUsize) {
    let (address, count) = futex(word, 1);
    let operation = (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG) as usize;
    // SAFETY: only the address of the word is used.
    let _ = unsafe { syscall(libc::SYS_futex, [address, operation, count]) };
}

pub(crate) fn setsockopt(socket: RawFd, level: c_int, name: c_int, value: &[u8]) -> Result<(), Errno> {
    let arguments =
        [fd(socket), level as usize, name as usize, value.as_ptr().expose_provenance(), value.len()];
    // SAFETY: pointer and length are those of a slice.
    unsafe { syscall(libc::SYS_setsockopt, arguments) }.map(|_| ())
}

/// Sets an option whose value the kernel also changes.
pub(crate) fn setsockopt_mut(
    socket: RawFd,
    level: c_int,
    name: c_int,
    value: &mut [u8],
) -> Result<(), Errno> {
    let arguments =
        [fd(socket), level as usize, name as usize, value.as_mut_ptr().expose_provenance(), value.len()];
    // SAFETY: pointer and length are those of a slice that may be written to.
    unsafe { syscall(libc::SYS_setsockopt, arguments) }.map(|_| ())
}

/// Fills `value`, which has the length of the option's value.
pub(crate) fn getsockopt(socket: RawFd, level: c_int, name: c_int, value: &mut [u8]) -> Result<(), Errno> {
    let mut len = value.len() as libc::socklen_t;
    let (value, len) = (value.as_mut_ptr().expose_provenance(), (&raw mut len).expose_provenance());
    // SAFETY: the pointers are those of a slice and of its length.
    unsafe { syscall(libc::SYS_getsockopt, [fd(socket), level as usize, name as usize, value, len]) }
        .map(|_| ())
}

pub(crate) fn bind(socket: RawFd, address: &[u8]) -> Result<(), Errno> {
    let arguments = [fd(socket), address.as_ptr().expose_provenance(), address.len(), 0, 0];
    // SAFETY: pointer and length are those of a slice.
    unsafe { syscall(libc::SYS_bind, arguments) }.map(|_| ())
}

pub(crate) fn connect(socket: RawFd, address: &[u8]) -> Result<(), Errno> {
    let arguments = [fd(socket), address.as_ptr().expose_provenance(), address.len(), 0, 0];
    // SAFETY: pointer and length are those of a slice.
    unsafe { syscall(libc::SYS_connect, arguments) }.map(|_| ())
}

pub(crate) fn listen(socket: RawFd, backlog: u32) -> Result<(), Errno> {
    // SAFETY: no pointer is passed.
    unsafe { syscall(libc::SYS_listen, [fd(socket), backlog as usize, 0, 0, 0]) }.map(|_| ())
}

/// Makes a system call that writes an address. Returns the address's length and the result of the call.
fn with_address(
    number: c_long,
    socket: RawFd,
    buffer: &mut [u8],
    flags: c_int,
) -> Result<(usize, usize), Errno> {
    let mut len = u32::try_from(buffer.len()).unwrap_or(u32::MAX);
    let pointer = (&raw mut len).expose_provenance();
    let arguments = [fd(socket), buffer.as_mut_ptr().expose_provenance(), pointer, flags as usize, 0];
    // SAFETY: the buffer is as long as `len` says, and both live through the call.
    let result = unsafe { syscall(number, arguments) }?;
    Ok((len as usize, result))
}

pub(crate) fn getsockname(socket: RawFd, buffer: &mut [u8]) -> Result<usize, Errno> {
    with_address(libc::SYS_getsockname, socket, buffer, 0).map(|(len, _)| len)
}

/// Calls `accept4`. Returns the new descriptor, and the length of the peer's address.
pub(crate) fn accept4(socket: RawFd, buffer: &mut [u8], flags: c_int) -> Result<(RawFd, usize), Errno> {
    with_address(libc::SYS_accept4, socket, buffer, flags).map(|(len, new)| (new as RawFd, len))
}

/// The result of `recvmsg`.
pub(crate) struct RecvmsgResult {
    pub count: usize,
    pub name_len: usize,
    pub control_len: usize,
    pub flags: c_int,
}

pub(crate) fn recvmsg(
    socket: RawFd,
    buffers: &mut [UserSliceMut<'_>],
    name: &mut [u8],
    control: &mut [u8],
    flags: c_int,
) -> Result<RecvmsgResult, Errno> {
    // SAFETY: an all-zero message is valid and empty.
    let mut message: msghdr = unsafe { core::mem::zeroed() };
    message.msg_name = name.as_mut_ptr().cast();
    message.msg_namelen = u32::try_from(name.len()).unwrap_or(u32::MAX);
    // `UserSliceMut` has the layout of `iovec`.
    message.msg_iov = buffers.as_mut_ptr().cast();
    message.msg_iovlen = buffers.len() as _;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = control.len() as _;
    let pointer = (&raw mut message).expose_provenance();
    // SAFETY: the message and everything that it points to but the program's buffers live through the call;
    // the kernel checks the latter.
    let count = unsafe { syscall(libc::SYS_recvmsg, [fd(socket), pointer, flags as usize, 0, 0]) }?;
    let (name_len, control_len) = (message.msg_namelen as usize, message.msg_controllen as usize);
    Ok(RecvmsgResult { count, name_len, control_len, flags: message.msg_flags })
}

pub(crate) fn sendmsg(
    socket: RawFd,
    buffers: &[UserSlice<'_>],
    name: &[u8],
    control: &[u8],
    flags: c_int,
) -> Result<usize, Errno> {
    // SAFETY: an all-zero message is valid and empty.
    let mut message: msghdr = unsafe { core::mem::zeroed() };
    if !name.is_empty() {
        message.msg_name = name.as_ptr().cast_mut().cast();
        message.msg_namelen = u32::try_from(name.len()).unwrap_or(u32::MAX);
    }
    // `UserSlice` has the layout of `iovec`.
    message.msg_iov = buffers.as_ptr().cast_mut().cast();
    message.msg_iovlen = buffers.len() as _;
    message.msg_control = control.as_ptr().cast_mut().cast();
    message.msg_controllen = control.len() as _;
    let pointer = (&raw const message).expose_provenance();
    // SAFETY: the message and everything that it points to live through the call, and the kernel only reads
    // it.
    unsafe { syscall(libc::SYS_sendmsg, [fd(socket), pointer, flags as usize, 0, 0]) }
}

/// Requests of epoll instances (`<linux/eventpoll.h>`).
const EPIOCSPARAMS: u32 = 0x4008_8a01;
const EPIOCGPARAMS: u32 = 0x8008_8a02;

/// Returns `struct epoll_params` of an epoll instance.
pub(crate) fn epoll_params(epoll: RawFd) -> Result<[u8; 8], Errno> {
    let mut params = [0; 8];
    let arguments = [fd(epoll), EPIOCGPARAMS as usize, params.as_mut_ptr().expose_provenance()];
    // SAFETY: the kernel writes the eight bytes of the structure, if it knows the request.
    unsafe { syscall(libc::SYS_ioctl, arguments) }.map(|_| params)
}

/// Sets `struct epoll_params` of an epoll instance.
pub(crate) fn set_epoll_params(epoll: RawFd, params: [u8; 8]) -> Result<(), Errno> {
    let arguments = [fd(epoll), EPIOCSPARAMS as usize, params.as_ptr().expose_provenance()];
    // SAFETY: the kernel reads the eight bytes of the structure.
    unsafe { syscall(libc::SYS_ioctl, arguments) }.map(|_| ())
}

unsafe extern "C" {
    /// Checks for handlers that ran, and makes the system call. All arguments are in registers that the
    /// kernel preserves, so a handler can restart the check until the call is made.
    fn ginnel_syscall_unless_handled(
        number: c_long,
        arguments: *const usize,
        ran: *const u64,
        interrupting: u64,
    ) -> isize;
    /// The first instruction of the check.
    static ginnel_check: u8;
    /// The instruction after the system call.
    static ginnel_after_syscall: u8;
}

#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".pushsection .text.ginnel_syscall_unless_handled, \"ax\", @progbits",
    ".globl ginnel_syscall_unless_handled, ginnel_check, ginnel_after_syscall",
    ".hidden ginnel_syscall_unless_handled, ginnel_check, ginnel_after_syscall",
    ".type ginnel_syscall_unless_handled, @function",
    ".balign 16",
    "ginnel_syscall_unless_handled:",
    ".cfi_startproc",
    "push rbx",
    ".cfi_adjust_cfa_offset 8",
    ".cfi_rel_offset rbx, 0",
    "push rbp",
    ".cfi_adjust_cfa_offset 8",
    ".cfi_rel_offset rbp, 0",
    "mov rbx, rdx",
    "mov rbp, rcx",
    "mov rax, rdi",
    "mov rdi, [rsi]",
    "mov rdx, [rsi + 16]",
    "mov r10, [rsi + 24]",
    "mov r8, [rsi + 32]",
    "mov r9, [rsi + 40]",
    "mov rsi, [rsi + 8]",
    "ginnel_check:",
    "test [rbx], rbp",
    "jne 2f",
    "syscall",
    "ginnel_after_syscall:",
    "jmp 3f",
    "2:",
    "mov rax, {interrupted}",
    "3:",
    "pop rbp",
    ".cfi_adjust_cfa_offset -8",
    ".cfi_restore rbp",
    "pop rbx",
    ".cfi_adjust_cfa_offset -8",
    ".cfi_restore rbx",
    "ret",
    ".cfi_endproc",
    ".size ginnel_syscall_unless_handled, . - ginnel_syscall_unless_handled",
    ".popsection",
    interrupted = const -libc::EINTR,
);

#[cfg(target_arch = "aarch64")]
core::arch::global_asm!(
    ".pushsection .text.ginnel_syscall_unless_handled, \"ax\", @progbits",
    ".globl ginnel_syscall_unless_handled, ginnel_check, ginnel_after_syscall",
    ".hidden ginnel_syscall_unless_handled, ginnel_check, ginnel_after_syscall",
    ".type ginnel_syscall_unless_handled, @function",
    ".balign 16",
    "ginnel_syscall_unless_handled:",
    ".cfi_startproc",
    "mov x8, x0",
    "mov x9, x1",
    "mov x10, x2",
    "mov x11, x3",
    "ldp x0, x1, [x9]",
    "ldp x2, x3, [x9, #16]",
    "ldp x4, x5, [x9, #32]",
    "ginnel_check:",
    "ldr x12, [x10]",
    "tst x12, x11",
    "b.ne 2f",
    "svc 0",
    "ginnel_after_syscall:",
    "ret",
    "2:",
    "mov x0, {interrupted}",
    "ret",
    ".cfi_endproc",
    ".size ginnel_syscall_unless_handled, . - ginnel_syscall_unless_handled",
    ".popsection",
    interrupted = const -libc::EINTR,
);

/// Makes a system call that sleeps. Fails with `EINTR` if a handler of one of the `interrupting` signals has
/// run before (see [`lock::handlers_ran`]), even at the last moment.
///
/// # Safety
/// The arguments must be what the system call of this number expects.
unsafe fn interruptible_syscall<const N: usize>(
    number: c_long,
    arguments: [usize; N],
    interrupting: u64,
) -> Result<usize, Errno> {
    const { assert!(N <= 6, "no system call has more arguments") };
    let arguments: [usize; 6] = core::array::from_fn(|at| arguments.get(at).copied().unwrap_or(0));
    // SAFETY: the caller's promise; the word belongs to this thread and lives as long as the thread.
    let result = unsafe {
        ginnel_syscall_unless_handled(number, arguments.as_ptr(), lock::handlers_ran_ptr(), interrupting)
    };
    usize::try_from(result).map_err(|_| Errno::from_raw_os_error(-result as c_int))
}

/// Returns where a thread continues that a handler has interrupted at `address`: at the start of the check if
/// it has not made its system call yet.
pub(crate) fn resume_address(address: usize) -> usize {
    let [check, after] = [(&raw const ginnel_check).addr(), (&raw const ginnel_after_syscall).addr()];
    if (check..after).contains(&address) { check } else { address }
}

/// Calls `ppoll`; without a time-out it waits indefinitely. Also fails with `EINTR` if a handler of one of
/// the `interrupting` signals has run before. Returns how many descriptors are ready.
pub(crate) fn ppoll(
    fds: &mut [pollfd],
    timeout: Option<timespec>,
    mask: Option<u64>,
    interrupting: u64,
) -> Result<usize, Errno> {
    // The kernel stores the remaining time.
    let mut timeout = timeout;
    let timeout = timeout.as_mut().map_or(core::ptr::null_mut(), core::ptr::from_mut);
    let mask = mask.as_ref().map_or(core::ptr::null(), core::ptr::from_ref);
    let arguments = [
        fds.as_mut_ptr().expose_provenance(),
        fds.len(),
        timeout.expose_provenance(),
        mask.expose_provenance(),
        KERNEL_SIGSET_BYTES,
    ];
    // SAFETY: list, time-out and mask live through the call, and the length is that of a slice.
    unsafe { interruptible_syscall(libc::SYS_ppoll, arguments, interrupting) }
}

/// Calls `pselect6` without waiting, for the exceptional conditions of all descriptors of a set. Returns how
/// many descriptors have one.
pub(crate) fn pselect_exceptions_now(set: &mut [u64]) -> Result<usize, Errno> {
    let bits = set.len() * 64;
    loop {
        // The kernel stores the remaining time.
        let mut now = timespec { tv_sec: 0, tv_nsec: 0 };
        let addresses = [set.as_mut_ptr().expose_provenance(), (&raw mut now).expose_provenance()];
        // SAFETY: the set has this number of bits, and set and time-out live through the call.
        let result = unsafe { syscall(libc::SYS_pselect6, [bits, 0, 0, addresses[0], addresses[1], 0]) };
        if result != Err(Errno::INTR) {
            return result;
        }
    }
}

/// Calls `epoll_pwait2` (since Linux 5.11); without a time-out it waits indefinitely. Also fails with `EINTR`
/// if a handler of one of the `interrupting` signals has run before. Returns the number of events.
pub(crate) fn epoll_pwait2(
    set: RawFd,
    events: &mut [epoll_event],
    timeout: Option<timespec>,
    mask: Option<u64>,
    interrupting: u64,
) -> Result<usize, Errno> {
    let timeout = timeout.as_ref().map_or(core::ptr::null(), core::ptr::from_ref);
    let mask = mask.as_ref().map_or(core::ptr::null(), core::ptr::from_ref);
    let arguments = [
        fd(set),
        events.as_mut_ptr().expose_provenance(),
        events.len(),
        timeout.expose_provenance(),
        mask.expose_provenance(),
        KERNEL_SIGSET_BYTES,
    ];
    // SAFETY: buffer, time-out and mask live through the call, and the length is that of a slice.
    unsafe { interruptible_syscall(libc::SYS_epoll_pwait2, arguments, interrupting) }
}

/// Bytes of the kernel's signal set, which is shorter than libc's.
const KERNEL_SIGSET_BYTES: usize = 8;

/// Returns the kernel's part of a signal set of libc.
pub(crate) fn kernel_sigset(set: &sigset_t) -> u64 {
    const { assert!(size_of::<sigset_t>() >= KERNEL_SIGSET_BYTES) };
    // SAFETY: libc's set begins with the kernel's, and is longer.
    unsafe { core::ptr::from_ref(set).cast::<u64>().read_unaligned() }
}

/// Sets the kernel's part of a signal set of libc.
pub(crate) fn set_kernel_sigset(set: &mut sigset_t, signals: u64) {
    // SAFETY: libc's set begins with the kernel's, and is longer.
    unsafe { core::ptr::from_mut(set).cast::<u64>().write_unaligned(signals) };
}

/// The disposition of a signal (`struct kernel_sigaction`).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct KernelSigaction {
    pub handler: usize,
    pub flags: u64,
    restorer: usize,
    mask: u64,
}

pub(crate) fn sigaction(signal: c_int) -> Result<KernelSigaction, Errno> {
    let mut action = KernelSigaction::default();
    let pointer = (&raw mut action).expose_provenance();
    let arguments = [signal as usize, 0, pointer, KERNEL_SIGSET_BYTES, 0];
    // SAFETY: no disposition is passed, and the kernel writes to a structure of its own layout.
    unsafe { syscall(libc::SYS_rt_sigaction, arguments) }?;
    Ok(action)
}

/// The action has a `restorer` (`asm/signal.h`); the kernel requires one on x86-64.
#[cfg(target_arch = "x86_64")]
const SA_RESTORER: u64 = 0x0400_0000;

#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn restorer() {
    core::arch::naked_asm!(
        "mov rax, {number}",
        "syscall",
        number = const libc::SYS_rt_sigreturn,
    );
}

impl KernelSigaction {
    /// Makes the kernel return from the handler by `rt_sigreturn`, as libc does for its callers' handlers.
    pub fn set_restorer(&mut self) {
        #[cfg(target_arch = "x86_64")]
        if self.flags & SA_RESTORER == 0 {
            self.flags |= SA_RESTORER;
            self.restorer = (restorer as *const ()).expose_provenance();
        }
    }
}

/// Sets the disposition of a signal.
///
/// # Safety
/// The action must be one that [`sigaction`] returned, with another handler and flags at most, and that
/// handler must be valid.
pub(crate) unsafe fn set_sigaction(signal: c_int, action: &KernelSigaction) -> Result<(), Errno> {
    let pointer = core::ptr::from_ref(action).expose_provenance();
    let arguments = [signal as usize, pointer, 0, KERNEL_SIGSET_BYTES, 0];
    // SAFETY: the action lives through the call, and is valid by the caller's promise.
    unsafe { syscall(libc::SYS_rt_sigaction, arguments) }.map(|_| ())
}

/// Returns the signal mask of this thread.
pub(crate) fn blocked_signals() -> Result<u64, Errno> {
    let mut set = 0u64;
    let pointer = (&raw mut set).expose_provenance();
    // SAFETY: no mask is passed, and the kernel writes to a set of its own size.
    unsafe { syscall(libc::SYS_rt_sigprocmask, [0, 0, pointer, KERNEL_SIGSET_BYTES, 0]) }?;
    Ok(set)
}

/// Sets the signal mask of this thread. Pending signals that it unblocks are delivered before this returns.
pub(crate) fn set_signal_mask(set: u64) {
    let pointer = (&raw const set).expose_provenance();
    let arguments = [libc::SIG_SETMASK as usize, pointer, 0, KERNEL_SIGSET_BYTES, 0];
    // SAFETY: the set lives through the call, which cannot fail with these arguments.
    let _ = unsafe { syscall(libc::SYS_rt_sigprocmask, arguments) };
}

/// Sets the signal mask of this thread as [`set_signal_mask`], and returns the mask before.
pub(crate) fn replace_signal_mask(set: u64) -> Result<u64, Errno> {
    let mut before = 0u64;
    let [new, old] = [(&raw const set).expose_provenance(), (&raw mut before).expose_provenance()];
    let arguments = [libc::SIG_SETMASK as usize, new, old, KERNEL_SIGSET_BYTES, 0];
    // SAFETY: both sets live through the call.
    unsafe { syscall(libc::SYS_rt_sigprocmask, arguments) }?;
    Ok(before)
}

/// Returns the signals that are pending for this thread or for its process.
pub(crate) fn pending_signals() -> Result<u64, Errno> {
    let mut set = 0u64;
    let pointer = (&raw mut set).expose_provenance();
    // SAFETY: the kernel writes to a set of its own size.
    unsafe { syscall(libc::SYS_rt_sigpending, [pointer, KERNEL_SIGSET_BYTES]) }?;
    Ok(set)
}

/// Discards a pending signal of this set, if there is one. The signals must be blocked.
pub(crate) fn discard_pending_signal(set: u64) {
    let no_wait = [0i64; 2];
    let [set, no_wait] = [(&raw const set).expose_provenance(), (&raw const no_wait).expose_provenance()];
    // SAFETY: the set and the time live through the call, which is passed no memory for a `siginfo_t`.
    let _ = unsafe { syscall(libc::SYS_rt_sigtimedwait, [set, 0, no_wait, KERNEL_SIGSET_BYTES]) };
}

/// Queues a signal that was delivered to this thread to it again, with the same `siginfo_t`.
pub(crate) fn requeue_signal(signal: c_int, info: &siginfo_t) -> Result<(), Errno> {
    // SAFETY: no pointer is passed.
    let (process, thread) = unsafe { (syscall(libc::SYS_getpid, [])?, syscall(libc::SYS_gettid, [])?) };
    let arguments = [process, thread, signal as usize, core::ptr::from_ref(info).expose_provenance()];
    // SAFETY: the structure lives through the call.
    unsafe { syscall(libc::SYS_rt_tgsigqueueinfo, arguments) }.map(|_| ())
}

/// Returns a new signalfd for these signals, or replaces the signals of an existing one.
pub(crate) fn signalfd(old: Option<RawFd>, set: u64) -> Result<RawFd, Errno> {
    let pointer = (&raw const set).expose_provenance();
    let flags = (libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) as usize;
    // SAFETY: the set lives through the call.
    let fd = unsafe {
        syscall(libc::SYS_signalfd4, [fd(old.unwrap_or(-1)), pointer, KERNEL_SIGSET_BYTES, flags, 0])
    }?;
    Ok(fd as RawFd)
}
