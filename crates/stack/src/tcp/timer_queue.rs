//! Connections that are visited in the order in which they were listed. Unlike the timer wheel, a queue
//! touches a connection only when its time has come.

use crate::time::Instant;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// A connection and when it is visited.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Entry {
    idx: u32,
    due: Instant,
}

/// A queue in order of time. Each entry has a number that its connection stores: a slot can have many short
/// connections until an entry is due, and the entry of an ended connection must not count for a later one.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct TimerQueue {
    entries: VecDeque<Entry>,
    /// Number of the first entry.
    first: u32,
}

impl TimerQueue {
    /// Returns the connections of all entries.
    pub fn connections(&self) -> impl Iterator<Item = u32> + '_ {
        self.entries.iter().map(|entry| entry.idx)
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Appends an entry and returns its number. It is due at `at`, but not before the entries in front of it.
    pub fn push(&mut self, idx: u32, at: Instant) -> u32 {
        let due = self.entries.back().map_or(at, |last| at.max(last.due));
        self.push_in_order(idx, due)
    }

    /// Appends an entry that is due at `at`, not before any other, and returns its number.
    #[inline]
    pub fn push_in_order(&mut self, idx: u32, at: Instant) -> u32 {
        debug_assert!(self.entries.back().is_none_or(|last| last.due <= at));
        let number = self.first.wrapping_add(self.entries.len() as u32);
        self.entries.push_back(Entry { idx, due: at });
        number
    }

    /// Takes the first entry if it is due. Returns its connection and its number.
    #[inline]
    pub fn pop_due(&mut self, now: Instant) -> Option<(u32, u32)> {
        let &Entry { idx, due } = self.entries.front()?;
        if due > now {
            return None;
        }
        self.entries.pop_front();
        let number = self.first;
        self.first = number.wrapping_add(1);
        Some((idx, number))
    }

    /// Returns the connection of the entry `distance` places after the first one.
    #[inline]
    pub fn ahead(&self, distance: usize) -> Option<u32> {
        self.entries.get(distance).map(|entry| entry.idx)
    }

    /// Returns when the first entry is due.
    #[inline]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.entries.front().map(|entry| entry.due)
    }
}

#[cfg(test)]
mod tests {
    use super::TimerQueue;
    use crate::time::Instant;

    #[test]
    fn entries_are_due_in_the_order_in_which_they_were_listed() {
        let mut queue = TimerQueue::default();
        let numbers = [(7, 20), (8, 10), (9, 30)].map(|(idx, at)| queue.push(idx, Instant::from_millis(at)));
        assert_eq!((queue.ahead(2), queue.ahead(3)), (Some(9), None));
        assert_eq!(queue.pop_due(Instant::from_millis(19)), None);
        let due = |queue: &mut TimerQueue| queue.pop_due(Instant::from_millis(20));
        assert_eq!(due(&mut queue), Some((7, numbers[0])));
        assert_eq!(due(&mut queue), Some((8, numbers[1])), "not before the entry in front of it");
        assert_eq!(due(&mut queue), None);
        assert_eq!((queue.len(), queue.next_deadline()), (1, Some(Instant::from_millis(30))));
    }

    #[test]
    fn numbers_stay_unique_across_the_wrap() {
        let mut queue = TimerQueue { first: u32::MAX, ..TimerQueue::default() };
        let pushed = [queue.push(1, Instant::ZERO), queue.push(2, Instant::ZERO)];
        assert_eq!(pushed, [u32::MAX, 0]);
        let popped = [(); 2].map(|()| queue.pop_due(Instant::ZERO).map(|(_, number)| number));
        assert_eq!(popped, [Some(u32::MAX), Some(0)]);
    }
}
