//! Segments that cannot leave: a device without room, a network layer without a route. No data may be lost,
//! and no resource may remain in use.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::time::Duration;
use ginnel_stack::error::ConnectError;
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::{Conn, LinkId};
use ginnel_stack::options::ConnectOptions;
use ginnel_stack::tcp::state::State;
use ginnel_stack::wire::ethernet::{self, EtherType};
use ginnel_stack::wire::ndp::{self, PrefixInfo, RouterAdvertisement};
use ginnel_stack::wire::{MacAddr, ipv6, protocol};
use ginnel_testkit::sim::{HostConfig, LinkModel, Sim, seeds};

const CLIENT: usize = 0;
const SERVER: usize = 1;
const SECOND: Duration = Duration::from_secs(1);
const PREFIX: Ipv6Addr = Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 0);

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + (i >> 8)) as u8).collect()
}

fn assert_nothing_left(sim: &Sim) {
    for host in &sim.hosts {
        let usage = host.stack.usage();
        let in_use =
            (usage.connections, usage.half_open, usage.time_wait, usage.active, usage.chunks, usage.timers);
        assert_eq!(in_use, (0, 0, 0, 0, 0, 0), "{}", sim.replay());
    }
}

/// Runs the simulation with devices whose capacity in each step is the next value of `capacity`.
fn run_with_device_capacity(sim: &mut Sim, time: Duration, mut capacity: impl FnMut() -> usize) {
    let until = sim.now + time;
    loop {
        for host in &mut sim.hosts {
            host.set_device_capacity(Some(capacity()));
        }
        if !sim.step(until) {
            break;
        }
    }
    for host in &mut sim.hosts {
        host.set_device_capacity(None);
    }
}

/// SYN, data in both directions, retransmissions, acknowledgements and FIN, all of which the device mostly
/// refuses.
// limit: bytes in a ring of the memory device
#[test]
fn nearly_full_devices_lose_nothing() {
    for seed in seeds(8) {
        let model = LinkModel { loss: 0.02, reorder: 0.02, ..LinkModel::default() };
        // A neighbour solicitation that the device refuses is lost, so all neighbours are static.
        let knows = |last: u8| HostConfig {
            static_neighbours: vec![(Ipv4Addr::new(10, 0, 0, last).into(), MacAddr([2, 0, 0, 0, 0, last]))],
            ..HostConfig::default()
        };
        let mut sim = Sim::pair_with(seed, knows(2), knows(1), model);
        sim.hosts[SERVER].listen(80);
        sim.hosts[CLIENT].close_on_peer_close = true;
        let (now, to) = (sim.now, SocketAddr::new(sim.hosts[SERVER].v4.into(), 80));
        sim.hosts[CLIENT].set_device_capacity(Some(0));
        let conn = sim.hosts[CLIENT].connect(now, to);
        let bytes = pattern(200_000);
        sim.hosts[CLIENT].send_all(now, conn, bytes.clone(), true);
        sim.collect(CLIENT);
        let mut turn = seed;
        let mut capacity = move || {
            turn = turn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Two frames in every eighth turn on average, none in the others.
            if turn >> 61 == 0 { 2 } else { 0 }
        };
        run_with_device_capacity(&mut sim, SECOND * 5, &mut capacity);
        let served_conn = sim.hosts[SERVER].accepted[0];
        let now = sim.now;
        sim.hosts[SERVER].send_all(now, served_conn, bytes.clone(), true);
        sim.collect(SERVER);
        run_with_device_capacity(&mut sim, SECOND * 30, &mut capacity);
        for (host, conn) in [(SERVER, served_conn), (CLIENT, conn)] {
            let received = &sim.hosts[host].received[&conn];
            assert!(received.bytes == bytes, "{} bytes: {}", received.bytes.len(), sim.replay());
            assert!(received.peer_closed, "{}", sim.replay());
            assert!(sim.hosts[host].stack.tcp_stats().device_full > 50, "{}", sim.replay());
        }
        // The answers of TIME_WAIT are not retransmitted by a timer, but sent for each FIN.
        sim.run(SECOND * 240);
        for (host, conn) in [(SERVER, served_conn), (CLIENT, conn)] {
            let closed = sim.hosts[host].received[&conn].closed;
            assert_eq!(closed, Some(CloseReason::Normal), "{host}: {}", sim.replay());
        }
        assert_nothing_left(&sim);
    }
}

/// Delivers a router advertisement that the prefix is on the link, or withdraws it.
fn advertise(sim: &mut Sim, host: usize, on_link: bool) {
    let (mac, src, dst) = (
        MacAddr([2, 0, 0, 0, 0, 9]),
        Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 9),
        Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1),
    );
    let mut advertisement = RouterAdvertisement { source_mac: Some(mac), ..RouterAdvertisement::default() };
    let lifetime = if on_link { 86_400 } else { 0 };
    advertisement.prefixes.push(PrefixInfo {
        prefix: PREFIX,
        prefix_len: 64,
        on_link: true,
        autonomous: on_link,
        valid_lifetime_s: lifetime,
        preferred_lifetime_s: lifetime,
    });
    let mut message = vec![0; ndp::MESSAGE_LEN_MAX];
    let len = ndp::NdpMessage::RouterAdvertisement(advertisement).emit(src, dst, &mut message);
    let mut frame = vec![0; 14 + 40 + len];
    let to = MacAddr::from_ipv6_multicast(dst);
    let at = ethernet::Header::new(to, mac, None, EtherType::IPV6).emit(&mut frame);
    let header = ipv6::Header {
        dscp: 0,
        ecn: 0,
        flow_label: 0,
        payload_len: len as u16,
        next_header: protocol::ICMPV6,
        hop_limit: 255,
        src,
        dst,
    };
    header.emit(&mut frame[at..]);
    frame[at + 40..].copy_from_slice(&message[..len]);
    sim.inject(host, frame);
    sim.run(Duration::from_millis(1));
}

/// Creates two hosts with addresses in an advertised prefix. Returns the server's address in it.
fn advertised(change: impl Fn(&mut HostConfig)) -> (Sim, SocketAddr) {
    let mut config = HostConfig { accept_ra: true, ..HostConfig::default() };
    change(&mut config);
    let mut sim = Sim::pair_with(1, config.clone(), config, LinkModel::default());
    let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 80);
    sim.hosts[SERVER].stack.listen(any, Default::default()).unwrap();
    sim.run(SECOND * 3);
    for host in [CLIENT, SERVER] {
        advertise(&mut sim, host, true);
    }
    sim.run(SECOND * 3);
    let mut addresses = sim.hosts[SERVER].stack.network().addresses(LinkId(0)).iter().map(|a| a.address);
    let in_prefix = |a: &IpAddr| matches!(a, IpAddr::V6(v6) if v6.segments()[0] == PREFIX.segments()[0]);
    let address = addresses.find(in_prefix).expect("an autoconfigured address");
    (sim, SocketAddr::new(address, 80))
}

fn connect(sim: &mut Sim, to: SocketAddr) -> (Conn, Conn) {
    let now = sim.now;
    let conn = sim.hosts[CLIENT].connect(now, to);
    sim.collect(CLIENT);
    sim.run(SECOND / 10);
    (conn, *sim.hosts[SERVER].accepted.last().expect("an accepted connection"))
}

fn withdraw_route(sim: &mut Sim, to: SocketAddr) {
    advertise(sim, CLIENT, false);
    let (now, options) = (sim.now, ConnectOptions::default());
    let result = sim.hosts[CLIENT].stack.connect(now, to, &options);
    assert_eq!(result, Err(ConnectError::NetUnreachable), "the route still exists");
}

/// Bytes in flight, queued bytes, pending acknowledgements, and FIN.
#[test]
fn missing_route_for_a_minute_loses_nothing() {
    // All bytes are queued at once.
    let large = 4 << 20;
    let (mut sim, to) = advertised(|config| config.stack.tcp.send_buffer_first_bytes = large);
    let (conn, served_conn) = connect(&mut sim, to);
    let bytes = pattern(3_000_000);
    let now = sim.now;
    sim.hosts[CLIENT].send_all(now, conn, bytes.clone(), true);
    sim.collect(CLIENT);
    sim.hosts[SERVER].send_all(now, served_conn, bytes.clone(), true);
    sim.collect(SERVER);
    sim.run(Duration::from_millis(5));
    withdraw_route(&mut sim, to);
    sim.run(SECOND * 60);
    assert!(
        sim.hosts[SERVER].received[&served_conn].bytes.len() < bytes.len(),
        "all bytes had arrived before the route was withdrawn"
    );
    assert_eq!(sim.hosts[CLIENT].stack.state(conn), Some(State::FinWait1));
    advertise(&mut sim, CLIENT, true);
    sim.run(SECOND * 120);
    for (host, conn) in [(SERVER, served_conn), (CLIENT, conn)] {
        let received = &sim.hosts[host].received[&conn];
        assert!(received.bytes == bytes && received.peer_closed, "{} bytes", received.bytes.len());
        assert_eq!(received.closed, Some(CloseReason::Normal));
    }
    sim.run(SECOND * 120);
    assert_nothing_left(&sim);
}

/// Nothing was in flight when the route disappeared, so only the attempt to send can arm a timer.
#[test]
fn queued_data_leaves_when_route_returns() {
    for close in [false, true] {
        let (mut sim, to) = advertised(|_| {});
        let (conn, served_conn) = connect(&mut sim, to);
        sim.run(SECOND * 10);
        withdraw_route(&mut sim, to);
        let now = sim.now;
        if close {
            sim.hosts[CLIENT].stack.close(conn).unwrap();
            sim.hosts[CLIENT].stack.transmit(now);
        } else {
            sim.hosts[CLIENT].send_all(now, conn, b"queued".to_vec(), false);
        }
        sim.collect(CLIENT);
        sim.run(SECOND * 5);
        advertise(&mut sim, CLIENT, true);
        sim.run(SECOND * 20);
        let received = &sim.hosts[SERVER].received[&served_conn];
        assert_eq!(
            (&received.bytes[..], received.peer_closed),
            if close { (&b""[..], true) } else { (&b"queued"[..], false) }
        );
    }
}

/// Connections in every state end eventually, however they were given up.
#[test]
fn missing_route_ends_every_connection() {
    let (mut sim, to) = advertised(|config| config.stack.tcp.retries = 5);
    let (now, options) = (sim.now, ConnectOptions::default());
    let mut conns = Vec::new();
    for actions in ["data", "FIN", "data and FIN, closed", "nothing, closed"] {
        let (conn, _) = connect(&mut sim, to);
        conns.push((actions, conn));
    }
    // Its SYN is never sent.
    let opening = sim.hosts[CLIENT].stack.connect(now, to, &options).unwrap();
    conns.push(("SYN", opening));
    withdraw_route(&mut sim, to);
    let now = sim.now;
    for (actions, conn) in &conns {
        let stack = &mut sim.hosts[CLIENT].stack;
        if actions.contains("data") {
            stack.send(*conn, &[1; 5000]).unwrap();
        }
        if actions.contains("FIN") {
            stack.shutdown_write(*conn).unwrap();
        }
        if actions.contains("closed") {
            stack.close(*conn).unwrap();
        }
    }
    sim.hosts[CLIENT].stack.transmit(now);
    sim.collect(CLIENT);
    sim.run(SECOND * 1200);
    for (actions, conn) in conns {
        assert_eq!(
            sim.hosts[CLIENT].received.get(&conn).and_then(|r| r.closed),
            Some(CloseReason::TimedOut),
            "{actions}"
        );
    }
    let usage = sim.hosts[CLIENT].stack.usage();
    let in_use = (usage.connections, usage.time_wait, usage.active, usage.chunks, usage.timers);
    assert_eq!(in_use, (0, 0, 0, 0, 0));
}
