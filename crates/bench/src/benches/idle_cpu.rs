//! CPU time of a server whose connections are all idle: `ginnel httpd` on a shard as users run it, including
//! timers, timeouts and sleep.

use crate::client::{Client, ClientConfig, Mode};
use crate::harness::machine::process_cpu_time;
use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use crate::http;
use crate::server::{Checksums, ShardServer, cable, link_setup};
use clap::Parser;
use core::time::Duration;
use ginnel::{StopFlag, clock};
use ginnel_apps::httpd::{self, Httpd};
use ginnel_stack::tcp::config::TcpConfig;
use std::thread;

/// Connections that are opened.
const CONNECTIONS: u32 = 1_000_000;
/// Limit on the connections of the server's stack (`tcp.connections_max`), above its default.
const CONNECTIONS_MAX: u32 = 10_000_000;
/// Connections that are opened at the same time.
const ACTIVE: u32 = 64;
/// Size of each ring in bytes.
const RING_BYTES: usize = 1 << 18;
/// Time between the last request and the measurement of CPU time.
const IDLE_TIME: Duration = Duration::from_secs(3);
/// Longer than the bench, so that no connection times out. Each is still checked every five seconds, the
/// shortest of the server's timeouts.
const IDLE_TIMEOUT: &str = "1h";
/// Largest percentage of a core that a million idle connections may use.
const PERCENT_MAX: f64 = 1.0;
/// Longest time to open all connections, which takes some ten seconds.
const OPEN_TIMEOUT: Duration = Duration::from_secs(600);

/// Parser for the options of the server.
#[derive(Debug, Parser)]
struct HttpdCommand {
    #[command(flatten)]
    options: httpd::HttpdOptions,
}

/// Opens a million connections, makes one request on each, and measures the server's CPU time while all are
/// idle.
pub fn run(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let failed = |e: ginnel::Error| MeasureError::Failed(e.to_string());
    let connections = if options.smoke { CONNECTIONS / 10 } else { CONNECTIONS };
    let site = tempfile::tempdir()?;
    std::fs::write(site.path().join("64"), [b'x'; http::BODY_BYTES])?;
    let words = ["httpd".as_ref(), site.path().as_os_str(), "--listen".as_ref(), "0.0.0.0:80".as_ref()];
    let words = words.into_iter().chain(["--idle-timeout".as_ref(), IDLE_TIMEOUT.as_ref()]);
    let command = HttpdCommand::try_parse_from(words).map_err(|e| MeasureError::Failed(e.to_string()))?;
    let client = ClientConfig {
        wire: link_setup(Checksums::Device),
        mode: Mode::Hold { active: ACTIVE },
        connections,
        requests: vec![http::REQUEST.to_vec()],
        window_scale: None,
    };
    let (server_end, client_end) = cable(Checksums::Device, RING_BYTES);
    let mut client = Client::new(client_end, &client);
    let tcp = TcpConfig { connections_max: CONNECTIONS_MAX, ..TcpConfig::default() };
    let started = clock::now();
    let server = Httpd::new(&command.options).map_err(failed)?;
    let mut shard = ShardServer::new(server_end, server, tcp, started).map_err(failed)?.into_shard();
    while client.counts().done < u64::from(connections) {
        let now = clock::now();
        if now - started > OPEN_TIMEOUT {
            return Err(MeasureError::Failed(format!("the client makes no progress: {:?}", client.counts())));
        }
        shard.poll_once(now).map_err(failed)?;
        client.turn(now);
    }

    let stop = StopFlag::new()?;
    let flag = stop.clone();
    let running = thread::spawn(move || shard.run(&flag).map(|()| shard));
    thread::sleep(IDLE_TIME);
    let time = Duration::from_secs_f64(options.seconds(10.0));
    let (used, from) = (process_cpu_time(), clock::now());
    // This thread sleeps, so the CPU time of the process is the shard's.
    thread::sleep(time);
    let used = (process_cpu_time() - used).as_secs_f64();
    let passed = (clock::now() - from).as_secs_f64();
    // The client has made no turn since the last request: as many were open then.
    let open = client.counts().open;
    stop.stop();
    let shard =
        running.join().map_err(|_| MeasureError::Failed("the shard panicked".into()))?.map_err(failed)?;

    let mut result = BenchResult::from_counts("idle-cpu", "% of a core", 100.0 * used / passed, None);
    let counters = shard.handler().server().counters();
    let facts = [
        ("connections", open),
        ("accepted", counters.connections),
        ("timeouts", counters.timeouts),
        ("sleeps", shard.stats().sleeps),
        ("turns", shard.stats().turns),
    ];
    result.our_facts.extend(facts.map(|(name, value)| (name.to_string(), value as f64)));
    if counters.connections != u64::from(connections) || counters.timeouts > 0 {
        result.problems.push(format!("not all of {connections} connections are open: {counters:?}"));
    }
    if result.ours > PERCENT_MAX {
        result.problems.push(format!("more than {PERCENT_MAX} % of a core"));
    }
    Ok(vec![result])
}
