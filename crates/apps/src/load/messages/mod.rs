//! `ginnel load iot` and `ginnel load echo`: an open loop of messages on many connections, as MCC, the load
//! generator of QStack, sends them (docs/load.md).
//!
//! ```text
//! options ─► plan ─► calendar (when each connection sends)   kinds (which messages are urgent)
//!                        │                                      │
//!                        └──────────────► session ◄─────────────┘
//!                                          │   ▲
//!                          network ◄───────┘   └─ wire (contents of messages and answers)
//!                                          │   ▲
//!                                          │   └─ outstanding (requests without an answer)
//!                                          └─► stats ─► report ─► picture
//! ```
//!
//! The session runs on the three stacks of [`crate::load`]. It has 8 bytes for each connection, because no
//! connection has a timer: they send in turn.

pub mod calendar;
pub mod kinds;
pub mod options;
pub mod outstanding;
pub(super) mod picture;
pub mod plan;
pub mod report;
pub mod session;
pub mod stats;
pub mod wire;

pub use options::{EchoLoadOptions, IotLoadOptions, MessageLoadOptions, MessageOptions};
pub use report::MessageReport;

use self::plan::{MessagePlan, SendMode};
use self::session::MessageSession;
use self::stats::MessageStats;
use super::agents::Agent;
use super::options::CommonOptions;
use super::plan::WorkerShare;
use super::run::{LoadJob, WorkerStats};
use super::sources::Sources;
use super::stats::{LiveProgress, ProgressSnapshot};
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::Instant;
use std::sync::Arc;

/// Time before a due message during which a worker polls with `--mode precision`. No wait is that long, so
/// the worker always polls.
pub const PRECISE_SPIN: Duration = Duration::from_secs(1);

/// Settings that all workers of a run share, checked and ready to use.
#[derive(Clone, Debug)]
pub struct MessageJob {
    /// Plan of the whole run.
    pub plan: Arc<MessagePlan>,
    /// Time in which the messages of the plan are due.
    pub duration: Duration,
    /// When messages are due.
    pub mode: SendMode,
    /// Addresses to connect to.
    pub targets: Vec<SocketAddr>,
    /// Name of the server in the report.
    pub server: String,
    /// Time between two progress lines.
    pub report_interval: Duration,
    /// Options that all kinds of load have.
    pub common: CommonOptions,
    /// Number of agents that send the plan together.
    pub agents: u32,
    /// Number of this agent, from 0 on.
    pub agent: u32,
    /// Start of the run, or `None` if it starts at once.
    pub start: Option<Instant>,
}

impl MessageJob {
    /// Makes the job the share of an agent.
    pub fn set_agent(&mut self, agent: &Agent) {
        (self.agent, self.start) = (agent.index(), Some(agent.start()));
    }

    /// Describes what all agents must do alike.
    pub fn description(&self) -> String {
        format!("{:?} for {:?} with {} workers", self.plan, self.duration, self.common.workers())
    }

    /// Adds the results of other agents to those of this one, and makes the report on all.
    pub fn report_on_agents(
        &self,
        own: &MessageStats,
        others: &[MessageStats],
        dead: &[String],
    ) -> MessageReport {
        let mut total = own.clone();
        others.iter().for_each(|stats| total.add(stats));
        let mut report = self.report(&total);
        report.missed.splice(0..0, dead.iter().cloned());
        report
    }
}

impl LoadJob for MessageJob {
    type Session = MessageSession;
    type Stats = MessageStats;
    type Report = MessageReport;

    fn common(&self) -> &CommonOptions {
        &self.common
    }

    fn common_mut(&mut self) -> &mut CommonOptions {
        &mut self.common
    }

    fn targets(&self) -> &[SocketAddr] {
        &self.targets
    }

    fn seed(&self) -> u64 {
        self.plan.seed
    }

    fn session(&self, share: WorkerShare, progress: Arc<LiveProgress>, now: Instant) -> MessageSession {
        let (plan, targets) = (Arc::clone(&self.plan), self.targets.clone());
        // What is due before now is late.
        let start = self.start.unwrap_or(now);
        MessageSession::new(plan, share, targets, self.sources(share), progress, start)
    }

    fn share(&self, worker: u32, workers: u32) -> WorkerShare {
        WorkerShare { worker: self.agent * workers + worker, workers: self.agents * workers }
    }

    fn sources(&self, share: WorkerShare) -> Sources {
        // Every agent has addresses of its own, which its workers share.
        let workers = u64::from(share.workers / self.agents);
        Sources::new(&self.common.source, u64::from(share.worker) % workers, workers)
    }

    fn report(&self, stats: &MessageStats) -> MessageReport {
        MessageReport::new(self, stats)
    }

    fn kernel_spin(&self) -> Duration {
        if self.mode == SendMode::Precision { PRECISE_SPIN } else { Duration::from_micros(60) }
    }

    fn progress_interval(&self) -> Duration {
        self.report_interval
    }

    fn progress_line(&self, elapsed: Duration, before: &ProgressSnapshot, now: &ProgressSnapshot) -> String {
        const STAGES: [&str; 5] = ["set-up", "waiting", "sending", "draining", "closing"];
        let stage = STAGES.get(now.stage as usize).unwrap_or(&"");
        let per_second = |count: u64| count as f64 / self.report_interval.as_secs_f64();
        format!(
            "{:>6.1} s  {stage:<9}  {:>9} open  {:>11.1} messages/s  {:>11.1} answers/s  {} failed",
            elapsed.as_secs_f64(),
            now.open,
            per_second(now.sent - before.sent),
            per_second(now.completed - before.completed),
            now.failed
        )
    }
}

#[cfg(test)]
mod tests;
