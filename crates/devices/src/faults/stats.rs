//! Counters of an impaired link.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of wire frames in one direction. They never decrease.
#[derive(Debug, Default)]
pub struct LinkCounters {
    /// Frames that entered the link.
    pub offered: AtomicU64,
    /// Frames that left the link.
    pub delivered: AtomicU64,
    /// Frames lost at random.
    pub lost: AtomicU64,
    /// Frames duplicated.
    pub duplicated: AtomicU64,
    /// Frames delayed so that others overtake them.
    pub reordered: AtomicU64,
    /// Frames with a flipped bit.
    pub corrupted: AtomicU64,
    /// Frames dropped because the queue in front of the link was full.
    pub queue_full: AtomicU64,
    /// Frames dropped because the frames in the link would exceed the limit `memory` of its specification.
    pub out_of_memory: AtomicU64,
    /// Frames whose super-frame or checksum metadata contradicted them.
    pub malformed: AtomicU64,
}

impl LinkCounters {
    /// Returns the number of frames that entered and will never leave the link.
    pub fn dropped(&self) -> u64 {
        [&self.lost, &self.queue_full, &self.out_of_memory]
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .sum()
    }
}

/// Counters shared by the half of the device that counts and by readers.
pub(super) type DirectionStats = Arc<LinkCounters>;

/// Counters of both directions.
#[derive(Clone, Debug, Default)]
pub struct FaultStats {
    /// Counters of frames that the device sent.
    pub up: Arc<LinkCounters>,
    /// Counters of frames that the device received.
    pub down: Arc<LinkCounters>,
}
