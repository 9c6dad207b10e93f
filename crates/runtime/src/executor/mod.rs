//! An executor for tasks, as the application of a shard.
//!
//! ```no_run
//! use ginnel::net::TcpListener;
//! use ginnel::{Config, Executor, Shard, StopFlag, task};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let server = Executor::new(async || -> std::io::Result<()> {
//!     let listener = TcpListener::bind("0.0.0.0:7").await?;
//!     loop {
//!         let (mut stream, _) = listener.accept().await?;
//!         task::spawn(async move {
//!             let mut buffer = [0; 4096];
//!             while let Ok(n @ 1..) = stream.read(&mut buffer).await {
//!                 if stream.write_all(&buffer[..n]).await.is_err() {
//!                     break;
//!                 }
//!             }
//!         });
//!     }
//! });
//! let config = Config::from_file("ginnel.toml".as_ref())?;
//! Shard::builder(config).handler(server).build()?.run(&StopFlag::new()?)?;
//! # Ok(())
//! # }
//! ```
//!
//! One executor belongs to one shard, and its tasks never leave the shard's thread: they need not be `Send`,
//! and share state with `Rc` and `Cell`. In each turn the shard processes received frames, then polls the
//! tasks that are ready, then sends what they wrote together with the acknowledgements. A task that is always
//! ready is polled once per turn, so it cannot starve the network.
//!
//! The reasons are in docs/adr/0009-async-on-the-shard.md.

pub mod async_fd;
pub mod compat;
mod local;
pub mod net;
mod run_queue;
pub mod signal;
mod slab;
mod state;
pub mod task;
mod tasks;
pub mod time;
mod timer;
mod waiters;
mod waker;

use crate::command::Command;
use crate::context::{Context, WorkContext};
use crate::error::Error;
use crate::handler::Handler;
use crate::kernel_fds::Readiness;
use crate::stats::CounterKind;
use core::cell::RefCell;
use core::fmt;
use core::sync::atomic::{AtomicU32, Ordering};
use core::task::Poll;
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::{Conn, Listener, UdpHandle};
use ginnel_stack::priority::{self, BEST_EFFORT};
use local::ExecutorGuard;
use state::{ExecutorInner, ExecutorState, WaitTarget};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use tasks::{TakenTask, TaskError, TaskResult};
use waker::RemoteWakeups;

/// Polls of tasks per turn; the network is served between turns. A few full bursts wake about as many tasks.
const POLLS_PER_TURN_MAX: usize = 256;

/// An application made of tasks: see the [module](self). The shard ends with the main task; the other tasks
/// are dropped then, and their connections are closed. Data that a peer has not received by then is lost with
/// the shard, so a main task should wait for the connections that matter.
///
/// The executor may move to another thread until its shard runs; from then on it stays on the shard's thread.
pub struct Executor<M> {
    main: Option<M>,
    id: u32,
    /// True if events have classes of priority.
    has_priorities: bool,
}

impl<M> fmt::Debug for Executor<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executor").field("id", &self.id).finish_non_exhaustive()
    }
}

/// The result of a main task: nothing, or a result whose error ends the shard with [`Error::Application`].
pub trait MainOutput: sealed::Sealed {
    /// Converts to the result of the shard.
    fn into_result(self) -> Result<(), Error>;
}

mod sealed {
    pub trait Sealed {}
}

impl sealed::Sealed for () {}

impl MainOutput for () {
    fn into_result(self) -> Result<(), Error> {
        Ok(())
    }
}

impl<E: fmt::Display> sealed::Sealed for Result<(), E> {}

impl<E: fmt::Display> MainOutput for Result<(), E> {
    fn into_result(self) -> Result<(), Error> {
        self.map_err(|e| Error::application(e.to_string()))
    }
}

/// Usage of an executor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExecutorStats {
    /// Tasks that have not ended.
    pub tasks: usize,
    /// Connections that tasks own.
    pub streams: usize,
    /// Sleeps that have not expired.
    pub sleeps: usize,
    /// Wait lists in use: objects that several tasks, or parts of a task with wakers of their own, wait for.
    pub wait_lists: usize,
}

impl<M, F> Executor<M>
where
    M: FnOnce() -> F + 'static,
    F: Future<Output: MainOutput> + 'static,
{
    /// Creates an executor whose main task is the future that `main` returns. `main` is called on the shard's
    /// thread when the shard starts.
    pub fn new(main: M) -> Self {
        static LAST: AtomicU32 = AtomicU32::new(0);
        Self { main: Some(main), id: LAST.fetch_add(1, Ordering::Relaxed), has_priorities: false }
    }
}

impl<M> Executor<M> {
    /// Returns the usage. All numbers are zero before the shard runs.
    pub fn stats(&self) -> ExecutorStats {
        let stats = local::state(self.id, |state| ExecutorStats {
            tasks: state.tasks.live(),
            streams: state.net.sockets.len(),
            sleeps: state.sleeps.len(),
            wait_lists: state.wait_lists.lists(),
        });
        stats.unwrap_or_default()
    }

    fn inner(&self) -> Rc<ExecutorInner> {
        local::find(self.id).expect("a shard with an executor stays on the thread on which it started")
    }

    /// Changes the state because of an event; tasks that the change makes ready get the event's class.
    #[inline(always)]
    fn on_event(&self, cx: &mut Context<'_>, update: impl FnOnce(&mut ExecutorState, &mut Context<'_>)) {
        self.update_state(|state| {
            if priority::COMPILED && self.has_priorities {
                state.tasks.set_class(cx.event_class());
            }
            update(state, cx);
        });
    }

    /// Changes the state, then calls the wakers that the change woke.
    #[inline(always)]
    fn update_state(&self, update: impl FnOnce(&mut ExecutorState)) {
        let inner = self.inner();
        let mut state = inner.state.borrow_mut();
        update(&mut state);
        let has_wakers = !state.wait_lists.detached.is_empty();
        drop(state);
        if has_wakers {
            inner.flush_wakers();
        }
    }
}

impl<M, F> Handler for Executor<M>
where
    M: FnOnce() -> F + 'static,
    F: Future<Output: MainOutput> + 'static,
{
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        self.has_priorities = cx.has_priorities();
        let shared = Arc::new(RemoteWakeups::new(self.id, cx.commander()));
        let state = RefCell::new(ExecutorState::new(&shared, cx.lower_share_percent()));
        let id = self.id;
        local::register(Rc::new(ExecutorInner { id, shared, state }));
        if let Some(main) = self.main.take() {
            self.update_state(|state| {
                let main = async move {
                    let outcome = main().await.into_result();
                    local::state(id, |state| state.outcome = Some(outcome));
                };
                state.tasks.add(Box::pin(main));
            });
        }
        Ok(())
    }

    fn is_pulling(&self) -> bool {
        true
    }

    fn incoming(&mut self, cx: &mut Context<'_>, listener: Listener) {
        self.on_event(cx, |state, _| state.incoming(listener));
    }

    fn listener_destroyed(&mut self, _: &mut Context<'_>, listener: Listener) {
        self.update_state(|state| state.listener_destroyed(listener));
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.on_event(cx, |state, cx| state.connected(cx, conn));
    }

    #[inline(always)]
    fn readable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.on_event(cx, |state, cx| state.readable(cx, conn));
    }

    #[cold]
    fn unordered_readable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.on_event(cx, |state, cx| state.readable(cx, conn));
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, _: &[u8]) -> usize {
        0
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.on_event(cx, |state, cx| state.writable(cx, conn));
    }

    fn peer_closed(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.on_event(cx, |state, cx| state.peer_closed(cx, conn));
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        self.on_event(cx, |state, cx| state.closed(cx, conn, reason));
    }

    fn datagrams(&mut self, cx: &mut Context<'_>, socket: UdpHandle) {
        self.on_event(cx, |state, _| state.datagrams(socket));
    }

    fn timer(&mut self, _: &mut Context<'_>, token: u64) {
        self.update_state(|state| {
            if priority::COMPILED && self.has_priorities {
                state.tasks.set_class(BEST_EFFORT);
            }
            let waiters = state.sleeps.expire(token);
            state.wake_all(waiters);
        });
    }

    fn kernel_ready(&mut self, _: &mut Context<'_>, token: u64, readiness: Readiness) {
        self.update_state(|state| {
            if priority::COMPILED && self.has_priorities {
                state.tasks.set_class(BEST_EFFORT);
            }
            state.kernel_ready(token, readiness);
        });
    }

    fn stopping(&mut self, _: &mut Context<'_>) {
        self.update_state(|state| {
            state.stop.is_requested = true;
            state.wake(WaitTarget::Stop);
        });
    }

    fn report_counters(&self, report: &mut dyn FnMut(CounterKind, &'static str, u64)) {
        let ExecutorStats { tasks, streams, sleeps, wait_lists } = self.stats();
        for (name, count) in [
            ("tasks.live", tasks),
            ("tasks.streams", streams),
            ("tasks.sleeps", sleeps),
            ("tasks.wait_lists", wait_lists),
        ] {
            report(CounterKind::Gauge, name, count as u64);
        }
    }

    fn command(&mut self, _: &mut Context<'_>, command: Command) {
        // Commands of other types are not for the executor.
        if let Ok(spawn) = command.downcast::<task::RemoteSpawn>() {
            self.update_state(|state| state.remote_spawns.push_back(spawn.0));
        }
    }

    fn work(&mut self, cx: &mut WorkContext<'_>) -> Result<usize, Error> {
        let inner = self.inner();
        {
            let mut state = inner.state.borrow_mut();
            if priority::COMPILED && self.has_priorities {
                state.tasks.set_class(BEST_EFFORT);
            }
            state.take_woken(&inner.shared);
            state.tasks.begin_turn();
            let must_stop = state.stop.is_requested && !state.stop.is_observed;
            let has_dropped = state.net.has_dropped() || state.kernel_fds.has_dropped();
            let is_idle = state.tasks.is_idle() && state.remote_spawns.is_empty() && !has_dropped;
            if is_idle && !must_stop {
                return Ok(0);
            }
        }
        let guard = ExecutorGuard::new(cx.core, &inner);
        // Fails only if this executor is not running.
        let _ = local::access(self.id, |a| {
            a.state.net.close_dropped(a.core);
            a.state.kernel_fds.deregister_dropped(a.core);
        });
        run_remote_spawns(&inner);
        let mut polls = 0;
        while polls < POLLS_PER_TURN_MAX && poll_next(&inner, &guard) {
            polls += 1;
            if priority::COMPILED && self.has_priorities && guard.must_look_at_devices() {
                break;
            }
        }
        let (outcome, must_stop) = {
            let mut state = inner.state.borrow_mut();
            (state.outcome.take(), state.stop.is_requested && !state.stop.is_observed)
        };
        let is_ending = must_stop || outcome.is_some();
        if is_ending {
            end_all(&inner, &guard);
        }
        drop(guard);
        if is_ending {
            cx.context().stop();
        }
        outcome.unwrap_or(Ok(())).map(|()| polls.max(1))
    }
}

impl<M> Drop for Executor<M> {
    fn drop(&mut self) {
        if let Some(inner) = local::unregister(self.id) {
            // Tasks are dropped while nothing is borrowed. Their connections end with the shard.
            let tasks: Vec<_> = drain(&inner).collect();
            drop(tasks);
            inner.flush_wakers();
        }
    }
}

/// Starts the tasks that other threads have sent.
fn run_remote_spawns(inner: &ExecutorInner) {
    loop {
        let mut state = inner.state.borrow_mut();
        let Some(make) = state.remote_spawns.pop_front() else { return };
        drop(state);
        // The closure creates a future and spawns it. If it panics, no task waits for the result.
        let _ = catch_unwind(AssertUnwindSafe(make));
    }
}

/// Polls the next ready task. Returns false if no task is ready.
#[inline(always)]
fn poll_next(inner: &Rc<ExecutorInner>, guard: &ExecutorGuard<'_>) -> bool {
    let Some(taken) = inner.state.borrow_mut().tasks.take_next() else { return false };
    guard.set_task(taken.index, taken.waker.clone());
    let TakenTask { index, mut future, waker, joinable, abort } = taken;
    if abort {
        end(inner, index, drop_quietly(future, Err(TaskError::Aborted)));
        return true;
    }
    let mut cx = core::task::Context::from_waker(waker.waker());
    match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll_task(&mut cx, joinable))) {
        Ok(Poll::Pending) => {
            drop(waker);
            let rest = inner.state.borrow_mut().tasks.put_back(index, future);
            if let Err(future) = rest {
                end(inner, index, drop_quietly(future, Err(TaskError::Aborted)));
            }
        }
        Ok(Poll::Ready(output)) => end(inner, index, drop_quietly(future, Ok(output))),
        Err(panic) => end(inner, index, drop_quietly(future, Err(TaskError::Panicked(panic)))),
    }
    true
}

/// Drops a value of the application. A panic in its destructor becomes the result of the task.
fn drop_quietly<T>(value: T, result: TaskResult) -> TaskResult {
    match catch_unwind(AssertUnwindSafe(|| drop(value))) {
        Ok(()) => result,
        Err(panic) => Err(TaskError::Panicked(panic)),
    }
}

/// Records the result of a task and wakes those that wait for it.
fn end(inner: &ExecutorInner, index: u32, result: TaskResult) {
    let panicked = matches!(result, Err(TaskError::Panicked(_)));
    let mut state = inner.state.borrow_mut();
    if index == MAIN && state.outcome.is_none() && panicked {
        state.outcome = Some(Err(Error::application("the main task panicked")));
    }
    let (joiners, unclaimed) = state.tasks.end(index, result);
    state.wake_all(joiners);
    drop(state);
    // The panic hook has reported the panic of a task that no other task waits for.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(unclaimed)));
    inner.flush_wakers();
}

/// Index of the main task, which is the first; the shard ends with it.
const MAIN: u32 = 0;

/// Drops all tasks while the shard is accessible, so that their connections are closed.
fn end_all(inner: &ExecutorInner, guard: &ExecutorGuard<'_>) {
    for taken in drain(inner) {
        guard.set_task(taken.index, taken.waker.clone());
        let _ = drop_quietly(taken.future, Ok(None));
    }
    inner.flush_wakers();
}

/// Takes all tasks out, one by one.
fn drain(inner: &ExecutorInner) -> impl Iterator<Item = TakenTask> {
    (0..)
        .map_while(|index| {
            let mut state = inner.state.borrow_mut();
            (index < state.tasks.slot_count()).then(|| state.tasks.take(index))
        })
        .flatten()
}
