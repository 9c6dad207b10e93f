//! Placeholders: numbers that the kernel gave out, behind which stands nothing but the claim to the number
//! (docs/adr/0012-holders-and-placeholders.md).
#![allow(unsafe_code)] // descriptors go through the program as plain numbers and come back

use crate::Ops;
use crate::held::Locked;
use core::sync::atomic::{AtomicU64, Ordering};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use rustix::io::{Errno, FdFlags, dup, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// Descriptors that are the process's own, not the program's, stand above those that `select` can use.
const OWN_FDS_FROM: RawFd = 1024;

/// As many numbers as the table of descriptors has at the most, a bit each.
static INTERNAL: [AtomicU64; 1 << 14] = [const { AtomicU64::new(0) }; 1 << 14];

/// Placeholders that have not the close-on-exec flag that they were given: the program may have changed it.
static CHANGED: [AtomicU64; 1 << 14] = [const { AtomicU64::new(0) }; 1 << 14];

/// Placeholders that were given this flag.
static CLOEXEC: [AtomicU64; 1 << 14] = [const { AtomicU64::new(0) }; 1 << 14];

/// The bit of a descriptor in a set of them.
fn bit(set: &'static [AtomicU64], fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((set.get(fd / 64)?, 1 << (fd % 64)))
}

fn is_in(set: &'static [AtomicU64], fd: RawFd) -> bool {
    bit(set, fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
}

fn put(set: &'static [AtomicU64], fd: RawFd, into: bool) {
    match bit(set, fd) {
        Some((word, bit)) if into => word.fetch_or(bit, Ordering::Relaxed),
        Some((word, bit)) => word.fetch_and(!bit, Ordering::Relaxed),
        None => 0,
    };
}

/// Whether a descriptor is this library's own: to the program it is not open.
pub(crate) fn is_internal(fd: RawFd) -> bool {
    is_in(&INTERNAL, fd)
}

/// The first internal descriptor from `from` on, up to `last`.
pub(crate) fn next_internal(from: RawFd, last: RawFd) -> Option<RawFd> {
    let end = last.min(INTERNAL.len() as RawFd * 64 - 1);
    let mut fd = from;
    while fd <= end {
        let (word, bit) = bit(&INTERNAL, fd)?;
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
    put(&INTERNAL, fd, true);
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
    /// Those of closed sockets, by whether they are closed on exec: to change that would be a system call for each connection.
    kept: [Vec<RawFd>; 2],
}

impl Placeholders {
    pub fn new() -> Result<Self, Errno> {
        let low = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        Ok(Self { original: Internal::new(low)?, kept: Default::default() })
    }

    /// Whether the next one is there already, so that to take it cannot fail.
    pub fn has_kept(&self, cloexec: bool) -> bool {
        !self.kept[usize::from(cloexec)].is_empty()
    }

    /// A new one.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`.
    pub fn take(&mut self, cloexec: bool) -> Result<RawFd, Errno> {
        if let Some(fd) = self.kept[usize::from(cloexec)].pop() {
            forget_internal(fd);
            return Ok(fd);
        }
        let fd = match (self.kept[usize::from(!cloexec)].pop(), cloexec) {
            (Some(fd), _) => {
                forget_internal(fd);
                let fd = own(fd);
                let flags = if cloexec { FdFlags::CLOEXEC } else { FdFlags::empty() };
                fcntl_setfd(&fd, flags)?;
                fd
            }
            (None, true) => fcntl_dupfd_cloexec(&self.original, 0)?,
            (None, false) => dup(&self.original)?,
        };
        put(&CHANGED, fd.as_raw_fd(), false);
        put(&CLOEXEC, fd.as_raw_fd(), cloexec);
        Ok(fd.into_raw_fd())
    }

    /// What all of them are copies of.
    pub fn original(&self) -> RawFd {
        self.original.as_raw_fd()
    }

    /// Puts one behind a number that there is already.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn replace(&self, fd: RawFd) -> Result<(), Errno> {
        let flags = rustix::io::fcntl_getfd(borrow(fd)?)?;
        let cloexec = if flags.contains(rustix::io::FdFlags::CLOEXEC) { libc::O_CLOEXEC } else { 0 };
        crate::raw::dup3(self.original.as_raw_fd(), fd, cloexec)
    }

    /// The program closed one. Up to `kept_max` stay open for the next.
    pub fn give_back(&mut self, fd: RawFd, kept_max: usize) {
        if is_in(&CHANGED, fd)
            || bit(&CLOEXEC, fd).is_none()
            || self.kept.iter().map(Vec::len).sum::<usize>() >= kept_max
        {
            drop(own(fd));
            return;
        }
        keep(fd);
        self.kept[usize::from(is_in(&CLOEXEC, fd))].push(fd);
    }

    /// Sets the close-on-exec flag of all that are kept with or without it, as they are meant to be or not.
    fn set_kept(&self, closed_on_exec: bool) {
        for &fd in &self.kept[0] {
            let flags = if closed_on_exec { FdFlags::CLOEXEC } else { FdFlags::empty() };
            // The number is ours; a program that closed it behind the library's back has nothing to lose.
            let _ = borrow(fd).and_then(|fd| fcntl_setfd(fd, flags));
        }
    }
}

/// Another program is being started: no placeholder that is merely kept goes to it, and no other thread uses the stack. See [`Ops::before_exec`].
pub struct Execing<'a> {
    pub(crate) ops: &'a Ops,
    pub(crate) lane: Locked<'a>,
}

impl Drop for Execing<'_> {
    fn drop(&mut self) {
        self.lane.placeholders.set_kept(false);
    }
}

impl Ops {
    /// To be called before `execve` and whatever else starts a program with this process's descriptors. The result is dropped if that failed, or when the
    /// program has begun and this one goes on (`posix_spawn`).
    ///
    /// # Errors
    /// `EAGAIN` in a signal handler that interrupted a call.
    pub fn before_exec(&self) -> Result<Execing<'_>, Errno> {
        let lane = self.lock()?;
        lane.placeholders.set_kept(true);
        Ok(Execing { ops: self, lane })
    }

    /// The program has changed the close-on-exec flag of one of its descriptors, or made it in another way than by these operations.
    pub fn flags_changed(&self, fd: RawFd) {
        put(&CHANGED, fd, true);
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
    put(&INTERNAL, fd, false);
}

impl Drop for Placeholders {
    fn drop(&mut self) {
        for fd in self.kept.iter_mut().flat_map(|kept| kept.drain(..)) {
            forget_internal(fd);
            drop(own(fd));
        }
    }
}
