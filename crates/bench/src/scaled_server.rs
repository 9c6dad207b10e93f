//! `ginnel demo-server` on many simulated shards: all shards, their clients and their backends run in turns
//! on one thread, in simulated time. The device delivers frames by their hash and with it, as an adapter
//! does.

use crate::harness::MeasureError;
use crate::single_thread::{START, TICK};
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind};
use ginnel::{
    CloseReason, Config, Conn, ConnectOptions, Context, Error, Handler, Instant, ListenOptions, Listener,
    Shard, Shards,
};
use ginnel_apps::demo_server::{DemoServer, DemoServerOptions};
use ginnel_devices::memory::{MemoryConfig, RssMode, multi_queue};
use std::sync::Arc;

/// Concurrent connections of clients for each shard.
const CONNECTIONS_EACH: u64 = 16;
/// Ports of the server, and ports of the backends. Clients have 28,232 ports of their own. The number of the
/// server's ports has no factor in common with 28,232, so that addresses are used again only after 254,088
/// connections, when those of the server's TIME-WAIT are gone.
const SERVER_PORTS: core::ops::Range<u16> = 80..89;
const BACKEND_PORTS: core::ops::Range<u16> = 8000..8004;
const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
const RESPONSE: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 64\r\n\r\n\
    ................................................................";
/// Token of clients' connections.
const CLIENT: u32 = 1;

/// A run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScalingCase {
    /// Number of shards.
    pub shards: u32,
    /// True if the server relays to backends.
    pub proxy: bool,
    /// True if connections stay open.
    pub keep_alive: bool,
}

/// Results of a run, except for the instructions, which valgrind counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScalingCounts {
    /// Frames that went from one shard to another. What all shards must learn, such as a neighbour, is not
    /// among them: it does not depend on the number of connections.
    pub messages: u64,
    /// Memory that the run has added to the process, in KiB, clients and backends included.
    pub kib: u64,
}

impl ScalingCase {
    /// Runs until the clients have received `operations` responses for each shard.
    ///
    /// # Errors
    /// The shards cannot be built, one of them fails, or there is no progress.
    pub fn run(&self, operations: u64) -> Result<ScalingCounts, MeasureError> {
        let failed = |e: Error| MeasureError::Failed(e.to_string());
        let before = resident_kib();
        let count = u64::from(self.shards);
        let (far, queues) =
            multi_queue(&MemoryConfig::default(), self.shards as usize, RssMode::DeliveredHash);
        let mut config = stack_config("10.0.0.1/24");
        config.shards.count = self.shards;
        let shards = Shards::new(config).device("cable", queues).seed([1; 32]).now(START);
        let options = self.options();
        let build = |worker: usize| Ok(DemoServer::new(&options, worker, Arc::default(), None));
        let mut shards = shards.open().and_then(|opened| opened.build(build)).map_err(failed)?;
        let peers =
            Peers { keep_alive: self.keep_alive, wanted: CONNECTIONS_EACH * count, ..Peers::default() };
        let peers = Shard::builder(stack_config("10.0.0.2/24")).handler(peers).device("cable", far);
        let mut peers = peers.seed([2; 32]).now(START).build().map_err(failed)?;
        let (mut now, deadline) = (START, START + Duration::from_secs(600));
        while peers.handler().done < operations * count {
            if now > deadline || peers.handler().failures > 0 {
                let Peers { done, failures, .. } = peers.handler();
                return Err(MeasureError::Failed(format!("{self:?}: {done} responses, {failures} failures")));
            }
            for shard in &mut shards {
                server_turn(shard, now).map_err(failed)?;
            }
            // A turn receives one burst. If the clients of 64 shards took only one burst in each tick, the
            // shards would wait for them and have less and less to do in a turn.
            while peers.poll_once(now).map_err(failed)?.work > 0 {}
            now += TICK;
        }
        let stats = shards.iter().map(Shard::stats);
        let messages = stats.map(|s| s.frames_forwarded + s.forwards_dropped).sum();
        Ok(ScalingCounts { messages, kib: resident_kib().saturating_sub(before) })
    }

    fn options(&self) -> DemoServerOptions {
        let at = |host: u8| move |port: u16| SocketAddr::from(([10, 0, 0, host], port));
        DemoServerOptions {
            workers: Some(self.shards),
            first_core: None,
            listen: SERVER_PORTS.map(at(1)).collect(),
            backend: BACKEND_PORTS.filter(|_| self.proxy).map(at(2)).collect(),
            log: None,
            keepalive: self.keep_alive,
            verbose: false,
            debug: false,
        }
    }
}

fn stack_config(address: &str) -> Config {
    let device = DeviceConfig::new("cable", DeviceKind::Memory);
    let mut config = Config::single(device, &[address.parse().expect("an address")], &[]);
    config.tcp.time_wait_seconds = 1;
    config
}

/// Returns the resident memory of the process in KiB.
fn resident_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse().ok()).unwrap_or(0)
}

/// valgrind counts the instructions within this function, which it finds by its name.
#[inline(never)]
fn server_turn(shard: &mut Shard<DemoServer>, now: Instant) -> Result<(), Error> {
    // The call must not be in tail position: a jump in its place would hide the end of the function from
    // valgrind.
    std::hint::black_box(shard.poll_once(now)).map(|_| ())
}

/// Clients and backends.
#[derive(Default)]
struct Peers {
    keep_alive: bool,
    /// Connections of clients to open.
    wanted: u64,
    next_port: u16,
    done: u64,
    failures: u64,
}

impl Peers {
    fn open(&mut self, cx: &mut Context<'_>) {
        let port = SERVER_PORTS.start + self.next_port % SERVER_PORTS.len() as u16;
        self.next_port = self.next_port.wrapping_add(1);
        let opened = cx.connect(([10, 0, 0, 1], port).into(), ConnectOptions::default());
        let opened = opened.ok().and_then(|conn| cx.set_token(conn, CLIENT).ok());
        self.failures += u64::from(opened.is_none());
    }
}

impl Handler for Peers {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        for port in BACKEND_PORTS {
            cx.listen(([0, 0, 0, 0], port).into(), ListenOptions::default())?;
        }
        // All shards listen by then.
        cx.set_timer(Duration::from_millis(100), 0);
        Ok(())
    }

    fn timer(&mut self, cx: &mut Context<'_>, _: u64) {
        for _ in 0..self.wanted {
            self.open(cx);
        }
    }

    fn accepted(&mut self, _: &mut Context<'_>, _: Conn, _: Listener) {}

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let _ = cx.send(conn, REQUEST);
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        if cx.token(conn) != Ok(CLIENT) {
            let _ = cx.send(conn, RESPONSE);
        } else if data.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
            // Heads and bodies fit into one segment.
            self.done += 1;
            if self.keep_alive {
                let _ = cx.send(conn, REQUEST);
            }
        }
        data.len()
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        if cx.token(conn) == Ok(CLIENT) {
            self.failures += u64::from(reason != CloseReason::Normal);
            self.open(cx);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ScalingCase;

    #[test]
    fn nothing_crosses_and_all_are_answered() {
        for (proxy, keep_alive) in [(false, false), (false, true), (true, false), (true, true)] {
            for shards in [1, 5] {
                let case = ScalingCase { shards, proxy, keep_alive };
                assert_eq!(case.run(20).unwrap().messages, 0, "{case:?}");
            }
        }
    }
}
