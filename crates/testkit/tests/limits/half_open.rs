//! `tcp.half_open_max` with `tcp.syn_cookies` off, auto and always, and a listener's backlog.

use super::common::{CLIENT, SECOND, SERVER, connect, is_connected, read, send, served, server, server_with};
use core::net::SocketAddr;
use ginnel_stack::events::Event;
use ginnel_stack::options::ListenOptions;
use ginnel_stack::stack::StackConfig;
use ginnel_stack::tcp::config::SynCookies;
use ginnel_stack::wire::tcp::{TcpFlags, TcpOptions};
use ginnel_testkit::scripted_peer::{PORT, STACK, ScriptedPeer, SentSegment};

const SYN: TcpFlags = TcpFlags::SYN;
const ACK: TcpFlags = TcpFlags::ACK;
/// Time after which every half-open connection is given up: SYN+ACK is retransmitted after 1, 3, 7, 15 and 31
/// s.
const GIVEN_UP: core::time::Duration = core::time::Duration::from_secs(64);

fn listening(cookies: SynCookies, half_open_max: u32) -> ScriptedPeer {
    let mut config = StackConfig::default();
    config.tcp.half_open_max = half_open_max;
    config.tcp.syn_cookies = cookies;
    let mut p = ScriptedPeer::new(config);
    p.listen();
    p
}

/// Delivers a SYN from another port of the peer. Returns the answers.
fn syn(p: &mut ScriptedPeer, port: u16) -> Vec<SentSegment> {
    p.ports.1 = port;
    let options = TcpOptions { mss: Some(1000), ..TcpOptions::default() };
    let syn = p.segment(SYN, 0, 0, &[], &options);
    p.deliver_frame(&syn)
}

/// Delivers SYNs from ports `from` on that are never completed. Returns how many were answered.
fn flood(p: &mut ScriptedPeer, from: u16, count: u16) -> usize {
    (from..from + count).filter(|port| !syn(p, *port).is_empty()).count()
}

/// Performs a whole handshake. Returns whether it succeeded.
fn handshake(p: &mut ScriptedPeer, port: u16) -> bool {
    p.conn = None;
    if syn(p, port).is_empty() {
        return false;
    }
    p.deliver(ACK, 1, 1, &[]);
    p.conn.is_some()
}

// limit: tcp.half_open_max
#[test]
fn syn_over_half_open_limit_is_dropped() {
    let mut p = listening(SynCookies::Off, 8);
    assert_eq!(flood(&mut p, 1000, 20), 8);
    assert_eq!((p.stack.usage().half_open, p.stack.tcp_stats().half_open_overflows), (8, 12));
    assert!(!handshake(&mut p, 5000));
    // One of the eight was genuine: it still succeeds and frees its entry. Its SYN+ACK was the last one.
    p.ports.1 = 1007;
    assert!(p.deliver(ACK, 1, 1, &[]).is_empty());
    assert!(p.conn.is_some(), "the handshake that has an entry succeeds");
    assert_eq!(p.stack.usage().half_open, 7);
    assert!(!syn(&mut p, 4999).is_empty(), "the entry is free");
    p.wait(GIVEN_UP);
    assert_eq!(p.stack.usage().half_open, 0);
    assert!(handshake(&mut p, 5000));
    assert_eq!(p.stack.tcp_stats().cookies_sent, 0);
    assert!(
        !p.events.iter().any(|e| matches!(e, Event::Closed { .. })),
        "half-open connections were reported"
    );
}

#[test]
fn completed_handshake_frees_its_half_open_entry() {
    let mut p = listening(SynCookies::Off, 1);
    for port in 1000..1100 {
        assert!(handshake(&mut p, port), "{port}");
    }
    assert_eq!((p.stack.usage().half_open, p.stack.tcp_stats().half_open_overflows), (0, 0));
    // A reset by the peer frees the entry, too.
    assert_eq!(flood(&mut p, 2000, 1), 1);
    assert!(!handshake(&mut p, 3000));
    p.ports.1 = 2000;
    p.deliver(TcpFlags::RST, 1, 0, &[]);
    assert!(handshake(&mut p, 3000));
}

// limit: tcp.half_open_max
#[test]
fn cookies_are_sent_only_during_syn_flood() {
    let mut p = listening(SynCookies::Auto, 8);
    assert_eq!(flood(&mut p, 1000, 20), 20, "every SYN is answered");
    let stats = *p.stack.tcp_stats();
    assert_eq!((p.stack.usage().half_open, stats.cookies_sent, stats.half_open_overflows), (8, 12, 0));
    assert!(handshake(&mut p, 5000));
    assert_eq!(p.stack.tcp_stats().cookies_accepted, 1);
    let conn = p.conn.unwrap();
    p.stack.send(conn, b"hello").unwrap();
    assert_eq!(p.flush()[0].payload, b"hello");
    p.deliver(ACK, 1, 6, b"good bye");
    assert_eq!(p.read, b"good bye");
    // A guessed cookie is rejected.
    p.ports.1 = 6000;
    p.iss = p.iss.wrapping_add(77);
    assert!(p.deliver(ACK, 1, 1, &[])[0].header.flags.contains(TcpFlags::RST));
    assert_eq!(p.stack.tcp_stats().cookies_failed, 1);
    p.wait(GIVEN_UP);
    let sent = p.stack.tcp_stats().cookies_sent;
    assert!(handshake(&mut p, 7000));
    assert_eq!(p.stack.tcp_stats().cookies_sent, sent, "a cookie was sent although an entry is free");
}

#[test]
fn always_cookies_keep_no_half_open_state() {
    let mut p = listening(SynCookies::Always, 1);
    assert_eq!(flood(&mut p, 1000, 50), 50);
    assert_eq!((p.stack.usage().half_open, p.stack.usage().connections), (0, 0));
    for port in 5000..5020 {
        assert!(handshake(&mut p, port));
    }
    let stats = p.stack.tcp_stats();
    assert_eq!((stats.cookies_sent, stats.cookies_accepted, p.stack.usage().connections), (70, 20, 20));
}

// limit: backlog of a listener
#[test]
fn backlog_limits_half_open_connections_per_listener() {
    let mut p = listening(SynCookies::Off, 1000);
    let small = ListenOptions { backlog: 3, ..ListenOptions::default() };
    p.stack.listen(SocketAddr::new(STACK.into(), 81), small).unwrap();
    p.ports.0 = 81;
    assert_eq!(flood(&mut p, 1000, 10), 4, "one more than the backlog, as on Linux");
    assert_eq!(p.stack.tcp_stats().half_open_overflows, 6);
    p.ports.0 = PORT;
    assert!(handshake(&mut p, 5000));
    p.ports.0 = 81;
    p.wait(GIVEN_UP);
    assert!(handshake(&mut p, 5001));
}

/// Six clients at a listener whose queue has room for three; the application accepts one after the other.
fn full_queue(cookies: SynCookies) {
    let mut sim = server_with(|c| c.tcp.syn_cookies = cookies);
    sim.hosts[SERVER].defer_accepts = true;
    let addr = server(&sim, false, 80);
    let options = ListenOptions { backlog: 2, ..ListenOptions::default() };
    let listener = sim.hosts[SERVER].stack.listen(addr, options).unwrap();
    let conns: Vec<_> = (0..6).map(|_| connect(&mut sim)).collect();
    for (i, conn) in conns.iter().enumerate() {
        send(&mut sim, CLIENT, *conn, &[i as u8; 100], false);
    }
    sim.run(SECOND * 5);
    assert_eq!(sim.hosts[SERVER].stack.tcp_stats().passive_opens, 3, "{cookies:?}");
    assert!(sim.hosts[SERVER].stack.tcp_stats().accept_overflows > 0, "{cookies:?}");
    for n in 0..6 {
        let waits = sim.run_until(SECOND * 60, |sim| {
            let host = &mut sim.hosts[SERVER];
            let Some(conn) = host.stack.accept(listener) else { return false };
            host.accepted.push(conn);
            true
        });
        assert!(waits, "{cookies:?}: {n} were accepted");
    }
    sim.run(SECOND * 60);
    for (i, conn) in conns.iter().enumerate() {
        assert!(is_connected(&sim.hosts[CLIENT], *conn), "{cookies:?}");
        assert_eq!(read(&sim, SERVER, served(&sim, *conn)), [i as u8; 100], "{cookies:?}");
    }
}

// limit: backlog of a listener
#[test]
fn clients_at_full_accept_queue_are_served_later() {
    full_queue(SynCookies::Off);
    full_queue(SynCookies::Auto);
    full_queue(SynCookies::Always);
}
