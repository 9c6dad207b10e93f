//! A server in any placement, clients on a shard of their own, and the messages that they send.

use crate::common::parse;
use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind, Placement};
use ginnel::{CloseReason, Config, Conn, ConnectOptions, Context, Error, Handler, Shard, Shards, clock};
use ginnel_apps::iot::counters::IotCounters;
use ginnel_apps::iot::message::{ANSWER_ERROR, ANSWER_OK};
use ginnel_apps::iot::{Iot, IotOptions, RedisAddress};
use ginnel_devices::memory::{MemoryConfig, RssMode, multi_queue};
use std::collections::HashMap;
use std::time::Instant;

/// Upper limit of every wait, however busy the machine is.
pub const TIMEOUT: Duration = Duration::from_secs(60);
/// Length of a message unless a test sets another.
pub const MESSAGE_BYTES: usize = 200;

pub const HEARTBEAT: u8 = 0;
pub const REQUEST: u8 = 1;
pub const ORDINARY: u8 = 0;
pub const URGENT: u8 = 2;

/// Returns a message.
pub fn message(counter: u32, kind: u8, label: u8) -> Vec<u8> {
    let mut bytes = vec![0xa5; MESSAGE_BYTES];
    bytes[..4].copy_from_slice(&counter.to_be_bytes());
    (bytes[5], bytes[6]) = (kind, label);
    bytes
}

/// The actions of one connection of a client.
#[derive(Clone, Debug, Default)]
pub struct ConnScript {
    pub bytes: Vec<u8>,
    /// Bytes of each call of `send`; 0 for all at once.
    pub chunk: usize,
    /// Number of answers after which it closes; `None`: it stays open.
    pub closes_after: Option<usize>,
    /// True if it sends FIN after the last byte.
    pub half_closes: bool,
    /// True if it leaves what it receives unread.
    pub is_deaf: bool,
}

/// The answers that a connection has received, and its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnResult {
    pub received: Vec<u8>,
    pub closed: Option<CloseReason>,
}

impl ConnResult {
    /// Returns the answers: true for each without an error.
    pub fn answers(&self) -> Vec<bool> {
        let answers = self.received.chunks(ANSWER_OK.len());
        answers
            .map(|answer| match answer {
                answer if answer == ANSWER_OK => true,
                answer if answer == ANSWER_ERROR => false,
                other => panic!("not an answer: {:?}", String::from_utf8_lossy(other)),
            })
            .collect()
    }
}

/// The clients.
#[derive(Default)]
pub struct Clients {
    scripts: Vec<ConnScript>,
    opened: usize,
    /// Connections that may be open or connecting at a time.
    window: usize,
    by_conn: HashMap<Conn, usize>,
    sent: Vec<usize>,
    conns: Vec<Option<Conn>>,
    pub results: Vec<ConnResult>,
    /// Answers that have arrived.
    pub answers: usize,
    pub connected: usize,
    pub closed: usize,
}

impl Clients {
    /// Creates a client for each script; at most `window` are open at a time.
    pub fn new(scripts: Vec<ConnScript>, window: usize) -> Self {
        let count = scripts.len();
        Self {
            scripts,
            window,
            sent: vec![0; count],
            conns: vec![None; count],
            results: vec![ConnResult::default(); count],
            ..Self::default()
        }
    }

    fn open(&mut self, cx: &mut Context<'_>) {
        while self.opened < self.scripts.len() && self.by_conn.len() < self.window {
            let conn = cx.connect(([10, 0, 0, 1], 80).into(), ConnectOptions::default()).unwrap();
            self.by_conn.insert(conn, self.opened);
            self.conns[self.opened] = Some(conn);
            self.opened += 1;
        }
    }

    /// Reads from now on what a deaf connection receives.
    pub fn listen_to(&mut self, cx: &mut Context<'_>, index: usize) {
        self.scripts[index].is_deaf = false;
        cx.resume_reading(self.conns[index].expect("it is open"));
    }

    /// Adds bytes for a connection.
    pub fn send(&mut self, cx: &mut Context<'_>, index: usize, bytes: &[u8]) {
        self.scripts[index].bytes.extend_from_slice(bytes);
        let conn = self.conns[index].expect("it is open");
        self.writable(cx, conn);
    }
}

impl Handler for Clients {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        self.open(cx);
        Ok(())
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.connected += 1;
        self.writable(cx, conn);
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let Some(&index) = self.by_conn.get(&conn) else { return };
        let script = &self.scripts[index];
        loop {
            let rest = &script.bytes[self.sent[index]..];
            let chunk = if script.chunk == 0 { rest.len() } else { script.chunk.min(rest.len()) };
            if chunk == 0 {
                break;
            }
            let sent = cx.send(conn, &rest[..chunk]).unwrap();
            self.sent[index] += sent;
            if sent < chunk {
                return;
            }
        }
        if script.half_closes {
            cx.shutdown_write(conn).unwrap();
        } else if script.closes_after == Some(0) {
            cx.close(conn).unwrap();
        }
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        let index = self.by_conn[&conn];
        if self.scripts[index].is_deaf {
            return 0;
        }
        let received = &mut self.results[index].received;
        let before = received.len() / ANSWER_OK.len();
        received.extend_from_slice(data);
        let answers = received.len() / ANSWER_OK.len();
        self.answers += answers - before;
        if self.scripts[index].closes_after.is_some_and(|count| answers >= count && before < count) {
            cx.close(conn).unwrap();
        }
        data.len()
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        let index = self.by_conn.remove(&conn).unwrap();
        self.conns[index] = None;
        self.closed += 1;
        self.results[index].closed = Some(reason);
        self.open(cx);
    }
}

/// The server's applications and the clients, driven by one thread in real time.
pub struct IotFixture {
    pub servers: Vec<Shard<Iot>>,
    pub clients: Shard<Clients>,
}

/// Returns options; `words` are separated by spaces.
pub fn options(words: &str) -> IotOptions {
    parse(&words.split_whitespace().collect::<Vec<_>>())
}

impl IotFixture {
    /// Connects clients with a server in its shard's thread.
    pub fn new(options: &IotOptions, clients: Clients) -> Self {
        Self::placed(options, clients, (Placement::Inline, 1, 0), &[])
    }

    /// Connects clients with a server in a placement: where the application is, shards, and workers of each.
    /// The clients have these addresses besides 10.0.0.2.
    pub fn placed(
        options: &IotOptions,
        clients: Clients,
        placement: (Placement, u32, u32),
        client_addresses: &[String],
    ) -> Self {
        Self::configured(options, clients, placement, client_addresses, |_| ())
    }

    /// As [`placed`](Self::placed), with a server whose configuration was changed.
    pub fn configured(
        options: &IotOptions,
        clients: Clients,
        (placement, shards, workers): (Placement, u32, u32),
        client_addresses: &[String],
        change: impl FnOnce(&mut Config),
    ) -> Self {
        let now = clock::now();
        let config = |addresses: &[String]| {
            let addresses: Vec<_> = addresses.iter().map(|a| a.parse().unwrap()).collect();
            Config::single(DeviceConfig::new("cable", DeviceKind::Memory), &addresses, &[])
        };
        let (far, queues) = multi_queue(&MemoryConfig::default(), shards as usize, RssMode::RoundRobin);
        let mut ours = config(&["10.0.0.1/16".to_owned()]);
        ours.shards.count = shards;
        (ours.shard.placement, ours.shard.workers) = (placement, workers);
        change(&mut ours);
        let opened = Shards::new(ours).device("cable", queues).seed([1; 32]).now(now).open().unwrap();
        let redis: &[RedisAddress] = &options.redis;
        let mut servers = opened.build(|_| Iot::new(options, redis)).unwrap();
        // All listen before the first client connects.
        for _ in 0..1000 {
            for server in &mut servers {
                server.poll_once(clock::now()).unwrap();
            }
        }
        let mut addresses = vec!["10.0.0.2/16".to_owned()];
        addresses.extend_from_slice(client_addresses);
        let clients = Shard::builder(config(&addresses)).handler(clients).device("cable", far);
        Self { servers, clients: clients.seed([2; 32]).now(now).build().unwrap() }
    }

    /// Runs a turn of all, or waits a moment if none has anything to do.
    pub fn turn(&mut self) {
        let now = clock::now();
        let mut work = self.clients.poll_once(now).unwrap().work;
        for server in &mut self.servers {
            work += server.poll_once(now).unwrap().work;
        }
        if work == 0 {
            // Redis is another process.
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    /// Runs until `done`.
    #[track_caller]
    pub fn run_until(&mut self, done: impl Fn(&Self) -> bool) {
        let end = Instant::now() + TIMEOUT;
        while !done(self) {
            assert!(
                Instant::now() < end,
                "not done: {:?} {:?}",
                self.counters(),
                self.clients.handler().answers
            );
            self.turn();
        }
    }

    /// Runs until all clients' connections are closed and no message waits.
    #[track_caller]
    pub fn run_to_end(&mut self) {
        let count = self.clients.handler().scripts.len();
        self.run_until(|fixture| {
            fixture.clients.handler().closed == count && fixture.waiting() == 0 && fixture.open() == 0
        });
        self.assert_reconciled();
    }

    /// Runs for a while.
    pub fn run_for(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.turn();
        }
    }

    /// Returns the sum of all applications' counters.
    pub fn counters(&self) -> IotCounters {
        let mut sum = IotCounters::default();
        self.servers.iter().for_each(|server| sum += *server.handler().counters());
        sum
    }

    pub fn waiting(&self) -> u64 {
        self.servers.iter().map(|server| server.handler().waiting()).sum()
    }

    pub fn open(&self) -> u64 {
        self.servers.iter().map(|server| server.handler().open()).sum()
    }

    /// Checks that every message is accounted for.
    #[track_caller]
    pub fn assert_reconciled(&self) {
        let counters = self.counters();
        assert_eq!(counters.messages, counters.done + counters.failed() + self.waiting(), "{counters:?}");
    }

    pub fn results(&self) -> &[ConnResult] {
        &self.clients.handler().results
    }

    /// Sends bytes on a connection of the clients.
    pub fn send(&mut self, index: usize, bytes: &[u8]) {
        self.clients.with(clock::now(), |clients, cx| clients.send(cx, index, bytes));
    }
}
