//! Over the same cable, with the same generator, CUBIC on both, and both charged for what it costs to receive: `ginnel httpd`, and nginx unmodified, against nginx on the kernel.

use crate::contest::{ADDRESS, Contest, Figure, site_in};
use crate::harness::result::BenchResult;
use crate::harness::{Failure, Options};
use crate::programs;
use ginnel_measure::generator::{Language, Load};
use ginnel_measure::wire::Wire;

/// Connections at the same time.
const CONNECTIONS: &str = "64";

/// What the generator asks for.
fn load(connections: &str, keep_alive: bool) -> Load {
    let mut words = vec!["http://10.77.0.1/64", "--connections", connections];
    words.extend(keep_alive.then_some("--keep-alive"));
    Load::new(Language::Http, &words)
}

/// Short connections to ginnel httpd.
pub fn short(options: &Options) -> Result<Vec<BenchResult>, Failure> {
    httpd("short-vs-kernel", "connections/s", options, false)
}

/// Requests to ginnel httpd on connections that stay.
pub fn keep_alive(options: &Options) -> Result<Vec<BenchResult>, Failure> {
    httpd("keepalive-vs-kernel", "requests/s", options, true)
}

fn httpd(
    name: &str,
    unit: &'static str,
    options: &Options,
    keep_alive: bool,
) -> Result<Vec<BenchResult>, Failure> {
    programs::need("nginx")?;
    let contest = Contest::new(name, unit, Figure::Rate, options, load(CONNECTIONS, keep_alive))?;
    let site = site_in(contest.folder())?;
    let nginx = [programs::nginx(contest.folder(), ADDRESS, 80)?];
    let ours = Box::new(|| contest.on_httpd(&site));
    let theirs = Box::new(|| contest.on_kernel(&nginx));
    Ok(vec![contest.run(ours, Some(theirs))?])
}

/// Short connections to nginx.
pub fn nginx_short(options: &Options) -> Result<Vec<BenchResult>, Failure> {
    let load = load(CONNECTIONS, false);
    nginx("nginx-short-vs-kernel", "connections/s", Figure::Rate, options, load, Wire::Veth)
}

/// Requests to nginx on connections that stay.
pub fn nginx_keep_alive(options: &Options) -> Result<Vec<BenchResult>, Failure> {
    let load = load(CONNECTIONS, true);
    nginx("nginx-keepalive-vs-kernel", "requests/s", Figure::Rate, options, load, Wire::Veth)
}

/// Short connections to nginx over shared memory; the kernel over its cable is context.
pub fn nginx_memory(options: &Options) -> Result<Vec<BenchResult>, Failure> {
    let load = load(CONNECTIONS, false);
    nginx("nginx-short-memory", "connections/s", Figure::Rate, options, load, Wire::Memif)
}

/// One connection to nginx that is asked again and again.
pub fn round_trip(options: &Options) -> Result<Vec<BenchResult>, Failure> {
    let mut results = Vec::new();
    for (part, wire) in [("memory", Wire::Memif), ("af_xdp", Wire::Veth)] {
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
    load: Load,
    wire: Wire,
) -> Result<Vec<BenchResult>, Failure> {
    programs::need("nginx")?;
    let contest = Contest::new(name, unit, figure, options, load)?;
    let nginx = [programs::nginx(contest.folder(), ADDRESS, 80)?];
    let ours = Box::new(|| contest.on_stack(&nginx, wire));
    let theirs = Box::new(|| contest.on_kernel(&nginx));
    Ok(vec![contest.run(ours, Some(theirs))?])
}
