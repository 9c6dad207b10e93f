use super::*;
use crate::ip::testbench::*;
use crate::ip::{InputResult, NetworkConfig, ParsedFrame};
use crate::link::LinkConfig;
use crate::wire::ethernet::EtherType;
use crate::wire::{ipv4, ipv6};
use core::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use core::time::Duration;

/// Returns a fixture with both peers as static neighbours.
fn fixture() -> NetworkFixture {
    fixture_with(network_config())
}

fn fixture_with(config: NetworkConfig) -> NetworkFixture {
    let static_neighbours = vec![(PEER_V4.into(), PEER_MAC), (PEER_V6.into(), PEER_MAC)];
    NetworkFixture::with(config, &LinkConfig { static_neighbours, ..link_config() }, CAPABILITIES)
}

fn icmp4(message: &icmpv4::Message<'_>) -> Vec<u8> {
    let mut out = vec![0; message.encoded_len()];
    message.emit(&mut out);
    out
}

fn icmp6_frame(message: &icmpv6::Message<'_>) -> Vec<u8> {
    let mut out = vec![0; message.encoded_len()];
    message.emit(PEER_V6, OUR_V6, &mut out);
    frame(EtherType::IPV6, &ipv6_packet(PEER_V6, OUR_V6, protocol::ICMPV6, 64, &out))
}

/// Returns a TCP packet as this host sends it.
fn our_packet() -> Vec<u8> {
    ipv4_packet(ipv4_header(OUR_V4, PEER_V4, protocol::TCP, 31), &segment(11))
}

fn our_packet6() -> Vec<u8> {
    ipv6_packet(OUR_V6, PEER_V6, protocol::TCP, 64, &segment(11))
}

#[track_caller]
fn error_of(input: InputResult) -> TransportError {
    match input {
        InputResult::Error(error) => error,
        input => panic!("{input:?}"),
    }
}

/// Parses a transmitted ICMP message.
fn sent_icmp4(fixture: &NetworkFixture, check: impl FnOnce(ipv4::Header, icmpv4::Message<'_>)) {
    let frame = fixture.sent_one();
    let (_, packet) = as_received(&frame);
    let header = ipv4::Header::parse(packet).unwrap();
    assert!(header.checksum_ok(packet));
    check(header, icmpv4::Message::parse(header.payload(packet)).unwrap());
}

fn sent_icmp6(fixture: &NetworkFixture, check: impl FnOnce(ipv6::Header, icmpv6::Message<'_>)) {
    let frame = fixture.sent_one();
    let (_, packet) = as_received(&frame);
    let header = ipv6::Header::parse(packet).unwrap();
    check(header, icmpv6::Message::parse(header.payload(packet), header.src, header.dst).unwrap());
}

#[test]
fn echo_requests_are_answered_in_both_families() {
    let mut fixture = fixture();
    let data = b"some data of odd length";
    fixture.input(&v4_frame(
        protocol::ICMP,
        &icmp4(&icmpv4::Message::EchoRequest(Echo { ident: 7, seq: 9, data })),
    ));
    sent_icmp4(&fixture, |header, message| {
        assert_eq!((header.src, header.dst), (OUR_V4, PEER_V4));
        assert_eq!(message, icmpv4::Message::EchoReply(Echo { ident: 7, seq: 9, data }));
    });
    fixture.input(&icmp6_frame(&icmpv6::Message::EchoRequest(Echo { ident: 7, seq: 9, data })));
    sent_icmp6(&fixture, |header, message| {
        assert_eq!((header.src, header.dst), (OUR_V6, PEER_V6));
        assert_eq!(message, icmpv6::Message::EchoReply(Echo { ident: 7, seq: 9, data }));
    });
}

#[test]
fn echo_requests_to_broadcast_addresses_are_not_answered() {
    let mut fixture = fixture();
    let request = icmp4(&icmpv4::Message::EchoRequest(Echo { ident: 7, seq: 9, data: b"" }));
    for dst in [Ipv4Addr::BROADCAST, Ipv4Addr::new(10, 0, 0, 255), Ipv4Addr::new(224, 0, 0, 1)] {
        let header = ipv4_header(PEER_V4, dst, protocol::ICMP, request.len());
        let packet = ipv4_packet(header, &request);
        fixture.input(&frame_to(crate::wire::MacAddr::BROADCAST, None, EtherType::IPV4, &packet));
    }
    assert_eq!(fixture.sent().len(), 0);
    assert_eq!(fixture.network.stats().icmp_echo_ignored, 3);
}

#[test]
fn echo_replies_can_be_disabled() {
    let mut fixture = fixture_with(NetworkConfig { icmp_echo: false, ..network_config() });
    let request = icmpv4::Message::EchoRequest(Echo { ident: 7, seq: 9, data: b"" });
    fixture.input(&v4_frame(protocol::ICMP, &icmp4(&request)));
    assert_eq!(fixture.sent().len(), 0);
}

#[test]
fn longest_echo_request_is_reassembled_and_answered() {
    let mut fixture = fixture();
    let data: Vec<u8> = (0..65_507_u32).map(|at| at as u8).collect();
    let request = icmp4(&icmpv4::Message::EchoRequest(Echo { ident: 1, seq: 1, data: &data }));
    let mut buffer = None;
    for (at, fragment) in request.chunks(1480).enumerate() {
        let offset = at * 1480;
        let header = ipv4::Header {
            more_fragments: offset + fragment.len() < request.len(),
            fragment_offset: offset as u16,
            ..ipv4_header(PEER_V4, OUR_V4, protocol::ICMP, fragment.len())
        };
        if let InputResult::Reassembled(reassembled) =
            fixture.input(&frame(EtherType::IPV4, &ipv4_packet(header, fragment)))
        {
            buffer = Some(reassembled);
        }
    }
    let buffer = buffer.unwrap();
    // What the owner of the network layer does: parse again, input again, return the buffer.
    let ParsedFrame::Other(other) = fixture.network.parse_reassembled(&buffer) else { panic!() };
    fixture.network.input(fixture.now, &other);
    fixture.network.recycle(buffer);
    let frames = fixture.sent();
    assert_eq!(frames.len(), 45);
    let mut payload = Vec::new();
    for bytes in &frames {
        let (_, packet) = as_received(bytes);
        let header = ipv4::Header::parse(packet).unwrap();
        assert_eq!(usize::from(header.fragment_offset), payload.len());
        payload.extend_from_slice(header.payload(packet));
    }
    let reply = icmpv4::Message::parse(&payload).unwrap();
    assert_eq!(reply, icmpv4::Message::EchoReply(Echo { ident: 1, seq: 1, data: &data }));
}

#[test]
fn ping_of_death_is_dropped() {
    let mut fixture = fixture();
    let header = |offset: u16, more, len| ipv4::Header {
        more_fragments: more,
        fragment_offset: offset,
        ..ipv4_header(PEER_V4, OUR_V4, protocol::ICMP, len)
    };
    fixture.input(&frame(EtherType::IPV4, &ipv4_packet(header(0, true, 1480), &[8; 1480])));
    let last = frame(EtherType::IPV4, &ipv4_packet(header(65_528, false, 1000), &[8; 1000]));
    assert!(matches!(fixture.parse(&last), ParsedFrame::Drop(crate::ip::DropReason::BadIpHeader)));
}

#[test]
fn error_about_our_segment_carries_its_sequence_number() {
    let mut fixture = fixture();
    let packet = our_packet();
    // RFC 792 quotes 8 bytes after the header, RFC 1812 more.
    for len in [28, 36, 51] {
        let message = icmpv4::Message::Unreachable { code: 3, mtu: 0, quote: &packet[..len] };
        let error = error_of(fixture.input(&v4_frame(protocol::ICMP, &icmp4(&message))));
        assert_eq!(error.kind, IcmpErrorKind::PortUnreachable);
        assert_eq!(error.local, SocketAddr::new(OUR_V4.into(), 12345));
        assert_eq!(error.remote, SocketAddr::new(PEER_V4.into(), 80));
        assert_eq!((error.protocol, error.seq), (protocol::TCP, Some(0x0102_0304)));
    }
    let packet = our_packet6();
    let message = icmpv6::Message::PacketTooBig { mtu: 1300, quote: &packet };
    let error = error_of(fixture.input(&icmp6_frame(&message)));
    assert_eq!(error.kind, IcmpErrorKind::PacketTooBig { mtu: 1300 });
    assert_eq!(error.seq, Some(0x0102_0304));
}

#[test]
fn error_about_a_foreign_packet_is_ignored() {
    let mut fixture = fixture();
    let foreign = ipv4_packet(ipv4_header(PEER_V4, OUR_V4, protocol::TCP, 31), &segment(11));
    let to_group =
        ipv4_packet(ipv4_header(OUR_V4, Ipv4Addr::new(224, 0, 0, 9), protocol::TCP, 31), &segment(11));
    let icmp = ipv4_packet(ipv4_header(OUR_V4, PEER_V4, protocol::ICMP, 31), &segment(11));
    let mut later = our_packet();
    later[7] = 9;
    let short = our_packet()[..27].to_vec();
    for quote in [&foreign[..], &to_group, &icmp, &later, &short, &[], &[0x45]] {
        let message = icmpv4::Message::Unreachable { code: 3, mtu: 0, quote };
        assert!(matches!(fixture.input(&v4_frame(protocol::ICMP, &icmp4(&message))), InputResult::Handled));
    }
    assert_eq!(fixture.network.stats().icmp_errors_foreign, 7);
    assert_eq!(fixture.network.stats().icmp_errors_in, 0);
}

#[test]
fn icmp_codes_map_as_on_linux() {
    let mut fixture = fixture();
    let packet = our_packet();
    let hard = [2, 3, 6, 7, 8, 9, 10, 13, 14, 15];
    for code in 0..=16 {
        let message = icmpv4::Message::Unreachable { code, mtu: 1000, quote: &packet };
        let error = error_of(fixture.input(&v4_frame(protocol::ICMP, &icmp4(&message))));
        assert_eq!(error.kind.is_hard(), hard.contains(&code), "{code}");
    }
    let packet = our_packet6();
    let hard = [1, 4, 5, 6];
    for code in 0..=6 {
        let error =
            error_of(fixture.input(&icmp6_frame(&icmpv6::Message::Unreachable { code, quote: &packet })));
        assert_eq!(error.kind.is_hard(), hard.contains(&code), "{code}");
    }
}

#[test]
fn path_mtu_applies_after_the_transport_accepts_it() {
    let mut fixture = fixture();
    let packet = our_packet();
    let message = icmpv4::Message::Unreachable { code: 4, mtu: 1400, quote: &packet };
    let error = error_of(fixture.input(&v4_frame(protocol::ICMP, &icmp4(&message))));
    assert_eq!(fixture.route(PEER_V4).mtu, 1500);
    assert_eq!(fixture.network.accept_path_mtu(fixture.now, &error), Some(1400));
    assert_eq!(fixture.route(PEER_V4).mtu, 1400);
    assert_eq!(fixture.network.accept_path_mtu(fixture.now, &error), None, "the path MTU is unchanged");
    let absurd = TransportError { kind: IcmpErrorKind::PacketTooBig { mtu: 1 }, ..error };
    assert_eq!(fixture.network.accept_path_mtu(fixture.now, &absurd), Some(552));
    let route = fixture.route(PEER_V4);
    assert_eq!((route.mtu, route.mtu_locked), (552, true));
    fixture.advance(Duration::from_secs(600));
    let route = fixture.route(PEER_V4);
    assert_eq!((route.mtu, route.mtu_locked), (1500, false));
    let other = TransportError { kind: IcmpErrorKind::TimeExceeded, ..error };
    assert_eq!(fixture.network.accept_path_mtu(fixture.now, &other), None);
}

#[test]
fn ipv6_path_mtu_never_falls_below_1280() {
    let mut fixture = fixture();
    let packet = our_packet6();
    let message = icmpv6::Message::PacketTooBig { mtu: 100, quote: &packet };
    let error = error_of(fixture.input(&icmp6_frame(&message)));
    assert_eq!(fixture.network.accept_path_mtu(fixture.now, &error), Some(1280));
    let route = fixture.route(PEER_V6);
    assert_eq!((route.mtu, route.mtu_locked), (1280, false));
}

#[test]
fn datagrams_respect_the_path_mtu() {
    let mut fixture = fixture();
    let packet = our_packet();
    let message = icmpv4::Message::Unreachable { code: 4, mtu: 600, quote: &packet };
    let error = error_of(fixture.input(&v4_frame(protocol::ICMP, &icmp4(&message))));
    fixture.network.accept_path_mtu(fixture.now, &error);
    let data = [1; 1000];
    fixture.input(&v4_frame(
        protocol::ICMP,
        &icmp4(&icmpv4::Message::EchoRequest(Echo { ident: 1, seq: 1, data: &data })),
    ));
    let lens: Vec<_> = fixture.sent().iter().map(Vec::len).collect();
    assert_eq!(lens, [14 + 20 + 576, 14 + 20 + 432]);
}

#[test]
fn redirects_and_malformed_messages_are_ignored() {
    let mut fixture = fixture();
    let packet = our_packet();
    let redirect = icmpv4::Message::Redirect { code: 1, gateway: ROUTER_V4, quote: &packet };
    fixture.input(&v4_frame(protocol::ICMP, &icmp4(&redirect)));
    let mut broken = icmp4(&icmpv4::Message::Unreachable { code: 3, mtu: 0, quote: &packet });
    broken[20] ^= 1;
    fixture.input(&v4_frame(protocol::ICMP, &broken));
    fixture.input(&v4_frame(protocol::ICMP, &broken[..7]));
    assert_eq!(fixture.network.stats().redirects_ignored, 1);
    assert_eq!(fixture.network.stats().icmp_invalid, 2);
    assert_eq!(fixture.sent().len(), 0);
}

#[test]
fn unknown_protocols_are_rejected_in_both_families() {
    let mut fixture = fixture();
    let bytes = v4_frame(99, &[1; 100]);
    fixture.input(&bytes);
    sent_icmp4(&fixture, |header, message| {
        assert_eq!((header.dscp, header.dst), (0x30, PEER_V4));
        assert_eq!(message, icmpv4::Message::Unreachable { code: 2, mtu: 0, quote: &bytes[14..] });
    });
    let bytes = frame(EtherType::IPV6, &ipv6_packet(PEER_V6, OUR_V6, 99, 64, &[1; 100]));
    fixture.input(&bytes);
    sent_icmp6(&fixture, |_, message| {
        assert_eq!(message, icmpv6::Message::ParameterProblem { code: 1, pointer: 6, quote: &bytes[14..] });
    });
    fixture.input(&frame(EtherType::IPV6, &ipv6_packet(PEER_V6, OUR_V6, protocol::NO_NEXT_HEADER, 64, &[])));
    assert_eq!(fixture.sent().len(), 0);
}

#[test]
fn unknown_options_are_reported_by_option_type() {
    let mut fixture = fixture();
    let packet = |kind: u8, dst: Ipv6Addr, next: u8, transport: &[u8]| {
        let payload = [&[next, 0, kind, 4, 0, 0, 0, 0], transport].concat();
        frame(EtherType::IPV6, &ipv6_packet(PEER_V6, dst, protocol::DESTINATION_OPTIONS, 64, &payload))
    };
    let all = "ff02::1".parse().unwrap();
    fixture.input(&packet(0x80 | 30, OUR_V6, 99, &[0; 8]));
    sent_icmp6(&fixture, |header, message| {
        assert_eq!(header.src, OUR_V6);
        assert!(matches!(message, icmpv6::Message::ParameterProblem { code: 2, pointer: 42, .. }));
    });
    // Packets to a group are reported only if the option type says so.
    fixture.input(&packet(0x80 | 30, all, 99, &[0; 8]));
    sent_icmp6(&fixture, |header, _| assert_eq!(header.src, OUR_V6));
    fixture.input(&packet(0xc0 | 30, all, 99, &[0; 8]));
    assert_eq!(fixture.sent().len(), 0);
    // ICMPv6 errors are never reported.
    fixture.input(&packet(0x80 | 30, OUR_V6, protocol::ICMPV6, &[3, 0, 0, 0, 0, 0, 0, 0]));
    assert_eq!(fixture.sent().len(), 0);
    fixture.input(&packet(0x80 | 30, OUR_V6, protocol::ICMPV6, &[128, 0, 0, 0, 0, 0, 0, 0]));
    assert_eq!(fixture.sent().len(), 1);
    assert!(matches!(fixture.parse(&packet(0x40 | 30, OUR_V6, 99, &[0; 8])), ParsedFrame::Drop(_)));
}

#[test]
fn errors_are_rate_limited_and_quotes_truncated() {
    let mut fixture = fixture();
    let bytes = v4_frame(99, &[1; 1400]);
    for _ in 0..20 {
        fixture.input(&bytes);
    }
    let frames = fixture.sent();
    assert_eq!(frames.len(), 6);
    assert!(frames.iter().all(|frame| frame.len() == 14 + 576));
    assert_eq!(fixture.network.stats().icmp_errors_limited, 14);
    let bytes = frame(EtherType::IPV6, &ipv6_packet(PEER_V6, OUR_V6, 99, 64, &[1; 1400]));
    fixture.input(&bytes);
    assert_eq!(fixture.sent_one().len(), 14 + 1280);
}

#[test]
fn reassembly_timeout_quotes_the_first_fragment() {
    let mut fixture = fixture();
    let fragment = |offset: u16| ipv4::Header {
        more_fragments: true,
        fragment_offset: offset,
        ..ipv4_header(PEER_V4, OUR_V4, protocol::UDP, 16)
    };
    fixture.input(&frame(EtherType::IPV4, &ipv4_packet(fragment(0), &[5; 16])));
    fixture.advance(Duration::from_millis(29_999));
    assert_eq!(fixture.sent().len(), 0);
    fixture.advance(Duration::from_millis(1));
    sent_icmp4(&fixture, |_, message| {
        let quote = ipv4_packet(fragment(0), &[5; 16]);
        assert_eq!(message, icmpv4::Message::TimeExceeded { code: 1, quote: &quote });
    });
    fixture.input(&frame(EtherType::IPV4, &ipv4_packet(fragment(16), &[5; 16])));
    fixture.advance(Duration::from_secs(31));
    assert_eq!(fixture.sent().len(), 0, "no error without the first fragment");
    assert_eq!(fixture.network.stats().reassembly_timeouts, 2);
    let fragment = [&[protocol::UDP, 0, 0, 1, 0, 0, 0, 9], &[6; 16][..]].concat();
    fixture.input(&frame(EtherType::IPV6, &ipv6_packet(PEER_V6, OUR_V6, protocol::FRAGMENT, 64, &fragment)));
    fixture.advance(Duration::from_millis(59_999));
    assert_eq!(fixture.sent().len(), 0);
    fixture.advance(Duration::from_millis(1));
    sent_icmp6(&fixture, |_, message| {
        assert!(matches!(message, icmpv6::Message::TimeExceeded { code: 1, quote } if quote.len() == 64));
    });
}

#[test]
fn ipv6_fragments_are_reassembled_and_invalid_ones_reported() {
    let mut fixture = fixture();
    let fragment = |offset: u16, more: bool, payload: &[u8]| {
        let field = (offset | u16::from(more)).to_be_bytes();
        let payload = [&[protocol::UDP, 0, field[0], field[1], 0, 0, 0, 9], payload].concat();
        frame(EtherType::IPV6, &ipv6_packet(PEER_V6, OUR_V6, protocol::FRAGMENT, 64, &payload))
    };
    let mut datagram = vec![0, 5, 0, 6, 0, 27, 0, 0];
    datagram.extend_from_slice(&[9; 19]);
    let sum = crate::wire::checksum::pseudo_v6(PEER_V6, OUR_V6, protocol::UDP, 27)
        .add(crate::wire::checksum::Sum::of(&datagram));
    datagram[6..8].copy_from_slice(&sum.finish_udp().to_be_bytes());
    assert!(matches!(fixture.input(&fragment(16, false, &datagram[16..])), InputResult::Handled));
    let InputResult::Reassembled(buffer) = fixture.input(&fragment(0, true, &datagram[..16])) else {
        panic!()
    };
    let ParsedFrame::Udp(l4) = fixture.network.parse_reassembled(&buffer) else { panic!() };
    assert_eq!(l4.bytes, datagram);
    // RFC 6946: an atomic fragment is a whole packet.
    assert!(matches!(fixture.parse(&fragment(0, false, &datagram)), ParsedFrame::Udp(_)));
    // RFC 8200 §4.5: a length that is not a multiple of 8, and a fragment beyond the longest packet.
    fixture.input(&fragment(0, true, &datagram[..15]));
    sent_icmp6(&fixture, |_, message| {
        assert!(matches!(message, icmpv6::Message::ParameterProblem { code: 0, pointer: 4, .. }));
    });
    fixture.input(&fragment(65_528, false, &datagram));
    sent_icmp6(&fixture, |_, message| {
        assert!(matches!(message, icmpv6::Message::ParameterProblem { code: 0, pointer: 42, .. }));
    });
    // RFC 7112: the first fragment must contain all headers.
    let chain =
        [&[protocol::DESTINATION_OPTIONS, 0, 0, 1, 0, 0, 0, 7][..], &[protocol::UDP, 1, 0, 0, 0, 0, 0, 0]]
            .concat();
    fixture.input(&frame(EtherType::IPV6, &ipv6_packet(PEER_V6, OUR_V6, protocol::FRAGMENT, 64, &chain)));
    sent_icmp6(&fixture, |_, message| {
        assert!(matches!(message, icmpv6::Message::ParameterProblem { code: 3, .. }));
    });
}
