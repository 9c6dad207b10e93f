//! What an executor keeps between turns.

use super::net::state::Net;
use super::tasks::Tasks;
use super::timer::Sleeps;
use super::waiters::{Caller, WaitLists, Waiters};
use super::waker::{Shared, TaskWaker};
use crate::error::Error;
use core::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

/// An executor as its handler, its tasks and their handles see it.
pub(super) struct Inner {
    /// Numbers all executors of the process.
    pub(super) id: u32,
    pub(super) shared: Arc<Shared>,
    pub(super) state: RefCell<State>,
}

/// What one can wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// Bytes of a connection.
    Read(u32),
    /// Room of a connection, or its establishment.
    Write(u32),
    /// Connections of a listener.
    Accept(u32),
    /// Datagrams of a socket.
    Datagrams(u32),
    /// The end of a task.
    End(u32),
    /// A point in time.
    Time(u32),
    /// That the shard is asked to stop.
    Stop,
}

pub(super) struct State {
    pub(super) tasks: Tasks,
    pub(super) net: Net,
    pub(super) sleeps: Sleeps,
    pub(super) lists: WaitLists,
    pub(super) stop: Stop,
    /// Makers of tasks that other threads sent.
    pub(super) arrivals: VecDeque<Box<dyn FnOnce() + Send>>,
    /// Room to collect tasks in that other threads woke.
    pub(super) woken: Vec<Arc<TaskWaker>>,
    /// How the main task ended.
    pub(super) outcome: Option<Result<(), Error>>,
}

/// How far the end of the shard has come.
pub(super) struct Stop {
    /// The shard was asked to stop.
    pub(super) asked: bool,
    /// A task has waited for that: it ends the shard.
    pub(super) heard: bool,
    pub(super) waiters: Waiters,
}

impl State {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Self {
            tasks: Tasks::new(Arc::clone(shared)),
            net: Net::new(),
            sleeps: Sleeps::new(),
            lists: WaitLists::new(),
            stop: Stop { asked: false, heard: false, waiters: Waiters::NONE },
            arrivals: VecDeque::new(),
            woken: Vec::new(),
            outcome: None,
        }
    }

    fn waiters_mut(&mut self, what: Wait) -> Option<&mut Waiters> {
        match what {
            Wait::Read(socket) => self.net.sockets.get_mut(socket).map(|s| &mut s.readers),
            Wait::Write(socket) => self.net.sockets.get_mut(socket).map(|s| &mut s.writers),
            Wait::Accept(listener) => self.net.listeners.get_mut(listener).map(|l| &mut l.waiters),
            Wait::Datagrams(socket) => self.net.udp.get_mut(socket).map(|s| &mut s.waiters),
            Wait::End(task) => self.tasks.joiners_mut(task),
            Wait::Time(sleep) => self.sleeps.waiters_mut(sleep),
            Wait::Stop => Some(&mut self.stop.waiters),
        }
    }

    /// Enters a caller among those who wait.
    pub(super) fn wait(&mut self, what: Wait, caller: Caller<'_>, id: &mut u64) {
        let Some(waiters) = self.waiters_mut(what).copied() else { return };
        let now = self.lists.add(waiters, caller, id);
        if let Some(waiters) = self.waiters_mut(what) {
            *waiters = now;
        }
    }

    /// A future that had entered itself is dropped.
    pub(super) fn cease(&mut self, what: Wait, id: u64) {
        let Some(waiters) = self.waiters_mut(what).copied() else { return };
        let Self { lists, tasks, .. } = self;
        let now = lists.remove(waiters, id, |task| tasks.schedule(task));
        if let Some(waiters) = self.waiters_mut(what) {
            *waiters = now;
        }
    }

    /// Lets all go on who wait for this.
    pub(super) fn wake(&mut self, what: Wait) {
        if let Some(waiters) = self.waiters_mut(what) {
            let waiters = core::mem::replace(waiters, Waiters::NONE);
            self.wake_all(waiters);
        }
    }

    /// The same for those who were taken out.
    pub(super) fn wake_all(&mut self, waiters: Waiters) {
        let Self { lists, tasks, .. } = self;
        lists.wake(waiters, |task| tasks.schedule(task));
    }

    /// Enters the tasks that other threads have woken.
    pub(super) fn take_woken(&mut self, shared: &Shared) {
        shared.take_woken(&mut self.woken);
        for waker in self.woken.drain(..) {
            self.tasks.schedule(waker.task());
        }
    }
}

impl Inner {
    /// Calls and drops the wakers that have left. To be called when nothing is borrowed: both may run anybody's code.
    pub(super) fn settle(&self) {
        loop {
            let mut state = self.state.borrow_mut();
            let leaving = &mut state.lists.leaving;
            let (waker, unwanted) = (leaving.to_wake.pop(), leaving.to_drop.pop());
            drop(state);
            if waker.is_none() && unwanted.is_none() {
                return;
            }
            drop(unwanted);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }
}
