//! Resident memory of an idle connection, everything included.

use crate::client::{ClientConfig, Mode};
use crate::harness::result::BenchResult;
use crate::harness::{Failure, Options};
use crate::http;
use crate::server::{Checksums, EngineOptions, EngineServer, cable, wire};
use crate::solo::{START, Solo};
use core::time::Duration;
use ginnel_stack::tcp::config::TcpConfig;
use serde_json::{Value, json};
use std::process::Command;

/// Connections that are opened.
const CONNECTIONS: u32 = 1_000_000;
/// Connections that there could be: their memory must not be touched.
const CONNECTIONS_MAX: u32 = 10_000_000;
/// Connections being opened at the same time.
const ACTIVE: u32 = 64;
/// Bytes of each ring: little beside a million connections.
const RING_BYTES: usize = 1 << 18;
/// How long they are left alone before memory is looked at: what is kept for a while after use has gone by then.
const REST: Duration = Duration::from_secs(10);

/// Opens a million connections in a process of its own, lets each make one request, and looks at its memory when all are idle.
pub fn bytes(options: &Options) -> Result<Vec<BenchResult>, Failure> {
    let connections = if options.smoke { CONNECTIONS / 10 } else { CONNECTIONS };
    let program = std::env::current_exe()?;
    let output = Command::new(program).args(["--idle-connections", &connections.to_string()]).output()?;
    let said: Value = serde_json::from_slice(&output.stdout).map_err(|e| {
        let log = String::from_utf8_lossy(&output.stderr);
        Failure::Failed(format!("{e}: {}", log.lines().last().unwrap_or_default()))
    })?;
    let of = |name: &str| said[name].as_f64().unwrap_or(f64::NAN);
    let mut result = BenchResult::counted("idle-bytes", "bytes per connection", of("bytes"), None);
    for name in ["connections", "flow_table_bytes", "busy", "chunks", "timers"] {
        result.our_facts.insert(name.into(), of(name));
    }
    if of("connections") != f64::from(connections) {
        result.complaints.push(format!("{} of {connections} connections are open", of("connections")));
    }
    Ok(vec![result])
}

/// What the process of its own does. Prints what it found.
pub fn work(connections: u32) -> Result<(), Failure> {
    let checksums = Checksums::Device;
    let client = ClientConfig {
        wire: wire(checksums),
        mode: Mode::Hold { active: ACTIVE },
        connections,
        requests: vec![http::REQUEST.to_vec()],
        window_scale: None,
    };
    let (server_end, client_end) = cable(checksums, RING_BYTES);
    // The client's memory is in use before the server's is counted.
    let client = crate::client::Client::new(client_end, &client);
    let before = resident_bytes()?;
    let tcp = TcpConfig { connections_max: CONNECTIONS_MAX, ..TcpConfig::default() };
    let options = EngineOptions { tcp, ..EngineOptions::new(true) };
    let mut solo = Solo::with(EngineServer::new(server_end, options, START), client);
    solo.run(connections.into());
    solo.pass(REST);
    let used = resident_bytes()? - before;
    let usage = solo.server().usage();
    let each = |bytes: u64| bytes as f64 / f64::from(connections);
    let found = json!({
        "bytes": each(used),
        "connections": usage.connections,
        "flow_table_bytes": each(usage.flow_table_bytes as u64),
        "busy": usage.busy,
        "chunks": usage.chunks,
        "timers": usage.timers,
    });
    println!("{found}");
    Ok(())
}

/// Resident memory of this process.
fn resident_bytes() -> Result<u64, Failure> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let pages = text.split_whitespace().nth(1).and_then(|w| w.parse::<u64>().ok());
    let pages = pages.ok_or_else(|| Failure::Failed("/proc/self/statm cannot be read".into()))?;
    Ok(pages * rustix::param::page_size() as u64)
}
