//! The stack's state of a client.

use super::super::doorbells::{Notifier, NotifyQueue};
use super::super::region::{LISTENERS_MAX, OFFERS_MAX, PREALLOCATED_MAX, Region};
use super::waker::ClientWaker;

/// A connection that is offered to a client.
#[derive(Clone, Copy)]
pub(super) struct PendingOffer {
    pub listener: u16,
    pub socket: u32,
    pub deadline: ginnel_stack::time::Instant,
}

/// State of one client.
pub(super) struct ClientState {
    pub from_client: NotifyQueue,
    pub to_client: Notifier,
    pub wake: ClientWaker,
    /// It did not accept an offer in time: its credits are ignored until it notifies the stack.
    pub is_suspended: bool,
    /// It had the CPU for a whole yield and notified of nothing: it waits for something else, and the shard
    /// does not yield to it until it has slept.
    pub is_idle: bool,
    /// How many notifications it had sent when the shard yielded to it, if the shard did.
    pub notified_at_yield: Option<u32>,
    /// Its preallocated sockets, by slot.
    pub preallocated: [Option<u32>; PREALLOCATED_MAX],
    offers: [Option<PendingOffer>; OFFERS_MAX],
    /// Free offer slots, as a bit mask.
    free_slots: u64,
    /// Outstanding offers of each listener.
    outstanding: [u8; LISTENERS_MAX],
}

impl ClientState {
    /// Creates the state of a client that has this number.
    pub fn new(region: &Region, number: usize, wake: ClientWaker) -> Self {
        Self {
            from_client: region.to_stack(number).notify_queue(),
            to_client: region.to_client(number).notifier(),
            wake,
            is_suspended: false,
            is_idle: false,
            notified_at_yield: None,
            preallocated: [None; PREALLOCATED_MAX],
            offers: [None; OFFERS_MAX],
            free_slots: u64::MAX >> (u64::BITS as usize - OFFERS_MAX),
            outstanding: [0; LISTENERS_MAX],
        }
    }

    /// Returns the offer in a slot.
    pub fn offer(&self, slot: usize) -> Option<PendingOffer> {
        self.offers[slot]
    }

    /// Puts an offer into a free slot and returns the slot. `None` if all slots are in use.
    pub fn add_offer(&mut self, offer: PendingOffer) -> Option<usize> {
        let slot = (self.free_slots != 0).then(|| self.free_slots.trailing_zeros() as usize)?;
        self.free_slots &= !(1 << slot);
        self.offers[slot] = Some(offer);
        self.outstanding[usize::from(offer.listener)] += 1;
        Some(slot)
    }

    /// Frees a slot.
    pub fn clear_offer(&mut self, slot: usize) {
        if let Some(offer) = self.offers[slot].take() {
            self.free_slots |= 1 << slot;
            self.outstanding[usize::from(offer.listener)] -= 1;
        }
    }

    /// Returns the number of outstanding offers.
    pub fn outstanding(&self) -> usize {
        OFFERS_MAX - self.free_slots.count_ones() as usize
    }

    /// Returns the number of outstanding offers of one listener.
    pub fn outstanding_of(&self, listener: usize) -> usize {
        self.outstanding[listener].into()
    }
}
