//! Placeholders: numbers that the kernel gave out, behind which stands nothing but the claim to the number
//! (docs/adr/0012-holders-and-placeholders.md).
#![allow(unsafe_code)] // descriptors go through the program as plain numbers and come back

use crate::Ops;
use crate::lock::LockGuard;
use core::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use ginnel::internal_fd::InternalFd;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use rustix::io::{Errno, FdFlags, dup, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Lower placeholders are not kept: a program that closes its standard input means what it opens next to be that.
const POOLED_FD_MIN: RawFd = 3;

/// As many numbers as the table of descriptors has at the most, a bit each.
static INTERNAL: [AtomicU64; 1 << 14] = [const { AtomicU64::new(0) }; 1 << 14];

/// Placeholders that have not the close-on-exec flag that they were given: the program may have changed it.
static FLAGS_CHANGED: [AtomicU64; 1 << 14] = [const { AtomicU64::new(0) }; 1 << 14];

/// Placeholders that were given this flag.
static CLOEXEC: [AtomicU64; 1 << 14] = [const { AtomicU64::new(0) }; 1 << 14];

/// Placeholders of closed sockets, which wait for the next.
static POOLED: [AtomicU64; 1 << 14] = [const { AtomicU64::new(0) }; 1 << 14];

/// Lower numbers are in use, or kept; this one may be free. Placeholders have the lowest that are free, so it is enough to know of those that the program frees.
static LOWEST_FREED: AtomicI32 = AtomicI32::new(RawFd::MAX);

/// The bit of a descriptor in a set of them.
fn bit(set: &'static [AtomicU64], fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((set.get(fd / 64)?, 1 << (fd % 64)))
}

fn has_bit(set: &'static [AtomicU64], fd: RawFd) -> bool {
    bit(set, fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
}

fn set_bit(set: &'static [AtomicU64], fd: RawFd, into: bool) {
    match bit(set, fd) {
        Some((word, bit)) if into => word.fetch_or(bit, Ordering::Relaxed),
        Some((word, bit)) => word.fetch_and(!bit, Ordering::Relaxed),
        None => 0,
    };
}

/// Whether a descriptor is this library's own: to the program it is not open.
pub(crate) fn is_internal(fd: RawFd) -> bool {
    has_bit(&INTERNAL, fd)
}

/// Whether the program closed it, and it is open only for the next socket.
pub(crate) fn is_pooled(fd: RawFd) -> bool {
    has_bit(&POOLED, fd)
}

/// Whether it is, and needed: not one that is only kept.
pub(crate) fn is_internal_in_use(fd: RawFd) -> bool {
    is_internal(fd) && !is_pooled(fd)
}

/// Notes that a descriptor of this library's own has another number.
pub(crate) fn renumber_internal(from: RawFd, to: RawFd) {
    unregister_internal(from);
    register_internal(to);
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
pub(crate) fn register_internal(fd: RawFd) {
    set_bit(&INTERNAL, fd, true);
}

/// A descriptor of this library's own.
#[derive(Debug)]
pub(crate) struct HiddenFd(InternalFd);

impl HiddenFd {
    /// Under a number that is out of the program's way.
    pub fn new(low: OwnedFd) -> Self {
        let fd = InternalFd::new(low);
        register_internal(fd.as_raw_fd());
        Self(fd)
    }

    /// See [`OwnFd::make_way`].
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn relocate(&self, number: RawFd) -> Result<Option<RawFd>, Errno> {
        self.0.relocate_from(number)
    }
}

impl AsFd for HiddenFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for HiddenFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl Drop for HiddenFd {
    fn drop(&mut self) {
        unregister_internal(self.0.as_raw_fd());
    }
}

/// Where placeholders come from.
pub(crate) struct ProxyFds {
    /// All of them are copies of this: a socket, so that `fstat` says so.
    template: HiddenFd,
    /// Those of closed sockets, by whether they are closed on exec: to change that would be a system call for each connection.
    pooled: [BinaryHeap<Reverse<RawFd>>; 2],
}

impl ProxyFds {
    pub fn new() -> Result<Self, Errno> {
        let low = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        Ok(Self { template: HiddenFd::new(low), pooled: Default::default() })
    }

    /// Whether the next one is there already, so that to take it cannot fail.
    pub fn has_pooled(&self) -> bool {
        self.pooled.iter().any(|kept| !kept.is_empty())
    }

    /// A new one: the lowest number that is free to the program, as far as its calls have told.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`.
    pub fn alloc(&mut self, cloexec: bool) -> Result<RawFd, Errno> {
        let lowest = self.pooled.iter().filter_map(|kept| kept.peek()).map(|Reverse(fd)| *fd).min();
        if let Some(kept) = lowest
            && kept < LOWEST_FREED.load(Ordering::Relaxed)
        {
            return self.take_pooled(cloexec);
        }
        // What is freed from here on is noted.
        LOWEST_FREED.store(RawFd::MAX, Ordering::Relaxed);
        let new = if cloexec { fcntl_dupfd_cloexec(&self.template, 0) } else { dup(&self.template) };
        let fd = match (new, lowest) {
            (Ok(fd), _) => fd.into_raw_fd(),
            (Err(_), Some(_)) => return self.take_pooled(cloexec),
            (Err(error), None) => return Err(error),
        };
        // What is lower than the kernel's lowest is not free.
        note_freed(fd.saturating_add(1));
        set_bit(&FLAGS_CHANGED, fd, false);
        set_bit(&CLOEXEC, fd, cloexec);
        if lowest.is_some_and(|kept| kept < fd) {
            // What the program had freed was taken again: the kept one is lower.
            self.add_to_pool(fd);
            return self.take_pooled(cloexec);
        }
        Ok(fd)
    }

    /// The lowest of those that are kept, with or without this flag.
    fn take_pooled(&mut self, cloexec: bool) -> Result<RawFd, Errno> {
        let lowest = |kept: &BinaryHeap<Reverse<RawFd>>| kept.peek().map_or(RawFd::MAX, |Reverse(fd)| *fd);
        let list = usize::from(lowest(&self.pooled[1]) < lowest(&self.pooled[0]));
        let Reverse(fd) = self.pooled[list].pop().ok_or(Errno::MFILE)?;
        unmark_pooled(fd);
        if list != usize::from(cloexec) {
            let flags = if cloexec { FdFlags::CLOEXEC } else { FdFlags::empty() };
            fcntl_setfd(borrow(fd)?, flags)?;
            set_bit(&CLOEXEC, fd, cloexec);
        }
        Ok(fd)
    }

    /// One stays open for the next.
    fn add_to_pool(&mut self, fd: RawFd) {
        register_internal(fd);
        set_bit(&POOLED, fd, true);
        self.pooled[usize::from(has_bit(&CLOEXEC, fd))].push(Reverse(fd));
    }

    /// Takes another number if it has this one. See [`OwnFd::make_way`].
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn relocate(&self, number: RawFd) -> Result<Option<RawFd>, Errno> {
        self.template.relocate(number)
    }

    /// What all of them are copies of.
    pub fn template(&self) -> RawFd {
        self.template.as_raw_fd()
    }

    /// Puts one behind a number that there is already.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn install_over(&self, fd: RawFd) -> Result<(), Errno> {
        let flags = rustix::io::fcntl_getfd(borrow(fd)?)?;
        let cloexec = if flags.contains(rustix::io::FdFlags::CLOEXEC) { libc::O_CLOEXEC } else { 0 };
        crate::syscall::dup3(self.template.as_raw_fd(), fd, cloexec)
    }

    /// The program closed one. Up to `kept_max` stay open for the next.
    pub fn release(&mut self, fd: RawFd, kept_max: usize) {
        if has_bit(&FLAGS_CHANGED, fd)
            || bit(&CLOEXEC, fd).is_none()
            || fd < POOLED_FD_MIN
            || self.pooled.iter().map(BinaryHeap::len).sum::<usize>() >= kept_max
        {
            close(fd);
            return;
        }
        self.add_to_pool(fd);
    }

    /// The program closes all from `first` to `last`, and these as well.
    pub fn close_pooled(&mut self, first: RawFd, last: RawFd) {
        for kept in &mut self.pooled {
            kept.retain(|Reverse(fd)| {
                let goes = (first..=last).contains(fd);
                if goes {
                    unmark_pooled(*fd);
                    close(*fd);
                }
                !goes
            });
        }
    }

    /// One that was kept is something else of the program's now.
    pub fn forget_pooled(&mut self, fd: RawFd) {
        for kept in &mut self.pooled {
            kept.retain(|Reverse(kept)| *kept != fd);
        }
        unmark_pooled(fd);
    }

    /// Sets the close-on-exec flag of all that are kept with or without it, as they are meant to be or not.
    fn set_pooled_cloexec(&self, closed_on_exec: bool) {
        for &Reverse(fd) in &self.pooled[0] {
            let flags = if closed_on_exec { FdFlags::CLOEXEC } else { FdFlags::empty() };
            // The number is ours; a program that closed it behind the library's back has nothing to lose.
            let _ = borrow(fd).and_then(|fd| fcntl_setfd(fd, flags));
        }
    }
}

/// Another program is being started: no placeholder that is merely kept goes to it, and no other thread uses the stack. See [`Ops::before_exec`].
pub struct ExecGuard<'a> {
    pub(crate) ops: &'a Ops,
    pub(crate) state: LockGuard<'a>,
}

impl ExecGuard<'_> {
    /// All is prepared: signals that were put off come now, and others as they come, as the program that is started would find them blocked. A handler that comes in
    /// between, uses sockets and finds `EAGAIN` is as one that was installed past the library.
    pub fn finish_preparation(&self) {
        Ops::stop_deferring_signals();
    }
}

impl Drop for ExecGuard<'_> {
    fn drop(&mut self) {
        self.state.proxy_fds.set_pooled_cloexec(false);
    }
}

impl Ops {
    /// To be called before `execve` and whatever else starts a program with this process's descriptors. The result is dropped if that failed, or when the
    /// program has begun and this one goes on (`posix_spawn`).
    ///
    /// # Errors
    /// `EAGAIN` in a signal handler that interrupted a call.
    pub fn prepare_exec(&self) -> Result<ExecGuard<'_>, Errno> {
        let lane = self.lock()?;
        lane.proxy_fds.set_pooled_cloexec(true);
        Ok(ExecGuard { ops: self, state: lane })
    }

    /// The program has changed the close-on-exec flag of one of its descriptors, or made it in another way than by these operations.
    pub fn note_fd_flags_changed(&self, fd: RawFd) {
        set_bit(&FLAGS_CHANGED, fd, true);
    }
}

/// Closes one that was a number of the program's.
pub(crate) fn close(fd: RawFd) {
    drop(take_ownership(fd));
    note_freed(fd);
}

/// A number below those of placeholders is free again.
pub(crate) fn note_freed(fd: RawFd) {
    if fd < LOWEST_FREED.load(Ordering::Relaxed) {
        LOWEST_FREED.fetch_min(fd, Ordering::Relaxed);
    }
}

/// Takes possession of a descriptor that was a number of the program's.
pub(crate) fn take_ownership(fd: RawFd) -> OwnedFd {
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

/// A placeholder that was kept is used again, or gone.
fn unmark_pooled(fd: RawFd) {
    set_bit(&POOLED, fd, false);
    unregister_internal(fd);
}

/// A descriptor is not this library's own any more.
pub(crate) fn unregister_internal(fd: RawFd) {
    set_bit(&INTERNAL, fd, false);
}

impl Drop for ProxyFds {
    fn drop(&mut self) {
        for Reverse(fd) in self.pooled.iter_mut().flat_map(BinaryHeap::drain) {
            unmark_pooled(fd);
            close(fd);
        }
    }
}
