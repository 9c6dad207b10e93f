//! Memory and set-up of millions of connections between `ginnel echo` and `ginnel load echo`. Both ends have
//! a complete TCP. Each connection is alive: it answers a message after all are open.

use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use crate::program_pair::{PairReport, ProgramPair, Sample, counter, server_counters, words};
use core::time::Duration;

/// Connections of `connections-1m`, and of `connections-10m`, which has as many as QStack's evaluation.
const ONE_MILLION: u32 = 1_000_000;
const TEN_MILLION: u32 = 10_368_000;
/// Connections of the run whose memory is subtracted. Their messages touch each buffer of the rings.
const FEW: u32 = 1_000;
/// Messages that each of them sends.
const FEW_MESSAGES: u32 = 20;
/// Largest number of bytes of a pair: a connection at both ends with the state of both applications.
const BYTES_MAX: f64 = 440.0;
/// Largest number of messages per second after the set-up.
const RATE: u32 = 172_800;
/// Shortest time in seconds between two messages of a connection. Shortly after a message a connection has
/// more state than an idle one.
const EPOCH_MIN: f64 = 20.0;
/// Memory in bytes that `connections-max` leaves to the rest of the machine.
const RESERVE_BYTES: u64 = 1 << 30;
/// Bytes of a pair by which `connections-max` chooses the number of connections.
const BYTES_EXPECTED: u64 = 420;
/// Goal for connections per second.
const ESTABLISH_MIN: f64 = 500_000.0;
/// Idle time before keepalive probes: in the bench, and that of the goal.
const KEEPALIVE_SECONDS: u32 = 60;
const KEEPALIVE_GOAL_SECONDS: u32 = 600;
/// Largest relative deviation of the number of probes from the expected one.
const PROBES_DEVIATION_MAX: f64 = 0.1;
/// Largest share of a core for the probes of ten million connections, in percent.
const KEEPALIVE_PERCENT_MAX: f64 = 5.0;

/// Measures the memory of a million connections.
pub fn one_million(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    memory("connections-1m", if options.smoke { ONE_MILLION / 20 } else { ONE_MILLION })
}

/// Measures the memory of ten million connections.
pub fn ten_million(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    memory("connections-10m", if options.smoke { ONE_MILLION / 10 } else { TEN_MILLION })
}

/// Opens as many connections as the free memory permits.
pub fn most(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let free = super::available_memory().saturating_sub(RESERVE_BYTES) / BYTES_EXPECTED;
    let connections = u32::try_from(free).unwrap_or(u32::MAX);
    memory("connections-max", if options.smoke { ONE_MILLION / 10 } else { connections })
}

/// Measures connections per second until all ten million are open, with and without touching the tables
/// before.
pub fn establish_rate(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let connections = if options.smoke { ONE_MILLION / 20 } else { TEN_MILLION };
    super::require_memory(u64::from(connections) * BYTES_EXPECTED)?;
    let mut results = Vec::new();
    for (part, keys) in [("usual", ""), ("prefault", "prefault = true")] {
        let name = format!("establish-rate/{part}");
        if !options.wants(&name) {
            continue;
        }
        let mut pair = echo(connections, connections);
        pair.shard_keys = keys.into();
        pair.load.extend(messages(connections, 1));
        let run = run(&pair)?;
        let rate = f64::from(connections) / run.number(&["achieved", "setup_seconds"]);
        let mut result = BenchResult::from_counts(&name, "connections/s", rate, None);
        add_setup(&mut result, &run, connections);
        result.problems.extend(missed_goal(rate >= ESTABLISH_MIN, "500,000 connections/s"));
        results.push(result);
    }
    Ok(results)
}

/// Measures the CPU time that keepalive probes take at the server, which probes each of ten million idle
/// connections.
pub fn keepalive_cpu(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let connections = if options.smoke { ONE_MILLION / 20 } else { TEN_MILLION };
    let seconds = if options.smoke { 2 } else { KEEPALIVE_SECONDS };
    super::require_memory(u64::from(connections) * BYTES_EXPECTED)?;
    let mut pair = echo(connections, connections);
    pair.server.push("--keepalive".into());
    pair.server_tcp_keys = format!("keepalive_time_seconds = {seconds}");
    // Set up evenly over the idle time, so that the probes are sent evenly.
    pair.load.extend(words(&format!("--setup {seconds}s --wait {}s", 3 * seconds + 5)));
    pair.load.extend(words(&format!("--epoch {seconds}s --duration 1s")));
    let round = Duration::from_secs(seconds.into());
    // Samples while the connections are idle, with the probes until then.
    let mut idle: Vec<(Sample, f64)> = Vec::new();
    let run = pair.run(|sample, folder| {
        let is_due = idle.last().is_none_or(|(last, _)| sample.at >= last.at + round / 10);
        if sample.stage == "waiting"
            && is_due
            && let Some(counters) = server_counters(folder)
        {
            idle.push((sample.clone(), counter(&counters, "tcp.keepalive_probes")));
        }
    })?;
    // From the first probe on, whole rounds of probes.
    let start = idle.first().map_or(Duration::ZERO, |(first, _)| first.at);
    let from = idle.iter().find(|(sample, _)| sample.at >= start + round);
    let to = from.and_then(|(from, _)| idle.iter().rfind(|(sample, _)| sample.at <= from.at + 2 * round));
    let (Some((from, first)), Some((to, last))) = (from, to) else {
        return Err(MeasureError::Failed("the connections were not idle for long enough".into()));
    };
    let probes = last - first;
    let percent_of = |used: Duration| {
        let each = used.as_secs_f64() / probes;
        100.0 * each * f64::from(connections) / f64::from(KEEPALIVE_GOAL_SECONDS)
    };
    let percent = percent_of(to.server - from.server);
    let mut result =
        BenchResult::from_counts("keepalive-cpu", "% of a core, probes every 600 s", percent, None);
    let expected = f64::from(connections) * (to.at - from.at).as_secs_f64() / f64::from(seconds);
    result.our_facts.insert("peer_percent".into(), percent_of(to.generator - from.generator));
    result.our_facts.insert("probes".into(), probes);
    result.our_facts.insert("connections".into(), f64::from(connections));
    if (probes / expected - 1.0).abs() > PROBES_DEVIATION_MAX {
        result.problems.push(format!("{probes} probes were sent instead of {expected:.0}"));
    }
    if run.number(&["connections", "lost"]) != 0.0 {
        result.problems.push("connections were lost".into());
    }
    result.problems.extend(missed_goal(percent <= KEEPALIVE_PERCENT_MAX, "5 % of a core"));
    Ok(vec![result])
}

/// Returns both programs without options for the messages.
fn echo(connections: u32, connections_max: u32) -> ProgramPair {
    ProgramPair {
        server: words("echo"),
        load: words("echo --timeout 120s"),
        connections,
        connections_max: connections_max + 1_000,
        shard_keys: String::new(),
        server_tcp_keys: String::new(),
    }
}

/// Returns the options for messages at the usual rate after a set-up as fast as possible. Each connection
/// sends `each` messages, and some send one more.
fn messages(connections: u32, each: u32) -> Vec<String> {
    let shortest = if connections == FEW { 0.1 } else { EPOCH_MIN };
    let epoch = (f64::from(connections) / f64::from(RATE)).max(shortest);
    let duration = epoch * (f64::from(each) + 0.3);
    words(&format!("--setup 1ms --wait 2s --epoch {epoch:.3}s --duration {duration:.3}s"))
}

fn run(pair: &ProgramPair) -> Result<PairReport, MeasureError> {
    pair.run(|_, _| {})
}

/// Returns the largest memory in bytes while messages were sent.
fn largest(run: &PairReport) -> Result<u64, MeasureError> {
    let sending = run.samples.iter().filter(|sample| sample.stage == "sending");
    let largest = sending.map(|sample| sample.memory.total()).max();
    largest.ok_or_else(|| MeasureError::Failed("no message was sent".into()))
}

/// Returns the problem if a figure is not within its goal, or is missing.
fn missed_goal(is_reached: bool, goal: &str) -> Option<String> {
    (!is_reached).then(|| format!("the goal is missed: {goal}"))
}

fn add_setup(result: &mut BenchResult, run: &PairReport, connections: u32) {
    result.our_facts.insert("connections".into(), run.number(&["achieved", "connections"]));
    result.our_facts.insert("setup_seconds".into(), run.number(&["achieved", "setup_seconds"]));
    result.our_facts.insert("answered".into(), run.number(&["messages", "answered"]));
    result.problems.extend(run.missed.iter().cloned());
    if run.number(&["connections", "open_at_end"]) != f64::from(connections) {
        result.problems.push(format!("not all of {connections} connections were open at the end"));
    }
    if run.number(&["messages", "answered"]) < f64::from(connections) {
        result.problems.push("not each connection answered".into());
    }
}

fn memory(name: &str, connections: u32) -> Result<Vec<BenchResult>, MeasureError> {
    super::require_memory(u64::from(connections) * BYTES_EXPECTED)?;
    let mut small = echo(FEW, connections);
    small.load.extend(messages(FEW, FEW_MESSAGES));
    let small = run(&small)?;
    let mut large = echo(connections, connections);
    large.load.extend(messages(connections, 1));
    let large = run(&large)?;
    let empty = largest(&small)?;
    let used = largest(&large)?.saturating_sub(empty);
    let bytes = used as f64 / f64::from(connections.saturating_sub(FEW));
    let mut result = BenchResult::from_counts(name, "bytes per pair of connections", bytes, None);
    add_setup(&mut result, &large, connections);
    result.our_facts.insert("empty_mib".into(), empty as f64 / f64::from(1 << 20));
    if let Some((_, last)) = large.stage("sending") {
        result.our_facts.insert("kernel_mib".into(), last.memory.kernel as f64 / f64::from(1 << 20));
    }
    if small.number(&["connections", "open_at_end"]) != f64::from(FEW) {
        result.problems.push("the run with few connections did not open all".into());
    }
    result.problems.extend(missed_goal(bytes <= BYTES_MAX, "440 bytes"));
    Ok(vec![result])
}
