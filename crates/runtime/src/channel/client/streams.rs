//! The streams of a process, for all its threads: each socket under its lock, while the events are one thread's business.

use super::super::bells::{RUNG, Ringer};
use super::super::hand::{Hand, Status};
use super::super::region::Region;
use super::super::socket::request;
use super::super::sync::Ordering;
use super::blocked::Blocked;
use crate::wait::EventFd;
use core::net::SocketAddr;
use core::sync::atomic::AtomicBool;
use ginnel_stack::error::{RecvError, SendError, Stale};
use ginnel_stack::handle::Conn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Reads and writes connections that its [`Client`](super::Client) holds, from any thread. Nothing here waits for the network; no call takes memory but the first
/// write on one of many sockets, and a system call only wakes whoever sleeps.
pub struct Streams {
    pub(super) region: Arc<Region>,
    pub(super) number: usize,
    bells: Mutex<Ringer>,
    stack: Arc<EventFd>,
    /// Sockets on which a write was cut short.
    pub(super) blocked: Arc<Blocked>,
    /// The stack's process is gone.
    pub(super) gone: AtomicBool,
}

impl Streams {
    pub(super) fn new(
        region: Arc<Region>,
        number: usize,
        stack: Arc<EventFd>,
        blocked: Arc<Blocked>,
    ) -> Self {
        let bells = Mutex::new(region.up(number).ringer());
        Self { region, number, bells, stack, blocked, gone: AtomicBool::new(false) }
    }

    fn bells(&self) -> MutexGuard<'_, Ringer> {
        // Whatever a thread was doing, the ring is whole after each step.
        self.bells.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(super) fn ring(&self, socket: u32, why: u8) {
        self.bells().ring(self.region.up(self.number), socket, why);
    }

    /// Tells the stack at once of what was done. To be called after each batch: until then the stack may sleep through it.
    #[inline]
    pub fn flush(&self) {
        // Whoever has rung asks for its own bells, so that nobody need wait for another here.
        if self.region.up(self.number).must_wake() {
            self.stack.signal();
        }
    }

    /// A stack that left the CPU to this process goes on.
    pub(super) fn end_turn(&self) {
        if self.region.up(self.number).ends_turn() {
            self.stack.signal();
        }
    }

    fn hand(&self, conn: Conn) -> Result<Hand<'_>, Stale> {
        let socket = conn.index();
        let there = (socket as usize) < self.region.sockets()
            && self.region.socket(socket).generation.load(Ordering::Relaxed) == conn.generation();
        if there { Ok(Hand::new(&self.region, socket, Some(self.number))) } else { Err(Stale::Handle) }
    }

    /// How a connection stands.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn status(&self, conn: Conn) -> Result<Status, Stale> {
        self.hand(conn).map(|hand| hand.status(hand.standing()))
    }

    /// Our end and the peer's.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn ends(&self, conn: Conn) -> Result<[SocketAddr; 2], Stale> {
        self.hand(conn)?;
        Ok(self.region.socket(conn.index()).ends())
    }

    /// As [`Client::peek`](super::Client::peek).
    ///
    /// # Errors
    /// The handle is stale, or a process that shares it was stopped in the middle of using it.
    pub fn peek(&self, conn: Conn, skip: usize, out: &mut [u8]) -> Result<usize, RecvError> {
        self.hand(conn).map_err(|_| RecvError::Stale)?.peek(skip, out)
    }

    /// Reads and takes what waits. `Ok(0)` if nothing does.
    ///
    /// # Errors
    /// As [`Streams::peek`].
    pub fn recv(&self, conn: Conn, out: &mut [u8]) -> Result<usize, RecvError> {
        let (count, ring) = self.hand(conn).map_err(|_| RecvError::Stale)?.recv(out)?;
        if ring {
            self.ring(conn.index(), RUNG);
        }
        Ok(count)
    }

    /// Takes up to `count` bytes off the front of what waits.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn consume(&self, conn: Conn, count: usize) -> Result<(), Stale> {
        if self.hand(conn)?.consume(count) {
            self.ring(conn.index(), RUNG);
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
        if self.gone.load(core::sync::atomic::Ordering::Relaxed) {
            return Err(SendError::Closed);
        }
        let hand = self.hand(conn).map_err(|_| SendError::Stale)?;
        let count = hand.send(bytes, self.blocked.of(conn.index()))?;
        if count > 0 {
            self.ring(conn.index(), RUNG);
        }
        Ok(count)
    }

    fn request(&self, conn: Conn, what: u32) -> Result<(), Stale> {
        self.hand(conn)?.request(what);
        self.ring(conn.index(), RUNG);
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
