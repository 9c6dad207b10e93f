//! Defects of earlier stacks, each as a test that Ginnel does not have it. Every test is named for the behaviour.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use core::time::Duration;
use ginnel_stack::events::{CloseReason, Event};
use ginnel_stack::options::ListenOptions;
use ginnel_stack::stack::StackConfig;
use ginnel_stack::tcp::state::State;
use ginnel_stack::wire::tcp::{TcpFlags, TcpOptions};
use ginnel_testkit::scripted_peer::{PEER_ISS, PORT, STACK, ScriptedPeer};
use ginnel_testkit::sim::{HostConfig, LinkModel, Sim};

const ACK: TcpFlags = TcpFlags::ACK;
const SYN: TcpFlags = TcpFlags::SYN;
const FIN: TcpFlags = TcpFlags::FIN;

fn config() -> StackConfig {
    StackConfig::default()
}

/// A stack that accepted the test's connection; the peer's MSS is 1,000.
fn established(config: StackConfig) -> ScriptedPeer {
    let mut p = ScriptedPeer::new(config);
    p.listen();
    let options = TcpOptions { mss: Some(1000), ..TcpOptions::default() };
    let syn = p.segment(SYN, 0, 0, &[], &options);
    p.deliver_frame(&syn);
    p.deliver(ACK, 1, 1, &[]);
    p
}

fn ack_of(sent: &ginnel_testkit::scripted_peer::SentSegment) -> i64 {
    i64::from(sent.header.ack.0.wrapping_sub(PEER_ISS) as i32)
}

#[test]
fn fin_is_only_on_the_last_segment() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.stack.send(conn, &[1; 4500]).unwrap();
    p.stack.close(conn).unwrap();
    let sent = p.flush();
    assert_eq!(sent.len(), 5);
    let fins: Vec<_> = sent.iter().map(|s| s.header.flags.contains(FIN)).collect();
    assert_eq!(fins, [false, false, false, false, true]);
}

#[test]
fn passive_close_leaves_no_state() {
    let mut p = established(config());
    for round in 0..50 {
        let conn = p.conn.unwrap();
        p.deliver(FIN | ACK, 1, 1, &[]);
        p.stack.close(conn).unwrap();
        p.flush();
        p.deliver(ACK, 2, 2, &[]);
        let usage = p.stack.usage();
        assert_eq!(
            (usage.connections, usage.active, usage.timers, usage.time_wait),
            (0, 0, 0, 0),
            "round {round}"
        );
        p.deliver(SYN, 0, 0, &[]);
        p.deliver(ACK, 1, 1, &[]);
    }
    let closed = p.events.iter().filter(|e| matches!(e, Event::Closed { .. })).count();
    assert_eq!(closed, 50);
}

#[test]
fn each_out_of_order_segment_causes_duplicate_ack() {
    let mut p = established(config());
    for i in 1..=3 {
        let sent = p.deliver(ACK, 1 + i * 1000, 1, &[0; 1000]);
        assert_eq!(sent.len(), 1);
        assert_eq!(ack_of(&sent[0]), 1);
    }
}

#[test]
fn overlapping_retransmission_acknowledges_its_new_part() {
    let mut p = established(config());
    p.deliver(ACK, 1, 1, &[1; 100]);
    let sent = p.deliver(ACK, 51, 1, &[2; 100]);
    assert_eq!(ack_of(sent.last().unwrap()), 151);
    assert_eq!(p.read.len(), 150);
    assert_eq!(&p.read[..100], &[1; 100]);
}

#[test]
fn fin_beyond_a_hole_is_processed_later() {
    let mut p = established(config());
    p.deliver(FIN | ACK, 101, 1, &[2; 50]);
    assert_eq!(p.stack.state(p.conn.unwrap()), Some(State::Established));
    let sent = p.deliver(ACK, 1, 1, &[1; 100]);
    assert_eq!(ack_of(sent.last().unwrap()), 152);
    assert_eq!(p.stack.state(p.conn.unwrap()), Some(State::CloseWait));
    assert_eq!(p.read.len(), 150);
}

#[test]
fn lost_syn_ack_is_retransmitted() {
    let mut p = ScriptedPeer::new(config());
    p.listen();
    p.deliver(SYN, 0, 0, &[]);
    let again = p.wait(Duration::from_millis(3500));
    assert_eq!(again.len(), 2, "after 1 s and 3 s");
    assert!(again.iter().all(|s| s.header.flags == SYN | ACK));
    let asked = p.deliver(SYN, 0, 0, &[]);
    assert_eq!(asked.len(), 1, "and when the peer says again what was answered");
    assert_eq!(p.stack.tcp_stats().retransmitted, 3);
}

#[test]
fn rto_is_bounded_and_retries_end() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.stack.send(conn, b"x").unwrap();
    p.flush();
    let mut times = Vec::new();
    for _ in 0..1200 {
        if !p.wait(Duration::from_secs(1)).is_empty() {
            times.push(p.now);
        }
    }
    let gaps: Vec<_> = times.windows(2).map(|w| (w[1] - w[0]).as_secs()).collect();
    assert!(gaps.iter().all(|g| *g <= 121), "never more than 120 s: {gaps:?}");
    assert!(gaps.iter().filter(|g| **g >= 119).count() >= 3, "bounded, not doubled: {gaps:?}");
    assert!(matches!(p.events.last(), Some(Event::Closed { reason: CloseReason::TimedOut, .. })));
}

#[test]
fn closed_window_is_probed_without_data_loss() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    let options = TcpOptions::default();
    let mut zero = p.segment(ACK, 1, 1, &[], &options);
    // Window 0: patch the field and the checksum.
    let field = 14 + 20 + 14;
    let old = u16::from_be_bytes([zero[field], zero[field + 1]]);
    zero[field..field + 2].copy_from_slice(&[0, 0]);
    let at = 14 + 20 + 16;
    let sum = u16::from_be_bytes([zero[at], zero[at + 1]]);
    let fixed = u32::from(!sum) + u32::from(!old);
    let fixed = !(((fixed & 0xffff) + (fixed >> 16)) as u16);
    zero[at..at + 2].copy_from_slice(&fixed.to_be_bytes());
    p.deliver_frame(&zero);
    p.stack.send(conn, &[7; 3000]).unwrap();
    assert!(p.flush().is_empty(), "nothing may be sent into a closed window");
    let probes = p.wait(Duration::from_secs(20));
    assert!(probes.len() >= 4, "probes: {}", probes.len());
    assert!(probes.iter().all(|s| s.payload.is_empty()));
    let sent = p.deliver(ACK, 1, 1, &[]);
    let bytes: usize = sent.iter().map(|s| s.payload.len()).sum();
    assert_eq!(bytes, 3000);
}

#[test]
fn retransmission_gives_no_rtt_sample_without_timestamps() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    let before = p.stack.info(conn).unwrap().rtt;
    p.stack.send(conn, b"x").unwrap();
    p.flush();
    assert!(!p.wait(Duration::from_secs(3)).is_empty(), "it was sent again");
    p.deliver(ACK, 1, 2, &[]);
    assert_eq!(p.stack.info(conn).unwrap().rtt, before);
    p.stack.send(conn, b"y").unwrap();
    p.flush();
    p.wait(Duration::from_millis(50));
    p.deliver(ACK, 1, 3, &[]);
    assert!(p.stack.info(conn).unwrap().rtt > before, "one that was sent once does");
}

#[test]
fn rto_follows_the_round_trip_time() {
    for (rtt_ms, time_out_ms) in [(20, 200..300), (150, 300..600), (900, 1000..2000)] {
        let mut p = ScriptedPeer::new(config());
        p.listen();
        p.deliver(SYN, 0, 0, &[]);
        p.wait(Duration::from_millis(rtt_ms));
        p.deliver(ACK, 1, 1, &[]);
        let conn = p.conn.unwrap();
        for at in 0..20 {
            p.stack.send(conn, b"x").unwrap();
            p.flush();
            assert!(p.wait(Duration::from_millis(rtt_ms)).is_empty(), "{rtt_ms} ms: sent again too early");
            p.deliver(ACK, 1, 2 + at, &[]);
        }
        p.stack.send(conn, b"y").unwrap();
        p.flush();
        let mut waited = 0;
        while p.wait(Duration::from_millis(10)).is_empty() {
            waited += 10;
        }
        assert!(time_out_ms.contains(&waited), "{waited} ms with a round trip of {rtt_ms} ms");
    }
}

#[test]
fn the_congestion_window_grows_beyond_65535_bytes() {
    let model = LinkModel { delay: Duration::from_millis(50), ..LinkModel::default() };
    let mut sim = Sim::pair_with(1, HostConfig::default(), HostConfig::default(), model);
    sim.hosts[1].listen(80);
    let to = SocketAddr::new(sim.hosts[1].v4.into(), 80);
    let now = sim.now;
    let conn = sim.hosts[0].connect(now, to);
    sim.hosts[0].send_all(now, conn, vec![5; 20 << 20], false);
    sim.collect(0);
    sim.run(Duration::from_secs(3));
    let info = sim.hosts[0].stack.info(conn).unwrap();
    assert!(info.snd_cwnd * info.snd_mss > 1 << 20, "window: {} segments", info.snd_cwnd);
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
fn exhausted_buffer_pool_loses_nothing() {
    let mut tight = HostConfig { defer_reads: true, ..HostConfig::default() };
    tight.stack.tcp.buffer_pool_bytes = 1 << 17;
    let mut sim = Sim::pair_with(2, HostConfig::default(), tight, LinkModel::default());
    sim.hosts[1].listen(80);
    let to = SocketAddr::new(sim.hosts[1].v4.into(), 80);
    let now = sim.now;
    let all: Vec<u8> = (0..1u32 << 20).map(|i| (i * 7) as u8).collect();
    let conn = sim.hosts[0].connect(now, to);
    sim.hosts[0].send_all(now, conn, all.clone(), false);
    sim.collect(0);
    sim.run(Duration::from_secs(5));
    let served = sim.hosts[1].accepted[0];
    for _ in 0..3000 {
        while sim.hosts[1].read(served, 1 << 14) > 0 {}
        let now = sim.now;
        sim.hosts[1].stack.transmit(now);
        sim.collect(1);
        sim.run(Duration::from_millis(100));
        if sim.hosts[1].received[&served].bytes.len() == all.len() {
            break;
        }
    }
    let got = &sim.hosts[1].received[&served].bytes;
    assert_eq!(got.len(), all.len(), "{:?}", sim.hosts[0].stack.info(conn));
    assert!(*got == all, "bytes came out of order");
}

#[test]
fn late_event_processing_loses_no_event() {
    const CONNECTIONS: u16 = 2000;
    let mut p = ScriptedPeer::new(config());
    p.listen();
    let opened: Vec<_> = (0..CONNECTIONS)
        .map(|i| {
            p.ports = (PORT, 10_000 + i);
            (p.open(&TcpOptions::default()), p.iss)
        })
        .collect();
    p.events.clear();
    for (i, (_, iss)) in (0..CONNECTIONS).zip(&opened) {
        p.ports = (PORT, 10_000 + i);
        p.iss = *iss;
        let last = p.segment(FIN | ACK, 1, 1, b"x", &TcpOptions::default());
        p.receive_without_events(&[last]);
    }
    p.flush();
    for (conn, _) in opened {
        let told = |event: Event| p.events.iter().filter(|e| **e == event).count();
        assert_eq!((told(Event::Readable { conn }), told(Event::PeerClosed { conn })), (1, 1), "{conn:?}");
    }
    assert_eq!(p.read.len(), usize::from(CONNECTIONS));
}

#[test]
fn both_families_are_served_by_one_listener() {
    let mut sim = Sim::pair(4);
    let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 80);
    sim.hosts[1].stack.listen(any, ListenOptions::default()).unwrap();
    // IPv6 addresses are looked for before they are used.
    sim.run(Duration::from_secs(3));
    for to in [IpAddr::V4(sim.hosts[1].v4), IpAddr::V6(sim.hosts[1].v6)] {
        let now = sim.now;
        let conn = sim.hosts[0].connect(now, SocketAddr::new(to, 80));
        sim.hosts[0].send_all(now, conn, vec![6; 1 << 20], true);
        sim.collect(0);
        sim.run(Duration::from_secs(5));
        let served = *sim.hosts[1].accepted.last().expect("accepted");
        assert_eq!(sim.hosts[1].received[&served].bytes.len(), 1 << 20, "{to}");
    }
    assert_eq!(sim.hosts[1].accepted.len(), 2);
}

#[test]
fn listeners_get_their_own_connections() {
    let mut p = ScriptedPeer::new(config());
    let ports = [80, 81, 8080, 65_535];
    let listeners: Vec<_> = ports
        .iter()
        .map(|port| p.stack.listen(SocketAddr::new(STACK.into(), *port), ListenOptions::default()).unwrap())
        .collect();
    for (port, listener) in ports.iter().zip(&listeners) {
        p.ports = (*port, 40_000);
        p.events.clear();
        p.deliver(SYN, 0, 0, &[]);
        p.deliver(ACK, 1, 1, &[]);
        assert!(p.events.contains(&Event::Incoming { listener: *listener }));
    }
}

#[test]
fn exact_address_precedes_wildcard() {
    let mut p = ScriptedPeer::new(config());
    let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    p.stack.listen(SocketAddr::new(any, PORT), ListenOptions::default()).unwrap();
    let exact = p.stack.listen(SocketAddr::new(STACK.into(), PORT), ListenOptions::default()).unwrap();
    p.deliver(SYN, 0, 0, &[]);
    p.deliver(ACK, 1, 1, &[]);
    assert!(p.events.contains(&Event::Incoming { listener: exact }));
}

#[test]
fn connect_needs_no_bind() {
    let mut p = ScriptedPeer::new(config());
    let conn = p.connect();
    let local = p.stack.info(conn).unwrap().local;
    assert_eq!(local.ip(), IpAddr::V4(STACK));
    assert!((32_768..=60_999).contains(&local.port()));
}

#[test]
fn idle_connection_survives_days() {
    let mut p = established(config());
    assert!(p.wait(Duration::from_secs(3 * 86_400)).is_empty());
    p.deliver(ACK, 1, 1, b"still there");
    assert_eq!(p.read, b"still there");
}

#[test]
fn the_receive_buffer_counts_bytes_not_packets() {
    let mut small = config();
    small.tcp.recv_buffer_bytes = 16_384;
    let mut p = established(small);
    p.defer_reads = true;
    for at in 1..=5000 {
        p.deliver(ACK, at, 1, b"a");
    }
    let info = p.stack.info(p.conn.unwrap()).unwrap();
    assert_eq!(info.recv_queued, 5000, "5,000 tiny segments fit into 16 KiB");
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
fn closing_window_loses_no_data_in_flight() {
    let lazy = HostConfig { defer_reads: true, ..HostConfig::default() };
    let mut sim =
        Sim::pair_with(3, HostConfig::default(), lazy, LinkModel { loss: 0.02, ..LinkModel::default() });
    sim.hosts[1].stack.network();
    sim.hosts[1].listen(80);
    let to = SocketAddr::new(sim.hosts[1].v4.into(), 80);
    let now = sim.now;
    let all: Vec<u8> = (0..12u32 << 20).map(|i| (i % 251) as u8).collect();
    let conn = sim.hosts[0].connect(now, to);
    sim.hosts[0].send_all(now, conn, all.clone(), true);
    sim.collect(0);
    for _ in 0..400 {
        sim.run(Duration::from_secs(1));
        let Some(served) = sim.hosts[1].accepted.first().copied() else { continue };
        for _ in 0..8 {
            sim.hosts[1].read(served, 1 << 16);
        }
        let now = sim.now;
        sim.hosts[1].stack.transmit(now);
        sim.collect(1);
    }
    let served = sim.hosts[1].accepted[0];
    assert!(sim.hosts[1].received[&served].bytes == all);
}

#[test]
fn sack_repairs_several_losses_per_round_trip() {
    let model = LinkModel { delay: Duration::from_millis(20), loss: 0.03, ..LinkModel::default() };
    let mut sim = Sim::pair_with(9, HostConfig::default(), HostConfig::default(), LinkModel::default());
    sim.hosts[1].listen(80);
    let to = SocketAddr::new(sim.hosts[1].v4.into(), 80);
    let now = sim.now;
    let conn = sim.hosts[0].connect(now, to);
    sim.collect(0);
    sim.run(Duration::from_millis(50));
    sim.set_link_from(0, &model);
    let now = sim.now;
    sim.hosts[0].send_all(now, conn, vec![3; 4 << 20], true);
    sim.collect(0);
    sim.run(Duration::from_secs(60));
    let stats = *sim.hosts[0].stack.tcp_stats();
    assert!(stats.fast_recoveries > 5);
    assert!(stats.timeouts <= 2, "time-outs: {}", stats.timeouts);
    assert_eq!(sim.hosts[1].received[&sim.hosts[1].accepted[0]].bytes.len(), 4 << 20);
}
