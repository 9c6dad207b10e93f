//! Keys of the `[shards]` table.

use super::{Placement, ShardConfig, within};
use ginnel_stack::error::ConfigError;
use ginnel_stack::steering::SHARDS_MAX;
use serde::Deserialize;

/// Keys of the `[shards]` table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ShardsConfig {
    /// Shards, each a thread with a queue of its own of every device: 1 to 64. What other tables limit, they limit for each shard. Default 1.
    pub count: u32,
    /// Pins the shards to the CPUs of these numbers, one for each. Default: not pinned.
    pub cpus: Vec<u32>,
    /// Pins the applications of the shards, in their order, to the CPUs of these numbers, if they have threads of their own on other CPUs
    /// (`shard.placement` `split`). Default: not pinned.
    pub application_cpus: Vec<u32>,
    /// Mailbox of one shard for frames that another received and that belong to it, in bytes: 262,144 to 1,073,741,824, rounded up to a power of
    /// two. When it is full, frames are dropped and counted, as by a full receive queue. There is one for each pair of shards. Default 512 KiB.
    pub mailbox_bytes: u32,
    /// The same for what all shards must know (neighbours, routers, path MTUs): 4,096 to 16,777,216. When it is full, such frames are not taken from
    /// the wire. Default 64 KiB.
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
    /// Checks the ranges, and what goes with the keys of each shard.
    pub(super) fn validate(&self, shard: &ShardConfig) -> Result<(), ConfigError> {
        within("shards.count", self.count, 1..=SHARDS_MAX.into())?;
        within("shards.mailbox_bytes", self.mailbox_bytes, 256 << 10..=1 << 30)?;
        within("shards.control_bytes", self.control_bytes, 4096..=16 << 20)?;
        self.validate_cpus("shards.cpus", &self.cpus)?;
        self.validate_cpus("shards.application_cpus", &self.application_cpus)?;
        if shard.cpu.is_some() && (self.count > 1 || !self.cpus.is_empty()) {
            return Err(ConfigError::new("shard.cpu", "is for a single shard: shards.cpus pins several"));
        }
        if shard.application_cpu.is_some() && (self.count > 1 || !self.application_cpus.is_empty()) {
            let problem = "is for a single shard: shards.application_cpus pins several";
            return Err(ConfigError::new("shard.application_cpu", problem));
        }
        if !self.application_cpus.is_empty() && shard.placement != Placement::Split {
            let problem = "is for applications on CPUs of their own: shard.placement \"split\"";
            return Err(ConfigError::new("shards.application_cpus", problem));
        }
        let workers = (self.count * shard.workers) as usize;
        if !shard.worker_cpus.is_empty() && shard.worker_cpus.len() != workers {
            let problem = format!("{} CPU(s) for {workers} worker(s)", shard.worker_cpus.len());
            return Err(ConfigError::new("shard.worker_cpus", problem));
        }
        Ok(())
    }

    /// CPUs that are given for each shard.
    fn validate_cpus(&self, key: &str, cpus: &[u32]) -> Result<(), ConfigError> {
        for (i, &cpu) in cpus.iter().enumerate() {
            within(format!("{key}[{i}]"), cpu, 0..=1023)?;
            if cpus[..i].contains(&cpu) {
                return Err(ConfigError::new(format!("{key}[{i}]"), format!("CPU {cpu} is there already")));
            }
        }
        if !cpus.is_empty() && cpus.len() != self.count as usize {
            let problem =
                format!("{} CPU(s) for {} shard(s): each needs one of its own", cpus.len(), self.count);
            return Err(ConfigError::new(key, problem));
        }
        Ok(())
    }
}
