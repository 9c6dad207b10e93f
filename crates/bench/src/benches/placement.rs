//! Cost of running the application outside of its shard's thread: short connections, round trips of one
//! connection, and the response time of a sleeping stack.

use super::vs_smoltcp::checksums;
use crate::client::{ClientConfig, Mode};
use crate::harness::machine::{Cpus, pin};
use crate::harness::pairs::{self, Arm, Bound, Measurement};
use crate::harness::result::{BenchResult, median};
use crate::harness::{MeasureError, Options};
use crate::http;
use crate::placed_server::PlacedServer;
use crate::server::link_setup;
use crate::two_threads::RunPlan;
use core::time::Duration;
use ginnel::config::Placement;
use rustix::event::{EventfdFlags, eventfd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

/// Concurrent connections of the benches with short connections.
const CONNECTIONS: u32 = 16;
/// Number of wake-ups of a stack.
const WAKE_UPS: usize = 1000;
/// Longest time to wait for a response.
const WAKE_UP_TIMEOUT: Duration = Duration::from_secs(10);
/// Idle time before each request: many times `shard.spin_us`.
const IDLE_TIME: Duration = Duration::from_millis(3);

/// Measures the application in its shard's thread.
pub fn inline(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    run("placement-inline", Placement::Inline, options)
}

/// Measures the application in a thread on the same CPU, against inline.
pub fn paired(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    run("placement-paired", Placement::Paired, options)
}

/// Measures the application in a thread on another CPU, against inline.
pub fn split(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    run("placement-split", Placement::Split, options)
}

fn client(mode: Mode, connections: u32, options: &Options) -> ClientConfig {
    let requests = vec![http::REQUEST.to_vec()];
    ClientConfig { wire: link_setup(checksums(options)), mode, connections, requests, window_scale: None }
}

fn run(name: &str, placement: Placement, options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let plan = RunPlan::new(Cpus::choose()?, options.seconds(3.0));
    let short = |placement| -> Result<Measurement, MeasureError> {
        let server = PlacedServer { placement, keep_alive: false, checksums: checksums(options) };
        let result = server.measure_rate(&plan, &client(Mode::Short, CONNECTIONS, options))?;
        Ok(Measurement::new(result.counts.done as f64 / result.seconds)
            .with("server_idle_time", result.stack.idle_share())
            .with("resets", result.counts.resets as f64)
            .with("stuck", result.counts.stuck as f64))
    };
    let round_trip = |placement| -> Result<Measurement, MeasureError> {
        let server = PlacedServer { placement, keep_alive: true, checksums: checksums(options) };
        let result = server.measure_rate(&plan, &client(Mode::KeepAlive, 1, options))?;
        Ok(Measurement::new(result.seconds * 1e6 / (result.counts.done as f64).max(1.0))
            .with("requests", result.counts.done as f64)
            .with("server_sleeps", result.stack.sleeps as f64))
    };
    let mut results = Vec::new();
    let beside = placement != Placement::Inline;
    type Measure<'a> = &'a dyn Fn(Placement) -> Result<Measurement, MeasureError>;
    let parts: [(&str, &str, Measure<'_>); 2] =
        [("short", "connections/s", &short), ("round-trip", "µs", &round_trip)];
    for (part, unit, measure) in parts {
        let name = format!("{name}/{part}");
        if options.wants(&name) {
            let ours: Arm<'_> = Box::new(|| measure(placement));
            let theirs = beside.then(|| -> Arm<'_> { Box::new(|| measure(Placement::Inline)) });
            results.push(pairs::run(&name, unit, options, Bound::Machine, ours, theirs)?);
        }
    }
    Ok(results)
}

/// Measures the time from a request that wakes the stack to its response, and the wake-up of a bare thread.
pub fn wake_latency(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let plan = RunPlan::new(Cpus::choose()?, options.seconds(3.0));
    let times = if options.smoke { 20 } else { WAKE_UPS };
    let mut results = Vec::new();
    for (name, placement) in [
        ("wake-latency/inline", Placement::Inline),
        ("wake-latency/paired", Placement::Paired),
        ("wake-latency/split", Placement::Split),
    ] {
        if !options.wants(name) {
            continue;
        }
        let ours = || {
            let server = PlacedServer { placement, keep_alive: true, checksums: checksums(options) };
            let client = client(Mode::Hold { active: 1 }, 1, options);
            let (times, stack) = server.measure_wake_ups(&plan, &client, times, IDLE_TIME)?;
            let mut measured = latency(times).with("server_sleeps", stack.sleeps as f64);
            if stack.sleeps < measured.facts["wake_ups"] as u64 {
                measured.problems.push("the stack did not sleep before each request".into());
            }
            Ok(measured)
        };
        let bare: Arm<'_> = Box::new(|| Ok(latency(bare_wake_ups(&plan, times)?)));
        results.push(pairs::run(name, "µs", options, Bound::Machine, Box::new(ours), Some(bare))?);
    }
    Ok(results)
}

/// Returns median and 99th percentile in microseconds.
fn latency(mut seconds: Vec<f64>) -> Measurement {
    seconds.sort_by(f64::total_cmp);
    let p99 = seconds.get(seconds.len() * 99 / 100).or(seconds.last()).copied().unwrap_or(f64::NAN);
    Measurement::new(median(&seconds).unwrap_or(f64::NAN) * 1e6)
        .with("p99", p99 * 1e6)
        .with("wake_ups", seconds.len() as f64)
}

/// Measures the machine's time to wake a thread that sleeps on an eventfd and responds in shared memory.
fn bare_wake_ups(plan: &RunPlan, times: usize) -> Result<Vec<f64>, MeasureError> {
    // Each read takes one from the counter.
    let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE).map_err(std::io::Error::from)?;
    let answered = AtomicU64::new(0);
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| -> std::io::Result<()> {
            pin(plan.cpus.server)?;
            for count in 1..=times as u64 {
                rustix::io::read(&bell, &mut [0; 8])?;
                answered.store(count, Ordering::Release);
            }
            Ok(())
        });
        let waker = scope.spawn(|| -> std::io::Result<Vec<f64>> {
            pin(plan.cpus.client)?;
            let mut latencies = Vec::new();
            for count in 1..=times as u64 {
                thread::sleep(IDLE_TIME);
                let started = std::time::Instant::now();
                rustix::io::write(&bell, &1u64.to_ne_bytes())?;
                while answered.load(Ordering::Acquire) < count {
                    std::hint::spin_loop();
                    if started.elapsed() > WAKE_UP_TIMEOUT {
                        return Err(std::io::Error::other("the thread did not wake up in time"));
                    }
                }
                latencies.push(started.elapsed().as_secs_f64());
            }
            Ok(latencies)
        });
        let latencies = waker.join();
        // A waker that failed has not woken the sleeper as often as the sleeper expects.
        let last_wake_ups = rustix::io::write(&bell, &(times as u64).to_ne_bytes());
        let slept = sleeper.join();
        let panicked = |_| MeasureError::Failed("a thread panicked".into());
        // The failure of the sleeper is the cause of the waker's.
        slept.map_err(panicked)??;
        last_wake_ups.map_err(std::io::Error::from)?;
        Ok(latencies.map_err(panicked)??)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ginnel_testkit::steal;

    /// Smoke test: one short pair of everything, in each placement. The figures mean nothing.
    #[test]
    fn every_bench_of_placements_works() {
        let options = Options {
            pairs: 1,
            seconds: Some(0.5),
            smoke: true,
            force: true,
            only: None,
            software_checksums: false,
            layout: crate::harness::CoreLayout::default(),
        };
        for (run, parts) in [(inline as fn(&Options) -> _, 2), (paired, 2), (split, 2), (wake_latency, 3)] {
            let measured = steal::repeat_if_stalled(|| {
                let results: Vec<BenchResult> = run(&options).unwrap_or_else(|e: MeasureError| panic!("{e}"));
                assert_eq!(results.len(), parts);
                for result in results {
                    assert_eq!(result.theirs.is_some(), !result.name.starts_with("placement-inline"));
                    // Such a short measurement has no result if the machine was stalled for most of it.
                    if !(result.ours.is_finite() && result.ours > 0.0) {
                        return Err(format!("{}: {}", result.name, result.ours));
                    }
                }
                Ok(())
            });
            assert!(measured.is_ok(), "{measured:?}");
        }
    }

    #[test]
    fn bare_wake_ups_end_when_a_thread_fails() {
        let cpus = match Cpus::choose() {
            Err(MeasureError::Skipped(reason)) => {
                return ginnel_testkit::skip("bare_wake_ups_end_when_a_thread_fails", &reason);
            }
            cpus => cpus.unwrap(),
        };
        assert_eq!(bare_wake_ups(&RunPlan::new(cpus, 1.0), 3).unwrap().len(), 3);
        let no_cpu = Cpus { client: 1023, ..cpus };
        assert!(bare_wake_ups(&RunPlan::new(no_cpu, 1.0), 3).is_err());
    }

    #[test]
    fn the_percentile_is_near_the_maximum() {
        let measured = latency((1..=1000).rev().map(f64::from).collect());
        assert_eq!((measured.value, measured.facts["p99"]), (500.5e6, 991e6));
    }
}
