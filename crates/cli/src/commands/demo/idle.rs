//! Measures the memory of an idle connection: resident memory with many open connections, both ends in this
//! process.

use super::DemoRow;
use crate::failure::Failure;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind, Prefix};
use ginnel::{
    CloseReason, Config, Conn, ConnectOptions, Context, Error, Handler, Instant, ListenOptions, Shard,
};
use ginnel_devices::memory::{MemoryConfig, pair};

/// Connections to one port of the server: fewer than there are ephemeral ports.
const CONNECTIONS_PER_PORT: u32 = 20_000;

/// Most handshakes in progress at the same time.
const CONNECTING_MAX: u32 = 256;

/// Connections that are open before memory is measured first, so that fixed costs do not count.
const WARM_UP_CONNECTIONS: u32 = 1_000;

struct IdleServer {
    ports: u16,
}

impl Handler for IdleServer {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        for port in 1..=self.ports {
            cx.listen(SocketAddr::new([10, 0, 0, 1].into(), port), ListenOptions::default())?;
        }
        Ok(())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

#[derive(Default)]
struct IdleClient {
    wanted: u32,
    begun: u32,
    open: u32,
    failed: u32,
}

impl IdleClient {
    fn begin(&mut self, cx: &mut Context<'_>) {
        while self.begun < self.wanted && self.begun - self.open - self.failed < CONNECTING_MAX {
            let port = 1 + (self.begun / CONNECTIONS_PER_PORT) as u16;
            self.begun += 1;
            if cx.connect(SocketAddr::new([10, 0, 0, 1].into(), port), ConnectOptions::default()).is_err() {
                self.failed += 1;
            }
        }
    }
}

impl Handler for IdleClient {
    fn start(&mut self, _: &mut Context<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn connected(&mut self, cx: &mut Context<'_>, _: Conn) {
        self.open += 1;
        self.begin(cx);
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn closed(&mut self, _: &mut Context<'_>, _: Conn, _: CloseReason) {
        self.failed += 1;
    }
}

/// Two shards on this thread, in simulated time.
struct IdlePair {
    server: Shard<IdleServer>,
    client: Shard<IdleClient>,
    now: Instant,
}

impl IdlePair {
    fn new(connections: u32) -> Result<Self, Failure> {
        let (client_device, server_device) = pair(MemoryConfig::default());
        let config = |host: u8| {
            let address = Prefix { address: [10, 0, 0, host].into(), len: 24 };
            let device = DeviceConfig::new("memory", DeviceKind::Memory);
            let mut config = Config::single(device, &[address], &[]);
            config.tcp.connections_max = 10_000_000.max(connections);
            config
        };
        let now = Instant::from_millis(1);
        let server = IdleServer { ports: connections.div_ceil(CONNECTIONS_PER_PORT) as u16 };
        let server =
            Shard::builder(config(1)).handler(server).device("memory", server_device).now(now).build()?;
        let client = Shard::builder(config(2))
            .handler(IdleClient::default())
            .device("memory", client_device)
            .now(now)
            .build()?;
        Ok(Self { server, client, now })
    }

    /// Opens connections until `wanted` are open, and lets them become idle.
    fn open(&mut self, wanted: u32) -> Result<(), Failure> {
        self.client.with(self.now, |opener, cx| {
            opener.wanted = wanted;
            opener.begin(cx);
        });
        let mut rest = 0;
        while rest < 50 {
            let work = self.server.poll_once(self.now)?.work + self.client.poll_once(self.now)?.work;
            let opener = self.client.handler();
            let done = opener.open + opener.failed >= wanted;
            // The state that active connections need returns to its pools after an idle timeout.
            rest = if done && work == 0 { rest + 1 } else { 0 };
            self.now += if done { Duration::from_millis(100) } else { Duration::from_micros(10) };
        }
        Ok(())
    }
}

/// Opens `connections` connections and compares resident memory before and after.
pub(super) fn measure(connections: u32) -> Result<DemoRow, Failure> {
    let mut pair = IdlePair::new(connections)?;
    pair.open(WARM_UP_CONNECTIONS)?;
    let before = resident_bytes()?;
    pair.open(connections)?;
    let grown = resident_bytes()?.saturating_sub(before);
    let ends = 2 * u64::from(connections - WARM_UP_CONNECTIONS);
    Ok(DemoRow {
        name: "memory: idle connection, each end".into(),
        bytes_per_connection: Some(grown as f64 / ends as f64),
        errors: pair.client.handler().failed.into(),
        ..DemoRow::default()
    })
}

/// Returns the resident memory of this process in bytes.
fn resident_bytes() -> Result<u64, Failure> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let pages: Option<u64> = text.split(' ').nth(1).and_then(|word| word.parse().ok());
    let page = rustix::param::page_size() as u64;
    pages.map(|pages| pages * page).ok_or_else(|| Failure::running("/proc/self/statm: unexpected format"))
}
