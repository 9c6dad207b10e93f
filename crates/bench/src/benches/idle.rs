//! Resident memory of an idle connection, everything included, with and without a task.

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
/// Limit on connections: unused memory for them must not be touched.
const CONNECTIONS_MAX: u32 = 10_000_000;
/// Connections that are opened at the same time.
const ACTIVE: u32 = 64;
/// Size of each ring in bytes: small compared with a million connections.
const RING_BYTES: usize = 1 << 18;
/// Time between the last request and the measurement of memory; resources that are kept for a while are
/// released by then.
const IDLE_TIME: Duration = Duration::from_secs(10);

/// Opens a million connections in a child process, makes one request on each, and measures the memory when
/// all are idle.
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

/// Measures a million connections with a task for each.
pub fn task_bytes(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let tasks = if options.smoke { CONNECTIONS / 10 } else { CONNECTIONS };
    let report = run_in_child_process("--idle-tasks", tasks)?;
    let unit = "bytes per task with its connection";
    let mut result = BenchResult::from_counts("task-bytes", unit, value_of(&report, "bytes"), None);
    for name in ["tasks", "streams", "sleeps", "wait_lists", "future_bytes"] {
        result.our_facts.insert(name.into(), value_of(&report, name));
    }
    // One more task listens.
    check_count(&mut result, &report, "tasks", tasks + 1);
    check_count(&mut result, &report, "streams", tasks);
    Ok(vec![result])
}

/// Runs a child process and returns the report that it prints.
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
        result.problems.push(format!("there are {} {name} instead of {wanted}", value_of(report, name)));
    }
}

/// Opens connections to a server and lets them become idle. Returns the server, and the resident memory per
/// connection.
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
    // The client's memory is resident before the server's is measured.
    let client = crate::client::Client::new(client_end, &client);
    let before = resident_bytes()?;
    let tcp = TcpConfig { connections_max: CONNECTIONS_MAX, ..TcpConfig::default() };
    let mut solo = SingleThread::with_client(server(server_end, tcp)?, client);
    solo.run(connections.into());
    solo.idle_for(IDLE_TIME);
    let used = resident_bytes()? - before;
    Ok((solo, used as f64 / f64::from(connections)))
}

/// Runs in the child process of `idle-bytes`: prints the report.
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

/// Runs in the child process of `task-bytes`: prints the report.
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

/// Returns the resident memory of this process in bytes.
fn resident_bytes() -> Result<u64, MeasureError> {
    let text = std::fs::read_to_string("/proc/self/statm")?;
    let pages = text.split_whitespace().nth(1).and_then(|w| w.parse::<u64>().ok());
    let pages = pages.ok_or_else(|| MeasureError::Failed("/proc/self/statm: unexpected format".into()))?;
    Ok(pages * rustix::param::page_size() as u64)
}
