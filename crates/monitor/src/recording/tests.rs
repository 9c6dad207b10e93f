use super::*;
use crate::scripted::{Side, segment, segment_of};
use crate::sources::PacketVisitor;
use core::time::Duration;
use proptest::prelude::*;
use std::io;

const PSH_ACK: u8 = ACK | 8;

/// Frames with their times, and the error after them.
struct Script {
    frames: Vec<(Instant, Vec<u8>)>,
    error: Option<SourceError>,
}

impl PacketSource for Script {
    fn poll(&mut self, visit: &mut PacketVisitor<'_>) -> Result<SourceState, SourceError> {
        for (at, frame) in self.frames.drain(..) {
            visit(LinkType::Ethernet, &[(at, &frame)]);
        }
        self.error.take().map_or(Ok(SourceState::End), Err)
    }

    fn wait(&mut self, _: Duration) -> io::Result<()> {
        Ok(())
    }

    fn now(&self) -> Option<Instant> {
        None
    }

    fn lost(&mut self) -> u64 {
        0
    }
}

/// Writes a conversation of one client with the server, a millisecond between two segments.
struct Conversation {
    frames: Vec<(Instant, Vec<u8>)>,
    client: ([u8; 4], u16),
    /// Sequence numbers of the next bytes of client and server.
    next: [u32; 2],
}

impl Conversation {
    fn new(client_port: u16, next: [u32; 2]) -> Self {
        Self { frames: Vec::new(), client: ([10, 0, 0, 2], client_port), next }
    }

    fn opened(client_port: u16, next: [u32; 2]) -> Self {
        let mut c = Self::new(client_port, next);
        c.open();
        c
    }

    fn open(&mut self) {
        self.send(Side::Client, SYN, &[]);
        self.send(Side::Server, SYN | ACK, &[]);
        self.send(Side::Client, ACK, &[]);
    }

    fn add(&mut self, frame: Vec<u8>) {
        let at = Instant::from_millis(5_000 + self.frames.len() as u64);
        self.frames.push((at, frame));
    }

    /// Returns the next segment of a side.
    fn build(&mut self, side: Side, flags: u8, payload: &[u8]) -> Vec<u8> {
        let own = usize::from(side == Side::Server);
        let frame = segment_of(self.client, side, self.next[own], self.next[1 - own], flags, payload);
        let len = payload.len() as u32 + u32::from(flags & (FIN | SYN) != 0);
        self.next[own] = self.next[own].wrapping_add(len);
        frame
    }

    fn send(&mut self, side: Side, flags: u8, payload: &[u8]) {
        let frame = self.build(side, flags, payload);
        self.add(frame);
    }

    fn request(&mut self, payload: &[u8]) {
        self.send(Side::Client, PSH_ACK, payload);
    }

    fn respond(&mut self, payload: &[u8]) {
        self.send(Side::Server, PSH_ACK, payload);
    }
}

fn options() -> RecordingOptions {
    RecordingOptions { ports: Vec::new(), bytes_max: 1 << 20 }
}

fn read_frames(frames: Vec<(Instant, Vec<u8>)>) -> Recording {
    read(&mut Script { frames, error: None }, &options()).unwrap()
}

/// Returns time in milliseconds and text of each send of a connection.
fn sends(recording: &Recording, connection: usize) -> Vec<(u64, String)> {
    let sends = recording.connections[connection].sends.clone();
    let sends = &recording.sends[sends.start as usize..sends.end as usize];
    let text = |send: &RecordedSend| {
        String::from_utf8_lossy(&recording.bytes[send.start..send.start + send.len as usize]).into_owned()
    };
    sends.iter().map(|send| (send.at_ns / 1_000_000, text(send))).collect()
}

#[test]
fn requests_and_answers_take_turns() {
    let mut c = Conversation::opened(2000, [5, 9]);
    c.request(b"ab");
    c.request(b"cd");
    c.respond(b"12345");
    c.respond(b"67");
    c.request(b"e");
    c.respond(b"8");
    c.send(Side::Client, FIN | ACK, &[]);
    c.send(Side::Server, FIN | ACK, &[]);
    let recording = read_frames(c.frames);
    assert_eq!(sends(&recording, 0), [(3, "ab".into()), (4, "cd".into()), (7, "e".into())]);
    let first = RecordedRequest { first_send: 0, last_send: 1, answer_from: 0, answer_bytes: 7 };
    let second = RecordedRequest { first_send: 2, last_send: 2, answer_from: 7, answer_bytes: 1 };
    assert_eq!(recording.requests, [first, second]);
    let connection = &recording.connections[0];
    assert_eq!((connection.opened_ns, connection.ended_ns / 1_000_000), (0, 9));
    assert_eq!((connection.answer_bytes, connection.end, connection.server_port), (8, RecordedEnd::Fin, 80));
    assert_eq!((recording.length_ns / 1_000_000, recording.account.connections), (10, 1));
}

#[test]
fn retransmissions_and_reordering_change_nothing_but_times() {
    // The sequence numbers of the client wrap.
    let mut c = Conversation::opened(2000, [u32::MAX - 4, 9]);
    let parts: Vec<_> =
        [&b"abcd"[..], b"efgh", b"ijkl"].map(|part| c.build(Side::Client, PSH_ACK, part)).into();
    for part in [2, 0, 0, 1, 2, 1] {
        c.add(parts[part].clone());
    }
    c.respond(b"1");
    let recording = read_frames(c.frames);
    // The last part came early, and counts when the gap before it was filled.
    assert_eq!(sends(&recording, 0), [(4, "abcd".into()), (6, "efgh".into()), (6, "ijkl".into())]);
    assert_eq!((recording.account.retransmissions, recording.account.early_segments), (3, 1));
    assert_eq!((recording.requests.len(), recording.requests[0].answer_bytes), (1, 1));
}

#[test]
fn connections_without_all_bytes_are_left_out() {
    let mut all = Vec::new();
    // Complete.
    let mut c = Conversation::opened(2000, [5, 9]);
    c.request(b"complete");
    c.respond(b"1");
    all.append(&mut c.frames);
    // Without bytes of the client, which the server has acknowledged.
    let mut c = Conversation::opened(2001, [5, 9]);
    c.build(Side::Client, PSH_ACK, b"lost");
    c.request(b"later");
    c.respond(b"1");
    all.append(&mut c.frames);
    // Without bytes at the end of the capture.
    let mut c = Conversation::opened(2002, [5, 9]);
    c.build(Side::Client, PSH_ACK, b"lost");
    c.request(b"later");
    all.append(&mut c.frames);
    // Without bytes before a reset.
    let mut c = Conversation::opened(2006, [5, 9]);
    c.build(Side::Client, PSH_ACK, b"lost");
    c.request(b"later");
    c.send(Side::Client, RST | ACK, &[]);
    all.append(&mut c.frames);
    // With a cut packet.
    let mut c = Conversation::opened(2003, [5, 9]);
    let mut cut = c.build(Side::Client, PSH_ACK, &[b'x'; 200]);
    cut.truncate(96);
    c.add(cut);
    all.append(&mut c.frames);
    // Seen from the middle on.
    let mut c = Conversation::new(2004, [5, 9]);
    c.respond(b"1");
    c.request(b"middle");
    all.append(&mut c.frames);
    // Bytes of the server are missing, which does no harm.
    let mut c = Conversation::opened(2005, [5, 9]);
    c.request(b"also");
    c.build(Side::Server, PSH_ACK, b"123");
    c.respond(b"4");
    c.send(Side::Client, ACK, &[]);
    all.append(&mut c.frames);
    let recording = read_frames(all);
    let texts: Vec<String> =
        (0..recording.connections.len()).map(|n| sends(&recording, n)[0].1.clone()).collect();
    assert_eq!(texts, ["complete", "also"]);
    let account = &recording.account;
    assert_eq!((account.left_out_incomplete, account.left_out_midstream), (4, 1));
    assert_eq!((account.missed_answer_bytes, recording.connections[1].answer_bytes), (3, 4));
}

#[test]
fn ports_are_used_again() {
    let mut c = Conversation::opened(2000, [5, 9]);
    c.request(b"first");
    c.send(Side::Client, RST | ACK, &[]);
    // A segment of the server was on its way.
    c.respond(b"late");
    c.next = [7_000, 9_000];
    c.open();
    c.request(b"second");
    c.respond(b"12");
    // Without the end of the second connection; its SYN is retransmitted.
    c.next = [90_000, 80_000];
    let syn = c.build(Side::Client, SYN, &[]);
    c.add(syn.clone());
    c.add(syn);
    c.send(Side::Server, SYN | ACK, &[]);
    c.request(b"third");
    let recording = read_frames(c.frames);
    let texts: Vec<String> =
        (0..recording.connections.len()).map(|n| sends(&recording, n)[0].1.clone()).collect();
    assert_eq!(texts, ["first", "second", "third"]);
    assert_eq!(recording.connections[0].end, RecordedEnd::Reset);
    assert_eq!((recording.account.left_out_midstream, recording.account.left_out_incomplete), (0, 0));
    assert_eq!(recording.open_max(), 1);
}

#[test]
fn server_may_speak_first() {
    let mut c = Conversation::opened(2000, [5, 9]);
    c.respond(b"220 hello");
    c.request(b"EHLO");
    c.respond(b"250");
    let recording = read_frames(c.frames);
    let request = RecordedRequest { first_send: 0, last_send: 0, answer_from: 9, answer_bytes: 3 };
    assert_eq!((recording.requests, recording.connections[0].answer_bytes), (vec![request], 12));
}

#[test]
fn ports_select_connections() {
    let mut c = Conversation::opened(2000, [5, 9]);
    c.request(b"x");
    for (ports, count) in [(vec![80], 1), (vec![81, 443], 0), (vec![2000], 0)] {
        let options = RecordingOptions { ports, ..options() };
        let recording = read(&mut Script { frames: c.frames.clone(), error: None }, &options).unwrap();
        assert_eq!(
            (recording.connections.len(), recording.account.left_out_midstream),
            (count, 0),
            "{options:?}"
        );
    }
}

#[test]
fn cut_captures_give_what_they_have() {
    let mut c = Conversation::opened(2000, [5, 9]);
    c.request(b"x");
    let mut script = Script { frames: c.frames, error: Some(SourceError::CutShort) };
    let recording = read(&mut script, &options()).unwrap();
    assert_eq!(recording.connections.len(), 1);
    assert!(recording.account.cut.unwrap().contains("cut short"));
}

// limit: client bytes of a replay
#[test]
fn too_many_bytes_are_refused() {
    let mut c = Conversation::opened(2000, [5, 9]);
    (0..3).for_each(|_| c.request(&[0; 1000]));
    let problem = read(
        &mut Script { frames: c.frames.clone(), error: None },
        &RecordingOptions { bytes_max: 2_999, ..options() },
    );
    assert!(problem.unwrap_err().contains("more than 2999 bytes (--bytes-max)"));
    let enough = RecordingOptions { bytes_max: 3_000, ..options() };
    assert_eq!(read(&mut Script { frames: c.frames, error: None }, &enough).unwrap().bytes.len(), 3_000);
}

proptest! {
    /// However segments are repeated and reordered, a stream is read as it was sent.
    #[test]
    fn streams_are_read_as_they_were_sent(
        parts in proptest::collection::vec(1usize..50, 1..30),
        order in proptest::collection::vec(any::<prop::sample::Index>(), 0..80),
        isn in any::<[u32; 2]>(),
    ) {
        let mut c = Conversation::opened(2000, isn);
        let mut expected = Vec::new();
        let frames: Vec<_> = parts
            .iter()
            .enumerate()
            .map(|(n, len)| {
                let payload = vec![n as u8; *len];
                expected.extend_from_slice(&payload);
                c.build(Side::Client, PSH_ACK, &payload)
            })
            .collect();
        order.iter().for_each(|index| c.add(index.get(&frames).clone()));
        frames.iter().rev().for_each(|frame| c.add(frame.clone()));
        c.respond(b"1");
        let recording = read_frames(c.frames);
        prop_assert_eq!(recording.bytes, expected);
        prop_assert!(recording.sends.is_sorted_by_key(|send| send.at_ns));
        prop_assert_eq!(recording.requests.len(), 1);
    }

    /// Nonsense is no panic.
    #[test]
    fn any_segments_are_read(
        segments in proptest::collection::vec((any::<bool>(), any::<u32>(), any::<u32>(), any::<u8>(), 0usize..20), 0..60),
    ) {
        let frames = segments.iter().enumerate().map(|(n, (is_client, seq, ack, flags, len))| {
            let side = if *is_client { Side::Client } else { Side::Server };
            (Instant::from_millis(n as u64), segment(side, *seq % 100, *ack % 100, *flags, &vec![0; *len]))
        });
        let recording = read_frames(frames.collect());
        let sent: u64 = recording.sends.iter().map(|send| u64::from(send.len)).sum();
        prop_assert_eq!(sent, recording.bytes.len() as u64);
    }
}
