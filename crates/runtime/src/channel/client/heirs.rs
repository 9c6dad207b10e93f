//! Clients that come from clients: another of the same domain, and the child of one that forked.

use super::super::bells::RUNG;
use super::super::control::Control;
use super::super::region::Region;
use super::{Client, Held, Streams, Up};
use crate::own_fd::OwnFd;
use crate::wait::EventFd;
use ginnel_stack::handle::Conn;
use rustix::fd::OwnedFd;
use std::sync::Arc;

/// The memory of a channel, for a process that must not touch it any more.
pub struct Memory(Arc<Region>);

impl Memory {
    /// What this process does with it from now on nobody else sees. May be called in a handler of a signal.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn part(&self) -> std::io::Result<()> {
        self.0.part()
    }

    /// Addresses that it takes up.
    pub fn bytes(&self) -> u64 {
        self.0.bytes()
    }
}

impl Client {
    /// Its memory, which children of this process have, too.
    pub fn memory(&self) -> Memory {
        Memory(self.region.clone())
    }

    /// The client's number in its domain.
    pub fn number(&self) -> u32 {
        // Cannot truncate: clients are 64 at the most.
        self.number as u32
    }

    /// Another client of the same domain, in this process.
    pub(crate) fn beside(&self, number: u32, wake: OwnedFd, control: Box<dyn Control>) -> Self {
        let wake = Arc::new(EventFd::from_fd(wake));
        Self::shared(self.region.clone(), number as usize, self.stack.clone(), wake, control)
    }

    /// Holds from now on what `parent` held when it forked, and goes on where that stood.
    pub(crate) fn inherit(&mut self, parent: &Self) {
        self.sockets.clone_from(&parent.sockets);
        // What the parent had not looked at yet the child looks at, too.
        self.events.extend(&parent.events);
        self.is_heir = true;
    }

    /// The same in the child itself, where the parent's client is this one's memory and nothing else: what it knows of sockets stays where it is.
    pub(crate) fn become_child(&mut self, number: u32, wake: OwnFd, control: Box<dyn Control>) {
        self.number = number as usize;
        let (region, stack) = (self.region.clone(), self.stack.clone());
        self.up =
            Up::Shared(Arc::new(Streams::new(region.clone(), self.number, stack, self.blocked.clone())));
        self.rang = false;
        self.down = region.down(self.number).answerer_from_first();
        self.wake = Arc::new(EventFd::from_own(wake));
        self.control = control;
        self.blank = 0;
        if let Some(offers) = &mut self.by_hand {
            offers.forget();
        }
        self.is_heir = true;
    }

    /// Holds a connection that another process held, or this one before it became another program: everything about it is new.
    ///
    /// The stack must have agreed.
    pub(crate) fn adopt(&mut self, conn: Conn) {
        if (conn.index() as usize) < self.sockets_max() {
            self.hold(conn.index(), conn.generation());
        }
    }

    /// Takes the lock of a connection, and keeps it: what a client does that dies in the middle.
    #[cfg(all(test, not(loom)))]
    pub(in crate::channel) fn lock(&self, conn: Conn) -> Option<super::super::lock::Guard<'_>> {
        let word = &self.region.socket(conn.index()).lock;
        super::super::lock::take(word, self.number, core::time::Duration::ZERO)
    }

    /// The connections that it holds.
    pub fn conns(&self) -> impl Iterator<Item = Conn> + '_ {
        let held = |(socket, held): (usize, &Held)| Some(Conn::new(socket as u32, held.generation?));
        self.sockets.iter().enumerate().filter_map(held)
    }

    /// Of a child, when it first wants to know what happened, which many never do: whatever was rung before it listened. It compares all it holds, and the stack looks at its credits.
    #[cold]
    pub(super) fn look_at_all(&mut self) {
        self.is_heir = false;
        for socket in 0..self.sockets.len() {
            if let Some(generation) = self.sockets[socket].generation {
                self.look(Conn::new(socket as u32, generation));
            }
        }
        self.ring(0, RUNG);
    }
}
