//! Unordered send: messages of high priority leave before queued ones of lower priority, in one contiguous
//! stream of whole messages.

use super::common::{ACK, FIN, closed_count, config};
use core::time::Duration;
use ginnel_stack::error::SendError;
use ginnel_stack::events::Event;
use ginnel_stack::options::TcpOption;
use ginnel_stack::tcp::source::PreloadedSource;
use ginnel_stack::wire::tcp::{TcpFlags, TcpOptions};
use ginnel_testkit::scripted_peer::{ScriptedPeer, SentSegment};
use proptest::prelude::*;

const HIGH: u8 = 6;
const LOW: u8 = 0;
const BACKGROUND: u8 = 1;

/// The peer: it puts the stream together and checks that no byte changes when it is sent again.
struct Receiver {
    p: ScriptedPeer,
    stream: Vec<u8>,
    has_fin: bool,
    /// Next sequence number of the peer.
    seq: i64,
}

impl Receiver {
    /// Creates a connection whose peer has an MSS of 1,000 and offers a window of `window` bytes.
    fn new(window: u16) -> Self {
        let options = TcpOptions { mss: Some(1000), ..TcpOptions::default() };
        let p = ScriptedPeer::established(config(), &options);
        let mut receiver = Self { p, stream: Vec::new(), has_fin: false, seq: 1 };
        // A window becomes smaller only by a segment that is later than the last one.
        receiver.acknowledge(0, window);
        receiver.acknowledge(0, window);
        receiver
    }

    fn send(&mut self, bytes: &[u8], priority: u8) {
        let conn = self.p.conn.unwrap();
        assert_eq!(self.p.stack.send_message(conn, bytes, priority), Ok(()));
    }

    /// Takes what the stack sent.
    fn take(&mut self, sent: &[SentSegment]) {
        // Window probes are before the stream.
        let has_contents = |s: &&SentSegment| !s.payload.is_empty() || s.header.flags.contains(FIN);
        for segment in sent.iter().filter(has_contents) {
            let at = segment.header.seq.0.wrapping_sub(self.p.iss.wrapping_add(1)) as usize;
            let known = self.stream.len().saturating_sub(at).min(segment.payload.len());
            assert!(at <= self.stream.len(), "a gap before {at}");
            assert_eq!(self.stream[at..at + known], segment.payload[..known], "other bytes at {at}");
            self.stream.extend(&segment.payload[known..]);
            if segment.header.flags.contains(FIN) {
                assert_eq!(at + segment.payload.len(), self.stream.len(), "data after FIN");
                self.has_fin = true;
            }
        }
    }

    fn flush(&mut self) {
        let sent = self.p.flush();
        self.take(&sent);
    }

    fn wait(&mut self, ms: u64) {
        let sent = self.p.wait(Duration::from_millis(ms));
        self.take(&sent);
    }

    /// Acknowledges `count` bytes of the stream, and offers a window. A byte of data lets the stack accept a
    /// smaller window. Returns what the stack sent.
    fn acknowledge(&mut self, count: usize, window: u16) -> Vec<SentSegment> {
        let ack = self.p.custom_segment(ACK, self.seq, 1 + count as i64, window, 0, b"x");
        self.seq += 1;
        let sent = self.p.deliver_frame(&ack);
        self.take(&sent);
        sent
    }

    /// Acknowledges everything until nothing more is sent.
    fn drain(&mut self) {
        loop {
            let before = self.stream.len();
            self.acknowledge(before, 60_000);
            self.wait(50);
            if self.stream.len() == before {
                return;
            }
        }
    }
}

/// The message that was begun is finished first, although window and segment size cut it.
#[test]
fn high_message_overtakes_those_that_wait_for_the_window() {
    let mut r = Receiver::new(1500);
    let begun = vec![b'b'; 2500];
    r.send(&begun, LOW);
    r.flush();
    assert_eq!(r.stream.len(), 1500, "the window has no room for the rest");
    r.send(b"low 1.", LOW);
    r.send(b"background.", BACKGROUND);
    r.send(b"low 2.", LOW);
    r.send(b"high 1.", HIGH);
    r.send(b"high 2.", HIGH);
    r.send(b"highest.", 7);
    r.drain();
    let expected = [&begun[..], b"highest.high 1.high 2.low 1.low 2.background."].concat();
    assert_eq!(String::from_utf8_lossy(&r.stream), String::from_utf8_lossy(&expected));
}

#[test]
fn plain_sends_keep_their_order() {
    let mut r = Receiver::new(0);
    let conn = r.p.conn.unwrap();
    r.p.stack.set_option(conn, TcpOption::Priority(BACKGROUND)).unwrap();
    assert_eq!(r.p.stack.send(conn, b"first."), Ok(6));
    r.p.stack.set_option(conn, TcpOption::Priority(HIGH)).unwrap();
    assert_eq!(r.p.stack.send(conn, b"second."), Ok(7));
    r.drain();
    assert_eq!(r.stream, b"first.second.");
}

#[test]
fn plain_bytes_and_slices_are_not_overtaken() {
    let mut r = Receiver::new(0);
    let conn = r.p.conn.unwrap();
    let source = r.p.stack.add_source(Box::new(PreloadedSource::new(b"slice.".as_slice())));
    r.send(b"low 1.", LOW);
    r.p.stack.send_source(conn, source, 0, 6).unwrap();
    r.send(b"low 2.", LOW);
    r.send(b"high 1.", HIGH);
    assert_eq!(r.p.stack.send(conn, b"plain."), Ok(6));
    r.send(b"low 3.", LOW);
    r.send(b"high 2.", HIGH);
    r.drain();
    assert_eq!(String::from_utf8_lossy(&r.stream), "low 1.slice.high 1.low 2.plain.high 2.low 3.");
    r.p.stack.release_source(source);
}

#[test]
fn fin_follows_all_messages() {
    let mut r = Receiver::new(0);
    r.send(b"low.", LOW);
    r.send(b"high.", HIGH);
    let conn = r.p.conn.unwrap();
    r.p.stack.shutdown_write(conn).unwrap();
    assert_eq!(r.p.stack.send_message(conn, b"late", HIGH), Err(SendError::Closed));
    r.drain();
    assert_eq!((r.stream.as_slice(), r.has_fin), (&b"high.low."[..], true));
    r.p.deliver(ACK | FIN, r.seq, 11, &[]);
    assert_eq!((closed_count(&r.p), r.p.stack.usage().chunks), (1, 0));
}

#[test]
fn abort_frees_queued_messages() {
    let mut r = Receiver::new(0);
    r.send(&[1; 9000], LOW);
    r.send(&[2; 9000], HIGH);
    r.p.stack.abort(r.p.conn.unwrap()).unwrap();
    assert!(r.p.flush().iter().any(|sent| sent.header.flags.contains(TcpFlags::RST)));
    assert_eq!((closed_count(&r.p), r.p.stack.usage().chunks), (1, 0));
}

/// Messages in flight keep their place when they are lost.
#[test]
fn retransmissions_are_not_overtaken() {
    let mut r = Receiver::new(60_000);
    r.send(&[b'1'; 600], LOW);
    r.flush();
    r.send(&[b'2'; 500], LOW);
    // Nagle's algorithm holds the small message back, so the next one may pass it.
    r.flush();
    assert_eq!(r.stream.len(), 600);
    r.send(&[b'3'; 700], HIGH);
    r.flush();
    assert!(r.stream[600..].starts_with(&[b'3'; 700]));
    r.send(b"4", 7);
    // Nothing is acknowledged: the first segments are sent again, with the bytes that they had.
    r.wait(5000);
    assert!(r.p.stack.tcp_stats().retransmitted > 0);
    r.drain();
    let expected = [&[b'1'; 600][..], &[b'3'; 700], &[b'2'; 300], &[b'2'; 200], b"4"].concat();
    assert_eq!(String::from_utf8_lossy(&r.stream), String::from_utf8_lossy(&expected));
}

#[test]
fn messages_before_the_handshake_are_ordered() {
    let mut p = ScriptedPeer::new(config());
    let conn = p.connect();
    p.stack.send_message(conn, b"low.", LOW).unwrap();
    p.stack.send_message(conn, b"high.", HIGH).unwrap();
    let sent = p.deliver(ACK | TcpFlags::SYN, 0, 1, &[]);
    let stream: Vec<u8> = sent.into_iter().flat_map(|sent| sent.payload).collect();
    assert_eq!(stream, b"high.low.");
}

#[test]
fn urgent_byte_keeps_its_place() {
    let mut r = Receiver::new(0);
    let conn = r.p.conn.unwrap();
    r.send(b"low.", LOW);
    assert_eq!(r.p.stack.send_urgent(conn, b"ab!"), Ok(3));
    r.send(b"more.", LOW);
    r.send(b"high.", HIGH);
    let sent = r.acknowledge(0, 60_000);
    assert!(sent.iter().any(|sent| sent.header.flags.contains(TcpFlags::URG) && sent.header.urg_ptr == 7));
    r.drain();
    assert_eq!(r.stream, b"low.ab!high.more.");
}

/// Records (`MSG_EOR`) move with their data.
#[test]
fn record_ends_stay_with_their_bytes() {
    let mut r = Receiver::new(0);
    let conn = r.p.conn.unwrap();
    r.send(b"low 1.", LOW);
    r.p.stack.end_record(conn);
    r.send(b"low 2.", LOW);
    r.send(b"high.", HIGH);
    let sent = r.acknowledge(0, 60_000);
    let payloads: Vec<&[u8]> = sent.iter().map(|sent| sent.payload.as_slice()).collect();
    assert_eq!(payloads[0], b"high.low 1.");
}

#[test]
fn message_fits_whole_or_not_at_all() {
    let mut r = Receiver::new(0);
    let conn = r.p.conn.unwrap();
    r.p.stack.set_option(conn, TcpOption::SendBuffer(4096)).unwrap();
    assert_eq!(r.p.stack.send_message(conn, &[0; 4097], HIGH), Err(SendError::TooLong));
    assert_eq!(r.p.stack.send_message(conn, &[], HIGH), Ok(()));
    r.send(&[1; 3000], LOW);
    assert_eq!(r.p.stack.send_message(conn, &[2; 2000], HIGH), Err(SendError::Full));
    assert_eq!(r.p.stack.queued(conn), 3000);
    assert!(!r.p.events.iter().any(|event| matches!(event, Event::Writable { .. })));
    r.drain();
    assert!(r.p.events.contains(&Event::Writable { conn }));
    r.send(&[2; 2000], HIGH);
    r.drain();
    assert_eq!(r.stream, [vec![1; 3000], vec![2; 2000]].concat());
}

#[derive(Clone, Debug)]
enum Step {
    Message { len: usize, priority: u8 },
    Acknowledge { percent: usize, window: u16 },
    Wait { ms: u64 },
    Segment { mss: u16 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0..3000usize, 0..8u8).prop_map(|(len, priority)| Step::Message { len, priority }),
        4 => (0..=100usize, prop_oneof![Just(0u16), 1..20_000u16])
            .prop_map(|(percent, window)| Step::Acknowledge { percent, window }),
        2 => (0..2000u64).prop_map(|ms| Step::Wait { ms }),
        1 => (100..1000u16).prop_map(|mss| Step::Segment { mss }),
    ];
    proptest::collection::vec(step, 1..60)
}

/// Returns the message with this number: its length, its priority, its number, and other bytes.
fn message(number: usize, len: usize, priority: u8) -> Vec<u8> {
    let mut bytes = ((len + 5) as u16).to_be_bytes().to_vec();
    bytes.push(priority);
    bytes.extend((number as u16).to_be_bytes());
    bytes.extend((0..len).map(|at| (at * 3 + number) as u8));
    bytes
}

proptest! {
    /// Whatever the windows, losses and segment sizes, the peer receives whole messages, and those of a
    /// priority in order.
    #[test]
    fn peer_receives_whole_messages(steps in steps()) {
        let mut r = Receiver::new(60_000);
        let conn = r.p.conn.unwrap();
        let (mut sent, mut acked) = (Vec::new(), 0);
        for step in steps {
            match step {
                Step::Message { len, priority } => {
                    let bytes = message(sent.len(), len, priority);
                    match r.p.stack.send_message(conn, &bytes, priority) {
                        Ok(()) => sent.push(bytes),
                        Err(error) => prop_assert_eq!(error, SendError::Full),
                    }
                }
                Step::Acknowledge { percent, window } => {
                    acked += (r.stream.len() - acked) * percent / 100;
                    r.acknowledge(acked, window);
                }
                Step::Wait { ms } => r.wait(ms),
                Step::Segment { mss } => {
                    r.p.stack.set_option(conn, TcpOption::MaxSegment(mss)).unwrap();
                }
            }
        }
        r.p.stack.shutdown_write(conn).unwrap();
        for _ in 0..400 {
            r.drain();
            if r.has_fin {
                break;
            }
            r.wait(10_000);
        }
        prop_assert!(r.has_fin);
        let (mut rest, mut received) = (&r.stream[..], Vec::new());
        while !rest.is_empty() {
            let len = usize::from(u16::from_be_bytes([rest[0], rest[1]]));
            received.push(rest[..len].to_vec());
            rest = &rest[len..];
        }
        for priority in 0..8 {
            let of = |all: &[Vec<u8>]| -> Vec<Vec<u8>> {
                all.iter().filter(|bytes| bytes[2] == priority).cloned().collect()
            };
            prop_assert_eq!(of(&received), of(&sent));
        }
        prop_assert_eq!(received.len(), sent.len());
    }
}
