//! What the operations of POSIX need beside what happened: how things stand, and what programs do rarely.

use super::{Client, NOTIFIED, SocketState, SocketStatus};
use crate::channel::control::{AddressSharing, ChannelReply, ChannelRequest, Reservation};
use crate::error::Error;
use crate::internal_fd::InternalFd;
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
    pub fn status(&self, conn: Conn) -> Result<SocketStatus, Stale> {
        let hand = self.socket_ref(conn)?;
        Ok(hand.status(self.with_stack_liveness(hand.state())))
    }

    /// The same but for its bytes.
    ///
    /// # Errors
    /// The handle is stale.
    #[inline]
    pub fn socket_state(&self, conn: Conn) -> Result<SocketState, Stale> {
        self.tracked(conn)?;
        Ok(self.with_stack_liveness(SocketState::load(self.region.socket(conn.index()))))
    }

    /// What the stack has written down, unless it is gone.
    #[inline]
    pub(super) fn with_stack_liveness(&self, written: SocketState) -> SocketState {
        if self.is_stack_gone() { written.with_stack_lost() } else { written }
    }

    /// The bytes of a connection of which the rest is known.
    ///
    /// # Errors
    /// The handle is stale.
    #[inline]
    pub fn status_with_state(&self, conn: Conn, standing: SocketState) -> Result<SocketStatus, Stale> {
        Ok(self.socket_ref(conn)?.status(standing))
    }

    /// Whether the stack's shard is at work at this moment, on another CPU than the caller: then news may come without sleeping.
    pub fn is_stack_running_elsewhere(&self) -> bool {
        let asleep = self.region.to_stack(self.number).words.is_asleep();
        !asleep && self.region.cpu().is_none_or(|cpu| cpu != rustix::thread::sched_getcpu())
    }

    /// Descriptors that the channel needs.
    pub fn internal_fds(&self) -> [&InternalFd; 3] {
        [self.region.internal_fd(), self.stack_wake.internal_fd(), self.wake.internal_fd()]
    }

    /// Bytes of a connection that may wait to be sent, in front of the engine's own buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.region.buffer_bytes()
    }

    /// Reports [`ClientEvent::Writable`](super::ClientEvent::Writable) as if a send had been cut short, and says whether there is room for so many bytes already.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn await_send_space(&mut self, conn: Conn, enough: usize) -> Result<bool, Stale> {
        let hand = self.socket_ref(conn)?;
        self.blocked.flag(conn.index()).store(true, Relaxed);
        hand.await_send_space();
        let there = hand.send_space() >= enough;
        if !there && hand.has_loan() {
            // The stack may take it out, and does so only for those who wait.
            self.notify(conn.index(), NOTIFIED);
        }
        Ok(there)
    }

    /// Bytes of a connection that were written and have not left, at the most. Only after [`TcpOption::NotSentLowWater`](ginnel_stack::options::TcpOption::NotSentLowWater).
    ///
    /// # Errors
    /// The handle is stale.
    pub fn not_sent(&self, conn: Conn) -> Result<usize, Stale> {
        Ok(self.socket_ref(conn)?.not_sent())
    }

    /// Bytes that were ever written on a connection.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn written(&self, conn: Conn) -> Result<u64, Stale> {
        Ok(self.socket_ref(conn)?.write_position())
    }

    /// Reserves an address for a socket that is going to listen or to connect; port 0 lets the stack choose one.
    ///
    /// # Errors
    /// Why not, or the shard is gone.
    pub fn reserve(&mut self, address: SocketAddr, sharing: AddressSharing) -> Result<Reservation, Error> {
        match self.call(ChannelRequest::Reserve(address, sharing))? {
            ChannelReply::Reserve(Ok(reserved)) => Ok(reserved),
            ChannelReply::Reserve(Err(error)) => Err(Error::Reserve(address, error)),
            _ => Err(super::unexpected_reply()),
        }
    }

    /// Gives up a reservation.
    ///
    /// # Errors
    /// The shard is gone.
    pub fn unreserve(&mut self, reserved: Reservation) -> Result<(), Error> {
        self.call(ChannelRequest::Unreserve(reserved.number)).map(|_| ())
    }

    /// Connections at a listener are offered when they have brought something, or so much time is over; 0 for at once, as at first. It holds for those that come from now on.
    ///
    /// # Errors
    /// The shard is gone.
    pub fn set_defer_accept(&mut self, listener: u32, time: Duration) -> Result<(), Error> {
        self.call(ChannelRequest::DeferAccept(listener, time)).map(|_| ())
    }

    /// Connections that come to a listener from now on begin with these options.
    ///
    /// # Errors
    /// The shard is gone.
    pub fn set_listener_options(&mut self, listener: u32, options: SocketOptions) -> Result<(), Error> {
        self.call(ChannelRequest::SetListenerOptions(listener, options)).map(|_| ())
    }

    /// The headers of the SYN that began a connection, if its listener was to keep them; empty if there are none. If `room` is enough for them, they
    /// are there no more afterwards.
    ///
    /// # Errors
    /// The handle is stale, or the shard gone.
    pub fn saved_syn(&mut self, conn: Conn, room: usize) -> Result<Vec<u8>, Stale> {
        self.tracked(conn)?;
        match self.call(ChannelRequest::SavedSyn(conn.index(), u32::try_from(room).unwrap_or(u32::MAX))) {
            Ok(ChannelReply::SavedSyn(bytes)) => Ok(bytes),
            _ => Err(Stale::Handle),
        }
    }

    /// As many of the connections that wait are offered as credits allow when this returns.
    ///
    /// # Errors
    /// The shard is gone.
    pub fn request_offers(&mut self) -> Result<(), Error> {
        self.call(ChannelRequest::OfferPending).map(|_| ())
    }

    /// How many connections may wait at a listener. Afterwards as many of those that wait are offered as credits allow.
    ///
    /// # Errors
    /// The shard is gone.
    pub fn set_backlog(&mut self, listener: u32, backlog: u32) -> Result<(), Error> {
        self.call(ChannelRequest::SetBacklog(listener, backlog)).map(|_| ())
    }
}
