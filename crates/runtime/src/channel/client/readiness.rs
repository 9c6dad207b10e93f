//! What the operations of POSIX need beside what happened: how things stand, and what programs do rarely.

use super::{Client, RUNG, Standing, Status};
use crate::channel::control::{Reply, Request, Reserved, Sharing};
use crate::error::Error;
use crate::own_fd::OwnFd;
use core::net::SocketAddr;
use core::sync::atomic::Ordering::Relaxed;
use core::time::Duration;
use ginnel_stack::error::Stale;
use ginnel_stack::handle::Conn;
use ginnel_stack::options::SocketOptions;

impl Client {
    /// How things stand with a connection, without a question to the stack.
    ///
    /// # Errors
    /// The handle is stale.
    #[inline(always)]
    pub fn status(&self, conn: Conn) -> Result<Status, Stale> {
        let hand = self.hand(conn)?;
        Ok(hand.status(self.as_is(hand.standing())))
    }

    /// The same but for its bytes.
    ///
    /// # Errors
    /// The handle is stale.
    #[inline]
    pub fn standing(&self, conn: Conn) -> Result<Standing, Stale> {
        self.held(conn)?;
        Ok(self.as_is(Standing::of(self.region.socket(conn.index()))))
    }

    /// What the stack has written down, unless it is gone.
    #[inline]
    pub(super) fn as_is(&self, written: Standing) -> Standing {
        if self.is_gone() { written.lost() } else { written }
    }

    /// The bytes of a connection of which the rest is known.
    ///
    /// # Errors
    /// The handle is stale.
    #[inline]
    pub fn status_beside(&self, conn: Conn, standing: Standing) -> Result<Status, Stale> {
        Ok(self.hand(conn)?.status(standing))
    }

    /// Whether the stack's shard is at work at this moment, on another CPU than the caller: then news may come without sleeping.
    pub fn stack_works_elsewhere(&self) -> bool {
        let asleep = self.region.up(self.number).words.is_asleep();
        !asleep && self.region.cpu().is_none_or(|cpu| cpu != rustix::thread::sched_getcpu())
    }

    /// Descriptors that the channel needs.
    pub fn own_fds(&self) -> [&OwnFd; 3] {
        [self.region.own(), self.stack.own(), self.wake.own()]
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
        self.blocked.of(conn.index()).store(true, Relaxed);
        hand.await_room();
        let there = hand.room() >= enough;
        if !there && hand.is_lent() {
            // The stack may take it out, and does so only for those who wait.
            self.ring(conn.index(), RUNG);
        }
        Ok(there)
    }

    /// Bytes of a connection that were written and have not left, at the most. Only after [`TcpOption::NotSentLowWater`](ginnel_stack::options::TcpOption::NotSentLowWater).
    ///
    /// # Errors
    /// The handle is stale.
    pub fn not_sent(&self, conn: Conn) -> Result<usize, Stale> {
        Ok(self.hand(conn)?.not_sent())
    }

    /// Bytes that were ever written on a connection.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn written(&self, conn: Conn) -> Result<u64, Stale> {
        Ok(self.hand(conn)?.written())
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

    /// Connections at a listener are offered when they have brought something, or so much time is over; 0 for at once, as at first. It holds for those that come from now on.
    ///
    /// # Errors
    /// The shard is gone.
    pub fn defer(&mut self, listener: u32, time: Duration) -> Result<(), Error> {
        self.ask(Request::Defer(listener, time)).map(|_| ())
    }

    /// Connections that come to a listener from now on begin with these options.
    ///
    /// # Errors
    /// The shard is gone.
    pub fn amend(&mut self, listener: u32, options: SocketOptions) -> Result<(), Error> {
        self.ask(Request::Amend(listener, options)).map(|_| ())
    }

    /// The headers of the SYN that began a connection, if its listener was to keep them; empty if there are none. If `room` is enough for them, they
    /// are there no more afterwards.
    ///
    /// # Errors
    /// The handle is stale, or the shard gone.
    pub fn saved_syn(&mut self, conn: Conn, room: usize) -> Result<Vec<u8>, Stale> {
        self.held(conn)?;
        match self.ask(Request::SavedSyn(conn.index(), u32::try_from(room).unwrap_or(u32::MAX))) {
            Ok(Reply::SavedSyn(bytes)) => Ok(bytes),
            _ => Err(Stale::Handle),
        }
    }

    /// As many of the connections that wait are offered as credits allow when this returns.
    ///
    /// # Errors
    /// The shard is gone.
    pub fn ask_for_offers(&mut self) -> Result<(), Error> {
        self.ask(Request::Offer).map(|_| ())
    }

    /// How many connections may wait at a listener. Afterwards as many of those that wait are offered as credits allow.
    ///
    /// # Errors
    /// The shard is gone.
    pub fn set_backlog(&mut self, listener: u32, backlog: u32) -> Result<(), Error> {
        self.ask(Request::Backlog(listener, backlog)).map(|_| ())
    }
}
