//! What the operations of POSIX need beside what happened: how things stand, and what programs do rarely.

use super::{Client, Status};
use crate::channel::control::{Reply, Request, Reserved, Sharing};
use crate::error::Error;
use core::net::SocketAddr;
use core::sync::atomic::Ordering::Relaxed;
use ginnel_stack::error::Stale;
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::Conn;
use rustix::fd::{AsRawFd, RawFd};

impl Client {
    /// How things stand with a connection, without a question to the stack.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn status(&self, conn: Conn) -> Result<Status, Stale> {
        let mut status = self.hand(conn)?.status();
        if self.is_gone() {
            // Nobody writes it down any more.
            status.ended = status.ended.or(Some(CloseReason::Reset));
        }
        Ok(status)
    }

    /// Whether the stack's shard is at work at this moment, on another CPU than the caller: then news may come without sleeping.
    pub fn stack_works_elsewhere(&self) -> bool {
        let asleep = self.region.up(self.number).words.is_asleep();
        !asleep && self.region.cpu().is_none_or(|cpu| cpu != rustix::thread::sched_getcpu())
    }

    /// Descriptors that the channel needs.
    pub fn descriptors(&self) -> [RawFd; 3] {
        [self.region.file(), self.stack.as_fd(), self.wake.as_fd()].map(|fd| fd.as_raw_fd())
    }

    /// Bytes of a connection that may wait to be sent, in front of the engine's own buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.region.buffer_bytes()
    }

    /// Reports [`ClientEvent::Writable`](super::ClientEvent::Writable) as if a send had been cut short, and says whether there is room for so many bytes already.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn await_room(&mut self, conn: Conn, enough: usize) -> Result<bool, Stale> {
        let hand = self.hand(conn)?;
        self.blocked[conn.index() as usize].store(true, Relaxed);
        hand.await_room();
        Ok(hand.status().room >= enough)
    }

    /// Reserves an address for a socket that is going to listen or to connect; port 0 lets the stack choose one.
    ///
    /// # Errors
    /// Why not, or the shard is gone.
    pub fn reserve(&mut self, address: SocketAddr, sharing: Sharing) -> Result<Reserved, Error> {
        match self.ask(Request::Reserve(address, sharing))? {
            Reply::Reserve(Ok(reserved)) => Ok(reserved),
            Reply::Reserve(Err(error)) => Err(Error::Reserve(address, error)),
            _ => Err(super::mismatch()),
        }
    }

    /// Gives up a reservation.
    ///
    /// # Errors
    /// The shard is gone.
    pub fn unreserve(&mut self, reserved: Reserved) -> Result<(), Error> {
        self.ask(Request::Unreserve(reserved.number)).map(|_| ())
    }

    /// How many connections may wait at a listener. Afterwards as many of those that wait are offered as credits allow.
    ///
    /// # Errors
    /// The shard is gone.
    pub fn set_backlog(&mut self, listener: u32, backlog: u32) -> Result<(), Error> {
        self.ask(Request::Backlog(listener, backlog)).map(|_| ())
    }
}
