//! Placeholders: numbers that the kernel gave out, behind which stands nothing but the claim to the number
//! (docs/adr/0012-holders-and-placeholders.md).
#![allow(unsafe_code)] // descriptors go through the program as plain numbers and come back

use core::sync::atomic::{AtomicU64, Ordering};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// Descriptors that are the process's own, not the program's, stand above those that `select` can use.
const OWN_FDS_FROM: RawFd = 1024;

/// As many numbers as the table of descriptors has at the most, a bit each.
static INTERNAL: [AtomicU64; 1 << 14] = [const { AtomicU64::new(0) }; 1 << 14];

fn word(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((INTERNAL.get(fd / 64)?, 1 << (fd % 64)))
}

/// Whether a descriptor is this library's own: to the program it is not open.
pub(crate) fn is_internal(fd: RawFd) -> bool {
    word(fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
}

/// The first internal descriptor from `from` on, up to `last`.
pub(crate) fn next_internal(from: RawFd, last: RawFd) -> Option<RawFd> {
    let end = last.min(INTERNAL.len() as RawFd * 64 - 1);
    let mut fd = from;
    while fd <= end {
        let (word, bit) = word(fd)?;
        let rest = word.load(Ordering::Relaxed) & !(bit - 1);
        if rest != 0 {
            let found = fd / 64 * 64 + rest.trailing_zeros() as RawFd;
            return (found <= end).then_some(found);
        }
        fd = fd / 64 * 64 + 64;
    }
    None
}

/// Notes that a descriptor is this library's own as long as the process lives.
pub(crate) fn keep(fd: RawFd) {
    if let Some((word, bit)) = word(fd) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

/// A descriptor of this library's own.
#[derive(Debug)]
pub(crate) struct Internal(OwnedFd);

impl Internal {
    /// Under a number that is out of the program's way, if the process may have as many.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn new(low: OwnedFd) -> Result<Self, Errno> {
        let fd = match fcntl_dupfd_cloexec(low.as_fd(), OWN_FDS_FROM) {
            Ok(high) => high,
            Err(Errno::INVAL | Errno::MFILE) => low,
            Err(error) => return Err(error),
        };
        keep(fd.as_raw_fd());
        Ok(Self(fd))
    }
}

impl AsFd for Internal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Internal {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Drop for Internal {
    fn drop(&mut self) {
        forget_internal(self.0.as_raw_fd());
    }
}

/// Where placeholders come from.
pub(crate) struct Placeholders {
    /// All of them are copies of this: a socket, so that `fstat` says so.
    original: Internal,
    kept: Vec<RawFd>,
}

impl Placeholders {
    pub fn new() -> Result<Self, Errno> {
        let low = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        Ok(Self { original: Internal::new(low)?, kept: Vec::new() })
    }

    /// A new one.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`.
    pub fn take(&mut self, cloexec: bool) -> Result<RawFd, Errno> {
        let fd = match self.kept.pop() {
            Some(fd) => {
                forget_internal(fd);
                own(fd)
            }
            None => fcntl_dupfd_cloexec(&self.original, 0)?,
        };
        if !cloexec {
            rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty())?;
        }
        Ok(fd.into_raw_fd())
    }

    /// The program closed one. Up to `kept_max` stay open for the next.
    pub fn give_back(&mut self, fd: RawFd, kept_max: usize) {
        let fd = own(fd);
        if self.kept.len() < kept_max && rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC).is_ok() {
            let fd = fd.into_raw_fd();
            keep(fd);
            self.kept.push(fd);
        }
    }
}

/// Takes possession of a descriptor that was a number of the program's.
pub(crate) fn own(fd: RawFd) -> OwnedFd {
    // SAFETY: the number was given to the program by this crate, which took it out of its table before, so nobody else here will close it.
    // A program that closed it behind the library's back loses what has the number now, as it would by closing twice.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A descriptor of the kernel's that the program named.
///
/// # Errors
/// `EBADF` for a negative number.
pub(crate) fn borrow<'a>(fd: RawFd) -> Result<BorrowedFd<'a>, Errno> {
    if fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: the number is used for one system call and not kept; if nothing is open under it the kernel says so.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// A descriptor is not this library's own any more.
pub(crate) fn forget_internal(fd: RawFd) {
    if let Some((word, bit)) = word(fd) {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

impl Drop for Placeholders {
    fn drop(&mut self) {
        for fd in self.kept.drain(..) {
            forget_internal(fd);
            drop(own(fd));
        }
    }
}
