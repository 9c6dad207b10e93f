//! The server's time, in seconds.

use super::response::DateText;
use core::time::Duration;
use ginnel::Instant;

/// Seconds for the time-outs and the date, both renewed only when a second begins.
#[derive(Debug)]
pub struct Clock {
    start: Instant,
    unix_at_start: Duration,
    /// Seconds of the transport's time.
    pub second: u32,
    /// The time of day.
    pub date: DateText,
    /// When either changes.
    next: Instant,
}

impl Clock {
    /// A clock for a transport whose time is `now` when the time of day is `unix`.
    pub fn new(now: Instant, unix: Duration) -> Self {
        let date = DateText::new(unix.as_secs());
        let mut clock = Self { start: now, unix_at_start: unix, second: 0, date, next: Instant::ZERO };
        clock.update(now);
        clock
    }

    /// The second at whose beginning so many have passed for sure: the one that has begun does not count, so that nobody gets less time than was granted.
    pub const fn deadline_after(&self, seconds: u32) -> u32 {
        self.second + seconds + 1
    }

    /// Moves on to `now`.
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
