//! The clock of one run of packetdrill: the time of day when it was created plus the monotonic time since
//! then, so that changes of the machine's clock do not affect the times that a script measures.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A clock that starts at the current time of day and runs monotonically.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// Time of day when the clock was created, since 1970.
    began: Duration,
    /// Monotonic time when the clock was created.
    at: Instant,
}

impl Clock {
    /// Creates a clock with the current time of day.
    pub fn new() -> Self {
        // If the machine's clock is before 1970, the clock starts at 1970.
        let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { began, at: Instant::now() }
    }

    /// Returns the time since 1970.
    pub fn now(&self) -> Duration {
        self.began + self.at.elapsed()
    }
}
