//! Numbers, such as those of sockets, that wait to be looked at, by class.

use super::{CLASSES, ClassScheduler, ClassSet};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Queues of numbers, one for each class, in which a number is at most once, and the order in which they are
/// served. A number may be in the queues of several classes: when it is taken for a higher class, all of its
/// work is done, and nothing is left when the entry of the lower class is taken.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "SavedNumbers")]
pub struct PrioritizedNumbers {
    queues: [VecDeque<u32>; CLASSES],
    #[serde(skip)]
    with_entries: ClassSet,
    /// For each number, the classes in whose queues it is.
    #[serde(skip)]
    queued: Vec<ClassSet>,
    scheduler: ClassScheduler,
}

/// Numbers of an image are below this.
const RESTORED_MAX: u32 = 1 << 24;

/// Queues of numbers as they are read from an image.
#[derive(Deserialize)]
#[serde(rename = "PrioritizedNumbers")]
struct SavedNumbers {
    queues: [VecDeque<u32>; CLASSES],
    scheduler: ClassScheduler,
}

impl TryFrom<SavedNumbers> for PrioritizedNumbers {
    type Error = &'static str;

    fn try_from(saved: SavedNumbers) -> Result<Self, Self::Error> {
        let SavedNumbers { queues, scheduler } = saved;
        let mut numbers = Self { scheduler, ..Self::new(0) };
        for (class, queue) in (0..).zip(queues) {
            for number in queue {
                if number >= RESTORED_MAX || numbers.classes_of(number) >> class & 1 != 0 {
                    return Err("a queue has a number twice, or one that is too large");
                }
                numbers.push(number, class);
            }
        }
        Ok(numbers)
    }
}

impl PrioritizedNumbers {
    /// Creates empty queues. While a class has entries, the classes below it get `lower_share_percent` of
    /// what is [charged](Self::charge): 0 to 50.
    #[must_use]
    pub fn new(lower_share_percent: u32) -> Self {
        Self {
            queues: core::array::from_fn(|_| VecDeque::new()),
            with_entries: 0,
            queued: Vec::new(),
            scheduler: ClassScheduler::new(lower_share_percent),
        }
    }

    /// Appends a number to the queue of a class, unless the number is in that queue.
    pub fn push(&mut self, number: u32, class: u8) {
        let index = number as usize;
        if index >= self.queued.len() {
            self.queued.resize(index + 1, 0);
        }
        if self.queued[index] >> class & 1 == 0 {
            self.queued[index] |= 1 << class;
            self.queues[usize::from(class)].push_back(number);
            self.with_entries |= 1 << class;
        }
    }

    /// Takes the next number, and returns its class, too. The share of the classes counts only what is
    /// [charged](Self::charge).
    pub fn pop(&mut self) -> Option<(u32, u8)> {
        let class = self.scheduler.pick(self.with_entries)?;
        let queue = &mut self.queues[usize::from(class)];
        let number = queue.pop_front()?;
        self.with_entries &= !(ClassSet::from(queue.is_empty()) << class);
        self.queued[number as usize] &= !(1 << class);
        Some((number, class))
    }

    /// Puts the number that was taken last back to the front of its queue.
    pub fn put_back(&mut self, number: u32, class: u8) {
        self.queued[number as usize] |= 1 << class;
        self.queues[usize::from(class)].push_front(number);
        self.with_entries |= 1 << class;
    }

    /// Accounts for `units` of work of a class, where the classes in `others` have work elsewhere.
    pub fn charge(&mut self, class: u8, units: usize, others: ClassSet) {
        self.scheduler.charge(class, self.with_entries | others | 1 << class, units);
    }

    /// Returns the class that is served next, where the classes in `others` have work elsewhere.
    #[must_use]
    pub fn next_class(&self, others: ClassSet) -> Option<u8> {
        self.scheduler.pick(self.with_entries | others)
    }

    /// Returns the classes in whose queues a number is.
    #[must_use]
    pub fn classes_of(&self, number: u32) -> ClassSet {
        self.queued.get(number as usize).copied().unwrap_or(0)
    }

    /// Returns the classes with entries.
    #[must_use]
    pub const fn with_entries(&self) -> ClassSet {
        self.with_entries
    }

    /// Returns whether no queue has entries.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.with_entries == 0
    }

    /// Iterates over all entries, numbers and classes, the highest class first.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u8)> + '_ {
        let queues = (0..CLASSES as u8).zip(&self.queues).rev();
        queues.flat_map(|(class, queue)| queue.iter().map(move |number| (*number, class)))
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.queues.iter().map(VecDeque::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::priority::BEST_EFFORT;

    #[test]
    fn number_waits_once_in_each_class() {
        let mut numbers = PrioritizedNumbers::new(5);
        for _ in 0..3 {
            numbers.push(7, BEST_EFFORT);
            numbers.push(9, BEST_EFFORT);
            numbers.push(9, 6);
        }
        assert_eq!((numbers.len(), numbers.classes_of(9)), (3, 0b0100_0010));
        assert_eq!(numbers.iter().collect::<Vec<_>>(), [(9, 6), (7, BEST_EFFORT), (9, BEST_EFFORT)]);
        assert_eq!(numbers.pop(), Some((9, 6)));
        numbers.put_back(9, 6);
        assert_eq!([numbers.pop(), numbers.pop()], [Some((9, 6)), Some((7, BEST_EFFORT))]);
        assert_eq!((numbers.classes_of(9), numbers.classes_of(1000)), (1 << BEST_EFFORT, 0));
        assert_eq!([numbers.pop(), numbers.pop()], [Some((9, BEST_EFFORT)), None]);
        assert!(numbers.is_empty() && numbers.with_entries() == 0);
    }

    #[test]
    fn lower_class_gets_its_share_of_charged_work() {
        let mut numbers = PrioritizedNumbers::new(25);
        (0..40).for_each(|number| numbers.push(number, if number < 20 { BEST_EFFORT } else { 5 }));
        let mut classes = Vec::new();
        while let Some((_, class)) = numbers.pop() {
            numbers.charge(class, 1, 0);
            classes.push(class);
        }
        assert_eq!(classes[..8], [5, 5, 5, 1, 5, 5, 5, 1]);
        assert_eq!(classes.len(), 40);
        // What is not charged takes nothing from the share of others.
        let mut numbers = PrioritizedNumbers::new(25);
        (0..40).for_each(|number| numbers.push(number, if number < 20 { BEST_EFFORT } else { 5 }));
        assert!((0..20).all(|_| numbers.pop().is_some_and(|(_, class)| class == 5)));
    }

    #[test]
    fn class_with_work_elsewhere_takes_part() {
        let mut numbers = PrioritizedNumbers::new(50);
        assert_eq!(numbers.next_class(1 << BEST_EFFORT), Some(BEST_EFFORT));
        numbers.push(1, 7);
        assert_eq!(numbers.next_class(1 << BEST_EFFORT), Some(7));
        numbers.charge(7, 1, 1 << BEST_EFFORT);
        assert_eq!(numbers.next_class(1 << BEST_EFFORT), Some(BEST_EFFORT));
        assert_eq!(numbers.next_class(0), Some(7));
    }
}
