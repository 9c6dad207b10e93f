//! Waking a task: on its own thread by entering it into the run queue, from another thread through a list that each task is in once at
//! the most, and the shard's mailbox if the shard may sleep.

use super::local;
use crate::command::Commander;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use core::task::Waker;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Wake;

/// The command that makes a shard look for tasks woken by other threads. Nothing in it: sending it allocates nothing.
pub(super) struct CheckWokenTasks;

/// What other threads have of an executor.
#[derive(Debug)]
pub(super) struct RemoteWakeups {
    /// The executor's number.
    pub(super) id: u32,
    /// Something is in `woken`.
    has_woken: AtomicBool,
    woken: Mutex<Vec<Arc<TaskWaker>>>,
    commander: Commander,
}

impl RemoteWakeups {
    pub(super) fn new(id: u32, commander: Commander) -> Self {
        Self { id, has_woken: AtomicBool::new(false), woken: Mutex::new(Vec::new()), commander }
    }

    pub(super) fn commander(&self) -> &Commander {
        &self.commander
    }

    /// Tasks that other threads have woken since the last call. Costs one load if there are none.
    pub(super) fn take_woken(&self, into: &mut Vec<Arc<TaskWaker>>) {
        // Whoever finds the mailbox full relies on this: the shard, which then has a command to take, takes it before it looks here.
        if !self.has_woken.load(Ordering::SeqCst) || !self.has_woken.swap(false, Ordering::SeqCst) {
            return;
        }
        let mut woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        into.append(&mut woken);
        drop(woken);
        for task in into {
            // From here on it may be entered again. Acquires what those wrote who found it entered.
            task.is_queued.swap(false, Ordering::AcqRel);
        }
    }
}

/// What the wakers of a task share.
#[derive(Debug)]
pub(super) struct TaskWaker {
    /// The task's place. Stays the same as long as anybody but the executor has this waker.
    task: AtomicU32,
    /// It is in `Shared::woken`, which thus never holds more entries than there are tasks.
    is_queued: AtomicBool,
    shared: Arc<RemoteWakeups>,
}

impl TaskWaker {
    pub(super) fn task(&self) -> u32 {
        self.task.load(Ordering::Relaxed)
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if local::schedule(self.shared.id, self.task()) || self.is_queued.swap(true, Ordering::AcqRel) {
            return;
        }
        let shared = &self.shared;
        shared.woken.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(self));
        if !shared.has_woken.swap(true, Ordering::SeqCst) {
            // If the mailbox is full the shard has things to do and looks by itself; if the shard is gone nobody waits.
            let _ = shared.commander.send(Box::new(CheckWokenTasks));
        }
    }
}

/// A waker and what it shares with its clones. Cloning it touches no shared memory.
#[derive(Clone, Debug)]
pub(super) struct LocalWaker(Rc<(Arc<TaskWaker>, Waker)>);

impl LocalWaker {
    pub(super) fn new(shared: &Arc<RemoteWakeups>) -> Self {
        let (task, entered) = (AtomicU32::new(0), AtomicBool::new(false));
        let task = Arc::new(TaskWaker { task, is_queued: entered, shared: Arc::clone(shared) });
        let waker = Waker::from(Arc::clone(&task));
        Self(Rc::new((task, waker)))
    }

    pub(super) fn waker(&self) -> &Waker {
        &self.0.1
    }

    /// From now on it stands for this task. Only for one that nobody else has.
    pub(super) fn assign(&self, task: u32) {
        self.0.0.task.store(task, Ordering::Relaxed);
    }

    /// Whether a clone is about, so that it can never stand for another task.
    pub(super) fn is_shared(&self) -> bool {
        // Two references are this value's own.
        let shared = Arc::strong_count(&self.0.0) > 2;
        // If another thread has just dropped its clone, what it did with it comes before what we do next.
        fence(Ordering::Acquire);
        shared
    }
}
