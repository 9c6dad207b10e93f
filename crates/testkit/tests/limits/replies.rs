//! `tcp.challenge_acks_per_second`.

use core::time::Duration;
use ginnel_stack::stack::StackConfig;
use ginnel_stack::wire::tcp::{TcpFlags, TcpOptions};
use ginnel_testkit::scripted_peer::ScriptedPeer;

/// Delivers SYNs within a connection. Returns how many were answered.
fn provoke(p: &mut ScriptedPeer, count: usize) -> u64 {
    (0..count).filter(|_| !p.deliver(TcpFlags::SYN, 1, 0, &[]).is_empty()).count() as u64
}

// limit: tcp.challenge_acks_per_second
#[test]
fn challenge_ack_limit_is_randomized() {
    let mut config = StackConfig::default();
    config.tcp.challenge_acks_per_second = 20;
    // Disables the separate limit of each connection.
    config.tcp.invalid_ack_interval_ms = 0;
    let mut p = ScriptedPeer::established(config, &TcpOptions::default());
    let mut answered = Vec::new();
    for second in 1..=8u64 {
        let before = *p.stack.tcp_stats();
        let answers = provoke(&mut p, 100);
        let after = *p.stack.tcp_stats();
        assert_eq!(after.challenge_acks - before.challenge_acks, answers);
        assert_eq!(after.challenge_acks_limited - before.challenge_acks_limited, 100 - answers);
        // The limit is drawn at random between half of and one and a half times the configured one
        // (CVE-2016-5696).
        assert!((10..30).contains(&answers), "{answers} in second {second}");
        answered.push(answers);
        // The connection itself continues.
        p.deliver(TcpFlags::ACK, second as i64, 1, b"x");
        assert_eq!(p.read.len() as u64, second);
        p.wait(Duration::from_secs(1));
    }
    answered.dedup();
    assert!(answered.len() > 2, "{answered:?}");
}
