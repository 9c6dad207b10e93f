//! Connections that the stack offers (docs/adr/0013-accept-credits.md): taken at once, or by hand, in the order in which they were offered.

use super::{Client, ClientEvent, Held};
use crate::channel::bells::RUNG;
use crate::channel::places;
use crate::channel::region::{LISTENERS_MAX, OFFERS_MAX};
use crate::channel::socket::{Offer, state};
use crate::channel::sync::Ordering;
use ginnel_stack::handle::Conn;
use std::collections::VecDeque;

/// What is offered to a client that accepts by hand.
pub(super) struct Offers {
    /// What stood in the places when it was last reported.
    seen: [u64; OFFERS_MAX],
    /// By listener: places, oldest first. What stood there may have been taken back meanwhile.
    queues: Vec<VecDeque<usize>>,
}

impl Offers {
    /// These were the parent's: a child has places of its own. What is not written stays the parent's memory.
    pub fn forget(&mut self) {
        self.seen.iter_mut().filter(|seen| **seen != 0).for_each(|seen| *seen = 0);
        self.queues.iter_mut().filter(|queue| !queue.is_empty()).for_each(VecDeque::clear);
    }
}

impl Client {
    /// From now on connections are not taken as soon as they are offered, but by [`Client::accept`]. What is offered is reported once.
    pub fn accept_by_hand(&mut self) {
        let queues = (0..LISTENERS_MAX).map(|_| VecDeque::new()).collect();
        self.by_hand = Some(Box::new(Offers { seen: [0; OFFERS_MAX], queues }));
    }

    /// A bell rang for a socket that this client does not hold: it may be offered. Then it is taken, or reported.
    pub(super) fn look_for_offer(&mut self, socket: u32) {
        // Another process of the domain may have written any number there.
        let place = self.region.socket(socket).offer_place.load(Ordering::Acquire) as usize;
        let Some(word) = self.region.offers(self.number).get(place) else { return };
        let bits = word.load(Ordering::Acquire);
        let Offer::Offered { listener, socket: of } = Offer::from_bits(bits) else { return };
        if of != socket {
            return;
        }
        let Some(offers) = &mut self.by_hand else {
            if let Some(conn) = self.take_offer(place, bits) {
                self.events.push_back(ClientEvent::Accepted { conn, listener: listener.into() });
                self.look(conn);
            }
            return;
        };
        if core::mem::replace(&mut offers.seen[place], bits) != bits
            && let Some(queue) = offers.queues.get_mut(usize::from(listener))
        {
            queue.push_back(place);
            self.events.push_back(ClientEvent::Offered { listener: listener.into() });
        }
    }

    /// Takes the connection that is offered in a place; `None` if the stack took it back meanwhile.
    fn take_offer(&mut self, place: usize, bits: u64) -> Option<Conn> {
        let Offer::Offered { listener, socket } = Offer::from_bits(bits) else { return None };
        if !places::take(&self.region.offers(self.number)[place], listener, socket) {
            return None;
        }
        // Another process of the domain may have written any number there.
        if socket as usize >= self.sockets_max() {
            return None;
        }
        let generation = self.region.socket(socket).generation.load(Ordering::Relaxed);
        *self.known(socket)? =
            Held { generation: Some(generation), reported: state::CONNECTED, ..Held::default() };
        self.blocked.clear(socket);
        self.ring(socket, RUNG);
        Some(Conn::new(socket, generation))
    }

    /// The oldest offer of a listener that still stands, and its place.
    fn oldest(&mut self, listener: u32) -> Option<(usize, u64)> {
        let offers = self.by_hand.as_mut()?;
        let queue = offers.queues.get_mut(listener as usize)?;
        loop {
            let place = *queue.front()?;
            let bits = self.region.offers(self.number)[place].load(Ordering::Acquire);
            if matches!(Offer::from_bits(bits), Offer::Offered { listener: of, .. } if u32::from(of) == listener)
            {
                return Some((place, bits));
            }
            // Taken back. If it is offered again, that is news.
            queue.pop_front();
            offers.seen[place] = 0;
        }
    }

    /// Whether a connection to a listener could be accepted now.
    pub fn is_offered(&mut self, listener: u32) -> bool {
        self.oldest(listener).is_some()
    }

    /// Takes the connection that was offered first. What happened to it meanwhile is reported after it.
    pub fn accept(&mut self, listener: u32) -> Option<Conn> {
        loop {
            let Some((place, bits)) = self.oldest(listener) else {
                self.wake_up();
                return None;
            };
            let conn = self.take_offer(place, bits);
            if let Some(offers) = &mut self.by_hand {
                offers.seen[place] = 0;
                offers.queues[listener as usize].pop_front();
            }
            if let Some(conn) = conn {
                self.look(conn);
                return Some(conn);
            }
        }
    }
}
