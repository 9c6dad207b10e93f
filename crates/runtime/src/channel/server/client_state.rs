//! One client, as the stack knows it.

use super::super::doorbells::{Notifier, NotifyQueue};
use super::super::region::{LISTENERS_MAX, OFFERS_MAX, PREALLOCATED_MAX, Region};
use super::waker::ClientWaker;

/// A connection that is offered.
#[derive(Clone, Copy)]
pub(super) struct PendingOffer {
    pub listener: u16,
    pub socket: u32,
    pub deadline: ginnel_stack::time::Instant,
}

/// One client.
pub(super) struct ClientState {
    pub from_client: NotifyQueue,
    pub to_client: Notifier,
    pub wake: ClientWaker,
    /// It did not take what it was offered: its credits are worth nothing until it rings again.
    pub is_suspended: bool,
    /// It had the CPU for a whole turn and rang for nothing: it waits for something else, and gets no more turns until it has slept.
    pub is_idle: bool,
    /// How many bells it had rung when its turn began, if it has one.
    pub notified_at_yield: Option<u32>,
    /// Sockets that it has at hand, by place.
    pub preallocated: [Option<u32>; PREALLOCATED_MAX],
    offers: [Option<PendingOffer>; OFFERS_MAX],
    /// Places for offers that are free, a bit each.
    free_slots: u64,
    /// How many offers of each listener are out.
    outstanding: [u8; LISTENERS_MAX],
}

impl ClientState {
    /// A client that has this number.
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

    /// What is offered in a place.
    pub fn offer(&self, place: usize) -> Option<PendingOffer> {
        self.offers[place]
    }

    /// Puts an offer into a free place, and says which. `None`: all are taken.
    pub fn add_offer(&mut self, offer: PendingOffer) -> Option<usize> {
        let place = (self.free_slots != 0).then(|| self.free_slots.trailing_zeros() as usize)?;
        self.free_slots &= !(1 << place);
        self.offers[place] = Some(offer);
        self.outstanding[usize::from(offer.listener)] += 1;
        Some(place)
    }

    /// The place is free again.
    pub fn clear_offer(&mut self, place: usize) {
        if let Some(offer) = self.offers[place].take() {
            self.free_slots |= 1 << place;
            self.outstanding[usize::from(offer.listener)] -= 1;
        }
    }

    /// How many offers are out.
    pub fn outstanding(&self) -> usize {
        OFFERS_MAX - self.free_slots.count_ones() as usize
    }

    /// How many of one listener.
    pub fn outstanding_of(&self, listener: usize) -> usize {
        self.outstanding[listener].into()
    }
}
