//! The stack's state of a client.

use super::super::client_memory::{ClientMemory, OFFERS_MAX, PREALLOCATED_MAX};
use super::super::doorbells::{Notifier, NotifyQueue};
use super::super::notified_clients::iter_set_bits;
use super::waker::ClientWaker;
use rustix::fd::OwnedFd;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A connection that is offered to a client.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct PendingOffer {
    pub listener: u16,
    /// True if the client has fallback credit only.
    pub is_fallback: bool,
    pub socket: u32,
    pub deadline: ginnel_stack::time::Instant,
}

/// State of one client.
pub(super) struct ClientState {
    /// The memory that the stack shares with it.
    pub memory: Arc<ClientMemory>,
    /// The file of that memory, for another process that continues with the shard's state; `None` for a
    /// thread.
    pub memory_file: Option<OwnedFd>,
    pub from_client: NotifyQueue,
    pub to_client: Notifier,
    pub wake: ClientWaker,
    /// It did not accept an offer in time: its credits are ignored until it notifies the stack.
    pub is_suspended: bool,
    /// Listeners of which an offer was revoked from it since it last claimed one.
    pub revoked_listeners: Vec<u16>,
    /// It had the CPU for a whole yield and notified of nothing: it waits for something else, and the shard
    /// does not yield to it until it has slept.
    pub is_idle: bool,
    /// How many notifications it had sent when the shard yielded to it, if the shard did.
    pub notified_at_yield: Option<u32>,
    /// True if the client is in the list `active` of the [`ClientTable`](super::client_table::ClientTable).
    pub is_active: bool,
    /// True if the client is in the list `unfinished` of the table.
    pub is_unfinished: bool,
    /// True if the client is in the list `offering` of the table.
    pub is_offering: bool,
    /// The sockets and listeners that it owns, in any order: see [`super::owner_set`].
    pub owned_sockets: Vec<u32>,
    pub owned_listeners: Vec<u32>,
    /// A bit for each listener that it owns, up to the last one that it ever owned.
    pub(super) listener_bits: Vec<u64>,
    /// Sockets that it released while one of its threads had their lock and another client owned them.
    pub locked_at_release: Vec<u32>,
    /// Its preallocated sockets, by slot.
    pub preallocated: [Option<u32>; PREALLOCATED_MAX],
    pub(super) offers: [Option<PendingOffer>; OFFERS_MAX],
    /// Free offer slots, as a bit mask.
    pub(super) free_slots: u64,
    /// Number of outstanding offers.
    pub(super) outstanding_total: usize,
    /// Outstanding offers of each listener that has or had some: the listener and their number.
    pub(super) outstanding: Vec<(u16, u8)>,
}

impl ClientState {
    /// Creates the state of a client that shares this memory.
    pub fn new(memory: Arc<ClientMemory>, wake: ClientWaker) -> Self {
        Self {
            from_client: NotifyQueue::default(),
            to_client: memory.to_client().notifier(),
            memory,
            memory_file: None,
            wake,
            is_suspended: false,
            revoked_listeners: Vec::new(),
            is_idle: false,
            notified_at_yield: None,
            is_active: false,
            is_unfinished: false,
            is_offering: false,
            owned_sockets: Vec::new(),
            owned_listeners: Vec::new(),
            listener_bits: Vec::new(),
            locked_at_release: Vec::new(),
            preallocated: [None; PREALLOCATED_MAX],
            offers: [None; OFFERS_MAX],
            free_slots: u64::MAX >> (u64::BITS as usize - OFFERS_MAX),
            outstanding_total: 0,
            outstanding: Vec::new(),
        }
    }

    /// Returns how often a ring of doorbells was full, to or from this client.
    pub fn rings_full(&self) -> u64 {
        self.from_client.overflows() + self.to_client.overflows()
    }

    /// Returns whether it owns a listener. As [`OwnerSet::contains`](super::owner_set::OwnerSet::contains),
    /// but in a time that does not depend on the number of owners.
    #[inline]
    pub fn owns_listener(&self, listener: usize) -> bool {
        self.listener_bits.get(listener / 64).is_some_and(|bits| bits & 1 << (listener % 64) != 0)
    }

    /// Records whether it owns a listener.
    pub fn set_owns_listener(&mut self, listener: usize, owns: bool) {
        if listener / 64 >= self.listener_bits.len() {
            self.listener_bits.resize(listener / 64 + 1, 0);
        }
        let bit = 1 << (listener % 64);
        let bits = &mut self.listener_bits[listener / 64];
        *bits = if owns { *bits | bit } else { *bits & !bit };
    }

    /// Returns the offer in a slot.
    pub fn offer(&self, slot: usize) -> Option<PendingOffer> {
        self.offers[slot]
    }

    /// Returns the slots that have an offer.
    pub fn offer_slots(&self) -> impl Iterator<Item = usize> + use<> {
        iter_set_bits(!self.free_slots & (u64::MAX >> (u64::BITS as usize - OFFERS_MAX)))
    }

    /// Puts an offer into a free slot and returns the slot. `None` if all slots are in use.
    pub fn add_offer(&mut self, offer: PendingOffer) -> Option<usize> {
        let slot = (self.free_slots != 0).then(|| self.free_slots.trailing_zeros() as usize)?;
        self.free_slots &= !(1 << slot);
        self.offers[slot] = Some(offer);
        self.outstanding_total += 1;
        match self.outstanding.iter_mut().find(|(listener, _)| *listener == offer.listener) {
            Some((_, count)) => *count += 1,
            None => self.add_outstanding(offer.listener),
        }
        Some(slot)
    }

    /// Puts an offer into a slot. Returns false if the slot is in use or does not exist.
    pub fn restore_offer(&mut self, slot: usize, offer: PendingOffer) -> bool {
        if slot >= OFFERS_MAX || self.offers[slot].is_some() {
            return false;
        }
        // The only free slot is the one that `add_offer` takes.
        let free_slots = core::mem::replace(&mut self.free_slots, 1 << slot);
        self.add_offer(offer);
        self.free_slots = free_slots & !(1 << slot);
        true
    }

    #[cold]
    fn add_outstanding(&mut self, listener: u16) {
        if self.outstanding.len() >= OFFERS_MAX {
            self.outstanding.retain(|(_, count)| *count > 0);
        }
        self.outstanding.push((listener, 1));
    }

    /// Frees a slot. Returns the offer that was in it.
    #[inline]
    pub fn clear_offer(&mut self, slot: usize) -> Option<PendingOffer> {
        let offer = self.offers[slot].take()?;
        self.free_slots |= 1 << slot;
        self.outstanding_total -= 1;
        if let Some((_, count)) =
            self.outstanding.iter_mut().find(|(listener, _)| *listener == offer.listener)
        {
            *count -= 1;
        }
        Some(offer)
    }

    /// Returns the number of outstanding offers.
    #[inline]
    pub fn outstanding(&self) -> usize {
        self.outstanding_total
    }

    /// Returns the number of outstanding offers of one listener.
    #[inline]
    pub fn outstanding_of(&self, listener: usize) -> usize {
        let mut counts = self.outstanding.iter();
        counts.find(|(of, _)| usize::from(*of) == listener).map_or(0, |(_, count)| usize::from(*count))
    }
}
