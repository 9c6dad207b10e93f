//! The plan of a run that sends messages: everything that the options decide, and nothing about the network.

use crate::load::plan::WorkerShare;
use core::time::Duration;

/// Service that the server offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// `ginnel iot`: answers requests with one of two fixed texts, and heartbeats not at all.
    Iot,
    /// An echo service: sends every message back.
    Echo,
}

/// Kinds of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A message without an answer.
    Heartbeat,
    /// An ordinary request.
    Low,
    /// An urgent request.
    High,
}

impl Kind {
    /// All kinds, in the order of counters.
    pub const ALL: [Self; 3] = [Self::Heartbeat, Self::Low, Self::High];
}

/// Unit that has one priority.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum PriorityGrain {
    /// Each message has a priority of its own.
    #[default]
    #[value(alias = "0", alias = "packet")]
    Message,
    /// All messages of a connection have one priority.
    #[value(alias = "1")]
    Flow,
}

/// Distances between bursts of messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Gaps {
    /// All distances are equal.
    #[default]
    Fixed,
    /// Distances are uniformly distributed between zero and twice the mean.
    Uniform,
    /// Distances are exponentially distributed: bursts are a Poisson process.
    Poisson,
}

/// When messages are due.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum SendMode {
    /// Bursts of messages are due at equal distances, or at those of --gaps.
    #[default]
    Normal,
    /// As normal, but all messages are due in periods of --burst-on, with silence for --burst-off after each.
    Burst,
    /// Every message has a time of its own, whatever --burst says, and the generator polls instead of
    /// sleeping until that time.
    Precision,
}

/// Periods in which messages are due, and the silence after each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnOff {
    /// Length of a period with messages, > 0.
    pub on: Duration,
    /// Length of the silence.
    pub off: Duration,
}

/// The plan of a whole run.
#[derive(Clone, Debug, PartialEq)]
pub struct MessagePlan {
    /// The service.
    pub service: Service,
    /// Number of connections, ≥ 1.
    pub connections: u32,
    /// Number of messages that are due at the same time, each on another connection, ≥ 1.
    pub burst: u32,
    /// Time in which every connection sends one message, > 0.
    pub epoch: Duration,
    /// Number of messages of the run.
    pub messages: u64,
    /// Share of urgent requests among all messages.
    pub high_share: f64,
    /// Share of ordinary requests among all messages. All others are heartbeats.
    pub low_share: f64,
    /// Unit that has one priority.
    pub grain: PriorityGrain,
    /// Distances between bursts.
    pub gaps: Gaps,
    /// Periods with messages, or `None` if messages are due at all times.
    pub on_off: Option<OnOff>,
    /// Shortest and longest message in bytes.
    pub length_bytes: (u16, u16),
    /// Time over which the connections are opened.
    pub setup: Duration,
    /// Time between the set-up and the first message.
    pub wait: Duration,
    /// Longest wait for a connection, for the end of the set-up, and for the last answers.
    pub timeout: Duration,
    /// Time for which a worker computes after each answer.
    pub think_time: Duration,
    /// Seed of all random choices.
    pub seed: u64,
}

/// Returns how many of `total` things this worker gets if they are distributed in turn.
pub fn part(total: u64, share: WorkerShare) -> u64 {
    let (worker, workers) = (u64::from(share.worker), u64::from(share.workers));
    total / workers + u64::from(worker < total % workers)
}

impl MessagePlan {
    /// Returns the number of bursts in an epoch.
    pub fn bursts(&self) -> u64 {
        u64::from(self.connections).div_ceil(u64::from(self.burst.clamp(1, self.connections)))
    }

    /// Returns the number of connections of a worker. Connections are distributed in turn.
    pub fn connections_of(&self, share: WorkerShare) -> u32 {
        // Cannot truncate: the part of a `u32`.
        part(self.connections.into(), share) as u32
    }

    /// Returns the number of messages of a worker: those of its connections.
    pub fn messages_of(&self, share: WorkerShare) -> u64 {
        let connections = u64::from(self.connections);
        let (epochs, rest) = (self.messages / connections, self.messages % connections);
        epochs * u64::from(self.connections_of(share)) + part(rest, share)
    }

    /// Returns the number of messages of all workers before this one.
    pub fn messages_before(&self, share: WorkerShare) -> u64 {
        (0..share.worker).map(|worker| self.messages_of(WorkerShare { worker, ..share })).sum()
    }

    /// Returns the number of connections of all workers before this one.
    pub fn connections_before(&self, share: WorkerShare) -> u64 {
        (0..share.worker).map(|worker| u64::from(self.connections_of(WorkerShare { worker, ..share }))).sum()
    }
}
