//! Differential test: sequences of calls, determined by a seed, run on the kernel and on the stack, and must
//! have equal results.
//!
//! A sequence that differs is minimised, and shown with the results of both. `GINNEL_SEED=N` runs the
//! sequence of one seed, and with `GINNEL_STEPS=0,3,7` only these steps of it. Differences found become cases
//! of `tests/parity`.

mod hosts;
#[expect(dead_code, reason = "the cases of `parity` use the rest")]
#[path = "../parity/kernel.rs"]
mod kernel;
mod minimise;
mod runner;
#[expect(dead_code, reason = "as above")]
#[path = "../parity/stack.rs"]
mod stack;
mod steps;
#[expect(dead_code, reason = "as above")]
#[path = "../parity/sys.rs"]
mod sys;

use ginnel_testkit::steal;
use hosts::{KernelHosts, SimulatedHosts};
use minimise::minimise;
use std::fmt::Write;
use std::time::{Duration, Instant};
use steps::{Step, sequence};

/// Returns the transcripts of the kept steps on the kernel and on the stack. Only the kernel runs in real
/// time.
fn transcripts(steps: &[Step], kept: &[usize]) -> [Vec<String>; 2] {
    let kept = || kept.iter().map(|step| &steps[*step]);
    let on_stack = runner::run(&mut SimulatedHosts::new(), kept());
    let on_kernel = steal::repeat_if_stalled(|| {
        let on_kernel = runner::run(&mut KernelHosts::new(), kept());
        if on_kernel == on_stack { Ok(()) } else { Err(on_kernel) }
    });
    [on_kernel.err().unwrap_or_else(|| on_stack.clone()), on_stack]
}

fn differ(steps: &[Step], kept: &[usize]) -> bool {
    let [on_kernel, on_stack] = transcripts(steps, kept);
    on_kernel != on_stack
}

/// Returns the minimised steps of a sequence that differs, with their results.
fn difference(seed: u64) -> Option<String> {
    let steps = sequence(seed);
    let selected: Option<Vec<usize>> =
        std::env::var("GINNEL_STEPS").ok().map(|list| list.split(',').map(|n| n.parse().unwrap()).collect());
    let all = selected.clone().unwrap_or_else(|| (0..steps.len()).collect());
    if !differ(&steps, &all) {
        return None;
    }
    let minimal = if selected.is_some() { all } else { minimise(all, |kept| differ(&steps, kept)) };
    let [on_kernel, on_stack] = transcripts(&steps, &minimal);
    let mut report = String::new();
    let numbers = minimal.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    writeln!(report, "seed {seed}; repeat with GINNEL_SEED={seed} GINNEL_STEPS={numbers}").unwrap();
    for ((step, kernel), stack) in minimal.iter().zip(&on_kernel).zip(&on_stack) {
        writeln!(report, "  {:?}", steps[*step]).unwrap();
        match kernel == stack {
            true => writeln!(report, "      {kernel}").unwrap(),
            false => writeln!(report, "      kernel: {kernel}\n      stack:  {stack}").unwrap(),
        }
    }
    Some(report)
}

/// Runs the sequences of these seeds, or of `GINNEL_SEED`, until the time limit. Shows at most
/// `SHOWN_MAX` differences.
fn check(seeds: core::ops::RangeInclusive<u64>, limit: Duration) {
    let start = Instant::now();
    let seeds = match std::env::var("GINNEL_SEED") {
        Ok(seed) => seed.parse().map(|seed| seed..=seed).unwrap(),
        Err(_) => seeds,
    };
    let mut differences = Vec::new();
    let mut ran = 0;
    for seed in seeds {
        if start.elapsed() > limit || differences.len() >= SHOWN_MAX {
            break;
        }
        ran += 1;
        differences.extend(difference(seed));
    }
    println!("{ran} sequences in {:?}", start.elapsed());
    assert!(differences.is_empty(), "the kernel and the stack differ:\n{}", differences.join("\n"));
}

/// Maximum number of differences to show.
const SHOWN_MAX: usize = 5;

#[test]
fn sequences_match_the_kernel() {
    check(1..=400, Duration::from_secs(15));
}

#[test]
#[ignore = "slow: runs thousands of sequences; run it with `make suites`"]
fn many_sequences_match_the_kernel() {
    check(1000..=20_000, Duration::from_secs(600));
}
