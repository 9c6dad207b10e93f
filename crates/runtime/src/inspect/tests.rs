//! Clients that read and clients that do not, of a shard with many sockets.

use super::server::{InspectServer, SOCKET, SocketCloser, answering_shards};
use crate::config::Placement;
use crate::fixture::{SERVER_ADDRESS, ShardThreads, config, host};
use crate::net::{TcpListener, UdpSocket};
use crate::time::timeout;
use crate::{Conn, Context, Error, Executor, Handler, Shard, Shards, UdpOptions};
use core::future::pending;
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::Device;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const TEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Their lines do not fit into the buffers of a Unix socket.
const SOCKETS: u16 = 6_000;

/// Has many UDP sockets and does nothing with them.
struct ManySockets(u16);

impl Handler for ManySockets {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.listen("10.0.0.1:80".parse().unwrap(), crate::ListenOptions::default())?;
        for port in 1..=self.0 {
            cx.udp_bind(([10, 0, 0, 1], port).into(), UdpOptions::default()).unwrap();
        }
        Ok(())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }
}

/// A running shard and its inspect server, until the value is dropped.
struct InspectFixture {
    temp_folder: PathBuf,
    inspect_server: Option<InspectServer>,
    stats: crate::StatsReader,
    threads: ShardThreads,
    /// The other end of the shard's device.
    _far: Device,
}

impl InspectFixture {
    fn new(sockets: u16) -> Self {
        Self::with_shard(|device| host(SERVER_ADDRESS, ManySockets(sockets), device).build().unwrap())
    }

    fn with_shard<H: Handler + Send + 'static>(build: impl FnOnce(Device) -> Shard<H>) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let temp_folder =
            std::env::temp_dir().join(format!("ginnel-inspect-{}-{number}", std::process::id()));
        std::fs::create_dir(&temp_folder).unwrap();
        let inspect_server = InspectServer::open(&temp_folder).unwrap();
        let (device, far) = pair(MemoryConfig::default());
        let shard = build(device);
        // The shard that has the engine.
        let runner = shard.co_shard.as_ref().and_then(|co_shard| co_shard.runner());
        inspect_server.register("7", runner.map_or_else(|| shard.commander(), |runner| runner.commander()));
        let (stats, mut threads) = (shard.stats_reader(), ShardThreads::new());
        threads.run(shard);
        let fixture = Self { temp_folder, inspect_server: Some(inspect_server), stats, threads, _far: far };
        let started = Instant::now();
        while fixture.stats.snapshot().running_ns == 0 {
            assert!(started.elapsed() < TEST_TIMEOUT);
            std::thread::sleep(Duration::from_millis(1));
        }
        fixture
    }

    fn ask(&self, question: &str) -> UnixStream {
        let mut stream = UnixStream::connect(self.temp_folder.join(SOCKET)).unwrap();
        stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        // A client above the limit is refused, and its request may stay unread.
        match stream.write_all(format!("{question}\n").as_bytes()) {
            Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => panic!("{error}"),
            _ => stream,
        }
    }

    fn lines(&self, question: &str) -> Vec<String> {
        BufReader::new(self.ask(question)).lines().map(Result::unwrap).collect()
    }

    /// Returns the number of chunks requested from the shard once that number is stable and published.
    fn settled_chunks(&self) -> u64 {
        let (end, mut last) = (Instant::now() + TEST_TIMEOUT, 0);
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let chunks = self.stats.snapshot().commands;
            if chunks > 0 && chunks == last {
                return chunks;
            }
            assert!(Instant::now() < end, "{chunks} chunks, and still more");
            last = chunks;
        }
    }
}

impl Drop for InspectFixture {
    fn drop(&mut self) {
        self.threads.stop();
        self.inspect_server = None;
        let _ = std::fs::remove_dir_all(&self.temp_folder);
    }
}

#[test]
fn every_socket_is_listed_once_in_bounded_chunks() {
    let fixture = InspectFixture::new(1_000);
    let lines = fixture.lines("list 1");
    assert!(lines[0].starts_with("shard\tnetid\tstate\t"), "{}", lines[0]);
    assert!(lines[1].starts_with("7\ttcp\tLISTEN\t0\t"), "{}", lines[1]);
    assert_eq!(lines.last().map(String::as_str), Some("."));
    let mut ports: Vec<u16> = Vec::new();
    for line in &lines[2..lines.len() - 1] {
        let fields: Vec<&str> = line.split('\t').collect();
        assert_eq!(fields[..5], ["7", "udp", "UNCONN", "0", "0"]);
        ports.push(fields[5].strip_prefix("10.0.0.1:").unwrap().parse().unwrap());
    }
    ports.sort_unstable();
    assert_eq!(ports, (1..=1_000).collect::<Vec<u16>>());
    assert_eq!(fixture.settled_chunks(), 1_001u64.div_ceil(super::SLOTS_PER_TURN as u64));
}

// limit: connections whose latency stages are sampled
#[test]
fn stages_of_too_many_connections_are_refused() {
    let fixture = InspectFixture::new(1);
    let conns = |count: usize| {
        let ends = "10.0.0.1:80\t10.0.0.2:9".to_owned();
        let lines: Vec<String> = (0..count).map(|index| format!("7\tc{index}.1\t{ends}")).collect();
        format!("stages 1 600000\n{}\n.", lines.join("\n"))
    };
    let refusal = "!\tat most 1024 connections are sampled at a time";
    assert_eq!(fixture.lines(&conns(super::STAGE_CONNS_MAX + 1)), [refusal]);
    // None of them exists, so the stack does not wait until the interval is over.
    assert_eq!(fixture.lines(&conns(super::STAGE_CONNS_MAX)), ["."]);
    for (request, problem) in [
        ("stages 1 x", "!\tthe longest interval is 600 s"),
        ("stages 1 600001\n.", "!\tthe longest interval is 600 s"),
        (
            "stages 1 1\n7\tl0.1\t1.1.1.1:1\t1.1.1.1:2",
            "!\tmalformed line: \"7\\tl0.1\\t1.1.1.1:1\\t1.1.1.1:2\"",
        ),
        ("stages 1 1\n8\tc0.1\t1.1.1.1:1\t1.1.1.1:2", "!\tthere is no shard \"8\""),
        ("stages 1 1\n", "!\tmalformed line: \"\""),
    ] {
        assert_eq!(fixture.lines(request), [problem], "{request:?}");
    }
}

/// Waits until a listing has a line that begins so, and closes its socket.
fn close_listed(fixture: &InspectFixture, begin: &str) {
    let started = Instant::now();
    let line = loop {
        let lines = fixture.lines("list 1");
        if let Some(line) = lines.into_iter().find(|line| line.starts_with(begin)) {
            break line;
        }
        assert!(started.elapsed() < TEST_TIMEOUT, "{begin} is not listed");
    };
    let fields: Vec<&str> = line.split('\t').collect();
    let mut closer = SocketCloser::connect(&fixture.temp_folder).unwrap();
    let [local, peer] = [5, 6].map(|at| fields[at].parse().unwrap());
    assert!(closer.close(fields[0], fields.last().unwrap(), local, peer).unwrap());
}

#[test]
fn tasks_learn_that_their_sockets_were_closed() {
    for placement in [Placement::Inline, Placement::Paired] {
        let (sender, results) = channel();
        let main = move || async move {
            let listener = TcpListener::bind("10.0.0.1:80").await.unwrap();
            let udp = UdpSocket::bind("10.0.0.1:53").await.unwrap();
            for _ in 0..2 {
                sender.send(listener.accept().await.map(drop).unwrap_err().kind()).unwrap();
            }
            sender.send(udp.recv_from(&mut [0]).await.unwrap_err().kind()).unwrap();
            assert!(timeout(Duration::from_millis(10), udp.recv_from(&mut [0])).await.is_err());
            sender.send(ErrorKind::Other).unwrap();
            pending::<()>().await;
        };
        let fixture = InspectFixture::with_shard(|device| {
            let mut config = config(&[SERVER_ADDRESS]);
            config.shard.placement = placement;
            let shards = Shards::new(config).device("cable", vec![device]).open().unwrap();
            let mut handler = Some(Executor::new(main));
            shards.build(|_| Ok(handler.take().unwrap())).unwrap().pop().unwrap()
        });
        close_listed(&fixture, "7\ttcp\tLISTEN");
        let next = || results.recv_timeout(TEST_TIMEOUT).unwrap();
        assert_eq!([next(), next()], [ErrorKind::ConnectionAborted; 2], "{placement:?}");
        close_listed(&fixture, "7\tudp\tUNCONN");
        assert_eq!([next(), next()], [ErrorKind::ConnectionAborted, ErrorKind::Other], "{placement:?}");
    }
}

#[test]
fn client_that_does_not_read_delays_no_other() {
    let mut fixture = InspectFixture::new(SOCKETS);
    let stuck = fixture.ask("list 1");
    let (chunks, all) = (fixture.settled_chunks(), u64::from(SOCKETS) / super::SLOTS_PER_TURN as u64);
    assert!(chunks < all, "{chunks} chunks were requested for a client that does not read");
    assert_eq!(fixture.lines("list 1").len(), usize::from(SOCKETS) + 3, "another client is not served");
    let chunks = fixture.settled_chunks();
    assert!((all..2 * all).contains(&chunks), "{chunks} chunks were requested");
    // The end of the server does not wait for the client either.
    let started = Instant::now();
    fixture.threads.stop();
    fixture.inspect_server = None;
    assert!(started.elapsed() < Duration::from_secs(5));
    drop(stuck);
}

#[test]
fn excess_clients_and_unknown_requests_are_refused() {
    let fixture = InspectFixture::new(SOCKETS);
    assert_eq!(
        fixture.lines("tell me all"),
        [concat!(
            "!\tthe requests are \"list 1\", \"processes 1\", \"kill 1\", \"routes 1\", ",
            "\"change-routes 1\", \"answering 1\""
        )]
    );
    let _stuck: Vec<UnixStream> = (0..8).map(|_| fixture.ask("list 1")).collect();
    let mut text = String::new();
    fixture.ask("list 1").read_to_string(&mut text).unwrap();
    assert_eq!(text, "!\t8 other clients are being served\n");
}

/// Waits in its turn until the other end of a channel is gone.
struct Waiting;

impl Handler for Waiting {
    fn start(&mut self, _: &mut Context<'_>) -> Result<(), Error> {
        Ok(())
    }

    fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize {
        data.len()
    }

    fn command(&mut self, _: &mut Context<'_>, command: Box<dyn std::any::Any + Send>) {
        if let Ok(released) = command.downcast::<Receiver<()>>() {
            let _ = released.recv_timeout(TEST_TIMEOUT);
        }
    }
}

#[test]
fn stuck_shard_does_not_answer() {
    let mut commander = None;
    let fixture = InspectFixture::with_shard(|device| {
        let shard = host(SERVER_ADDRESS, Waiting, device).build().unwrap();
        commander = Some(shard.commander());
        shard
    });
    let answering = || answering_shards(&fixture.temp_folder).unwrap();
    assert_eq!(answering(), [("7".to_owned(), true)]);
    let (release, released) = channel::<()>();
    commander.unwrap().send(Box::new(released)).unwrap();
    assert_eq!(answering(), [("7".to_owned(), false)]);
    drop(release);
    assert_eq!(answering(), [("7".to_owned(), true)]);
}

#[test]
fn ended_shard_is_reported() {
    let mut fixture = InspectFixture::new(10);
    fixture.threads.stop();
    let lines = fixture.lines("list 1");
    assert_eq!(lines[1..], ["!\tshard 7 has ended", "."]);
}

#[test]
fn sockets_are_closed_once() {
    let fixture = InspectFixture::new(1);
    let listed = fixture.lines("list 1");
    let columns: Vec<&str> = listed[0].split('\t').collect();
    let listener = listed.iter().find(|line| line.contains("\tLISTEN\t")).unwrap();
    let cells: Vec<&str> = listener.split('\t').collect();
    let cell = |name: &str| cells[columns.iter().position(|known| *known == name).unwrap()];
    let request = [cell("shard"), cell("sk"), cell("local"), cell("peer")].join("\t");
    assert_eq!(fixture.lines(&format!("kill 1\n{request}\n{request}\n.")), ["1", "0", "."]);
    assert!(!fixture.lines("list 1").iter().any(|line| line.contains("\tLISTEN\t")));
    for (line, expected) in [
        ("7\tc0.0\t10.0.0.1:80", "!\tmalformed line: \"7\\tc0.0\\t10.0.0.1:80\""),
        ("7\tx0.0\t10.0.0.1:80\t0.0.0.0:0", "!\tmalformed line: "),
        ("7\tc0.0\there\t0.0.0.0:0", "!\tmalformed line: "),
        ("8\tc0.0\t10.0.0.1:80\t0.0.0.0:0", "!\tthere is no shard \"8\""),
        (&"x".repeat(5000), "!\tmalformed line: \"xxx"),
    ] {
        let answer = fixture.lines(&format!("kill 1\n{line}"));
        assert!(answer.len() == 1 && answer[0].starts_with(expected), "{answer:?}");
    }
    // Slots that exist in no table, and a connection that does not exist any more.
    let others = ["c0.0", "c4294967295.4294967295", "l9.9", "t0.0", "t4294967295.0", "u0.0", "u4294967295.0"];
    let lines: String = others.iter().map(|sk| format!("7\t{sk}\t10.0.0.1:80\t10.0.0.2:9\n")).collect();
    assert_eq!(fixture.lines(&format!("kill 1\n{lines}.")), ["0", "0", "0", "0", "0", "0", "0", "."]);
}
