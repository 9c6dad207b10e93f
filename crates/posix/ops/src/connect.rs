//! `bind`, `connect` and `shutdown`, as `inet_bind` and `inet_stream_connect` implement them.

use crate::Ops;
use crate::descriptor_report::KernelReason;
use crate::fd_table::FileId;
use crate::file::{BoundAddress, ShutdownState, SocketRole, Stream};
use crate::kernel_socket;
use crate::lock::LockGuard;
use crate::process::ProcessState;
use crate::sleep::{Timeout, Wait};
use crate::sockaddr::{self, Family};
use crate::syscall;
use core::cell::Cell;
use core::ffi::c_int;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use ginnel::channel::AddressSharing;
use ginnel::channel::control::ReserveError;
use ginnel::{Conn, ConnectError, ConnectOptions, Error, ListenError, SocketOptions};
use rustix::fd::RawFd;
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities};

/// How many ports a `bind` to port 0 tries that must be free on the stack and on the kernel.
pub(crate) const PORT_ATTEMPTS_MAX: u32 = 32;

impl Ops {
    /// Implements `bind`. The stack reserves the address, and chooses a port for port 0.
    ///
    /// # Errors
    /// `EINVAL` if the socket is bound or the address too short, `EAFNOSUPPORT`, `EADDRINUSE`,
    /// `EADDRNOTAVAIL`, `EACCES`.
    pub fn bind(&self, fd: RawFd, bytes: &[u8]) -> Result<(), Errno> {
        self.bind_to(fd, bytes)?;
        let is_v6_address = sockaddr::decode(bytes, Family::V6)
            .is_ok_and(|address| address.is_ipv6() && !address.ip().is_unspecified());
        if is_v6_address {
            let mut state = self.lock()?;
            // The socket may be one of the kernel now.
            if let Ok(file) = self.file_of(&mut state, fd)
                && let Ok(socket) = state.files.socket(file)
                && socket.family == Family::V6
            {
                // `__inet6_bind`
                socket.options.set_v6_only();
            }
        }
        Ok(())
    }

    fn bind_to(&self, fd: RawFd, bytes: &[u8]) -> Result<(), Errno> {
        let mut state = self.lock()?;
        // A process that never sleeps in a call would not notice that the shards were started again.
        state.check_stack_alive();
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file)?;
        let family = socket.family;
        let unspecified = family == Family::V4
            && sockaddr::family_of(bytes).is_ok_and(|f| f == libc::AF_UNSPEC as u16)
            && bytes.get(4..8) == Some(&[0; 4]);
        let address = if unspecified && bytes.len() >= 16 {
            // Old programs leave the family 0 with the unspecified address (`__inet_bind`).
            SocketAddr::new(family.unspecified().ip(), u16::from_be_bytes([bytes[2], bytes[3]]))
        } else {
            sockaddr::decode(bytes, family)?
        };
        let (sharing, is_udp) = (socket.options.sharing(family), socket.is_udp);
        let is_rebound = !matches!(socket.role, SocketRole::Unconnected { bound: None });
        if is_rebound && !state.may_bind_again(file) {
            return Err(Errno::INVAL);
        }
        let is_v6_only = state.files.socket(file)?.options.is_v6_only();
        if address.is_ipv4() && family == Family::V6 && is_v6_only {
            return Err(Errno::INVAL);
        }
        if is_privileged(address.port(), self.config.unprivileged_port_start) {
            return Err(Errno::ACCESS);
        }
        if is_udp {
            return self.bind_udp(state, fd, file, address, bytes);
        }
        if is_rebound {
            state.release_automatic_port(file);
        }
        let socket = state.files.socket(file)?;
        let lacks_port = address.port() == 0 && socket.options.binds_without_port();
        if lacks_port && address.ip().is_unspecified() {
            state.keep_bound_without_port(file, address);
            return Ok(());
        }
        if !address.ip().is_unspecified() {
            let is_stack_address = (self.config.is_stack_address)(address.ip());
            let not_available = Err(Errno::ADDRNOTAVAIL);
            let reserved = if is_stack_address && lacks_port {
                state.bind_without_port(file, address, sharing)
            } else if is_stack_address {
                state.reserve(file, address, sharing, None)
            } else {
                not_available
            };
            state.report_fd(fd, file);
            // What a socket has received from the stack would be lost on the kernel's network.
            if reserved != not_available || !self.config.kernel_listen || is_rebound {
                return reserved;
            }
            // The address does not belong to the stack, so it may be one of the kernel's.
            self.convert_to_kernel(&mut state, fd, file)?;
            state.report_kernel_socket(fd, KernelReason::NotLocal);
            drop(state);
            return syscall::bind(fd, bytes);
        }
        if !self.config.kernel_listen {
            return state.reserve_and_report(fd, file, address, sharing, None);
        }
        // The kernel decides whether the port is free and permitted.
        self.open_kernel_socket(&mut state, fd, file)?;
        kernel_socket::set_nonblocking(fd)?;
        if is_rebound {
            kernel_socket::repeat_sharing(fd, sharing);
        }
        if let Err(error) = syscall::bind(fd, bytes) {
            let _ = state.proxy_fds.install_over(fd);
            // The stack permits the port to everybody.
            return match error {
                Errno::ACCESS => state.reserve_and_report(fd, file, address, sharing, None),
                error => Err(error),
            };
        }
        let kernel_address = kernel_socket::local_address(fd, family)?;
        let chosen = SocketAddr::new(address.ip(), kernel_address.port());
        let reserved = match state.reserve(file, chosen, sharing, Some(fd)) {
            // The kernel does not know which ports the stack's connections use.
            Err(Errno::ADDRINUSE) if address.port() == 0 => {
                self.bind_to_port_of_stack(&mut state, (fd, file), address, sharing)
            }
            reserved => reserved,
        };
        state.report_fd(fd, file);
        // The kernel's half must not keep the port.
        if reserved.is_err() {
            let _ = state.proxy_fds.install_over(fd);
        }
        reserved
    }

    /// Binds a socket without a port, and its kernel socket, to a port that is free on the stack.
    ///
    /// # Errors
    /// `EADDRINUSE` if no port is free on both.
    fn bind_to_port_of_stack(
        &self,
        state: &mut LockGuard<'_>,
        (fd, file): (RawFd, FileId),
        address: SocketAddr,
        sharing: AddressSharing,
    ) -> Result<(), Errno> {
        let family = state.files.socket(file)?.family;
        for _ in 0..PORT_ATTEMPTS_MAX {
            state.reserve(file, address, sharing, Some(fd))?;
            let bound = state.files.socket(file)?.bound().ok_or(Errno::INVAL)?;
            let with_port = sockaddr::encode(SocketAddr::new(address.ip(), bound.address().port()), family);
            // The kernel socket has another port, or was refused one.
            let result = self
                .open_kernel_socket(state, fd, file)
                .map(|()| kernel_socket::repeat_sharing(fd, sharing))
                .and_then(|()| kernel_socket::set_nonblocking(fd))
                .and_then(|()| syscall::bind(fd, with_port.bytes()));
            if result.is_ok() {
                return Ok(());
            }
            state.unreserve(Some(bound));
            match &mut state.files.socket(file)?.role {
                SocketRole::Stream(stream) => (stream.bound, stream.is_rebound) = (None, false),
                role => *role = SocketRole::Unconnected { bound: None },
            }
            if result != Err(Errno::ADDRINUSE) {
                return result;
            }
        }
        Err(Errno::ADDRINUSE)
    }

    /// Implements `connect`. Waits until the connection is established, unless the socket is non-blocking.
    ///
    /// # Errors
    /// `EINPROGRESS`, `EALREADY`, `EISCONN`, `ECONNREFUSED`, `ETIMEDOUT`, `ENETUNREACH`, `EADDRNOTAVAIL`,
    /// `EAFNOSUPPORT`, `EINTR` …
    pub fn connect(&self, fd: RawFd, address: &[u8]) -> Result<(), Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file)?;
        if socket.is_udp {
            return self.connect_udp(state, fd, file, address);
        }
        let (family, nonblocking) = (socket.family, socket.nonblocking);
        let timeout = if nonblocking { Timeout::Zero } else { socket.options.send_timeout() };
        if sockaddr::family_of(address)? == libc::AF_UNSPEC as u16 {
            return state.disconnect(file);
        }
        let first = match socket.role {
            SocketRole::Unconnected { bound } => {
                let to = sockaddr::decode(address, family)?;
                state.take_peer_flow_info(file, address)?;
                match self.begin_connect(&mut state, (fd, file), bound, to, false)? {
                    ConnectBegun::Sent => true,
                    ConnectBegun::Deferred => return Ok(()),
                    ConnectBegun::Kernel => {
                        drop(state);
                        return syscall::connect(fd, address);
                    }
                }
            }
            SocketRole::Listening(_) | SocketRole::Udp(_) => return Err(Errno::ISCONN),
            SocketRole::Stream(stream) if stream.disconnecting => return Err(Errno::INVAL),
            SocketRole::Stream(stream) if stream.connecting => false,
            SocketRole::Stream(_) => return Err(Errno::ISCONN),
        };
        state.client.flush();
        if first && timeout == Timeout::Zero {
            // Even if the connection is already established, which is not checked.
            return Err(Errno::INPROGRESS);
        }
        let (mut state, result) = self.wait_for_connect(state, file, timeout);
        match result {
            Err(Errno::AGAIN) if first => Err(Errno::INPROGRESS),
            Err(Errno::AGAIN) if state.syn_data_max(file).is_some() => Err(Errno::ISCONN),
            Err(Errno::AGAIN) => Err(Errno::ALREADY),
            result => result,
        }
    }

    /// Begins to connect a socket that was not connected. With `is_fast` its SYN may carry data.
    pub(crate) fn begin_connect(
        &self,
        state: &mut LockGuard<'_>,
        (fd, file): (RawFd, FileId),
        bound: Option<BoundAddress>,
        to: SocketAddr,
        is_fast: bool,
    ) -> Result<ConnectBegun, Errno> {
        let local = bound.map(|bound| bound.address()).or(state.files.socket(file)?.last_address);
        check_families(local, to)?;
        if to.ip().is_multicast() || to.ip() == Ipv4Addr::BROADCAST {
            // `tcp_v4_connect`, `tcp_v6_connect`.
            return Err(Errno::NETUNREACH);
        }
        let is_stack_address = (self.config.is_stack_address)(to.ip());
        let result = if is_stack_address {
            let or_kernels = self.config.kernel_listen;
            let begun =
                state.request_over_restarts(|state| state.start_connect(file, to, or_kernels, is_fast));
            match begun {
                // No host has port 0. The socket has got a port before its SYN is refused.
                Err(Errno::CONNREFUSED) => state.choose_port_in_vain(file).and(Err(Errno::CONNREFUSED)),
                result => result,
            }
        } else {
            Err(Errno::NETUNREACH)
        };
        if result == Err(Errno::NETUNREACH) && self.config.kernel_listen {
            self.convert_to_kernel(state, fd, file)?;
            return Ok(ConnectBegun::Kernel);
        }
        let begun = result?;
        state.report_fd(fd, file);
        if let Some(stream) = state.files.stream(file) {
            stream.incomplete_report_fd = Some(fd);
        }
        Ok(begun)
    }

    /// Waits until a connection is established. Returns `EAGAIN` after the time-out. After another error the
    /// socket is unconnected.
    pub(crate) fn wait_for_connect<'a>(
        &'a self,
        state: LockGuard<'a>,
        file: FileId,
        timeout: Timeout,
    ) -> (LockGuard<'a>, Result<(), Errno>) {
        let done = Cell::new(0);
        let wait = Wait::restarting(timeout, &done);
        let (mut state, result) =
            self.block_until(state, &[file], &mut [], &wait, |state, _| state.connect_step(file));
        if !matches!(result, Ok(()) | Err(Errno::AGAIN | Errno::INTR)) {
            // The socket may try again, as after `tcp_disconnect`.
            state.publish_disconnected(file);
            state.drop_connection(file);
        }
        (state, result)
    }

    /// Implements `shutdown`.
    ///
    /// # Errors
    /// `EINVAL` if `how` is unknown, `ENOTCONN`.
    pub fn shutdown(&self, fd: RawFd, how: c_int) -> Result<(), Errno> {
        let mut state = self.lock()?;
        let file = self.file_of(&mut state, fd)?;
        let socket = state.files.socket(file)?;
        let (read, write) = match how {
            libc::SHUT_RD => (true, false),
            libc::SHUT_WR => (false, true),
            libc::SHUT_RDWR => (true, true),
            _ => return Err(Errno::INVAL),
        };
        if socket.is_udp {
            return state.shutdown_udp(file, read, write);
        }
        let result = match socket.role {
            SocketRole::Listening(_) if !read => Ok(()),
            SocketRole::Listening(_) => {
                state.stop_listening(file);
                Ok(())
            }
            SocketRole::Unconnected { .. } | SocketRole::Udp(_) => {
                socket.record_shutdown(read, write);
                Err(Errno::NOTCONN)
            }
            SocketRole::Stream(_) => state.shutdown(file, read, write),
        };
        state.publish_shared(file);
        // `inet_shutdown` wakes all waiters, whatever the result.
        state.wake(file, 0);
        result
    }
}

/// How a connection begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectBegun {
    /// The SYN was sent.
    Sent,
    /// The SYN waits for the first bytes (TCP Fast Open).
    Deferred,
    /// The socket has become a kernel socket, because the stack has no route.
    Kernel,
}

impl ProcessState {
    /// Reserves an address and updates the report entry of the descriptor.
    fn reserve_and_report(
        &mut self,
        fd: RawFd,
        file: FileId,
        address: SocketAddr,
        sharing: AddressSharing,
        kernel: Option<RawFd>,
    ) -> Result<(), Errno> {
        let reserved = self.reserve(file, address, sharing, kernel);
        self.report_fd(fd, file);
        reserved
    }

    /// Binds a socket to an address of the stack without a port, which `connect` or `listen` chooses.
    fn bind_without_port(
        &mut self,
        file: FileId,
        address: SocketAddr,
        sharing: AddressSharing,
    ) -> Result<(), Errno> {
        // Checks whether the address belongs to the stack.
        let reserved = self.request_over_restarts(|state| {
            state.client.reserve(address, sharing).map_err(|e| errno_of(&e))
        })?;
        let _ = self.client.unreserve(reserved);
        self.keep_bound_without_port(file, address);
        Ok(())
    }

    /// Records an address without a port as the one that the program has bound.
    fn keep_bound_without_port(&mut self, file: FileId, address: SocketAddr) {
        let Ok(socket) = self.files.socket(file) else { return };
        socket.last_address = Some(address);
        if let SocketRole::Stream(stream) = &mut socket.role {
            stream.is_rebound = true;
        }
    }

    /// Returns whether a socket that is not new may be bound: its connection has ended, and it has no port
    /// (`__inet_bind`).
    fn may_bind_again(&mut self, file: FileId) -> bool {
        let Some(stream) = self.files.stream(file).copied() else { return false };
        let has_port = stream.bound.is_some_and(|bound| bound.port_locked || stream.is_rebound);
        !has_port && self.has_connection_ended(file)
    }

    /// Returns whether the connection of a socket has ended. A peer on the loopback of Linux has answered by
    /// the time that `shutdown` returns, so a peer on this stack gets the time to answer.
    fn has_connection_ended(&mut self, file: FileId) -> bool {
        let Some((conn, conn_state)) = self.socket_state(file) else { return false };
        if conn_state.is_closed() {
            return true;
        }
        let is_shut = self.files.socket(file).is_ok_and(|socket| socket.shutdown.write);
        let ends = self.client.endpoints(conn);
        let is_within_stack =
            ends.is_ok_and(|[local, peer]| local.ip() == peer.ip() || peer.ip().is_loopback());
        if !is_shut || !is_within_stack {
            return false;
        }
        self.client.settle();
        self.process_events();
        self.socket_state(file).is_some_and(|(_, state)| state.is_closed())
    }

    /// Releases the port that the stack has chosen for a connection that has ended (`inet_put_port`).
    fn release_automatic_port(&mut self, file: FileId) {
        let Some(stream) = self.files.stream(file) else { return };
        let bound = stream.bound.take();
        self.unreserve(bound);
        if let Ok(socket) = self.files.socket(file) {
            // That of the listener, if the connection was accepted.
            socket.options.replace_group_program(None);
        }
        if let Some(kernel_fd) = bound.and_then(|bound| bound.kernel_fd) {
            // The kernel's half must not keep the port. A failure leaves the half as it is.
            let _ = self.proxy_fds.install_over(kernel_fd);
        }
    }

    /// Reserves an address for a socket that is not bound.
    pub fn reserve(
        &mut self,
        file: FileId,
        address: SocketAddr,
        sharing: AddressSharing,
        kernel: Option<RawFd>,
    ) -> Result<(), Errno> {
        self.request_over_restarts(|state| state.try_reserve(file, address, sharing, kernel))
    }

    fn try_reserve(
        &mut self,
        file: FileId,
        address: SocketAddr,
        sharing: AddressSharing,
        kernel: Option<RawFd>,
    ) -> Result<(), Errno> {
        let port_locked = address.port() != 0;
        let ports = if port_locked { None } else { self.local_ports(file)? };
        if port_locked && self.files.socket(file)?.options.group_program().is_some() {
            // A socket with a group of its own does not join another one (`sk_reuseport_match`).
            let unshared = AddressSharing { reuse_port: false, ..sharing };
            let probe = self.client.reserve(address, unshared).map_err(|e| errno_of(&e))?;
            let _ = self.client.unreserve(probe);
        }
        let reserved = match ports {
            None => self.client.reserve(address, sharing).map_err(|e| errno_of(&e)),
            Some(ports) => first_free(ports, |port| {
                let address = SocketAddr::new(address.ip(), port);
                self.client.reserve(address, sharing).map_err(|e| errno_of(&e))
            }),
        }?;
        let description = random_number();
        let is_shared = false;
        let now = Some(BoundAddress { reserved, port_locked, kernel_fd: kernel, description, is_shared });
        match &mut self.files.socket(file)?.role {
            SocketRole::Unconnected { bound } => *bound = now,
            SocketRole::Stream(stream) => (stream.bound, stream.is_rebound) = (now, true),
            SocketRole::Listening(_) | SocketRole::Udp(_) => {}
        }
        Ok(())
    }

    /// Starts to connect. `or_kernels` tells that a socket becomes a kernel socket if the stack has no route
    /// to the destination, so the route must be checked first.
    fn start_connect(
        &mut self,
        file: FileId,
        to: SocketAddr,
        or_kernels: bool,
        is_fast: bool,
    ) -> Result<ConnectBegun, Errno> {
        let socket = self.files.socket(file)?;
        let SocketRole::Unconnected { bound } = socket.role else { return Err(Errno::ISCONN) };
        let to = loopback_for_any(to, bound.map(|b| b.address()));
        if to.is_ipv4() && socket.family == Family::V6 && socket.options.is_v6_only() {
            return Err(Errno::NETUNREACH);
        }
        // An address without a port survives a disconnect, and may be all that `bind` was asked for
        // (`IP_BIND_ADDRESS_NO_PORT`).
        let local_ip =
            socket.last_address.filter(|last_address| bound.is_none() && !last_address.ip().is_unspecified());
        let is_restricted = bound.is_none() && socket.options.has_port_range();
        let local = bound.map(|bound| match (bound.address().ip(), to.ip()) {
            // An IPv6 socket that is bound to the unspecified address may open IPv4 connections.
            (IpAddr::V6(any), IpAddr::V4(_)) if any.is_unspecified() => {
                SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), bound.address().port())
            }
            _ => bound.address(),
        });
        let local = local.or(local_ip.map(|last_address| SocketAddr::new(last_address.ip(), 0)));
        let v4 = Some(to.is_ipv4());
        let filter = socket.options.filter_code();
        let mut options =
            ConnectOptions { local, socket: socket.options.initial_options(v4), ..ConnectOptions::default() };
        options.socket.fastopen_connect |= is_fast;
        let async_options = SocketOptions { nodelay: false, keepalive: false, ..options.socket };
        let ports = if is_restricted { self.local_ports(file)? } else { None };
        let conn = if let Some(ports) = ports {
            let any = if to.is_ipv4() { Family::V4.unspecified() } else { Family::V6.unspecified() };
            let ip = local.unwrap_or(any).ip();
            let conn = first_free(ports, |port| {
                let local = Some(SocketAddr::new(ip, port));
                let options = ConnectOptions { local, is_ephemeral_port: true, ..options };
                self.client.connect(to, options, filter.as_deref()).map_err(|e| match e {
                    Error::Connect(_, ConnectError::AddressInUse) => Errno::ADDRINUSE,
                    error => errno_of(&error),
                })
            });
            // No port of the range is free (`inet_hash_connect`).
            let conn = conn.map_err(|e| if e == Errno::ADDRINUSE { Errno::ADDRNOTAVAIL } else { e })?;
            self.files.socket(file)?.options.mark_initial_applied(v4);
            conn
        } else if local.is_none()
            && async_options == SocketOptions::default()
            && to.port() != 0
            && filter.is_none()
            && (!or_kernels || self.reachable_hosts.contains(&to.ip()))
        {
            // Only options that can be set after the SYN differ from the defaults.
            let conn = self.client.connect_without_request(to).map_err(|e| errno_of(&e))?;
            self.files.socket(file)?.options.mark_none_applied();
            conn
        } else {
            let conn = self.client.connect(to, options, filter.as_deref()).map_err(|e| errno_of(&e))?;
            self.files.socket(file)?.options.mark_initial_applied(v4);
            if or_kernels && !self.reachable_hosts.contains(&to.ip()) {
                self.note_reachable(to.ip());
            }
            conn
        };
        let socket = self.files.socket(file)?;
        if socket.shutdown.is_lost || socket.shutdown.error.is_some() {
            socket.shutdown = ShutdownState::default();
        }
        socket.role = SocketRole::Stream(Stream::new(conn, true, bound));
        self.bind_conn(conn, file);
        self.apply_options(file)?;
        self.note_own_connection(file, to);
        let is_deferred = options.socket.fastopen_connect && self.syn_data_max(file).is_some();
        Ok(if is_deferred { ConnectBegun::Deferred } else { ConnectBegun::Sent })
    }

    /// Chooses a port for a connection that is refused. The socket does not keep the port, but has it as its
    /// name (`inet_sport`).
    ///
    /// # Errors
    /// `EADDRNOTAVAIL` if no port is free.
    fn choose_port_in_vain(&mut self, file: FileId) -> Result<(), Errno> {
        let socket = self.files.socket(file)?;
        if socket.bound().is_none() {
            let ip = socket.last_address.unwrap_or(socket.family.unspecified()).ip();
            let sharing = socket.options.sharing(socket.family);
            let chosen = self.reserve(file, SocketAddr::new(ip, 0), sharing, None);
            chosen.map_err(|e| if e == Errno::ADDRINUSE { Errno::ADDRNOTAVAIL } else { e })?;
        }
        let bound = self.files.socket(file)?.bound();
        let kept = self.keep_address(bound);
        let socket = self.files.socket(file)?;
        socket.role = SocketRole::Unconnected { bound: kept };
        socket.last_address = bound.map(|bound| bound.address());
        Ok(())
    }

    /// Replaces a connection that was opened asynchronously, and for which its shard had no port, by one of
    /// another shard, and returns the new handle. Does nothing if other processes share the connection,
    /// because they know its handle.
    pub fn connect_on_other_shard(&mut self, file: FileId) -> Option<Conn> {
        let old_conn = self.files.stream(file)?.conn;
        let error = self.client.connect_error(old_conn);
        let lacks_port =
            matches!(error, Some(ConnectError::PortsExhausted | ConnectError::AddressNotAvailable));
        if !lacks_port || self.client.all().len() == 1 || self.files.get(file).shared_version.is_some() {
            return None;
        }
        let [_, to] = self.client.endpoints(old_conn).ok()?;
        if error == Some(ConnectError::AddressNotAvailable) {
            self.client.note_unserved(old_conn, to.ip());
        }
        let v4 = Some(to.is_ipv4());
        let options = &mut self.files.socket(file).ok()?.options;
        let socket = options.initial_options(v4);
        let connect = ConnectOptions { socket, ..ConnectOptions::default() };
        let conn = self.client.connect(to, connect, options.filter_code().as_deref()).ok()?;
        options.mark_initial_applied(v4);
        self.files.stream(file)?.conn = conn;
        self.unbind_conn(old_conn);
        self.release_stream(old_conn);
        self.bind_conn(conn, file);
        self.note_own_connection(file, to);
        // The connection was opened a moment ago; if the stack is gone, another call reports that.
        let _ = self.apply_options(file);
        self.client.flush();
        Some(conn)
    }

    /// Returns `EAGAIN` until the handshake is complete.
    fn connect_step(&mut self, file: FileId) -> Result<(), Errno> {
        let Some((_, conn_state)) = self.socket_state(file).filter(|(_, state)| !state.is_closed()) else {
            return Err(self.take_error(file).unwrap_or(Errno::CONNABORTED));
        };
        if !conn_state.is_connected() {
            return Err(Errno::AGAIN);
        }
        if let Some(stream) = self.files.stream(file) {
            stream.connecting = false;
        }
        Ok(())
    }

    /// Implements `connect` with `AF_UNSPEC`: resets the connection and makes the socket unconnected.
    fn disconnect(&mut self, file: FileId) -> Result<(), Errno> {
        match self.files.socket(file)?.role {
            SocketRole::Unconnected { .. } | SocketRole::Udp(_) => {}
            SocketRole::Listening(_) => self.stop_listening(file),
            SocketRole::Stream(stream) => {
                let status = self.client.status(stream.conn);
                // `tcp_disconnect` reports the connection that it ends, unless both ends have finished.
                let is_open = status.is_ok_and(|status| {
                    !(status.state.is_closed() || status.state.has_fin() && status.is_write_closed)
                });
                let _ = self.client.abort(stream.conn);
                self.publish_disconnected(file);
                self.drop_connection(file);
                self.files.socket(file)?.shutdown.error = is_open.then_some(Errno::CONNRESET);
            }
        }
        Ok(())
    }

    /// Returns the address that a socket keeps when it becomes unconnected. A port that the stack has chosen
    /// is released (`inet_put_port`).
    pub fn keep_address(&mut self, bound: Option<BoundAddress>) -> Option<BoundAddress> {
        let kept = bound.filter(BoundAddress::survives_disconnect);
        if kept.is_none() {
            self.unreserve(bound);
        }
        kept
    }

    /// Releases the connection of a socket, which keeps the address that the program has bound.
    pub fn drop_connection(&mut self, file: FileId) {
        let Some(stream) = self.files.stream(file).copied() else { return };
        self.unbind_conn(stream.conn);
        let port = self.client.endpoints(stream.conn).map_or(0, |[local, _]| local.port());
        self.release_stream(stream.conn);
        let bound = if stream.is_rebound { stream.bound } else { self.keep_address(stream.bound) };
        if let Ok(socket) = self.files.socket(file) {
            // An address that was bound without a port stays bound, too (`SOCK_BINDADDR_LOCK`).
            let bound_address = stream.bound.map(|bound| bound.address()).or(socket.last_address);
            let ip = bound_address.unwrap_or(socket.family.unspecified()).ip();
            if !stream.is_rebound {
                socket.last_address = Some(SocketAddr::new(ip, port));
            }
            socket.role = SocketRole::Unconnected { bound };
            socket.shutdown = ShutdownState::default();
            socket.forget_awaited_stamps();
        }
        self.wake(file, libc::POLLOUT | libc::POLLHUP);
    }

    fn shutdown(&mut self, file: FileId, read: bool, write: bool) -> Result<(), Errno> {
        let (conn, conn_state) = self.socket_state(file).ok_or(Errno::NOTCONN)?;
        if !conn_state.is_closed() && !conn_state.is_connected() {
            // `inet_shutdown` disconnects a socket that is not connected yet.
            self.disconnect(file)?;
            return Ok(());
        }
        self.files.socket(file)?.record_shutdown(read, write);
        if conn_state.is_closed() {
            if let Some(stream) = self.files.stream(file) {
                stream.disconnecting = stream.connecting;
            }
            return Err(Errno::NOTCONN);
        }
        if let Some(stream) = self.files.stream(file) {
            // The connection is established, even if no call has reported that (`SS_CONNECTED`).
            stream.connecting = false;
        }
        if read {
            self.client.shutdown_read(conn).map_err(|_| Errno::NOTCONN)?;
        }
        if write {
            self.client.shutdown_write(conn).map_err(|_| Errno::NOTCONN)?;
        }
        self.client.flush();
        self.deliver_locally();
        Ok(())
    }
}

/// Checks that a socket with a local address can connect to `to`.
///
/// # Errors
/// `ENETUNREACH` from an IPv6 address to an IPv4 address, `EAFNOSUPPORT` the other way round.
fn check_families(local: Option<SocketAddr>, to: SocketAddr) -> Result<(), Errno> {
    match (local.map(|local| local.ip()), to.ip()) {
        (Some(IpAddr::V6(ip)), IpAddr::V4(_)) if !ip.is_unspecified() => Err(Errno::NETUNREACH),
        (Some(IpAddr::V4(_)), IpAddr::V6(_)) => Err(Errno::AFNOSUPPORT),
        _ => Ok(()),
    }
}

/// Returns a random number, or 0 if the kernel gives none.
fn random_number() -> u64 {
    let mut bytes = [0; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::NONBLOCK) {
        Ok(count) if count == bytes.len() => u64::from_ne_bytes(bytes),
        _ => 0,
    }
}

/// Returns the result of `with` for the first port that is not in use.
pub(crate) fn first_free<T>(
    ports: impl Iterator<Item = u16>,
    mut with: impl FnMut(u16) -> Result<T, Errno>,
) -> Result<T, Errno> {
    for port in ports {
        match with(port) {
            Err(Errno::ADDRINUSE) => {}
            result => return result,
        }
    }
    Err(Errno::ADDRINUSE)
}

/// Returns whether this process must not bind the port (`inet_port_requires_bind_service`).
fn is_privileged(port: u16, unprivileged_start: u16) -> bool {
    let may =
        || capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::NET_BIND_SERVICE));
    port != 0 && port < unprivileged_start && !may()
}

/// Returns the destination, with loopback in the place of the unspecified address (`ip_route_connect`).
pub(crate) fn loopback_for_any(to: SocketAddr, bound: Option<SocketAddr>) -> SocketAddr {
    match to.ip() {
        ip if !ip.is_unspecified() => to,
        _ if bound.is_some_and(|b| !b.ip().is_unspecified()) => {
            SocketAddr::new(bound.map_or(to.ip(), |b| b.ip()), to.port())
        }
        IpAddr::V4(_) => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), to.port()),
        IpAddr::V6(_) => SocketAddr::new(Ipv6Addr::LOCALHOST.into(), to.port()),
    }
}

/// Returns the error number for a connection that cannot be opened.
pub(crate) fn connect_errno(error: ConnectError) -> Errno {
    match error {
        // Also if the port is in use towards this peer (`__inet_check_established`).
        ConnectError::PortsExhausted | ConnectError::AddressNotAvailable | ConnectError::AddressInUse => {
            Errno::ADDRNOTAVAIL
        }
        ConnectError::NetUnreachable | ConnectError::InvalidAddress => Errno::NETUNREACH,
        ConnectError::TooMany => Errno::NFILE,
        ConnectError::InvalidOption => Errno::INVAL,
    }
}

/// Returns the error number for a refusal by the stack.
pub(crate) fn errno_of(error: &Error) -> Errno {
    match error {
        Error::Listen(_, error) => match error {
            ListenError::AddressInUse => Errno::ADDRINUSE,
            ListenError::AddressNotAvailable => Errno::ADDRNOTAVAIL,
            ListenError::TooMany => Errno::NFILE,
            ListenError::InvalidOption => Errno::INVAL,
        },
        // Every host answers a SYN to port 0 with RST.
        Error::Connect(to, ConnectError::InvalidAddress) if to.port() == 0 => Errno::CONNREFUSED,
        Error::Connect(_, error) => connect_errno(*error),
        Error::Reserve(_, error) => match error {
            ReserveError::InUse => Errno::ADDRINUSE,
            ReserveError::NotAvailable => Errno::ADDRNOTAVAIL,
            ReserveError::TooMany => Errno::NOBUFS,
        },
        Error::Filter(error) => ginnel::errno::filter(*error),
        // The stack is gone, and the network with it.
        _ => Errno::NETDOWN,
    }
}
