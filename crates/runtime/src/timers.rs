//! The application's timers, on a wheel of their own: setting, cancelling and firing are O(1).

use core::time::Duration;
use ginnel_stack::time::Instant;
use ginnel_stack::timer_wheel::{TimerNode, TimerStore, TimerWheel};

/// A timer that was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timer {
    index: u32,
    generation: u32,
}

/// 24 bytes. Entries are reused in LIFO order; a free one links to the next free one in `token`.
#[derive(Clone, Copy, Debug)]
struct Entry {
    node: TimerNode,
    generation: u32,
    token: u64,
}

#[derive(Debug)]
struct Entries(Vec<Entry>);

impl TimerStore for Entries {
    fn timer_node(&mut self, id: u32) -> &mut TimerNode {
        &mut self.0[id as usize].node
    }
}

const NO_ENTRY: u64 = u64::MAX;

#[derive(Debug)]
pub(crate) struct Timers {
    wheel: TimerWheel,
    entries: Entries,
    /// The free entry to use next, or `NO_ENTRY`.
    free: u64,
    max: usize,
    /// Timers that were refused because `max` were set.
    pub(crate) refused: u64,
}

impl Timers {
    pub(crate) fn new(now: Instant, max: u32) -> Self {
        let (wheel, entries) = (TimerWheel::new(now), Entries(Vec::new()));
        Self { wheel, entries, free: NO_ENTRY, max: max as usize, refused: 0 }
    }

    /// Sets a timer for `at`, or nothing if as many as permitted are set.
    pub(crate) fn set(&mut self, at: Instant, token: u64) -> Option<Timer> {
        let index = if self.free != NO_ENTRY {
            let index = self.free as u32;
            self.free = self.entries.0[index as usize].token;
            index
        } else if self.entries.0.len() < self.max {
            self.entries.0.push(Entry { node: TimerNode::default(), generation: 0, token });
            (self.entries.0.len() - 1) as u32
        } else {
            self.refused += 1;
            return None;
        };
        let entry = &mut self.entries.0[index as usize];
        entry.token = token;
        let generation = entry.generation;
        self.wheel.schedule(&mut self.entries, index, at);
        Some(Timer { index, generation })
    }

    pub(crate) fn cancel(&mut self, timer: Timer) -> bool {
        let current =
            self.entries.0.get(timer.index as usize).is_some_and(|e| e.generation == timer.generation);
        let armed = current && self.wheel.cancel(&mut self.entries, timer.index);
        if armed {
            self.release(timer.index);
        }
        armed
    }

    /// The token of a timer that has run out, earliest first.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<u64> {
        let index = self.wheel.pop_expired(&mut self.entries, now)?;
        let token = self.entries.0[index as usize].token;
        self.release(index);
        Some(token)
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.wheel.next_deadline()
    }

    fn release(&mut self, index: u32) {
        let entry = &mut self.entries.0[index as usize];
        entry.generation = entry.generation.wrapping_add(1);
        entry.token = self.free;
        self.free = index.into();
    }
}

/// How late a timer can be because the wheel counts in ticks.
pub const TIMER_TICK: Duration = Duration::from_nanos(1 << 16);

#[cfg(test)]
mod tests {
    use super::{TIMER_TICK, Timers};
    use core::time::Duration;
    use ginnel_stack::time::Instant;

    #[test]
    fn timers_fire_in_order_never_early_and_at_most_a_tick_late() {
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
    fn a_cancelled_timer_does_not_fire_and_its_handle_is_stale() {
        let start = Instant::ZERO;
        let mut timers = Timers::new(start, 1);
        let first = timers.set(start + Duration::from_millis(1), 1).unwrap();
        assert!(timers.cancel(first));
        assert!(!timers.cancel(first));
        let second = timers.set(start + Duration::from_millis(1), 2).unwrap();
        assert!(!timers.cancel(first), "the entry has another tenant");
        assert_eq!(timers.pop(Instant::from_millis(5)), Some(2));
        assert_eq!(timers.pop(Instant::from_millis(500)), None);
        assert!(!timers.cancel(second));
    }

    #[test]
    fn at_the_limit_a_timer_is_refused_and_counted() {
        let mut timers = Timers::new(Instant::ZERO, 2);
        assert!(timers.set(Instant::from_millis(1), 1).is_some());
        assert!(timers.set(Instant::from_millis(2), 2).is_some());
        assert!(timers.set(Instant::from_millis(3), 3).is_none());
        assert_eq!(timers.refused, 1);
        assert_eq!(timers.pop(Instant::from_millis(9)), Some(1));
        assert!(timers.set(Instant::from_millis(10), 4).is_some());
    }
}
