//! The light TCP without a session against Ginnel's servers in simulated time: the received data, and
//! resources after the end.

use super::frames::{SegmentFields, Template};
use super::input::InputEvent;
use super::locals::Locals;
use super::{LightWorker, WorkerStack};
use crate::echo::{self, Echo};
use crate::httpd::{Httpd, HttpdOptions};
use crate::load::options::tests::job;
use crate::load::plan::WorkerShare;
use crate::load::session::Network;
use crate::load::stats::Failure;
use clap::Parser;
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind};
use ginnel::{Config, Handler, Instant, Random, Shard};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::{Device, RxBurst, RxChecksum, RxFrame};
use ginnel_stack::wire::MacAddr;
use ginnel_stack::wire::tcp::TcpFlags;
use std::collections::BTreeMap;
use std::path::Path;

const V4: (&str, &str, &str) = ("10.0.0.1/16", "10.0.0.2/16", "10.0.0.1:80");
const V6: (&str, &str, &str) = ("fd00::1/64", "fd00::2/64", "[fd00::1]:80");
const FAULTY_LINK: &str = "delay=2ms loss=3% duplicate=2% reorder=5% corrupt=1%";

#[derive(Parser)]
struct ParsedOptions<T: clap::Args> {
    #[command(flatten)]
    options: T,
}

fn options<T: clap::Args>(words: &[&str]) -> T {
    ParsedOptions::parse_from([&["program"], words].concat()).options
}

fn echo() -> Echo {
    Echo::new(&options::<echo::EchoOptions>(&["--listen", "0.0.0.0:80", "--listen", "[::]:80"]))
}

fn httpd(root: &Path) -> Httpd {
    let root = root.to_str().unwrap();
    let options: HttpdOptions = options(&[root, "--listen", "0.0.0.0:80", "--listen", "[::]:80"]);
    Httpd::with_clock(&options, || Duration::from_secs(784_111_777)).unwrap()
}

/// A server and the light TCP at the ends of a cable.
struct ConnectedPair<S> {
    server: Shard<S>,
    client: LightWorker,
    to: SocketAddr,
    now: Instant,
}

/// Data that a test received on a connection.
#[derive(Default)]
struct ExchangeResult {
    sent: usize,
    received: Vec<u8>,
    end: Option<Result<(), Failure>>,
}

impl<S: Handler> ConnectedPair<S> {
    fn new(
        server: S,
        (own, near, to): (&str, &str, &str),
        faults: Option<&str>,
        memory: MemoryConfig,
        seed: u64,
    ) -> Self {
        let now = Instant::from_millis(1_000);
        let (far, device) = pair(memory);
        let config = |address: &str| {
            let cable = DeviceConfig::new("cable", DeviceKind::Memory);
            Config::single(cable, &[address.parse().unwrap()], &[])
        };
        let builder = Shard::builder(config(own)).handler(server).device("cable", far);
        let server = builder.seed([seed as u8; 32]).now(now).build().unwrap();
        let job = job(&format!("http://{to}/"));
        let mut place = WorkerStack { config: config(near), device: Some(device) };
        place.config.devices[0].faults = faults.map(|f| f.parse().unwrap());
        place.config.devices[0].faults_seed = seed;
        let client = LightWorker::new(&job, WorkerShare::WHOLE, Default::default(), place, now).unwrap();
        let mut ends = Self { server, client, to: to.parse().unwrap(), now };
        // Waits for duplicate address detection of the server's IPv6 address, and for neighbours.
        while !(ends.client.net.is_ready() && ends.server.stats().running_ns > 0) {
            ends.turn(&mut |_, _| {});
            assert!(ends.now < Instant::from_millis(60_000), "no neighbour");
        }
        assert!(ends.client.net.neighbours[0].mac.is_some());
        ends
    }

    /// Runs a turn of both, then advances the time to the next deadline.
    fn turn(&mut self, handle: &mut dyn FnMut(&mut super::LightNetwork, InputEvent<'_>)) {
        let LightWorker { rx, net, .. } = &mut self.client;
        net.set_time(self.now);
        let mut burst = RxBurst::new();
        rx.rx_burst(self.now, &mut burst);
        let mut work = burst.len();
        for frame in &burst {
            let outcome = net.receive(frame);
            handle(net, outcome);
        }
        drop(burst);
        while let Some((slot, failure)) = net.expire() {
            handle(net, InputEvent::Ended(slot, failure));
            work += 1;
        }
        net.solicit_neighbours();
        net.acknowledge();
        net.flush();
        let server = self.server.poll_once(self.now).unwrap();
        let next = [server.next_deadline, self.client.net.next_deadline(), self.client.rx.next_deadline()];
        self.now += Duration::from_micros(1);
        if work + server.work == 0
            && let Some(next) = next.into_iter().flatten().min()
        {
            self.now = self.now.max(next);
        }
    }

    /// Sends `stream` on each connection, and returns when `is_done` is true for the received data of each or
    /// the connection has ended.
    fn exchange(
        &mut self,
        slots: u32,
        stream: impl Fn(u32) -> Vec<u8>,
        is_done: impl Fn(u32, &[u8]) -> bool,
    ) -> Vec<ExchangeResult> {
        let streams: Vec<Vec<u8>> = (0..slots).map(stream).collect();
        let mut seen: Vec<ExchangeResult> = (0..slots).map(|_| ExchangeResult::default()).collect();
        for slot in 0..slots {
            self.client.net.connect(slot, self.to, None).unwrap();
        }
        let limit = self.now + Duration::from_secs(600);
        while seen.iter().any(|s| s.end.is_none()) {
            self.turn(&mut |net, outcome| {
                let (slot, fin) = match outcome {
                    InputEvent::Nothing => return,
                    InputEvent::Ended(slot, failure) => return seen[slot as usize].end = Some(Err(failure)),
                    InputEvent::Connected(slot) => (slot, false),
                    InputEvent::Progress(p) => {
                        seen[p.slot as usize].received.extend_from_slice(p.data);
                        (p.slot, p.fin)
                    }
                };
                let s = &mut seen[slot as usize];
                s.sent += net.send(slot, &streams[slot as usize][s.sent..]);
                if fin || is_done(slot, &s.received) {
                    net.close(slot);
                    s.end = Some(Ok(()));
                }
            });
            assert!(self.now < limit, "stuck: {:?}", self.client.net.conns);
        }
        seen
    }

    /// Waits for the last segments, and checks that no resources are in use.
    fn settle(&mut self) {
        let limit = self.now + Duration::from_secs(200);
        while self.client.net.open_connections() > 0 && self.now < limit {
            self.turn(&mut |_, outcome| assert!(matches!(outcome, InputEvent::Nothing), "{outcome:?}"));
        }
        let net = &self.client.net;
        assert_eq!((net.open_connections(), net.buffers.in_use()), (0, 0), "{:?}", net.conns);
    }
}

/// Returns random bytes.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Random::new(seed);
    (0..len).map(|_| rng.next_u64() as u8).collect()
}

/// Transfers data in both directions at the same time; the client closes first.
fn echo_through(net: (&str, &str, &str), faults: Option<&str>, memory: MemoryConfig, len: usize, seed: u64) {
    let mut ends = ConnectedPair::new(echo(), net, faults, memory, seed);
    let stream = |slot| noise(seed * 100 + u64::from(slot), len + slot as usize);
    for _ in 0..2 {
        let seen = ends.exchange(5, stream, |slot, received| received.len() >= len + slot as usize);
        for (slot, seen) in (0..).zip(seen) {
            assert_eq!(seen.end, Some(Ok(())), "seed {seed}");
            assert!(seen.received == stream(slot), "seed {seed}: connection {slot} got other bytes back");
        }
        ends.settle();
    }
}

#[test]
fn sent_data_are_echoed() {
    for net in [V4, V6] {
        for memory in [MemoryConfig::default(), MemoryConfig::default().without_offloads()] {
            echo_through(net, None, memory, 150_000, 1);
        }
    }
}

#[test]
fn a_faulty_link_loses_no_data() {
    for seed in 0..12u64 {
        let net = if seed.is_multiple_of(2) { V4 } else { V6 };
        echo_through(net, Some(FAULTY_LINK), MemoryConfig::default(), 30_000, seed);
    }
}

/// Fetches a page on each connection; the server closes first.
fn pages(faults: Option<&str>, sizes: &[usize], seed: u64) {
    let root = tempfile::tempdir().unwrap();
    let bodies: BTreeMap<u32, Vec<u8>> =
        (0..).zip(sizes).map(|(slot, size)| (slot, noise(seed + u64::from(slot), *size))).collect();
    for (slot, body) in &bodies {
        std::fs::write(root.path().join(format!("{slot}.bin")), body).unwrap();
    }
    let mut ends = ConnectedPair::new(httpd(root.path()), V4, faults, MemoryConfig::default(), seed);
    let request =
        |slot| format!("GET /{slot}.bin HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").into_bytes();
    let seen = ends.exchange(sizes.len() as u32, request, |_, _| false);
    for (slot, seen) in (0..).zip(seen) {
        assert_eq!(seen.end, Some(Ok(())));
        assert!(seen.received.ends_with(&bodies[&slot]), "seed {seed}: page {slot} differs");
    }
    ends.settle();
    assert_eq!(ends.server.handler().server().counters().open, 0);
}

#[test]
fn pages_arrive_unchanged_when_the_server_closes_first() {
    pages(None, &[0, 1, 64, 1_460, 70_000, 3_000_000], 3);
    for seed in 0..8 {
        pages(Some(FAULTY_LINK), &[0, 1, 64, 1_460, 70_000, 500_000], seed);
    }
}

#[test]
fn a_closed_port_refuses() {
    let root = tempfile::tempdir().unwrap();
    let mut ends = ConnectedPair::new(
        httpd(root.path()),
        ("10.0.0.1/16", "10.0.0.2/16", "10.0.0.1:81"),
        None,
        MemoryConfig::default(),
        1,
    );
    let seen = ends.exchange(3, |_| Vec::new(), |_, _| false);
    assert!(seen.iter().all(|s| s.end == Some(Err(Failure::Refused))));
    ends.settle();
}

#[test]
fn a_vanished_server_times_out() {
    // The client gets another device, whose other end does not exist: all frames are lost.
    let mut ends = ConnectedPair::new(echo(), V4, None, MemoryConfig::default(), 1);
    let Device { rx, tx } = pair(MemoryConfig::default()).0;
    (ends.client.rx, ends.client.net.out.tx) = (rx, tx);
    let start = ends.now;
    let seen = ends.exchange(2, |_| Vec::new(), |_, _| false);
    assert!(seen.iter().all(|s| s.end == Some(Err(Failure::ConnectTimeout))));
    let seconds = (ends.now - start).as_secs();
    // 1 + 2 + 4 + … + 32 + 60 seconds.
    assert!((120..=125).contains(&seconds), "{seconds} s");
    assert!(ends.client.net.neighbours[0].mac.is_some(), "what is known of a silent neighbour stays");
}

#[test]
fn timeouts_pass_when_the_clock_wraps() {
    let mut ends = ConnectedPair::new(echo(), V4, None, MemoryConfig::default(), 1);
    let Device { rx, tx } = pair(MemoryConfig::default()).0;
    (ends.client.rx, ends.client.net.out.tx) = (rx, tx);
    // Milliseconds since the start wrap 60 seconds later.
    ends.now = Instant::from_millis(1_000 + (1 << 32) - 60_000);
    ends.client.net.set_time(ends.now);
    let start = ends.now;
    let seen = ends.exchange(2, |_| Vec::new(), |_, _| false);
    assert!(seen.iter().all(|s| s.end == Some(Err(Failure::ConnectTimeout))));
    let seconds = (ends.now - start).as_secs();
    assert!((120..=125).contains(&seconds), "{seconds} s");
}

#[test]
fn a_reset_is_accepted_and_not_answered() {
    let mut ends = ConnectedPair::new(echo(), V4, None, MemoryConfig::default(), 1);
    for slot in 0..3 {
        ends.client.net.connect(slot, ends.to, None).unwrap();
    }
    let mut connected = 0;
    while connected < 3 {
        ends.turn(&mut |_, outcome| connected += u32::from(matches!(outcome, InputEvent::Connected(_))));
    }
    let sent =
        |ends: &mut ConnectedPair<Echo>| ends.server.with(ends.now, |_, cx| cx.tcp_stats().segments_out);
    let sent_before = sent(&mut ends);
    for slot in 0..3 {
        ends.client.net.abort(slot);
    }
    ends.settle();
    for _ in 0..100 {
        ends.turn(&mut |_, _| {});
    }
    assert_eq!(ends.server.stats().events, 6, "accepted and closed, three times");
    assert_eq!(ends.server.with(ends.now, |_, cx| cx.tcp_stats().closed_reset), 3);
    assert_eq!(sent(&mut ends), sent_before, "a reset was answered");
}

/// Returns a pair with an open connection in slot 0.
fn open_one() -> ConnectedPair<Echo> {
    let mut ends = ConnectedPair::new(echo(), V4, None, MemoryConfig::default(), 1);
    ends.client.net.connect(0, ends.to, None).unwrap();
    let mut connected = false;
    while !connected {
        ends.turn(&mut |_, outcome| connected |= matches!(outcome, InputEvent::Connected(0)));
    }
    ends
}

/// Injects a forged segment of the server, whose numbers are this much ahead of the expected ones, and
/// returns the failure that it causes.
fn inject_forged(
    ends: &mut ConnectedPair<Echo>,
    flags: TcpFlags,
    ahead: u32,
    ack_ahead: u32,
) -> Option<Failure> {
    let net = &mut ends.client.net;
    let c = net.conns[0];
    let client = SocketAddr::new(net.locals.get(c.source).address, c.port);
    let mac = net.out.mac;
    let template = Template::new(client, MacAddr([2, 0, 0, 0, 0, 1]), mac, 1_000, false);
    let numbers =
        SegmentFields { port: ends.to.port(), seq: c.rcv_nxt + ahead, ack: c.snd_max + ack_ahead, flags };
    let mut bytes = vec![0; template.head_len()];
    template.write(&mut bytes, Locals::new([ends.to.ip()]).get(0), numbers, &[], &[]);
    let frame = RxFrame::new(&bytes);
    match net.receive(&frame) {
        InputEvent::Ended(_, failure) => Some(failure),
        InputEvent::Nothing => None,
        other => panic!("{other:?}"),
    }
}

#[test]
fn only_an_exact_reset_is_accepted() {
    let mut ends = open_one();
    let rst = TcpFlags::RST | TcpFlags::ACK;
    for (flags, ahead) in [
        (rst, 1),
        (rst, 60_000),
        (rst, u32::MAX),
        (rst, 1 << 30),
        (TcpFlags::SYN | TcpFlags::ACK, 0),
        (TcpFlags::SYN, 5),
    ] {
        assert_eq!(inject_forged(&mut ends, flags, ahead, 0), None, "{flags:?} {ahead}");
        assert!(ends.client.net.conns[0].is_synchronized());
    }
    assert_eq!(inject_forged(&mut ends, rst, 0, 0), Some(Failure::Reset));
    assert_eq!(ends.client.net.open_connections(), 0);
}

#[test]
fn acknowledgements_of_unsent_data_are_ignored() {
    let mut ends = open_one();
    let una = ends.client.net.conns[0].snd_una;
    for ack_ahead in [1, 1_000, 1 << 30, u32::MAX] {
        assert_eq!(inject_forged(&mut ends, TcpFlags::ACK, 0, ack_ahead), None);
        assert_eq!(ends.client.net.conns[0].snd_una, una, "{ack_ahead}");
    }
}

#[test]
fn a_closed_window_is_probed_until_it_opens() {
    let mut ends = open_one();
    ends.client.net.conns[0].snd_wnd = 0;
    let bytes = noise(1, 5_000);
    assert_eq!(ends.client.net.send(0, &bytes), bytes.len());
    assert!(ends.client.net.conns[0].is_all_acked(), "nothing may be sent");
    let (start, mut received) = (ends.now, Vec::new());
    while received.len() < bytes.len() {
        ends.turn(&mut |_, outcome| {
            if let InputEvent::Progress(p) = outcome {
                received.extend_from_slice(p.data);
            }
        });
    }
    assert!(received == bytes);
    let waited = (ends.now - start).as_millis();
    assert!((200..=400).contains(&waited), "probed after {waited} ms");
}

#[test]
fn hostile_frames_do_no_harm() {
    for seed in 0..40 {
        run_hostile_frames(seed);
    }
}

/// Opens connections in all states and injects random frames and modified valid frames. The frames are marked
/// as having verified checksums, so that the modifications are not detected by them.
fn run_hostile_frames(seed: u64) {
    let net = if seed.is_multiple_of(2) { V4 } else { V6 };
    let mut ends = ConnectedPair::new(echo(), net, None, MemoryConfig::default().without_offloads(), seed);
    let mut rng = Random::new(seed);
    let mut seen: Vec<Vec<u8>> = Vec::new();
    let request = noise(seed, 5_000);
    for step in 0..1_500u32 {
        let slot = rng.next_u64() as u32 % 16;
        match rng.next_u64() % 8 {
            0 => ends.client.net.close(slot),
            1 => ends.client.net.abort(slot),
            2 | 3 => {
                ends.client.net.abort(slot);
                ends.client.net.connect(slot, ends.to, None).unwrap();
            }
            _ => _ = ends.client.net.send(slot, &request[..rng.next_u64() as usize % 5_000]),
        }
        // The server's frames are recorded and delivered.
        let LightWorker { rx, net, .. } = &mut ends.client;
        net.set_time(ends.now);
        let mut burst = RxBurst::new();
        rx.rx_burst(ends.now, &mut burst);
        for frame in &burst {
            if seen.len() < 200 || rng.next_u64().is_multiple_of(8) {
                let place = rng.next_u64() as usize % 200;
                if place < seen.len() {
                    seen[place] = frame.bytes.to_vec()
                } else {
                    seen.push(frame.bytes.to_vec())
                }
            }
            let _ = net.receive(frame);
        }
        drop(burst);
        for _ in 0..8 {
            let mut bytes = match seen.len() {
                0 => noise(rng.next_u64(), rng.next_u64() as usize % 200),
                n => seen[rng.next_u64() as usize % n].clone(),
            };
            for _ in 0..rng.next_u64() % 4 {
                if !bytes.is_empty() {
                    let at = rng.next_u64() as usize % bytes.len().min(90);
                    bytes[at] = rng.next_u64() as u8;
                }
            }
            if rng.next_u64().is_multiple_of(8) {
                bytes.truncate(rng.next_u64() as usize % (bytes.len() + 1));
            }
            let frame = RxFrame { checksum: RxChecksum::Verified, ..RxFrame::new(&bytes) };
            let _ = net.receive(&frame);
        }
        while net.expire().is_some() {}
        net.solicit_neighbours();
        net.acknowledge();
        net.flush();
        check(net, step);
        ends.server.poll_once(ends.now).unwrap();
        ends.now += Duration::from_millis(rng.next_u64() % 20);
    }
    // A forged address of the server may have been accepted; the neighbour is verified after a timeout.
    for slot in 0..16 {
        ends.client.net.abort(slot);
    }
    let limit = ends.now + Duration::from_secs(200);
    while ends.client.net.open_connections() > 0 {
        assert!(ends.now < limit, "seed {seed}: {:?}", ends.client.net.conns);
        // The last turn may advance to the next timer of the server, minutes later.
        ends.turn(&mut |_, _| {});
    }
    assert_eq!(ends.client.net.buffers.in_use(), 0);
}

/// Checks the invariants of the network.
fn check(net: &super::LightNetwork, step: u32) {
    for c in &net.conns {
        let in_flight = c.snd_max - c.snd_una;
        let ok = (0..=70_000).contains(&in_flight)
            && c.snd_una.le(c.snd_nxt)
            && c.snd_nxt.le(c.snd_max)
            && c.send_queue.len() as usize <= super::buffer::SEND_QUEUE_BYTES_MAX;
        assert!(ok, "step {step}: {c:?}");
    }
    assert!(net.conns.len() <= 600 && net.unacked.is_empty(), "step {step}");
}
