//! BBR's model of a path, its rate, its queue and its fairness.

use super::common::{Bottleneck, MSS, SECOND, capacity};
use core::time::Duration;
use ginnel_stack::options::{CaState, TcpOption};
use ginnel_stack::tcp::config::CongestionControl;
use ginnel_testkit::sim::LinkModel;

const RATE_BPS: u64 = 10_000_000;
const RTT: Duration = Duration::from_millis(40);

/// 10 Mbit/s and 40 ms, with room for 200 ms of data.
fn link() -> LinkModel {
    LinkModel { delay: RTT / 2, rate_bps: RATE_BPS, queue_bytes: 250_000, ..LinkModel::default() }
}

#[test]
fn model_converges_and_queue_stays_small() {
    let mut path = Bottleneck::new(CongestionControl::Bbr, &link());
    path.send_endlessly(0);
    path.sim.run(5 * SECOND);
    let goodput = path.goodput(0, 4 * SECOND) / capacity(RATE_BPS);
    let info = path.info(0);
    let model = info.bbr.unwrap();
    assert!((0.95..1.01).contains(&goodput), "{goodput}");
    let bandwidth = model.bandwidth as f64 / capacity(RATE_BPS);
    assert!((0.95..1.1).contains(&bandwidth), "{bandwidth}");
    assert!((40_000..43_000).contains(&model.min_rtt_us), "{}", model.min_rtt_us);
    assert!(info.rtt < RTT * 3 / 2, "{:?}", info.rtt);
    // The window is twice what the path holds, and more for packets that are being built.
    assert!((66..=90).contains(&info.snd_cwnd), "{}", info.snd_cwnd);

    let mut path = Bottleneck::new(CongestionControl::Cubic, &link());
    path.send_endlessly(0);
    path.sim.run(9 * SECOND);
    assert!(path.info(0).rtt > RTT * 2, "CUBIC fills the queue: {:?}", path.info(0).rtt);
}

#[test]
fn random_loss_does_not_reduce_the_rate() {
    let goodput = |kind| {
        let rate_bps = 2 * RATE_BPS;
        let model =
            LinkModel { delay: RTT, rate_bps, loss: 0.01, queue_bytes: 500_000, ..LinkModel::default() };
        let mut path = Bottleneck::new(kind, &model);
        path.send_endlessly(0);
        path.sim.run(4 * SECOND);
        path.goodput(0, 10 * SECOND) / capacity(rate_bps)
    };
    let (bbr, cubic) = (goodput(CongestionControl::Bbr), goodput(CongestionControl::Cubic));
    assert!(bbr >= 0.8, "{bbr}");
    assert!(cubic < 0.4, "{cubic}");
}

#[test]
fn round_trip_time_is_probed_every_ten_seconds() {
    let mut path = Bottleneck::new(CongestionControl::Bbr, &link());
    path.send_endlessly(0);
    let mut probes: Vec<Duration> = Vec::new();
    let start = path.sim.now;
    for _ in 0..3300 {
        path.sim.run(SECOND / 100);
        if path.info(0).snd_cwnd <= 4 {
            probes.push(path.sim.now - start);
        }
    }
    let begins: Vec<Duration> = probes
        .iter()
        .enumerate()
        .filter(|(i, at)| *i == 0 || **at - probes[*i - 1] > SECOND)
        .map(|(_, at)| *at)
        .collect();
    assert_eq!(begins.len(), 3, "{begins:?}");
    for (number, pair) in begins.windows(2).enumerate() {
        let apart = pair[1] - pair[0];
        assert!((10 * SECOND..11 * SECOND).contains(&apart), "{number}: {apart:?}");
    }
    // 200 ms, plus the round trips until only four segments are in flight and until ACKs show that.
    let each = probes.len() / begins.len();
    assert!((18..=45).contains(&each), "{each} times 10 ms");
    // The model is as before.
    let bandwidth = path.info(0).bbr.unwrap().bandwidth as f64 / capacity(RATE_BPS);
    assert!(bandwidth > 0.9, "{bandwidth}");
}

#[test]
fn two_flows_share_the_bottleneck() {
    let mut path = Bottleneck::new(CongestionControl::Bbr, &link());
    path.send_endlessly(0);
    path.sim.run(3 * SECOND);
    path.connect();
    path.send_endlessly(1);
    path.sim.run(25 * SECOND);
    let before = path.arrived(1);
    let first = path.goodput(0, 20 * SECOND) / capacity(RATE_BPS);
    let second = (path.arrived(1) - before) as f64 / 20.0 / capacity(RATE_BPS);
    assert!(first + second > 0.9, "{first} {second}");
    assert!(first > 0.3 && second > 0.3, "{first} {second}");
}

#[test]
fn application_that_sends_little_does_not_lower_the_model() {
    let mut path = Bottleneck::new(CongestionControl::Bbr, &link());
    path.send(0, 6 << 20);
    assert!(path.sim.run_until(20 * SECOND, |sim| sim.hosts[0].stack.queued(path.conns[0]) == 0));
    let before = path.info(0).bbr.unwrap().bandwidth;
    for _ in 0..160 {
        path.send(0, 4000);
        path.sim.run(SECOND / 20);
    }
    let info = path.info(0);
    assert!(info.bbr.unwrap().bandwidth >= before * 9 / 10, "{} {before}", info.bbr.unwrap().bandwidth);
    assert!(info.delivery_rate > 0);
}

#[test]
fn restart_from_idle_is_paced_at_the_bandwidth() {
    let mut path = Bottleneck::new(CongestionControl::Bbr, &link());
    path.send(0, 4 << 20);
    assert!(path.sim.run_until(20 * SECOND, |sim| sim.hosts[0].stack.queued(path.conns[0]) == 0));
    let model = path.info(0).bbr.unwrap();
    path.sim.run(5 * SECOND);
    assert_eq!(path.info(0).bbr.unwrap().bandwidth, model.bandwidth, "kept while idle");
    path.departures();
    path.send(0, 300_000);
    let start = path.sim.now;
    path.sim.run(RTT);
    // A window of 60 segments is open, but they leave at the bandwidth.
    let sent: u64 = path.departures().iter().filter(|d| d.at - start <= RTT / 2).map(|d| d.bytes).sum();
    let expected = model.bandwidth as f64 * 0.02;
    assert!((0.8 * expected..1.3 * expected + 3000.0).contains(&(sent as f64)), "{sent} {expected}");
}

#[test]
fn policed_path_is_used_without_heavy_loss() {
    // A queue for three segments behind a rate: what exceeds the rate is lost, as by a policer.
    let model = LinkModel { queue_bytes: 4600, ..link() };
    let mut path = Bottleneck::new(CongestionControl::Bbr, &model);
    path.send_endlessly(0);
    path.sim.run(6 * SECOND);
    let goodput = path.goodput(0, 6 * SECOND) / capacity(RATE_BPS);
    assert!(goodput > 0.7, "{goodput}");
    let stats = path.sim.hosts[0].stack.tcp_stats();
    assert!(stats.retransmitted * 5 < stats.segments_out, "{} {}", stats.retransmitted, stats.segments_out);
}

#[test]
fn time_out_is_survived_and_the_rate_found_again() {
    let mut path = Bottleneck::new(CongestionControl::Bbr, &link());
    path.send_endlessly(0);
    path.sim.run(4 * SECOND);
    path.sim.set_link_from(0, &LinkModel { loss: 1.0, ..link() });
    path.sim.run(SECOND);
    assert_eq!(path.info(0).ca_state, CaState::Loss);
    path.sim.set_link_from(0, &link());
    path.sim.run(4 * SECOND);
    let goodput = path.goodput(0, 4 * SECOND) / capacity(RATE_BPS);
    assert!(goodput > 0.9, "{goodput}");
}

#[test]
fn bandwidth_follows_the_path() {
    let mut path = Bottleneck::new(CongestionControl::Bbr, &link());
    path.send_endlessly(0);
    for rate_bps in [RATE_BPS, RATE_BPS / 4, RATE_BPS * 2] {
        path.sim.set_link_from(0, &LinkModel { rate_bps, ..link() });
        path.sim.run(6 * SECOND);
        let goodput = path.goodput(0, 3 * SECOND) / capacity(rate_bps);
        assert!(goodput > 0.85, "{rate_bps}: {goodput}");
        assert!(path.info(0).rtt < RTT * 3, "{:?}", path.info(0).rtt);
    }
}

#[test]
fn switching_algorithms_keeps_the_connection_going() {
    let mut path = Bottleneck::new(CongestionControl::Cubic, &link());
    assert_eq!(path.info(0).bbr, None);
    path.send_endlessly(0);
    for kind in [CongestionControl::Bbr, CongestionControl::NewReno, CongestionControl::Bbr] {
        path.sim.run(SECOND);
        path.set(TcpOption::Congestion(kind));
        assert_eq!(path.info(0).congestion, kind);
        path.sim.run(5 * SECOND);
        let goodput = path.goodput(0, 2 * SECOND) / capacity(RATE_BPS);
        assert!(goodput > 0.85, "{kind:?}: {goodput}");
    }
    assert!(path.info(0).bbr.unwrap().bandwidth > MSS);
}

#[test]
fn another_algorithm_reduces_the_window_in_recovery() {
    for kind in [CongestionControl::Cubic, CongestionControl::NewReno] {
        let mut path = Bottleneck::new(CongestionControl::Bbr, &LinkModel { loss: 0.02, ..link() });
        path.send_endlessly(0);
        let is_in = |path: &Bottleneck, state| path.info(0).ca_state == state;
        while !is_in(&path, CaState::Recovery) {
            path.sim.run(Duration::from_millis(1));
        }
        let info = path.info(0);
        assert_eq!(info.snd_ssthresh, u32::MAX, "the startup has no threshold");
        path.set(TcpOption::Congestion(kind));
        let threshold = path.info(0).snd_ssthresh;
        assert!((2..=200).contains(&threshold), "{threshold}");
        path.sim.set_link_from(0, &link());
        while !is_in(&path, CaState::Open) {
            path.sim.run(Duration::from_millis(1));
            assert!(path.info(0).snd_cwnd <= 400, "{}", path.info(0).snd_cwnd);
        }
        assert!(path.info(0).snd_cwnd <= threshold + 10, "{} {threshold}", path.info(0).snd_cwnd);
    }
}

#[test]
fn cubic_begins_anew_after_bbr() {
    let mut path = Bottleneck::new(CongestionControl::Cubic, &link());
    path.send_endlessly(0);
    path.sim.run(6 * SECOND);
    path.set(TcpOption::Congestion(CongestionControl::Bbr));
    path.sim.run(17 * SECOND);
    path.set(TcpOption::Congestion(CongestionControl::Cubic));
    let before = path.info(0);
    assert!(before.snd_cwnd > before.snd_ssthresh, "{} {}", before.snd_cwnd, before.snd_ssthresh);
    path.sim.run(6 * RTT);
    let grown = path.info(0).snd_cwnd;
    assert!(grown <= before.snd_cwnd + 10, "{} {grown}", before.snd_cwnd);
}

#[test]
fn messages_after_idle_time_are_no_samples_of_the_network() {
    let mut path = Bottleneck::new(CongestionControl::Bbr, &link());
    // The window is full after the last segment.
    path.send(0, 10 * MSS as usize);
    path.sim.run(SECOND);
    let first = path.info(0);
    assert!(first.delivery_rate_app_limited && first.delivery_rate > 200_000, "{}", first.delivery_rate);
    path.send(0, 100);
    path.sim.run(SECOND);
    let info = path.info(0);
    assert_eq!((info.delivery_rate_app_limited, info.delivery_rate), (true, first.delivery_rate));
    assert_eq!(info.bbr.unwrap().bandwidth, first.bbr.unwrap().bandwidth);
}

#[test]
fn startup_has_no_threshold_of_the_former_algorithm() {
    let mut path = Bottleneck::new(CongestionControl::Cubic, &LinkModel { loss: 0.01, ..link() });
    path.send_endlessly(0);
    path.sim.run(2 * SECOND);
    assert!(path.info(0).snd_ssthresh < 1000);
    path.set(TcpOption::Congestion(CongestionControl::Bbr));
    assert_eq!(path.info(0).snd_ssthresh, u32::MAX);
}
