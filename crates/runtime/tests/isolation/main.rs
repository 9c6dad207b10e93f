//! Shards touch no memory of each other: each has an arena of its own, and during a turn of one shard the
//! arenas of the others are inaccessible (docs/many-cores.md lists what they share). The shards take turns on
//! one thread, in simulated time.

mod arena;

use arena::{ARENAS, ShardAllocator, TOUCHED, alone, in_shard, set_shard, set_up, used};
use core::time::Duration;
use ginnel::config::{Config, DeviceConfig, DeviceKind};
use ginnel::{
    CloseReason, Conn, ConnectOptions, Context, Error, Handler, Instant, ListenOptions, Listener, Shard,
    Shards,
};
use ginnel_devices::memory::{MemoryConfig, RssMode, multi_queue};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[global_allocator]
static ALLOCATOR: ShardAllocator = ShardAllocator;

const START: Instant = Instant::from_millis(1_000);
/// Turns in which the shards begin to listen.
const FIRST_TURNS: usize = 200;
/// Connections at a time.
const CONNECTIONS: usize = 64;
/// Connections that each test serves.
const SERVED: u64 = 5_000;
/// Set in the child process of a test that touches foreign memory on purpose.
const TOUCH_VARIABLE: &str = "GINNEL_TEST_TOUCH";
const REQUEST: [u8; 600] = [7; 600];

/// Relays each connection to a backend.
struct Relay {
    /// The other end of a relayed connection, by the token of each end.
    ends: Vec<Option<Conn>>,
    /// Memory of another shard, which `data` touches.
    foreign: Option<Arc<AtomicU64>>,
}

impl Relay {
    fn new(foreign: Option<Arc<AtomicU64>>) -> Self {
        Self { ends: Vec::new(), foreign }
    }

    /// Adds an end whose other end is `other`, and returns its token.
    fn add(&mut self, other: Conn) -> u32 {
        self.ends.push(Some(other));
        self.ends.len() as u32 - 1
    }

    fn other_end(&self, cx: &Context<'_>, conn: Conn) -> Option<Conn> {
        self.ends.get(cx.token(conn).ok()? as usize).copied().flatten()
    }
}

impl Handler for Relay {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.listen(([10, 0, 0, 1], 80).into(), ListenOptions::default()).map(drop)
    }

    fn accepted(&mut self, cx: &mut Context<'_>, conn: Conn, _: Listener) {
        let to_backend = cx.connect(([10, 0, 0, 2], 8000).into(), ConnectOptions::default()).unwrap();
        let token = self.add(to_backend);
        cx.set_token(conn, token).unwrap();
        let token = self.add(conn);
        cx.set_token(to_backend, token).unwrap();
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        if let Some(foreign) = &self.foreign {
            foreign.fetch_add(1, Ordering::Relaxed);
        }
        let other = self.other_end(cx, conn);
        other.map_or(data.len(), |other| cx.send(other, data).unwrap_or(data.len()))
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, _: CloseReason) {
        if let Some(other) = self.other_end(cx, conn) {
            let _ = cx.close(other);
        }
    }
}

/// Clients and the backend, which echoes.
#[derive(Default)]
struct Peers {
    served: u64,
    failed: u64,
    received: Vec<usize>,
}

/// Token of the backend's connections; clients' tokens are below.
const BACKEND: u32 = u32::MAX;

impl Peers {
    fn open(&mut self, cx: &mut Context<'_>) {
        let conn = cx.connect(([10, 0, 0, 1], 80).into(), ConnectOptions::default()).unwrap();
        cx.set_token(conn, self.received.len() as u32).unwrap();
        self.received.push(0);
    }
}

impl Handler for Peers {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.listen(([10, 0, 0, 2], 8000).into(), ListenOptions::default())?;
        // All shards listen by then.
        cx.set_timer(Duration::from_millis(FIRST_TURNS as u64), 0);
        Ok(())
    }

    fn timer(&mut self, cx: &mut Context<'_>, _: u64) {
        (0..CONNECTIONS).for_each(|_| self.open(cx));
    }

    fn accepted(&mut self, cx: &mut Context<'_>, conn: Conn, _: Listener) {
        cx.set_token(conn, BACKEND).unwrap();
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        cx.send(conn, &REQUEST).unwrap();
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        let token = cx.token(conn).unwrap();
        if token == BACKEND {
            return cx.send(conn, data).unwrap();
        }
        let received = &mut self.received[token as usize];
        *received += data.len();
        if *received == REQUEST.len() {
            self.served += 1;
            cx.close(conn).unwrap();
            self.open(cx);
        }
        data.len()
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        let is_client = cx.token(conn).is_ok_and(|token| token != BACKEND);
        self.failed += u64::from(is_client && reason != CloseReason::Normal);
    }
}

fn config(address: &str) -> Config {
    let device = DeviceConfig::new("cable", DeviceKind::Memory);
    let mut config = Config::single(device, &[address.parse().unwrap()], &[]);
    config.tcp.time_wait_seconds = 1;
    config.tcp.connections_max = 4096;
    config
}

/// Serves connections, with each shard in its arena. `foreign` returns what the handler of a shard touches.
/// Returns the number of frames that were forwarded between shards.
fn serve(rss_mode: RssMode, foreign: impl Fn(usize) -> Option<Arc<AtomicU64>>) -> u64 {
    let (far, queues) = multi_queue(&MemoryConfig::default(), ARENAS, rss_mode);
    let mut stack = config("10.0.0.1/24");
    stack.shards.count = ARENAS as u32;
    let opened = Shards::new(stack).device("cable", queues).seed([1; 32]).now(START).open().unwrap();
    // A shard is built after its handler: all that it allocates is in its arena.
    let build = |index: usize| {
        set_shard(Some(index));
        Ok(Relay::new(foreign(index)))
    };
    let shards = opened.build(build).unwrap();
    set_shard(None);
    // The vector is shared, so each shard moves to its arena.
    let mut shards: Vec<Box<Shard<Relay>>> =
        shards.into_iter().enumerate().map(|(index, shard)| in_shard(index, || Box::new(shard))).collect();
    let peers = Shard::builder(config("10.0.0.2/24")).handler(Peers::default()).device("cable", far);
    let mut peers = peers.seed([2; 32]).now(START).build().unwrap();
    let mut now = START;
    for turn in 0.. {
        for (index, shard) in shards.iter_mut().enumerate() {
            let result = if turn < FIRST_TURNS / 2 {
                // The listener registry and what the shards learn from it.
                shard.poll_once(now)
            } else {
                alone(index, || shard.poll_once(now))
            };
            result.unwrap();
        }
        while peers.poll_once(now).unwrap().work > 0 {}
        if peers.handler().served >= SERVED {
            break;
        }
        now += Duration::from_millis(1);
        assert!(turn < 1_000_000, "{} connections were served", peers.handler().served);
    }
    assert_eq!(peers.handler().failed, 0);
    for (index, shard) in shards.iter().enumerate() {
        assert!(used(index) > 1 << 20, "shard {index} has {} bytes of its own", used(index));
        let relayed = shard.handler().ends.len() as u64 / 2;
        assert!(relayed > SERVED / 8, "shard {index} has relayed {relayed}");
    }
    shards.iter().map(|shard| shard.stats().frames_forwarded).sum()
}

#[test]
fn shards_touch_only_their_own_memory() {
    if std::env::var_os(TOUCH_VARIABLE).is_some() {
        return;
    }
    set_up();
    assert_eq!(serve(RssMode::DeliveredHash, |_| None), 0, "packets arrive at home");
    assert!(serve(RssMode::RoundRobin, |_| None) > SERVED, "packets cross the mailboxes");
}

/// The child process of `a_touch_is_reported`.
#[test]
fn shard_one_touches_shard_zero() {
    if std::env::var_os(TOUCH_VARIABLE).is_none() {
        return;
    }
    set_up();
    let word = in_shard(0, || Arc::new(AtomicU64::new(0)));
    serve(RssMode::DeliveredHash, |index| (index == 1).then(|| Arc::clone(&word)));
}

#[test]
fn a_touch_is_reported() {
    if std::env::var_os(TOUCH_VARIABLE).is_some() {
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "shard_one_touches_shard_zero", "--nocapture"]).env(TOUCH_VARIABLE, "1");
    let output = child.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(TOUCHED), "{error}");
    assert!(error.contains("shard 1 touched memory of shard 0 at 0x"), "{error}");
    // The stack leads from the turn to the handler.
    assert!(error.contains("arena::alone"), "{error}");
}
