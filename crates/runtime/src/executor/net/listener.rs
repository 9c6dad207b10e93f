//! TCP listeners.

use super::addr::ToSocketAddr;
use super::errors;
use super::state::{ConnPhase, DroppedHandle, ListenerState};
use super::stream::TcpStream;
use crate::executor::local::{self, Access, Attempt, WaitRegistration};
use crate::executor::state::WaitTarget;
use crate::executor::waiters::Waiters;
use core::marker::PhantomData;
use core::net::SocketAddr;
use core::task::{Context, Poll};
use ginnel_stack::error::ListenError;
use ginnel_stack::options::{ListenOptions, SocketOptions};
use std::io;

/// Ports for a listener on port 0: Linux's default range of ephemeral ports.
const EPHEMERAL_PORTS: core::ops::RangeInclusive<u16> = 32_768..=60_999;

/// A TCP socket that accepts connections.
///
/// Connections wait in the backlog until they are accepted. If the backlog is full, clients have to retry, as
/// on Linux. Dropping the listener closes it: connections in the backlog are reset, accepted ones continue.
#[derive(Debug)]
pub struct TcpListener {
    listener: u32,
    executor: u32,
    _not_send: PhantomData<*const ()>,
}

impl TcpListener {
    /// Listens on an address. The unspecified address stands for all addresses of the shard, port 0 for any
    /// free port.
    ///
    /// Nagle's algorithm applies to accepted connections until [`TcpStream::set_nodelay`], or unless
    /// [`bind_with`](Self::bind_with) disables it.
    ///
    /// # Errors
    /// `AddrInUse`, `AddrNotAvailable`, `ENFILE` at the limit of listeners, and an error outside of a shard's
    /// task.
    pub async fn bind(address: impl ToSocketAddr) -> io::Result<Self> {
        Self::bind_with(address, ListenOptions::default()).await
    }

    /// As [`bind`](Self::bind), with options.
    ///
    /// # Errors
    /// As [`bind`](Self::bind), and `InvalidInput` if an option is out of range.
    pub async fn bind_with(address: impl ToSocketAddr, options: ListenOptions) -> io::Result<Self> {
        let address = address.to_socket_addr()?;
        // Tasks have no use for events about acknowledged data.
        let socket = SocketOptions { ack_events: false, ..options.socket };
        let options = ListenOptions { socket, ..options };
        let executor = local::current_or_error()?;
        let listener = local::access(executor, |a| listen(a, address, options))??;
        Ok(Self { listener, executor, _not_send: PhantomData })
    }

    /// Waits for a connection and accepts it. Any number of tasks may wait.
    ///
    /// Dropping the future loses nothing: a connection that has arrived is accepted by the next call.
    ///
    /// # Errors
    /// `ConnectionAborted` after an administrator has closed the listener (`ginnel ss -K`), and an error if
    /// the listener belongs to another shard.
    pub fn accept(&self) -> impl Future<Output = io::Result<(TcpStream, SocketAddr)>> {
        Attempt::new(self.executor, WaitTarget::Accept(self.listener), |a| accept(a, self.listener))
    }

    /// As [`accept`](Self::accept), as a `poll` function: the last task that called it is woken.
    ///
    /// # Errors
    /// As for [`accept`](Self::accept).
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(TcpStream, SocketAddr)>> {
        let mut waiting = WaitRegistration::poll_function(self.executor, WaitTarget::Accept(self.listener));
        waiting.poll(cx, |a| accept(a, self.listener))
    }

    /// Returns all connections, one after the other.
    pub fn incoming(&self) -> Incoming<'_> {
        Incoming { listener: self }
    }

    /// Returns the address that it listens on.
    ///
    /// # Errors
    /// Only if the listener belongs to another shard.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        local::access(self.executor, |a| a.state.net.listeners[self.listener].local)
    }
}

/// See [`TcpListener::incoming`]. With the feature `futures` it is a `Stream`.
#[derive(Debug)]
pub struct Incoming<'a> {
    listener: &'a TcpListener,
}

impl Incoming<'_> {
    /// Waits for the next connection. Never returns `None`; the type is that of `Stream`'s method of this
    /// name.
    ///
    /// # Errors
    /// As for [`TcpListener::accept`].
    pub async fn next(&mut self) -> Option<io::Result<TcpStream>> {
        Some(self.listener.accept().await.map(|(stream, _)| stream))
    }

    /// As [`next`](Self::next), as a `poll` function.
    ///
    /// # Errors
    /// As for [`TcpListener::accept`].
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<TcpStream>>> {
        self.listener.poll_accept(cx).map_ok(|(stream, _)| stream).map(Some)
    }
}

fn listen(a: &mut Access<'_>, address: SocketAddr, options: ListenOptions) -> io::Result<u32> {
    let mut local = address;
    let count = u64::from(EPHEMERAL_PORTS.end() - EPHEMERAL_PORTS.start()) + 1;
    let start = a.core.rng.next_u64() % count;
    let mut result = Err(ListenError::AddressInUse);
    for offset in 0..if address.port() == 0 { count } else { 1 } {
        if address.port() == 0 {
            // Cannot truncate: the remainder is below the number of ports.
            local.set_port(EPHEMERAL_PORTS.start() + ((start + offset) % count) as u16);
        }
        // A port that was chosen here is not shared with other shards.
        result = match address.port() {
            0 => a.core.listen_exclusive(local, options),
            _ => a.core.listen(local, options),
        };
        if result != Err(ListenError::AddressInUse) {
            break;
        }
    }
    let listener = result.map_err(errors::listen)?;
    let net = &mut a.state.net;
    let listener_id =
        net.listeners.insert(ListenerState { listener, local, waiters: Waiters::NONE, is_destroyed: false });
    net.listener_numbers.insert(listener, listener_id);
    Ok(listener_id)
}

fn accept(a: &mut Access<'_>, listener: u32) -> Option<io::Result<(TcpStream, SocketAddr)>> {
    let ListenerState { listener, is_destroyed, .. } = a.state.net.listeners[listener];
    if is_destroyed {
        return Some(Err(errors::destroyed()));
    }
    let conn = a.core.stack.accept(listener)?;
    // The engine knows the endpoints of a connection that was just accepted, even if it is over already.
    let [_, peer] = a.core.stack.endpoints(conn)?;
    let socket = a.state.net.add(a.core, conn, ConnPhase::Open);
    Some(Ok((TcpStream::new(socket, a.executor), peer)))
}

impl Drop for TcpListener {
    fn drop(&mut self) {
        local::release(self.executor, |state, core| {
            let Some(listener) = state.net.listeners.remove(self.listener) else { return };
            state.net.listener_numbers.remove(&listener.listener);
            state.wait_lists.forget(listener.waiters);
            let dropped = DroppedHandle::Listener(listener.listener);
            match core {
                Some(core) => dropped.close(core),
                None => state.net.dropped.push(dropped),
            }
        });
    }
}
