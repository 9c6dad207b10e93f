//! Headers that this stack emits are parsed by etherparse, and headers that etherparse emits are parsed by
//! this stack.

use crate::values::*;
use core::net::Ipv6Addr;
use etherparse::*;
use ginnel_stack::wire::checksum::{Sum, pseudo_v4, pseudo_v6};
use ginnel_stack::wire::echo::Echo;
use ginnel_stack::wire::tcp::{SeqNumber, TcpFlags, TcpOptions, TcpSegment, Timestamps, emit};
use ginnel_stack::wire::{arp, ethernet, icmpv4, icmpv6 as our_icmpv6, ipv4, ipv6, ndp, protocol, udp};
use proptest::prelude::*;

fn options_of(header: &TcpHeader) -> TcpOptions {
    let mut options = TcpOptions::default();
    for element in header.options_iterator() {
        match element {
            Ok(TcpOptionElement::MaximumSegmentSize(mss)) => options.mss = Some(mss),
            Ok(TcpOptionElement::WindowScale(shift)) => options.window_scale = Some(shift),
            Ok(TcpOptionElement::SelectiveAcknowledgementPermitted) => options.sack_permitted = true,
            Ok(TcpOptionElement::Timestamp(tsval, tsecr)) => {
                options.timestamps = Some(Timestamps { tsval, tsecr })
            }
            Ok(TcpOptionElement::SelectiveAcknowledgement(first, more)) => {
                let blocks = core::iter::once(first).chain(more.into_iter().flatten());
                options.sack_blocks = blocks.map(|(a, b)| (SeqNumber(a), SeqNumber(b))).collect();
            }
            Ok(TcpOptionElement::Noop) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    options
}

proptest! {
    #[test]
    fn ethernet_with_and_without_tag(header in ethernet_header()) {
        let mut ours = [0xee; 18];
        let len = header.emit(&mut ours);
        let outer = if header.vlan.is_some() { ethernet::EtherType::VLAN.0 } else { header.ethertype.0 };
        let mut theirs = Ethernet2Header { source: header.src.0, destination: header.dst.0, ether_type: EtherType(outer) }.to_bytes().to_vec();
        if let Some(tag) = header.vlan {
            let tag = SingleVlanHeader {
                pcp: VlanPcp::try_new(tag.pcp).unwrap(),
                drop_eligible_indicator: tag.dei,
                vlan_id: VlanId::try_new(tag.vid).unwrap(),
                ether_type: EtherType(header.ethertype.0),
            };
            theirs.extend(tag.to_bytes());
        }
        prop_assert_eq!(&ours[..len], &theirs[..]);
        prop_assert_eq!(ethernet::Header::parse(&theirs), Ok(header));
    }

    #[test]
    fn arp_packets(packet in arp_packet()) {
        let mut ours = [0xee; 28];
        packet.emit(&mut ours);
        let theirs = ArpPacket::from_slice(&ours).unwrap().try_eth_ipv4().unwrap();
        prop_assert_eq!(arp::ArpPacket::parse(&theirs.to_bytes()), Ok(packet));
        prop_assert_eq!((theirs.sender_mac, theirs.target_mac), (packet.sender_mac.0, packet.target_mac.0));
        prop_assert_eq!((theirs.sender_ipv4_addr(), theirs.target_ipv4_addr()), (packet.sender_ip, packet.target_ip));
    }

    #[test]
    fn ipv4_headers_with_options((header, payload) in payload().prop_flat_map(|p| (ipv4_header(p.len()), Just(p))), nops in 0usize..=10) {
        let mut ours = vec![0xee; 20];
        header.emit(&mut ours);
        ours.extend(&payload);
        let (mut theirs, rest) = Ipv4Header::from_slice(&ours).unwrap();
        prop_assert_eq!(theirs.calc_header_checksum(), theirs.header_checksum);
        prop_assert_eq!(rest, &payload[..]);
        prop_assert_eq!((theirs.dscp.value(), theirs.ecn.value(), theirs.fragment_offset.byte_offset()), (header.dscp, header.ecn, header.fragment_offset));

        theirs.options = vec![1; nops * 4][..].try_into().unwrap();
        theirs.set_payload_len(payload.len()).unwrap();
        theirs.header_checksum = theirs.calc_header_checksum();
        let mut bytes = theirs.to_bytes().to_vec();
        bytes.extend(&payload);
        let header = ipv4::Header { header_len: 20 + nops as u8 * 4, total_len: bytes.len() as u16, ..header };
        prop_assert_eq!(ipv4::Header::parse(&bytes), Ok(header));
        prop_assert!(header.checksum_ok(&bytes));
        prop_assert_eq!(header.payload(&bytes), &payload[..]);
    }

    #[test]
    fn ipv6_headers((header, payload) in payload().prop_flat_map(|p| (ipv6_header(p.len()), Just(p)))) {
        let mut ours = vec![0xee; 40];
        header.emit(&mut ours);
        ours.extend(&payload);
        let (theirs, rest) = Ipv6Header::from_slice(&ours).unwrap();
        prop_assert_eq!(rest, &payload[..]);
        prop_assert_eq!((theirs.dscp().value(), theirs.ecn().value(), theirs.flow_label.value()), (header.dscp, header.ecn, header.flow_label));
        let bytes = [&theirs.to_bytes()[..], &payload].concat();
        prop_assert_eq!(ipv6::Header::parse(&bytes), Ok(header));
    }

    #[test]
    fn ipv6_extension_chains(kinds in prop::collection::vec((prop_oneof![Just(43u8), Just(60), Just(44)], 0usize..4), 0..4), hop_by_hop: bool, ident: u32, transport in 61u8..100) {
        // Each kind of header once, as etherparse emits them; options are padding, routes have no segments
        // left, fragments are atomic.
        let mut extensions = Ipv6Extensions::default();
        let options = |units: usize| {
            let len = 6 + 8 * units;
            let mut options = vec![0x1e, len as u8 - 2];
            options.resize(len, 0);
            Ipv6RawExtHeader::new_raw(IpNumber(0), &options).unwrap()
        };
        if hop_by_hop {
            extensions.hop_by_hop_options = Some(options(0));
        }
        for (kind, units) in kinds {
            match kind {
                43 => {
                    let routing = Ipv6RawExtHeader::new_raw(IpNumber(0), &vec![0; 6 + 8 * units]).unwrap();
                    extensions.routing = Some(Ipv6RoutingExtensions { routing, final_destination_options: (units > 2).then(|| options(1)) });
                }
                60 => extensions.destination_options = Some(options(units)),
                _ => extensions.fragment = Some(Ipv6FragmentHeader::new(IpNumber(0), IpFragOffset::ZERO, false, ident)),
            }
        }
        let first = extensions.set_next_headers(IpNumber(transport));
        let mut bytes = Vec::new();
        extensions.write(&mut bytes, first).unwrap();
        let header = ipv6::Header { dscp: 0, ecn: 0, flow_label: 0, payload_len: bytes.len() as u16, next_header: first.0, hop_limit: 1, src: Ipv6Addr::LOCALHOST, dst: Ipv6Addr::LOCALHOST };
        let mut packet = vec![0; 40];
        header.emit(&mut packet);
        packet.extend(bytes);
        let chain = ipv6::walk_header_chain(&packet, &header).unwrap();
        prop_assert_eq!((chain.protocol, chain.offset, chain.fragment), (transport, packet.len(), None));
        prop_assert_eq!(packet[chain.next_header_offset], transport);
        // In a packet that is truncated within the chain, as by an ICMP error, no chain is found.
        for len in 40..packet.len() {
            prop_assert!(ipv6::walk_header_chain(&packet[..len], &header).is_err());
        }
    }

    #[test]
    fn udp_headers(src_port: u16, dst_port: u16, body in payload(), a in v4(), b in v4(), c in v6(), d in v6()) {
        let len = 8 + body.len();
        let v4 = UdpHeader::with_ipv4_checksum(src_port, dst_port, &Ipv4Header::new(0, 0, IpNumber::UDP, a.octets(), b.octets()).unwrap(), &body).unwrap();
        let v6 = {
            let ip = Ipv6Header { source: c.octets(), destination: d.octets(), ..Default::default() };
            UdpHeader::with_ipv6_checksum(src_port, dst_port, &ip, &body).unwrap()
        };
        for (theirs, pseudo) in [(v4, pseudo_v4(a, b, protocol::UDP, len)), (v6, pseudo_v6(c, d, protocol::UDP, len))] {
            let bytes = [&theirs.to_bytes()[..], &body].concat();
            let header = udp::Header::parse(&bytes).unwrap();
            prop_assert_eq!(header, udp::Header { src_port, dst_port, len: len as u16, checksum: theirs.checksum });
            let mut ours = vec![0xee; 8];
            udp::Header { checksum: 0, ..header }.emit(&mut ours);
            ours.extend(&body);
            prop_assert_eq!(pseudo.add(Sum::of(&ours)).finish_udp(), theirs.checksum);
            prop_assert!(pseudo.add(Sum::of(&bytes)).is_valid());
        }
    }

    #[test]
    fn tcp_segments((header, options) in tcp_header(), body in payload(), a in v4(), b in v4(), c in v6(), d in v6()) {
        // etherparse does not know the user timeout option.
        let options = TcpOptions { user_timeout: None, ..options };
        let mut ours = vec![0xee; 60];
        let len = emit(&header, &options, &mut ours);
        ours.truncate(len);
        let header = ginnel_stack::wire::tcp::TcpHeader { header_len: len as u8, ..header };
        ours.extend(&body);

        let (mut theirs, rest) = TcpHeader::from_slice(&ours).unwrap();
        prop_assert_eq!(rest, &body[..]);
        prop_assert_eq!(options_of(&theirs), options.clone());
        let flags = [theirs.fin, theirs.syn, theirs.rst, theirs.psh, theirs.ack, theirs.urg, theirs.ece, theirs.cwr];
        let flags = flags.iter().enumerate().fold(0, |byte, (bit, &set)| byte | u8::from(set) << bit);
        prop_assert_eq!(TcpFlags(flags), header.flags);

        let sum = Sum::of(&ours);
        let checksum4 = pseudo_v4(a, b, protocol::TCP, ours.len()).add(sum).finish();
        prop_assert_eq!(theirs.calc_checksum_ipv4_raw(a.octets(), b.octets(), &body).unwrap(), checksum4);
        let ip = Ipv6Header { source: c.octets(), destination: d.octets(), ..Default::default() };
        let checksum6 = pseudo_v6(c, d, protocol::TCP, ours.len()).add(sum).finish();
        prop_assert_eq!(theirs.calc_checksum_ipv6(&ip, &body).unwrap(), checksum6);

        theirs.checksum = checksum4;
        let bytes = [&theirs.to_bytes()[..], &body].concat();
        prop_assert!(pseudo_v4(a, b, protocol::TCP, bytes.len()).add(Sum::of(&bytes)).is_valid());
        let segment = TcpSegment::parse(&bytes).unwrap();
        prop_assert_eq!(segment.header, header);
        prop_assert_eq!(segment.payload, &body[..]);
        prop_assert_eq!(TcpOptions::parse(segment.options), options);
    }

    #[test]
    fn icmpv4_messages(code in 0u8..16, mtu: u16, pointer: u8, gateway in v4(), body in payload(), kind in 0..4) {
        let (message, theirs) = match kind {
            0 => {
                let mtu = if code == 4 { mtu } else { 0 };
                let header = icmpv4_unreachable(code, mtu);
                (icmpv4::Message::Unreachable { code, mtu, quote: &body }, Icmpv4Type::DestinationUnreachable(header))
            }
            1 => {
                let code = code % 4;
                let header = etherparse::icmpv4::RedirectHeader {
                    code: etherparse::icmpv4::RedirectCode::from_u8(code).unwrap(),
                    gateway_internet_address: gateway.octets(),
                };
                (icmpv4::Message::Redirect { code, gateway, quote: &body }, Icmpv4Type::Redirect(header))
            }
            2 => {
                let code = code % 2;
                let their_code = etherparse::icmpv4::TimeExceededCode::from_u8(code).unwrap();
                (icmpv4::Message::TimeExceeded { code, quote: &body }, Icmpv4Type::TimeExceeded(their_code))
            }
            _ => {
                let header = etherparse::icmpv4::ParameterProblemHeader::PointerIndicatesError(pointer);
                (icmpv4::Message::ParameterProblem { code: 0, pointer, quote: &body }, Icmpv4Type::ParameterProblem(header))
            }
        };
        let mut ours = vec![0xee; message.encoded_len()];
        message.emit(&mut ours);
        let bytes = [&Icmpv4Header::with_checksum(theirs, &body).to_bytes()[..], &body].concat();
        prop_assert_eq!(&ours, &bytes);
        prop_assert_eq!(icmpv4::Message::parse(&bytes), Ok(message));
    }

    #[test]
    fn icmpv6_messages(a in v6(), b in v6(), id: u16, seq: u16, mtu: u32, body in payload(), code in 0u8..7, kind in 0..5) {
        use etherparse::icmpv6::*;
        let (message, theirs) = match kind {
            0 => (our_icmpv6::Message::EchoRequest(Echo { ident: id, seq, data: &body }), Icmpv6Type::EchoRequest(IcmpEchoHeader { id, seq })),
            1 => (our_icmpv6::Message::Unreachable { code, quote: &body }, Icmpv6Type::DestinationUnreachable(DestUnreachableCode::from_u8(code).unwrap())),
            2 => (our_icmpv6::Message::PacketTooBig { mtu, quote: &body }, Icmpv6Type::PacketTooBig { mtu }),
            3 => (our_icmpv6::Message::TimeExceeded { code: code % 2, quote: &body }, Icmpv6Type::TimeExceeded(TimeExceededCode::from_u8(code % 2).unwrap())),
            _ => {
                let header = ParameterProblemHeader { code: ParameterProblemCode::from_u8(code).unwrap(), pointer: mtu };
                (our_icmpv6::Message::ParameterProblem { code, pointer: mtu, quote: &body }, Icmpv6Type::ParameterProblem(header))
            }
        };
        let mut ours = vec![0xee; message.encoded_len()];
        message.emit(a, b, &mut ours);
        let header = theirs.to_header(a.octets(), b.octets(), &body).unwrap();
        let bytes = [&header.to_bytes()[..], &body].concat();
        prop_assert_eq!(&ours, &bytes);
        prop_assert_eq!(our_icmpv6::Message::parse(&bytes, a, b), Ok(message));
    }

    #[test]
    fn ndp_messages_of_ours(message in ndp_message(4), a in link_local(), b in unicast()) {
        use etherparse::icmpv6::*;
        let mut ours = vec![0xee; ndp::MESSAGE_LEN_MAX];
        let len = message.emit(a, b, &mut ours);
        ours.truncate(len);
        let (header, rest) = Icmpv6Header::from_slice(&ours).unwrap();
        let checksum = header.icmp_type.calc_checksum(a.octets(), b.octets(), rest).unwrap();
        prop_assert_eq!(header.checksum, checksum);
        let mut macs = Vec::new();
        let mut prefixes = Vec::new();
        let (_, options) = header.icmp_type.payload_from_slice(rest).unwrap().unwrap();
        for option in NdpOptionsIterator::from_slice(options) {
            match option.unwrap() {
                NdpOptionSlice::SourceLinkLayerAddress(option) => macs.push(option.as_bytes()[2..].to_vec()),
                NdpOptionSlice::TargetLinkLayerAddress(option) => macs.push(option.as_bytes()[2..].to_vec()),
                NdpOptionSlice::PrefixInformation(option) => prefixes.push(option.prefix()),
                NdpOptionSlice::Mtu(_) => {}
                other => prop_assert!(false, "{:?}", other),
            }
        }
        let (mac, expected) = match &message {
            ndp::NdpMessage::RouterSolicitation { source_mac } => {
                prop_assert_eq!(header.icmp_type, Icmpv6Type::RouterSolicitation);
                (*source_mac, vec![])
            }
            ndp::NdpMessage::RouterAdvertisement(router) => {
                let fields = RouterAdvertisementHeader {
                    cur_hop_limit: router.hop_limit,
                    managed_address_config: router.managed,
                    other_config: router.other,
                    router_lifetime: router.router_lifetime_s,
                };
                prop_assert_eq!(header.icmp_type, Icmpv6Type::RouterAdvertisement(fields));
                (router.source_mac, router.prefixes.iter().map(|p| p.prefix.octets()).collect())
            }
            ndp::NdpMessage::NeighbourSolicitation { source_mac, .. } => {
                prop_assert_eq!(header.icmp_type, Icmpv6Type::NeighborSolicitation);
                (*source_mac, vec![])
            }
            ndp::NdpMessage::NeighbourAdvertisement { router, solicited, overrides, target_mac, .. } => {
                let fields = NeighborAdvertisementHeader { router: *router, solicited: *solicited, r#override: *overrides };
                prop_assert_eq!(header.icmp_type, Icmpv6Type::NeighborAdvertisement(fields));
                (*target_mac, vec![])
            }
        };
        prop_assert_eq!(macs, mac.map(|m| m.0.to_vec()).into_iter().collect::<Vec<_>>());
        prop_assert_eq!(prefixes, expected);
    }
}

fn icmpv4_unreachable(code: u8, mtu: u16) -> etherparse::icmpv4::DestUnreachableHeader {
    etherparse::icmpv4::DestUnreachableHeader::from_values(code, mtu).unwrap()
}
