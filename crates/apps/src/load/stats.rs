//! Results of a run.

use super::latency::Latency;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;

/// Reasons why a request or a connection failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// RST in response to SYN.
    Refused,
    /// No response to SYN in time.
    ConnectTimeout,
    /// No route to the server.
    Unreachable,
    /// No source port, descriptor or connection is left on this side.
    Exhausted,
    /// RST during a request.
    Reset,
    /// The server closed before its response was complete.
    ClosedEarly,
    /// The received data are no valid response.
    BadResponse,
    /// No complete response in time.
    Timeout,
}

impl Failure {
    /// All failures, in the order of [`LoadCounters::failures`].
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

    /// Returns the name for reports.
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

/// Counters of one worker for the measured time, unless stated otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadCounters {
    /// Connections established.
    pub connected: u64,
    /// Requests that were due (open loop) or begun (closed loop) and assigned to a connection.
    pub started: u64,
    /// Requests of `started` that were completed, even after the measured time.
    pub completed: u64,
    /// Responses completed within the measured time, whenever their requests were due: the throughput.
    pub completed_in_time: u64,
    /// Bytes received.
    pub bytes: u64,
    /// Requests of `completed` by the first digit of their status.
    pub by_class: [u64; 6],
    /// Failures, indexed as [`Failure::ALL`].
    pub failures: [u64; Failure::ALL.len()],
    /// Idle connections that the server closed or reset.
    pub lost_idle: u64,
    /// Requests without a response at the end of the run.
    pub unanswered: u64,
    /// Requests that were due but found no free connection until the end.
    pub not_started: u64,
    /// Most connections open at the same time, not only in the measured time.
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

/// Results of one worker.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Counters.
    pub counters: LoadCounters,
    /// Time from the (intended) start of a connection until it is established.
    pub connect: Latency,
    /// Time from the intended start of a request until the first byte of its response.
    pub first_byte: Latency,
    /// Time from the intended start of a request until its response is complete.
    pub total: Latency,
    /// Delay between the intended and the actual start of requests: the part of the latency that the
    /// generator or a lack of connections causes. Only in an open loop.
    pub lag: Latency,
    /// The measured time. If the number of requests ended the run, it ends with the last completion.
    pub measured: Duration,
    /// True if the run was given up because requests failed for too long and none was answered.
    pub gave_up: bool,
    /// When the last answer came, counted from the start of the measured time, if the server answered nothing
    /// at the end of the run.
    pub answered_until: Option<Duration>,
    /// Share of the time that the worker was busy; with several workers, that of the busiest.
    pub busy: Option<f64>,
}

impl Stats {
    /// Adds the results of another worker for the same time.
    pub fn add(&mut self, other: &Self) {
        // A worker without answers does not say whether the server has vanished. One that was answered until
        // the end says that it has not.
        self.answered_until = match (self.counters.completed, other.counters.completed) {
            (_, 0) => self.answered_until,
            (0, _) => other.answered_until,
            _ => self.answered_until.zip(other.answered_until).map(|(mine, theirs)| mine.max(theirs)),
        };
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

/// Live progress of one worker, which alone writes it.
#[derive(Debug, Default)]
pub struct LiveProgress {
    /// Connections established since the start.
    pub connected: AtomicU64,
    /// Messages sent since the start, if the run sends messages.
    pub sent: AtomicU64,
    /// Responses completed since the start.
    pub completed: AtomicU64,
    /// Bytes received since the start.
    pub bytes: AtomicU64,
    /// Failures since the start.
    pub failed: AtomicU64,
    /// Connections open now.
    pub open: AtomicU64,
    /// The current [`crate::load::session::Stage`] as a number.
    pub stage: AtomicU64,
}

/// A snapshot of [`LiveProgress`] of one or several workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProgressSnapshot {
    /// Connections established since the start.
    pub connected: u64,
    /// Messages sent since the start, if the run sends messages.
    pub sent: u64,
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
    /// Publishes `now`. The numbers need not be consistent with each other, so relaxed ordering suffices.
    pub fn publish(&self, now: &ProgressSnapshot) {
        self.connected.store(now.connected, Ordering::Relaxed);
        self.sent.store(now.sent, Ordering::Relaxed);
        self.completed.store(now.completed, Ordering::Relaxed);
        self.bytes.store(now.bytes, Ordering::Relaxed);
        self.failed.store(now.failed, Ordering::Relaxed);
        self.open.store(now.open, Ordering::Relaxed);
        self.stage.store(now.stage, Ordering::Relaxed);
    }

    /// Returns the sum over several workers.
    pub fn sum<'a>(workers: impl IntoIterator<Item = &'a Self>) -> ProgressSnapshot {
        let mut sum = ProgressSnapshot { stage: u64::MAX, ..ProgressSnapshot::default() };
        for worker in workers {
            sum.connected += worker.connected.load(Ordering::Relaxed);
            sum.sent += worker.sent.load(Ordering::Relaxed);
            sum.completed += worker.completed.load(Ordering::Relaxed);
            sum.bytes += worker.bytes.load(Ordering::Relaxed);
            sum.failed += worker.failed.load(Ordering::Relaxed);
            sum.open += worker.open.load(Ordering::Relaxed);
            sum.stage = sum.stage.min(worker.stage.load(Ordering::Relaxed));
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_vanishes_for_all_workers() {
        let second = Duration::from_secs;
        let worker = |completed, answered_until| Stats {
            counters: LoadCounters { completed, ..LoadCounters::default() },
            answered_until,
            ..Stats::default()
        };
        let sum = |workers: &[Stats]| {
            let mut total = Stats::default();
            workers.iter().for_each(|worker| total.add(worker));
            total.answered_until
        };
        let (lost, answered, idle) = (worker(5, Some(second(3))), worker(5, None), worker(0, None));
        let lost_later = worker(1, Some(second(4)));
        for workers in [[lost.clone(), answered.clone()], [answered.clone(), lost.clone()]] {
            assert_eq!(sum(&workers), None, "one was answered until the end");
        }
        assert_eq!(sum(&[answered, idle.clone(), lost.clone()]), None);
        assert_eq!(sum(&[idle.clone(), lost.clone(), lost_later, idle]), Some(second(4)));
        assert_eq!(sum(&[lost]), Some(second(3)));
    }
}
