//! TCP connections.

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
use ginnel_stack::stream_position::StreamPosition;
use std::io;

/// Size of `NetState::bounce_buffer`, and so the most that [`TcpStream::poll_recv_with`] receives.
#[cfg(feature = "hyper")]
const BOUNCE_BYTES: usize = 1 << 14;

/// Bytes that [`TcpStream::recv_unordered`] has received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedBytes {
    /// Offset of the first byte in the stream.
    pub offset: u64,
    /// Number of bytes at the front of the buffer; 0 at the end of the stream.
    pub len: usize,
    /// True if bytes before these are missing.
    pub is_early: bool,
}

/// A TCP connection.
///
/// Data that is not read stays in the receive buffer and reduces the window that the peer may send into. A
/// write waits while the send buffer is full. Dropping a stream closes it as on Linux: with FIN after the
/// written data, or with RST if received data was not read.
///
/// Dropping a future of a stream loses no data: received data stays for the next read, and a write has
/// written nothing unless it returned. Methods that consist of several operations, such as
/// [`write_all`](Self::write_all), are exceptions.
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

    /// Opens a connection. Dropping the future aborts the attempt.
    ///
    /// # Errors
    /// `ConnectionRefused`, `TimedOut`, `NetworkUnreachable`, `HostUnreachable`, `AddrNotAvailable` if no
    /// port is free, `ENFILE` at the limit of connections, `InvalidInput`, and an error outside of a shard's
    /// task.
    pub async fn connect(address: impl ToSocketAddr) -> io::Result<Self> {
        Self::connect_with(address, ConnectOptions::default()).await
    }

    /// As [`connect`](Self::connect), with options. The option `fastopen_connect` has no effect: the stream
    /// exists only when the connection is established, so there are no data for the SYN.
    ///
    /// # Errors
    /// As [`connect`](Self::connect), and `AddrNotAvailable` for the local address.
    pub async fn connect_with(address: impl ToSocketAddr, options: ConnectOptions) -> io::Result<Self> {
        let address = address.to_socket_addr()?;
        let socket = SocketOptions { ack_events: false, fastopen_connect: false, ..options.socket };
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

    /// Receives up to `buffer.len()` bytes; 0 is the end of the stream.
    pub(super) fn recv(&self, buffer: &mut [u8]) -> impl Future<Output = io::Result<usize>> {
        Attempt::new(self.executor, WaitTarget::Read(self.socket), move |a| recv(a, self.socket, buffer))
    }

    pub(super) fn poll_recv(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        let mut waiting = WaitRegistration::poll_function(self.executor, WaitTarget::Read(self.socket));
        waiting.poll(cx, |a| recv(a, self.socket, buffer))
    }

    /// Receives up to `limit` bytes and passes them to `consume`.
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

    /// Queues as many bytes as fit into the send buffer, at least one.
    pub(super) fn send(&self, bytes: &[u8]) -> impl Future<Output = io::Result<usize>> {
        Attempt::new(self.executor, WaitTarget::Write(self.socket), move |a| send(a, self.socket, bytes))
    }

    pub(super) fn poll_send(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut waiting = WaitRegistration::poll_function(self.executor, WaitTarget::Write(self.socket));
        waiting.poll(cx, |a| send(a, self.socket, bytes))
    }

    /// Sends FIN after the written data; receiving continues.
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

    /// Copies received data into `buffer` without consuming it; 0 is the end of the stream. More data may be
    /// available than is copied.
    ///
    /// # Errors
    /// As for reading.
    pub fn peek(&self, buffer: &mut [u8]) -> impl Future<Output = io::Result<usize>> {
        Attempt::new(self.executor, WaitTarget::Read(self.socket), move |a| peek(a, self.socket, buffer))
    }

    /// Waits until there is data to read, the end of the stream, or an error. A waiting task needs no buffer,
    /// unless the buffer is a local variable of an `async` function, which is part of the task.
    ///
    /// # Errors
    /// Only if the stream belongs to another shard; an error of the connection is left for the next read.
    pub fn readable(&self) -> impl Future<Output = io::Result<()>> {
        let socket = self.socket;
        Attempt::new(self.executor, WaitTarget::Read(socket), move |a| {
            is_readable(a, socket).then_some(Ok(()))
        })
    }

    /// Waits until the send buffer has space, or for an error.
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

    /// Reads without waiting.
    ///
    /// # Errors
    /// `WouldBlock` if no data is available; otherwise as for reading.
    pub fn try_read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        local::access(self.executor, |a| {
            recv(a, self.socket, buffer).unwrap_or_else(|| Err(errors::would_block()))
        })?
    }

    /// Receives bytes of a connection with unordered receive ([`TcpOption::Unordered`]): bytes of high
    /// priority as soon as they have arrived, otherwise the next bytes in order. Waits until there are bytes,
    /// and returns 0 bytes at the end of the stream. `position` belongs to this stream, and the stream must
    /// not be read in another way meanwhile. A short buffer takes a part; of bytes of high priority, the rest
    /// remains of high priority.
    ///
    /// # Errors
    /// As for reading.
    pub fn recv_unordered(
        &self,
        position: &mut StreamPosition,
        buffer: &mut [u8],
    ) -> impl Future<Output = io::Result<ReceivedBytes>> {
        Attempt::new(self.executor, WaitTarget::Read(self.socket), move |a| {
            recv_unordered(a, self.socket, position, buffer)
        })
    }

    /// Delivers bytes of frames with a priority above best effort while bytes before them are missing, by
    /// [`recv_unordered`](Self::recv_unordered).
    ///
    /// # Errors
    /// As for [`set_option`](Self::set_option); `InvalidInput` also where the stack runs in another thread.
    pub fn set_unordered(&self, on: bool) -> io::Result<()> {
        self.set_option(TcpOption::Unordered(on))
    }

    /// Sends a message with a priority (0 to 7, see [`ginnel_stack::priority`]; higher values count as 7):
    /// queued messages of lower priority of which no byte was sent leave after it. Waits until the send
    /// buffer has room for all of it. What other methods write is no message: messages queued later follow
    /// it. Where the stack runs in another thread, messages are sent in the order of the calls.
    ///
    /// # Errors
    /// `EMSGSIZE` if the message is longer than the send buffer; otherwise as for writing.
    pub fn send_message(&self, message: &[u8], priority: u8) -> impl Future<Output = io::Result<()>> {
        Attempt::new(self.executor, WaitTarget::Write(self.socket), move |a| {
            send_message(a, self.socket, message, priority)
        })
    }

    /// Writes as much as fits, without waiting.
    ///
    /// # Errors
    /// `WouldBlock` if the send buffer is full; otherwise as for writing.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        local::access(self.executor, |a| {
            send(a, self.socket, bytes).unwrap_or_else(|| Err(errors::would_block()))
        })?
    }

    /// Returns and clears the pending error (`SO_ERROR`).
    ///
    /// # Errors
    /// Only if the stream belongs to another shard.
    pub fn take_error(&self) -> io::Result<Option<io::Error>> {
        local::access(self.executor, |a| a.state.net.sockets[self.socket].error.take().map(io::Error::from))
    }

    /// Returns the address of the peer.
    ///
    /// # Errors
    /// `NotConnected` if the connection is over.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.info().map(|info| info.remote)
    }

    /// Returns the local address.
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

    /// Returns the state of the connection (`TCP_INFO`).
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
    /// `InvalidInput` if its value is out of range, `NotConnected` if the connection is over.
    pub fn set_option(&self, option: TcpOption) -> io::Result<()> {
        if matches!(option, TcpOption::AckEvents(true)) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "tasks do not receive events about acknowledged data",
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

    /// Disables Nagle's algorithm (`TCP_NODELAY`).
    ///
    /// # Errors
    /// As for [`set_option`](Self::set_option).
    pub fn set_nodelay(&self, on: bool) -> io::Result<()> {
        self.set_option(TcpOption::NoDelay(on))
    }

    /// Enables keepalive probes (`SO_KEEPALIVE`), the first after `idle` without data, in whole seconds;
    /// `None` disables them.
    ///
    /// # Errors
    /// As for [`set_option`](Self::set_option).
    pub fn set_keepalive(&self, idle: Option<Duration>) -> io::Result<()> {
        if let Some(idle) = idle {
            self.set_option(TcpOption::KeepIdle(idle))?;
        }
        self.set_option(TcpOption::KeepAlive(idle.is_some()))
    }

    /// Makes dropping the stream reset the connection (`SO_LINGER` with time 0).
    ///
    /// # Errors
    /// As for [`set_option`](Self::set_option).
    pub fn set_zero_linger(&self) -> io::Result<()> {
        self.set_option(TcpOption::LingerZero(true))
    }

    /// Sets the priority of its segments over those of other connections (`SO_PRIORITY`): 0 (the default) to
    /// 7, in the order of [`ginnel_stack::priority`].
    ///
    /// # Errors
    /// As for [`set_option`](Self::set_option).
    pub fn set_priority(&self, priority: u8) -> io::Result<()> {
        self.set_option(TcpOption::Priority(priority))
    }

    /// Splits into borrowed halves, for use at the same time inside one task.
    pub const fn split(&mut self) -> (ReadHalf<'_>, WriteHalf<'_>) {
        (ReadHalf(self), WriteHalf(self))
    }

    /// Splits into owned halves, for different tasks. Dropping the write half sends FIN.
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
            // The peer closed the connection right after it was established.
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
        // The connection is over, and the event that tells why is about to be delivered.
        Ok(0) if !socket.peer_fin => None,
        Ok(n) => Some(Ok(n)),
        Err(RecvError::WouldBlock) => None,
        Err(RecvError::Stale) => Some(Err(errors::not_connected())),
    }
}

fn recv_unordered(
    a: &mut Access<'_>,
    socket_id: u32,
    position: &mut StreamPosition,
    buffer: &mut [u8],
) -> Option<io::Result<ReceivedBytes>> {
    let socket = &a.state.net.sockets[socket_id];
    if socket.phase != ConnPhase::Closed
        && let Ok(Some(bytes)) = a.core.stack.recv_unordered(socket.conn, buffer)
    {
        let offset = position.on_unordered(bytes);
        return Some(Ok(ReceivedBytes { offset, len: bytes.len, is_early: true }));
    }
    // What is left of a connection that is over has no mark where bytes were taken.
    let max = position.until_early().map_or(buffer.len(), |max| buffer.len().min(max as usize));
    let received = recv(a, socket_id, &mut buffer[..max])?;
    Some(received.map(|len| ReceivedBytes { offset: position.on_data(len), len, is_early: false }))
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
        // Only an urgent byte may be left before the end, and it is not part of the stream.
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
    // After an urgent byte only the end of the stream may be left.
    socket.phase == ConnPhase::Closed || socket.peer_fin || a.core.stack.has_readable(socket.conn)
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
        // The connection is over, and the event that tells why is about to be delivered.
        Err(SendError::Closed) => None,
        Err(_) => Some(Err(errors::broken_pipe())),
    }
}

fn send_message(a: &mut Access<'_>, socket_id: u32, message: &[u8], priority: u8) -> Option<io::Result<()>> {
    let socket = &mut a.state.net.sockets[socket_id];
    if socket.phase == ConnPhase::Closed {
        return Some(Err(socket.error.take().map_or_else(errors::broken_pipe, io::Error::from)));
    }
    match a.core.stack.send_message(socket.conn, message, priority) {
        Ok(()) => Some(Ok(())),
        Err(SendError::Full) => {
            socket.send_buffer_full = true;
            None
        }
        Err(SendError::TooLong) => Some(Err(errors::message_too_long())),
        Err(_) if socket.write_shutdown => Some(Err(errors::broken_pipe())),
        // The connection is over, and the event that tells why is about to be delivered.
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
