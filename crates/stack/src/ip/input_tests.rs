use super::*;
use crate::ip::testbench::*;
use crate::ip::{NetworkConfig, ParsedFrame};
use crate::wire::checksum::{Sum, pseudo_v4, pseudo_v6};
use crate::wire::ethernet::EtherType;
use crate::wire::{ipv4, udp};
use core::net::IpAddr;
use proptest::prelude::*;

/// Returns a UDP datagram from the peer with a correct checksum.
fn datagram(src: IpAddr, dst: IpAddr, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![0; 8];
    udp::Header { src_port: 5, dst_port: 6, len: 8 + payload.len() as u16, checksum: 0 }.emit(&mut out);
    out.extend_from_slice(payload);
    let pseudo = match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => pseudo_v4(src, dst, protocol::UDP, out.len()),
        (IpAddr::V6(src), IpAddr::V6(dst)) => pseudo_v6(src, dst, protocol::UDP, out.len()),
        _ => unreachable!(),
    };
    let checksum = pseudo.add(Sum::of(&out)).finish_udp();
    out[6..8].copy_from_slice(&checksum.to_be_bytes());
    out
}

fn fragment_v4(ident: u16, datagram: &[u8], start: usize, end: usize) -> Vec<u8> {
    let header = ipv4::Header {
        ident,
        more_fragments: end < datagram.len(),
        fragment_offset: start as u16,
        ..ipv4_header(PEER_V4, OUR_V4, protocol::UDP, end - start)
    };
    frame(EtherType::IPV4, &ipv4_packet(header, &datagram[start..end]))
}

fn fragment_v6(ident: u32, datagram: &[u8], start: usize, end: usize) -> Vec<u8> {
    let mut payload = vec![0; ipv6::FragmentHeader::LEN];
    let header = ipv6::FragmentHeader {
        next_header: protocol::UDP,
        offset: start as u16,
        more_fragments: end < datagram.len(),
        ident,
    };
    header.emit(&mut payload);
    payload.extend_from_slice(&datagram[start..end]);
    frame(EtherType::IPV6, &ipv6_packet(PEER_V6, OUR_V6, protocol::FRAGMENT, 64, &payload))
}

/// Splits `len` bytes at multiples of 8 and returns the ranges.
fn split_points(len: usize, sizes: &[u8]) -> Vec<(usize, usize)> {
    let mut ranges = Vec::new();
    let mut start = 0;
    for &size in sizes.iter().cycle() {
        let end = start + 8 * usize::from(size.max(1));
        if end >= len {
            ranges.push((start, len));
            return ranges;
        }
        ranges.push((start, end));
        start = end;
    }
    unreachable!("sizes are not empty")
}

proptest! {
    /// Two datagrams of each family are fragmented arbitrarily, their fragments are shuffled and some are
    /// duplicated. Each datagram is received once, byte for byte.
    #[test]
    fn arbitrary_fragmentation_is_reassembled_exactly(
        len in 16_usize..5000,
        sizes in prop::collection::vec(1_u8..180, 1..6),
        order in any::<u64>(),
        duplicated in any::<u64>(),
    ) {
        let payload: Vec<u8> = (0..len).map(|at| (at * 31 / 7) as u8).collect();
        let v4 = datagram(PEER_V4.into(), OUR_V4.into(), &payload);
        let v6 = datagram(PEER_V6.into(), OUR_V6.into(), &payload);
        let ranges = split_points(v4.len(), &sizes);
        prop_assume!(ranges.len() > 1);
        let mut frames = Vec::new();
        for ident in [1, 2] {
            for &(start, end) in &ranges {
                frames.push(fragment_v4(ident, &v4, start, end));
                frames.push(fragment_v6(ident.into(), &v6, start, end));
            }
        }
        let mut shuffle = crate::ip::entropy::Entropy::new(&[order as u8; 32]);
        let mut sent = Vec::new();
        while !frames.is_empty() {
            let next = frames.swap_remove(shuffle.below(frames.len() as u32) as usize);
            // A duplicate is ignored while its datagram is incomplete; after the last fragment it would begin
            // a new datagram.
            if duplicated >> (sent.len() % 64) & 1 == 1 && frames.len() > 3 * ranges.len() {
                sent.push(next.clone());
            }
            sent.push(next);
        }
        let mut fixture = NetworkFixture::new();
        let mut arrived = [0, 0];
        for bytes in &sent {
            if let InputResult::Reassembled(buffer) = fixture.input(bytes) {
                let ParsedFrame::Udp(l4) = fixture.network.parse_reassembled(&buffer) else {
                    return Err(TestCaseError::fail("no datagram"));
                };
                prop_assert_eq!(&l4.bytes[8..], &payload[..]);
                arrived[usize::from(l4.src.is_ipv6())] += 1;
                fixture.network.recycle(buffer);
            }
        }
        prop_assert_eq!(arrived, [2, 2]);
    }
}

#[test]
fn fragment_flood_stays_within_the_budget() {
    let config = NetworkConfig { fragment_bytes: 65_536, ..network_config() };
    let mut fixture = NetworkFixture::with(config, &link_config(), CAPABILITIES);
    let datagram = vec![7; 3000];
    for ident in 0..1000 {
        fixture.input(&fragment_v4(ident, &datagram, 0, 1480));
    }
    let stats = fixture.network.stats();
    let kept = 1000 - stats.reassembly_evicted;
    assert_eq!(kept, 65_536 / (1480 + 20 + 2 * 64));
    // The most recent datagrams are kept; nothing of the others remains when their timeout expires.
    assert!(matches!(fixture.input(&fragment_v4(999, &datagram, 1480, 3000)), InputResult::Reassembled(_)));
    fixture.advance(core::time::Duration::from_secs(31));
    assert_eq!(fixture.network.stats().reassembly_timeouts, kept - 1);
    // The neighbour of the senders was solicited in order to report the timeouts to them.
    fixture.advance(core::time::Duration::from_secs(10));
    assert_eq!(fixture.network.next_deadline(), None);
}

#[test]
fn nested_fragments_are_not_reassembled() {
    let mut fixture = NetworkFixture::new();
    // A fragment header followed by another fragment header.
    let inner = [&[protocol::UDP, 0, 0, 1, 0, 0, 0, 2][..], &[1; 16]].concat();
    let fragment = |start: usize, end: usize| {
        let mut payload = vec![0; 8];
        let header = ipv6::FragmentHeader {
            next_header: protocol::FRAGMENT,
            offset: start as u16,
            more_fragments: end < inner.len(),
            ident: 1,
        };
        header.emit(&mut payload);
        payload.extend_from_slice(&inner[start..end]);
        frame(EtherType::IPV6, &ipv6_packet(PEER_V6, OUR_V6, protocol::FRAGMENT, 64, &payload))
    };
    fixture.input(&fragment(0, 16));
    let InputResult::Reassembled(buffer) = fixture.input(&fragment(16, 24)) else { panic!() };
    let parsed = fixture.network.parse_reassembled(&buffer);
    assert!(matches!(parsed, ParsedFrame::Drop(DropReason::NestedFragment)), "{parsed:?}");
}
