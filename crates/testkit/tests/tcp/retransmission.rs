//! Acknowledgements, retransmissions and round-trip times.

use super::common::{ACK, SYN, ack_of, config, established};
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_stack::events::{CloseReason, Event};
use ginnel_stack::options::TcpOption;
use ginnel_stack::wire::tcp::{SeqNumber, TcpOptions};
use ginnel_testkit::scripted_peer::ScriptedPeer;
use ginnel_testkit::sim::{HostConfig, LinkModel, Sim};

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
fn smaller_mss_applies_to_retransmissions() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.stack.send(conn, &[1; 900]).unwrap();
    p.flush();
    p.stack.set_option(conn, TcpOption::MaxSegment(200)).unwrap();
    let retransmitted = p.wait(Duration::from_secs(4));
    assert!(!retransmitted.is_empty());
    assert!(retransmitted.iter().all(|s| s.payload.len() <= 200), "{:?}", retransmitted[0].payload.len());
}

#[test]
fn segment_sacked_in_two_steps_counts_as_sacked() {
    let mut p = ScriptedPeer::new(config());
    p.listen();
    let conn = p.open(&TcpOptions { mss: Some(1000), sack_permitted: true, ..TcpOptions::default() });
    p.stack.send(conn, &[1; 4000]).unwrap();
    assert_eq!(p.flush().len(), 4);
    for end in [2500, 3001] {
        let mut options = TcpOptions::default();
        let seq = |n: u32| SeqNumber(p.iss.wrapping_add(n));
        options.sack_blocks.push((seq(1001), seq(end)));
        let sack = p.segment(ACK, 1, 1, &[], &options);
        p.deliver_frame(&sack);
    }
    assert_eq!(p.stack.info(conn).unwrap().sacked, 2);
}

#[test]
fn undone_time_out_is_counted() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    p.stack.send(conn, &[1; 4000]).unwrap();
    p.flush();
    while p.wait(Duration::from_millis(10)).is_empty() {}
    p.stack.send(conn, &[1; 2000]).unwrap();
    // Only the first segment was retransmitted, so the second acknowledgement is one of an original (F-RTO).
    for end in [1001, 2001] {
        p.deliver(ACK, 1, end, &[]);
    }
    let stats = p.stack.tcp_stats();
    assert_eq!((stats.timeouts, stats.undos), (1, 1));
}

#[test]
fn undone_fast_recovery_is_counted() {
    let mut p = ScriptedPeer::new(config());
    p.listen();
    let conn = p.open(&TcpOptions { mss: Some(1000), sack_permitted: true, ..TcpOptions::default() });
    p.stack.send(conn, &[1; 4000]).unwrap();
    p.flush();
    let seq = |p: &ScriptedPeer, n: u32| SeqNumber(p.iss.wrapping_add(n));
    // The last acknowledgement reports that the first segment arrived twice.
    for (ack, block) in [(1, Some((1001, 4001))), (4001, None), (4001, Some((1, 1001)))] {
        p.wait(Duration::from_millis(1));
        let mut options = TcpOptions::default();
        if let Some((start, end)) = block {
            options.sack_blocks.push((seq(&p, start), seq(&p, end)));
        }
        let segment = p.segment(ACK, 1, ack, &[], &options);
        p.deliver_frame(&segment);
        // Data in flight keep the state of the recovery.
        p.stack.send(conn, &[1; 1000]).unwrap();
        p.flush();
    }
    let stats = p.stack.tcp_stats();
    assert_eq!((stats.fast_recoveries, stats.undos), (1, 1));
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
            assert!(p.wait(Duration::from_millis(rtt_ms)).is_empty(), "{rtt_ms} ms: retransmitted too early");
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
fn retransmission_gives_no_rtt_sample_without_timestamps() {
    let mut p = established(config());
    let conn = p.conn.unwrap();
    let before = p.stack.info(conn).unwrap().rtt;
    p.stack.send(conn, b"x").unwrap();
    p.flush();
    assert!(!p.wait(Duration::from_secs(3)).is_empty(), "the segment was retransmitted");
    p.deliver(ACK, 1, 2, &[]);
    assert_eq!(p.stack.info(conn).unwrap().rtt, before);
    p.stack.send(conn, b"y").unwrap();
    p.flush();
    p.wait(Duration::from_millis(50));
    p.deliver(ACK, 1, 3, &[]);
    assert!(p.stack.info(conn).unwrap().rtt > before, "a segment that was sent once gives a sample");
}

#[test]
fn retransmitted_syn_ack_gives_no_rtt_sample() {
    let mut p = ScriptedPeer::new(config());
    p.listen();
    p.deliver(SYN, 0, 0, &[]);
    p.wait(Duration::from_millis(900));
    p.deliver(SYN, 0, 0, &[]);
    p.wait(Duration::from_millis(1));
    p.deliver(ACK, 1, 1, &[]);
    let info = p.stack.info(p.conn.unwrap()).unwrap();
    assert_eq!(info.rtt, Duration::ZERO, "the ACK may answer either SYN+ACK (Karn's algorithm)");
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
