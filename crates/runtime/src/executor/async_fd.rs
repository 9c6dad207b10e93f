//! Kernel descriptors that tasks wait for, with an API like tokio's `AsyncFd`.

use super::local::{self, WaitRegistration};
use super::slab::Slab;
use super::state::{ExecutorState, WaitTarget};
use super::waiters::Waiters;
use crate::context::ShardCore;
use crate::kernel_fds::{Interest, KernelFd, KernelFds, Readiness};
use core::fmt;
use core::future::poll_fn;
use core::task::{Context, Poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::io;

/// A direction in which a task waits for a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoDirection {
    /// Waits until the descriptor is readable.
    Read,
    /// Waits until the descriptor is writable.
    Write,
}

/// One direction of a registered descriptor.
#[derive(Debug)]
pub(super) struct DirectionState {
    pub(super) waiters: Waiters,
    is_ready: bool,
    /// Counts how often the kernel has reported that the descriptor became ready.
    events: u32,
}

/// A registered descriptor.
#[derive(Debug)]
pub(super) struct FdState {
    handle: KernelFd,
    pub(super) read: DirectionState,
    pub(super) write: DirectionState,
}

impl FdState {
    fn direction(&mut self, direction: IoDirection) -> &mut DirectionState {
        match direction {
            IoDirection::Read => &mut self.read,
            IoDirection::Write => &mut self.write,
        }
    }
}

/// The registered descriptors of an executor. The token of a descriptor is its index.
#[derive(Debug)]
pub(super) struct FdTable {
    pub(super) fds: Slab<FdState>,
    /// Descriptors that were dropped while no task was running; they are deregistered when the next task
    /// runs.
    dropped: Vec<KernelFd>,
}

impl FdTable {
    pub(super) const fn new() -> Self {
        Self { fds: Slab::new(), dropped: Vec::new() }
    }

    pub(super) fn has_dropped(&self) -> bool {
        !self.dropped.is_empty()
    }

    /// Deregisters the descriptors that were dropped meanwhile.
    pub(super) fn deregister_dropped(&mut self, core: &mut ShardCore) {
        for handle in self.dropped.drain(..) {
            deregister(core, handle);
        }
    }
}

fn deregister(core: &mut ShardCore, handle: KernelFd) {
    if let Some(fds) = &mut core.kernel_fds {
        // Fails only if a later descriptor has the number already.
        let _ = fds.deregister(handle);
    }
}

impl ExecutorState {
    /// Handles the kernel's report that a descriptor became ready.
    pub(super) fn kernel_ready(&mut self, token: u64, readiness: Readiness) {
        // The token was made from an index of 32 bits.
        let index = token as u32;
        let directions = [(IoDirection::Read, readiness.readable), (IoDirection::Write, readiness.writable)];
        for (direction, _) in directions.into_iter().filter(|(_, is_ready)| *is_ready) {
            let Some(fd) = self.kernel_fds.fds.get_mut(index) else { return };
            let state = fd.direction(direction);
            (state.is_ready, state.events) = (true, state.events.wrapping_add(1));
            self.wake(WaitTarget::KernelFd(index, direction));
        }
    }
}

/// A kernel descriptor, such as a pipe or a Unix socket, for which tasks of a shard wait.
///
/// The descriptor must be non-blocking. A task waits with [`readable`](Self::readable) or
/// [`writable`](Self::writable), reads or writes with [`ReadyGuard::try_io`], and waits again after
/// `WouldBlock`; [`async_io`](Self::async_io) does all of this. Dropping the value deregisters and drops the
/// descriptor.
pub struct AsyncFd<T: AsFd> {
    /// `None` only while the value is dropped.
    inner: Option<T>,
    executor: u32,
    index: u32,
}

impl<T: AsFd + fmt::Debug> fmt::Debug for AsyncFd<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncFd").field("inner", &self.inner).finish_non_exhaustive()
    }
}

const TAKEN: &str = "the descriptor is there until it is dropped";

impl<T: AsFd> AsyncFd<T> {
    /// Registers a descriptor with the shard of the running task.
    ///
    /// # Errors
    /// Returns those of `epoll_ctl(2)`: `EEXIST` if the shard watches the descriptor already, `EPERM` for
    /// regular files; an error if no task of a shard is running.
    pub fn new(inner: T) -> io::Result<Self> {
        let executor = local::current_or_error()?;
        let index = local::access(executor, |a| {
            let direction = || DirectionState { waiters: Waiters::NONE, is_ready: false, events: 0 };
            let (read, write) = (direction(), direction());
            let unregistered = KernelFd::default();
            let index = a.state.kernel_fds.fds.insert(FdState { handle: unregistered, read, write });
            let slot = &mut a.core.kernel_fds;
            match KernelFds::register(slot, inner.as_fd(), Interest::EDGES, index.into()) {
                Ok(handle) => {
                    a.state.kernel_fds.fds[index].handle = handle;
                    Ok(index)
                }
                Err(error) => {
                    a.state.kernel_fds.fds.remove(index);
                    Err(error)
                }
            }
        })??;
        Ok(Self { inner: Some(inner), executor, index })
    }

    /// Returns the value that owns the descriptor.
    pub fn get_ref(&self) -> &T {
        self.inner.as_ref().expect(TAKEN)
    }

    /// Returns the value that owns the descriptor, mutably. The value must keep this descriptor.
    pub fn get_mut(&mut self) -> &mut T {
        self.inner.as_mut().expect(TAKEN)
    }

    /// Deregisters the descriptor and returns the value that owns it.
    pub fn into_inner(mut self) -> T {
        self.deregister();
        self.inner.take().expect(TAKEN)
    }

    /// Waits until the descriptor is readable, or its other end is closed.
    ///
    /// # Errors
    /// If the shard of the descriptor is not running on this thread.
    pub async fn readable(&self) -> io::Result<ReadyGuard<'_, T>> {
        self.ready(IoDirection::Read).await
    }

    /// Waits until the descriptor is writable.
    ///
    /// # Errors
    /// If the shard of the descriptor is not running on this thread.
    pub async fn writable(&self) -> io::Result<ReadyGuard<'_, T>> {
        self.ready(IoDirection::Write).await
    }

    /// Polls for readability. Only the task that polled last is woken.
    pub fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<ReadyGuard<'_, T>>> {
        self.poll_ready(cx, IoDirection::Read)
    }

    /// Polls for writability. Only the task that polled last is woken.
    pub fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<ReadyGuard<'_, T>>> {
        self.poll_ready(cx, IoDirection::Write)
    }

    /// Calls `act` as soon as the descriptor is ready in this direction, and again after each `WouldBlock`.
    ///
    /// # Errors
    /// Other errors of `act`, and those of [`readable`](Self::readable).
    pub async fn async_io<R>(
        &self,
        direction: IoDirection,
        mut act: impl FnMut(&T) -> io::Result<R>,
    ) -> io::Result<R> {
        loop {
            let mut guard = self.ready(direction).await?;
            if let Ok(result) = guard.try_io(&mut act) {
                return result;
            }
        }
    }

    async fn ready(&self, direction: IoDirection) -> io::Result<ReadyGuard<'_, T>> {
        let target = WaitTarget::KernelFd(self.index, direction);
        let mut waiting = WaitRegistration::new(self.executor, target);
        let events = poll_fn(|cx| self.poll_with(&mut waiting, cx, direction)).await?;
        Ok(ReadyGuard { fd: self, direction, events })
    }

    fn poll_ready(
        &self,
        cx: &mut Context<'_>,
        direction: IoDirection,
    ) -> Poll<io::Result<ReadyGuard<'_, T>>> {
        let target = WaitTarget::KernelFd(self.index, direction);
        let mut waiting = WaitRegistration::poll_function(self.executor, target);
        let poll = self.poll_with(&mut waiting, cx, direction);
        poll.map_ok(|events| ReadyGuard { fd: self, direction, events })
    }

    /// Returns the number of the event that made the descriptor ready.
    fn poll_with(
        &self,
        waiting: &mut WaitRegistration,
        cx: &mut Context<'_>,
        direction: IoDirection,
    ) -> Poll<io::Result<u32>> {
        waiting.poll(cx, |a| {
            let state = a.state.kernel_fds.fds[self.index].direction(direction);
            state.is_ready.then_some(Ok(state.events))
        })
    }

    fn deregister(&mut self) {
        let index = self.index;
        local::release(self.executor, |state, core| {
            let Some(FdState { handle, read, write }) = state.kernel_fds.fds.remove(index) else { return };
            state.wake_all(read.waiters);
            state.wake_all(write.waiters);
            match core {
                Some(core) => deregister(core, handle),
                None => state.kernel_fds.dropped.push(handle),
            }
        });
    }
}

impl<T: AsFd> AsFd for AsyncFd<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.get_ref().as_fd()
    }
}

impl<T: AsFd> AsRawFd for AsyncFd<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl<T: AsFd> Drop for AsyncFd<T> {
    fn drop(&mut self) {
        // `into_inner` has deregistered the descriptor already.
        if self.inner.is_some() {
            self.deregister();
        }
    }
}

/// A descriptor that is ready as far as known.
#[derive(Debug)]
pub struct ReadyGuard<'a, T: AsFd> {
    fd: &'a AsyncFd<T>,
    direction: IoDirection,
    /// Number of the event that made it ready.
    events: u32,
}

/// The descriptor was not ready after all: wait again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotReady;

impl<T: AsFd> ReadyGuard<'_, T> {
    /// Calls `act`. If that returns `WouldBlock`, the descriptor counts as not ready until the kernel reports
    /// otherwise.
    ///
    /// # Errors
    /// [`NotReady`] after `WouldBlock`.
    pub fn try_io<R>(&mut self, act: impl FnOnce(&T) -> io::Result<R>) -> Result<io::Result<R>, NotReady> {
        match act(self.fd.get_ref()) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.clear_ready();
                Err(NotReady)
            }
            result => Ok(result),
        }
    }

    /// Records that reading or writing returned `WouldBlock`. Has no effect if the kernel has reported the
    /// descriptor as ready since this guard was created.
    pub fn clear_ready(&mut self) {
        let (index, direction, events) = (self.fd.index, self.direction, self.events);
        local::state(self.fd.executor, |state| {
            if let Some(fd) = state.kernel_fds.fds.get_mut(index) {
                let state = fd.direction(direction);
                state.is_ready &= state.events != events;
            }
        });
    }

    /// Returns the value that owns the descriptor.
    pub fn get_inner(&self) -> &T {
        self.fd.get_ref()
    }
}
