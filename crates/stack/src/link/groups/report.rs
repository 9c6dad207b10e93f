//! Reports: of changes of filters, and the division of records into packets.

use super::querier::{PendingResponse, Version};
use crate::handle::LinkId;
use crate::ip::Network;
use crate::ip::timers::NetworkTimer;
use crate::time::Instant;
use crate::wire::group_record::{GroupRecord, RecordType};
use core::net::IpAddr;
use core::time::Duration;

/// Longest time between two reports of a change (RFC 3376 §8.11, RFC 3810 §9.11).
const UNSOLICITED_REPORT_INTERVAL_MS: u32 = 1_000;
/// Longest time between two reports of an older version (RFC 2236 §8.10, RFC 2710 §7.10).
const OLDER_REPORT_INTERVAL_MS: u32 = 10_000;
/// Bytes in front of the records of a report, for IPv4 and IPv6: headers with the router alert, and the
/// report's header.
const HEADERS_V4: usize = 24 + 8;
const HEADERS_V6: usize = 40 + 8 + 8;

impl Network {
    /// Reports the changes of filters of all groups of a family.
    pub(crate) fn on_group_state_change(&mut self, now: Instant, id: LinkId, is_v4: bool) {
        let groups = &mut self.link_mut(id).groups;
        let querier = groups.querier(is_v4);
        let (version, robustness) = (querier.version(now), querier.robustness());
        let mut records = Vec::new();
        let (mut joined, mut left) = (Vec::new(), Vec::new());
        let mut has_more = false;
        for group in groups.of_family(is_v4).filter(|group| !group.change.is_done()) {
            if version == Version::Newest {
                group.change.take_records(group.address, &group.filter, &mut records);
                has_more |= !group.change.is_done();
                continue;
            }
            group.change.clear();
            group.response = None;
            let is_member = !group.filter.is_none();
            group.repeats_left = if is_member { robustness.saturating_sub(1) } else { 0 };
            if is_member { joined.push(group.address) } else { left.push(group.address) }
        }
        groups.remove_unused();
        self.send_group_report(id, is_v4, records);
        if has_more {
            let delay = 1 + self.entropy.below(UNSOLICITED_REPORT_INTERVAL_MS);
            let at = now + Duration::from_millis(delay.into());
            self.timers.arm(NetworkTimer::StateChange(id, is_v4), at);
        }
        for group in joined {
            self.send_older_report(now, id, group, version);
        }
        // IGMPv1 has no message about leaving.
        for group in left.into_iter().filter(|_| version == Version::Second) {
            match group {
                IpAddr::V4(group) => self.send_igmp_leave(id, group),
                IpAddr::V6(group) => self.send_mld_done(id, group),
            }
        }
    }

    /// Sends a report of an older version, and schedules its repetition.
    pub(super) fn send_older_report(&mut self, now: Instant, id: LinkId, group: IpAddr, version: Version) {
        match group {
            IpAddr::V4(group) => self.send_older_igmp_report(id, group, version),
            IpAddr::V6(group) => self.send_older_mld_report(id, group),
        }
        let delay = self.entropy.below(OLDER_REPORT_INTERVAL_MS);
        let at = now + Duration::from_millis(delay.into());
        let entry = self.link_mut(id).groups.find_mut(group);
        if let Some(entry) = entry.filter(|entry| entry.repeats_left > 0) {
            entry.repeats_left -= 1;
            entry.response = Some(PendingResponse::whole(at));
            self.timers.arm_no_later(NetworkTimer::QueryResponse(id, group.is_ipv4()), at);
        }
    }

    /// Sends the records in as many reports as are necessary.
    pub(super) fn send_group_report(&mut self, id: LinkId, is_v4: bool, records: Vec<GroupRecord>) {
        let link = self.link(id);
        let space = if is_v4 {
            usize::from(link.mtu).saturating_sub(HEADERS_V4)
        } else {
            usize::from(link.mtu_v6).saturating_sub(HEADERS_V6)
        };
        for records in into_packets(records, space) {
            if is_v4 { self.send_igmp_report(id, &records) } else { self.send_mld_report(id, &records) }
        }
    }
}

/// Divides records into packets with space for `space` bytes of records. A record that is too long becomes
/// several; in EXCLUDE mode it is cut off instead (RFC 3376 §4.2.16).
fn into_packets(records: Vec<GroupRecord>, space: usize) -> Vec<Vec<GroupRecord>> {
    let mut packets: Vec<Vec<GroupRecord>> = Vec::new();
    let mut left = 0;
    let mut push = |record: GroupRecord| {
        let len = record.encoded_len();
        match packets.last_mut() {
            Some(packet) if len <= left => {
                left -= len;
                packet.push(record);
            }
            _ => {
                left = space.saturating_sub(len);
                packets.push(vec![record]);
            }
        }
    };
    for record in records {
        let GroupRecord { kind, group, sources } = &record;
        let address = if group.is_ipv4() { 4 } else { 16 };
        let sources_max = (space.saturating_sub(GroupRecord::len_with(*group, 0)) / address).max(1);
        if sources.len() <= sources_max {
            push(record);
            continue;
        }
        let chunks = sources.chunks(sources_max);
        let is_cut = matches!(kind, RecordType::ModeIsExclude | RecordType::ChangeToExcludeMode);
        for sources in chunks.take(if is_cut { 1 } else { usize::MAX }) {
            push(GroupRecord { kind: *kind, group: *group, sources: sources.to_vec() });
        }
    }
    packets
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: RecordType, sources: u32) -> GroupRecord {
        let sources = (0..sources).map(|number| IpAddr::from(number.to_be_bytes())).collect();
        GroupRecord { kind, group: [239, 0, 0, 1].into(), sources }
    }

    #[test]
    fn records_are_divided_by_space() {
        let counts = |records, space| -> Vec<Vec<usize>> {
            let packets = into_packets(records, space);
            packets.iter().map(|packet| packet.iter().map(|record| record.sources.len()).collect()).collect()
        };
        let two = || vec![record(RecordType::ModeIsInclude, 1), record(RecordType::AllowNewSources, 2)];
        assert_eq!(counts(two(), 28), [vec![1, 2]]);
        assert_eq!(counts(two(), 27), [vec![1], vec![2]]);
        assert_eq!(counts(vec![record(RecordType::AllowNewSources, 7)], 20), [vec![3], vec![3], vec![1]]);
        assert_eq!(counts(vec![record(RecordType::ChangeToExcludeMode, 7)], 20), [vec![3]]);
        assert!(counts(Vec::new(), 20).is_empty());
    }
}
