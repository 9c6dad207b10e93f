//! Connections that the stack offers (docs/adr/0013-accept-credits.md): taken at once, or by hand, in the order in which they were offered.

use super::{Client, ClientEvent, ClientSocket};
use crate::channel::doorbells::NOTIFIED;
use crate::channel::offer_slots;
use crate::channel::region::{LISTENERS_MAX, OFFERS_MAX};
use crate::channel::socket::{OfferSlot, state};
use crate::channel::sync::Ordering;
use ginnel_stack::handle::Conn;
use std::collections::VecDeque;

/// What is offered to a client that accepts by hand.
pub(super) struct ReceivedOffers {
    /// What stood in the places when it was last reported.
    seen: [u64; OFFERS_MAX],
    /// By listener: places, oldest first. What stood there may have been taken back meanwhile.
    queues: Vec<VecDeque<usize>>,
}

impl ReceivedOffers {
    /// These were the parent's: a child has places of its own. What is not written stays the parent's memory.
    pub fn clear(&mut self) {
        self.seen.iter_mut().filter(|seen| **seen != 0).for_each(|seen| *seen = 0);
        self.queues.iter_mut().filter(|queue| !queue.is_empty()).for_each(VecDeque::clear);
    }
}

impl Client {
    /// From now on connections are not taken as soon as they are offered, but by [`Client::accept`]. What is offered is reported once.
    pub fn accept_explicitly(&mut self) {
        let queues = (0..LISTENERS_MAX).map(|_| VecDeque::new()).collect();
        self.explicit_offers = Some(Box::new(ReceivedOffers { seen: [0; OFFERS_MAX], queues }));
    }

    /// A bell rang for a socket that this client does not hold: it may be offered. Then it is taken, or reported.
    pub(super) fn check_offer(&mut self, socket: u32) {
        // Another process of the domain may have written any number there.
        let place = self.region.socket(socket).offer_slot.load(Ordering::Acquire) as usize;
        let Some(word) = self.region.offers(self.number).get(place) else { return };
        let bits = word.load(Ordering::Acquire);
        let OfferSlot::Offered { listener, socket: of } = OfferSlot::from_bits(bits) else { return };
        if of != socket {
            return;
        }
        let Some(offers) = &mut self.explicit_offers else {
            if let Some(conn) = self.accept_offer(place, bits) {
                self.events.push_back(ClientEvent::Accepted { conn, listener: listener.into() });
                self.report_changes(conn);
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
    fn accept_offer(&mut self, place: usize, bits: u64) -> Option<Conn> {
        let OfferSlot::Offered { listener, socket } = OfferSlot::from_bits(bits) else { return None };
        if !offer_slots::accept(&self.region.offers(self.number)[place], listener, socket) {
            return None;
        }
        // Another process of the domain may have written any number there.
        if socket as usize >= self.sockets_max() {
            return None;
        }
        let generation = self.region.socket(socket).generation.load(Ordering::Relaxed);
        *self.socket_entry(socket)? = ClientSocket {
            generation: Some(generation),
            reported_state: state::CONNECTED,
            ..ClientSocket::default()
        };
        self.blocked.clear(socket);
        self.notify(socket, NOTIFIED);
        Some(Conn::new(socket, generation))
    }

    /// The oldest offer of a listener that still stands, and its place.
    fn oldest_offer(&mut self, listener: u32) -> Option<(usize, u64)> {
        let offers = self.explicit_offers.as_mut()?;
        let queue = offers.queues.get_mut(listener as usize)?;
        loop {
            let place = *queue.front()?;
            let bits = self.region.offers(self.number)[place].load(Ordering::Acquire);
            if matches!(OfferSlot::from_bits(bits), OfferSlot::Offered { listener: of, .. } if u32::from(of) == listener)
            {
                return Some((place, bits));
            }
            // Taken back. If it is offered again, that is news.
            queue.pop_front();
            offers.seen[place] = 0;
        }
    }

    /// Whether a connection to a listener could be accepted now.
    pub fn has_offer(&mut self, listener: u32) -> bool {
        self.oldest_offer(listener).is_some()
    }

    /// Takes the connection that was offered first. What happened to it meanwhile is reported after it.
    pub fn accept(&mut self, listener: u32) -> Option<Conn> {
        loop {
            let Some((place, bits)) = self.oldest_offer(listener) else {
                self.resume_offers();
                return None;
            };
            let conn = self.accept_offer(place, bits);
            if let Some(offers) = &mut self.explicit_offers {
                offers.seen[place] = 0;
                offers.queues[listener as usize].pop_front();
            }
            if let Some(conn) = conn {
                self.report_changes(conn);
                return Some(conn);
            }
        }
    }
}
