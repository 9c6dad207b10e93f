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
fn one_reply_releases_every_waiting_packet_in_order() {
    let mut bench = NetworkFixture::new();
    let route = bench.route(PEER_V4);
    for payload in [1, 2, 3] {
        bench.send_tcp(&route, PEER_V4, &segment(payload)).unwrap();
    }
    let (dst, request) = arp_of(&bench.sent_one());
    assert_eq!((dst, request.sender_ip, request.target_ip), (MacAddr::BROADCAST, OUR_V4, PEER_V4));
    bench.input(&arp_reply(PEER_V4, PEER_MAC));
    let frames = bench.sent();
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
    assert_eq!(bench.network.next_error(), None);
}

#[test]
fn a_full_device_delays_released_packets_but_loses_none() {
    let mut bench = NetworkFixture::new();
    let route = bench.route(PEER_V4);
    for payload in 0..10 {
        bench.send_tcp(&route, PEER_V4, &segment(payload)).unwrap();
    }
    bench.sent();
    bench.set_capacity(4);
    bench.input(&arp_reply(PEER_V4, PEER_MAC));
    assert_eq!(bench.sent().len(), 4);
    bench.advance(Duration::from_millis(3));
    assert_eq!(bench.sent().len(), 0);
    bench.set_capacity(100);
    bench.advance(Duration::from_millis(1));
    let lens: Vec<_> = bench.sent().iter().map(|frame| frame.len() - 54).collect();
    assert_eq!(lens, [4, 5, 6, 7, 8, 9]);
}

#[test]
fn a_failed_resolution_reports_every_packet_and_the_next_packet_asks_again() {
    let mut bench = NetworkFixture::new();
    let route = bench.route(PEER_V4);
    for _ in 0..2 {
        bench.send_tcp(&route, PEER_V4, &segment(5)).unwrap();
        bench.send_tcp(&route, PEER_V4, &segment(6)).unwrap();
        bench.advance(Duration::from_millis(2_999));
        assert_eq!(bench.sent().len(), 3);
        assert_eq!(bench.network.next_error(), None);
        bench.advance(Duration::from_millis(1));
        for _ in 0..2 {
            let error = bench.network.next_error().unwrap();
            assert_eq!(error.kind, IcmpErrorKind::HostUnreachable);
            assert_eq!(error.local, SocketAddr::new(OUR_V4.into(), 12345));
            assert_eq!(error.remote, SocketAddr::new(PEER_V4.into(), 80));
            assert_eq!((error.protocol, error.seq), (protocol::TCP, Some(0x0102_0304)));
        }
        assert_eq!(bench.network.next_error(), None);
        assert_eq!(bench.sent().len(), 0);
    }
    assert_eq!(bench.network.stats().tx_unresolved, 4);
}

#[test]
fn a_question_that_finds_the_device_full_is_asked_as_soon_as_there_is_room() {
    let mut bench = NetworkFixture::new();
    let route = bench.route(PEER_V4);
    bench.set_capacity(0);
    bench.send_tcp(&route, PEER_V4, &segment(5)).unwrap();
    bench.advance(Duration::from_millis(2));
    let stats = bench.network.stats().clone();
    assert_eq!((stats.arp_requests_out, stats.tx_control_dropped), (0, 2), "at once and after 1 ms");
    bench.set_capacity(usize::MAX);
    bench.advance(Duration::from_millis(1));
    assert_eq!(arp_of(&bench.sent_one()).1.target_ip, PEER_V4);
    // From here on as usual: two more requests, one second apart.
    bench.advance(Duration::from_millis(2_999));
    assert_eq!((bench.sent().len(), bench.network.next_error()), (2, None));
    bench.advance(Duration::from_millis(1));
    assert_eq!(bench.network.next_error().unwrap().kind, IcmpErrorKind::HostUnreachable);
}

#[test]
fn a_known_neighbour_is_not_given_up_for_questions_that_found_the_device_full() {
    let mut bench = NetworkFixture::new();
    bench.learn_v4(PEER_V4, PEER_MAC);
    let route = bench.route(PEER_V4);
    bench.advance(60 * SECOND);
    bench.send_tcp(&route, PEER_V4, &segment(0)).unwrap();
    bench.sent();
    // The delay is over. The device is full until the third probe would have been the last.
    bench.set_capacity(0);
    bench.advance(5 * SECOND + Duration::from_millis(2_900));
    bench.set_capacity(usize::MAX);
    bench.advance(SECOND / 2);
    assert_eq!(arp_of(&bench.sent_one()).0, PEER_MAC);
    bench.input(&arp_reply(PEER_V4, PEER_MAC));
    bench.advance(10 * SECOND);
    assert_eq!((bench.network.next_error(), bench.network.stats().neighbours_failed), (None, 0));
}

#[test]
fn a_device_that_stays_full_keeps_nobody_waiting_for_ever() {
    let mut bench = NetworkFixture::new();
    let route = bench.route(PEER_V4);
    bench.set_capacity(0);
    bench.send_tcp(&route, PEER_V4, &segment(5)).unwrap();
    bench.advance(7 * SECOND);
    assert_eq!(bench.network.next_error().unwrap().kind, IcmpErrorKind::HostUnreachable);
    // Three requests, each retried ten times at growing intervals.
    assert_eq!(bench.network.stats().tx_control_dropped, 33);
    assert_eq!(bench.network.next_deadline(), None);
}

#[test]
fn a_static_entry_survives_hours_of_use_and_contradiction() {
    let static_neighbours = vec![(IpAddr::V4(PEER_V4), PEER_MAC)];
    let link = LinkConfig { static_neighbours, ..link_config() };
    let mut bench = NetworkFixture::with(network_config(), &link, CAPABILITIES);
    let route = bench.route(PEER_V4);
    for _ in 0..120 {
        bench.advance(60 * SECOND);
        bench.input(&arp_request(PEER_V4, OTHER_MAC, PEER_V4));
        bench.input(&arp_reply(PEER_V4, OTHER_MAC));
        assert_eq!(bench.sent().len(), 0, "a static neighbour is never asked");
        assert!(bench.network.hop_is_current(&route.hop));
        bench.send_tcp(&route, PEER_V4, &segment(0)).unwrap();
        assert_eq!(as_received(&bench.sent_one()).0.dst, PEER_MAC);
    }
}

#[test]
fn a_dynamic_entry_survives_hours_if_the_neighbour_answers() {
    let mut bench = NetworkFixture::new();
    bench.learn_v4(PEER_V4, PEER_MAC);
    let route = bench.route(PEER_V4);
    let mut asked = 0;
    for _ in 0..7200 {
        bench.advance(SECOND);
        bench.send_tcp(&route, PEER_V4, &segment(0)).unwrap();
        for bytes in bench.sent() {
            let (header, _) = as_received(&bytes);
            if header.ethertype == EtherType::ARP {
                assert_eq!(header.dst, PEER_MAC, "a known neighbour is asked alone");
                asked += 1;
                bench.input(&arp_reply(PEER_V4, PEER_MAC));
            }
        }
    }
    assert_eq!(bench.network.next_error(), None);
    // One probe per reachable time (15 to 45 s) and delay (5 s).
    assert!((7200 / 51..7200 / 19).contains(&asked), "{asked}");
}

#[test]
fn requests_for_our_address_are_answered_and_teach_the_asker() {
    let mut bench = NetworkFixture::new();
    bench.input(&arp_request(PEER_V4, PEER_MAC, OUR_V4));
    let (dst, reply) = arp_of(&bench.sent_one());
    assert_eq!(dst, PEER_MAC);
    assert_eq!(reply.operation, arp::ArpOperation::Reply);
    assert_eq!((reply.sender_mac, reply.sender_ip), (OUR_MAC, OUR_V4));
    assert_eq!((reply.target_mac, reply.target_ip), (PEER_MAC, PEER_V4));
    let route = bench.route(PEER_V4);
    bench.send_tcp(&route, PEER_V4, &segment(0)).unwrap();
    assert_eq!(as_received(&bench.sent_one()).0.dst, PEER_MAC);
}

#[test]
fn requests_for_others_and_announcements_of_strangers_create_nothing() {
    let mut bench = NetworkFixture::new();
    bench.input(&arp_request(PEER_V4, PEER_MAC, ROUTER_V4));
    bench.input(&arp_request(PEER_V4, PEER_MAC, PEER_V4));
    bench.input(&arp_reply(PEER_V4, PEER_MAC));
    assert_eq!(bench.sent().len(), 0);
    assert_eq!(bench.network.stats().neighbours_created, 0);
}

#[test]
fn a_probe_is_answered_but_teaches_nothing() {
    let mut bench = NetworkFixture::new();
    bench.input(&arp_request(Ipv4Addr::UNSPECIFIED, PEER_MAC, OUR_V4));
    let (dst, reply) = arp_of(&bench.sent_one());
    assert_eq!((dst, reply.target_ip), (PEER_MAC, Ipv4Addr::UNSPECIFIED));
    assert_eq!(bench.network.stats().neighbours_created, 0);
}

#[test]
fn no_answer_for_an_address_of_another_link() {
    let mut bench = NetworkFixture::new();
    let other = Ipv4Addr::new(192, 168, 7, 1);
    let config = LinkConfig {
        name: "vlan".into(),
        addresses: vec![(other.into(), 24)],
        vlan: Some(5),
        ..LinkConfig::default()
    };
    bench.network.add_link(bench.port, &config).unwrap();
    bench.input(&arp_request(PEER_V4, PEER_MAC, other));
    assert_eq!(bench.sent().len(), 0);
}

#[test]
fn a_gratuitous_announcement_moves_a_known_neighbour_at_once() {
    let mut bench = NetworkFixture::new();
    bench.learn_v4(PEER_V4, PEER_MAC);
    bench.input(&arp_request(PEER_V4, OTHER_MAC, PEER_V4));
    let route = bench.route(PEER_V4);
    bench.send_tcp(&route, PEER_V4, &segment(0)).unwrap();
    assert_eq!(as_received(&bench.sent_one()).0.dst, OTHER_MAC);
    assert_eq!(bench.network.stats().neighbours_moved, 1);
}

#[test]
fn of_several_answers_within_the_lock_time_the_first_wins() {
    let mut bench = NetworkFixture::new();
    bench.learn_v4(PEER_V4, PEER_MAC);
    bench.input(&arp_reply(PEER_V4, OTHER_MAC));
    let route = bench.route(PEER_V4);
    bench.send_tcp(&route, PEER_V4, &segment(0)).unwrap();
    assert_eq!(as_received(&bench.sent_one()).0.dst, PEER_MAC);
    bench.advance(SECOND);
    bench.input(&arp_reply(PEER_V4, OTHER_MAC));
    bench.send_tcp(&route, PEER_V4, &segment(0)).unwrap();
    assert_eq!(as_received(&bench.sent_one()).0.dst, OTHER_MAC);
    assert!(bench.network.hop_is_current(&route.hop), "a new MAC address needs no new hop");
}

#[test]
fn a_claim_to_our_own_address_is_counted_and_teaches_nothing() {
    let mut bench = NetworkFixture::new();
    bench.input(&arp_request(OUR_V4, OTHER_MAC, OUR_V4));
    assert_eq!(bench.network.stats().arp_conflicts, 1);
    bench.input(&arp_request(OUR_V4, OUR_MAC, OUR_V4));
    assert_eq!(bench.network.stats().arp_conflicts, 1);
    assert_eq!(bench.sent().len(), 0);
}

#[test]
fn impossible_senders_are_dropped() {
    let mut bench = NetworkFixture::new();
    let senders = [
        (Ipv4Addr::new(224, 0, 0, 1), PEER_MAC),
        (Ipv4Addr::new(10, 0, 0, 255), PEER_MAC),
        (Ipv4Addr::LOCALHOST, PEER_MAC),
        (PEER_V4, MacAddr::BROADCAST),
        (PEER_V4, MacAddr::ZERO),
    ];
    for (address, mac) in senders {
        bench.input(&arp_request(address, mac, OUR_V4));
    }
    assert_eq!(bench.network.drops().bad_arp, 5);
    assert_eq!(bench.network.stats().neighbours_created, 0);
    assert_eq!(bench.sent().len(), 0);
}

#[test]
fn the_gateway_is_asked_for_destinations_beyond_it() {
    let mut bench = NetworkFixture::new();
    let far = IpAddr::from([192, 0, 2, 9]);
    assert_eq!(bench.network.route(bench.now, far, None), Err(RouteError::NetUnreachable));
    let old = bench.route(PEER_V4);
    bench
        .network
        .add_route(crate::ip::RouteConfig {
            destination: IpAddr::from([0, 0, 0, 0]),
            prefix: 0,
            gateway: Some(ROUTER_V4.into()),
            link: bench.link,
            metric: 0,
        })
        .unwrap();
    assert!(!bench.network.hop_is_current(&old.hop));
    assert_eq!(bench.send_tcp(&old, PEER_V4, &segment(0)), Err(TxError::Stale));
    let route = bench.route(far);
    assert_eq!(route.src, IpAddr::V4(OUR_V4));
    bench.send_tcp(&route, far, &segment(0)).unwrap();
    assert_eq!(arp_of(&bench.sent_one()).1.target_ip, ROUTER_V4);
}

#[test]
fn more_static_neighbours_than_there_is_room_for_are_refused_before_anything_is_changed() {
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
    let mut bench = NetworkFixture::with(config, &link_config(), CAPABILITIES);
    // Dynamic neighbours are evicted for static ones.
    for last in 100..120 {
        bench.route(Ipv4Addr::new(10, 0, 0, last));
    }
    bench.network.add_link(PortId(0), &static_ones(1, 10)).unwrap();
    let error = bench.network.add_link(PortId(0), &static_ones(2, 7)).unwrap_err();
    assert_eq!(error.key, "link.vlan2.static_neighbours");
    assert!(!bench.network.is_local(Ipv4Addr::new(10, 2, 0, 1).into()));
    // The rejected link left nothing that could conflict.
    bench.network.add_link(PortId(0), &static_ones(2, 6)).unwrap();
    assert!(bench.network.add_link(PortId(0), &static_ones(3, 1)).is_err());
}

#[test]
fn an_evicted_neighbour_makes_its_hops_stale_and_reports_what_waited() {
    let config = NetworkConfig { neighbours_max: 16, ..network_config() };
    let mut bench = NetworkFixture::with(config, &link_config(), CAPABILITIES);
    let first = bench.route(PEER_V4);
    bench.send_tcp(&first, PEER_V4, &segment(0)).unwrap();
    for last in 100..200 {
        bench.route(Ipv4Addr::new(10, 0, 0, last));
    }
    assert!(!bench.network.hop_is_current(&first.hop));
    assert_eq!(bench.send_tcp(&first, PEER_V4, &segment(0)), Err(TxError::Stale));
    assert!(bench.network.next_error().is_some());
    assert!(bench.network.stats().neighbours_evicted > 80);
}

#[test]
fn what_waits_is_bounded_and_the_oldest_goes() {
    let mut bench = NetworkFixture::new();
    let route = bench.route(PEER_V4);
    for _ in 0..1000 {
        bench.send_tcp(&route, PEER_V4, &segment(1400)).unwrap();
    }
    bench.sent();
    bench.input(&arp_reply(PEER_V4, PEER_MAC));
    assert_eq!(bench.sent().len(), 212_992 / 1454);
    assert_eq!(bench.network.stats().tx_pending_overflow, 1000 - 212_992 / 1454);
}

#[test]
fn broadcast_and_multicast_need_no_resolution() {
    let mut bench = NetworkFixture::new();
    let cases = [
        (Ipv4Addr::BROADCAST, MacAddr::BROADCAST),
        (Ipv4Addr::new(10, 0, 0, 255), MacAddr::BROADCAST),
        (Ipv4Addr::new(224, 0, 0, 251), MacAddr([1, 0, 0x5e, 0, 0, 251])),
    ];
    for (dst, mac) in cases {
        let route = bench.route(dst);
        bench.send_tcp(&route, dst, &segment(0)).unwrap();
        assert_eq!(as_received(&bench.sent_one()).0.dst, mac);
    }
}

#[test]
fn impossible_destinations_and_foreign_sources_are_refused() {
    let mut bench = NetworkFixture::new();
    for dst in ["0.0.0.0", "127.0.0.1", "::", "::1", "::ffff:10.0.0.2"] {
        let dst: IpAddr = dst.parse().unwrap();
        assert_eq!(bench.network.route(bench.now, dst, None), Err(RouteError::InvalidDestination), "{dst}");
    }
    let foreign = Some(IpAddr::from([10, 0, 0, 77]));
    assert_eq!(bench.network.route(bench.now, PEER_V4.into(), foreign), Err(RouteError::SourceNotLocal));
    let mixed = Some(IpAddr::V6(OUR_V6));
    assert_eq!(bench.network.route(bench.now, PEER_V4.into(), mixed), Err(RouteError::SourceNotLocal));
    assert_eq!(bench.network.route(bench.now, OUR_V4.into(), None), Err(RouteError::OwnAddress));
}

#[test]
fn truncated_and_foreign_arp_is_dropped() {
    let mut bench = NetworkFixture::new();
    let good = arp_request(PEER_V4, PEER_MAC, OUR_V4);
    for len in 0..good.len() {
        bench.parse(&good[..len]);
    }
    assert_eq!(bench.network.stats().rx_dropped, good.len() as u64);
    assert!(matches!(bench.input(&good), InputResult::Handled));
}
