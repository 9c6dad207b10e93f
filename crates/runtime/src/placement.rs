//! An application beside its shard instead of in it: what `shard.placement` asks for.
//!
//! The application has a shard of its own without devices, whose engine is the other's, through a channel. On threads each runs by itself;
//! in simulations, turn by turn, the application's shard takes the stack's along.

use crate::channel::ChannelServer;
use crate::channel::control::SameThread;
use crate::error::Error;
use crate::shard::Shard;
use crate::stats::{ShardStats, StatsReader};
use crate::stop::StopFlag;
use crate::wait::EventFd;
use core::sync::atomic::{AtomicBool, Ordering};
use ginnel_stack::time::Instant;
use std::sync::{Arc, MutexGuard, PoisonError};

/// The stack's shard of an application that has one of its own.
pub(crate) struct Beside {
    stack: SameThread,
    published: StatsReader,
    /// It runs on a thread.
    runs: bool,
    /// It ran on a thread and ended.
    ended: Arc<AtomicBool>,
}

impl Beside {
    pub fn new(stack: SameThread) -> Self {
        let published = stack.0.lock().unwrap_or_else(PoisonError::into_inner).stats_reader();
        Self { stack, published, runs: false, ended: Arc::default() }
    }

    /// The stack's shard, while it runs on no thread.
    pub fn shard(&self) -> MutexGuard<'_, Shard<ChannelServer>> {
        // A handler that panicked has left the shard as it is.
        self.stack.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its counters: while it runs on a thread those that it published last.
    pub fn stats(&self) -> ShardStats {
        if self.runs { self.published.snapshot() } else { *self.shard().stats() }
    }

    /// One turn at the time `now`, if it does not run by itself. Returns how much it did.
    pub fn turn(&mut self, now: Instant) -> Result<usize, Error> {
        if self.runs { Ok(0) } else { Ok(self.shard().poll_once(now)?.work) }
    }

    /// When it has to be turned again.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.runs { None } else { self.shard().next_deadline() }
    }

    /// Whether it ran and ended, which it does before the application only because of an error.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// How to ask it: directly.
    pub fn control(&self) -> SameThread {
        self.stack.clone()
    }

    /// Notes that it runs on a thread, or no more.
    pub fn set_running(&mut self, runs: bool) {
        self.runs = runs;
        self.ended.store(false, Ordering::Release);
    }

    /// What the thread does that runs it: until `stop`, and then it wakes the application, which must not wait for it.
    pub fn runner(
        &self,
        stop: StopFlag,
        wake: Arc<EventFd>,
    ) -> impl FnOnce() -> Result<(), Error> + Send + use<> {
        let (stack, ended) = (self.stack.clone(), self.ended.clone());
        move || {
            let result = stack.0.lock().unwrap_or_else(PoisonError::into_inner).run(&stop);
            ended.store(true, Ordering::Release);
            wake.signal();
            result
        }
    }
}
