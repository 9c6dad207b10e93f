//! The timers of the application, on a wheel of their own: setting, cancelling and expiring are O(1). Timers
//! that must be exact to the nanosecond instead of a tick are in a heap.

use core::cmp::Reverse;
use core::time::Duration;
use ginnel_stack::time::Instant;
use ginnel_stack::timer_wheel::{TimerNode, TimerStore, TimerWheel};
use std::collections::BinaryHeap;

/// A handle to a timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timer {
    index: u32,
    generation: u32,
}

impl Timer {
    /// Returns the handle as a number, for interfaces that have no types.
    pub const fn to_bits(self) -> u64 {
        (self.generation as u64) << 32 | self.index as u64
    }

    /// Returns the handle that [`to_bits`](Self::to_bits) has converted. Any other number is a stale handle.
    pub const fn from_bits(bits: u64) -> Self {
        Self { index: bits as u32, generation: (bits >> 32) as u32 }
    }
}

/// A timer, in 24 bytes. Entries are reused in LIFO order; the `token` of a free entry is the next free
/// entry.
#[derive(Clone, Copy, Debug)]
struct TimerEntry {
    node: TimerNode,
    generation: u32,
    token: u64,
}

#[derive(Debug)]
struct TimerEntries(Vec<TimerEntry>);

impl TimerStore for TimerEntries {
    fn timer_node(&mut self, id: u32) -> &mut TimerNode {
        &mut self.0[id as usize].node
    }
}

const NO_FREE_ENTRY: u64 = u64::MAX;

/// All timers of a shard's application.
#[derive(Debug)]
pub(crate) struct Timers {
    wheel: TimerWheel,
    entries: TimerEntries,
    /// Exact timers, the earliest on top: deadline, entry, generation of the entry. Cancelled timers stay in
    /// the heap; their generation differs from that of the entry.
    exact: BinaryHeap<Reverse<(Instant, u32, u32)>>,
    /// Number of cancelled timers in the heap.
    cancelled_exact: usize,
    /// The first free entry, or `NO_FREE_ENTRY`.
    free: u64,
    max: usize,
    /// Timers that were refused because `max` timers were set.
    pub(crate) refused: u64,
}

impl Timers {
    pub(crate) fn new(now: Instant, max: u32) -> Self {
        Self {
            wheel: TimerWheel::new(now),
            entries: TimerEntries(Vec::new()),
            exact: BinaryHeap::new(),
            cancelled_exact: 0,
            free: NO_FREE_ENTRY,
            max: max as usize,
            refused: 0,
        }
    }

    /// Sets a timer for `at`. Returns `None` if `max` timers are set.
    pub(crate) fn set(&mut self, at: Instant, token: u64) -> Option<Timer> {
        let timer = self.take(token)?;
        self.wheel.schedule(&mut self.entries, timer.index, at);
        Some(timer)
    }

    /// As [`set`](Self::set), for a timer that does not wait for the end of its tick. O(log n) in the number
    /// of exact timers.
    pub(crate) fn set_exact(&mut self, at: Instant, token: u64) -> Option<Timer> {
        let timer = self.take(token)?;
        self.exact.push(Reverse((at, timer.index, timer.generation)));
        Some(timer)
    }

    /// Takes an entry. Returns `None` if `max` timers are set.
    fn take(&mut self, token: u64) -> Option<Timer> {
        let index = if self.free != NO_FREE_ENTRY {
            let index = self.free as u32;
            self.free = self.entries.0[index as usize].token;
            index
        } else if self.entries.0.len() < self.max {
            self.entries.0.push(TimerEntry { node: TimerNode::default(), generation: 0, token });
            (self.entries.0.len() - 1) as u32
        } else {
            self.refused += 1;
            return None;
        };
        let entry = &mut self.entries.0[index as usize];
        entry.token = token;
        entry.generation = entry.generation.wrapping_add(1);
        Some(Timer { index, generation: entry.generation })
    }

    /// Cancels a timer. Returns whether it was set.
    pub(crate) fn cancel(&mut self, timer: Timer) -> bool {
        let armed = self.is_set(timer.index, timer.generation);
        if armed {
            if !self.wheel.cancel(&mut self.entries, timer.index) {
                self.cancelled_exact += 1;
            }
            self.release(timer.index);
            self.sweep_cancelled();
        }
        armed
    }

    /// Returns whether a timer of this index and generation is set. Entries in use have odd generations, so
    /// that no number means an entry that is free.
    fn is_set(&self, index: u32, generation: u32) -> bool {
        generation & 1 != 0 && self.entries.0.get(index as usize).is_some_and(|e| e.generation == generation)
    }

    /// Removes cancelled timers from the top of the heap, and all of them if they are more than half of it.
    fn sweep_cancelled(&mut self) {
        let Self { exact, entries, .. } = self;
        let is_set = |index: u32, generation: u32| entries.0[index as usize].generation == generation;
        if self.cancelled_exact > exact.len() / 2 {
            exact.retain(|Reverse((_, index, generation))| is_set(*index, *generation));
            self.cancelled_exact = 0;
        }
        while exact.peek().is_some_and(|Reverse((_, index, generation))| !is_set(*index, *generation)) {
            exact.pop();
            self.cancelled_exact -= 1;
        }
    }

    /// Returns the number of timers that are set, their limit, and the highest number so far.
    pub(crate) fn usage(&self) -> (usize, usize, usize) {
        let set = self.wheel.len() + self.exact.len() - self.cancelled_exact;
        (set, self.max, self.entries.0.len())
    }

    /// Removes an expired timer and returns its token: exact timers first, then the others, each kind in the
    /// order of deadlines.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<u64> {
        let index = match self.exact.peek() {
            Some(Reverse((at, index, _))) if *at <= now => {
                let index = *index;
                self.exact.pop();
                index
            }
            _ => self.wheel.pop_expired(&mut self.entries, now)?,
        };
        let token = self.entries.0[index as usize].token;
        self.release(index);
        self.sweep_cancelled();
        Some(token)
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        Instant::earliest([self.wheel.next_deadline(), self.next_exact()])
    }

    /// Returns the earliest deadline of the exact timers.
    pub(crate) fn next_exact(&self) -> Option<Instant> {
        self.exact.peek().map(|Reverse((at, ..))| *at)
    }

    fn release(&mut self, index: u32) {
        let entry = &mut self.entries.0[index as usize];
        entry.generation = entry.generation.wrapping_add(1);
        entry.token = self.free;
        self.free = index.into();
    }
}

/// Maximum delay of a timer after its deadline, because the wheel counts in ticks.
pub const TIMER_TICK: Duration = Duration::from_nanos(1 << 16);

#[cfg(test)]
mod tests {
    use super::{TIMER_TICK, Timer, Timers};
    use core::time::Duration;
    use ginnel_stack::time::Instant;

    #[test]
    fn timers_expire_in_order_within_a_tick() {
        let start = Instant::from_millis(1000);
        let mut timers = Timers::new(start, 100);
        for ms in [30, 10, 20] {
            timers.set(start + Duration::from_millis(ms), ms).unwrap();
        }
        for ms in [10, 20, 30] {
            let due = start + Duration::from_millis(ms);
            assert_eq!(timers.pop(Instant::from_nanos(due.as_nanos() - 1)), None);
            assert_eq!(timers.pop(due + TIMER_TICK), Some(ms));
        }
        assert_eq!(timers.next_deadline(), None);
    }

    #[test]
    fn no_number_means_a_free_entry() {
        let due = Instant::from_millis(2000);
        let mut timers = Timers::new(Instant::from_millis(1000), 4);
        let first = timers.set(due, 1).unwrap();
        assert_ne!(first.to_bits(), 0);
        assert!(timers.cancel(first));
        for generation in 0..8 {
            assert!(!timers.cancel(Timer::from_bits(generation << 32)), "{generation}");
        }
        let all = [2, 3, 4].map(|token| timers.set(due, token).unwrap().to_bits());
        assert_eq!(all.map(|bits| bits as u32), [0, 1, 2], "each timer has an entry of its own");
    }

    #[test]
    fn exact_timer_expires_at_its_nanosecond() {
        let start = Instant::from_millis(1000);
        let mut timers = Timers::new(start, 100);
        let due = |n: u64| start + Duration::from_nanos(10_000_001 + n * 7);
        for n in [2, 0, 1] {
            timers.set_exact(due(n), n).unwrap();
        }
        timers.set(start + Duration::from_millis(30), 9).unwrap();
        for n in 0..3 {
            assert_eq!(timers.next_deadline(), Some(due(n)));
            assert_eq!(timers.pop(Instant::from_nanos(due(n).as_nanos() - 1)), None);
            assert_eq!(timers.pop(due(n)), Some(n));
        }
        assert_eq!(timers.next_exact(), None);
        assert_eq!(timers.pop(start + Duration::from_millis(30) + TIMER_TICK), Some(9));
    }

    #[test]
    fn cancelled_exact_timers_neither_expire_nor_accumulate() {
        let start = Instant::from_millis(1000);
        let mut timers = Timers::new(start, 3);
        let late = timers.set_exact(start + Duration::from_secs(9), 1).unwrap();
        for n in 0..1000 {
            let other = timers.set_exact(start + Duration::from_millis(n), 2).unwrap();
            assert!(timers.cancel(other) && !timers.cancel(other));
            assert_eq!(timers.next_deadline(), Some(start + Duration::from_secs(9)));
            assert!(timers.exact.len() <= 2);
        }
        // Late timers, which never reach the top of the heap.
        for n in 0..1000 {
            let other = timers.set_exact(start + Duration::from_secs(10 + n), 2).unwrap();
            assert!(timers.cancel(other));
            assert!(timers.exact.len() <= 3);
        }
        assert!(timers.cancel(late));
        assert_eq!((timers.next_deadline(), timers.exact.len()), (None, 0));
    }

    #[test]
    fn cancelled_timer_does_not_expire_and_is_stale() {
        let start = Instant::ZERO;
        let mut timers = Timers::new(start, 1);
        let first = timers.set(start + Duration::from_millis(1), 1).unwrap();
        assert!(timers.cancel(first));
        assert!(!timers.cancel(first));
        let second = timers.set(start + Duration::from_millis(1), 2).unwrap();
        assert!(!timers.cancel(first), "the entry was reused");
        assert_eq!(timers.pop(Instant::from_millis(5)), Some(2));
        assert_eq!(timers.pop(Instant::from_millis(500)), None);
        assert!(!timers.cancel(second));
    }

    #[test]
    fn timer_beyond_the_limit_is_refused_and_counted() {
        let mut timers = Timers::new(Instant::ZERO, 2);
        assert!(timers.set(Instant::from_millis(1), 1).is_some());
        assert!(timers.set(Instant::from_millis(2), 2).is_some());
        assert!(timers.set(Instant::from_millis(3), 3).is_none());
        assert_eq!(timers.refused, 1);
        assert_eq!(timers.pop(Instant::from_millis(9)), Some(1));
        assert!(timers.set(Instant::from_millis(10), 4).is_some());
    }
}
