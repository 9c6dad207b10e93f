//! Resident memory of an idle connection, everything included, and of one with a task.

use crate::client::{ClientConfig, Mode};
use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use crate::http;
use crate::server::{Checksums, EngineOptions, EngineServer, Server, TaskServer, cable, link_setup};
use crate::single_thread::{START, SingleThread};
use core::time::Duration;
use ginnel_stack::device::Device;
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
const IDLE_TIME: Duration = Duration::from_secs(10);

/// Opens a million connections in a process of its own, lets each make one request, and looks at its memory when all are idle.
pub fn bytes(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let connections = if options.smoke { CONNECTIONS / 10 } else { CONNECTIONS };
    let report = run_in_child_process("--idle-connections", connections)?;
    let mut result =
        BenchResult::from_counts("idle-bytes", "bytes per connection", value_of(&report, "bytes"), None);
    for name in ["connections", "flow_table_bytes", "busy", "chunks", "timers"] {
        result.our_facts.insert(name.into(), value_of(&report, name));
    }
    check_count(&mut result, &report, "connections", connections);
    Ok(vec![result])
}

/// The same with a task for each connection.
pub fn task_bytes(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let tasks = if options.smoke { CONNECTIONS / 10 } else { CONNECTIONS };
    let report = run_in_child_process("--idle-tasks", tasks)?;
    let unit = "bytes per task with its connection";
    let mut result = BenchResult::from_counts("task-bytes", unit, value_of(&report, "bytes"), None);
    for name in ["tasks", "streams", "sleeps", "wait_lists", "future_bytes"] {
        result.our_facts.insert(name.into(), value_of(&report, name));
    }
    // One more listens.
    check_count(&mut result, &report, "tasks", tasks + 1);
    check_count(&mut result, &report, "streams", tasks);
    Ok(vec![result])
}

/// What a process of its own found.
fn run_in_child_process(option: &str, connections: u32) -> Result<Value, MeasureError> {
    let program = std::env::current_exe()?;
    let output = Command::new(program).args([option, &connections.to_string()]).output()?;
    serde_json::from_slice(&output.stdout).map_err(|e| {
        let log = String::from_utf8_lossy(&output.stderr);
        MeasureError::Failed(format!("{e}: {}", log.lines().last().unwrap_or_default()))
    })
}

fn value_of(report: &Value, name: &str) -> f64 {
    report[name].as_f64().unwrap_or(f64::NAN)
}

fn check_count(result: &mut BenchResult, report: &Value, name: &str, wanted: u32) {
    if value_of(report, name) != f64::from(wanted) {
        result.complaints.push(format!("{} of {wanted} {name} are there", value_of(report, name)));
    }
}

/// Opens connections to a server and leaves it alone then. Returns it, and how much memory it uses for each.
fn measure_idle_memory<S: Server>(
    connections: u32,
    server: impl FnOnce(Device, TcpConfig) -> Result<S, MeasureError>,
) -> Result<(SingleThread<S>, f64), MeasureError> {
    let checksums = Checksums::Device;
    let client = ClientConfig {
        wire: link_setup(checksums),
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
    let mut solo = SingleThread::with_client(server(server_end, tcp)?, client);
    solo.run(connections.into());
    solo.idle_for(IDLE_TIME);
    let used = resident_bytes()? - before;
    Ok((solo, used as f64 / f64::from(connections)))
}

/// What the process of its own does for `idle-bytes`. Prints what it found.
pub fn print_connection_memory(connections: u32) -> Result<(), MeasureError> {
    let (solo, bytes) = measure_idle_memory(connections, |device, tcp| {
        Ok(EngineServer::new(device, EngineOptions { tcp, ..EngineOptions::new(true) }, START))
    })?;
    let usage = solo.server().usage();
    let report = json!({
        "bytes": bytes,
        "connections": usage.connections,
        "flow_table_bytes": usage.flow_table_bytes as f64 / f64::from(connections),
        "busy": usage.active,
        "chunks": usage.chunks,
        "timers": usage.timers,
    });
    println!("{report}");
    Ok(())
}

/// What the process of its own does for `task-bytes`. Prints what it found.
pub fn print_task_memory(tasks: u32) -> Result<(), MeasureError> {
    let (solo, bytes) = measure_idle_memory(tasks, |device, tcp| {
        TaskServer::new(device, true, tcp, START).map_err(|e| MeasureError::Failed(e.to_string()))
    })?;
    let stats = solo.server().server.handler().stats();
    let report = json!({
        "bytes": bytes,
        "tasks": stats.tasks,
        "streams": stats.streams,
        "sleeps": stats.sleeps,
        "wait_lists": stats.wait_lists,
        "future_bytes": solo.server().future_bytes(),
    });
    println!("{report}");
    Ok(())
}

/// Resident memory of this process.
fn resident_bytes() -> Result<u64, MeasureError> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let pages = text.split_whitespace().nth(1).and_then(|w| w.parse::<u64>().ok());
    let pages = pages.ok_or_else(|| MeasureError::Failed("/proc/self/statm cannot be read".into()))?;
    Ok(pages * rustix::param::page_size() as u64)
}
