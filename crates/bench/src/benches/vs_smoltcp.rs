//! The engine, alone and with the runtime, against smoltcp, with equal client, rings and bytes.

use crate::client::{ClientConfig, Mode};
use crate::harness::machine::Cpus;
use crate::harness::pairs;
use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use crate::http;
use crate::interleaved;
use crate::server::{
    Checksums, EngineOptions, EngineServer, Responder, ShardServer, SmoltcpServer, cable, link_setup,
};
use crate::two_threads::{RunPlan, RunResult};
use ginnel_stack::tcp::config::TcpConfig;

/// Concurrent connections.
const CONNECTIONS: u32 = 16;
/// Size of each ring in bytes.
const RING_BYTES: usize = 1 << 20;

/// Measures short connections; the server closes.
pub fn short(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    compare_with_smoltcp("short-vs-smoltcp", "connections/s", Mode::Short, options)
}

/// Measures requests on persistent connections.
pub fn keep_alive(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    compare_with_smoltcp("keepalive-vs-smoltcp", "requests/s", Mode::KeepAlive, options)
}

fn compare_with_smoltcp(
    name: &str,
    unit: &str,
    mode: Mode,
    options: &Options,
) -> Result<Vec<BenchResult>, MeasureError> {
    let plan = RunPlan::new(Cpus::choose()?, options.seconds(3.0));
    let checksums = checksums(options);
    let client = ClientConfig {
        wire: link_setup(checksums),
        mode,
        connections: CONNECTIONS,
        requests: vec![http::REQUEST.to_vec()],
        window_scale: None,
    };
    let keep_alive = mode == Mode::KeepAlive;
    let cables = || [cable(checksums, RING_BYTES), cable(checksums, RING_BYTES)];
    let engine = |device, now| EngineServer::new(device, EngineOptions::new(keep_alive), now);
    let shard = |device, now| {
        let server = ShardServer::new(device, Responder::new(keep_alive), TcpConfig::default(), now);
        server.expect("the configuration is valid")
    };
    let theirs = |device, now| SmoltcpServer::new(device, checksums, CONNECTIONS, keep_alive, now);
    let rates = |samples: [RunResult; 2]| samples.map(|sample| sample.rate());
    let through_the_runtime = format!("{name}/runtime");
    Ok(vec![
        pairs::run_interleaved(name, unit, options, || {
            Ok(rates(interleaved::run(&plan, &client, cables(), engine, theirs)?))
        })?,
        pairs::run_interleaved(&through_the_runtime, unit, options, || {
            Ok(rates(interleaved::run(&plan, &client, cables(), shard, theirs)?))
        })?,
    ])
}

/// Returns who computes checksums, as the options say.
pub fn checksums(options: &Options) -> Checksums {
    if options.software_checksums { Checksums::Software } else { Checksums::Device }
}
