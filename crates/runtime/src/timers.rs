//! The application's timers.

use ginnel_stack::time::Instant;
use std::collections::BTreeMap;

/// A timer that was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timer {
    at: Instant,
    number: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Timers {
    by_time: BTreeMap<(Instant, u64), u64>,
    next_number: u64,
}

impl Timers {
    pub(crate) fn set(&mut self, at: Instant, token: u64) -> Timer {
        let number = self.next_number;
        self.next_number += 1;
        self.by_time.insert((at, number), token);
        Timer { at, number }
    }

    pub(crate) fn cancel(&mut self, timer: Timer) -> bool {
        self.by_time.remove(&(timer.at, timer.number)).is_some()
    }
}
