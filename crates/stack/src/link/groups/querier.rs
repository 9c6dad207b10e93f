//! Queries of routers: when and how they are answered, and which version of the protocol the routers need
//! (RFC 3376 §5.2, §7.2; RFC 3810 §6.2, §8.2).

use super::{Group, is_reported};
use crate::handle::LinkId;
use crate::ip::Network;
use crate::ip::timers::NetworkTimer;
use crate::multicast::FilterMode;
use crate::time::Instant;
use crate::wire::group_record::{GroupQuery, GroupRecord, RecordType};
use core::net::IpAddr;
use core::time::Duration;
use std::collections::BTreeSet;

/// Default of the robustness variable (RFC 3376 §8.1), and of the query interval (§8.2).
const ROBUSTNESS_DEFAULT: u8 = 2;
const QUERY_INTERVAL_DEFAULT: Duration = Duration::from_secs(125);
/// Largest number of queried sources that are remembered of a group; beyond it the answer lists all sources.
// limit: queried sources of a group
const QUERIED_SOURCES_MAX: usize = 512;

/// The version of the protocol that a link's routers need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    /// IGMPv3 or MLDv2.
    Newest,
    /// IGMPv2 or MLDv1.
    Second,
    /// IGMPv1.
    First,
}

/// The routers of a link, for one address family.
#[derive(Debug)]
pub(super) struct Querier {
    /// Until when a router counts as present that speaks IGMPv1.
    first_until: Instant,
    /// Until when a router counts as present that speaks IGMPv2 or MLDv1.
    second_until: Instant,
    robustness: u8,
    query_interval: Duration,
    /// When a query about all groups is answered.
    general_response_at: Option<Instant>,
}

/// The answer to a query about a group.
#[derive(Debug)]
pub(super) struct PendingResponse {
    pub(super) at: Instant,
    /// The queried sources; `None` if the query was about all sources.
    sources: Option<BTreeSet<IpAddr>>,
}

impl PendingResponse {
    /// Returns an answer about all sources.
    pub(super) const fn whole(at: Instant) -> Self {
        Self { at, sources: None }
    }
}

impl Default for Querier {
    fn default() -> Self {
        Self {
            first_until: Instant::ZERO,
            second_until: Instant::ZERO,
            robustness: ROBUSTNESS_DEFAULT,
            query_interval: QUERY_INTERVAL_DEFAULT,
            general_response_at: None,
        }
    }
}

impl Querier {
    /// Returns how many times a change is reported.
    pub(super) fn robustness(&self) -> u8 {
        self.robustness
    }

    /// Returns the version that the routers need.
    pub(super) fn version(&self, now: Instant) -> Version {
        if now < self.first_until {
            Version::First
        } else if now < self.second_until {
            Version::Second
        } else {
            Version::Newest
        }
    }

    /// Learns version, robustness and query interval of the routers from a query.
    fn learn(&mut self, now: Instant, query: &GroupQuery, is_v4: bool) {
        let max_response = Duration::from_millis(query.max_response_ms.into());
        // RFC 3376 §8.12: the older version querier present timeout.
        let until = now + self.query_interval * self.robustness.into() + max_response;
        match (is_v4, query.version) {
            (true, 1) => self.first_until = until,
            (true, 2) | (false, 1) => self.second_until = until,
            _ => {
                let seconds = Duration::from_secs(query.interval_seconds.into());
                self.robustness = if query.robustness == 0 { ROBUSTNESS_DEFAULT } else { query.robustness };
                self.query_interval = if seconds.is_zero() { QUERY_INTERVAL_DEFAULT } else { seconds };
            }
        }
    }
}

impl Group {
    /// Returns the record that describes the present filter.
    fn current_state(&self) -> GroupRecord {
        let kind = match self.filter.mode() {
            FilterMode::Include => RecordType::ModeIsInclude,
            FilterMode::Exclude => RecordType::ModeIsExclude,
        };
        GroupRecord { kind, group: self.address, sources: self.filter.sources().to_vec() }
    }

    /// Returns the record that answers a query about the group; `None` if nothing is to be said.
    fn response_record(&self, response: &PendingResponse) -> Option<GroupRecord> {
        if self.filter.is_none() {
            return None;
        }
        let Some(queried) = &response.sources else { return Some(self.current_state()) };
        let sources: Vec<_> = queried.iter().copied().filter(|source| self.filter.allows(*source)).collect();
        let record = GroupRecord { kind: RecordType::ModeIsInclude, group: self.address, sources };
        (!record.sources.is_empty()).then_some(record)
    }

    /// Remembers a query about this group, which is to be answered at `at` (RFC 3376 §5.2, rules 3 to 5).
    fn add_query(&mut self, at: Instant, sources: &[IpAddr]) {
        let queried = (!sources.is_empty()).then(|| sources.iter().copied().collect::<BTreeSet<_>>());
        let merged = match (self.response.take(), queried) {
            (None, sources) => PendingResponse { at, sources },
            (Some(PendingResponse { at: earlier, sources: Some(mut known) }), Some(more)) => {
                known.extend(more);
                PendingResponse { at: at.min(earlier), sources: Some(known) }
            }
            (Some(earlier), _) => PendingResponse::whole(at.min(earlier.at)),
        };
        let sources = merged.sources.filter(|sources| sources.len() <= QUERIED_SOURCES_MAX);
        self.response = Some(PendingResponse { sources, ..merged });
    }
}

impl Network {
    /// Handles a query of a router.
    pub(super) fn group_query_input(&mut self, now: Instant, id: LinkId, is_v4: bool, query: &GroupQuery) {
        if self.is_secondary_shard(id) || self.link(id).loopback {
            return;
        }
        let groups = &mut self.links[usize::from(id.0)].groups;
        let querier = groups.querier(is_v4);
        let before = querier.version(now);
        querier.learn(now, query, is_v4);
        let version = querier.version(now);
        if version != before {
            // RFC 3376 §7.2.1: a change of the compatibility mode cancels what is pending.
            querier.general_response_at = None;
            for group in groups.of_family(is_v4) {
                group.change.clear();
                (group.response, group.repeats_left) = (None, 0);
            }
            groups.remove_unused();
        }
        let entropy = &mut self.entropy;
        let mut response_time = || {
            let delay = entropy.below(query.max_response_ms.saturating_add(1));
            now + Duration::from_millis(delay.into())
        };
        let general_at = groups.querier(is_v4).general_response_at;
        let mut earliest: Option<Instant> = None;
        match query.group {
            _ if version != Version::Newest => {
                for group in groups.of_family(is_v4) {
                    let is_meant = query.group.is_none_or(|queried| queried == group.address);
                    if is_meant && !group.filter.is_none() && is_reported(group.address) {
                        let at = response_time();
                        group.add_query(at, &[]);
                        earliest = Some(earliest.map_or(at, |earliest| earliest.min(at)));
                    }
                }
            }
            None => {
                let at = response_time();
                let at = general_at.map_or(at, |earlier| earlier.min(at));
                groups.querier(is_v4).general_response_at = Some(at);
                earliest = Some(at);
            }
            Some(queried) => {
                let at = response_time();
                let member = groups.find_mut(queried).filter(|group| !group.filter.is_none());
                if let Some(group) = member
                    && is_reported(queried)
                    && general_at.is_none_or(|general| general > at)
                {
                    group.add_query(at, &query.sources);
                    earliest = Some(at);
                }
            }
        }
        if let Some(at) = earliest {
            self.timers.arm_no_later(NetworkTimer::QueryResponse(id, is_v4), at);
        }
    }

    /// Handles the report of another member, which makes a report of this host unnecessary if the routers
    /// speak an older version.
    pub(super) fn other_member_reported(&mut self, now: Instant, id: LinkId, group: IpAddr) {
        let groups = &mut self.link_mut(id).groups;
        if groups.querier(group.is_ipv4()).version(now) != Version::Newest
            && let Some(group) = groups.find_mut(group)
        {
            (group.response, group.repeats_left) = (None, 0);
        }
    }

    /// Answers the queries whose time has come.
    pub(crate) fn on_query_response(&mut self, now: Instant, id: LinkId, is_v4: bool) {
        let groups = &mut self.link_mut(id).groups;
        let querier = groups.querier(is_v4);
        let version = querier.version(now);
        let is_general = querier.general_response_at.take_if(|at| *at <= now).is_some();
        let general_at = querier.general_response_at;
        let mut records = Vec::new();
        let mut older = Vec::new();
        for group in groups.of_family(is_v4) {
            if is_general && !group.filter.is_none() && is_reported(group.address) {
                records.push(group.current_state());
            }
            let Some(response) = group.response.take_if(|response| response.at <= now) else { continue };
            if version != Version::Newest {
                older.push(group.address);
            } else if !is_general {
                records.extend(group.response_record(&response));
            }
        }
        self.send_group_report(id, is_v4, records);
        for group in older {
            self.send_older_report(now, id, group, version);
        }
        let groups = &mut self.link_mut(id).groups;
        let responses = groups.of_family(is_v4).filter_map(|group| group.response.as_ref().map(|it| it.at));
        if let Some(next) = responses.chain(general_at).min() {
            self.timers.arm_no_later(NetworkTimer::QueryResponse(id, is_v4), next);
        }
    }
}
