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
fn dropped(bench: &mut NetworkFixture, bytes: &[u8]) -> DropReason {
    match bench.parse(bytes) {
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
fn a_segment_for_us_comes_with_what_its_headers_said() {
    let mut bench = NetworkFixture::new();
    let mut bytes = with_header(|header| (header.ecn, header.ttl) = (2, 33));
    bytes.extend_from_slice(&[0xff; 9]);
    let l4 = tcp_of(bench.parse(&bytes));
    assert_eq!((l4.src, l4.dst), (PEER_V4.into(), OUR_V4.into()));
    assert_eq!((l4.ecn, l4.hop_limit, l4.broadcast), (2, 33, false));
    assert_eq!(l4.bytes, tcp_segment(), "padding is not part of it");
    assert_eq!(l4.ip_packet.len(), 20 + l4.bytes.len());
    let bytes = tcp6_frame();
    let l4 = tcp_of(bench.parse(&bytes));
    assert_eq!((l4.src, l4.dst, l4.bytes.len()), (PEER_V6.into(), OUR_V6.into(), 31));
}

#[test]
fn no_prefix_of_a_frame_is_taken_for_the_whole() {
    let mut bench = NetworkFixture::new();
    for whole in [tcp_frame(), tcp6_frame()] {
        for len in 0..whole.len() {
            assert!(matches!(bench.parse(&whole[..len]), ParsedFrame::Drop(_)), "{len}");
        }
        tcp_of(bench.parse(&whole));
    }
}

#[test]
fn any_single_flipped_bit_of_an_ipv4_segment_is_noticed() {
    let mut bench = NetworkFixture::new();
    let whole = tcp_frame();
    for bit in 14 * 8..whole.len() * 8 {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert!(matches!(bench.parse(&bytes), ParsedFrame::Drop(_)), "{bit}");
    }
}

#[test]
fn impossible_lengths_are_dropped() {
    let mut bench = NetworkFixture::new();
    let lengths = [0, 19, 20, 39, 52, 1500, 65535];
    for total_len in lengths {
        let reason = dropped(&mut bench, &with_header(|header| header.total_len = total_len));
        let expected = match total_len {
            20 | 39 => DropReason::BadTransportLength,
            _ => DropReason::BadIpHeader,
        };
        assert_eq!(reason, expected, "{total_len}");
    }
    for first in [0x40, 0x44, 0x4f, 0x55, 0x65, 0x05] {
        let mut bytes = tcp_frame();
        bytes[14] = first;
        assert!(matches!(bench.parse(&bytes), ParsedFrame::Drop(_)), "{first:#x}");
    }
    // IPv6: the payload length exceeds the frame.
    let mut bytes = tcp6_frame();
    bytes[19] += 1;
    assert_eq!(dropped(&mut bench, &bytes), DropReason::BadIpHeader);
}

#[test]
fn wrong_checksums_are_dropped() {
    let mut bench = NetworkFixture::new();
    let mut bytes = tcp_frame();
    bytes[24] ^= 1;
    assert_eq!(dropped(&mut bench, &bytes), DropReason::BadIpChecksum);
    let mut bytes = tcp_frame();
    *bytes.last_mut().unwrap() ^= 1;
    assert_eq!(dropped(&mut bench, &bytes), DropReason::BadTransportChecksum);
    assert_eq!(bench.network.drops().bad_transport_checksum, 1);
}

#[test]
fn the_devices_word_about_a_checksum_counts_for_this_segment_only() {
    let bench = NetworkFixture::new();
    let mut bytes = tcp_frame();
    *bytes.last_mut().unwrap() ^= 1;
    let parse = |checksum| bench.network.parse(bench.port, &RxFrame { checksum, ..RxFrame::new(&bytes) });
    assert!(matches!(parse(RxChecksum::Verified), ParsedFrame::Tcp(_)));
    assert!(matches!(parse(RxChecksum::Partial { start: 34, offset: 16 }), ParsedFrame::Tcp(_)));
    // The verified checksum is that of an encapsulated segment and does not cover the outer one.
    let parsed = parse(RxChecksum::Partial { start: 54, offset: 16 });
    assert!(matches!(parsed, ParsedFrame::Drop(DropReason::BadTransportChecksum)));
}

#[test]
fn sources_no_other_host_can_have_are_dropped() {
    let mut bench = NetworkFixture::new();
    for source in
        ["0.0.0.0", "0.1.2.3", "127.0.0.1", "224.0.0.5", "255.255.255.255", "10.0.0.255", "10.0.0.1"]
    {
        let bytes = with_header(|header| header.src = source.parse().unwrap());
        assert_eq!(dropped(&mut bench, &bytes), DropReason::MartianSource, "{source}");
    }
    for source in ["::", "::1", "ff02::1", "::ffff:10.0.0.2", "2001:db8::1"] {
        let packet = ipv6_packet(source.parse().unwrap(), OUR_V6, protocol::TCP, 64, &segment(0));
        assert_eq!(
            dropped(&mut bench, &frame(EtherType::IPV6, &packet)),
            DropReason::MartianSource,
            "{source}"
        );
    }
}

#[test]
fn what_is_for_others_is_dropped() {
    let mut bench = NetworkFixture::new();
    let bytes = with_header(|header| header.dst = Ipv4Addr::new(10, 0, 0, 3));
    assert_eq!(dropped(&mut bench, &bytes), DropReason::NotLocal);
    let mut bytes = tcp_frame();
    bytes[5] ^= 4;
    assert_eq!(dropped(&mut bench, &bytes), DropReason::OtherHost);
    let mut bytes = tcp_frame();
    bytes[..6].fill(0xff);
    assert_eq!(dropped(&mut bench, &bytes), DropReason::UnicastInBroadcast);
    let bytes = frame(EtherType(0x88cc), &[0; 60]);
    assert_eq!(dropped(&mut bench, &bytes), DropReason::UnknownEthertype);
    let packet = ipv6_packet(PEER_V6, "ff02::1:ff99:9999".parse().unwrap(), protocol::TCP, 64, &segment(0));
    assert_eq!(dropped(&mut bench, &frame(EtherType::IPV6, &packet)), DropReason::NotLocal);
}

#[test]
fn tcp_to_broadcast_addresses_is_dropped() {
    let mut bench = NetworkFixture::new();
    for dst in ["255.255.255.255", "10.0.0.255", "224.0.0.1"] {
        let mut bytes = with_header(|header| header.dst = dst.parse().unwrap());
        bytes[..6].fill(0xff);
        assert_eq!(dropped(&mut bench, &bytes), DropReason::TcpBroadcast, "{dst}");
    }
}

#[test]
fn source_routes_are_dropped_and_other_options_skipped() {
    let mut bench = NetworkFixture::new();
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
        assert_eq!(dropped(&mut bench, &with_options([1, kind, 3, 4])), DropReason::BadIpOptions);
    }
    assert_eq!(dropped(&mut bench, &with_options([7, 200, 0, 0])), DropReason::BadIpHeader);
    assert_eq!(tcp_of(bench.parse(&with_options([0x94, 4, 0, 0]))).bytes.len(), 31);
    assert_eq!(
        tcp_of(bench.parse(&with_options([0, 131, 131, 131]))).bytes.len(),
        31,
        "after the end of options"
    );
}

#[test]
fn frames_go_to_the_link_of_their_vlan() {
    let mut bench = NetworkFixture::new();
    let address = Ipv4Addr::new(10, 5, 0, 1);
    let config = LinkConfig {
        name: "vlan5".into(),
        addresses: vec![(address.into(), 24)],
        vlan: Some(5),
        ..LinkConfig::default()
    };
    let vlan = bench.network.add_link(bench.port, &config).unwrap();
    let packet = tcp_frame()[14..].to_vec();
    let mut link_of = |tag| {
        let bytes = frame_to(OUR_MAC, tag, EtherType::IPV4, &packet);
        match bench.parse(&bytes) {
            ParsedFrame::Tcp(l4) => Ok(l4.link),
            ParsedFrame::Drop(reason) => Err(reason),
            parsed => panic!("{parsed:?}"),
        }
    };
    assert_eq!(link_of(None), Ok(LinkId(0)));
    assert_eq!(link_of(Some(0)), Ok(LinkId(0)), "VLAN 0 only carries a priority");
    // The weak host model: a local address is accepted on any link.
    assert_eq!(link_of(Some(5)), Ok(vlan));
    assert_eq!(link_of(Some(6)), Err(DropReason::UnknownVlan));
}

#[test]
fn a_link_without_ipv6_drops_it() {
    let link = LinkConfig { addresses: vec![(OUR_V4.into(), 24)], ..link_config() };
    let mut bench = NetworkFixture::with(network_config(), &link, CAPABILITIES);
    assert_eq!(dropped(&mut bench, &tcp6_frame()), DropReason::FamilyDisabled);
    assert_eq!(bench.network.stats().tx_frames, 0, "and says nothing of its own");
}

#[test]
fn a_super_frame_is_one_segment() {
    let bench = NetworkFixture::new();
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
    let l4 = tcp_of(bench.network.parse(bench.port, &frame));
    assert_eq!((l4.bytes.len(), l4.gso), (20 + payload, Some(gso)));
}

#[test]
fn udp_needs_a_checksum_over_ipv6_only() {
    let mut bench = NetworkFixture::new();
    let datagram = [0, 1, 0, 2, 0, 9, 0, 0, 77];
    assert!(matches!(bench.parse(&v4_frame(protocol::UDP, &datagram)), ParsedFrame::Udp(_)));
    let packet = ipv6_packet(PEER_V6, OUR_V6, protocol::UDP, 64, &datagram);
    assert_eq!(dropped(&mut bench, &frame(EtherType::IPV6, &packet)), DropReason::BadTransportChecksum);
    for len in [0, 7, 10, 255] {
        let mut datagram = datagram;
        datagram[5] = len;
        assert_eq!(dropped(&mut bench, &v4_frame(protocol::UDP, &datagram)), DropReason::BadTransportLength);
    }
}

/// Processes a frame completely, as the stack does.
fn feed(bench: &mut NetworkFixture, bytes: &[u8], checksum: RxChecksum, gso: Option<Gso>) {
    let frame = RxFrame { checksum, gso, ..RxFrame::new(bytes) };
    let mut parsed = bench.network.parse(bench.port, &frame);
    bench.network.count_received(&parsed);
    let mut buffers = Vec::new();
    // Nested fragments: each round removes one header, so the loop ends.
    loop {
        let input = match parsed {
            ParsedFrame::Tcp(l4) | ParsedFrame::Udp(l4) => {
                bench.network.send_icmp_unreachable(bench.now, &l4, crate::icmp::UnreachableReason::Port);
                return;
            }
            ParsedFrame::Drop(_) => return,
            ParsedFrame::Other(other) => bench.network.input(bench.now, &other),
        };
        match input {
            crate::ip::InputResult::Reassembled(buffer) => buffers.push(buffer),
            crate::ip::InputResult::Error(error) => {
                bench.network.accept_path_mtu(bench.now, &error);
                return;
            }
            crate::ip::InputResult::Handled => return,
        }
        parsed = bench.network.parse_reassembled(buffers.last().unwrap());
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
        let mut bench = NetworkFixture::new();
        for bytes in &frames {
            feed(&mut bench, bytes, RxChecksum::Unverified, None);
            let mut ours = bytes.clone();
            if ours.len() >= 14 {
                ours[..6].copy_from_slice(&OUR_MAC.0);
                let ethertype = if ours[13] & 1 == 0 { [8, 0] } else { [0x86, 0xdd] };
                ours[12..14].copy_from_slice(&ethertype);
                feed(&mut bench, &ours, RxChecksum::Verified, None);
            }
        }
        bench.advance(core::time::Duration::from_secs(100));
    }

    #[test]
    fn damaged_frames_never_panic_and_budgets_hold(
        damages in prop::collection::vec((any::<prop::sample::Index>(), prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4), any::<bool>(), any::<u16>()), 1..60)
    ) {
        let config = crate::ip::NetworkConfig { fragment_bytes: 65_536, neighbours_max: 16, ..network_config() };
        let mut bench = NetworkFixture::with(config, &link_config(), CAPABILITIES);
        let samples = samples();
        for (which, damage, fix, cut) in damages {
            let mut bytes = which.get(&samples).clone();
            for (at, value) in damage {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            bytes.truncate(bytes.len().max(usize::from(cut % 300)));
            if fix && bytes[12..14] == [8, 0] && bytes.len() >= 14 + usize::from(bytes[14] & 15) * 4 && bytes.len() >= 34 {
                fix_checksum(&mut bytes);
            }
            let checksum = if cut % 2 == 0 { RxChecksum::Verified } else { RxChecksum::Unverified };
            feed(&mut bench, &bytes, checksum, None);
        }
        bench.advance(core::time::Duration::from_secs(100));
        prop_assert!(bench.network.neighbours().count() <= 16);
    }
}
