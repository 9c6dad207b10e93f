//! All reads and writes of memory whose address the program gave. A pointer that cannot be accessed makes the
//! call fail with `EFAULT`, as on Linux, and not the program.
//!
//! Every access goes through one copy routine. A fault in the routine continues at its fix-up address, which
//! returns that the copy failed: handlers of `SIGSEGV` and `SIGBUS` ask [`fix_up`] first (`fault_signals`).
//! So an access needs no check in advance, and a copy that succeeds costs as much as `memcpy`. Threads that
//! block these signals: `fault_mask`.
#![allow(unsafe_code)] // accesses memory at the program's addresses
#![allow(clippy::not_unsafe_ptr_arg_deref)] // reading any address returns bytes or an error

use crate::fault_mask;
use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU8, Ordering};
use ginnel::channel::{Fault, RecvBuffer, SendBuffer};
use libc::{c_void, iovec, ucontext_t};
use rustix::io::Errno;

/// Maximum length of a transfer, in bytes (`MAX_RW_COUNT`).
pub(crate) const MAX_RW_COUNT: usize = 0x7fff_f000;
/// Maximum number of buffers in a call (`UIO_MAXIOV`).
pub const UIO_MAXIOV: usize = 1024;

/// Bits of `ginnel_copy_features`: the routine may use 32-byte registers, or `rep movsb` for long copies.
#[cfg(target_arch = "x86_64")]
const HAS_AVX2: u8 = 1;
#[cfg(target_arch = "x86_64")]
const HAS_ERMS: u8 = 2;

unsafe extern "C" {
    /// Copies `len` bytes. Returns 0, or 1 if memory could not be accessed; any of the bytes may have been
    /// copied then.
    fn ginnel_copy(to: *mut u8, from: *const u8, len: usize) -> u64;
    /// Copies without asking whether the signals of faults are blocked.
    fn ginnel_copy_unchecked(to: *mut u8, from: *const u8, len: usize) -> u64;
    /// The instruction after the last one that accesses memory, and the first one after a fault.
    static ginnel_copy_fault: u8;
    /// Says what the routine may use on this CPU. With 0 it runs everywhere.
    #[cfg(target_arch = "x86_64")]
    static ginnel_copy_features: AtomicU8;
}

// Lengths up to 256 bytes are copied by overlapping loads and stores; all loads of a step precede its stores.
#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".pushsection .text.ginnel_copy, \"ax\", @progbits",
    ".globl ginnel_copy, ginnel_copy_unchecked, ginnel_copy_fault",
    ".hidden ginnel_copy, ginnel_copy_unchecked, ginnel_copy_fault",
    ".type ginnel_copy, @function",
    ".type ginnel_copy_unchecked, @function",
    ".balign 64",
    "ginnel_copy:",
    ".cfi_startproc",
    "mov rax, qword ptr [rip + ginnel_fault_mask@GOTTPOFF]",
    "cmp byte ptr fs:[rax], {unblocked}",
    "jne {unblock}",
    "ginnel_copy_unchecked:",
    "cmp rdx, 16",
    "jb 2f",
    "cmp rdx, 32",
    "ja 5f",
    // 16 to 32 bytes.
    "movups xmm0, [rsi]",
    "movups xmm1, [rsi + rdx - 16]",
    "movups [rdi], xmm0",
    "movups [rdi + rdx - 16], xmm1",
    "xor eax, eax",
    "ret",
    "2:",
    "cmp edx, 8",
    "jb 3f",
    // 8 to 15 bytes.
    "mov rax, [rsi]",
    "mov rcx, [rsi + rdx - 8]",
    "mov [rdi], rax",
    "mov [rdi + rdx - 8], rcx",
    "xor eax, eax",
    "ret",
    "3:",
    "cmp edx, 4",
    "jb 4f",
    // 4 to 7 bytes.
    "mov eax, [rsi]",
    "mov ecx, [rsi + rdx - 4]",
    "mov [rdi], eax",
    "mov [rdi + rdx - 4], ecx",
    "xor eax, eax",
    "ret",
    "4:",
    "xor eax, eax",
    "test edx, edx",
    "je 41f",
    // 1 to 3 bytes: the first, the middle and the last, which may be the same.
    "movzx ecx, byte ptr [rsi]",
    "movzx r8d, byte ptr [rsi + rdx - 1]",
    "mov r9, rdx",
    "shr r9",
    "movzx r10d, byte ptr [rsi + r9]",
    "mov [rdi], cl",
    "mov [rdi + r9], r10b",
    "mov [rdi + rdx - 1], r8b",
    "41:",
    "ret",
    "5:",
    "cmp rdx, 64",
    "ja 6f",
    // 33 to 64 bytes.
    "movups xmm0, [rsi]",
    "movups xmm1, [rsi + 16]",
    "movups xmm2, [rsi + rdx - 32]",
    "movups xmm3, [rsi + rdx - 16]",
    "movups [rdi], xmm0",
    "movups [rdi + 16], xmm1",
    "movups [rdi + rdx - 32], xmm2",
    "movups [rdi + rdx - 16], xmm3",
    "xor eax, eax",
    "ret",
    "6:",
    "movzx eax, byte ptr [rip + ginnel_copy_features]",
    "test al, {avx2}",
    "je 8f",
    "cmp rdx, 128",
    "ja 7f",
    // 65 to 128 bytes.
    "vmovdqu ymm0, [rsi]",
    "vmovdqu ymm1, [rsi + 32]",
    "vmovdqu ymm2, [rsi + rdx - 64]",
    "vmovdqu ymm3, [rsi + rdx - 32]",
    "vmovdqu [rdi], ymm0",
    "vmovdqu [rdi + 32], ymm1",
    "vmovdqu [rdi + rdx - 64], ymm2",
    "vmovdqu [rdi + rdx - 32], ymm3",
    "xor eax, eax",
    "vzeroupper",
    "ret",
    "7:",
    "cmp rdx, 256",
    "ja 72f",
    // 129 to 256 bytes.
    "vmovdqu ymm0, [rsi]",
    "vmovdqu ymm1, [rsi + 32]",
    "vmovdqu ymm2, [rsi + 64]",
    "vmovdqu ymm3, [rsi + 96]",
    "vmovdqu ymm4, [rsi + rdx - 128]",
    "vmovdqu ymm5, [rsi + rdx - 96]",
    "vmovdqu ymm6, [rsi + rdx - 64]",
    "vmovdqu ymm7, [rsi + rdx - 32]",
    "vmovdqu [rdi], ymm0",
    "vmovdqu [rdi + 32], ymm1",
    "vmovdqu [rdi + 64], ymm2",
    "vmovdqu [rdi + 96], ymm3",
    "vmovdqu [rdi + rdx - 128], ymm4",
    "vmovdqu [rdi + rdx - 96], ymm5",
    "vmovdqu [rdi + rdx - 64], ymm6",
    "vmovdqu [rdi + rdx - 32], ymm7",
    "xor eax, eax",
    "vzeroupper",
    "ret",
    // More: the first bytes up to an aligned address of the destination, then all but the last 128 bytes in
    // steps of 128, then the last 128.
    "72:",
    "vmovdqu ymm0, [rsi]",
    "mov rcx, rdi",
    "or rcx, 31",
    "inc rcx",
    "sub rcx, rdi",
    "vmovdqu [rdi], ymm0",
    "add rdi, rcx",
    "add rsi, rcx",
    "sub rdx, rcx",
    "test al, {erms}",
    "je 73f",
    "cmp rdx, {rep_min}",
    "jae 9f",
    "73:",
    "lea rcx, [rdi + rdx - 128]",
    "vmovdqu ymm4, [rsi + rdx - 128]",
    "vmovdqu ymm5, [rsi + rdx - 96]",
    "vmovdqu ymm6, [rsi + rdx - 64]",
    "vmovdqu ymm7, [rsi + rdx - 32]",
    "74:",
    "vmovdqu ymm0, [rsi]",
    "vmovdqu ymm1, [rsi + 32]",
    "vmovdqu ymm2, [rsi + 64]",
    "vmovdqu ymm3, [rsi + 96]",
    "sub rsi, -128",
    "vmovdqa [rdi], ymm0",
    "vmovdqa [rdi + 32], ymm1",
    "vmovdqa [rdi + 64], ymm2",
    "vmovdqa [rdi + 96], ymm3",
    "sub rdi, -128",
    "cmp rdi, rcx",
    "jb 74b",
    "vmovdqu [rcx], ymm4",
    "vmovdqu [rcx + 32], ymm5",
    "vmovdqu [rcx + 64], ymm6",
    "vmovdqu [rcx + 96], ymm7",
    "xor eax, eax",
    "vzeroupper",
    "ret",
    // More than 64 bytes with 16-byte registers: all but the last 64 bytes in steps of 64, then the last 64.
    "8:",
    "lea rcx, [rdi + rdx - 64]",
    "movups xmm4, [rsi + rdx - 64]",
    "movups xmm5, [rsi + rdx - 48]",
    "movups xmm6, [rsi + rdx - 32]",
    "movups xmm7, [rsi + rdx - 16]",
    "81:",
    "movups xmm0, [rsi]",
    "movups xmm1, [rsi + 16]",
    "movups xmm2, [rsi + 32]",
    "movups xmm3, [rsi + 48]",
    "add rsi, 64",
    "movups [rdi], xmm0",
    "movups [rdi + 16], xmm1",
    "movups [rdi + 32], xmm2",
    "movups [rdi + 48], xmm3",
    "add rdi, 64",
    "cmp rdi, rcx",
    "jb 81b",
    "movups [rcx], xmm4",
    "movups [rcx + 16], xmm5",
    "movups [rcx + 32], xmm6",
    "movups [rcx + 48], xmm7",
    "xor eax, eax",
    "ret",
    "9:",
    "mov rcx, rdx",
    "vzeroupper",
    "rep movsb",
    "xor eax, eax",
    "ret",
    "ginnel_copy_fault:",
    "mov eax, 1",
    "ret",
    ".cfi_endproc",
    ".size ginnel_copy, . - ginnel_copy",
    ".popsection",
    ".pushsection .data.ginnel_copy_features, \"aw\", @progbits",
    ".globl ginnel_copy_features",
    ".hidden ginnel_copy_features",
    "ginnel_copy_features: .byte 0",
    ".popsection",
    avx2 = const HAS_AVX2,
    erms = const HAS_ERMS,
    // As in glibc: shorter copies are faster without.
    rep_min = const 4096,
    unblocked = const fault_mask::UNBLOCKED,
    unblock = sym copy_with_faults_unblocked,
);

#[cfg(target_arch = "aarch64")]
core::arch::global_asm!(
    ".pushsection .text.ginnel_copy, \"ax\", @progbits",
    ".globl ginnel_copy, ginnel_copy_unchecked, ginnel_copy_fault",
    ".hidden ginnel_copy, ginnel_copy_unchecked, ginnel_copy_fault",
    ".type ginnel_copy, @function",
    ".type ginnel_copy_unchecked, @function",
    ".balign 64",
    "ginnel_copy:",
    ".cfi_startproc",
    "mrs x3, tpidr_el0",
    "adrp x4, :gottprel:ginnel_fault_mask",
    "ldr x4, [x4, :gottprel_lo12:ginnel_fault_mask]",
    "ldrb w3, [x3, x4]",
    "cmp w3, #{unblocked}",
    // A conditional branch may not reach the function.
    "b.eq 9f",
    "b {unblock}",
    "9:",
    "ginnel_copy_unchecked:",
    "subs x2, x2, #32",
    "b.lo 3f",
    "2:",
    "ldp q0, q1, [x1], #32",
    "stp q0, q1, [x0], #32",
    "subs x2, x2, #32",
    "b.hs 2b",
    // The lower bits of the length, which the subtractions have not changed, tell what is left.
    "3:",
    "tbz x2, #4, 4f",
    "ldr q0, [x1], #16",
    "str q0, [x0], #16",
    "4:",
    "tbz x2, #3, 5f",
    "ldr x3, [x1], #8",
    "str x3, [x0], #8",
    "5:",
    "tbz x2, #2, 6f",
    "ldr w3, [x1], #4",
    "str w3, [x0], #4",
    "6:",
    "tbz x2, #1, 7f",
    "ldrh w3, [x1], #2",
    "strh w3, [x0], #2",
    "7:",
    "tbz x2, #0, 8f",
    "ldrb w3, [x1]",
    "strb w3, [x0]",
    "8:",
    "mov x0, #0",
    "ret",
    "ginnel_copy_fault:",
    "mov x0, #1",
    "ret",
    ".cfi_endproc",
    ".size ginnel_copy, . - ginnel_copy",
    ".popsection",
    unblocked = const fault_mask::UNBLOCKED,
    unblock = sym copy_with_faults_unblocked,
);

/// Copies in a thread that may block the signals of faults. Called by the copy routine in its own place.
unsafe extern "C" fn copy_with_faults_unblocked(to: *mut u8, from: *const u8, len: usize) -> u64 {
    // SAFETY: the arguments are those of the copy routine.
    fault_mask::unblock_during(|| unsafe { ginnel_copy_unchecked(to, from, len) })
}

/// Chooses the fastest instructions that this CPU has.
pub(crate) fn detect_cpu() {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        let erms = if std::arch::is_x86_feature_detected!("ermsb") { HAS_ERMS } else { 0 };
        set_features(HAS_AVX2 | erms);
    }
}

#[cfg(target_arch = "x86_64")]
fn set_features(features: u8) {
    // SAFETY: the assembler defines a byte.
    unsafe { &ginnel_copy_features }.store(features, Ordering::Relaxed);
}

/// Continues a thread that faulted in the copy routine at the fix-up address. Returns false if it faulted
/// elsewhere.
#[inline]
pub(crate) fn fix_up(context: &mut ucontext_t) -> bool {
    #[cfg(target_arch = "x86_64")]
    let place = &mut context.uc_mcontext.gregs[libc::REG_RIP as usize];
    #[cfg(target_arch = "aarch64")]
    let place = &mut context.uc_mcontext.pc;
    let routine = (ginnel_copy as *const ()).addr()..(&raw const ginnel_copy_fault).addr();
    let is_copying = routine.contains(&(*place as usize));
    if is_copying {
        *place = routine.end as _;
    }
    is_copying
}

#[inline]
unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> Result<(), Fault> {
    // SAFETY: the caller's promise for the side that is not the program's; a fault on the other side is
    // reported.
    if unsafe { ginnel_copy(to, from, len) } == 0 { Ok(()) } else { Err(Fault) }
}

/// Reports a fault as the kernel does.
pub(crate) fn efault(_: Fault) -> Errno {
    Errno::FAULT
}

/// Checks that a range can belong to the program: it neither wraps around nor reaches into the kernel's half
/// of the addresses (`access_ok`). The kernel checks this even if it copies nothing.
#[inline]
fn check_range(pointer: *const c_void, len: usize) -> Result<(), Errno> {
    let end = pointer.addr().wrapping_add(len);
    let is_in_lower_half = (pointer.addr() | len | end).cast_signed() >= 0;
    if is_in_lower_half { Ok(()) } else { Err(Errno::FAULT) }
}

/// Checks that a list can belong to the program, although the call may store nothing in it.
///
/// # Errors
/// `EFAULT`.
#[inline]
pub fn check_list<T>(list: *const T, len: usize) -> Result<(), Errno> {
    check_range(list.cast(), len.saturating_mul(size_of::<T>()))
}

/// Reads a value of the program.
///
/// # Errors
/// `EFAULT`.
///
/// # Safety
/// All bytes must be valid as a `T`.
#[inline]
pub unsafe fn read<T: Copy>(pointer: *const T) -> Result<T, Errno> {
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: the value is writable for its size; the caller promises that any bytes are a value.
    unsafe {
        copy(value.as_mut_ptr().cast(), pointer.cast(), size_of::<T>()).map_err(efault)?;
        Ok(value.assume_init())
    }
}

/// Writes a value to memory of the program. The pointer need not be aligned.
///
/// # Errors
/// `EFAULT`.
///
/// # Safety
/// The pointer must be the argument of a call that writes to it.
#[inline]
pub unsafe fn write<T: Copy>(pointer: *mut T, value: &T) -> Result<(), Errno> {
    // SAFETY: the value is readable for its size, and the caller's promise.
    unsafe { copy(pointer.cast(), core::ptr::from_ref(value).cast(), size_of::<T>()).map_err(efault) }
}

/// Reads bytes of the program.
///
/// # Errors
/// `EFAULT`.
#[inline]
pub fn read_bytes(pointer: *const u8, into: &mut [u8]) -> Result<(), Errno> {
    // SAFETY: the slice is writable for its length.
    unsafe { copy(into.as_mut_ptr(), pointer, into.len()).map_err(efault) }
}

/// Reads values of the program into a list.
///
/// # Errors
/// `EFAULT`.
///
/// # Safety
/// All bytes must be valid as a `T`.
#[inline]
pub unsafe fn read_list<T: Copy>(list: *const T, into: &mut [MaybeUninit<T>]) -> Result<(), Errno> {
    // SAFETY: the list is writable for its size.
    unsafe { copy(into.as_mut_ptr().cast(), list.cast(), size_of_val(into)).map_err(efault) }
}

/// Writes values to a list of the program.
///
/// # Errors
/// `EFAULT`.
///
/// # Safety
/// The list must be the argument of a call that writes to it.
#[inline]
pub unsafe fn write_list<T: Copy>(list: *mut T, values: &[T]) -> Result<(), Errno> {
    // SAFETY: the values are readable for their size, and the caller's promise.
    unsafe { copy(list.cast(), values.as_ptr().cast(), size_of_val(values)).map_err(efault) }
}

/// Bytes that the program passed to be read. Has the layout of `iovec`.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct UserSlice<'a>(iovec, PhantomData<&'a [u8]>);

/// Bytes that the program passed to be written. Has the layout of `iovec`.
#[derive(Debug)]
#[repr(transparent)]
pub struct UserSliceMut<'a>(iovec, PhantomData<&'a mut [u8]>);

impl<'a> UserSlice<'a> {
    /// Returns whether there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.iov_len == 0
    }

    /// Returns the bytes of a slice, which can always be read.
    #[inline]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }, PhantomData)
    }

    /// Returns bytes at an address of the program, `MAX_RW_COUNT` at the most.
    ///
    /// # Errors
    /// `EFAULT` if the address cannot be one of the program.
    #[inline]
    pub fn from_raw(pointer: *const c_void, len: usize) -> Result<Self, Errno> {
        check_range(pointer, len)?;
        Ok(Self(iovec { iov_base: pointer.cast_mut(), iov_len: len.min(MAX_RW_COUNT) }, PhantomData))
    }
}

impl<'a> UserSliceMut<'a> {
    /// Returns whether there are no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.iov_len == 0
    }

    /// Returns the bytes of a slice, which can always be written.
    #[inline]
    pub fn new(bytes: &'a mut [u8]) -> Self {
        Self(iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }, PhantomData)
    }

    /// Returns bytes at an address of the program, `MAX_RW_COUNT` at the most.
    ///
    /// # Errors
    /// `EFAULT` if the address cannot be one of the program.
    ///
    /// # Safety
    /// The bytes must be those of a call that writes to them.
    #[inline]
    pub unsafe fn from_raw(pointer: *mut c_void, len: usize) -> Result<Self, Errno> {
        check_range(pointer, len)?;
        Ok(Self(iovec { iov_base: pointer, iov_len: len.min(MAX_RW_COUNT) }, PhantomData))
    }
}

impl SendBuffer for UserSlice<'_> {
    #[inline]
    fn len(&self) -> usize {
        self.0.iov_len
    }

    #[inline]
    unsafe fn copy_to(&self, at: usize, to: *mut u8, len: usize) -> Result<(), Fault> {
        // SAFETY: the caller's promise.
        unsafe { copy(to, self.0.iov_base.cast::<u8>().wrapping_add(at), len) }
    }
}

impl RecvBuffer for UserSliceMut<'_> {
    #[inline]
    fn len(&self) -> usize {
        self.0.iov_len
    }

    #[inline]
    unsafe fn copy_from(&mut self, at: usize, from: *const u8, len: usize) -> Result<(), Fault> {
        // SAFETY: the caller's promise.
        unsafe { copy(self.0.iov_base.cast::<u8>().wrapping_add(at), from, len) }
    }
}

/// Checks the buffers of a call as the kernel does (`import_iovec`).
///
/// # Errors
/// `EINVAL` if a length does not fit in `ssize_t`, `EFAULT` if an address cannot be one of the program.
fn check_buffers(list: &mut [iovec]) -> Result<(), Errno> {
    let mut left = MAX_RW_COUNT;
    for buffer in &mut *list {
        if buffer.iov_len.cast_signed() < 0 {
            return Err(Errno::INVAL);
        }
        check_range(buffer.iov_base, buffer.iov_len)?;
        buffer.iov_len = buffer.iov_len.min(left);
        left -= buffer.iov_len;
    }
    Ok(())
}

/// Runs a closure with a copy of the program's list of buffers.
fn with_iovecs<T>(
    list: *const iovec,
    len: usize,
    run: impl FnOnce(&mut [iovec]) -> Result<T, Errno>,
) -> Result<T, Errno> {
    if len > UIO_MAXIOV {
        return Err(Errno::INVAL);
    }
    let mut short = [const { MaybeUninit::<iovec>::uninit() }; 16];
    let mut long = (len > short.len()).then(|| crate::SignalDeferred::new(|| Vec::with_capacity(len)));
    let place = match &mut long {
        Some(long) => &mut long.spare_capacity_mut()[..len],
        None => &mut short[..len],
    };
    // SAFETY: any bytes are an `iovec`, and `len` elements are read or the call fails.
    let copy = unsafe {
        read_list(list, place)?;
        core::slice::from_raw_parts_mut(place.as_mut_ptr().cast::<iovec>(), len)
    };
    check_buffers(copy)?;
    run(copy)
}

/// Runs a closure with the buffers of a call that sends.
///
/// # Errors
/// `EINVAL`, `EFAULT`, and those of the closure.
#[inline]
pub fn with_buffers<T>(
    list: *const iovec,
    len: usize,
    run: impl FnOnce(&[UserSlice<'_>]) -> Result<T, Errno>,
) -> Result<T, Errno> {
    with_iovecs(list, len, |list| {
        // SAFETY: `UserSlice` has the layout of `iovec`.
        run(unsafe { core::slice::from_raw_parts(list.as_ptr().cast(), list.len()) })
    })
}

/// Runs a closure with the buffers of a call that receives.
///
/// # Errors
/// `EINVAL`, `EFAULT`, and those of the closure.
///
/// # Safety
/// The buffers must be those of a call that writes to them.
#[inline]
pub unsafe fn with_buffers_mut<T>(
    list: *const iovec,
    len: usize,
    run: impl FnOnce(&mut [UserSliceMut<'_>]) -> Result<T, Errno>,
) -> Result<T, Errno> {
    with_iovecs(list, len, |list| {
        // SAFETY: `UserSliceMut` has the layout of `iovec`.
        run(unsafe { core::slice::from_raw_parts_mut(list.as_mut_ptr().cast(), list.len()) })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_alignment_is_copied() {
        let source: Vec<u8> = (0..20_000u32).map(|at| (at % 251) as u8).collect();
        let mut lengths: Vec<usize> = (0..600).collect();
        lengths.extend([1000, 1023, 1024, 1025, 4095, 4096, 4097, 4128, 4160, 9000, 16_384]);
        let mut rounds = 1;
        if cfg!(target_arch = "x86_64") && std::arch::is_x86_feature_detected!("avx2") {
            rounds = 3;
        }
        for round in 0..rounds {
            #[cfg(target_arch = "x86_64")]
            set_features([0, HAS_AVX2, HAS_AVX2 | HAS_ERMS][round]);
            for &len in &lengths {
                for (from, to) in [(0, 0), (1, 0), (0, 1), (7, 13), (31, 5)] {
                    let mut target = vec![0xEE; to + len + 64];
                    let bytes = UserSlice::new(&source[from..][..len]);
                    // SAFETY: the target is longer.
                    unsafe { bytes.copy_to(0, target[to..].as_mut_ptr(), len) }.unwrap();
                    assert_eq!(target[to..][..len], source[from..][..len], "{len} {from} {to} {round}");
                    assert!(
                        target[..to].iter().chain(&target[to + len..]).all(|byte| *byte == 0xEE),
                        "{len}"
                    );
                }
            }
        }
    }

    #[test]
    fn memory_that_cannot_be_accessed_is_efault() {
        crate::fault_signals::install();
        let page = 4096;
        // SAFETY: a new mapping, of which the second page becomes inaccessible.
        let start = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let start = libc::mmap(core::ptr::null_mut(), 2 * page, libc::PROT_READ, flags, -1, 0);
            assert_eq!(libc::mprotect(start.byte_add(page), page, libc::PROT_NONE), 0);
            start
        };
        let mut copy = vec![0; 2 * page];
        for len in (1..300).chain([1000, page]) {
            for beyond in [1, len.div_ceil(2), len] {
                let first = start.wrapping_byte_add(page + beyond - len);
                let bytes = UserSlice::from_raw(first, len).unwrap();
                // SAFETY: the copy is longer.
                let read = unsafe { bytes.copy_to(0, copy.as_mut_ptr(), len) };
                assert_eq!(read, Err(Fault), "{len} bytes, {beyond} of them inaccessible");
                // SAFETY: nothing else uses the mapping.
                let mut bytes = unsafe { UserSliceMut::from_raw(first, len) }.unwrap();
                // SAFETY: the copy is longer.
                assert_eq!(unsafe { bytes.copy_from(0, copy.as_ptr(), len) }, Err(Fault), "{len} {beyond}");
            }
        }
        for pointer in [0usize, 1, 8, usize::MAX, 1 << 62, 1 << 63] {
            let pointer = core::ptr::without_provenance::<u64>(pointer);
            // SAFETY: any bytes are a number.
            assert_eq!(unsafe { read(pointer) }, Err(Errno::FAULT), "{pointer:?}");
        }
        assert_eq!(
            UserSlice::from_raw(core::ptr::without_provenance(usize::MAX), 1).err(),
            Some(Errno::FAULT)
        );
        // SAFETY: the mapping is no longer used.
        unsafe { libc::munmap(start, 2 * page) };
    }
}
