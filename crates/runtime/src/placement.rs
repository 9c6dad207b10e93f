//! Applications on threads of their own: what `shard.placement` configures.
//!
//! The application then has a shard without devices, whose engine is in the stack's shard and is reached
//! through a channel. On threads, each shard runs by itself; in simulations, the application's shard also
//! runs the turns of the stack's shard.

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

/// The role of a shard in the thread arrangement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Has the devices and the engine, and also the application if the placement is `inline`.
    Stack,
    /// Has the application, without the stack.
    Application,
    /// Has the application of one worker, by number, without the stack.
    Worker(u16),
}

/// On which CPU, and how, a shard's thread runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Affinity {
    /// The configuration key that chose the CPU.
    pub key: &'static str,
    /// The CPU.
    pub cpu: Option<u32>,
    /// How long the shard polls when it finds nothing to do.
    pub spin: Duration,
    /// Set if the application's and the stack's thread share a CPU: neither polls then, as that would take
    /// the other's time.
    pub quantum: Option<Quantum>,
}

/// How a thread shares its CPU: see [`CpuShare`](crate::cpu_share::CpuShare).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quantum {
    /// How long the thread works at a time.
    pub length: Duration,
    /// True if the thread has real-time priority.
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
        // There may be more workers than CPUs, as workers are made for work that waits.
        let polls = !paired && !matches!(role, Role::Worker(_));
        let spin = if polls { Duration::from_micros(config.spin_us.into()) } else { Duration::ZERO };
        let work = Duration::from_micros(config.paired_work_us.into());
        let realtime = config.paired_realtime && role == Role::Stack;
        Self { key, cpu, spin, quantum: paired.then_some(Quantum { length: work, realtime }) }
    }
}

/// The shard through which an application's shard reaches the engine: the stack's, or the hub of workers.
pub(crate) struct CoShard {
    /// `None` if another part of the program runs it.
    stack: Option<SameThread>,
    stats_reader: StatsReader,
    /// It runs on a thread.
    is_running: bool,
    /// It ran on a thread and ended.
    has_ended: Arc<AtomicBool>,
    /// It is one of several shards that shut down together.
    has_shutdown_barrier: bool,
}

impl CoShard {
    /// Creates a co-shard whose turns run with those of its application.
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

    /// Creates a co-shard that runs by itself until it sets `has_ended`.
    pub fn running(stats_reader: StatsReader, has_ended: Arc<AtomicBool>) -> Self {
        Self { stack: None, stats_reader, is_running: true, has_ended, has_shutdown_barrier: false }
    }

    /// Returns the counters of the shard with the devices; while that runs on a thread, those that it
    /// published last.
    pub fn stats(&self) -> ShardStats {
        match &self.stack {
            Some(stack) if !self.is_running => lock_shard(stack).stack_stats(),
            _ => self.stats_reader.snapshot(),
        }
    }

    /// Returns a reader of those counters for other threads.
    pub fn stats_reader(&self) -> StatsReader {
        self.stats_reader.clone()
    }

    #[cfg(all(test, not(loom)))]
    pub fn check_invariants(&self) {
        if let Some(stack) = self.stack.as_ref().filter(|_| !self.is_running) {
            lock_shard(stack).check_invariants();
        }
    }

    /// Runs one turn at the time `now`, unless it runs by itself. Returns how much it did.
    pub fn run_turn(&mut self, now: Instant) -> Result<usize, Error> {
        match &self.stack {
            Some(stack) if !self.is_running => Ok(lock_shard(stack).poll_once(now)?.work),
            _ => Ok(0),
        }
    }

    /// Runs one turn of it, and then one of each shard through which it reaches the engine.
    pub fn run_turns(&mut self, now: Instant) -> Result<usize, Error> {
        match &self.stack {
            Some(stack) if !self.is_running => lock_shard(stack).turn_all(now),
            _ => Ok(0),
        }
    }

    /// Returns when it has to run again.
    pub fn next_deadline(&self) -> Option<Instant> {
        match &self.stack {
            Some(stack) if !self.is_running => lock_shard(stack).next_deadline(),
            _ => None,
        }
    }

    /// Returns whether it ran and ended, which it does before the application only because of an error.
    pub fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Returns what has to run on a thread of its own while the application runs.
    pub fn runner(&self) -> Option<CoShardRunner> {
        let stack = self.stack.clone()?;
        Some(CoShardRunner { stack, has_ended: self.has_ended.clone() })
    }

    /// Makes it shut down together with other shards.
    pub fn set_shutdown_barrier(&mut self, barrier: Option<BarrierMember>) {
        self.has_shutdown_barrier = barrier.is_some();
        if let Some(stack) = &self.stack {
            lock_shard(stack).join_barrier(barrier);
        }
    }

    /// Returns whether it shuts down together with other shards.
    pub fn has_shutdown_barrier(&self) -> bool {
        self.has_shutdown_barrier
    }

    /// Records whether it runs on a thread.
    pub fn set_running(&mut self, runs: bool) {
        self.is_running = runs;
        self.has_ended.store(false, Ordering::Release);
    }
}

/// Runs a co-shard on another thread.
pub(crate) struct CoShardRunner {
    stack: SameThread,
    has_ended: Arc<AtomicBool>,
}

impl CoShardRunner {
    /// Returns the path for requests while it runs on no thread.
    pub fn same_thread(&self) -> SameThread {
        self.stack.clone()
    }

    /// Returns the path for requests while it runs on a thread.
    pub fn commander(&self) -> crate::Commander {
        lock_shard(&self.stack).commander()
    }

    /// Runs it until `stop` is set, and then wakes the application, which must not wait for it.
    pub fn run(self, stop: &StopFlag, wake: &EventFd) -> Result<(), Error> {
        let result = lock_shard(&self.stack).run(stop);
        self.has_ended.store(true, Ordering::Release);
        wake.signal();
        result
    }
}

/// Locks a shard that runs on no thread.
fn lock_shard(stack: &SameThread) -> MutexGuard<'_, Shard<ChannelServer>> {
    // A handler that panicked has left the shard in its last state.
    stack.0.lock().unwrap_or_else(PoisonError::into_inner)
}
