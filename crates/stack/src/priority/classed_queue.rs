//! Connections that wait to be accepted: the oldest one comes first or, if there are several classes, the
//! oldest one of the class whose turn it is.

use super::{BEST_EFFORT, CLASSES, COMPILED, ClassScheduler, ClassSet};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Entries of other classes than best effort, and the minimum share of lower classes.
#[derive(Debug, Serialize, Deserialize)]
struct OtherClasses<T> {
    /// By class. The queue of best effort is empty.
    queues: [VecDeque<T>; CLASSES],
    scheduler: ClassScheduler,
}

/// The class of an entry, and the share of the entries below it.
#[derive(Clone, Copy, Debug)]
pub struct QueueClass {
    /// Class of priority ([`super::class`]).
    pub class: u8,
    /// Part of the entries that lower classes get at least while a class has entries, in percent: 0 to 50. It
    /// counts when the first entry of another class than best effort is added.
    pub lower_share_percent: u32,
}

/// A queue whose entries may have classes. Without them it is first in, first out.
#[derive(Debug, Serialize, Deserialize)]
pub struct ClassedQueue<T> {
    best_effort: VecDeque<T>,
    /// `None` until an entry of another class was added.
    others: Option<Box<OtherClasses<T>>>,
}

impl<T> Default for ClassedQueue<T> {
    fn default() -> Self {
        Self { best_effort: VecDeque::new(), others: None }
    }
}

impl<T> ClassedQueue<T> {
    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.best_effort.len() + self.others_len()
    }

    /// Returns whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.best_effort.is_empty() && self.others.as_ref().is_none_or(|others| others.with_entries() == 0)
    }

    /// Returns the number of entries of best effort.
    #[inline(always)]
    pub fn best_effort_len(&self) -> usize {
        self.best_effort.len()
    }

    /// Returns the number of entries of other classes than best effort.
    pub fn others_len(&self) -> usize {
        let count = |others: &OtherClasses<T>| others.queues.iter().map(VecDeque::len).sum();
        self.others.as_deref().map_or(0, count)
    }

    /// Returns whether entries of other classes than best effort have ever been added.
    #[inline(always)]
    pub fn has_classes(&self) -> bool {
        COMPILED && self.others.is_some()
    }

    /// Returns all entries, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        let others = self.others.iter().flat_map(|others| &others.queues);
        self.best_effort.iter().chain(others.flatten())
    }

    /// Returns the number of entries for which there is memory.
    pub fn capacity(&self) -> usize {
        let others = self.others.iter().flat_map(|others| &others.queues);
        others.map(VecDeque::capacity).sum::<usize>() + self.best_effort.capacity()
    }

    /// Adds an entry after the others of its class; `None` is best effort.
    #[inline]
    pub fn push_back(&mut self, entry: T, class: Option<QueueClass>) {
        match class {
            Some(class) if COMPILED => self.queue_of(class).push_back(entry),
            _ => self.best_effort.push_back(entry),
        }
    }

    /// Adds an entry of best effort after the others.
    #[inline(always)]
    pub fn push_best_effort(&mut self, entry: T) {
        self.best_effort.push_back(entry);
    }

    /// Adds an entry before the others of its class; `None` is best effort.
    pub fn push_front(&mut self, entry: T, class: Option<QueueClass>) {
        match class {
            Some(class) => self.queue_of(class).push_front(entry),
            None => self.best_effort.push_front(entry),
        }
    }

    /// Takes the next entry.
    #[inline]
    pub fn pop(&mut self) -> Option<T> {
        if self.has_classes() {
            return self.pop_by_class().map(|(entry, _)| entry);
        }
        self.best_effort.pop_front()
    }

    /// Takes the next entry, and returns its class, too.
    #[cold]
    pub fn pop_by_class(&mut self) -> Option<(T, u8)> {
        let Some(others) = &mut self.others else {
            return self.best_effort.pop_front().map(|entry| (entry, BEST_EFFORT));
        };
        let with_work = others.with_entries() | ClassSet::from(!self.best_effort.is_empty()) << BEST_EFFORT;
        let class = others.scheduler.pick(with_work)?;
        others.scheduler.charge(class, with_work, 1);
        self.pop_of_class(class).map(|entry| (entry, class))
    }

    /// Takes the oldest entry of a class.
    pub fn pop_of_class(&mut self, class: u8) -> Option<T> {
        if class == BEST_EFFORT {
            return self.best_effort.pop_front();
        }
        self.others.as_mut()?.queues[usize::from(class)].pop_front()
    }

    /// Takes the oldest entry of best effort.
    #[inline(always)]
    pub fn pop_best_effort(&mut self) -> Option<T> {
        self.best_effort.pop_front()
    }

    /// Takes all entries.
    pub fn take_all(&mut self) -> Vec<T> {
        core::iter::from_fn(|| self.pop()).collect()
    }

    /// Takes all entries, and returns their classes, too.
    pub fn take_all_with_classes(&mut self) -> Vec<(T, u8)> {
        core::iter::from_fn(|| self.pop_by_class()).collect()
    }

    #[cold]
    fn queue_of(&mut self, QueueClass { class, lower_share_percent }: QueueClass) -> &mut VecDeque<T> {
        if class == BEST_EFFORT {
            return &mut self.best_effort;
        }
        let others = self.others.get_or_insert_with(|| {
            let queues = core::array::from_fn(|_| VecDeque::new());
            Box::new(OtherClasses { queues, scheduler: ClassScheduler::new(lower_share_percent) })
        });
        &mut others.queues[usize::from(class)]
    }
}

impl<T: PartialEq> ClassedQueue<T> {
    /// Moves an entry to a class if it is in a lower one. Searches the queues of the lower classes, so it is
    /// called at most once for each entry and class.
    #[cold]
    pub fn raise(&mut self, entry: T, to: QueueClass) {
        let class = to.class;
        let remove = |queue: &mut VecDeque<T>| {
            let at = queue.iter().position(|other| *other == entry);
            at.is_some_and(|at| queue.remove(at).is_some())
        };
        let lower = self.others.iter_mut().flat_map(|others| &mut others.queues[..usize::from(class)]);
        if lower.chain([&mut self.best_effort].into_iter().filter(|_| class > BEST_EFFORT)).any(remove) {
            self.push_back(entry, Some(to));
        }
    }
}

impl<T> OtherClasses<T> {
    fn with_entries(&self) -> ClassSet {
        let with_entries = self.queues.iter().enumerate().filter(|(_, queue)| !queue.is_empty());
        with_entries.fold(0, |set, (class, _)| set | 1 << class)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn higher_classes_come_first() {
        let mut queue = ClassedQueue::default();
        let of = |class| QueueClass { class, lower_share_percent: 25 };
        (0..20).for_each(|entry| queue.push_back(entry, None));
        (20..40).for_each(|entry| queue.push_back(entry, Some(of(BEST_EFFORT))));
        assert!(!queue.has_classes());
        (40..70).for_each(|entry| queue.push_back(entry, Some(of(6))));
        queue.push_back(70, Some(of(0)));
        queue.push_front(71, Some(of(6)));
        queue.raise(5, of(7));
        queue.raise(70, of(7));
        // An entry is not moved to a lower class.
        queue.raise(5, of(2));
        assert_eq!((queue.len(), queue.best_effort_len(), queue.others_len()), (72, 39, 33));
        let order = queue.take_all();
        assert_eq!(order[..2], [5, 70]);
        let low = order[2..42].iter().filter(|entry| **entry < 40).count();
        assert!((9..=11).contains(&low), "{low} of 40 got their share");
        let (high, low): (Vec<u32>, Vec<u32>) = order[2..].iter().partition(|entry| **entry >= 40);
        assert_eq!(high, [71].into_iter().chain(40..70).collect::<Vec<_>>());
        assert_eq!(low, (0..40).filter(|entry| *entry != 5).collect::<Vec<_>>());
        assert!(queue.is_empty() && queue.pop().is_none());
    }

    #[test]
    fn entries_of_one_class_can_be_taken() {
        let mut queue = ClassedQueue::default();
        queue.push_back(1, None);
        queue.push_back(2, Some(QueueClass { class: 6, lower_share_percent: 5 }));
        queue.push_back(3, None);
        assert_eq!(queue.pop_of_class(7), None);
        assert_eq!(
            (queue.pop_best_effort(), queue.pop_of_class(6), queue.pop_of_class(6)),
            (Some(1), Some(2), None)
        );
        assert_eq!((queue.pop_by_class(), queue.pop_by_class()), (Some((3, BEST_EFFORT)), None));
    }
}
