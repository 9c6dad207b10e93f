//! Short connections per second that one core of the generator makes against a responder that costs less than
//! the generator itself.

use crate::generator::GeneratorCase;
use crate::harness::machine::{Cpus, pin};
use crate::harness::pairs::{self, Arm, Bound, Measurement};
use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};
use crate::server::{Checksums, Server, Sink, cable, link_setup};
use crate::two_threads::PollTime;
use core::time::Duration;
use ginnel::clock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Concurrent connections.
const CONNECTIONS: u32 = 1_024;
/// Size of each ring in bytes.
const RING_BYTES: usize = 1 << 21;
/// Time of a measurement.
const SECONDS: f64 = 3.0;
/// Goal in connections per second.
const GOAL: f64 = 2e6;
/// Largest share of the time that the generator may idle.
const IDLE_MAX: f64 = 0.02;

/// Measures connections per second of the light TCP.
pub fn run(options: &Options) -> Result<Vec<BenchResult>, MeasureError> {
    let seconds = options.seconds(SECONDS);
    let ours: Arm<'_> = Box::new(move || measure(Duration::from_secs_f64(seconds)));
    let mut result = pairs::run("load-sink", "connections/s", options, Bound::Machine, ours, None)?;
    if result.ours < GOAL {
        result.problems.push(format!("the goal of {GOAL} connections/s is missed"));
    }
    Ok(vec![result])
}

fn measure(duration: Duration) -> Result<Measurement, MeasureError> {
    let cpus = Cpus::choose()?;
    let (server_end, client_end) = cable(Checksums::Device, RING_BYTES);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sink = scope.spawn(|| -> Result<_, MeasureError> {
            pin(cpus.server)?;
            let mut sink = Sink::new(server_end, link_setup(Checksums::Device));
            let mut load = PollTime::default();
            let mut now = clock::now();
            while !is_over.load(Ordering::Relaxed) {
                let frames = sink.turn(now);
                let end = clock::now();
                load.count(frames, end - now);
                now = end;
            }
            Ok((load, sink.facts()))
        });
        let generator = scope.spawn(|| -> Result<_, MeasureError> {
            let outcome = pin(cpus.client).map_err(MeasureError::from).and_then(|()| {
                let mut worker =
                    GeneratorCase::light(client_end, CONNECTIONS, duration).map_err(MeasureError::failed)?;
                let mut load = PollTime::default();
                let mut now = clock::now();
                loop {
                    let turn = worker.turn(now);
                    let end = clock::now();
                    load.count(turn.work, end - now);
                    now = end;
                    if turn.done {
                        return Ok((load, worker.stats()));
                    }
                }
            });
            is_over.store(true, Ordering::Relaxed);
            outcome
        });
        let (generator, stats) = generator.join().expect("the generator does not panic")?;
        let (sink, facts) = sink.join().expect("the responder does not panic")?;
        let counters = &stats.counters;
        let mut measured = Measurement::new(counters.completed as f64 / stats.measured.as_secs_f64())
            .with("generator_idle_time", generator.idle_time())
            .with("responder_idle_time", sink.idle_time());
        for (name, count) in facts {
            measured = measured.with(name, count as f64);
        }
        let failed = counters.failures.iter().sum::<u64>();
        if failed > 0 {
            measured.problems.push(format!("{failed} connections failed"));
        }
        if generator.idle_time() > IDLE_MAX {
            measured.problems.push(format!(
                "the generator was not the bottleneck: it idled {:.1} % of the time",
                100.0 * generator.idle_time()
            ));
        }
        Ok(measured)
    })
}
