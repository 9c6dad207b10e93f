//! `fork`: the child goes on with all that the parent holds (docs/adr/0012-holders-and-placeholders.md).

use crate::fd_table::FileId;
use crate::file::{FOREIGN_RESERVATION, FileKind, SocketRole};
use crate::lock::LockGuard;
use crate::process::ProcessState;
use crate::sleep::{self, Waiters};
use crate::wait_queue::WaitEntry;
use crate::{Ops, descriptor};
use ginnel::broker::PreparedProcess;
use rustix::io::Errno;

/// A fork that is about to happen. While it exists no other thread uses the stack, so the child finds everything whole.
pub struct ForkGuard<'a> {
    state: LockGuard<'a>,
    /// The child's way in; `None` if the stack has no room for another process, or is gone.
    child: Option<PreparedProcess>,
}

impl Ops {
    /// To be called before `fork`, and its result to be given to [`Ops::forked_here`] in the parent and to [`Ops::forked_child`] in the child.
    pub fn prepare_fork(&self) -> ForkGuard<'_> {
        let mut lane = self.lock_or_panic();
        for file in lane.files.ids() {
            lane.share(file);
            lane.query_local_end(file);
        }
        let child = lane.attachment.as_ref().and_then(|process| process.prepare_fork().ok());
        if child.is_none() {
            lane.client.check_stack_alive();
        }
        ForkGuard { state: lane, child }
    }

    /// The parent goes on as it was.
    pub fn fork_parent(&self, forking: ForkGuard<'_>) {
        // Its copy of the child's connection closes: the child has the other.
        drop(forking);
    }

    /// The child becomes a process of its own to the stack.
    ///
    /// # Errors
    /// `ENOBUFS`: the stack had no room for it, so it must not use what it inherited.
    pub fn fork_child(&self, forking: ForkGuard<'_>) -> Result<(), Errno> {
        let ForkGuard { state: mut lane, child } = forking;
        match child {
            Some(child) => lane.become_child(child)?,
            // There is nobody to be a process to: it goes on as its parent does, without network.
            None if lane.client.is_stack_gone() => drop(lane.reset_waits_in_child()?),
            None => return Err(Errno::NOBUFS),
        }
        self.note_connection_fd(&lane);
        // The parent's book is the parent's.
        self.rebuild_report(&mut lane);
        Ok(())
    }
}

impl ProcessState {
    fn become_child(&mut self, expected: PreparedProcess) -> Result<(), Errno> {
        let process = self.attachment.as_mut().ok_or(Errno::NOBUFS)?;
        let parents: Vec<_> = self.client.internal_fds().chain([process.connection_fd()]).collect();
        // What the parent had is the parent's: here it is only put away, and what is closed is not hidden any more.
        parents.iter().for_each(|fd| descriptor::unregister_internal(*fd));
        if process.become_child_with(self.client.all_mut(), expected).is_err() {
            parents.into_iter().for_each(descriptor::register_internal);
            return Err(Errno::NOBUFS);
        }
        self.client.reset_in_child();
        self.client.internal_fds().chain([process.connection_fd()]).for_each(descriptor::register_internal);
        // It takes a share of its own where the parent took one and nobody is going to say so: in a set of epoll's, and in a call that goes on here. Elsewhere it does with its first call about
        // the listener, if it ever makes one.
        for file in self.reset_waits_in_child()? {
            self.begin_accepting(file);
        }
        Ok(())
    }

    /// Threads that waited are the parent's, but for the one that forked, in a handler. Returns the listeners at which it accepted, and which are waited for.
    fn reset_waits_in_child(&mut self) -> Result<Vec<FileId>, Errno> {
        let own = sleep::sleeping_waiter();
        self.waiters = Waiters::for_child(own)?;
        let goes_on = |watcher: &WaitEntry| match watcher {
            WaitEntry::EpollItem { .. } => true,
            WaitEntry::Thread { waiter: sleeper, .. } => Some(*sleeper) == own,
        };
        let mut listeners = Vec::new();
        for file in self.files.ids() {
            let known = self.files.get(file);
            known.wait_queue.retain(goes_on);
            let calls = known.wait_queue.iter().filter(|watcher| matches!(watcher, WaitEntry::Thread { .. }));
            // Cannot truncate: one thread, and what it waits for.
            known.refcount = known.fd_count + calls.count() as u32;
            let is_waited_for = !known.wait_queue.is_empty();
            if let FileKind::Socket(socket) = &mut known.kind
                && let Some(bound) = socket.bound_mut()
            {
                // It is the parent's.
                bound.reserved.number = FOREIGN_RESERVATION;
            }
            if let FileKind::Socket(socket) = &mut known.kind
                && let SocketRole::Listening(listening) = &mut socket.role
                && core::mem::take(&mut listening.accepting)
                && is_waited_for
            {
                listeners.push(file);
            }
        }
        Ok(listeners)
    }
}
