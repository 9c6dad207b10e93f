//! The monitor observes a running stack: its times lie between those of the server and of the client.

use ginnel::config::{DeviceConfig, DeviceKind, LinkConfig, Loopback};
use ginnel::inspect::MirrorDirection;
use ginnel::published_stack::PublishedStack;
use ginnel::{
    CloseReason, Config, Conn, ConnectOptions, Context, Error, Handler, Instant, ListenOptions, Shard,
    StopFlag, clock,
};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_monitor::engine::{Engine, EngineConfig};
use ginnel_monitor::frame::{ACK, Frame, LinkType, SYN};
use ginnel_monitor::report::Report;
use ginnel_monitor::rules::{PortRule, ProtocolName};
use ginnel_monitor::session::Session;
use ginnel_monitor::sources::stack::{RunningStackSource, StackFrames};
use ginnel_monitor::sources::{PacketSource, SourceState};
use ginnel_stack::device::Device;
use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

const GET: &[u8] = b"GET / HTTP/1.1\r\n\r\n";
const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
const COUNT: usize = 40;
/// The server takes this long for each request.
const COST: Duration = Duration::from_millis(1);

fn config(address: &str) -> Config {
    let mut config = Config::default();
    config.devices.push(DeviceConfig::new("cable", DeviceKind::Memory));
    config.links.push(LinkConfig::new("cable", "cable", vec![address.parse().unwrap()]));
    config.run.name = Some("observed".into());
    config
}

/// Answers each request after [`COST`], and adds up the time from its arrival to its answer.
#[derive(Default)]
struct Server {
    own_time: Duration,
}

impl Handler for Server {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.listen("10.0.0.1:80".parse().unwrap(), ListenOptions::default()).map(drop)
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        assert_eq!(data, GET);
        let began = clock::now();
        thread::sleep(COST);
        self.own_time += clock::now() - began;
        assert_eq!(cx.send(conn, OK).unwrap(), OK.len());
        data.len()
    }
}

/// Makes requests one after the other, and adds up the time from each to its answer.
#[derive(Default)]
struct Client {
    sent: Option<Instant>,
    answers: usize,
    own_time: Duration,
}

impl Client {
    fn ask(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.sent = Some(clock::now());
        assert_eq!(cx.send(conn, GET).unwrap(), GET.len());
    }
}

impl Handler for Client {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.connect("10.0.0.1:80".parse().unwrap(), ConnectOptions::default()).map(drop)
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.ask(cx, conn);
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        assert_eq!(data, OK);
        self.own_time += clock::now() - self.sent.expect("a request");
        self.answers += 1;
        if self.answers < COUNT {
            self.ask(cx, conn);
        } else {
            cx.stop();
        }
        data.len()
    }
}

fn serve(device: Device, published: &std::sync::Arc<PublishedStack>, stop: &StopFlag) -> Duration {
    let shard = Shard::builder(config("10.0.0.1/24")).handler(Server::default()).device("cable", device);
    let mut shard = shard.published(Some(published.clone()), "0").build().unwrap();
    shard.run(stop).unwrap();
    shard.handler().own_time
}

fn ask(device: Device) -> Duration {
    let shard = Shard::builder(config("10.0.0.2/24")).handler(Client::default()).device("cable", device);
    let mut shard = shard.build().unwrap();
    shard.run(&StopFlag::new().unwrap()).unwrap();
    assert_eq!(shard.handler().answers, COUNT);
    shard.handler().own_time
}

/// Observes the stack until `is_done` is set and there are no packets any more.
fn observe(mut source: RunningStackSource, is_done: &AtomicBool) -> Report {
    let config = EngineConfig::new(vec![PortRule::new(ProtocolName::Http, vec![80])]);
    let mut session = Session::new(Engine::new(&config).unwrap(), None);
    loop {
        // Packets of the conversation are in the rings when it has ended.
        let was_done = is_done.load(Ordering::Acquire);
        if was_done {
            thread::sleep(Duration::from_millis(10));
        }
        let state = source.poll(&mut |link, packets| session.process(link, packets, 0, &mut |_| ()));
        match state.unwrap() {
            SourceState::More => {}
            SourceState::Idle if !was_done => source.wait(Duration::from_millis(1)).unwrap(),
            SourceState::Idle | SourceState::End => break,
        }
    }
    let lost = source.lost();
    session.finish(lost, &mut |_| ())
}

/// Ends the other threads when it is dropped, also by a failure.
struct EndGuard<'a> {
    stop: &'a StopFlag,
    is_done: &'a AtomicBool,
}

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        self.is_done.store(true, Ordering::Release);
        self.stop.stop();
    }
}

fn attach(directory: &Path) -> std::io::Result<RunningStackSource> {
    RunningStackSource::attach(directory, 1 << 20, 65_550)
}

#[test]
fn times_lie_between_server_and_client() {
    let base = tempfile::tempdir().unwrap();
    let run = config("10.0.0.1/24").run;
    let published = PublishedStack::new_in(&base.path().join("run"), &run, "test").unwrap().unwrap();
    let (server_device, client_device) = pair(MemoryConfig::default());
    let (stop, is_done) = (StopFlag::new().unwrap(), AtomicBool::new(false));
    let directory = published.dir().path();
    let (server_time, client_time, report) = thread::scope(|scope| {
        let guard = EndGuard { stop: &stop, is_done: &is_done };
        let server = scope.spawn(|| serve(server_device, &published, &stop));
        // The shard is registered when it is built.
        let source = loop {
            match attach(directory) {
                Ok(source) if source.has_rings() => break source,
                _ => thread::sleep(Duration::from_millis(1)),
            }
        };
        let problem = attach(directory).err().expect("one monitor at a time").to_string();
        assert!(problem.contains("another capture, monitor, "), "{problem}");
        let monitor = scope.spawn(|| observe(source, &is_done));
        let client_time = ask(client_device);
        is_done.store(true, Ordering::Release);
        let report = monitor.join().unwrap();
        // The layers can be put around the devices again.
        let again = loop {
            match attach(directory) {
                Ok(source) => break source,
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        };
        drop(guard);
        let server_time = server.join().unwrap();
        drop(again);
        (server_time, client_time, report)
    });
    let counters = report.counters;
    assert_eq!((counters.requests, counters.responses), (COUNT as u64, COUNT as u64), "{counters:?}");
    assert_eq!((counters.connections_midstream, counters.missed_bytes, report.source_lost), (0, 0, 0));
    let mean = |time: Duration| time.as_nanos() as u64 / COUNT as u64;
    let (least, most) = (mean(server_time), mean(client_time));
    let monitored = report.latency.total.mean_ns;
    assert!(least <= monitored && monitored <= most, "{least} {monitored} {most}");
    assert!(report.latency.total.min_ns >= COST.as_nanos() as u64);
}

/// Connects to itself over the loopback link, again and again: the client sends a request and closes.
#[derive(Default)]
struct SelfTalk {
    client: Option<Conn>,
}

impl SelfTalk {
    fn connect(&mut self, cx: &mut Context<'_>) {
        self.client = Some(cx.connect("127.0.0.1:80".parse().unwrap(), ConnectOptions::default()).unwrap());
    }
}

impl Handler for SelfTalk {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.listen("127.0.0.1:80".parse().unwrap(), ListenOptions::default())?;
        self.connect(cx);
        Ok(())
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        assert_eq!(cx.send(conn, GET).unwrap(), GET.len());
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        match self.client {
            Some(client) if client == conn => cx.abort(conn).unwrap(),
            _ => assert_eq!(cx.send(conn, OK).unwrap(), OK.len()),
        }
        data.len()
    }

    fn closed(&mut self, cx: &mut Context<'_>, conn: Conn, _: CloseReason) {
        if self.client == Some(conn) {
            self.connect(cx);
        }
    }
}

#[test]
fn loopback_frames_are_copied_once() {
    let base = tempfile::tempdir().unwrap();
    let mut config = config("10.0.0.1/24");
    config.loopback = Loopback::Stack;
    let published = PublishedStack::new_in(&base.path().join("run"), &config.run, "test").unwrap().unwrap();
    let stop = StopFlag::new().unwrap();
    let directory = published.dir().path();
    thread::scope(|scope| {
        let shard_stop = stop.clone();
        let published = published.clone();
        let shard = scope.spawn(move || {
            let (device, _other) = pair(MemoryConfig::default());
            let shard = Shard::builder(config).handler(SelfTalk::default()).device("cable", device);
            shard.published(Some(published), "0").build().unwrap().run(&shard_stop).unwrap();
        });
        // The shard is registered when it is built.
        let mut frames = loop {
            match StackFrames::attach(directory, 1 << 20, 65_550, true) {
                Ok(frames) if !frames.rings().is_empty() => break frames,
                _ => thread::sleep(Duration::from_millis(1)),
            }
        };
        let rings: Vec<_> = frames.rings().iter().map(|r| (r.device.clone(), r.direction)).collect();
        let loopback = rings.iter().position(|(device, _)| device == "lo").unwrap();
        assert_eq!((rings.len(), rings[loopback].1), (3, MirrorDirection::Received));
        let (mut starts, mut payloads) = (HashSet::new(), 0);
        while payloads < 200 {
            let state = frames.poll(|frame| {
                assert_eq!((frame.ring, frame.bytes.len()), (loopback, frame.frame.frame_len));
                let Frame::Tcp(segment) = Frame::parse(LinkType::Ethernet, frame.bytes) else { panic!() };
                if segment.flags & (SYN | ACK) == SYN {
                    assert!(starts.insert((segment.source_port, segment.seq)), "a SYN was copied twice");
                }
                payloads += usize::from(segment.payload == GET || segment.payload == OK);
            });
            if state.unwrap() == SourceState::Idle {
                frames.wait(Duration::from_millis(1));
            }
        }
        assert!(starts.len() >= 90, "{}", starts.len());
        drop(frames);
        // A monitor does not see the loopback link, and the layer is gone: the shard goes on.
        let source = loop {
            match StackFrames::attach(directory, 1 << 20, 65_550, false) {
                Ok(source) => break source,
                Err(_) => thread::sleep(Duration::from_millis(1)),
            }
        };
        assert!(source.rings().iter().all(|ring| ring.device == "cable") && source.rings().len() == 2);
        stop.stop();
        shard.join().unwrap();
    });
}
