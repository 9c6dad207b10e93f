//! Throughput with ten million connections, of which random ones make requests.

use super::vs_smoltcp::checksums;
use crate::client::{ClientConfig, Mode};
use crate::harness::machine::Cpus;
use crate::harness::pairs::{self, Arm, Bound, Measurement};
use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use crate::http;
use crate::server::{Responder, ShardServer, cable, link_setup};
use crate::two_threads::{self, RunPlan};
use ginnel_stack::tcp::config::TcpConfig;

/// Connections that are open.
const CONNECTIONS: u32 = 10_368_000;
/// Connections that are open in the other arm.
const FEW: u32 = 1_000;
/// Requests that are in flight.
const ACTIVE: u32 = 256;
/// Size of each ring in bytes: a segment of every active connection.
const RING_BYTES: usize = 1 << 20;
/// Time of a measurement after all connections were opened.
const SECONDS: f64 = 5.0;
/// Smallest share of the rate with few connections.
const RATIO_MIN: f64 = 0.5;

/// Measures requests on random ones of ten million connections, against a thousand connections.
pub fn at_10m(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let many = if options.smoke { CONNECTIONS / 100 } else { CONNECTIONS };
    let name = "throughput-at-10m";
    let arm = |connections| -> Arm<'_> { Box::new(move || measure(options, connections)) };
    let mut result = pairs::run(name, "requests/s", options, Bound::Machine, arm(many), Some(arm(FEW)))?;
    if result.ratio.is_some_and(|ratio| ratio < RATIO_MIN) {
        result.problems.push(format!("less than {RATIO_MIN} of the rate with {FEW} connections"));
    }
    Ok(vec![result])
}

fn measure(options: &Options, connections: u32) -> Result<Measurement, MeasureError> {
    let plan = RunPlan::new(Cpus::choose()?, options.seconds(SECONDS));
    let checksums = checksums(options);
    let client = ClientConfig {
        wire: link_setup(checksums),
        mode: Mode::Uniform { active: ACTIVE },
        connections,
        requests: vec![http::REQUEST.to_vec()],
        window_scale: None,
    };
    let tcp = TcpConfig { connections_max: connections + ACTIVE, ..TcpConfig::default() };
    let cable = cable(checksums, RING_BYTES);
    let run = two_threads::run(&plan, &client, cable, |device, now| {
        ShardServer::new(device, Responder::new(true), tcp, now).expect("the configuration is valid")
    })?;
    let mut measured = run.rate().with("open", run.counts.open as f64);
    if run.counts.open != u64::from(connections) {
        measured.problems.push(format!("{} of {connections} connections are open", run.counts.open));
    }
    Ok(measured)
}
