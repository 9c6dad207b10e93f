//! The users of a group, and the union of their filters.

use crate::multicast::{FilterMode, SourceFilter};
use core::net::IpAddr;
use std::collections::BTreeMap;

/// Counts of the users of a group by mode, and of the users that list a source by mode. Replacing the filter
/// of one user does not look at the others.
#[derive(Clone, Debug, Default)]
pub(super) struct Users {
    modes: [u32; 2],
    sources: BTreeMap<IpAddr, [u32; 2]>,
}

impl Users {
    pub(super) fn is_empty(&self) -> bool {
        self.modes == [0; 2]
    }

    /// Replaces the filter of one user; `None` is that of a user that is not a member.
    pub(super) fn replace(&mut self, before: Option<&SourceFilter>, now: Option<&SourceFilter>) {
        if let Some(filter) = now {
            self.modes[filter.mode() as usize] += 1;
            for source in filter.sources() {
                self.sources.entry(*source).or_default()[filter.mode() as usize] += 1;
            }
        }
        if let Some(filter) = before {
            let mode = filter.mode() as usize;
            self.modes[mode] = self.modes[mode].saturating_sub(1);
            for source in filter.sources() {
                if let Some(counts) = self.sources.get_mut(source) {
                    counts[mode] = counts[mode].saturating_sub(1);
                    if *counts == [0; 2] {
                        self.sources.remove(source);
                    }
                }
            }
        }
    }

    /// Returns the filter that lets exactly the packets pass that pass the filter of any user (RFC 3376
    /// §3.2).
    pub(super) fn merged(&self) -> SourceFilter {
        let [_, excluding] = self.modes;
        let sources = |keep: fn([u32; 2], u32) -> bool| {
            let kept = self.sources.iter().filter(|(_, counts)| keep(**counts, excluding));
            kept.map(|(source, _)| *source).collect()
        };
        if excluding > 0 {
            // What all users in EXCLUDE mode exclude, and no user in INCLUDE mode includes.
            let sources = sources(|[include, exclude], excluding| exclude == excluding && include == 0);
            SourceFilter::new(FilterMode::Exclude, sources)
        } else {
            SourceFilter::new(FilterMode::Include, sources(|[include, _], _| include > 0))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(mode: FilterMode, sources: &[u8]) -> SourceFilter {
        SourceFilter::new(mode, sources.iter().map(|&last| IpAddr::from([10, 0, 0, last])).collect())
    }

    #[test]
    fn merged_filter_passes_what_any_user_receives() {
        let filters = [
            filter(FilterMode::Include, &[1, 2]),
            filter(FilterMode::Include, &[2, 3]),
            filter(FilterMode::Exclude, &[2, 4, 5]),
            filter(FilterMode::Exclude, &[4, 5, 6]),
            filter(FilterMode::Include, &[5]),
        ];
        // All subsets of the users.
        for set in 0..1 << filters.len() {
            let members: Vec<_> =
                filters.iter().enumerate().filter(|(at, _)| set >> at & 1 == 1).map(|(_, it)| it).collect();
            let mut users = Users::default();
            filters.iter().for_each(|filter| users.replace(None, Some(filter)));
            for (at, filter) in filters.iter().enumerate() {
                if set >> at & 1 == 0 {
                    users.replace(Some(filter), None);
                }
            }
            for last in 0..9 {
                let source = IpAddr::from([10, 0, 0, last]);
                let expected = members.iter().any(|member| member.allows(source));
                assert_eq!(users.merged().allows(source), expected, "{set:b} {source}");
            }
            assert_eq!(users.is_empty(), set == 0);
        }
    }
}
