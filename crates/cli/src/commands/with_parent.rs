//! `ginnel with-parent`: becomes a program that the kernel kills when its parent dies, however that dies.

use crate::failure::Failure;
use clap::Args;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Options of `ginnel with-parent`.
#[derive(Clone, Debug, Args)]
pub struct WithParentOptions {
    /// Process id of the parent.
    #[arg(long, value_name = "PID")]
    parent: i32,

    /// The program and its arguments.
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Returns a command that starts a program which is killed when this process, or the thread that starts it,
/// dies.
pub fn command(program: &OsStr) -> Result<Command, Failure> {
    let executable = std::env::current_exe().map_err(|e| Failure::running(format!("own executable: {e}")))?;
    let mut command = Command::new(executable);
    command.args(["with-parent", "--parent", &std::process::id().to_string(), "--"]).arg(program);
    Ok(command)
}

/// Becomes the program.
pub fn run(options: &WithParentOptions) -> Result<(), Failure> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|e| Failure::running(format!("signal at the parent's death: {e}")))?;
    // The signal is sent for a death from now on. A parent that died before is found by its id.
    if getppid().map(Pid::as_raw_pid) != Some(options.parent) {
        return Err(Failure::running("the process that started this one has ended"));
    }
    let (program, arguments) = options.program.split_first().expect("the argument is required");
    let error = Command::new(program).args(arguments).exec();
    Err(Failure::not_started(&program.to_string_lossy(), &error))
}
