//! Time as the engine sees it: a number of nanoseconds that the caller passes in.

use core::ops::{Add, AddAssign, Sub};
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// A point in time, in nanoseconds since an epoch of the caller's choice (monotonic).
///
/// The engine reads no clock: the shard passes the time of its burst, a simulation passes any time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Instant(u64);

impl Instant {
    /// The caller's epoch.
    pub const ZERO: Self = Self(0);
    /// Later than any other instant.
    pub const MAX: Self = Self(u64::MAX);

    /// Returns the instant `nanos` nanoseconds after the epoch.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Returns the instant `micros` microseconds after the epoch.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros * 1_000)
    }

    /// Returns the instant `millis` milliseconds after the epoch.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis * 1_000_000)
    }

    /// Returns the nanoseconds since the epoch.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Returns the whole microseconds since the epoch.
    pub const fn as_micros(self) -> u64 {
        self.0 / 1_000
    }

    /// Returns the whole milliseconds since the epoch.
    pub const fn as_millis(self) -> u64 {
        self.0 / 1_000_000
    }

    /// Returns the whole microseconds since `earlier`, zero if `earlier` is later.
    #[inline]
    pub(crate) const fn micros_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0) / 1_000
    }

    /// Returns the instant `micros` microseconds later. Saturates.
    #[inline]
    pub(crate) const fn after_micros(self, micros: u64) -> Self {
        Self(self.0.saturating_add(micros.saturating_mul(1_000)))
    }

    /// Returns the earliest of several deadlines; `None` if all are `None` or [`Instant::MAX`].
    #[inline]
    pub fn earliest<const N: usize>(deadlines: [Option<Self>; N]) -> Option<Self> {
        let at = deadlines.iter().fold(Self::MAX, |at, deadline| at.min(deadline.unwrap_or(Self::MAX)));
        (at != Self::MAX).then_some(at)
    }

    /// Returns the time since `earlier`, zero if `earlier` is later.
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    /// Saturates at [`Instant::MAX`].
    fn add(self, rhs: Duration) -> Self {
        let nanos = u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, rhs: Duration) {
        *self = *self + rhs;
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, rhs: Self) -> Duration {
        self.saturating_since(rhs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn earliest_deadline_ignores_missing_ones() {
        let [one, two] = [1, 2].map(|at| Some(Instant::from_nanos(at)));
        assert_eq!(Instant::earliest([two, None, one, Some(Instant::MAX)]), one);
        assert_eq!(Instant::earliest([two, two]), two);
        assert_eq!(Instant::earliest([None, Some(Instant::MAX)]), None);
        assert_eq!(Instant::earliest([]), None);
    }
}
