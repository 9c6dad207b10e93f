//! `fork`: the child goes on with all that the parent holds (docs/adr/0012-holders-and-placeholders.md).

use crate::file::{Kind, Shape};
use crate::held::Locked;
use crate::lane::Lane;
use crate::sleep::Sleepers;
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
        let lane = self.lock_for_good();
        let child = lane.process.as_ref().and_then(|process| process.expect_child().ok());
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
        lane.become_child(child.ok_or(Errno::NOBUFS)?)?;
        // The parent's book is the parent's.
        self.write_all_down(&mut lane);
        Ok(())
    }
}

impl Lane {
    fn become_child(&mut self, expected: Expected) -> Result<(), Errno> {
        let process = self.process.as_mut().ok_or(Errno::NOBUFS)?;
        let parents = process.descriptors();
        let clients = process.become_child_of(self.client.all(), expected).map_err(|_| Errno::NOBUFS)?;
        // What the parent had is the parent's: here it is only put away.
        for fd in self.client.descriptors().into_iter().chain(parents) {
            descriptor::forget_internal(fd);
        }
        drop(self.client.replace(clients));
        for fd in process.descriptors().into_iter().chain(self.client.descriptors()) {
            descriptor::keep(fd);
        }
        // Threads that slept are the parent's.
        self.sleepers = Sleepers::default();
        let mut listeners = Vec::new();
        for file in self.files.ids() {
            let known = self.files.get(file);
            known.watchers.retain(|watcher| matches!(watcher, Watcher::Item { .. }));
            known.users = known.descriptors;
            if let Kind::Socket(socket) = &mut known.kind
                && let Shape::Listening(listening) = &mut socket.shape
                && core::mem::take(&mut listening.accepts)
            {
                listeners.push(file);
            }
        }
        // It takes a share of its own where the parent took one.
        for file in listeners {
            self.begin_accepting(file);
        }
        Ok(())
    }
}
