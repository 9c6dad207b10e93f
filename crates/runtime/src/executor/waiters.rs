//! Waiters for an object. Usually this is one task, which takes four bytes and no reference count.

use super::slab::Slab;
use core::task::Waker;

/// The waiters for one object: none, the index of a task, or (with the bit `LIST`) the index of a wait list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Waiters(u32);

const LIST: u32 = 1 << 31;

impl Waiters {
    pub(super) const NONE: Self = Self(u32::MAX);
}

/// The waiter to be added.
#[derive(Clone, Copy, Debug)]
pub(super) enum WaiterRef<'a> {
    /// The task that is being polled, with its own waker.
    Task(u32),
    /// A waker of a part of the task, such as a branch of `join!`.
    Waker(&'a Waker),
}

/// Id of the waiters of the `poll_…` functions, which keep only the last caller. The id of a future is 0
/// before it is added to a list, and unique from then on.
pub(super) const POLL_ID: u64 = 1;

#[derive(Debug)]
enum Waiter {
    Task(u32),
    Waker(Waker),
}

#[derive(Debug)]
struct WaitEntry {
    waiter: Waiter,
    id: u64,
}

/// Wakers that were removed from wait lists. They are called or dropped when nothing is borrowed, because
/// both may run code of the application.
#[derive(Debug, Default)]
pub(super) struct DetachedWakers {
    pub(super) to_wake: Vec<Waker>,
    pub(super) to_drop: Vec<Waker>,
}

impl DetachedWakers {
    pub(super) fn is_empty(&self) -> bool {
        self.to_wake.is_empty() && self.to_drop.is_empty()
    }
}

#[derive(Debug)]
pub(super) struct WaitLists {
    lists: Slab<Vec<WaitEntry>>,
    /// Empty lists for reuse.
    spare: Vec<Vec<WaitEntry>>,
    last_id: u64,
    pub(super) detached: DetachedWakers,
}

impl WaitLists {
    pub(super) fn new() -> Self {
        Self { lists: Slab::new(), spare: Vec::new(), last_id: POLL_ID, detached: DetachedWakers::default() }
    }

    /// Adds a waiter and returns the new waiters. `id` belongs to the future; it is set if it is 0 and the
    /// waiter is added to a list.
    pub(super) fn add(&mut self, waiters: Waiters, waiter: WaiterRef<'_>, id: &mut u64) -> Waiters {
        let list = match (waiters, waiter) {
            (Waiters::NONE, WaiterRef::Task(task)) => return Waiters(task),
            // One wake-up is enough for all parts of a task that share its waker.
            (Waiters(other), WaiterRef::Task(task)) if other == task => return waiters,
            (Waiters::NONE, _) => self.new_list(),
            (Waiters(code), _) if code & LIST != 0 => code & !LIST,
            (Waiters(task), _) => {
                let list = self.new_list();
                self.lists[list].push(WaitEntry { waiter: Waiter::Task(task), id: 0 });
                list
            }
        };
        let entries = &mut self.lists[list];
        if let WaiterRef::Task(task) = waiter
            && entries.iter().any(|e| matches!(e.waiter, Waiter::Task(t) if t == task))
        {
            return Waiters(list | LIST);
        }
        if *id == 0 {
            self.last_id += 1;
            *id = self.last_id;
        }
        let waiter = match (waiter, entries.iter_mut().find(|e| e.id == *id)) {
            (WaiterRef::Waker(waker), Some(WaitEntry { waiter: Waiter::Waker(registered), .. }))
                if registered.will_wake(waker) =>
            {
                return Waiters(list | LIST);
            }
            (waiter, Some(entry)) => {
                let old = core::mem::replace(&mut entry.waiter, waiter.to_owned());
                if let Waiter::Waker(waker) = old {
                    self.detached.to_drop.push(waker);
                }
                return Waiters(list | LIST);
            }
            (waiter, None) => waiter.to_owned(),
        };
        entries.push(WaitEntry { waiter, id: *id });
        Waiters(list | LIST)
    }

    fn new_list(&mut self) -> u32 {
        let list = self.spare.pop().unwrap_or_default();
        self.lists.insert(list)
    }

    /// Wakes all waiters: passes tasks to `schedule`, and moves wakers to `detached`.
    pub(super) fn wake(&mut self, waiters: Waiters, mut schedule: impl FnMut(u32)) {
        match waiters {
            Waiters::NONE => {}
            Waiters(code) if code & LIST == 0 => schedule(code),
            Waiters(code) => self.end_list(code & !LIST, |waiter, detached| match waiter {
                Waiter::Task(task) => schedule(task),
                Waiter::Waker(waker) => detached.to_wake.push(waker),
            }),
        }
    }

    /// Removes all waiters without waking them.
    pub(super) fn forget(&mut self, waiters: Waiters) {
        if waiters != Waiters::NONE && waiters.0 & LIST != 0 {
            self.end_list(waiters.0 & !LIST, |waiter, detached| {
                if let Waiter::Waker(waker) = waiter {
                    detached.to_drop.push(waker);
                }
            });
        }
    }

    fn end_list(&mut self, list: u32, mut each: impl FnMut(Waiter, &mut DetachedWakers)) {
        let Some(mut entries) = self.lists.remove(list) else { return };
        for entry in entries.drain(..) {
            each(entry.waiter, &mut self.detached);
        }
        self.spare.push(entries);
    }

    /// Removes the waiter of a future that is dropped, and returns the remaining waiters. An entry of a task
    /// may stand for several of its futures, so the task is passed to `schedule` and polls its other futures
    /// again; a spurious poll is permitted.
    pub(super) fn remove(&mut self, waiters: Waiters, id: u64, mut schedule: impl FnMut(u32)) -> Waiters {
        if waiters == Waiters::NONE || waiters.0 & LIST == 0 {
            // A single task stays; at worst it is woken once spuriously.
            return waiters;
        }
        let list = waiters.0 & !LIST;
        let entries = &mut self.lists[list];
        let Some(position) = entries.iter().position(|e| e.id == id) else { return waiters };
        match entries.swap_remove(position).waiter {
            Waiter::Task(task) => schedule(task),
            Waiter::Waker(waker) => self.detached.to_drop.push(waker),
        }
        if !self.lists[list].is_empty() {
            return waiters;
        }
        self.end_list(list, |_, _| {});
        Waiters::NONE
    }

    /// Returns the number of lists in use.
    pub(super) fn lists(&self) -> usize {
        self.lists.len()
    }
}

impl WaiterRef<'_> {
    fn to_owned(self) -> Waiter {
        match self {
            Self::Task(task) => Waiter::Task(task),
            Self::Waker(waker) => Waiter::Waker(waker.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{POLL_ID, WaitLists, WaiterRef, Waiters};
    use core::sync::atomic::{AtomicUsize, Ordering};
    use core::task::Waker;
    use std::sync::Arc;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl std::task::Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn woken(lists: &mut WaitLists, waiters: Waiters) -> Vec<u32> {
        let mut tasks = Vec::new();
        lists.wake(waiters, |task| tasks.push(task));
        lists.detached.to_wake.drain(..).for_each(Waker::wake);
        tasks
    }

    #[test]
    fn single_task_needs_no_list() {
        let mut lists = WaitLists::new();
        let mut waiters = Waiters::NONE;
        for _ in 0..3 {
            waiters = lists.add(waiters, WaiterRef::Task(7), &mut 0);
        }
        assert_eq!(lists.lists(), 0);
        assert_eq!(woken(&mut lists, waiters), [7]);
    }

    #[test]
    fn tasks_and_wakers_are_each_woken_once() {
        let mut lists = WaitLists::new();
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        let (mut a, mut b, mut w) = (0, 0, 0);
        let mut waiters = lists.add(Waiters::NONE, WaiterRef::Task(1), &mut a);
        waiters = lists.add(waiters, WaiterRef::Task(2), &mut b);
        waiters = lists.add(waiters, WaiterRef::Waker(&waker), &mut w);
        waiters = lists.add(waiters, WaiterRef::Waker(&waker), &mut w);
        assert_eq!(woken(&mut lists, waiters), [1, 2]);
        assert_eq!((count.0.load(Ordering::Relaxed), lists.lists()), (1, 0));
    }

    #[test]
    fn dropped_future_leaves_no_waiter() {
        let mut lists = WaitLists::new();
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        let mut waiters = Waiters::NONE;
        for _ in 0..1000 {
            let mut id = 0;
            waiters = lists.add(waiters, WaiterRef::Waker(&waker), &mut id);
            waiters = lists.remove(waiters, id, |_| panic!("no task waits"));
        }
        assert_eq!((waiters, lists.lists()), (Waiters::NONE, 0));
        lists.detached.to_drop.clear();
        drop(waker);
        assert_eq!(Arc::strong_count(&count), 1);
    }

    #[test]
    fn task_with_two_futures_is_scheduled_when_one_drops() {
        let mut lists = WaitLists::new();
        let (mut other, mut first, mut second) = (0, 0, 0);
        let mut waiters = lists.add(Waiters::NONE, WaiterRef::Task(1), &mut other);
        waiters = lists.add(waiters, WaiterRef::Task(2), &mut first);
        waiters = lists.add(waiters, WaiterRef::Task(2), &mut second);
        let mut scheduled = Vec::new();
        waiters = lists.remove(waiters, first, |task| scheduled.push(task));
        assert_eq!(scheduled, [2]);
        assert_eq!(woken(&mut lists, waiters), [1]);
    }

    #[test]
    fn poll_functions_keep_the_last_caller() {
        let mut lists = WaitLists::new();
        let counts = [Arc::new(Count::default()), Arc::new(Count::default())];
        let mut waiters = Waiters::NONE;
        for count in &counts {
            let waker = Waker::from(Arc::clone(count));
            waiters = lists.add(waiters, WaiterRef::Waker(&waker), &mut { POLL_ID });
        }
        assert_eq!(woken(&mut lists, waiters), [0u32; 0]);
        assert_eq!(counts.map(|c| c.0.load(Ordering::Relaxed)), [0, 1]);
    }
}
