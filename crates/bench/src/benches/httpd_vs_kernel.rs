//! Over the same cable, with the same generator, CUBIC on both, and both charged for what it costs to receive: `ginnel httpd`, and nginx unmodified, against nginx on the kernel.

use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use crate::program_comparison::{ADDRESS, Figure, ProgramComparison, create_site};
use crate::programs;
use ginnel_measure::generator::{LoadProtocol, LoadSpec};
use ginnel_measure::testbed::Medium;

/// Connections at the same time.
const CONNECTIONS: &str = "64";

/// What the generator asks for.
fn load(connections: &str, keep_alive: bool) -> LoadSpec {
    let mut words = vec!["http://10.77.0.1/64", "--connections", connections];
    words.extend(keep_alive.then_some("--keep-alive"));
    LoadSpec::new(LoadProtocol::Http, &words)
}

/// Short connections to ginnel httpd.
pub fn short(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    httpd("short-vs-kernel", "connections/s", options, false)
}

/// Requests to ginnel httpd on connections that stay.
pub fn keep_alive(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    httpd("keepalive-vs-kernel", "requests/s", options, true)
}

fn httpd(
    name: &str,
    unit: &'static str,
    options: &Options,
    keep_alive: bool,
) -> Result<Vec<BenchResult>, MeasureError> {
    programs::require("nginx")?;
    let contest = ProgramComparison::new(name, unit, Figure::Rate, options, load(CONNECTIONS, keep_alive))?;
    let site = create_site(contest.folder())?;
    let nginx = [programs::nginx(contest.folder(), ADDRESS, 80)?];
    let ours = Box::new(|| contest.on_httpd(&site));
    let theirs = Box::new(|| contest.on_kernel(&nginx));
    Ok(vec![contest.run(ours, Some(theirs))?])
}

/// Short connections to nginx.
pub fn nginx_short(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let load = load(CONNECTIONS, false);
    nginx("nginx-short-vs-kernel", "connections/s", Figure::Rate, options, load, Medium::Veth)
}

/// Requests to nginx on connections that stay.
pub fn nginx_keep_alive(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let load = load(CONNECTIONS, true);
    nginx("nginx-keepalive-vs-kernel", "requests/s", Figure::Rate, options, load, Medium::Veth)
}

/// Short connections to nginx over shared memory; the kernel over its cable is context.
pub fn nginx_memory(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let load = load(CONNECTIONS, false);
    nginx("nginx-short-memory", "connections/s", Figure::Rate, options, load, Medium::Memif)
}

/// One connection to nginx that is asked again and again.
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
    programs::require("nginx")?;
    let contest = ProgramComparison::new(name, unit, figure, options, load)?;
    let nginx = [programs::nginx(contest.folder(), ADDRESS, 80)?];
    let ours = Box::new(|| contest.on_stack(&nginx, wire));
    let theirs = Box::new(|| contest.on_kernel(&nginx));
    Ok(vec![contest.run(ours, Some(theirs))?])
}
