//! What a run measured.

use super::latency::Latency;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;

/// Why a request or a connection failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// RST in answer to SYN.
    Refused,
    /// No answer to SYN in time.
    ConnectTimeout,
    /// No way to the server.
    Unreachable,
    /// No source port, descriptor or connection left on this side.
    Exhausted,
    /// RST in the middle of a request.
    Reset,
    /// The server closed before its response was complete.
    ClosedEarly,
    /// What came is no response.
    BadResponse,
    /// No complete response in time.
    Timeout,
}

impl Failure {
    /// All of them, in the order of [`Counters::failures`].
    pub const ALL: [Self; 8] = [
        Self::Refused,
        Self::ConnectTimeout,
        Self::Unreachable,
        Self::Exhausted,
        Self::Reset,
        Self::ClosedEarly,
        Self::BadResponse,
        Self::Timeout,
    ];

    /// A name for reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Refused => "connect refused",
            Self::ConnectTimeout => "connect timeout",
            Self::Unreachable => "unreachable",
            Self::Exhausted => "no port or descriptor left",
            Self::Reset => "reset",
            Self::ClosedEarly => "closed early",
            Self::BadResponse => "bad response",
            Self::Timeout => "timeout",
        }
    }
}

/// Counts of one worker over the measured time, except where said otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadCounters {
    /// Connections established.
    pub connected: u64,
    /// Requests due (open loop) or begun (closed loop) and handed to a connection.
    pub started: u64,
    /// Of those, completed, be it after the measured time.
    pub completed: u64,
    /// Responses completed within the measured time, whenever they were asked for: the throughput.
    pub completed_in_time: u64,
    /// Bytes received.
    pub bytes: u64,
    /// Those of `completed` by the first digit of their status.
    pub by_class: [u64; 6],
    /// Failures, by [`Failure::ALL`].
    pub failures: [u64; Failure::ALL.len()],
    /// Idle connections that the server closed or reset.
    pub lost_idle: u64,
    /// Requests without an answer when the run ended.
    pub unanswered: u64,
    /// Requests that were due and for which there was no connection until the end.
    pub not_started: u64,
    /// Most connections open at once, at any time.
    pub open_max: u64,
}

impl LoadCounters {
    fn add(&mut self, other: &Self) {
        let Self {
            connected,
            started,
            completed,
            completed_in_time,
            bytes,
            by_class,
            failures,
            lost_idle,
            unanswered,
            not_started,
            open_max,
        } = other;
        self.connected += connected;
        self.started += started;
        self.completed += completed;
        self.completed_in_time += completed_in_time;
        self.bytes += bytes;
        self.lost_idle += lost_idle;
        self.unanswered += unanswered;
        self.not_started += not_started;
        self.open_max += open_max; // of different workers, so a sum
        self.by_class.iter_mut().zip(by_class).for_each(|(a, b)| *a += b);
        self.failures.iter_mut().zip(failures).for_each(|(a, b)| *a += b);
    }
}

/// Everything one worker measured.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Counts.
    pub counters: LoadCounters,
    /// From the (intended) start of a connection until it is established.
    pub connect: Latency,
    /// From the intended start of a request until the first byte of its response.
    pub first_byte: Latency,
    /// From the intended start of a request until its response is complete.
    pub total: Latency,
    /// How much later than intended requests were begun: the part of the latencies that is due to the generator or to a lack of
    /// connections. Only in an open loop.
    pub lag: Latency,
    /// The measured time, until the last completion if it was the number of requests that ended the run.
    pub measured: Duration,
    /// It ended because requests failed for too long, and none was answered.
    pub gave_up: bool,
    /// Share of the time in which the worker had something to do; of several workers, the busiest one's.
    pub busy: Option<f64>,
}

impl Stats {
    /// Adds what another worker measured in the same time.
    pub fn add(&mut self, other: &Self) {
        self.counters.add(&other.counters);
        self.measured = self.measured.max(other.measured);
        self.gave_up |= other.gave_up;
        self.busy = [self.busy, other.busy].into_iter().flatten().reduce(f64::max);
        for (mine, theirs) in [
            (&mut self.connect, &other.connect),
            (&mut self.first_byte, &other.first_byte),
            (&mut self.total, &other.total),
            (&mut self.lag, &other.lag),
        ] {
            mine.add(theirs);
        }
    }
}

/// What a worker lets others see while it runs. One per worker, written by it alone.
#[derive(Debug, Default)]
pub struct LiveProgress {
    /// Connections established since the start.
    pub connected: AtomicU64,
    /// Responses completed since the start.
    pub completed: AtomicU64,
    /// Bytes received since the start.
    pub bytes: AtomicU64,
    /// Failures since the start.
    pub failed: AtomicU64,
    /// Connections open now.
    pub open: AtomicU64,
    /// What it is doing: a [`crate::load::session::Stage`] as a number.
    pub stage: AtomicU64,
}

/// A copy of [`Progress`], of one worker or several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProgressSnapshot {
    /// Connections established since the start.
    pub connected: u64,
    /// Responses completed since the start.
    pub completed: u64,
    /// Bytes received since the start.
    pub bytes: u64,
    /// Failures since the start.
    pub failed: u64,
    /// Connections open now.
    pub open: u64,
    /// The least advanced stage.
    pub stage: u64,
}

impl LiveProgress {
    /// Publishes `now`. The numbers need not fit each other exactly, so no ordering is needed.
    pub fn publish(&self, now: &ProgressSnapshot) {
        self.connected.store(now.connected, Ordering::Relaxed);
        self.completed.store(now.completed, Ordering::Relaxed);
        self.bytes.store(now.bytes, Ordering::Relaxed);
        self.failed.store(now.failed, Ordering::Relaxed);
        self.open.store(now.open, Ordering::Relaxed);
        self.stage.store(now.stage, Ordering::Relaxed);
    }

    /// The sum over several workers.
    pub fn sum<'a>(workers: impl IntoIterator<Item = &'a Self>) -> ProgressSnapshot {
        let mut sum = ProgressSnapshot { stage: u64::MAX, ..ProgressSnapshot::default() };
        for worker in workers {
            sum.connected += worker.connected.load(Ordering::Relaxed);
            sum.completed += worker.completed.load(Ordering::Relaxed);
            sum.bytes += worker.bytes.load(Ordering::Relaxed);
            sum.failed += worker.failed.load(Ordering::Relaxed);
            sum.open += worker.open.load(Ordering::Relaxed);
            sum.stage = sum.stage.min(worker.stage.load(Ordering::Relaxed));
        }
        sum
    }
}
