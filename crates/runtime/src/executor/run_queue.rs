//! The queue of ready tasks. A task has the class of priority of the frame that made it ready, or of the task
//! that did, and higher classes run first, except for the minimum share of lower ones
//! (`priority.lower_share_percent`). Without priorities, all tasks are of one class: the order is first in,
//! first out.

use ginnel_stack::priority::{self, BEST_EFFORT, CLASSES, ClassScheduler, ClassSet};
use std::collections::VecDeque;

/// Ready tasks.
pub(super) struct RunQueue {
    /// Tasks of class [`BEST_EFFORT`].
    best_effort: VecDeque<u32>,
    /// Tasks of the other classes, and the classes with tasks.
    classes: [VecDeque<u32>; CLASSES],
    with_tasks: ClassSet,
    scheduler: ClassScheduler,
    /// The class of the task that was taken last and the classes with tasks then, until the scheduler is
    /// told.
    uncharged: Option<(u8, ClassSet)>,
    /// Class of what happens now.
    class: u8,
}

impl RunQueue {
    pub(super) fn new(lower_share_percent: u32) -> Self {
        Self {
            best_effort: VecDeque::new(),
            classes: core::array::from_fn(|_| VecDeque::new()),
            with_tasks: 0,
            scheduler: ClassScheduler::new(lower_share_percent),
            uncharged: None,
            class: BEST_EFFORT,
        }
    }

    pub(super) fn set_class(&mut self, class: u8) {
        self.class = class;
    }

    pub(super) fn class(&self) -> u8 {
        self.class
    }

    pub(super) fn is_empty(&self) -> bool {
        self.best_effort.is_empty() && (!priority::COMPILED || self.with_tasks == 0)
    }

    /// Appends a task, with the class of what happens now.
    #[inline(always)]
    pub(super) fn push(&mut self, task: u32) {
        self.push_to_class(task, self.class);
    }

    #[inline(always)]
    pub(super) fn push_to_class(&mut self, task: u32, class: u8) {
        if !priority::COMPILED || class == BEST_EFFORT {
            self.best_effort.push_back(task);
        } else {
            self.push_prioritized(task, class);
        }
    }

    #[cold]
    #[inline(never)]
    fn push_prioritized(&mut self, task: u32, class: u8) {
        self.classes[usize::from(class)].push_back(task);
        self.with_tasks |= 1 << class;
    }

    /// Takes the next task, and sets its class.
    #[inline(always)]
    pub(super) fn pop(&mut self) -> Option<u32> {
        if priority::COMPILED && (self.with_tasks != 0 || self.class != BEST_EFFORT) {
            return self.pop_by_class();
        }
        self.best_effort.pop_front()
    }

    /// Does not charge its class for the task that was taken last, which does not run.
    #[cold]
    pub(super) fn discard(&mut self) {
        self.uncharged = None;
    }

    #[cold]
    #[inline(never)]
    fn pop_by_class(&mut self) -> Option<u32> {
        let with_tasks = self.with_tasks | ClassSet::from(!self.best_effort.is_empty()) << BEST_EFFORT;
        self.class = BEST_EFFORT;
        if let Some((class, with_tasks)) = self.uncharged.take() {
            self.scheduler.charge(class, with_tasks, 1);
        }
        let class = self.scheduler.pick(with_tasks)?;
        self.uncharged = Some((class, with_tasks));
        self.class = class;
        if class == BEST_EFFORT {
            return self.best_effort.pop_front();
        }
        let queue = &mut self.classes[usize::from(class)];
        let task = queue.pop_front();
        self.with_tasks &= !(ClassSet::from(queue.is_empty()) << class);
        task
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn higher_classes_run_first_with_a_share_for_lower_ones() {
        let mut queue = RunQueue::new(25);
        for task in 0..8 {
            queue.push(task);
        }
        queue.set_class(6);
        for task in 100..106 {
            queue.push(task);
        }
        let order: Vec<u32> = core::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(order, [100, 101, 102, 0, 103, 104, 105, 1, 2, 3, 4, 5, 6, 7]);
        assert!(queue.is_empty() && queue.class() == BEST_EFFORT);
    }

    /// Entries of tasks that moved up to a higher class cost their old class nothing.
    #[test]
    fn discarded_entries_take_no_share() {
        let mut queue = RunQueue::new(50);
        (0..4).for_each(|task| queue.push(task));
        queue.set_class(6);
        (100..104).for_each(|task| queue.push(task));
        let order: Vec<u32> = core::iter::from_fn(|| {
            let task = queue.pop()?;
            if task < 2 {
                queue.discard();
            }
            Some(task)
        })
        .collect();
        assert_eq!(order, [100, 0, 1, 2, 101, 3, 102, 103]);
    }

    #[test]
    fn one_class_is_first_in_first_out() {
        let mut queue = RunQueue::new(5);
        (0..100).for_each(|task| queue.push(task));
        assert!((0..100).eq(core::iter::from_fn(|| queue.pop())));
    }
}
