//! The streams of a process, for all its threads: each socket under its lock, while the events are one thread's business.

use super::super::doorbells::{NOTIFIED, Notifier};
use super::super::region::Region;
use super::super::socket::request;
use super::super::socket_ref::{SocketRef, SocketStatus};
use super::super::sync::Ordering;
use super::send_blocked::SendBlockedFlags;
use crate::wait::EventFd;
use core::net::SocketAddr;
use core::sync::atomic::AtomicBool;
use ginnel_stack::error::{RecvError, SendError, Stale};
use ginnel_stack::handle::Conn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Reads and writes connections that its [`Client`](super::Client) holds, from any thread. Nothing here waits for the network; no call takes memory but the first
/// write on one of many sockets, and a system call only wakes whoever sleeps.
pub struct SharedStreams {
    pub(super) region: Arc<Region>,
    pub(super) client: usize,
    notifier: Mutex<Notifier>,
    stack_wake: Arc<EventFd>,
    /// Sockets on which a write was cut short.
    pub(super) blocked: Arc<SendBlockedFlags>,
    /// The stack's process is gone.
    pub(super) is_stack_gone: AtomicBool,
}

impl SharedStreams {
    pub(super) fn new(
        region: Arc<Region>,
        client: usize,
        stack_wake: Arc<EventFd>,
        blocked: Arc<SendBlockedFlags>,
    ) -> Self {
        let notifier = Mutex::new(region.to_stack(client).notifier());
        Self { region, client, notifier, stack_wake, blocked, is_stack_gone: AtomicBool::new(false) }
    }

    fn notifier(&self) -> MutexGuard<'_, Notifier> {
        // Whatever a thread was doing, the ring is whole after each step.
        self.notifier.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(super) fn notify(&self, socket: u32, why: u8) {
        self.notifier().notify(self.region.to_stack(self.client), socket, why);
    }

    /// Tells the stack at once of what was done. To be called after each batch: until then the stack may sleep through it.
    #[inline]
    pub fn flush(&self) {
        // Whoever has rung asks for its own bells, so that nobody need wait for another here.
        if self.region.to_stack(self.client).needs_wakeup() {
            self.stack_wake.signal();
        }
    }

    /// A stack that left the CPU to this process goes on.
    pub(super) fn end_yield(&self) {
        if self.region.to_stack(self.client).ends_yield() {
            self.stack_wake.signal();
        }
    }

    fn socket_ref(&self, conn: Conn) -> Result<SocketRef<'_>, Stale> {
        let socket = conn.index();
        let there = (socket as usize) < self.region.sockets()
            && self.region.socket(socket).generation.load(Ordering::Relaxed) == conn.generation();
        if there { Ok(SocketRef::new(&self.region, socket, Some(self.client))) } else { Err(Stale::Handle) }
    }

    /// How a connection stands.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn status(&self, conn: Conn) -> Result<SocketStatus, Stale> {
        self.socket_ref(conn).map(|hand| hand.status(hand.state()))
    }

    /// Our end and the peer's.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn endpoints(&self, conn: Conn) -> Result<[SocketAddr; 2], Stale> {
        self.socket_ref(conn)?;
        Ok(self.region.socket(conn.index()).endpoints())
    }

    /// As [`Client::peek`](super::Client::peek).
    ///
    /// # Errors
    /// The handle is stale, or a process that shares it was stopped in the middle of using it.
    pub fn peek(&self, conn: Conn, skip: usize, out: &mut [u8]) -> Result<usize, RecvError> {
        self.socket_ref(conn).map_err(|_| RecvError::Stale)?.peek(skip, out)
    }

    /// Reads and takes what waits. `Ok(0)` if nothing does.
    ///
    /// # Errors
    /// As [`Streams::peek`].
    pub fn recv(&self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError> {
        let (count, ring) = self.socket_ref(conn).map_err(|_| RecvError::Stale)?.recv(out)?;
        if ring {
            self.notify(conn.index(), NOTIFIED);
        }
        Ok(count)
    }

    /// Takes up to `count` bytes off the front of what waits.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn consume(&self, conn: Conn, count: usize) -> Result<(), Stale> {
        if self.socket_ref(conn)?.consume(count) {
            self.notify(conn.index(), NOTIFIED);
        }
        Ok(())
    }

    /// Writes as many bytes as there is room for, and returns how many. If that is less than all,
    /// [`ClientEvent::Writable`](super::ClientEvent::Writable) follows.
    ///
    /// # Errors
    /// The handle is stale; the connection is over, its write side closed, or the stack gone. [`SendError::Full`]: a process that shares it was stopped
    /// in the middle of using it.
    pub fn send(&self, conn: Conn, bytes: &[u8]) -> Result<usize, SendError> {
        if self.is_stack_gone.load(core::sync::atomic::Ordering::Relaxed) {
            return Err(SendError::Closed);
        }
        let hand = self.socket_ref(conn).map_err(|_| SendError::Stale)?;
        let count = hand.send(bytes, self.blocked.flag(conn.index()))?;
        if count > 0 {
            self.notify(conn.index(), NOTIFIED);
        }
        Ok(count)
    }

    fn request(&self, conn: Conn, what: u32) -> Result<(), Stale> {
        self.socket_ref(conn)?.request(what);
        self.notify(conn.index(), NOTIFIED);
        Ok(())
    }

    /// FIN behind what was written; receiving goes on.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn shutdown_write(&self, conn: Conn) -> Result<(), Stale> {
        self.request(conn, request::SHUTDOWN)
    }

    /// Closes both directions, whoever else holds it: as [`Client::close`](super::Client::close).
    ///
    /// # Errors
    /// The handle is stale.
    pub fn close(&self, conn: Conn) -> Result<(), Stale> {
        self.request(conn, request::CLOSE)
    }

    /// Resets it.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn abort(&self, conn: Conn) -> Result<(), Stale> {
        self.request(conn, request::ABORT)
    }
}
