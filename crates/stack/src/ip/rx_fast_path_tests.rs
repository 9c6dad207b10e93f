use super::*;
use crate::ip::ParsedFrame;
use crate::ip::testbench::*;
use crate::wire::MacAddr;
use crate::wire::ethernet::EtherType;
use crate::wire::ipv4;

/// Returns a segment of the peer with a correct checksum.
fn v4_segment() -> Vec<u8> {
    let mut bytes = segment(11);
    let sum = pseudo_v4(PEER_V4, OUR_V4, protocol::TCP, bytes.len()).add(Sum::of(&bytes));
    bytes[16..18].copy_from_slice(&sum.finish().to_be_bytes());
    bytes
}

fn v6_frame() -> Vec<u8> {
    let mut bytes = segment(11);
    let sum = pseudo_v6(PEER_V6, OUR_V6, protocol::TCP, bytes.len()).add(Sum::of(&bytes));
    bytes[16..18].copy_from_slice(&sum.finish().to_be_bytes());
    frame(EtherType::IPV6, &ipv6_packet(PEER_V6, OUR_V6, protocol::TCP, 64, &bytes))
}

/// Returns whether the fast path accepts a frame; [`NetworkFixture::parse`] compares the result with the slow
/// path.
fn is_accepted(fixture: &mut NetworkFixture, bytes: &[u8]) -> bool {
    fixture.parse(bytes);
    let frame = RxFrame::new(bytes);
    fixture.network.parse_fast(fixture.port, &frame).is_some()
}

#[test]
fn fast_path_accepts_ordinary_segments_of_both_families() {
    let mut fixture = NetworkFixture::new();
    assert!(is_accepted(&mut fixture, &v4_frame(protocol::TCP, &v4_segment())));
    assert!(is_accepted(&mut fixture, &v6_frame()));
    let mut padded = v4_frame(protocol::TCP, &v4_segment());
    padded.extend_from_slice(&[0; 7]);
    assert!(is_accepted(&mut fixture, &padded));
}

#[test]
fn fast_path_rejects_every_other_frame() {
    let mut fixture = NetworkFixture::new();
    let packet = |change: &dyn Fn(&mut ipv4::Header)| {
        let mut header = ipv4_header(PEER_V4, OUR_V4, protocol::TCP, v4_segment().len());
        change(&mut header);
        frame(EtherType::IPV4, &ipv4_packet(header, &v4_segment()))
    };
    let others = [
        packet(&|h| h.more_fragments = true),
        packet(&|h| h.fragment_offset = 8),
        packet(&|h| h.protocol = protocol::UDP),
        packet(&|h| h.src = OUR_V4),
        packet(&|h| h.src = Ipv4Addr::BROADCAST),
        packet(&|h| h.src = Ipv4Addr::new(224, 0, 0, 9)),
        packet(&|h| h.src = Ipv4Addr::LOCALHOST),
        packet(&|h| h.src = Ipv4Addr::UNSPECIFIED),
        packet(&|h| h.dst = PEER_V4),
        packet(&|h| h.total_len = 39),
        frame_to(MacAddr::BROADCAST, None, EtherType::IPV4, &v4_frame(protocol::TCP, &v4_segment())[14..]),
        frame_to(
            MacAddr([2, 9, 9, 9, 9, 9]),
            None,
            EtherType::IPV4,
            &v4_frame(protocol::TCP, &v4_segment())[14..],
        ),
    ];
    for (case, bytes) in others.iter().enumerate() {
        assert!(!is_accepted(&mut fixture, bytes), "case {case}");
    }
}

#[test]
fn fast_path_rejects_truncated_and_corrupted_frames() {
    let mut fixture = NetworkFixture::new();
    for valid in [v4_frame(protocol::TCP, &v4_segment()), v6_frame()] {
        for len in 0..valid.len() {
            assert!(!is_accepted(&mut fixture, &valid[..len]), "{len}");
        }
        for bit in 0..valid.len() * 8 {
            let mut bytes = valid.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            // Some bits have no meaning, such as those of the source MAC address. `parse` compares the two
            // paths.
            is_accepted(&mut fixture, &bytes);
        }
    }
}

#[test]
fn checksum_verified_elsewhere_does_not_count() {
    let fixture = NetworkFixture::new();
    let mut bytes = v4_frame(protocol::TCP, &v4_segment());
    *bytes.last_mut().unwrap() ^= 1;
    let seen = |checksum| {
        let frame = RxFrame { checksum, ..RxFrame::new(&bytes) };
        assert_eq!(
            fixture.network.parse_fast(fixture.port, &frame).is_some(),
            matches!(fixture.network.parse(fixture.port, &frame), ParsedFrame::Tcp(_))
        );
        fixture.network.parse_fast(fixture.port, &frame).is_some()
    };
    assert!(seen(RxChecksum::Verified));
    assert!(seen(RxChecksum::Partial { start: 34, offset: 16 }));
    assert!(!seen(RxChecksum::Partial { start: 54, offset: 16 }));
    assert!(!seen(RxChecksum::Unverified));
}
