//! Instructions that the server, or the load generator, executes per connection, request and megabyte,
//! counted by valgrind. The count is equal in every run on any machine of the architecture, under any load,
//! so that a regression of a few percent is detected.
//!
//! `bench/instructions.json` has the accepted counts. `GINNEL_BLESS=1` writes it anew.

use crate::client::{ClientConfig, Mode};
use crate::generator::GeneratorCase;
use crate::harness::result::{BenchResult, number};
use crate::harness::{MeasureError, Options};
use crate::http;
use crate::server::{
    CallsServer, Checksums, EngineOptions, EngineServer, Responder, ShardServer, SmoltcpServer, TaskServer,
    cable, link_setup,
};
use crate::single_thread::{START, SingleThread};
use ginnel_stack::tcp::config::TcpConfig;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A count that exceeds the accepted one by more than this share is a regression.
const REGRESSION_MIN: f64 = 0.02;
/// Concurrent connections, as in the benches against smoltcp.
const CONNECTIONS: u32 = 16;
/// Length of a bulk response in bytes.
const BULK_BYTES: u64 = 1_000_000;
/// The cases, with the unit of an operation.
pub(super) const CASES: &[(&str, &str)] = &[
    ("short-connection", "instructions per connection"),
    ("keep-alive-request", "instructions per request"),
    ("bulk-megabyte", "instructions per MB"),
    ("bulk-megabyte-software", "instructions per MB"),
    ("runtime-short-connection", "instructions per connection"),
    ("runtime-keep-alive-request", "instructions per request"),
    ("task-short-connection", "instructions per connection"),
    ("task-keep-alive-request", "instructions per request"),
    ("calls-short-connection", "instructions per connection"),
    ("calls-keep-alive-request", "instructions per request"),
    ("calls-crowd-short-connection", "instructions per connection"),
    ("calls-crowd-keep-alive-request", "instructions per request"),
    ("load-short-connection", "instructions per connection"),
    ("load-keep-alive-request", "instructions per request"),
    ("load-light-short-connection", "instructions per connection"),
    ("load-light-keep-alive-request", "instructions per request"),
    ("httpd-short-connection", "instructions per connection"),
    ("httpd-keep-alive-request", "instructions per request"),
    ("httpd-mirrored-keep-alive-request", "instructions per request"),
    ("iot-message", "instructions per message"),
    ("iot-mirrored-message", "instructions per message"),
    ("smoltcp-short-connection", "instructions per connection"),
    ("smoltcp-keep-alive-request", "instructions per request"),
];
/// Cases of smoltcp, which are shown beside ours and not checked.
const SMOLTCP_PREFIX: &str = "smoltcp-";
/// Cases that use the runtime; the cases without a prefix use the engine alone.
const RUNTIME_PREFIX: &str = "runtime-";
/// Cases with a task for each connection.
const TASK_PREFIX: &str = "task-";
/// Cases with a program in POSIX calls.
const CALLS_PREFIX: &str = "calls-";
/// Second prefix of the cases beside [`CROWD`] idle clients. Such a case may cost at most the share
/// [`CROWD_COST_MAX`] more than the case alone.
const CROWD_PREFIX: &str = "crowd-";
const CROWD: usize = 1000;
const CROWD_COST_MAX: f64 = 0.01;
/// Cases that measure the load generator instead of the server, and the second prefix of those on the light
/// TCP.
const LOAD_PREFIX: &str = "load-";
const LIGHT_PREFIX: &str = "light-";
/// Cases of `ginnel httpd`, with the generator on the light TCP.
const HTTPD_PREFIX: &str = "httpd-";
/// Cases of `ginnel iot`, with the generator on the light TCP, which [`IOT_PROGRAM`] runs. It is beside this
/// program.
const IOT_PREFIX: &str = "iot-";
const IOT_PROGRAM: &str = "ginnel-bench-iot";
/// Second prefix of the cases of which `ginnel monitor` gets copies of all frames. Such a case of `ginnel
/// httpd` or `ginnel iot` may cost at most this share more than the case alone.
const MIRRORED_PREFIX: &str = "mirrored-";
const HTTPD_MIRROR_COST_MAX: f64 = 0.05;
const IOT_MIRROR_COST_MAX: f64 = 0.02;

/// Counts all cases and compares them with the accepted counts.
pub fn run(_options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    if Command::new("valgrind").arg("--version").output().is_err() {
        return Err(MeasureError::Skipped("valgrind is not installed".into()));
    }
    let counted: BTreeMap<&str, f64> = std::thread::scope(|scope| {
        let running: Vec<_> =
            CASES.iter().map(|(case, _)| (*case, scope.spawn(|| count_per_operation(case)))).collect();
        running
            .into_iter()
            .map(|(case, thread)| Ok((case, thread.join().expect("counting does not panic")?)))
            .collect::<Result<_, MeasureError>>()
    })?;
    let crowd = format!("{CROWD} idle clients");
    let copies = "copies of all frames for a monitor";
    for (prefix, second_prefix, reason, cost_max) in [
        (CALLS_PREFIX, CROWD_PREFIX, crowd.as_str(), CROWD_COST_MAX),
        (HTTPD_PREFIX, MIRRORED_PREFIX, copies, HTTPD_MIRROR_COST_MAX),
        (IOT_PREFIX, MIRRORED_PREFIX, copies, IOT_MIRROR_COST_MAX),
    ] {
        for (case, cost) in costs(&counted, prefix, second_prefix) {
            let (percent, limit) = (100.0 * cost, 100.0 * cost_max);
            println!("  {reason} change {prefix}{case} by {percent:+.2} % (limit {limit} %)");
            if cost > cost_max {
                let problem = format!("{prefix}{case}: {percent:+.2} % with {reason}, more than {limit} %");
                return Err(MeasureError::Failed(problem));
            }
        }
    }
    let ours = CASES.iter().filter(|(case, _)| !case.starts_with(SMOLTCP_PREFIX));
    let results: Vec<BenchResult> = ours
        .map(|(case, unit)| {
            let theirs = format!(
                "{SMOLTCP_PREFIX}{}",
                case.trim_start_matches(RUNTIME_PREFIX)
                    .trim_start_matches(TASK_PREFIX)
                    .trim_start_matches(CALLS_PREFIX)
                    .trim_start_matches(CROWD_PREFIX)
            );
            let theirs = counted.get(theirs.as_str()).copied();
            result(case, unit, counted[case], theirs)
        })
        .collect();
    let accepted_file = Path::new("bench/instructions.json");
    if std::env::var_os("GINNEL_BLESS").is_some() {
        let all: Map<String, Value> =
            results.iter().map(|r| (short_name(r), json!(r.ours.round()))).collect();
        fs::write(accepted_file, format!("{:#}\n", Value::Object(all)))?;
    }
    let text = fs::read_to_string(accepted_file)
        .map_err(|e| MeasureError::Failed(format!("{}: {e}", accepted_file.display())))?;
    let accepted: BTreeMap<String, f64> = serde_json::from_str(&text)
        .map_err(|e| MeasureError::Failed(format!("bench/instructions.json: {e}")))?;
    compare(results, &accepted)
}

/// Returns the cases with a second prefix, and what share they cost more than those without it.
fn costs<'a>(counted: &BTreeMap<&'a str, f64>, prefix: &str, second_prefix: &str) -> Vec<(&'a str, f64)> {
    let both = counted.iter().filter_map(|(case, count)| {
        let alone = case.strip_prefix(prefix)?.strip_prefix(second_prefix)?;
        Some((alone, count / counted[format!("{prefix}{alone}").as_str()] - 1.0))
    });
    both.collect()
}

/// Adds the accepted counts to the results. Fails if one is a regression.
fn compare(
    mut results: Vec<BenchResult>,
    accepted: &BTreeMap<String, f64>,
) -> Result<Vec<BenchResult>, MeasureError> {
    let mut worse = Vec::new();
    for result in &mut results {
        let name = short_name(result);
        let Some(&accepted) = accepted.get(&name) else {
            worse.push(format!("{name} is not in bench/instructions.json (GINNEL_BLESS=1 writes it)"));
            continue;
        };
        let change = result.ours / accepted - 1.0;
        result.our_facts.insert("accepted".into(), accepted);
        result.our_facts.insert("change".into(), change);
        println!(
            "  {name:<24} {:>12} accepted {:>12} {:>+7.2} %",
            number(result.ours),
            number(accepted),
            100.0 * change
        );
        if change > REGRESSION_MIN {
            worse.push(format!("{name}: {:+.1} %", 100.0 * change));
        }
    }
    if worse.is_empty() { Ok(results) } else { Err(MeasureError::Failed(worse.join("; "))) }
}

fn short_name(result: &BenchResult) -> String {
    result.name.trim_start_matches("instructions/").into()
}

fn result(case: &str, unit: &str, ours: f64, theirs: Option<f64>) -> BenchResult {
    BenchResult::from_counts(&format!("instructions/{case}"), unit, ours, theirs)
}

/// Returns the instructions per operation: the difference between a long and a short run, in which the
/// start-up cancels out.
fn count_per_operation(case: &str) -> Result<f64, MeasureError> {
    let build = if case.starts_with(IOT_PREFIX) { Build::of_iot()? } else { Build::this()? };
    count_per_operation_of(&build, case)
}

/// Returns the instructions per operation of a build.
pub(super) fn count_per_operation_of(build: &Build, case: &str) -> Result<f64, MeasureError> {
    let (few, many) = operations(case);
    Ok((build.count_total(case, many)? - build.count_total(case, few)?) / (many - few) as f64)
}

/// Returns the operations of the short run and of the long run. The short run reaches the steady state.
fn operations(case: &str) -> (u64, u64) {
    if case.contains("bulk") { (5, 15) } else { (6_000, 10_000) }
}

/// Returns the instructions that the measured side executes in a run of a case under valgrind.
pub(super) fn count_total(case: &str, operations: u64) -> Result<f64, MeasureError> {
    Build::this()?.count_total(case, operations)
}

/// A build of this program.
pub(super) struct Build {
    program: PathBuf,
    /// Arguments besides those of a case.
    arguments: Vec<String>,
}

impl Build {
    /// Returns this program.
    pub fn this() -> Result<Self, MeasureError> {
        Ok(Self::new(std::env::current_exe()?, &[]))
    }

    /// Returns [`IOT_PROGRAM`] of this build.
    fn of_iot() -> Result<Self, MeasureError> {
        let program = std::env::current_exe()?.with_file_name(IOT_PROGRAM);
        if program.exists() {
            return Ok(Self::new(program, &[]));
        }
        let way_out = "run \"scripts/bench instructions\", which builds it";
        Err(MeasureError::Failed(format!("{} is missing: {way_out}", program.display())))
    }

    /// Returns the build at a path, which is given `arguments` before those of a case.
    pub fn new(program: PathBuf, arguments: &[&str]) -> Self {
        Self { program, arguments: arguments.iter().map(|argument| argument.to_string()).collect() }
    }

    /// Returns the instructions that the measured side executes in a run of a case under valgrind.
    fn count_total(&self, case: &str, operations: u64) -> Result<f64, MeasureError> {
        let out = self.out_file(case);
        let counted = if case.starts_with(LOAD_PREFIX) { "*generator_turn*" } else { "*server_turn*" };
        let output = Command::new("valgrind")
            .args(["--tool=callgrind", "--collect-atstart=no"])
            .arg(format!("--toggle-collect={counted}"))
            .arg(format!("--callgrind-out-file={}", out.display()))
            .arg(&self.program)
            .args(&self.arguments)
            .args(["--count-case", case, "--operations", &operations.to_string()])
            .output()?;
        let profile = fs::read_to_string(&out).unwrap_or_default();
        _ = fs::remove_file(&out);
        instructions_in(&profile).filter(|_| output.status.success()).ok_or_else(|| {
            let log = String::from_utf8_lossy(&output.stderr);
            MeasureError::Failed(format!(
                "{case}: valgrind counted nothing: {}",
                log.lines().last().unwrap_or_default()
            ))
        })
    }

    /// Returns the file of a case's profile. Several builds may count a case at the same time.
    fn out_file(&self, case: &str) -> PathBuf {
        let name = format!("ginnel-callgrind-{}-{case}{}", std::process::id(), self.arguments.join(""));
        std::env::temp_dir().join(name)
    }
}

/// Returns the total of a callgrind profile.
fn instructions_in(profile: &str) -> Option<f64> {
    let line = profile.lines().find_map(|l| l.strip_prefix("totals:").or(l.strip_prefix("summary:")))?;
    line.split_whitespace().next()?.parse().ok().filter(|n| *n > 0.0)
}

/// Runs a case; called under valgrind.
pub fn run_case(case: &str, operations: u64) -> Result<(), MeasureError> {
    if case.starts_with(super::scaling::PREFIX) {
        return super::scaling::run_case(case, operations);
    }
    // With a short TIME_WAIT, entries expire as fast as they are created during the measured operations.
    let tcp = TcpConfig { time_wait_seconds: 1, ..TcpConfig::default() };
    if case.starts_with(LOAD_PREFIX) || case.starts_with(HTTPD_PREFIX) {
        let httpd = case.starts_with(HTTPD_PREFIX);
        let light = httpd || case.trim_start_matches(LOAD_PREFIX).starts_with(LIGHT_PREFIX);
        let keep_alive = case.ends_with("keep-alive-request");
        let run = GeneratorCase {
            light,
            httpd,
            is_mirrored: case.trim_start_matches(HTTPD_PREFIX).starts_with(MIRRORED_PREFIX),
            keep_alive,
            connections: CONNECTIONS,
            requests: operations,
            tcp,
        };
        return run.run();
    }
    let kind = [SMOLTCP_PREFIX, RUNTIME_PREFIX, TASK_PREFIX, CALLS_PREFIX, CROWD_PREFIX]
        .iter()
        .fold(case, |case, kind| case.trim_start_matches(kind));
    let (mode, bulk_bytes, checksums) = match kind {
        "short-connection" => (Mode::Short, None, Checksums::Device),
        "keep-alive-request" => (Mode::KeepAlive, None, Checksums::Device),
        "bulk-megabyte" => (Mode::KeepAlive, Some(BULK_BYTES), Checksums::Device),
        "bulk-megabyte-software" => (Mode::KeepAlive, Some(BULK_BYTES), Checksums::Software),
        _ => return Err(MeasureError::Failed(format!("unknown case {case:?}"))),
    };
    let bulk = bulk_bytes.is_some();
    let client = ClientConfig {
        wire: link_setup(checksums),
        mode,
        connections: if bulk { 1 } else { CONNECTIONS },
        requests: vec![http::REQUEST.to_vec()],
        window_scale: bulk.then_some(7),
    };
    let (server_end, client_end) = cable(checksums, 1 << 22);
    let keep_alive = mode == Mode::KeepAlive;
    if case.starts_with(SMOLTCP_PREFIX) {
        let server = SmoltcpServer::new(server_end, checksums, CONNECTIONS, keep_alive, START);
        SingleThread::new(server, client_end, &client).run(operations);
        return Ok(());
    }
    if case.starts_with(CALLS_PREFIX) {
        let idle_clients = if case.contains(CROWD_PREFIX) { CROWD } else { 0 };
        let server = CallsServer::new(server_end, keep_alive, idle_clients, tcp, START);
        let server = server.map_err(|e| MeasureError::Failed(e.to_string()))?;
        SingleThread::new(server, client_end, &client).run(operations);
    } else if case.starts_with(TASK_PREFIX) {
        let server = TaskServer::new(server_end, keep_alive, tcp, START);
        let server = server.map_err(|e| MeasureError::Failed(e.to_string()))?;
        SingleThread::new(server, client_end, &client).run(operations);
    } else if case.starts_with(RUNTIME_PREFIX) {
        let server = ShardServer::new(server_end, Responder::new(keep_alive), tcp, START);
        let server = server.map_err(|e| MeasureError::Failed(e.to_string()))?;
        SingleThread::new(server, client_end, &client).run(operations);
    } else {
        let options = EngineOptions { keep_alive, bulk_bytes, tcp };
        SingleThread::new(EngineServer::new(server_end, options, START), client_end, &client).run(operations);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_two_percent_is_a_regression() {
        let results = |ours| vec![result("short-connection", "", ours, None)];
        let accepted = BTreeMap::from([("short-connection".to_string(), 1000.0)]);
        assert!(compare(results(1019.0), &accepted).is_ok());
        assert!(compare(results(500.0), &accepted).is_ok());
        assert!(compare(results(1021.0), &accepted).is_err());
        assert!(compare(results(1.0), &BTreeMap::new()).is_err(), "a case without an accepted count");
    }

    #[test]
    fn the_total_of_a_profile_is_found() {
        assert_eq!(instructions_in("events: Ir\nfn=(1)\n1 5\ntotals: 1234\n"), Some(1234.0));
        assert_eq!(instructions_in("events: Ir\ntotals: 0\n"), None);
    }
}
