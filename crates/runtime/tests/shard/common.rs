//! Two shards that are connected in memory, driven on one thread in simulated time.

use crate::placement_suite::{WireTranscript, build, placement_under_test};
use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind};
use ginnel::{Config, Handler, Instant, Shard};
use ginnel_devices::memory::{MemoryConfig, pair};

/// Addresses of the two ends.
pub const SERVER_ADDRESS: &str = "10.0.0.1/24";
pub const CLIENT_ADDRESS: &str = "10.0.0.2/24";

/// Returns a configuration with one memory device named `cable` and one address.
pub fn config(address: &str) -> Config {
    let mut config =
        Config::single(DeviceConfig::new("cable", DeviceKind::Memory), &[address.parse().unwrap()], &[]);
    config.tcp.connections_max = 1000;
    config
}

/// A shard for each of two applications, connected, both in the placement under test.
pub struct ShardPair<S: Handler, C: Handler> {
    pub server: Shard<S>,
    pub client: Shard<C>,
    pub now: Instant,
    transcript: Option<WireTranscript>,
}

impl<S: Handler, C: Handler> ShardPair<S, C> {
    #[track_caller]
    pub fn new(server: S, client: C) -> Self {
        Self::with(server, client, |_| {})
    }

    /// As [`new`](Self::new), with changes of both configurations.
    #[track_caller]
    pub fn with(server: S, client: C, change: impl Fn(&mut Config)) -> Self {
        let now = Instant::from_millis(1000);
        let (a, b) = pair(MemoryConfig::default());
        let (b, transcript) = WireTranscript::new(b);
        let (mut ca, mut cb) = (config(SERVER_ADDRESS), config(CLIENT_ADDRESS));
        for config in [&mut ca, &mut cb] {
            placement_under_test().set(config);
            change(config);
        }
        let (server, client) = (build(ca, server, a, 1, now), build(cb, client, b, 2, now));
        Self { server, client, now, transcript: Some(transcript) }
    }

    /// Drops the transcript, because it depends on the number of turns.
    pub fn discard_transcript(&mut self) {
        self.transcript = None;
    }

    /// Runs both until `done`, until nothing is left to do, or for at most `limit` of simulated time. Returns
    /// whether it was done.
    pub fn run_until(&mut self, limit: Duration, mut done: impl FnMut(&S, &C) -> bool) -> bool {
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

impl<S: Handler, C: Handler> Drop for ShardPair<S, C> {
    fn drop(&mut self) {
        if let Some(transcript) = self.transcript.take().filter(|_| !std::thread::panicking()) {
            // Completes what is in progress.
            self.run_until(Duration::from_secs(3), |_, _| false);
            transcript.record();
        }
    }
}
