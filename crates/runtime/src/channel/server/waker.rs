//! Wake-ups across a trust boundary.
//!
//! Every process that has a descriptor of an eventfd can make it block, fill it and drain it for all others.
//! So the stack never reads or writes an eventfd that another process has: clients wake it through
//! edge-triggered epoll, and it wakes them through its own end of a socket pair.

use crate::wait::EventFd;
use rustix::event::{Timespec, epoll};
use rustix::fd::{AsRawFd, OwnedFd, RawFd};
use rustix::net::{SendFlags, send};
use std::sync::Arc;

/// Wakes one client.
pub(super) enum ClientWaker {
    /// A thread of this process.
    Thread(Arc<EventFd>),
    /// Another process, which has the other end of this socket.
    Process(OwnedFd),
}

impl ClientWaker {
    pub fn signal(&self) {
        match self {
            Self::Thread(event) => event.signal(),
            // If the socket is full, the client has not read earlier wake-ups and is or will be awake; if the
            // client is gone, nobody needs to be woken.
            Self::Process(end) => drop(send(end, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL)),
        }
    }
}

/// Wakes the shard: one epoll descriptor for the domains of all processes.
pub(super) struct DomainEpoll(OwnedFd);

impl DomainEpoll {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// Adds the descriptor of a domain, until it is [removed](Self::remove) or all its copies are closed.
    pub fn add(&self, domain: &EventFd, index: u8) -> std::io::Result<()> {
        let data = epoll::EventData::new_u64(index.into());
        Ok(epoll::add(&self.0, domain.as_fd(), data, epoll::EventFlags::IN | epoll::EventFlags::ET)?)
    }

    /// Removes the descriptor of a domain. Closing it would not suffice while a process has a copy.
    pub fn remove(&self, domain: &EventFd) {
        // The descriptor was added.
        let _ = epoll::delete(&self.0, domain.as_fd());
    }

    /// Discards events so far. Later ones wake the shard again.
    pub fn clear(&self) {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut events =
            [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
                super::super::DOMAINS_MAX];
        // Only an invalid descriptor could be refused.
        let _ = epoll::wait(&self.0, &mut events, Some(&now));
    }

    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
