//! Work, messages and memory of `ginnel demo-server` on 1 to 64 simulated shards. valgrind counts the
//! instructions, so that the result is equal in every run. A simulation has no caches, no memory bus and no
//! waiting; it shows that nothing in the stack grows with the number of shards.

mod picture;

use super::instructions::count_total;
use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use crate::scaled_server::{ScalingCase, ScalingCounts};
use picture::Curve;
use std::path::Path;
use std::process::Command;

/// Numbers of shards.
const SHARDS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];
/// Responses for each shard in the short and in the long run. After the short one, tables have their final
/// sizes.
const OPERATIONS: [u64; 2] = [500, 1000];
/// Largest growth of the instructions from one shard to more.
const GROWTH_MAX: f64 = 0.02;
/// Prefix of the cases.
pub const PREFIX: &str = "scaling-";
/// File of the picture, which `GINNEL_BLESS=1` writes.
const PICTURE: &str = "docs/scaling.svg";
/// The cases: name, unit, and whether the server is a proxy and keeps connections open.
const CASES: [(&str, &str, bool, bool); 4] = [
    ("naive-connection", "instructions per connection", false, false),
    ("naive-request", "instructions per request", false, true),
    ("proxy-connection", "instructions per relayed connection", true, false),
    ("proxy-request", "instructions per relayed request", true, true),
];

/// Returns the case of a name such as `scaling-proxy-request-64`.
fn parse(name: &str) -> Option<ScalingCase> {
    let (case, shards) = name.strip_prefix(PREFIX)?.rsplit_once('-')?;
    let (.., proxy, keep_alive) = *CASES.iter().find(|(known, ..)| *known == case)?;
    Some(ScalingCase { shards: shards.parse().ok()?, proxy, keep_alive })
}

/// Runs a case, and prints messages and memory. Called in a process of its own.
pub fn run_case(name: &str, operations: u64) -> Result<(), MeasureError> {
    let case = parse(name).ok_or_else(|| MeasureError::Failed(format!("unknown case {name:?}")))?;
    let ScalingCounts { messages, kib } = case.run(operations)?;
    println!("{messages} {kib}");
    Ok(())
}

/// Returns the counts that [`run_case`] prints.
fn count_messages(name: &str, operations: u64) -> Result<ScalingCounts, MeasureError> {
    let mut command = Command::new(std::env::current_exe()?);
    let output = command.args(["--count-case", name, "--operations", &operations.to_string()]).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mut numbers = text.split_whitespace().map_while(|word| word.parse().ok());
    match (numbers.next(), numbers.next()) {
        (Some(messages), Some(kib)) if output.status.success() => Ok(ScalingCounts { messages, kib }),
        _ => Err(MeasureError::Failed(format!("{name}: {}", String::from_utf8_lossy(&output.stderr)))),
    }
}

/// Measures one case with one number of shards: instructions and messages for each response, and KiB for each
/// shard.
fn measure(case: &str, shards: u32) -> Result<[f64; 3], MeasureError> {
    let name = format!("{PREFIX}{case}-{shards}");
    let responses = (OPERATIONS[1] - OPERATIONS[0]) as f64 * f64::from(shards);
    let instructions = count_total(&name, OPERATIONS[1])? - count_total(&name, OPERATIONS[0])?;
    let [few, many] = [count_messages(&name, OPERATIONS[0])?, count_messages(&name, OPERATIONS[1])?];
    let messages = many.messages.saturating_sub(few.messages) as f64;
    Ok([instructions / responses, messages / responses, many.kib as f64 / f64::from(shards)])
}

/// Measures all cases.
pub fn run(_options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    if Command::new("valgrind").arg("--version").output().is_err() {
        return Err(MeasureError::Skipped("valgrind is not installed".into()));
    }
    let mut results = Vec::new();
    let mut curves = Vec::new();
    for (case, unit, ..) in CASES {
        let mut efficiency = Vec::new();
        let mut one = 0.0;
        for shards in SHARDS {
            let [instructions, messages, kib] = measure(case, shards)?;
            if shards == 1 {
                one = instructions;
            }
            let growth = instructions / one - 1.0;
            println!(
                "  {case:<17} {shards:>2} shards {instructions:>9.0} {:+6.2} %, {messages} messages, {kib:>7.0} KiB each",
                100.0 * growth
            );
            let mut result =
                BenchResult::from_counts(&format!("sim-scaling/{case}/{shards}"), unit, instructions, None);
            result.our_facts.extend([
                ("growth".to_owned(), growth),
                ("messages_each".to_owned(), messages),
                ("kib_per_shard".to_owned(), kib),
            ]);
            if growth > GROWTH_MAX {
                result.problems.push(format!("{:+.2} % against one shard", 100.0 * growth));
            }
            if messages > 0.0 {
                result.problems.push(format!("{messages} messages between shards for each response"));
            }
            efficiency.push((f64::from(shards), one / instructions));
            results.push(result);
        }
        curves.push(Curve { name: case, points: efficiency });
    }
    if std::env::var_os("GINNEL_BLESS").is_some() {
        std::fs::write(Path::new(PICTURE), picture::draw(&curves))?;
    }
    Ok(results)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_cases_are_parsed() {
        let proxy = ScalingCase { shards: 64, proxy: true, keep_alive: false };
        assert_eq!(parse("scaling-proxy-connection-64"), Some(proxy));
        let naive = ScalingCase { shards: 1, proxy: false, keep_alive: true };
        assert_eq!(parse("scaling-naive-request-1"), Some(naive));
        for wrong in
            ["scaling-naive-request", "scaling-other-1", "naive-request-1", "scaling-naive-request-x"]
        {
            assert_eq!(parse(wrong), None);
        }
    }
}
