//! `SO_MAX_PACING_RATE`: when segments leave.

use super::common::{Bottleneck, Departure, MSS, SECOND};
use core::time::Duration;
use ginnel_stack::options::TcpOption;
use ginnel_stack::tcp::config::CongestionControl;
use ginnel_testkit::sim::LinkModel;

const RTT: Duration = Duration::from_millis(40);
/// Tick of the timer wheel, to which departures are rounded.
const TICK: Duration = Duration::from_nanos(1 << 16);

fn fast_link() -> LinkModel {
    LinkModel { delay: RTT / 2, rate_bps: 1_000_000_000, ..LinkModel::default() }
}

fn paced(rate: u64) -> Bottleneck {
    let mut path = Bottleneck::new(CongestionControl::Cubic, &fast_link());
    path.set(TcpOption::MaxPacingRate(rate));
    path.send_endlessly(0);
    path
}

fn rate_of(departures: &[Departure]) -> f64 {
    let [first, .., last] = departures else { panic!("{departures:?}") };
    let bytes: u64 = departures[..departures.len() - 1].iter().map(|d| d.bytes).sum();
    bytes as f64 / (last.at - first.at).as_secs_f64()
}

#[test]
fn each_packet_leaves_after_the_time_of_the_previous_one() {
    let rate = 1_000_000;
    let mut path = paced(rate);
    path.sim.run(SECOND);
    path.departures();
    path.sim.run(2 * SECOND);
    let departures = path.departures();
    assert!(departures.len() > 600, "{}", departures.len());
    for pair in departures.windows(2) {
        // A packet has at least two segments, although a millisecond of data is less than one.
        assert_eq!(pair[0].bytes, 2 * MSS);
        let expected = Duration::from_nanos(pair[0].bytes * 1_000_000_000 / rate);
        let gap = pair[1].at - pair[0].at;
        assert!((expected - TICK..=expected + TICK).contains(&gap), "{gap:?}, not {expected:?}");
    }
}

#[test]
fn rate_is_kept_within_five_percent() {
    for rate in [20_000, 200_000, 1_000_000, 10_000_000] {
        let mut path = paced(rate);
        path.sim.run(2 * SECOND);
        path.departures();
        path.sim.run(3 * SECOND);
        let ratio = rate_of(&path.departures()) / rate as f64;
        assert!((0.95..1.05).contains(&ratio), "{rate}: {ratio}");
        let info = path.info(0);
        assert_eq!((info.pacing_rate, info.max_pacing_rate), (rate, rate));
        assert!(path.sim.hosts[0].stack.tcp_stats().pacing_waits > 10);
        // If nothing is in flight between two packets, the network delivers a packet in a round trip.
        let delivered = info.delivery_rate as f64 / (rate.max(72_400)) as f64;
        assert!((0.9..1.1).contains(&delivered), "{rate}: {delivered}");
    }
}

#[test]
fn change_applies_while_sending() {
    let mut path = paced(1_000_000);
    for rate in [1_000_000, 3_000_000, 400_000, 2_000_000] {
        path.set(TcpOption::MaxPacingRate(rate));
        path.sim.run(SECOND / 10);
        path.departures();
        path.sim.run(SECOND);
        let ratio = rate_of(&path.departures()) / rate as f64;
        assert!((0.95..1.05).contains(&ratio), "{rate}: {ratio}");
    }
    // Without a limit the window decides about the rate.
    path.set(TcpOption::MaxPacingRate(u64::MAX));
    path.sim.run(3 * SECOND);
    path.departures();
    path.sim.run(SECOND / 2);
    assert!(rate_of(&path.departures()) > 5_000_000.0);
    assert!(path.info(0).pacing_rate > 5_000_000);
}

#[test]
fn zero_rate_and_no_rate_do_not_pace() {
    let mut counts = Vec::new();
    for rate in [0, u64::MAX] {
        let mut path = paced(rate);
        assert_eq!(path.info(0).max_pacing_rate, rate);
        path.sim.run(SECOND);
        counts.push(path.arrived(0));
        assert_eq!(path.sim.hosts[0].stack.tcp_stats().pacing_waits, 0);
    }
    assert!(counts[0] > 10_000_000 && counts[1] > 10_000_000, "{counts:?}");
}

#[test]
fn first_ten_segments_leave_at_once() {
    let mut path = paced(100_000);
    let departures = path.departures();
    assert_eq!(departures.iter().map(|d| d.bytes).sum::<u64>(), 10 * MSS);
    assert_eq!(departures.len(), 1);
}

#[test]
fn retransmissions_are_paced_and_fin_arrives() {
    let rate = 500_000;
    let mut path = Bottleneck::new(CongestionControl::Cubic, &LinkModel { loss: 0.05, ..fast_link() });
    path.set(TcpOption::MaxPacingRate(rate));
    let (now, conn) = (path.sim.now, path.conns[0]);
    path.sim.hosts[0].send_all(now, conn, vec![7; 1 << 20], true);
    path.sim.collect(0);
    assert!(path.sim.run_until(60 * SECOND, |sim| {
        let host = &sim.hosts[1];
        host.received[&host.accepted[0]].peer_closed
    }));
    assert_eq!(path.arrived(0), 1 << 20);
    let departures = path.departures();
    for window in departures.windows(8).skip(2) {
        let ratio = rate_of(window) / rate as f64;
        // A tail loss probe leaves at its own time.
        assert!(ratio < 1.3, "{ratio} {window:?}");
    }
}

#[test]
fn idle_paced_connection_wakes_nobody() {
    let mut path = Bottleneck::new(CongestionControl::Bbr, &fast_link());
    path.send(0, 4 << 20);
    path.sim.run(SECOND / 4);
    assert!(path.memory() > 100_000);
    path.sim.run(5 * SECOND);
    assert!(path.memory() < 4096, "{}", path.memory());
    let mut steps = 0;
    let until = path.sim.now + 600 * SECOND;
    while path.sim.step(until) {
        steps += 1;
    }
    assert!(steps < 40, "{steps} turns in ten minutes");
}

#[test]
fn retransmission_after_time_out_does_not_wait() {
    let mut path = paced(20_000);
    path.sim.run(3 * SECOND);
    path.sim.set_link_from(0, &LinkModel { loss: 1.0, ..fast_link() });
    let retransmitted = path.sim.hosts[0].stack.tcp_stats().retransmitted;
    // Packets leave each 145 ms, until the time-out of the first lost one.
    assert!(path.sim.run_until(SECOND, |sim| sim.hosts[0].stack.tcp_stats().timeouts == 1));
    path.sim.run(2 * TICK);
    assert_eq!(path.sim.hosts[0].stack.tcp_stats().retransmitted, retransmitted + 1);
}

#[test]
fn time_out_is_not_due_before_the_departure() {
    // A near peer gets 45 segments in a packet, which takes seconds.
    let near = LinkModel { delay: Duration::from_micros(100), ..fast_link() };
    let mut path = Bottleneck::new(CongestionControl::Cubic, &near);
    path.send(0, 2 << 20);
    path.sim.run(SECOND / 10);
    assert!(path.info(0).snd_cwnd > 45);
    path.set(TcpOption::MaxPacingRate(20_000));
    path.set(TcpOption::UserTimeout(2 * SECOND));
    path.sim.set_link_from(0, &LinkModel { loss: 1.0, ..near.clone() });
    path.departures();
    path.send(0, 100_000);
    path.sim.run(SECOND / 10);
    let sent: u64 = path.departures().iter().map(|d| d.bytes).sum();
    assert!((45 * MSS..46 * MSS).contains(&sent), "{sent}");
    path.sim.set_link_from(0, &near);
    assert!(path.sim.run_until(30 * SECOND, |sim| sim.hosts[0].stack.queued(path.conns[0]) == 0));
    assert_eq!(path.arrived(0), (2 << 20) + 100_000);
    let stats = path.sim.hosts[0].stack.tcp_stats();
    assert!(stats.timeouts <= 1 && stats.retransmitted >= 45, "{} {}", stats.timeouts, stats.retransmitted);
}

#[test]
fn samples_that_begin_in_flight_measure_the_flight() {
    // The clock of the simulation is far from zero.
    for option in [TcpOption::MaxPacingRate(1_000_000), TcpOption::Congestion(CongestionControl::Bbr)] {
        let mut path = Bottleneck::new(CongestionControl::Cubic, &fast_link());
        path.send_endlessly(0);
        path.sim.run(SECOND / 2);
        path.set(option);
        let mut rates = Vec::new();
        for _ in 0..12 {
            path.sim.run(RTT / 4);
            let info = path.info(0);
            rates.extend([info.delivery_rate, info.bbr.map_or(0, |bbr| bbr.bandwidth)]);
        }
        rates.retain(|rate| *rate > 0);
        assert!(rates.len() > 4 && rates.iter().all(|rate| *rate > 100_000), "{option:?}: {rates:?}");
    }
}

#[test]
fn wait_for_a_departure_is_counted_once() {
    let mut path = Bottleneck::new(CongestionControl::Cubic, &fast_link());
    path.set(TcpOption::MaxPacingRate(20_000));
    path.set(TcpOption::NoDelay(true));
    path.send(0, 20_000);
    path.sim.run(SECOND);
    path.departures();
    let waits = path.sim.hosts[0].stack.tcp_stats().pacing_waits;
    for _ in 0..100 {
        path.send(0, 400);
        path.sim.run(SECOND / 100);
    }
    let waits = path.sim.hosts[0].stack.tcp_stats().pacing_waits - waits;
    let departures = path.departures().len() as u64;
    assert!(waits > 0 && waits <= departures + 1, "{waits} waits, {departures} departures");
}

#[test]
fn later_response_has_no_unpaced_segments() {
    let mut path = Bottleneck::new(CongestionControl::Cubic, &fast_link());
    path.send(0, 3000);
    path.sim.run(2 * RTT);
    path.set(TcpOption::MaxPacingRate(100_000));
    path.departures();
    path.send(0, 50_000);
    assert_eq!(path.departures().iter().map(|d| d.bytes).sum::<u64>(), 2 * MSS);
}
