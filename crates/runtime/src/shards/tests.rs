//! Several shards on one thread in simulated time, with a client at the other end of their cable.

mod control;
mod datagrams;
mod device_shards;
mod device_tables;
mod fast_open;
mod labels;
mod limits;
mod listeners;
mod priority_rules;
mod saved;
mod steering_rules;
mod streams;
mod tasks;
mod threads;
mod workers;

use super::{SavedShard, Shards};
use crate::config::Config;
use crate::context::Context;
use crate::error::Error;
use crate::fixture::{START, config, next_turn};
use crate::handler::Handler;
use crate::shard::Shard;
use crate::stats::ShardStats;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_devices::memory::{MemoryConfig, RssMode, multi_queue};
use ginnel_stack::device::{Device, RxBurst, TxMeta};
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::{Conn, Listener, UdpHandle};
use ginnel_stack::time::Instant;
use ginnel_stack::udp::{Datagram, UdpError};

/// Addresses of the shards and of the client.
const STACK_ADDRESSES: [&str; 2] = ["10.0.0.1/24", "fd00::1/64"];
const CLIENT_ADDRESSES: [&str; 2] = ["10.0.0.2/24", "fd00::2/64"];

/// An application that does only what tests make it do, and records its events.
#[derive(Default)]
struct RecordingHandler {
    started: bool,
    accepted: Vec<Conn>,
    connected: usize,
    closed: Vec<CloseReason>,
    /// Bytes of all connections.
    bytes: usize,
    /// Sender and length.
    datagrams: Vec<(SocketAddr, usize)>,
    errors: Vec<UdpError>,
}

impl Handler for RecordingHandler {
    fn start(&mut self, _: &mut Context<'_>) -> Result<(), Error> {
        self.started = true;
        Ok(())
    }

    fn accepted(&mut self, _: &mut Context<'_>, conn: Conn, _: Listener) {
        self.accepted.push(conn);
    }

    fn connected(&mut self, _: &mut Context<'_>, _: Conn) {
        self.connected += 1;
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        self.bytes += data.len();
        data.len()
    }

    fn closed(&mut self, _: &mut Context<'_>, _: Conn, reason: CloseReason) {
        self.closed.push(reason);
    }

    fn datagram(&mut self, _: &mut Context<'_>, _: UdpHandle, datagram: &Datagram, data: &[u8]) {
        assert_eq!(data.len(), datagram.len);
        self.datagrams.push((datagram.from, data.len()));
    }

    fn datagram_error(&mut self, _: &mut Context<'_>, _: UdpHandle, error: UdpError) {
        self.errors.push(error);
    }
}

/// Returns the configuration of `count` shards.
fn stack_config(count: u32) -> Config {
    let mut config = config(&STACK_ADDRESSES);
    config.shards.count = count;
    config
}

/// Creates shards; the returned device is the other end of their cable.
fn shards_and_device<S: Handler>(
    config: Config,
    spread: RssMode,
    mut server: impl FnMut(usize) -> S,
) -> (Vec<Shard<S>>, Device) {
    let (far, queues) = multi_queue(&MemoryConfig::default(), config.shards.count as usize, spread);
    let opened = Shards::new(config).device("cable", queues).seed([1; 32]).now(START).open().unwrap();
    (opened.build(|index| Ok(server(index))).unwrap(), far)
}

/// Shards and a client.
struct Fixture<S, C> {
    shards: Vec<Shard<S>>,
    client: Shard<C>,
    now: Instant,
}

impl<S: Handler, C: Handler> Fixture<S, C> {
    fn new(config: Config, spread: RssMode, server: impl FnMut(usize) -> S, client: C) -> Self {
        Self::with_devices(shards_and_device(config, spread, server), client)
    }

    /// Creates a client for shards whose devices are open.
    fn with_devices((shards, far): (Vec<Shard<S>>, Device), client: C) -> Self {
        let client = Shard::builder(config(&CLIENT_ADDRESSES)).handler(client).device("cable", far);
        Self { shards, client: client.seed([2; 32]).now(START).build().unwrap(), now: START }
    }

    /// Runs all until `done`, or for at most `limit` of simulated time. Returns whether it was done.
    fn run_until(&mut self, limit: Duration, mut done: impl FnMut(&[Shard<S>], &C) -> bool) -> bool {
        let end = self.now + limit;
        while self.now <= end {
            let turns = self.shards.iter_mut().map(|shard| shard.poll_once(self.now).unwrap());
            let turns = turns.chain(core::iter::once_with(|| self.client.poll_once(self.now).unwrap()));
            let next = next_turn(self.now, turns);
            if done(&self.shards, self.client.handler()) {
                return true;
            }
            self.now = next.unwrap_or(end + limit);
        }
        false
    }

    /// Runs all for `time`.
    fn advance(&mut self, time: Duration) {
        let end = self.now + time;
        self.run_until(time, |_, _| false);
        self.now = end;
    }

    /// Calls `act` with one shard's application.
    fn with_shard<R>(&mut self, shard: usize, act: impl FnOnce(&mut S, &mut Context<'_>) -> R) -> R {
        self.shards[shard].with(self.now, act)
    }

    /// Sums a counter over the shards.
    fn sum(&self, counter: impl Fn(&ShardStats) -> u64) -> u64 {
        // All workers of a shard return its counters.
        let first_of_each = self.shards.iter().filter(|shard| shard.core.shard_and_worker.1 == 0);
        first_of_each.map(|shard| counter(&shard.stack_stats())).sum()
    }

    /// Sums a counter of the network layer over the shards.
    fn sum_network(&self, counter: impl Fn(&ginnel_stack::ip::NetworkStats) -> u64) -> u64 {
        self.shards.iter().map(|shard| counter(&shard.core.stack.local().unwrap().network().stats())).sum()
    }
}

type RecordingFixture = Fixture<RecordingHandler, RecordingHandler>;

/// Creates shards and a client that have completed duplicate address detection.
fn recording_fixture(count: u32, spread: RssMode) -> RecordingFixture {
    let server = |_| RecordingHandler::default();
    let mut fixture = Fixture::new(stack_config(count), spread, server, RecordingHandler::default());
    fixture.advance(Duration::from_secs(3));
    fixture
}

/// Sends a frame on the cable.
fn send(wire: &mut Device, frame: &[u8]) {
    wire.tx.reserve(frame.len()).unwrap().copy_from_slice(frame);
    wire.tx.commit(frame.len(), TxMeta::default());
    wire.tx.flush(START);
}

/// Returns the frames that the shards have sent.
fn receive(wire: &mut Device) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    loop {
        let mut burst = RxBurst::new();
        wire.rx.rx_burst(START, &mut burst);
        if burst.is_empty() {
            return frames;
        }
        frames.extend(burst.iter().map(|frame| frame.bytes.to_vec()));
    }
}
