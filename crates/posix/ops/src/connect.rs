//! `bind`, `connect` and `shutdown`, as `inet_bind` and `inet_stream_connect` do them.

use crate::Ops;
use crate::book::Why;
use crate::fd_table::FileId;
use crate::file::{Bound, Shape, Shut, Stream};
use crate::kernel;
use crate::lane::Lane;
use crate::raw;
use crate::sleep::{Patience, Wait};
use crate::sockaddr::{self, Family};
use core::cell::Cell;
use core::ffi::c_int;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use ginnel::channel::Sharing;
use ginnel::channel::control::ReserveError;
use ginnel::{Conn, ConnectError, ConnectOptions, Error, ListenError, SocketOptions};
use rustix::fd::RawFd;
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities};

impl Ops {
    /// `bind`. The stack reserves the address; port 0 lets it choose one.
    ///
    /// # Errors
    /// `EINVAL` (bound already, or too short an address), `EAFNOSUPPORT`, `EADDRINUSE`, `EADDRNOTAVAIL`, `EACCES`.
    pub fn bind(&self, fd: RawFd, bytes: &[u8]) -> Result<(), Errno> {
        let mut lane = self.lock()?;
        let file = self.file(&mut lane, fd)?;
        let socket = lane.files.socket(file)?;
        let family = socket.family;
        let unspecified = family == Family::V4
            && sockaddr::family_of(bytes).is_ok_and(|f| f == libc::AF_UNSPEC as u16)
            && bytes.get(4..8) == Some(&[0; 4]);
        let address = if unspecified && bytes.len() >= 16 {
            // Old programs leave the family out where there is no address (`__inet_bind`).
            SocketAddr::new(family.any().ip(), u16::from_be_bytes([bytes[2], bytes[3]]))
        } else {
            sockaddr::read(bytes, family)?
        };
        let (sharing, datagrams) = (socket.options.sharing(family), socket.datagrams);
        if !matches!(socket.shape, Shape::Fresh { bound: None }) {
            return Err(Errno::INVAL);
        }
        if address.is_ipv4() && family == Family::V6 && socket.options.is_v6_only() {
            return Err(Errno::INVAL);
        }
        if is_privileged(address.port(), self.config.unprivileged_port_start) {
            return Err(Errno::ACCESS);
        }
        if datagrams {
            return self.bind_datagrams(lane, (fd, file), address, bytes);
        }
        let socket = lane.files.socket(file)?;
        let no_port = address.port() == 0 && socket.options.is_on("IP_BIND_ADDRESS_NO_PORT");
        if no_port && address.ip().is_unspecified() {
            socket.past = Some(address);
            return Ok(());
        }
        if !address.ip().is_unspecified() {
            let ours = (self.config.takes)(address.ip());
            let refused = Err(Errno::ADDRNOTAVAIL);
            let reserved = if ours && no_port {
                lane.bind_without_port(file, address, sharing)
            } else if ours {
                lane.reserve(file, address, sharing, None)
            } else {
                refused
            };
            lane.write_down(fd, file);
            if reserved != refused || !self.config.kernel_listen {
                return reserved;
            }
            // Not an address of the stack's, so it may be one of the kernel's.
            self.hand_to_kernel(&mut lane, fd, file)?;
            lane.write_down_kernels(fd, Why::NotLocal);
            drop(lane);
            return raw::bind(fd, bytes);
        }
        if !self.config.kernel_listen {
            return lane.reserve_for(fd, file, address, sharing, None);
        }
        // Whether the port is free, and may be had, the kernel knows better.
        self.back_with_kernel(&mut lane, fd, file)?;
        kernel::never_wait(fd)?;
        match raw::bind(fd, bytes) {
            // In the stack the port is free to all.
            Err(Errno::ACCESS) => return lane.reserve_for(fd, file, address, sharing, None),
            bound => bound?,
        }
        let chosen = kernel::name_of(fd, family)?;
        lane.reserve_for(fd, file, SocketAddr::new(address.ip(), chosen.port()), sharing, Some(fd))
    }

    /// `connect`. Waits until the connection is established, unless the socket does not wait.
    ///
    /// # Errors
    /// `EINPROGRESS`, `EALREADY`, `EISCONN`, `ECONNREFUSED`, `ETIMEDOUT`, `ENETUNREACH`, `EADDRNOTAVAIL`, `EAFNOSUPPORT`, `EINTR` …
    pub fn connect(&self, fd: RawFd, address: &[u8]) -> Result<(), Errno> {
        let mut lane = self.lock()?;
        let file = self.file(&mut lane, fd)?;
        let socket = lane.files.socket(file)?;
        if socket.datagrams {
            return self.connect_datagrams(lane, (fd, file), address);
        }
        let (family, nonblocking) = (socket.family, socket.nonblocking);
        let patience = if nonblocking { Patience::None } else { socket.options.send_patience() };
        if sockaddr::family_of(address)? == libc::AF_UNSPEC as u16 {
            return lane.disconnect(file);
        }
        let first = match socket.shape {
            Shape::Fresh { .. } => {
                let to = sockaddr::read(address, family)?;
                let ours = (self.config.takes)(to.ip());
                let begun = if ours {
                    lane.begin_connect(file, to, self.config.kernel_listen)
                } else {
                    Err(Errno::NETUNREACH)
                };
                if begun == Err(Errno::NETUNREACH) && self.config.kernel_listen {
                    self.hand_to_kernel(&mut lane, fd, file)?;
                    drop(lane);
                    return raw::connect(fd, address);
                }
                begun?;
                lane.write_down(fd, file);
                if let Some(stream) = lane.files.stream(file) {
                    stream.unnamed = Some(fd);
                }
                true
            }
            Shape::Listening(_) | Shape::Datagrams(_) => return Err(Errno::ISCONN),
            Shape::Stream(stream) if stream.disconnecting => return Err(Errno::INVAL),
            Shape::Stream(stream) if stream.connecting => false,
            Shape::Stream(_) => return Err(Errno::ISCONN),
        };
        lane.client.flush();
        if first && patience == Patience::None {
            // Also if the answer is there already: it is not looked for.
            return Err(Errno::INPROGRESS);
        }
        let done = Cell::new(0);
        let wait = Wait::restarting(patience, &done);
        let (mut lane, result) = self.until(lane, &[file], &mut [], &wait, |lane, _| lane.connect_step(file));
        match result {
            Err(Errno::AGAIN) => Err(if first { Errno::INPROGRESS } else { Errno::ALREADY }),
            Err(Errno::INTR) => Err(Errno::INTR),
            Ok(()) => Ok(()),
            Err(error) => {
                // As after `tcp_disconnect`: it may try again.
                lane.tell_given_up(file);
                lane.drop_connection(file);
                Err(error)
            }
        }
    }

    /// `shutdown`.
    ///
    /// # Errors
    /// `EINVAL` for an unknown way, `ENOTCONN`.
    pub fn shutdown(&self, fd: RawFd, how: c_int) -> Result<(), Errno> {
        let mut lane = self.lock()?;
        let file = self.file(&mut lane, fd)?;
        let socket = lane.files.socket(file)?;
        let (read, write) = match how {
            libc::SHUT_RD => (true, false),
            libc::SHUT_WR => (false, true),
            libc::SHUT_RDWR => (true, true),
            _ => return Err(Errno::INVAL),
        };
        let result = match socket.shape {
            Shape::Datagrams(_) => return lane.shutdown_datagrams(file, read, write),
            Shape::Listening(_) if !read => Ok(()),
            Shape::Listening(_) => {
                lane.stop_listening(file);
                Ok(())
            }
            Shape::Fresh { .. } => {
                socket.shut(read, write);
                Err(Errno::NOTCONN)
            }
            Shape::Stream(_) => lane.shutdown(file, read, write),
        };
        lane.tell_sharers(file);
        // Whatever came of it: `inet_shutdown` wakes everybody.
        lane.wake(file, 0);
        result
    }
}

impl Lane {
    /// The same for one that is reached by this descriptor, and writes it down.
    fn reserve_for(
        &mut self,
        fd: RawFd,
        file: FileId,
        address: SocketAddr,
        sharing: Sharing,
        kernel: Option<RawFd>,
    ) -> Result<(), Errno> {
        let reserved = self.reserve(file, address, sharing, kernel);
        self.write_down(fd, file);
        reserved
    }

    /// Gives a socket an address of the stack's and no port: `connect` or `listen` is to choose it.
    fn bind_without_port(
        &mut self,
        file: FileId,
        address: SocketAddr,
        sharing: Sharing,
    ) -> Result<(), Errno> {
        // Whether it is one of the stack's.
        let reserved = self.client.reserve(address, sharing).map_err(|e| errno_of(&e))?;
        let _ = self.client.unreserve(reserved);
        self.files.socket(file)?.past = Some(address);
        Ok(())
    }

    /// Reserves an address for a socket that has none.
    pub fn reserve(
        &mut self,
        file: FileId,
        address: SocketAddr,
        sharing: Sharing,
        kernel: Option<RawFd>,
    ) -> Result<(), Errno> {
        let keeps_port = address.port() != 0;
        let ports = self.files.socket(file)?.options.local_ports().filter(|_| !keeps_port);
        let reserved = match ports {
            None => self.client.reserve(address, sharing).map_err(|e| errno_of(&e)),
            Some(ports) => first_free(ports, |port| {
                let address = SocketAddr::new(address.ip(), port);
                self.client.reserve(address, sharing).map_err(|e| errno_of(&e))
            }),
        }?;
        if let Shape::Fresh { bound } = &mut self.files.socket(file)?.shape {
            *bound = Some(Bound { reserved, keeps_port, kernel });
        }
        Ok(())
    }

    /// `or_kernels`: what the stack has no way to is the kernel's, so that must be known before.
    fn begin_connect(&mut self, file: FileId, to: SocketAddr, or_kernels: bool) -> Result<(), Errno> {
        let socket = self.files.socket(file)?;
        let Shape::Fresh { bound } = socket.shape else { return Err(Errno::ISCONN) };
        let to = loopback_for_any(to, bound.map(|b| b.address()));
        if to.is_ipv4() && socket.family == Family::V6 && socket.options.is_v6_only() {
            return Err(Errno::NETUNREACH);
        }
        // An address without a port outlives what was made with it, and may have been all that `bind` was to give (`IP_BIND_ADDRESS_NO_PORT`).
        let kept = socket.past.filter(|past| bound.is_none() && !past.ip().is_unspecified());
        let ports = socket.options.local_ports().filter(|_| bound.is_none());
        let local = bound.map(|bound| match (bound.address().ip(), to.ip()) {
            // An IPv6 socket that is bound to all addresses opens IPv4 connections too.
            (IpAddr::V6(any), IpAddr::V4(_)) if any.is_unspecified() => {
                SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), bound.address().port())
            }
            _ => bound.address(),
        });
        let local = local.or(kept.map(|past| SocketAddr::new(past.ip(), 0)));
        let v4 = Some(to.is_ipv4());
        let options =
            ConnectOptions { local, socket: socket.options.at_birth(v4), ..ConnectOptions::default() };
        let later = SocketOptions { nodelay: false, keepalive: false, ..options.socket };
        let conn = if let Some(ports) = ports {
            let any = if to.is_ipv4() { Family::V4.any() } else { Family::V6.any() };
            let ip = local.unwrap_or(any).ip();
            let conn = first_free(ports, |port| {
                let local = Some(SocketAddr::new(ip, port));
                let options = ConnectOptions { local, port_was_chosen: true, ..options };
                self.client.connect(to, options).map_err(|e| match e {
                    Error::Connect(_, ConnectError::AddressInUse) => Errno::ADDRINUSE,
                    error => errno_of(&error),
                })
            });
            // None of them is free (`inet_hash_connect`).
            let conn = conn.map_err(|e| if e == Errno::ADDRINUSE { Errno::ADDRNOTAVAIL } else { e })?;
            self.files.socket(file)?.options.born(v4);
            conn
        } else if local.is_none()
            && later == SocketOptions::default()
            && to.port() != 0
            && (!or_kernels || self.ways.contains(&to.ip()))
        {
            // These two options can be told when the SYN has left.
            let conn = self.client.connect_unasked(to).map_err(|e| errno_of(&e))?;
            self.files.socket(file)?.options.born_untold();
            conn
        } else {
            let conn = self.client.connect(to, options).map_err(|e| errno_of(&e))?;
            self.files.socket(file)?.options.born(v4);
            if or_kernels && !self.ways.contains(&to.ip()) {
                self.note_way(to.ip());
            }
            conn
        };
        let socket = self.files.socket(file)?;
        socket.shape = Shape::Stream(Stream::new(conn, true, bound));
        self.bind_conn(conn, file);
        self.apply_options(file)
    }

    /// A connection that was opened without a question, and for which its shard had no port: one of another shard takes its place, if one has. Not where other
    /// processes have it, too, and know it by its number.
    pub fn connect_elsewhere(&mut self, file: FileId) -> Option<Conn> {
        let old = self.files.stream(file)?.conn;
        let no_port = matches!(
            self.client.refusal(old),
            Some(ConnectError::PortsExhausted | ConnectError::AddressNotAvailable)
        );
        if !no_port || self.client.all().len() == 1 || self.files.get(file).shared.is_some() {
            return None;
        }
        let [_, to] = self.client.ends(old).ok()?;
        let v4 = Some(to.is_ipv4());
        let options = &mut self.files.socket(file).ok()?.options;
        let conn = self
            .client
            .connect(to, ConnectOptions { socket: options.at_birth(v4), ..ConnectOptions::default() })
            .ok()?;
        options.born(v4);
        self.files.stream(file)?.conn = conn;
        self.unbind_conn(old);
        let _ = self.client.release(old);
        self.bind_conn(conn, file);
        // It was there a moment ago; if the stack is gone, that is told in another way.
        let _ = self.apply_options(file);
        self.client.flush();
        Some(conn)
    }

    /// How far the handshake is.
    fn connect_step(&mut self, file: FileId) -> Result<(), Errno> {
        let (_, standing) = self.standing(file).ok_or(Errno::CONNABORTED)?;
        if standing.is_over() {
            return Err(self.take_error(file).unwrap_or(Errno::CONNABORTED));
        }
        if !standing.is_connected() {
            return Err(Errno::AGAIN);
        }
        if let Some(stream) = self.files.stream(file) {
            stream.connecting = false;
        }
        Ok(())
    }

    /// `connect` to no address: the connection is reset, and the socket as good as new.
    fn disconnect(&mut self, file: FileId) -> Result<(), Errno> {
        match self.files.socket(file)?.shape {
            Shape::Fresh { .. } | Shape::Datagrams(_) => {}
            Shape::Listening(_) => self.stop_listening(file),
            Shape::Stream(stream) => {
                let _ = self.client.abort(stream.conn);
                self.tell_given_up(file);
                self.drop_connection(file);
            }
        }
        Ok(())
    }

    /// What becomes of an address when the socket is as new: a port that was only chosen goes (`inet_put_port`).
    pub fn keep(&mut self, bound: Option<Bound>) -> Option<Bound> {
        let stays = bound.filter(Bound::stays);
        if stays.is_none() {
            self.unreserve(bound);
        }
        stays
    }

    /// The socket has no connection any more, but the address that the program bound it to.
    pub fn drop_connection(&mut self, file: FileId) {
        let Some(stream) = self.files.stream(file).copied() else { return };
        self.unbind_conn(stream.conn);
        let port = self.client.ends(stream.conn).map_or(0, |[local, _]| local.port());
        let _ = self.client.release(stream.conn);
        self.client.flush();
        let bound = self.keep(stream.bound);
        if let Ok(socket) = self.files.socket(file) {
            let ip = stream.bound.map_or(socket.family.any(), |bound| bound.address()).ip();
            socket.past = Some(SocketAddr::new(ip, port));
            socket.shape = Shape::Fresh { bound };
            socket.shut = Shut::default();
        }
        self.wake(file, libc::POLLOUT | libc::POLLHUP);
    }

    fn shutdown(&mut self, file: FileId, read: bool, write: bool) -> Result<(), Errno> {
        let (conn, standing) = self.standing(file).ok_or(Errno::NOTCONN)?;
        if !standing.is_over() && !standing.is_connected() {
            // `inet_shutdown` disconnects what is not connected yet.
            return self.disconnect(file);
        }
        self.files.socket(file)?.shut(read, write);
        if standing.is_over() {
            if let Some(stream) = self.files.stream(file) {
                stream.disconnecting = stream.connecting;
            }
            return Err(Errno::NOTCONN);
        }
        if let Some(stream) = self.files.stream(file) {
            // It is connected, also if nobody asked how that went (`SS_CONNECTED`).
            stream.connecting = false;
        }
        if read {
            self.client.shutdown_read(conn).map_err(|_| Errno::NOTCONN)?;
        }
        if write {
            self.client.shutdown_write(conn).map_err(|_| Errno::NOTCONN)?;
        }
        self.client.flush();
        Ok(())
    }
}

/// What can be had with the first port that nobody has.
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

/// Whether this process may not bind the port (`inet_port_requires_bind_service`).
fn is_privileged(port: u16, unprivileged_start: u16) -> bool {
    let may =
        || capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::NET_BIND_SERVICE));
    port != 0 && port < unprivileged_start && !may()
}

/// To connect to no address is to connect to oneself (`ip_route_connect`).
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

/// Why a connection cannot be opened.
pub(crate) fn errno_of_refusal(why: ConnectError) -> Errno {
    match why {
        // Also if it is in use towards this peer (`__inet_check_established`).
        ConnectError::PortsExhausted | ConnectError::AddressNotAvailable | ConnectError::AddressInUse => {
            Errno::ADDRNOTAVAIL
        }
        ConnectError::NetUnreachable | ConnectError::InvalidAddress => Errno::NETUNREACH,
        ConnectError::TooMany => Errno::NFILE,
        ConnectError::InvalidOption => Errno::INVAL,
    }
}

/// What a refusal of the stack is to a program.
pub(crate) fn errno_of(error: &Error) -> Errno {
    match error {
        Error::Listen(_, error) => match error {
            ListenError::AddressInUse => Errno::ADDRINUSE,
            ListenError::AddressNotAvailable => Errno::ADDRNOTAVAIL,
            ListenError::TooMany => Errno::NFILE,
            ListenError::InvalidOption => Errno::INVAL,
        },
        // A SYN to port 0 is answered by RST everywhere.
        Error::Connect(to, ConnectError::InvalidAddress) if to.port() == 0 => Errno::CONNREFUSED,
        Error::Connect(_, error) => errno_of_refusal(*error),
        Error::Reserve(_, error) => match error {
            ReserveError::InUse => Errno::ADDRINUSE,
            ReserveError::NotAvailable => Errno::ADDRNOTAVAIL,
            ReserveError::TooMany => Errno::NOBUFS,
        },
        // The stack is gone, and the network with it.
        _ => Errno::NETDOWN,
    }
}
