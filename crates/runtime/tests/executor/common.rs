//! Two shards with executors, connected in memory, on one thread in simulated time.

use crate::placement_suite::{WireTranscript, build, placement_under_test};
use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind};
use ginnel::executor::MainOutput;
use ginnel::{Config, Executor, Handler, Instant, Shard};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::Device;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Address and port of the server.
pub const SERVER: &str = "10.0.0.1:80";
/// A port of the server without listener.
pub const CLOSED_PORT: &str = "10.0.0.1:81";

/// Returns a configuration with one memory device named `cable` and one address.
pub fn config(address: &str) -> Config {
    let mut config =
        Config::single(DeviceConfig::new("cable", DeviceKind::Memory), &[address.parse().unwrap()], &[]);
    config.tcp.connections_max = 1000;
    placement_under_test().set(&mut config);
    config
}

/// The server's shard, the client's shard and the time.
pub struct Pair<S: Handler, C: Handler> {
    pub server: Shard<S>,
    pub client: Shard<C>,
    pub now: Instant,
    transcript: Option<WireTranscript>,
}

impl<S: Handler, C: Handler> Pair<S, C> {
    #[track_caller]
    pub fn new(server: S, client: C) -> Self {
        Self::with(server, client, |_| {})
    }

    /// As [`new`](Self::new), with changes of both configurations.
    #[track_caller]
    pub fn with(server: S, client: C, change: impl Fn(&mut Config)) -> Self {
        let (a, b) = pair(MemoryConfig::default());
        let (b, transcript) = WireTranscript::new(b);
        let mut pair = Self::connected_pair(server, client, change, [a, b]);
        pair.transcript = Some(transcript);
        pair
    }

    /// As [`with`](Self::with), without a transcript.
    pub fn without_transcript(server: S, client: C, change: impl Fn(&mut Config)) -> Self {
        let (a, b) = pair(MemoryConfig::default());
        Self::connected_pair(server, client, change, [a, b])
    }

    fn connected_pair(server: S, client: C, change: impl Fn(&mut Config), [a, b]: [Device; 2]) -> Self {
        let now = Instant::from_millis(1000);
        let (mut ca, mut cb) = (config("10.0.0.1/24"), config("10.0.0.2/24"));
        change(&mut ca);
        change(&mut cb);
        Self {
            server: build(ca, server, a, 1, now),
            client: build(cb, client, b, 2, now),
            now,
            transcript: None,
        }
    }

    /// Runs a turn of both. Returns the work done, and the next deadline.
    pub fn turn(&mut self) -> (usize, Option<Instant>) {
        let a = self.server.poll_once(self.now).expect("the server must not fail");
        let b = self.client.poll_once(self.now).expect("the client must not fail");
        (a.work + b.work, [a.next_deadline, b.next_deadline].into_iter().flatten().min())
    }

    /// Runs both until the client's main task ends.
    pub fn run(&mut self, limit: Duration) {
        let end = self.now + limit;
        while self.now < end {
            let a = self.server.poll_once(self.now).expect("the server must not fail");
            let b = self.client.poll_once(self.now).expect("the client must not fail");
            if b.stopped {
                return;
            }
            self.now = match [a.next_deadline, b.next_deadline].into_iter().flatten().min() {
                Some(next) if a.work + b.work == 0 => next.max(self.now + Duration::from_micros(1)),
                None if a.work + b.work == 0 => panic!("no work and no deadline: the test is stuck"),
                _ => self.now + Duration::from_micros(1),
            };
        }
        panic!("not done after {limit:?}");
    }

    /// Runs both for `time`.
    pub fn advance(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            let (work, next) = self.turn();
            self.now = match next {
                _ if work > 0 => self.now + Duration::from_micros(1),
                Some(next) => next.max(self.now + Duration::from_micros(1)).min(end),
                None => end,
            };
        }
    }
}

impl<S: Handler, C: Handler> Drop for Pair<S, C> {
    fn drop(&mut self) {
        if let Some(transcript) = self.transcript.take().filter(|_| !std::thread::panicking()) {
            // Completes what is in progress.
            let end = self.now + Duration::from_secs(3);
            for _ in 0..100_000 {
                let (work, next) = self.turn();
                let soon = self.now + Duration::from_micros(1);
                match next {
                    _ if work > 0 => self.now = soon,
                    Some(next) if next <= end => self.now = next.max(soon),
                    _ => break,
                }
            }
            transcript.record();
        }
    }
}

/// Runs both main tasks until the client's ends.
#[track_caller]
pub fn run<S, C, SF, CF>(server: S, client: C)
where
    S: FnOnce() -> SF + 'static,
    C: FnOnce() -> CF + 'static,
    SF: Future<Output: MainOutput> + 'static,
    CF: Future<Output: MainOutput> + 'static,
{
    Pair::new(Executor::new(server), Executor::new(client)).run(Duration::from_secs(3600));
}

/// Runs one main task on a shard without peer.
pub fn run_alone<M, F>(main: M) -> Duration
where
    M: FnOnce() -> F + 'static,
    F: Future<Output: MainOutput> + 'static,
{
    run_alone_with(main, |_| {})
}

/// As [`run_alone`], with another configuration. Returns the simulated time that it took.
pub fn run_alone_with<M, F>(main: M, change: impl Fn(&mut Config)) -> Duration
where
    M: FnOnce() -> F + 'static,
    F: Future<Output: MainOutput> + 'static,
{
    let (device, _other_end) = pair(MemoryConfig::default());
    let start = Instant::from_millis(1000);
    let mut now = start;
    let mut config = config("10.0.0.1/24");
    change(&mut config);
    let mut shard = build(config, Executor::new(main), device, 1, now);
    for _ in 0..1_000_000 {
        let turn = shard.poll_once(now).expect("the main task must not fail");
        if turn.stopped {
            return now.saturating_since(start);
        }
        now = match turn.next_deadline {
            _ if turn.work > 0 => now + Duration::from_micros(1),
            Some(next) => next.max(now + Duration::from_micros(1)),
            None => panic!("no work and no deadline: the test is stuck"),
        };
    }
    panic!("not done");
}

/// Returns bytes in which no two positions look alike.
pub fn pattern(range: core::ops::Range<usize>) -> Vec<u8> {
    range.map(|i| (i * 31 % 251) as u8 ^ (i >> 11) as u8).collect()
}

/// Creates a value that tasks and the test share.
pub fn shared<T: Default>() -> (Rc<RefCell<T>>, Rc<RefCell<T>>) {
    let value = Rc::new(RefCell::new(T::default()));
    (Rc::clone(&value), value)
}

/// A counter that tasks and the test share.
#[derive(Clone, Default)]
pub struct SharedCounter(Rc<Cell<u32>>);

impl SharedCounter {
    pub fn add(&self) {
        self.0.set(self.0.get() + 1);
    }

    pub fn get(&self) -> u32 {
        self.0.get()
    }
}
