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
        label: Label::NONE,
    }
}

/// Returns a fixture with a resolved peer, and the route to it.
fn known_peer(capabilities: Capabilities) -> (NetworkFixture, Route) {
    let mut bench = NetworkFixture::with(network_config(), &link_config(), capabilities);
    bench.learn_v4(PEER_V4, PEER_MAC);
    let route = bench.route(PEER_V4);
    (bench, route)
}

/// Sends a segment; the sum of its payload may be given.
fn send(
    bench: &mut NetworkFixture,
    route: &Route,
    payload_sum: Option<(usize, Sum)>,
    gso: Option<u16>,
    bytes: &[u8],
) {
    let header = tcp(route.src, PEER_V4.into());
    let mut packet = bench.network.begin(bench.now, &route.hop, &header, bytes.len() + 40).unwrap();
    assert_eq!(packet.l4().len(), bytes.len() + 40);
    packet.l4()[..bytes.len()].copy_from_slice(bytes);
    let sealed = packet.seal(bytes.len(), TxChecksum { offset: 16, payload_sum }, gso);
    bench.network.commit(sealed);
}

/// Passes a frame to the peer's stack, which is a second instance of this network layer.
fn peer_reads(frame: &[u8], checksum: RxChecksum, check: impl FnOnce(ParsedFrame<'_>)) {
    let link = LinkConfig { addresses: vec![(PEER_V4.into(), 24), (PEER_V6.into(), 64)], ..link_config() };
    let capabilities = Capabilities { mac: PEER_MAC.0, ..CAPABILITIES };
    let peer = NetworkFixture::with(network_config(), &link, capabilities);
    check(peer.network.parse(peer.port, &RxFrame { checksum, ..RxFrame::new(frame) }));
}

#[test]
fn headers_say_what_they_were_told_and_checksums_are_right() {
    let (mut bench, route) = known_peer(CAPABILITIES);
    let bytes = segment(1001);
    send(&mut bench, &route, None, None, &bytes);
    let frame = bench.sent_one();
    assert_eq!(frame.len(), 14 + 20 + bytes.len());
    let header = ipv4::Header::parse(&frame[14..]).unwrap();
    assert_eq!((header.dscp, header.ecn, header.ttl), (0x2e, 2, 61));
    assert!(header.dont_fragment && header.ident == 0);
    peer_reads(&frame, RxChecksum::Unverified, |parsed| assert_eq!(tcp_of(parsed).bytes.len(), bytes.len()));
}

#[test]
fn a_known_payload_sum_gives_the_same_frame() {
    let (mut bench, route) = known_peer(CAPABILITIES);
    let bytes = segment(777);
    send(&mut bench, &route, None, None, &bytes);
    let plain = bench.sent_one();
    for start in [20, 21, 34] {
        send(&mut bench, &route, Some((start, Sum::of(&bytes[start..]))), None, &bytes);
        assert_eq!(bench.sent_one(), plain, "{start}");
    }
}

#[test]
fn a_device_that_completes_checksums_gets_the_pseudo_header_sum() {
    let (mut bench, route) = known_peer(Capabilities { tx_checksum: true, ..CAPABILITIES });
    let bytes = segment(64);
    send(&mut bench, &route, None, None, &bytes);
    let (frame, meta) = bench.sent_with_meta().remove(0);
    assert_eq!(meta, TxMeta { partial_checksum: Some((34, 16)), ..TxMeta::NONE });
    let pseudo = pseudo_v4(OUR_V4, PEER_V4, protocol::TCP, bytes.len()).fold();
    assert_eq!(frame[50..52], pseudo.to_be_bytes());
    // As the device does: the sum from offset 34 to the end is stored at offset 34 + 16.
    let mut complete = frame.clone();
    let sum = Sum::of(&frame[34..]).finish();
    complete[50..52].copy_from_slice(&sum.to_be_bytes());
    peer_reads(&complete, RxChecksum::Unverified, |parsed| assert!(matches!(parsed, ParsedFrame::Tcp(_))));
    peer_reads(&frame, RxChecksum::Partial { start: 34, offset: 16 }, |parsed| {
        assert!(matches!(parsed, ParsedFrame::Tcp(_)))
    });
}

#[test]
fn a_super_frame_tells_the_device_how_to_cut() {
    let capabilities = Capabilities { tx_checksum: true, gso_bytes_max: 65_536, ..CAPABILITIES };
    let (mut bench, route) = known_peer(capabilities);
    let mut bytes = segment(10_000);
    bytes[12] = 0x80;
    bytes[13] = 0x90;
    send(&mut bench, &route, None, Some(1448), &bytes);
    let (frame, meta) = bench.sent_with_meta().remove(0);
    assert_eq!(meta.gso, Some(Gso { kind: GsoKind::Tcp4, size: 1448, header_len: 66, ecn: true }));
    assert_eq!(meta.partial_checksum, Some((34, 16)));
    assert_eq!(ipv4::Header::parse(&frame[14..]).unwrap().total_len, 10_040);
}

#[test]
fn capabilities_keep_super_frames_within_what_a_length_field_can_say() {
    let capabilities = Capabilities { tx_checksum: true, gso_bytes_max: 200_000, ..CAPABILITIES };
    let bench = NetworkFixture::with(
        network_config(),
        &LinkConfig { mtu: Some(1400), ..link_config() },
        capabilities,
    );
    let link = bench.network.capabilities(bench.link).unwrap();
    assert_eq!((link.mtu, link.gso_bytes_max), (1400, 65_535 + 14));
    assert_eq!(bench.network.capabilities(LinkId(9)), None);
}

#[test]
fn more_than_the_link_takes_is_never_sent() {
    let (mut bench, route) = known_peer(CAPABILITIES);
    let header = tcp(route.src, PEER_V4.into());
    let begun = bench.network.begin(bench.now, &route.hop, &header, 1485);
    assert_eq!(begun.err(), Some(TxError::TooBig));
    // The space reserved for a VLAN tag does not allow a longer packet.
    let bytes = segment(1461);
    let mut packet = bench.network.begin(bench.now, &route.hop, &header, bytes.len()).unwrap();
    packet.l4().copy_from_slice(&bytes);
    let sealed = packet.seal(bytes.len(), TxChecksum { offset: 16, payload_sum: None }, None);
    bench.network.commit(sealed);
    assert_eq!(bench.sent().len(), 0);
    assert_eq!(bench.network.stats().tx_too_big, 1);
}

#[test]
fn a_full_device_and_a_default_hop_are_told_apart() {
    let (mut bench, route) = known_peer(CAPABILITIES);
    bench.set_capacity(0);
    assert_eq!(bench.send_tcp(&route, PEER_V4, &segment(0)), Err(TxError::Full));
    let stale = Route { hop: NextHop::default(), ..route };
    assert_eq!(bench.send_tcp(&stale, PEER_V4, &segment(0)), Err(TxError::Stale));
    assert!(!bench.network.hop_is_current(&stale.hop));
    let header = tcp(route.src, PEER_V6.into());
    assert_eq!(bench.network.begin(bench.now, &route.hop, &header, 20).err(), Some(TxError::Unreachable));
}

#[test]
fn an_abandoned_packet_leaves_no_trace() {
    let (mut bench, route) = known_peer(CAPABILITIES);
    let header = tcp(route.src, PEER_V4.into());
    drop(bench.network.begin(bench.now, &route.hop, &header, 100).unwrap());
    assert_eq!(bench.sent().len(), 0);
    bench.send_tcp(&route, PEER_V4, &segment(0)).unwrap();
    assert_eq!(bench.sent().len(), 1);
}

#[test]
fn packets_of_a_vlan_carry_its_tag_even_if_they_had_to_wait() {
    let link = LinkConfig { vlan: Some(77), ..link_config() };
    let mut bench = NetworkFixture::with(network_config(), &link, CAPABILITIES);
    let route = bench.route(PEER_V4);
    bench.send_tcp(&route, PEER_V4, &segment(1460)).unwrap();
    let (header, _) = as_received(&bench.sent_one());
    assert_eq!((header.vlan.map(|tag| tag.vid), header.ethertype), (Some(77), EtherType::ARP));
    bench.input(&frame_to(OUR_MAC, Some(77), EtherType::ARP, &arp_reply(PEER_V4, PEER_MAC)[14..]));
    bench.send_tcp(&route, PEER_V4, &segment(3)).unwrap();
    for (frame, len) in bench.sent().iter().zip([1460, 3]) {
        let (header, packet) = as_received(frame);
        assert_eq!((header.vlan.map(|tag| tag.vid), header.dst), (Some(77), PEER_MAC));
        assert_eq!(ipv4::Header::parse(packet).unwrap().payload(packet).len(), 20 + len);
    }
}

#[test]
fn packets_that_may_be_fragmented_have_changing_identifications() {
    let (mut bench, route) = known_peer(CAPABILITIES);
    let mut ident = || {
        let header = IpHeader { dont_fragment: false, ..tcp(route.src, PEER_V4.into()) };
        let packet = bench.network.begin(bench.now, &route.hop, &header, 20).unwrap();
        let sealed = packet.seal_complete(20);
        bench.network.commit(sealed);
        ipv4::Header::parse(&bench.sent_one()[14..]).unwrap().ident
    };
    let first = ident();
    assert_eq!(ident(), first.wrapping_add(1));
}

/// Sends a UDP datagram with this payload, lets the peer reassemble it, and returns the number of frames.
fn datagram_arrives(
    bench: &mut NetworkFixture,
    peer: &mut NetworkFixture,
    dst: IpAddr,
    payload: &[u8],
) -> usize {
    let route = bench.network.route(bench.now, dst, None).unwrap();
    let header = IpHeader {
        src: route.src,
        dst,
        protocol: protocol::UDP,
        tos: 0,
        hop_limit: 64,
        dont_fragment: true,
        label: Label::NONE,
    };
    let udp =
        crate::wire::udp::Header { src_port: 5, dst_port: 6, len: 8 + payload.len() as u16, checksum: 0 };
    let write = |out: &mut [u8]| {
        udp.emit(out);
        out[8..].copy_from_slice(payload);
    };
    bench.network.send_datagram(bench.now, &route, &header, 8 + payload.len(), Some(6), write).unwrap();
    let frames = bench.sent();
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
        let mut bench = NetworkFixture::with(network_config(), &ours, wide);
        let link =
            LinkConfig { addresses: vec![(PEER_V4.into(), 24), (PEER_V6.into(), 64)], ..link_config() };
        let mut peer =
            NetworkFixture::with(network_config(), &link, Capabilities { mac: PEER_MAC.0, ..wide });
        let payload: Vec<u8> = (0..65_507_u32).map(|at| (at * 7 / 3) as u8).collect();
        for len in [0, 1, mtu - 48, mtu - 47, mtu - 28, mtu - 27, 3 * mtu + 5, 65_507] {
            let count = datagram_arrives(&mut bench, &mut peer, PEER_V4.into(), &payload[..len]);
            let expected = if len + 28 <= mtu { 1 } else { (len + 8).div_ceil((mtu - 20) & !7) };
            assert_eq!(count, expected, "{mtu} {len}");
            if mtu >= 1280 {
                let count = datagram_arrives(&mut bench, &mut peer, PEER_V6.into(), &payload[..len]);
                let expected = if len + 48 <= mtu { 1 } else { (len + 8).div_ceil((mtu - 48) & !7) };
                assert_eq!(count, expected, "{mtu} {len}");
            }
        }
    }
}

#[test]
fn a_device_that_fills_up_between_fragments_loses_the_rest() {
    let (mut bench, route) = known_peer(CAPABILITIES);
    let header = IpHeader { protocol: protocol::UDP, ..tcp(route.src, PEER_V4.into()) };
    bench.set_capacity(0);
    let sent = bench.network.send_datagram(bench.now, &route, &header, 4000, Some(6), |out| out.fill(0));
    assert_eq!(sent, Err(TxError::Full));
    bench.set_capacity(2);
    let sent = bench.network.send_datagram(bench.now, &route, &header, 4000, Some(6), |out| out.fill(0));
    assert_eq!(sent, Ok(()));
    assert_eq!((bench.sent().len(), bench.network.stats().tx_fragments_lost), (2, 1));
    let sent = bench.network.send_datagram(bench.now, &route, &header, 65_516, None, |_| ());
    assert_eq!(sent, Err(TxError::TooBig));
}

#[test]
fn multicast_over_ipv6_goes_to_the_groups_mac_address() {
    let mut bench = NetworkFixture::new();
    let group: IpAddr = "ff02::fb".parse().unwrap();
    let route = bench.route(group);
    assert!(matches!(route.src, IpAddr::V6(src) if src.is_unicast_link_local()));
    bench.send_tcp(&route, group, &segment(0)).unwrap();
    let (header, _) = as_received(&bench.sent_one());
    assert_eq!((header.dst, header.ethertype), (MacAddr([0x33, 0x33, 0, 0, 0, 0xfb]), EtherType::IPV6));
}

#[test]
fn routes_with_impossible_gateways_are_refused() {
    let mut bench = NetworkFixture::new();
    let mut add = |destination: &str, prefix, gateway: &str, link| {
        let route = RouteConfig {
            destination: destination.parse().unwrap(),
            prefix,
            gateway: Some(gateway.parse().unwrap()),
            link: LinkId(link),
            metric: 0,
        };
        bench.network.add_route(route).map_err(|error| error.problem)
    };
    assert_eq!(add("0.0.0.0", 0, "10.0.0.254", 0), Ok(()));
    assert_eq!(add("::", 0, "fe80::1", 0), Ok(()));
    let problem = |result: Result<(), String>| result.unwrap_err();
    assert_eq!(problem(add("0.0.0.0", 0, "10.0.0.254", 1)), "no such link");
    assert_eq!(problem(add("0.0.0.0", 33, "10.0.0.254", 0)), "the prefix is longer than the address");
    assert_eq!(problem(add("0.0.0.0", 0, "::1", 0)), "destination and gateway are of different families");
    assert_eq!(problem(add("0.0.0.0", 0, "10.0.0.1", 0)), "the gateway is not another host");
    assert_eq!(problem(add("0.0.0.0", 0, "192.0.2.1", 0)), "the gateway is not on the link");
}
