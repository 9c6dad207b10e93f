use super::{Packet, TCP, UDP};
use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use proptest::prelude::*;

fn packet(ipv4: bool, tcp: bool, tag: Option<u16>, payload: &[u8]) -> Vec<u8> {
    let ethernet = etherparse::PacketBuilder::ethernet2([2; 6], [4; 6]);
    let tag = tag.and_then(|id| etherparse::VlanId::try_new(id).ok());
    let ip = match (tag, ipv4) {
        (Some(id), true) => ethernet.single_vlan(id).ipv4([10, 1, 2, 3], [10, 4, 5, 6], 64),
        (Some(id), false) => ethernet.single_vlan(id).ipv6([1; 16], [2; 16], 64),
        (None, true) => ethernet.ipv4([10, 1, 2, 3], [10, 4, 5, 6], 64),
        (None, false) => ethernet.ipv6([1; 16], [2; 16], 64),
    };
    let mut bytes = Vec::new();
    if tcp {
        ip.tcp(1000, 80, 1, 2).options_raw(&[1, 1, 1, 1]).unwrap().write(&mut bytes, payload).unwrap();
    } else {
        ip.udp(1000, 80).write(&mut bytes, payload).unwrap();
    }
    bytes
}

#[test]
fn fields_of_plain_packets_are_found() {
    for (ipv4, tcp, tag) in
        [(true, true, None), (false, true, Some(5)), (true, false, Some(5)), (false, false, None)]
    {
        let mut bytes = packet(ipv4, tcp, tag, b"hello");
        // Padding of Ethernet is no payload.
        bytes.extend([0; 7]);
        let packet = Packet::parse(&bytes);
        let source = if ipv4 { "10.1.2.3" } else { "101:101:101:101:101:101:101:101" };
        assert_eq!(packet.source(), source.parse().ok());
        assert_eq!(packet.protocol(), Some(if tcp { TCP } else { UDP }));
        assert_eq!(packet.ports(), Some((1000, 80)));
        assert_eq!(packet.payload(), Some(&b"hello"[..]));
        assert_eq!((packet.dscp(), packet.is_fragment()), (Some(0), false));
        assert!(packet.flow_key().is_some());
    }
}

#[test]
fn two_vlan_tags_are_skipped() {
    let mut bytes = packet(true, false, Some(5), b"hello");
    bytes.splice(12..12, [0x88, 0xa8, 0, 9]);
    let packet = Packet::parse(&bytes);
    assert_eq!((packet.ports(), packet.payload()), (Some((1000, 80)), Some(&b"hello"[..])));
    assert!(packet.flow_key().is_none(), "the key has room for one tag");
    bytes.splice(12..12, [0x81, 0, 0, 9]);
    assert_eq!(Packet::parse(&bytes).source(), None);
}

#[test]
fn ipv4_options_are_skipped() {
    let mut bytes = packet(true, false, None, b"hello");
    bytes[14] = 0x46;
    bytes[17] += 4;
    bytes.splice(34..34, [1, 1, 1, 0]);
    let packet = Packet::parse(&bytes);
    assert_eq!((packet.ports(), packet.payload()), (Some((1000, 80)), Some(&b"hello"[..])));
    assert!(packet.flow_key().is_none());
}

/// Adds a header after the IPv6 header.
fn insert_extension(bytes: &mut Vec<u8>, number: u8, mut header: Vec<u8>) {
    header[0] = core::mem::replace(&mut bytes[20], number);
    bytes[19] += header.len() as u8;
    bytes.splice(54..54, header);
}

#[test]
fn ipv6_extension_headers_are_skipped() {
    let mut bytes = packet(false, true, None, b"hello");
    insert_extension(&mut bytes, 60, vec![0, 0, 1, 4, 0, 0, 0, 0]);
    insert_extension(&mut bytes, 51, [vec![0, 1], vec![0; 10]].concat());
    insert_extension(&mut bytes, 44, vec![0; 8]);
    insert_extension(&mut bytes, 0, [vec![0, 1, 1, 12], vec![0; 12]].concat());
    let packet = Packet::parse(&bytes);
    assert_eq!((packet.protocol(), packet.ports()), (Some(TCP), Some((1000, 80))));
    assert_eq!(packet.payload(), Some(&b"hello"[..]));
    assert!(!packet.is_fragment(), "an atomic fragment is a whole packet (RFC 6946)");
    assert!(packet.flow_key().is_none());
    for _ in 0..5 {
        insert_extension(&mut bytes, 60, vec![0, 0, 1, 4, 0, 0, 0, 0]);
    }
    let packet = Packet::parse(&bytes);
    assert_eq!(packet.protocol(), None, "nine extension headers");
    assert!(packet.source().is_some());
}

#[test]
fn fragments_have_only_the_fields_in_them() {
    let mut ipv4 = packet(true, false, None, b"hello");
    let mut ipv6 = packet(false, false, None, b"hello");
    insert_extension(&mut ipv6, 44, vec![0; 8]);
    for (bytes, field_at, more) in [(&mut ipv4, 20, 0x2000u16), (&mut ipv6, 56, 1)] {
        bytes[field_at..field_at + 2].copy_from_slice(&more.to_be_bytes());
        let first = Packet::parse(bytes);
        assert!(first.is_fragment());
        assert_eq!((first.ports(), first.payload()), (Some((1000, 80)), Some(&b"hello"[..])));
        assert!(first.flow_key().is_none());
        bytes[field_at + 1] |= 8;
        let later = Packet::parse(bytes);
        assert!(later.is_fragment() && later.source().is_some());
        assert_eq!((later.protocol(), later.ports(), later.payload()), (Some(UDP), None, None));
    }
}

#[test]
fn malformed_packets_lack_fields() {
    let whole = packet(true, true, None, b"hello");
    let with = |at: usize, value: u8| {
        let mut bytes = whole.clone();
        bytes[at] = value;
        let packet = Packet::parse(&bytes);
        (packet.source().is_some(), packet.ports().is_some(), packet.payload().is_some())
    };
    assert_eq!(with(14, 0x44), (false, false, false), "a header length of 16");
    assert_eq!(with(14, 0x65), (false, false, false), "version 6");
    assert_eq!(with(17, 19), (false, false, false), "a total length of 19");
    assert_eq!(with(17, 23), (true, false, false), "half of the ports");
    assert_eq!(with(46, 0x40), (true, true, false), "a TCP header of 16 bytes");
    assert_eq!(with(46, 0xf0), (true, true, false), "a TCP header longer than the packet");
    assert_eq!(with(23, 1), (true, false, false), "ICMP");
    for len in 0..whole.len() {
        let packet = Packet::parse(&whole[..len]);
        assert_eq!((packet.source().is_some(), packet.ports().is_some()), (len >= 34, len >= 38), "{len}");
    }
}

/// etherparse skips tags with a type that is none of IEEE 802.1Q and that Linux does not know, 0x9100. It
/// takes an IPv6 payload length of 0, which has a meaning only with the option of a jumbogram, for the length
/// of the rest of the frame.
fn is_read_differently_by_etherparse(bytes: &[u8], sliced: &SlicedPacket<'_>) -> bool {
    let is_jumbogram = matches!(&sliced.net, Some(NetSlice::Ipv6(ip)) if ip.header().payload_length() == 0);
    // The types of the first and the second tag.
    is_jumbogram || [12, 16].iter().any(|at| bytes.get(*at..at + 2) == Some(&[0x91, 0x00]))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// `Packet` finds the fields that etherparse, which is strict, finds in frames without errors.
    #[test]
    fn fields_agree_with_etherparse(
        ipv4: bool, tcp: bool, tag in proptest::option::of(0u16..4096), extension: bool,
        payload in proptest::collection::vec(any::<u8>(), 0..40),
        changes in proptest::collection::vec((0usize..70, any::<u8>()), 0..3), cut in 0usize..200,
    ) {
        let mut bytes = packet(ipv4, tcp, tag, &payload);
        if extension && !ipv4 && tag.is_none() {
            insert_extension(&mut bytes, 60, vec![0, 0, 1, 4, 0, 0, 0, 0]);
        }
        for (at, value) in changes {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        bytes.truncate(cut);
        let found = Packet::parse(&bytes);
        let Ok(sliced) = SlicedPacket::from_ethernet(&bytes) else { return Ok(()) };
        if is_read_differently_by_etherparse(&bytes, &sliced) {
            return Ok(());
        }
        let (addresses, dscp) = match &sliced.net {
            Some(NetSlice::Ipv4(ip)) => {
                let header = ip.header();
                (Some((header.source_addr().into(), header.destination_addr().into())), Some(header.dcp().value()))
            }
            Some(NetSlice::Ipv6(ip)) => {
                let header = ip.header();
                let addresses = (header.source_addr().into(), header.destination_addr().into());
                (Some(addresses), Some(header.traffic_class() >> 2))
            }
            _ => (None, None),
        };
        prop_assert_eq!(found.source().zip(found.destination()), addresses);
        prop_assert_eq!(found.dscp(), dscp);
        match &sliced.transport {
            Some(TransportSlice::Tcp(tcp)) => {
                prop_assert_eq!(found.ports(), Some((tcp.source_port(), tcp.destination_port())));
                prop_assert_eq!(found.payload(), Some(tcp.payload()));
            }
            Some(TransportSlice::Udp(udp)) => {
                prop_assert_eq!(found.ports(), Some((udp.source_port(), udp.destination_port())));
                prop_assert_eq!(found.payload(), Some(udp.payload()));
            }
            _ => {}
        }
    }
}
