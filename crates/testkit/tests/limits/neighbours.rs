//! `network.neighbours_max`, `network.neighbour_pending_bytes`, `network.neighbour_pending_total_bytes`,
//! `network.errors_max`.

use super::common::{
    CLIENT, SECOND, SERVER, client_with, connect, is_connected, pattern, read, send, served, server,
    server_with,
};
use core::net::{Ipv4Addr, SocketAddr};
use core::time::Duration;
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::UdpHandle;
use ginnel_stack::options::ConnectOptions;
use ginnel_stack::udp::{UdpError, UdpOptions};
use ginnel_stack::wire::ethernet::{self, EtherType};
use ginnel_stack::wire::{MacAddr, arp};
use ginnel_testkit::sim::{HostConfig, LinkModel, Sim};

fn udp(sim: &mut Sim) -> UdpHandle {
    let any = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0);
    sim.hosts[CLIENT].stack.udp_bind(any, UdpOptions::default()).unwrap()
}

/// Sends a datagram to 10.0.0.`last`, which may not exist.
fn datagram(sim: &mut Sim, socket: UdpHandle, last: u8, len: usize) -> Result<(), UdpError> {
    let (now, to) = (sim.now, SocketAddr::new(Ipv4Addr::new(10, 0, 0, last).into(), 9));
    let sent = sim.hosts[CLIENT].stack.udp_send_to(now, socket, Some(to), &vec![1; len]);
    sim.hosts[CLIENT].stack.transmit(now);
    sim.collect(CLIENT);
    sent
}

// limit: network.neighbours_max
#[test]
fn connection_survives_neighbour_table_pressure() {
    let mut sim = client_with(|c| c.network.neighbours_max = 16);
    sim.hosts[SERVER].listen(80);
    let conn = connect(&mut sim);
    sim.run(SECOND / 10);
    let served_conn = served(&sim, conn);
    let socket = udp(&mut sim);
    for round in 0..20 {
        for last in 10..200 {
            datagram(&mut sim, socket, last, 100).unwrap();
        }
        send(&mut sim, CLIENT, conn, &pattern(round, 10_000), false);
        sim.run(SECOND);
    }
    sim.run(SECOND * 20);
    let expected: Vec<u8> = (0..20).flat_map(|round| pattern(round, 10_000)).collect();
    assert!(read(&sim, SERVER, served_conn) == expected);
    assert!(is_connected(&sim.hosts[CLIENT], conn));
    let stack = &sim.hosts[CLIENT].stack;
    assert!(stack.network().stats().neighbours_evicted > 3000);
    assert_eq!(stack.network().neighbours().count(), 16);
}

// limit: network.neighbours_max
#[test]
fn arp_flood_does_not_evict_active_neighbour() {
    let mut sim = server_with(|c| c.network.neighbours_max = 16);
    sim.hosts[SERVER].listen(80);
    let conn = connect(&mut sim);
    sim.run(SECOND / 10);
    let served_conn = served(&sim, conn);
    for round in 0..50u8 {
        for last in 3..=250 {
            let mac = MacAddr([2, 0, 0, 1, round, last]);
            let mut frame = vec![0; 14 + 28];
            let at = ethernet::Header::new(MacAddr::BROADCAST, mac, None, EtherType::ARP).emit(&mut frame);
            let question = arp::ArpPacket {
                operation: arp::ArpOperation::Request,
                sender_mac: mac,
                sender_ip: Ipv4Addr::new(10, 0, 0, last),
                target_mac: MacAddr::ZERO,
                target_ip: sim.hosts[SERVER].v4,
            };
            question.emit(&mut frame[at..]);
            sim.inject(SERVER, frame);
        }
        send(&mut sim, CLIENT, conn, &[round; 100], false);
        send(&mut sim, SERVER, served_conn, &[round; 100], false);
        sim.run(Duration::from_millis(50));
        assert_eq!(read(&sim, CLIENT, conn).len(), 100 * (usize::from(round) + 1), "without a pause");
        assert_eq!(read(&sim, SERVER, served_conn).len(), 100 * (usize::from(round) + 1));
    }
    assert_eq!(sim.hosts[SERVER].stack.network().neighbours().count(), 16);
}

// limit: network.neighbour_pending_bytes
// limit: network.neighbour_pending_total_bytes
#[test]
fn pending_packets_are_limited_by_neighbour_and_total() {
    let mut sim = client_with(|c| {
        c.network.neighbour_pending_bytes = 10_000;
        c.network.neighbour_pending_total_bytes = 30_000;
    });
    let socket = udp(&mut sim);
    // Each packet takes 1,042 bytes: nine wait for each of three neighbours, and one for the fourth.
    for last in 10..20 {
        for _ in 0..20 {
            datagram(&mut sim, socket, last, 1000).unwrap();
        }
    }
    let stats = sim.hosts[CLIENT].stack.network().stats().clone();
    assert_eq!((stats.tx_pending, stats.tx_pending_overflow), (200, 200 - 28));
    sim.run(SECOND * 10);
    let stats = sim.hosts[CLIENT].stack.network().stats().clone();
    assert_eq!((stats.tx_unresolved, stats.neighbours_failed), (28, 10));
    // There is room again, and a neighbour that answers receives everything.
    let to = server(&sim, false, 9);
    let bound = sim.hosts[SERVER].stack.udp_bind(to, UdpOptions::default()).unwrap();
    for _ in 0..9 {
        datagram(&mut sim, socket, 2, 1000).unwrap();
    }
    sim.run(SECOND);
    let mut buffer = [0; 2000];
    let got = core::iter::from_fn(|| sim.hosts[SERVER].stack.udp_recv_from(bound, &mut buffer).ok()).count();
    assert_eq!(got, 9);
}

// limit: network.errors_max
#[test]
fn every_unreachable_connect_ends_at_error_limit() {
    let mut sim = client_with(|c| c.network.errors_max = 4);
    let now = sim.now;
    let conns: Vec<_> = (10..30)
        .map(|last| {
            let to = SocketAddr::new(Ipv4Addr::new(10, 0, 0, last).into(), 80);
            sim.hosts[CLIENT].stack.connect(now, to, &ConnectOptions::default()).unwrap()
        })
        .collect();
    sim.hosts[CLIENT].stack.transmit(now);
    sim.collect(CLIENT);
    sim.run(SECOND * 5);
    let ended = |sim: &Sim| conns.iter().filter(|c| sim.hosts[CLIENT].received.contains_key(c)).count();
    // Each connection has sent its SYN twice when its neighbour is given up: the four stored errors concern
    // two connections.
    assert_eq!((ended(&sim), sim.hosts[CLIENT].stack.network().stats().errors_overflow), (2, 36));
    sim.run(SECOND * 200);
    for conn in &conns {
        assert_eq!(sim.hosts[CLIENT].received[conn].closed, Some(CloseReason::HostUnreachable));
    }
    assert_eq!(sim.hosts[CLIENT].stack.usage().connections, 0);
}

/// Static neighbours are never evicted, so the table can be full permanently.
// limit: network.neighbours_max
#[test]
fn static_neighbours_are_never_evicted() {
    let mut short = HostConfig::default();
    short.stack.network.neighbours_max = 16;
    short.static_neighbours =
        (2..18).map(|last| (Ipv4Addr::new(10, 0, 0, last).into(), MacAddr([2, 0, 0, 0, 0, last]))).collect();
    // The client is 10.0.0.1, the server 10.0.0.2.
    let mut sim = Sim::pair_with(1, short, HostConfig::default(), LinkModel::default());
    sim.hosts[SERVER].listen(80);
    let conn = connect(&mut sim);
    sim.run(SECOND / 10);
    let served_conn = served(&sim, conn);
    let socket = udp(&mut sim);
    for last in 20..40 {
        assert_eq!(datagram(&mut sim, socket, last, 100), Err(UdpError::NoBuffers));
    }
    assert_eq!(sim.hosts[CLIENT].stack.network().stats().neighbours_exhausted, 20);
    datagram(&mut sim, socket, 2, 100).unwrap();
    send(&mut sim, CLIENT, conn, &pattern(1, 10_000), false);
    sim.run(SECOND);
    assert!(read(&sim, SERVER, served_conn) == pattern(1, 10_000));
}
