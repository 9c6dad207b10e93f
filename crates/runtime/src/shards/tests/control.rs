//! Neighbours, addresses, routes and path MTUs that one shard learns are known to all, and one shard speaks
//! for all on the link.

use super::{RecordingHandler, START, receive, recording_fixture, send, shards_and_device, stack_config};
use crate::shard::Shard;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::time::Duration;
use ginnel_devices::memory::RssMode;
use ginnel_stack::handle::LinkId;
use ginnel_stack::link::AddressState;
use ginnel_stack::link::neighbour::NeighbourState;
use ginnel_stack::options::{ConnectOptions, ListenOptions};
use ginnel_stack::time::Instant;
use ginnel_stack::wire::ethernet::{EtherType, Header};
use ginnel_stack::wire::ndp::{NdpMessage, PrefixInfo, RouterAdvertisement};
use ginnel_stack::wire::{MacAddr, arp, icmpv4, ipv4, ipv6, protocol};

/// MAC addresses of the shards' device and of the other end.
pub(super) const OUR_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);
pub(super) const WIRE_MAC: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);

pub(super) fn ethernet(dst: MacAddr, ethertype: EtherType, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; 14];
    Header::new(dst, WIRE_MAC, None, ethertype).emit(&mut frame);
    frame.extend(payload);
    frame
}

pub(super) fn arp(
    operation: arp::ArpOperation,
    sender: Ipv4Addr,
    sender_mac: MacAddr,
    dst: MacAddr,
) -> Vec<u8> {
    let packet = arp::ArpPacket {
        operation,
        sender_mac,
        sender_ip: sender,
        target_mac: MacAddr::ZERO,
        target_ip: Ipv4Addr::new(10, 0, 0, 1),
    };
    let mut bytes = [0; arp::ArpPacket::LEN];
    packet.emit(&mut bytes);
    ethernet(dst, EtherType::ARP, &bytes)
}

/// Runs several turns of each shard at `now`.
pub(super) fn turn(shards: &mut [Shard<RecordingHandler>], now: Instant) {
    for _ in 0..4 {
        for shard in shards.iter_mut() {
            shard.poll_once(now).unwrap();
        }
    }
}

/// Runs the shards until `end`.
fn pass(shards: &mut [Shard<RecordingHandler>], from: Instant, to: Instant) {
    let mut now = from;
    while now < to {
        turn(shards, now);
        let next = shards.iter_mut().filter_map(|shard| shard.poll_once(now).unwrap().next_deadline).min();
        now = next.unwrap_or(to).max(now + Duration::from_micros(1)).min(to);
    }
    turn(shards, to);
}

/// Returns a shard's entry of a neighbour.
pub(super) fn neighbour(shard: &Shard<RecordingHandler>, address: &str) -> Option<(MacAddr, NeighbourState)> {
    let address: IpAddr = address.parse().unwrap();
    let known =
        shard.core.stack.local().unwrap().network().neighbours().find(|known| known.address == address)?;
    Some((known.mac?, known.state))
}

#[test]
fn neighbour_resolved_by_one_shard_serves_all() {
    for spread in [RssMode::Fixed(0), RssMode::Fixed(2), RssMode::RoundRobin] {
        let mut fixture = recording_fixture(4, spread);
        let requests_before = fixture.sum_network(|n| n.arp_requests_out);
        for shard in [3, 1, 2, 0] {
            let to = "10.0.0.2:9".parse().unwrap();
            fixture.with_shard(shard, |_, cx| cx.connect(to, ConnectOptions::default()).map(|_| ())).unwrap();
            fixture.advance(Duration::from_millis(20));
        }
        assert_eq!(fixture.sum_network(|n| n.arp_requests_out) - requests_before, 1, "{spread:?}");
        for shard in &fixture.shards {
            let known = neighbour(shard, "10.0.0.2").unwrap();
            assert_eq!(known, (WIRE_MAC, NeighbourState::Reachable), "{spread:?}");
            assert_eq!(shard.handler().closed.len(), 1, "the peer must refuse the connection");
        }
    }
}

#[test]
fn one_shard_speaks_for_all_on_the_link() {
    for count in [1, 4] {
        let mut fixture = recording_fixture(count, RssMode::RoundRobin);
        fixture.advance(Duration::from_secs(20));
        // Addresses were probed once, routers solicited three times, and groups reported as by one host.
        assert_eq!(fixture.sum_network(|n| n.ndp_solicitations_out), 2, "{count} shards");
        assert_eq!(fixture.sum_network(|n| n.ndp_router_solicitations_out), 3, "{count} shards");
        let reports = fixture.sum_network(|n| n.mld_reports_out);
        assert!((1..=4).contains(&reports), "{count} shards: {reports}");
        // The client solicits once per family, and gets one answer.
        for to in ["10.0.0.1:9", "[fd00::1]:9"] {
            let to = to.parse().unwrap();
            fixture.client.with(fixture.now, |_, cx| cx.connect(to, ConnectOptions::default())).unwrap();
        }
        fixture.advance(Duration::from_millis(100));
        assert_eq!(fixture.client.handler().closed.len(), 2);
        assert_eq!(fixture.sum_network(|n| n.arp_replies_out), 1, "{count} shards");
        assert_eq!(fixture.sum_network(|n| n.ndp_advertisements_out), 1, "{count} shards");
        for shard in &fixture.shards {
            assert!(neighbour(shard, "10.0.0.2").is_some() && neighbour(shard, "fd00::2").is_some());
        }
    }
}

#[test]
fn static_neighbours_never_expire_on_any_shard() {
    let mut config = stack_config(3);
    config.links[0].neighbours = vec![crate::config::NeighbourConfig {
        address: "10.0.0.66".parse().unwrap(),
        mac: crate::config::Mac([2; 6]),
    }];
    let (mut shards, mut wire) =
        shards_and_device(config, RssMode::RoundRobin, |_| RecordingHandler::default());
    let day = START + Duration::from_secs(86_400);
    pass(&mut shards, START, day);
    receive(&mut wire);
    // A claim of a static neighbour's address is not believed.
    send(
        &mut wire,
        &arp(arp::ArpOperation::Request, Ipv4Addr::new(10, 0, 0, 66), WIRE_MAC, MacAddr::BROADCAST),
    );
    turn(&mut shards, day);
    receive(&mut wire);
    for shard in &mut shards {
        assert_eq!(neighbour(shard, "10.0.0.66"), Some((MacAddr([2; 6]), NeighbourState::Permanent)));
        let to = "10.0.0.66:9".parse().unwrap();
        shard.with(day, |_, cx| cx.connect(to, ConnectOptions::default())).unwrap();
    }
    turn(&mut shards, day);
    let sent = receive(&mut wire);
    assert_eq!(sent.len(), 3, "a SYN each, and no ARP request");
    assert!(sent.iter().all(|frame| frame[..6] == [2; 6] && frame[23] == protocol::TCP));
}

/// Returns an IPv6 packet with a neighbour discovery message.
fn discovery(src: Ipv6Addr, dst: Ipv6Addr, message: &NdpMessage) -> Vec<u8> {
    let mut packet = vec![0; 1280];
    let len = message.emit(src, dst, &mut packet[40..]);
    let header = ipv6::Header {
        dscp: 0,
        ecn: 0,
        flow_label: 0,
        payload_len: len as u16,
        next_header: protocol::ICMPV6,
        hop_limit: 255,
        src,
        dst,
    };
    header.emit(&mut packet);
    packet.truncate(40 + len);
    ethernet(MacAddr::from_ipv6_multicast(dst), EtherType::IPV6, &packet)
}

#[test]
fn router_advertisement_reaches_all_shards() {
    let (mut shards, mut wire) =
        shards_and_device(stack_config(3), RssMode::Fixed(1), |_| RecordingHandler::default());
    let now = START + Duration::from_secs(5);
    pass(&mut shards, START, now);
    let router: Ipv6Addr = "fe80::99".parse().unwrap();
    let prefix = PrefixInfo {
        prefix: "2001:db8::".parse().unwrap(),
        prefix_len: 64,
        on_link: true,
        autonomous: true,
        valid_lifetime_s: 3600,
        preferred_lifetime_s: 3600,
    };
    let advertisement = RouterAdvertisement {
        router_lifetime_s: 1800,
        source_mac: Some(WIRE_MAC),
        prefixes: [prefix].into_iter().collect(),
        ..RouterAdvertisement::default()
    };
    let message = NdpMessage::RouterAdvertisement(advertisement);
    send(&mut wire, &discovery(router, "ff02::1".parse().unwrap(), &message));
    turn(&mut shards, now);
    let states = |shards: &[Shard<RecordingHandler>]| -> Vec<_> {
        let of = |shard: &Shard<RecordingHandler>| {
            let addresses = shard.core.stack.local().unwrap().network().addresses(LinkId(0));
            addresses.iter().find(|known| known.autoconfigured).map(|known| (known.address, known.state))
        };
        shards.iter().map(of).collect()
    };
    let formed = states(&shards)[0].unwrap().0;
    assert_eq!(states(&shards), [Some((formed, AddressState::Tentative { probes: 0 })); 3]);
    receive(&mut wire);
    let later = now + Duration::from_secs(3);
    pass(&mut shards, now, later);
    assert_eq!(states(&shards), [Some((formed, AddressState::Valid)); 3]);
    // Every shard has the route, and its router.
    for shard in &mut shards {
        let route = shard
            .core
            .stack
            .local_mut()
            .unwrap()
            .network_mut()
            .route(later, "2001:4860::1".parse().unwrap(), None)
            .unwrap();
        assert_eq!(route.src, formed);
        assert_eq!(neighbour(shard, "fe80::99").map(|(mac, _)| mac), Some(WIRE_MAC));
    }
}

#[test]
fn duplicate_address_is_used_by_no_shard() {
    let (mut shards, mut wire) =
        shards_and_device(stack_config(3), RssMode::Fixed(2), |_| RecordingHandler::default());
    let own_address: Ipv6Addr = "fd00::1".parse().unwrap();
    let taken = NdpMessage::NeighbourAdvertisement {
        target: own_address,
        router: false,
        solicited: false,
        overrides: true,
        target_mac: Some(WIRE_MAC),
    };
    send(&mut wire, &discovery(own_address, "ff02::1".parse().unwrap(), &taken));
    pass(&mut shards, START, START + Duration::from_secs(5));
    for shard in &shards {
        let addresses = shard.core.stack.local().unwrap().network().addresses(LinkId(0));
        let known = addresses.iter().find(|known| known.address == IpAddr::V6(own_address)).unwrap();
        assert_eq!(known.state, AddressState::Duplicate);
        assert!(!shard.core.stack.local().unwrap().network().is_local(own_address.into()));
        assert!(shard.handler().started, "the handler must start with the other addresses");
    }
}

/// Returns an ICMP "fragmentation needed" error of a router about a packet of the shards.
fn too_big(quote: &[u8], mtu: u16) -> Vec<u8> {
    let message =
        icmpv4::Message::Unreachable { code: icmpv4::unreachable::FRAGMENTATION_NEEDED, mtu, quote };
    let len = 8 + quote.len();
    let mut packet = vec![0; 20 + len];
    message.emit(&mut packet[20..]);
    let header = ipv4::Header {
        dscp: 0,
        ecn: 0,
        ident: 0,
        dont_fragment: false,
        more_fragments: false,
        fragment_offset: 0,
        ttl: 64,
        protocol: protocol::ICMP,
        src: Ipv4Addr::new(10, 0, 0, 254),
        dst: Ipv4Addr::new(10, 0, 0, 1),
        header_len: 20,
        total_len: (20 + len) as u16,
    };
    header.emit(&mut packet);
    ethernet(OUR_MAC, EtherType::IPV4, &packet)
}

#[test]
fn icmp_error_reaches_its_shard_and_mtu_all() {
    for connecting in 0..3 {
        // All frames arrive at the first shard.
        let (mut shards, mut wire) =
            shards_and_device(stack_config(3), RssMode::Fixed(0), |_| RecordingHandler::default());
        let now = START + Duration::from_secs(5);
        pass(&mut shards, START, now);
        let peer = Ipv4Addr::new(10, 0, 0, 9);
        send(&mut wire, &arp(arp::ArpOperation::Request, peer, WIRE_MAC, MacAddr::BROADCAST));
        turn(&mut shards, now);
        receive(&mut wire);
        let to = SocketAddr::from((peer, 80));
        shards[connecting].with(now, |_, cx| cx.connect(to, ConnectOptions::default())).unwrap();
        turn(&mut shards, now);
        let syn = receive(&mut wire).into_iter().find(|frame| frame[12..14] == [8, 0]).unwrap();
        let before: Vec<u64> =
            shards.iter().map(|s| s.core.stack.local().unwrap().network().stats().icmp_errors_in).collect();
        send(&mut wire, &too_big(&syn[14..14 + 28], 1000));
        turn(&mut shards, now);
        for (index, shard) in shards.iter_mut().enumerate() {
            let network = shard.core.stack.local_mut().unwrap().network_mut();
            let seen = network.stats().icmp_errors_in - before[index];
            assert_eq!(
                seen,
                u64::from(index == connecting),
                "shard {index}, for a connection of shard {connecting}"
            );
            assert_eq!(network.route(now, peer.into(), None).unwrap().mtu, 1000, "shard {index}");
        }
    }
}

#[test]
fn icmp_error_without_connection_is_not_broadcast() {
    let (mut shards, mut wire) =
        shards_and_device(stack_config(2), RssMode::Fixed(0), |_| RecordingHandler::default());
    let now = START + Duration::from_secs(5);
    pass(&mut shards, START, now);
    shards[0].with(now, |_, cx| cx.listen("10.0.0.1:80".parse().unwrap(), ListenOptions::default())).unwrap();
    let broadcasts_before: u64 = shards.iter().map(|shard| shard.stats().broadcasts_sent).sum();
    let mut quote = [0; 28];
    quote[..10].copy_from_slice(&[0x45, 0, 5, 0xdc, 0, 0, 0x40, 0, 64, protocol::TCP]);
    quote[12..24].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 9, 0, 80, 0x13, 0x88]);
    for port in 0..20 {
        quote[23] = port;
        send(&mut wire, &too_big(&quote, 600));
    }
    turn(&mut shards, now);
    assert_eq!(shards.iter().map(|shard| shard.stats().broadcasts_sent).sum::<u64>(), broadcasts_before);
    for shard in &mut shards {
        let route = shard
            .core
            .stack
            .local_mut()
            .unwrap()
            .network_mut()
            .route(now, "10.0.0.9".parse().unwrap(), None)
            .unwrap();
        assert_eq!(route.mtu, 1500);
    }
}
