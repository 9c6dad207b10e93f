//! Futures that wait for a time, as the shard's timers know them.

use super::waiters::Waiters;
use crate::timers::Timer;

/// A sleeping future's place.
#[derive(Debug)]
struct Sleep {
    /// `None`: the place is free.
    timer: Option<Timer>,
    generation: u32,
    waiters: Waiters,
}

/// Names a sleep that has begun and not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SleepId {
    pub(super) index: u32,
    generation: u32,
}

impl SleepId {
    /// As the token of a timer.
    const fn token(self) -> u64 {
        (self.generation as u64) << 32 | self.index as u64
    }

    const fn of_token(token: u64) -> Self {
        Self { index: token as u32, generation: (token >> 32) as u32 }
    }
}

#[derive(Debug)]
pub(super) struct Sleeps {
    places: Vec<Sleep>,
    free: Vec<u32>,
}

impl Sleeps {
    pub(super) const fn new() -> Self {
        Self { places: Vec::new(), free: Vec::new() }
    }

    /// Begins a sleep with the timer that `set` sets, which is given its token. `None` if it cannot.
    pub(super) fn begin(&mut self, set: impl FnOnce(u64) -> Option<Timer>) -> Option<SleepId> {
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push(Sleep { timer: None, generation: 0, waiters: Waiters::NONE });
            // There are at most as many as the shard has timers.
            (self.places.len() - 1) as u32
        });
        let place = &mut self.places[index as usize];
        let id = SleepId { index, generation: place.generation };
        place.timer = set(id.token());
        if place.timer.is_none() {
            self.free.push(index);
            return None;
        }
        Some(id)
    }

    /// Ends a sleep. Its timer, and who waited; nothing if it has ended before.
    pub(super) fn end(&mut self, id: SleepId) -> Option<(Timer, Waiters)> {
        let place = self.places.get_mut(id.index as usize).filter(|p| p.generation == id.generation)?;
        let timer = place.timer.take()?;
        place.generation = place.generation.wrapping_add(1);
        self.free.push(id.index);
        Some((timer, core::mem::replace(&mut place.waiters, Waiters::NONE)))
    }

    /// The same for the timer with this token, which ran out.
    pub(super) fn ran_out(&mut self, token: u64) -> Waiters {
        self.end(SleepId::of_token(token)).map_or(Waiters::NONE, |(_, waiters)| waiters)
    }

    pub(super) fn is_on(&self, id: SleepId) -> bool {
        self.places.get(id.index as usize).is_some_and(|p| p.generation == id.generation && p.timer.is_some())
    }

    pub(super) fn waiters_mut(&mut self, index: u32) -> Option<&mut Waiters> {
        self.places.get_mut(index as usize).map(|p| &mut p.waiters)
    }

    /// Sleeps that are on.
    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }
}
