//! Whole connections of two stacks over a simulated link, with and without faults.

use core::net::SocketAddr;
use core::time::Duration;
use ginnel_devices::random::Random;
use ginnel_stack::events::CloseReason;
use ginnel_stack::options::TcpOption;
use ginnel_stack::tcp::state::State;
use ginnel_testkit::checks::{
    acks_never_decrease, arp, from, icmp, ipv6, port, tcp, well_formed, within_mtu,
};
use ginnel_testkit::sim::{HostConfig, LinkModel, Sim, seeds};

const MINUTE: Duration = Duration::from_secs(60);

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Random::new(seed);
    (0..len.div_ceil(8)).flat_map(|_| rng.next_u64().to_le_bytes()).take(len).collect()
}

fn server(sim: &Sim, v6: bool) -> SocketAddr {
    let host = &sim.hosts[1];
    if v6 { SocketAddr::new(host.v6.into(), 80) } else { SocketAddr::new(host.v4.into(), 80) }
}

#[test]
fn a_connection_opens_carries_both_ways_and_closes() {
    let mut sim = Sim::pair(1);
    sim.hosts[1].listen(80);
    let to = server(&sim, false);
    let now = sim.now;
    let client = sim.hosts[0].connect(now, to);
    sim.collect(0);
    assert!(sim.run_until(MINUTE, |s| !s.hosts[1].accepted.is_empty()), "{}", sim.replay());
    let served = sim.hosts[1].accepted[0];
    let now = sim.now;
    sim.hosts[0].send_all(now, client, bytes(1, 100_000), true);
    sim.hosts[1].send_all(now, served, bytes(2, 50_000), true);
    sim.run(Duration::from_secs(10));
    assert_eq!(sim.hosts[1].received[&served].bytes, bytes(1, 100_000));
    assert_eq!(sim.hosts[0].received[&client].bytes, bytes(2, 50_000));
    assert_eq!(sim.hosts[0].received[&client].closed, Some(CloseReason::Normal));
    assert_eq!(sim.hosts[1].received[&served].closed, Some(CloseReason::Normal));
    sim.run(Duration::from_secs(70));
    for host in &sim.hosts {
        let usage = host.stack.usage();
        assert_eq!(
            (usage.connections, usage.time_wait, usage.active, usage.chunks, usage.timers),
            (0, 0, 0, 0, 0)
        );
    }
}

fn transfer(seed: u64, model: LinkModel, len: usize, limit: Duration) -> Sim {
    let mut sim = Sim::pair_with(seed, HostConfig::default(), HostConfig::default(), LinkModel::default());
    // Resolve the neighbour first: three lost ARP requests would end the test before TCP has begun.
    let to = server(&sim, false);
    let now = sim.now;
    sim.hosts[0].connect(now, to);
    sim.collect(0);
    sim.run(Duration::from_millis(10));
    sim.set_link(&model);
    sim.hosts[1].listen(80);
    sim.hosts[1].close_on_peer_close = true;
    for host in 0..2 {
        let own = from(sim.hosts[host].v4) & tcp() & port(80) & acks_never_decrease();
        sim.check_sent(host, well_formed() & within_mtu(1500) & (own | arp() | ipv6() & icmp()));
    }
    let to = server(&sim, false);
    let now = sim.now;
    let client = sim.hosts[0].connect(now, to);
    sim.hosts[0].send_all(now, client, bytes(seed, len), true);
    sim.collect(0);
    let done = sim.run_until(limit, |s| s.hosts[0].received[&client].closed.is_some());
    assert!(done, "not done in {limit:?}: client {:?}, {}", sim.hosts[0].stack.info(client), sim.replay());
    assert_eq!(sim.hosts[0].received[&client].closed, Some(CloseReason::Normal), "{}", sim.replay());
    let served = sim.hosts[1].accepted[0];
    assert!(sim.hosts[1].received[&served].bytes == bytes(seed, len), "bytes differ: {}", sim.replay());
    sim
}

#[test]
fn bytes_are_exact_under_loss() {
    for seed in seeds(10) {
        for loss in [0.0, 0.01, 0.05, 0.2] {
            transfer(seed, LinkModel { loss, ..LinkModel::default() }, 1 << 20, 20 * MINUTE);
        }
    }
}

#[test]
fn bytes_are_exact_under_all_faults_at_once() {
    for seed in seeds(20) {
        let model = LinkModel {
            loss: 0.02,
            duplicate: 0.02,
            reorder: 0.05,
            corrupt: 0.01,
            jitter: Duration::from_millis(1),
            ..LinkModel::default()
        };
        transfer(seed, model, 1 << 19, 20 * MINUTE);
    }
}

#[test]
fn clean_gigabit_link_is_filled() {
    let model = LinkModel {
        rate_bps: 1_000_000_000,
        queue_bytes: 1 << 20,
        delay: Duration::from_millis(5),
        ..LinkModel::default()
    };
    let start = Sim::pair(1).now;
    let sim = transfer(1, model, 64 << 20, MINUTE);
    let took = sim.now - start;
    assert!(took < Duration::from_millis(800), "64 MiB at 1 Gbit/s took {took:?}");
}

#[test]
fn ipv6_transfer_is_exact() {
    let mut sim = Sim::pair(3);
    let addr = SocketAddr::new(core::net::Ipv6Addr::UNSPECIFIED.into(), 80);
    sim.hosts[1].stack.listen(addr, Default::default()).unwrap();
    sim.run(Duration::from_secs(3));
    let to = server(&sim, true);
    let now = sim.now;
    let client = sim.hosts[0].connect(now, to);
    sim.hosts[0].send_all(now, client, bytes(3, 300_000), true);
    sim.collect(0);
    sim.run(Duration::from_secs(5));
    let served = sim.hosts[1].accepted[0];
    assert!(sim.hosts[1].received[&served].bytes == bytes(3, 300_000));
}

#[test]
fn window_closes_and_reopens_with_the_reader() {
    let deferred = HostConfig { defer_reads: true, ..HostConfig::default() };
    let mut sim = Sim::pair_with(4, HostConfig::default(), deferred, LinkModel::default());
    sim.hosts[1].listen(80);
    let to = server(&sim, false);
    let now = sim.now;
    let client = sim.hosts[0].connect(now, to);
    let all = bytes(4, 20 << 20);
    sim.hosts[0].send_all(now, client, all.clone(), true);
    sim.collect(0);
    sim.run(5 * MINUTE);
    let served = sim.hosts[1].accepted[0];
    let readable = sim.hosts[1].stack.readable(served);
    assert!(readable < 7 << 20, "the window bounds what is held: {readable}");
    assert_eq!(sim.hosts[0].stack.state(client), Some(State::Established));
    assert!(sim.hosts[0].stack.tcp_stats().window_probes > 3);
    for _ in 0..4000 {
        while sim.hosts[1].read(served, 1 << 16) > 0 {}
        let now = sim.now;
        sim.hosts[1].stack.transmit(now);
        sim.collect(1);
        sim.run(Duration::from_millis(5));
        if sim.hosts[1].received[&served].bytes.len() == all.len() {
            break;
        }
    }
    assert!(sim.hosts[1].received[&served].bytes == all);
}

#[test]
fn connecting_to_a_closed_port_is_refused() {
    let mut sim = Sim::pair(5);
    let to = server(&sim, false);
    let now = sim.now;
    let client = sim.hosts[0].connect(now, to);
    sim.collect(0);
    sim.run(Duration::from_secs(1));
    assert_eq!(sim.hosts[0].received[&client].closed, Some(CloseReason::Refused));
}

#[test]
fn connect_times_out_after_six_retries() {
    let mut sim = Sim::pair(6);
    let to = server(&sim, false);
    // Resolve the neighbour first, so that ARP does not fail.
    let now = sim.now;
    sim.hosts[0].connect(now, to);
    sim.collect(0);
    sim.run(Duration::from_secs(1));
    sim.set_link_from(0, &LinkModel { loss: 1.0, ..LinkModel::default() });
    let start = sim.now;
    let client = sim.hosts[0].connect(start, to);
    sim.collect(0);
    assert!(sim.run_until(10 * MINUTE, |s| s.hosts[0].received[&client].closed.is_some()));
    assert_eq!(sim.hosts[0].received[&client].closed, Some(CloseReason::TimedOut));
    let took = (sim.now - start).as_secs();
    assert!((126..=128).contains(&took), "1+2+4+8+16+32+64 s: {took}");
}

/// Without timestamps only F-RTO detects that the path became slower and nothing was lost (RFC 5682).
#[test]
fn frto_limits_spurious_retransmissions() {
    let retransmitted = |frto: bool| {
        let mut config = HostConfig::default();
        config.stack.tcp.timestamps = false;
        config.stack.tcp.frto = frto;
        let model =
            LinkModel { delay: Duration::from_millis(10), rate_bps: 20_000_000, ..LinkModel::default() };
        let mut sim = Sim::pair_with(1, config.clone(), config, model.clone());
        sim.hosts[1].listen(80);
        let (now, to) = (sim.now, server(&sim, false));
        let client = sim.hosts[0].connect(now, to);
        let all = bytes(1, 4 << 20);
        sim.hosts[0].send_all(now, client, all.clone(), true);
        sim.collect(0);
        sim.run(Duration::from_millis(500));
        sim.set_link(&LinkModel { delay: Duration::from_millis(800), ..model });
        sim.run(2 * MINUTE);
        let served = sim.hosts[1].accepted[0];
        assert!(sim.hosts[1].received[&served].bytes == all, "frto {frto}");
        let stats = sim.hosts[0].stack.tcp_stats();
        assert!(stats.timeouts > 0, "the time-out was spurious");
        stats.retransmitted
    };
    let (with, without) = (retransmitted(true), retransmitted(false));
    assert!(with <= 5 && without > 10 * with, "{with} with F-RTO, {without} without");
}

/// A sender that may queue less than a segment waits for an acknowledgement each time. The reader must send
/// it when it has read, not after a delay: as on Linux, each buffer takes one round trip.
#[test]
fn small_buffers_are_acknowledged_without_delay() {
    const LEN: usize = 1 << 18;
    let delay = Duration::from_micros(50);
    for (send, receive) in [(4608, None), (8192, None), (8192, Some(4096)), (4608, Some(2048)), (8960, None)]
    {
        let host = HostConfig { mtu: 9000, ..HostConfig::default() };
        let model = LinkModel { delay, ..LinkModel::default() };
        let mut sim = Sim::pair_with(1, host.clone(), host, model);
        sim.hosts[1].listen(80);
        let to = server(&sim, false);
        let now = sim.now;
        let client = sim.hosts[0].connect(now, to);
        sim.collect(0);
        assert!(sim.run_until(MINUTE, |s| !s.hosts[1].accepted.is_empty()));
        let served = sim.hosts[1].accepted[0];
        sim.hosts[0].stack.set_option(client, TcpOption::SendBuffer(send)).unwrap();
        if let Some(receive) = receive {
            sim.hosts[1].stack.set_option(served, TcpOption::RecvBuffer(receive)).unwrap();
        }
        let now = sim.now;
        sim.hosts[0].send_all(now, client, bytes(1, LEN), true);
        sim.collect(0);
        let done = sim.run_until(MINUTE, |s| s.hosts[1].received[&served].bytes.len() == LEN);
        let took = sim.now - now;
        let rounds = LEN.div_ceil(receive.unwrap_or(send).min(send) as usize) as u32;
        // A sender waits once, for a time-out, when the window becomes smaller, because it might open again
        // (RFC 1122 §4.2.3.4).
        let patience = receive.map_or(Duration::ZERO, |_| Duration::from_millis(250));
        let time_max = 2 * rounds * 2 * delay + patience;
        assert!(done && took < time_max, "{send}, {receive:?}: {took:?} for {rounds} rounds");
    }
}
