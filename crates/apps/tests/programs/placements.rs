//! Echo and httpd in every placement: their clients receive equal bytes.

use crate::common::{UNIX, parse};
use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind, Placement};
use ginnel::{CloseReason, Config, Conn, ConnectOptions, Context, Error, Handler, Instant, Shard, Shards};
use ginnel_apps::echo::{Echo, EchoOptions};
use ginnel_apps::httpd::{Httpd, HttpdOptions};
use ginnel_devices::memory::{MemoryConfig, RssMode, multi_queue};
use std::collections::BTreeMap;
use std::fs;

const CONNECTIONS: usize = 40;
/// Number of concurrent connections.
const WINDOW: usize = 8;

/// Sends data that depend on the number of the connection, and records what it receives.
struct Client {
    port: u16,
    script: fn(usize) -> Vec<u8>,
    /// True if the client half-closes, for a server that waits for FIN.
    half_closes: bool,
    opened: usize,
    /// Number of the connection, and the data still to be sent.
    open: BTreeMap<Conn, (usize, Vec<u8>)>,
    transcript: BTreeMap<usize, (Vec<u8>, Option<CloseReason>)>,
}

impl Client {
    fn new(port: u16, half_closes: bool, script: fn(usize) -> Vec<u8>) -> Self {
        Self { port, script, half_closes, opened: 0, open: BTreeMap::new(), transcript: BTreeMap::new() }
    }

    fn open_one(&mut self, cx: &mut Context<'_>) {
        if self.opened < CONNECTIONS {
            let to = ([10, 0, 0, 1], self.port).into();
            let conn = cx.connect(to, ConnectOptions::default()).unwrap();
            self.open.insert(conn, (self.opened, (self.script)(self.opened)));
            self.opened += 1;
        }
    }
}

impl Handler for Client {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        // All servers listen by then.
        cx.set_timer(Duration::from_secs(1), 0).unwrap();
        Ok(())
    }

    fn timer(&mut self, cx: &mut Context<'_>, _: u64) {
        (0..WINDOW).for_each(|_| self.open_one(cx));
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.writable(cx, conn);
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let Some((_, rest)) = self.open.get_mut(&conn) else { return };
        let sent = cx.send(conn, rest).unwrap();
        rest.drain(..sent);
        if rest.is_empty() && self.half_closes {
            cx.shutdown_write(conn).unwrap();
        }
    }

    fn data(&mut self, _: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        let number = self.open[&conn].0;
        self.transcript.entry(number).or_default().0.extend(data);
        data.len()
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        let (number, rest) = self.open.remove(&conn).unwrap();
        assert!(rest.is_empty(), "{number}: {} bytes were not sent", rest.len());
        self.transcript.entry(number).or_default().1 = Some(reason);
        self.open_one(cx);
        if self.open.is_empty() {
            cx.stop();
        }
    }
}

fn config(address: &str) -> Config {
    Config::single(DeviceConfig::new("cable", DeviceKind::Memory), &[address.parse().unwrap()], &[])
}

/// Returns what the client of a server in this placement receives, by connection.
fn transcript<S: Handler>(
    (placement, shards, workers): (Placement, u32, u32),
    server: impl Fn() -> S,
    client: Client,
) -> BTreeMap<usize, (Vec<u8>, Option<CloseReason>)> {
    let mut now = Instant::from_millis(1);
    let (far, queues) = multi_queue(&MemoryConfig::default(), shards as usize, RssMode::RoundRobin);
    let mut ours = config("10.0.0.1/24");
    ours.shards.count = shards;
    (ours.shard.placement, ours.shard.workers) = (placement, workers);
    let opened = Shards::new(ours).device("cable", queues).seed([1; 32]).now(now).open().unwrap();
    let mut servers = opened.build(|_| Ok(server())).unwrap();
    let client = Shard::builder(config("10.0.0.2/24")).handler(client).device("cable", far);
    let mut client = client.seed([2; 32]).now(now).build().unwrap();
    let end = now + Duration::from_secs(600);
    loop {
        let mut turns: Vec<_> = servers.iter_mut().map(|server| server.poll_once(now).unwrap()).collect();
        turns.push(client.poll_once(now).unwrap());
        if turns.pop_if(|turn| turn.stopped).is_some() {
            return core::mem::take(&mut client.handler_mut().transcript);
        }
        let soon = now + Duration::from_micros(1);
        let next = turns.iter().filter_map(|turn| turn.next_deadline).min();
        let works = turns.iter().any(|turn| turn.work > 0);
        now = if works { soon } else { next.expect("somebody waits for something").max(soon) };
        assert!(now < end, "{placement:?}, {shards} shards with {workers} workers: it does not end");
    }
}

/// Runs a server in each placement, compares the results with those of the inline placement, and returns
/// those.
fn assert_same_in_all_placements<S: Handler>(
    server: impl Fn() -> S,
    client: impl Fn() -> Client,
) -> BTreeMap<usize, (Vec<u8>, Option<CloseReason>)> {
    let first = transcript((Placement::Inline, 1, 0), &server, client());
    assert_eq!(first.len(), CONNECTIONS);
    for placement in [Placement::Inline, Placement::Paired, Placement::Split] {
        for (shards, workers) in [(1, 0), (1, 2), (2, 0), (2, 2)] {
            let here = (placement, shards, workers);
            assert!(transcript(here, &server, client()) == first, "{here:?}");
        }
    }
    first
}

#[test]
fn httpd_behaves_equally_in_all_placements() {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("index.html"), "<p>here</p>").unwrap();
    fs::write(root.path().join("large.bin"), vec![b'x'; 300_000]).unwrap();
    let server = || {
        let options: HttpdOptions = parse(&[root.path().to_str().unwrap(), "--listen", "0.0.0.0:80"]);
        Httpd::with_clock(&options, || UNIX).unwrap()
    };
    let script = |number: usize| {
        let get = |what: &str, more: &str| format!("{what} HTTP/1.1\r\nHost: here\r\n{more}\r\n");
        let mut all = match number % 4 {
            0 => get("GET /", "").repeat(5),
            1 => get("GET /large.bin", "Range: bytes=1000-99999\r\n"),
            2 => get("HEAD /large.bin", "") + &get("GET /none", ""),
            _ => get("GET /large.bin", "") + &get("OPTIONS *", ""),
        };
        all += &get("GET /index.html", "Connection: close\r\n");
        all.into_bytes()
    };
    let received = assert_same_in_all_placements(server, || Client::new(80, false, script));
    for (number, (text, reason)) in &received {
        assert_eq!(*reason, Some(CloseReason::Normal), "{number}");
        assert!(text.starts_with(b"HTTP/1.1 20") && text.ends_with(b"\r\n\r\n<p>here</p>"), "{number}");
    }
    assert!(received[&3].0.len() > 300_000);
}

#[test]
fn echo_behaves_equally_in_all_placements() {
    let server = || {
        Echo::new(&EchoOptions { listen: vec!["0.0.0.0:7".parse().unwrap()], udp: false, keepalive: false })
    };
    let script =
        |number: usize| (0..1 + number * 5000).map(|at| ((at * 31 + number) % 251) as u8).collect::<Vec<_>>();
    let received = assert_same_in_all_placements(server, || Client::new(7, true, script));
    for (number, (text, reason)) in received {
        assert_eq!(reason, Some(CloseReason::Normal), "{number}");
        assert!(text == script(number), "{number}: {} bytes", text.len());
    }
}
