//! Two shards joined by a cable in memory, polled in turn by one thread in simulated time.

use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind, Placement};
use ginnel::{Config, Handler, Instant, Shard};
use ginnel_devices::memory::{self, MemoryConfig};

/// Address of the server.
pub const SERVER: &str = "10.0.0.1";
/// A day on which everything here happens: Sun, 06 Nov 1994 08:49:37 GMT.
pub const UNIX: Duration = Duration::from_secs(784_111_777);

/// A server, a client and the time. If `SPLIT`, both applications stand beside their shards.
pub struct Pair<S, C, const SPLIT: bool> {
    /// The server's shard.
    pub server: Shard<S>,
    /// The client's shard.
    pub client: Shard<C>,
    /// The time.
    pub now: Instant,
}

impl<S: Handler, C: Handler, const SPLIT: bool> Pair<S, C, SPLIT> {
    /// Joins them. `faults` is a link specification for both directions; `sources` are the client's addresses, with prefix lengths.
    pub fn new(server: S, client: C, faults: Option<&str>, sources: &[&str]) -> Self {
        Self::at(&format!("{SERVER}/16"), server, client, faults, sources)
    }

    /// The same with another address of the server.
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

    /// Lets time pass until the client's application stops its shard, or `limit` of simulated time is over.
    pub fn run(&mut self, limit: Duration) {
        let end = self.now + limit;
        loop {
            let server = self.server.poll_once(self.now).expect("the server runs");
            let client = self.client.poll_once(self.now).expect("the client runs");
            if client.stopped {
                return;
            }
            // A turn that did something may have sent something.
            if server.work + client.work == 0 {
                let next = [server.next_deadline, client.next_deadline].into_iter().flatten().min();
                let next = next.expect("somebody waits for something");
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

/// Options as the command line has them.
pub fn parse<T: clap::Args>(words: &[&str]) -> T {
    use clap::Parser;
    Parse::try_parse_from([&["program"], words].concat()).unwrap_or_else(|e| panic!("{e}")).options
}
