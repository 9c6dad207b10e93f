//! Busy time of a worker. A generator without idle time measures itself and not the server.

use core::time::Duration;

/// Measured time of a worker, and the idle part of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BusyTime {
    idle: Duration,
    total: Duration,
}

impl BusyTime {
    /// Adds a span of time, which was idle or not.
    pub fn count(&mut self, time: Duration, is_idle: bool) {
        self.total += time;
        if is_idle {
            self.idle += time;
        }
    }

    /// Returns the share of the time that was busy, or `None` if no time was added.
    pub fn share(&self) -> Option<f64> {
        (!self.total.is_zero()).then(|| 1.0 - self.idle.as_secs_f64() / self.total.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busy_share_excludes_idle_time() {
        let mut busy = BusyTime::default();
        assert_eq!(busy.share(), None);
        busy.count(Duration::from_millis(30), false);
        busy.count(Duration::from_millis(10), true);
        assert_eq!(busy.share(), Some(0.75));
    }
}
