use crate::handle::PortId;
use crate::icmp::error::IcmpErrorKind;
use crate::ip::testbench::*;
use crate::ip::{InputResult, NetworkConfig, RouteError, TxError};
use crate::link::LinkConfig;
use crate::wire::checksum::{Sum, pseudo_v4};
use crate::wire::ethernet::EtherType;
use crate::wire::{MacAddr, arp, ipv4, protocol};
use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use core::time::Duration;

const OTHER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 9]);
const SECOND: Duration = Duration::from_secs(1);

/// Parses a transmitted ARP packet and returns it with its destination MAC address.
fn arp_of(frame: &[u8]) -> (MacAddr, arp::ArpPacket) {
    let (header, packet) = as_received(frame);
    assert_eq!(header.ethertype, EtherType::ARP);
    (header.dst, arp::ArpPacket::parse(packet).unwrap())
}

#[test]
fn reply_releases_pending_packets_in_order() {
    let mut fixture = NetworkFixture::new();
    let route = fixture.route(PEER_V4);
    for payload in [1, 2, 3] {
        fixture.send_tcp(&route, PEER_V4, &segment(payload)).unwrap();
    }
    let (dst, request) = arp_of(&fixture.sent_one());
    assert_eq!((dst, request.sender_ip, request.target_ip), (MacAddr::BROADCAST, OUR_V4, PEER_V4));
    fixture.input(&arp_reply(PEER_V4, PEER_MAC));
    let frames = fixture.sent();
    assert_eq!(frames.len(), 3);
    for (at, bytes) in frames.iter().enumerate() {
        let (header, packet) = as_received(bytes);
        assert_eq!(header.dst, PEER_MAC);
        let ip = ipv4::Header::parse(packet).unwrap();
        assert!(ip.checksum_ok(packet) && ip.dont_fragment && ip.ident == 0);
        let l4 = ip.payload(packet);
        assert_eq!(l4.len(), 21 + at);
        assert!(pseudo_v4(ip.src, ip.dst, protocol::TCP, l4.len()).add(Sum::of(l4)).is_valid());
    }
    assert_eq!(fixture.network.next_error(), None);
}

#[test]
fn full_device_delays_pending_packets_without_loss() {
    let mut fixture = NetworkFixture::new();
    let route = fixture.route(PEER_V4);
    for payload in 0..10 {
        fixture.send_tcp(&route, PEER_V4, &segment(payload)).unwrap();
    }
    fixture.sent();
    fixture.set_capacity(4);
    fixture.input(&arp_reply(PEER_V4, PEER_MAC));
    assert_eq!(fixture.sent().len(), 4);
    fixture.advance(Duration::from_millis(3));
    assert_eq!(fixture.sent().len(), 0);
    fixture.set_capacity(100);
    fixture.advance(Duration::from_millis(1));
    let lens: Vec<_> = fixture.sent().iter().map(|frame| frame.len() - 54).collect();
    assert_eq!(lens, [4, 5, 6, 7, 8, 9]);
}

#[test]
fn failed_resolution_restarts_with_the_next_packet() {
    let mut fixture = NetworkFixture::new();
    let route = fixture.route(PEER_V4);
    for _ in 0..2 {
        fixture.send_tcp(&route, PEER_V4, &segment(5)).unwrap();
        fixture.send_tcp(&route, PEER_V4, &segment(6)).unwrap();
        fixture.advance(Duration::from_millis(2_999));
        assert_eq!(fixture.sent().len(), 3);
        assert_eq!(fixture.network.next_error(), None);
        fixture.advance(Duration::from_millis(1));
        for _ in 0..2 {
            let error = fixture.network.next_error().unwrap();
            assert_eq!(error.kind, IcmpErrorKind::HostUnreachable);
            assert_eq!(error.local, SocketAddr::new(OUR_V4.into(), 12345));
            assert_eq!(error.remote, SocketAddr::new(PEER_V4.into(), 80));
            assert_eq!((error.protocol, error.seq), (protocol::TCP, Some(0x0102_0304)));
        }
        assert_eq!(fixture.network.next_error(), None);
        assert_eq!(fixture.sent().len(), 0);
    }
    assert_eq!(fixture.network.stats().tx_unresolved, 4);
}

#[test]
fn arp_request_is_retried_while_device_is_full() {
    let mut fixture = NetworkFixture::new();
    let route = fixture.route(PEER_V4);
    fixture.set_capacity(0);
    fixture.send_tcp(&route, PEER_V4, &segment(5)).unwrap();
    fixture.advance(Duration::from_millis(2));
    let stats = fixture.network.stats().clone();
    assert_eq!((stats.arp_requests_out, stats.tx_control_dropped), (0, 2), "immediately and after 1 ms");
    fixture.set_capacity(usize::MAX);
    fixture.advance(Duration::from_millis(1));
    assert_eq!(arp_of(&fixture.sent_one()).1.target_ip, PEER_V4);
    // From here on as usual: two more requests, one second apart.
    fixture.advance(Duration::from_millis(2_999));
    assert_eq!((fixture.sent().len(), fixture.network.next_error()), (2, None));
    fixture.advance(Duration::from_millis(1));
    assert_eq!(fixture.network.next_error().unwrap().kind, IcmpErrorKind::HostUnreachable);
}

#[test]
fn full_device_does_not_consume_unicast_probes() {
    let mut fixture = NetworkFixture::new();
    fixture.learn_v4(PEER_V4, PEER_MAC);
    let route = fixture.route(PEER_V4);
    fixture.advance(60 * SECOND);
    fixture.send_tcp(&route, PEER_V4, &segment(0)).unwrap();
    fixture.sent();
    // After the delay the device stays full for most of the time that three probes would take.
    fixture.set_capacity(0);
    fixture.advance(5 * SECOND + Duration::from_millis(2_900));
    fixture.set_capacity(usize::MAX);
    fixture.advance(SECOND / 2);
    assert_eq!(arp_of(&fixture.sent_one()).0, PEER_MAC);
    fixture.input(&arp_reply(PEER_V4, PEER_MAC));
    fixture.advance(10 * SECOND);
    assert_eq!((fixture.network.next_error(), fixture.network.stats().neighbours_failed), (None, 0));
}

#[test]
fn resolution_fails_when_device_stays_full() {
    let mut fixture = NetworkFixture::new();
    let route = fixture.route(PEER_V4);
    fixture.set_capacity(0);
    fixture.send_tcp(&route, PEER_V4, &segment(5)).unwrap();
    fixture.advance(7 * SECOND);
    assert_eq!(fixture.network.next_error().unwrap().kind, IcmpErrorKind::HostUnreachable);
    // Three requests, each retried ten times at growing intervals.
    assert_eq!(fixture.network.stats().tx_control_dropped, 33);
    assert_eq!(fixture.network.next_deadline(), None);
}

#[test]
fn permanent_neighbour_survives_contradicting_replies() {
    let static_neighbours = vec![(IpAddr::V4(PEER_V4), PEER_MAC)];
    let link = LinkConfig { static_neighbours, ..link_config() };
    let mut fixture = NetworkFixture::with(network_config(), &link, CAPABILITIES);
    let route = fixture.route(PEER_V4);
    for _ in 0..120 {
        fixture.advance(60 * SECOND);
        fixture.input(&arp_request(PEER_V4, OTHER_MAC, PEER_V4));
        fixture.input(&arp_reply(PEER_V4, OTHER_MAC));
        assert_eq!(fixture.sent().len(), 0, "a static neighbour is never solicited");
        assert!(fixture.network.hop_is_current(&route.hop));
        fixture.send_tcp(&route, PEER_V4, &segment(0)).unwrap();
        assert_eq!(as_received(&fixture.sent_one()).0.dst, PEER_MAC);
    }
}

#[test]
fn answering_neighbour_stays_reachable_for_hours() {
    let mut fixture = NetworkFixture::new();
    fixture.learn_v4(PEER_V4, PEER_MAC);
    let route = fixture.route(PEER_V4);
    let mut asked = 0;
    for _ in 0..7200 {
        fixture.advance(SECOND);
        fixture.send_tcp(&route, PEER_V4, &segment(0)).unwrap();
        for bytes in fixture.sent() {
            let (header, _) = as_received(&bytes);
            if header.ethertype == EtherType::ARP {
                assert_eq!(header.dst, PEER_MAC, "a known neighbour is solicited by unicast");
                asked += 1;
                fixture.input(&arp_reply(PEER_V4, PEER_MAC));
            }
        }
    }
    assert_eq!(fixture.network.next_error(), None);
    // One probe per reachable time (15 to 45 s) and delay (5 s).
    assert!((7200 / 51..7200 / 19).contains(&asked), "{asked}");
}

#[test]
fn arp_request_is_answered_and_creates_a_neighbour() {
    let mut fixture = NetworkFixture::new();
    fixture.input(&arp_request(PEER_V4, PEER_MAC, OUR_V4));
    let (dst, reply) = arp_of(&fixture.sent_one());
    assert_eq!(dst, PEER_MAC);
    assert_eq!(reply.operation, arp::ArpOperation::Reply);
    assert_eq!((reply.sender_mac, reply.sender_ip), (OUR_MAC, OUR_V4));
    assert_eq!((reply.target_mac, reply.target_ip), (PEER_MAC, PEER_V4));
    let route = fixture.route(PEER_V4);
    fixture.send_tcp(&route, PEER_V4, &segment(0)).unwrap();
    assert_eq!(as_received(&fixture.sent_one()).0.dst, PEER_MAC);
}

#[test]
fn unrelated_arp_creates_no_neighbour() {
    let mut fixture = NetworkFixture::new();
    fixture.input(&arp_request(PEER_V4, PEER_MAC, ROUTER_V4));
    fixture.input(&arp_request(PEER_V4, PEER_MAC, PEER_V4));
    fixture.input(&arp_reply(PEER_V4, PEER_MAC));
    assert_eq!(fixture.sent().len(), 0);
    assert_eq!(fixture.network.stats().neighbours_created, 0);
}

#[test]
fn arp_probe_is_answered_without_learning() {
    let mut fixture = NetworkFixture::new();
    fixture.input(&arp_request(Ipv4Addr::UNSPECIFIED, PEER_MAC, OUR_V4));
    let (dst, reply) = arp_of(&fixture.sent_one());
    assert_eq!((dst, reply.target_ip), (PEER_MAC, Ipv4Addr::UNSPECIFIED));
    assert_eq!(fixture.network.stats().neighbours_created, 0);
}

#[test]
fn arp_ignores_addresses_of_other_links() {
    let mut fixture = NetworkFixture::new();
    let other = Ipv4Addr::new(192, 168, 7, 1);
    let config = LinkConfig {
        name: "vlan".into(),
        addresses: vec![(other.into(), 24)],
        vlan: Some(5),
        ..LinkConfig::default()
    };
    fixture.network.add_link(fixture.port, &config).unwrap();
    fixture.input(&arp_request(PEER_V4, PEER_MAC, other));
    assert_eq!(fixture.sent().len(), 0);
}

#[test]
fn gratuitous_arp_moves_a_known_neighbour() {
    let mut fixture = NetworkFixture::new();
    fixture.learn_v4(PEER_V4, PEER_MAC);
    fixture.input(&arp_request(PEER_V4, OTHER_MAC, PEER_V4));
    let route = fixture.route(PEER_V4);
    fixture.send_tcp(&route, PEER_V4, &segment(0)).unwrap();
    assert_eq!(as_received(&fixture.sent_one()).0.dst, OTHER_MAC);
    assert_eq!(fixture.network.stats().neighbours_moved, 1);
}

#[test]
fn first_reply_within_the_lock_time_wins() {
    let mut fixture = NetworkFixture::new();
    fixture.learn_v4(PEER_V4, PEER_MAC);
    fixture.input(&arp_reply(PEER_V4, OTHER_MAC));
    let route = fixture.route(PEER_V4);
    fixture.send_tcp(&route, PEER_V4, &segment(0)).unwrap();
    assert_eq!(as_received(&fixture.sent_one()).0.dst, PEER_MAC);
    fixture.advance(SECOND);
    fixture.input(&arp_reply(PEER_V4, OTHER_MAC));
    fixture.send_tcp(&route, PEER_V4, &segment(0)).unwrap();
    assert_eq!(as_received(&fixture.sent_one()).0.dst, OTHER_MAC);
    assert!(fixture.network.hop_is_current(&route.hop), "a new MAC address needs no new hop");
}

#[test]
fn arp_conflict_is_counted_without_learning() {
    let mut fixture = NetworkFixture::new();
    fixture.input(&arp_request(OUR_V4, OTHER_MAC, OUR_V4));
    assert_eq!(fixture.network.stats().arp_conflicts, 1);
    fixture.input(&arp_request(OUR_V4, OUR_MAC, OUR_V4));
    assert_eq!(fixture.network.stats().arp_conflicts, 1);
    assert_eq!(fixture.sent().len(), 0);
}

#[test]
fn impossible_arp_senders_are_dropped() {
    let mut fixture = NetworkFixture::new();
    let senders = [
        (Ipv4Addr::new(224, 0, 0, 1), PEER_MAC),
        (Ipv4Addr::new(10, 0, 0, 255), PEER_MAC),
        (Ipv4Addr::LOCALHOST, PEER_MAC),
        (PEER_V4, MacAddr::BROADCAST),
        (PEER_V4, MacAddr::ZERO),
    ];
    for (address, mac) in senders {
        fixture.input(&arp_request(address, mac, OUR_V4));
    }
    assert_eq!(fixture.network.drops().bad_arp, 5);
    assert_eq!(fixture.network.stats().neighbours_created, 0);
    assert_eq!(fixture.sent().len(), 0);
}

#[test]
fn gateway_is_resolved_for_remote_destinations() {
    let mut fixture = NetworkFixture::new();
    let far = IpAddr::from([192, 0, 2, 9]);
    assert_eq!(fixture.network.route(fixture.now, far, None), Err(RouteError::NetUnreachable));
    let old = fixture.route(PEER_V4);
    fixture
        .network
        .add_route(crate::ip::RouteConfig {
            destination: IpAddr::from([0, 0, 0, 0]),
            prefix: 0,
            gateway: Some(ROUTER_V4.into()),
            link: fixture.link,
            metric: 0,
        })
        .unwrap();
    assert!(!fixture.network.hop_is_current(&old.hop));
    assert_eq!(fixture.send_tcp(&old, PEER_V4, &segment(0)), Err(TxError::Stale));
    let route = fixture.route(far);
    assert_eq!(route.src, IpAddr::V4(OUR_V4));
    fixture.send_tcp(&route, far, &segment(0)).unwrap();
    assert_eq!(arp_of(&fixture.sent_one()).1.target_ip, ROUTER_V4);
}

#[test]
fn excess_static_neighbours_are_rejected_without_side_effects() {
    let config = NetworkConfig { neighbours_max: 16, ..network_config() };
    let static_ones = |vlan: u16, count: u8| LinkConfig {
        name: format!("vlan{vlan}"),
        vlan: Some(vlan),
        addresses: vec![(Ipv4Addr::new(10, vlan as u8, 0, 1).into(), 24)],
        static_neighbours: (0..count)
            .map(|n| (Ipv4Addr::new(10, vlan as u8, 0, 100 + n).into(), PEER_MAC))
            .collect(),
        ..LinkConfig::default()
    };
    let mut fixture = NetworkFixture::with(config, &link_config(), CAPABILITIES);
    // Dynamic neighbours are evicted for static ones.
    for last in 100..120 {
        fixture.route(Ipv4Addr::new(10, 0, 0, last));
    }
    fixture.network.add_link(PortId(0), &static_ones(1, 10)).unwrap();
    let error = fixture.network.add_link(PortId(0), &static_ones(2, 7)).unwrap_err();
    assert_eq!(error.key, "link.vlan2.static_neighbours");
    assert!(!fixture.network.is_local(Ipv4Addr::new(10, 2, 0, 1).into()));
    // The rejected link left nothing that could conflict.
    fixture.network.add_link(PortId(0), &static_ones(2, 6)).unwrap();
    assert!(fixture.network.add_link(PortId(0), &static_ones(3, 1)).is_err());
}

#[test]
fn eviction_reports_pending_packets_as_unreachable() {
    let config = NetworkConfig { neighbours_max: 16, ..network_config() };
    let mut fixture = NetworkFixture::with(config, &link_config(), CAPABILITIES);
    let first = fixture.route(PEER_V4);
    fixture.send_tcp(&first, PEER_V4, &segment(0)).unwrap();
    for last in 100..200 {
        fixture.route(Ipv4Addr::new(10, 0, 0, last));
    }
    assert!(!fixture.network.hop_is_current(&first.hop));
    assert_eq!(fixture.send_tcp(&first, PEER_V4, &segment(0)), Err(TxError::Stale));
    let error = fixture.network.next_error().unwrap();
    assert_eq!(error.kind, IcmpErrorKind::HostUnreachable);
    assert_eq!(error.remote, SocketAddr::new(PEER_V4.into(), 80));
    assert!(fixture.network.stats().neighbours_evicted > 80);
}

#[test]
fn oldest_pending_packet_is_dropped_at_the_limit() {
    let mut fixture = NetworkFixture::new();
    let route = fixture.route(PEER_V4);
    fixture.send_tcp(&route, PEER_V4, &segment(1399)).unwrap();
    for _ in 1..1000 {
        fixture.send_tcp(&route, PEER_V4, &segment(1400)).unwrap();
    }
    fixture.sent();
    fixture.input(&arp_reply(PEER_V4, PEER_MAC));
    let sent = fixture.sent();
    assert_eq!(sent.len(), 212_992 / 1454);
    assert!(sent.iter().all(|frame| frame.len() == 1454), "the first packet was dropped");
    assert_eq!(fixture.network.stats().tx_pending_overflow, 1000 - 212_992 / 1454);
}

#[test]
fn broadcast_and_multicast_need_no_resolution() {
    let mut fixture = NetworkFixture::new();
    let cases = [
        (Ipv4Addr::BROADCAST, MacAddr::BROADCAST),
        (Ipv4Addr::new(10, 0, 0, 255), MacAddr::BROADCAST),
        (Ipv4Addr::new(224, 0, 0, 251), MacAddr([1, 0, 0x5e, 0, 0, 251])),
    ];
    for (dst, mac) in cases {
        let route = fixture.route(dst);
        fixture.send_tcp(&route, dst, &segment(0)).unwrap();
        assert_eq!(as_received(&fixture.sent_one()).0.dst, mac);
    }
}

#[test]
fn invalid_destinations_and_sources_are_rejected() {
    let mut fixture = NetworkFixture::new();
    for dst in ["0.0.0.0", "127.0.0.1", "::", "::1", "::ffff:10.0.0.2"] {
        let dst: IpAddr = dst.parse().unwrap();
        assert_eq!(
            fixture.network.route(fixture.now, dst, None),
            Err(RouteError::InvalidDestination),
            "{dst}"
        );
    }
    let foreign = Some(IpAddr::from([10, 0, 0, 77]));
    assert_eq!(fixture.network.route(fixture.now, PEER_V4.into(), foreign), Err(RouteError::SourceNotLocal));
    let mixed = Some(IpAddr::V6(OUR_V6));
    assert_eq!(fixture.network.route(fixture.now, PEER_V4.into(), mixed), Err(RouteError::SourceNotLocal));
    assert_eq!(fixture.network.route(fixture.now, OUR_V4.into(), None), Err(RouteError::OwnAddress));
}

#[test]
fn truncated_arp_is_dropped() {
    let mut fixture = NetworkFixture::new();
    let good = arp_request(PEER_V4, PEER_MAC, OUR_V4);
    for len in 0..good.len() {
        fixture.parse(&good[..len]);
    }
    assert_eq!(fixture.network.stats().rx_dropped, good.len() as u64);
    assert!(matches!(fixture.input(&good), InputResult::Handled));
}
