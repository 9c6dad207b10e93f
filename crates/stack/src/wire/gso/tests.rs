use super::*;
use crate::wire::tcp::{TcpOptions, emit};
use crate::wire::{MacAddr, ethernet::EtherType};
use proptest::prelude::*;

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn cut(frame: &[u8], gso: Gso) -> Result<Vec<Vec<u8>>, WireError> {
    let mut scratch = vec![0xee; frame.len()];
    let mut segments = Vec::new();
    let count = segment(frame, gso, &mut scratch, |segment| segments.push(segment.to_vec()))?;
    assert_eq!(count, segments.len());
    Ok(segments)
}

fn gso(kind: GsoKind, size: u16) -> Gso {
    // The header length of 0 shows that the value is not used.
    Gso { kind, size, header_len: 0, ecn: false }
}

#[test]
fn segments_match_linux_gso() {
    let mut cases = 0;
    for case in include_str!("linux_gso.txt").split("case ").skip(1) {
        let mut lines = case.lines();
        let title = lines.next().unwrap();
        let mut words = title.split(' ');
        let kind = match words.next().unwrap() {
            "tcp4" => GsoKind::Tcp4,
            "tcp6" => GsoKind::Tcp6,
            _ => GsoKind::Udp,
        };
        let size = words.next().unwrap().parse().unwrap();
        let frame = bytes(lines.next().unwrap().strip_prefix("super ").unwrap());
        let expected: Vec<Vec<u8>> =
            lines.map(|line| bytes(line.strip_prefix("segment ").unwrap())).collect();
        assert_eq!(cut(&frame, gso(kind, size)).unwrap(), expected, "{title}");
        assert_eq!(usize::from(headers_len(&frame, kind).unwrap()), frame.len() - 20, "{title}");
        cases += 1;
    }
    assert_eq!(cases, 13);
}

const SRC: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const DST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);

fn tcp4(payload: &[u8], flags: TcpFlags) -> Vec<u8> {
    let mut frame = vec![0; 54];
    ethernet::Header::new(MacAddr([2; 6]), MacAddr([4; 6]), None, EtherType::IPV4).emit(&mut frame);
    let ip = ipv4::Header {
        dscp: 0,
        ecn: 2,
        total_len: 40 + payload.len() as u16,
        ident: 7,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        ttl: 64,
        protocol: protocol::TCP,
        src: SRC,
        dst: DST,
        header_len: 20,
    };
    ip.emit(&mut frame[14..]);
    let tcp = TcpHeader { seq: SeqNumber(u32::MAX - 5), flags, ..Default::default() };
    emit(&tcp, &TcpOptions::default(), &mut frame[34..]);
    frame.extend(payload);
    frame
}

#[test]
fn wrong_gso_kind_and_zero_size_are_rejected() {
    let frame = tcp4(b"data", TcpFlags::ACK);
    assert_eq!(cut(&frame, gso(GsoKind::Tcp6, 8)), Err(WireError::BadValue));
    assert_eq!(cut(&frame, gso(GsoKind::Udp, 8)), Err(WireError::BadValue));
    assert_eq!(cut(&frame, gso(GsoKind::Tcp4, 0)), Err(WireError::BadValue));
    let mut fragment = frame.clone();
    fragment[20] = 0x20;
    assert_eq!(cut(&fragment, gso(GsoKind::Tcp4, 8)), Err(WireError::BadValue));
    for len in 0..frame.len() {
        assert!(cut(&frame[..len], gso(GsoKind::Tcp4, 8)).is_err(), "{len}");
    }
}

#[test]
fn short_scratch_buffer_is_rejected_before_any_output() {
    let frame = tcp4(&[1; 100], TcpFlags::ACK);
    let mut scratch = [0; 93];
    let result = segment(&frame, gso(GsoKind::Tcp4, 40), &mut scratch, |_| panic!("called"));
    assert_eq!(result, Err(WireError::BadLength));
    let mut scratch = [0; 94];
    assert_eq!(segment(&frame, gso(GsoKind::Tcp4, 40), &mut scratch, |_| {}), Ok(3));
}

#[test]
fn frame_without_payload_yields_one_segment_without_padding() {
    let mut frame = tcp4(b"", TcpFlags::ACK | TcpFlags::FIN);
    frame.extend([0; 6]);
    let segments = cut(&frame, gso(GsoKind::Tcp4, 8)).unwrap();
    assert_eq!((segments.len(), segments[0].len()), (1, 54));
}

#[test]
fn partial_checksum_is_completed() {
    let mut frame = tcp4(b"some data", TcpFlags::ACK);
    let whole = cut(&frame, gso(GsoKind::Tcp4, 1000)).unwrap().remove(0);
    let pseudo = pseudo_v4(SRC, DST, protocol::TCP, frame.len() - 34);
    frame[50..52].copy_from_slice(&pseudo.fold().to_be_bytes());
    assert_eq!(complete_checksum(&mut frame, 34, 16), Ok(()));
    assert_eq!(frame, whole);
}

#[test]
fn completed_checksum_is_never_zero() {
    // The only summed word is the field itself, 0xffff.
    let mut frame = [0, 0, 0xff, 0xff];
    assert_eq!(complete_checksum(&mut frame, 0, 2), Ok(()));
    assert_eq!(frame, [0, 0, 0xff, 0xff]);
}

#[test]
fn udp_segment_checksum_is_never_zero() {
    let cases = include_str!("linux_gso.txt");
    let (_, case) = cases.split_once("case udp4 8 ").unwrap();
    let mut frame = bytes(case.lines().nth(1).unwrap().strip_prefix("super ").unwrap());
    let checksum = |segment: &[u8]| u16::from_be_bytes([segment[40], segment[41]]);
    let first = cut(&frame, gso(GsoKind::Udp, 8)).unwrap().remove(0);
    // The payload makes the sum 0xffff, so that the checksum becomes 0.
    let word = Sum::of(&frame[42..44]).add_u16(checksum(&first)).fold();
    frame[42..44].copy_from_slice(&word.to_be_bytes());
    let first = cut(&frame, gso(GsoKind::Udp, 8)).unwrap().remove(0);
    assert_eq!(checksum(&first), 0xffff);
}

#[test]
fn checksum_field_outside_the_frame_is_rejected() {
    let mut frame = [1; 20];
    for (start, offset) in [(21, 0), (10, 10), (10, 9), (19, 0), (0, 7), (usize::MAX, 2), (2, usize::MAX - 1)]
    {
        assert_eq!(
            complete_checksum(&mut frame, start, offset),
            Err(WireError::BadLength),
            "{start} {offset}"
        );
    }
    assert_eq!(frame, [1; 20]);
}

proptest! {
    #[test]
    fn segments_are_valid_and_carry_the_whole_payload(payload in prop::collection::vec(any::<u8>(), 0..5000), size in 1u16..3000, flags: u8) {
        let frame = tcp4(&payload, TcpFlags(flags));
        let segments = cut(&frame, gso(GsoKind::Tcp4, size)).unwrap();
        let mut carried: Vec<u8> = Vec::new();
        for (index, bytes) in segments.iter().enumerate() {
            let packet = &bytes[14..];
            let ip = ipv4::Header::parse(packet).unwrap();
            prop_assert!(ip.checksum_ok(packet));
            prop_assert_eq!(usize::from(ip.total_len), packet.len());
            let body = ip.payload(packet);
            prop_assert!(pseudo_v4(ip.src, ip.dst, ip.protocol, body.len()).add(Sum::of(body)).is_valid());
            let tcp = TcpSegment::parse(body).unwrap();
            prop_assert_eq!(tcp.header.seq, SeqNumber(u32::MAX - 5) + carried.len() as u32);
            prop_assert!(index + 1 == segments.len() || tcp.payload.len() == usize::from(size));
            carried.extend(tcp.payload);
        }
        prop_assert_eq!(carried, payload);
    }

    #[test]
    fn arbitrary_bytes_never_panic(mut frame in prop::collection::vec(any::<u8>(), 0..200), seed in prop::option::of(any::<prop::sample::Index>()), kind in 0..3, size: u16, scratch in 0usize..300) {
        // Half of the frames are valid ones with a few modified bytes, so that the parsers get further.
        if let Some(seed) = seed {
            let noise = frame;
            frame = tcp4(&[7; 100], TcpFlags::ACK);
            for (n, byte) in noise.iter().take(3).enumerate() {
                let at = (seed.index(1 << 20) * (n + 1) + usize::from(*byte)) % frame.len();
                frame[at] = *byte;
            }
        }
        let kind = [GsoKind::Tcp4, GsoKind::Tcp6, GsoKind::Udp][kind as usize];
        let mut scratch = vec![0; scratch];
        let _ = segment(&frame, gso(kind, size), &mut scratch, |segment| assert!(segment.len() <= 300));
        let _ = headers_len(&frame, kind);
    }
}
