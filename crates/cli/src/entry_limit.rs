//! Limits how often one place in the code writes to the log, so that frequent entries do not replace rare
//! ones.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tracing::callsite::Identifier;

/// Entries of one callsite that are written at once.
// limit: entries of one kind
const BURST: u32 = 20;
/// Time after which one more entry of a callsite is written.
const REFILL: Duration = Duration::from_secs(30);

/// The callsites that have written entries.
#[derive(Debug, Default)]
pub struct EntryLimit(Mutex<HashMap<Identifier, Allowance>>);

/// Number of entries that a callsite may write.
#[derive(Debug)]
struct Allowance {
    /// Entries that may be written now.
    credit: u32,
    /// The time from which the next refill counts.
    refilled: Instant,
    /// Entries that were left out since the last one.
    omitted: u64,
}

impl EntryLimit {
    /// Returns whether an entry of this callsite is written at `now`, and how many were left out before it.
    pub fn admit(&self, callsite: Identifier, now: Instant) -> Option<u64> {
        // Each change of a callsite is complete before the next operation that could panic.
        let mut callsites = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        callsites.entry(callsite).or_insert(Allowance { credit: BURST, refilled: now, omitted: 0 }).admit(now)
    }
}

impl Allowance {
    fn admit(&mut self, now: Instant) -> Option<u64> {
        let refills = u32::try_from((now - self.refilled).as_secs() / REFILL.as_secs()).unwrap_or(BURST);
        if self.credit.saturating_add(refills) >= BURST {
            (self.credit, self.refilled) = (BURST, now);
        } else {
            self.credit += refills;
            self.refilled += refills * REFILL;
        }
        if self.credit == 0 {
            self.omitted += 1;
            return None;
        }
        self.credit -= 1;
        Some(core::mem::take(&mut self.omitted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // limit: entries of one kind
    #[test]
    fn entries_are_limited_and_counted() {
        let start = Instant::now();
        let mut callsite = Allowance { credit: BURST, refilled: start, omitted: 0 };
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!((0..100).filter(|_| callsite.admit(at(1)).is_some()).count(), BURST as usize);
        assert_eq!((callsite.admit(at(29)), callsite.omitted), (None, 81));
        // One more, which tells how many were left out.
        assert_eq!((callsite.admit(at(31)), callsite.admit(at(32))), (Some(81), None));
        assert_eq!(
            (callsite.admit(at(91)), callsite.admit(at(91)), callsite.admit(at(91))),
            (Some(1), Some(0), None)
        );
        // After a long time, as many as at first.
        assert_eq!((0..100).filter(|_| callsite.admit(at(100_000)).is_some()).count(), BURST as usize);
    }
}
