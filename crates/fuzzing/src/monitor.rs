//! The monitor: captures of any bytes, and connections with any segments. Every request must be accounted
//! for.
//!
//! The first byte of an input selects a capture file, or the protocol of segments. A segment is described by
//! 6 bytes: connection and direction, how far its sequence number is from the expected one (two bytes),
//! flags, length of its payload, and how many bytes are cut off the end of its frame. Then its payload
//! follows.

use ginnel_monitor::engine::{Engine, EngineConfig};
use ginnel_monitor::frame::LinkType;
use ginnel_monitor::recording::{self, RecordingOptions};
use ginnel_monitor::rules::{ByteTest, Endianness, LengthPrefix, PortRule, ProtocolName};
use ginnel_monitor::scripted::{SERVER_PORT, Side, segment_of};
use ginnel_monitor::session::Session;
use ginnel_monitor::sources::capture_file::CaptureFile;
use ginnel_monitor::sources::{PacketSource, SourceState};
use ginnel_stack::time::Instant;
use std::io::Cursor;

/// Bytes before the payload of a segment.
const SEGMENT_BYTES: usize = 6;
/// Connections of a run, one more than the engine may track.
const CONNECTIONS: usize = 4;
/// Length in bytes of each message of `iot`: short, so that an input has room for many.
const MESSAGE_BYTES: u32 = 20;

/// Runs one input.
///
/// # Panics
/// If a request is not accounted for, a limit is exceeded, or the parts of a recording do not fit together.
pub fn run(data: &[u8]) {
    let Some((mode, rest)) = data.split_first() else { return };
    match mode % 5 {
        0 => read_capture(rest),
        protocol => follow(protocol, rest),
    }
}

fn engine(protocol: u8) -> Engine {
    let name = [ProtocolName::Iot, ProtocolName::Http, ProtocolName::Redis, ProtocolName::LengthPrefixed];
    let name = name[usize::from(protocol.saturating_sub(1)) % name.len()];
    let prefix = LengthPrefix {
        offset_bytes: 1,
        width_bytes: 2,
        endianness: Endianness::Little,
        added_bytes: 3,
        message_bytes_max: 4096,
        high: Some(ByteTest { offset_bytes: 3, value: 2 }),
        one_way: Some(ByteTest { offset_bytes: 0, value: 0 }),
    };
    let request = (name == ProtocolName::LengthPrefixed).then_some(prefix);
    let rule = PortRule { message_bytes: MESSAGE_BYTES, request, ..PortRule::new(name, vec![SERVER_PORT]) };
    let config = EngineConfig {
        connections_max: 3,
        outstanding_max: 50,
        early_bytes_max: 500,
        ..EngineConfig::new(vec![rule])
    };
    Engine::new(&config).expect("a valid rule")
}

fn read_capture(bytes: &[u8]) {
    let Ok(mut source) = CaptureFile::open(Box::new(Cursor::new(bytes.to_vec()))) else { return };
    let mut session = Session::new(engine(2), Some(core::time::Duration::from_millis(100)));
    while let Ok(SourceState::More) =
        source.poll(&mut |link, packets| session.process(link, packets, 0, &mut |_| ()))
    {}
    let total = session.finish(0, &mut |_| ());
    let c = total.counters;
    assert_eq!(c.requests, c.responses + c.unanswered + c.abandoned, "{c:?}");
    read_recording(bytes);
}

/// Reads the connections of a capture for a replay, and checks that all their parts fit together.
fn read_recording(bytes: &[u8]) {
    let Ok(mut source) = CaptureFile::open(Box::new(Cursor::new(bytes.to_vec()))) else { return };
    let options = RecordingOptions { ports: Vec::new(), bytes_max: 1 << 20 };
    let Ok(recording) = recording::read(&mut source, &options) else { return };
    let mut end = 0;
    for send in &recording.sends {
        assert_eq!(send.start, end);
        end += send.len as usize;
    }
    assert_eq!(end, recording.bytes.len());
    for connection in &recording.connections {
        let requests = connection.requests.start as usize..connection.requests.end as usize;
        let requests = &recording.requests[requests];
        assert_eq!(requests.is_empty(), connection.sends.is_empty());
        assert!(requests.iter().all(|request| connection.sends.contains(&request.last_send)));
        assert!(requests.iter().all(|r| r.answer_from + r.answer_bytes <= connection.answer_bytes));
        assert!(connection.ended_ns <= recording.length_ns);
    }
}

fn follow(protocol: u8, mut data: &[u8]) {
    let mut engine = engine(protocol);
    let mut next = [[0u32; 2]; CONNECTIONS];
    for time in 1u64.. {
        let Some((head, rest)) = data.split_first_chunk::<SEGMENT_BYTES>() else { break };
        let [who, distance_low, distance_high, flags, len, cut] = *head;
        let (payload, rest) = rest.split_at(usize::from(len).min(rest.len()));
        data = rest;
        let (connection, side) = (usize::from(who) % CONNECTIONS, usize::from(who >> 7));
        let distance = i16::from_le_bytes([distance_low, distance_high]);
        let [own, other] = [next[connection][side], next[connection][1 - side]];
        let seq = own.wrapping_add_signed(distance.into());
        let client = ([10, 0, 0, 2], 1000 + u16::from(who) % CONNECTIONS as u16);
        let side_name = [Side::Client, Side::Server][side];
        let frame = segment_of(client, side_name, seq, other, flags, payload);
        // SYN and FIN take a sequence number each.
        let taken = payload.len() as u32 + u32::from(flags & 1) + u32::from(flags >> 1 & 1);
        next[connection][side] = seq.wrapping_add(taken);
        let captured = frame.len().saturating_sub(usize::from(cut));
        engine.process(Instant::from_millis(time), LinkType::Ethernet, &frame[..captured]);
        check(&engine);
    }
    engine.finish();
    check(&engine);
    assert_eq!((engine.connections(), engine.outstanding()), (0, 0));
}

fn check(engine: &Engine) {
    let c = engine.counters();
    let accounted = c.responses + c.unanswered + c.abandoned + engine.outstanding() as u64;
    assert_eq!(c.requests, accounted, "{c:?}");
    assert!(engine.connections() <= 3 && engine.outstanding() <= 50);
    assert!(c.requests_high <= c.requests && c.responses_high <= c.responses);
}

/// Returns the handwritten inputs.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    const SYN: u8 = 2;
    const ACK: u8 = 16;
    const SERVER: u8 = 0x80;
    let segment = |who: u8, distance: i16, flags: u8, payload: &[u8]| {
        let [low, high] = distance.to_le_bytes();
        [&[who, low, high, flags, payload.len() as u8, 0], payload].concat()
    };
    let input = |protocol: u8, segments: &[Vec<u8>]| [&[protocol][..], &segments.concat()].concat();
    let open = [segment(0, 100, SYN, &[]), segment(SERVER, -70, SYN | ACK, &[])].concat();
    let mut message = vec![0; MESSAGE_BYTES as usize];
    (message[5], message[6]) = (1, 2);
    let answer = ginnel_apps::iot::message::ANSWER_OK;
    let get = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    let post = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
    let ok = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab";
    let until_close = b"HTTP/1.0 200 OK\r\n\r\nbody";
    let mut capture =
        vec![0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0];
    for (side, payload) in [(Side::Client, &get[..]), (Side::Server, ok)] {
        let frame = segment_of(([10, 0, 0, 2], 1000), side, 1, 100, ACK, payload);
        let len = (frame.len() as u32).to_le_bytes();
        capture.extend([&[1, 0, 0, 0, 2, 0, 0, 0][..], &len, &len, &frame].concat());
    }
    let mut section = vec![0x0a, 0x0d, 0x0d, 0x0a, 28, 0, 0, 0, 0x4d, 0x3c, 0x2b, 0x1a, 1, 0, 0, 0];
    section.extend([0xff; 8]);
    section.extend([28, 0, 0, 0, 1, 0, 0, 0, 20, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 20, 0, 0, 0]);
    section.extend([6, 0, 0, 0, 36, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0]);
    section.extend([1, 2, 3, 4, 36, 0, 0, 0]);
    vec![
        ("pcap", [&[0][..], &capture].concat()),
        ("pcapng", [&[0][..], &section].concat()),
        (
            "iot",
            input(
                1,
                &[open.clone(), segment(0, 0, ACK, &message.repeat(2)), segment(SERVER, 0, ACK, &answer[..])],
            ),
        ),
        (
            "http-reordered",
            input(
                2,
                &[
                    open.clone(),
                    segment(0, 10, ACK, &get[10..]),
                    segment(0, -27, ACK, &get[..10]),
                    segment(SERVER, 0, ACK, ok),
                    segment(SERVER, -40, ACK, ok),
                ],
            ),
        ),
        (
            "http-bodies",
            input(
                2,
                &[
                    open.clone(),
                    segment(0, 0, ACK, post),
                    segment(0, 0, ACK, get),
                    segment(SERVER, 0, ACK | 1, until_close),
                ],
            ),
        ),
        (
            "http-midstream",
            input(
                2,
                &[
                    segment(0, 5, ACK, b"body"),
                    segment(0, 0, ACK, get),
                    segment(SERVER, 0, ACK, ok),
                    segment(SERVER, 0, 4, &[]),
                ],
            ),
        ),
        (
            "redis",
            input(
                3,
                &[
                    open.clone(),
                    segment(0, 0, ACK, b"*1\r\n$4\r\nPING\r\nGET x\r\n"),
                    segment(SERVER, 0, ACK, b"+PONG\r\n%1\r\n+a\r\n$1\r\nb\r\n"),
                ],
            ),
        ),
        (
            "length-prefixed",
            input(
                4,
                &[
                    open,
                    segment(0, 0, ACK, b"r\x02\x00\x02xr\x00\x00"),
                    segment(SERVER, 0, ACK, b"r\x00\x00r\x01\x00y"),
                ],
            ),
        ),
    ]
}
