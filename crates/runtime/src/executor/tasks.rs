//! The tasks of an executor: where they are, which of them can go on, and what became of those that ended.

use super::waiters::Waiters;
use super::waker::{LocalWaker, RemoteWakeups};
use core::any::Any;
use core::pin::Pin;
use core::task::{Context, Poll};
use std::collections::VecDeque;
use std::sync::Arc;

/// A future whose type and result are forgotten. One allocation holds it; its result is boxed only if somebody waits for it (and a `()` needs
/// no memory in a box).
pub(super) trait Task {
    fn poll_task(self: Pin<&mut Self>, cx: &mut Context<'_>, keep: bool) -> Poll<Output>;
}

/// What a task returned, if it is kept.
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

/// How a task ended.
pub(super) type TaskResult = Result<Output, TaskError>;

enum Stage {
    Vacant,
    Idle(BoxedTask),
    /// It is being polled; the future is with the executor.
    Running,
    Ended(TaskResult),
}

/// A place for a task.
struct TaskSlot {
    stage: Stage,
    /// Its waker, if anybody has a clone of it; stays with the place.
    waker: Option<LocalWaker>,
    /// Who waits for its end.
    joiners: Waiters,
    generation: u32,
    /// It is in one of the queues.
    is_queued: bool,
    /// It is to be ended instead of polled.
    abort: bool,
    /// Somebody has a handle to it.
    joinable: bool,
}

/// A task that is taken out to be polled.
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
    /// Tasks that can go on in this turn.
    queue: VecDeque<u32>,
    /// Tasks that woke themselves: they go on in the next turn, after the network had its own.
    next_turn: Vec<u32>,
    /// The waker that tasks are polled with until they give a clone of it away.
    unclaimed_waker: LocalWaker,
    shared: Arc<RemoteWakeups>,
    live: usize,
}

impl Tasks {
    pub(super) fn new(shared: Arc<RemoteWakeups>) -> Self {
        let unclaimed_waker = LocalWaker::new(&shared);
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            queue: VecDeque::new(),
            next_turn: Vec::new(),
            unclaimed_waker,
            shared,
            live: 0,
        }
    }

    /// Puts a task into a place and into the queue. Returns the place and its generation.
    pub(super) fn add(&mut self, future: BoxedTask) -> (u32, u32) {
        self.live += 1;
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(TaskSlot {
                stage: Stage::Vacant,
                waker: None,
                joiners: Waiters::NONE,
                generation: 0,
                is_queued: false,
                abort: false,
                joinable: false,
            });
            // A task is more than eight bytes: memory ends before the numbers do.
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

    /// Lets a task go on. A number that stands for no task is one of a waker that outlived its task.
    pub(super) fn schedule(&mut self, index: u32) {
        let Some(slot) = self.slots.get_mut(index as usize) else { return };
        if slot.is_queued {
            return;
        }
        match slot.stage {
            Stage::Idle(_) => self.queue.push_back(index),
            Stage::Running => self.next_turn.push(index),
            Stage::Vacant | Stage::Ended(_) => return,
        }
        slot.is_queued = true;
    }

    /// Those who woke themselves in the last turn can go on in this one.
    pub(super) fn begin_turn(&mut self) {
        self.queue.extend(self.next_turn.drain(..));
    }

    /// Whether any task can go on.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.next_turn.is_empty()
    }

    /// Tasks that have not ended.
    pub(super) const fn live(&self) -> usize {
        self.live
    }

    /// Places that there are.
    pub(super) const fn slot_count(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Takes the next task out of the queue.
    pub(super) fn take_next(&mut self) -> Option<TakenTask> {
        loop {
            let index = self.queue.pop_front()?;
            self.slots[index as usize].is_queued = false;
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

    /// Puts a task back that is not done. Gives it back if it is to be ended.
    pub(super) fn put_back(&mut self, index: u32, future: BoxedTask) -> Result<(), BoxedTask> {
        self.keep_waker(index);
        let slot = &mut self.slots[index as usize];
        if slot.abort {
            return Err(future);
        }
        slot.stage = Stage::Idle(future);
        Ok(())
    }

    /// Once a clone of the common waker is about it stands for this place for ever.
    fn keep_waker(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        if slot.waker.is_none() && self.unclaimed_waker.is_shared() {
            slot.waker = Some(core::mem::replace(&mut self.unclaimed_waker, LocalWaker::new(&self.shared)));
        }
    }

    /// A task has ended. Returns who waits for that, and the result if nobody ever will.
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

    /// The result, if the task has ended; the place is free then.
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

    /// Nobody will ask for the result. Returns who waited, and the result if there is one, both to be dropped.
    pub(super) fn detach(&mut self, index: u32, generation: u32) -> (Waiters, Option<TaskResult>) {
        let Some(slot) = self.slot_of(index, generation) else { return (Waiters::NONE, None) };
        slot.joinable = false;
        let joiners = core::mem::replace(&mut slot.joiners, Waiters::NONE);
        (joiners, self.vacate_if_ended(index))
    }

    fn vacate_if_ended(&mut self, index: u32) -> Option<TaskResult> {
        matches!(self.slots[index as usize].stage, Stage::Ended(_)).then(|| self.vacate(index)).flatten()
    }

    /// Ends a task when its turn comes.
    pub(super) fn abort(&mut self, index: u32, generation: u32) {
        if let Some(slot) = self.slot_of(index, generation)
            && matches!(slot.stage, Stage::Idle(_) | Stage::Running)
        {
            slot.abort = true;
            self.schedule(index);
        }
    }
}
