//! Results of a replay.

use crate::load::latency::Latency;
use crate::load::run::WorkerStats;
use crate::load::stats::Failure;
use core::time::Duration;

/// Counters of one worker for the whole run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayCounters {
    /// Connections that became due.
    pub connections_due: u64,
    /// Connections that were established.
    pub connections: u64,
    /// Connections that ended by a failure.
    pub connections_failed: u64,
    /// Connections whose answers have fewer or more bytes than the recorded ones.
    pub connections_mismatched: u64,
    /// Requests that became due with their connections and have an answer in the recording.
    pub due: u64,
    /// Requests whose answer began after their last byte was sent. Their latency was measured.
    pub answered: u64,
    /// Requests whose answer began before their last byte was sent.
    pub answered_early: u64,
    /// Requests that were sent, and whose answer did not begin.
    pub unanswered: u64,
    /// Requests that were not sent completely.
    pub not_sent: u64,
    /// Bytes sent.
    pub bytes_sent: u64,
    /// Bytes received.
    pub bytes: u64,
    /// Bytes of answers that the recording has and the server did not send.
    pub missing_bytes: u64,
    /// Bytes that the server sent beyond those of the recording.
    pub excess_bytes: u64,
    /// Failures of connections, indexed as [`Failure::ALL`].
    pub failures: [u64; Failure::ALL.len()],
}

impl ReplayCounters {
    fn add(&mut self, other: &Self) {
        let Self {
            connections_due,
            connections,
            connections_failed,
            connections_mismatched,
            due,
            answered,
            answered_early,
            unanswered,
            not_sent,
            bytes_sent,
            bytes,
            missing_bytes,
            excess_bytes,
            failures,
        } = other;
        self.connections_due += connections_due;
        self.connections += connections;
        self.connections_failed += connections_failed;
        self.connections_mismatched += connections_mismatched;
        self.due += due;
        self.answered += answered;
        self.answered_early += answered_early;
        self.unanswered += unanswered;
        self.not_sent += not_sent;
        self.bytes_sent += bytes_sent;
        self.bytes += bytes;
        self.missing_bytes += missing_bytes;
        self.excess_bytes += excess_bytes;
        self.failures.iter_mut().zip(failures).for_each(|(a, b)| *a += b);
    }
}

/// Results of one worker.
#[derive(Clone, Debug, Default)]
pub struct ReplayStats {
    /// Counters.
    pub counters: ReplayCounters,
    /// Time from the intended opening of a connection until it is established.
    pub connect: Latency,
    /// Time from the intended time of the last byte of a request until the first byte of its answer.
    pub first_byte: Latency,
    /// Time from the intended time of bytes until they were given to the network completely.
    pub send_error: Latency,
    /// Time from the start until the last bytes were sent.
    pub sending: Duration,
    /// True if the run was ended before its time.
    pub is_interrupted: bool,
    /// Share of the time that the worker was busy; with several workers, that of the busiest.
    pub busy: Option<f64>,
}

impl WorkerStats for ReplayStats {
    fn add(&mut self, other: &Self) {
        self.counters.add(&other.counters);
        self.sending = self.sending.max(other.sending);
        self.is_interrupted |= other.is_interrupted;
        self.busy = [self.busy, other.busy].into_iter().flatten().reduce(f64::max);
        for (mine, theirs) in [
            (&mut self.connect, &other.connect),
            (&mut self.first_byte, &other.first_byte),
            (&mut self.send_error, &other.send_error),
        ] {
            mine.add(theirs);
        }
    }

    fn set_busy(&mut self, busy: Option<f64>) {
        self.busy = busy;
    }
}
