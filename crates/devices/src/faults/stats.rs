//! What happened on an impaired link.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of wire frames in one direction. They only grow.
#[derive(Debug, Default)]
pub struct LinkCounters {
    /// Entered.
    pub offered: AtomicU64,
    /// Came out.
    pub delivered: AtomicU64,
    /// Lost by chance.
    pub lost: AtomicU64,
    /// Doubled.
    pub duplicated: AtomicU64,
    /// Came later than their turn.
    pub reordered: AtomicU64,
    /// Had a bit flipped.
    pub corrupted: AtomicU64,
    /// Dropped by the full queue in front of the link.
    pub queue_full: AtomicU64,
    /// Dropped because more than `memory` would have been held.
    pub out_of_memory: AtomicU64,
    /// Super-frames and partial checksums that contradicted their frame.
    pub malformed: AtomicU64,
}

impl LinkCounters {
    /// Frames offered that will never come out.
    pub fn dropped(&self) -> u64 {
        [&self.lost, &self.queue_full, &self.out_of_memory]
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .sum()
    }
}

/// Shared by the half of the device that counts and whoever reads.
pub(super) type DirectionStats = Arc<LinkCounters>;

/// Counts of both directions.
#[derive(Clone, Debug, Default)]
pub struct FaultStats {
    /// What the device sent.
    pub up: Arc<LinkCounters>,
    /// What it received.
    pub down: Arc<LinkCounters>,
}
