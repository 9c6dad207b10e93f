//! `ginnel load replay`: sends what the clients of a capture sent, at the recorded times.
//!
//! ```text
//! capture ─► recording (connections, sends, requests)
//!                │
//! options ─► job ┴─► session ◄─► network
//!                        │
//!                        └─► stats ─► report ─► picture
//! ```
//!
//! A run is an open loop: nothing waits for an answer. The capture is read by `ginnel-monitor`, which orders
//! the segments.

pub mod options;
pub mod recording;
pub mod report;
pub mod session;
pub mod stats;

pub use options::ReplayOptions;
pub use report::ReplayReport;

use self::recording::Recording;
use self::session::ReplaySession;
use self::stats::ReplayStats;
use super::options::CommonOptions;
use super::plan::WorkerShare;
use super::run::LoadJob;
use super::session::Stage;
use super::stats::{LiveProgress, ProgressSnapshot};
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::Instant;
use std::sync::Arc;

/// The plan of a whole run: everything that the options decide.
#[derive(Clone, Debug)]
pub struct ReplayPlan {
    /// The recorded connections.
    pub recording: Recording,
    /// Factor by which the time of the recording passes faster, > 0.
    pub speed: f64,
    /// Times that the recording is replayed, one after the other.
    pub repeat: u32,
    /// Connections for each recorded connection.
    pub copies: u32,
    /// Time over which the starts of the copies are evenly distributed.
    pub spread: Duration,
    /// Longest wait for a connection, and for answers after the recorded end of a connection.
    pub timeout: Duration,
}

impl ReplayPlan {
    /// Converts a time of the recording, in nanoseconds, to one of the run.
    #[must_use]
    pub fn scaled(&self, nanos: u64) -> Duration {
        Duration::from_nanos((nanos as f64 / self.speed) as u64)
    }

    /// Returns the time between the starts of two passes over the recording.
    #[must_use]
    pub fn pass(&self) -> Duration {
        // A recording may have no length at all.
        self.scaled(self.recording.length_ns).max(Duration::from_micros(1))
    }

    /// Returns the time in which everything is due.
    #[must_use]
    pub fn length(&self) -> Duration {
        let shift = self.copy_shift(self.copies - 1);
        self.pass().saturating_mul(self.repeat - 1) + self.scaled(self.recording.length_ns) + shift
    }

    /// Returns how much later than the first copy a copy begins.
    #[must_use]
    pub fn copy_shift(&self, copy: u32) -> Duration {
        self.spread.mul_f64(f64::from(copy) / f64::from(self.copies))
    }

    /// Returns the number of connections of the run.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.recording.connections.len() as u64 * u64::from(self.repeat) * u64::from(self.copies)
    }
}

/// Settings that all workers of a run share, checked and ready to use.
#[derive(Clone, Debug)]
pub struct ReplayJob {
    /// Plan of the whole run.
    pub plan: Arc<ReplayPlan>,
    /// Name of the capture.
    pub capture: String,
    /// Addresses of the servers; those without a port have that of the recorded server.
    pub servers: Vec<options::ReplayTarget>,
    /// All addresses and ports to which connections may be opened.
    pub targets: Vec<SocketAddr>,
    /// Interval of progress lines.
    pub report_interval: Duration,
    /// Options that all kinds of load have.
    pub common: CommonOptions,
}

impl LoadJob for ReplayJob {
    type Session = ReplaySession;
    type Stats = ReplayStats;
    type Report = ReplayReport;

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
        self.common.seed
    }

    fn session(&self, share: WorkerShare, progress: Arc<LiveProgress>, now: Instant) -> ReplaySession {
        let (plan, servers) = (Arc::clone(&self.plan), self.servers.clone());
        ReplaySession::new(plan, share, servers, self.sources(share), progress, now)
    }

    fn report(&self, stats: &ReplayStats) -> ReplayReport {
        ReplayReport::new(self, stats)
    }

    fn progress_interval(&self) -> Duration {
        self.report_interval
    }

    fn progress_line(&self, elapsed: Duration, before: &ProgressSnapshot, now: &ProgressSnapshot) -> String {
        let stage = if now.stage < Stage::Drain as u64 { "sending" } else { "draining" };
        let per_second = |count: u64| count as f64 / self.report_interval.as_secs_f64();
        format!(
            "{:>6.1} s  {stage:<9}  {:>9} open  {:>11.1} requests/s  {:>11.1} answers/s  {:>8.1} MB/s  {} failed",
            elapsed.as_secs_f64(),
            now.open,
            per_second(now.sent - before.sent),
            per_second(now.completed - before.completed),
            per_second(now.bytes - before.bytes) / 1e6,
            now.failed
        )
    }
}

#[cfg(test)]
mod tests;
