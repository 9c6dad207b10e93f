//! Sequences of calls that follow from a seed run on the kernel and on the stack, and must say the same.
//!
//! A sequence that differs is made smaller as long as it still differs, and shown beside what both said. `GINNEL_SEED=N` runs the sequence of one seed, with
//! `GINNEL_STEPS=0,3,7` these steps of it alone. What was found so becomes a case of `tests/parity`.

#[expect(dead_code, reason = "the cases of `parity` use the rest")]
#[path = "../parity/kernel.rs"]
mod kernel;
mod minimise;
mod rigs;
#[expect(dead_code, reason = "as above")]
#[path = "../parity/stack.rs"]
mod stack;
mod steps;
#[expect(dead_code, reason = "as above")]
#[path = "../parity/sys.rs"]
mod sys;
mod world;

use ginnel_testkit::steal;
use minimise::minimise;
use rigs::{OnKernel, Simulated};
use std::fmt::Write;
use std::time::{Duration, Instant};
use steps::{Step, sequence};

/// Returns the transcripts of the kept steps on the kernel and on the stack. Only the kernel runs in real time.
fn both(steps: &[Step], kept: &[usize]) -> [Vec<String>; 2] {
    let kept = || kept.iter().map(|step| &steps[*step]);
    let on_stack = world::run(&mut Simulated::new(), kept());
    let on_kernel = steal::repeat_if_stalled(|| {
        let on_kernel = world::run(&mut OnKernel::new(), kept());
        if on_kernel == on_stack { Ok(()) } else { Err(on_kernel) }
    });
    [on_kernel.err().unwrap_or_else(|| on_stack.clone()), on_stack]
}

fn differ(steps: &[Step], kept: &[usize]) -> bool {
    let [on_kernel, on_stack] = both(steps, kept);
    on_kernel != on_stack
}

/// The steps of a sequence that differ, as few as there need be, with what was said.
fn difference(seed: u64) -> Option<String> {
    let steps = sequence(seed);
    let chosen: Option<Vec<usize>> =
        std::env::var("GINNEL_STEPS").ok().map(|list| list.split(',').map(|n| n.parse().unwrap()).collect());
    let all = chosen.clone().unwrap_or_else(|| (0..steps.len()).collect());
    if !differ(&steps, &all) {
        return None;
    }
    let few = if chosen.is_some() { all } else { minimise(all, |kept| differ(&steps, kept)) };
    let [on_kernel, on_stack] = both(&steps, &few);
    let mut said = String::new();
    let numbers = few.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    writeln!(said, "seed {seed}; to run it again: GINNEL_SEED={seed} GINNEL_STEPS={numbers}").unwrap();
    for ((step, kernel), stack) in few.iter().zip(&on_kernel).zip(&on_stack) {
        writeln!(said, "  {:?}", steps[*step]).unwrap();
        match kernel == stack {
            true => writeln!(said, "      {kernel}").unwrap(),
            false => writeln!(said, "      kernel: {kernel}\n      stack:  {stack}").unwrap(),
        }
    }
    Some(said)
}

/// Runs these seeds, or the one of `GINNEL_SEED`, until the time is over. Shows at most so many differences.
fn check(seeds: core::ops::RangeInclusive<u64>, time: Duration) {
    let begun = Instant::now();
    let seeds = match std::env::var("GINNEL_SEED") {
        Ok(seed) => seed.parse().map(|seed| seed..=seed).unwrap(),
        Err(_) => seeds,
    };
    let mut found = Vec::new();
    let mut ran = 0;
    for seed in seeds {
        if begun.elapsed() > time || found.len() >= SHOWN_MAX {
            break;
        }
        ran += 1;
        found.extend(difference(seed));
    }
    println!("{ran} sequences in {:?}", begun.elapsed());
    assert!(found.is_empty(), "the kernel and the stack differ:\n{}", found.join("\n"));
}

/// Differences that are shown at a time.
const SHOWN_MAX: usize = 5;

#[test]
fn sequences_say_the_same_on_the_kernel_and_on_the_stack() {
    check(1..=400, Duration::from_secs(15));
}

#[test]
#[ignore = "long: thousands of sequences; part of `make suites`"]
fn many_sequences_say_the_same_on_the_kernel_and_on_the_stack() {
    check(1000..=20_000, Duration::from_secs(600));
}
