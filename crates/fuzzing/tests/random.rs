//! Seeded random inputs for every target. `GINNEL_SEED=n` runs a single seed; `cargo test -p ginnel-fuzzing
//! --test random -- --ignored` runs many.

use ginnel_fuzzing::{TARGETS, Target, inputs};
use std::panic::catch_unwind;

fn run(target: &Target, seeds: core::ops::Range<u64>) {
    let one = std::env::var("GINNEL_SEED").ok().and_then(|s| s.parse().ok());
    let seeds = one.map_or(seeds, |seed| seed..seed + 1);
    for seed in seeds {
        let data = inputs::random(target, seed);
        if catch_unwind(|| (target.run)(&data)).is_err() {
            let file = std::env::temp_dir().join(format!("ginnel-{}-{seed}", target.name));
            std::fs::write(&file, &data).expect("a writable temporary directory");
            panic!(
                "{} fails on seed {seed} (GINNEL_SEED={seed} repeats it); to shrink the input:\n\
                 cargo run -p ginnel-fuzzing --example replay -- {} {}",
                target.name,
                target.name,
                file.display()
            );
        }
    }
}

/// Runs the first `seeds` seeds of a target.
fn target(name: &str, seeds: u64) {
    let target = TARGETS.iter().find(|t| t.name == name).expect("a target");
    run(target, 0..seeds);
}

#[test]
fn random_operations_on_a_stack() {
    target("frames", 3000);
}

#[test]
fn random_tcp_options() {
    target("tcp_options", 20_000);
}

#[test]
fn random_fragments() {
    target("ip_reassembly", 5000);
}

#[test]
fn random_http() {
    target("http", 2000);
}

#[test]
fn random_configuration() {
    target("config", 3000);
}

#[test]
fn random_frames_and_programs() {
    target("matcher", 20_000);
}

#[test]
fn random_link_specifications() {
    target("link_spec", 20_000);
}

#[test]
fn random_clients() {
    target("channel", 150);
}

#[test]
fn random_memif_peers() {
    target("memif", 3000);
}

#[test]
fn random_segments_and_captures() {
    target("monitor", 500);
}

#[test]
#[ignore = "long: many seeds of every target; part of `make suites`"]
fn random_inputs_for_long() {
    for target in &TARGETS {
        let seeds = match target.name {
            "frames" => 1_000_000,
            // Each takes hundreds of turns of two shards.
            "channel" => 10_000,
            _ => 200_000,
        };
        run(target, 100_000..100_000 + seeds);
    }
}
