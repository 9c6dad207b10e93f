//! The two sides on which a suite runs.

use ginnel_testkit::interop::build_preload_library;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const GINNEL: &str = env!("CARGO_BIN_EXE_ginnel");
/// Time in seconds for a module, a stressor or a suite.
pub(crate) const SECONDS: u32 = 1200;

/// Where a suite runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Kernel,
    Stack,
}

/// Returns a command that runs a program on a side.
pub(crate) fn command(side: Side, folder: &Path, words: &[&str]) -> Command {
    command_for(side, folder, SECONDS, (&[], &[]), words)
}

/// Returns a command that runs a program on a side, for `seconds` at most. The command begins with `wrapper`,
/// and a stack has these options.
pub(crate) fn command_for(
    side: Side,
    folder: &Path,
    seconds: u32,
    (wrapper, options): (&[&str], &[&str]),
    words: &[&str],
) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-k", "5"]).arg(seconds.to_string()).args(wrapper);
    if side == Side::Stack {
        command.args([GINNEL, "run", "--loopback", "stack"]).args(options).arg("--");
        command.env("GINNEL_LIBRARY", build_preload_library(GINNEL));
    }
    command.args(words).current_dir(folder).env("GINNEL_RUN_DIR", folder.join("run"));
    command.env_remove("LD_PRELOAD").env_remove("GINNEL_STACK").stdin(Stdio::null());
    command
}

/// Asserts that timeout(1) has not ended the program, whose list of verdicts would be incomplete. timeout(1)
/// exits with 124, or with 137 if it had to send SIGKILL.
#[track_caller]
pub(crate) fn assert_ended(output: &Output, side: Side, words: &[&str]) {
    let is_timeout = matches!(output.status.code(), None | Some(124 | 137));
    assert!(!is_timeout, "{words:?} takes more than {SECONDS} s: {side:?}");
}
