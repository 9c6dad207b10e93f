//! Rules that choose the owner of a TCP flow before the hash does.

use super::INDIRECTION_ENTRIES;
use crate::device::Label;
use core::cell::Cell;
use core::fmt;
use core::net::SocketAddr;
use core::ops::RangeInclusive;
use std::sync::Arc;

/// A TCP flow whose owner is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SteeredFlow {
    /// Sender of the received packets.
    pub source: SocketAddr,
    /// Receiver of the received packets: an address of the stack.
    pub destination: SocketAddr,
    /// The flow hash, cut to the bits that a label carries.
    pub hash: u32,
    /// The number of shards.
    pub shards: u8,
    /// The shards that serve the device of the destination: a bit for each.
    pub serving: u64,
    /// The owner so far: that of the hash, or of a rule that let others decide.
    pub shard: u8,
}

impl SteeredFlow {
    /// Returns the position of this flow among `count` choices, by its hash: 0 if there are none.
    #[must_use]
    pub const fn spread(&self, count: usize) -> usize {
        if count == 0 { 0 } else { (self.hash % INDIRECTION_ENTRIES) as usize % count }
    }

    /// Returns whether a shard exists and serves the device of the destination.
    #[must_use]
    pub const fn is_served_by(&self, shard: u8) -> bool {
        shard < self.shards && self.serving >> shard & 1 != 0
    }
}

/// Chooses owners of flows. All shards must get the same answer for a flow at all times, so it may depend on
/// nothing but the flow.
pub trait SteeringPolicy: Send + Sync {
    /// Returns the owner of a flow; `None` leaves it to the hash. A shard that does not exist, or does not
    /// serve the device of the destination, is counted, and the hash decides.
    fn owner(&self, flow: &SteeredFlow) -> Option<u8>;
}

/// The policy of a shard, with what it has counted.
pub(super) struct PolicyState {
    policy: Arc<dyn SteeringPolicy>,
    active_ports: RangeInclusive<u16>,
    chosen: Cell<u64>,
    invalid: Cell<u64>,
}

impl PolicyState {
    pub(super) fn new(policy: Arc<dyn SteeringPolicy>, active_ports: RangeInclusive<u16>) -> Self {
        Self { policy, active_ports, chosen: Cell::new(0), invalid: Cell::new(0) }
    }

    /// Returns the owner of a flow: that of the policy, or that of the hash, which `flow` has.
    #[inline(never)]
    pub(super) fn owner(&self, flow: SteeredFlow) -> u8 {
        if self.active_ports.contains(&flow.destination.port()) {
            return flow.shard;
        }
        // The hash is masked as in a label, so that all shards get the same answer with and without one.
        let flow = SteeredFlow { hash: flow.hash & Label::HASH_MASK, ..flow };
        let count = |counter: &Cell<u64>| counter.set(counter.get() + 1);
        match self.policy.owner(&flow) {
            None => flow.shard,
            Some(owner) if flow.is_served_by(owner) => {
                count(&self.chosen);
                owner
            }
            Some(_) => {
                count(&self.invalid);
                flow.shard
            }
        }
    }

    /// Returns how many owners the policy has chosen, and how many of its answers were no shards of the
    /// device.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.chosen.get(), self.invalid.get())
    }
}

impl fmt::Debug for PolicyState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolicyState").field("counts", &self.counts()).finish_non_exhaustive()
    }
}
