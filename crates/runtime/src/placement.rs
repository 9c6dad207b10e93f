//! An application beside its shard instead of in it: what `shard.placement` asks for.
//!
//! The application has a shard of its own without devices, whose engine is the other's, through a channel. On threads each runs by itself;
//! in simulations, turn by turn, the application's shard takes the stack's along.

use crate::channel::ChannelServer;
use crate::channel::control::SameThread;
use crate::config::{Placement, ShardConfig};
use crate::error::Error;
use crate::shard::Shard;
use crate::shutdown::BarrierMember;
use crate::stats::{ShardStats, StatsReader};
use crate::stop::StopFlag;
use crate::wait::EventFd;
use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use ginnel_stack::time::Instant;
use std::sync::{Arc, MutexGuard, PoisonError};

/// What a shard has of the thread arrangement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The devices and the engine; the application, too, if that is `inline`.
    Stack,
    /// The application beside it.
    Application,
    /// One of the workers behind the application, by number.
    Worker(u16),
}

/// Where and how the thread of a shard runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Affinity {
    /// The key that chose the CPU.
    pub key: &'static str,
    /// The CPU.
    pub cpu: Option<u32>,
    /// How long it polls when there is nothing to do.
    pub spin: Duration,
    /// If the other thread is on the same CPU: neither polls, for it would take the other's time.
    pub quantum: Option<Quantum>,
}

/// How two threads share a CPU: see [`Pace`](crate::pace::Pace).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quantum {
    /// How long this one works at a time.
    pub length: Duration,
    /// It goes before the other.
    pub realtime: bool,
}

impl Affinity {
    pub fn new(config: &ShardConfig, role: Role) -> Self {
        let paired = config.placement == Placement::Paired && !matches!(role, Role::Worker(_));
        let (key, cpu) = match role {
            Role::Stack => ("shard.cpu", config.cpu),
            Role::Application if paired => ("shard.application_cpu", config.application_cpu.or(config.cpu)),
            Role::Application => ("shard.application_cpu", config.application_cpu),
            Role::Worker(number) => {
                ("shard.worker_cpus", config.worker_cpus.get(usize::from(number)).copied())
            }
        };
        // Workers are many, and made for work that waits for something else: there may be more of them than CPUs.
        let polls = !paired && !matches!(role, Role::Worker(_));
        let spin = if polls { Duration::from_micros(config.spin_us.into()) } else { Duration::ZERO };
        let work = Duration::from_micros(config.paired_work_us.into());
        let realtime = config.paired_realtime && role == Role::Stack;
        Self { key, cpu, spin, quantum: paired.then_some(Quantum { length: work, realtime }) }
    }
}

/// The shard behind an application's: the stack's, or one through which workers reach it.
pub(crate) struct CoShard {
    /// `None` if it is turned, or runs, by somebody else's care.
    stack: Option<SameThread>,
    stats_reader: StatsReader,
    /// It runs on a thread.
    is_running: bool,
    /// It ran on a thread and ended.
    has_ended: Arc<AtomicBool>,
    /// It is one of several shards that leave together.
    has_shutdown_barrier: bool,
}

impl CoShard {
    /// One that is taken along.
    pub fn new(stack: SameThread) -> Self {
        let stats_reader = lock_shard(&stack).stack_stats_reader();
        Self {
            stack: Some(stack),
            stats_reader,
            is_running: false,
            has_ended: Arc::default(),
            has_shutdown_barrier: false,
        }
    }

    /// One that runs by itself until it sets `ended`.
    pub fn running(stats_reader: StatsReader, has_ended: Arc<AtomicBool>) -> Self {
        Self { stack: None, stats_reader, is_running: true, has_ended, has_shutdown_barrier: false }
    }

    /// The counters of the shard with the devices: while it runs on a thread those that it published last.
    pub fn stats(&self) -> ShardStats {
        match &self.stack {
            Some(stack) if !self.is_running => lock_shard(stack).stack_stats(),
            _ => self.stats_reader.snapshot(),
        }
    }

    /// The same from other threads.
    pub fn stats_reader(&self) -> StatsReader {
        self.stats_reader.clone()
    }

    #[cfg(all(test, not(loom)))]
    pub fn check_invariants(&self) {
        if let Some(stack) = self.stack.as_ref().filter(|_| !self.is_running) {
            lock_shard(stack).check_invariants();
        }
    }

    /// One turn at the time `now`, if it does not run by itself. Returns how much it did.
    pub fn run_turn(&mut self, now: Instant) -> Result<usize, Error> {
        match &self.stack {
            Some(stack) if !self.is_running => Ok(lock_shard(stack).poll_once(now)?.work),
            _ => Ok(0),
        }
    }

    /// The same, and then one of each shard behind it.
    pub fn run_turns(&mut self, now: Instant) -> Result<usize, Error> {
        match &self.stack {
            Some(stack) if !self.is_running => lock_shard(stack).turn_all(now),
            _ => Ok(0),
        }
    }

    /// When it has to be turned again.
    pub fn next_deadline(&self) -> Option<Instant> {
        match &self.stack {
            Some(stack) if !self.is_running => lock_shard(stack).next_deadline(),
            _ => None,
        }
    }

    /// Whether it ran and ended, which it does before the application only because of an error.
    pub fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// What has to run on a thread of its own while the application does.
    pub fn runner(&self) -> Option<CoShardRunner> {
        let stack = self.stack.clone()?;
        Some(CoShardRunner { stack, has_ended: self.has_ended.clone() })
    }

    /// It leaves with others.
    pub fn set_shutdown_barrier(&mut self, leave: Option<BarrierMember>) {
        self.has_shutdown_barrier = leave.is_some();
        if let Some(stack) = &self.stack {
            lock_shard(stack).join_barrier(leave);
        }
    }

    /// Whether it leaves with others.
    pub fn has_shutdown_barrier(&self) -> bool {
        self.has_shutdown_barrier
    }

    /// Notes that it runs on a thread, or no more.
    pub fn set_running(&mut self, runs: bool) {
        self.is_running = runs;
        self.has_ended.store(false, Ordering::Release);
    }
}

/// A shard that can be run on another thread.
pub(crate) struct CoShardRunner {
    stack: SameThread,
    has_ended: Arc<AtomicBool>,
}

impl CoShardRunner {
    /// How to ask it while it runs on no thread.
    pub fn same_thread(&self) -> SameThread {
        self.stack.clone()
    }

    /// How to ask it while it runs.
    pub fn commander(&self) -> crate::Commander {
        lock_shard(&self.stack).commander()
    }

    /// Runs it until `stop`, and then wakes the application, which must not wait for it.
    pub fn run(self, stop: &StopFlag, wake: &EventFd) -> Result<(), Error> {
        let result = lock_shard(&self.stack).run(stop);
        self.has_ended.store(true, Ordering::Release);
        wake.signal();
        result
    }
}

/// A shard that runs on no thread.
fn lock_shard(stack: &SameThread) -> MutexGuard<'_, Shard<ChannelServer>> {
    // A handler that panicked has left the shard as it is.
    stack.0.lock().unwrap_or_else(PoisonError::into_inner)
}
