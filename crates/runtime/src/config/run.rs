//! The `[run]` table.

use super::within;
use crate::run_dir::is_valid_name;
use ginnel_stack::error::ConfigError;
use serde::Deserialize;

/// Keys of the `[run]` table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// Name of the stack in `ginnel stat` and `ginnel ss`: 1 to 48 letters, digits, `.`, `_` and `-`.
    /// Default: the command and the process id, as in `httpd-4711`.
    pub name: Option<String>,
    /// Publish the stack to other processes of the user, in `/run/ginnel` for root, otherwise in
    /// `$XDG_RUNTIME_DIR/ginnel` or `/tmp/ginnel-UID`; `$GINNEL_RUN_DIR` overrides the directory. Default
    /// true.
    pub directory: bool,
    /// Interval at which a busy shard publishes its counters to other processes, in milliseconds: 10 to
    /// 60,000. A shard publishes before it sleeps, too. Default 100.
    pub publish_ms: u32,
    /// Programs on the stack need `CAP_NET_BIND_SERVICE` to bind ports below this one, as with the kernel's
    /// `net.ipv4.ip_unprivileged_port_start`: 0 to 65,535. Default: 1,024, or 0 for a stack that `ginnel run`
    /// creates for its program.
    pub unprivileged_port_start: Option<u16>,
    /// From which shard a worker process of `ginnel run` accepts connections first, if `--listen-spawn` does
    /// not say it: `off`, from all alike; `bound`, from the shard of the CPU to which the worker is pinned;
    /// `auto`, also without pinning, from the shards in turn. Default `auto`.
    pub listen_spawn: ListenSpawnMode,
    /// Size of a file of the stack's log, which `ginnel log` shows, in bytes: 65,536 to 1,073,741,824. A log
    /// has two files; when one is full, it replaces the other. Default 1 MiB.
    pub log_bytes: u64,
    /// Stacks of the user whose logs are kept: 1 to 4,096. When a stack starts, the oldest logs of stacks
    /// that do not run are deleted until no more are left, those of stacks without a name of their own first.
    /// Default 100.
    pub logs_max: u32,
}

/// The shard from which a worker accepts connections first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ListenSpawnMode {
    /// All alike.
    Off,
    /// The shard of the CPU that the worker is pinned to, if it is pinned to one.
    Bound,
    /// As `Bound`; workers that are not pinned get the shards in turn.
    #[default]
    Auto,
}

impl ListenSpawnMode {
    /// Returns the name, as in a configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Bound => "bound",
            Self::Auto => "auto",
        }
    }
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            name: None,
            directory: true,
            publish_ms: 100,
            unprivileged_port_start: None,
            listen_spawn: ListenSpawnMode::Auto,
            log_bytes: 1 << 20,
            logs_max: 100,
        }
    }
}

impl RunConfig {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        if let Some(name) = self.name.as_deref().filter(|name| !is_valid_name(name)) {
            let problem = format!(
                "{name:?} is not a valid stack name: it must be 1 to 48 letters, digits, \".\", \"_\" and \"-\", and begin with a letter or digit"
            );
            return Err(ConfigError::new("run.name", problem));
        }
        within("run.publish_ms", self.publish_ms, 10..=60_000)?;
        within("run.log_bytes", self.log_bytes, 65_536..=1 << 30)?;
        within("run.logs_max", self.logs_max, 1..=4096)
    }
}
