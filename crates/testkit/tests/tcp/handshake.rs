//! Handshake, SYN cookies, and the options that a SYN negotiates.

use super::common::{ACK, SYN, closed_count, config};
use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use core::time::Duration;
use ginnel_stack::events::{CloseReason, Event};
use ginnel_stack::options::{ListenOptions, SocketOptions, TcpOption};
use ginnel_stack::priority::BEST_EFFORT;
use ginnel_stack::stack::StackConfig;
use ginnel_stack::tcp::config::SynCookies;
use ginnel_stack::tcp::state::State;
use ginnel_stack::wire::tcp::{TcpOptions, Timestamps};
use ginnel_testkit::scripted_peer::{PORT, STACK, ScriptedPeer};
use ginnel_testkit::sim::Sim;

fn with_cookies() -> StackConfig {
    let mut config = config();
    config.tcp.syn_cookies = SynCookies::Always;
    config
}

fn listen_with(p: &mut ScriptedPeer, socket: SocketOptions) {
    let addr = SocketAddr::new(STACK.into(), PORT);
    p.stack.listen(addr, ListenOptions { socket, ..ListenOptions::default() }).unwrap();
}

#[test]
fn cookie_offers_window_scale_of_its_listener() {
    let mut p = ScriptedPeer::new(with_cookies());
    listen_with(&mut p, SocketOptions { recv_buffer_bytes: Some(1 << 18), ..SocketOptions::default() });
    let options = TcpOptions {
        mss: Some(1000),
        window_scale: Some(2),
        timestamps: Some(Timestamps { tsval: 5, tsecr: 0 }),
        ..TcpOptions::default()
    };
    let syn = p.segment(SYN, 0, 0, &[], &options);
    let answer = p.deliver_frame(&syn).remove(0);
    let window_scale = answer.options.window_scale.unwrap();
    assert_eq!(window_scale, 3, "of 256 KiB");
    let echo = answer.options.timestamps.unwrap().tsval;
    let options =
        TcpOptions { timestamps: Some(Timestamps { tsval: 6, tsecr: echo }), ..TcpOptions::default() };
    let ack = p.segment(ACK, 1, 1, &[], &options);
    p.deliver_frame(&ack);
    let info = p.stack.info(p.conn.expect("accepted")).unwrap();
    assert_eq!(info.rcv_wscale, window_scale);
    assert!(info.rcv_wnd >= u32::from(answer.header.window), "the window never shrinks");
}

#[test]
fn cookie_connection_sends_keepalive_probes() {
    let mut cookies = with_cookies();
    cookies.tcp.keepalive_time_seconds = 10;
    let mut p = ScriptedPeer::new(cookies);
    listen_with(&mut p, SocketOptions { keepalive: true, ..SocketOptions::default() });
    p.open(&TcpOptions { mss: Some(1000), ..TcpOptions::default() });
    assert_eq!(p.wait(Duration::from_secs(15)).len(), 1, "a probe");
}

#[test]
fn window_scale_stays_as_in_syn() {
    let mut p = ScriptedPeer::new(config());
    let conn = p.connect();
    let syn_scale = 7;
    assert_eq!(p.stack.info(conn).unwrap().rcv_wscale, syn_scale);
    p.stack.set_option(conn, TcpOption::RecvBuffer(32_768)).unwrap();
    let options = TcpOptions { mss: Some(1000), window_scale: Some(2), ..TcpOptions::default() };
    let answer = p.segment(SYN | ACK, 0, 1, &[], &options);
    p.deliver_frame(&answer);
    assert_eq!(p.stack.state(conn), Some(State::Established));
    assert_eq!(p.stack.info(conn).unwrap().rcv_wscale, syn_scale);
}

#[test]
fn enabling_keepalive_does_not_prolong_connect() {
    let mut p = ScriptedPeer::new(config());
    let conn = p.connect();
    for _ in 0..300 {
        let _ = p.stack.set_option(conn, TcpOption::KeepAlive(true));
        p.wait(Duration::from_secs(1));
    }
    assert_eq!(closed_count(&p), 1);
}

#[test]
fn lost_syn_ack_is_retransmitted() {
    let mut p = ScriptedPeer::new(config());
    p.listen();
    p.deliver(SYN, 0, 0, &[]);
    let retransmitted = p.wait(Duration::from_millis(3500));
    assert_eq!(retransmitted.len(), 2, "after 1 s and 3 s");
    assert!(retransmitted.iter().all(|s| s.header.flags == SYN | ACK));
    let responses = p.deliver(SYN, 0, 0, &[]);
    assert_eq!(responses.len(), 1, "and when the peer repeats its SYN");
    assert_eq!(p.stack.tcp_stats().retransmitted, 3);
}

#[test]
fn unresolved_neighbour_fails_the_connect() {
    let mut sim = Sim::pair(1);
    let now = sim.now;
    let conn = sim.hosts[0].connect(now, SocketAddr::new(Ipv4Addr::new(10, 0, 0, 77).into(), 80));
    sim.collect(0);
    sim.run(Duration::from_secs(10));
    assert_eq!(sim.hosts[0].received[&conn].closed, Some(CloseReason::HostUnreachable));
}

#[test]
fn connect_needs_no_bind() {
    let mut p = ScriptedPeer::new(config());
    let conn = p.connect();
    let local = p.stack.info(conn).unwrap().local;
    assert_eq!(local.ip(), IpAddr::V4(STACK));
    assert!((32_768..=60_999).contains(&local.port()));
}

/// Data of a higher class of priority than the SYN+ACK come after `Connected` nevertheless.
#[test]
fn connected_is_reported_before_high_priority_data() {
    let mut p = ScriptedPeer::new(config());
    let conn = p.connect();
    let none = TcpOptions::default();
    let syn_ack = p.segment(ACK | SYN, 0, 1, &[], &none);
    p.receive_without_events(&[syn_ack]);
    p.stack.select_class(6);
    let data = p.segment(ACK, 1, 1, b"urgent", &none);
    p.receive_without_events(&[data]);
    let events: Vec<Event> = core::iter::from_fn(|| p.stack.next_event_by_class()).collect();
    assert_eq!(events, [Event::Connected { conn }, Event::Readable { conn }]);
    p.stack.select_class(BEST_EFFORT);
    assert_eq!(p.stack.next_event_by_class(), None, "it is reported once");
    p.stack.check_invariants();
}
