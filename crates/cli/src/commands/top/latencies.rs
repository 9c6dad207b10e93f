//! Latencies: round trips of connections, as `ginnel ss -i` shows them, and times of responses, as `ginnel
//! monitor` measures them.

use crate::commands::monitor::protocol::ProtocolOptions;
use crate::commands::{monitor, ss};
use crate::failure::Failure;
use core::time::Duration;
use ginnel::run_dir::RunningStack;
use ginnel_monitor::distribution::QUANTILES;
use ginnel_monitor::engine::{Engine, EngineConfig};
use ginnel_monitor::report::Report;
use ginnel_monitor::session::Session;
use ginnel_monitor::sources::stack::RunningStackSource;
use ginnel_monitor::sources::{PacketSource, SourceState};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::thread::JoinHandle;

/// Most connections whose round trips are listed for each picture. A shard lists 64 sockets a turn.
const CONNECTIONS_MAX: u64 = 10_000;
/// Memory for the copies of frames, for each device and direction of each shard.
const RING_BYTES: usize = 4 << 20;
/// Batches of packets that are examined before keys and signals are looked at.
const BATCHES_MAX: usize = 64;

/// Quantiles of a time in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quantiles {
    pub count: u64,
    pub median: u64,
    pub p90: u64,
    pub p99: u64,
    pub max: u64,
}

impl Quantiles {
    fn of(mut nanos: Vec<u64>) -> Self {
        nanos.sort_unstable();
        let Some(last) = nanos.len().checked_sub(1) else { return Self::default() };
        // The smallest value for which this percentage of the values is not larger.
        let at = |percent: usize| nanos[((last + 1) * percent).div_ceil(100).saturating_sub(1)];
        Self { count: nanos.len() as u64, median: at(50), p90: at(90), p99: at(99), max: nanos[last] }
    }
}

/// Round trips of the established connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RoundTrips {
    /// Nothing was read yet.
    Unknown,
    /// There are too many connections to list: their number.
    TooMany(u64),
    /// The stack does not list them, for this reason.
    Failed(String),
    Known(Quantiles),
}

impl RoundTrips {
    /// Returns the quantiles, if they are known.
    pub fn quantiles(&self) -> Option<&Quantiles> {
        match self {
            Self::Known(quantiles) => Some(quantiles),
            _ => None,
        }
    }
}

/// Reads round trips on a thread of its own, so that a stack that does not answer keeps nothing waiting.
pub struct RoundTripReader {
    reading: Option<JoinHandle<RoundTrips>>,
    last: RoundTrips,
}

impl RoundTripReader {
    pub fn new() -> Self {
        Self { reading: None, last: RoundTrips::Unknown }
    }

    /// Returns what was read last, and starts to read again unless that is going on.
    pub fn update(&mut self, running: &RunningStack, connections: u64) -> &RoundTrips {
        if let Some(reading) = self.reading.take_if(|reading| reading.is_finished()) {
            self.last = reading.join().unwrap_or(RoundTrips::Unknown);
        }
        if connections > CONNECTIONS_MAX {
            self.last = RoundTrips::TooMany(connections);
        } else if self.reading.is_none() {
            let running = running.clone();
            let thread = std::thread::Builder::new().name("round-trips".into());
            self.reading = thread.spawn(move || read_round_trips(&running)).ok();
        }
        &self.last
    }
}

fn read_round_trips(running: &RunningStack) -> RoundTrips {
    let mut nanos = Vec::new();
    let listed = ss::for_each_socket(running, |socket| {
        if socket.netid == "tcp" && socket.state == "ESTAB" {
            nanos.extend(socket.number("rtt_us").filter(|us| *us > 0).map(|us| us.saturating_mul(1000)));
        }
    });
    match listed {
        Ok(()) => RoundTrips::Known(Quantiles::of(nanos)),
        Err(failure) => RoundTrips::Failed(failure.to_string()),
    }
}

/// Times of the responses of an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Responses {
    pub quantiles: Quantiles,
    /// Frames that the stack could not copy for the observer.
    pub lost: u64,
}

impl Responses {
    fn of(report: &Report) -> Self {
        let total = &report.latency.total;
        let at = |wanted: f64| {
            let known = QUANTILES.iter().zip(total.quantiles_ns);
            known.filter(|(quantile, _)| **quantile == wanted).map(|(_, nanos)| nanos).next().unwrap_or(0)
        };
        let quantiles =
            Quantiles { count: total.count, median: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0) };
        Self { quantiles, lost: report.source_lost }
    }
}

/// Observes the responses of a stack's servers, with the tap of `ginnel monitor`.
pub struct ResponseObserver {
    source: RunningStackSource,
    session: Session,
    last: Responses,
}

impl ResponseObserver {
    /// Starts to observe.
    ///
    /// # Errors
    /// The options are wrong, or something else observes the stack.
    pub fn attach(
        running: &RunningStack,
        protocol: &ProtocolOptions,
        every: Duration,
    ) -> Result<Self, Failure> {
        let failed = |e: String| Failure::running(format!("stack \"{}\": {e}", running.name));
        let config = EngineConfig {
            seed: RandomState::new().build_hasher().finish(),
            ..EngineConfig::new(protocol.rules()?)
        };
        let engine = Engine::new(&config).map_err(Failure::usage)?;
        let source = RunningStackSource::attach(&running.path, RING_BYTES, monitor::FRAME_BYTES_MAX as usize);
        let source = source.map_err(|e| failed(e.to_string()))?;
        if !source.has_rings() {
            return Err(failed(
                "the stack has no devices (yet), and what it sends to itself is not observed".into(),
            ));
        }
        Ok(Self { source, session: Session::new(engine, Some(every)), last: Responses::default() })
    }

    /// Examines the packets that have arrived. Returns false if the stack's frames cannot be observed any
    /// more.
    pub fn poll(&mut self) -> bool {
        let Self { source, session, last } = self;
        for _ in 0..BATCHES_MAX {
            let lost = source.lost();
            let polled = source.poll(&mut |link, packets| {
                session.process(link, packets, lost, &mut |interval| *last = Responses::of(interval.report));
            });
            match polled {
                Ok(SourceState::More) => {}
                Ok(SourceState::Idle) => {
                    if let Some(now) = source.now() {
                        session.advance(now, lost, &mut |interval| *last = Responses::of(interval.report));
                    }
                    return true;
                }
                Ok(SourceState::End) | Err(_) => return false,
            }
        }
        true
    }

    /// Returns the times of the last complete interval.
    pub fn last(&self) -> &Responses {
        &self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_occurred() {
        assert_eq!(Quantiles::of(vec![]), Quantiles::default());
        assert_eq!(Quantiles::of(vec![7]), Quantiles { count: 1, median: 7, p90: 7, p99: 7, max: 7 });
        let hundred = Quantiles::of((1..=100).rev().collect());
        assert_eq!(hundred, Quantiles { count: 100, median: 50, p90: 90, p99: 99, max: 100 });
    }
}
