//! Instructions that priorities cost while they are off: those of this build, compared with those of a build
//! whose usual path of a packet has no classes of priority ([`ginnel_stack::priority::COMPILED`]).
//! `scripts/bench` builds both.

use super::instructions::{Build, CASES, count_per_operation_of};
use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use std::process::Command;

/// Share of a case's instructions that priorities may cost while they are off.
const COST_MAX: f64 = 0.01;

/// Prefixes of the cases of the bench "instructions" in which each layer with classes takes part: the engine,
/// shards with handlers and with tasks, and POSIX calls behind a channel.
const PREFIXES: &[&str] = &["", "runtime-", "task-", "calls-"];
/// Names of the cases after a prefix.
const KINDS: &[&str] = &["short-connection", "keep-alive-request"];

/// Counts the cases of [`PREFIXES`] and [`KINDS`] in both builds. Fails if priorities cost more than
/// [`COST_MAX`] in one of them.
pub fn run(_options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    if Command::new("valgrind").arg("--version").output().is_err() {
        return Err(MeasureError::Skipped("valgrind is not installed".into()));
    }
    let ours = Build::this()?;
    let baseline = baseline()?;
    let is_counted = |case: &str| {
        PREFIXES.iter().any(|prefix| case.strip_prefix(prefix).is_some_and(|k| KINDS.contains(&k)))
    };
    let mut results = Vec::new();
    let mut missed = Vec::new();
    for (case, unit) in CASES.iter().filter(|(case, _)| is_counted(case)) {
        let (with, without) =
            (count_per_operation_of(&ours, case)?, count_per_operation_of(&baseline, case)?);
        let cost = with / without - 1.0;
        println!("  {case:<28} {with:>10.0} without {without:>10.0} {:>+7.2} %", 100.0 * cost);
        if cost > COST_MAX {
            missed.push(format!("{case}: {:+.2} %", 100.0 * cost));
        }
        results.push(BenchResult::from_counts(
            &format!("priority-off-cost/{case}"),
            unit,
            with,
            Some(without),
        ));
    }
    if results.len() != PREFIXES.len() * KINDS.len() {
        return Err(MeasureError::Failed("\"instructions\" lacks a case of PREFIXES and KINDS".into()));
    }
    if missed.is_empty() {
        return Ok(results);
    }
    let goal = 100.0 * COST_MAX;
    Err(MeasureError::Failed(format!(
        "priorities that are off cost more than {goal} %: {}",
        missed.join("; ")
    )))
}

/// Returns the build without priorities, which is beside this one: `target/without-priorities/release`.
fn baseline() -> Result<Build, MeasureError> {
    let own = std::env::current_exe()?;
    let missing = || {
        MeasureError::Failed("no build without priorities: run \"scripts/bench priority-off-cost\"".into())
    };
    let (release, name) = own.parent().zip(own.file_name()).ok_or_else(missing)?;
    let profile = release.file_name().ok_or_else(missing)?;
    let program = release.with_file_name("without-priorities").join(profile).join(name);
    if !program.exists() {
        return Err(missing());
    }
    Ok(Build::new(program, &["--without-priorities"]))
}
