//! The sleeps of an executor, each with a timer of the shard.

use super::waiters::Waiters;
use crate::timers::Timer;

/// A slot for a sleep.
#[derive(Debug)]
struct SleepSlot {
    /// `None`: the slot is free.
    timer: Option<Timer>,
    generation: u32,
    waiters: Waiters,
}

/// Identifies a sleep that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SleepId {
    pub(super) index: u32,
    generation: u32,
}

impl SleepId {
    /// Converts to the token of a timer.
    const fn token(self) -> u64 {
        (self.generation as u64) << 32 | self.index as u64
    }

    const fn of_token(token: u64) -> Self {
        Self { index: token as u32, generation: (token >> 32) as u32 }
    }
}

#[derive(Debug)]
pub(super) struct Sleeps {
    slots: Vec<SleepSlot>,
    free: Vec<u32>,
}

impl Sleeps {
    pub(super) const fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }

    /// Begins a sleep. `set_timer` sets a timer with the given token. Returns `None` if it has set none.
    pub(super) fn begin(&mut self, set_timer: impl FnOnce(u64) -> Option<Timer>) -> Option<SleepId> {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(SleepSlot { timer: None, generation: 0, waiters: Waiters::NONE });
            // Cannot truncate: there are at most as many sleeps as the shard has timers.
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        let id = SleepId { index, generation: slot.generation };
        slot.timer = set_timer(id.token());
        if slot.timer.is_none() {
            self.free.push(index);
            return None;
        }
        Some(id)
    }

    /// Ends a sleep and returns its timer and its waiters; `None` if it has ended before.
    pub(super) fn end(&mut self, id: SleepId) -> Option<(Timer, Waiters)> {
        let slot = self.slots.get_mut(id.index as usize).filter(|p| p.generation == id.generation)?;
        let timer = slot.timer.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(id.index);
        Some((timer, core::mem::replace(&mut slot.waiters, Waiters::NONE)))
    }

    /// Ends the sleep whose timer with this token expired, and returns its waiters.
    pub(super) fn expire(&mut self, token: u64) -> Waiters {
        self.end(SleepId::of_token(token)).map_or(Waiters::NONE, |(_, waiters)| waiters)
    }

    pub(super) fn is_active(&self, id: SleepId) -> bool {
        self.slots.get(id.index as usize).is_some_and(|p| p.generation == id.generation && p.timer.is_some())
    }

    pub(super) fn waiters_mut(&mut self, index: u32) -> Option<&mut Waiters> {
        self.slots.get_mut(index as usize).map(|p| &mut p.waiters)
    }

    /// Returns the number of sleeps that have not ended.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}
