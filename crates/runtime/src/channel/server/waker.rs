//! Waking clients, and being woken by them, across a boundary of trust.
//!
//! Whoever holds a descriptor of an eventfd can make it block, fill it and empty it, for all who hold it. So the stack never reads nor writes
//! one that a process has: it is woken by the edge, and wakes over one end of a pair of sockets that is its own.

use crate::wait::EventFd;
use rustix::event::{Timespec, epoll};
use rustix::fd::{AsRawFd, OwnedFd, RawFd};
use rustix::net::{SendFlags, send};
use std::sync::Arc;

/// Wakes one client.
pub(super) enum ClientWaker {
    /// In a thread of this process.
    Thread(Arc<EventFd>),
    /// In another process, which has the other end.
    Process(OwnedFd),
}

impl ClientWaker {
    pub fn signal(&self) {
        match self {
            Self::Thread(event) => event.signal(),
            // If there is no room it has not taken earlier ones, and is awake or will be; if it is gone nobody need wake.
            Self::Process(end) => drop(send(end, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL)),
        }
    }
}

/// What wakes the shard: one descriptor for all domains of processes.
pub(super) struct DomainEpoll(OwnedFd);

impl DomainEpoll {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// Is woken by this one, too, until it is closed for good.
    pub fn add(&self, domain: &EventFd, index: u8) -> std::io::Result<()> {
        let data = epoll::EventData::new_u64(index.into());
        Ok(epoll::add(&self.0, domain.as_fd(), data, epoll::EventFlags::IN | epoll::EventFlags::ET)?)
    }

    /// No more. Closing ours is not enough while a process has it.
    pub fn remove(&self, domain: &EventFd) {
        // It was added.
        let _ = epoll::delete(&self.0, domain.as_fd());
    }

    /// Forgets what woke the shard until now. What comes later wakes it anew.
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
