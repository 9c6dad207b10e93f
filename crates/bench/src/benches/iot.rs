//! QStack's scenario: millions of devices that send heartbeats and, rarely, urgent requests to `ginnel iot`
//! with a real Redis, observed by `ginnel monitor`.
//!
//! Server and generator have a core each, and Redis and the monitor run wherever there is room, so on two
//! cores all four compete. The generator uses its cheapest TCP, so that most is left for the others.
//!
//! `GINNEL_BLESS=1` draws the latencies of each run into `docs/`.

use crate::harness::jitter::{self, Jitter};
use crate::harness::machine::{CpuTimes, Cpus};
use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use crate::program_pair::{
    PairReport, Process, ProgramPair, Sample, counter, cpu_time, server_counters, words,
};
use core::time::Duration;
use ginnel_measure::program::ginnel_path;
use serde_json::Value;
use std::fs::File;
use std::io::Seek;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A scenario as QStack's evaluation had it.
const TEN_MILLION: Scenario = Scenario {
    name: "iot-10m",
    connections: 10_368_000,
    rate: 172_800.0,
    nominal_seconds: 600.0,
    goal_ms: 2.4,
    goal_percentile: "p99",
    goal_priority: "total",
};
/// A scenario with a million connections.
const ONE_MILLION: Scenario = Scenario {
    name: "iot-1m",
    connections: 1_000_000,
    rate: 16_667.0,
    nominal_seconds: 120.0,
    goal_ms: 3.5,
    goal_percentile: "p99_9",
    goal_priority: "high",
};
/// Time in seconds of each run other than the nominal one with priorities.
const OTHER_SECONDS: f64 = 120.0;
/// Memory in bytes of a pair of connections, with the monitor's part.
const BYTES_OF_CONNECTION: u64 = 600;
/// Load of the overloaded runs, as a multiple of what the server takes.
const OVERLOAD: f64 = 1.2;
/// First load of the search for the server's capacity, as a multiple of the scenario's rate. It is doubled
/// until the server executes less than the share [`PROBE_TAKEN_MAX`] of it, in at most [`PROBES_MAX`] runs of
/// [`PROBE_SECONDS`].
const PROBE_FACTOR: f64 = 3.0;
const PROBE_TAKEN_MAX: f64 = 0.9;
const PROBES_MAX: u32 = 6;
const PROBE_SECONDS: f64 = 15.0;
/// Smallest busy share of the server's core in an overloaded run. The kernel may run Redis there, too.
const OVERLOADED_SHARE_MIN: f64 = 0.98;
/// Shares of urgent requests and of ordinary ones; the rest are heartbeats.
const HIGH_SHARE: f64 = 0.05;
const LOW_SHARE: f64 = 0.05;
/// Shortest time between two turns of the generator in microseconds. Without it the generator would never
/// sleep, because after each turn a message is due or a response has arrived. Latencies count from the
/// intended times, so they include this.
const COALESCE_US: u32 = 100;
/// How long the monitor may take to end after the stack.
const MONITOR_END_TIMEOUT: Duration = Duration::from_secs(60);
/// Set-up of the connections per second.
const SETUP_RATE: f64 = 400_000.0;

#[derive(Clone, Copy, Debug)]
struct Scenario {
    name: &'static str,
    connections: u32,
    /// Messages per second.
    rate: f64,
    nominal_seconds: f64,
    /// Goal for the nominal run with priorities, and the latency that it concerns.
    goal_ms: f64,
    goal_percentile: &'static str,
    goal_priority: &'static str,
}

/// One run of a scenario.
#[derive(Clone, Copy, Debug)]
struct Run {
    part: &'static str,
    priorities: bool,
    rate: f64,
    seconds: f64,
    is_overloaded: bool,
}

/// Runs the scenario with ten million connections.
pub fn ten_million(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    run_all(TEN_MILLION, options)
}

/// Runs the scenario with a million connections.
pub fn one_million(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    run_all(ONE_MILLION, options)
}

fn run_all(mut scenario: Scenario, options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    if options.smoke {
        scenario.connections /= 50;
        scenario.rate /= 50.0;
    }
    let other = options.seconds(OTHER_SECONDS);
    let rate = scenario.rate;
    let nominal = |part, priorities, seconds| Run { part, priorities, rate, seconds, is_overloaded: false };
    let longest = options.seconds(scenario.nominal_seconds);
    super::require_memory(u64::from(scenario.connections) * BYTES_OF_CONNECTION)?;
    let mut results = Vec::new();
    for run in [nominal("nominal", true, longest), nominal("nominal-off", false, other)] {
        if options.wants(&format!("{}/{}", scenario.name, run.part)) {
            results.push(measure(&scenario, run)?);
        }
    }
    // A failure of the overloaded runs does not discard the results of the nominal ones.
    if let Err(failure) = overload(&scenario, options, other, &mut results) {
        let mut result =
            BenchResult::from_counts(&format!("{}/overload", scenario.name), "ms", f64::NAN, None);
        result.problems.push(failure.to_string());
        results.push(result);
    }
    Ok(results)
}

/// Runs both overloaded runs.
fn overload(
    scenario: &Scenario,
    options: &Options,
    seconds: f64,
    results: &mut Vec<BenchResult>,
) -> Result<(), MeasureError> {
    let parts = [("overload", true), ("overload-off", false)];
    let wanted = parts.into_iter().filter(|(part, _)| options.wants(&format!("{}/{part}", scenario.name)));
    let wanted: Vec<_> = wanted.collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let taken = capacity(scenario, options)?;
    println!("  the server takes {taken:.0} messages/s");
    for (part, priorities) in wanted {
        let run = Run { part, priorities, rate: OVERLOAD * taken, seconds, is_overloaded: true };
        results.push(measure(scenario, run)?);
    }
    Ok(())
}

/// Returns the messages per second that the server executes when it is offered more.
fn capacity(scenario: &Scenario, options: &Options) -> Result<f64, MeasureError> {
    let seconds = options.seconds(PROBE_SECONDS);
    let mut rate = PROBE_FACTOR * scenario.rate;
    for _ in 0..PROBES_MAX {
        let taken = executed_rate(scenario, rate, seconds)?;
        if taken < PROBE_TAKEN_MAX * rate {
            return Ok(taken);
        }
        rate *= 2.0;
    }
    Err(MeasureError::Failed(format!("the server takes all of {:.0} messages/s", rate / 2.0)))
}

/// Returns the messages per second that the server executes when `rate` are offered for some seconds.
fn executed_rate(scenario: &Scenario, rate: f64, seconds: f64) -> Result<f64, MeasureError> {
    let run = Run { part: "probe", priorities: false, rate, seconds, is_overloaded: true };
    let outcome = observe(scenario, run, None)?;
    // The first sample of the next stage is taken as soon as that begins.
    let counters = &outcome.counters;
    let is_sending = |(sample, _): &(Sample, Value)| sample.stage == "sending";
    let end = counters.iter().rposition(is_sending).map(|last| (last + 1).min(counters.len() - 1));
    match (counters.iter().find(|both| is_sending(both)), end.map(|end| &counters[end])) {
        (Some((first, from)), Some((last, to))) if last.at > first.at => {
            Ok((counter(to, "iot.done") - counter(from, "iot.done")) / (last.at - first.at).as_secs_f64())
        }
        _ => Err(MeasureError::Failed("no counters of the server were seen".into())),
    }
}

/// Observations of a run.
struct Outcome {
    report: PairReport,
    /// Counters of the server at several times.
    counters: Vec<(Sample, Value)>,
    /// The monitor's last report.
    monitor: Value,
    /// CPU time of the monitor at the last sample before messages were sent, and at the last sample while
    /// they were sent.
    monitor_cpu: [Duration; 2],
    /// Use of all CPUs while messages were sent.
    cpus: CpuTimes,
}

/// A monitor of the server's stack.
struct Monitor {
    process: Process,
    /// A file without a name, because the directory of the run is gone at the end.
    output: File,
}

impl Monitor {
    fn start(run_dir: &Path) -> Result<Self, MeasureError> {
        let output = tempfile::tempfile()?;
        let mut command = Command::new(ginnel_path()?);
        command.args(["monitor", "server", "--protocol", "iot", "--json", "--interval", "10"]);
        command.env("GINNEL_RUN_DIR", run_dir.join("stacks")).stdin(Stdio::null());
        command.stdout(output.try_clone()?).stderr(Stdio::null());
        Ok(Self { process: Process::spawn(&mut command)?, output })
    }

    /// Waits until the monitor has ended with the stack, and returns its last report.
    fn finish(mut self) -> Result<Value, MeasureError> {
        let status = self.process.wait(MONITOR_END_TIMEOUT)?;
        if !status.is_some_and(|status| status.success()) {
            return Err(MeasureError::Failed(format!("the monitor has not ended with success: {status:?}")));
        }
        self.output.rewind()?;
        let text = std::io::read_to_string(self.output)?;
        let last = text.lines().last().unwrap_or_default();
        serde_json::from_str(last).map_err(|e| MeasureError::Failed(format!("the monitor's report: {e}")))
    }
}

/// Observes a run, and draws its latencies into the file `picture` if it is given.
fn observe(scenario: &Scenario, run: Run, picture: Option<PathBuf>) -> Result<Outcome, MeasureError> {
    let connections = f64::from(scenario.connections);
    let mut server = words("iot --start-redis 1");
    if run.priorities {
        server.push("--priorities".into());
    }
    let setup = connections / SETUP_RATE;
    let mut load = words(&format!(
        "iot --stack light --coalesce-us {COALESCE_US} --high-share {HIGH_SHARE} --low-share {LOW_SHARE} \
         --setup {setup:.3}s --wait 5s --epoch {:.6}s --duration {:.3}s --timeout 30s",
        connections / run.rate,
        run.seconds
    ));
    if let Some(picture) = picture {
        load.extend(["--svg".into(), picture.display().to_string()]);
    }
    let pair = ProgramPair {
        server,
        load,
        connections: scenario.connections,
        connections_max: scenario.connections + 1_000,
        shard_keys: "spin_us = 0".into(),
        server_tcp_keys: String::new(),
    };
    let mut monitor = None;
    let mut counters = Vec::new();
    let mut monitor_cpu = [Duration::ZERO; 2];
    let mut cpus: Vec<CpuTimes> = Vec::new();
    let mut failure = None;
    let report = pair.run(|sample, folder| {
        if monitor.is_none() && failure.is_none() {
            match Monitor::start(folder) {
                Ok(started) => monitor = Some(started),
                Err(e) => failure = Some(e),
            }
        }
        let Some(monitor) = &monitor else { return };
        let used = cpu_time(monitor.process.id());
        if sample.stage == "sending" {
            // The first and the last are kept.
            cpus.truncate(1);
            cpus.extend(CpuTimes::read());
        }
        match sample.stage.as_str() {
            "sending" => monitor_cpu[1] = used,
            "set-up" | "waiting" => monitor_cpu = [used; 2],
            _ => {}
        }
        // A few times per run, and at its end.
        let is_due = counters.last().is_none_or(|(last, _): &(Sample, Value)| {
            sample.at >= last.at + Duration::from_secs(2) || last.stage != sample.stage
        });
        if is_due && let Some(values) = server_counters(folder) {
            counters.push((sample.clone(), values));
        }
    })?;
    if let Some(failure) = failure {
        return Err(failure);
    }
    let monitor = monitor.map(Monitor::finish).transpose()?.unwrap_or_default();
    let cpus = match &cpus[..] {
        [first, last] => last.since(first),
        _ => CpuTimes::default(),
    };
    Ok(Outcome { report, counters, monitor, monitor_cpu, cpus })
}

fn measure(scenario: &Scenario, run: Run) -> Result<BenchResult, MeasureError> {
    let name = format!("{}/{}", scenario.name, run.part);
    println!("  {name}: {:.0} messages/s for {:.0} s", run.rate, run.seconds);
    let cpus = Cpus::choose()?;
    let floor = jitter::measure(cpus)?;
    let picture = match std::env::var_os("GINNEL_BLESS") {
        Some(_) => Some(std::path::absolute(format!("docs/{}-{}.svg", scenario.name, run.part))?),
        None => None,
    };
    let outcome = observe(scenario, run, picture)?;
    let report = &outcome.report;
    let latency = |priority, figure| report.number(&["latency_ns", priority, figure]) / 1e6;
    let figure = latency(scenario.goal_priority, scenario.goal_percentile);
    let unit = format!(
        "ms, {} of {} messages",
        scenario.goal_percentile.replace('_', "."),
        if scenario.goal_priority == "total" { "all" } else { "urgent" }
    );
    let mut result = BenchResult::from_counts(&name, &unit, figure, None);
    for priority in ["total", "high", "low"] {
        for percentile in ["p50", "p99", "p99_9", "max"] {
            let fact = format!("{priority}_{percentile}_ms");
            result.our_facts.insert(fact, latency(priority, percentile));
        }
    }
    add_floor(&mut result, &floor);
    add_cpu(&mut result, &outcome);
    add_accounts(&mut result, scenario, &outcome);
    // If more is sent than can be executed, the rate is not the one that was asked for.
    let is_expected = |reason: &String| run.is_overloaded && reason.contains("messages/s");
    result.problems.extend(report.missed.iter().filter(|reason| !is_expected(reason)).cloned());
    let core = outcome.cpus.busy_shares().get(cpus.server).copied().unwrap_or(f64::NAN);
    result.our_facts.insert("core_of_server_busy".into(), core);
    if run.is_overloaded && (core.is_nan() || core < OVERLOADED_SHARE_MIN) {
        result
            .problems
            .push(format!("no overload: the server's core was busy for {:.0} % only", core * 100.0));
    }
    if figure.is_nan() {
        result.problems.push("the report lacks the latency".into());
    }
    if !run.is_overloaded && run.priorities && figure > scenario.goal_ms {
        result.problems.push(format!("the goal of {} ms is missed", scenario.goal_ms));
    }
    Ok(result)
}

fn add_floor(result: &mut BenchResult, floor: &Jitter) {
    result.our_facts.insert("floor_p99_9_ms".into(), floor.p99_9.as_secs_f64() * 1e3);
    result.our_facts.insert("floor_max_ms".into(), floor.longest.as_secs_f64() * 1e3);
}

/// Adds the shares of a core that each program used while messages were sent.
fn add_cpu(result: &mut BenchResult, outcome: &Outcome) {
    let Some((first, last)) = outcome.report.stage("sending") else { return };
    let passed = (last.at - first.at).as_secs_f64().max(1e-3);
    let monitor = outcome.monitor_cpu[1].saturating_sub(outcome.monitor_cpu[0]);
    for (name, used) in [
        ("cpu_stack", last.server - first.server),
        ("cpu_redis", last.children - first.children),
        ("cpu_generator", last.generator - first.generator),
        ("cpu_monitor", monitor),
    ] {
        result.our_facts.insert(name.into(), used.as_secs_f64() / passed);
    }
    result.our_facts.insert("memory_mib".into(), last.memory.total() as f64 / f64::from(1 << 20));
}

/// Compares the counts of the generator, the server and the monitor.
fn add_accounts(result: &mut BenchResult, scenario: &Scenario, outcome: &Outcome) {
    let report = &outcome.report;
    let number = |name| report.number(&["messages", name]);
    let (sent, answered) = (number("sent"), number("answered"));
    let (heartbeats, unanswered) = (number("heartbeats"), number("unanswered"));
    let Some((_, counters)) = outcome.counters.last() else {
        result.problems.push("the server's counters were not seen".into());
        return;
    };
    let received = counter(counters, "iot.messages");
    let monitored = outcome.monitor["counters"]["requests"].as_f64().unwrap_or(f64::NAN);
    let facts = [
        ("connections", report.number(&["achieved", "connections"])),
        ("messages_per_second", report.number(&["achieved", "messages_per_second"])),
        ("sent", sent),
        ("received", received),
        ("answered", answered),
        ("answered_error", number("answered_error")),
        ("heartbeats", heartbeats),
        ("unanswered", unanswered),
        ("executed", counter(counters, "iot.done")),
        ("monitored_requests", monitored),
        ("monitor_p99_ms", outcome.monitor["latency"]["total"]["p99_ns"].as_f64().unwrap_or(f64::NAN) / 1e6),
        ("monitor_lost_frames", outcome.monitor["source_lost"].as_f64().unwrap_or(f64::NAN)),
    ];
    result.our_facts.extend(facts.map(|(name, value)| (name.to_owned(), value)));
    if sent != received {
        result.problems.push(format!("{sent} messages were sent, but {received} received"));
    }
    if sent != answered + heartbeats + unanswered || unanswered != 0.0 {
        result.problems.push(format!(
            "{sent} sent, {answered} answered, {heartbeats} heartbeats, {unanswered} unanswered"
        ));
    }
    let requests = sent - heartbeats;
    if outcome.monitor["source_lost"].as_u64() == Some(0) && monitored != requests {
        result.problems.push(format!("the monitor saw {monitored} of {requests} requests"));
    }
    if report.number(&["connections", "open_at_end"]) != f64::from(scenario.connections) {
        result.problems.push("not all connections were open at the end".into());
    }
}
