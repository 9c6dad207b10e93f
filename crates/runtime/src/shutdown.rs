//! The common end of several shards.
//!
//! A shard whose application has ended is still needed by the others: the primary shard answers for all on
//! the link, and each shard receives frames that belong to others. So each shard goes on relaying until the
//! application of the last shard has ended.

use crate::context::Context;
use crate::doorbell::Doorbell;
use crate::error::Error;
use crate::handler::Handler;
use core::sync::atomic::{AtomicUsize, Ordering};
use ginnel_stack::handle::Conn;
use std::sync::Arc;

/// Counts the shards whose applications have not ended.
#[derive(Debug)]
pub(crate) struct ShutdownBarrier {
    /// Shards whose applications have not ended.
    running: AtomicUsize,
    doorbells: Vec<Arc<Doorbell>>,
}

impl ShutdownBarrier {
    /// Creates a barrier for `doorbells.len()` shards.
    pub(crate) fn new(doorbells: Vec<Arc<Doorbell>>) -> Arc<Self> {
        Arc::new(Self { running: AtomicUsize::new(doorbells.len()), doorbells })
    }
}

/// The membership of one shard. Dropping it, as after an error or a panic, counts as the end of the shard's
/// application.
#[derive(Debug)]
pub(crate) struct BarrierMember {
    barrier: Arc<ShutdownBarrier>,
    has_arrived: bool,
}

impl BarrierMember {
    pub(crate) fn new(barrier: &Arc<ShutdownBarrier>) -> Self {
        Self { barrier: Arc::clone(barrier), has_arrived: false }
    }

    /// Records that the application of this shard has ended. The last shard wakes the others, which may be
    /// asleep.
    pub(crate) fn arrive(&mut self) {
        if !core::mem::replace(&mut self.has_arrived, true)
            && self.barrier.running.fetch_sub(1, Ordering::AcqRel) == 1
        {
            self.barrier.doorbells.iter().for_each(|bell| bell.ring());
        }
    }

    /// Returns whether the applications of all shards have ended.
    pub(crate) fn is_complete(&self) -> bool {
        self.barrier.running.load(Ordering::Acquire) == 0
    }
}

impl Drop for BarrierMember {
    fn drop(&mut self) {
        self.arrive();
    }
}

/// Takes the place of an application that has ended. Received data is left unread, and connections are closed
/// when their peers close.
pub(crate) struct DrainedHandler;

impl Handler for DrainedHandler {
    fn start(&mut self, _: &mut Context<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn is_pulling(&self) -> bool {
        true
    }
}
