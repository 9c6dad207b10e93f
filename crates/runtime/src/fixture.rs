//! Base of the fixtures of tests: hosts on a link in memory, in simulated time or each on a thread.
//!
//! Test suites outside the library include this file by its path, and so do examples.

use core::time::Duration;
use ginnel::broker::Broker;
use ginnel::builder::ShardBuilder;
use ginnel::channel::{ChannelConfig, ChannelServer};
use ginnel::config::{DeviceConfig, DeviceKind};
use ginnel::shard::Turn;
use ginnel::{Commander, Config, Handler, Instant, Shard, StopFlag};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::{Device, RxBurst, TxMeta};
use std::thread::JoinHandle;

/// Address of the stack under test.
pub const SERVER_ADDRESS: &str = "10.0.0.1/24";
/// Address of the other host on the link.
pub const CLIENT_ADDRESS: &str = "10.0.0.2/24";
/// Time at which simulations begin.
pub const START: Instant = Instant::from_millis(1000);

/// Returns a configuration with one memory device named `cable`, these addresses and up to 4,000 connections.
pub fn config(addresses: &[&str]) -> Config {
    let addresses: Vec<_> = addresses.iter().map(|address| address.parse().unwrap()).collect();
    let mut config = Config::single(DeviceConfig::new("cable", DeviceKind::Memory), &addresses, &[]);
    config.tcp.connections_max = 4000;
    config
}

/// Passes the received frames of one device on to another one. Returns how many there were.
pub fn pass_frames(from: &mut Device, to: &mut Device, now: Instant) -> usize {
    let mut burst = RxBurst::new();
    from.rx.rx_burst(now, &mut burst);
    for frame in &burst {
        if let Some(out) = to.tx.reserve(frame.bytes.len()) {
            out.copy_from_slice(frame.bytes);
            to.tx.commit(frame.bytes.len(), TxMeta::NONE);
        }
    }
    to.tx.flush(now);
    burst.len()
}

/// Returns the builder of a host with one address.
pub fn host<H: Handler>(address: &str, handler: H, device: Device) -> ShardBuilder<H> {
    Shard::builder(config(&[address])).handler(handler).device("cable", device)
}

/// Creates two hosts on a link; the first one has send buffers of the largest size. All bytes of the seed are
/// 1 in the first host, 2 in the second.
pub fn linked_hosts<S: Handler, C: Handler>(server: S, client: C, now: Instant) -> (Shard<S>, Shard<C>) {
    let (a, b) = pair(MemoryConfig::default());
    let mut config = config(&[SERVER_ADDRESS]);
    config.tcp.send_buffer_first_bytes = config.tcp.send_buffer_bytes;
    let server = Shard::builder(config).handler(server).device("cable", a);
    let server = server.seed([1; 32]).now(now).build().unwrap();
    (server, host(CLIENT_ADDRESS, client, b).seed([2; 32]).now(now).build().unwrap())
}

/// Returns the time of the next turn in a simulation whose hosts have just had `turns` at `now`: one
/// microsecond later if a host did any work, otherwise the earliest deadline. Returns `None` if nothing is
/// left to do.
pub fn next_turn(now: Instant, turns: impl IntoIterator<Item = Turn>) -> Option<Instant> {
    let (mut work, mut next) = (0, None);
    for turn in turns {
        work += turn.work;
        next = [next, turn.next_deadline].into_iter().flatten().min();
    }
    let soon = now + Duration::from_micros(1);
    if work > 0 { Some(soon) } else { next.map(|next| next.max(soon)) }
}

/// Shards that run on a thread each until the value is dropped.
pub struct ShardThreads {
    stop: StopFlag,
    threads: Vec<JoinHandle<()>>,
}

impl ShardThreads {
    pub fn new() -> Self {
        Self { stop: StopFlag::new().unwrap(), threads: Vec::new() }
    }

    pub fn run<H: Handler + Send + 'static>(&mut self, mut shard: Shard<H>) {
        let stop = self.stop.clone();
        self.threads.push(std::thread::spawn(move || shard.run(&stop).unwrap()));
    }

    /// Ends all shards, and waits for their threads.
    pub fn stop(&mut self) {
        self.stop.stop();
        for thread in self.threads.drain(..) {
            thread.join().unwrap();
        }
    }
}

impl Drop for ShardThreads {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A stack with a broker. Each of its shards has a link of its own to a peer.
pub struct BrokerFixture {
    pub broker: Broker,
    /// The peers, in the order of the shards.
    pub peers: Vec<Commander>,
    /// Ends the threads when the fixture is dropped.
    _threads: ShardThreads,
}

impl BrokerFixture {
    pub fn with_peers<P: Handler + Send + 'static>(
        channel: &ChannelConfig,
        peers: impl IntoIterator<Item = P>,
        open: impl FnOnce(Vec<Commander>) -> Broker,
    ) -> Self {
        let mut threads = ShardThreads::new();
        let (mut servers, mut commanders) = (Vec::new(), Vec::new());
        for peer in peers {
            let (a, b) = pair(MemoryConfig::default());
            let channel_server = ChannelServer::for_processes(channel).unwrap();
            let server = host(SERVER_ADDRESS, channel_server, a).build().unwrap();
            let peer = host(CLIENT_ADDRESS, peer, b).build().unwrap();
            servers.push(server.commander());
            commanders.push(peer.commander());
            threads.run(server);
            threads.run(peer);
        }
        Self { broker: open(servers), peers: commanders, _threads: threads }
    }
}
