//! Creation, duplication and closing of descriptors, and what `fcntl` changes.

use crate::Ops;
use crate::descriptor;
use crate::fd_table::FileId;
use crate::file::{FileKind, ShutdownState, Socket, SocketRole, UrgentState};
use crate::lock::LockGuard;
use crate::options::SocketOptionState;
use crate::process::ProcessState;
use crate::sleep::{Timeout, Wait};
use crate::sockaddr::Family;
use core::ffi::c_int;
use ginnel::State;
use rustix::fd::RawFd;
use rustix::io::Errno;
use std::time::{Duration, Instant};

impl Ops {
    /// Returns whether the stack supports sockets of this kind. All others are kernel sockets from the start.
    pub fn supports_socket(domain: c_int, kind: c_int, protocol: c_int) -> bool {
        let kind = kind & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC);
        matches!(domain, libc::AF_INET | libc::AF_INET6)
            && matches!(
                (kind, protocol),
                (libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) | (libc::SOCK_DGRAM, 0 | libc::IPPROTO_UDP)
            )
    }

    /// Implements `socket`, for sockets that [`Ops::supports_socket`] accepts.
    ///
    /// # Errors
    /// `EMFILE`, `ENFILE`; `EAFNOSUPPORT` for sockets that the stack does not support.
    pub fn socket(&self, domain: c_int, kind: c_int, protocol: c_int) -> Result<RawFd, Errno> {
        if !Self::supports_socket(domain, kind, protocol) {
            return Err(Errno::AFNOSUPPORT);
        }
        let family = if domain == libc::AF_INET { Family::V4 } else { Family::V6 };
        let is_udp = kind & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) == libc::SOCK_DGRAM;
        let mut options = SocketOptionState::new(family, is_udp);
        if let Some([first, _]) = self.config.send_buffer.filter(|_| !is_udp) {
            options.set_initial_send_buffer(first);
        }
        let socket = Socket {
            family,
            is_udp,
            udp_send: None,
            flow_labels: None,
            nonblocking: kind & libc::SOCK_NONBLOCK != 0,
            options,
            shutdown: ShutdownState::default(),
            role: SocketRole::Unconnected { bound: None },
            last_address: None,
            urgent: UrgentState::default(),
            netdown_round: 0,
            cookie: 0,
        };
        let mut state = self.lock()?;
        self.open(&mut state, FileKind::Socket(Box::new(socket)), kind & libc::SOCK_CLOEXEC != 0)
    }

    /// Creates an open file description and a proxy descriptor for it.
    pub(crate) fn open(
        &self,
        state: &mut ProcessState,
        kind: FileKind,
        cloexec: bool,
    ) -> Result<RawFd, Errno> {
        let fd = state.proxy_fds.alloc(cloexec)?;
        self.install(state, fd, kind)
    }

    /// Creates an open file description for an existing descriptor. Closes the descriptor if it is beyond the
    /// table.
    pub(crate) fn install(
        &self,
        state: &mut ProcessState,
        fd: RawFd,
        kind: FileKind,
    ) -> Result<RawFd, Errno> {
        let file = state.files.add(kind);
        if !self.fds.set(fd, file) {
            descriptor::close(fd);
            state.free_file(file);
            return Err(Errno::MFILE);
        }
        let description = state.files.get(file);
        (description.refcount, description.fd_count) = (1, 1);
        state.report_fd(fd, file);
        Ok(fd)
    }

    /// Implements `dup` and `fcntl(F_DUPFD)`: the caller has made the kernel duplicate the proxy descriptor
    /// `fd` to `copy`. If `copy` was a descriptor of the stack, the caller has called [`Ops::forget_fd`].
    ///
    /// # Errors
    /// `EBADF` if `fd` does not belong to the stack, `EMFILE` if `copy` is beyond the table.
    pub fn dup(&self, fd: RawFd, copy: RawFd) -> Result<(), Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        self.note_fd_flags_changed(copy);
        if !self.fds.set(copy, file) {
            return Err(Errno::MFILE);
        }
        Self::add_fd(&mut state, copy, file);
        Ok(())
    }

    /// Implements `dup`, and `fcntl(F_DUPFD)` with a minimum of 0, of a socket without a kernel socket: since
    /// all proxy descriptors are alike, a pooled one serves as well. Returns `None` if the caller must have
    /// the kernel duplicate the descriptor and then call [`Ops::dup`].
    ///
    /// # Errors
    /// `EMFILE`; `EAGAIN` in a handler that interrupted a call.
    pub fn dup_from_pool(&self, fd: RawFd, cloexec: bool) -> Result<Option<RawFd>, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        if state.has_kernel_socket(file) {
            return Ok(None);
        }
        let copy = state.proxy_fds.alloc(cloexec)?;
        if !self.fds.set(copy, file) {
            descriptor::close(copy);
            return Err(Errno::MFILE);
        }
        Self::add_fd(&mut state, copy, file);
        Ok(Some(copy))
    }

    /// Adds a descriptor to an open file description.
    fn add_fd(state: &mut ProcessState, copy: RawFd, file: FileId) {
        let description = state.files.get(file);
        description.refcount += 1;
        description.fd_count += 1;
        state.query_local_end(file);
        state.report_fd(copy, file);
    }

    /// Implements `close`. May wait if `SO_LINGER` is set.
    ///
    /// # Errors
    /// `EBADF`; `EINTR` in a handler that interrupted a call, if too many closes are deferred.
    pub fn close(&self, fd: RawFd) -> Result<(), Errno> {
        if let Some(result) = self.defer_close(fd) {
            return result;
        }
        let mut state = self.lock()?;
        let file = self.fds.take(fd).ok_or(Errno::BADF)?;
        if state.has_kernel_socket(file) {
            // The descriptor refers to a kernel object, which must be closed with its last descriptor.
            descriptor::close(fd);
        } else {
            state.proxy_fds.release(fd, self.config.proxy_pool_max);
        }
        self.drop_fd(state, fd, file);
        Ok(())
    }

    /// Removes a descriptor that the kernel has already closed or replaced (`dup2`).
    pub fn forget_fd(&self, fd: RawFd) {
        // If a handler replaces a descriptor in the middle of a call, the socket stays open.
        let Ok(mut state) = self.lock() else { return };
        match self.fds.take(fd) {
            Some(file) => self.drop_fd(state, fd, file),
            None if descriptor::is_pooled(fd) => state.proxy_fds.forget_pooled(fd),
            None => {}
        }
    }

    /// Implements `close_range`: the kernel closes the proxy descriptors together with all others, so they
    /// are only removed here. Pooled descriptors are closed now.
    pub fn forget_range(&self, first: RawFd, last: RawFd) {
        if let Ok(mut state) = self.lock() {
            state.proxy_fds.close_pooled(first, last);
        }
        descriptor::note_freed(first);
        for fd in self.fds.range(first, last) {
            self.forget_fd(fd);
        }
    }

    /// Removes a descriptor from its open file description, and closes the socket with the last one.
    fn drop_fd<'a>(&'a self, mut state: LockGuard<'a>, fd: RawFd, file: FileId) {
        state.unreport_fd(fd);
        let description = state.files.get(file);
        description.fd_count -= 1;
        if description.fd_count > 0 {
            description.refcount -= 1;
            // From now on the kernel socket is reached by a duplicate.
            let copy = || self.fds.range(0, RawFd::MAX).find(|copy| self.fds.get(*copy) == Some(file));
            state.move_kernel_socket(file, fd, copy);
            return;
        }
        // Another process may have set the option.
        state.sync_shared(file);
        if let Some(linger_time) = state.linger_time(file) {
            state = self.linger(state, file, linger_time);
        }
        let description = state.files.get(file);
        description.refcount -= 1;
        if description.refcount == 0 {
            state.free_file(file);
        }
    }

    /// Waits until written data is acknowledged, as `SO_LINGER` demands (`tcp_close`,
    /// `sk_stream_wait_close`).
    fn linger<'a>(&'a self, mut state: LockGuard<'a>, file: FileId, linger_time: Duration) -> LockGuard<'a> {
        let Some((conn, status)) = state.status(file) else { return state };
        // Only the last close of all processes ends the connection (`__fput`).
        let may_be_shared = state.files.get(file).shared_version.is_some();
        if status.readable > 0
            || may_be_shared && state.client.is_shared(conn) != Ok(false)
            || state.client.shutdown_write(conn).is_err()
        {
            return state;
        }
        let wait = Wait::of(Timeout::after(Some(linger_time)));
        let end = Instant::now() + linger_time;
        loop {
            let Ok(info) = state.client.info(conn) else { return state };
            // Only in these states is an acknowledgement by the peer outstanding. In the first two, the FIN
            // still waits for data before it to leave the channel.
            let is_outstanding = matches!(
                info.state,
                State::Established | State::CloseWait | State::FinWait1 | State::Closing | State::LastAck
            );
            if !is_outstanding || Instant::now() >= end {
                return state;
            }
            let poll_wait = Wait { timeout: Timeout::after(Some(LINGER_POLL_INTERVAL)), ..wait };
            let result: Result<(), Errno>;
            (state, result) = self.block_until(state, &[file], &mut [], &poll_wait, |_, _| Err(Errno::AGAIN));
            if result == Err(Errno::INTR) {
                return state;
            }
        }
    }

    /// Returns whether a socket has `O_NONBLOCK` (`fcntl(F_GETFL)`). Returns `None` for an epoll set, whose
    /// flags the kernel has.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn is_nonblocking(&self, fd: RawFd) -> Result<Option<bool>, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        Ok(state.files.socket(file).ok().map(|socket| socket.nonblocking))
    }

    /// Implements `fcntl(F_SETFL)` and `ioctl(FIONBIO)`. Returns `None`, and sets nothing, for an epoll set,
    /// whose flags the kernel has.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn set_nonblocking(&self, fd: RawFd, nonblocking: bool) -> Result<Option<()>, Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let Ok(socket) = state.files.socket(file) else { return Ok(None) };
        socket.nonblocking = nonblocking;
        state.publish_shared(file);
        Ok(Some(()))
    }
}

/// Interval at which a lingering close asks the stack for the state of the connection.
const LINGER_POLL_INTERVAL: Duration = Duration::from_millis(1);

impl ProcessState {
    /// Returns how long a close lingers; `None` if it does not.
    fn linger_time(&mut self, file: FileId) -> Option<Duration> {
        let socket = self.files.socket(file).ok()?;
        let stream = matches!(socket.role, SocketRole::Stream(_));
        socket.options.linger_time().filter(|linger_time| stream && !linger_time.is_zero())
    }
}
