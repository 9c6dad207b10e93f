//! Headers that this stack emits are parsed by smoltcp, and headers that smoltcp emits are parsed by this
//! stack.

use crate::values::*;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use ginnel_stack::wire::checksum::{Sum, pseudo_v4, pseudo_v6};
use ginnel_stack::wire::echo::Echo;
use ginnel_stack::wire::group_record::{self, GroupQuery, GroupRecord, RecordType};
use ginnel_stack::wire::tcp::{SeqNumber, TcpFlags, TcpOptions, TcpSegment, Timestamps, emit};
use ginnel_stack::wire::{MacAddr, arp, ethernet, icmpv4, icmpv6, ipv4, ipv6, mld, ndp, protocol, udp};
use proptest::prelude::*;
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::time::Duration;
use smoltcp::wire::*;

fn caps() -> ChecksumCapabilities {
    ChecksumCapabilities::default()
}

fn raw_mac(mac: MacAddr) -> RawHardwareAddress {
    EthernetAddress(mac.0).into()
}

/// Fills in a checksum field that was emitted as 0.
fn complete_v4(src: Ipv4Addr, dst: Ipv4Addr, protocol: u8, at: usize, bytes: &mut [u8]) {
    let sum = pseudo_v4(src, dst, protocol, bytes.len()).add(Sum::of(bytes));
    bytes[at..at + 2].copy_from_slice(&sum.finish_udp().to_be_bytes());
}

proptest! {
    #[test]
    fn ethernet_without_tag(header in ethernet_header()) {
        let header = ethernet::Header { vlan: None, len: 14, ..header };
        let mut ours = [0xee; 14];
        header.emit(&mut ours);
        let theirs = EthernetFrame::new_checked(&ours).unwrap();
        prop_assert_eq!((theirs.dst_addr().0, theirs.src_addr().0), (header.dst.0, header.src.0));
        prop_assert_eq!(u16::from(theirs.ethertype()), header.ethertype.0);

        let mut bytes = [0xee; 14];
        let mut frame = EthernetFrame::new_unchecked(&mut bytes);
        frame.set_dst_addr(EthernetAddress(header.dst.0));
        frame.set_src_addr(EthernetAddress(header.src.0));
        frame.set_ethertype(header.ethertype.0.into());
        prop_assert_eq!(bytes, ours);
        prop_assert_eq!(ethernet::Header::parse(&bytes), Ok(header));
    }

    #[test]
    fn arp_packets(packet in arp_packet()) {
        let repr = ArpRepr::EthernetIpv4 {
            operation: if packet.operation == arp::ArpOperation::Request { ArpOperation::Request } else { ArpOperation::Reply },
            source_hardware_addr: EthernetAddress(packet.sender_mac.0),
            source_protocol_addr: packet.sender_ip,
            target_hardware_addr: EthernetAddress(packet.target_mac.0),
            target_protocol_addr: packet.target_ip,
        };
        let (mut ours, mut theirs) = ([0xee; 28], [0xee; 28]);
        packet.emit(&mut ours);
        repr.emit(&mut ArpPacket::new_unchecked(&mut theirs));
        prop_assert_eq!(ours, theirs);
        prop_assert_eq!(ArpRepr::parse(&ArpPacket::new_unchecked(&ours)), Ok(repr));
        prop_assert_eq!(arp::ArpPacket::parse(&theirs), Ok(packet));
    }

    #[test]
    fn ipv4_headers((header, payload) in payload().prop_flat_map(|p| (ipv4_header(p.len()), Just(p)))) {
        let mut ours = vec![0xee; 20];
        header.emit(&mut ours);
        ours.extend(&payload);
        let packet = Ipv4Packet::new_checked(&ours[..]).unwrap();
        prop_assert!(packet.verify_checksum());
        prop_assert_eq!(packet.payload(), &payload[..]);

        let mut theirs = vec![0; 20];
        let mut packet = Ipv4Packet::new_unchecked(&mut theirs[..]);
        packet.set_version(4);
        packet.set_header_len(20);
        packet.set_dscp(header.dscp);
        packet.set_ecn(header.ecn);
        packet.set_total_len(header.total_len);
        packet.set_ident(header.ident);
        packet.set_dont_frag(header.dont_fragment);
        packet.set_more_frags(header.more_fragments);
        packet.set_frag_offset(header.fragment_offset);
        packet.set_hop_limit(header.ttl);
        packet.set_next_header(header.protocol.into());
        packet.set_src_addr(header.src);
        packet.set_dst_addr(header.dst);
        packet.fill_checksum();
        prop_assert_eq!(&ours[..20], &theirs[..]);
        theirs.extend(&payload);
        let parsed = ipv4::Header::parse(&theirs);
        prop_assert_eq!(parsed, Ok(header));
        prop_assert!(header.checksum_ok(&theirs));
        prop_assert_eq!(header.payload(&theirs), &payload[..]);
    }

    #[test]
    fn ipv6_headers((header, payload) in payload().prop_flat_map(|p| (ipv6_header(p.len()), Just(p)))) {
        let mut ours = vec![0xee; 40];
        header.emit(&mut ours);
        ours.extend(&payload);
        prop_assert_eq!(Ipv6Packet::new_checked(&ours[..]).unwrap().payload(), &payload[..]);

        let mut theirs = vec![0; 40];
        let mut packet = Ipv6Packet::new_unchecked(&mut theirs[..]);
        packet.set_version(6);
        packet.set_traffic_class(header.dscp << 2 | header.ecn);
        packet.set_flow_label(header.flow_label);
        packet.set_payload_len(header.payload_len);
        packet.set_next_header(header.next_header.into());
        packet.set_hop_limit(header.hop_limit);
        packet.set_src_addr(header.src);
        packet.set_dst_addr(header.dst);
        prop_assert_eq!(&ours[..40], &theirs[..]);
        theirs.extend(&payload);
        prop_assert_eq!(ipv6::Header::parse(&theirs), Ok(header));
        prop_assert_eq!(header.payload(&theirs), &payload[..]);
    }

    #[test]
    fn ipv6_fragment_headers(header in fragment_header()) {
        let mut ours = [0xee; 8];
        header.emit(&mut ours);
        let repr = Ipv6FragmentRepr { frag_offset: header.offset / 8, more_frags: header.more_fragments, ident: header.ident };
        // smoltcp's view begins after the next-header and reserved bytes.
        prop_assert_eq!(Ipv6FragmentRepr::parse(&Ipv6FragmentHeader::new_unchecked(&ours[2..])), Ok(repr));
        let mut theirs = [header.next_header, 0, 0, 0, 0, 0, 0, 0];
        repr.emit(&mut Ipv6FragmentHeader::new_unchecked(&mut theirs[2..]));
        prop_assert_eq!(ipv6::FragmentHeader::parse(&theirs), Ok(header));
        prop_assert_eq!(ours, theirs);
    }

    #[test]
    fn udp_over_both(src_port in 1u16.., dst_port in 1u16.., body in payload(), a4 in v4(), b4 in v4(), a6 in v6(), b6 in v6()) {
        let repr = UdpRepr { src_port, dst_port };
        let len = 8 + body.len();
        for (a, b) in [(IpAddr::V4(a4), IpAddr::V4(b4)), (IpAddr::V6(a6), IpAddr::V6(b6))] {
            let pseudo = match (a, b) {
                (IpAddr::V4(a), IpAddr::V4(b)) => pseudo_v4(a, b, protocol::UDP, len),
                (IpAddr::V6(a), IpAddr::V6(b)) => pseudo_v6(a, b, protocol::UDP, len),
                _ => unreachable!(),
            };
            let (a, b) = (IpAddress::from(a), IpAddress::from(b));
            let mut theirs = vec![0; len];
            repr.emit(&mut UdpPacket::new_unchecked(&mut theirs[..]), &a, &b, body.len(), |out| out.copy_from_slice(&body), &caps());
            let header = udp::Header::parse(&theirs).unwrap();
            prop_assert_eq!((header.src_port, header.dst_port, usize::from(header.len)), (src_port, dst_port, len));
            prop_assert_eq!(header.payload(&theirs), &body[..]);
            prop_assert!(pseudo.add(Sum::of(&theirs)).is_valid());

            let mut ours = vec![0xee; 8];
            udp::Header { checksum: 0, ..header }.emit(&mut ours);
            ours.extend(&body);
            let checksum = pseudo.add(Sum::of(&ours)).finish_udp();
            udp::Header { checksum, ..header }.emit(&mut ours);
            prop_assert_eq!(UdpRepr::parse(&UdpPacket::new_unchecked(&ours[..]), &a, &b, &caps()), Ok(repr));
            prop_assert_eq!(ours, theirs);
        }
    }

    #[test]
    fn tcp_segments_of_ours((header, options) in tcp_header(), body in payload(), a in v4(), b in v4()) {
        let mut ours = vec![0xee; 60];
        let len = emit(&header, &options, &mut ours);
        ours.truncate(len);
        ours.extend(&body);
        complete_v4(a, b, protocol::TCP, 16, &mut ours);
        let packet = TcpPacket::new_checked(&ours[..]).unwrap();
        prop_assert!(packet.verify_checksum(&a.into(), &b.into()));
        prop_assert_eq!((packet.src_port(), packet.dst_port()), (header.src_port, header.dst_port));
        prop_assert_eq!(packet.seq_number().0 as u32, header.seq.0);
        prop_assert_eq!(packet.ack_number().0 as u32, header.ack.0);
        let flags = [packet.fin(), packet.syn(), packet.rst(), packet.psh(), packet.ack(), packet.urg(), packet.ece(), packet.cwr()];
        let flags = flags.iter().enumerate().fold(0, |byte, (bit, &set)| byte | u8::from(set) << bit);
        prop_assert_eq!(TcpFlags(flags), header.flags);
        prop_assert_eq!((packet.window_len(), packet.urgent_at()), (header.window, header.urg_ptr));
        prop_assert_eq!(packet.payload(), &body[..]);
        prop_assert!(!packet.ns());

        let mut rest = packet.options();
        let mut read = TcpOptions::default();
        while !rest.is_empty() {
            let (next, option) = TcpOption::parse(rest).unwrap();
            match option {
                TcpOption::NoOperation => {}
                TcpOption::MaxSegmentSize(mss) => read.mss = Some(mss),
                TcpOption::WindowScale(shift) => read.window_scale = Some(shift),
                TcpOption::SackPermitted => read.sack_permitted = true,
                TcpOption::TimeStamp { tsval, tsecr } => read.timestamps = Some(Timestamps { tsval, tsecr }),
                // smoltcp parses only the first three.
                TcpOption::SackRange(blocks) => read.sack_blocks = blocks.iter().flatten().map(|&(a, b)| (SeqNumber(a), SeqNumber(b))).collect(),
                TcpOption::Unknown { kind: 28, data: &[a, b] } => read.user_timeout = Some(u16::from_be_bytes([a, b])),
                other => prop_assert!(false, "{:?}", other),
            }
            rest = next;
        }
        let mut expected = options;
        expected.sack_blocks.truncate(3);
        prop_assert_eq!(read, expected);
    }

    #[test]
    fn tcp_segments_of_theirs((header, options) in tcp_header(), body in payload(), a in v6(), b in v6(), control in 0usize..5, acked: bool) {
        // smoltcp has one control flag and no urgent data, and sends SACK blocks only with ACK and without
        // SACK-permitted.
        let controls = [
            (TcpControl::None, TcpFlags::NONE),
            (TcpControl::Psh, TcpFlags::PSH),
            (TcpControl::Syn, TcpFlags::SYN),
            (TcpControl::Fin, TcpFlags::FIN),
            (TcpControl::Rst, TcpFlags::RST),
        ];
        let mut sack_ranges = [None; 3];
        let mut expected = TcpOptions { user_timeout: None, ..options };
        // Its padding, unlike this stack's, leaves no space for a block in addition to all other options.
        expected.sack_blocks.truncate(if expected.timestamps.is_some() { 1 } else { 2 });
        if expected.sack_permitted || !acked {
            expected.sack_blocks.clear();
        }
        for (range, (left, right)) in sack_ranges.iter_mut().zip(&expected.sack_blocks) {
            *range = Some((left.0, right.0));
        }
        let repr = TcpRepr {
            src_port: header.src_port,
            dst_port: header.dst_port,
            control: controls[control].0,
            seq_number: TcpSeqNumber(header.seq.0 as i32),
            ack_number: acked.then_some(TcpSeqNumber(header.ack.0 as i32)),
            window_len: header.window,
            window_scale: expected.window_scale,
            max_seg_size: expected.mss,
            sack_permitted: expected.sack_permitted,
            sack_ranges,
            timestamp: expected.timestamps.map(|t| TcpTimestampRepr::new(t.tsval, t.tsecr)),
            payload: &body,
        };
        let mut theirs = vec![0; repr.buffer_len()];
        repr.emit(&mut TcpPacket::new_unchecked(&mut theirs[..]), &a.into(), &b.into(), &caps());
        prop_assert!(pseudo_v6(a, b, protocol::TCP, theirs.len()).add(Sum::of(&theirs)).is_valid());
        let segment = TcpSegment::parse(&theirs).unwrap();
        let read = segment.header;
        prop_assert_eq!((read.src_port, read.dst_port, read.seq), (header.src_port, header.dst_port, header.seq));
        prop_assert_eq!((read.window, read.urg_ptr), (header.window, 0));
        if acked {
            prop_assert_eq!((read.ack, read.flags), (header.ack, controls[control].1 | TcpFlags::ACK));
        } else {
            prop_assert_eq!(read.flags, controls[control].1);
        }
        prop_assert_eq!(segment.payload, &body[..]);
        prop_assert_eq!(TcpOptions::parse(segment.options), expected);
    }

    #[test]
    fn icmpv4_messages(ident: u16, seq: u16, data in payload(), code in 0u8..16, quoted in ipv4_header(8), transport: [u8; 8], kind in 0..4) {
        // smoltcp quotes a header with only these fields.
        let quoted = ipv4::Header { dscp: 0, ecn: 0, ident: 0, dont_fragment: true, more_fragments: false, fragment_offset: 0, ..quoted };
        let mut quote = vec![0; 20];
        quoted.emit(&mut quote);
        quote.extend(transport);
        let header = Ipv4Repr { src_addr: quoted.src, dst_addr: quoted.dst, next_header: quoted.protocol.into(), payload_len: 8, hop_limit: quoted.ttl };
        let (message, repr) = match kind {
            0 => (icmpv4::Message::EchoRequest(Echo { ident, seq, data: &data }), Icmpv4Repr::EchoRequest { ident, seq_no: seq, data: &data }),
            1 => (icmpv4::Message::EchoReply(Echo { ident, seq, data: &data }), Icmpv4Repr::EchoReply { ident, seq_no: seq, data: &data }),
            2 => (icmpv4::Message::Unreachable { code, mtu: 0, quote: &quote }, Icmpv4Repr::DstUnreachable { reason: code.into(), header, data: &transport }),
            _ => (icmpv4::Message::TimeExceeded { code, quote: &quote }, Icmpv4Repr::TimeExceeded { reason: code.into(), header, data: &transport }),
        };
        let mut ours = vec![0xee; message.encoded_len()];
        message.emit(&mut ours);
        let packet = Icmpv4Packet::new_checked(&ours[..]).unwrap();
        prop_assert_eq!(Icmpv4Repr::parse(&packet, &caps()), Ok(repr));
        let mut theirs = vec![0; repr.buffer_len()];
        repr.emit(&mut Icmpv4Packet::new_unchecked(&mut theirs[..]), &caps());
        prop_assert_eq!(icmpv4::Message::parse(&theirs), Ok(message));
    }

    #[test]
    fn icmpv6_messages(a in v6(), b in v6(), ident: u16, seq: u16, word: u32, data in payload(), quoted in ipv6_header(8), transport: [u8; 8], kind in 0..6) {
        let quoted = ipv6::Header { dscp: 0, ecn: 0, flow_label: 0, ..quoted };
        let mut quote = vec![0; 40];
        quoted.emit(&mut quote);
        quote.extend(transport);
        let header = Ipv6Repr { src_addr: quoted.src, dst_addr: quoted.dst, next_header: quoted.next_header.into(), payload_len: 8, hop_limit: quoted.hop_limit };
        let (message, repr) = match kind {
            0 => (icmpv6::Message::EchoRequest(Echo { ident, seq, data: &data }), Icmpv6Repr::EchoRequest { ident, seq_no: seq, data: &data }),
            1 => (icmpv6::Message::EchoReply(Echo { ident, seq, data: &data }), Icmpv6Repr::EchoReply { ident, seq_no: seq, data: &data }),
            2 => (icmpv6::Message::Unreachable { code: 4, quote: &quote }, Icmpv6Repr::DstUnreachable { reason: Icmpv6DstUnreachable::PortUnreachable, header, data: &transport }),
            3 => (icmpv6::Message::PacketTooBig { mtu: word, quote: &quote }, Icmpv6Repr::PktTooBig { mtu: word, header, data: &transport }),
            4 => (icmpv6::Message::TimeExceeded { code: 1, quote: &quote }, Icmpv6Repr::TimeExceeded { reason: Icmpv6TimeExceeded::from(1), header, data: &transport }),
            _ => (icmpv6::Message::ParameterProblem { code: 1, pointer: word, quote: &quote }, Icmpv6Repr::ParamProblem { reason: Icmpv6ParamProblem::UnrecognizedNxtHdr, pointer: word, header, data: &transport }),
        };
        let mut ours = vec![0xee; message.encoded_len()];
        message.emit(a, b, &mut ours);
        let packet = Icmpv6Packet::new_checked(&ours[..]).unwrap();
        prop_assert_eq!(Icmpv6Repr::parse(&a, &b, &packet, &caps()), Ok(repr));
        let mut theirs = vec![0; repr.buffer_len()];
        repr.emit(&a, &b, &mut Icmpv6Packet::new_unchecked(&mut theirs[..]), &caps());
        prop_assert_eq!(icmpv6::Message::parse(&theirs, a, b), Ok(message));
    }

    #[test]
    fn ndp_messages(message in ndp_message(1), a in link_local(), b in unicast()) {
        let repr = match &message {
            ndp::NdpMessage::RouterSolicitation { source_mac } => NdiscRepr::RouterSolicit { lladdr: source_mac.map(raw_mac) },
            ndp::NdpMessage::RouterAdvertisement(router) => NdiscRepr::RouterAdvert {
                hop_limit: router.hop_limit,
                flags: NdiscRouterFlags::from_bits_truncate(u8::from(router.managed) << 7 | u8::from(router.other) << 6),
                router_lifetime: Duration::from_secs(router.router_lifetime_s.into()),
                reachable_time: Duration::from_millis(router.reachable_time_ms.into()),
                retrans_time: Duration::from_millis(router.retrans_timer_ms.into()),
                lladdr: router.source_mac.map(raw_mac),
                mtu: router.mtu,
                prefix_info: router.prefixes.first().map(|prefix| NdiscPrefixInformation {
                    prefix_len: prefix.prefix_len,
                    flags: NdiscPrefixInfoFlags::from_bits_truncate(u8::from(prefix.on_link) << 7 | u8::from(prefix.autonomous) << 6),
                    valid_lifetime: Duration::from_secs(prefix.valid_lifetime_s.into()),
                    preferred_lifetime: Duration::from_secs(prefix.preferred_lifetime_s.into()),
                    prefix: prefix.prefix,
                }),
            },
            ndp::NdpMessage::NeighbourSolicitation { target, source_mac, .. } => {
                NdiscRepr::NeighborSolicit { target_addr: *target, lladdr: source_mac.map(raw_mac) }
            }
            ndp::NdpMessage::NeighbourAdvertisement { target, router, solicited, overrides, target_mac } => NdiscRepr::NeighborAdvert {
                flags: NdiscNeighborFlags::from_bits_truncate(u8::from(*router) << 7 | u8::from(*solicited) << 6 | u8::from(*overrides) << 5),
                target_addr: *target,
                lladdr: target_mac.map(raw_mac),
            },
        };
        let repr = Icmpv6Repr::Ndisc(repr);
        let mut ours = vec![0xee; ndp::MESSAGE_LEN_MAX];
        let len = message.emit(a, b, &mut ours);
        ours.truncate(len);
        let packet = Icmpv6Packet::new_checked(&ours[..]).unwrap();
        prop_assert_eq!(Icmpv6Repr::parse(&a, &b, &packet, &caps()), Ok(repr));
        let mut theirs = vec![0; repr.buffer_len()];
        repr.emit(&a, &b, &mut Icmpv6Packet::new_unchecked(&mut theirs[..]), &caps());
        prop_assert_eq!(icmpv6::Message::parse(&theirs, a, b), Ok(icmpv6::Message::Ndp(&theirs)));
        prop_assert_eq!(ndp::NdpMessage::parse(&theirs, a, b, 255), Ok(message));
    }

    #[test]
    fn mld_reports_of_ours(groups in prop::collection::vec((multicast(), 0usize..3), 0..5), a in link_local()) {
        let kinds = [
            (RecordType::ModeIsExclude, MldRecordType::ModeIsExclude),
            (RecordType::ChangeToExcludeMode, MldRecordType::ChangeToExclude),
            (RecordType::ChangeToIncludeMode, MldRecordType::ChangeToInclude),
        ];
        let records: Vec<_> = groups.iter().map(|&(group, kind)| GroupRecord { kind: kinds[kind].0, group: group.into(), sources: Vec::new() }).collect();
        let theirs: Vec<_> = groups.iter().map(|&(group, kind)| MldAddressRecordRepr::new(kinds[kind].1, group)).collect();
        let mut ours = vec![0xee; group_record::report_len(&records)];
        mld::emit_report(&records, a, mld::ALL_MLDV2_ROUTERS, &mut ours);
        let repr = Icmpv6Repr::Mld(MldRepr::ReportRecordReprs(&theirs));
        // smoltcp returns the length of the report header only, although it writes the records, too.
        let mut bytes = vec![0; ours.len()];
        repr.emit(&a, &mld::ALL_MLDV2_ROUTERS, &mut Icmpv6Packet::new_unchecked(&mut bytes[..]), &caps());
        prop_assert_eq!(ours, bytes);
    }

    #[test]
    fn mld_queries_of_theirs(code in 0u16..0x8000, group in multicast(), a in link_local(), specific: bool) {
        let group = if specific { group } else { Ipv6Addr::UNSPECIFIED };
        let repr = Icmpv6Repr::Mld(MldRepr::Query { max_resp_code: code, mcast_addr: group, s_flag: false, qrv: 2, qqic: 125, num_srcs: 0, data: &[] });
        let mut bytes = vec![0; repr.buffer_len()];
        repr.emit(&a, &group, &mut Icmpv6Packet::new_unchecked(&mut bytes[..]), &caps());
        prop_assert_eq!(icmpv6::Message::parse(&bytes, a, group), Ok(icmpv6::Message::MldQuery(&bytes)));
        let expected = GroupQuery { max_response_ms: code.into(), group: specific.then_some(group.into()), sources: Vec::new(), version: 2, robustness: 2, interval_seconds: 125 };
        prop_assert_eq!(mld::parse_query(&bytes, a, 1), Ok(expected));
    }
}
