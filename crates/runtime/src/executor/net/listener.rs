//! Listening.

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

/// Ports that a listener on port 0 is given, as Linux's default range for clients.
const EPHEMERAL_PORTS: core::ops::RangeInclusive<u16> = 32_768..=60_999;

/// A TCP socket that takes connections.
///
/// Connections that nobody accepts wait in the backlog, and beyond it clients are held back as by Linux. Dropping the listener closes it:
/// connections that nobody accepted are reset, accepted ones go on.
#[derive(Debug)]
pub struct TcpListener {
    listener: u32,
    executor: u32,
    _not_send: PhantomData<*const ()>,
}

impl TcpListener {
    /// Listens on an address; an unspecified one stands for all of the shard's, port 0 for any free one.
    ///
    /// Small segments of accepted connections leave at once only after [`TcpStream::set_nodelay`], or with
    /// [`bind_with`](Self::bind_with).
    ///
    /// # Errors
    /// `AddrInUse`, `AddrNotAvailable`, `ENFILE` if there are as many listeners as there may be, and an error outside of a shard's task.
    pub async fn bind(address: impl ToSocketAddr) -> io::Result<Self> {
        Self::bind_with(address, ListenOptions::default()).await
    }

    /// The same with options.
    ///
    /// # Errors
    /// The same, and `InvalidInput` if an option is out of range.
    pub async fn bind_with(address: impl ToSocketAddr, options: ListenOptions) -> io::Result<Self> {
        let address = address.to_socket_addr()?;
        // Acknowledged bytes are of no use to tasks.
        let socket = SocketOptions { ack_events: false, ..options.socket };
        let options = ListenOptions { socket, ..options };
        let executor = local::current_or_error()?;
        let listener = local::access(executor, |a| listen(a, address, options))??;
        Ok(Self { listener, executor, _not_send: PhantomData })
    }

    /// Waits for a connection and takes it. Any number of tasks may wait.
    ///
    /// Nothing is lost if the future is dropped: a connection that is there then is for the next one.
    ///
    /// # Errors
    /// Only if the listener belongs to another shard.
    pub fn accept(&self) -> impl Future<Output = io::Result<(TcpStream, SocketAddr)>> {
        Attempt::new(self.executor, WaitTarget::Accept(self.listener), |a| accept(a, self.listener))
    }

    /// The same as a `poll` function. Of several tasks that use it only the last one is woken.
    ///
    /// # Errors
    /// As for [`accept`](Self::accept).
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(TcpStream, SocketAddr)>> {
        let mut waiting = WaitRegistration::poll_function(self.executor, WaitTarget::Accept(self.listener));
        waiting.poll(cx, |a| accept(a, self.listener))
    }

    /// All connections, one after the other.
    pub fn incoming(&self) -> Incoming<'_> {
        Incoming { listener: self }
    }

    /// The address it listens on.
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
    /// The next connection. Never `None`, but what the method of this name of a `Stream` returns.
    ///
    /// # Errors
    /// As for [`TcpListener::accept`].
    pub async fn next(&mut self) -> Option<io::Result<TcpStream>> {
        Some(self.listener.accept().await.map(|(stream, _)| stream))
    }

    /// The same as a `poll` function.
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
        // One that was chosen is not shared with other shards.
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
    let listener_id = net.listeners.insert(ListenerState { listener, local, waiters: Waiters::NONE });
    net.listener_numbers.insert(listener, listener_id);
    Ok(listener_id)
}

fn accept(a: &mut Access<'_>, listener: u32) -> Option<io::Result<(TcpStream, SocketAddr)>> {
    let listener = a.state.net.listeners[listener].listener;
    let conn = a.core.stack.accept(listener)?;
    // A connection that was accepted just now is known, were it over already.
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
