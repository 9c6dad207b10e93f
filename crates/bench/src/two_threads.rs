//! Measures a server and a client on two pinned threads, joined by a pair of memory devices.

use crate::client::{Client, ClientConfig, ClientCounts};
use crate::harness::machine::{Cpus, pin};
use crate::harness::pairs::Measurement;
use crate::server::Server;
use core::time::Duration;
use ginnel::clock;
use ginnel_stack::device::Device;
use ginnel_stack::time::Instant;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};

/// Largest share of time that the server may spend on polls without frames; above it the server was not the
/// bottleneck. The number of empty polls says little: with few connections there are many between two bursts,
/// but each takes only a fiftieth of the time of a burst.
const IDLE_TIME_MAX: f64 = 0.02;
/// Largest number of stuck and reset connections per completed connection (with keep-alive: request) in a
/// valid run.
const FAILED_SHARE_MAX: f64 = 1e-4;

/// Phase in which a run begins.
pub const WARM_UP: u8 = 0;
const MEASURE: u8 = 1;
const STOP: u8 = 2;

/// CPUs and times of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct RunPlan {
    /// CPUs of the threads.
    pub cpus: Cpus,
    /// Time before the measurement, after all connections are open if the client opens many.
    pub warm_up: Duration,
    /// Length of the measurement.
    pub measure: Duration,
    /// True if the client yields its CPU when it has nothing to do.
    pub yields_when_idle: bool,
}

impl RunPlan {
    /// Creates a plan for a measurement of `seconds`.
    pub fn new(cpus: Cpus, seconds: f64) -> Self {
        let measure = Duration::from_secs_f64(seconds);
        Self {
            cpus,
            warm_up: (measure / 5).min(Duration::from_millis(500)),
            measure,
            yields_when_idle: false,
        }
    }
}

/// Time that a polling loop spent busy and idle.
#[derive(Clone, Copy, Debug, Default)]
pub struct PollTime {
    turns: u64,
    idle_turns: u64,
    busy: Duration,
    idle: Duration,
}

impl PollTime {
    /// Counts a turn, which took `took` and handled `frames` frames.
    pub fn count(&mut self, frames: usize, took: Duration) {
        self.turns += 1;
        if frames == 0 {
            self.idle_turns += 1;
            self.idle += took;
        } else {
            self.busy += took;
        }
    }

    /// Adds the counts of another loop.
    pub fn add(&mut self, other: &Self) {
        self.turns += other.turns;
        self.idle_turns += other.idle_turns;
        self.busy += other.busy;
        self.idle += other.idle;
    }

    /// Returns the time spent in polls without frames.
    pub fn idle_for(&self) -> Duration {
        self.idle
    }

    /// Returns the share of polls without frames.
    pub fn idle_polls(&self) -> f64 {
        self.idle_turns as f64 / self.turns.max(1) as f64
    }

    /// Returns the share of time spent in polls without frames.
    pub fn idle_time(&self) -> f64 {
        self.idle.as_secs_f64() / (self.busy + self.idle).as_secs_f64().max(1e-9)
    }
}

/// Result of a measurement.
#[derive(Clone, Debug)]
pub struct RunResult {
    /// Actual length of the measurement.
    pub seconds: f64,
    /// Counters of the client for that time; `open` is the value at the end.
    pub counts: ClientCounts,
    /// Busy and idle time of the server.
    pub server: PollTime,
    /// Busy and idle time of the client.
    pub client: PollTime,
    /// Counters of the server since its start.
    pub server_facts: Vec<(&'static str, u64)>,
    /// Reasons why the result is not valid.
    pub problems: Vec<String>,
}

/// Ends the other thread of a run when this one ends, also with an error or a panic.
pub struct StopAtEnd<'a>(pub &'a AtomicU8);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(STOP, Ordering::Relaxed);
    }
}

/// Runs server and client. `make` creates the server on its own thread, so that its memory is allocated near
/// its CPU.
///
/// # Errors
/// A thread cannot be pinned to its CPU.
pub fn run<S: Server>(
    plan: &RunPlan,
    client: &ClientConfig,
    cable: (Device, Device),
    make: impl FnOnce(Device, Instant) -> S + Send,
) -> io::Result<RunResult> {
    let phase = AtomicU8::new(WARM_UP);
    let (server_end, client_end) = cable;
    std::thread::scope(|scope| {
        let server = scope.spawn(|| -> io::Result<_> {
            let _stop_at_end = StopAtEnd(&phase);
            pin(plan.cpus.server)?;
            let mut server = make(server_end, clock::now());
            let load = serve(&mut server, &phase);
            Ok((load, server.facts()))
        });
        let client = scope.spawn(|| -> io::Result<_> {
            let _stop_at_end = StopAtEnd(&phase);
            pin(plan.cpus.client)?;
            Ok(drive_client(plan, client, client_end, &phase))
        });
        let (seconds, counts, client) = client.join().expect("the client does not panic")?;
        let (server, server_facts) = server.join().expect("the server does not panic")?;
        Ok(RunResult { seconds, counts, server, client, server_facts, problems: Vec::new() })
    })
}

fn serve<S: Server>(server: &mut S, phase: &AtomicU8) -> PollTime {
    let mut load = PollTime::default();
    let mut phase_seen = WARM_UP;
    let mut now = clock::now();
    loop {
        match phase.load(Ordering::Relaxed) {
            STOP => return load,
            p if p != phase_seen => {
                phase_seen = p;
                load = PollTime::default();
            }
            _ => {}
        }
        let frames = server.turn(now);
        let end = clock::now();
        load.count(frames, end - now);
        now = end;
    }
}

/// Runs the client until the measurement is over, or the server has failed. Returns the length of the
/// measurement in seconds, and the counters and the poll time of the client for it.
pub fn drive_client(
    plan: &RunPlan,
    config: &ClientConfig,
    device: Device,
    phase: &AtomicU8,
) -> (f64, ClientCounts, PollTime) {
    let mut client = Client::new(device, config);
    let mut load = PollTime::default();
    let mut before = ClientCounts::default();
    let mut now = clock::now();
    let mut started = now;
    let mut phase_seen = WARM_UP;
    loop {
        let frames = client.turn(now);
        if frames == 0 && plan.yields_when_idle {
            std::thread::yield_now();
        }
        let end = clock::now();
        load.count(frames, end - now);
        now = end;
        if phase.load(Ordering::Relaxed) == STOP {
            return ((now - started).as_secs_f64(), client.counts().since(&before), load);
        }
        if phase_seen == WARM_UP {
            if !client.is_ready() {
                started = now;
            } else if now - started >= plan.warm_up {
                phase_seen = MEASURE;
                // Fails if the server has failed.
                let _ = phase.compare_exchange(WARM_UP, MEASURE, Ordering::Relaxed, Ordering::Relaxed);
                (before, load, started) = (client.counts(), PollTime::default(), now);
            }
        } else if now - started >= plan.measure {
            return ((now - started).as_secs_f64(), client.counts().since(&before), load);
        }
    }
}

impl RunResult {
    /// Returns connections or requests per second, with additional facts.
    pub fn rate(&self) -> Measurement {
        let c = &self.counts;
        let done = (c.done as f64).max(1.0);
        let mut measured = Measurement::new(c.done as f64 / self.seconds)
            .with("server_idle_polls", self.server.idle_polls())
            .with("server_idle_time", self.server.idle_time())
            .with("client_busy_time", 1.0 - self.client.idle_time())
            .with("packets_to_server", c.sent as f64 / done)
            .with("packets_to_client", c.received as f64 / done)
            .with("seconds", self.seconds);
        for (name, count) in [("resets", c.resets), ("stuck", c.stuck), ("stray", c.stray), ("full", c.full)]
        {
            if count > 0 {
                measured = measured.with(name, count as f64);
            }
        }
        for (name, count) in &self.server_facts {
            measured = measured.with(name, *count as f64);
        }
        measured.problems.extend(self.problems.iter().cloned());
        let idle = self.server.idle_time();
        if idle >= IDLE_TIME_MAX {
            measured.problems.push(format!(
                "the server was not the bottleneck: it spent {:.1} % of its time on polls that found nothing ({:.1} % of them)",
                100.0 * idle,
                100.0 * self.server.idle_polls()
            ));
        }
        let trouble = (c.resets + c.stuck) as f64 / done;
        if trouble > FAILED_SHARE_MAX {
            measured.problems.push(format!("{} connections were reset, {} got stuck", c.resets, c.stuck));
        }
        measured
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::Mode;
    use crate::harness::MeasureError;
    use crate::server::{Checksums, cable, link_setup};
    use std::sync::mpsc;

    struct NoServer;

    impl Server for NoServer {
        fn turn(&mut self, _: Instant) -> usize {
            0
        }
    }

    /// Runs a client beside a server that fails. Returns the result; `None` if the run panicked.
    fn run_beside_failing_server(
        cpus: Cpus,
        make: fn(Device, Instant) -> NoServer,
    ) -> Option<io::Result<RunResult>> {
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            let plan = RunPlan::new(cpus, 60.0);
            let client = ClientConfig {
                wire: link_setup(Checksums::Device),
                mode: Mode::KeepAlive,
                connections: 1,
                requests: vec![b"?".to_vec()],
                window_scale: None,
            };
            let result = run(&plan, &client, cable(Checksums::Device, 1 << 16), make);
            sender.send(result).unwrap();
        });
        match receiver.recv_timeout(Duration::from_secs(20)) {
            Ok(result) => Some(result),
            Err(mpsc::RecvTimeoutError::Disconnected) => None,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("the client does not end"),
        }
    }

    #[test]
    fn client_ends_when_the_server_fails() {
        let cpus = match Cpus::choose() {
            Err(MeasureError::Skipped(reason)) => {
                return ginnel_testkit::skip("client_ends_when_the_server_fails", &reason);
            }
            cpus => cpus.unwrap(),
        };
        let no_cpu = Cpus { server: 1023, ..cpus };
        assert!(run_beside_failing_server(no_cpu, |_, _| NoServer).is_some_and(|result| result.is_err()));
        assert!(run_beside_failing_server(cpus, |_, _| panic!("a server that cannot be made")).is_none());
    }
}
