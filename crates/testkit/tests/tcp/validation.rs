//! Validation of segments, and challenge ACKs.

use super::common::{ACK, SYN, config, established};
use core::time::Duration;
use ginnel_stack::link::neighbour::NeighbourState;
use ginnel_stack::wire::tcp::{TcpFlags, TcpOptions};
use ginnel_testkit::scripted_peer::ScriptedPeer;

#[test]
fn invalid_data_offset_is_dropped_and_counted() {
    let mut p = established(config());
    let malformed = p.stack.tcp_stats().malformed;
    for offset in [0u8, 1, 4, 15] {
        let mut frame = p.segment(ACK, 1, 1, &[], &TcpOptions::default());
        let at = 14 + 20 + 12;
        let old = u16::from_be_bytes([frame[at], frame[at + 1]]);
        frame[at] = offset << 4;
        let new = u16::from_be_bytes([frame[at], frame[at + 1]]);
        let sum = 14 + 20 + 16;
        let check = u16::from_be_bytes([frame[sum], frame[sum + 1]]);
        let mut fixed = u32::from(!check) + u32::from(!old) + u32::from(new);
        while fixed > 0xffff {
            fixed = (fixed & 0xffff) + (fixed >> 16);
        }
        frame[sum..sum + 2].copy_from_slice(&(!(fixed as u16)).to_be_bytes());
        assert!(p.deliver_frame(&frame).is_empty());
    }
    assert_eq!(p.stack.tcp_stats().malformed, malformed + 4);
}

#[test]
fn frames_for_other_hosts_are_ignored() {
    let mut p = ScriptedPeer::new(config());
    p.listen();
    let mut to_other_mac = p.segment(SYN, 0, 0, &[], &TcpOptions::default());
    to_other_mac[..6].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
    assert!(p.deliver_frame(&to_other_mac).is_empty());
    let mut to_other_ip = p.segment(SYN, 0, 0, &[], &TcpOptions::default());
    to_other_ip[14 + 19] = 99;
    assert!(p.deliver_frame(&to_other_ip).is_empty());
    assert_eq!(p.stack.usage().connections, 0);
}

#[test]
fn challenge_ack_limit_may_be_unlimited() {
    let mut unlimited = config();
    unlimited.tcp.challenge_acks_per_second = u32::MAX;
    let mut p = established(unlimited);
    for _ in 0..16 {
        assert_eq!(p.deliver(TcpFlags::RST, 100, 0, &[]).len(), 1);
        p.wait(Duration::from_secs(2));
    }
}

/// An invalid segment is answered at most once per `invalid_ack_interval_ms`, however short the round trip
/// is.
#[test]
fn idle_connection_remembers_challenge_ack_time() {
    let mut p = established(config());
    assert!(p.stack.info(p.conn.unwrap()).unwrap().rto < Duration::from_millis(300));
    p.wait(Duration::from_secs(3));
    assert_eq!(p.stack.usage().active, 0);
    let mut answers = 0;
    for _ in 0..5 {
        answers += p.deliver(TcpFlags::RST, 100, 0, &[]).len();
        answers += p.wait(Duration::from_millis(400)).len();
    }
    assert_eq!(answers, 3, "in two seconds");
    p.wait(Duration::from_secs(2));
    assert_eq!(p.stack.usage().active, 0, "the active state is freed");
}

#[test]
fn ack_of_unsent_data_confirms_no_neighbour() {
    let mut p = ScriptedPeer::with_stale_neighbour(config());
    p.listen();
    p.open(&TcpOptions { mss: Some(1000), ..TcpOptions::default() });
    let conn = p.conn.unwrap();
    p.stack.send(conn, &[1; 500]).unwrap();
    p.flush();
    let state = |p: &ScriptedPeer| p.stack.network().neighbours().map(|n| n.state).collect::<Vec<_>>();
    // The entry is in use, and is probed unless TCP confirms reachability.
    assert_eq!(state(&p), [NeighbourState::Delay]);
    let answer = p.deliver(ACK, 1, 502, &[]);
    assert_eq!((answer.len(), p.stack.tcp_stats().challenge_acks), (1, 1));
    assert_eq!(state(&p), [NeighbourState::Delay]);
    p.deliver(ACK, 1, 501, &[]);
    assert_eq!(state(&p), [NeighbourState::Reachable]);
}
