//! Keys of the `[run]` table.

use super::within;
use crate::run_dir::is_valid_name;
use ginnel_stack::error::ConfigError;
use serde::Deserialize;

/// Keys of the `[run]` table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RunConfig {
    /// What the stack is called by `ginnel stat` and `ginnel ss`: 1 to 48 letters, digits, `.`, `_` and `-`. Default: the command and the number of its
    /// process, as `httpd-4711`.
    pub name: Option<String>,
    /// Be seen by other processes of the user, in `/run/ginnel` for root, else in `$XDG_RUNTIME_DIR/ginnel` or `/tmp/ginnel-UID`; `$GINNEL_RUN_DIR` chooses another
    /// place. Default true.
    pub directory: bool,
    /// How often a busy shard shows its counters to other processes, in milliseconds: 10 to 60,000. One that sleeps has shown them before. Default 100.
    pub publish_ms: u32,
    /// Programs on the stack need `CAP_NET_BIND_SERVICE` to bind ports below this one, as `net.ipv4.ip_unprivileged_port_start` says it for the kernel's: 0 to 65,535.
    /// Default: 1,024, or 0 on a stack of the program's own (`ginnel run`).
    pub unprivileged_port_start: Option<u16>,
}

impl Default for RunConfig {
    fn default() -> Self {
        Self { name: None, directory: true, publish_ms: 100, unprivileged_port_start: None }
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
        within("run.publish_ms", self.publish_ms, 10..=60_000)
    }
}
