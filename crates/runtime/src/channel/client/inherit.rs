//! Clients created from other clients: a sibling in the same domain, and the child of a client whose process
//! forked.

use super::super::client_memory::ClientMemory;
use super::super::control::ControlPath;
use super::super::doorbells::{NOTIFIED, NotifyQueue};
use super::super::region::Region;
use super::{Client, ClientSocket};
use crate::error::Error;
use crate::internal_fd::InternalFd;
use crate::wait::EventFd;
use ginnel_stack::handle::Conn;
use rustix::fd::OwnedFd;
use std::sync::Arc;

/// The memory of a child's client, mapped before the child takes over the parent's clients.
pub(crate) struct ChildMemory(Arc<ClientMemory>);

/// Memory and a descriptor that a client's process shares with the stack, for a process that must not change
/// them any more.
pub struct ChannelMapping {
    region: Arc<Region>,
    memory: Arc<ClientMemory>,
    wake: Arc<EventFd>,
}

impl ChannelMapping {
    /// Makes this process's later changes invisible to other processes: the region becomes a private copy,
    /// and the client's memory private and empty. Returns false if the kernel refuses the memory: then
    /// [`make_page_writable`](Self::make_page_writable) must be called for each page that cannot be written.
    /// May be called in a signal handler.
    pub fn make_private(&self) -> bool {
        let is_memory_writable = self.memory.make_private();
        self.region.make_private() && is_memory_writable
    }

    /// Makes the page at an address writable after [`make_private`](Self::make_private) has returned false.
    /// Returns false if the address is outside of the mappings, or if the kernel has no memory. May be called
    /// in a signal handler.
    pub fn make_page_writable(&self, address: usize) -> bool {
        self.memory.make_page_writable(address) || self.region.make_page_writable(address)
    }

    /// Returns the descriptor on which the stack wakes the process.
    pub fn wake_fd(&self) -> &InternalFd {
        self.wake.internal_fd()
    }

    /// Returns how many bytes of address space the mappings take.
    pub fn bytes(&self) -> u64 {
        self.region.bytes() + self.memory.bytes()
    }
}

impl Client {
    /// Returns the mappings of the region and of the client's memory, and the descriptor on which the stack
    /// wakes the client. Forked children of this process have them, too.
    pub fn mapping(&self) -> ChannelMapping {
        ChannelMapping { region: self.region.clone(), memory: self.memory.clone(), wake: self.wake.clone() }
    }

    /// Returns the client's number in its domain.
    pub fn number(&self) -> u32 {
        // Cannot truncate: client numbers have 16 bits.
        self.number as u32
    }

    /// Creates another client of the same domain, in this process. `memory` is the memory file of that
    /// client.
    pub(crate) fn sibling(
        &self,
        number: u32,
        memory: &OwnedFd,
        wake: OwnedFd,
        control: Box<dyn ControlPath>,
    ) -> Result<Self, Error> {
        let (region, stack) = (self.region.clone(), self.stack_wake.clone());
        let wake = EventFd::from_fd(wake).map_err(|e| Error::io("wake-ups of the channel", e))?;
        let wake = Arc::new(wake);
        Self::with_shared_streams(region, memory, number as usize, stack, wake, control)
    }

    /// Takes over the sockets that `parent` owned when it forked, at the parent's read and event positions.
    pub(crate) fn inherit(&mut self, parent: &Self) {
        self.sockets.clone_from(&parent.sockets);
        // The child also processes events that the parent had queued and not delivered.
        self.events.extend(&parent.events);
        self.must_rescan = true;
    }

    /// Maps the memory file of a forked child of this process.
    ///
    /// # Errors
    /// Returns an error if the memory cannot be mapped or is not valid.
    pub(crate) fn open_child_memory(&self, memory: &OwnedFd) -> Result<ChildMemory, Error> {
        Self::open_memory(&self.region, memory).map(ChildMemory)
    }

    /// Turns this client into the forked child's, in the child's process. The state of the parent's client is
    /// already a copy, so the state of its sockets stays in place.
    pub(crate) fn become_child(
        &mut self,
        number: u32,
        memory: ChildMemory,
        wake: InternalFd,
        control: Box<dyn ControlPath>,
    ) {
        self.memory = memory.0;
        self.number = number as usize;
        self.share_streams();
        self.has_notified = false;
        self.from_stack = NotifyQueue::default();
        self.wake = Arc::new(EventFd::from_internal(wake));
        self.control = control;
        self.next_preallocated = 0;
        if let Some(offers) = &mut self.explicit_offers {
            offers.clear();
        }
        self.must_rescan = true;
    }

    /// Makes the next call for events look at everything, for a program that inherits sockets.
    pub(crate) fn rescan_at_next_poll(&mut self) {
        self.must_rescan = true;
    }

    /// Takes over a connection or UDP socket that another process owned, or this process before it executed
    /// another program. Queues events for its whole state, because this client has reported nothing about it.
    ///
    /// The stack must have confirmed the ownership.
    pub(crate) fn adopt(&mut self, conn: Conn) {
        if (conn.index() as usize) < self.sockets_max() {
            self.track(conn.index(), conn.generation());
        }
    }

    /// Takes the lock of a connection. A test that forgets the guard acts as a client that dies while it has
    /// the lock.
    #[cfg(all(test, not(loom)))]
    pub(in crate::channel) fn lock(&self, conn: Conn) -> Option<super::super::lock::SocketLockGuard<'_>> {
        let word = &self.region.socket(conn.index()).lock;
        super::super::lock::lock(word, self.number, core::time::Duration::ZERO)
    }

    /// Returns the connections and UDP sockets that this client owns.
    pub fn conns(&self) -> impl Iterator<Item = Conn> + '_ {
        let entry =
            |(socket, entry): (usize, &ClientSocket)| Some(Conn::new(socket as u32, entry.generation?));
        self.sockets.iter().enumerate().filter_map(entry)
    }

    /// Catches up with notifications that were sent before a forked child read its queue: compares all
    /// sockets that it owns with the region, and makes the stack read its credits. Called when the child
    /// first asks for events, which many children never do.
    #[cold]
    pub(super) fn rescan(&mut self) {
        self.must_rescan = false;
        self.report_destroyed_listeners();
        for socket in 0..self.sockets.len() {
            if let Some(generation) = self.sockets[socket].generation {
                self.report_changes(Conn::new(socket as u32, generation));
            }
        }
        self.notify(0, NOTIFIED);
    }
}
