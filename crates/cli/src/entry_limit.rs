//! Limits how often one place in the code writes to the log, so that frequent entries do not replace rare
//! ones.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::Level;
use tracing::callsite::Identifier;

/// Entries of one callsite that are written at once.
// limit: entries of one kind
const BURST: u32 = 20;
/// Time after which one more entry of a callsite is written.
pub const REFILL: Duration = Duration::from_secs(30);

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
    /// Level and text of the last of them.
    last: Option<(Level, String)>,
}

/// The last of the entries that were left out.
#[derive(Debug, PartialEq, Eq)]
pub struct OmittedEntry {
    pub level: Level,
    pub text: String,
    /// Entries of the callsite that were left out before this one.
    pub before: u64,
}

impl EntryLimit {
    /// Returns how many entries were left out before this one; `None` if this one is left out, too. The last
    /// left-out entry of a callsite is kept: see [`EntryLimit::take_overdue`].
    pub fn admit(&self, callsite: Identifier, now: Instant, level: Level, text: &str) -> Option<u64> {
        let mut callsites = self.callsites();
        let new = || Allowance { credit: BURST, refilled: now, omitted: 0, last: None };
        let allowance = callsites.entry(callsite).or_insert_with(new);
        let admitted = allowance.admit(now);
        if admitted.is_none() {
            allowance.last = Some((level, text.into()));
        }
        admitted
    }

    /// Takes the last entry that was left out of each callsite that may write again at `now`. Without that,
    /// the number of left out entries would be told only with the next entry, which may never come.
    pub fn take_overdue(&self, now: Instant) -> Vec<OmittedEntry> {
        self.callsites().values_mut().filter_map(|allowance| allowance.take_overdue(now)).collect()
    }

    /// Returns whether entries were left out that no later entry has told about.
    pub fn has_omitted(&self) -> bool {
        self.callsites().values().any(|allowance| allowance.omitted > 0)
    }

    fn callsites(&self) -> MutexGuard<'_, HashMap<Identifier, Allowance>> {
        // Each change of a callsite is complete before the next operation that could panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Allowance {
    fn admit(&mut self, now: Instant) -> Option<u64> {
        self.refill(now);
        if self.credit == 0 {
            self.omitted += 1;
            return None;
        }
        self.credit -= 1;
        self.last = None;
        Some(core::mem::take(&mut self.omitted))
    }

    fn take_overdue(&mut self, now: Instant) -> Option<OmittedEntry> {
        if self.omitted == 0 {
            return None;
        }
        self.refill(now);
        if self.credit == 0 {
            return None;
        }
        self.credit -= 1;
        let (level, text) = self.last.take()?;
        Some(OmittedEntry { level, text, before: core::mem::take(&mut self.omitted) - 1 })
    }

    fn refill(&mut self, now: Instant) {
        let refills = u32::try_from((now - self.refilled).as_secs() / REFILL.as_secs()).unwrap_or(BURST);
        if self.credit.saturating_add(refills) >= BURST {
            (self.credit, self.refilled) = (BURST, now);
        } else {
            self.credit += refills;
            self.refilled += refills * REFILL;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // limit: entries of one kind
    #[test]
    fn entries_are_limited_and_counted() {
        let start = Instant::now();
        let mut callsite = Allowance { credit: BURST, refilled: start, omitted: 0, last: None };
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

    #[test]
    fn the_last_entry_is_told_when_no_other_comes() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut callsite = Allowance { credit: 1, refilled: start, omitted: 0, last: None };
        assert_eq!(
            (callsite.admit(at(0)), callsite.take_overdue(at(100))),
            (Some(0), None),
            "all were written"
        );
        callsite = Allowance { credit: 0, refilled: start, omitted: 0, last: None };
        assert_eq!([1, 2, 3].map(|seconds| callsite.admit(at(seconds))), [None; 3]);
        callsite.last = Some((Level::WARN, "the third".into()));
        assert_eq!(callsite.take_overdue(at(29)), None);
        let told = OmittedEntry { level: Level::WARN, text: "the third".into(), before: 2 };
        assert_eq!(callsite.take_overdue(at(30)), Some(told));
        assert_eq!((callsite.take_overdue(at(60)), callsite.omitted), (None, 0));
    }
}
