//! Two shards joined by a cable of memory, driven on one thread in simulated time.

use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind, Placement};
use ginnel::{Config, Handler, Instant, Shard};
use ginnel_devices::memory::{MemoryConfig, pair};

/// Addresses of the two ends.
pub const A: &str = "10.0.0.1/24";
pub const B: &str = "10.0.0.2/24";

/// A configuration with one memory device named `cable` and one address.
pub fn config(address: &str) -> Config {
    let mut config =
        Config::single(DeviceConfig::new("cable", DeviceKind::Memory), &[address.parse().unwrap()], &[]);
    config.tcp.connections_max = 1000;
    config
}

/// A shard for each of two applications, joined. If `SPLIT`, each application stands beside its shard.
pub struct Two<S, C, const SPLIT: bool> {
    pub server: Shard<S>,
    pub client: Shard<C>,
    pub now: Instant,
}

impl<S: Handler, C: Handler, const SPLIT: bool> Two<S, C, SPLIT> {
    pub fn new(server: S, client: C) -> Self {
        Self::with(server, client, |_| {})
    }

    /// The same with another configuration of both.
    pub fn with(server: S, client: C, change: impl Fn(&mut Config)) -> Self {
        let now = Instant::from_millis(1000);
        let (a, b) = pair(MemoryConfig::default());
        let (mut ca, mut cb) = (config(A), config(B));
        for config in [&mut ca, &mut cb] {
            config.shard.placement = if SPLIT { Placement::Split } else { Placement::Inline };
            change(config);
        }
        let server = Shard::builder(ca).handler(server).device("cable", a).seed([1; 32]).now(now).build();
        let client = Shard::builder(cb).handler(client).device("cable", b).seed([2; 32]).now(now).build();
        Self { server: server.unwrap(), client: client.unwrap(), now }
    }

    /// Turns both until `done` or nothing happens for ever, for `limit` of simulated time at the most. Returns whether it was done.
    pub fn until(&mut self, limit: Duration, mut done: impl FnMut(&S, &C) -> bool) -> bool {
        let end = self.now + limit;
        while self.now <= end {
            let a = self.server.poll_once(self.now).unwrap();
            let b = self.client.poll_once(self.now).unwrap();
            if done(self.server.handler(), self.client.handler()) {
                return true;
            }
            if a.work + b.work > 0 {
                self.now += Duration::from_micros(1);
                continue;
            }
            let Some(next) = [a.next_deadline, b.next_deadline].into_iter().flatten().min() else {
                return false;
            };
            self.now = next.max(self.now + Duration::from_micros(1));
        }
        false
    }
}
