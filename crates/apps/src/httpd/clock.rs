//! The server's clock, in seconds.

use super::response::DateText;
use core::time::Duration;
use ginnel::Instant;

/// Seconds for timeouts and for the Date field, both updated only when a second begins.
#[derive(Debug)]
pub struct Clock {
    start: Instant,
    unix_at_start: Duration,
    /// Current second of the transport's time.
    pub second: u32,
    /// Current time of day.
    pub date: DateText,
    /// Time of the next change of `second` or `date`.
    next: Instant,
}

impl Clock {
    /// Creates a clock for a transport whose time is `now` when the time of day is `unix`.
    pub fn new(now: Instant, unix: Duration) -> Self {
        let date = DateText::new(unix.as_secs());
        let mut clock = Self { start: now, unix_at_start: unix, second: 0, date, next: Instant::ZERO };
        clock.update(now);
        clock
    }

    /// Returns the deadline for a timeout of `seconds`. The current second has already begun and does not
    /// count, so no client gets less time than the timeout.
    pub const fn deadline_after(&self, seconds: u32) -> u32 {
        self.second + seconds + 1
    }

    /// Advances the clock to `now`.
    pub fn update(&mut self, now: Instant) {
        if now < self.next {
            return;
        }
        const SECOND: u64 = 1_000_000_000;
        self.second = (now.as_nanos() / SECOND) as u32;
        let unix = self.unix_at_start + now.saturating_since(self.start);
        if unix.as_secs() != self.date.second() {
            self.date = DateText::new(unix.as_secs());
        }
        let to_date = SECOND - u64::from(unix.subsec_nanos());
        let to_second = SECOND - now.as_nanos() % SECOND;
        self.next = now + Duration::from_nanos(to_date.min(to_second));
    }
}
