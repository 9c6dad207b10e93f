//! One client, as the stack knows it.

use super::super::bells::{Answerer, Ringer};
use super::super::region::{BLANKS_MAX, LISTENERS_MAX, OFFERS_MAX, Region};
use super::wake::Wake;

/// A connection that is offered.
#[derive(Clone, Copy)]
pub(super) struct Offered {
    pub listener: u16,
    pub socket: u32,
    pub until: ginnel_stack::time::Instant,
}

/// One client.
pub(super) struct Served {
    pub up: Answerer,
    pub down: Ringer,
    pub wake: Wake,
    /// It did not take what it was offered: its credits are worth nothing until it rings again.
    pub dozes: bool,
    /// It had the CPU for a whole turn and rang for nothing: it waits for something else, and gets no more turns until it has slept.
    pub is_absent: bool,
    /// How many bells it had rung when its turn began, if it has one.
    pub turn: Option<u32>,
    /// Sockets that it has at hand, by place.
    pub blanks: [Option<u32>; BLANKS_MAX],
    offers: [Option<Offered>; OFFERS_MAX],
    /// Places for offers that are free, a bit each.
    free: u64,
    /// How many offers of each listener are out.
    out: [u8; LISTENERS_MAX],
}

impl Served {
    /// A client that has this number.
    pub fn new(region: &Region, number: usize, wake: Wake) -> Self {
        Self {
            up: region.up(number).answerer(),
            down: region.down(number).ringer(),
            wake,
            dozes: false,
            is_absent: false,
            turn: None,
            blanks: [None; BLANKS_MAX],
            offers: [None; OFFERS_MAX],
            free: u64::MAX >> (u64::BITS as usize - OFFERS_MAX),
            out: [0; LISTENERS_MAX],
        }
    }

    /// What is offered in a place.
    pub fn offered(&self, place: usize) -> Option<Offered> {
        self.offers[place]
    }

    /// Puts an offer into a free place, and says which. `None`: all are taken.
    pub fn put(&mut self, offer: Offered) -> Option<usize> {
        let place = (self.free != 0).then(|| self.free.trailing_zeros() as usize)?;
        self.free &= !(1 << place);
        self.offers[place] = Some(offer);
        self.out[usize::from(offer.listener)] += 1;
        Some(place)
    }

    /// The place is free again.
    pub fn clear(&mut self, place: usize) {
        if let Some(offer) = self.offers[place].take() {
            self.free |= 1 << place;
            self.out[usize::from(offer.listener)] -= 1;
        }
    }

    /// How many offers are out.
    pub fn out(&self) -> usize {
        OFFERS_MAX - self.free.count_ones() as usize
    }

    /// How many of one listener.
    pub fn out_of(&self, listener: usize) -> usize {
        self.out[listener].into()
    }
}
