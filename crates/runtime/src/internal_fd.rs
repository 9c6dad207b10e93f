//! Internal descriptors: descriptors of the library in a process, which are hidden from the program. They
//! have high numbers, and move away if the program wants a number.
#![allow(unsafe_code)] // a descriptor whose number changes while it is open

use crate::raised_limit::RaisedLimit;
use core::sync::atomic::{AtomicI32, Ordering};
use ginnel_devices::resource_limit::resource_limit;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::process::Resource;

/// Lowest number: select(2) supports only lower ones, and programs that choose numbers themselves choose
/// lower ones.
const FIRST_FD: RawFd = 1024;
/// A soft limit that is lower than `FIRST_FD` plus this number is raised for the duplication.
const RAISED_LIMIT_ROOM: u64 = 1024;
/// If the hard limit is lower, the descriptors are among this many highest numbers.
const FALLBACK_RANGE: RawFd = 64;
/// Lowest number in any case: programs expect standard input, output and error at the numbers below, also
/// after they have closed them.
const LOWEST_FD: RawFd = 3;
/// Lowest numbers that are tried in turn if the limit is not known.
const FALLBACKS: [RawFd; 4] = [512, 192, 64, LOWEST_FD];

/// A descriptor that this process owns and its program does not know.
#[derive(Debug)]
pub struct InternalFd(AtomicI32);

impl InternalFd {
    /// Moves `fd` to a high number, close-on-exec. Keeps the number if that fails, unless the number is that
    /// of standard input, output or error.
    ///
    /// # Errors
    /// `EMFILE`: no other number is free.
    pub fn new(fd: OwnedFd) -> Result<Self, Errno> {
        match dup_high(fd.as_fd()) {
            Err(error) if fd.as_raw_fd() < LOWEST_FD => Err(error),
            copy => Ok(Self::in_place(copy.unwrap_or(fd))),
        }
    }

    /// Keeps the number of `fd`.
    pub fn in_place(fd: OwnedFd) -> Self {
        Self(AtomicI32::new(fd.into_raw_fd()))
    }

    /// Duplicates `fd` to a high number, close-on-exec.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn copy_of(fd: impl AsFd) -> Result<Self, Errno> {
        dup_high(fd.as_fd()).map(Self::in_place)
    }

    /// Duplicates the descriptor to a high number.
    ///
    /// # Errors
    /// `EMFILE`.
    pub(crate) fn try_clone(&self) -> Result<Self, Errno> {
        Self::copy_of(self)
    }

    /// If the descriptor has this number, moves it to another number and returns that. The old number stays
    /// open and belongs to the caller, who replaces it. No other thread may be using the descriptor.
    ///
    /// # Errors
    /// `EMFILE`: no number is free.
    pub fn relocate_from(&self, number: RawFd) -> Result<Option<RawFd>, Errno> {
        if self.as_raw_fd() != number {
            return Ok(None);
        }
        let relocated = dup_high(self.as_fd())?.into_raw_fd();
        self.0.store(relocated, Ordering::Relaxed);
        Ok(Some(relocated))
    }
}

/// Duplicates `fd` to a high number, close-on-exec.
fn dup_high(fd: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    match fcntl_dupfd_cloexec(fd, FIRST_FD) {
        Err(Errno::INVAL | Errno::MFILE) => {}
        result => return result,
    }
    let limit = resource_limit(Resource::Nofile);
    // The limit may be finite and unknown.
    let Some(current) = limit.current else { return dup_to_first(fd, FALLBACKS) };
    // `RLIMIT_NOFILE` limits the numbers, and programs choose numbers below it. The limit is raised only
    // during the call, so the program cannot use numbers above it.
    if current < FIRST_FD as u64 + RAISED_LIMIT_ROOM {
        let _raised = RaisedLimit::new();
        let copy = fcntl_dupfd_cloexec(fd, FIRST_FD);
        if copy.is_ok() {
            return copy;
        }
    }
    let highest = RawFd::try_from(current).unwrap_or(RawFd::MAX).saturating_sub(FALLBACK_RANGE);
    dup_to_first(fd, [highest.max(LOWEST_FD), LOWEST_FD])
}

/// Duplicates `fd` to a free number from the first of `lowest` on that has one.
fn dup_to_first(fd: BorrowedFd<'_>, lowest: impl IntoIterator<Item = RawFd>) -> Result<OwnedFd, Errno> {
    let free = lowest.into_iter().find_map(|lowest| fcntl_dupfd_cloexec(fd, lowest).ok());
    free.ok_or(Errno::MFILE)
}

impl AsRawFd for InternalFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.load(Ordering::Relaxed)
    }
}

impl AsFd for InternalFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as `self` is; the caller of `relocate_from` promises that no
        // thread uses it meanwhile.
        unsafe { BorrowedFd::borrow_raw(self.as_raw_fd()) }
    }
}

impl Drop for InternalFd {
    fn drop(&mut self) {
        // SAFETY: the descriptor is owned by this value since it was created.
        drop(unsafe { OwnedFd::from_raw_fd(self.as_raw_fd()) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::{fcntl_getfd, read, write};
    use rustix::pipe::pipe;
    use rustix::process::{Rlimit, getrlimit, setrlimit};

    #[test]
    fn descriptor_is_high_and_relocates_on_demand() {
        let (out, into) = pipe().unwrap();
        let own = InternalFd::new(into).unwrap();
        let number = own.as_raw_fd();
        assert!(number >= FIRST_FD || getrlimit(Resource::Nofile).maximum.is_some_and(|most| most <= 1024));
        assert_eq!(own.relocate_from(number + 1), Ok(None));
        let relocated = own.relocate_from(number).unwrap().expect("it had the number");
        assert_eq!((own.as_raw_fd(), relocated == number), (relocated, false));
        // The old number is open until it is replaced. SAFETY: nothing else owns it now.
        let old = unsafe { OwnedFd::from_raw_fd(number) };
        assert!(fcntl_getfd(&old).is_ok());
        drop(old);
        write(&own, b"x").unwrap();
        assert_eq!(read(&out, &mut [0; 2]), Ok(1));
    }

    #[test]
    fn numbers_of_standard_input_and_output_are_not_taken() {
        let (file, _) = pipe().unwrap();
        // As if the limit were not known, and above those that are tried first.
        let copy = dup_to_first(file.as_fd(), [RawFd::MAX, LOWEST_FD]).unwrap();
        assert!(copy.as_raw_fd() > 2);
        assert_eq!(dup_to_first(file.as_fd(), [RawFd::MAX]).unwrap_err(), Errno::MFILE);
    }

    #[test]
    fn low_soft_limit_is_raised_and_restored() {
        let before = getrlimit(Resource::Nofile);
        if before.maximum.is_some_and(|most| most <= 1024) {
            return;
        }
        // The limit is high enough for other tests of this process.
        setrlimit(Resource::Nofile, Rlimit { current: Some(512), ..before }).unwrap();
        let own = InternalFd::new(pipe().unwrap().0).unwrap();
        let limit_during = getrlimit(Resource::Nofile).current;
        setrlimit(Resource::Nofile, before).unwrap();
        assert!(own.as_raw_fd() >= FIRST_FD);
        assert_eq!(limit_during, Some(512));
    }
}
