//! The streams of a process, for all its threads. Each socket has a lock, while one thread processes the
//! events.

use super::super::client_memory::ClientMemory;
use super::super::doorbells::{NOTIFIED, Notifier};
use super::super::region::Region;
use super::super::socket::request;
use super::super::socket_ref::{SocketRef, SocketStatus};
use super::super::sync::Ordering;
use super::needs_wakeup;
use super::send_blocked::SendBlockedFlags;
use crate::wait::EventFd;
use core::net::SocketAddr;
use core::sync::atomic::AtomicBool;
use ginnel_stack::error::{RecvError, SendError, Stale};
use ginnel_stack::handle::Conn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Reads and writes connections that its [`Client`](super::Client) owns, from any thread. No call waits for
/// the network, and none allocates memory except the first write on one of many sockets. System calls are
/// made only to wake a sleeper, and to wait for a lock.
pub struct SharedStreams {
    pub(super) region: Arc<Region>,
    memory: Arc<ClientMemory>,
    pub(super) client: usize,
    notifier: Mutex<Notifier>,
    stack_wake: Arc<EventFd>,
    /// Sockets on which a write was short.
    pub(super) blocked: Arc<SendBlockedFlags>,
    /// The stack's process is gone.
    pub(super) is_stack_gone: AtomicBool,
}

impl SharedStreams {
    pub(super) fn new(
        region: Arc<Region>,
        memory: Arc<ClientMemory>,
        client: usize,
        stack_wake: Arc<EventFd>,
        blocked: Arc<SendBlockedFlags>,
    ) -> Self {
        let notifier = Mutex::new(memory.to_stack().notifier());
        Self { region, memory, client, notifier, stack_wake, blocked, is_stack_gone: AtomicBool::new(false) }
    }

    fn notifier(&self) -> MutexGuard<'_, Notifier> {
        // The ring is consistent after each step, whatever a thread that panicked was doing.
        self.notifier.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(super) fn notify(&self, number: u32, reasons: u8) {
        self.notifier().notify(self.memory.to_stack(), number, reasons);
        self.region.notified().insert(self.client);
    }

    /// Wakes the stack if it sleeps. Call this after each batch: until then the stack may sleep despite the
    /// notifications.
    #[inline]
    pub fn flush(&self) {
        if needs_wakeup(&self.region, &self.memory) {
            self.stack_wake.signal();
        }
    }

    fn socket_ref(&self, conn: Conn) -> Result<SocketRef<'_>, Stale> {
        let socket = conn.index();
        let is_valid = (socket as usize) < self.region.sockets()
            && self.region.socket(socket).generation.load(Ordering::Relaxed) == conn.generation();
        if is_valid {
            Ok(SocketRef::new(&self.region, socket, Some(self.client)))
        } else {
            Err(Stale::Handle)
        }
    }

    /// Returns the state of a connection and its buffers.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn status(&self, conn: Conn) -> Result<SocketStatus, Stale> {
        self.socket_ref(conn).map(|socket_ref| socket_ref.status(socket_ref.state()))
    }

    /// Returns the local and the peer's address.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn endpoints(&self, conn: Conn) -> Result<[SocketAddr; 2], Stale> {
        self.socket_ref(conn)?;
        Ok(self.region.socket(conn.index()).endpoints())
    }

    /// Copies received bytes without consuming them, as [`Client::peek`](super::Client::peek) does.
    ///
    /// # Errors
    /// Returns an error if the handle is stale, or if a process that shares the socket was stopped while it
    /// had the lock.
    pub fn peek(&self, conn: Conn, skip: usize, out: &mut [u8]) -> Result<usize, RecvError> {
        self.socket_ref(conn).map_err(|_| RecvError::Stale)?.peek(skip, out)
    }

    /// Reads and consumes received bytes. Returns `Ok(0)` if there are none.
    ///
    /// # Errors
    /// As [`SharedStreams::peek`].
    pub fn recv(&self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError> {
        let (count, must_notify) = self.socket_ref(conn).map_err(|_| RecvError::Stale)?.recv(out)?;
        if must_notify {
            self.notify(conn.index(), NOTIFIED);
        }
        Ok(count)
    }

    /// Consumes `count` received bytes, or fewer if fewer were received. Returns how many.
    ///
    /// # Errors
    /// As [`SharedStreams::peek`].
    pub fn consume(&self, conn: Conn, count: usize) -> Result<usize, RecvError> {
        let (count, must_notify) = self.socket_ref(conn).map_err(|_| RecvError::Stale)?.consume(count)?;
        if must_notify {
            self.notify(conn.index(), NOTIFIED);
        }
        Ok(count)
    }

    /// Writes as many bytes as there is space for, and returns how many. After a short write
    /// [`ClientEvent::Writable`](super::ClientEvent::Writable) follows.
    ///
    /// # Errors
    /// Returns an error if the handle is stale, the connection is closed, its write side is shut down, or the
    /// stack is gone, and [`SendError::Full`] if a process that shares the socket was stopped while it had
    /// the lock.
    pub fn send(&self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        if self.is_stack_gone.load(core::sync::atomic::Ordering::Relaxed) {
            return Err(SendError::Closed);
        }
        let socket_ref = self.socket_ref(conn).map_err(|_| SendError::Stale)?;
        let count = socket_ref.send(bytes, self.blocked.flag(conn.index()))?;
        // As in `Client::send`.
        if count > 0 || !bytes.is_empty() && socket_ref.has_loan() {
            self.notify(conn.index(), NOTIFIED);
        }
        Ok(count)
    }

    fn request(&self, conn: Conn, bits: u32) -> Result<(), Stale> {
        self.socket_ref(conn)?.request(bits);
        self.notify(conn.index(), NOTIFIED);
        Ok(())
    }

    /// Sends FIN after what was written; receiving continues.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn shutdown_write(&self, conn: Conn) -> Result<(), Stale> {
        self.request(conn, request::SHUTDOWN)
    }

    /// Closes both directions, for all owners, as [`Client::close`](super::Client::close) does.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn close(&self, conn: Conn) -> Result<(), Stale> {
        self.request(conn, request::CLOSE)
    }

    /// Resets the connection.
    ///
    /// # Errors
    /// Returns an error if the handle is stale.
    pub fn abort(&self, conn: Conn) -> Result<(), Stale> {
        self.request(conn, request::ABORT)
    }
}
