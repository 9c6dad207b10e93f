//! `fork`: the child owns everything that its parent owns (docs/adr/0012-owners-and-proxy-descriptors.md).

use crate::fd_table::FileId;
use crate::file::{FOREIGN_RESERVATION, FileKind, SocketRole};
use crate::lock::LockGuard;
use crate::process::ProcessState;
use crate::sleep::{self, Waiters};
use crate::wait_queue::WaitEntry;
use crate::{Ops, descriptor};
use ginnel::Error;
use ginnel::broker::PreparedProcess;
use rustix::io::Errno;

/// A fork in preparation. While the value exists, no other thread uses the stack, so the child finds a
/// consistent state.
pub struct ForkGuard<'a> {
    state: LockGuard<'a>,
    /// The child as prepared with the stack; an error if the stack refuses it, or is gone.
    child: Result<PreparedProcess, Error>,
}

impl Ops {
    /// Must be called before `fork`. The result must be passed to [`Ops::fork_parent`] in the parent, and to
    /// [`Ops::fork_child`] in the child.
    pub fn prepare_fork(&self) -> ForkGuard<'_> {
        let mut state = self.lock_or_panic();
        for file in state.files.ids() {
            state.share(file);
            state.query_local_end(file);
        }
        let prepare =
            |state: &ProcessState| state.attachment.as_ref().ok_or(Error::StackGone)?.prepare_fork();
        let mut child = prepare(&state);
        if child.is_err() {
            // The process of the shards may have been started again.
            if state.has_restarted() {
                child = prepare(&state);
            }
        }
        ForkGuard { state, child }
    }

    /// Continues in the parent.
    pub fn fork_parent(&self, guard: ForkGuard<'_>) {
        // Closes the parent's copy of the child's control connection.
        drop(guard);
    }

    /// Makes the child a process of its own to the stack.
    ///
    /// # Errors
    /// Why the stack refuses it: the child must not use what it inherited.
    pub fn fork_child(&self, guard: ForkGuard<'_>) -> Result<(), Error> {
        let ForkGuard { mut state, child } = guard;
        match child {
            Ok(child) => state.become_child(child)?,
            // There is no stack to attach to: the child continues without network, as its parent does.
            Err(_) if state.client.is_stack_gone() => drop(state.reset_waits_in_child().map_err(of_errno)?),
            Err(error) => return Err(error),
        }
        // The inherited report is the parent's.
        self.rebuild_report(&mut state);
        self.note_internal_fds(&state);
        Ok(())
    }
}

fn of_errno(errno: Errno) -> Error {
    Error::io("waiters of a child", errno)
}

impl ProcessState {
    fn become_child(&mut self, prepared: PreparedProcess) -> Result<(), Error> {
        let attachment = self.attachment.as_mut().ok_or(Error::StackGone)?;
        let parent_fds: Vec<_> = self.client.internal_fds().chain([attachment.connection_fd()]).collect();
        // The inherited descriptors are the parent's. The child closes them, and closed descriptors are no
        // longer internal.
        parent_fds.iter().for_each(|fd| descriptor::unregister_internal(*fd));
        if let Err(error) = attachment.become_child_with(self.client.all_mut(), prepared) {
            parent_fds.into_iter().for_each(descriptor::register_internal);
            return Err(error);
        }
        self.client.reset_in_child();
        self.client
            .internal_fds()
            .chain([attachment.connection_fd()])
            .for_each(descriptor::register_internal);
        self.publish_shared_memory([]);
        // The child grants accept credit of its own where the parent did, unless a later call of the child
        // will do that. So listeners in epoll sets get credit now, and the listener of a call that continues
        // in the child; other listeners get it with the child's first call on them.
        for file in self.reset_waits_in_child().map_err(of_errno)? {
            self.begin_accepting(file);
        }
        Ok(())
    }

    /// Removes the waiters of the parent's threads, except the one that forked in a handler. Returns the
    /// listeners that had accept credit and are waited for.
    fn reset_waits_in_child(&mut self) -> Result<Vec<FileId>, Errno> {
        let own_waiter = sleep::sleeping_waiter();
        self.waiters = Waiters::for_child(own_waiter)?;
        let belongs_to_child = |entry: &WaitEntry| match entry {
            WaitEntry::EpollItem { .. } => true,
            WaitEntry::Thread { waiter, .. } => Some(*waiter) == own_waiter,
        };
        let mut listeners = Vec::new();
        for id in self.files.ids() {
            let file = self.files.get(id);
            file.wait_queue.retain(belongs_to_child);
            let calls = file.wait_queue.iter().filter(|entry| matches!(entry, WaitEntry::Thread { .. }));
            // Cannot truncate: one thread waits for a limited number of descriptions.
            file.refcount = file.fd_count + calls.count() as u32;
            let is_waited_for = !file.wait_queue.is_empty();
            if let FileKind::Epoll(set) = &mut file.kind {
                set.forget_direct_sleep();
            }
            if let FileKind::Socket(socket) = &mut file.kind {
                if let Some(bound) = socket.bound_mut() {
                    // The reservation belongs to the parent.
                    bound.reserved.number = FOREIGN_RESERVATION;
                }
                if let Some(udp_send) = &mut socket.udp_send {
                    udp_send.tx_stamps.reset_in_child();
                    socket.options.zerocopy.set_has_stamps(false);
                }
            }
            if let FileKind::Socket(socket) = &mut file.kind
                && let SocketRole::Listening(listening) = &mut socket.role
                && core::mem::take(&mut listening.accepting)
                && is_waited_for
            {
                listeners.push(id);
            }
        }
        Ok(listeners)
    }
}
