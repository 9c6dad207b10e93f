//! Interface between the three stacks of the generator and a run. A run sends requests in a loop ([`Job`]),
//! messages by a calendar ([`crate::load::messages`]), or what the clients of a capture sent
//! ([`crate::load::replay`]).

use super::options::{CommonOptions, Job};
use super::plan::WorkerShare;
use super::report::Report;
use super::session::{Network, Session};
use super::sources::Sources;
use super::stats::{Failure, LiveProgress, ProgressSnapshot, Stats};
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::{Instant, clock};
use std::sync::Arc;

/// Time before a due request for which the kernel's worker polls, because a sleep would end too late.
const KERNEL_SPIN: Duration = Duration::from_micros(60);

/// Settings of a run that all workers share.
pub trait LoadJob: Clone + Send + Sync + 'static {
    /// Decides what one worker sends.
    type Session: LoadSession<Stats = Self::Stats> + Send;
    /// Results of one worker, or of several together.
    type Stats: WorkerStats;
    /// The report on the results.
    type Report: Send;

    /// Returns the options that do not depend on the protocol.
    fn common(&self) -> &CommonOptions;

    /// Returns the options that do not depend on the protocol, for changing them.
    fn common_mut(&mut self) -> &mut CommonOptions;

    /// Returns the addresses to connect to.
    fn targets(&self) -> &[SocketAddr];

    /// Returns the seed of all random choices.
    fn seed(&self) -> u64;

    /// Creates the session of a worker, which begins at `now`.
    fn session(&self, share: WorkerShare, progress: Arc<LiveProgress>, now: Instant) -> Self::Session;

    /// Creates the report on the results of all workers.
    fn report(&self, stats: &Self::Stats) -> Self::Report;

    /// Formats the progress from `before` to `now`, `elapsed` after the start.
    fn progress_line(&self, elapsed: Duration, before: &ProgressSnapshot, now: &ProgressSnapshot) -> String;

    /// Returns the time between two progress lines.
    fn progress_interval(&self) -> Duration {
        Duration::from_secs(1)
    }

    /// Returns true if the kernel must send small segments at once (`TCP_NODELAY`).
    fn needs_nodelay(&self) -> bool {
        true
    }

    /// Returns the time before a due event for which the kernel's worker polls.
    fn kernel_spin(&self) -> Duration {
        KERNEL_SPIN
    }

    /// Returns the share of worker `worker` of `workers` in this process.
    fn share(&self, worker: u32, workers: u32) -> WorkerShare {
        WorkerShare { worker, workers }
    }

    /// Returns the source addresses of a worker.
    fn sources(&self, share: WorkerShare) -> Sources {
        Sources::new(&self.common().source, share.worker.into(), share.workers.into())
    }
}

/// Results of workers.
pub trait WorkerStats: Clone + Default + Send {
    /// Adds the results of another worker for the same time.
    fn add(&mut self, other: &Self);

    /// Sets the share of the time that the worker was busy, if it was measured.
    fn set_busy(&mut self, busy: Option<f64>);
}

/// Decides which connections to open and what to send on them. The network calls it; connections are
/// identified by slots as in [`Network`].
pub trait LoadSession {
    /// Results.
    type Stats: WorkerStats;

    /// Handles an established connection.
    fn connected(&mut self, slot: u32, now: Instant, net: &mut impl Network);

    /// Continues sending when send buffer has become free.
    fn writable(&mut self, slot: u32, now: Instant, net: &mut impl Network);

    /// Handles received bytes. All of them are consumed.
    fn data(&mut self, slot: u32, bytes: &[u8], now: Instant, net: &mut impl Network);

    /// Handles the server's FIN, after all data before it were delivered.
    fn peer_closed(&mut self, slot: u32, now: Instant, net: &mut impl Network);

    /// Handles the end of a connection, which the network has closed because of `failure`.
    fn ended(&mut self, slot: u32, failure: Failure, now: Instant, net: &mut impl Network);

    /// Performs the actions that are due. Returns the latest time of the next call, or `None` once the run is
    /// over.
    fn poll(&mut self, now: Instant, net: &mut impl Network) -> Option<Instant>;

    /// Returns when the next request or message is due whose delay would be measured.
    fn next_arrival(&self) -> Option<Instant>;

    /// Ends the run soon. What was measured so far counts.
    fn interrupt(&mut self, now: Instant);

    /// Returns true while the load of the run is sent.
    fn is_measuring(&self) -> bool;

    /// Returns the results. They are complete after [`LoadSession::poll`] has returned `None`.
    fn stats(&self) -> &Self::Stats;

    /// Returns for how long the worker must compute because of the answers since the last call.
    fn take_think_time(&mut self) -> Duration {
        Duration::ZERO
    }
}

/// Computes for `time`, as a client that processes an answer does.
#[inline]
pub(super) fn think(time: Duration) {
    if !time.is_zero() {
        let until = clock::now() + time;
        while clock::now() < until {
            core::hint::spin_loop();
        }
    }
}

impl LoadJob for Job {
    type Session = Session;
    type Stats = Stats;
    type Report = Report;

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

    fn session(&self, share: WorkerShare, progress: Arc<LiveProgress>, now: Instant) -> Session {
        let WorkerShare { worker, workers } = share;
        let (plan, requests) = (self.plan.share(worker, workers), Arc::clone(&self.requests));
        Session::new(plan, requests, self.targets.clone(), self.sources(share), progress, now)
    }

    fn report(&self, stats: &Stats) -> Report {
        Report::new(self, stats)
    }

    fn needs_nodelay(&self) -> bool {
        !self.plan.is_short()
    }

    fn progress_line(&self, elapsed: Duration, before: &ProgressSnapshot, now: &ProgressSnapshot) -> String {
        const STAGES: [&str; 5] = ["set-up", "warm-up", "measuring", "draining", "done"];
        let stage = STAGES.get(now.stage as usize).unwrap_or(&"");
        format!(
            "{:>4} s  {stage:<9}  {:>9} requests/s  {:>9} connections/s  {:>8.1} MB/s  {:>8} open  {} failed",
            elapsed.as_secs(),
            now.completed - before.completed,
            now.connected - before.connected,
            (now.bytes - before.bytes) as f64 / 1e6,
            now.open,
            now.failed
        )
    }
}

impl WorkerStats for Stats {
    fn add(&mut self, other: &Self) {
        Self::add(self, other);
    }

    fn set_busy(&mut self, busy: Option<f64>) {
        self.busy = busy;
    }
}

impl LoadSession for Session {
    type Stats = Stats;

    #[inline]
    fn connected(&mut self, slot: u32, now: Instant, net: &mut impl Network) {
        Self::connected(self, slot, now, net);
    }

    #[inline]
    fn writable(&mut self, slot: u32, _: Instant, net: &mut impl Network) {
        Self::writable(self, slot, net);
    }

    #[inline]
    fn data(&mut self, slot: u32, bytes: &[u8], now: Instant, net: &mut impl Network) {
        Self::data(self, slot, bytes, now, net);
    }

    #[inline]
    fn peer_closed(&mut self, slot: u32, now: Instant, net: &mut impl Network) {
        Self::peer_closed(self, slot, now, net);
    }

    #[inline]
    fn ended(&mut self, slot: u32, failure: Failure, now: Instant, net: &mut impl Network) {
        Self::ended(self, slot, failure, now, net);
    }

    #[inline]
    fn poll(&mut self, now: Instant, net: &mut impl Network) -> Option<Instant> {
        Self::poll(self, now, net)
    }

    #[inline]
    fn next_arrival(&self) -> Option<Instant> {
        Self::next_arrival(self)
    }

    fn interrupt(&mut self, now: Instant) {
        Self::interrupt(self, now);
    }

    #[inline]
    fn is_measuring(&self) -> bool {
        Self::is_measuring(self)
    }

    fn stats(&self) -> &Stats {
        Self::stats(self)
    }
}
