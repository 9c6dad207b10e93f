//! Runs `ginnel load iot` and `ginnel iot` in turns on one thread, in simulated time, to count what the
//! server costs per message. A part of this program stands for Redis, so that each run has the same steps.
//!
//! The bench "instructions" runs this program under valgrind. It is no part of `ginnel-bench`, whose other
//! cases would be compiled differently beside it.

mod mirrored_device;
mod program_options;

use clap::Parser;
use core::net::Ipv4Addr;
use core::time::Duration;
use ginnel::config::{Config, DeviceConfig, DeviceKind, Prefix};
use ginnel::{Error, Instant, Shard};
use ginnel_apps::iot::{Iot, IotOptions, RedisAddress};
use ginnel_apps::load::light::{LightWorker, WorkerStack};
use ginnel_apps::load::messages::{IotLoadOptions, MessageJob, MessageLoadOptions};
use ginnel_apps::load::plan::WorkerShare;
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_measure::MeasureError;
use ginnel_stack::device::Device;
use ginnel_stack::tcp::config::TcpConfig;
use mirrored_device::mirrored;
use program_options::options;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

/// Addresses of `ginnel iot` and of the generator.
const SERVER: Ipv4Addr = Ipv4Addr::new(192, 168, 0, 1);
const CLIENT: Ipv4Addr = Ipv4Addr::new(192, 168, 0, 2);
/// Name of the device of each.
const NAME: &str = "cable";
/// Start of the simulated time, and the part of it that a turn takes.
const START: Instant = Instant::from_millis(1_000_000);
const TICK: Duration = Duration::from_millis(1);
/// Connections, each of which sends a message in 100 ms: its acknowledgement does not wait for the next one.
const CONNECTIONS: u64 = 1600;
/// Messages that are due in each turn.
const MESSAGES_PER_TURN: u64 = 16;

/// A run with messages of 200 bytes: 5 % are urgent requests, 5 % ordinary ones, and the others heartbeats.
#[derive(Debug, Parser)]
#[command(name = "ginnel-bench-iot", version)]
struct IotCase {
    /// Case of the bench "instructions": with "mirrored" in its name, a monitor gets copies of the frames.
    #[arg(long, value_name = "CASE")]
    count_case: String,

    /// Number of messages.
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    operations: u64,
}

fn main() -> ExitCode {
    match IotCase::parse().run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the configuration of a stack with an address on the cable.
fn config(address: Ipv4Addr) -> Config {
    let own = Prefix { address: address.into(), len: 24 };
    let device = DeviceConfig::new(NAME, DeviceKind::Memory);
    Config { tcp: TcpConfig::default(), ..Config::single(device, &[own], &[]) }
}

/// Returns an error of a stack as a failure of the bench.
fn failed(error: Error) -> MeasureError {
    MeasureError::Failed(error.to_string())
}

/// valgrind counts the instructions within this function, which it finds by its name.
#[inline(never)]
fn server_turn(server: &mut Shard<Iot>, now: Instant) {
    // The call must not be in tail position: a jump in its place would hide the end of the function from
    // valgrind.
    _ = std::hint::black_box(server.poll_once(now).expect("`ginnel iot` does not fail"));
}

impl IotCase {
    /// Runs the generator to its end against the server.
    fn run(&self) -> Result<(), MeasureError> {
        let (server_end, client_end) = pair(MemoryConfig { ring_bytes: 1 << 22, ..MemoryConfig::default() });
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("redis.sock");
        let mut redis = ScriptedRedis::listen(&path)?;
        let handler = Iot::new(&options::<IotOptions>(&[]), &[RedisAddress::Unix(path)]).map_err(failed)?;
        let server_end =
            if self.count_case.contains("mirrored-") { mirrored(server_end)? } else { server_end };
        let server = Shard::builder(config(SERVER)).handler(handler).device(NAME, server_end);
        let mut server = server.seed([7; 32]).now(START).build().map_err(failed)?;
        let mut generator = self.generator(client_end).map_err(failed)?;
        let mut now = START;
        loop {
            if now > START + Duration::from_secs(600) {
                return Err(MeasureError::Failed("the generator makes no progress".into()));
            }
            server_turn(&mut server, now);
            redis.turn()?;
            if generator.turn(now).done && server.handler().waiting() == 0 {
                break;
            }
            now += TICK;
        }
        match server.handler().counters().done {
            done if done == self.operations => Ok(()),
            done => Err(MeasureError::Failed(format!("{done} of {} messages were stored", self.operations))),
        }
    }

    fn generator(&self, client_end: Device) -> Result<LightWorker<MessageJob>, Error> {
        let (server, connections) = (SERVER.to_string(), CONNECTIONS.to_string());
        let turns = |messages: u64| TICK * u32::try_from(messages / MESSAGES_PER_TURN).unwrap_or(u32::MAX);
        let seconds = |time: Duration| format!("{}s", time.as_secs_f64());
        let (burst, epoch) = (MESSAGES_PER_TURN.to_string(), seconds(turns(CONNECTIONS)));
        let duration = seconds(turns(self.operations));
        let words = [
            ["--connections", &connections],
            ["--burst", &burst],
            ["--epoch", &epoch],
            ["--duration", &duration],
            ["--low-share", "0.05"],
        ];
        let words = [&[&*server], words.as_flattened()].concat();
        let job = options::<IotLoadOptions>(&words).job(None)?;
        let stack = WorkerStack { config: config(CLIENT), device: Some(client_end) };
        LightWorker::new(&job, WorkerShare::WHOLE, Arc::default(), stack, START)
    }
}

/// Answers the commands of `ginnel iot`: GET with a number, and SET.
struct ScriptedRedis {
    listener: UnixListener,
    clients: Vec<UnixStream>,
    /// True if the last byte that was read begins a command.
    has_begun: bool,
}

impl ScriptedRedis {
    fn listen(path: &Path) -> Result<Self, MeasureError> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, clients: Vec::new(), has_begun: false })
    }

    /// Answers all commands that have arrived.
    fn turn(&mut self) -> Result<(), MeasureError> {
        while let Ok((client, _)) = self.listener.accept() {
            client.set_nonblocking(true)?;
            self.clients.push(client);
        }
        let (mut commands, mut replies) = ([0; 64 << 10], Vec::new());
        for client in &mut self.clients {
            loop {
                let len = match client.read(&mut commands) {
                    Ok(0) => break,
                    Ok(len) => len,
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    Err(e) => return Err(e.into()),
                };
                for byte in &commands[..len] {
                    // Keys and values have no asterisk.
                    match (core::mem::replace(&mut self.has_begun, *byte == b'*'), byte) {
                        (true, b'2') => replies.extend_from_slice(b"$1\r\n1\r\n"),
                        (true, _) => replies.extend_from_slice(b"+OK\r\n"),
                        (false, _) => {}
                    }
                }
            }
            client.write_all(&replies)?;
            replies.clear();
        }
        Ok(())
    }
}
