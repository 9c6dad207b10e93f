//! `ginnel upgrade`: has the version of this executable run the shards of a running stack.

use crate::failure::Failure;
use crate::output;
use crate::served_stack::control_socket;
use crate::supervisor::UPGRADE_TIMEOUT;
use clap::Args;
use ginnel::{broker, run_dir};
use std::fs::File;
use std::os::fd::AsFd;

/// Options of `ginnel upgrade`.
#[derive(Clone, Debug, Args)]
pub struct UpgradeOptions {
    /// Name of the stack.
    #[arg(value_name = "NAME")]
    stack_name: String,
}

/// Upgrades the shards of a stack, and says for how long they were away.
pub fn run(options: &UpgradeOptions) -> Result<(), Failure> {
    let name = &options.stack_name;
    let running = run_dir::find(Some(name)).map_err(|e| Failure::running(e.to_string()))?;
    let executable = File::open("/proc/self/exe")
        .map_err(|e| Failure::running(format!("executable of this process: {e}")))?;
    let away = broker::upgrade(&control_socket(&running.path), executable.as_fd(), UPGRADE_TIMEOUT)
        .map_err(|e| Failure::running(format!("the stack \"{name}\" was not upgraded: {e}")))?;
    output::note(format!(
        "The shards of \"{name}\" run version {} of ginnel now. They were away for {} ms; connections were reset.",
        env!("CARGO_PKG_VERSION"),
        away.as_millis()
    ));
    Ok(())
}
