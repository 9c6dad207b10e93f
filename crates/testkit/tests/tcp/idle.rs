//! Connections that are idle for a long time: keepalive, timestamps and timers.

use super::common::{ACK, SYN, closed_count, config, established};
use core::time::Duration;
use ginnel_stack::events::{CloseReason, Event};
use ginnel_stack::options::TcpOption;
use ginnel_stack::wire::tcp::{TcpOptions, Timestamps};
use ginnel_testkit::scripted_peer::ScriptedPeer;

#[test]
fn idle_connection_survives_days() {
    let mut p = established(config());
    assert!(p.wait(Duration::from_secs(3 * 86_400)).is_empty());
    p.deliver(ACK, 1, 1, b"still there");
    assert_eq!(p.read, b"still there");
}

#[test]
fn keepalive_probes_are_spread_over_the_user_timeout() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.stack.set_option(conn, TcpOption::KeepAlive(true)).unwrap();
    p.stack.set_option(conn, TcpOption::KeepIdle(Duration::from_secs(1))).unwrap();
    p.stack.set_option(conn, TcpOption::KeepInterval(Duration::from_secs(1))).unwrap();
    p.stack.set_option(conn, TcpOption::UserTimeout(Duration::from_secs(600))).unwrap();
    let probes = p.wait(Duration::from_secs(550)).len();
    assert!((200..=255).contains(&probes), "{probes} probes");
    p.wait(Duration::from_secs(100));
    assert!(matches!(p.events.last(), Some(Event::Closed { reason: CloseReason::TimedOut, .. })));
}

/// The clock of connections has 32 bits of milliseconds, which are comparable for 24.8 days.
#[test]
fn keepalive_enabled_after_idle_month_probes_immediately() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.wait(30 * DAY);
    p.stack.set_option(conn, TcpOption::KeepAlive(true)).unwrap();
    assert_eq!(p.wait(Duration::from_secs(10)).len(), 1);
}

#[test]
fn wrapped_timestamp_after_idle_month_is_accepted() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let mut p = ScriptedPeer::new(config());
    p.listen();
    let stamped = |value: u32| TcpOptions {
        timestamps: Some(Timestamps { tsval: value, tsecr: 0 }),
        ..TcpOptions::default()
    };
    let syn = p.segment(SYN, 0, 0, &[], &stamped(1000));
    p.deliver_frame(&syn);
    let ack = p.segment(ACK, 1, 1, &[], &stamped(1000));
    p.deliver_frame(&ack);
    p.wait(30 * DAY);
    let later = 1000 + 30 * 24 * 3600 * 1000;
    for (seq, value) in [(1, later), (5, later + 1)] {
        let bytes = p.segment(ACK, seq, 1, b"late", &stamped(value));
        p.deliver_frame(&bytes);
    }
    assert_eq!(p.read, b"latelate");
    // Keepalive probes may end the idle time, too.
    p.wait(30 * DAY);
    let conn = p.conn.unwrap();
    p.stack.set_option(conn, TcpOption::KeepAlive(true)).unwrap();
    p.wait(Duration::from_secs(1));
    let answer = p.segment(ACK, 9, 1, &[], &stamped(later.wrapping_add(30 * 24 * 3600 * 1000)));
    p.deliver_frame(&answer);
    let rejected = p.stack.tcp_stats().paws_rejected;
    p.wait(Duration::from_secs(3600));
    assert_eq!((rejected, closed_count(&p)), (0, 0));
}

/// Timestamp clocks of peers have any rate (RFC 7323 §4.1), so a timestamp may seem older after a long idle
/// time.
#[test]
fn paws_is_disabled_after_24_idle_days() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let stamped = |value: u32| TcpOptions {
        timestamps: Some(Timestamps { tsval: value, tsecr: 0 }),
        ..TcpOptions::default()
    };
    for days in [1, 23, 25, 40, 49, 50, 55, 60, 74, 75, 99, 100, 120, 300] {
        let mut p = ScriptedPeer::new(config());
        p.listen();
        let syn = p.segment(SYN, 0, 0, &[], &stamped(1000));
        p.deliver_frame(&syn);
        let ack = p.segment(ACK, 1, 1, &[], &stamped(1000));
        p.deliver_frame(&ack);
        assert!(p.wait(days * DAY).is_empty(), "the stack sends nothing while idle");
        let late = p.segment(ACK, 1, 1, b"late", &stamped(500));
        p.deliver_frame(&late);
        let expected: &[u8] = if days < 24 { b"" } else { b"late" };
        assert_eq!(p.read, expected, "after {days} days");
        // PAWS is enabled again from here on.
        let older = p.segment(ACK, 5, 1, b"older", &stamped(499));
        p.deliver_frame(&older);
        assert_eq!(p.read, expected, "after {days} days");
        // The next idle time disables it again. A rejected segment does not end an idle time.
        p.wait(days.max(24) * DAY + DAY);
        let late = p.segment(ACK, 1 + p.read.len() as i64, 1, b"late", &stamped(400));
        p.deliver_frame(&late);
        assert_eq!(p.read, [expected, b"late"].concat(), "after {days} days twice");
    }
}

/// The timer for the age of TS.Recent expires later than any other, and must not prevent others from being
/// armed.
#[test]
fn loss_after_long_silence_is_retransmitted() {
    for hours in [1, 20, 30, 36, 37, 50, 66, 80, 110, 1000] {
        let mut p = ScriptedPeer::new(config());
        p.listen();
        let stamped =
            TcpOptions { timestamps: Some(Timestamps { tsval: 1000, tsecr: 0 }), ..TcpOptions::default() };
        let syn = p.segment(SYN, 0, 0, &[], &stamped);
        p.deliver_frame(&syn);
        let ack = p.segment(ACK, 1, 1, &[], &stamped);
        p.deliver_frame(&ack);
        let conn = p.conn.expect("the connection was accepted");
        p.stack.send(conn, b"once").unwrap();
        assert_eq!(p.flush().len(), 1);
        let ack = p.segment(ACK, 1, 5, &[], &stamped);
        p.deliver_frame(&ack);
        assert!(p.wait(hours * Duration::from_secs(3600)).is_empty(), "the stack sends nothing while idle");
        p.stack.send(conn, b"lost").unwrap();
        assert_eq!(p.flush().len(), 1, "after {hours} hours");
        assert!(!p.wait(Duration::from_secs(10)).is_empty(), "retransmitted after {hours} hours");
    }
}
