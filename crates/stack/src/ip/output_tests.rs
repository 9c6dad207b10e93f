//! Sending of packets: headers, checksums, super-frames, fragments and routes.

use super::*;
use crate::device::{Capabilities, RxChecksum, RxFrame};
use crate::handle::LinkId;
use crate::ip::testbench::*;
use crate::ip::{InputResult, ParsedFrame, Route, RouteConfig};
use crate::link::LinkConfig;
use crate::wire::MacAddr;
use crate::wire::ethernet::EtherType;
use core::net::Ipv4Addr;

fn tcp(src: IpAddr, dst: IpAddr) -> IpHeader {
    IpHeader {
        src,
        dst,
        protocol: protocol::TCP,
        tos: 0xba,
        hop_limit: 61,
        dont_fragment: true,
        flow_label: 0,
        label: Label::NONE,
    }
}

/// Returns a fixture with a resolved peer, and the route to it.
fn known_peer(capabilities: Capabilities) -> (NetworkFixture, Route) {
    let mut fixture = NetworkFixture::with(network_config(), &link_config(), capabilities);
    fixture.learn_v4(PEER_V4, PEER_MAC);
    let route = fixture.route(PEER_V4);
    (fixture, route)
}

/// Sends a segment; the sum of its payload may be given.
fn send(
    fixture: &mut NetworkFixture,
    route: &Route,
    payload_sum: Option<(usize, Sum)>,
    gso: Option<u16>,
    bytes: &[u8],
) {
    let header = tcp(route.src, PEER_V4.into());
    let mut packet = fixture.network.begin(fixture.now, &route.hop, &header, bytes.len() + 40).unwrap();
    assert_eq!(packet.l4().len(), bytes.len() + 40);
    packet.l4()[..bytes.len()].copy_from_slice(bytes);
    let sealed = packet.seal(bytes.len(), TxChecksum { offset: 16, payload_sum }, gso);
    fixture.network.commit(sealed);
}

/// Passes a frame to the peer's stack, which is a second instance of this network layer.
fn peer_parses(frame: &[u8], checksum: RxChecksum, check: impl FnOnce(ParsedFrame<'_>)) {
    let link = LinkConfig { addresses: vec![(PEER_V4.into(), 24), (PEER_V6.into(), 64)], ..link_config() };
    let capabilities = Capabilities { mac: PEER_MAC.0, ..CAPABILITIES };
    let peer = NetworkFixture::with(network_config(), &link, capabilities);
    check(peer.network.parse(peer.port, &RxFrame { checksum, ..RxFrame::new(frame) }));
}

#[test]
fn emits_requested_headers_and_correct_checksums() {
    let (mut fixture, route) = known_peer(CAPABILITIES);
    let bytes = segment(1001);
    send(&mut fixture, &route, None, None, &bytes);
    let frame = fixture.sent_one();
    assert_eq!(frame.len(), 14 + 20 + bytes.len());
    let header = ipv4::Header::parse(&frame[14..]).unwrap();
    assert_eq!((header.dscp, header.ecn, header.ttl), (0x2e, 2, 61));
    assert!(header.dont_fragment && header.ident == 0);
    peer_parses(&frame, RxChecksum::Unverified, |parsed| assert_eq!(tcp_of(parsed).bytes.len(), bytes.len()));
}

#[test]
fn known_payload_sum_yields_identical_frame() {
    let (mut fixture, route) = known_peer(CAPABILITIES);
    let bytes = segment(777);
    send(&mut fixture, &route, None, None, &bytes);
    let expected = fixture.sent_one();
    for start in [20, 21, 34] {
        send(&mut fixture, &route, Some((start, Sum::of(&bytes[start..]))), None, &bytes);
        assert_eq!(fixture.sent_one(), expected, "{start}");
    }
}

#[test]
fn checksum_offload_receives_pseudo_header_sum() {
    let (mut fixture, route) = known_peer(Capabilities { tx_checksum: true, ..CAPABILITIES });
    let bytes = segment(64);
    send(&mut fixture, &route, None, None, &bytes);
    let (frame, meta) = fixture.sent_with_meta().remove(0);
    assert_eq!(meta, TxMeta { partial_checksum: Some((34, 16)), ..TxMeta::NONE });
    let pseudo = pseudo_v4(OUR_V4, PEER_V4, protocol::TCP, bytes.len()).fold();
    assert_eq!(frame[50..52], pseudo.to_be_bytes());
    // As the device does: the sum from offset 34 to the end is stored at offset 34 + 16.
    let mut complete = frame.clone();
    let sum = Sum::of(&frame[34..]).finish();
    complete[50..52].copy_from_slice(&sum.to_be_bytes());
    peer_parses(&complete, RxChecksum::Unverified, |parsed| assert!(matches!(parsed, ParsedFrame::Tcp(_))));
    peer_parses(&frame, RxChecksum::Partial { start: 34, offset: 16 }, |parsed| {
        assert!(matches!(parsed, ParsedFrame::Tcp(_)))
    });
}

#[test]
fn super_frame_carries_gso_metadata() {
    let capabilities = Capabilities { tx_checksum: true, gso_bytes_max: 65_536, ..CAPABILITIES };
    let (mut fixture, route) = known_peer(capabilities);
    let mut bytes = segment(10_000);
    bytes[12] = 0x80;
    bytes[13] = 0x90;
    send(&mut fixture, &route, None, Some(1448), &bytes);
    let (frame, meta) = fixture.sent_with_meta().remove(0);
    assert_eq!(meta.gso, Some(Gso { kind: GsoKind::Tcp4, size: 1448, header_len: 66, ecn: true }));
    assert_eq!(meta.partial_checksum, Some((34, 16)));
    assert_eq!(ipv4::Header::parse(&frame[14..]).unwrap().total_len, 10_040);
}

#[test]
fn capabilities_limit_super_frames_to_ip_total_length() {
    let capabilities = Capabilities { tx_checksum: true, gso_bytes_max: 200_000, ..CAPABILITIES };
    let fixture = NetworkFixture::with(
        network_config(),
        &LinkConfig { mtu: Some(1400), ..link_config() },
        capabilities,
    );
    let link = fixture.network.capabilities(fixture.link).unwrap();
    assert_eq!((link.mtu, link.gso_bytes_max), (1400, 65_535 + 14));
    assert_eq!(fixture.network.capabilities(LinkId(9)), None);
}

#[test]
fn packet_above_mtu_is_never_sent() {
    let (mut fixture, route) = known_peer(CAPABILITIES);
    let header = tcp(route.src, PEER_V4.into());
    let result = fixture.network.begin(fixture.now, &route.hop, &header, 1485);
    assert_eq!(result.err(), Some(TxError::TooBig));
    // The space reserved for a VLAN tag does not allow a longer packet.
    let bytes = segment(1461);
    let mut packet = fixture.network.begin(fixture.now, &route.hop, &header, bytes.len()).unwrap();
    packet.l4().copy_from_slice(&bytes);
    let sealed = packet.seal(bytes.len(), TxChecksum { offset: 16, payload_sum: None }, None);
    fixture.network.commit(sealed);
    assert_eq!(fixture.sent().len(), 0);
    assert_eq!(fixture.network.stats().tx_too_big, 1);
}

#[test]
fn full_device_and_stale_hop_return_different_errors() {
    let (mut fixture, route) = known_peer(CAPABILITIES);
    fixture.set_capacity(0);
    assert_eq!(fixture.send_tcp(&route, PEER_V4, &segment(0)), Err(TxError::Full));
    let stale = Route { hop: NextHop::default(), ..route };
    assert_eq!(fixture.send_tcp(&stale, PEER_V4, &segment(0)), Err(TxError::Stale));
    assert!(!fixture.network.hop_is_current(&stale.hop));
    let header = tcp(route.src, PEER_V6.into());
    assert_eq!(fixture.network.begin(fixture.now, &route.hop, &header, 20).err(), Some(TxError::Unreachable));
}

#[test]
fn dropped_tx_packet_sends_nothing() {
    let (mut fixture, route) = known_peer(CAPABILITIES);
    let header = tcp(route.src, PEER_V4.into());
    drop(fixture.network.begin(fixture.now, &route.hop, &header, 100).unwrap());
    assert_eq!(fixture.sent().len(), 0);
    fixture.send_tcp(&route, PEER_V4, &segment(0)).unwrap();
    assert_eq!(fixture.sent().len(), 1);
}

#[test]
fn pending_packets_keep_their_vlan_tag() {
    let link = LinkConfig { vlan: Some(77), ..link_config() };
    let mut fixture = NetworkFixture::with(network_config(), &link, CAPABILITIES);
    let route = fixture.route(PEER_V4);
    fixture.send_tcp(&route, PEER_V4, &segment(1460)).unwrap();
    let (header, _) = as_received(&fixture.sent_one());
    assert_eq!((header.vlan.map(|tag| tag.vid), header.ethertype), (Some(77), EtherType::ARP));
    fixture.input(&frame_to(OUR_MAC, Some(77), EtherType::ARP, &arp_reply(PEER_V4, PEER_MAC)[14..]));
    fixture.send_tcp(&route, PEER_V4, &segment(3)).unwrap();
    for (frame, len) in fixture.sent().iter().zip([1460, 3]) {
        let (header, packet) = as_received(frame);
        assert_eq!((header.vlan.map(|tag| tag.vid), header.dst), (Some(77), PEER_MAC));
        assert_eq!(ipv4::Header::parse(packet).unwrap().payload(packet).len(), 20 + len);
    }
}

#[test]
fn fragmentable_packets_have_distinct_identifications() {
    let (mut fixture, route) = known_peer(CAPABILITIES);
    let mut ident = || {
        let header = IpHeader { dont_fragment: false, ..tcp(route.src, PEER_V4.into()) };
        let packet = fixture.network.begin(fixture.now, &route.hop, &header, 20).unwrap();
        let sealed = packet.seal_complete(20);
        fixture.network.commit(sealed);
        ipv4::Header::parse(&fixture.sent_one()[14..]).unwrap().ident
    };
    let first = ident();
    assert_eq!(ident(), first.wrapping_add(1));
}

/// Sends a UDP datagram with this payload, lets the peer reassemble it, and returns the number of frames.
fn datagram_arrives(
    fixture: &mut NetworkFixture,
    peer: &mut NetworkFixture,
    dst: IpAddr,
    payload: &[u8],
) -> usize {
    let route = fixture.network.route(fixture.now, dst, None).unwrap();
    let header = IpHeader {
        src: route.src,
        dst,
        protocol: protocol::UDP,
        tos: 0,
        hop_limit: 64,
        dont_fragment: true,
        flow_label: 0,
        label: Label::NONE,
    };
    let udp =
        crate::wire::udp::Header { src_port: 5, dst_port: 6, len: 8 + payload.len() as u16, checksum: 0 };
    let write = |out: &mut [u8]| {
        udp.emit(out);
        out[8..].copy_from_slice(payload);
    };
    fixture.network.send_datagram(fixture.now, &route, &header, 8 + payload.len(), Some(6), write).unwrap();
    let frames = fixture.sent();
    let mut arrived = 0;
    // In reverse, since the order must not matter.
    for bytes in frames.iter().rev() {
        assert!(bytes.len() <= 14 + usize::from(route.mtu));
        match peer.parse(bytes) {
            ParsedFrame::Udp(l4) => {
                assert_eq!(&l4.bytes[8..], payload);
                arrived += 1;
            }
            ParsedFrame::Other(other) => match peer.network.input(peer.now, &other) {
                InputResult::Handled => {}
                InputResult::Reassembled(buffer) => {
                    let ParsedFrame::Udp(l4) = peer.network.parse_reassembled(&buffer) else { panic!() };
                    assert_eq!(&l4.bytes[8..], payload);
                    arrived += 1;
                    peer.network.recycle(buffer);
                }
                InputResult::Error(error) => panic!("{error:?}"),
            },
            parsed => panic!("{parsed:?}"),
        }
    }
    assert_eq!(arrived, 1);
    frames.len()
}

#[test]
fn datagrams_of_any_length_arrive_over_any_mtu() {
    let static_of = |v4: Ipv4Addr, v6: core::net::Ipv6Addr, mac| vec![(v4.into(), mac), (v6.into(), mac)];
    for mtu in [128, 1280, 1281, 1500, 9000] {
        let wide = Capabilities { mtu: 9000, ..CAPABILITIES };
        let ours = LinkConfig {
            mtu: Some(mtu),
            static_neighbours: static_of(PEER_V4, PEER_V6, PEER_MAC),
            ..link_config()
        };
        let v4_only = LinkConfig {
            addresses: vec![(OUR_V4.into(), 24)],
            static_neighbours: vec![(PEER_V4.into(), PEER_MAC)],
            ..ours.clone()
        };
        let ours = if mtu < 1280 { v4_only } else { ours };
        let mut fixture = NetworkFixture::with(network_config(), &ours, wide);
        let link =
            LinkConfig { addresses: vec![(PEER_V4.into(), 24), (PEER_V6.into(), 64)], ..link_config() };
        let mut peer =
            NetworkFixture::with(network_config(), &link, Capabilities { mac: PEER_MAC.0, ..wide });
        let payload: Vec<u8> = (0..65_507_u32).map(|at| (at * 7 / 3) as u8).collect();
        for len in [0, 1, mtu - 48, mtu - 47, mtu - 28, mtu - 27, 3 * mtu + 5, 65_507] {
            let count = datagram_arrives(&mut fixture, &mut peer, PEER_V4.into(), &payload[..len]);
            let expected = if len + 28 <= mtu { 1 } else { (len + 8).div_ceil((mtu - 20) & !7) };
            assert_eq!(count, expected, "{mtu} {len}");
            if mtu >= 1280 {
                let count = datagram_arrives(&mut fixture, &mut peer, PEER_V6.into(), &payload[..len]);
                let expected = if len + 48 <= mtu { 1 } else { (len + 8).div_ceil((mtu - 48) & !7) };
                assert_eq!(count, expected, "{mtu} {len}");
            }
        }
    }
}

#[test]
fn device_full_between_fragments_drops_the_rest() {
    let (mut fixture, route) = known_peer(CAPABILITIES);
    let header = IpHeader { protocol: protocol::UDP, ..tcp(route.src, PEER_V4.into()) };
    fixture.set_capacity(0);
    let sent = fixture.network.send_datagram(fixture.now, &route, &header, 4000, Some(6), |out| out.fill(0));
    assert_eq!(sent, Err(TxError::Full));
    fixture.set_capacity(2);
    let sent = fixture.network.send_datagram(fixture.now, &route, &header, 4000, Some(6), |out| out.fill(0));
    assert_eq!(sent, Ok(()));
    assert_eq!((fixture.sent().len(), fixture.network.stats().tx_fragments_lost), (2, 1));
    let sent = fixture.network.send_datagram(fixture.now, &route, &header, 65_516, None, |_| ());
    assert_eq!(sent, Err(TxError::TooBig));
}

#[test]
fn ipv6_multicast_uses_the_group_mac_address() {
    let mut fixture = NetworkFixture::new();
    let group: IpAddr = "ff02::fb".parse().unwrap();
    let route = fixture.route(group);
    assert!(matches!(route.src, IpAddr::V6(src) if src.is_unicast_link_local()));
    fixture.send_tcp(&route, group, &segment(0)).unwrap();
    let (header, _) = as_received(&fixture.sent_one());
    assert_eq!((header.dst, header.ethertype), (MacAddr([0x33, 0x33, 0, 0, 0, 0xfb]), EtherType::IPV6));
}

#[test]
fn routes_with_invalid_gateways_are_rejected() {
    let mut fixture = NetworkFixture::new();
    let mut add = |destination: &str, prefix, gateway: &str, link| {
        let route = RouteConfig {
            destination: destination.parse().unwrap(),
            prefix,
            gateway: Some(gateway.parse().unwrap()),
            link: LinkId(link),
            metric: 0,
        };
        fixture.network.add_route(route).map_err(|error| error.problem)
    };
    assert_eq!(add("0.0.0.0", 0, "10.0.0.254", 0), Ok(()));
    assert_eq!(add("::", 0, "fe80::1", 0), Ok(()));
    let problem = |result: Result<(), String>| result.unwrap_err();
    assert_eq!(problem(add("0.0.0.0", 0, "10.0.0.254", 1)), "no such link");
    assert_eq!(problem(add("0.0.0.0", 33, "10.0.0.254", 0)), "the prefix is longer than the address");
    assert_eq!(
        problem(add("0.0.0.0", 0, "::1", 0)),
        "destination and gateway are of different address families"
    );
    assert_eq!(problem(add("0.0.0.0", 0, "10.0.0.1", 0)), "the gateway is not another host");
    assert_eq!(problem(add("0.0.0.0", 0, "192.0.2.1", 0)), "the gateway is not on the link");
}
