//! ICMP: the rate of errors, and the number of destinations whose path MTU is stored.

use super::common::{
    CLIENT, SECOND, SERVER, connect, datagram, header_v4, icmp, is_connected, packet_v4, send, server_with,
};
use core::time::Duration;
use ginnel_stack::wire::protocol;
use ginnel_testkit::sim::Sim;

/// Delivers a datagram from `src` to a closed port of the server.
fn send_to_closed_port(sim: &mut Sim, src: [u8; 4]) {
    let header = header_v4(src, [10, 0, 0, 2], protocol::UDP);
    sim.inject(SERVER, packet_v4(1, 2, &header, &datagram(1000, 9, b"anybody?")));
}

// limit: network.icmp_errors_burst
// limit: network.icmp_errors_per_second
#[test]
fn icmp_errors_are_rate_limited() {
    let mut sim = server_with(|c| {
        c.network.icmp_errors_per_second = 100;
        c.network.icmp_errors_burst = 20;
    });
    let stats = |sim: &Sim| {
        let stats = sim.hosts[SERVER].stack.network().stats();
        (stats.icmp_errors_out, stats.icmp_errors_limited)
    };
    for _ in 0..50 {
        send_to_closed_port(&mut sim, [10, 0, 0, 1]);
    }
    sim.run(Duration::from_micros(1));
    assert_eq!(stats(&sim), (6, 44), "to one destination");
    for last in 10..200 {
        send_to_closed_port(&mut sim, [10, 0, 0, last]);
    }
    sim.run(Duration::from_micros(1));
    assert_eq!(stats(&sim).0, 20, "to all");
    assert_eq!(stats(&sim).1, 240 - 20);
    sim.run(SECOND * 10);
    let before = stats(&sim).0;
    send_to_closed_port(&mut sim, [10, 0, 0, 1]);
    sim.run(Duration::from_micros(1));
    assert_eq!(stats(&sim).0, before + 1);
}

// limit: network.icmp_errors_per_second
#[test]
fn icmp_error_rate_zero_sends_none() {
    let mut sim = server_with(|c| c.network.icmp_errors_per_second = 0);
    sim.hosts[SERVER].listen(80);
    send_to_closed_port(&mut sim, [10, 0, 0, 1]);
    let conn = connect(&mut sim);
    sim.run(SECOND / 10);
    assert!(is_connected(&sim.hosts[CLIENT], conn));
    assert_eq!(sim.hosts[SERVER].stack.network().stats().icmp_errors_out, 0);
}

// limit: network.path_mtu_entries
#[test]
fn oldest_path_mtu_is_evicted_at_limit() {
    let mut sim = server_with(|c| c.network.path_mtu_entries = 4);
    sim.hosts[SERVER].listen(80);
    let conn = connect(&mut sim);
    sim.run(SECOND / 10);
    let served_conn = super::common::served(&sim, conn);
    let bound = super::common::server(&sim, false, 9);
    sim.hosts[SERVER].stack.udp_bind(bound, Default::default()).unwrap();
    for last in 10..=200 {
        // A router reports that a datagram of the server to 10.0.0.`last` was too big; the datagram's socket
        // exists.
        let quote = packet_v4(
            2,
            1,
            &header_v4([10, 0, 0, 2], [10, 0, 0, last], protocol::UDP),
            &datagram(9, 1000, b"x"),
        );
        let message = icmp(3, 4, [0, 0, 4, 176], &quote[14..]);
        let header = header_v4([10, 0, 0, 1], [10, 0, 0, 2], protocol::ICMP);
        sim.inject(SERVER, packet_v4(1, 2, &header, &message));
    }
    sim.run(SECOND / 10);
    let stats = sim.hosts[SERVER].stack.network().stats();
    assert_eq!((stats.path_mtu_learnt, stats.path_mtu_evicted), (191, 187));
    let (now, any) = (sim.now, core::net::SocketAddr::from(([10, 0, 0, 2], 0)));
    let mut mtu = |last: u8| {
        let to = core::net::IpAddr::from([10, 0, 0, last]);
        sim.hosts[SERVER].stack.network_mut().route(now, to, Some(any.ip())).unwrap().mtu
    };
    assert_eq!([196, 197, 200].map(&mut mtu), [1500, 1200, 1200]);
    send(&mut sim, SERVER, served_conn, &[7; 50_000], false);
    sim.run(SECOND);
    assert_eq!(super::common::read(&sim, CLIENT, conn).len(), 50_000);
}
