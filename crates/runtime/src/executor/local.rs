//! Thread-local state: the executors of this thread, and the one whose tasks are running, with the core of
//! its shard.
//!
//! `Future::poll` has no argument for the shard, so tasks reach it through here. The boxed core itself is
//! moved here while tasks run; no reference is stored, so nothing is unsafe.

use super::state::{ExecutorInner, ExecutorState, WaitTarget};
use super::waiters::{POLL_ID, WaiterRef};
use super::waker::LocalWaker;
use crate::context::{CoreSlot, ShardCore};
use core::cell::RefCell;
use core::pin::Pin;
use core::task::{Context, Poll};
use std::io;
use std::rc::Rc;

thread_local! {
    static EXECUTORS: RefCell<Vec<Rc<ExecutorInner>>> = const { RefCell::new(Vec::new()) };
    static RUNNING: RefCell<Option<RunningExecutor>> = const { RefCell::new(None) };
}

/// Successful operations (reads, writes, accepts and so on) of a task per poll. At the limit the task yields
/// to others.
const OPERATIONS_PER_POLL_MAX: u32 = 128;

const NOT_IN_TASK: &str = "no task of a Ginnel shard is running on this thread";
const WRONG_SHARD: &str = "this object belongs to another Ginnel shard, or its shard is not running";

/// The executor whose tasks are running.
struct RunningExecutor {
    core: Box<ShardCore>,
    inner: Rc<ExecutorInner>,
    /// The task that is being polled, and its waker.
    task: u32,
    waker: Option<LocalWaker>,
    budget: u32,
}

/// Access of a running task to its shard and its executor. Code that has it must not run code of the
/// application: it calls no waker and drops no value of the application.
pub(super) struct Access<'a> {
    pub(super) core: &'a mut ShardCore,
    pub(super) state: &'a mut ExecutorState,
    pub(super) executor: u32,
}

/// Marks the time during which an executor's tasks run. Dropping it ends that time.
pub(super) struct ExecutorGuard<'a> {
    core: &'a mut CoreSlot,
    /// The executor that was running before, if one of its tasks drives another shard; it continues
    /// afterwards.
    outer: Option<RunningExecutor>,
}

impl<'a> ExecutorGuard<'a> {
    pub(super) fn new(core: &'a mut CoreSlot, inner: &Rc<ExecutorInner>) -> Self {
        let inner = Rc::clone(inner);
        let running = RunningExecutor { core: core.take(), inner, task: u32::MAX, waker: None, budget: 0 };
        Self { outer: RUNNING.replace(Some(running)), core }
    }

    /// Returns whether the shard must look at its devices before another task is polled.
    pub(super) fn must_look_at_devices(&self) -> bool {
        RUNNING.with_borrow(|running| running.as_ref().is_some_and(|r| r.core.must_look_at_devices()))
    }

    /// Sets the task that is polled next.
    pub(super) fn set_task(&self, task: u32, waker: LocalWaker) {
        RUNNING.with_borrow_mut(|running| {
            if let Some(running) = running {
                running.task = task;
                running.waker = Some(waker);
                running.budget = OPERATIONS_PER_POLL_MAX;
            }
        });
    }
}

impl Drop for ExecutorGuard<'_> {
    fn drop(&mut self) {
        if let Some(running) = RUNNING.replace(self.outer.take()) {
            self.core.put(running.core);
        }
    }
}

/// Registers an executor on this thread.
pub(super) fn register(inner: Rc<ExecutorInner>) {
    EXECUTORS.with_borrow_mut(|executors| executors.push(inner));
}

/// Removes an executor from this thread. The caller drops it when nothing is borrowed.
pub(super) fn unregister(id: u32) -> Option<Rc<ExecutorInner>> {
    let taken = EXECUTORS.try_with(|executors| {
        let mut executors = executors.borrow_mut();
        let position = executors.iter().position(|inner| inner.id == id)?;
        Some(executors.swap_remove(position))
    });
    taken.ok().flatten()
}

/// Returns the executor with this id, if it belongs to this thread.
pub(super) fn find(id: u32) -> Option<Rc<ExecutorInner>> {
    let found =
        EXECUTORS.try_with(|executors| executors.borrow().iter().find(|inner| inner.id == id).cloned());
    found.ok().flatten()
}

/// Makes a task ready. Returns false if its executor does not belong to this thread.
pub(super) fn schedule(id: u32, task: u32) -> bool {
    let scheduled = EXECUTORS.try_with(|executors| {
        let executors = executors.borrow();
        let inner = executors.iter().find(|inner| inner.id == id)?;
        inner.state.borrow_mut().tasks.schedule(task);
        Some(())
    });
    scheduled.is_ok_and(|s| s.is_some())
}

/// Calls `act` with the state of an executor of this thread, running or not. Returns `None` if the executor
/// has ended.
pub(super) fn state<R>(id: u32, act: impl FnOnce(&mut ExecutorState) -> R) -> Option<R> {
    let inner = find(id)?;
    let result = act(&mut inner.state.borrow_mut());
    inner.flush_wakers();
    Some(result)
}

/// Returns the id of the executor whose task is running.
///
/// # Panics
/// If no task is running.
#[track_caller]
pub(super) fn current() -> u32 {
    match RUNNING.with_borrow(|running| running.as_ref().map(|r| r.inner.id)) {
        Some(id) => id,
        None => panic!("{NOT_IN_TASK}"),
    }
}

/// Returns the id of the executor whose task is running, or an error if no task is running.
pub(super) fn current_or_error() -> io::Result<u32> {
    RUNNING
        .with_borrow(|running| running.as_ref().map(|r| r.inner.id))
        .ok_or_else(|| io::Error::other(NOT_IN_TASK))
}

/// Calls `act` with the running shard. Fails if another executor, or none, is running.
pub(super) fn access<R>(executor: u32, act: impl FnOnce(&mut Access<'_>) -> R) -> io::Result<R> {
    let mut pending_wakers = None;
    let result = RUNNING.with_borrow_mut(|running| {
        let running = running.as_mut().filter(|r| r.inner.id == executor)?;
        let mut state = running.inner.state.borrow_mut();
        let result = act(&mut Access { core: &mut running.core, state: &mut state, executor });
        if !state.wait_lists.detached.is_empty() {
            pending_wakers = Some(Rc::clone(&running.inner));
        }
        Some(result)
    });
    if let Some(inner) = pending_wakers {
        inner.flush_wakers();
    }
    result.ok_or_else(|| io::Error::other(WRONG_SHARD))
}

/// Calls `act` with an executor's state, and with the core of its shard if its tasks are running. For
/// destructors, which may run anywhere.
pub(super) fn release(executor: u32, act: impl FnOnce(&mut ExecutorState, Option<&mut ShardCore>)) {
    let mut act = Some(act);
    let inner = RUNNING.try_with(|running| {
        let mut running = running.borrow_mut();
        let running = running.as_mut().filter(|r| r.inner.id == executor)?;
        let mut state = running.inner.state.borrow_mut();
        if let Some(act) = act.take() {
            act(&mut state, Some(&mut running.core));
        }
        Some(Rc::clone(&running.inner))
    });
    match (inner, act) {
        (Ok(Some(inner)), _) => inner.flush_wakers(),
        (_, Some(act)) => {
            state(executor, |state| act(state, None));
        }
        _ => {}
    }
}

/// The registration of a future with the object that it waits for. Dropping it removes the waiter.
#[derive(Debug)]
pub(super) struct WaitRegistration {
    executor: u32,
    target: WaitTarget,
    id: u64,
}

/// Result of an attempt.
enum PollStep<R> {
    Done(R),
    Pending,
    OutOfBudget,
}

impl WaitRegistration {
    /// Creates the registration of a future.
    pub(super) const fn new(executor: u32, target: WaitTarget) -> Self {
        Self { executor, target, id: 0 }
    }

    /// Creates the registration of a `poll_…` function, which wakes only its last caller.
    pub(super) const fn poll_function(executor: u32, target: WaitTarget) -> Self {
        Self { executor, target, id: POLL_ID }
    }

    /// Calls `attempt`, and registers the waiter if it returns `None`. A task that has used its budget is
    /// woken again at once instead.
    pub(super) fn poll<R>(
        &mut self,
        cx: &mut Context<'_>,
        attempt: impl FnOnce(&mut Access<'_>) -> Option<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        let mut pending_wakers = None;
        let step = RUNNING.with_borrow_mut(|running| {
            let running = running.as_mut().filter(|r| r.inner.id == self.executor)?;
            let is_task_waker =
                running.waker.as_ref().is_some_and(|waker| waker.waker().will_wake(cx.waker()));
            if running.budget == 0 {
                return Some(PollStep::OutOfBudget);
            }
            let mut state = running.inner.state.borrow_mut();
            let executor = self.executor;
            let step = match attempt(&mut Access { core: &mut running.core, state: &mut state, executor }) {
                Some(result) => {
                    running.budget -= 1;
                    PollStep::Done(result)
                }
                None => {
                    let waiter = if is_task_waker {
                        WaiterRef::Task(running.task)
                    } else {
                        WaiterRef::Waker(cx.waker())
                    };
                    state.wait(self.target, waiter, &mut self.id);
                    PollStep::Pending
                }
            };
            if !state.wait_lists.detached.is_empty() {
                pending_wakers = Some(Rc::clone(&running.inner));
            }
            Some(step)
        });
        if let Some(inner) = pending_wakers {
            inner.flush_wakers();
        }
        match step {
            Some(PollStep::Done(result)) => Poll::Ready(result),
            Some(PollStep::Pending) => Poll::Pending,
            Some(PollStep::OutOfBudget) => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            None => Poll::Ready(Err(io::Error::other(WRONG_SHARD))),
        }
    }
}

/// A future that repeats an attempt until it succeeds. It is smaller than an `async` block, which would store
/// its captures twice.
#[derive(Debug)]
pub(super) struct Attempt<F> {
    waiting: WaitRegistration,
    attempt: F,
}

impl<F> Attempt<F> {
    pub(super) const fn new<R>(executor: u32, target: WaitTarget, attempt: F) -> Self
    where
        F: FnMut(&mut Access<'_>) -> Option<io::Result<R>>,
    {
        Self { waiting: WaitRegistration::new(executor, target), attempt }
    }
}

impl<R, F> Future for Attempt<F>
where
    F: FnMut(&mut Access<'_>) -> Option<io::Result<R>> + Unpin,
{
    type Output = io::Result<R>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<R>> {
        let Self { waiting, attempt } = self.get_mut();
        waiting.poll(cx, attempt)
    }
}

impl Drop for WaitRegistration {
    fn drop(&mut self) {
        if self.id > POLL_ID {
            state(self.executor, |state| state.cancel_wait(self.target, self.id));
        }
    }
}
