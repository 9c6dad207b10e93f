//! Changes of a group's filter that remain to be reported (RFC 3376 §5.1, RFC 3810 §6.1).

use crate::multicast::{FilterMode, SourceFilter};
use crate::wire::group_record::{GroupRecord, RecordType};
use core::net::IpAddr;
use std::collections::BTreeMap;

/// The changes of a filter, with the number of reports in which each is still to be sent.
#[derive(Debug, Default)]
pub(super) struct StateChange {
    /// The mode has changed.
    mode: u8,
    /// These sources have become, or ceased to be, sources whose packets pass.
    sources: BTreeMap<IpAddr, u8>,
}

impl StateChange {
    pub(super) fn is_done(&self) -> bool {
        self.mode == 0 && self.sources.is_empty()
    }

    /// Discards what remains to be reported.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Records a change from one filter to another, to be reported `times` times.
    pub(super) fn record(&mut self, before: &SourceFilter, now: &SourceFilter, times: u8) {
        if before.mode() != now.mode() {
            // The record about the mode contains all sources.
            self.mode = times;
            self.sources.clear();
            return;
        }
        let changed = |a: &SourceFilter, b: &SourceFilter| -> Vec<IpAddr> {
            a.sources().iter().filter(|source| b.sources().binary_search(source).is_err()).copied().collect()
        };
        for source in changed(before, now).into_iter().chain(changed(now, before)) {
            self.sources.insert(source, times);
        }
    }

    /// Appends the records of the next report about the group, whose filter is now `filter`.
    pub(super) fn take_records(
        &mut self,
        group: IpAddr,
        filter: &SourceFilter,
        records: &mut Vec<GroupRecord>,
    ) {
        if self.mode > 0 {
            let kind = match filter.mode() {
                FilterMode::Include => RecordType::ChangeToIncludeMode,
                FilterMode::Exclude => RecordType::ChangeToExcludeMode,
            };
            records.push(GroupRecord { kind, group, sources: filter.sources().to_vec() });
        } else {
            for (kind, passes) in [(RecordType::AllowNewSources, true), (RecordType::BlockOldSources, false)]
            {
                let sources: Vec<_> =
                    self.sources.keys().filter(|source| filter.allows(**source) == passes).copied().collect();
                if !sources.is_empty() {
                    records.push(GroupRecord { kind, group, sources });
                }
            }
        }
        self.mode = self.mode.saturating_sub(1);
        self.sources.retain(|_, times| {
            *times -= 1;
            *times > 0
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use FilterMode::{Exclude, Include};
    use RecordType::{AllowNewSources, BlockOldSources, ChangeToExcludeMode, ChangeToIncludeMode};

    fn source(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn filter(mode: FilterMode, sources: &[u8]) -> SourceFilter {
        SourceFilter::new(mode, sources.iter().map(|&last| source(last)).collect())
    }

    /// Returns the records of the next report, each as its type and its sources.
    fn next(change: &mut StateChange, filter: &SourceFilter) -> Vec<(RecordType, Vec<IpAddr>)> {
        let mut records = Vec::new();
        change.take_records([239, 0, 0, 1].into(), filter, &mut records);
        records.into_iter().map(|record| (record.kind, record.sources)).collect()
    }

    #[test]
    fn changes_are_repeated_and_merged() {
        let mut change = StateChange::default();
        let steps = [filter(Include, &[]), filter(Include, &[1, 2]), filter(Include, &[2, 3])];
        change.record(&steps[0], &steps[1], 2);
        assert_eq!(next(&mut change, &steps[1]), [(AllowNewSources, vec![source(1), source(2)])]);
        change.record(&steps[1], &steps[2], 2);
        let expected = [(AllowNewSources, vec![source(2), source(3)]), (BlockOldSources, vec![source(1)])];
        assert_eq!(next(&mut change, &steps[2]), expected);
        let expected = [(AllowNewSources, vec![source(3)]), (BlockOldSources, vec![source(1)])];
        assert_eq!(next(&mut change, &steps[2]), expected);
        assert!(change.is_done());
    }

    #[test]
    fn mode_change_reports_the_current_filter() {
        let mut change = StateChange::default();
        let (member, left) = (filter(Exclude, &[4]), filter(Include, &[]));
        change.record(&left, &member, 2);
        assert_eq!(next(&mut change, &member), [(ChangeToExcludeMode, vec![source(4)])]);
        change.record(&member, &left, 2);
        for _ in 0..2 {
            assert_eq!(next(&mut change, &left), [(ChangeToIncludeMode, vec![])]);
        }
        assert!(change.is_done() && next(&mut change, &left).is_empty());
    }
}
