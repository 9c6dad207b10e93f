//! Tasks: [`spawn`], [`JoinHandle`], [`yield_now`], and [`Spawner`] for other threads.

use super::local::{self, WaitRegistration};
use super::state::WaitTarget;
use super::tasks::{Output, TaskError};
use crate::command::{CommandError, Commander};
use core::any::Any;
use core::fmt;
use core::future::poll_fn;
use core::marker::PhantomData;
use core::pin::Pin;
use core::task::{Context, Poll};
use std::io;

/// Starts a task on this shard. The first poll comes after the current task has begun to wait. Dropping
/// the handle detaches the task, which continues.
///
/// # Panics
/// Outside of a shard's task.
#[track_caller]
pub fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future<Output: 'static> + 'static,
{
    let executor = local::current();
    let future = Box::pin(future);
    let added = local::state(executor, |state| state.tasks.add(future));
    let (task, generation) = added.expect("a running executor is registered on its thread");
    JoinHandle { executor, task, generation, done: false, _result: PhantomData }
}

/// Lets other tasks and the network run before the task continues.
pub async fn yield_now() {
    let mut yielded = false;
    poll_fn(|cx| {
        if core::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Returns the priority class ([`priority::class`](ginnel_stack::priority::class)) with which the current
/// task runs: the class of the frame or of the task that made it ready.
///
/// # Panics
/// Outside of a shard's task.
#[track_caller]
pub fn class() -> u8 {
    let class = local::state(local::current(), |state| state.tasks.class());
    class.expect("a running executor is registered on its thread")
}

/// A handle to a task. Awaiting it returns the task's result.
///
/// # Panics
/// If it is awaited again after it returned the result.
#[must_use = "to detach the task, drop the handle"]
pub struct JoinHandle<T> {
    executor: u32,
    task: u32,
    generation: u32,
    /// True if the result was returned.
    done: bool,
    /// Not `Send`: the handle stays on the thread.
    _result: PhantomData<*const T>,
}

impl<T> fmt::Debug for JoinHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinHandle").field("task", &self.task).finish_non_exhaustive()
    }
}

impl<T> JoinHandle<T> {
    /// Drops the task before it is polled again. Awaiting the handle then returns an error of which
    /// [`is_cancelled`](JoinError::is_cancelled) is true. Has no effect on a task that has ended.
    pub fn abort(&self) {
        local::state(self.executor, |state| state.tasks.abort(self.task, self.generation));
    }

    /// Returns whether the task has ended.
    pub fn is_finished(&self) -> bool {
        self.done
            || local::state(self.executor, |state| state.tasks.has_ended(self.task, self.generation))
                .unwrap_or(true)
    }
}

impl<T: 'static> Future for JoinHandle<T> {
    type Output = Result<T, JoinError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        assert!(!self.done, "the result of the task was returned before");
        let (task, generation) = (self.task, self.generation);
        let mut waiting = WaitRegistration::poll_function(self.executor, WaitTarget::Join(task));
        let polled = waiting.poll(cx, |a| a.state.tasks.join(task, generation).map(Ok));
        polled.map(|ended| {
            let result = match ended {
                Ok(Ok(output)) => Ok(downcast(output)),
                Ok(Err(TaskError::Aborted)) => Err(JoinError(JoinFailure::Aborted)),
                Ok(Err(TaskError::Panicked(panic))) => Err(JoinError(JoinFailure::Panicked(panic))),
                Err(error) => Err(JoinError(JoinFailure::Unreachable(error))),
            };
            self.done = true;
            result
        })
    }
}

fn downcast<T: 'static>(output: Output) -> T {
    let output = output.and_then(|boxed| boxed.downcast::<T>().ok());
    *output.expect("the result of a task with a handle is kept and has the handle's type")
}

impl<T> Drop for JoinHandle<T> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        // A result that nobody has claimed is dropped here, outside of the borrow of the executor's state.
        let unclaimed = local::state(self.executor, |state| {
            let (joiners, unclaimed) = state.tasks.detach(self.task, self.generation);
            state.wait_lists.forget(joiners);
            unclaimed
        });
        drop(unclaimed);
    }
}

/// Why a task has no result.
pub struct JoinError(JoinFailure);

enum JoinFailure {
    Aborted,
    /// The payload of the panic.
    Panicked(Box<dyn Any + Send>),
    /// The handle was awaited where its shard does not run.
    Unreachable(io::Error),
}

impl JoinError {
    /// Returns whether the task was aborted.
    pub const fn is_cancelled(&self) -> bool {
        matches!(self.0, JoinFailure::Aborted)
    }

    /// Returns whether the task panicked. False, as [`is_cancelled`](JoinError::is_cancelled), if the handle
    /// was awaited outside of its shard: the task may still run then.
    pub const fn is_panic(&self) -> bool {
        matches!(self.0, JoinFailure::Panicked(_))
    }

    /// Returns the payload of the panic, for [`resume_unwind`](std::panic::resume_unwind).
    ///
    /// # Errors
    /// The error itself, if the task did not panic.
    pub fn try_into_panic(self) -> Result<Box<dyn Any + Send>, Self> {
        match self.0 {
            JoinFailure::Panicked(panic) => Ok(panic),
            other => Err(Self(other)),
        }
    }
}

/// Returns the message of a panic, if its payload is text.
fn panic_message(panic: &(dyn Any + Send)) -> Option<&str> {
    panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str))
}

impl fmt::Debug for JoinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for JoinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            JoinFailure::Aborted => f.write_str("the task was aborted"),
            JoinFailure::Panicked(panic) => match panic_message(&**panic) {
                None => f.write_str("the task panicked"),
                Some(message) => write!(f, "the task panicked: {message}"),
            },
            JoinFailure::Unreachable(error) => write!(f, "the task cannot be joined: {error}"),
        }
    }
}

impl std::error::Error for JoinError {}

impl From<JoinError> for io::Error {
    fn from(error: JoinError) -> Self {
        Self::other(error.to_string())
    }
}

/// A command that spawns a task, sent by another thread.
pub(super) struct RemoteSpawn(pub(super) Box<dyn FnOnce() + Send>);

/// Starts tasks on a shard from other threads.
#[derive(Clone, Debug)]
pub struct Spawner(Commander);

/// Returns a spawner for this shard.
///
/// # Panics
/// Outside of a shard's task.
#[track_caller]
pub fn spawner() -> Spawner {
    let inner = local::find(local::current()).expect("a running executor is registered on its thread");
    Spawner(inner.shared.commander().clone())
}

impl Spawner {
    /// Calls `make` on the shard's thread and starts the future that it returns as a task. Never waits.
    ///
    /// # Errors
    /// The shard's mailbox is full (`shard.commands_max`), or the shard is gone.
    pub fn spawn<M, F>(&self, make: M) -> Result<(), SpawnError>
    where
        M: FnOnce() -> F + Send + 'static,
        F: Future<Output: 'static> + 'static,
    {
        let spawn = RemoteSpawn(Box::new(|| drop(spawn(make()))));
        self.0.send(Box::new(spawn)).map_err(|error| match error {
            CommandError::Full(_) => SpawnError::Full,
            CommandError::Gone(_) => SpawnError::Gone,
        })
    }
}

/// Why a task could not be sent to a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpawnError {
    /// The shard's mailbox is full.
    Full,
    /// The shard is gone.
    Gone,
}

impl fmt::Display for SpawnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "the mailbox of the shard is full",
            Self::Gone => "the shard is gone",
        })
    }
}

impl std::error::Error for SpawnError {}
