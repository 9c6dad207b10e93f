//! The connections of a listener that are not offered: the oldest one comes first or, with `[priority]` in
//! use, the oldest one of the class whose turn it is.

use ginnel_stack::priority::{BEST_EFFORT, CLASSES, ClassScheduler, ClassSet};
use std::collections::VecDeque;

/// Connections of other classes than best effort, and the minimum share of lower classes.
struct OtherClasses {
    /// By class. The entry of best effort is empty.
    queues: [VecDeque<u32>; CLASSES],
    scheduler: ClassScheduler,
}

/// The class of a connection, and the share of the connections below it.
#[derive(Clone, Copy)]
pub(super) struct PendingClass {
    pub class: u8,
    pub lower_share_percent: u32,
}

/// Numbers of sockets, each of which is in one queue.
#[derive(Default)]
pub(super) struct PendingConnections {
    best_effort: VecDeque<u32>,
    /// `None` until a connection of another class was added.
    others: Option<Box<OtherClasses>>,
}

impl PendingConnections {
    /// Returns the number of connections.
    pub fn len(&self) -> usize {
        let count = |others: &OtherClasses| others.queues.iter().map(VecDeque::len).sum();
        self.best_effort.len() + self.others.as_deref().map_or(0, count)
    }

    pub fn is_empty(&self) -> bool {
        self.best_effort.is_empty() && self.others.as_ref().is_none_or(|others| others.with_entries() == 0)
    }

    /// Adds a connection after the others of its class, which is best effort without `[priority]`.
    #[inline]
    pub fn push_back(&mut self, socket: u32, class: Option<PendingClass>) {
        match class {
            Some(class) => self.queue_of(class).push_back(socket),
            None => self.best_effort.push_back(socket),
        }
    }

    /// Adds a connection before the others of its class.
    pub fn push_front(&mut self, socket: u32, class: Option<PendingClass>) {
        match class {
            Some(class) => self.queue_of(class).push_front(socket),
            None => self.best_effort.push_front(socket),
        }
    }

    /// Moves a connection to a class if it is in a lower one. Searches the queues of those: called at most
    /// once for each connection and class.
    #[cold]
    pub fn raise(&mut self, socket: u32, to: PendingClass) {
        let class = to.class;
        let remove = |queue: &mut VecDeque<u32>| {
            let at = queue.iter().position(|number| *number == socket);
            at.is_some_and(|at| queue.remove(at).is_some())
        };
        let lower = self.others.iter_mut().flat_map(|others| &mut others.queues[..usize::from(class)]);
        if lower.chain([&mut self.best_effort].into_iter().filter(|_| class > BEST_EFFORT)).any(remove) {
            self.push_back(socket, Some(to));
        }
    }

    /// Takes the next connection.
    pub fn pop(&mut self) -> Option<u32> {
        let Some(others) = &mut self.others else { return self.best_effort.pop_front() };
        let with_work = others.with_entries() | ClassSet::from(!self.best_effort.is_empty()) << BEST_EFFORT;
        let class = others.scheduler.pick(with_work)?;
        others.scheduler.charge(class, with_work, 1);
        if class == BEST_EFFORT {
            self.best_effort.pop_front()
        } else {
            others.queues[usize::from(class)].pop_front()
        }
    }

    /// Takes all connections.
    pub fn take_all(&mut self) -> Vec<u32> {
        core::iter::from_fn(|| self.pop()).collect()
    }

    #[cold]
    fn queue_of(&mut self, PendingClass { class, lower_share_percent }: PendingClass) -> &mut VecDeque<u32> {
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

impl OtherClasses {
    fn with_entries(&self) -> ClassSet {
        let with_entries = self.queues.iter().enumerate().filter(|(_, queue)| !queue.is_empty());
        with_entries.fold(0, |set, (class, _)| set | 1 << class)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn higher_classes_are_offered_first() {
        let mut pending = PendingConnections::default();
        let of = |class| PendingClass { class, lower_share_percent: 25 };
        (0..20).for_each(|socket| pending.push_back(socket, None));
        (20..40).for_each(|socket| pending.push_back(socket, Some(of(BEST_EFFORT))));
        (40..70).for_each(|socket| pending.push_back(socket, Some(of(6))));
        pending.push_back(70, Some(of(0)));
        pending.push_front(71, Some(of(6)));
        pending.raise(5, of(7));
        pending.raise(70, of(7));
        // A connection is not moved to a lower class.
        pending.raise(5, of(2));
        assert_eq!(pending.len(), 72);
        let order = pending.take_all();
        assert_eq!(order[..2], [5, 70]);
        let low = order[2..42].iter().filter(|socket| **socket < 40).count();
        assert!((9..=11).contains(&low), "{low} of 40 got their share");
        let (high, low): (Vec<u32>, Vec<u32>) = order[2..].iter().partition(|socket| **socket >= 40);
        assert_eq!(high, [71].into_iter().chain(40..70).collect::<Vec<_>>());
        assert_eq!(low, (0..40).filter(|socket| *socket != 5).collect::<Vec<_>>());
        assert!(pending.is_empty() && pending.pop().is_none());
    }
}
