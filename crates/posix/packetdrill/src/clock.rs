//! The one clock of an instance: the time of day when it began, and from then on as much as went by, so that nobody who sets the machine's clock changes what a script measures.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Tells the time.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    began: Duration,
    at: Instant,
}

impl Clock {
    /// One that agrees with the machine's now.
    pub fn new() -> Self {
        // A machine whose clock is before 1970 gets a clock that begins there.
        let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { began, at: Instant::now() }
    }

    /// Time since 1970.
    pub fn now(&self) -> Duration {
        self.began + self.at.elapsed()
    }
}
