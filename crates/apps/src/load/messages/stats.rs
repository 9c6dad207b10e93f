//! Results of a run that sends messages.

use super::plan::Kind;
use crate::load::latency::Latency;
use crate::load::run::WorkerStats;
use crate::load::stats::Failure;
use core::time::Duration;
use serde::{Deserialize, Serialize};

/// Counts of messages, indexed by [`Kind`].
pub type KindCounts = [u64; Kind::ALL.len()];

/// Counters of one worker for the whole run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageCounters {
    /// Messages that became due.
    pub due: KindCounts,
    /// Messages that were given to the network completely.
    pub sent: KindCounts,
    /// Answers, by the kind of their messages.
    pub answered: KindCounts,
    /// Answers that report an error of the server; `answered` includes them.
    pub answered_error: u64,
    /// Answers on connections that waited for answers to urgent and to ordinary requests. They are counted
    /// for the older request, which may be the wrong one.
    pub answers_ambiguous: u64,
    /// Requests without an answer whose connection was lost.
    pub lost: KindCounts,
    /// Requests without an answer at the end of the run.
    pub unanswered: KindCounts,
    /// Messages that were not sent because their connection was not open.
    pub not_sent_closed: u64,
    /// Messages that were not sent because the network accepted nothing more on their connection.
    pub not_sent_full: u64,
    /// Bytes received.
    pub bytes: u64,
    /// Connections asked for.
    pub connections: u64,
    /// Connections that were open when the set-up ended.
    pub open_at_start: u64,
    /// Connections that were open when the last message had been sent.
    pub open_at_end: u64,
    /// Connections that ended before the end of the run.
    pub connections_lost: u64,
    /// Failures of connections, indexed as [`Failure::ALL`].
    pub failures: [u64; Failure::ALL.len()],
}

impl MessageCounters {
    fn add(&mut self, other: &Self) {
        let Self {
            due,
            sent,
            answered,
            answered_error,
            answers_ambiguous,
            lost,
            unanswered,
            not_sent_closed,
            not_sent_full,
            bytes,
            connections,
            open_at_start,
            open_at_end,
            connections_lost,
            failures,
        } = other;
        for (mine, theirs) in [
            (&mut self.due, due),
            (&mut self.sent, sent),
            (&mut self.answered, answered),
            (&mut self.lost, lost),
            (&mut self.unanswered, unanswered),
        ] {
            mine.iter_mut().zip(theirs).for_each(|(a, b)| *a += b);
        }
        self.failures.iter_mut().zip(failures).for_each(|(a, b)| *a += b);
        self.answered_error += answered_error;
        self.answers_ambiguous += answers_ambiguous;
        self.not_sent_closed += not_sent_closed;
        self.not_sent_full += not_sent_full;
        self.bytes += bytes;
        self.connections += connections;
        self.open_at_start += open_at_start;
        self.open_at_end += open_at_end;
        self.connections_lost += connections_lost;
    }
}

/// Results of one worker.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct MessageStats {
    /// Counters.
    pub counters: MessageCounters,
    /// Time from the planned start of a connection until it is established.
    pub connect: Latency,
    /// Time from the due time of an urgent request until its answer is complete.
    pub high: Latency,
    /// Time from the due time of an ordinary request until its answer is complete.
    pub low: Latency,
    /// Time from the due time of a message until it was given to the network: the error of the generator's
    /// send times.
    pub send_error: Latency,
    /// Time from the start until all connections were established, or the set-up was given up.
    pub setup: Duration,
    /// Time from the planned start of the first epoch until the last message was sent.
    pub sending: Duration,
    /// Time from the planned start of the first epoch until the last message was due. With random gaps it
    /// differs from the planned duration.
    pub due_for: Duration,
    /// True if the run was ended before its time.
    pub is_interrupted: bool,
    /// Share of the time that the worker was busy; with several workers, that of the busiest.
    pub busy: Option<f64>,
}

impl WorkerStats for MessageStats {
    fn add(&mut self, other: &Self) {
        self.counters.add(&other.counters);
        self.setup = self.setup.max(other.setup);
        self.sending = self.sending.max(other.sending);
        self.due_for = self.due_for.max(other.due_for);
        self.is_interrupted |= other.is_interrupted;
        self.busy = [self.busy, other.busy].into_iter().flatten().reduce(f64::max);
        for (mine, theirs) in [
            (&mut self.connect, &other.connect),
            (&mut self.high, &other.high),
            (&mut self.low, &other.low),
            (&mut self.send_error, &other.send_error),
        ] {
            mine.add(theirs);
        }
    }

    fn set_busy(&mut self, busy: Option<f64>) {
        self.busy = busy;
    }
}
