//! `poll`, `ppoll`, `select` and `pselect`.

use crate::Ops;
use crate::descriptor::is_internal;
use crate::file::FileKind;
use crate::lock::{LockGuard, SignalDeferred};
use crate::scratch::{self, ScratchBuffers};
use crate::sleep::{Timeout, Wait, poll_now};
use crate::syscall;
use core::ffi::c_int;
use core::ops::Range;
use libc::{
    POLLERR, POLLHUP, POLLIN, POLLNVAL, POLLOUT, POLLPRI, POLLRDBAND, POLLRDNORM, POLLWRBAND, POLLWRNORM,
};
use libc::{pollfd, sigset_t};
use rustix::fd::RawFd;
use rustix::io::Errno;

/// Events that `select` reports as readable, writable and exceptional.
const SELECT_IN: i16 = POLLRDNORM | POLLRDBAND | POLLIN | POLLHUP | POLLERR;
const SELECT_OUT: i16 = POLLWRBAND | POLLWRNORM | POLLOUT | POLLERR;
const SELECT_EXCEPT: i16 = POLLPRI;

/// A descriptor set of `select`, as 64-bit words.
pub type FdSet<'a> = Option<&'a mut [u64]>;

impl Ops {
    /// Implements `poll` and `ppoll`, with descriptors of the stack and of the kernel. Returns how many are
    /// ready.
    ///
    /// # Errors
    /// `EINTR`, and those of the kernel.
    pub fn poll(
        &self,
        fds: &mut [pollfd],
        timeout: Timeout,
        mask: Option<&sigset_t>,
    ) -> Result<usize, Errno> {
        let state = self.lock()?;
        self.poll_locked(state, fds, timeout, mask).1
    }

    /// Implements `poll` for a caller that holds the lock and keeps it.
    fn poll_locked<'a>(
        &'a self,
        state: LockGuard<'a>,
        fds: &mut [pollfd],
        timeout: Timeout,
        mask: Option<&sigset_t>,
    ) -> (LockGuard<'a>, Result<usize, Errno>) {
        scratch::with(|scratch| self.poll_with_buffers(state, fds, scratch, timeout, mask))
    }

    fn poll_with_buffers<'a>(
        &'a self,
        mut state: LockGuard<'a>,
        fds: &mut [pollfd],
        scratch: &mut ScratchBuffers,
        timeout: Timeout,
        mask: Option<&sigset_t>,
    ) -> (LockGuard<'a>, Result<usize, Errno>) {
        let ScratchBuffers { stack_fds: ours, files, kernel_fds: kernel, .. } = scratch;
        // To the program these are closed, although the kernel has their numbers open.
        let mut closed = Vec::new();
        for (at, fd) in fds.iter().enumerate() {
            match self.fds.get(fd.fd) {
                Some(file) => ours.push((at, file)),
                None if is_internal(fd.fd) => closed.push(at),
                None => {}
            }
        }
        // The program's `revents` are ignored.
        kernel.extend(fds.iter().map(|requested| pollfd {
            fd: requested.fd,
            events: requested.events,
            revents: 0,
        }));
        for (at, file) in &*ours {
            kernel[*at].fd = state.polled_kernel_fd(*file).unwrap_or(-1);
            state.begin_accepting(*file);
        }
        closed.iter().for_each(|at: &usize| kernel[*at].fd = -1);
        // Some of the events may be there already.
        state.deliver_locally();
        let has_kernel_fds = kernel.iter().any(|fd| fd.fd >= 0);
        files.extend(ours.iter().map(|(_, file)| *file));
        let wait = Wait { mask, ..Wait::of(timeout) };
        let watched = if has_kernel_fds { &mut kernel[..] } else { &mut [] };
        let result;
        (state, result) = self.block_until(state, files, watched, &wait, |state, kernel| {
            state.process_events();
            for (at, file) in ours.iter().filter(|_| has_kernel_fds) {
                // A kernel's epoll instance may have got another number.
                if matches!(state.files.get(*file).kind, FileKind::Epoll(_)) {
                    kernel[*at].fd = state.polled_kernel_fd(*file).unwrap_or(-1);
                }
            }
            let mut count = if has_kernel_fds { poll_now(kernel)? } else { 0 };
            for (at, fd) in fds.iter_mut().enumerate() {
                fd.revents = kernel.get(at).map_or(0, |fd| fd.revents);
            }
            for at in &closed {
                fds[*at].revents = POLLNVAL;
                count += 1;
            }
            for (at, file) in &*ours {
                let by_kernel = fds[*at].revents != 0;
                if by_kernel
                    && matches!(&state.files.get(*file).kind, FileKind::Epoll(set) if set.has_sentinels())
                {
                    // The kernel may have reported an event of the library alone.
                    fds[*at].revents = state.readiness(*file) & fds[*at].events;
                    count -= usize::from(fds[*at].revents == 0);
                    continue;
                }
                let wanted = fds[*at].events | POLLERR | POLLHUP;
                fds[*at].revents |= state.readiness(*file) & wanted;
                count += usize::from(fds[*at].revents != 0 && !by_kernel);
            }
            if count > 0 { Ok(count) } else { Err(Errno::AGAIN) }
        });
        match result {
            Err(Errno::AGAIN) => (state, Ok(0)),
            result => (state, result),
        }
    }

    /// Returns how many descriptors `select` looks at if the program passes `nfds`. Linux ignores numbers
    /// beyond its descriptor table (`core_sys_select`), so programs may pass any large number with a plain
    /// `fd_set`. Internal descriptors have enlarged that table, so its size is not used, but the one that the
    /// program's highest open descriptor needs, and at least `FD_SETSIZE`.
    pub fn select_count(nfds: c_int) -> c_int {
        const SIZE_MIN: c_int = libc::FD_SETSIZE as c_int;
        if nfds <= SIZE_MIN || has_open(nfds - 1..nfds) {
            return nfds;
        }
        let mut size = SIZE_MIN;
        while size < nfds && table_has(size) {
            size = size.saturating_mul(2);
        }
        while size > SIZE_MIN && !has_open(size / 2..size) {
            size /= 2;
        }
        nfds.min(size)
    }

    /// Implements `select` and `pselect`. The sets have at least `nfds` bits and are overwritten with what is
    /// ready. Returns the number of bits that are then set.
    ///
    /// # Errors
    /// `EBADF` if a descriptor is not open, `EINVAL` if `nfds` is negative, `EINTR`, and those of the kernel.
    pub fn select(
        &self,
        nfds: c_int,
        sets: [FdSet<'_>; 3],
        timeout: Timeout,
        mask: Option<&sigset_t>,
    ) -> Result<usize, Errno> {
        let nfds = usize::try_from(nfds).map_err(|_| Errno::INVAL)?;
        let state = self.lock()?;
        // The lock is held until the end.
        let (_state, result) = scratch::with(|scratch| {
            self.select_with_buffers(state, nfds, sets, &mut scratch.select_fds, timeout, mask)
        });
        result
    }

    fn select_with_buffers<'a>(
        &'a self,
        mut state: LockGuard<'a>,
        nfds: usize,
        sets: [FdSet<'_>; 3],
        fds: &mut Vec<pollfd>,
        timeout: Timeout,
        mask: Option<&sigset_t>,
    ) -> (LockGuard<'a>, Result<usize, Errno>) {
        let masks = [SELECT_IN, SELECT_OUT, SELECT_EXCEPT];
        for fd in 0..nfds {
            let wanted = sets.iter().zip(masks).filter(|(set, _)| contains(set, fd));
            let events = wanted.fold(0, |events, (_, mask)| events | mask);
            if events != 0 {
                fds.push(pollfd { fd: fd as RawFd, events, revents: 0 });
            }
        }
        let result;
        (state, result) = self.poll_locked(state, fds, timeout, mask);
        if result.is_err() {
            return (state, result);
        }
        if fds.iter().any(|fd| fd.revents & POLLNVAL != 0) {
            return (state, Err(Errno::BADF));
        }
        let mut count = 0;
        for (mut set, mask) in sets.into_iter().zip(masks) {
            let requested = fds.iter().filter(|fd| fd.events & mask == mask).map(|fd| (fd.fd, fd.revents));
            let requested: Vec<(usize, bool)> = requested
                .filter(|(fd, _)| contains(&set, *fd as usize))
                .map(|(fd, revents)| (fd as usize, revents & mask != 0))
                .collect();
            let Some(words) = &mut set else { continue };
            words.iter_mut().take(nfds.div_ceil(64)).for_each(|word| *word = 0);
            for (fd, _) in requested.iter().filter(|(_, ready)| *ready) {
                words[fd / 64] |= 1 << (fd % 64);
                count += 1;
            }
        }
        (state, Ok(count))
    }
}

/// Returns whether one of these descriptors is open and not internal.
fn has_open(fds: Range<RawFd>) -> bool {
    const AT_ONCE: usize = 64;
    let mut part = [pollfd { fd: -1, events: 0, revents: 0 }; AT_ONCE];
    fds.clone().step_by(AT_ONCE).any(|first| {
        let len = AT_ONCE.min((fds.end - first) as usize);
        let part = &mut part[..len];
        part.iter_mut().zip(first..).for_each(|(entry, fd)| entry.fd = fd);
        // If the kernel refuses the call, the program may not have that many descriptors either.
        poll_now(part).is_ok()
            && part.iter().any(|entry| entry.revents & POLLNVAL == 0 && !Ops::is_internal(entry.fd))
    })
}

/// Returns whether the kernel's descriptor table of the process has this number: select(2) refuses a closed
/// descriptor in the table, and leaves the bits of numbers beyond it as they are.
fn table_has(fd: RawFd) -> bool {
    let (word, bit) = (fd as usize / 64, 1 << (fd % 64));
    let mut set = SignalDeferred::new(|| vec![0u64; word + 1]);
    set[word] = bit;
    match syscall::pselect_exceptions_now(&mut set) {
        Ok(0) => set[word] == 0,
        result => matches!(result, Ok(_) | Err(Errno::BADF)),
    }
}

fn contains(set: &FdSet<'_>, fd: usize) -> bool {
    set.as_ref().is_some_and(|words| words.get(fd / 64).is_some_and(|word| word & 1 << (fd % 64) != 0))
}
