//! The plan of a run.

use core::time::Duration;

/// An open loop: requests are due at times that do not depend on the server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Requests per second, > 0.
    pub per_second: f64,
    /// True if the distances are random (a Poisson process) instead of equal.
    pub poisson: bool,
}

/// Side that closes a connection after its last request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Closer {
    /// The server, if the last request asks it to. The server keeps the TIME_WAIT state.
    #[default]
    Server,
    /// The client, as soon as the response is complete.
    Client,
    /// The client, with RST: no TIME_WAIT state on either side.
    Reset,
}

/// Identifies a worker, and so its share of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerShare {
    /// Index of the worker.
    pub worker: u32,
    /// Number of workers.
    pub workers: u32,
}

impl WorkerShare {
    /// The share of the only worker.
    pub const WHOLE: Self = Self { worker: 0, workers: 1 };
}

/// The plan of one worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// Number of connections, ≥ 1: all of them are kept busy in a closed loop; in an open loop at most this
    /// many are open.
    pub connections: u32,
    /// Requests on a connection before it is closed: 1 for short connections, `u32::MAX` for no limit.
    pub requests_per_connection: u32,
    /// Most requests in flight on a connection, ≥ 1.
    pub pipeline: u16,
    /// Rate of an open loop; `None` for a closed loop.
    pub rate: Option<Rate>,
    /// Time over which the connections are opened.
    pub setup: Duration,
    /// Time after the set-up before the measurement begins.
    pub warmup: Duration,
    /// Measured time. If there is none, `requests` ends the run.
    pub duration: Option<Duration>,
    /// Measured requests after which the run ends.
    pub requests: Option<u64>,
    /// Longest wait for a connection, a response or the server's FIN.
    pub timeout: Duration,
    /// The run is given up when requests have failed for this time and none was answered in between.
    pub give_up: Option<Duration>,
    /// Side that closes connections.
    pub closer: Closer,
    /// Seed of all random choices.
    pub seed: u64,
}

impl Plan {
    /// Returns true if every request has a connection of its own.
    pub const fn is_short(&self) -> bool {
        self.requests_per_connection == 1
    }

    /// Returns the share of worker `worker` of `workers`.
    pub fn share(&self, worker: u32, workers: u32) -> Self {
        let part = |total: u64| {
            total / u64::from(workers) + u64::from(u64::from(worker) < total % u64::from(workers))
        };
        Self {
            connections: (part(self.connections.into()) as u32).max(1),
            rate: self.rate.map(|r| Rate { per_second: r.per_second / f64::from(workers), ..r }),
            requests: self.requests.map(part),
            seed: self.seed.wrapping_add(u64::from(worker).wrapping_mul(0x9E37_79B9_7F4A_7C15)),
            ..*self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up() {
        let plan = Plan {
            connections: 11,
            requests_per_connection: 1,
            pipeline: 1,
            rate: Some(Rate { per_second: 30.0, poisson: false }),
            setup: Duration::ZERO,
            warmup: Duration::ZERO,
            duration: None,
            requests: Some(100),
            timeout: Duration::from_secs(1),
            give_up: Some(Duration::from_secs(1)),
            closer: Closer::Server,
            seed: 1,
        };
        let shares: Vec<Plan> = (0..3).map(|w| plan.share(w, 3)).collect();
        assert_eq!(shares.iter().map(|p| p.connections).collect::<Vec<_>>(), [4, 4, 3]);
        assert_eq!(shares.iter().map(|p| p.requests.unwrap()).sum::<u64>(), 100);
        assert!(shares.iter().all(|p| p.rate.unwrap().per_second == 10.0));
        assert_ne!(shares[0].seed, shares[1].seed);
        assert_eq!(shares[0].timeout, plan.timeout);
    }
}
