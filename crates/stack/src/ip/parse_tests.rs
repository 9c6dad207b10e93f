use super::*;
use crate::device::{GsoKind, RxFrame};
use crate::ip::testbench::*;
use crate::link::LinkConfig;
use crate::wire::echo::Echo;
use proptest::prelude::*;

/// Returns a valid TCP segment from the peer.
fn tcp_segment() -> Vec<u8> {
    let mut bytes = segment(11);
    let sum = pseudo_v4(PEER_V4, OUR_V4, protocol::TCP, bytes.len()).add(Sum::of(&bytes));
    bytes[16..18].copy_from_slice(&sum.finish().to_be_bytes());
    bytes
}

fn tcp_frame() -> Vec<u8> {
    v4_frame(protocol::TCP, &tcp_segment())
}

fn tcp6_frame() -> Vec<u8> {
    let mut bytes = segment(11);
    let sum = pseudo_v6(PEER_V6, OUR_V6, protocol::TCP, bytes.len()).add(Sum::of(&bytes));
    bytes[16..18].copy_from_slice(&sum.finish().to_be_bytes());
    frame(EtherType::IPV6, &ipv6_packet(PEER_V6, OUR_V6, protocol::TCP, 64, &bytes))
}

#[track_caller]
fn dropped(fixture: &mut NetworkFixture, bytes: &[u8]) -> DropReason {
    match fixture.parse(bytes) {
        ParsedFrame::Drop(reason) => reason,
        parsed => panic!("not dropped: {parsed:?}"),
    }
}

/// Returns a frame with a TCP segment, a modified IPv4 header and a correct header checksum.
fn with_header(change: impl FnOnce(&mut ipv4::Header)) -> Vec<u8> {
    let segment = tcp_segment();
    let mut header = ipv4_header(PEER_V4, OUR_V4, protocol::TCP, segment.len());
    change(&mut header);
    frame(EtherType::IPV4, &ipv4_packet(header, &segment))
}

/// Corrects the checksum of an IPv4 header.
fn fix_checksum(bytes: &mut [u8]) {
    let len = usize::from(bytes[14] & 0x0f) * 4;
    bytes[24..26].fill(0);
    let sum = Sum::of(&bytes[14..14 + len]).finish();
    bytes[24..26].copy_from_slice(&sum.to_be_bytes());
}

#[test]
fn parsed_segment_carries_its_header_fields() {
    let mut fixture = NetworkFixture::new();
    let mut bytes = with_header(|header| (header.ecn, header.ttl) = (2, 33));
    bytes.extend_from_slice(&[0xff; 9]);
    let l4 = tcp_of(fixture.parse(&bytes));
    assert_eq!((l4.src, l4.dst), (PEER_V4.into(), OUR_V4.into()));
    assert_eq!((l4.ecn, l4.hop_limit, l4.broadcast), (2, 33, false));
    assert_eq!(l4.bytes, tcp_segment(), "without padding");
    assert_eq!(l4.ip_packet.len(), 20 + l4.bytes.len());
    let bytes = tcp6_frame();
    let l4 = tcp_of(fixture.parse(&bytes));
    assert_eq!((l4.src, l4.dst, l4.bytes.len()), (PEER_V6.into(), OUR_V6.into(), 31));
}

#[test]
fn truncated_frames_are_dropped() {
    let mut fixture = NetworkFixture::new();
    for whole in [tcp_frame(), tcp6_frame()] {
        for len in 0..whole.len() {
            assert!(matches!(fixture.parse(&whole[..len]), ParsedFrame::Drop(_)), "{len}");
        }
        tcp_of(fixture.parse(&whole));
    }
}

#[test]
fn any_flipped_bit_of_a_segment_is_detected() {
    let mut fixture = NetworkFixture::new();
    let whole = tcp_frame();
    for bit in 14 * 8..whole.len() * 8 {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(matches!(fixture.parse(&bytes), ParsedFrame::Drop(_)), "{bit}");
    }
}

#[test]
fn frames_with_impossible_lengths_are_dropped() {
    let mut fixture = NetworkFixture::new();
    let lengths = [0, 19, 20, 39, 52, 1500, 65535];
    for total_len in lengths {
        let reason = dropped(&mut fixture, &with_header(|header| header.total_len = total_len));
        let expected = match total_len {
            20 | 39 => DropReason::BadTransportLength,
            _ => DropReason::BadIpHeader,
        };
        assert_eq!(reason, expected, "{total_len}");
    }
    for first in [0x40, 0x44, 0x4f, 0x55, 0x65, 0x05] {
        let mut bytes = tcp_frame();
        bytes[14] = first;
        assert!(matches!(fixture.parse(&bytes), ParsedFrame::Drop(_)), "{first:#x}");
    }
    // IPv6: the payload length exceeds the frame.
    let mut bytes = tcp6_frame();
    bytes[19] += 1;
    assert_eq!(dropped(&mut fixture, &bytes), DropReason::BadIpHeader);
}

#[test]
fn frames_with_wrong_checksums_are_dropped() {
    let mut fixture = NetworkFixture::new();
    let mut bytes = tcp_frame();
    bytes[24] ^= 1;
    assert_eq!(dropped(&mut fixture, &bytes), DropReason::BadIpChecksum);
    let mut bytes = tcp_frame();
    *bytes.last_mut().unwrap() ^= 1;
    assert_eq!(dropped(&mut fixture, &bytes), DropReason::BadTransportChecksum);
    assert_eq!(fixture.network.drops().bad_transport_checksum, 1);
}

#[test]
fn frames_with_partial_checksums_are_counted_separately() {
    let mut fixture = NetworkFixture::new();
    let mut segment = segment(11);
    let pseudo = pseudo_v6(PEER_V6, OUR_V6, protocol::TCP, segment.len());
    segment[16..18].copy_from_slice(&pseudo.fold().to_be_bytes());
    let bytes = frame(EtherType::IPV6, &ipv6_packet(PEER_V6, OUR_V6, protocol::TCP, 64, &segment));
    assert_eq!(dropped(&mut fixture, &bytes), DropReason::PartialTransportChecksum);
    let mut datagram = [0, 1, 0, 2, 0, 9, 0, 0, 77];
    let pseudo = pseudo_v4(PEER_V4, OUR_V4, protocol::UDP, datagram.len());
    datagram[6..8].copy_from_slice(&pseudo.fold().to_be_bytes());
    let bytes = v4_frame(protocol::UDP, &datagram);
    assert_eq!(dropped(&mut fixture, &bytes), DropReason::PartialTransportChecksum);
    let drops = fixture.network.drops();
    assert_eq!((drops.partial_transport_checksum, drops.bad_transport_checksum), (2, 0));
}

#[test]
fn device_checksum_status_applies_to_outer_segment_only() {
    let fixture = NetworkFixture::new();
    let mut bytes = tcp_frame();
    *bytes.last_mut().unwrap() ^= 1;
    let parse = |checksum| fixture.network.parse(fixture.port, &RxFrame { checksum, ..RxFrame::new(&bytes) });
    assert!(matches!(parse(RxChecksum::Verified), ParsedFrame::Tcp(_)));
    assert!(matches!(parse(RxChecksum::Partial { start: 34, offset: 16 }), ParsedFrame::Tcp(_)));
    // The verified checksum is that of an encapsulated segment and does not cover the outer one.
    let parsed = parse(RxChecksum::Partial { start: 54, offset: 16 });
    assert!(matches!(parsed, ParsedFrame::Drop(DropReason::BadTransportChecksum)));
}

#[test]
fn martian_sources_are_dropped() {
    let mut fixture = NetworkFixture::new();
    for source in
        ["0.0.0.0", "0.1.2.3", "127.0.0.1", "224.0.0.5", "255.255.255.255", "10.0.0.255", "10.0.0.1"]
    {
        let bytes = with_header(|header| header.src = source.parse().unwrap());
        assert_eq!(dropped(&mut fixture, &bytes), DropReason::MartianSource, "{source}");
    }
    for source in ["::", "::1", "ff02::1", "::ffff:10.0.0.2", "2001:db8::1"] {
        let packet = ipv6_packet(source.parse().unwrap(), OUR_V6, protocol::TCP, 64, &segment(0));
        assert_eq!(
            dropped(&mut fixture, &frame(EtherType::IPV6, &packet)),
            DropReason::MartianSource,
            "{source}"
        );
    }
}

#[test]
fn frames_for_other_hosts_are_dropped() {
    let mut fixture = NetworkFixture::new();
    let bytes = with_header(|header| header.dst = Ipv4Addr::new(10, 0, 0, 3));
    assert_eq!(dropped(&mut fixture, &bytes), DropReason::NotLocal);
    let mut bytes = tcp_frame();
    bytes[5] ^= 4;
    assert_eq!(dropped(&mut fixture, &bytes), DropReason::OtherHost);
    let mut bytes = tcp_frame();
    bytes[..6].fill(0xff);
    assert_eq!(dropped(&mut fixture, &bytes), DropReason::UnicastInBroadcast);
    let bytes = frame(EtherType(0x88cc), &[0; 60]);
    assert_eq!(dropped(&mut fixture, &bytes), DropReason::UnknownEthertype);
    let packet = ipv6_packet(PEER_V6, "ff02::1:ff99:9999".parse().unwrap(), protocol::TCP, 64, &segment(0));
    assert_eq!(dropped(&mut fixture, &frame(EtherType::IPV6, &packet)), DropReason::NotLocal);
}

#[test]
fn tcp_to_broadcast_addresses_is_dropped() {
    let mut fixture = NetworkFixture::new();
    for dst in ["255.255.255.255", "10.0.0.255", "224.0.0.1"] {
        let mut bytes = with_header(|header| header.dst = dst.parse().unwrap());
        bytes[..6].fill(0xff);
        assert_eq!(dropped(&mut fixture, &bytes), DropReason::TcpBroadcast, "{dst}");
    }
}

#[test]
fn source_routed_packets_are_dropped() {
    let mut fixture = NetworkFixture::new();
    let with_options = |options: [u8; 4]| {
        let segment = tcp_segment();
        let header = ipv4_header(PEER_V4, OUR_V4, protocol::TCP, segment.len() + 4);
        let mut packet = ipv4_packet(header, &options);
        packet[0] = 0x46;
        packet.extend_from_slice(&segment);
        let mut bytes = frame(EtherType::IPV4, &packet);
        fix_checksum(&mut bytes);
        bytes
    };
    for kind in [131, 137] {
        assert_eq!(dropped(&mut fixture, &with_options([1, kind, 3, 4])), DropReason::BadIpOptions);
    }
    assert_eq!(dropped(&mut fixture, &with_options([7, 200, 0, 0])), DropReason::BadIpHeader);
    assert_eq!(tcp_of(fixture.parse(&with_options([0x94, 4, 0, 0]))).bytes.len(), 31);
    assert_eq!(
        tcp_of(fixture.parse(&with_options([0, 131, 131, 131]))).bytes.len(),
        31,
        "after the end of options"
    );
}

#[test]
fn frames_are_assigned_to_their_vlan_link() {
    let mut fixture = NetworkFixture::new();
    let address = Ipv4Addr::new(10, 5, 0, 1);
    let config = LinkConfig {
        name: "vlan5".into(),
        addresses: vec![(address.into(), 24)],
        vlan: Some(5),
        ..LinkConfig::default()
    };
    let vlan = fixture.network.add_link(fixture.port, &config).unwrap();
    let packet = tcp_frame()[14..].to_vec();
    let mut link_of = |tag| {
        let bytes = frame_to(OUR_MAC, tag, EtherType::IPV4, &packet);
        match fixture.parse(&bytes) {
            ParsedFrame::Tcp(l4) => Ok(l4.link),
            ParsedFrame::Drop(reason) => Err(reason),
            parsed => panic!("{parsed:?}"),
        }
    };
    assert_eq!(link_of(None), Ok(LinkId(0)));
    assert_eq!(link_of(Some(0)), Ok(LinkId(0)), "VLAN 0 is a priority tag");
    // The weak host model: a local address is accepted on any link.
    assert_eq!(link_of(Some(5)), Ok(vlan));
    assert_eq!(link_of(Some(6)), Err(DropReason::UnknownVlan));
}

#[test]
fn link_without_ipv6_drops_ipv6_frames() {
    let link = LinkConfig { addresses: vec![(OUR_V4.into(), 24)], ..link_config() };
    let mut fixture = NetworkFixture::with(network_config(), &link, CAPABILITIES);
    assert_eq!(dropped(&mut fixture, &tcp6_frame()), DropReason::FamilyDisabled);
    assert_eq!(fixture.network.stats().tx_frames, 0, "and nothing is transmitted");
}

#[test]
fn super_frame_is_parsed_as_one_segment() {
    let fixture = NetworkFixture::new();
    let payload = 60_000;
    let mut bytes = segment(payload);
    bytes[16..18].copy_from_slice(&[0x12, 0x34]);
    let frame = v4_frame(protocol::TCP, &bytes);
    let gso = Gso { kind: GsoKind::Tcp4, size: 1448, header_len: 54, ecn: false };
    let frame = RxFrame {
        checksum: RxChecksum::Partial { start: 34, offset: 16 },
        gso: Some(gso),
        ..RxFrame::new(&frame)
    };
    let l4 = tcp_of(fixture.network.parse(fixture.port, &frame));
    assert_eq!((l4.bytes.len(), l4.gso), (20 + payload, Some(gso)));
}

#[test]
fn udp_checksum_is_mandatory_over_ipv6_only() {
    let mut fixture = NetworkFixture::new();
    let datagram = [0, 1, 0, 2, 0, 9, 0, 0, 77];
    assert!(matches!(fixture.parse(&v4_frame(protocol::UDP, &datagram)), ParsedFrame::Udp(_)));
    let packet = ipv6_packet(PEER_V6, OUR_V6, protocol::UDP, 64, &datagram);
    assert_eq!(dropped(&mut fixture, &frame(EtherType::IPV6, &packet)), DropReason::BadTransportChecksum);
    for len in [0, 7, 10, 255] {
        let mut datagram = datagram;
        datagram[5] = len;
        assert_eq!(
            dropped(&mut fixture, &v4_frame(protocol::UDP, &datagram)),
            DropReason::BadTransportLength
        );
    }
}

/// Processes a frame completely, as the stack does.
fn feed(fixture: &mut NetworkFixture, bytes: &[u8], checksum: RxChecksum, gso: Option<Gso>) {
    let frame = RxFrame { checksum, gso, ..RxFrame::new(bytes) };
    let mut parsed = fixture.network.parse(fixture.port, &frame);
    fixture.network.count_received(&parsed);
    let mut buffers = Vec::new();
    // Nested fragments: each round removes one header, so the loop ends.
    loop {
        let input = match parsed {
            ParsedFrame::Tcp(l4) | ParsedFrame::Udp(l4) => {
                fixture.network.send_icmp_unreachable(fixture.now, &l4, crate::icmp::UnreachableReason::Port);
                return;
            }
            ParsedFrame::Drop(_) => return,
            ParsedFrame::Other(other) => fixture.network.input(fixture.now, &other),
        };
        match input {
            crate::ip::InputResult::Reassembled(buffer) => buffers.push(buffer),
            crate::ip::InputResult::Error(error) => {
                fixture.network.accept_path_mtu(fixture.now, &error);
                return;
            }
            crate::ip::InputResult::Handled => return,
        }
        parsed = fixture.network.parse_reassembled(buffers.last().unwrap());
    }
}

/// Returns valid frames of every kind, which the tests then corrupt.
fn samples() -> Vec<Vec<u8>> {
    use crate::wire::{icmpv4, icmpv6, ndp};
    let mut samples = vec![tcp_frame(), tcp6_frame(), arp_request(PEER_V4, PEER_MAC, OUR_V4)];
    let mut icmp = vec![0; 64];
    let len = icmpv4::Message::EchoRequest(Echo { ident: 1, seq: 2, data: b"hello" }).emit(&mut icmp);
    samples.push(v4_frame(protocol::ICMP, &icmp[..len]));
    let mut quoted = ipv4_packet(ipv4_header(OUR_V4, PEER_V4, protocol::TCP, 20), &segment(0));
    quoted.truncate(28);
    let len = icmpv4::Message::Unreachable { code: 4, mtu: 1400, quote: &quoted }.emit(&mut icmp);
    samples.push(v4_frame(protocol::ICMP, &icmp[..len]));
    for offset in [0, 16] {
        samples.push(with_header(|header| {
            (header.fragment_offset, header.more_fragments) = (offset, offset == 0);
            header.total_len = 20 + if offset == 0 { 16 } else { 15 };
        }));
    }
    let mut message = vec![0; ndp::MESSAGE_LEN_MAX];
    let solicitation =
        ndp::NdpMessage::NeighbourSolicitation { target: OUR_V6, source_mac: Some(PEER_MAC), nonce: None };
    let len = solicitation.emit(PEER_V6, OUR_V6, &mut message);
    samples
        .push(frame(EtherType::IPV6, &ipv6_packet(PEER_V6, OUR_V6, protocol::ICMPV6, 255, &message[..len])));
    let quoted = ipv6_packet(OUR_V6, PEER_V6, protocol::TCP, 64, &segment(0));
    let mut icmp = vec![0; 128];
    let len = icmpv6::Message::PacketTooBig { mtu: 1300, quote: &quoted }.emit(PEER_V6, OUR_V6, &mut icmp);
    samples.push(frame(EtherType::IPV6, &ipv6_packet(PEER_V6, OUR_V6, protocol::ICMPV6, 64, &icmp[..len])));
    let fragment = [vec![protocol::UDP, 0, 0, 1, 0, 0, 0, 9], vec![0; 16]].concat();
    samples.push(frame(EtherType::IPV6, &ipv6_packet(PEER_V6, OUR_V6, protocol::FRAGMENT, 64, &fragment)));
    let options = [vec![protocol::UDP, 0, 1, 4, 0, 0, 0, 0], vec![0; 16]].concat();
    samples.push(frame(
        EtherType::IPV6,
        &ipv6_packet(PEER_V6, OUR_V6, protocol::DESTINATION_OPTIONS, 64, &options),
    ));
    samples
}

proptest! {
    #[test]
    fn random_bytes_never_panic(
        frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 1..20)
    ) {
        let mut fixture = NetworkFixture::new();
        for bytes in &frames {
            feed(&mut fixture, bytes, RxChecksum::Unverified, None);
            let mut ours = bytes.clone();
            if ours.len() >= 14 {
                ours[..6].copy_from_slice(&OUR_MAC.0);
                let ethertype = if ours[13] & 1 == 0 { [8, 0] } else { [0x86, 0xdd] };
                ours[12..14].copy_from_slice(&ethertype);
                feed(&mut fixture, &ours, RxChecksum::Verified, None);
            }
        }
        fixture.advance(core::time::Duration::from_secs(100));
    }

    #[test]
    fn damaged_frames_never_panic_and_budgets_hold(
        damages in prop::collection::vec((any::<prop::sample::Index>(), prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4), any::<bool>(), any::<u16>()), 1..60)
    ) {
        let config = crate::ip::NetworkConfig { fragment_bytes: 65_536, neighbours_max: 16, ..network_config() };
        let mut fixture = NetworkFixture::with(config, &link_config(), CAPABILITIES);
        let samples = samples();
        for (which, damage, fix, cut) in damages {
            let mut bytes = which.get(&samples).clone();
            for (at, value) in damage {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            // All frames are much shorter than 300 bytes, so most of them stay whole.
            bytes.truncate(usize::from(cut % 300));
            if fix && bytes.len() >= 34 && bytes[12..14] == [8, 0] && bytes.len() >= 14 + usize::from(bytes[14] & 15) * 4 {
                fix_checksum(&mut bytes);
            }
            let checksum = if cut % 2 == 0 { RxChecksum::Verified } else { RxChecksum::Unverified };
            feed(&mut fixture, &bytes, checksum, None);
        }
        fixture.advance(core::time::Duration::from_secs(100));
        prop_assert!(fixture.network.neighbours().count() <= 16);
    }
}
