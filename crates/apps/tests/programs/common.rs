//! Two shards joined by a memory cable, polled in turn by one thread in simulated time.

use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind, Placement};
use ginnel::{Config, Handler, Instant, Shard};
use ginnel_devices::memory::{self, MemoryConfig};

/// Address of the server.
pub const SERVER: &str = "10.0.0.1";
/// The simulated day: Sun, 06 Nov 1994 08:49:37 GMT.
pub const UNIX: Duration = Duration::from_secs(784_111_777);

/// A server, a client and the time. With `SPLIT` both applications run in threads of their own.
pub struct Pair<S, C, const SPLIT: bool> {
    /// The server's shard.
    pub server: Shard<S>,
    /// The client's shard.
    pub client: Shard<C>,
    /// The simulated time.
    pub now: Instant,
}

impl<S: Handler, C: Handler, const SPLIT: bool> Pair<S, C, SPLIT> {
    /// Joins server and client. `faults` is a link specification for both directions; `sources` are the
    /// client's addresses with prefix lengths.
    pub fn new(server: S, client: C, faults: Option<&str>, sources: &[&str]) -> Self {
        Self::at(&format!("{SERVER}/16"), server, client, faults, sources)
    }

    /// Joins server and client; the server has `address`.
    pub fn at(address: &str, server: S, client: C, faults: Option<&str>, sources: &[&str]) -> Self {
        let (a, b) = memory::pair(MemoryConfig::default());
        let now = Instant::from_millis(1_000);
        let config = |addresses: &[&str], seed| {
            let mut device = DeviceConfig::new("cable", DeviceKind::Memory);
            device.faults = faults.map(|f| f.parse().expect("a link specification"));
            device.faults_seed = seed;
            let addresses: Vec<_> = addresses.iter().map(|a| a.parse().expect("an address")).collect();
            let mut config = Config::single(device, &addresses, &[]);
            config.shard.placement = if SPLIT { Placement::Split } else { Placement::Inline };
            config
        };
        let server = Shard::builder(config(&[address], 1)).handler(server);
        let server = server.device("cable", a).seed([1; 32]).now(now).build().expect("a server");
        let client = Shard::builder(config(sources, 2)).handler(client);
        let client = client.device("cable", b).seed([2; 32]).now(now).build().expect("a client");
        Self { server, client, now }
    }

    /// Advances the time until the client's application stops its shard. Panics if that takes longer than
    /// `limit` of simulated time.
    pub fn run(&mut self, limit: Duration) {
        let end = self.now + limit;
        loop {
            let server = self.server.poll_once(self.now).expect("the server runs");
            let client = self.client.poll_once(self.now).expect("the client runs");
            if client.stopped {
                return;
            }
            // A turn that did work may have sent frames, so the next deadline is not awaited.
            if server.work + client.work == 0 {
                let next = [server.next_deadline, client.next_deadline].into_iter().flatten().min();
                let next = next.expect("a deadline");
                self.now = next.max(self.now + Duration::from_micros(1));
            } else {
                self.now += Duration::from_micros(1);
            }
            assert!(self.now < end, "not done after {limit:?}");
        }
    }
}

#[derive(clap::Parser)]
struct Parse<T: clap::Args> {
    #[command(flatten)]
    options: T,
}

/// Parses options as on a command line.
pub fn parse<T: clap::Args>(words: &[&str]) -> T {
    use clap::Parser;
    Parse::try_parse_from([&["program"], words].concat()).unwrap_or_else(|e| panic!("{e}")).options
}
