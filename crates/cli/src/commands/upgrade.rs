//! `ginnel upgrade`: has the version of this executable run the shards of a running stack.

use crate::failure::Failure;
use crate::output;
use crate::served_stack::control_socket;
use crate::supervisor::UPGRADE_TIMEOUT;
use clap::Args;
use ginnel::broker::{self, ConnectionPolicy};
use ginnel::run_dir;
use std::fs::File;
use std::os::fd::AsFd;

/// Text after the options in `ginnel upgrade --help`.
const HELP: &str = "\
The library in the programs and the process of \"ginnel up\" keep their version until they are restarted.

Connections, listeners and UDP sockets pass to the new version of the shards if both versions save the same \
state, and if all that is in use can be saved. Programs and peers then notice only a pause. Otherwise the \
shards are restarted: connections are reset, and listeners and UDP sockets serve again. The output and \
\"ginnel log NAME\" say which of the two has happened, and why connections were reset. If the new version \
fails to continue with the connections, the former one does, and the upgrade has failed.";

/// Options of `ginnel upgrade`.
#[derive(Clone, Debug, Args)]
#[command(after_long_help = HELP)]
pub struct UpgradeOptions {
    /// Name of the stack.
    #[arg(value_name = "NAME")]
    stack_name: String,

    /// Upgrade only if the connections can be kept.
    #[arg(long, conflicts_with = "reset_connections")]
    keep_connections: bool,

    /// Restart the shards, which resets the connections.
    #[arg(long)]
    reset_connections: bool,
}

impl UpgradeOptions {
    fn policy(&self) -> ConnectionPolicy {
        match (self.keep_connections, self.reset_connections) {
            (true, _) => ConnectionPolicy::Keep,
            (false, true) => ConnectionPolicy::Reset,
            (false, false) => ConnectionPolicy::KeepIfPossible,
        }
    }
}

/// Upgrades the shards of a stack, and says for how long they were away and whether connections were kept.
pub fn run(options: &UpgradeOptions) -> Result<(), Failure> {
    let name = &options.stack_name;
    let running = run_dir::find(Some(name)).map_err(|e| Failure::running(e.to_string()))?;
    let executable = File::open("/proc/self/exe")
        .map_err(|e| Failure::running(format!("executable of this process: {e}")))?;
    let control = control_socket(&running.path);
    if !control.exists() {
        return Err(Failure::running(format!(
            "the stack \"{name}\" was not upgraded: its shards are threads of process {}, which is neither \"ginnel up\" nor \"ginnel run\": restart that process",
            running.pid
        )));
    }
    let upgraded = broker::upgrade(&control, executable.as_fd(), options.policy(), UPGRADE_TIMEOUT)
        .map_err(|e| Failure::running(format!("the stack \"{name}\" was not upgraded: {e}")))?;
    let connections = match &upgraded.connections {
        Ok(kept) => format!("connections kept: {kept}"),
        Err(reason) => format!("connections were reset: {reason}"),
    };
    output::note(format!(
        "The shards of \"{name}\" run version {} of ginnel now. They were away for {} ms; {connections}.",
        env!("CARGO_PKG_VERSION"),
        upgraded.away.as_millis()
    ));
    Ok(())
}
