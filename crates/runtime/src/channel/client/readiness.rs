//! What the operations of POSIX need beside what happened: how things stand, and what programs do rarely.

use super::{Client, ClientEvent, Offer, Status};
use crate::channel::control::{Reply, Request, Reserved, Sharing};
use crate::channel::region::OFFERS_MAX;
use crate::channel::sync::Ordering;
use crate::error::Error;
use core::net::SocketAddr;
use core::sync::atomic::Ordering::Relaxed;
use ginnel_stack::error::Stale;
use ginnel_stack::handle::Conn;
use rustix::fd::{AsRawFd, RawFd};

impl Client {
    /// From now on connections are not taken as soon as they are offered, but by [`Client::accept`]. What is offered is reported once.
    pub fn accept_by_hand(&mut self) {
        self.by_hand = Some(Box::new([0; OFFERS_MAX]));
    }

    pub(super) fn report_offers(&mut self) {
        let Some(mut seen) = self.by_hand.take() else { return };
        for (seen, word) in seen.iter_mut().zip(self.region.offers(self.number)) {
            let bits = word.load(Ordering::Acquire);
            if core::mem::replace(seen, bits) != bits
                && let Offer::Offered { listener, .. } = Offer::from_bits(bits)
            {
                self.events.push_back(ClientEvent::Offered { listener: listener.into() });
            }
        }
        self.by_hand = Some(seen);
    }

    /// Whether a connection to a listener could be accepted now.
    pub fn is_offered(&self, listener: u32) -> bool {
        self.offers_of(listener).next().is_some()
    }

    fn offers_of(&self, listener: u32) -> impl Iterator<Item = (usize, u64)> + '_ {
        let words = self.region.offers(self.number).iter().enumerate();
        words.map(|(place, word)| (place, word.load(Ordering::Acquire))).filter(
            move |(_, bits)| matches!(Offer::from_bits(*bits), Offer::Offered { listener: of, .. } if u32::from(of) == listener),
        )
    }

    /// Takes a connection that is offered. What happened to it meanwhile is reported after it.
    pub fn accept(&mut self, listener: u32) -> Option<Conn> {
        loop {
            let (place, bits) = self.offers_of(listener).next()?;
            if let Some(conn) = self.take_offer(place, bits) {
                if let Some(seen) = &mut self.by_hand {
                    seen[place] = 0;
                }
                self.look(conn.index());
                return Some(conn);
            }
        }
    }

    /// How things stand with a connection, without a question to the stack.
    ///
    /// # Errors
    /// The handle is stale.
    pub fn status(&self, conn: Conn) -> Result<Status, Stale> {
        self.hand(conn).map(|hand| hand.status())
    }

    /// Descriptors that the channel needs.
    pub fn descriptors(&self) -> [RawFd; 3] {
        [self.region.file(), self.stack.as_fd(), self.wake.as_fd()].map(|fd| fd.as_raw_fd())
    }

    /// Bytes of a connection that may wait to be sent, in front of the engine's own buffer.
    pub fn buffer_bytes(&self) -> usize {
        self.region.buffer_bytes()
    }

    /// Reports [`ClientEvent::Writable`] as if a send had been cut short, and says whether there is room for so many bytes already.
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

    /// How many connections may wait at a listener.
    ///
    /// # Errors
    /// The shard is gone.
    pub fn set_backlog(&mut self, listener: u32, backlog: u32) -> Result<(), Error> {
        self.ask(Request::Backlog(listener, backlog)).map(|_| ())
    }
}
