//! The engine, alone and under the runtime, against smoltcp: the same client, the same rings, the same bytes.

use crate::client::{ClientConfig, Mode};
use crate::duel::{self, Plan};
use crate::harness::machine::Cpus;
use crate::harness::pairs::{self, Bound, Measured};
use crate::harness::result::BenchResult;
use crate::harness::{Failure, Options};
use crate::http;
use crate::server::{
    Checksums, EngineOptions, EngineServer, Responder, ShardServer, SmoltcpServer, cable, wire,
};
use ginnel_stack::tcp::config::TcpConfig;

/// Connections at the same time.
const CONNECTIONS: u32 = 16;
/// Bytes of each ring.
const RING_BYTES: usize = 1 << 20;

/// Short connections: the server closes.
pub fn short(options: &Options) -> Result<Vec<BenchResult>, Failure> {
    versus("short-vs-smoltcp", "connections/s", Mode::Short, options)
}

/// Requests on connections that stay.
pub fn keep_alive(options: &Options) -> Result<Vec<BenchResult>, Failure> {
    versus("keepalive-vs-smoltcp", "requests/s", Mode::KeepAlive, options)
}

fn versus(name: &str, unit: &str, mode: Mode, options: &Options) -> Result<Vec<BenchResult>, Failure> {
    let plan = Plan::new(Cpus::choose()?, options.seconds(3.0));
    let checksums = checksums(options);
    let client = ClientConfig {
        wire: wire(checksums),
        mode,
        connections: CONNECTIONS,
        requests: vec![http::REQUEST.to_vec()],
        window_scale: None,
    };
    let keep_alive = mode == Mode::KeepAlive;
    let ours = || -> Result<Measured, Failure> {
        let make = |device, now| EngineServer::new(device, EngineOptions::new(keep_alive), now);
        Ok(duel::run(&plan, &client, cable(checksums, RING_BYTES), make)?.rate())
    };
    let shards = || -> Result<Measured, Failure> {
        let make = |device, now| {
            let made = ShardServer::new(device, Responder::new(keep_alive), TcpConfig::default(), now);
            made.expect("the configuration is valid")
        };
        Ok(duel::run(&plan, &client, cable(checksums, RING_BYTES), make)?.rate())
    };
    let theirs = || -> Result<Measured, Failure> {
        let make = |device, now| SmoltcpServer::new(device, checksums, CONNECTIONS, keep_alive, now);
        Ok(duel::run(&plan, &client, cable(checksums, RING_BYTES), make)?.rate())
    };
    let through_the_runtime = format!("{name}/runtime");
    Ok(vec![
        pairs::run(name, unit, options, Bound::Machine, Box::new(ours), Some(Box::new(theirs)))?,
        pairs::run(
            &through_the_runtime,
            unit,
            options,
            Bound::Machine,
            Box::new(shards),
            Some(Box::new(theirs)),
        )?,
    ])
}

/// Who does checksums, as the options say.
pub fn checksums(options: &Options) -> Checksums {
    if options.software_checksums { Checksums::Software } else { Checksums::Device }
}
