//! The echo service and messages from the generator on its light TCP, in simulated time.

use clap::Parser;
use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind};
use ginnel::{Config, Instant, Shard};
use ginnel_apps::echo::{Echo, EchoOptions};
use ginnel_apps::load::light::{LightWorker, WorkerStack};
use ginnel_apps::load::messages::{EchoLoadOptions, MessageJob, MessageLoadOptions, MessageReport};
use ginnel_apps::load::plan::WorkerShare;
use ginnel_apps::load::run::LoadJob;
use ginnel_devices::memory::{self, MemoryConfig};
use ginnel_testkit::alloc_counter::{CountingAllocator, count_allocations};
use std::sync::Arc;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

#[derive(clap::Parser)]
struct Parse<T: clap::Args> {
    #[command(flatten)]
    options: T,
}

fn parse<T: clap::Args>(words: &[&str]) -> T {
    Parse::try_parse_from([&["program"], words].concat()).unwrap_or_else(|e| panic!("{e}")).options
}

fn config(address: &str, faults: Option<&str>) -> Config {
    let mut device = DeviceConfig::new("cable", DeviceKind::Memory);
    device.faults = faults.map(|faults| faults.parse().unwrap());
    Config::single(device, &[address.parse().unwrap()], &[])
}

/// A server, the generator and the time.
struct ConnectedPair {
    server: Shard<Echo>,
    light: LightWorker<MessageJob>,
    job: MessageJob,
    now: Instant,
}

impl ConnectedPair {
    fn new(words: &[&str], faults: Option<&str>) -> Self {
        let (far, near) = memory::pair(MemoryConfig::default());
        let now = Instant::from_millis(1_000);
        let echo = Echo::new(&parse::<EchoOptions>(&[]));
        let builder = Shard::builder(config("10.0.0.1/16", None)).handler(echo).device("cable", far);
        let mut server = builder.seed([1; 32]).now(now).build().unwrap();
        server.poll_once(now).unwrap();
        let options: EchoLoadOptions = parse(words);
        let job = options.job("10.0.0.2".parse().ok()).unwrap();
        let place = WorkerStack { config: config("10.0.0.2/16", faults), device: Some(near) };
        let light = LightWorker::new(&job, WorkerShare::WHOLE, Arc::default(), place, now).unwrap();
        Self { server, light, job, now }
    }

    /// Runs a turn of both, and returns true when the run is over.
    fn turn(&mut self) -> bool {
        let server = self.server.poll_once(self.now).unwrap();
        let client = self.light.turn(self.now);
        self.now += Duration::from_micros(1);
        if server.work + client.work == 0 {
            let next = server.next_deadline.map_or(client.next_deadline, |at| at.min(client.next_deadline));
            self.now = self.now.max(next);
        }
        client.done
    }

    fn run(&mut self, limit: Duration) -> MessageReport {
        let end = self.now + limit;
        while !self.turn() {
            assert!(self.now < end, "not done after {limit:?}: {} connections", self.light.connections());
        }
        self.job.report(&self.light.stats())
    }
}

const ONE_RUN: &[&str] =
    &["10.0.0.1", "-c", "200", "-e", "1", "-s", "1", "-w", "1", "-d", "3", "-l", "64-3000"];

#[test]
fn every_echo_is_compared_and_counted() {
    for more in [&[][..], &["-b", "50"], &["--mode", "burst"], &["--gaps", "poisson", "-p", "flow"]] {
        let report = ConnectedPair::new(&[ONE_RUN, more].concat(), None).run(Duration::from_secs(60));
        let messages = report.messages;
        assert_eq!((messages.sent, messages.answered, messages.high.answered), (600, 600, 30), "{report}");
        assert!(messages.is_complete && report.missed.is_empty() && report.failures.is_empty(), "{report}");
        assert!(report.latency_ns.send_error.max < 100_000, "{report}");
    }
}

#[test]
fn a_faulty_link_only_costs_time() {
    let faults = "delay=3ms loss=2% duplicate=2% reorder=3% gap=10us";
    let words = [ONE_RUN, &["--timeout", "60"]].concat();
    let report = ConnectedPair::new(&words, Some(faults)).run(Duration::from_secs(600));
    let messages = report.messages;
    assert_eq!((messages.sent, messages.answered), (600, 600), "{report}");
    assert!(messages.is_complete && report.missed.is_empty(), "{report}");
    assert!(report.latency_ns.total.p50 > 6_000_000 && report.latency_ns.total.max > 200_000_000, "{report}");
}

#[test]
fn messages_allocate_nothing_in_steady_state() {
    let mut pair = ConnectedPair::new(ONE_RUN, None);
    // One second of messages has grown all pools.
    while pair.now < Instant::from_millis(4_200) {
        assert!(!pair.turn());
    }
    let sent = pair.job.report(&pair.light.stats()).messages.sent;
    let ((), allocations) = count_allocations(|| {
        while pair.now < Instant::from_millis(5_200) {
            assert!(!pair.turn());
        }
    });
    assert_eq!(allocations.count, 0);
    let more = pair.job.report(&pair.light.stats()).messages.sent - sent;
    assert!((199..=201).contains(&more), "{more}");
}
