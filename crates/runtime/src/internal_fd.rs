//! Descriptors that a process has and its program does not know of: they stand where no program looks, and go out of the way of one that does.
#![allow(unsafe_code)] // a descriptor whose number changes while it is open

use core::sync::atomic::{AtomicI32, Ordering};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// From here on they stand: `select` knows only lower ones, and programs that name descriptors themselves choose among those.
const FIRST_FD: RawFd = 1024;
/// Room for so many is made above a limit that is lower.
const RAISED_LIMIT_ROOM: u64 = 1024;
/// If the process may never have as many, they are among so many highest.
const FALLBACK_RANGE: RawFd = 64;

/// A descriptor that this process owns and its program does not know of.
#[derive(Debug)]
pub struct InternalFd(AtomicI32);

impl InternalFd {
    /// Under a number that is out of the program's way, close-on-exec. If there is none, it stays where it was.
    pub fn new(fd: OwnedFd) -> Self {
        Self::in_place(dup_high(fd.as_fd()).unwrap_or(fd))
    }

    /// Under the number that it has: in a process that is no program's, there is no way to be in.
    pub fn in_place(fd: OwnedFd) -> Self {
        Self(AtomicI32::new(fd.into_raw_fd()))
    }

    /// A copy, out of the way.
    ///
    /// # Errors
    /// `EMFILE`.
    pub(crate) fn try_clone(&self) -> Result<Self, Errno> {
        dup_high(self.as_fd()).map(Self::in_place)
    }

    /// If it has this number it takes another, and the old one stays open for whoever wants the number to put something else there. Returns the new
    /// number. No other thread may be using the descriptor.
    ///
    /// # Errors
    /// `EMFILE`: there is no other.
    pub fn relocate_from(&self, number: RawFd) -> Result<Option<RawFd>, Errno> {
        if self.as_raw_fd() != number {
            return Ok(None);
        }
        let relocated = dup_high(self.as_fd())?.into_raw_fd();
        self.0.store(relocated, Ordering::Relaxed);
        Ok(Some(relocated))
    }
}

/// A copy out of the way.
fn dup_high(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let error = match fcntl_dupfd_cloexec(fd, FIRST_FD) {
        Err(error @ (Errno::INVAL | Errno::MFILE)) => error,
        result => return result,
    };
    let limit = getrlimit(Resource::Nofile);
    let Some(current) = limit.current else { return Err(error) };
    // The limit is about numbers. Above it the program cannot name any: it is raised for the moment of the copy.
    let raised_limit = (FIRST_FD as u64 + RAISED_LIMIT_ROOM).min(limit.maximum.unwrap_or(u64::MAX));
    if current < raised_limit
        && raised_limit > FIRST_FD as u64
        && setrlimit(Resource::Nofile, Rlimit { current: Some(raised_limit), ..limit }).is_ok()
    {
        let copy = fcntl_dupfd_cloexec(fd, FIRST_FD);
        // Lowering is always allowed.
        let _ = setrlimit(Resource::Nofile, limit);
        if copy.is_ok() {
            return copy;
        }
    }
    let highest = RawFd::try_from(current).unwrap_or(RawFd::MAX).saturating_sub(FALLBACK_RANGE).max(0);
    fcntl_dupfd_cloexec(fd, highest).or_else(|_| fcntl_dupfd_cloexec(fd, 0))
}

impl AsRawFd for InternalFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.load(Ordering::Relaxed)
    }
}

impl AsFd for InternalFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open as long as `self` is; who makes way promises that nobody uses it meanwhile.
        unsafe { BorrowedFd::borrow_raw(self.as_raw_fd()) }
    }
}

impl Drop for InternalFd {
    fn drop(&mut self) {
        // SAFETY: the number of a descriptor that this value has owned since it was made.
        drop(unsafe { OwnedFd::from_raw_fd(self.as_raw_fd()) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::{fcntl_getfd, read, write};
    use rustix::pipe::pipe;

    #[test]
    fn it_stands_high_and_makes_way_for_who_wants_its_number() {
        let (out, into) = pipe().unwrap();
        let own = InternalFd::new(into);
        let number = own.as_raw_fd();
        assert!(number >= FIRST_FD || getrlimit(Resource::Nofile).maximum.is_some_and(|most| most <= 1024));
        assert_eq!(own.relocate_from(number + 1), Ok(None));
        let relocated = own.relocate_from(number).unwrap().expect("it had the number");
        assert_eq!((own.as_raw_fd(), relocated == number), (relocated, false));
        // The old number is open until somebody takes it.
        // SAFETY: nobody else owns it now.
        let old = unsafe { OwnedFd::from_raw_fd(number) };
        assert!(fcntl_getfd(&old).is_ok());
        drop(old);
        write(&own, b"x").unwrap();
        assert_eq!(read(&out, &mut [0; 2]), Ok(1));
    }

    #[test]
    fn a_low_limit_of_the_program_does_not_keep_it_low_and_is_as_it_was() {
        let before = getrlimit(Resource::Nofile);
        if before.maximum.is_some_and(|most| most <= 1024) {
            return;
        }
        // Other tests of this process have room, too.
        setrlimit(Resource::Nofile, Rlimit { current: Some(512), ..before }).unwrap();
        let own = InternalFd::new(pipe().unwrap().0);
        let limit_during = getrlimit(Resource::Nofile).current;
        setrlimit(Resource::Nofile, before).unwrap();
        assert!(own.as_raw_fd() >= FIRST_FD);
        assert_eq!(limit_during, Some(512));
    }
}
