//! Connections that the stack offers (docs/adr/0013-accept-credits.md). They are accepted at once, or
//! explicitly in the order in which they were offered; with priorities, those of a high class first.

use super::{Client, ClientEvent, ClientSocket};
use crate::channel::client_memory::OFFERS_MAX;
use crate::channel::control::ChannelRequest;
use crate::channel::data_class;
use crate::channel::doorbells::NOTIFIED;
use crate::channel::offer_slots;
use crate::channel::region::{Direction, Region};
use crate::channel::socket::{OfferSlot, state};
use crate::channel::sync::Ordering;
use ginnel_stack::handle::Conn;
use ginnel_stack::priority::{self, CLASSES, ClassScheduler, ClassSet};
use std::collections::VecDeque;

/// Offers to a client that accepts explicitly.
pub(super) struct ReceivedOffers {
    /// Content of each slot when it was last reported.
    seen: [u64; OFFERS_MAX],
    /// For each listener up to the last one that had an offer, the slots of its offers, oldest first. An
    /// offer may have been revoked since.
    queues: Vec<VecDeque<usize>>,
    /// Gives lower classes of priority their share of the accepted connections, if the stack has priorities.
    scheduler: Option<ClassScheduler>,
}

impl ReceivedOffers {
    /// Forgets the offers of the parent: a forked child has slots of its own. Does not write unchanged words,
    /// whose pages stay shared with the parent.
    pub fn clear(&mut self) {
        self.seen.iter_mut().filter(|seen| **seen != 0).for_each(|seen| *seen = 0);
        self.queues.iter_mut().filter(|queue| !queue.is_empty()).for_each(VecDeque::clear);
    }
}

impl Client {
    /// Makes offered connections wait until [`Client::accept`] accepts them. Each offer is reported once.
    pub fn accept_explicitly(&mut self) {
        self.explicit_offers =
            Some(Box::new(ReceivedOffers { seen: [0; OFFERS_MAX], queues: Vec::new(), scheduler: None }));
    }

    /// Handles a notification of a socket that this client does not own: if the socket is offered, the offer
    /// is accepted or reported. Returns the event; others, which come after it, are queued.
    #[inline(always)]
    pub(super) fn check_offer(&mut self, socket: u32) -> Option<ClientEvent> {
        // Another process of the domain may have written any number there.
        let slot = self.region.socket(socket).offer_slot.load(Ordering::Acquire) as usize;
        let bits = self.memory.offers().get(slot)?.load(Ordering::Acquire);
        let OfferSlot::Offered { listener, socket: of } = OfferSlot::from_bits(bits) else { return None };
        if of != socket {
            return None;
        }
        let Some(offers) = &mut self.explicit_offers else {
            let conn = self.accept_offer(slot, bits)?;
            self.report_changes(conn);
            return Some(ClientEvent::Accepted { conn, listener: listener.into() });
        };
        let index = usize::from(listener);
        if core::mem::replace(&mut offers.seen[slot], bits) == bits || index >= self.region.listeners() {
            return None;
        }
        if index >= offers.queues.len() {
            offers.queues.resize_with(index + 1, VecDeque::new);
        }
        offers.queues[index].push_back(slot);
        Some(ClientEvent::Offered { listener: listener.into() })
    }

    /// Accepts the connection offered in a slot; `None` if the stack has revoked the offer meanwhile.
    fn accept_offer(&mut self, slot: usize, bits: u64) -> Option<Conn> {
        let OfferSlot::Offered { listener, socket } = OfferSlot::from_bits(bits) else { return None };
        if !offer_slots::accept(&self.memory.offers()[slot], listener, socket) {
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

    /// Returns the oldest offer of a listener that is still valid, and its slot.
    fn oldest_offer(&mut self, listener: u32) -> Option<(usize, u64)> {
        let offers = self.explicit_offers.as_mut()?;
        let queue = offers.queues.get_mut(listener as usize)?;
        loop {
            let slot = *queue.front()?;
            let bits = self.memory.offers()[slot].load(Ordering::Acquire);
            let offer = OfferSlot::from_bits(bits);
            if matches!(offer, OfferSlot::Offered { listener: of, .. } if u32::from(of) == listener) {
                return Some((slot, bits));
            }
            // The offer was revoked. If the connection is offered again, that is a new offer.
            queue.pop_front();
            offers.seen[slot] = 0;
        }
    }

    /// Returns the next offer of a listener that is still valid, its slot, and its index among the listener's
    /// offers: the oldest one or, if the stack has priorities, the oldest one of the class whose turn it is.
    fn next_offer(&mut self, listener: u32) -> Option<(usize, u64, usize)> {
        let (slot, bits) = self.oldest_offer(listener)?;
        match priority::COMPILED && self.prioritized.is_some() {
            // An entry that is not valid must be taken, too, so that it does not stay.
            true => self.next_offer_by_class(listener).or(Some((slot, bits, 0))),
            false => Some((slot, bits, 0)),
        }
    }

    #[cold]
    fn next_offer_by_class(&mut self, listener: u32) -> Option<(usize, u64, usize)> {
        let share = self.lower_share_percent().unwrap_or(0);
        let Self { explicit_offers, memory, region, .. } = self;
        let offers = explicit_offers.as_mut()?;
        let mut first = [None; CLASSES];
        for (index, slot) in offers.queues.get(listener as usize)?.iter().enumerate() {
            let bits = memory.offers()[*slot].load(Ordering::Acquire);
            if let OfferSlot::Offered { listener: of, socket } = OfferSlot::from_bits(bits)
                && u32::from(of) == listener
                && let Some(class) = offered_class(region, socket)
            {
                first[usize::from(class)].get_or_insert((*slot, bits, index));
            }
        }
        let with_offers = first.iter().enumerate().filter(|(_, offer)| offer.is_some());
        let with_offers = with_offers.fold(0, |set: ClassSet, (class, _)| set | 1 << class);
        let scheduler = offers.scheduler.get_or_insert_with(|| ClassScheduler::new(share));
        let class = scheduler.pick(with_offers)?;
        scheduler.charge(class, with_offers, 1);
        first[usize::from(class)]
    }

    /// Returns whether a connection of a listener could be accepted now.
    pub fn has_offer(&mut self, listener: u32) -> bool {
        self.oldest_offer(listener).is_some()
    }

    /// Asks the stack for a connection that is offered to another client.
    #[cold]
    fn claim_offer(&mut self, listener: u32) {
        self.memory.offers_suspended().store(0, Ordering::Relaxed);
        // A shard that is gone has no connections.
        let _ = self.call(ChannelRequest::ClaimOffer(listener));
    }

    /// Accepts the connection that was offered first, among those of a high class of priority if there are
    /// any. Returns `None` if no offer is valid. Events of the connection that occurred meanwhile are
    /// reported afterwards. If the stack has revoked offers because this client did not accept in time, and
    /// there is no other, the stack is asked for one, which the next call accepts after the client's events
    /// were handled.
    pub fn accept(&mut self, listener: u32) -> Option<Conn> {
        loop {
            let Some((slot, bits, index)) = self.next_offer(listener) else {
                if self.memory.offers_suspended().load(Ordering::Relaxed) != 0 {
                    self.claim_offer(listener);
                }
                return None;
            };
            let conn = self.accept_offer(slot, bits);
            if let Some(offers) = &mut self.explicit_offers {
                offers.seen[slot] = 0;
                let queue = &mut offers.queues[listener as usize];
                let _ = if index == 0 { queue.pop_front() } else { queue.remove(index) };
            }
            if let Some(conn) = conn {
                self.report_changes(conn);
                return Some(conn);
            }
        }
    }
}

/// Returns the class of a connection that is offered; `None` if no socket has this number.
pub(super) fn offered_class(region: &Region, socket: u32) -> Option<u8> {
    // Another process of the domain may have written any number.
    let area = ((socket as usize) < region.sockets()).then(|| region.socket(socket))?;
    Some(data_class::of_unread(&area.data_class, area.positions(Direction::Incoming).read()))
}
