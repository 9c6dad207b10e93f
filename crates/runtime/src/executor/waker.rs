//! Waking tasks. On the executor's thread a waker adds its task to the run queue. On other threads it adds
//! the task to a locked list, in which each task is at most once, and sends a command to the shard, which may
//! be asleep.

use super::local;
use crate::command::Commander;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use core::task::Waker;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Wake;

/// The command that makes a shard look for tasks woken by other threads. It has no fields, so sending it
/// allocates nothing.
pub(super) struct CheckWokenTasks;

/// The part of an executor that other threads access.
#[derive(Debug)]
pub(super) struct RemoteWakeups {
    /// Id of the executor.
    pub(super) id: u32,
    /// The list `woken` is not empty.
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

    /// Appends the tasks that other threads have woken since the last call to `into`. Costs one load if there
    /// are none.
    pub(super) fn take_woken(&self, into: &mut Vec<Arc<TaskWaker>>) {
        // A waker that finds the mailbox full relies on this order: the shard takes its commands before it
        // looks here.
        if !self.has_woken.load(Ordering::SeqCst) || !self.has_woken.swap(false, Ordering::SeqCst) {
            return;
        }
        let mut woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        into.append(&mut woken);
        drop(woken);
        for task in into {
            // From here on the task may be queued again. Acquires the writes of the wakers that found it
            // queued.
            task.is_queued.swap(false, Ordering::AcqRel);
        }
    }
}

/// The shared part of a task's wakers.
#[derive(Debug)]
pub(super) struct TaskWaker {
    /// Index of the task. Constant as long as a clone exists outside of the executor.
    task: AtomicU32,
    /// The task is in `RemoteWakeups::woken`, which therefore never has more entries than there are tasks.
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
            // If the mailbox is full, the shard is awake and looks for woken tasks itself. If the shard is
            // gone, the task is, too.
            let _ = shared.commander.send(Box::new(CheckWokenTasks));
        }
    }
}

/// A waker together with its shared part. Cloning it changes no memory that other threads access.
#[derive(Clone, Debug)]
pub(super) struct LocalWaker(Rc<(Arc<TaskWaker>, Waker)>);

impl LocalWaker {
    pub(super) fn new(shared: &Arc<RemoteWakeups>) -> Self {
        let (task, is_queued) = (AtomicU32::new(0), AtomicBool::new(false));
        let task = Arc::new(TaskWaker { task, is_queued, shared: Arc::clone(shared) });
        let waker = Waker::from(Arc::clone(&task));
        Self(Rc::new((task, waker)))
    }

    pub(super) fn waker(&self) -> &Waker {
        &self.0.1
    }

    /// Assigns the waker to a task. Only for a waker without clones.
    pub(super) fn assign(&self, task: u32) {
        self.0.0.task.store(task, Ordering::Relaxed);
    }

    /// Returns whether a clone exists, so that the waker cannot be assigned to another task any more.
    pub(super) fn is_shared(&self) -> bool {
        // Two references are this value's own.
        let shared = Arc::strong_count(&self.0.0) > 2;
        // Orders everything that another thread did with its clone before what follows here.
        fence(Ordering::Acquire);
        shared
    }
}
