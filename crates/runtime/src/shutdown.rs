//! Several shards leave together.
//!
//! A shard whose application has ended still has the others to think of: the first answers for all on the link, and each gets frames that belong to others. So it
//! goes on doing that until the application of the last shard has ended, too.

use crate::context::Context;
use crate::doorbell::Doorbell;
use crate::error::Error;
use crate::handler::Handler;
use core::sync::atomic::{AtomicUsize, Ordering};
use ginnel_stack::handle::Conn;
use std::sync::Arc;

/// What the shards know of each other's end.
#[derive(Debug)]
pub(crate) struct ShutdownBarrier {
    /// Shards whose applications have not ended.
    running: AtomicUsize,
    doorbells: Vec<Arc<Doorbell>>,
}

impl ShutdownBarrier {
    /// For as many shards as there are bells.
    pub(crate) fn new(bells: Vec<Arc<Doorbell>>) -> Arc<Self> {
        Arc::new(Self { running: AtomicUsize::new(bells.len()), doorbells: bells })
    }
}

/// One shard's part in it. It counts as ended when this is dropped, too: after an error or a panic.
#[derive(Debug)]
pub(crate) struct BarrierMember {
    barrier: Arc<ShutdownBarrier>,
    has_arrived: bool,
}

impl BarrierMember {
    pub(crate) fn new(barrier: &Arc<ShutdownBarrier>) -> Self {
        Self { barrier: Arc::clone(barrier), has_arrived: false }
    }

    /// The application of this shard has ended. The last one wakes the others, which may be waiting for it.
    pub(crate) fn arrive(&mut self) {
        if !core::mem::replace(&mut self.has_arrived, true)
            && self.barrier.running.fetch_sub(1, Ordering::AcqRel) == 1
        {
            self.barrier.doorbells.iter().for_each(|bell| bell.ring());
        }
    }

    /// Nobody needs this shard any more.
    pub(crate) fn is_complete(&self) -> bool {
        self.barrier.running.load(Ordering::Acquire) == 0
    }
}

impl Drop for BarrierMember {
    fn drop(&mut self) {
        self.arrive();
    }
}

/// Stands where an application was. What still arrives for it stays where it is; connections whose peers close are closed.
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
