//! Several shards leave together.
//!
//! A shard whose application has ended still has the others to think of: the first answers for all on the link, and each gets frames that belong to others. So it
//! goes on doing that until the application of the last shard has ended, too.

use crate::bell::Bell;
use crate::context::Context;
use crate::error::Error;
use crate::handler::Handler;
use core::sync::atomic::{AtomicUsize, Ordering};
use ginnel_stack::handle::Conn;
use std::sync::Arc;

/// What the shards know of each other's end.
#[derive(Debug)]
pub(crate) struct Departure {
    /// Shards whose applications have not ended.
    staying: AtomicUsize,
    bells: Vec<Arc<Bell>>,
}

impl Departure {
    /// For as many shards as there are bells.
    pub(crate) fn new(bells: Vec<Arc<Bell>>) -> Arc<Self> {
        Arc::new(Self { staying: AtomicUsize::new(bells.len()), bells })
    }
}

/// One shard's part in it. It counts as ended when this is dropped, too: after an error or a panic.
#[derive(Debug)]
pub(crate) struct Leave {
    departure: Arc<Departure>,
    has_left: bool,
}

impl Leave {
    pub(crate) fn new(departure: &Arc<Departure>) -> Self {
        Self { departure: Arc::clone(departure), has_left: false }
    }

    /// The application of this shard has ended. The last one wakes the others, which may be waiting for it.
    pub(crate) fn leave(&mut self) {
        if !core::mem::replace(&mut self.has_left, true)
            && self.departure.staying.fetch_sub(1, Ordering::AcqRel) == 1
        {
            self.departure.bells.iter().for_each(|bell| bell.ring());
        }
    }

    /// Nobody needs this shard any more.
    pub(crate) fn is_over(&self) -> bool {
        self.departure.staying.load(Ordering::Acquire) == 0
    }
}

impl Drop for Leave {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Stands where an application was. What still arrives for it stays where it is; connections whose peers close are closed.
pub(crate) struct Left;

impl Handler for Left {
    fn start(&mut self, _: &mut Context<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn pulls(&self) -> bool {
        true
    }
}
