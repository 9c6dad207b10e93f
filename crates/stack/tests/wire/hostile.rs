//! Arbitrary bytes never make a parser panic, read out of bounds, or accept a truncated header.

use crate::values::*;
use core::net::{Ipv4Addr, Ipv6Addr};
use ginnel_stack::wire::tcp::{TcpOptions, TcpSegment, emit};
use ginnel_stack::wire::{arp, ethernet, icmpv4, icmpv6, igmp, ipv4, ipv6, mld, ndp, udp};
use proptest::prelude::*;

/// Calls every function that parses received bytes, and checks the properties that hold for all bytes.
fn read_all(bytes: &[u8], a: Ipv6Addr, b: Ipv6Addr) -> Result<(), TestCaseError> {
    if let Ok(header) = ethernet::Header::parse(bytes) {
        prop_assert!(usize::from(header.len) <= bytes.len());
    }
    let _ = arp::ArpPacket::parse(bytes);
    if let Ok(header) = ipv4::Header::parse(bytes) {
        let payload = header.payload(bytes);
        prop_assert_eq!(payload.len() + usize::from(header.header_len), usize::from(header.total_len));
        prop_assert!(usize::from(header.fragment_offset) + payload.len() <= 65_535);
        header.checksum_ok(bytes);
    }
    if let Ok((header, rest)) = ipv4::Header::parse_quoted(bytes) {
        prop_assert_eq!(rest.len() + usize::from(header.header_len), bytes.len());
        header.payload(bytes);
    }
    if let Ok(header) = ipv6::Header::parse(bytes) {
        prop_assert_eq!(header.payload(bytes).len(), usize::from(header.payload_len));
    }
    if let Ok(header) = ipv6::Header::parse_quoted(bytes)
        && let Ok(chain) = ipv6::walk_header_chain(bytes, &header)
    {
        prop_assert!(chain.offset <= bytes.len() && chain.next_header_offset < chain.offset);
        prop_assert_eq!(bytes[chain.next_header_offset], chain.protocol);
        if let Some(fragment) = chain.fragment {
            prop_assert!(
                fragment.next_header_offset < fragment.header_offset
                    && fragment.header_offset + 8 == chain.offset
            );
            prop_assert_eq!(bytes[fragment.next_header_offset], 44);
        }
    }
    let _ = ipv6::FragmentHeader::parse(bytes);
    if let Ok(segment) = TcpSegment::parse(bytes) {
        prop_assert_eq!(20 + segment.options.len() + segment.payload.len(), bytes.len());
        prop_assert_eq!(20 + segment.options.len(), usize::from(segment.header.header_len));
    }
    if let Ok(header) = udp::Header::parse(bytes) {
        prop_assert_eq!(header.payload(bytes).len() + 8, header.datagram(bytes).len());
    }
    let _ = icmpv4::Message::parse(bytes);
    let _ = icmpv6::Message::parse(bytes, a, b);
    let _ = ndp::NdpMessage::parse(bytes, a, b, 255);
    let _ = mld::parse_query(bytes, a, 1);
    let _ = mld::parse_report_v1(bytes);
    let _ = igmp::Message::parse(bytes);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn random_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200), a in v6(), b in v6()) {
        read_all(&bytes, a, b)?;
    }

    #[test]
    fn plausible_prefixes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 1..200), first in 0usize..12, a in link_local(), b in unicast()) {
        bytes[0] = [0x45, 0x46, 0x4f, 0x60, 130, 133, 134, 135, 136, 137, 0, 3][first];
        if let Some(byte) = bytes.get_mut(1) {
            *byte &= 1;
        }
        // Lengths that are often consistent: IPv4's total length, IPv6's payload length.
        if bytes[0] >> 4 == 4 && bytes.len() >= 4 {
            bytes[2] = 0;
        }
        if bytes[0] >> 4 == 6 && bytes.len() >= 7 {
            bytes[4] = 0;
            bytes[6] = [0, 43, 44, 60][usize::from(bytes[6]) % 4];
        }
        read_all(&bytes, a, b)?;
    }

    #[test]
    fn damaged_extension_chains(mut body in prop::collection::vec(prop_oneof![Just(0u8), Just(1), Just(6), Just(43), Just(44), Just(60), any::<u8>()], 8..120), first in 0usize..4, declared in 0u16..140) {
        let next_header = [0, 43, 44, 60][first];
        let header = ipv6::Header { dscp: 0, ecn: 0, flow_label: 0, payload_len: declared, next_header, hop_limit: 1, src: Ipv6Addr::LOCALHOST, dst: Ipv6Addr::LOCALHOST };
        let mut packet = vec![0; 40];
        header.emit(&mut packet);
        packet.append(&mut body);
        if let Ok(chain) = ipv6::walk_header_chain(&packet, &header) {
            prop_assert!(chain.offset <= packet.len().min(40 + usize::from(declared)));
        }
        read_all(&packet, Ipv6Addr::LOCALHOST, Ipv6Addr::LOCALHOST)?;
    }

    #[test]
    fn random_tcp_options(bytes in prop::collection::vec(prop_oneof![0u8..12, Just(28), any::<u8>()], 0..60)) {
        let options = TcpOptions::parse(&bytes);
        prop_assert!(options.window_scale.is_none_or(|shift| shift <= 14));
        prop_assert!(options.mss != Some(0));
        if let Some(timestamps) = TcpOptions::parse_timestamps_only(&bytes) {
            prop_assert_eq!(&options, &TcpOptions { timestamps: Some(timestamps), ..Default::default() });
        }
        // Parsed options can be emitted.
        let mut out = [0; 60];
        prop_assert!(options.encoded_len() <= 40 && options.encoded_len().is_multiple_of(4));
        let len = emit(&Default::default(), &options, &mut out);
        let again = TcpOptions::parse(&out[20..len]);
        let mut expected = options;
        expected.sack_blocks.truncate(again.sack_blocks.len());
        prop_assert_eq!(again, expected);
    }

    #[test]
    fn cut_tcp_options((_, options) in tcp_header(), cut in any::<prop::sample::Index>()) {
        let mut out = [0; 60];
        let len = emit(&Default::default(), &options, &mut out);
        let whole = &out[20..len];
        let read = TcpOptions::parse(&whole[..cut.index(whole.len() + 1)]);
        // Each option is either unchanged or absent.
        prop_assert!(read.mss.is_none() || read.mss == options.mss);
        prop_assert!(read.window_scale.is_none() || read.window_scale == options.window_scale);
        prop_assert!(read.timestamps.is_none() || read.timestamps == options.timestamps);
        prop_assert!(read.user_timeout.is_none() || read.user_timeout == options.user_timeout);
        prop_assert!(read.sack_blocks.is_empty() || read.sack_blocks == options.sack_blocks);
    }

    #[test]
    fn truncated_headers_are_rejected(ethernet in ethernet_header(), arp in arp_packet(), v4 in ipv4_header(9), v6 in ipv6_header(9), (tcp, options) in tcp_header(), fragment in fragment_header()) {
        let mut out = [0; 80];
        let len = ethernet.emit(&mut out);
        prop_assert!((0..len).all(|cut| ethernet::Header::parse(&out[..cut]).is_err()));
        let len = arp.emit(&mut out);
        prop_assert!((0..len).all(|cut| arp::ArpPacket::parse(&out[..cut]).is_err()));
        let len = v4.emit(&mut out) + 9;
        prop_assert!((0..len).all(|cut| ipv4::Header::parse(&out[..cut]).is_err()));
        prop_assert!((0..20).all(|cut| ipv4::Header::parse_quoted(&out[..cut]).is_err()));
        let len = v6.emit(&mut out) + 9;
        prop_assert!((0..len).all(|cut| ipv6::Header::parse(&out[..cut]).is_err()));
        prop_assert!((0..40).all(|cut| ipv6::Header::parse_quoted(&out[..cut]).is_err()));
        let len = emit(&tcp, &options, &mut out);
        prop_assert!((0..len).all(|cut| TcpSegment::parse(&out[..cut]).is_err()));
        let len = fragment.emit(&mut out);
        prop_assert!((0..len).all(|cut| ipv6::FragmentHeader::parse(&out[..cut]).is_err()));
        let len = 8 + (udp::Header { len: 17, ..Default::default() }.emit(&mut out) + 1);
        prop_assert!((0..len).all(|cut| udp::Header::parse(&out[..cut]).is_err()));
    }
}

#[test]
fn addresses_of_headers_are_in_network_order() {
    let mut packet = [0; 20];
    packet[0] = 0x45;
    packet[3] = 20;
    packet[12..20].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
    let header = ipv4::Header::parse(&packet).unwrap();
    assert_eq!((header.src, header.dst), (Ipv4Addr::new(1, 2, 3, 4), Ipv4Addr::new(5, 6, 7, 8)));
}
