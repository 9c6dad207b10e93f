use crate::device::Capabilities;
use crate::icmp::error::IcmpErrorKind;
use crate::ip::testbench::*;
use crate::ip::{InputResult, NetworkConfig, ParsedFrame, RouteError};
use crate::link::{AddressState, LinkConfig};
use crate::steering::Steering;
use crate::time::Instant;
use crate::wire::ethernet::EtherType;
use crate::wire::ndp::{self, NdpMessage, PrefixInfo, RouterAdvertisement, solicited_node};
use crate::wire::{MacAddr, icmpv6, ipv6, mld, protocol};
use core::net::{IpAddr, Ipv6Addr};
use core::time::Duration;

const SECOND: Duration = Duration::from_secs(1);
const OTHER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 9]);
const ROUTER_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 0xfe]);
const ROUTER: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0xfe);
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
const FAR: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xffff, 0, 0, 0, 0, 1);

/// Returns the link-local address formed from the device's MAC address.
fn link_local() -> Ipv6Addr {
    "fe80::ff:fe00:1".parse().unwrap()
}

fn slaac(prefix: u16) -> Ipv6Addr {
    Ipv6Addr::new(0x2001, 0xdb8, prefix, 0, 0, 0xff, 0xfe00, 1)
}

fn ndp_frame(src: Ipv6Addr, dst: Ipv6Addr, message: &NdpMessage) -> Vec<u8> {
    ndp_frame_with_hop_limit(src, dst, 255, message)
}

fn ndp_frame_with_hop_limit(src: Ipv6Addr, dst: Ipv6Addr, hop_limit: u8, message: &NdpMessage) -> Vec<u8> {
    let mut out = vec![0; ndp::MESSAGE_LEN_MAX];
    let len = message.emit(src, dst, &mut out);
    let packet = ipv6_packet(src, dst, protocol::ICMPV6, hop_limit, &out[..len]);
    let mac = if dst.is_multicast() { MacAddr::from_ipv6_multicast(dst) } else { OUR_MAC };
    frame_to(mac, None, EtherType::IPV6, &packet)
}

fn advertisement(target: Ipv6Addr, mac: MacAddr) -> NdpMessage {
    NdpMessage::NeighbourAdvertisement {
        target,
        router: false,
        solicited: true,
        overrides: true,
        target_mac: Some(mac),
    }
}

fn solicitation(target: Ipv6Addr, source_mac: Option<MacAddr>) -> NdpMessage {
    NdpMessage::NeighbourSolicitation { target, source_mac, nonce: None }
}

/// Parses a transmitted neighbour discovery message. Returns its destination MAC, source and destination
/// addresses, and the message.
#[track_caller]
fn ndp_of(frame: &[u8]) -> (MacAddr, Ipv6Addr, Ipv6Addr, NdpMessage) {
    let (ethernet, packet) = as_received(frame);
    let header = ipv6::Header::parse(packet).unwrap();
    let payload = header.payload(packet);
    assert!(icmpv6::Message::parse(payload, header.src, header.dst).is_ok(), "checksum");
    let message = NdpMessage::parse(payload, header.src, header.dst, header.hop_limit).unwrap();
    (ethernet.dst, header.src, header.dst, message)
}

/// Takes the transmitted neighbour discovery messages.
fn sent_ndp(fixture: &NetworkFixture) -> Vec<(MacAddr, Ipv6Addr, Ipv6Addr, NdpMessage)> {
    let frames = fixture.sent();
    let is_ndp = |frame: &&Vec<u8>| frame[20] == protocol::ICMPV6;
    frames.iter().filter(is_ndp).map(|frame| ndp_of(frame)).collect()
}

fn ra_fixture() -> NetworkFixture {
    let link = LinkConfig { addresses: vec![], accept_ra: true, ..link_config() };
    NetworkFixture::with(network_config(), &link, CAPABILITIES)
}

fn router() -> RouterAdvertisement {
    RouterAdvertisement {
        router_lifetime_s: 1800,
        source_mac: Some(ROUTER_MAC),
        ..RouterAdvertisement::default()
    }
}

fn prefix(number: u16, valid: u32, preferred: u32) -> PrefixInfo {
    PrefixInfo {
        prefix: Ipv6Addr::new(0x2001, 0xdb8, number, 0, 0, 0, 0, 0),
        prefix_len: 64,
        on_link: true,
        autonomous: true,
        valid_lifetime_s: valid,
        preferred_lifetime_s: preferred,
    }
}

fn receive_ra(fixture: &mut NetworkFixture, advertisement: RouterAdvertisement) {
    let message = NdpMessage::RouterAdvertisement(advertisement);
    fixture.input(&ndp_frame(ROUTER, ALL_NODES, &message));
}

fn with_prefix(info: PrefixInfo) -> RouterAdvertisement {
    let mut advertisement = router();
    advertisement.prefixes.push(info);
    advertisement
}

#[test]
fn solicitation_is_answered_and_creates_a_neighbour() {
    let mut fixture = NetworkFixture::new();
    fixture.input(&ndp_frame(PEER_V6, solicited_node(OUR_V6), &solicitation(OUR_V6, Some(PEER_MAC))));
    let (mac, src, dst, message) = ndp_of(&fixture.sent_one());
    assert_eq!((mac, src, dst), (PEER_MAC, OUR_V6, PEER_V6));
    assert_eq!(message, advertisement(OUR_V6, OUR_MAC));
    let route = fixture.route(PEER_V6);
    fixture.send_tcp(&route, PEER_V6, &segment(0)).unwrap();
    assert_eq!(as_received(&fixture.sent_one()).0.dst, PEER_MAC);
}

#[test]
fn solicitations_for_others_are_not_answered() {
    let mut fixture = NetworkFixture::new();
    // Another address whose solicited-node group is that of a local address.
    let neighbour: Ipv6Addr = "2001:db8:7::1".parse().unwrap();
    assert_eq!(solicited_node(neighbour), solicited_node(OUR_V6));
    fixture.input(&ndp_frame(PEER_V6, solicited_node(OUR_V6), &solicitation(neighbour, Some(PEER_MAC))));
    assert_eq!(fixture.sent().len(), 0);
    assert_eq!(fixture.network.stats().neighbours_created, 0);
}

#[test]
fn advertisement_releases_every_pending_packet() {
    let mut fixture = NetworkFixture::new();
    let route = fixture.route(PEER_V6);
    assert_eq!(route.src, IpAddr::V6(OUR_V6));
    for payload in [1, 2, 3] {
        fixture.send_tcp(&route, PEER_V6, &segment(payload)).unwrap();
    }
    let (mac, src, dst, message) = ndp_of(&fixture.sent_one());
    assert_eq!(mac, MacAddr::from_ipv6_multicast(solicited_node(PEER_V6)));
    assert_eq!((src, dst), (OUR_V6, solicited_node(PEER_V6)));
    assert_eq!(message, solicitation(PEER_V6, Some(OUR_MAC)));
    // An advertisement without a MAC address is of no use.
    let nothing = NdpMessage::NeighbourAdvertisement {
        target: PEER_V6,
        router: false,
        solicited: true,
        overrides: true,
        target_mac: None,
    };
    fixture.input(&ndp_frame(PEER_V6, OUR_V6, &nothing));
    assert_eq!(fixture.sent().len(), 0);
    fixture.input(&ndp_frame(PEER_V6, OUR_V6, &advertisement(PEER_V6, PEER_MAC)));
    let lens: Vec<_> = fixture.sent().iter().map(|frame| frame.len() - 14 - 40 - 20).collect();
    assert_eq!(lens, [1, 2, 3]);
}

#[test]
fn failed_resolution_reports_every_packet() {
    let mut fixture = NetworkFixture::new();
    let route = fixture.route(PEER_V6);
    fixture.send_tcp(&route, PEER_V6, &segment(1)).unwrap();
    fixture.send_tcp(&route, PEER_V6, &segment(1)).unwrap();
    fixture.advance(3 * SECOND);
    assert_eq!(fixture.sent().len(), 3);
    for _ in 0..2 {
        let error = fixture.network.next_error().unwrap();
        assert_eq!((error.kind, error.remote.ip()), (IcmpErrorKind::HostUnreachable, PEER_V6.into()));
        assert_eq!(error.seq, Some(0x0102_0304));
    }
}

#[test]
fn messages_from_beyond_the_link_are_ignored() {
    let mut fixture = NetworkFixture::new();
    fixture.input(&ndp_frame_with_hop_limit(PEER_V6, OUR_V6, 254, &solicitation(OUR_V6, Some(PEER_MAC))));
    fixture.input(&ndp_frame_with_hop_limit(PEER_V6, OUR_V6, 64, &advertisement(PEER_V6, PEER_MAC)));
    assert_eq!(fixture.sent().len(), 0);
    assert_eq!(fixture.network.stats().ndp_invalid, 2);
}

#[test]
fn tentative_address_becomes_valid_without_objection() {
    let config = NetworkConfig::default();
    let mut network = NetworkFixture::with(
        config.clone(),
        &LinkConfig { addresses: vec![], ..link_config() },
        CAPABILITIES,
    );
    let link = LinkConfig { name: "second".into(), vlan: Some(3), ..link_config() };
    let id = network.network.add_link(network.port, &link).unwrap();
    let states = |fixture: &NetworkFixture| -> Vec<AddressState> {
        fixture.network.addresses(id).iter().skip(1).map(|known| known.state).collect()
    };
    assert_eq!(network.network.addresses(id)[2].address, IpAddr::V6(link_local()));
    let tentative = AddressState::Tentative { probes: 0 };
    assert_eq!(states(&network), [tentative, tentative]);
    let route = network.network.route(network.now, PEER_V6.into(), None);
    assert_eq!(route, Err(RouteError::NetUnreachable), "a tentative address is not a source address");
    let route = network.network.route(network.now, PEER_V6.into(), Some(OUR_V6.into()));
    assert_eq!(route, Err(RouteError::SourceNotLocal));
    // Solicitations for it are not answered either.
    let bytes = ndp_frame(PEER_V6, solicited_node(OUR_V6), &solicitation(OUR_V6, Some(PEER_MAC)));
    let bytes = frame_to(
        MacAddr::from_ipv6_multicast(solicited_node(OUR_V6)),
        Some(3),
        EtherType::IPV6,
        &bytes[14..],
    );
    network.input(&bytes);
    assert_eq!(network.sent().len(), 0);
    network.advance(2 * SECOND);
    assert_eq!(states(&network), [AddressState::Valid, AddressState::Valid]);
    let asked: Vec<_> = network
        .sent()
        .iter()
        .filter(|frame| frame[24] == protocol::ICMPV6)
        .map(|frame| ndp_of(frame))
        .map(|(_, src, dst, message)| match message {
            NdpMessage::NeighbourSolicitation { target, source_mac: None, nonce: Some(_) } => {
                (src, dst, target)
            }
            message => panic!("{message:?}"),
        })
        .collect();
    assert_eq!(asked.len(), 2);
    for (src, dst, target) in asked {
        assert_eq!((src, dst), (Ipv6Addr::UNSPECIFIED, solicited_node(target)));
    }
    assert!(network.network.route(network.now, PEER_V6.into(), None).is_ok());
}

/// Returns a link with tentative addresses, and the nonce of its solicitation for `OUR_V6`.
fn checking() -> (NetworkFixture, [u8; 6]) {
    let config = NetworkConfig { dad_transmits: 5, ..NetworkConfig::default() };
    let mut fixture = NetworkFixture::with(config, &link_config(), CAPABILITIES);
    for _ in 0..3 {
        fixture.advance(SECOND);
        for (_, _, _, message) in sent_ndp(&fixture) {
            if let NdpMessage::NeighbourSolicitation { target: OUR_V6, nonce: Some(nonce), .. } = message {
                return (fixture, nonce);
            }
        }
    }
    panic!("no solicitation was sent");
}

#[test]
fn defended_address_becomes_duplicate() {
    let (mut fixture, _) = checking();
    let defence = NdpMessage::NeighbourAdvertisement {
        target: OUR_V6,
        router: false,
        solicited: false,
        overrides: true,
        target_mac: Some(OTHER_MAC),
    };
    fixture.input(&ndp_frame(OUR_V6, ALL_NODES, &defence));
    fixture.advance(20 * SECOND);
    assert_eq!(fixture.network.addresses(fixture.link)[1].state, AddressState::Duplicate);
    assert_eq!(fixture.network.stats().dad_duplicates, 1);
    assert!(!fixture.network.is_local(OUR_V6.into()));
    assert!(fixture.network.is_local(link_local().into()), "other addresses are not affected");
}

#[test]
fn simultaneous_dad_makes_the_address_duplicate() {
    let (mut fixture, nonce) = checking();
    let question = |nonce| NdpMessage::NeighbourSolicitation { target: OUR_V6, source_mac: None, nonce };
    let group = solicited_node(OUR_V6);
    // The host's own solicitation, looped back (RFC 7527).
    fixture.input(&ndp_frame(Ipv6Addr::UNSPECIFIED, group, &question(Some(nonce))));
    assert_eq!(fixture.network.stats().dad_duplicates, 0);
    fixture.input(&ndp_frame(Ipv6Addr::UNSPECIFIED, group, &question(Some([9; 6]))));
    assert_eq!(fixture.network.addresses(fixture.link)[1].state, AddressState::Duplicate);
}

#[test]
fn dad_waits_until_the_solicitation_was_sent() {
    let config = NetworkConfig { dad_transmits: 2, ..NetworkConfig::default() };
    let mut fixture =
        NetworkFixture::with(config, &LinkConfig { addresses: vec![], ..link_config() }, CAPABILITIES);
    fixture.set_capacity(0);
    let link = LinkConfig { name: "second".into(), vlan: Some(3), ..link_config() };
    let id = fixture.network.add_link(fixture.port, &link).unwrap();
    fixture.advance(20 * SECOND);
    let states = |fixture: &NetworkFixture| -> Vec<AddressState> {
        fixture.network.addresses(id).iter().skip(1).map(|known| known.state).collect()
    };
    assert_eq!(states(&fixture), [AddressState::Tentative { probes: 0 }; 2]);
    let stats = fixture.network.stats().clone();
    assert_eq!(stats.ndp_solicitations_out, 0);
    assert!((300..450).contains(&stats.tx_control_dropped), "each 100 ms: {}", stats.tx_control_dropped);
    fixture.set_capacity(usize::MAX);
    fixture.advance(Duration::from_millis(2_200));
    assert_eq!(states(&fixture), [AddressState::Valid; 2]);
    assert_eq!(fixture.network.stats().ndp_solicitations_out, 4);
}

#[test]
fn solicitation_is_retried_while_device_is_full() {
    let mut fixture = NetworkFixture::new();
    let route = fixture.route(PEER_V6);
    fixture.set_capacity(0);
    fixture.send_tcp(&route, PEER_V6, &segment(5)).unwrap();
    assert_eq!(fixture.network.stats().ndp_solicitations_out, 0);
    fixture.set_capacity(usize::MAX);
    fixture.advance(Duration::from_millis(1));
    let (_, _, dst, message) = ndp_of(&fixture.sent_one());
    assert_eq!((dst, message), (solicited_node(PEER_V6), solicitation(PEER_V6, Some(OUR_MAC))));
    assert_eq!(fixture.network.stats().ndp_solicitations_out, 1);
}

#[test]
fn full_device_does_not_consume_router_solicitations() {
    let link = LinkConfig {
        name: "second".into(),
        vlan: Some(3),
        addresses: vec![],
        accept_ra: true,
        ..link_config()
    };
    let mut fixture = NetworkFixture::new();
    fixture.set_capacity(0);
    fixture.network.add_link(fixture.port, &link).unwrap();
    fixture.advance(10 * SECOND);
    assert_eq!(fixture.network.stats().ndp_router_solicitations_out, 0);
    fixture.set_capacity(usize::MAX);
    fixture.advance(Duration::from_millis(8_100));
    assert_eq!(fixture.network.stats().ndp_router_solicitations_out, 3);
    fixture.advance(60 * SECOND);
    assert_eq!(fixture.network.stats().ndp_router_solicitations_out, 3);
}

#[test]
fn own_address_is_defended_to_all_nodes() {
    let mut fixture = NetworkFixture::new();
    let question =
        NdpMessage::NeighbourSolicitation { target: OUR_V6, source_mac: None, nonce: Some([1; 6]) };
    fixture.input(&ndp_frame(Ipv6Addr::UNSPECIFIED, solicited_node(OUR_V6), &question));
    let (_, src, dst, message) = ndp_of(&fixture.sent_one());
    assert_eq!((src, dst), (OUR_V6, ALL_NODES));
    assert!(matches!(message, NdpMessage::NeighbourAdvertisement { target: OUR_V6, solicited: false, .. }));
}

#[test]
fn address_conflict_is_counted() {
    let mut fixture = NetworkFixture::new();
    fixture.input(&ndp_frame(PEER_V6, OUR_V6, &advertisement(OUR_V6, OTHER_MAC)));
    assert_eq!(fixture.network.stats().ndp_conflicts, 1);
    assert!(fixture.network.is_local(OUR_V6.into()));
}

#[test]
fn three_router_solicitations_from_the_link_local_address() {
    let link = LinkConfig { addresses: vec![], accept_ra: true, ..link_config() };
    let mut fixture =
        NetworkFixture::with(NetworkConfig { dad_transmits: 0, ..network_config() }, &link, CAPABILITIES);
    // The first one was sent while the fixture was set up.
    assert_eq!(fixture.network.stats().ndp_router_solicitations_out, 1);
    fixture.advance(60 * SECOND);
    let sent = sent_ndp(&fixture);
    assert_eq!(sent.len(), 2);
    for (_, src, dst, message) in sent {
        assert_eq!((src, dst), (link_local(), "ff02::2".parse().unwrap()));
        assert_eq!(message, NdpMessage::RouterSolicitation { source_mac: Some(OUR_MAC) });
    }
    let mut fixture = ra_fixture();
    receive_ra(&mut fixture, router());
    fixture.advance(60 * SECOND);
    assert_eq!(sent_ndp(&fixture).len(), 0, "a router has answered");
}

#[test]
fn advertisement_configures_address_route_and_link() {
    let mut fixture = ra_fixture();
    let mut advertisement = with_prefix(prefix(1, 3600, 1800));
    advertisement.hop_limit = 50;
    advertisement.mtu = Some(1400);
    receive_ra(&mut fixture, advertisement);
    assert!(fixture.network.is_local(slaac(1).into()));
    assert_eq!(fixture.network.hop_limit(fixture.link), 50);
    let route = fixture.route(FAR);
    assert_eq!((route.src, route.mtu), (slaac(1).into(), 1400));
    fixture.sent();
    fixture.send_tcp(&route, FAR, &segment(0)).unwrap();
    assert_eq!(as_received(&fixture.sent_one()).0.dst, ROUTER_MAC);
    // The prefix is on the link: the destination itself is solicited, not the router.
    let on_link = Ipv6Addr::new(0x2001, 0xdb8, 1, 0, 0, 0, 0, 9);
    let route = fixture.route(on_link);
    fixture.send_tcp(&route, on_link, &segment(0)).unwrap();
    assert!(
        matches!(ndp_of(&fixture.sent_one()).3, NdpMessage::NeighbourSolicitation { target, .. } if target == on_link)
    );
}

#[test]
fn advertisements_are_ignored_without_accept_ra() {
    let mut fixture = NetworkFixture::new();
    receive_ra(&mut fixture, with_prefix(prefix(1, 3600, 1800)));
    assert!(!fixture.network.is_local(slaac(1).into()));
    assert_eq!(fixture.network.route(fixture.now, FAR.into(), None), Err(RouteError::NetUnreachable));
}

/// The steering learns each address, and each address that expires, but is not told again for each route.
#[test]
fn steering_learns_changes_of_addresses_alone() {
    let mut fixture = ra_fixture();
    let mut steering = Steering::new(0, 2, &network_config());
    steering.set_device_shards([vec![1]]);
    fixture.network.set_steering(steering);
    let serves = |fixture: &NetworkFixture| fixture.network.serves(slaac(1).into());
    let place = |fixture: &NetworkFixture| fixture.network.steering().unwrap().place_of_addresses();
    assert!(serves(&fixture), "nobody has the address");
    receive_ra(&mut fixture, with_prefix(prefix(1, 3600, 1200)));
    assert!(!serves(&fixture));
    let told = place(&fixture);
    let hop = fixture.route(FAR).hop;
    for router_lifetime_s in [0, 1800, 0, 1800] {
        let mtu = Some(1300 + u32::from(router_lifetime_s) / 100);
        receive_ra(&mut fixture, RouterAdvertisement { router_lifetime_s, mtu, ..router() });
    }
    assert!(!fixture.network.hop_is_current(&hop), "the routes have changed");
    assert_eq!(place(&fixture), told);
    fixture.advance(3600 * SECOND);
    assert!(serves(&fixture), "the address is gone");
}

#[test]
fn advertised_state_expires_with_its_lifetime() {
    let mut fixture = ra_fixture();
    receive_ra(&mut fixture, with_prefix(prefix(1, 3600, 1200)));
    let hop = fixture.route(FAR).hop;
    fixture.advance(1799 * SECOND);
    assert!(fixture.network.hop_is_current(&hop));
    fixture.advance(SECOND);
    assert!(!fixture.network.hop_is_current(&hop), "the default router is gone");
    assert_eq!(fixture.network.route(fixture.now, FAR.into(), None), Err(RouteError::NetUnreachable));
    assert!(fixture.network.is_local(slaac(1).into()));
    fixture.advance(1799 * SECOND);
    assert!(fixture.network.is_local(slaac(1).into()));
    fixture.advance(SECOND);
    assert!(!fixture.network.is_local(slaac(1).into()), "the address is gone");
}

#[test]
fn deprecated_address_is_the_last_choice() {
    let mut fixture = ra_fixture();
    receive_ra(&mut fixture, with_prefix(prefix(0xffff, 86_400, 100)));
    fixture.advance(101 * SECOND);
    assert_eq!(fixture.route(FAR).src, IpAddr::V6(slaac(0xffff)));
    receive_ra(&mut fixture, with_prefix(prefix(2, 86_400, 3600)));
    assert_eq!(
        fixture.route(FAR).src,
        IpAddr::V6(slaac(2)),
        "although the deprecated address matches better"
    );
}

#[test]
fn advertisement_cannot_expire_an_address_immediately() {
    let mut fixture = ra_fixture();
    receive_ra(&mut fixture, with_prefix(prefix(1, 86_400, 3600)));
    receive_ra(&mut fixture, with_prefix(prefix(1, 1, 1)));
    fixture.advance(Duration::from_secs(7199));
    assert!(fixture.network.is_local(slaac(1).into()));
    fixture.advance(SECOND);
    assert!(!fixture.network.is_local(slaac(1).into()), "two hours remain (RFC 4862 §5.5.3)");
}

#[test]
fn zero_lifetime_removes_the_default_router() {
    let mut fixture = ra_fixture();
    receive_ra(&mut fixture, with_prefix(prefix(1, 3600, 1800)));
    receive_ra(&mut fixture, RouterAdvertisement { router_lifetime_s: 0, ..router() });
    assert_eq!(fixture.network.route(fixture.now, FAR.into(), None), Err(RouteError::NetUnreachable));
    receive_ra(&mut fixture, router());
    assert!(fixture.network.route(fixture.now, FAR.into(), None).is_ok());
    // The router advertises itself as a host.
    fixture.input(&ndp_frame(ROUTER, link_local(), &advertisement(ROUTER, ROUTER_MAC)));
    assert_eq!(fixture.network.route(fixture.now, FAR.into(), None), Err(RouteError::NetUnreachable));
}

#[test]
fn unreachable_router_is_skipped() {
    let mut fixture = ra_fixture();
    let silent: Ipv6Addr = "fe80::1".parse().unwrap();
    let mut first = with_prefix(prefix(1, 3600, 1800));
    first.source_mac = None;
    fixture.input(&ndp_frame(silent, ALL_NODES, &NdpMessage::RouterAdvertisement(first)));
    receive_ra(&mut fixture, router());
    fixture.sent();
    let route = fixture.route(FAR);
    fixture.send_tcp(&route, FAR, &segment(0)).unwrap();
    assert!(
        matches!(ndp_of(&fixture.sent_one()).3, NdpMessage::NeighbourSolicitation { target, .. } if target == silent)
    );
    fixture.advance(3 * SECOND);
    assert!(fixture.network.next_error().is_some());
    fixture.sent();
    let route = fixture.route(FAR);
    fixture.send_tcp(&route, FAR, &segment(0)).unwrap();
    assert_eq!(as_received(&fixture.sent_one()).0.dst, ROUTER_MAC);
}

// limit: network.autoconf_addresses_max
// limit: network.autoconf_routes_max
#[test]
fn advertised_addresses_and_routes_are_limited() {
    let mut fixture = ra_fixture();
    for number in 0..100 {
        receive_ra(&mut fixture, with_prefix(prefix(number, 3600, 1800)));
    }
    let formed = fixture.network.addresses(fixture.link).iter().filter(|known| known.autoconfigured).count();
    assert_eq!(formed, 16);
    // 1 router and 15 prefixes.
    assert_eq!(fixture.network.stats().router_advertisement_limits, 84 + 85);
}

#[test]
fn invalid_prefixes_and_mtus_are_ignored() {
    let mut fixture = ra_fixture();
    let cases = [
        PrefixInfo { preferred_lifetime_s: 9, ..prefix(1, 8, 8) },
        PrefixInfo { prefix: "fe80::".parse().unwrap(), ..prefix(1, 8, 8) },
        PrefixInfo { prefix: "ff02::".parse().unwrap(), ..prefix(1, 8, 8) },
        PrefixInfo { prefix_len: 48, on_link: false, ..prefix(1, 8, 8) },
        PrefixInfo { on_link: false, ..prefix(1, 0, 0) },
    ];
    for info in cases {
        receive_ra(&mut fixture, with_prefix(info));
    }
    for mtu in [0, 1279, 1501, 65_536 + 1400] {
        receive_ra(&mut fixture, RouterAdvertisement { mtu: Some(mtu), ..router() });
    }
    assert_eq!(fixture.network.addresses(fixture.link).len(), 1);
    assert_eq!(fixture.network.link(fixture.link).mtu_v6, 1500);
}

#[test]
fn advertisement_does_not_override_configuration() {
    let link = LinkConfig { accept_ra: true, ..link_config() };
    let mut fixture = NetworkFixture::with(network_config(), &link, CAPABILITIES);
    receive_ra(&mut fixture, with_prefix(prefix(0, 0, 0)));
    receive_ra(&mut fixture, with_prefix(prefix(0, 10, 10)));
    fixture.advance(20 * SECOND);
    assert!(fixture.network.route(fixture.now, PEER_V6.into(), None).is_ok());
    assert!(fixture.network.is_local(OUR_V6.into()));
}

#[test]
fn groups_are_reported_twice_and_on_query() {
    let fixture = NetworkFixture::new();
    assert_eq!(fixture.network.stats().mld_reports_out, 2);
    let mut fixture = fixture;
    let mut query = vec![mld::QUERY, 0, 0, 0, 0x03, 0xe8, 0, 0];
    query.extend_from_slice(&[0; 20]);
    let packet = |query: &[u8]| {
        let mut query = query.to_vec();
        let sum = crate::wire::checksum::pseudo_v6(ROUTER, ALL_NODES, protocol::ICMPV6, query.len())
            .add(crate::wire::checksum::Sum::of(&query));
        query[2..4].copy_from_slice(&sum.finish().to_be_bytes());
        let packet = ipv6_packet(ROUTER, ALL_NODES, protocol::ICMPV6, 1, &query);
        frame_to(MacAddr::from_ipv6_multicast(ALL_NODES), None, EtherType::IPV6, &packet)
    };
    fixture.input(&packet(&query));
    fixture.advance(SECOND);
    let frame = fixture.sent_one();
    let (ethernet, packet6) = as_received(&frame);
    let header = ipv6::Header::parse(packet6).unwrap();
    assert_eq!(ethernet.dst, MacAddr::from_ipv6_multicast(mld::ALL_MLDV2_ROUTERS));
    assert_eq!((header.src, header.dst, header.hop_limit), (link_local(), mld::ALL_MLDV2_ROUTERS, 1));
    let chain = ipv6::walk_header_chain(packet6, &header).unwrap();
    assert_eq!((chain.protocol, chain.router_alert), (protocol::ICMPV6, Some(0)));
    let report = &packet6[chain.offset..];
    assert!(icmpv6::Message::parse(report, header.src, header.dst).is_ok());
    assert_eq!(report.len(), 28, "both addresses have one group");
    // A query about a group that this host has not joined.
    query[8..24].copy_from_slice(&solicited_node(FAR).octets());
    query[23] = 0x77;
    fixture.input(&packet(&query));
    fixture.advance(SECOND);
    assert_eq!(fixture.sent().len(), 0);
}

#[test]
fn link_below_1280_bytes_disables_ipv6() {
    let link = LinkConfig { addresses: vec![(OUR_V4.into(), 24)], accept_ra: true, ..link_config() };
    let bytes = ndp_frame(PEER_V6, solicited_node(link_local()), &solicitation(link_local(), Some(PEER_MAC)));
    for (mtu, has_ipv6) in [(1280, true), (1279, false)] {
        let capabilities = Capabilities { mtu, ..CAPABILITIES };
        let mut fixture = NetworkFixture::with(network_config(), &link, capabilities);
        assert_eq!(matches!(fixture.parse(&bytes), ParsedFrame::Drop(_)), !has_ipv6, "{mtu}");
        assert_eq!(fixture.network.is_local(link_local().into()), has_ipv6, "{mtu}");
    }
}

#[test]
fn link_local_peers_are_reached_on_their_link() {
    let mut fixture = NetworkFixture::new();
    let peer: Ipv6Addr = "fe80::2".parse().unwrap();
    let route = fixture.route(peer);
    assert_eq!(route.src, IpAddr::V6(link_local()));
    fixture.send_tcp(&route, peer, &segment(0)).unwrap();
    let (_, src, _, message) = ndp_of(&fixture.sent_one());
    assert_eq!(src, link_local());
    assert_eq!(message, solicitation(peer, Some(OUR_MAC)));
}

#[test]
fn start_sequence_is_determined_by_the_seed() {
    let run = || {
        let link = LinkConfig { accept_ra: true, ..link_config() };
        let mut fixture = NetworkFixture::with(NetworkConfig::default(), &link, CAPABILITIES);
        let mut times = Vec::new();
        for _ in 0..50 {
            let Some(at) = fixture.network.next_deadline() else { break };
            fixture.now = at.max(Instant::ZERO);
            fixture.network.run_timers(at);
            times.push((at, fixture.sent()));
        }
        times
    };
    assert_eq!(run(), run());
}

#[test]
fn fragmented_neighbour_discovery_is_ignored() {
    let mut fixture = NetworkFixture::new();
    let mut out = vec![0; ndp::MESSAGE_LEN_MAX];
    let len = solicitation(OUR_V6, Some(PEER_MAC)).emit(PEER_V6, OUR_V6, &mut out);
    let fragment = |offset: usize, end: usize| {
        let field = (offset as u16 | u16::from(end < len)).to_be_bytes();
        let payload = [&[protocol::ICMPV6, 0, field[0], field[1], 0, 0, 0, 9], &out[offset..end]].concat();
        frame(EtherType::IPV6, &ipv6_packet(PEER_V6, OUR_V6, protocol::FRAGMENT, 255, &payload))
    };
    fixture.input(&fragment(0, 16));
    let InputResult::Reassembled(buffer) = fixture.input(&fragment(16, len)) else { panic!() };
    let ParsedFrame::Other(other) = fixture.network.parse_reassembled(&buffer) else { panic!() };
    fixture.network.input(fixture.now, &other);
    assert_eq!(fixture.sent().len(), 0);
    assert_eq!(fixture.network.stats().ndp_invalid, 1);
}
