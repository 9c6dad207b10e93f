//! Unmodified servers on a stack and on the kernel: redis, memcached, and HAProxy in front of nginx.

use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use crate::program_comparison::{ADDRESS, Figure, ProgramComparison};
use ginnel_measure::generator::{LoadProtocol, LoadSpec};
use ginnel_measure::servers;
use ginnel_measure::testbed::Medium;
use std::ffi::OsString;

/// Connections to redis or memcached, each with one request in flight.
const VALUE_CONNECTIONS: &str = "50";
/// Size of the value in bytes.
const VALUE_BYTES: &str = "64";
/// Concurrent connections to the proxy.
const PROXY_CONNECTIONS: &str = "64";
/// Port of nginx behind the proxy.
const BACKEND_PORT: u16 = 8080;

/// Measures GET of redis.
pub fn redis(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    values("redis-vs-kernel", LoadProtocol::Redis, options, |contest| {
        servers::redis(contest.folder(), ADDRESS, 6379)
    })
}

/// Measures get of memcached.
pub fn memcached(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    values("memcached-vs-kernel", LoadProtocol::Memcached, options, |_| servers::memcached(ADDRESS))
}

/// Measures over memory and over AF_XDP; the kernel, which has no memif, uses its veth pair for both.
fn values(
    name: &str,
    protocol: LoadProtocol,
    options: &Options,
    program: fn(&ProgramComparison<'_>) -> Result<Vec<OsString>, MeasureError>,
) -> Result<Vec<BenchResult>, MeasureError> {
    let address = ADDRESS.to_string();
    let words = [&*address, "--size", VALUE_BYTES, "--connections", VALUE_CONNECTIONS];
    let mut results = Vec::new();
    for (part, wire) in [("memory", Medium::Memif), ("af_xdp", Medium::Veth)] {
        let name = format!("{name}/{part}");
        if !options.wants(&name) {
            continue;
        }
        let load = LoadSpec::new(protocol, &words);
        let contest = ProgramComparison::new(name, "requests/s", Figure::Rate, options, load)?;
        let program = [program(&contest)?];
        let ours = Box::new(|| contest.on_stack(&program, wire));
        let theirs = Box::new(|| contest.on_kernel(&program));
        results.push(contest.run(ours, Some(theirs))?);
    }
    Ok(results)
}

/// Measures HAProxy in front of nginx, both on one core, and on one stack or on the kernel.
pub fn haproxy(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let url = format!("http://{ADDRESS}/64");
    let load = LoadSpec::new(LoadProtocol::Http, &[&url, "--connections", PROXY_CONNECTIONS]);
    let contest = ProgramComparison::new("haproxy-vs-kernel", "connections/s", Figure::Rate, options, load)?;
    let both = [
        servers::nginx(contest.folder(), ADDRESS, BACKEND_PORT)?,
        servers::haproxy(contest.folder(), ADDRESS, 80, BACKEND_PORT)?,
    ];
    let ours = Box::new(|| contest.on_stack(&both, Medium::Veth));
    let theirs = Box::new(|| contest.on_kernel(&both));
    Ok(vec![contest.run(ours, Some(theirs))?])
}
