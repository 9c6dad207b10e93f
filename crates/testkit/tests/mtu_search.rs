//! Paths that drop large packets silently: probing finds the path MTU (RFC 4821).

use core::net::SocketAddr;
use core::time::Duration;
use ginnel_devices::random::Random;
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::Conn;
use ginnel_stack::tcp::TcpStats;
use ginnel_stack::tcp::config::MtuProbing;
use ginnel_testkit::sim::{HostConfig, LinkModel, Sim, seeds};

const CLIENT: usize = 0;
const SERVER: usize = 1;
const SECOND: Duration = Duration::from_secs(1);

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Random::new(seed);
    (0..len.div_ceil(8)).flat_map(|_| rng.next_u64().to_le_bytes()).take(len).collect()
}

/// A client with this probing mode, connected to a server behind a link.
struct MtuPath {
    sim: Sim,
    client: Conn,
}

impl MtuPath {
    fn new(seed: u64, mode: MtuProbing, model: &LinkModel, settings: impl Fn(&mut HostConfig)) -> Self {
        let mut host = HostConfig::default();
        host.stack.tcp.mtu_probing = mode;
        settings(&mut host);
        let mut sim = Sim::pair_with(seed, host, HostConfig::default(), LinkModel::default());
        sim.hosts[SERVER].listen(80);
        let to = SocketAddr::new(sim.hosts[SERVER].v4.into(), 80);
        let client = sim.hosts[CLIENT].connect(sim.now, to);
        sim.collect(CLIENT);
        assert!(sim.run_until(SECOND, |s| !s.hosts[SERVER].accepted.is_empty()), "{}", sim.replay());
        sim.set_link_from(CLIENT, model);
        Self { sim, client }
    }

    /// Sends data. Returns whether they arrived within the time.
    fn delivers(&mut self, data: Vec<u8>, limit: Duration) -> bool {
        let (now, client, served) = (self.sim.now, self.client, self.sim.hosts[SERVER].accepted[0]);
        let received = |sim: &Sim| sim.hosts[SERVER].received.get(&served).map_or(0, |r| r.bytes.len());
        let start = received(&self.sim);
        self.sim.hosts[CLIENT].send_all(now, client, data.clone(), false);
        self.sim.collect(CLIENT);
        let whole = start + data.len();
        let arrived = self.sim.run_until(limit, |sim| received(sim) == whole);
        assert!(
            !arrived || self.sim.hosts[SERVER].received[&served].bytes[start..] == data[..],
            "bytes differ: {}",
            self.sim.replay()
        );
        arrived
    }

    fn pmtu(&self) -> u32 {
        self.sim.hosts[CLIENT].stack.info(self.client).unwrap().pmtu
    }

    fn stats(&self) -> TcpStats {
        *self.sim.hosts[CLIENT].stack.tcp_stats()
    }
}

fn narrow(mtu: usize) -> LinkModel {
    LinkModel { mtu, delay: Duration::from_millis(10), ..LinkModel::default() }
}

#[test]
fn black_hole_transfer_completes_only_with_probing() {
    let data = bytes(1, 4 << 20);
    let mut path = MtuPath::new(1, MtuProbing::Off, &narrow(1300), |_| {});
    assert!(!path.delivers(data.clone(), 2000 * SECOND));
    assert_eq!(path.sim.hosts[CLIENT].received[&path.client].closed, Some(CloseReason::TimedOut));

    let mut path = MtuPath::new(1, MtuProbing::BlackHole, &narrow(1300), |_| {});
    assert!(path.delivers(data, 60 * SECOND), "{}", path.sim.replay());
    let stats = path.stats();
    assert_eq!(stats.mtu_black_holes, 1, "the base is small enough");
    assert!(stats.mtu_probes_lost > 0 && stats.mtu_probes_acknowledged > 0, "{stats:?}");
    assert!((1293..=1300).contains(&path.pmtu()), "{}", path.pmtu());
}

#[test]
fn segments_are_halved_until_they_get_through() {
    let mut path = MtuPath::new(2, MtuProbing::BlackHole, &narrow(600), |_| {});
    assert!(path.delivers(bytes(2, 1 << 20), 120 * SECOND), "{}", path.sim.replay());
    assert_eq!(path.stats().mtu_black_holes, 2);
    assert!((593..=600).contains(&path.pmtu()), "{}", path.pmtu());
}

#[test]
fn mtu_probing_always_causes_no_time_outs() {
    for mtu in [1076, 1100, 1280, 1301, 1400, 1499, 1500] {
        let mut path = MtuPath::new(3, MtuProbing::Always, &narrow(mtu), |_| {});
        assert!(path.delivers(bytes(3, 4 << 20), 10 * SECOND), "{mtu}: {}", path.sim.replay());
        let (stats, found) = (path.stats(), path.pmtu() as usize);
        assert!(found <= mtu && found + 8 > mtu, "{found} of {mtu}");
        assert_eq!((stats.timeouts, stats.mtu_black_holes, stats.fast_recoveries), (0, 0, 0), "{mtu}");
        let lost = path.sim.link_stats(CLIENT).oversized;
        assert_eq!(stats.mtu_probes_lost, lost, "{mtu}");
        assert!(stats.mtu_probes <= 10, "a binary search: {stats:?}");
        let info = path.sim.hosts[CLIENT].stack.info(path.client).unwrap();
        assert_eq!(info.snd_ssthresh, u32::MAX, "no loss was taken for congestion");
    }
}

#[test]
fn found_path_mtu_survives_idleness_and_is_reprobed() {
    let mut path = MtuPath::new(4, MtuProbing::BlackHole, &narrow(1300), |_| {});
    assert!(path.delivers(bytes(4, 4 << 20), 60 * SECOND));
    let (before, found) = (path.stats(), path.pmtu());
    for _ in 0..5 {
        path.sim.run(30 * SECOND);
        assert_eq!(path.sim.hosts[CLIENT].stack.usage().active, 0, "timers other than the connection's");
        assert!(path.delivers(bytes(5, 1 << 20), 5 * SECOND));
    }
    let after = path.stats();
    assert_eq!((after.timeouts, after.mtu_probes, path.pmtu()), (before.timeouts, before.mtu_probes, found));

    path.sim.set_link_from(CLIENT, &narrow(1500));
    path.sim.run(1300 * SECOND);
    assert!(path.delivers(bytes(6, 4 << 20), 10 * SECOND));
    assert!(path.pmtu() > 1492, "{}", path.pmtu());
    assert_eq!(path.stats().timeouts, before.timeouts);
}

/// Failed probe sizes are forgotten with the active state of a connection; this must not cost a probe in each
/// burst.
#[test]
fn short_bursts_do_not_repeat_failed_mtu_probe() {
    let mut path = MtuPath::new(6, MtuProbing::Always, &narrow(1300), |_| {});
    for burst in 0..60 {
        assert!(path.delivers(bytes(burst, 30_000), 10 * SECOND), "{}", path.sim.replay());
        path.sim.run(2 * SECOND);
    }
    let stats = path.stats();
    assert!((1..=4).contains(&stats.mtu_probes_lost), "in two minutes: {stats:?}");
    assert!((1024..=1300).contains(&path.pmtu()), "{}", path.pmtu());
}

#[test]
fn active_connection_reprobes_after_an_interval() {
    let settings = |host: &mut HostConfig| host.stack.tcp.mtu_probe_interval_seconds = 1;
    let slow = |mtu| LinkModel { rate_bps: 50_000_000, queue_bytes: 1 << 20, ..narrow(mtu) };
    let mut path = MtuPath::new(7, MtuProbing::Always, &slow(1200), settings);
    assert!(path.delivers(bytes(7, 2 << 20), 10 * SECOND));
    assert!((1193..=1200).contains(&path.pmtu()), "{}", path.pmtu());
    path.sim.set_link_from(CLIENT, &slow(1500));
    assert!(path.delivers(bytes(8, 24 << 20), 10 * SECOND));
    assert!(path.pmtu() > 1492, "{}", path.pmtu());
}

#[test]
fn mtu_probing_keeps_bytes_exact_under_faults() {
    for seed in seeds(20) {
        for mode in [MtuProbing::BlackHole, MtuProbing::Always] {
            let model = LinkModel {
                loss: 0.02,
                duplicate: 0.02,
                reorder: 0.05,
                corrupt: 0.01,
                jitter: Duration::from_millis(1),
                ..narrow(1100 + (seed % 7) as usize * 60)
            };
            let mut path = MtuPath::new(seed, mode, &model, |host| {
                host.stack.tcp.mtu_probe_interval_seconds = 1;
                host.stack.tcp.sack = !seed.is_multiple_of(3);
            });
            assert!(path.delivers(bytes(seed, 1 << 19), 1200 * SECOND), "{mode:?} {}", path.sim.replay());
        }
    }
}

#[test]
fn mtu_probing_does_not_change_acknowledgements() {
    let acknowledgements = |mode| {
        let mut path = MtuPath::new(9, mode, &narrow(1500), |_| {});
        assert!(path.delivers(bytes(9, 1000), SECOND));
        // One frame at a time.
        path.sim.set_link_from(SERVER, &LinkModel { rate_bps: 50_000_000, ..narrow(1500) });
        let (now, served, client) = (path.sim.now, path.sim.hosts[SERVER].accepted[0], path.client);
        path.sim.hosts[SERVER].send_all(now, served, bytes(9, 1 << 20), false);
        path.sim.collect(SERVER);
        let all = |sim: &mut Sim| sim.hosts[CLIENT].received[&client].bytes.len() == 1 << 20;
        assert!(path.sim.run_until(10 * SECOND, all));
        path.stats().segments_out
    };
    assert_eq!(acknowledgements(MtuProbing::Always), acknowledgements(MtuProbing::Off));
}
