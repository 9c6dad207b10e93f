//! Packets of IGMP (RFC 3376, RFC 2236).

use super::querier::Version;
use crate::handle::LinkId;
use crate::ip::{Ipv4Packet, Network};
use crate::time::Instant;
use crate::wire::ethernet::EtherType;
use crate::wire::group_record::{self, GroupRecord};
use crate::wire::igmp;
use crate::wire::{MacAddr, ipv4, protocol};
use core::net::{IpAddr, Ipv4Addr};

/// DSCP of reports: internetwork control (RFC 3376 §4).
const DSCP: u8 = 48;

impl Network {
    /// Handles an IGMP message.
    pub(crate) fn igmp_input(&mut self, now: Instant, id: LinkId, packet: &Ipv4Packet<'_>) {
        match igmp::Message::parse(packet.payload) {
            Ok(igmp::Message::Query(query)) => {
                self.stats.igmp_queries_in += 1;
                self.group_query_input(now, id, true, &query);
            }
            // As in Linux's `igmp_rcv`: routers may not have heard a unicast report, so it suppresses none of
            // this host's.
            Ok(igmp::Message::Report(group)) if packet.broadcast => {
                self.other_member_reported(now, id, group.into());
            }
            Ok(igmp::Message::Other) => {}
            Ok(igmp::Message::Report(_)) | Err(_) => self.stats.igmp_invalid += 1,
        }
    }

    /// Sends an IGMPv3 report with these records to all IGMPv3 routers.
    pub(super) fn send_igmp_report(&mut self, id: LinkId, records: &[GroupRecord]) {
        let len = group_record::report_len(records);
        self.send_igmp(id, igmp::ALL_IGMPV3_ROUTERS, len, |out| {
            igmp::emit_report(records, out);
        });
    }

    /// Sends a report of IGMPv1 or IGMPv2 to the group.
    pub(super) fn send_older_igmp_report(&mut self, id: LinkId, group: Ipv4Addr, version: Version) {
        let kind = if version == Version::First { igmp::REPORT_V1 } else { igmp::REPORT_V2 };
        self.send_igmp(id, group, igmp::MESSAGE_LEN, |out| {
            igmp::emit_message(kind, group, out);
        });
    }

    /// Sends a leave message of IGMPv2 to all routers.
    pub(super) fn send_igmp_leave(&mut self, id: LinkId, group: Ipv4Addr) {
        self.send_igmp(id, igmp::ALL_ROUTERS, igmp::MESSAGE_LEN, |out| {
            igmp::emit_message(igmp::LEAVE, group, out);
        });
    }

    /// Sends an IGMP message of `len` bytes, which `write` fills in.
    fn send_igmp(&mut self, id: LinkId, dst: Ipv4Addr, len: usize, write: impl FnOnce(&mut [u8])) {
        // Without an address of the link, the source is the unspecified address (RFC 3376 §4.2.13).
        let own = |address: &crate::link::InterfaceAddress| match address.address {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        };
        let src = self.link(id).addresses.iter().find_map(own).unwrap_or(Ipv4Addr::UNSPECIFIED);
        let total = ipv4::Header::LEN_ROUTER_ALERT + len;
        let sent = self.send_control(id, MacAddr::from_ipv4_multicast(dst), EtherType::IPV4, total, |out| {
            let header = ipv4::Header {
                dscp: DSCP,
                ecn: 0,
                // Cannot truncate: the caller keeps within the MTU.
                total_len: total as u16,
                ident: 0,
                dont_fragment: true,
                more_fragments: false,
                fragment_offset: 0,
                ttl: 1,
                protocol: protocol::IGMP,
                src,
                dst,
                header_len: ipv4::Header::LEN_ROUTER_ALERT as u8,
            };
            header.emit_router_alert(out);
            write(&mut out[ipv4::Header::LEN_ROUTER_ALERT..]);
            total
        });
        if sent {
            self.stats.igmp_reports_out += 1;
        }
    }
}
