use super::*;
use crate::scripted::{Side, segment};

fn tcp(frame: Frame<'_>) -> TcpSegment<'_> {
    match frame {
        Frame::Tcp(segment) => segment,
        other => panic!("{other:?}"),
    }
}

#[test]
fn all_link_types_carry_the_same_segment() {
    let frame = segment(Side::Client, 7, 9, ACK, b"hello");
    let expected = tcp(Frame::parse(LinkType::Ethernet, &frame));
    assert_eq!((expected.payload, expected.payload_len), (&b"hello"[..], 5));
    assert_eq!((expected.seq, expected.ack, expected.flags), (7, 9, ACK));
    let ip = &frame[14..];
    let tag = |tags: &[u8]| [&frame[..12], tags, &frame[12..]].concat();
    let others = [
        (LinkType::Ethernet, tag(&[0x81, 0, 0, 5])),
        (LinkType::Ethernet, tag(&[0x88, 0xa8, 0, 5, 0x81, 0, 0, 6])),
        (LinkType::Raw, ip.to_vec()),
        (LinkType::Null, [&[2, 0, 0, 0], ip].concat()),
        (LinkType::LinuxSll, [&[0; 14][..], &[8, 0], ip].concat()),
        (LinkType::LinuxSll2, [&[8, 0][..], &[0; 18], ip].concat()),
        // Ethernet pads short frames.
        (LinkType::Ethernet, [&frame[..], &[0; 9]].concat()),
    ];
    for (link, bytes) in others {
        assert_eq!(tcp(Frame::parse(link, &bytes)), expected, "{link:?}");
    }
}

#[test]
fn shortened_frames_keep_their_length() {
    let frame = segment(Side::Server, 7, 9, ACK, &[1; 300]);
    let short = tcp(Frame::parse(LinkType::Ethernet, &frame[..96]));
    assert_eq!((short.payload.len(), short.payload_len), (96 - 54, 300));
    let headers = tcp(Frame::parse(LinkType::Ethernet, &frame[..54]));
    assert_eq!((headers.payload.len(), headers.payload_len), (0, 300));
}

#[test]
fn ipv6_extension_headers_are_skipped() {
    let tcp_header = [0, 80, 0, 90, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x10, 0, 0, 0, 0, 0, 0];
    let mut packet = vec![0x60, 0, 0, 0, 0, 8 + 20 + 3, 0, 64];
    packet.extend([1; 16]);
    packet.extend([2; 16]);
    packet.extend([TCP, 0, 1, 4, 0, 0, 0, 0]);
    packet.extend(tcp_header);
    packet.extend(b"abc");
    let segment = tcp(Frame::parse(LinkType::Raw, &packet));
    assert_eq!((segment.source_port, segment.destination_port, segment.payload), (80, 90, &b"abc"[..]));
    let [source, destination] = [1u8, 2].map(|byte| u128::from_be_bytes([byte; 16]));
    assert_eq!(segment.addresses, Addresses::V6 { source, destination });
}

#[test]
fn nonsense_is_malformed() {
    let frame = segment(Side::Client, 7, 9, ACK, b"hello");
    let changed = |at: usize, byte: u8| {
        let mut frame = frame.clone();
        frame[at] = byte;
        frame
    };
    // Version, header length, total length, data offset.
    for (at, byte) in [(14, 0x55), (14, 0x44), (17, 30), (46, 0x40), (46, 0xf0)] {
        assert_eq!(Frame::parse(LinkType::Ethernet, &changed(at, byte)), Frame::Malformed, "{at} {byte:#x}");
    }
    for len in 0..54 {
        assert_eq!(Frame::parse(LinkType::Ethernet, &frame[..len]), Frame::Malformed, "{len}");
    }
    // UDP, a fragment, ARP.
    for (at, byte) in [(23, 17), (20, 0x20), (13, 6)] {
        assert_eq!(Frame::parse(LinkType::Ethernet, &changed(at, byte)), Frame::Other, "{at} {byte:#x}");
    }
}
