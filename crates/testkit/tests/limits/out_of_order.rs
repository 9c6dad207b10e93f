//! Number of out-of-order ranges of a connection, and `tcp.buffer_pool_bytes` for all of them together.

use super::common::pattern;
use ginnel_stack::options::TcpOption;
use ginnel_stack::stack::StackConfig;
use ginnel_stack::tcp::recv_buffer::{EARLY_RANGES_MAX, RANGES_MAX};
use ginnel_stack::wire::tcp::{TcpFlags, TcpOptions};
use ginnel_testkit::scripted_peer::ScriptedPeer;

const ACK: TcpFlags = TcpFlags::ACK;

/// Delivers the bytes of `text` at these positions, in one segment each.
fn send_single_bytes(p: &mut ScriptedPeer, text: &[u8], positions: impl Iterator<Item = usize>) {
    let byte = |p: &ScriptedPeer, at: usize| {
        p.segment(ACK, 1 + at as i64, 1, &text[at..=at], &TcpOptions::default())
    };
    let frames: Vec<_> = positions.map(|at| byte(p, at)).collect();
    for burst in frames.chunks(64) {
        p.deliver_frames(burst);
    }
}

/// Opens another connection from `port` that sends `word`. Returns whether the application read it.
fn send_on_other_connection(p: &mut ScriptedPeer, port: u16, word: &[u8]) -> bool {
    let (ports, iss, conn) = (p.ports, p.iss, p.conn.take());
    let before = p.read.len();
    p.ports.1 = port;
    p.open(&TcpOptions::default());
    p.deliver(ACK, 1, 1, word);
    (p.ports, p.iss, p.conn) = (ports, iss, conn);
    &p.read[before..] == word
}

// limit: out-of-order ranges of a connection
#[test]
fn ranges_beyond_limit_are_accepted_when_retransmitted() {
    let mut p = ScriptedPeer::established(StackConfig::default(), &TcpOptions::default());
    let text = pattern(1, 2 * (RANGES_MAX + 100));
    // Every second byte, so that no ranges are adjacent.
    send_single_bytes(&mut p, &text, (0..RANGES_MAX + 100).map(|n| 2 * n + 1));
    let stats = *p.stack.tcp_stats();
    assert_eq!((stats.out_of_order, stats.ofo_ranges_dropped), ((RANGES_MAX + 100) as u64, 100));
    assert_eq!(stats.pool_exhausted, 0, "the pool was exhausted");
    assert!(send_on_other_connection(&mut p, 5000, b"hello"), "another connection is affected");
    p.read.clear();
    // Nearer ranges displace those farthest ahead, because they are needed first.
    send_single_bytes(&mut p, &text, [2usize].into_iter());
    assert_eq!(p.stack.tcp_stats().ofo_ranges_dropped, 100, "a joining range was dropped");
    for (n, piece) in text.chunks(1000).enumerate() {
        p.deliver(ACK, 1 + 1000 * n as i64, 1, piece);
    }
    assert!(p.read == text, "{} of {} bytes", p.read.len(), text.len());
    assert_eq!(p.stack.usage().chunks, 0);
}

// limit: tcp.buffer_pool_bytes
#[test]
fn in_order_data_reclaims_out_of_order_memory() {
    let mut config = StackConfig::default();
    config.tcp.buffer_pool_bytes = 1 << 16;
    let mut p = ScriptedPeer::established(config, &TcpOptions::default());
    let text = pattern(2, 65_000);
    // One byte in each chunk of the pool.
    send_single_bytes(&mut p, &text, (0..31).map(|n| 2048 * n + 100));
    assert!(p.stack.tcp_stats().pool_exhausted > 0, "the last of the memory is not for pieces");
    assert!(send_on_other_connection(&mut p, 5000, &[7; 1000]));
    p.read.clear();
    for (n, piece) in text.chunks(1000).enumerate() {
        p.deliver(ACK, 1 + 1000 * n as i64, 1, piece);
    }
    assert!(p.read == text, "{} of {} bytes", p.read.len(), text.len());
    assert_eq!(p.stack.usage().chunks, 0);
}

// limit: ranges received early on a connection
#[test]
fn segments_beyond_early_limit_are_read_in_order() {
    let mut p = ScriptedPeer::established(StackConfig::default(), &TcpOptions::default());
    p.stack.set_option(p.conn.unwrap(), TcpOption::Unordered(true)).unwrap();
    p.received = Some(Vec::new());
    let text = pattern(3, 2 * (EARLY_RANGES_MAX + 10));
    let send = |p: &mut ScriptedPeer, positions: &mut dyn Iterator<Item = usize>, priority: u8| {
        let frame = |at: usize| p.segment(ACK, 1 + at as i64, 1, &text[at..=at], &TcpOptions::default());
        let frames: Vec<_> = positions.map(|at| (frame(at), priority)).collect();
        for burst in frames.chunks(64) {
            p.deliver_prioritized(burst);
        }
    };
    let (odd, even) = (|n| 2 * n + 1, |n| 2 * n);
    send(&mut p, &mut (0..EARLY_RANGES_MAX + 10).map(odd), 7);
    let early = p.received.take().unwrap();
    assert_eq!(early.len(), EARLY_RANGES_MAX);
    assert!(early.iter().all(|received| received.is_early));
    let stats = *p.stack.tcp_stats();
    assert_eq!((stats.unordered, stats.unordered_limited), (EARLY_RANGES_MAX as u64, 10));
    p.received = Some(Vec::new());
    send(&mut p, &mut (0..EARLY_RANGES_MAX + 10).map(even), 0);
    let mut stream = vec![0; text.len()];
    for received in early.into_iter().chain(p.received.take().unwrap()) {
        stream[received.offset as usize..][..received.bytes.len()].copy_from_slice(&received.bytes);
    }
    assert!(stream == text && p.stack.usage().chunks == 0);
    // There is room again.
    let next = text.len();
    let high = p.segment(ACK, 2 + next as i64, 1, b"high", &TcpOptions::default());
    p.received = Some(Vec::new());
    p.deliver_prioritized(&[(high, 7)]);
    assert_eq!(p.received.unwrap()[0].offset, 1 + next as u64);
}
