//! The proxy of `ginnel demo-server` on several shards: where the device's hash is known, every packet
//! arrives at the shard that owns it.

use crate::common::parse;
use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind};
use ginnel::{
    CloseReason, Config, Conn, ConnectOptions, Context, Error, Handler, Instant, ListenOptions, Listener,
    Shard, Shards,
};
use ginnel_apps::demo_server::counters::WorkerCounters;
use ginnel_apps::demo_server::{DemoServer, DemoServerOptions};
use ginnel_devices::memory::{MemoryConfig, RssMode, multi_queue};
use std::collections::BTreeSet;
use std::sync::Arc;

const CLIENTS: usize = 60;
const REQUESTS: usize = 3;
const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n";
const RESPONSE: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";

/// Clients and backends, at the other end of the cable.
#[derive(Default)]
struct Peers {
    keepalive: bool,
    opened: usize,
    clients: BTreeSet<Conn>,
    answered: usize,
    served: [usize; 2],
    resets: usize,
}

impl Peers {
    fn open(&mut self, cx: &mut Context<'_>) {
        let wanted = if self.keepalive { CLIENTS } else { CLIENTS * REQUESTS };
        if self.opened < wanted {
            self.opened += 1;
            let conn = cx.connect("10.0.0.1:80".parse().unwrap(), ConnectOptions::default()).unwrap();
            self.clients.insert(conn);
        }
    }
}

impl Handler for Peers {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        for port in [8000, 8001] {
            cx.listen(([0, 0, 0, 0], port).into(), ListenOptions::default())?;
        }
        // All shards listen by then.
        cx.set_timer(Duration::from_secs(1), 0).unwrap();
        Ok(())
    }

    fn timer(&mut self, cx: &mut Context<'_>, _: u64) {
        (0..10).for_each(|_| self.open(cx));
    }

    fn accepted(&mut self, _: &mut Context<'_>, _: Conn, _: Listener) {}

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        cx.send(conn, REQUEST).unwrap();
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        if self.clients.contains(&conn) {
            // Heads and bodies fit into one segment.
            assert!(data.ends_with(b"\r\n\r\nhello"), "{}", String::from_utf8_lossy(data));
            self.answered += 1;
            if self.keepalive {
                if self.answered.is_multiple_of(REQUESTS) {
                    cx.close(conn).unwrap();
                    self.open(cx);
                } else {
                    cx.send(conn, REQUEST).unwrap();
                }
            }
        } else {
            assert!(data.ends_with(b"\r\n\r\n"));
            let port = cx.info(conn).unwrap().local.port();
            self.served[usize::from(port - 8000)] += 1;
            cx.send(conn, RESPONSE).unwrap();
        }
        data.len()
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, reason: CloseReason) {
        self.resets += usize::from(reason != CloseReason::Normal);
        if self.clients.remove(&conn) && !self.keepalive {
            self.open(cx);
        }
        if self.answered == CLIENTS * REQUESTS && self.clients.is_empty() {
            cx.stop();
        }
    }
}

/// Runs all requests through a proxy of `count` shards. Returns the shards.
fn run(count: u32, keepalive: bool, spread: RssMode) -> Vec<Shard<DemoServer>> {
    let config = |address: &str| {
        Config::single(DeviceConfig::new("cable", DeviceKind::Memory), &[address.parse().unwrap()], &[])
    };
    let backends = ["-x", "10.0.0.2:8000", "-x", "10.0.0.2:8001"];
    let flags: &[&str] = if keepalive { &["-k"] } else { &[] };
    let options: DemoServerOptions = parse(&[&backends[..], flags].concat());
    let mut now = Instant::from_millis(1000);
    let (far, queues) = multi_queue(&MemoryConfig::default(), count as usize, spread);
    let mut proxy = config("10.0.0.1/24");
    proxy.shards.count = count;
    let shards = Shards::new(proxy).device("cable", queues).seed([1; 32]).now(now).open().unwrap();
    let counters: Vec<Arc<WorkerCounters>> = (0..count).map(|_| Arc::default()).collect();
    let build = |worker: usize| Ok(DemoServer::new(&options, worker, Arc::clone(&counters[worker]), None));
    let mut shards = shards.build(build).unwrap();
    let peers = Peers { keepalive, ..Peers::default() };
    let peers = Shard::builder(config("10.0.0.2/24")).handler(peers).device("cable", far);
    let mut peers = peers.seed([2; 32]).now(now).build().unwrap();
    let end = now + Duration::from_secs(600);
    loop {
        let mut turns: Vec<_> = shards.iter_mut().map(|shard| shard.poll_once(now).unwrap()).collect();
        turns.push(peers.poll_once(now).unwrap());
        if turns.last().is_some_and(|turn| turn.stopped) {
            break;
        }
        let next = turns.iter().filter_map(|turn| turn.next_deadline).min();
        let is_idle = turns.iter().all(|turn| turn.work == 0);
        now = next.filter(|_| is_idle).unwrap_or(now).max(now + Duration::from_micros(1));
        assert!(now < end, "{} answers with {count} shards", peers.handler().answered);
    }
    let served = peers.handler().served;
    assert_eq!(served.iter().sum::<usize>(), CLIENTS * REQUESTS);
    assert!(served.iter().all(|&n| n > CLIENTS * REQUESTS / 4), "{served:?}");
    assert_eq!(peers.handler().resets, 0);
    let counts = counters.iter().map(|worker| worker.counts());
    let sum = counts.fold((0, 0, 0), |(requests, errors, failures), counts| {
        (requests + counts.requests, errors + counts.errors, failures + counts.backend_failures)
    });
    assert_eq!(sum, ((CLIENTS * REQUESTS) as u64, 0, 0));
    shards
}

#[test]
fn every_packet_of_a_proxy_arrives_home() {
    for count in [1, 2, 3, 4, 7, 64] {
        for keepalive in [false, true] {
            let shards = run(count, keepalive, RssMode::Hash);
            let stats: Vec<_> = shards.iter().map(|shard| *shard.stats()).collect();
            let sum = |counter: fn(&ginnel::ShardStats) -> u64| stats.iter().map(counter).sum::<u64>();
            // ARP concerns all shards; nothing else crosses.
            assert_eq!(sum(|s| s.frames_forwarded) + sum(|s| s.forwards_dropped), 0, "{count} shards");
            let busy = stats.iter().filter(|stats| stats.frames_received > 0).count();
            assert!(busy >= shards.len().min(30), "{busy} of {count} shards received");
        }
    }
}

#[test]
fn a_proxy_works_whatever_the_device_does() {
    for spread in [RssMode::Fixed(1), RssMode::RoundRobin] {
        let shards = run(3, true, spread);
        assert!(shards.iter().map(|shard| shard.stats().frames_forwarded).sum::<u64>() > 0);
    }
}
