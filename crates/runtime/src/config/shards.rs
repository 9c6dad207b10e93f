//! The `[shards]` table.

use super::{Placement, ShardConfig, within};
use ginnel_stack::error::ConfigError;
use ginnel_stack::steering::SHARDS_MAX;
use serde::Deserialize;

/// Keys of the `[shards]` table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ShardsConfig {
    /// Number of shards, each a thread with its own queue of every device, unless a device has `shards`: 1 to
    /// 64. The limits of other tables apply to each shard. Default 1.
    pub count: u32,
    /// Pins the shards to these CPUs, one for each. Default: not pinned.
    pub cpus: Vec<u32>,
    /// Pins the applications of the shards, in their order, to these CPUs if they have threads of their own
    /// on other CPUs (`shard.placement` is `split`). Default: not pinned.
    pub application_cpus: Vec<u32>,
    /// Size of the queue for frames that one shard forwards to another, in bytes: 262,144 to 1,073,741,824,
    /// rounded up to a power of two. If it is full, frames are dropped and counted, as by a full receive
    /// queue. Each ordered pair of shards has one, and so has each shard for each device that it does not
    /// serve. Default 512 KiB.
    pub mailbox_bytes: u32,
    /// Size of the queue for broadcasts of one shard to another (neighbours, routers, path MTUs), in bytes:
    /// 4,096 to 16,777,216. If it is full, frames that would have to be broadcast are dropped. Default 64
    /// KiB.
    pub control_bytes: u32,
}

impl Default for ShardsConfig {
    fn default() -> Self {
        Self {
            count: 1,
            cpus: Vec::new(),
            application_cpus: Vec::new(),
            mailbox_bytes: 512 << 10,
            control_bytes: 64 << 10,
        }
    }
}

impl ShardsConfig {
    /// Validates the ranges, and the combinations with keys of `[shard]`.
    pub(super) fn validate(&self, shard: &ShardConfig) -> Result<(), ConfigError> {
        within("shards.count", self.count, 1..=SHARDS_MAX.into())?;
        within("shards.mailbox_bytes", self.mailbox_bytes, 256 << 10..=1 << 30)?;
        within("shards.control_bytes", self.control_bytes, 4096..=16 << 20)?;
        self.validate_cpus("shards.cpus", &self.cpus)?;
        self.validate_cpus("shards.application_cpus", &self.application_cpus)?;
        if shard.cpu.is_some() && (self.count > 1 || !self.cpus.is_empty()) {
            return Err(ConfigError::new(
                "shard.cpu",
                "applies only to a single shard; shards.cpus pins several",
            ));
        }
        if shard.application_cpu.is_some() && (self.count > 1 || !self.application_cpus.is_empty()) {
            let problem = "applies only to a single shard; shards.application_cpus pins several";
            return Err(ConfigError::new("shard.application_cpu", problem));
        }
        if !self.application_cpus.is_empty() && shard.placement != Placement::Split {
            let problem = "applies only to applications on CPUs of their own: shard.placement \"split\"";
            return Err(ConfigError::new("shards.application_cpus", problem));
        }
        let workers = (self.count * shard.workers) as usize;
        if !shard.worker_cpus.is_empty() && shard.worker_cpus.len() != workers {
            let problem = format!("{} CPU(s) for {workers} worker(s)", shard.worker_cpus.len());
            return Err(ConfigError::new("shard.worker_cpus", problem));
        }
        Ok(())
    }

    /// Validates a list of CPUs, one for each shard.
    fn validate_cpus(&self, key: &str, cpus: &[u32]) -> Result<(), ConfigError> {
        for (i, &cpu) in cpus.iter().enumerate() {
            within(format!("{key}[{i}]"), cpu, 0..=1023)?;
            if cpus[..i].contains(&cpu) {
                return Err(ConfigError::new(format!("{key}[{i}]"), format!("CPU {cpu} is listed twice")));
            }
        }
        if !cpus.is_empty() && cpus.len() != self.count as usize {
            let problem = format!(
                "{} CPU(s) for {} shard(s): each shard needs a CPU of its own",
                cpus.len(),
                self.count
            );
            return Err(ConfigError::new(key, problem));
        }
        Ok(())
    }
}
