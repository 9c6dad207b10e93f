//! Connections.

use super::addr::ToSocketAddr;
use super::errors;
use super::split::{OwnedReadHalf, OwnedWriteHalf, ReadHalf, WriteHalf};
use super::state::{ConnPhase, DroppedHandle};
use crate::executor::local::{self, Access, Attempt, WaitRegistration};
use crate::executor::state::WaitTarget;
use core::marker::PhantomData;
use core::net::SocketAddr;
use core::task::{Context, Poll};
use core::time::Duration;
use ginnel_stack::error::{RecvError, SendError};
use ginnel_stack::options::{ConnectOptions, SocketOptions, TcpInfo, TcpOption};
use std::io;

/// How much is received at a time on the way through `Net::between`.
#[cfg(feature = "hyper")]
const BOUNCE_BYTES: usize = 1 << 14;

/// A TCP connection.
///
/// What is not read stays in the receive buffer and closes the window that the peer may send into; a write waits when the send buffer is full.
/// Dropping a stream closes it as Linux does: with FIN after what was written, or with RST if received bytes were not read.
///
/// Dropping a future of a stream loses nothing: what was received is for the next read, and of a write either nothing or what it said was
/// written ([`write_all`](Self::write_all) and the like, which consist of several, excepted).
#[derive(Debug)]
pub struct TcpStream {
    pub(super) socket: u32,
    pub(super) executor: u32,
    _not_send: PhantomData<*const ()>,
}

impl TcpStream {
    pub(super) const fn new(socket: u32, executor: u32) -> Self {
        Self { socket, executor, _not_send: PhantomData }
    }

    /// Opens a connection. Dropping the future gives it up.
    ///
    /// # Errors
    /// `ConnectionRefused`, `TimedOut`, `NetworkUnreachable`, `HostUnreachable`, `AddrNotAvailable` if no port is free, `ENFILE` if there are
    /// as many connections as there may be, `InvalidInput`, and an error outside of a shard's task.
    pub async fn connect(address: impl ToSocketAddr) -> io::Result<Self> {
        Self::connect_with(address, ConnectOptions::default()).await
    }

    /// The same with options.
    ///
    /// # Errors
    /// The same, and `AddrNotAvailable` for the local address.
    pub async fn connect_with(address: impl ToSocketAddr, options: ConnectOptions) -> io::Result<Self> {
        let address = address.to_socket_addr()?;
        let socket = SocketOptions { ack_events: false, ..options.socket };
        let options = ConnectOptions { socket, ..options };
        let executor = local::current_or_error()?;
        let socket = local::access(executor, |a| {
            let now = a.core.now;
            let conn = a.core.stack.connect(now, address, &options).map_err(errors::connect)?;
            Ok::<_, io::Error>(a.state.net.add(a.core, conn, ConnPhase::Connecting))
        })??;
        let stream = Self::new(socket, executor);
        Attempt::new(executor, WaitTarget::Write(socket), move |a| established(a, socket)).await?;
        Ok(stream)
    }

    /// Receives up to as many bytes as `buffer` takes; 0 is the end of the stream.
    pub(super) fn recv(&self, buffer: &mut [u8]) -> impl Future<Output = io::Result<usize>> {
        Attempt::new(self.executor, WaitTarget::Read(self.socket), move |a| recv(a, self.socket, buffer))
    }

    pub(super) fn poll_recv(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        let mut waiting = WaitRegistration::poll_function(self.executor, WaitTarget::Read(self.socket));
        waiting.poll(cx, |a| recv(a, self.socket, buffer))
    }

    /// Receives up to so many bytes and gives them to `take`.
    #[cfg(feature = "hyper")]
    pub(in crate::executor) fn poll_recv_with(
        &self,
        cx: &mut Context<'_>,
        limit: usize,
        consume: impl FnOnce(&[u8]),
    ) -> Poll<io::Result<usize>> {
        let mut waiting = WaitRegistration::poll_function(self.executor, WaitTarget::Read(self.socket));
        waiting.poll(cx, |a| {
            let mut bounce = core::mem::take(&mut a.state.net.bounce_buffer);
            bounce.resize(BOUNCE_BYTES, 0);
            let limit = limit.min(bounce.len());
            let received = recv(a, self.socket, &mut bounce[..limit]);
            if let Some(Ok(n)) = received {
                consume(&bounce[..n]);
            }
            a.state.net.bounce_buffer = bounce;
            received
        })
    }

    /// Queues as many bytes as there is room for, at least one.
    pub(super) fn send(&self, bytes: &[u8]) -> impl Future<Output = io::Result<usize>> {
        Attempt::new(self.executor, WaitTarget::Write(self.socket), move |a| send(a, self.socket, bytes))
    }

    pub(super) fn poll_send(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut waiting = WaitRegistration::poll_function(self.executor, WaitTarget::Write(self.socket));
        waiting.poll(cx, |a| send(a, self.socket, bytes))
    }

    /// Sends FIN after what was written; receiving goes on.
    pub(super) fn shutdown_write(&self) -> io::Result<()> {
        local::access(self.executor, |a| {
            let socket = &mut a.state.net.sockets[self.socket];
            if socket.phase == ConnPhase::Closed {
                return Err(socket.error.take().map_or_else(errors::not_connected, io::Error::from));
            }
            socket.write_shutdown = true;
            a.core.stack.shutdown_write(socket.conn).map_err(|_| errors::not_connected())
        })?
    }

    /// Copies what was received into `buffer` and leaves it there; 0 is the end of the stream. There may be more than is shown.
    ///
    /// # Errors
    /// As for reading.
    pub fn peek(&self, buffer: &mut [u8]) -> impl Future<Output = io::Result<usize>> {
        Attempt::new(self.executor, WaitTarget::Read(self.socket), move |a| peek(a, self.socket, buffer))
    }

    /// Waits until there is something to read, or the end of the stream, or an error. A task that waits here needs no buffer
    /// meanwhile, unless that is a local variable of an `async` function: those are part of the task all the time.
    ///
    /// # Errors
    /// Only if the stream belongs to another shard; an error of the connection is left for the next read.
    pub fn readable(&self) -> impl Future<Output = io::Result<()>> {
        let socket = self.socket;
        Attempt::new(self.executor, WaitTarget::Read(socket), move |a| {
            is_readable(a, socket).then_some(Ok(()))
        })
    }

    /// Waits until there is room to write, or an error.
    ///
    /// # Errors
    /// Only if the stream belongs to another shard; an error of the connection is left for the next write.
    pub fn writable(&self) -> impl Future<Output = io::Result<()>> {
        let socket_id = self.socket;
        Attempt::new(self.executor, WaitTarget::Write(socket_id), move |a| {
            let socket = &a.state.net.sockets[socket_id];
            (!socket.send_buffer_full || socket.phase == ConnPhase::Closed).then_some(Ok(()))
        })
    }

    /// Reads what is there.
    ///
    /// # Errors
    /// `WouldBlock` if nothing is; otherwise as for reading.
    pub fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        local::access(self.executor, |a| {
            recv(a, self.socket, buffer).unwrap_or_else(|| Err(errors::would_block()))
        })?
    }

    /// Writes what there is room for.
    ///
    /// # Errors
    /// `WouldBlock` if there is none; otherwise as for writing.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        local::access(self.executor, |a| {
            send(a, self.socket, bytes).unwrap_or_else(|| Err(errors::would_block()))
        })?
    }

    /// The error that the connection ended with, if it was not told yet (`SO_ERROR`).
    ///
    /// # Errors
    /// Only if the stream belongs to another shard.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        local::access(self.executor, |a| a.state.net.sockets[self.socket].error.take().map(io::Error::from))
    }

    /// The peer's address.
    ///
    /// # Errors
    /// `NotConnected` if the connection is over.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.info().map(|info| info.remote)
    }

    /// Our address.
    ///
    /// # Errors
    /// Only if the stream belongs to another shard.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        local::access(self.executor, |a| match a.state.net.closed_streams.get(&self.socket) {
            Some(closed) => Ok(closed.local),
            None => {
                let ends = a.core.stack.endpoints(a.state.net.sockets[self.socket].conn);
                ends.map(|[local, _]| local).ok_or_else(errors::not_connected)
            }
        })?
    }

    /// What is known about the connection (`TCP_INFO`).
    ///
    /// # Errors
    /// `NotConnected` if the connection is over.
    pub fn info(&self) -> io::Result<TcpInfo> {
        local::access(self.executor, |a| {
            let socket = &a.state.net.sockets[self.socket];
            let open = (socket.phase != ConnPhase::Closed).then_some(socket.conn);
            open.and_then(|conn| a.core.stack.info(conn)).ok_or_else(errors::not_connected)
        })?
    }

    /// Sets one option.
    ///
    /// # Errors
    /// `InvalidInput` if it is out of range, `NotConnected` if the connection is over.
    pub fn set_option(&self, option: TcpOption) -> io::Result<()> {
        if matches!(option, TcpOption::AckEvents(true)) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "tasks are not told of acknowledgements",
            ));
        }
        local::access(self.executor, |a| {
            let socket = &a.state.net.sockets[self.socket];
            if socket.phase == ConnPhase::Closed {
                return Err(errors::not_connected());
            }
            a.core.stack.set_option(socket.conn, option).map_err(errors::option)
        })?
    }

    /// Sends small segments at once (`TCP_NODELAY`).
    ///
    /// # Errors
    /// As for [`set_option`](Self::set_option).
    pub fn set_nodelay(&self, on: bool) -> io::Result<()> {
        self.set_option(TcpOption::NoDelay(on))
    }

    /// Probes an idle peer (`SO_KEEPALIVE`), the first time after `idle` in whole seconds; `None`: no more.
    ///
    /// # Errors
    /// As for [`set_option`](Self::set_option).
    pub fn set_keepalive(&self, idle: Option<Duration>) -> io::Result<()> {
        if let Some(idle) = idle {
            self.set_option(TcpOption::KeepIdle(idle))?;
        }
        self.set_option(TcpOption::KeepAlive(idle.is_some()))
    }

    /// Makes dropping the stream a reset (`SO_LINGER` with time 0).
    ///
    /// # Errors
    /// As for [`set_option`](Self::set_option).
    pub fn set_zero_linger(&self) -> io::Result<()> {
        self.set_option(TcpOption::LingerZero(true))
    }

    /// Lets its segments go before those of others, or after them: 0, the usual one, to 7 in the order of [`ginnel_stack::priority`] (`SO_PRIORITY`).
    ///
    /// # Errors
    /// As for [`set_option`](Self::set_option).
    pub fn set_priority(&self, priority: u8) -> io::Result<()> {
        self.set_option(TcpOption::Priority(priority))
    }

    /// Halves that can be used at the same time inside one task.
    pub const fn split(&mut self) -> (ReadHalf<'_>, WriteHalf<'_>) {
        (ReadHalf(self), WriteHalf(self))
    }

    /// Halves that can go to different tasks. Dropping the writing half sends FIN.
    pub fn into_split(self) -> (OwnedReadHalf, OwnedWriteHalf) {
        OwnedReadHalf::halves(self)
    }
}

fn established(a: &mut Access<'_>, socket: u32) -> Option<io::Result<()>> {
    let socket = &mut a.state.net.sockets[socket];
    match socket.phase {
        ConnPhase::Connecting => None,
        ConnPhase::Open => Some(Ok(())),
        ConnPhase::Closed => Some(match socket.error.take() {
            Some(error) => Err(error.into()),
            // The peer closed it at once.
            None => Ok(()),
        }),
    }
}

fn recv(a: &mut Access<'_>, socket_id: u32, buffer: &mut [u8]) -> Option<io::Result<usize>> {
    let net = &mut a.state.net;
    let socket = &mut net.sockets[socket_id];
    if buffer.is_empty() {
        return Some(Ok(0));
    }
    if socket.phase == ConnPhase::Closed {
        if let Some(closed) = net.closed_streams.get_mut(&socket_id) {
            let unread = &closed.unread[closed.read..];
            let n = unread.len().min(buffer.len());
            buffer[..n].copy_from_slice(&unread[..n]);
            closed.read += n;
            if n > 0 {
                return Some(Ok(n));
            }
        }
        return Some(socket.error.take().map_or(Ok(0), |error| Err(error.into())));
    }
    match a.core.stack.recv(socket.conn, buffer) {
        // It is over, and how is about to be told.
        Ok(0) if !socket.peer_fin => None,
        Ok(n) => Some(Ok(n)),
        Err(RecvError::WouldBlock) => None,
        Err(RecvError::Stale) => Some(Err(errors::not_connected())),
    }
}

fn peek(a: &mut Access<'_>, socket_id: u32, buffer: &mut [u8]) -> Option<io::Result<usize>> {
    let net = &mut a.state.net;
    let socket = &mut net.sockets[socket_id];
    if buffer.is_empty() {
        return Some(Ok(0));
    }
    if socket.phase == ConnPhase::Closed {
        let unread = net.closed_streams.get(&socket_id).map_or(&[][..], |r| &r.unread[r.read..]);
        let n = unread.len().min(buffer.len());
        buffer[..n].copy_from_slice(&unread[..n]);
        if n > 0 {
            return Some(Ok(n));
        }
        return Some(socket.error.take().map_or(Ok(0), |error| Err(error.into())));
    }
    if socket.peer_fin && matches!(a.core.stack.peek(socket.conn, buffer), Err(RecvError::WouldBlock)) {
        // Nothing but an urgent byte is in front of the end, and that is no part of the stream.
        let _ = a.core.stack.skip(socket.conn, 0);
    }
    match a.core.stack.peek(socket.conn, buffer) {
        Ok(0) if !socket.peer_fin => None,
        Ok(n) => Some(Ok(n)),
        Err(RecvError::WouldBlock) => None,
        Err(RecvError::Stale) => Some(Err(errors::not_connected())),
    }
}

fn is_readable(a: &mut Access<'_>, socket_id: u32) -> bool {
    let socket = &a.state.net.sockets[socket_id];
    // Behind an urgent byte there may be nothing but the end.
    socket.phase == ConnPhase::Closed || socket.peer_fin || peek(a, socket_id, &mut [0]).is_some()
}

fn send(a: &mut Access<'_>, socket_id: u32, bytes: &[u8]) -> Option<io::Result<usize>> {
    let socket = &mut a.state.net.sockets[socket_id];
    if socket.phase == ConnPhase::Closed {
        return Some(Err(socket.error.take().map_or_else(errors::broken_pipe, io::Error::from)));
    }
    match a.core.stack.send(socket.conn, bytes) {
        Ok(n) => {
            socket.send_buffer_full = n < bytes.len();
            (n > 0 || bytes.is_empty()).then_some(Ok(n))
        }
        Err(_) if socket.write_shutdown => Some(Err(errors::broken_pipe())),
        // It is over, and how is about to be told.
        Err(SendError::Closed) => None,
        Err(_) => Some(Err(errors::broken_pipe())),
    }
}

impl Drop for TcpStream {
    fn drop(&mut self) {
        local::release(self.executor, |state, core| {
            let Some(socket) = state.net.sockets.remove(self.socket) else { return };
            state.wait_lists.forget(socket.readers);
            state.wait_lists.forget(socket.writers);
            if socket.phase == ConnPhase::Closed {
                state.net.closed_streams.remove(&self.socket);
                return;
            }
            let dropped = DroppedHandle::Conn(socket.conn);
            match core {
                Some(core) => dropped.close(core),
                None => state.net.dropped.push(dropped),
            }
        });
    }
}
