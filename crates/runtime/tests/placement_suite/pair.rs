//! Two hosts on a link in memory, in the placement under test, driven on one thread in simulated time.

use super::{WireTranscript, build, placement_under_test};
use crate::fixture::{CLIENT_ADDRESS, SERVER_ADDRESS, START, config, next_turn};
use core::time::Duration;
use ginnel::shard::Turn;
use ginnel::{Config, Handler, Instant, Shard};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::{Capabilities, Device, TxMeta, TxQueue};

/// The server's shard, the client's shard and the time.
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
        let (a, b) = pair(MemoryConfig::default());
        let (b, transcript) = WireTranscript::new(b);
        let mut pair = Self::on_link(server, client, change, [a, b]);
        pair.transcript = Some(transcript);
        pair
    }

    /// As [`with`](Self::with), without a transcript.
    pub fn without_transcript(server: S, client: C, change: impl Fn(&mut Config)) -> Self {
        let (a, b) = pair(MemoryConfig::default());
        Self::on_link(server, client, change, [a, b])
    }

    /// As [`without_transcript`](Self::without_transcript), over a link that loses some of the client's
    /// frames with data.
    pub fn with_losses(server: S, client: C, change: impl Fn(&mut Config)) -> Self {
        let (a, mut b) = pair(MemoryConfig { labels: true, ..MemoryConfig::default() });
        b.tx = Box::new(LossyTx { inner: b.tx, large_frames: 0 });
        Self::on_link(server, client, change, [a, b])
    }

    fn on_link(server: S, client: C, change: impl Fn(&mut Config), [a, b]: [Device; 2]) -> Self {
        let [ca, cb] = [SERVER_ADDRESS, CLIENT_ADDRESS].map(|address| {
            let mut config = config(&[address]);
            placement_under_test().set(&mut config);
            change(&mut config);
            config
        });
        let (server, client) = (build(ca, server, a, 1, START), build(cb, client, b, 2, START));
        Self { server, client, now: START, transcript: None }
    }

    /// Drops the transcript, because it depends on the number of turns.
    pub fn discard_transcript(&mut self) {
        self.transcript = None;
    }

    /// Runs a turn of both.
    pub fn turn(&mut self) -> [Turn; 2] {
        [self.server.poll_once(self.now).unwrap(), self.client.poll_once(self.now).unwrap()]
    }

    /// Runs both until `done`, until nothing is left to do, or for at most `limit` of simulated time. Returns
    /// whether it was done.
    pub fn run_until(&mut self, limit: Duration, mut done: impl FnMut(&S, &C) -> bool) -> bool {
        let end = self.now + limit;
        while self.now <= end {
            let turns = self.turn();
            if done(self.server.handler(), self.client.handler()) {
                return true;
            }
            let Some(next) = next_turn(self.now, turns) else { return false };
            self.now = next;
        }
        false
    }

    /// Runs both until the client stops.
    pub fn run(&mut self, limit: Duration) {
        let end = self.now + limit;
        while self.now < end {
            let turns = self.turn();
            if turns[1].stopped {
                return;
            }
            self.now = next_turn(self.now, turns).expect("work or a deadline: otherwise the test is stuck");
        }
        panic!("not done after {limit:?}");
    }

    /// Runs both for `time`.
    pub fn advance(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            let turns = self.turn();
            self.now = next_turn(self.now, turns).unwrap_or(end).min(end);
        }
    }
}

/// Loses every seventh frame with more than 200 bytes. Unlike the faults of a configuration, it keeps labels.
struct LossyTx {
    inner: Box<dyn TxQueue + Send>,
    large_frames: usize,
}

impl TxQueue for LossyTx {
    fn capabilities(&self) -> Capabilities {
        Capabilities { gso_bytes_max: 0, uso: false, ..self.inner.capabilities() }
    }

    fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        self.inner.reserve(len)
    }

    fn commit(&mut self, len: usize, meta: TxMeta) {
        self.large_frames += usize::from(len > 200);
        if len <= 200 || !self.large_frames.is_multiple_of(7) {
            self.inner.commit(len, meta);
        }
    }

    fn flush(&mut self, now: Instant) {
        self.inner.flush(now);
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.inner.next_deadline()
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
