//! Reports and answers of a link, against a scripted router.

use super::GroupUser;
use crate::ip::ParsedFrame;
use crate::ip::testbench::*;
use crate::multicast::{FilterMode, SourceFilter};
use crate::time::Instant;
use crate::wire::checksum::{Sum, pseudo_v6};
use crate::wire::ethernet::EtherType;
use crate::wire::{MacAddr, icmpv6, igmp, ipv4, ipv6, mld, protocol};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use core::time::Duration;
use std::collections::BTreeMap;

const GROUP: Ipv4Addr = Ipv4Addr::new(239, 1, 2, 3);
const GROUP_V6: Ipv6Addr = Ipv6Addr::new(0xff15, 0, 0, 0, 0, 0, 0, 0x77);
const ROUTER_V6: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0xff);
const SECOND: Duration = Duration::from_secs(1);

fn sources(last: &[u8]) -> Vec<IpAddr> {
    last.iter().map(|&last| IpAddr::from([10, 0, 0, last])).collect()
}

fn include(last: &[u8]) -> SourceFilter {
    SourceFilter::new(FilterMode::Include, sources(last))
}

/// A message to routers: its type, its group, and its sources by their last byte.
type Report = (u8, IpAddr, Vec<u8>);

impl NetworkFixture {
    /// Replaces the filter of the only socket that uses a group.
    fn set_filter(
        &mut self,
        group: impl Into<IpAddr>,
        before: Option<SourceFilter>,
        now: Option<SourceFilter>,
    ) {
        let (link, group) = (self.link, group.into());
        self.network.change_group(link, group, GroupUser::Socket, before.as_ref(), now.as_ref());
        self.network.run_timers(self.now);
    }

    /// Takes the group records and older messages sent so far. Checks the headers of their packets.
    fn reports(&mut self) -> Vec<Report> {
        let frames = self.sent();
        frames.iter().flat_map(|frame| records_of(frame)).collect()
    }

    fn hear_igmp(&mut self, src: Ipv4Addr, dst: Ipv4Addr, message: &[u8]) {
        let mut message = message.to_vec();
        let sum = Sum::of(&message).finish();
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        let header = ipv4_header(src, dst, protocol::IGMP, message.len());
        let packet = ipv4_packet(header, &message);
        let mac = if dst.is_multicast() { MacAddr::from_ipv4_multicast(dst) } else { OUR_MAC };
        self.input(&frame_to(mac, None, EtherType::IPV4, &packet));
    }

    fn hear_mld(&mut self, dst: Ipv6Addr, message: &[u8]) {
        self.hear_mld_from(ROUTER_V6, dst, 1, message);
    }

    fn hear_mld_from(&mut self, src: Ipv6Addr, dst: Ipv6Addr, hop_limit: u8, message: &[u8]) {
        let mut message = message.to_vec();
        let sum = pseudo_v6(src, dst, protocol::ICMPV6, message.len()).add(Sum::of(&message));
        message[2..4].copy_from_slice(&sum.finish().to_be_bytes());
        let packet = ipv6_packet(src, dst, protocol::ICMPV6, hop_limit, &message);
        let mac = if dst.is_multicast() { MacAddr::from_ipv6_multicast(dst) } else { OUR_MAC };
        self.input(&frame_to(mac, None, EtherType::IPV6, &packet));
    }
}

fn records_of(frame: &[u8]) -> Vec<Report> {
    let (ethernet, packet) = as_received(frame);
    if ethernet.ethertype == EtherType::IPV4 {
        let header = ipv4::Header::parse(packet).unwrap();
        assert!(header.checksum_ok(packet));
        assert_eq!((header.ttl, header.dscp, header.protocol, header.src), (1, 48, 2, OUR_V4));
        assert_eq!(ethernet.dst, MacAddr::from_ipv4_multicast(header.dst));
        assert_eq!(packet[20..24], [148, 4, 0, 0], "router alert");
        let message = header.payload(packet);
        assert!(Sum::of(message).is_valid());
        let group = |at: usize| Ipv4Addr::from_octets(message[at..at + 4].try_into().unwrap());
        if message[0] != igmp::REPORT_V3 {
            let to = if message[0] == igmp::LEAVE { igmp::ALL_ROUTERS } else { group(4) };
            assert_eq!((header.dst, message.len()), (to, 8));
            return vec![(message[0], group(4).into(), Vec::new())];
        }
        assert_eq!(header.dst, igmp::ALL_IGMPV3_ROUTERS);
        records(message, 4)
    } else {
        let header = ipv6::Header::parse(packet).unwrap();
        let chain = ipv6::walk_header_chain(packet, &header).unwrap();
        assert_eq!((header.hop_limit, chain.protocol, chain.router_alert), (1, protocol::ICMPV6, Some(0)));
        let message = &packet[chain.offset..];
        assert!(icmpv6::Message::parse(message, header.src, header.dst).is_ok());
        if message[0] != mld::REPORT {
            let group = Ipv6Addr::from_octets(message[8..24].try_into().unwrap());
            let to = if message[0] == mld::DONE { mld::ALL_ROUTERS } else { group };
            assert_eq!(header.dst, to);
            return vec![(message[0], group.into(), Vec::new())];
        }
        assert_eq!(header.dst, mld::ALL_MLDV2_ROUTERS);
        records(message, 16)
    }
}

fn records(message: &[u8], address_len: usize) -> Vec<Report> {
    let count = u16::from_be_bytes([message[6], message[7]]);
    let mut at = 8;
    let records = (0..count).map(|_| {
        let sources = usize::from(u16::from_be_bytes([message[at + 2], message[at + 3]]));
        let end_of = |number: usize| at + 4 + address_len * (number + 1);
        let bytes = &message[at + 4..at + 4 + address_len];
        let group = match bytes.try_into() {
            Ok(v4) => IpAddr::V4(Ipv4Addr::from_octets(v4)),
            Err(_) => IpAddr::V6(Ipv6Addr::from_octets(bytes.try_into().unwrap())),
        };
        let record = (message[at], group, (1..=sources).map(|number| message[end_of(number) - 1]).collect());
        at = end_of(sources);
        record
    });
    let records: Vec<_> = records.collect();
    assert_eq!(at, message.len());
    records
}

fn query(code: u8, group: Ipv4Addr, last: &[u8]) -> Vec<u8> {
    let mut message = vec![igmp::QUERY, code, 0, 0];
    message.extend(group.octets());
    message.extend([2, 125, 0, last.len() as u8]);
    last.iter().for_each(|&last| message.extend([10, 0, 0, last]));
    message
}

const ALL_HOSTS: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 1);
const ANY: Ipv4Addr = Ipv4Addr::UNSPECIFIED;

#[test]
fn join_and_leave_are_reported_twice() {
    let mut fixture = NetworkFixture::new();
    for (group, filter, joined, left) in [
        (IpAddr::V4(GROUP), SourceFilter::ANY, 4, 3),
        (IpAddr::V6(GROUP_V6), SourceFilter::ANY, 4, 3),
        (IpAddr::V4(GROUP), include(&[9]), 5, 6),
    ] {
        let last = filter.sources().iter().map(|_| 9).collect::<Vec<u8>>();
        for (kind, before, now) in [(joined, None, Some(filter.clone())), (left, Some(filter.clone()), None)]
        {
            fixture.set_filter(group, before, now);
            assert_eq!(fixture.reports(), [(kind, group, last.clone())], "at once");
            fixture.advance(SECOND + Duration::from_millis(1));
            assert_eq!(fixture.reports(), [(kind, group, last.clone())], "within a second");
            fixture.advance(10 * SECOND);
            assert!(fixture.reports().is_empty());
        }
        assert!(fixture.network.link(fixture.link).groups.find(group).is_none(), "forgotten");
    }
}

#[test]
fn second_member_changes_nothing() {
    let mut fixture = NetworkFixture::new();
    fixture.set_filter(GROUP, None, Some(SourceFilter::ANY));
    fixture.advance(2 * SECOND);
    fixture.reports();
    fixture.set_filter(GROUP, None, Some(include(&[7])));
    fixture.set_filter(GROUP, Some(include(&[7])), None);
    fixture.advance(5 * SECOND);
    assert!(fixture.reports().is_empty());
    // The permanent groups are not reported.
    fixture.set_filter(ALL_HOSTS, None, Some(SourceFilter::ANY));
    fixture.set_filter(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1), None, Some(SourceFilter::ANY));
    let within_host = Ipv6Addr::new(0xff01, 0, 0, 0, 0, 0, 0, 5);
    fixture.set_filter(within_host, None, Some(SourceFilter::ANY));
    fixture.advance(5 * SECOND);
    assert!(fixture.reports().is_empty());
    // What is not reported is forgotten at once.
    fixture.set_filter(within_host, Some(SourceFilter::ANY), None);
    let groups = &fixture.network.link(fixture.link).groups;
    assert!(groups.find(within_host.into()).is_none() && groups.find(ALL_HOSTS.into()).is_some());
}

#[test]
fn queries_are_answered_within_their_delay() {
    let mut fixture = NetworkFixture::new();
    fixture.set_filter(GROUP, None, Some(include(&[1, 2])));
    fixture.advance(5 * SECOND);
    fixture.reports();
    let group = IpAddr::V4(GROUP);
    for (to, message, expected) in [
        (ALL_HOSTS, query(30, ANY, &[]), vec![(1, group, vec![1, 2])]),
        (GROUP, query(30, GROUP, &[]), vec![(1, group, vec![1, 2])]),
        (GROUP, query(30, GROUP, &[2, 3]), vec![(1, group, vec![2])]),
        (GROUP, query(30, GROUP, &[3]), vec![]),
        (ALL_HOSTS, query(30, Ipv4Addr::new(239, 9, 9, 9), &[]), vec![]),
    ] {
        fixture.hear_igmp(PEER_V4, to, &message);
        assert!(fixture.reports().is_empty(), "not at once");
        fixture.advance(3 * SECOND);
        assert_eq!(fixture.reports(), expected, "{message:?}");
        fixture.advance(10 * SECOND);
        assert!(fixture.reports().is_empty());
    }
    // Two queries about sources have one answer.
    fixture.hear_igmp(PEER_V4, GROUP, &query(30, GROUP, &[1]));
    fixture.hear_igmp(Ipv4Addr::UNSPECIFIED, GROUP, &query(30, GROUP, &[2]));
    fixture.advance(3 * SECOND);
    assert_eq!(fixture.reports(), [(1, group, vec![1, 2])]);
    assert_eq!(fixture.network.stats().igmp_queries_in, 7);
}

// limit: queried sources of a group
#[test]
fn queried_sources_are_limited() {
    let mut fixture = NetworkFixture::new();
    let filter = SourceFilter::new(FilterMode::Exclude, sources(&[1, 2]));
    fixture.set_filter(GROUP, None, Some(filter));
    fixture.advance(5 * SECOND);
    fixture.reports();
    let query = |numbers: core::ops::Range<u16>| {
        let mut message = query(10, GROUP, &[]);
        message[10..12].copy_from_slice(&(numbers.len() as u16).to_be_bytes());
        numbers.for_each(|number| message.extend([[10, 1], number.to_be_bytes()].concat()));
        message
    };
    let all = vec![(2, IpAddr::V4(GROUP), vec![1, 2])];
    for (queries, sources) in [
        (vec![(0, 512)], Some(512)),
        (vec![(0, 513)], None),
        (vec![(0, 256), (256, 512)], Some(512)),
        (vec![(0, 256), (256, 513)], None),
        (vec![(0, 513), (0, 1)], None),
        (vec![(0, 1)], Some(1)),
    ] {
        queries.iter().for_each(|&(from, to)| fixture.hear_igmp(PEER_V4, GROUP, &query(from..to)));
        fixture.advance(SECOND);
        let reports = fixture.reports();
        match sources {
            None => assert_eq!(reports, all, "{queries:?}"),
            Some(count) => {
                let listed: usize = reports.iter().map(|(_, _, sources)| sources.len()).sum();
                assert!(reports.iter().all(|(kind, ..)| *kind == 1) && listed == count, "{queries:?}");
            }
        }
        fixture.advance(SECOND);
    }
}

#[test]
fn excluded_sources_are_not_in_the_answer() {
    let mut fixture = NetworkFixture::new();
    let filter = SourceFilter::new(FilterMode::Exclude, sources(&[1]));
    fixture.set_filter(GROUP, None, Some(filter));
    assert_eq!(fixture.reports(), [(4, IpAddr::V4(GROUP), vec![1])]);
    fixture.advance(5 * SECOND);
    fixture.reports();
    fixture.hear_igmp(PEER_V4, GROUP, &query(10, GROUP, &[1, 2]));
    fixture.advance(SECOND);
    assert_eq!(fixture.reports(), [(1, IpAddr::V4(GROUP), vec![2])]);
    fixture.hear_igmp(PEER_V4, GROUP, &query(10, ANY, &[]));
    fixture.advance(SECOND);
    assert_eq!(fixture.reports(), [(2, IpAddr::V4(GROUP), vec![1])]);
}

#[test]
fn older_igmp_routers_get_older_reports() {
    let (v1, v2) = ([igmp::QUERY, 0, 0, 0, 0, 0, 0, 0], [igmp::QUERY, 100, 0, 0, 0, 0, 0, 0]);
    for (message, report, leaves) in [(v2, igmp::REPORT_V2, true), (v1, igmp::REPORT_V1, false)] {
        let mut fixture = NetworkFixture::new();
        let group = IpAddr::V4(GROUP);
        fixture.hear_igmp(PEER_V4, ALL_HOSTS, &message);
        fixture.set_filter(GROUP, None, Some(SourceFilter::ANY));
        assert_eq!(fixture.reports(), [(report, group, vec![])]);
        fixture.advance(10 * SECOND);
        assert_eq!(fixture.reports(), [(report, group, vec![])], "repeated once");
        fixture.hear_igmp(PEER_V4, ALL_HOSTS, &message);
        fixture.advance(10 * SECOND);
        assert_eq!(fixture.reports(), [(report, group, vec![])], "answered");
        // The report of another member makes the own one unnecessary.
        fixture.hear_igmp(PEER_V4, ALL_HOSTS, &message);
        let other = [report, 0, 0, 0, 239, 1, 2, 3];
        fixture.hear_igmp(PEER_V4, GROUP, &other);
        fixture.advance(10 * SECOND);
        assert!(fixture.reports().is_empty());
        fixture.set_filter(GROUP, Some(SourceFilter::ANY), None);
        let left = [(igmp::LEAVE, group, vec![])];
        assert_eq!(fixture.reports(), if leaves { &left[..] } else { &[] });
        // RFC 3376 §8.12: 2 · 125 s + 10 s after the last older query.
        fixture.advance(260 * SECOND);
        fixture.set_filter(GROUP, None, Some(SourceFilter::ANY));
        assert_eq!(fixture.reports(), [(4, group, vec![])]);
    }
}

#[test]
fn older_mld_routers_get_older_reports() {
    let mut fixture = NetworkFixture::new();
    let all_nodes = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    let mut message = vec![mld::QUERY, 0, 0, 0, 0x03, 0xe8, 0, 0];
    message.extend([0; 16]);
    fixture.hear_mld(all_nodes, &message);
    fixture.advance(SECOND);
    let solicited = fixture.reports();
    assert!(matches!(solicited[..], [(mld::REPORT_V1, IpAddr::V6(_), _)]), "{solicited:?}");
    fixture.set_filter(GROUP_V6, None, Some(SourceFilter::ANY));
    assert_eq!(fixture.reports(), [(mld::REPORT_V1, IpAddr::V6(GROUP_V6), vec![])]);
    fixture.advance(10 * SECOND);
    assert_eq!(fixture.reports(), [(mld::REPORT_V1, IpAddr::V6(GROUP_V6), vec![])]);
    fixture.set_filter(GROUP_V6, Some(SourceFilter::ANY), None);
    assert_eq!(fixture.reports(), [(mld::DONE, IpAddr::V6(GROUP_V6), vec![])]);
    // A query of version 2 about a group is answered by version 2 after the time-out.
    fixture.advance(300 * SECOND);
    fixture.set_filter(GROUP_V6, None, Some(SourceFilter::ANY));
    fixture.advance(5 * SECOND);
    fixture.reports();
    message[8..24].copy_from_slice(&GROUP_V6.octets());
    message.extend([2, 125, 0, 0]);
    fixture.hear_mld(GROUP_V6, &message);
    fixture.advance(SECOND);
    assert_eq!(fixture.reports(), [(2, IpAddr::V6(GROUP_V6), vec![])]);
}

#[test]
fn reports_from_off_link_silence_nobody() {
    let mut fixture = NetworkFixture::new();
    let query = [igmp::QUERY, 100, 0, 0, 0, 0, 0, 0];
    fixture.hear_igmp(PEER_V4, ALL_HOSTS, &query);
    fixture.set_filter(GROUP, None, Some(SourceFilter::ANY));
    fixture.advance(10 * SECOND);
    fixture.reports();
    fixture.hear_igmp(PEER_V4, ALL_HOSTS, &query);
    fixture.hear_igmp(Ipv4Addr::new(192, 0, 2, 9), OUR_V4, &[igmp::REPORT_V2, 0, 0, 0, 239, 1, 2, 3]);
    fixture.advance(10 * SECOND);
    assert_eq!(fixture.reports(), [(igmp::REPORT_V2, IpAddr::V4(GROUP), vec![])]);
    assert_eq!(fixture.network.stats().igmp_invalid, 1);

    let mut query = vec![mld::QUERY, 0, 0, 0, 0x03, 0xe8, 0, 0];
    query.extend([0; 16]);
    let report = [&[mld::REPORT_V1, 0, 0, 0, 0, 0, 0, 0][..], &GROUP_V6.octets()].concat();
    let all_nodes = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    fixture.hear_mld(all_nodes, &query);
    fixture.set_filter(GROUP_V6, None, Some(SourceFilter::ANY));
    fixture.advance(10 * SECOND);
    fixture.reports();
    for (src, dst, hop_limit, silences) in [
        (PEER_V6, GROUP_V6, 1, false),
        (ROUTER_V6, GROUP_V6, 2, false),
        (ROUTER_V6, OUR_V6, 1, false),
        (ROUTER_V6, GROUP_V6, 1, true),
        (Ipv6Addr::UNSPECIFIED, GROUP_V6, 1, true),
    ] {
        let invalid = fixture.network.stats().icmp_invalid;
        fixture.hear_mld(all_nodes, &query);
        fixture.hear_mld_from(src, dst, hop_limit, &report);
        fixture.advance(SECOND);
        let own = (mld::REPORT_V1, IpAddr::V6(GROUP_V6), vec![]);
        assert_eq!(fixture.reports().contains(&own), !silences, "{src} {dst} {hop_limit}");
        assert_eq!(fixture.network.stats().icmp_invalid - invalid, u64::from(!silences));
    }
}

#[test]
fn malformed_group_messages_are_counted() {
    let mut fixture = NetworkFixture::new();
    fixture.hear_igmp(PEER_V4, ALL_HOSTS, &[igmp::QUERY, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
    fixture.hear_igmp(PEER_V4, ALL_HOSTS, &query(1, Ipv4Addr::new(10, 0, 0, 1), &[]));
    let header = ipv4_header(PEER_V4, ALL_HOSTS, protocol::IGMP, 3);
    let packet = ipv4_packet(header, &[igmp::QUERY, 0, 0]);
    fixture.input(&frame_to(MacAddr::from_ipv4_multicast(ALL_HOSTS), None, EtherType::IPV4, &packet));
    assert_eq!(fixture.network.stats().igmp_invalid, 3);
    fixture.advance(20 * SECOND);
    assert!(fixture.sent().is_empty());
}

#[test]
fn groups_of_other_shards_are_received_and_reported() {
    let mut fixture = NetworkFixture::new();
    let header = ipv4_header(PEER_V4, GROUP, protocol::UDP, 8);
    let packet = ipv4_packet(header, &[0, 1, 0, 2, 0, 8, 0, 0]);
    let frame = frame_to(MacAddr::from_ipv4_multicast(GROUP), None, EtherType::IPV4, &packet);
    assert!(matches!(fixture.parse(&frame), ParsedFrame::Drop(_)));
    let key = |shard: u8| (shard, fixture.link.0, IpAddr::V4(GROUP));
    let one = BTreeMap::from([(key(1), SourceFilter::ANY)]);
    let two = BTreeMap::from([(key(1), SourceFilter::ANY), (key(2), include(&[3]))]);
    for (others, expected) in [(one, vec![(4, IpAddr::V4(GROUP), vec![])]), (two, vec![])] {
        fixture.network.set_groups_of_other_shards(others);
        fixture.network.run_timers(fixture.now);
        assert_eq!(fixture.reports(), expected);
        assert!(matches!(fixture.parse(&frame), ParsedFrame::Udp(_)));
        fixture.advance(5 * SECOND);
        fixture.reports();
    }
    fixture.network.set_groups_of_other_shards(BTreeMap::new());
    fixture.network.run_timers(Instant::MAX);
    assert!(matches!(fixture.parse(&frame), ParsedFrame::Drop(_)));
}
