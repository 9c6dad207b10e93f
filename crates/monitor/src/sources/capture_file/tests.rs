use super::*;
use crate::frame::ACK;
use crate::scripted::{Side, segment};

/// Returns a capture of two packets at 1.5 s and 2.000001 s in the classic format.
fn pcap(link: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(0xa1b2_c3d4u32.to_le_bytes());
    bytes.extend([2, 0, 4, 0]);
    bytes.extend([0; 8]);
    for word in [200, link] {
        bytes.extend(word.to_le_bytes());
    }
    // The second packet was longer than the limit of 200 bytes.
    for (seconds, micros, len) in [(1u32, 500_000u32, 60u32), (2, 1, 1460)] {
        let frame = segment(Side::Client, 1, 1, ACK, &vec![7; len as usize]);
        let captured = frame.len().min(200);
        for word in [seconds, micros, captured as u32, frame.len() as u32] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(&frame[..captured]);
    }
    bytes
}

fn block(kind: u32, body: &[u8]) -> Vec<u8> {
    let padded = body.len().next_multiple_of(4);
    let len = (12 + padded as u32).to_le_bytes();
    let mut bytes = [kind.to_le_bytes(), len].concat();
    bytes.extend(body);
    bytes.resize(8 + padded, 0);
    bytes.extend(len);
    bytes
}

/// Returns a capture of a packet at 1.5 s, with times in units of `resolution`.
fn pcapng(resolution: u8, ticks: u64) -> Vec<u8> {
    let mut section = vec![0x4d, 0x3c, 0x2b, 0x1a, 1, 0, 0, 0];
    section.extend([0xff; 8]);
    let mut interface = vec![1, 0, 0, 0, 0, 0, 0, 0];
    interface.extend([9, 0, 1, 0, resolution, 0, 0, 0, 0, 0, 0, 0]);
    let frame = segment(Side::Client, 1, 1, ACK, b"hello");
    let mut packet = Vec::new();
    let words = [0, (ticks >> 32) as u32, ticks as u32, frame.len() as u32, frame.len() as u32];
    words.iter().for_each(|word| packet.extend(word.to_le_bytes()));
    packet.extend(&frame);
    [block(SECTION_HEADER, &section), block(1, &interface), block(ENHANCED_PACKET, &packet)].concat()
}

/// Returns times and lengths of the packets, and why the capture ends early.
fn read(bytes: &[u8]) -> (Vec<(u64, usize)>, Option<SourceError>) {
    let mut found = Vec::new();
    let mut source = match CaptureFile::open(Box::new(Cursor::new(bytes.to_vec()))) {
        Ok(source) => source,
        Err(e) => return (found, Some(e)),
    };
    loop {
        let state = source.poll(&mut |link, packets| {
            assert_eq!(link, LinkType::Ethernet);
            found.extend(packets.iter().map(|(at, bytes)| (at.as_nanos(), bytes.len())));
        });
        match state {
            Ok(SourceState::End) => return (found, None),
            Ok(_) => {}
            Err(e) => return (found, Some(e)),
        }
    }
}

#[test]
fn pcap_packets_have_times() {
    let (packets, error) = read(&pcap(1));
    assert_eq!(packets, [(1_500_000_000, 114), (2_000_001_000, 200)]);
    assert!(error.is_none(), "{error:?}");
}

#[test]
fn pcapng_times_have_the_units_of_their_interface() {
    for (resolution, ticks) in [(6, 1_500_000), (9, 1_500_000_000), (3, 1500), (0x80 | 10, 1536), (0x81, 3)] {
        let (packets, error) = read(&pcapng(resolution, ticks));
        assert_eq!(packets, [(1_500_000_000, 59)], "{resolution}");
        assert!(error.is_none(), "{error:?}");
    }
    // Nonsense, but a number.
    assert_eq!(read(&pcapng(127, u64::MAX)).0, [(0, 59)]);
    assert_eq!(read(&pcapng(0, u64::MAX)).0, [(u64::MAX, 59)]);
}

#[test]
fn shortened_captures_give_what_they_have() {
    for (whole, ends) in [(pcap(1), vec![24, 24 + 16 + 114]), (pcapng(6, 1), vec![28, 28 + 32])] {
        for len in 1..whole.len() {
            let (packets, error) = read(&whole[..len]);
            let is_at_end = ends.contains(&len);
            assert_eq!(error.is_none(), is_at_end, "{len}: {error:?}");
            assert!(error.is_none_or(|e| matches!(e, SourceError::CutShort)), "{len}");
            assert!(packets.len() < 2);
        }
    }
}

#[test]
fn unusable_captures_are_named() {
    let problem = |bytes: &[u8]| read(bytes).1.expect("an error").to_string();
    assert!(problem(b"").contains("empty"));
    assert!(problem(b"#!/bin/sh\necho this is no capture at all\n").contains("neither a pcap nor a pcapng"));
    assert_eq!(
        problem(&pcap(127)),
        "link type 127 is not supported: use Ethernet, raw IP, BSD loopback, or Linux's \"any\""
    );
    let mut foreign = pcapng(6, 1);
    // The number of the packet's interface.
    foreign[28 + 32 + 8] = 3;
    assert!(problem(&foreign).contains("not described"), "{}", problem(&foreign));
    let simple = [&pcapng(6, 1)[..], &block(SIMPLE_PACKET, &[0; 8])].concat();
    assert!(problem(&simple).contains("block type 3"));
}

#[test]
fn corrupt_captures_are_no_panic() {
    for whole in [pcap(1), pcapng(6, 1_500_000)] {
        for at in 0..whole.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] = value;
                if let (_, Some(e)) =
                    std::panic::catch_unwind(|| read_any(&bytes)).unwrap_or_else(|_| panic!("{at} {value}"))
                {
                    assert!(!e.to_string().is_empty());
                }
            }
        }
    }
}

/// As [`read`], for any link type.
fn read_any(bytes: &[u8]) -> (usize, Option<SourceError>) {
    let mut count = 0;
    let mut source = match CaptureFile::open(Box::new(Cursor::new(bytes.to_vec()))) {
        Ok(source) => source,
        Err(e) => return (count, Some(e)),
    };
    loop {
        match source.poll(&mut |_, packets| count += packets.len()) {
            Ok(SourceState::End) => return (count, None),
            Ok(_) => {}
            Err(e) => return (count, Some(e)),
        }
    }
}
