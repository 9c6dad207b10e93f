//! Connections: the application sees the same events with any number of shards, and the work does not grow
//! with the number.

use super::{Fixture, RecordingHandler, stack_config};
use crate::config::{Config, Placement};
use crate::context::Context;
use crate::error::Error;
use crate::handler::Handler;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel_devices::memory::RssMode;
use ginnel_devices::random::Random;
use ginnel_stack::error::ConnectError;
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::{Conn, Listener};
use ginnel_stack::options::{ConnectOptions, ListenOptions};
use std::collections::BTreeMap;

/// Answers each line with a number of bytes that depends on the client's port.
#[derive(Default)]
struct StreamServer {
    /// Bytes received by client port.
    transcript: BTreeMap<u16, Vec<u8>>,
    closed: Vec<(u16, CloseReason)>,
    ports: BTreeMap<Conn, u16>,
    owed: BTreeMap<Conn, usize>,
}

impl StreamServer {
    fn pay(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let Some(owed) = self.owed.get_mut(&conn) else { return };
        while *owed > 0 {
            let chunk = [b'x'; 4096];
            let Ok(sent) = cx.send(conn, &chunk[..chunk.len().min(*owed)]) else { return };
            if sent == 0 {
                return;
            }
            *owed -= sent;
        }
    }
}

impl Handler for StreamServer {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.listen("[::]:80".parse().unwrap(), ListenOptions::default()).map(|_| ())
    }

    fn accepted(&mut self, cx: &mut Context<'_>, conn: Conn, _: Listener) {
        self.ports.insert(conn, cx.info(conn).unwrap().remote.port());
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        let port = self.ports[&conn];
        self.transcript.entry(port).or_default().extend(data);
        let lines = data.iter().filter(|&&byte| byte == b'\n').count();
        *self.owed.entry(conn).or_default() += lines * (500 + 40 * usize::from(port % 97));
        self.pay(cx, conn);
        data.len()
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.pay(cx, conn);
    }

    fn closed(&mut self, _: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        self.closed.push((self.ports.remove(&conn).unwrap_or(0), reason));
        self.owed.remove(&conn);
    }
}

/// Opens connections and makes some requests on each, one after the other.
struct StreamClient {
    rng: Random,
    total: usize,
    opened: usize,
    /// Number of the connection, requests left, and bytes of the response left, by connection.
    open: BTreeMap<Conn, (usize, u32, usize)>,
    /// Received data by number of the connection.
    transcript: BTreeMap<usize, Vec<u8>>,
    ended: usize,
}

impl StreamClient {
    fn new(seed: u64, total: usize) -> Self {
        Self {
            rng: Random::new(seed),
            total,
            opened: 0,
            open: BTreeMap::new(),
            transcript: BTreeMap::new(),
            ended: 0,
        }
    }

    fn open_one(&mut self, cx: &mut Context<'_>) {
        if self.opened == self.total {
            return;
        }
        let to: SocketAddr =
            if self.opened % 3 == 2 { "[fd00::1]:80" } else { "10.0.0.1:80" }.parse().unwrap();
        let conn = cx.connect(to, ConnectOptions::default()).unwrap();
        let requests = 1 + (self.rng.next_u64() % 4) as u32;
        self.open.insert(conn, (self.opened, requests, 0));
        self.opened += 1;
    }

    fn request(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let port = cx.info(conn).unwrap().local.port();
        let (number, requests, expected) = self.open.get_mut(&conn).unwrap();
        if *requests == 0 {
            cx.close(conn).unwrap();
            return;
        }
        *requests -= 1;
        *expected = 500 + 40 * usize::from(port % 97);
        let text = format!("request {requests} of {number}\n");
        assert_eq!(cx.send(conn, text.as_bytes()).unwrap(), text.len());
    }
}

impl Handler for StreamClient {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        (0..16).for_each(|_| self.open_one(cx));
        Ok(())
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.request(cx, conn);
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        let (number, _, expected) = self.open.get_mut(&conn).unwrap();
        self.transcript.entry(*number).or_default().extend(data);
        *expected -= data.len();
        if *expected == 0 {
            self.request(cx, conn);
        }
        data.len()
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        assert_eq!(reason, CloseReason::Normal, "{:?}", self.open.get(&conn));
        self.open.remove(&conn);
        self.ended += 1;
        self.open_one(cx);
    }
}

/// Events that the applications at both ends have seen, and the costs.
struct StreamTotals {
    client: BTreeMap<usize, Vec<u8>>,
    server: BTreeMap<u16, Vec<u8>>,
    closed: Vec<(u16, CloseReason)>,
    forwarded: u64,
    received: u64,
    broadcasts: u64,
    served_by: usize,
}

const CONNECTIONS: usize = 120;

fn run(count: u32, spread: RssMode, seed: u64) -> StreamTotals {
    run_with(stack_config(count), spread, seed)
}

fn run_with(config: Config, spread: RssMode, seed: u64) -> StreamTotals {
    let count = config.shards.count;
    let mut fixture =
        Fixture::new(config, spread, |_| StreamServer::default(), StreamClient::new(seed, CONNECTIONS));
    // The client starts when duplicate address detection has finished; the server takes about as long.
    let done = fixture.run_until(Duration::from_secs(60), |_, client| client.ended == CONNECTIONS);
    assert!(done, "{count} shards, {spread:?}: {} of {CONNECTIONS}", fixture.client.handler().ended);
    fixture.advance(Duration::from_secs(1));
    assert_eq!(fixture.sum(|s| s.forwards_dropped), 0);
    assert_eq!(
        fixture.sum(|s| s.forwards_received),
        fixture.sum(|s| s.frames_forwarded),
        "forwarded frames must arrive"
    );
    let (mut server, mut closed) = (BTreeMap::new(), Vec::new());
    for shard in &fixture.shards {
        for (port, bytes) in &shard.handler().transcript {
            assert!(server.insert(*port, bytes.clone()).is_none(), "port {port} was served twice");
        }
        closed.extend(&shard.handler().closed);
        shard.check_invariants();
    }
    closed.sort_by_key(|(port, _)| *port);
    let served_by = fixture.shards.iter().filter(|shard| !shard.handler().closed.is_empty()).count();
    StreamTotals {
        client: fixture.client.handler().transcript.clone(),
        server,
        closed,
        forwarded: fixture.sum(|s| s.frames_forwarded),
        received: fixture.sum(|s| s.frames_received),
        broadcasts: fixture.sum(|s| s.broadcasts_sent),
        served_by,
    }
}

#[test]
fn events_do_not_depend_on_number_of_shards() {
    for seed in 1..=3 {
        let alone = run(1, RssMode::Hash, seed);
        assert_eq!((alone.forwarded, alone.broadcasts), (0, 0));
        for count in [2, 4] {
            for spread in [RssMode::Hash, RssMode::Fixed(0), RssMode::RoundRobin] {
                let many = run(count, spread, seed);
                assert_eq!(many.client, alone.client, "{count} shards, {spread:?}, seed {seed}");
                assert_eq!(many.server, alone.server, "{count} shards, {spread:?}, seed {seed}");
                assert_eq!(many.closed, alone.closed, "{count} shards, {spread:?}, seed {seed}");
                assert_eq!(many.served_by, count as usize);
            }
        }
    }
}

/// One shard with its application inline, and several shards in every placement and with workers.
#[test]
fn events_do_not_depend_on_placement_or_workers() {
    let alone = run(1, RssMode::Hash, 1);
    for placement in [Placement::Inline, Placement::Paired, Placement::Split] {
        for (count, workers) in [(1, 0), (1, 1), (1, 3), (2, 0), (2, 2), (3, 0), (3, 3)] {
            let mut config = stack_config(count);
            (config.shard.placement, config.shard.workers) = (placement, workers);
            let many = run_with(config, RssMode::RoundRobin, 1);
            let case = format!("{placement:?}, {count} shards with {workers} workers each");
            assert_eq!(many.client, alone.client, "{case}");
            assert_eq!(many.server, alone.server, "{case}");
            assert_eq!(many.closed, alone.closed, "{case}");
            assert_eq!(many.served_by, (count * workers.max(1)) as usize, "{case}");
        }
    }
}

#[test]
fn forwarding_does_not_grow_with_number_of_shards() {
    let alone = run(1, RssMode::Hash, 1);
    for count in [2, 4] {
        let hashed = run(count, RssMode::Hash, 1);
        assert_eq!(hashed.forwarded, 0, "frames on the right queue are not forwarded");
        let astray = run(count, RssMode::RoundRobin, 1);
        // As many frames arrive for the connections, and each is forwarded at most once.
        assert!(astray.received <= alone.received * 11 / 10, "{} and {}", astray.received, alone.received);
        assert!(astray.forwarded <= astray.received);
        // ARP and neighbour discovery of one client are a few frames, and each other shard receives them.
        assert!(astray.broadcasts <= 16 * u64::from(count - 1), "{} broadcasts", astray.broadcasts);
    }
}

#[test]
fn connection_uses_a_port_of_its_shard() {
    let mut fixture = Fixture::new(
        stack_config(4),
        RssMode::Hash,
        |_| RecordingHandler::default(),
        StreamServer::default(),
    );
    fixture.advance(Duration::from_secs(3));
    for shard in 0..4 {
        for to in ["10.0.0.2:80", "[fd00::2]:80"] {
            for _ in 0..20 {
                let to = to.parse().unwrap();
                fixture
                    .with_shard(shard, |_, cx| cx.connect(to, ConnectOptions::default()).map(|_| ()))
                    .unwrap();
            }
        }
    }
    fixture.advance(Duration::from_secs(1));
    for shard in &fixture.shards {
        assert_eq!(shard.core.stack.local().unwrap().usage().connections, 40);
        assert_eq!(shard.handler().connected, 40, "all connections were established");
    }
    assert_eq!(fixture.sum(|s| s.frames_forwarded), 0);
}

#[test]
fn local_port_of_another_shard_is_refused() {
    let mut fixture = Fixture::new(
        stack_config(2),
        RssMode::Hash,
        |_| RecordingHandler::default(),
        StreamServer::default(),
    );
    fixture.advance(Duration::from_secs(3));
    let to: SocketAddr = "10.0.0.2:80".parse().unwrap();
    let mut opened = [0; 2];
    for port in 5000..5050 {
        for (shard, opened) in opened.iter_mut().enumerate() {
            let local = Some(SocketAddr::from(([0, 0, 0, 0], port)));
            let options = ConnectOptions { local, ..ConnectOptions::default() };
            match fixture.with_shard(shard, |_, cx| cx.connect(to, options)) {
                Ok(_) => *opened += 1,
                Err(Error::Connect(_, ConnectError::AddressNotAvailable)) => {}
                Err(other) => panic!("{other}"),
            }
        }
    }
    assert_eq!(opened[0] + opened[1], 50, "each port belongs to one shard: {opened:?}");
    assert!(opened[0] > 10 && opened[1] > 10, "{opened:?}");
}
