//! Packets of MLD (RFC 3810, RFC 2710).

use crate::handle::LinkId;
use crate::ip::Network;
use crate::time::Instant;
use crate::wire::ethernet::EtherType;
use crate::wire::group_record::{self, GroupRecord};
use crate::wire::{MacAddr, ipv6, mld, protocol};
use core::net::Ipv6Addr;

/// Bytes of the hop-by-hop options header with the router alert.
const ROUTER_ALERT_LEN: usize = 8;

impl Network {
    /// Handles a query of a router for group members.
    pub(crate) fn mld_query_input(
        &mut self,
        now: Instant,
        id: LinkId,
        src: Ipv6Addr,
        hop_limit: u8,
        message: &[u8],
    ) {
        let Ok(query) = mld::parse_query(message, src, hop_limit) else {
            self.stats.icmp_invalid += 1;
            return;
        };
        self.stats.mld_queries_in += 1;
        self.group_query_input(now, id, false, &query);
    }

    /// Handles a version 1 report of another listener with the header of its packet.
    pub(crate) fn mld_report_input(
        &mut self,
        now: Instant,
        id: LinkId,
        header: &ipv6::Header,
        message: &[u8],
    ) {
        // RFC 2710 §3, and RFC 3590 §4 for the unspecified address. Only a host on the link can send such a
        // packet, and routers hear it (`igmp6_event_report`).
        let is_of_link = header.src.is_unicast_link_local() || header.src.is_unspecified();
        let is_valid = is_of_link && header.hop_limit == 1 && header.dst.is_multicast();
        match mld::parse_report_v1(message).filter(|_| is_valid) {
            Some(group) => self.other_member_reported(now, id, group.into()),
            None => self.stats.icmp_invalid += 1,
        }
    }

    pub(super) fn send_mld_report(&mut self, id: LinkId, records: &[GroupRecord]) {
        let len = group_record::report_len(records);
        self.send_mld(id, mld::ALL_MLDV2_ROUTERS, len, |src, dst, out| {
            mld::emit_report(records, src, dst, out);
        });
    }

    pub(super) fn send_older_mld_report(&mut self, id: LinkId, group: Ipv6Addr) {
        self.send_mld(id, group, mld::MESSAGE_LEN, |src, dst, out| {
            mld::emit_message(mld::REPORT_V1, group, src, dst, out);
        });
    }

    pub(super) fn send_mld_done(&mut self, id: LinkId, group: Ipv6Addr) {
        self.send_mld(id, mld::ALL_ROUTERS, mld::MESSAGE_LEN, |src, dst, out| {
            mld::emit_message(mld::DONE, group, src, dst, out);
        });
    }

    /// Sends a message of `len` bytes, which `write` fills in; it gets the source and the destination.
    fn send_mld(
        &mut self,
        id: LinkId,
        dst: Ipv6Addr,
        len: usize,
        write: impl FnOnce(Ipv6Addr, Ipv6Addr, &mut [u8]),
    ) {
        // RFC 3590 §4: before the link-local address is valid, reports have the unspecified source address.
        let src = self.link(id).link_local().unwrap_or(Ipv6Addr::UNSPECIFIED);
        let at = ipv6::Header::LEN + ROUTER_ALERT_LEN;
        let total = at + len;
        let sent = self.send_control(id, MacAddr::from_ipv6_multicast(dst), EtherType::IPV6, total, |out| {
            write(src, dst, &mut out[at..]);
            ipv6::emit_router_alert(protocol::ICMPV6, &mut out[ipv6::Header::LEN..]);
            let header = ipv6::Header {
                dscp: 0,
                ecn: 0,
                flow_label: 0,
                // Cannot truncate: the caller keeps within the MTU.
                payload_len: (ROUTER_ALERT_LEN + len) as u16,
                next_header: protocol::HOP_BY_HOP,
                hop_limit: 1,
                src,
                dst,
            };
            header.emit(out);
            total
        });
        if sent {
            self.stats.mld_reports_out += 1;
        }
    }
}
