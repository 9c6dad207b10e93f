//! Stopping shards from other threads.

use crate::wait::EventFd;
use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// Asks shards to stop. Clones share one flag, and a flag can serve any number of shards.
#[derive(Clone, Debug)]
pub struct StopFlag(Arc<StopInner>);

#[derive(Debug)]
struct StopInner {
    set: AtomicBool,
    /// Never cleared, so that it wakes every shard that sleeps on it.
    wake: EventFd,
}

impl StopFlag {
    /// Creates a flag that is not set. Fails if the process has no file descriptor left.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self(Arc::new(StopInner { set: AtomicBool::new(false), wake: EventFd::new()? })))
    }

    /// Asks all shards that run with this flag to stop, and wakes those that sleep.
    pub fn stop(&self) {
        self.0.set.store(true, Ordering::Release);
        self.0.wake.signal();
    }

    /// Returns whether [`StopFlag::stop`] was called.
    pub fn is_set(&self) -> bool {
        self.0.set.load(Ordering::Acquire)
    }

    pub(crate) fn wake(&self) -> &EventFd {
        &self.0.wake
    }
}
