//! Multicast listener reports (RFC 3810), which let switches with MLD snooping forward the solicited-node
//! groups.

use crate::handle::LinkId;
use crate::ip::Network;
use crate::ip::timers::NetworkTimer;
use crate::time::Instant;
use crate::wire::ethernet::EtherType;
use crate::wire::mld::{self, MldQuery, MulticastAddressRecord, RecordType};
use crate::wire::{MacAddr, ipv6, protocol};
use core::net::Ipv6Addr;
use core::time::Duration;

/// Number of reports of a new group (the robustness variable of RFC 3810 §9.1).
const ROBUSTNESS_VARIABLE: u8 = 2;
/// Longest time between these reports (RFC 3810 §9.11).
const UNSOLICITED_REPORT_INTERVAL_MS: u32 = 1000;
/// Bytes of the hop-by-hop options header with the router alert.
const ROUTER_ALERT_LEN: usize = 8;

impl Network {
    /// Joins a group. The report is sent in the next call of [`Network::run_timers`].
    pub(crate) fn join_group(&mut self, id: LinkId, group: Ipv6Addr) {
        let link = self.link_mut(id);
        if let Err(at) = link.groups.binary_search(&group) {
            link.groups.insert(at, group);
            if self.is_secondary_shard() {
                return;
            }
            self.link_mut(id).join_reports_left = ROBUSTNESS_VARIABLE;
            self.timers.arm(NetworkTimer::ListenerReport(id), Instant::ZERO);
        }
    }

    /// Leaves a group and reports it.
    pub(crate) fn leave_group(&mut self, id: LinkId, group: Ipv6Addr) {
        let link = self.link_mut(id);
        if let Ok(at) = link.groups.binary_search(&group) {
            link.groups.remove(at);
            if self.is_secondary_shard() {
                return;
            }
            self.send_listener_report(
                id,
                &[MulticastAddressRecord { kind: RecordType::ChangeToIncludeMode, group }],
            );
        }
    }

    /// Handles a query of a router for group members.
    pub(crate) fn mld_input(
        &mut self,
        now: Instant,
        id: LinkId,
        src: Ipv6Addr,
        hop_limit: u8,
        message: &[u8],
    ) {
        let Ok(query) = MldQuery::parse(message, src, hop_limit) else {
            self.stats.icmp_invalid += 1;
            return;
        };
        self.stats.mld_queries_in += 1;
        let link = self.link(id);
        let is_member = match query.group {
            None => !link.groups.is_empty(),
            Some(group) => link.groups.binary_search(&group).is_ok(),
        };
        if is_member {
            // RFC 3810 §6.2: the report is sent after a random fraction of the maximum response delay.
            let delay = Duration::from_millis(self.entropy.below(query.max_response_ms).into());
            self.timers.arm_no_later(NetworkTimer::ListenerReport(id), now + delay);
        }
    }

    pub(crate) fn on_listener_report(&mut self, now: Instant, id: LinkId) {
        let link = self.link_mut(id);
        let joining = link.join_reports_left > 0;
        link.join_reports_left = link.join_reports_left.saturating_sub(1);
        let more_reports = link.join_reports_left > 0;
        let kind = if joining { RecordType::ChangeToExcludeMode } else { RecordType::ModeIsExclude };
        let records: Vec<_> =
            link.groups.iter().map(|&group| MulticastAddressRecord { kind, group }).collect();
        let headers = ipv6::Header::LEN + ROUTER_ALERT_LEN;
        let mut per_report = 1;
        while headers + mld::report_len(per_report + 1) <= usize::from(link.mtu_v6) {
            per_report += 1;
        }
        for records in records.chunks(per_report) {
            self.send_listener_report(id, records);
        }
        if more_reports {
            let delay = Duration::from_millis(self.entropy.below(UNSOLICITED_REPORT_INTERVAL_MS).into());
            self.timers.arm(NetworkTimer::ListenerReport(id), now + delay);
        }
    }

    fn send_listener_report(&mut self, id: LinkId, records: &[MulticastAddressRecord]) {
        // RFC 3590 §4: before the link-local address is valid, reports have the unspecified source address.
        let src = self.link(id).link_local().unwrap_or(Ipv6Addr::UNSPECIFIED);
        let dst = mld::ALL_MLDV2_ROUTERS;
        let at = ipv6::Header::LEN + ROUTER_ALERT_LEN;
        let len_max = at + mld::report_len(records.len());
        let sent =
            self.send_control(id, MacAddr::from_ipv6_multicast(dst), EtherType::IPV6, len_max, |out| {
                let len = ROUTER_ALERT_LEN + mld::emit_report(records, src, dst, &mut out[at..]);
                ipv6::emit_router_alert(protocol::ICMPV6, &mut out[ipv6::Header::LEN..]);
                let header = ipv6::Header {
                    dscp: 0,
                    ecn: 0,
                    flow_label: 0,
                    // Cannot truncate: the caller keeps within the MTU.
                    payload_len: len as u16,
                    next_header: protocol::HOP_BY_HOP,
                    hop_limit: 1,
                    src,
                    dst,
                };
                header.emit(out) + len
            });
        if sent {
            self.stats.mld_reports_out += 1;
        }
    }
}
