//! `tcp.connections_max`, and the range of local ports.

use super::common::{
    CLIENT, SECOND, SERVER, assert_nothing_left, client_with, close, connect, is_connected, read, reset,
    send, served, server, server_with,
};
use core::time::Duration;
use ginnel_stack::error::ConnectError;
use ginnel_stack::options::ConnectOptions;
use ginnel_stack::tcp::config::SynCookies;

// limit: tcp.connections_max
#[test]
fn syn_dropped_at_connection_limit_succeeds_later() {
    let mut sim = server_with(|c| c.tcp.connections_max = 4);
    sim.hosts[SERVER].listen(80);
    sim.hosts[SERVER].close_on_peer_close = true;
    let conns: Vec<_> = (0..6).map(|_| connect(&mut sim)).collect();
    sim.run(SECOND / 2);
    let connected = conns.iter().filter(|c| is_connected(&sim.hosts[CLIENT], **c)).count();
    assert_eq!((connected, sim.hosts[SERVER].stack.usage().connections), (4, 4));
    assert_eq!(sim.hosts[SERVER].stack.tcp_stats().connection_overflows, 2);
    // Existing connections are not affected.
    for (i, conn) in conns[..4].iter().enumerate() {
        send(&mut sim, CLIENT, *conn, &[i as u8; 5000], false);
    }
    sim.run(SECOND / 4);
    for (i, conn) in conns[..4].iter().enumerate() {
        assert_eq!(read(&sim, SERVER, served(&sim, *conn)), [i as u8; 5000]);
    }
    for conn in &conns[..2] {
        close(&mut sim, CLIENT, *conn);
    }
    sim.run(SECOND * 20);
    for conn in &conns[2..] {
        assert!(is_connected(&sim.hosts[CLIENT], *conn), "its SYN was sent again");
    }
    assert_eq!(sim.hosts[SERVER].stack.usage().connections, 4);
    for conn in &conns[2..] {
        close(&mut sim, CLIENT, *conn);
    }
    sim.run(SECOND * 120);
    assert_nothing_left(&sim.hosts[SERVER]);
    assert_nothing_left(&sim.hosts[CLIENT]);
}

// limit: tcp.connections_max
#[test]
fn connect_fails_at_connection_limit() {
    for v6 in [false, true] {
        let mut sim = client_with(|c| c.tcp.connections_max = 2);
        // IPv6 addresses pass duplicate address detection first.
        sim.run(SECOND * 5);
        let to = server(&sim, v6, 80);
        sim.hosts[SERVER].stack.listen(to, Default::default()).unwrap();
        let open = |sim: &mut ginnel_testkit::sim::Sim| {
            let now = sim.now;
            let result = sim.hosts[CLIENT].stack.connect(now, to, &ConnectOptions::default());
            sim.hosts[CLIENT].stack.transmit(now);
            sim.collect(CLIENT);
            sim.run(Duration::from_millis(20));
            result
        };
        let mut open_conns = vec![open(&mut sim).unwrap(), open(&mut sim).unwrap()];
        for _ in 0..50 {
            assert_eq!(open(&mut sim), Err(ConnectError::TooMany));
            let oldest = open_conns.remove(0);
            assert!(is_connected(&sim.hosts[CLIENT], oldest));
            reset(&mut sim, oldest);
            open_conns.push(open(&mut sim).expect("a free connection"));
        }
        let stats = sim.hosts[CLIENT].stack.tcp_stats();
        assert_eq!((stats.active_opens, stats.connects_refused), (52, 50));
        assert_eq!(sim.hosts[CLIENT].stack.usage().connections, 2);
    }
}

#[test]
fn time_wait_does_not_count_as_connection() {
    let mut sim = server_with(|c| c.tcp.connections_max = 1);
    sim.hosts[SERVER].listen(80);
    sim.hosts[CLIENT].close_on_peer_close = true;
    for round in 1..=30 {
        let conn = connect(&mut sim);
        sim.run(SECOND / 10);
        assert!(is_connected(&sim.hosts[CLIENT], conn), "round {round}");
        let served_conn = served(&sim, conn);
        close(&mut sim, SERVER, served_conn);
        sim.run(SECOND / 10);
        let usage = sim.hosts[SERVER].stack.usage();
        assert_eq!((usage.connections, usage.time_wait), (0, round));
    }
    assert_eq!(sim.hosts[SERVER].stack.tcp_stats().connection_overflows, 0);
}

// limit: tcp.connections_max
#[test]
fn cookie_holder_is_served_when_room_returns() {
    let mut sim = server_with(|c| {
        c.tcp.connections_max = 1;
        c.tcp.syn_cookies = SynCookies::Always;
    });
    sim.hosts[SERVER].listen(80);
    let first = connect(&mut sim);
    sim.run(SECOND / 10);
    let second = connect(&mut sim);
    sim.run(SECOND / 10);
    assert!(is_connected(&sim.hosts[CLIENT], second), "the SYN+ACK with a cookie completes the connect");
    send(&mut sim, CLIENT, second, b"request", false);
    sim.run(SECOND);
    assert_eq!(sim.hosts[SERVER].stack.usage().connections, 1);
    assert!(sim.hosts[SERVER].stack.tcp_stats().connection_overflows >= 2);
    reset(&mut sim, first);
    sim.run(SECOND * 10);
    assert_eq!(read(&sim, SERVER, served(&sim, second)), b"request");
}

// limit: tcp.local_port_last
#[test]
fn exhausted_local_ports_are_reusable_after_close() {
    let mut sim = client_with(|c| (c.tcp.local_port_first, c.tcp.local_port_last) = (40_000, 40_003));
    sim.hosts[SERVER].listen(80);
    sim.hosts[SERVER].listen(81);
    let conns: Vec<_> = (0..4).map(|_| connect(&mut sim)).collect();
    sim.run(SECOND / 10);
    let (now, full, other) = (sim.now, server(&sim, false, 80), server(&sim, false, 81));
    let stack = &mut sim.hosts[CLIENT].stack;
    assert_eq!(stack.connect(now, full, &ConnectOptions::default()), Err(ConnectError::PortsExhausted));
    assert_eq!(stack.tcp_stats().ports_exhausted, 1);
    assert!(
        stack.connect(now, other, &ConnectOptions::default()).is_ok(),
        "the ports are free towards other addresses"
    );
    let mut ports: Vec<u16> =
        conns.iter().map(|c| sim.hosts[CLIENT].stack.info(*c).unwrap().local.port()).collect();
    ports.sort_unstable();
    assert_eq!(ports, [40_000, 40_001, 40_002, 40_003]);
    reset(&mut sim, conns[2]);
    let new_conn = connect(&mut sim);
    sim.run(SECOND / 10);
    assert!(is_connected(&sim.hosts[CLIENT], new_conn));
}
