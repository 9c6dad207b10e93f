//! The state of an executor between turns.

use super::async_fd::{FdTable, IoDirection};
use super::net::state::NetState;
use super::tasks::Tasks;
use super::timer::Sleeps;
use super::waiters::{WaitLists, WaiterRef, Waiters};
use super::waker::{RemoteWakeups, TaskWaker};
use crate::error::Error;
use core::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

/// An executor, as its handler, its tasks and their handles share it.
pub(super) struct ExecutorInner {
    /// Unique among the executors of the process.
    pub(super) id: u32,
    pub(super) shared: Arc<RemoteWakeups>,
    pub(super) state: RefCell<ExecutorState>,
}

/// An object that a future can wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaitTarget {
    /// Data of a connection.
    Read(u32),
    /// Send space of a connection, or its establishment.
    Write(u32),
    /// Connections of a listener.
    Accept(u32),
    /// Datagrams of a socket.
    Datagrams(u32),
    /// The end of a task.
    Join(u32),
    /// The end of a sleep.
    Sleep(u32),
    /// Readiness of a kernel descriptor.
    KernelFd(u32, IoDirection),
    /// A request to stop the shard.
    Stop,
}

/// The tasks of an executor, and the objects that they wait for.
pub(super) struct ExecutorState {
    pub(super) tasks: Tasks,
    pub(super) net: NetState,
    pub(super) sleeps: Sleeps,
    pub(super) kernel_fds: FdTable,
    pub(super) wait_lists: WaitLists,
    pub(super) stop: StopState,
    /// Closures of other threads that spawn tasks.
    pub(super) remote_spawns: VecDeque<Box<dyn FnOnce() + Send>>,
    /// Buffer for the tasks that other threads woke.
    pub(super) woken: Vec<Arc<TaskWaker>>,
    /// The result of the main task.
    pub(super) outcome: Option<Result<(), Error>>,
}

/// Progress of stopping the shard.
pub(super) struct StopState {
    /// True if the shard was asked to stop.
    pub(super) is_requested: bool,
    /// True if a task has waited for the request: the main task ends the shard then.
    pub(super) is_observed: bool,
    pub(super) waiters: Waiters,
}

impl ExecutorState {
    pub(super) fn new(shared: &Arc<RemoteWakeups>, lower_share_percent: u32) -> Self {
        Self {
            tasks: Tasks::new(Arc::clone(shared), lower_share_percent),
            net: NetState::new(),
            sleeps: Sleeps::new(),
            kernel_fds: FdTable::new(),
            wait_lists: WaitLists::new(),
            stop: StopState { is_requested: false, is_observed: false, waiters: Waiters::NONE },
            remote_spawns: VecDeque::new(),
            woken: Vec::new(),
            outcome: None,
        }
    }

    fn waiters_mut(&mut self, target: WaitTarget) -> Option<&mut Waiters> {
        match target {
            WaitTarget::Read(socket) => self.net.sockets.get_mut(socket).map(|s| &mut s.readers),
            WaitTarget::Write(socket) => self.net.sockets.get_mut(socket).map(|s| &mut s.writers),
            WaitTarget::Accept(listener) => self.net.listeners.get_mut(listener).map(|l| &mut l.waiters),
            WaitTarget::Datagrams(socket) => self.net.udp.get_mut(socket).map(|s| &mut s.waiters),
            WaitTarget::Join(task) => self.tasks.joiners_mut(task),
            WaitTarget::Sleep(sleep) => self.sleeps.waiters_mut(sleep),
            WaitTarget::KernelFd(fd, direction) => {
                let fd = self.kernel_fds.fds.get_mut(fd)?;
                Some(match direction {
                    IoDirection::Read => &mut fd.read.waiters,
                    IoDirection::Write => &mut fd.write.waiters,
                })
            }
            WaitTarget::Stop => Some(&mut self.stop.waiters),
        }
    }

    /// Adds a waiter for `target`.
    pub(super) fn wait(&mut self, target: WaitTarget, waiter: WaiterRef<'_>, id: &mut u64) {
        let Some(waiters) = self.waiters_mut(target).copied() else { return };
        let now = self.wait_lists.add(waiters, waiter, id);
        if let Some(waiters) = self.waiters_mut(target) {
            *waiters = now;
        }
    }

    /// Removes the waiter of a future that is dropped.
    pub(super) fn cancel_wait(&mut self, target: WaitTarget, id: u64) {
        let Some(waiters) = self.waiters_mut(target).copied() else { return };
        let Self { wait_lists: lists, tasks, .. } = self;
        let now = lists.remove(waiters, id, |task| tasks.schedule(task));
        if let Some(waiters) = self.waiters_mut(target) {
            *waiters = now;
        }
    }

    /// Wakes all waiters of `target`.
    pub(super) fn wake(&mut self, target: WaitTarget) {
        if let Some(waiters) = self.waiters_mut(target) {
            let waiters = core::mem::replace(waiters, Waiters::NONE);
            self.wake_all(waiters);
        }
    }

    /// Wakes waiters that were taken from their target.
    pub(super) fn wake_all(&mut self, waiters: Waiters) {
        let Self { wait_lists: lists, tasks, .. } = self;
        lists.wake(waiters, |task| tasks.schedule(task));
    }

    /// Schedules the tasks that other threads have woken.
    pub(super) fn take_woken(&mut self, shared: &RemoteWakeups) {
        shared.take_woken(&mut self.woken);
        for waker in self.woken.drain(..) {
            self.tasks.schedule(waker.task());
        }
    }
}

impl ExecutorInner {
    /// Calls or drops the wakers that were detached. Call it when nothing is borrowed, because both may run
    /// code of the application.
    pub(super) fn flush_wakers(&self) {
        loop {
            let mut state = self.state.borrow_mut();
            let detached = &mut state.wait_lists.detached;
            let (waker, to_drop) = (detached.to_wake.pop(), detached.to_drop.pop());
            drop(state);
            if waker.is_none() && to_drop.is_none() {
                return;
            }
            drop(to_drop);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
}
