//! Coalescing of a shard's turns: instead of working on each frame as it arrives, a thread that has little to
//! do works at intervals, as an interface does with its interrupts (`rx-usecs` of ethtool).
//!
//! A turn and the sleep before it cost about as much as several frames. Otherwise a thread would never sleep
//! at a rate at which each turn finds a new frame or timer.

use crate::clock;
use core::time::Duration;
use ginnel_stack::device::BURST_FRAMES_MAX;
use ginnel_stack::time::Instant;

/// The interval between the starts of two turns.
#[derive(Clone, Copy, Debug)]
pub struct Coalescing {
    interval: Duration,
}

impl Coalescing {
    /// Creates it from `shard.coalesce_us`. With 0 no turn waits.
    pub fn new(coalesce_us: u32) -> Self {
        Self { interval: Duration::from_micros(coalesce_us.into()) }
    }

    /// Returns when the turn after one that started at `turn_start` starts; `None` is at once. `work` is the
    /// number of frames, events, commands and timers that the turn has handled. After a full burst the next
    /// turn starts at once, because more frames wait.
    #[inline]
    pub fn next_turn(&self, turn_start: Instant, work: usize) -> Option<Instant> {
        let waits = !self.interval.is_zero() && work < BURST_FRAMES_MAX;
        waits.then(|| turn_start + self.interval)
    }

    /// Sleeps from `now` until `until`, whatever arrives, and returns for how long.
    pub fn sleep(now: Instant, until: Instant) -> Duration {
        if until <= now {
            return Duration::ZERO;
        }
        std::thread::sleep(until - now);
        clock::now() - now
    }
}

#[cfg(test)]
mod tests {
    use super::{BURST_FRAMES_MAX, Coalescing, Duration, Instant};

    #[test]
    fn turns_wait_unless_more_frames_are_there() {
        let start = Instant::ZERO + Duration::from_secs(1);
        let coalescing = Coalescing::new(100);
        assert_eq!(coalescing.next_turn(start, 3), Some(start + Duration::from_micros(100)));
        assert_eq!(coalescing.next_turn(start, BURST_FRAMES_MAX), None);
        assert_eq!(Coalescing::new(0).next_turn(start, 3), None);
    }
}
