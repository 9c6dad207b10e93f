//! Proxy descriptors: kernel descriptors that only reserve the number of a stack socket, and the registry of
//! the library's internal descriptors (docs/adr/0012-owners-and-proxy-descriptors.md).
#![allow(unsafe_code)] // descriptors pass through the program as plain integers

use crate::Ops;
use crate::lock::LockGuard;
use core::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use ginnel::internal_fd::InternalFd;
use ginnel::raised_limit::with_raised_limit;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use rustix::io::{Errno, FdFlags, dup, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Proxy descriptors below this number are not pooled: a program that closes its standard input expects the
/// next descriptor to take its place.
const POOLED_FD_MIN: RawFd = 3;

/// The library's internal descriptors, one bit for each number that a process can have.
static INTERNAL: [AtomicU64; 1 << 14] = [const { AtomicU64::new(0) }; 1 << 14];

/// Proxy descriptors whose close-on-exec flag the program may have changed.
static FLAGS_CHANGED: [AtomicU64; 1 << 14] = [const { AtomicU64::new(0) }; 1 << 14];

/// Proxy descriptors that were created with the close-on-exec flag.
static CLOEXEC: [AtomicU64; 1 << 14] = [const { AtomicU64::new(0) }; 1 << 14];

/// Proxy descriptors of closed sockets in the pool.
static POOLED: [AtomicU64; 1 << 14] = [const { AtomicU64::new(0) }; 1 << 14];

/// Every number below this one is in use or pooled; this number may be free. Proxy descriptors take the
/// lowest free number, so it is enough to watch the numbers that the program frees.
static LOWEST_FREED: AtomicI32 = AtomicI32::new(RawFd::MAX);

/// Returns the word and the bit of a descriptor in a bit set.
fn bit(set: &'static [AtomicU64], fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let fd = usize::try_from(fd).ok()?;
    Some((set.get(fd / 64)?, 1 << (fd % 64)))
}

fn has_bit(set: &'static [AtomicU64], fd: RawFd) -> bool {
    bit(set, fd).is_some_and(|(word, bit)| word.load(Ordering::Relaxed) & bit != 0)
}

fn set_bit(set: &'static [AtomicU64], fd: RawFd, value: bool) {
    match bit(set, fd) {
        Some((word, bit)) if value => word.fetch_or(bit, Ordering::Relaxed),
        Some((word, bit)) => word.fetch_and(!bit, Ordering::Relaxed),
        None => 0,
    };
}

/// Returns whether a descriptor is internal to the library, which the program sees as not open.
pub(crate) fn is_internal(fd: RawFd) -> bool {
    has_bit(&INTERNAL, fd)
}

/// Returns whether the program has closed a proxy descriptor that the pool keeps open.
pub(crate) fn is_pooled(fd: RawFd) -> bool {
    has_bit(&POOLED, fd)
}

/// Returns whether a descriptor is internal and in use, not pooled.
pub(crate) fn is_internal_in_use(fd: RawFd) -> bool {
    is_internal(fd) && !is_pooled(fd)
}

/// Moves the mark of an internal descriptor to its new number.
pub(crate) fn renumber_internal(from: RawFd, to: RawFd) {
    unregister_internal(from);
    register_internal(to);
}

/// Returns the first internal descriptor from `from` to `last`.
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

/// Marks a descriptor as internal to the library.
pub(crate) fn register_internal(fd: RawFd) {
    set_bit(&INTERNAL, fd, true);
}

/// A descriptor of the library that is hidden from the program.
#[derive(Debug)]
pub(crate) struct HiddenFd(InternalFd);

impl HiddenFd {
    /// Moves a descriptor to a high number, out of the program's way, and marks it as internal.
    ///
    /// # Errors
    /// `EMFILE`: only numbers of standard input, output and error are free.
    pub fn new(fd: OwnedFd) -> Result<Self, Errno> {
        InternalFd::new(fd).map(Self::register)
    }

    /// Duplicates a descriptor to a high number, and marks the copy as internal.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn copy_of(fd: impl AsFd) -> Result<Self, Errno> {
        InternalFd::copy_of(fd).map(Self::register)
    }

    fn register(fd: InternalFd) -> Self {
        register_internal(fd.as_raw_fd());
        Self(fd)
    }

    /// See [`InternalFd::relocate_from`].
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

/// Returns whether the process has no number left for a descriptor.
pub(crate) fn is_shortage(errno: &Errno) -> bool {
    *errno == Errno::MFILE
}

/// Creates proxy descriptors.
pub(crate) struct ProxyFds {
    /// All proxy descriptors are duplicates of this socket, so that `fstat` reports a socket.
    template: HiddenFd,
    /// Pooled proxy descriptors without and with the close-on-exec flag: changing the flag would cost a
    /// system call for each connection.
    pooled: [BinaryHeap<Reverse<RawFd>>; 2],
}

impl ProxyFds {
    pub fn new() -> Result<Self, Errno> {
        // The program may have used all of its numbers.
        let template = with_raised_limit(is_shortage, || {
            HiddenFd::new(socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?)
        });
        Ok(Self { template: template?, pooled: Default::default() })
    }

    /// Returns whether a proxy descriptor is pooled, so that [`alloc`](Self::alloc) cannot fail.
    pub fn has_pooled(&self) -> bool {
        self.pooled.iter().any(|pool| !pool.is_empty())
    }

    /// Returns a proxy descriptor with the lowest number that is free to the program, as far as the hooked
    /// calls tell.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`.
    pub fn alloc(&mut self, cloexec: bool) -> Result<RawFd, Errno> {
        let lowest = self.pooled.iter().filter_map(|pool| pool.peek()).map(|Reverse(fd)| *fd).min();
        if let Some(pooled_fd) = lowest
            && pooled_fd < LOWEST_FREED.load(Ordering::Relaxed)
        {
            return self.take_pooled(cloexec);
        }
        // Descriptors that are closed from here on lower the mark again.
        LOWEST_FREED.store(RawFd::MAX, Ordering::Relaxed);
        let new = if cloexec { fcntl_dupfd_cloexec(&self.template, 0) } else { dup(&self.template) };
        let fd = match (new, lowest) {
            (Ok(fd), _) => fd.into_raw_fd(),
            (Err(_), Some(_)) => return self.take_pooled(cloexec),
            (Err(error), None) => return Err(error),
        };
        // The kernel returns its lowest free number, so no lower one is free.
        note_freed(fd.saturating_add(1));
        set_bit(&FLAGS_CHANGED, fd, false);
        set_bit(&CLOEXEC, fd, cloexec);
        if lowest.is_some_and(|pooled_fd| pooled_fd < fd) {
            // The freed number is in use again: the pooled descriptor is lower.
            self.add_to_pool(fd);
            return self.take_pooled(cloexec);
        }
        Ok(fd)
    }

    /// Returns the pooled descriptor with the lowest number, and sets its close-on-exec flag as asked.
    fn take_pooled(&mut self, cloexec: bool) -> Result<RawFd, Errno> {
        let lowest = |pool: &BinaryHeap<Reverse<RawFd>>| pool.peek().map_or(RawFd::MAX, |Reverse(fd)| *fd);
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

    /// Adds a descriptor to the pool.
    fn add_to_pool(&mut self, fd: RawFd) {
        register_internal(fd);
        set_bit(&POOLED, fd, true);
        self.pooled[usize::from(has_bit(&CLOEXEC, fd))].push(Reverse(fd));
    }

    /// Moves the template to another number if it has this one. See [`InternalFd::relocate_from`].
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn relocate(&self, number: RawFd) -> Result<Option<RawFd>, Errno> {
        self.template.relocate(number)
    }

    /// Returns the descriptor of which all proxy descriptors are duplicates.
    pub fn template(&self) -> RawFd {
        self.template.as_raw_fd()
    }

    /// Puts a proxy behind an existing number, keeping its close-on-exec flag.
    ///
    /// # Errors
    /// `EBADF`, `EMFILE`.
    pub fn install_over(&self, fd: RawFd) -> Result<(), Errno> {
        let flags = rustix::io::fcntl_getfd(borrow(fd)?)?;
        let cloexec = if flags.contains(rustix::io::FdFlags::CLOEXEC) { libc::O_CLOEXEC } else { 0 };
        crate::syscall::dup3(self.template.as_raw_fd(), fd, cloexec)
    }

    /// Releases a proxy descriptor that the program closed: pools it, or closes it if `pool_max` descriptors
    /// are pooled.
    pub fn release(&mut self, fd: RawFd, pool_max: usize) {
        if has_bit(&FLAGS_CHANGED, fd)
            || bit(&CLOEXEC, fd).is_none()
            || fd < POOLED_FD_MIN
            || self.pooled.iter().map(BinaryHeap::len).sum::<usize>() >= pool_max
        {
            close(fd);
            return;
        }
        self.add_to_pool(fd);
    }

    /// Closes the pooled descriptors from `first` to `last`.
    pub fn close_pooled(&mut self, first: RawFd, last: RawFd) {
        for pool in &mut self.pooled {
            pool.retain(|Reverse(fd)| {
                let is_in_range = (first..=last).contains(fd);
                if is_in_range {
                    unmark_pooled(*fd);
                    close(*fd);
                }
                !is_in_range
            });
        }
    }

    /// Forgets a pooled descriptor whose number the program has reused.
    pub fn forget_pooled(&mut self, fd: RawFd) {
        for pool in &mut self.pooled {
            pool.retain(|Reverse(pooled_fd)| *pooled_fd != fd);
        }
        unmark_pooled(fd);
    }

    /// Sets the close-on-exec flag of the pooled descriptors that lack it, or clears it again.
    fn set_pooled_cloexec(&self, closed_on_exec: bool) {
        for &Reverse(fd) in &self.pooled[0] {
            let flags = if closed_on_exec { FdFlags::CLOEXEC } else { FdFlags::empty() };
            // The number belongs to the library; a program that closed it without the hooks loses nothing.
            let _ = borrow(fd).and_then(|fd| fcntl_setfd(fd, flags));
        }
    }
}

/// Keeps pooled proxy descriptors out of a program that is being executed, and other threads off the stack.
/// See [`Ops::prepare_exec`].
pub struct ExecGuard<'a> {
    pub(crate) ops: &'a Ops,
    pub(crate) state: LockGuard<'a>,
}

impl ExecGuard<'_> {
    /// Marks the end of the preparation: deferred signals are delivered, and further ones are no longer
    /// deferred, since the new program would find them blocked. Until the program is executed, a handler that
    /// uses sockets gets `EAGAIN`, like one that was installed without the library's hooks.
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
    /// Must be called before `execve` and any other call that executes a program with this process's
    /// descriptors. The result must be dropped if that fails, or once the program runs and this one continues
    /// (`posix_spawn`).
    ///
    /// # Errors
    /// `EAGAIN` in a signal handler that interrupted a call.
    pub fn prepare_exec(&self) -> Result<ExecGuard<'_>, Errno> {
        let state = self.lock()?;
        state.proxy_fds.set_pooled_cloexec(true);
        Ok(ExecGuard { ops: self, state })
    }

    /// Records that the program has changed the close-on-exec flag of a descriptor, or created it without
    /// [`Ops`].
    pub fn note_fd_flags_changed(&self, fd: RawFd) {
        set_bit(&FLAGS_CHANGED, fd, true);
    }
}

/// Closes a descriptor that the program had a number for.
pub(crate) fn close(fd: RawFd) {
    drop(take_ownership(fd));
    note_freed(fd);
}

/// Records that a number is free, if it is lower than those known.
pub(crate) fn note_freed(fd: RawFd) {
    if fd < LOWEST_FREED.load(Ordering::Relaxed) {
        LOWEST_FREED.fetch_min(fd, Ordering::Relaxed);
    }
}

/// Takes ownership of a descriptor that the program had a number for.
pub(crate) fn take_ownership(fd: RawFd) -> OwnedFd {
    // SAFETY: this crate gave the number to the program and has removed it from its table, so no other code
    // of the library closes it. If the program closed it without the hooks, the descriptor that has the
    // number now is closed instead, as by any double close.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Borrows a kernel descriptor that the program named.
///
/// # Errors
/// `EBADF` for a negative number.
pub(crate) fn borrow<'a>(fd: RawFd) -> Result<BorrowedFd<'a>, Errno> {
    if fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: the number is used for one system call and not kept; the kernel reports a number that is not
    // open.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Unmarks a pooled descriptor that is used again or closed.
fn unmark_pooled(fd: RawFd) {
    set_bit(&POOLED, fd, false);
    unregister_internal(fd);
}

/// Unmarks an internal descriptor.
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
