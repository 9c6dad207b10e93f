//! Unordered receive: data of high priority are delivered while data before them are missing.

use super::common::{ACK, FIN, ack_of, closed_count, config};
use core::time::Duration;
use ginnel_stack::error::RecvError;
use ginnel_stack::events::{CloseReason, Event};
use ginnel_stack::options::TcpOption;
use ginnel_stack::stack::StackConfig;
use ginnel_stack::wire::tcp::{SeqNumber, TcpFlags, TcpOptions};
use ginnel_testkit::scripted_peer::{PEER_ISS, ReceivedBytes, ScriptedPeer};
use proptest::prelude::*;

const HIGH: u8 = 6;
const LOW: u8 = 0;

/// Creates a connection with SACK whose application receives unordered, or not.
fn connection_with(config: StackConfig, unordered: bool) -> ScriptedPeer {
    let options = TcpOptions { mss: Some(1000), sack_permitted: true, ..TcpOptions::default() };
    let mut p = ScriptedPeer::established(config, &options);
    p.received = Some(Vec::new());
    p.stack.set_option(p.conn.unwrap(), TcpOption::Unordered(unordered)).unwrap();
    p
}

fn connection(unordered: bool) -> ScriptedPeer {
    connection_with(config(), unordered)
}

fn data(p: &ScriptedPeer, seq: i64, bytes: &[u8], priority: u8) -> (Vec<u8>, u8) {
    (p.segment(ACK, seq, 1, bytes, &TcpOptions::default()), priority)
}

/// Takes what the application has received, as (offset, bytes, early).
fn taken(p: &mut ScriptedPeer) -> Vec<(u64, Vec<u8>, bool)> {
    let received = core::mem::take(p.received.as_mut().unwrap());
    received.into_iter().map(|ReceivedBytes { offset, bytes, is_early }| (offset, bytes, is_early)).collect()
}

fn sack(start: u32, end: u32) -> (SeqNumber, SeqNumber) {
    (SeqNumber(PEER_ISS + start), SeqNumber(PEER_ISS + end))
}

#[test]
fn high_segment_is_delivered_before_the_gap_fills() {
    let mut p = connection(true);
    let high = data(&p, 11, b"high", HIGH);
    let sent = p.deliver_prioritized(core::slice::from_ref(&high));
    assert_eq!(taken(&mut p), [(10, b"high".to_vec(), true)]);
    // The peer is told of the gap, truthfully.
    assert_eq!((sent.len(), ack_of(&sent[0]), sent[0].options.sack_blocks[0]), (1, 1, sack(11, 15)));
    // A retransmission is not delivered again.
    p.deliver_prioritized(core::slice::from_ref(&high));
    assert_eq!(taken(&mut p), []);
    let low = [data(&p, 1, b"0123456789", LOW), data(&p, 15, b"after", LOW)];
    let sent = p.deliver_prioritized(&low);
    assert_eq!(taken(&mut p), [(0, b"0123456789".to_vec(), false), (14, b"after".to_vec(), false)]);
    assert_eq!(ack_of(sent.last().unwrap()), 20);
    p.deliver_prioritized(&[high]);
    assert_eq!((taken(&mut p), p.stack.usage().chunks), (vec![], 0));
    assert_eq!(p.stack.tcp_stats().unordered, 1);
}

#[test]
fn without_the_option_the_stream_is_ordinary() {
    let mut p = connection(false);
    let sent = p.deliver_prioritized(&[data(&p, 11, b"high", HIGH)]);
    assert_eq!((taken(&mut p), sent[0].options.sack_blocks[0]), (vec![], sack(11, 15)));
    p.deliver_prioritized(&[data(&p, 1, b"0123456789", LOW)]);
    assert_eq!(taken(&mut p), [(0, b"0123456789high".to_vec(), false)]);
    assert_eq!(p.stack.tcp_stats().unordered, 0);
    assert!(!p.events.iter().any(|event| matches!(event, Event::Unordered { .. })));
}

#[test]
fn only_priorities_above_best_effort_are_early() {
    for priority in 0..=7 {
        let mut p = connection(true);
        p.deliver_prioritized(&[data(&p, 11, b"early?", priority)]);
        assert_eq!(taken(&mut p).len(), usize::from(priority > 1), "{priority}");
    }
}

/// A gap that fills in the burst of the high segment leaves nothing to deliver early.
#[test]
fn gap_that_fills_at_once_keeps_the_order() {
    let mut p = connection(true);
    p.deliver_prioritized(&[data(&p, 4, b"def", HIGH), data(&p, 1, b"abc", LOW)]);
    assert_eq!(taken(&mut p), [(0, b"abcdef".to_vec(), false)]);
}

/// Bytes are delivered early at most once, whatever segments cover them, also if a segment of low priority
/// brought them before.
#[test]
fn overlapping_segments_deliver_each_byte_once() {
    let mut p = connection(true);
    p.deliver_prioritized(&[data(&p, 21, b"klm", HIGH)]);
    p.deliver_prioritized(&[data(&p, 11, b"abcdefghijXXXnop", HIGH)]);
    p.deliver_prioritized(&[data(&p, 9, b"89ABCDEFGHIJKLMNOPqr", LOW)]);
    p.deliver_prioritized(&[data(&p, 9, b"89", HIGH)]);
    let early = [(20, b"klm".to_vec(), true), (10, b"abcdefghij".to_vec(), true)];
    let more = [(23, b"nop".to_vec(), true), (8, b"89".to_vec(), true)];
    assert_eq!(taken(&mut p), [early, more].concat());
    p.deliver_prioritized(&[data(&p, 1, b"01234567", LOW)]);
    assert_eq!(taken(&mut p), [(0, b"01234567".to_vec(), false), (26, b"qr".to_vec(), false)]);
}

/// A short buffer takes a part; what is left when the gap fills is read in order.
#[test]
fn part_that_was_not_taken_is_read_in_order() {
    let mut p = connection(true);
    let conn = p.conn.unwrap();
    p.defer_reads = true;
    p.deliver_prioritized(&[data(&p, 4, b"defgh", HIGH)]);
    let next = p.stack.next_unordered(conn).unwrap();
    assert_eq!((next.ahead, next.len), (3, 5));
    let mut part = [0; 2];
    let first = p.stack.recv_unordered(conn, &mut part).unwrap().unwrap();
    assert_eq!((first.ahead, first.len, &part), (3, 2, b"de"));
    p.deliver_prioritized(&[data(&p, 1, b"abc", LOW)]);
    assert_eq!(p.stack.recv_unordered(conn, &mut part), Ok(None));
    let mut rest = [0; 10];
    // A read stops at the bytes that were taken.
    assert_eq!((p.stack.peek(conn, &mut rest), p.stack.recv(conn, &mut rest)), (Ok(3), Ok(3)));
    assert_eq!(p.stack.recv(conn, &mut rest), Ok(3));
    assert_eq!(&rest[..3], b"fgh");
    assert_eq!(p.stack.recv(conn, &mut rest), Err(RecvError::WouldBlock));
}

#[test]
fn switching_off_delivers_the_rest_in_order() {
    let mut p = connection(true);
    let conn = p.conn.unwrap();
    p.defer_reads = true;
    p.deliver_prioritized(&[data(&p, 4, b"def", HIGH)]);
    p.stack.set_option(conn, TcpOption::Unordered(false)).unwrap();
    assert_eq!(p.stack.recv_unordered(conn, &mut [0; 8]), Ok(None));
    p.defer_reads = false;
    p.deliver_prioritized(&[data(&p, 1, b"abc", LOW)]);
    assert_eq!(p.read, b"abcdef");
}

#[test]
fn fin_after_early_data_ends_the_stream_last() {
    let mut p = connection(true);
    let high = (p.segment(ACK | FIN, 4, 1, b"def", &TcpOptions::default()), HIGH);
    p.deliver_prioritized(&[high]);
    assert_eq!(taken(&mut p), [(3, b"def".to_vec(), true)]);
    assert!(!p.events.iter().any(|event| matches!(event, Event::PeerClosed { .. })));
    let sent = p.deliver_prioritized(&[data(&p, 1, b"abc", LOW)]);
    assert_eq!((taken(&mut p), ack_of(&sent[0])), (vec![(0, b"abc".to_vec(), false)], 8));
    let conn = p.conn.unwrap();
    assert!(p.events.contains(&Event::PeerClosed { conn }));
    assert_eq!(p.stack.recv(conn, &mut [0; 8]), Ok(0));
}

/// As on Linux, data after a gap do not count as unread data when the application closes, and a reset
/// discards them.
#[test]
fn close_and_reset_discard_data_after_gaps() {
    let mut p = connection(true);
    p.defer_reads = true;
    p.deliver_prioritized(&[data(&p, 4, b"def", HIGH)]);
    p.stack.close(p.conn.unwrap()).unwrap();
    let sent = p.flush();
    assert!(sent.iter().any(|sent| sent.header.flags.contains(FIN)));
    // The rest finds no reader.
    let sent = p.deliver_prioritized(&[data(&p, 1, b"abc", LOW)]);
    assert!(sent.iter().any(|sent| sent.header.flags.contains(TcpFlags::RST)));
    assert_eq!((closed_count(&p), p.stack.usage().chunks), (1, 0));
    let mut p = connection(true);
    p.defer_reads = true;
    p.deliver_prioritized(&[data(&p, 4, b"def", HIGH)]);
    p.deliver(TcpFlags::RST, 1, 0, &[]);
    let conn = p.conn.unwrap();
    assert!(p.events.contains(&Event::Closed { conn, token: 0, reason: CloseReason::Reset }));
    assert!(p.stack.recv_unordered(conn, &mut [0; 8]).is_err());
    assert_eq!(p.stack.usage().chunks, 0);
}

#[test]
fn abort_frees_data_after_gaps() {
    let mut p = connection(true);
    p.deliver_prioritized(&[data(&p, 4, b"def", HIGH)]);
    p.stack.abort(p.conn.unwrap()).unwrap();
    p.flush();
    assert_eq!((closed_count(&p), p.stack.usage().chunks), (1, 0));
}

/// Only unread bytes make `close` reset the connection, and bytes taken early are read.
#[test]
fn close_after_everything_was_taken_sends_fin() {
    let mut p = connection(true);
    p.deliver_prioritized(&[data(&p, 4, b"def", HIGH)]);
    p.deliver_prioritized(&[data(&p, 1, b"abc", LOW)]);
    p.stack.close(p.conn.unwrap()).unwrap();
    let sent = p.flush();
    assert!(sent.iter().all(|sent| !sent.header.flags.contains(TcpFlags::RST)));
    assert!(sent.iter().any(|sent| sent.header.flags.contains(FIN)));
}

/// Urgent data have a place in the stream: while they are expected or unread, nothing overtakes them.
#[test]
fn urgent_data_are_not_overtaken() {
    let mut p = connection(true);
    let urgent = (p.custom_segment(ACK | TcpFlags::URG, 4, 1, 60_000, 3, b"def"), HIGH);
    p.deliver_prioritized(&[urgent]);
    assert_eq!(taken(&mut p), []);
    p.deliver_prioritized(&[data(&p, 11, b"klm", HIGH)]);
    assert_eq!(taken(&mut p), []);
    p.deliver_prioritized(&[data(&p, 1, b"abc", LOW), data(&p, 7, b"ghij", LOW)]);
    assert_eq!(p.read, b"abcdeghijklm");
    // A pointer to a byte that was received early is ignored.
    p.deliver_prioritized(&[data(&p, 24, b"xyz", HIGH)]);
    let events = p.events.len();
    let urgent = (p.custom_segment(ACK | TcpFlags::URG, 14, 1, 60_000, 11, b"n"), LOW);
    p.deliver_prioritized(&[urgent]);
    assert!(!p.events[events..].iter().any(|event| matches!(event, Event::Urgent { .. })));
    p.deliver_prioritized(&[data(&p, 15, b"opqrstuvw", LOW), data(&p, 27, b"!", LOW)]);
    assert_eq!(p.read, b"abcdeghijklmnopqrstuvw!");
}

/// Early data lie within the window. Acknowledgements and windows are those of an ordinary
/// connection: bytes taken early count until the bytes before them are read.
#[test]
fn windows_are_those_of_ordinary_connections() {
    let run = |unordered| {
        let mut config = config();
        config.tcp.recv_buffer_bytes = 4096;
        config.tcp.recv_window_first_bytes = 4096;
        let mut p = connection_with(config, unordered);
        let conn = p.conn.unwrap();
        let window = p.stack.info(conn).unwrap().rcv_wnd as usize;
        let start = window - 96;
        let mut sent = p.deliver_prioritized(&[data(&p, 1 + start as i64, &[7; 200], HIGH)]);
        let early = [(start as u64, vec![7; 96], true)];
        assert_eq!(taken(&mut p), early[..usize::from(unordered)]);
        p.defer_reads = true;
        let low: Vec<_> = (0..start).step_by(1000).map(|at| (at, (start - at).min(1000))).collect();
        let low: Vec<_> =
            low.into_iter().map(|(at, len)| data(&p, 1 + at as i64, &vec![1; len], LOW)).collect();
        sent.extend(p.deliver_prioritized(&low));
        assert_eq!(p.stack.buffered(conn), if unordered { start } else { window });
        let mut out = [0; 8192];
        let read = p.stack.recv(conn, &mut out);
        assert_eq!(read, Ok(if unordered { start } else { window }));
        sent.extend(p.flush());
        let windows: Vec<_> = sent.iter().map(|sent| (ack_of(sent), sent.header.window)).collect();
        assert_eq!(windows.last(), Some(&(1 + window as i64, 4096)));
        windows
    };
    assert_eq!(run(true), run(false));
}

/// A segment that has overtaken others in this host's own queues leaves a gap that the peer does not learn
/// of.
#[test]
fn gap_of_overtaking_segment_is_not_reported() {
    let mut p = connection(true);
    p.stack.set_overtaking(true);
    let sent = p.deliver_prioritized(&[data(&p, 11, b"high", HIGH)]);
    assert_eq!((taken(&mut p), sent.len()), (vec![(10, b"high".to_vec(), true)], 0));
    p.stack.set_overtaking(false);
    // Segments that are sent meanwhile do not report it either.
    p.stack.send(p.conn.unwrap(), b"answer").unwrap();
    let sent = p.flush();
    assert!(sent.len() == 1 && sent[0].options.sack_blocks.is_empty() && sent[0].payload == b"answer");
    assert!(p.wait(Duration::from_millis(150)).iter().all(|sent| sent.options.sack_blocks.is_empty()));
    p.deliver_prioritized(&[data(&p, 1, b"01234", LOW)]);
    let sent = p.deliver_prioritized(&[data(&p, 6, b"56789", LOW)]);
    assert!(sent.iter().all(|sent| sent.options.sack_blocks.is_empty()));
    let sent = p.wait(Duration::from_millis(300));
    let acks: Vec<i64> = sent.iter().map(ack_of).collect();
    assert!(acks.iter().all(|&ack| ack == 15), "{acks:?}");
    assert_eq!(p.read, b"0123456789");
}

#[test]
fn real_gap_before_overtaking_segment_is_reported() {
    let mut p = connection(true);
    p.stack.set_overtaking(true);
    p.deliver_prioritized(&[data(&p, 21, b"high", HIGH)]);
    p.stack.set_overtaking(false);
    // The first ten bytes were lost on the way: the segment that was overtaken shows it.
    let sent = p.deliver_prioritized(&[data(&p, 11, b"0123456789", LOW)]);
    assert_eq!((sent.len(), ack_of(&sent[0])), (1, 1));
    assert_eq!(sent[0].options.sack_blocks.as_slice(), [sack(11, 21)]);
    // The next segment in the stream shows that nothing of it waits here any more.
    let sent = p.deliver_prioritized(&[data(&p, 25, b"z", LOW)]);
    assert_eq!(sent[0].options.sack_blocks.as_slice(), [sack(11, 26)]);
}

#[derive(Clone, Debug)]
struct Delivery {
    start: usize,
    len: usize,
    priority: u8,
    overtaking: bool,
    take: bool,
}

fn deliveries() -> impl Strategy<Value = Vec<Delivery>> {
    let one = (0..60_000usize, 1..1400usize, prop_oneof![Just(LOW), Just(HIGH)], any::<bool>(), 0..4u8)
        .prop_map(|(start, len, priority, overtaking, take)| Delivery {
            start,
            len,
            priority,
            overtaking,
            take: take > 0,
        });
    proptest::collection::vec(one, 1..120)
}

proptest! {
    /// Segments are lost, duplicated, reordered and cut in new ways; memory may be scarce.
    #[test]
    fn every_byte_is_delivered_exactly_once(deliveries in deliveries(), chunks in 32..64u64, unordered: bool) {
        let mut config = config();
        config.tcp.buffer_pool_bytes = chunks * 2048;
        let mut p = connection_with(config, unordered);
        let byte = |at: usize| (at * 7 % 251) as u8;
        let conn = p.conn.unwrap();
        let end = 60_400;
        let whole: Vec<Delivery> = (0..end).step_by(1000)
            .map(|start| Delivery { start, len: 1000, priority: LOW, overtaking: false, take: true })
            .collect();
        for Delivery { start, len, priority, overtaking, take } in deliveries.into_iter().chain(whole) {
            let bytes: Vec<u8> = (start..end.min(start + len)).map(byte).collect();
            p.stack.set_overtaking(overtaking);
            p.defer_reads = !take;
            p.deliver_prioritized(&[data(&p, 1 + start as i64, &bytes, priority)]);
            if take {
                while p.take_unordered(conn) {}
                let mut out = [0; 700];
                p.read_buffered(conn, &mut out);
            }
        }
        let mut delivered = vec![0u8; end];
        for ReceivedBytes { offset, bytes, is_early } in p.received.take().unwrap() {
            prop_assert!(unordered || !is_early);
            for (at, &got) in (offset as usize..).zip(&bytes) {
                prop_assert_eq!(got, byte(at), "{}", at);
                delivered[at] += 1;
            }
        }
        prop_assert!(delivered.iter().all(|&count| count == 1), "{delivered:?}");
        prop_assert_eq!(p.stack.usage().chunks, 0);
    }
}
