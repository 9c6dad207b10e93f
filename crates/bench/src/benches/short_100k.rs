//! A hundred thousand open connections, of which the oldest are served and replaced continuously.

use super::vs_smoltcp::checksums;
use crate::client::{ClientConfig, Mode};
use crate::harness::machine::Cpus;
use crate::harness::pairs::{self, Bound, Measurement};
use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use crate::http;
use crate::server::{EngineOptions, EngineServer, cable, link_setup};
use crate::two_threads::{self, RunPlan};
use ginnel_stack::tcp::config::TcpConfig;

/// Open connections.
const CONNECTIONS: u32 = 100_000;
/// Connections that make a request or are opened at the same time.
const ACTIVE: u32 = 256;
/// Size of each ring in bytes: a segment of every active connection.
const RING_BYTES: usize = 1 << 20;
/// Longer than TIME_WAIT, so that expiring entries are measured, too.
const SECONDS: f64 = 75.0;
/// Limit on connections in TIME_WAIT: 60 s at two million connections per second. Memory is allocated as they
/// occur.
const TIME_WAIT_MAX: u32 = 120_000_000;
/// Memory in bytes that a run at the target rate needs: 60 million entries and their share of the flow table.
const MEMORY_BYTES_MIN: u64 = 6 << 30;

/// Measures short connections while 100,000 are open. The server closes first, and keeps each in TIME_WAIT
/// for 60 s.
pub fn short_100k(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let seconds = options.seconds(SECONDS);
    let available = super::available_memory();
    if available < MEMORY_BYTES_MIN && seconds > 10.0 {
        let gib = available >> 30;
        return Err(MeasureError::Skipped(format!(
            "needs 6 GiB of memory for TIME_WAIT, but {gib} GiB are available"
        )));
    }
    let plan = RunPlan::new(Cpus::choose()?, seconds);
    let checksums = checksums(options);
    let client = ClientConfig {
        wire: link_setup(checksums),
        mode: Mode::Rotate { active: ACTIVE },
        connections: CONNECTIONS,
        requests: vec![http::REQUEST.to_vec()],
        window_scale: None,
    };
    let ours = || -> Result<Measurement, MeasureError> {
        let tcp = TcpConfig {
            connections_max: 2 * CONNECTIONS,
            time_wait_max: TIME_WAIT_MAX,
            ..TcpConfig::default()
        };
        let options = EngineOptions { tcp, ..EngineOptions::new(false) };
        let cable = cable(checksums, RING_BYTES);
        let sample =
            two_threads::run(&plan, &client, cable, |device, now| EngineServer::new(device, options, now))?;
        let mut measured = sample.rate().with("open_at_the_end", sample.counts.open as f64);
        if measured.facts.get("time_wait_overflows").is_some_and(|n| *n > 0.0) {
            measured.problems.push("some connections left TIME_WAIT early".into());
        }
        Ok(measured)
    };
    Ok(vec![pairs::run("short-100k", "connections/s", options, Bound::Machine, Box::new(ours), None)?])
}
