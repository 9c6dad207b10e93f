//! When a busy shard looks at its devices again.

use crate::clock::TurnClock;
use core::time::Duration;
use ginnel_stack::time::Instant;

/// The interval at which received frames are looked at while the application works.
#[derive(Debug)]
pub(crate) struct DeviceCheck {
    clock: TurnClock,
    interval: Duration,
    /// When the devices were looked at last.
    looked_at: Instant,
}

impl DeviceCheck {
    pub(crate) fn new(clock: TurnClock, interval: Duration, now: Instant) -> Self {
        Self { clock, interval, looked_at: now }
    }

    /// Records that the devices are looked at in the turn that begins at `now`.
    pub(crate) fn begin_turn(&mut self, now: Instant) {
        self.looked_at = self.clock.begin_turn(now);
    }

    /// Returns whether half of the interval is over: the part of a turn that receives frames and delivers
    /// events ends then, so that tasks have the other half.
    pub(crate) fn is_half_over(&self) -> bool {
        (self.clock.now() - self.looked_at) * 2 >= self.interval
    }

    /// Returns whether the interval is over. Takes about 20 ns.
    pub(crate) fn is_due(&self) -> bool {
        self.clock.now() - self.looked_at >= self.interval
    }
}
