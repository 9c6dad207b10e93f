//! When each connection sends: a calendar of all connections instead of a timer for each.
//!
//! Connections send in a fixed order, one message each in every epoch. So the calendar needs only the number
//! of the next message, from which connection and time follow. The plan fixes the times and not the server: a
//! server that stalls makes messages late, and their latency counts from their due time.
//!
//! With several workers, worker `w` of `n` has connections w, w + n, w + 2n … of all. The times of bursts do
//! not depend on the number of workers: every worker sends its part of each burst.

use super::plan::{Gaps, MessagePlan, OnOff};
use crate::load::plan::WorkerShare;
use core::time::Duration;
use ginnel::{Instant, Random};

/// A message that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DueMessage {
    /// When the message is due.
    pub at: Instant,
    /// Number of the connection among those of the worker.
    pub connection: u32,
    /// Number of the connection's message, from 0 on. It wraps.
    pub counter: u32,
}

/// Bursts at random distances.
#[derive(Clone, Debug)]
struct RandomBursts {
    gaps: Gaps,
    random: Random,
    /// Mean distance in nanoseconds.
    mean_nanos: f64,
    /// Number of bursts whose time was drawn, and the time of the last one in nanoseconds.
    drawn: u64,
    nanos: f64,
}

impl RandomBursts {
    /// Returns the time of burst `burst` in nanoseconds. `burst` must not decrease from call to call.
    fn nanos_of(&mut self, burst: u64) -> u64 {
        while self.drawn <= burst {
            let gap = match self.gaps {
                Gaps::Fixed => 1.0,
                Gaps::Uniform => 2.0 * self.random.unit(),
                Gaps::Poisson => self.random.exponential(),
            };
            self.nanos += gap * self.mean_nanos;
            self.drawn += 1;
        }
        self.nanos as u64
    }
}

/// The messages of one worker in the order of their times.
#[derive(Clone, Debug)]
pub struct Calendar {
    start: Instant,
    epoch_nanos: u64,
    on_off: Option<OnOff>,
    random: Option<RandomBursts>,
    /// Connections of all workers, and of this one.
    connections: u64,
    own: u64,
    share: WorkerShare,
    /// Bursts in an epoch.
    bursts: u64,
    epoch: u64,
    next: DueMessage,
    /// Number of the next message's burst since the start.
    burst: u64,
    left: u64,
}

impl Calendar {
    /// Creates the calendar of a worker whose first burst is due at `start`, or after the first random gap.
    pub fn new(plan: &MessagePlan, share: WorkerShare, start: Instant) -> Self {
        let bursts = plan.bursts();
        let random = (plan.gaps != Gaps::Fixed).then(|| RandomBursts {
            gaps: plan.gaps,
            // One seed for all workers, which agree on the times of bursts.
            random: Random::new(plan.seed),
            mean_nanos: plan.epoch.as_nanos() as f64 / bursts as f64,
            drawn: 0,
            nanos: 0.0,
        });
        let mut calendar = Self {
            start,
            epoch_nanos: plan.epoch.as_nanos() as u64,
            on_off: plan.on_off,
            random,
            connections: plan.connections.into(),
            own: plan.connections_of(share).into(),
            share,
            bursts,
            epoch: 0,
            next: DueMessage { at: start, connection: 0, counter: 0 },
            burst: u64::MAX,
            left: plan.messages_of(share),
        };
        calendar.find_time();
        calendar
    }

    /// Returns the next message, or `None` after the last one.
    #[inline]
    pub fn next(&self) -> Option<DueMessage> {
        (self.left > 0).then_some(self.next)
    }

    /// Returns the number of messages that are left.
    pub const fn left(&self) -> u64 {
        self.left
    }

    /// Advances to the message after the next one.
    #[inline]
    pub fn advance(&mut self) {
        self.left = self.left.saturating_sub(1);
        self.next.connection += 1;
        if u64::from(self.next.connection) >= self.own {
            self.epoch += 1;
            (self.next.connection, self.next.counter) = (0, self.epoch as u32);
        }
        self.find_time();
    }

    #[inline]
    fn find_time(&mut self) {
        let of_all =
            u64::from(self.next.connection) * u64::from(self.share.workers) + u64::from(self.share.worker);
        let burst = self.epoch * self.bursts + of_all * self.bursts / self.connections;
        if burst != self.burst {
            self.burst = burst;
            self.next.at = self.time_of(burst);
        }
    }

    /// Returns the time of a burst.
    fn time_of(&mut self, burst: u64) -> Instant {
        let nanos = match &mut self.random {
            Some(random) => random.nanos_of(burst),
            // Computed from the number instead of by addition, so that rounding errors do not accumulate.
            None => (u128::from(burst) * u128::from(self.epoch_nanos) / u128::from(self.bursts)) as u64,
        };
        let nanos = self.on_off.map_or(nanos, |on_off| compress(nanos, on_off));
        self.start + Duration::from_nanos(nanos)
    }
}

/// Moves a time into the part of its period in which messages are sent.
fn compress(nanos: u64, on_off: OnOff) -> u64 {
    let (on, off) = (on_off.on.as_nanos() as u64, on_off.off.as_nanos() as u64);
    let period = on.saturating_add(off);
    let (periods, within) = (nanos / period, nanos % period);
    periods * period + (u128::from(within) * u128::from(on) / u128::from(period)) as u64
}

#[cfg(test)]
mod tests {
    use super::super::tests::plan;
    use super::*;

    const MS: u64 = 1_000_000;

    fn all(plan: &MessagePlan, share: WorkerShare) -> Vec<DueMessage> {
        let mut calendar = Calendar::new(plan, share, Instant::ZERO);
        let mut messages = Vec::new();
        while let Some(next) = calendar.next() {
            messages.push(next);
            calendar.advance();
        }
        messages
    }

    fn times(plan: &MessagePlan) -> Vec<u64> {
        all(plan, WorkerShare::WHOLE).iter().map(|m| m.at.as_nanos()).collect()
    }

    #[test]
    fn every_connection_sends_once_an_epoch() {
        let plan = MessagePlan { connections: 10, messages: 35, epoch: Duration::from_secs(1), ..plan() };
        let messages = all(&plan, WorkerShare::WHOLE);
        for (n, message) in (0u32..).zip(&messages) {
            assert_eq!((message.connection, message.counter), (n % 10, n / 10));
            assert_eq!(message.at.as_nanos(), u64::from(n) * 100 * MS);
        }
        assert_eq!(messages.len(), 35);
    }

    #[test]
    fn bursts_are_due_together_and_evenly_spread() {
        // QStack's ratio: 60 bursts in an epoch of 60 s.
        let plan = MessagePlan {
            connections: 600,
            burst: 10,
            messages: 1_200,
            epoch: Duration::from_secs(60),
            ..plan()
        };
        let times = times(&plan);
        for (n, at) in (0u64..).zip(times) {
            assert_eq!(at, n / 10 * 1_000 * MS);
        }
    }

    #[test]
    fn workers_share_connections_messages_and_bursts() {
        for (connections, burst, messages, workers) in
            [(10, 3, 47, 3), (7, 7, 21, 2), (5, 1, 17, 4), (3, 100, 9, 3), (1, 1, 5, 2)]
        {
            let plan = MessagePlan { connections, burst, messages, ..plan() };
            let whole = all(&plan, WorkerShare::WHOLE);
            let mut shared: Vec<(Instant, u32, u32)> = Vec::new();
            for worker in 0..workers {
                let share = WorkerShare { worker, workers };
                let own = all(&plan, share);
                assert_eq!(own.len() as u64, plan.messages_of(share));
                assert!(own.is_sorted_by_key(|m| m.at));
                shared.extend(own.iter().map(|m| (m.at, m.counter, m.connection * workers + worker)));
            }
            shared.sort_unstable_by_key(|(at, counter, connection)| (*counter, *connection, *at));
            let expected: Vec<_> = whole.iter().map(|m| (m.at, m.counter, m.connection)).collect();
            assert_eq!(shared, expected);
        }
    }

    #[test]
    fn times_do_not_drift() {
        let plan = MessagePlan {
            connections: 7,
            messages: 7_000_001,
            epoch: Duration::from_nanos(1_000_000_007),
            ..plan()
        };
        let last = *times(&plan).last().unwrap();
        assert_eq!(last, 1_000_000 * 1_000_000_007);
    }

    #[test]
    fn random_gaps_have_the_planned_mean_and_spread() {
        for (gaps, deviation) in [(Gaps::Uniform, 1.0 / 3f64.sqrt()), (Gaps::Poisson, 1.0)] {
            let plan = MessagePlan { connections: 100, messages: 100_000, gaps, ..plan() };
            let times = times(&plan);
            let gaps: Vec<f64> = times.windows(2).map(|w| (w[1] - w[0]) as f64).collect();
            let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
            let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
            assert!((mean / 1e7 - 1.0).abs() < 0.02, "{gaps:?}: {mean}");
            assert!((variance.sqrt() / mean - deviation).abs() < 0.02, "{}", variance.sqrt() / mean);
        }
    }

    #[test]
    fn workers_agree_on_random_bursts() {
        let plan = MessagePlan { connections: 20, burst: 4, messages: 200, gaps: Gaps::Poisson, ..plan() };
        let times = |worker, workers| -> Vec<Instant> {
            let mut times: Vec<_> =
                all(&plan, WorkerShare { worker, workers }).iter().map(|m| m.at).collect();
            times.dedup();
            times
        };
        assert_eq!(times(0, 2), times(1, 2));
        assert_eq!(times(0, 2), times(0, 1));
    }

    #[test]
    fn bursts_fall_silent_and_keep_their_rate() {
        let on_off = OnOff { on: Duration::from_millis(100), off: Duration::from_millis(900) };
        let plan = MessagePlan { connections: 1_000, messages: 3_000, on_off: Some(on_off), ..plan() };
        let times = times(&plan);
        assert!(times.iter().all(|at| at % (1_000 * MS) < 100 * MS));
        for second in 0..3 {
            let of_second = times.iter().filter(|at| **at / (1_000 * MS) == second).count();
            assert_eq!(of_second, 1_000);
        }
        assert_eq!(times[1] - times[0], MS / 10);
    }
}
