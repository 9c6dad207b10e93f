//! `fork`: the child goes on with all that the parent holds (docs/adr/0012-holders-and-placeholders.md).

use crate::fd_table::FileId;
use crate::file::{Kind, NOT_OURS, Shape};
use crate::held::Locked;
use crate::lane::Lane;
use crate::sleep::{self, Sleepers};
use crate::wake::Watcher;
use crate::{Ops, descriptor};
use ginnel::door::Expected;
use rustix::io::Errno;

/// A fork that is about to happen. While it exists no other thread uses the stack, so the child finds everything whole.
pub struct Forking<'a> {
    lane: Locked<'a>,
    /// The child's way in; `None` if the stack has no room for another process, or is gone.
    child: Option<Expected>,
}

impl Ops {
    /// To be called before `fork`, and its result to be given to [`Ops::forked_here`] in the parent and to [`Ops::forked_child`] in the child.
    pub fn before_fork(&self) -> Forking<'_> {
        let mut lane = self.lock_for_good();
        for file in lane.files.ids() {
            lane.share(file);
            lane.know_own_end(file);
        }
        let child = lane.process.as_ref().and_then(|process| process.expect_child().ok());
        if child.is_none() {
            lane.client.look_for_end();
        }
        Forking { lane, child }
    }

    /// The parent goes on as it was.
    pub fn forked_here(&self, forking: Forking<'_>) {
        // Its copy of the child's connection closes: the child has the other.
        drop(forking);
    }

    /// The child becomes a process of its own to the stack.
    ///
    /// # Errors
    /// `ENOBUFS`: the stack had no room for it, so it must not use what it inherited.
    pub fn forked_child(&self, forking: Forking<'_>) -> Result<(), Errno> {
        let Forking { mut lane, child } = forking;
        match child {
            Some(child) => lane.become_child(child)?,
            // There is nobody to be a process to: it goes on as its parent does, without network.
            None if lane.client.is_gone() => drop(lane.begin_anew()?),
            None => return Err(Errno::NOBUFS),
        }
        self.note_line(&lane);
        // The parent's book is the parent's.
        self.write_all_down(&mut lane);
        Ok(())
    }
}

impl Lane {
    fn become_child(&mut self, expected: Expected) -> Result<(), Errno> {
        let process = self.process.as_mut().ok_or(Errno::NOBUFS)?;
        let parents: Vec<_> = self.client.own_fds().chain([process.line()]).collect();
        // What the parent had is the parent's: here it is only put away, and what is closed is not hidden any more.
        parents.iter().for_each(|fd| descriptor::forget_internal(*fd));
        if process.become_child_of(self.client.all_mut(), expected).is_err() {
            parents.into_iter().for_each(descriptor::keep);
            return Err(Errno::NOBUFS);
        }
        self.client.are_childs();
        self.client.own_fds().chain([process.line()]).for_each(descriptor::keep);
        // It takes a share of its own where the parent took one and nobody is going to say so: in a set of epoll's, and in a call that goes on here. Elsewhere it does with its first call about
        // the listener, if it ever makes one.
        for file in self.begin_anew()? {
            self.begin_accepting(file);
        }
        Ok(())
    }

    /// Threads that waited are the parent's, but for the one that forked, in a handler. Returns the listeners at which it accepted, and which are waited for.
    fn begin_anew(&mut self) -> Result<Vec<FileId>, Errno> {
        let own = sleep::asleep();
        self.sleepers = Sleepers::of_child(own)?;
        let goes_on = |watcher: &Watcher| match watcher {
            Watcher::Item { .. } => true,
            Watcher::Thread { sleeper, .. } => Some(*sleeper) == own,
        };
        let mut listeners = Vec::new();
        for file in self.files.ids() {
            let known = self.files.get(file);
            known.watchers.retain(goes_on);
            let calls = known.watchers.iter().filter(|watcher| matches!(watcher, Watcher::Thread { .. }));
            // Cannot truncate: one thread, and what it waits for.
            known.users = known.descriptors + calls.count() as u32;
            let is_waited_for = !known.watchers.is_empty();
            if let Kind::Socket(socket) = &mut known.kind
                && let Some(bound) = socket.bound_mut()
            {
                // It is the parent's.
                bound.reserved.number = NOT_OURS;
            }
            if let Kind::Socket(socket) = &mut known.kind
                && let Shape::Listening(listening) = &mut socket.shape
                && core::mem::take(&mut listening.accepts)
                && is_waited_for
            {
                listeners.push(file);
            }
        }
        Ok(listeners)
    }
}
