//! The prologue before a seccomp filter of the program, which admits the system calls that the library makes
//! ([`Ops::system_calls`]).
#![allow(unsafe_code)] // reads a filter of the program
#![allow(clippy::not_unsafe_ptr_arg_deref)] // reading any address returns bytes or an error

use crate::{Ops, user_memory};
use libc::{sock_filter, sock_fprog};

/// Maximum length of a filter in instructions (`BPF_MAXINSNS`).
const INSTRUCTIONS_MAX: usize = 4096;
/// `AUDIT_ARCH_X86_64`, `AUDIT_ARCH_AARCH64`.
const ARCHITECTURE: u32 = if cfg!(target_arch = "x86_64") { 0xc000_003e } else { 0xc000_00b7 };
/// Offsets of the system call number and the architecture in `struct seccomp_data`.
const NUMBER_AT: u32 = 0;
const ARCHITECTURE_AT: u32 = 4;
/// `BPF_LD|BPF_W|BPF_ABS`, `BPF_JMP|BPF_JEQ|BPF_K`, `BPF_RET|BPF_K`.
const LOAD: u16 = 0x20;
const IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;

/// Returns the prologue for the program's filter.
fn prologue() -> Vec<sock_filter> {
    let calls = Ops::system_calls();
    let line = |code, k, jt, jf| sock_filter { code, jt, jf, k };
    let mut lines = vec![line(LOAD, ARCHITECTURE_AT, 0, 0)];
    // Cannot truncate: there are few calls. Jumps over the load, all comparisons, and the return.
    lines.push(line(IF_EQUAL, ARCHITECTURE, 0, calls.len() as u8 + 2));
    lines.push(line(LOAD, NUMBER_AT, 0, 0));
    for (at, call) in calls.iter().enumerate() {
        let left = (calls.len() - 1 - at) as u8;
        // The last comparison jumps over the return to the program's filter.
        lines.push(line(IF_EQUAL, *call as u32, left, u8::from(left == 0)));
    }
    lines.push(line(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0));
    lines
}

/// Returns the program's filter with the prologue in front. Returns `None` if that is too long, or if the
/// filter is empty or cannot be read.
pub fn with_prologue(filter: *const sock_fprog) -> Option<Vec<sock_filter>> {
    // SAFETY: any bytes are a filter.
    let filter = unsafe { user_memory::read(filter) }.ok()?;
    let (mut lines, own) = (prologue(), usize::from(filter.len));
    if own == 0 || lines.len() + own > INSTRUCTIONS_MAX {
        return None;
    }
    lines.reserve_exact(own);
    // SAFETY: any bytes are instructions, and the vector has space for `own` more.
    unsafe {
        user_memory::read_list(filter.filter.cast_const(), &mut lines.spare_capacity_mut()[..own]).ok()?;
        lines.set_len(lines.len() + own);
    }
    Some(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs these instructions for a system call. Returns the index after the last one, and the value that it
    /// returned.
    fn run(lines: &[sock_filter], architecture: u32, number: u32) -> (usize, Option<u32>) {
        let (mut at, mut value) = (0, 0);
        while let Some(line) = lines.get(at) {
            at += 1;
            match line.code {
                LOAD => value = if line.k == NUMBER_AT { number } else { architecture },
                IF_EQUAL => at += usize::from(if value == line.k { line.jt } else { line.jf }),
                _ => return (at, Some(line.k)),
            }
        }
        (at, None)
    }

    #[test]
    fn prologue_admits_only_the_librarys_calls() {
        let lines = prologue();
        for call in Ops::system_calls() {
            assert_eq!(run(&lines, ARCHITECTURE, *call as u32).1, Some(libc::SECCOMP_RET_ALLOW));
            // Numbers of another architecture are different calls.
            assert_eq!(run(&lines, 0x4000_0003, *call as u32), (lines.len(), None));
        }
        for call in [libc::SYS_openat, libc::SYS_execve, libc::SYS_socket, libc::SYS_connect, 9999] {
            assert_eq!(run(&lines, ARCHITECTURE, call as u32), (lines.len(), None));
        }
    }

    #[test]
    fn oversized_filter_is_left_unchanged() {
        let mut own = vec![sock_filter { code: RETURN, jt: 0, jf: 0, k: 0 }; INSTRUCTIONS_MAX];
        let mut filter = |len: usize| sock_fprog { len: len as u16, filter: own.as_mut_ptr() };
        let most = INSTRUCTIONS_MAX - prologue().len();
        let lines =
            |len: usize, filter: sock_fprog| with_prologue(&raw const filter).map(|lines| lines.len() - len);
        assert_eq!(lines(most, filter(most)), Some(prologue().len()));
        assert_eq!(lines(most + 1, filter(most + 1)), None);
    }
}
