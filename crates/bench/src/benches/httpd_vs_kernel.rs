//! `ginnel httpd`, and unmodified nginx on Ginnel, against nginx on the kernel. Cable and generator are
//! equal, both arms use CUBIC, and both pay for their receive processing.

use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use crate::program_comparison::{ADDRESS, Figure, ProgramComparison, create_site};
use ginnel_measure::generator::{LoadProtocol, LoadSpec};
use ginnel_measure::servers;
use ginnel_measure::testbed::Medium;

/// Concurrent connections.
const CONNECTIONS: &str = "64";

/// Returns the load of the generator.
fn load(connections: &str, keep_alive: bool) -> LoadSpec {
    let mut words = vec!["http://10.77.0.1/64", "--connections", connections];
    words.extend(keep_alive.then_some("--keep-alive"));
    LoadSpec::new(LoadProtocol::Http, &words)
}

/// Measures short connections to `ginnel httpd`.
pub fn short(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    httpd("short-vs-kernel", "connections/s", options, false)
}

/// Measures requests to `ginnel httpd` on persistent connections.
pub fn keep_alive(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    httpd("keepalive-vs-kernel", "requests/s", options, true)
}

fn httpd(
    name: &str,
    unit: &'static str,
    options: &Options,
    keep_alive: bool,
) -> Result<Vec<BenchResult>, MeasureError> {
    let contest = ProgramComparison::new(name, unit, Figure::Rate, options, load(CONNECTIONS, keep_alive))?;
    let site = create_site(contest.folder())?;
    let nginx = [servers::nginx(contest.folder(), ADDRESS, 80)?];
    let ours = Box::new(|| contest.on_httpd(&site));
    let theirs = Box::new(|| contest.on_kernel(&nginx));
    Ok(vec![contest.run(ours, Some(theirs))?])
}

/// Measures short connections to nginx.
pub fn nginx_short(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let load = load(CONNECTIONS, false);
    nginx("nginx-short-vs-kernel", "connections/s", Figure::Rate, options, load, Medium::Veth)
}

/// Measures requests to nginx on persistent connections.
pub fn nginx_keep_alive(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let load = load(CONNECTIONS, true);
    nginx("nginx-keepalive-vs-kernel", "requests/s", Figure::Rate, options, load, Medium::Veth)
}

/// Measures short connections to nginx over shared memory; the kernel over its veth pair is context.
pub fn nginx_memory(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let load = load(CONNECTIONS, false);
    nginx("nginx-short-memory", "connections/s", Figure::Rate, options, load, Medium::Memif)
}

/// Measures round trips of one connection to nginx.
pub fn round_trip(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let mut results = Vec::new();
    for (part, wire) in [("memory", Medium::Memif), ("af_xdp", Medium::Veth)] {
        let name = format!("rtt-vs-kernel/{part}");
        if options.wants(&name) {
            results.extend(nginx(&name, "µs", Figure::RoundTrip, options, load("1", true), wire)?);
        }
    }
    Ok(results)
}

fn nginx(
    name: &str,
    unit: &'static str,
    figure: Figure,
    options: &Options,
    load: LoadSpec,
    wire: Medium,
) -> Result<Vec<BenchResult>, MeasureError> {
    let contest = ProgramComparison::new(name, unit, figure, options, load)?;
    let nginx = [servers::nginx(contest.folder(), ADDRESS, 80)?];
    let ours = Box::new(|| contest.on_stack(&nginx, wire));
    let theirs = Box::new(|| contest.on_kernel(&nginx));
    Ok(vec![contest.run(ours, Some(theirs))?])
}
