//! Windows that close.

use super::common::{ACK, config, established};
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_stack::tcp::state::State;
use ginnel_stack::wire::tcp::TcpOptions;
use ginnel_testkit::sim::{HostConfig, LinkModel, Sim};

#[test]
fn closed_window_is_probed_without_data_loss() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    let options = TcpOptions::default();
    let mut zero = p.segment(ACK, 1, 1, &[], &options);
    // Patches the window field to 0 and adjusts the checksum.
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
    assert!(p.flush().is_empty(), "no data is sent into a closed window");
    let probes = p.wait(Duration::from_secs(20));
    assert!(probes.len() >= 4, "probes: {}", probes.len());
    assert!(probes.iter().all(|s| s.payload.is_empty()));
    let sent = p.deliver(ACK, 1, 1, &[]);
    let bytes: usize = sent.iter().map(|s| s.payload.len()).sum();
    assert_eq!(bytes, 3000);
}

#[test]
fn closing_window_loses_no_data_in_flight() {
    let deferred = HostConfig { defer_reads: true, ..HostConfig::default() };
    let mut sim =
        Sim::pair_with(3, HostConfig::default(), deferred, LinkModel { loss: 0.02, ..LinkModel::default() });
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
fn answering_peer_with_zero_window_is_kept() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.stack.send(conn, &[1; 500]).unwrap();
    p.flush();
    for _ in 0..1800 {
        if !p.wait(Duration::from_secs(1)).is_empty() {
            let answer = p.custom_segment(ACK, 1, 1, 0, 0, &[]);
            p.deliver_frame(&answer);
        }
    }
    assert_eq!(p.stack.state(conn), Some(State::Established), "{:?}", p.events);
}

#[test]
fn orphan_at_zero_window_times_out() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    let shut = p.custom_segment(ACK, 1, 1, 0, 0, &[]);
    p.deliver_frame(&shut);
    p.stack.send(conn, &[1; 500]).unwrap();
    p.stack.close(conn).unwrap();
    p.flush();
    for _ in 0..7200 {
        if !p.wait(Duration::from_secs(1)).is_empty() {
            let answer = p.custom_segment(ACK, 1, 1, 0, 0, &[]);
            p.deliver_frame(&answer);
        }
    }
    assert_eq!(p.stack.usage().connections, 0);
}
