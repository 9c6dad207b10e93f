//! Age of the peer's last timestamp (RFC 7323 §5.5). An idle connection must record that it is too old to
//! compare with, because only low bits of the time of the last segment are stored: after 49.7 days it would
//! seem recent again.
//!
//! A timer for each connection would have to be moved with each request. Instead, a small part of the table
//! is examined from time to time, so that each connection is seen every two weeks.

use super::Tcp;
use super::conn::{Flags, SlotState};
use super::input::PAWS_24DAYS_MS;
use crate::time::Instant;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Time between two steps.
const STEP: Duration = Duration::from_secs(600);

/// Steps for the whole table: 14 days.
const STEPS: usize = 2048;

/// Where the examination of the table continues, and when.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct TimestampAge {
    next: usize,
    next_at: Instant,
}

impl TimestampAge {
    pub fn new(now: Instant) -> Self {
        Self { next: 0, next_at: now + STEP }
    }

    /// Returns whether the next step is due.
    #[inline]
    pub fn is_due(&self, now: Instant) -> bool {
        self.next_at <= now
    }

    /// Returns when the next step is due.
    pub fn next_deadline(&self) -> Instant {
        self.next_at
    }
}

impl Tcp {
    /// Takes the next step.
    #[cold]
    pub(super) fn record_old_timestamps(&mut self) {
        let slots = self.conns.high_water();
        let first = if self.timestamp_age.next < slots { self.timestamp_age.next } else { 0 };
        let end = (first + slots.div_ceil(STEPS)).min(slots);
        for idx in first..end {
            let c = &mut self.conns[idx as u32];
            let idle_ms = self.now_ms.wrapping_sub(c.last_rx);
            if c.slot_state == SlotState::Open
                && c.state.is_synchronized()
                && c.has(Flags::TIMESTAMPS)
                && idle_ms > PAWS_24DAYS_MS
            {
                c.flags.set(Flags::TS_RECENT_OLD);
            }
        }
        self.timestamp_age = TimestampAge { next: end, next_at: self.now + STEP };
    }
}
