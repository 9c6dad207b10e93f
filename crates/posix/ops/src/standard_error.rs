//! Lines on the program's standard error. They neither end the program nor delay it: a line for which there
//! is no room at once is left out, and no signal is raised if nobody reads.

use crate::syscall;
use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, Ordering};
use rustix::fd::BorrowedFd;
use rustix::fs::{FileType, Mode, OFlags, fstat, open};
use rustix::io::{Errno, IoSlice, ReadWriteFlags, pwritev2, write};
use rustix::net::{SendFlags, send};
use std::sync::OnceLock;

/// Device and inode of standard error when the program attached.
static STANDARD_ERROR: OnceLock<Option<(u64, u64)>> = OnceLock::new();

/// True once the program may have a seccomp filter, which may end programs that open files.
static MUST_NOT_OPEN: AtomicBool = AtomicBool::new(false);

/// Most bytes of a line (`PIPE_BUF`). A pipe that has room takes all of them or none.
const LINE_BYTES_MAX: usize = 4096;

/// Returns the identity of the file that is standard error now.
fn standard_error() -> Option<(u64, u64)> {
    fstat(rustix::stdio::stderr()).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

/// Remembers the program's standard error. A daemon may close it and get another file of that number, to
/// which no message must be written.
pub(crate) fn remember_standard_error() {
    STANDARD_ERROR.get_or_init(standard_error);
}

/// Opens no file any more: a line for a terminal, or for a pipe before Linux 6.4, is left out.
pub(crate) fn never_open() {
    MUST_NOT_OPEN.store(true, Ordering::Relaxed);
}

/// Writes a line to the program's standard error if that is still the file that it was when the program
/// attached.
pub fn write_line(line: &str) {
    let known = STANDARD_ERROR.get().copied().flatten();
    if known.is_some() && known == standard_error() {
        write_at_once(line);
    }
}

/// Writes a line to the program's standard error if there is room now.
pub fn write_at_once(line: &str) {
    let mut line = line.as_bytes().to_vec();
    if line.len() > LINE_BYTES_MAX {
        line.truncate(LINE_BYTES_MAX - 1);
        line.push(b'\n');
    }
    // All signals, so that a terminal that stops background processes which write stops none.
    let Ok(before) = syscall::replace_signal_mask(u64::MAX) else { return };
    let pending = syscall::pending_signals().unwrap_or(u64::MAX);
    let raised = match write_without_waiting(rustix::stdio::stderr(), &line) {
        // The last reader has gone, or the file is as long as the program permits.
        Err(Errno::PIPE) => signal_bit(libc::SIGPIPE),
        Err(Errno::FBIG) => signal_bit(libc::SIGXFSZ),
        _ => 0,
    };
    if raised & !pending != 0 {
        syscall::discard_pending_signal(raised);
    }
    syscall::set_signal_mask(before);
}

/// Writes a line if the file takes it at once, whether or not its descriptor is nonblocking.
fn write_without_waiting(stderr: BorrowedFd<'_>, line: &[u8]) -> Result<(), Errno> {
    let file_type = FileType::from_raw_mode(fstat(stderr)?.st_mode);
    if file_type == FileType::Socket {
        return send(stderr, line, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).map(|_| ());
    }
    if matches!(file_type, FileType::Fifo | FileType::CharacterDevice) {
        return match pwritev2(stderr, &[IoSlice::new(line)], u64::MAX, ReadWriteFlags::NOWAIT) {
            // Terminals, and pipes of Linux before 6.4. A file description of its own is nonblocking for this
            // line alone.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) if !MUST_NOT_OPEN.load(Ordering::Relaxed) => {
                let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
                write(open("/proc/self/fd/2", flags, Mode::empty())?, line).map(|_| ())
            }
            result => result.map(|_| ()),
        };
    }
    write(stderr, line).map(|_| ())
}

/// Returns the set of one signal.
fn signal_bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}
