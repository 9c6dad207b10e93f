//! Applications with threads of their own.

use crate::fixture::{CLIENT_ADDRESS, SERVER_ADDRESS, config};
use core::time::Duration;
use ginnel::config::Placement;
use ginnel::{
    CloseReason, Conn, ConnectOptions, Context, Error, Handler, ListenOptions, Shard, SocketOptions, StopFlag,
};
use ginnel_devices::memory::{MemoryConfig, pair};
use std::sync::mpsc;
use std::thread;

const REQUESTS: u32 = 2000;
const CONNECTIONS: u32 = 8;

/// Echoes, and panics if a byte asks for that.
struct Echo;

impl Handler for Echo {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        cx.listen("0.0.0.0:7".parse().unwrap(), ListenOptions::default()).map(|_| ())
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        cx.send(conn, data).unwrap_or(data.len())
    }

    fn writable(&mut self, cx: &mut Context<'_>, conn: Conn) {
        cx.resume_reading(conn);
    }
}

/// Sends small requests one after the other on each of its connections, and stops when all are answered and
/// closed.
struct RequestClient {
    answered: u32,
    closed: u32,
    done: mpsc::Sender<u32>,
}

fn dial(cx: &mut Context<'_>) -> Result<(), Error> {
    let socket = SocketOptions { nodelay: true, ..SocketOptions::default() };
    let options = ConnectOptions { socket, ..ConnectOptions::default() };
    cx.connect("10.0.0.1:7".parse().unwrap(), options).map(|_| ())
}

/// Stops the shards of a test however the test ends.
struct StopOnDrop(StopFlag);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl Handler for RequestClient {
    fn start(&mut self, cx: &mut Context<'_>) -> Result<(), Error> {
        (0..CONNECTIONS).try_for_each(|_| dial(cx))
    }

    fn connected(&mut self, cx: &mut Context<'_>, conn: Conn) {
        cx.send(conn, b"request").unwrap();
    }

    fn data(&mut self, cx: &mut Context<'_>, conn: Conn, data: &[u8]) -> usize {
        if data.len() < 7 {
            return 0;
        }
        assert_eq!(data, b"request");
        self.answered += 1;
        if self.answered + CONNECTIONS > REQUESTS {
            cx.close(conn).unwrap();
        } else {
            cx.send(conn, b"request").unwrap();
        }
        7
    }

    fn closed(&mut self, cx: &mut Context<'_>, _: Conn, reason: CloseReason) {
        if reason == CloseReason::Refused && self.answered == 0 {
            // The server does not listen yet.
            return dial(cx).unwrap();
        }
        assert_eq!(reason, CloseReason::Normal);
        self.closed += 1;
        if self.closed == CONNECTIONS {
            self.done.send(self.answered).unwrap();
            cx.stop();
        }
    }
}

fn exchange(server: Placement, client: Placement) {
    let (a, b) = pair(MemoryConfig::default());
    let (mut ca, mut cb) = (config(&[SERVER_ADDRESS]), config(&[CLIENT_ADDRESS]));
    ca.shard.placement = server;
    cb.shard.placement = client;
    let (done, answered) = mpsc::channel();
    let client = RequestClient { answered: 0, closed: 0, done };
    let mut server = Shard::builder(ca).handler(Echo).device("cable", a).build().unwrap();
    let mut client = Shard::builder(cb).handler(client).device("cable", b).build().unwrap();
    let stop = StopFlag::new().unwrap();
    thread::scope(|scope| {
        let running = scope.spawn(|| {
            server.run(&stop).unwrap();
            server.stack_stats()
        });
        let _end = StopOnDrop(stop.clone());
        client.run(&StopFlag::new().unwrap()).unwrap();
        assert_eq!(answered.recv(), Ok(REQUESTS));
        // Both sides of the channel sleep when they are idle.
        thread::sleep(Duration::from_millis(50));
        stop.stop();
        let stats = running.join().unwrap();
        assert!(stats.frames_received > u64::from(REQUESTS), "{stats:?}");
        assert!(stats.sleeps > 0, "{stats:?}");
    });
}

#[test]
fn split_applications_exchange_requests_and_end() {
    exchange(Placement::Split, Placement::Split);
}

#[test]
fn paired_applications_exchange_requests_and_end() {
    exchange(Placement::Paired, Placement::Paired);
}

#[test]
fn placement_is_invisible_to_the_peer() {
    exchange(Placement::Split, Placement::Inline);
    exchange(Placement::Inline, Placement::Paired);
}

/// A device that goes away ends the stack's shard, and the application must not wait for it.
#[test]
fn application_ends_with_the_error_of_its_stack() {
    let (device, _far) = pair(MemoryConfig::default());
    let mut config = config(&[SERVER_ADDRESS]);
    config.shard.placement = Placement::Split;
    // A CPU number beyond those of any machine.
    config.shard.cpu = Some(1023);
    let mut shard = Shard::builder(config).handler(Echo).device("cable", device).build().unwrap();
    let error = shard.run(&StopFlag::new().unwrap()).unwrap_err();
    assert!(error.to_string().starts_with("shard.cpu: CPU 1023"), "{error}");
}

#[test]
fn idle_split_application_uses_no_time() {
    let (device, _far) = pair(MemoryConfig::default());
    let mut config = config(&[SERVER_ADDRESS]);
    config.shard.placement = Placement::Split;
    let mut shard = Shard::builder(config).handler(Echo).device("cable", device).build().unwrap();
    let (stop, reader) = (StopFlag::new().unwrap(), shard.stats_reader());
    let flag = stop.clone();
    let running = thread::spawn(move || {
        shard.run(&flag).unwrap();
        shard.stack_stats()
    });
    thread::sleep(Duration::from_millis(200));
    let before = reader.snapshot();
    thread::sleep(Duration::from_millis(1000));
    let after = reader.snapshot();
    stop.stop();
    let stack = running.join().unwrap();
    assert!(after.turns - before.turns <= 5000, "{before:?} {after:?}");
    assert!(stack.turns <= 50_000 && stack.slept_ns > 500_000_000, "{stack:?}");
}
