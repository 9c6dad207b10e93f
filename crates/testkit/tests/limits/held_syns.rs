//! SYNs that wait because the process that had listened has ended: `killed_listener_wait_ms`, the backlog and
//! `tcp.half_open_max`.

use core::net::Ipv4Addr;
use core::time::Duration;
use ginnel_stack::options::ListenOptions;
use ginnel_stack::stack::StackConfig;
use ginnel_stack::wire::tcp::{TcpFlags, TcpOptions};
use ginnel_testkit::scripted_peer::{PORT, STACK, ScriptedPeer, SentSegment};

const WAIT: Duration = Duration::from_millis(200);
const SYN_ACK: TcpFlags = TcpFlags::SYN.with(TcpFlags::ACK);
const REFUSED: TcpFlags = TcpFlags::RST.with(TcpFlags::ACK);

/// Returns a stack where SYNs wait for a listener that is gone.
fn holding(half_open_max: u32, backlog: u32) -> ScriptedPeer {
    let mut config = StackConfig::default();
    config.tcp.half_open_max = half_open_max;
    let mut p = ScriptedPeer::new(config);
    let listener = p.listen();
    assert!(p.stack.unlisten(listener));
    p.stack.hold_syns((STACK, PORT).into(), false, backlog, WAIT);
    p
}

/// Delivers a segment without data from another port of the peer. Returns the answers.
fn deliver(p: &mut ScriptedPeer, port: u16, flags: TcpFlags) -> Vec<SentSegment> {
    p.ports.1 = port;
    let options = TcpOptions { mss: Some(1000), ..TcpOptions::default() };
    let segment = p.segment(flags, 0, 0, &[], &options);
    p.deliver_frame(&segment)
}

fn flags_of(segments: &[SentSegment]) -> Vec<TcpFlags> {
    segments.iter().map(|segment| segment.header.flags).collect()
}

#[test]
fn syns_get_a_listener_that_is_opened_in_time() {
    let mut p = holding(8, 8);
    for port in 1000..1003 {
        assert!(deliver(&mut p, port, TcpFlags::SYN).is_empty());
    }
    assert!(p.wait(WAIT - Duration::from_millis(1)).is_empty());
    p.listen();
    assert_eq!(flags_of(&p.wait(Duration::ZERO)), [SYN_ACK; 3]);
    assert_eq!((p.stack.usage().half_open, p.stack.tcp_stats().syns_held), (3, 3));
    p.ports.1 = 1002;
    p.deliver(TcpFlags::ACK, 1, 1, &[]);
    assert!(p.conn.is_some(), "the handshake completes");
}

#[test]
fn syns_are_refused_when_their_time_is_over() {
    let mut p = holding(8, 8);
    assert!(deliver(&mut p, 1000, TcpFlags::SYN).is_empty());
    assert!(p.wait(WAIT - Duration::from_millis(1)).is_empty());
    assert!(deliver(&mut p, 1001, TcpFlags::SYN).is_empty());
    assert_eq!(flags_of(&p.wait(Duration::from_millis(1))), [REFUSED; 2]);
    assert_eq!(flags_of(&deliver(&mut p, 1002, TcpFlags::SYN)), [REFUSED]);
    assert_eq!(p.stack.tcp_stats().no_listener, 3);
}

#[test]
fn only_syns_to_the_address_wait() {
    let mut p = holding(8, 8);
    assert_eq!(flags_of(&deliver(&mut p, 1000, TcpFlags::ACK)), [TcpFlags::RST]);
    assert_eq!(flags_of(&deliver(&mut p, 1000, SYN_ACK)), [TcpFlags::RST]);
    assert_eq!(flags_of(&deliver(&mut p, 1000, TcpFlags::SYN | TcpFlags::FIN)), [REFUSED]);
    p.ports.0 = PORT + 1;
    assert_eq!(flags_of(&deliver(&mut p, 1000, TcpFlags::SYN)), [REFUSED]);
    assert_eq!(p.stack.tcp_stats().syns_held, 0);
}

#[test]
fn syns_are_refused_after_an_orderly_close_of_the_next_listener() {
    let mut p = holding(8, 8);
    let listener = p.listen();
    p.stack.hold_syns((Ipv4Addr::UNSPECIFIED, PORT).into(), false, 8, WAIT / 2);
    assert!(p.stack.unlisten(listener));
    assert!(deliver(&mut p, 1000, TcpFlags::SYN).is_empty(), "the other address holds it");
    assert_eq!(flags_of(&p.wait(WAIT / 2)), [REFUSED]);
    assert_eq!(flags_of(&deliver(&mut p, 1001, TcpFlags::SYN)), [REFUSED]);
}

/// The SYNs of an address count in the backlog of another one that covers them, once the first one's time is
/// over.
#[test]
fn syns_go_on_waiting_at_an_address_that_covers_theirs() {
    let mut p = holding(8, 8);
    assert!(deliver(&mut p, 1000, TcpFlags::SYN).is_empty());
    assert!(deliver(&mut p, 1001, TcpFlags::SYN).is_empty());
    p.stack.hold_syns((Ipv4Addr::UNSPECIFIED, PORT).into(), false, 3, WAIT * 2);
    assert!(p.wait(WAIT).is_empty());
    assert!(deliver(&mut p, 1002, TcpFlags::SYN).is_empty());
    assert!(deliver(&mut p, 1003, TcpFlags::SYN).is_empty(), "dropped");
    p.listen();
    assert_eq!(flags_of(&p.wait(Duration::ZERO)), [SYN_ACK; 3]);
    let stats = p.stack.tcp_stats();
    assert_eq!((stats.syns_held, stats.half_open_overflows), (3, 1));
}

/// Returns how many of 20 SYNs wait and how many are dropped.
fn held_and_dropped(half_open_max: u32, backlog: u32) -> (u64, u64) {
    let mut p = holding(half_open_max, backlog);
    for port in 1000..1020 {
        assert!(deliver(&mut p, port, TcpFlags::SYN).is_empty());
    }
    let stats = p.stack.tcp_stats();
    (stats.syns_held, stats.half_open_overflows)
}

#[test]
fn syns_over_the_backlog_or_the_half_open_limit_are_dropped() {
    assert_eq!(held_and_dropped(64, 20), (20, 0));
    assert_eq!(held_and_dropped(64, 19), (19, 1));
    assert_eq!(held_and_dropped(8, 64), (8, 12));
    // Half-open connections of other listeners count.
    let mut p = holding(8, 64);
    p.stack.listen((STACK, PORT + 1).into(), ListenOptions::default()).unwrap();
    p.ports.0 = PORT + 1;
    assert_eq!((1000..1003).map(|port| deliver(&mut p, port, TcpFlags::SYN).len()).sum::<usize>(), 3);
    p.ports.0 = PORT;
    assert!((1000..1020).all(|port| deliver(&mut p, port, TcpFlags::SYN).is_empty()));
    assert_eq!(p.stack.tcp_stats().syns_held, 5);
}
