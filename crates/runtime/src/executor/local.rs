//! What belongs to a thread: its executors, and the one whose tasks run just now, with the core of its shard.
//!
//! Tasks reach their shard through here and not through an argument, because a future's `poll` has none for it. No reference is kept: the
//! core itself, in its box, lies here while tasks run, so nothing here is unsafe.

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

/// What a task may do at one go before it has to let others do something: so many reads, writes and the like that were successful.
const OPERATIONS_PER_POLL_MAX: u32 = 128;

const NOT_IN_TASK: &str = "no task of a Ginnel shard is running on this thread";
const WRONG_SHARD: &str = "this belongs to another Ginnel shard, or its shard is not running";

/// The executor whose tasks run.
struct RunningExecutor {
    core: Box<ShardCore>,
    inner: Rc<ExecutorInner>,
    /// The task that is being polled, and with which waker.
    task: u32,
    waker: Option<LocalWaker>,
    budget: u32,
}

/// An executor's way to its shard and to itself, while one of its tasks runs. Nothing that is reached from here may run an application's
/// code: no waker is called and nothing of the application's is dropped.
pub(super) struct Access<'a> {
    pub(super) core: &'a mut ShardCore,
    pub(super) state: &'a mut ExecutorState,
    pub(super) executor: u32,
}

/// The time during which an executor's tasks run. Ends when dropped.
pub(super) struct ExecutorGuard<'a> {
    core: &'a mut CoreSlot,
    /// An executor whose task drives another shard. Odd, but then it goes on afterwards.
    outer: Option<RunningExecutor>,
}

impl<'a> ExecutorGuard<'a> {
    pub(super) fn new(core: &'a mut CoreSlot, inner: &Rc<ExecutorInner>) -> Self {
        let inner = Rc::clone(inner);
        let running = RunningExecutor { core: core.take(), inner, task: u32::MAX, waker: None, budget: 0 };
        Self { outer: RUNNING.replace(Some(running)), core }
    }

    /// From now on it is this task that runs.
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

/// Makes an executor known on this thread.
pub(super) fn register(inner: Rc<ExecutorInner>) {
    EXECUTORS.with_borrow_mut(|executors| executors.push(inner));
}

/// The opposite. The executor is returned, so that what it holds is dropped where nothing is borrowed.
pub(super) fn unregister(id: u32) -> Option<Rc<ExecutorInner>> {
    let taken = EXECUTORS.try_with(|executors| {
        let mut executors = executors.borrow_mut();
        let position = executors.iter().position(|inner| inner.id == id)?;
        Some(executors.swap_remove(position))
    });
    taken.ok().flatten()
}

/// The executor of this number, if it is one of this thread.
pub(super) fn find(id: u32) -> Option<Rc<ExecutorInner>> {
    let found =
        EXECUTORS.try_with(|executors| executors.borrow().iter().find(|inner| inner.id == id).cloned());
    found.ok().flatten()
}

/// Lets a task go on. False if its executor is not one of this thread.
pub(super) fn schedule(id: u32, task: u32) -> bool {
    let scheduled = EXECUTORS.try_with(|executors| {
        let executors = executors.borrow();
        let inner = executors.iter().find(|inner| inner.id == id)?;
        inner.state.borrow_mut().tasks.schedule(task);
        Some(())
    });
    scheduled.is_ok_and(|s| s.is_some())
}

/// Reaches the state of an executor of this thread, be it running or not. `None` if there is none: it has ended.
pub(super) fn state<R>(id: u32, act: impl FnOnce(&mut ExecutorState) -> R) -> Option<R> {
    let inner = find(id)?;
    let result = act(&mut inner.state.borrow_mut());
    inner.flush_wakers();
    Some(result)
}

/// The number of the executor whose task runs.
///
/// # Panics
/// If none does.
#[track_caller]
pub(super) fn current() -> u32 {
    match RUNNING.with_borrow(|running| running.as_ref().map(|r| r.inner.id)) {
        Some(id) => id,
        None => panic!("{NOT_IN_TASK}"),
    }
}

/// The same as an error.
pub(super) fn current_or_error() -> io::Result<u32> {
    RUNNING
        .with_borrow(|running| running.as_ref().map(|r| r.inner.id))
        .ok_or_else(|| io::Error::other(NOT_IN_TASK))
}

/// Reaches the shard that is running, which must be the one of this executor.
pub(super) fn access<R>(executor: u32, act: impl FnOnce(&mut Access<'_>) -> R) -> io::Result<R> {
    let mut unsettled = None;
    let result = RUNNING.with_borrow_mut(|running| {
        let running = running.as_mut().filter(|r| r.inner.id == executor)?;
        let mut state = running.inner.state.borrow_mut();
        let result = act(&mut Access { core: &mut running.core, state: &mut state, executor });
        if !state.wait_lists.detached.is_empty() {
            unsettled = Some(Rc::clone(&running.inner));
        }
        Some(result)
    });
    if let Some(inner) = unsettled {
        inner.flush_wakers();
    }
    result.ok_or_else(|| io::Error::other(WRONG_SHARD))
}

/// Reaches an executor's state, and the core of its shard if its tasks run just now: for what is dropped, wherever that happens.
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

/// A future's place among those who wait for something. Gives it back when dropped.
#[derive(Debug)]
pub(super) struct WaitRegistration {
    executor: u32,
    target: WaitTarget,
    id: u64,
}

/// What became of an attempt.
enum PollStep<R> {
    Done(R),
    Pending,
    OutOfBudget,
}

impl WaitRegistration {
    /// For a future of its own.
    pub(super) const fn new(executor: u32, target: WaitTarget) -> Self {
        Self { executor, target, id: 0 }
    }

    /// For a `poll_…` function, which has no place of its own: the last caller is woken.
    pub(super) const fn poll_function(executor: u32, target: WaitTarget) -> Self {
        Self { executor, target, id: POLL_ID }
    }

    /// Tries, and waits if there is nothing to be had. A task that has done enough for once gets another turn.
    pub(super) fn poll<R>(
        &mut self,
        cx: &mut Context<'_>,
        attempt: impl FnOnce(&mut Access<'_>) -> Option<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        let mut unsettled = None;
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
                unsettled = Some(Rc::clone(&running.inner));
            }
            Some(step)
        });
        if let Some(inner) = unsettled {
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

/// A future that tries until there is something to be had. Smaller than the same as an `async` block, which keeps what it captured twice.
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
