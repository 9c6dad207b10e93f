//! httpd and the load generator on its light TCP: all features of the generator, in simulated time.

use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind};
use ginnel::{Config, Instant, Shard};
use ginnel_apps::httpd::{Httpd, HttpdOptions};
use ginnel_apps::load::light::{LightWorker, WorkerStack};
use ginnel_apps::load::plan::WorkerShare;
use ginnel_apps::load::{HttpOptions, Job, LoadOptions, Report};
use ginnel_devices::memory::{self, MemoryConfig};
use ginnel_testkit::alloc_counter::{CountingAllocator, count_allocations};
use std::sync::Arc;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Address of the server.
const SERVER: &str = "10.0.0.1";
/// The simulated day.
const UNIX: Duration = Duration::from_secs(784_111_777);

#[derive(clap::Parser)]
struct Parse<T: clap::Args> {
    #[command(flatten)]
    options: T,
}

fn parse<T: clap::Args>(words: &[&str]) -> T {
    use clap::Parser;
    Parse::try_parse_from([&["program"], words].concat()).unwrap_or_else(|e| panic!("{e}")).options
}

/// A server, the generator and the time.
struct ConnectedPair {
    server: Shard<Httpd>,
    light: LightWorker,
    job: Job,
    now: Instant,
    _root: tempfile::TempDir,
}

fn config(addresses: &[&str], faults: Option<(&str, u64)>) -> Config {
    let mut device = DeviceConfig::new("cable", DeviceKind::Memory);
    if let Some((faults, seed)) = faults {
        (device.faults, device.faults_seed) = (Some(faults.parse().unwrap()), seed);
    }
    let addresses: Vec<_> = addresses.iter().map(|a| a.parse().unwrap()).collect();
    Config::single(device, &addresses, &[])
}

impl ConnectedPair {
    fn new(words: &[&str], faults: Option<(&str, u64)>, server: &str, sources: &[&str]) -> Self {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("index.html"), "x".repeat(64)).unwrap();
        std::fs::write(root.path().join("large.bin"), vec![7; 300_000]).unwrap();
        let site = root.path().to_str().unwrap();
        let httpd: HttpdOptions = parse(&[site, "--listen", "0.0.0.0:80", "--listen", "[::]:80"]);
        let handler = Httpd::with_clock(&httpd, || UNIX).unwrap();
        let (far, near) = memory::pair(MemoryConfig::default());
        let now = Instant::from_millis(1_000);
        let builder = Shard::builder(config(&[server], None)).handler(handler).device("cable", far);
        let mut server = builder.seed([1; 32]).now(now).build().unwrap();
        let mut now = now;
        // Waits for duplicate address detection.
        while server.stats().running_ns == 0 {
            server.poll_once(now).unwrap();
            now += Duration::from_millis(10);
        }
        let job = parse::<HttpOptions>(words).job().unwrap();
        let place = WorkerStack { config: config(sources, faults), device: Some(near) };
        let light = LightWorker::new(&job, WorkerShare::WHOLE, Arc::default(), place, now).unwrap();
        Self { server, light, job, now, _root: root }
    }

    /// Runs a turn of server and generator. `measure` gets the generator's turn as a closure and calls it.
    /// Returns true when the run is over.
    fn turn(&mut self, measure: &mut dyn FnMut(&mut dyn FnMut())) -> bool {
        let server = self.server.poll_once(self.now).unwrap();
        let mut client = None;
        let (light, now) = (&mut self.light, self.now);
        measure(&mut || client = Some(light.turn(now)));
        let client = client.unwrap();
        self.now += Duration::from_micros(1);
        if server.work + client.work == 0 {
            let next = server.next_deadline.map_or(client.next_deadline, |at| at.min(client.next_deadline));
            self.now = self.now.max(next);
        }
        client.done
    }

    fn run(&mut self, limit: Duration) -> Report {
        let end = self.now + limit;
        while !self.turn(&mut |turn| turn()) {
            assert!(self.now < end, "not done after {limit:?}: {} connections", self.light.connections());
        }
        Report::new(&self.job, &self.light.stats())
    }
}

const URL: &str = "http://10.0.0.1/";
const LARGE: &str = "http://10.0.0.1/large.bin";
const ONE_SOURCE: &[&str] = &["10.0.0.2/16"];

fn measure(words: &[&str], faults: Option<(&str, u64)>) -> (Report, ConnectedPair) {
    let mut ends = ConnectedPair::new(words, faults, &format!("{SERVER}/16"), ONE_SOURCE);
    (ends.run(Duration::from_secs(600)), ends)
}

#[test]
fn every_kind_of_load_is_answered() {
    let table: [(&[&str], u64); 7] = [
        (&[URL, "-n", "3000", "-c", "16"], 3000),
        (&[URL, "-n", "300", "-c", "10", "--close", "client"], 300),
        (&[URL, "-n", "300", "-c", "10", "--close", "reset"], 300),
        (&[URL, "-k", "-n", "5000", "-c", "4"], 5000),
        (&[URL, "-k", "--pipeline", "64", "-n", "5000", "-c", "4"], 5000),
        (&[URL, "-k", "--per-connection", "3", "-n", "999", "-c", "7", "--close", "client"], 999),
        (&[LARGE, "-k", "-n", "50", "-c", "5"], 50),
    ];
    for (words, count) in table {
        let (report, mut ends) = measure(words, None);
        assert_eq!((report.requests.completed, report.failures.len()), (count, 0), "{words:?} {report}");
        assert_eq!(report.statuses["2xx"], count);
        for _ in 0..20_000 {
            ends.turn(&mut |turn| turn());
        }
        assert_eq!(ends.server.handler().server().counters().open, 0, "{words:?}");
        assert_eq!(ends.light.connections(), 0, "{words:?}");
    }
}

#[test]
fn requests_over_ipv6_are_answered() {
    let words = ["http://[fd00::1]/", "-n", "500", "-c", "8", "--source", "fd00::2-fd00::5"];
    let mut ends = ConnectedPair::new(&words, Some(("delay=1ms loss=1%", 3)), "fd00::1/64", &["fd00::2/64"]);
    let report = ends.run(Duration::from_secs(600));
    assert_eq!((report.requests.completed, report.failures.len()), (500, 0), "{report}");
}

#[test]
fn a_faulty_link_only_costs_time() {
    for seed in 0..10 {
        let faults = Some(("delay=3ms loss=2% duplicate=2% reorder=3% corrupt=0.5%", seed));
        for words in [
            &[URL, "-n", "400", "-c", "20", "--timeout", "60s"][..],
            &[URL, "-k", "-n", "1000", "-c", "10", "--pipeline", "4", "--timeout", "60s"],
            &[LARGE, "-n", "10", "-c", "5", "--timeout", "120s"],
            &[URL, "-n", "200", "-c", "20", "--close", "client", "--timeout", "60s"],
        ] {
            let (report, _) = measure(words, faults);
            assert_eq!(report.failures.len(), 0, "seed {seed} {words:?} {report}");
            assert_eq!(report.requests.completed, report.requests.started, "seed {seed} {words:?} {report}");
        }
    }
}

#[test]
fn open_loops_with_many_sources_keep_their_rate() {
    let words = [URL, "--rate", "2000", "-d", "2s", "-w", "200ms", "-c", "500", "--source", "10.0.1.1-200"];
    let mut ends = ConnectedPair::new(&words, Some(("delay=5ms", 1)), &format!("{SERVER}/16"), ONE_SOURCE);
    let report = ends.run(Duration::from_secs(60));
    assert_eq!((report.requests.started, report.requests.not_started), (4000, 0), "{report}");
    assert!(report.failures.is_empty() && report.warnings.is_empty(), "{report}");
    // Two round trips of 10 ms.
    let p99 = report.latency_ns.total.p99;
    assert!((20_000_000..21_000_000).contains(&p99), "{report}");
    let lag = report.latency_ns.lag.as_ref().unwrap();
    assert!(lag.max <= 1_000, "{} ns late", lag.max);
}

#[test]
fn reused_ports_are_accepted_in_time_wait() {
    // More connections than an address has ports, all within the server's TIME-WAIT.
    let (report, ends) = measure(&[URL, "-n", "70000", "-c", "50"], None);
    assert_eq!((report.requests.completed, report.failures.len()), (70_000, 0), "{report}");
    assert!(ends.now < Instant::from_millis(50_000), "slower than TIME-WAIT: {:?}", ends.now);
}

#[test]
fn an_unreachable_server_is_reported() {
    let mut ends = ConnectedPair::new(
        &["http://10.0.0.9/", "-d", "1s", "-c", "3"],
        None,
        &format!("{SERVER}/16"),
        ONE_SOURCE,
    );
    let report = ends.run(Duration::from_secs(60));
    assert_eq!(report.requests.completed, 0);
    assert!(report.failures["unreachable"] > 0 && report.failures.len() == 1, "{report}");
}

#[test]
fn unsupported_configurations_are_refused() {
    let job = parse::<HttpOptions>(&[URL]).job().unwrap();
    let error = |config: Config| {
        let (near, _far) = memory::pair(MemoryConfig::default());
        let place = WorkerStack { config, device: Some(near) };
        LightWorker::new(&job, WorkerShare::WHOLE, Arc::default(), place, Instant::ZERO)
            .err()
            .unwrap()
            .to_string()
    };
    let mut tagged = config(ONE_SOURCE, None);
    tagged.links[0].vlan = Some(7);
    assert!(error(tagged).contains("link.vlan"));
    assert!(error(config(&["192.0.2.7/24"], None)).starts_with("no route to 10.0.0.1"));
    let mut two = config(ONE_SOURCE, None);
    two.devices.push(DeviceConfig::new("other", DeviceKind::Memory));
    assert!(error(two).contains("exactly one [[device]]"));
}

#[test]
fn in_steady_state_nothing_is_allocated() {
    for words in [
        &[URL, "-d", "100s", "-c", "50", "--source", "10.0.0.2-9"][..],
        &[URL, "-k", "-d", "100s", "-c", "50", "--pipeline", "4"],
        &[LARGE, "-d", "100s", "-c", "5", "--close", "client"],
    ] {
        let mut ends = ConnectedPair::new(words, None, &format!("{SERVER}/16"), ONE_SOURCE);
        for _ in 0..20_000 {
            assert!(!ends.turn(&mut |turn| turn()));
        }
        let mut made = 0;
        let before = ends.server.handler().server().counters().responses;
        for _ in 0..20_000 {
            let _ = ends.turn(&mut |turn| made += count_allocations(turn).1.count);
        }
        let answered = ends.server.handler().server().counters().responses - before;
        assert!(answered > 100, "{words:?}: {answered}");
        assert_eq!(made, 0, "{words:?}: for {answered} responses");
    }
}
