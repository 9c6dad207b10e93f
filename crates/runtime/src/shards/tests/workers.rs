//! Workers: which worker gets a connection, and how a worker affects the others.

use super::threads::{cpus, only_v4, open};
use super::{CLIENT_ADDRESSES, Fixture, config, stack_config};
use crate::config::{Config, Placement};
use crate::context::Context;
use crate::error::Error;
use crate::executor::Executor;
use crate::handler::Handler;
use crate::net::TcpStream;
use crate::shard::Shard;
use crate::stop::StopFlag;
use crate::time::sleep;
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use ginnel_devices::memory::RssMode;
use ginnel_stack::events::CloseReason;
use ginnel_stack::handle::{Conn, Listener};
use ginnel_stack::options::{ConnectOptions, ListenOptions};
use std::sync::{Mutex, mpsc};
use std::{io, thread};

const PLACEMENTS: [Placement; 3] = [Placement::Inline, Placement::Paired, Placement::Split];

fn with_workers(count: u32, placement: Placement, workers: u32) -> Config {
    let mut config = only_v4(stack_config(count));
    (config.shard.placement, config.shard.workers) = (placement, workers);
    config
}

fn listen(cx: &mut Context<'_>) -> Result<(), Error> {
    cx.listen("10.0.0.1:7".parse().unwrap(), ListenOptions::default()).map(|_| ())
}

/// Answers each byte with the number of its worker, and `!` only after it was released.
struct StuckHandler<'a> {
    is_stuck: &'a AtomicBool,
    released: &'a Mutex<mpsc::Receiver<()>>,
    accepted: u32,
}

impl Handler for StuckHandler<'_> {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        listen(cx)
    }

    fn accepted(&mut self, _: &mut Context<'_>, _: Conn, _: Listener) {
        self.accepted += 1;
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        if data.contains(&b'!') {
            self.is_stuck.store(true, Ordering::Release);
            self.released.lock().unwrap().recv_timeout(Duration::from_secs(20)).unwrap();
        }
        let answer = vec![b'0' + cx.worker() as u8; data.len()];
        cx.send(conn, &answer).unwrap()
    }
}

async fn ask(stream: &mut TcpStream) -> io::Result<u8> {
    stream.write_all(b"?").await?;
    answer(stream).await
}

async fn answer(stream: &mut TcpStream) -> io::Result<u8> {
    let mut byte = [0];
    stream.read_exact(&mut byte).await?;
    Ok(byte[0])
}

async fn connect() -> io::Result<(TcpStream, u8)> {
    let mut stream = loop {
        match TcpStream::connect("10.0.0.1:7").await {
            // The server does not listen yet.
            Err(refused) if refused.kind() == io::ErrorKind::ConnectionRefused => {
                sleep(Duration::from_millis(1)).await;
            }
            connected => break connected?,
        }
    };
    let worker = ask(&mut stream).await?;
    Ok((stream, worker))
}

/// Acts as the client: blocks one worker, and asserts that everything else continues.
async fn block_one_worker(is_stuck: &AtomicBool, release: mpsc::Sender<()>) -> io::Result<()> {
    let (mut one, stuck) = connect().await?;
    let (mut same, mut others) = (Vec::new(), Vec::new());
    while same.len() < 2 || others.len() < 2 {
        let (stream, worker) = connect().await?;
        if worker == stuck { same.push(stream) } else { others.push(stream) }
    }
    one.write_all(b"!").await?;
    while !is_stuck.load(Ordering::Acquire) {
        sleep(Duration::from_millis(1)).await;
    }
    for stream in &mut same {
        stream.write_all(b"?").await?;
    }
    for _ in 0..20 {
        for stream in &mut others {
            assert_ne!(ask(stream).await?, stuck);
        }
    }
    // Some of these are offered to the blocked worker, which does not accept them.
    for _ in 0..6 {
        assert_ne!(connect().await?.1, stuck);
    }
    for stream in &mut same {
        assert!(stream.try_read(&mut [0]).is_err(), "its worker is blocked");
    }
    release.send(()).unwrap();
    for stream in same.iter_mut().chain([&mut one]) {
        assert_eq!(answer(stream).await?, stuck);
    }
    Ok(())
}

#[test]
fn blocked_worker_delays_only_its_own_connections() {
    for placement in PLACEMENTS {
        let (opened, far) = open(with_workers(1, placement, 2), RssMode::Hash);
        assert_eq!((opened.count(), opened.applications()), (1, 2));
        let stop = StopFlag::new().unwrap();
        let (release, released) = mpsc::channel();
        let released = Mutex::new(released);
        // The client's task outlives everything that is borrowed here.
        let is_stuck: &'static AtomicBool = Box::leak(Box::default());
        thread::scope(|scope| {
            let make = |_| Ok(StuckHandler { is_stuck, released: &released, accepted: 0 });
            let finish = |number, shard: Shard<StuckHandler<'_>>| {
                let name = thread::current().name().unwrap().to_string();
                assert_eq!(name, format!("worker-0-{number}"));
                (shard.handler().accepted, shard.stats().sleeps, shard.stack_stats())
            };
            let flag = stop.clone();
            let server = scope.spawn(move || opened.run(&flag, make, finish));
            let client = Executor::new(move || block_one_worker(is_stuck, release));
            let client =
                Shard::builder(only_v4(config(&CLIENT_ADDRESSES))).handler(client).device("cable", far);
            let ended = client.build().unwrap().run(&StopFlag::new().unwrap());
            stop.stop();
            let ends = server.join().unwrap().unwrap();
            ended.unwrap();
            let [(one, sleeps, stack), (other, ..)] = ends[..] else { panic!("{ends:?}") };
            assert!(one >= 2 && other >= 2 && sleeps > 0, "{placement:?}: {ends:?}");
            assert!(stack.frames_received > 50, "{placement:?}: {stack:?}");
        });
    }
}

/// Reads nothing on its first connection until it is released, and everything on others.
#[derive(Default)]
struct UnreadingHandler {
    first: Option<Conn>,
    is_released: bool,
    taken: Vec<u8>,
    closed: u32,
}

impl Handler for UnreadingHandler {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        listen(cx)
    }

    fn accepted(&mut self, _: &mut Context<'_>, conn: Conn, _: Listener) {
        self.first.get_or_insert(conn);
    }

    fn data(&mut self, _: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        if self.first != Some(conn) {
            return data.len();
        }
        if !self.is_released {
            return 0;
        }
        self.taken.extend(data);
        data.len()
    }

    fn closed(&mut self, _: &mut Context<'_>, _: Conn, reason: CloseReason) {
        assert_eq!(reason, CloseReason::Normal);
        self.closed += 1;
    }
}

/// Sends a pattern on each of its connections, as fast as possible.
struct FloodClient {
    conns: Vec<(Conn, usize)>,
}

const FLOOD: usize = 1 << 20;

fn pattern(range: core::ops::Range<usize>) -> Vec<u8> {
    range.map(|i| (i * 7 % 251) as u8).collect()
}

impl FloodClient {
    fn pour(&mut self, cx: &mut Context<'_>, conn: Conn) {
        let (_, sent) = self.conns.iter_mut().find(|(c, _)| *c == conn).unwrap();
        while *sent < FLOOD {
            let count = cx.send(conn, &pattern(*sent..(*sent + 4096).min(FLOOD))).unwrap();
            if count == 0 {
                return;
            }
            *sent += count;
        }
        cx.close(conn).unwrap();
    }
}

impl Handler for FloodClient {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        let to = "10.0.0.1:7".parse().unwrap();
        let conns = (0..4).map(|_| Ok((cx.connect(to, ConnectOptions::default())?, 0)));
        self.conns = conns.collect::<Result<_, Error>>()?;
        Ok(())
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.pour(cx, conn);
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        self.pour(cx, conn);
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

#[test]
fn unread_data_blocks_only_its_own_peer() {
    for placement in PLACEMENTS {
        let mut config = with_workers(1, placement, 2);
        (config.tcp.recv_buffer_bytes, config.channel.socket_buffer_bytes) = (64 << 10, 16 << 10);
        let flood = FloodClient { conns: Vec::new() };
        let mut fixture = Fixture::new(config, RssMode::Hash, |_| UnreadingHandler::default(), flood);
        fixture.advance(Duration::from_secs(5));
        let closed = |fixture: &Fixture<UnreadingHandler, FloodClient>| -> u32 {
            fixture.shards.iter().map(|shard| shard.handler().closed).sum()
        };
        // Each worker blocks its first connection, and the other two are done.
        assert_eq!(closed(&fixture), 2, "{placement:?}");
        let mut sent: Vec<usize> = fixture.client.handler().conns.iter().map(|(_, sent)| *sent).collect();
        sent.sort_unstable();
        // The connections that are not blocked have sent everything, and no others have.
        assert_eq!(sent[2..], [FLOOD; 2]);
        assert!(sent[1] < FLOOD, "{placement:?}: {sent:?}");
        for worker in 0..2 {
            fixture.with_shard(worker, |handler, cx| {
                handler.is_released = true;
                cx.resume_reading(handler.first.unwrap());
            });
        }
        fixture.advance(Duration::from_secs(20));
        assert_eq!(closed(&fixture), 4, "{placement:?}");
        for shard in &fixture.shards {
            assert!(shard.handler().taken == pattern(0..FLOOD), "{placement:?}");
            shard.check_invariants();
        }
    }
}

/// Accepts connections or declines them.
struct DecliningHandler {
    may: bool,
    accepted: u32,
}

impl Handler for DecliningHandler {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        listen(cx)
    }

    fn may_accept(&mut self, _: Listener) -> bool {
        self.may
    }

    fn accepted(&mut self, _: &mut Context<'_>, _: Conn, _: Listener) {
        self.accepted += 1;
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

#[test]
fn worker_that_declines_gets_few_offers() {
    let config = with_workers(1, Placement::Split, 2);
    let server = |number| DecliningHandler { may: number == 1, accepted: 0 };
    let mut fixture = Fixture::new(config, RssMode::Hash, server, super::RecordingHandler::default());
    fixture.advance(Duration::from_millis(10));
    for _ in 0..300 {
        let to = "10.0.0.1:7".parse().unwrap();
        fixture
            .client
            .with(fixture.now, |_, cx| cx.connect(to, ConnectOptions::default()).map(|_| ()))
            .unwrap();
        fixture.advance(Duration::from_millis(1));
    }
    assert_eq!(fixture.client.handler().connected, 300);
    let [one, other] = [0, 1].map(|worker| fixture.shards[worker].handler().accepted);
    assert_eq!((one, other), (0, 300 - 16));
}

/// Listens after some time, except on the first shard.
struct LateListener(usize, u32);

impl Handler for LateListener {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        if self.0 == 0 {
            return listen(cx);
        }
        cx.set_timer(Duration::from_millis(50), 0);
        Ok(())
    }

    fn timer(&mut self, cx: &mut Context<'_>, _: u64) {
        listen(cx).unwrap();
    }

    fn accepted(&mut self, _: &mut Context<'_>, _: Conn, _: Listener) {
        self.1 += 1;
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

/// One shard listens, so all do. Connections of a shard whose application does not listen yet are not lost.
#[test]
fn connections_wait_until_their_application_listens() {
    for (placement, workers) in [(Placement::Inline, 0), (Placement::Split, 0), (Placement::Split, 2)] {
        let config = with_workers(2, placement, workers);
        let server = |number| LateListener(number, 0);
        let mut fixture =
            Fixture::new(config, RssMode::RoundRobin, server, super::RecordingHandler::default());
        fixture.advance(Duration::from_millis(10));
        for _ in 0..40 {
            let to = "10.0.0.1:7".parse().unwrap();
            let dial = |cx: &mut Context<'_>| cx.connect(to, ConnectOptions::default()).map(|_| ());
            fixture.client.with(fixture.now, |_, cx| dial(cx)).unwrap();
        }
        fixture.advance(Duration::from_millis(200));
        assert_eq!(fixture.client.handler().connected, 40);
        let accepted: Vec<u32> = fixture.shards.iter().map(|shard| shard.handler().1).collect();
        assert_eq!(accepted.iter().sum::<u32>(), 40, "{placement:?}, {workers} workers: {accepted:?}");
        assert!(accepted[accepted.len() / 2..].iter().sum::<u32>() > 5, "{accepted:?}");
    }
}

/// Panics, is refused, or fails later.
struct EndingHandler(&'static str);

impl Handler for EndingHandler {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        listen(cx)?;
        match self.0 {
            "start" => Err(Error::application("no more")),
            _ => {
                cx.set_timer(Duration::from_millis(20), 0);
                Ok(())
            }
        }
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn timer(&mut self, cx: &mut Context<'_>, _: u64) {
        match self.0 {
            "panic" => panic!("test failure"),
            "stop" => cx.stop(),
            _ => {}
        }
    }
}

#[test]
fn workers_and_shards_end_together_however_one_of_them_ends() {
    for placement in PLACEMENTS {
        for (how, error) in [
            ("build", Some("shard 1: no more")),
            ("start", Some("shard 1: no more")),
            ("panic", Some("shard 1: panicked: test failure")),
            ("stop", None),
        ] {
            let (opened, _far) = open(with_workers(2, placement, 2), RssMode::Hash);
            assert_eq!(opened.applications(), 4);
            let stop = StopFlag::new().unwrap();
            let make = |number| match (number, how) {
                (2, "build") => Err(Error::application("no more")),
                (2, how) => Ok(EndingHandler(how)),
                _ => Ok(EndingHandler("")),
            };
            let ended = opened.run(&stop, make, |number, _| number);
            match error {
                Some(error) => assert_eq!(ended.unwrap_err().to_string(), error, "{placement:?} {how}"),
                None => assert_eq!(ended.unwrap(), [0, 1, 2, 3], "{placement:?}"),
            }
        }
    }
}

#[test]
fn commands_reach_their_worker() {
    struct CommandRecorder(Option<u32>);
    impl Handler for CommandRecorder {
        fn start(&mut self, _: &mut Context<'_>) -> Result<(), Error> {
            Ok(())
        }
        fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
            data.len()
        }
        fn command(&mut self, cx: &mut Context<'_>, command: crate::Command) {
            self.0 = command.downcast_ref().copied();
            cx.stop();
        }
    }
    for (placement, count, workers) in
        [(Placement::Inline, 1, 3), (Placement::Split, 2, 0), (Placement::Split, 2, 2)]
    {
        let (opened, _far) = open(with_workers(count, placement, workers), RssMode::Hash);
        let commanders = opened.commanders();
        assert_eq!(commanders.len(), opened.applications());
        for (number, commander) in (0u32..).zip(&commanders) {
            commander.send(Box::new(number)).unwrap();
        }
        let received = opened
            .run(&StopFlag::new().unwrap(), |_| Ok(CommandRecorder(None)), |_, shard| shard.handler().0)
            .unwrap();
        // The first to stop stops all, so some may not get that far.
        for (number, received) in (0..).zip(&received) {
            assert!(received.is_none_or(|received| received == number), "{placement:?}: {received:?}");
        }
        assert!(received.iter().any(Option::is_some));
    }
}

#[test]
fn applications_and_workers_are_pinned_as_configured() {
    let cpus = cpus();
    let [first, .., last] = cpus[..] else { return };
    let mask = |_: usize, _: Shard<super::RecordingHandler>| self::cpus();
    let run = |config: Config| {
        let (opened, _far) = open(config, RssMode::Hash);
        let stop = StopFlag::new().unwrap();
        stop.stop();
        opened.run(&stop, |_| Ok(super::RecordingHandler::default()), mask).unwrap()
    };
    let mut config = with_workers(1, Placement::Split, 2);
    config.shard.cpu = Some(first);
    config.shard.worker_cpus = vec![last, first];
    assert_eq!(run(config), [vec![last], vec![first]]);
    let mut config = with_workers(2, Placement::Split, 0);
    config.shards.cpus = vec![first, last];
    config.shards.application_cpus = vec![last, first];
    assert_eq!(run(config), [vec![last], vec![first]]);
    let mut config = with_workers(2, Placement::Paired, 0);
    config.shards.cpus = vec![first, last];
    assert_eq!(run(config), [vec![first], vec![last]], "in a thread of its own");
    let mut config = with_workers(2, Placement::Split, 2);
    config.shards.cpus = vec![first, last];
    assert_eq!(run(config), [cpus.clone(), cpus.clone(), cpus.clone(), cpus]);
}
