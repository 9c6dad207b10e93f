//! Clients that come from clients: another of the same domain, and the child of one that forked.

use super::super::control::ControlPath;
use super::super::doorbells::NOTIFIED;
use super::super::region::Region;
use super::{Client, ClientSocket, SharedStreams, StackNotifier};
use crate::internal_fd::InternalFd;
use crate::wait::EventFd;
use ginnel_stack::handle::Conn;
use rustix::fd::OwnedFd;
use std::sync::Arc;

/// The memory of a channel, for a process that must not touch it any more.
pub struct ChannelMapping(Arc<Region>);

impl ChannelMapping {
    /// What this process does with it from now on nobody else sees. May be called in a handler of a signal.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn make_private(&self) -> std::io::Result<()> {
        self.0.make_private()
    }

    /// Addresses that it takes up.
    pub fn bytes(&self) -> u64 {
        self.0.bytes()
    }
}

impl Client {
    /// Its memory, which children of this process have, too.
    pub fn mapping(&self) -> ChannelMapping {
        ChannelMapping(self.region.clone())
    }

    /// The client's number in its domain.
    pub fn number(&self) -> u32 {
        // Cannot truncate: clients are 64 at the most.
        self.number as u32
    }

    /// Another client of the same domain, in this process.
    pub(crate) fn sibling(&self, number: u32, wake: OwnedFd, control: Box<dyn ControlPath>) -> Self {
        let wake = Arc::new(EventFd::from_fd(wake));
        Self::with_shared_streams(
            self.region.clone(),
            number as usize,
            self.stack_wake.clone(),
            wake,
            control,
        )
    }

    /// Holds from now on what `parent` held when it forked, and goes on where that stood.
    pub(crate) fn inherit(&mut self, parent: &Self) {
        self.sockets.clone_from(&parent.sockets);
        // What the parent had not looked at yet the child looks at, too.
        self.events.extend(&parent.events);
        self.must_rescan = true;
    }

    /// The same in the child itself, where the parent's client is this one's memory and nothing else: what it knows of sockets stays where it is.
    pub(crate) fn become_child(&mut self, number: u32, wake: InternalFd, control: Box<dyn ControlPath>) {
        self.number = number as usize;
        let (region, stack) = (self.region.clone(), self.stack_wake.clone());
        self.to_stack = StackNotifier::Shared(Arc::new(SharedStreams::new(
            region.clone(),
            self.number,
            stack,
            self.blocked.clone(),
        )));
        self.has_notified = false;
        self.from_stack = region.to_client(self.number).notify_queue_from_start();
        self.wake = Arc::new(EventFd::from_internal(wake));
        self.control = control;
        self.next_preallocated = 0;
        if let Some(offers) = &mut self.explicit_offers {
            offers.clear();
        }
        self.must_rescan = true;
    }

    /// Holds a connection that another process held, or this one before it became another program: everything about it is new.
    ///
    /// The stack must have agreed.
    pub(crate) fn adopt(&mut self, conn: Conn) {
        if (conn.index() as usize) < self.sockets_max() {
            self.track(conn.index(), conn.generation());
        }
    }

    /// Takes the lock of a connection, and keeps it: what a client does that dies in the middle.
    #[cfg(all(test, not(loom)))]
    pub(in crate::channel) fn lock(&self, conn: Conn) -> Option<super::super::lock::SocketLockGuard<'_>> {
        let word = &self.region.socket(conn.index()).lock;
        super::super::lock::lock(word, self.number, core::time::Duration::ZERO)
    }

    /// The connections that it holds.
    pub fn conns(&self) -> impl Iterator<Item = Conn> + '_ {
        let held = |(socket, held): (usize, &ClientSocket)| Some(Conn::new(socket as u32, held.generation?));
        self.sockets.iter().enumerate().filter_map(held)
    }

    /// Of a child, when it first wants to know what happened, which many never do: whatever was rung before it listened. It compares all it holds, and the stack looks at its credits.
    #[cold]
    pub(super) fn rescan(&mut self) {
        self.must_rescan = false;
        for socket in 0..self.sockets.len() {
            if let Some(generation) = self.sockets[socket].generation {
                self.report_changes(Conn::new(socket as u32, generation));
            }
        }
        self.notify(0, NOTIFIED);
    }
}
