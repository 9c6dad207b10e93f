//! What a run is to do.

use core::time::Duration;

/// Requests at times of their own, whatever the server does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Requests per second, > 0.
    pub per_second: f64,
    /// At random distances (a Poisson process) instead of equal ones.
    pub poisson: bool,
}

/// Who ends a connection that has served its purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Closer {
    /// The server, if the last request asked it to; it keeps the TIME_WAIT.
    #[default]
    Server,
    /// The client, as soon as the response is complete.
    Client,
    /// The client, with RST: no TIME_WAIT on either side.
    Reset,
}

/// The plan of one worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// Connections to keep busy (closed loop) or open at most (open loop), ≥ 1.
    pub connections: u32,
    /// Requests on one connection before it is closed; `u32::MAX` for no limit, 1 for short connections.
    pub requests_per_connection: u32,
    /// Requests in flight on one connection at most, ≥ 1.
    pub pipeline: u16,
    /// An open loop at this rate; a closed loop if there is none.
    pub rate: Option<Rate>,
    /// Over which time the connections are opened.
    pub setup: Duration,
    /// Time after that before measuring begins.
    pub warmup: Duration,
    /// Measured time. If none is given, `requests` ends the run.
    pub duration: Option<Duration>,
    /// Measured requests after which the run ends.
    pub requests: Option<u64>,
    /// Longest wait for a connection, a response or the server's close.
    pub timeout: Duration,
    /// The run ends when requests have failed for so long and none was answered in between.
    pub give_up: Option<Duration>,
    /// Who closes.
    pub closer: Closer,
    /// Seed of all random choices.
    pub seed: u64,
}

impl Plan {
    /// One connection per request.
    pub const fn is_short(&self) -> bool {
        self.requests_per_connection == 1
    }

    /// The part of worker `worker` of `workers`.
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
