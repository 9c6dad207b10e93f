//! What belongs to a thread: its executors, and the one whose tasks run just now, with the core of its shard.
//!
//! Tasks reach their shard through here and not through an argument, because a future's `poll` has none for it. No reference is kept: the
//! core itself, in its box, lies here while tasks run, so nothing here is unsafe.

use super::state::{Inner, State, Wait};
use super::waiters::{Caller, POLL};
use super::waker::OwnWaker;
use crate::context::{Core, Lent};
use core::cell::RefCell;
use core::pin::Pin;
use core::task::{Context, Poll};
use std::io;
use std::rc::Rc;

thread_local! {
    static HERE: RefCell<Vec<Rc<Inner>>> = const { RefCell::new(Vec::new()) };
    static RUNNING: RefCell<Option<Running>> = const { RefCell::new(None) };
}

/// What a task may do at one go before it has to let others do something: so many reads, writes and the like that were successful.
const STEPS_PER_POLL_MAX: u32 = 128;

const OUTSIDE: &str = "no task of a Ginnel shard is running on this thread";
const FOREIGN: &str = "this belongs to another Ginnel shard, or its shard is not running";

/// The executor whose tasks run.
struct Running {
    core: Box<Core>,
    inner: Rc<Inner>,
    /// The task that is being polled, and with which waker.
    task: u32,
    waker: Option<OwnWaker>,
    steps: u32,
}

/// An executor's way to its shard and to itself, while one of its tasks runs. Nothing that is reached from here may run an application's
/// code: no waker is called and nothing of the application's is dropped.
pub(super) struct Access<'a> {
    pub(super) core: &'a mut Core,
    pub(super) state: &'a mut State,
    pub(super) executor: u32,
}

/// The time during which an executor's tasks run. Ends when dropped.
pub(super) struct Entered<'a> {
    place: &'a mut Lent,
    /// An executor whose task drives another shard. Odd, but then it goes on afterwards.
    outer: Option<Running>,
}

impl<'a> Entered<'a> {
    pub(super) fn new(place: &'a mut Lent, inner: &Rc<Inner>) -> Self {
        let inner = Rc::clone(inner);
        let running = Running { core: place.take(), inner, task: u32::MAX, waker: None, steps: 0 };
        Self { outer: RUNNING.replace(Some(running)), place }
    }

    /// From now on it is this task that runs.
    pub(super) fn task(&self, task: u32, waker: OwnWaker) {
        RUNNING.with_borrow_mut(|running| {
            if let Some(running) = running {
                running.task = task;
                running.waker = Some(waker);
                running.steps = STEPS_PER_POLL_MAX;
            }
        });
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some(running) = RUNNING.replace(self.outer.take()) {
            self.place.put(running.core);
        }
    }
}

/// Makes an executor known on this thread.
pub(super) fn register(inner: Rc<Inner>) {
    HERE.with_borrow_mut(|here| here.push(inner));
}

/// The opposite. The executor is returned, so that what it holds is dropped where nothing is borrowed.
pub(super) fn unregister(id: u32) -> Option<Rc<Inner>> {
    let taken = HERE.try_with(|here| {
        let mut here = here.borrow_mut();
        let at = here.iter().position(|inner| inner.id == id)?;
        Some(here.swap_remove(at))
    });
    taken.ok().flatten()
}

/// The executor of this number, if it is one of this thread.
pub(super) fn find(id: u32) -> Option<Rc<Inner>> {
    let found = HERE.try_with(|here| here.borrow().iter().find(|inner| inner.id == id).cloned());
    found.ok().flatten()
}

/// Lets a task go on. False if its executor is not one of this thread.
pub(super) fn schedule(id: u32, task: u32) -> bool {
    let scheduled = HERE.try_with(|here| {
        let here = here.borrow();
        let inner = here.iter().find(|inner| inner.id == id)?;
        inner.state.borrow_mut().tasks.schedule(task);
        Some(())
    });
    scheduled.is_ok_and(|s| s.is_some())
}

/// Reaches the state of an executor of this thread, be it running or not. `None` if there is none: it has ended.
pub(super) fn state<R>(id: u32, act: impl FnOnce(&mut State) -> R) -> Option<R> {
    let inner = find(id)?;
    let result = act(&mut inner.state.borrow_mut());
    inner.settle();
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
        None => panic!("{OUTSIDE}"),
    }
}

/// The same as an error.
pub(super) fn current_or_error() -> io::Result<u32> {
    RUNNING
        .with_borrow(|running| running.as_ref().map(|r| r.inner.id))
        .ok_or_else(|| io::Error::other(OUTSIDE))
}

/// Reaches the shard that is running, which must be the one of this executor.
pub(super) fn access<R>(executor: u32, act: impl FnOnce(&mut Access<'_>) -> R) -> io::Result<R> {
    let mut unsettled = None;
    let result = RUNNING.with_borrow_mut(|running| {
        let running = running.as_mut().filter(|r| r.inner.id == executor)?;
        let mut state = running.inner.state.borrow_mut();
        let result = act(&mut Access { core: &mut running.core, state: &mut state, executor });
        if !state.lists.leaving.is_empty() {
            unsettled = Some(Rc::clone(&running.inner));
        }
        Some(result)
    });
    if let Some(inner) = unsettled {
        inner.settle();
    }
    result.ok_or_else(|| io::Error::other(FOREIGN))
}

/// Reaches an executor's state, and the core of its shard if its tasks run just now: for what is dropped, wherever that happens.
pub(super) fn release(executor: u32, act: impl FnOnce(&mut State, Option<&mut Core>)) {
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
        (Ok(Some(inner)), _) => inner.settle(),
        (_, Some(act)) => {
            state(executor, |state| act(state, None));
        }
        _ => {}
    }
}

/// A future's place among those who wait for something. Gives it back when dropped.
#[derive(Debug)]
pub(super) struct Waiting {
    executor: u32,
    what: Wait,
    id: u64,
}

/// What became of an attempt.
enum Step<R> {
    Done(R),
    Waits,
    Pauses,
}

impl Waiting {
    /// For a future of its own.
    pub(super) const fn new(executor: u32, what: Wait) -> Self {
        Self { executor, what, id: 0 }
    }

    /// For a `poll_…` function, which has no place of its own: the last caller is woken.
    pub(super) const fn poll_function(executor: u32, what: Wait) -> Self {
        Self { executor, what, id: POLL }
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
            let is_own = running.waker.as_ref().is_some_and(|own| own.waker().will_wake(cx.waker()));
            if running.steps == 0 {
                return Some(Step::Pauses);
            }
            let mut state = running.inner.state.borrow_mut();
            let executor = self.executor;
            let step = match attempt(&mut Access { core: &mut running.core, state: &mut state, executor }) {
                Some(result) => {
                    running.steps -= 1;
                    Step::Done(result)
                }
                None => {
                    let caller = if is_own { Caller::Task(running.task) } else { Caller::Waker(cx.waker()) };
                    state.wait(self.what, caller, &mut self.id);
                    Step::Waits
                }
            };
            if !state.lists.leaving.is_empty() {
                unsettled = Some(Rc::clone(&running.inner));
            }
            Some(step)
        });
        if let Some(inner) = unsettled {
            inner.settle();
        }
        match step {
            Some(Step::Done(result)) => Poll::Ready(result),
            Some(Step::Waits) => Poll::Pending,
            Some(Step::Pauses) => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            None => Poll::Ready(Err(io::Error::other(FOREIGN))),
        }
    }
}

/// A future that tries until there is something to be had. Smaller than the same as an `async` block, which keeps what it captured twice.
#[derive(Debug)]
pub(super) struct Attempt<F> {
    waiting: Waiting,
    attempt: F,
}

impl<F> Attempt<F> {
    pub(super) const fn new<R>(executor: u32, what: Wait, attempt: F) -> Self
    where
        F: FnMut(&mut Access<'_>) -> Option<io::Result<R>>,
    {
        Self { waiting: Waiting::new(executor, what), attempt }
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

impl Drop for Waiting {
    fn drop(&mut self) {
        if self.id > POLL {
            state(self.executor, |state| state.cease(self.what, self.id));
        }
    }
}
