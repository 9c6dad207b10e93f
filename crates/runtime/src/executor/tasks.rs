//! The tasks of an executor: their slots, the run queue, and the results of tasks that ended.

use super::run_queue::RunQueue;
use super::waiters::Waiters;
use super::waker::{LocalWaker, RemoteWakeups};
use core::any::Any;
use core::pin::Pin;
use core::task::{Context, Poll};
use std::sync::Arc;

/// A type-erased future. It takes one allocation; its result is boxed only if a handle exists (boxing a `()`
/// allocates nothing).
pub(super) trait Task {
    fn poll_task(self: Pin<&mut Self>, cx: &mut Context<'_>, keep: bool) -> Poll<Output>;
}

/// The result of a task, if it is kept.
pub(super) type Output = Option<Box<dyn Any>>;

impl<F: Future<Output: 'static>> Task for F {
    fn poll_task(self: Pin<&mut Self>, cx: &mut Context<'_>, keep: bool) -> Poll<Output> {
        self.poll(cx).map(|output| keep.then(|| Box::new(output) as Box<dyn Any>))
    }
}

pub(super) type BoxedTask = Pin<Box<dyn Task>>;

/// Why a task has no result.
pub(super) enum TaskError {
    Aborted,
    Panicked(Box<dyn Any + Send>),
}

/// The result of a task that ended.
pub(super) type TaskResult = Result<Output, TaskError>;

enum Stage {
    Vacant,
    Idle(BoxedTask),
    /// The task is being polled, and the executor has its future.
    Running,
    Ended(TaskResult),
}

/// A slot for a task.
struct TaskSlot {
    stage: Stage,
    /// The task's waker, once a clone of it exists. It stays with the slot.
    waker: Option<LocalWaker>,
    /// Waiters for the task's end.
    joiners: Waiters,
    generation: u32,
    /// One more than the class with which the task is in one of the queues; 0 if it is in none. Entries of
    /// other classes are obsolete: a task that is made ready again with a higher class gets a second entry.
    queued_above: u8,
    /// True if the task is dropped instead of its next poll.
    abort: bool,
    /// True if a handle to the task exists.
    joinable: bool,
}

/// A task that was taken out to be polled.
pub(super) struct TakenTask {
    pub(super) index: u32,
    pub(super) future: BoxedTask,
    pub(super) waker: LocalWaker,
    pub(super) joinable: bool,
    pub(super) abort: bool,
}

pub(super) struct Tasks {
    slots: Vec<TaskSlot>,
    free: Vec<u32>,
    /// Tasks that are ready in this turn.
    queue: RunQueue,
    /// Tasks that woke themselves, with their classes: they are ready in the next turn, after the network was
    /// served.
    next_turn: Vec<(u32, u8)>,
    /// The waker for the next task without one; it belongs to the task once the task clones it.
    unclaimed_waker: LocalWaker,
    shared: Arc<RemoteWakeups>,
    live: usize,
}

impl Tasks {
    pub(super) fn new(shared: Arc<RemoteWakeups>, lower_share_percent: u32) -> Self {
        let unclaimed_waker = LocalWaker::new(&shared);
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            queue: RunQueue::new(lower_share_percent),
            next_turn: Vec::new(),
            unclaimed_waker,
            shared,
            live: 0,
        }
    }

    /// Adds and schedules a task. Returns its slot and the generation of the slot.
    pub(super) fn add(&mut self, future: BoxedTask) -> (u32, u32) {
        self.live += 1;
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(TaskSlot {
                stage: Stage::Vacant,
                waker: None,
                joiners: Waiters::NONE,
                generation: 0,
                queued_above: 0,
                abort: false,
                joinable: false,
            });
            // Cannot truncate: memory is exhausted before 2^32 slots exist.
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        slot.stage = Stage::Idle(future);
        slot.abort = false;
        slot.joinable = true;
        let generation = slot.generation;
        self.schedule(index);
        (index, generation)
    }

    /// Makes a task ready. Does nothing if the task has ended, because a waker may outlive its task.
    pub(super) fn schedule(&mut self, index: u32) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        let class = self.queue.class();
        if slot.queued_above > class {
            return;
        }
        match slot.stage {
            Stage::Idle(_) => self.queue.push(index),
            Stage::Running => self.next_turn.push((index, class)),
            Stage::Vacant | Stage::Ended(_) => return,
        }
        slot.queued_above = class + 1;
    }

    /// Makes the tasks ready that woke themselves in the last turn.
    pub(super) fn begin_turn(&mut self) {
        for (index, class) in self.next_turn.drain(..) {
            self.queue.push_to_class(index, class);
        }
    }

    /// Returns whether no task is ready.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.next_turn.is_empty()
    }

    /// Returns the number of tasks that have not ended.
    pub(super) const fn live(&self) -> usize {
        self.live
    }

    /// Returns the number of slots, free ones included.
    pub(super) const fn slot_count(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Sets the class of priority of what happens from now on: tasks that it makes ready get this class.
    pub(super) fn set_class(&mut self, class: u8) {
        self.queue.set_class(class);
    }

    /// Returns the class that was set last.
    pub(super) fn class(&self) -> u8 {
        self.queue.class()
    }

    /// Takes the next task from the run queue, and sets its class.
    pub(super) fn take_next(&mut self) -> Option<TakenTask> {
        loop {
            let index = self.queue.pop()?;
            let slot = &mut self.slots[index as usize];
            if slot.queued_above != self.queue.class() + 1 {
                self.queue.discard();
                continue;
            }
            slot.queued_above = 0;
            let taken = self.take(index);
            if taken.is_some() {
                return taken;
            }
        }
    }

    /// Takes out a task that is not being polled.
    pub(super) fn take(&mut self, index: u32) -> Option<TakenTask> {
        let slot = &mut self.slots[index as usize];
        if !matches!(slot.stage, Stage::Idle(_)) {
            return None;
        }
        let Stage::Idle(future) = core::mem::replace(&mut slot.stage, Stage::Running) else { return None };
        let waker = slot.waker.clone().unwrap_or_else(|| {
            self.unclaimed_waker.assign(index);
            self.unclaimed_waker.clone()
        });
        Some(TakenTask { index, future, waker, joinable: slot.joinable, abort: slot.abort })
    }

    /// Puts back a task that is not done. Returns the future if the task was aborted meanwhile.
    pub(super) fn put_back(&mut self, index: u32, future: BoxedTask) -> Result<(), BoxedTask> {
        self.keep_waker(index);
        let slot = &mut self.slots[index as usize];
        if slot.abort {
            return Err(future);
        }
        slot.stage = Stage::Idle(future);
        Ok(())
    }

    /// Gives the unclaimed waker to this slot, for good, if the task has cloned it.
    fn keep_waker(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        if slot.waker.is_none() && self.unclaimed_waker.is_shared() {
            slot.waker = Some(core::mem::replace(&mut self.unclaimed_waker, LocalWaker::new(&self.shared)));
        }
    }

    /// Records the result of a task. Returns its waiters, and the result if no handle to the task exists.
    pub(super) fn end(&mut self, index: u32, result: TaskResult) -> (Waiters, Option<TaskResult>) {
        self.keep_waker(index);
        self.live -= 1;
        let slot = &mut self.slots[index as usize];
        let joiners = core::mem::replace(&mut slot.joiners, Waiters::NONE);
        slot.stage = Stage::Ended(result);
        if slot.joinable {
            return (joiners, None);
        }
        (joiners, self.vacate(index))
    }

    fn vacate(&mut self, index: u32) -> Option<TaskResult> {
        let slot = &mut self.slots[index as usize];
        let Stage::Ended(result) = core::mem::replace(&mut slot.stage, Stage::Vacant) else { return None };
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(index);
        Some(result)
    }

    fn slot_of(&mut self, index: u32, generation: u32) -> Option<&mut TaskSlot> {
        self.slots.get_mut(index as usize).filter(|slot| slot.generation == generation)
    }

    /// Returns the result if the task has ended, and frees its slot.
    pub(super) fn join(&mut self, index: u32, generation: u32) -> Option<TaskResult> {
        let slot = self.slot_of(index, generation)?;
        matches!(slot.stage, Stage::Ended(_)).then(|| self.vacate(index)).flatten()
    }

    pub(super) fn joiners_mut(&mut self, index: u32) -> Option<&mut Waiters> {
        self.slots.get_mut(index as usize).map(|slot| &mut slot.joiners)
    }

    pub(super) fn has_ended(&mut self, index: u32, generation: u32) -> bool {
        self.slot_of(index, generation).is_none_or(|slot| matches!(slot.stage, Stage::Ended(_)))
    }

    /// Drops the interest in the result. Returns the waiters and the result, if there is one; the caller
    /// drops both.
    pub(super) fn detach(&mut self, index: u32, generation: u32) -> (Waiters, Option<TaskResult>) {
        let Some(slot) = self.slot_of(index, generation) else { return (Waiters::NONE, None) };
        slot.joinable = false;
        let joiners = core::mem::replace(&mut slot.joiners, Waiters::NONE);
        (joiners, self.vacate_if_ended(index))
    }

    fn vacate_if_ended(&mut self, index: u32) -> Option<TaskResult> {
        matches!(self.slots[index as usize].stage, Stage::Ended(_)).then(|| self.vacate(index)).flatten()
    }

    /// Makes the executor drop the task instead of polling it again.
    pub(super) fn abort(&mut self, index: u32, generation: u32) {
        if let Some(slot) = self.slot_of(index, generation)
            && matches!(slot.stage, Stage::Idle(_) | Stage::Running)
        {
            slot.abort = true;
            self.schedule(index);
        }
    }
}
