//! How busy a worker was: a generator that has no time left has measured itself.

use core::time::Duration;

/// Time in which a worker measured, and what it had nothing to do in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BusyTime {
    idle: Duration,
    total: Duration,
}

impl BusyTime {
    /// So much time went by, with something to do or without.
    pub fn count(&mut self, time: Duration, is_idle: bool) {
        self.total += time;
        if is_idle {
            self.idle += time;
        }
    }

    /// The share of the time in which there was something to do, if any time went by.
    pub fn share(&self) -> Option<f64> {
        (!self.total.is_zero()).then(|| 1.0 - self.idle.as_secs_f64() / self.total.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_what_is_not_idle() {
        let mut busy = BusyTime::default();
        assert_eq!(busy.share(), None);
        busy.count(Duration::from_millis(30), false);
        busy.count(Duration::from_millis(10), true);
        assert_eq!(busy.share(), Some(0.75));
    }
}
