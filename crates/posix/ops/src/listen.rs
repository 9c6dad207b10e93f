//! `listen` and `accept4`.

use crate::Ops;
use crate::cleanup::CleanupHandler;
use crate::connect::errno_of;
use crate::descriptor;
use crate::fd_table::FileId;
use crate::file::{BoundAddress, FileKind, Listener, ShutdownState, Socket, SocketRole, Stream, UrgentState};
use crate::kernel_socket;
use crate::lock::LockGuard;
use crate::process::ProcessState;
use crate::sleep::{Timeout, Wait};
use crate::sockaddr::{self, Family, SockaddrBytes};
use crate::syscall;
use core::cell::Cell;
use core::ffi::c_int;
use core::net::SocketAddr;
use core::pin::pin;
use ginnel::ListenOptions;
use ginnel::channel::DescriptionKey;
use libc::{POLLIN, pollfd};
use rustix::fd::RawFd;
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

/// Maximum length of the accept queue (`net.core.somaxconn`).
const SOMAXCONN: u32 = 4096;

impl Ops {
    /// Implements `listen`. The stack chooses a port for a socket that is not bound.
    ///
    /// # Errors
    /// `EADDRINUSE`, `EINVAL` if the socket is connected, `EOPNOTSUPP` for a UDP socket, `ENFILE`.
    pub fn listen(&self, fd: RawFd, backlog: c_int) -> Result<(), Errno> {
        let mut state = self.lock()?;
        state.check_stack_alive();
        let file = self.file_of(&mut state, fd)?;
        // As in Linux, which compares it as unsigned, a negative backlog is the maximum.
        let backlog = u32::try_from(backlog).unwrap_or(SOMAXCONN).min(SOMAXCONN);
        loop {
            let restarts = state.restarts;
            let result = self.try_listen(&mut state, (fd, file), backlog);
            if !state.is_request_lost(restarts, &result) {
                return result;
            }
        }
    }

    fn try_listen(
        &self,
        state: &mut LockGuard<'_>,
        (fd, file): (RawFd, FileId),
        backlog: u32,
    ) -> Result<(), Errno> {
        let socket = state.files.socket(file)?;
        let sharing = socket.options.sharing(socket.family);
        // An address without a port survives a disconnect (`SOCK_BINDADDR_LOCK`).
        let any = socket
            .last_address
            .map_or(socket.family.unspecified(), |last_address| SocketAddr::new(last_address.ip(), 0));
        match &mut socket.role {
            SocketRole::Listening(listening) => {
                // A second `listen` only changes the backlog.
                listening.backlog = backlog;
                let number = listening.number;
                if let Some(fd) = listening.kernel_fd {
                    syscall::listen(fd, backlog)?;
                }
                return state.client.set_backlog(number, backlog).map_err(|e| errno_of(&e));
            }
            SocketRole::Udp(_) => return Err(Errno::OPNOTSUPP),
            SocketRole::Unconnected { .. } if socket.is_udp => return Err(Errno::OPNOTSUPP),
            SocketRole::Stream(_) => return Err(Errno::INVAL),
            SocketRole::Unconnected { bound: None } => state.reserve(file, any, sharing, None)?,
            SocketRole::Unconnected { .. } => {}
        }
        let socket = state.files.socket(file)?;
        let SocketRole::Unconnected { bound: Some(bound) } = socket.role else { return Err(Errno::INVAL) };
        let v4 = socket.child_is_v4();
        let options = ListenOptions {
            backlog,
            v6_only: socket.options.is_v6_only(),
            reuse_port: sharing.reuse_port,
            awaits_filter: false,
            user: sharing.uid,
            socket: socket.options.initial_options(v4),
        };
        let filter = socket.options.filter_code();
        let program = socket.options.group_program();
        let number = state.client.listen(&bound, options, filter.as_deref()).map_err(|e| errno_of(&e))?;
        if let Some(program) = program {
            let begun = state.begin_group(DescriptionKey::Listener(number), &program, !bound.is_shared);
            if let Err(error) = begun {
                // The address stays bound.
                let _ = state.client.unlisten(number, None);
                return Err(error);
            }
        }
        state.bind_listener(number, file);
        let socket = state.files.socket(file)?;
        socket.options.mark_initial_applied(v4);
        let kernel = bound.kernel_fd;
        socket.role =
            SocketRole::Listening(Listener { number, bound, accepting: false, backlog, kernel_fd: kernel });
        if bound.is_shared {
            // What another process that listens has published applies.
            state.files.get(file).shared_version = Some(0);
            state.share_again(file);
        }
        state.report_fd(fd, file);
        // Epoll sets and threads may have waited for the socket before it listened.
        if !state.files.get(file).wait_queue.is_empty() {
            state.begin_accepting(file);
        }
        if let Some(fd) = kernel {
            syscall::listen(fd, backlog)?;
            state.add_kernel_half_to_sets(file);
        }
        Ok(())
    }

    /// Implements `accept4`. Returns the peer's address as `getpeername` does.
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`, `EINVAL` if the socket does not listen or a flag is unknown, `EOPNOTSUPP` for a UDP
    /// socket, `EMFILE`; `ENETDOWN` if the stack is gone.
    pub fn accept4(&self, fd: RawFd, flags: c_int) -> Result<(RawFd, SockaddrBytes), Errno> {
        if flags & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) != 0 {
            return Err(Errno::INVAL);
        }
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file)?;
        let timeout = if socket.nonblocking { Timeout::Zero } else { socket.options.recv_timeout() };
        let reported_round = socket.netdown_round;
        if socket.is_udp {
            return Err(Errno::OPNOTSUPP);
        }
        if !matches!(socket.role, SocketRole::Listening(_)) {
            return Err(Errno::INVAL);
        }
        state.begin_accepting(file);
        state.client.flush();
        state.deliver_locally();
        // The descriptor is taken first, because an accepted connection cannot be returned. A non-blocking
        // call takes it from the pool after it has accepted.
        let cloexec = flags & libc::SOCK_CLOEXEC != 0;
        let from_pool = timeout == Timeout::Zero && state.proxy_fds.has_pooled();
        let mut new = if from_pool { None } else { Some(state.proxy_fds.alloc(cloexec)?) };
        let mut kernel_accepted = None;
        let done = Cell::new(0);
        let wait = Wait { exclusive: true, ..Wait::restarting(timeout, &done) };
        let family = state.files.socket(file)?.family;
        let kernel_fd = state.kernel_fd(file);
        let mut kernel_fds = [pollfd { fd: kernel_fd.unwrap_or(-1), events: POLLIN, revents: 0 }];
        let kernel_fds = &mut kernel_fds[..usize::from(kernel_fd.is_some())];
        let unused_fd = new;
        let cleanup_handler = pin!(CleanupHandler::new(|| self.cancel_accept(unused_fd)));
        // Only a call that has taken a descriptor has something to clean up.
        let cleanup_handler = unused_fd.is_some().then(|| cleanup_handler.push());
        let (mut state, result) = self.block_until(state, &[file], kernel_fds, &wait, |state, _| {
            match (state.accept_step(file, flags, reported_round), kernel_fd) {
                (Err(Errno::AGAIN), Some(kernel_fd)) => {
                    kernel_socket::accept(kernel_fd, flags, family).map(Accepted::Kernel)
                }
                (result, _) => result.map(Accepted::Stack),
            }
        });
        drop(cleanup_handler);
        let result = result.and_then(|accepted| match accepted {
            Accepted::Stack(socket) => Ok(socket),
            Accepted::Kernel(from) => {
                kernel_accepted = Some(from);
                Err(Errno::AGAIN)
            }
        });
        let accepted = result.and_then(|socket| {
            let (family, conn) = (socket.family, socket.conn());
            let peer = conn.and_then(|conn| state.client.peer(conn).ok());
            let fd = match new.take() {
                Some(fd) => fd,
                None => state.proxy_fds.alloc(cloexec)?,
            };
            self.install(&mut state, fd, FileKind::Socket(socket)).map(|fd| (fd, family, conn, peer))
        });
        match accepted {
            Ok((new, family, conn, peer)) => {
                let file = self.file_of(&mut state, new)?;
                if let Some(conn) = conn {
                    state.bind_conn(conn, file);
                    if state.has_own_connections()
                        && let Ok(ends) = state.client.endpoints(conn)
                    {
                        state.note_accepted(ends);
                    }
                }
                state.apply_options(file)?;
                Ok((new, sockaddr::encode(peer.unwrap_or(family.unspecified()), family)))
            }
            Err(error) => {
                if let Some(new) = new {
                    state.proxy_fds.release(new, self.config.proxy_pool_max);
                }
                state.notice_stack_end();
                kernel_accepted.ok_or(error)
            }
        }
    }
}

impl Ops {
    /// Cleans up after a handler that left a blocked `accept` by a jump.
    #[cold]
    fn cancel_accept(&self, unused_fd: Option<RawFd>) {
        if let (Some(unused_fd), Ok(mut state)) = (unused_fd, self.lock()) {
            state.proxy_fds.release(unused_fd, self.config.proxy_pool_max);
        }
    }
}

/// The origin of an accepted connection.
enum Accepted {
    Stack(Box<Socket>),
    /// The kernel's listener has accepted it; its descriptor does not belong to the stack.
    Kernel((RawFd, SockaddrBytes)),
}

impl Socket {
    /// Returns whether connections of a listener will use IPv4, or `None` if they may use either version.
    pub fn child_is_v4(&self) -> Option<bool> {
        match self.family {
            Family::V4 => Some(true),
            Family::V6 if self.options.is_v6_only() => Some(false),
            Family::V6 => None,
        }
    }

    fn conn(&self) -> Option<ginnel::Conn> {
        match self.role {
            SocketRole::Stream(stream) => Some(stream.conn),
            _ => None,
        }
    }
}

impl ProcessState {
    /// Grants accept credit to a listener, so that this process takes its share of the connections from now
    /// on.
    #[inline]
    pub fn begin_accepting(&mut self, file: FileId) {
        if let Ok(Socket { role: SocketRole::Listening(listening), .. }) = self.files.socket(file)
            && !core::mem::replace(&mut listening.accepting, true)
        {
            let (number, backlog) = (listening.number, listening.backlog);
            self.grant_credits(number, backlog);
        }
    }

    #[cold]
    fn grant_credits(&mut self, number: u32, backlog: u32) {
        // Like Linux, admits one connection more than the backlog.
        self.client.set_credits(number, backlog.saturating_add(1));
        // Connections that were waiting are offered when this returns; there are none if the stack is gone.
        // The backlog is not sent, because another process that shares the listener may have changed it.
        let _ = self.client.request_offers(number);
    }

    /// Accepts a connection that is offered.
    fn accept_step(&mut self, file: FileId, flags: c_int, reported_round: u32) -> Result<Box<Socket>, Errno> {
        let SocketRole::Listening(listening) = self.files.socket(file)?.role else {
            return Err(Errno::INVAL);
        };
        let mut accepted_conn = self.client.accept(listening.number);
        if accepted_conn.is_none() {
            self.process_events();
            // The events may say that an administrator has closed the listener.
            if !matches!(self.files.socket(file)?.role, SocketRole::Listening(_)) {
                return Err(Errno::INVAL);
            }
            accepted_conn = self.client.accept(listening.number);
        }
        let conn = accepted_conn.ok_or_else(|| self.wait_error(file, listening.kernel_fd, reported_round))?;
        let listener = self.files.socket(file)?;
        let socket = Socket {
            family: listener.family,
            is_udp: false,
            udp_send: None,
            flow_labels: None,
            nonblocking: flags & libc::SOCK_NONBLOCK != 0,
            options: listener.options.for_accepted_socket(),
            shutdown: ShutdownState::default(),
            role: SocketRole::Stream(Stream::new(conn, false, None)),
            last_address: None,
            urgent: UrgentState::default(),
            netdown_round: 0,
            cookie: 0,
        };
        Ok(self.files.box_socket(socket))
    }

    /// Makes sockets unconnected whose listeners an administrator has closed (`tcp_abort` of a listener).
    #[cold]
    pub fn end_destroyed_listeners(&mut self) {
        for file in self.files.ids() {
            let Ok(Socket { role: SocketRole::Listening(listening), .. }) = self.files.socket(file) else {
                continue;
            };
            let (number, kernel_fd) = (listening.number, listening.kernel_fd);
            if !self.client.is_listener_destroyed(number) {
                continue;
            }
            self.stop_listening(file);
            if let Some(Ok(kernel_socket)) = kernel_fd.map(descriptor::borrow) {
                // The program has one listener, so its kernel socket ends with it.
                let _ = shutdown(kernel_socket, Shutdown::Both);
            }
            if let Ok(socket) = self.files.socket(file) {
                socket.shutdown = ShutdownState {
                    read: true,
                    write: true,
                    is_lost: false,
                    error: Some(Errno::CONNABORTED),
                };
            }
            self.wake(file, 0);
        }
    }

    /// Closes the listener of a socket, which keeps the address that the program has bound.
    pub fn stop_listening(&mut self, file: FileId) {
        let Ok(Socket { role: SocketRole::Listening(listening), .. }) = self.files.socket(file) else {
            return;
        };
        let listening = *listening;
        self.unbind_listener(listening.number);
        let kept_address = Some(listening.bound).filter(BoundAddress::survives_disconnect);
        let released = if kept_address.is_none() { listening.bound.own_reservation() } else { None };
        // If the stack is gone, so is the listener.
        let _ = self.client.unlisten(listening.number, released);
        if let Ok(socket) = self.files.socket(file) {
            socket.role = SocketRole::Unconnected { bound: kept_address };
            // The socket has left its group (`reuseport_stop_listen_sock`).
            socket.options.replace_group_program(None);
            socket.last_address = Some(listening.bound.address());
        }
    }
}
