//! `ginnel run`: an unmodified program on a stack of its own, or on one that `ginnel up` keeps.

use crate::failure::Failure;
use crate::programs::{ProgramOptions, library};
use crate::serving::{self, LOOK_EVERY, Made, Serving};
use crate::stack_options::StackOptions;
use clap::Args;
use ginnel::{StopFlag, run_dir};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::Signals;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

/// The name that stands for no stack at all.
pub const KERNEL: &str = "kernel";
/// A stack that has just been started may not serve yet.
const SERVES_WITHIN: Duration = Duration::from_secs(12);

/// Options of `ginnel run`.
#[derive(Clone, Debug, Args)]
pub struct RunOptions {
    /// The stack to run on, which ginnel up keeps; "kernel" for none, which is how the same command line rolls back. Default: one of the program's own, which
    /// the options below describe.
    #[arg(long = "stack", value_name = "NAME")]
    on: Option<String>,

    #[command(flatten)]
    program: ProgramOptions,

    #[command(flatten)]
    stack: StackOptions,
}

/// Runs the program, and ends as it ended.
pub fn run(options: &RunOptions) -> Result<(), Failure> {
    match options.on.as_deref() {
        None => on_own(options),
        // With the options of a stack or without: those of the command line that is rolled back.
        Some(KERNEL) => Err(options.program.become_on_kernel()),
        Some(name) => on_named(options, name),
    }
}

fn on_named(options: &RunOptions, name: &str) -> Result<(), Failure> {
    if let Some(option) = options.stack.first_given() {
        return Err(Failure::usage(format!("{option}: the stack \"{name}\" is as ginnel up made it")));
    }
    let library = library()?;
    if let Some(cause) = options.program.why_not() {
        return Err(options.program.without_stack(&cause));
    }
    match way_to(name) {
        Ok(control) => Err(options.program.become_on_stack(&library, &control)),
        Err(cause) => Err(options.program.without_stack(&cause)),
    }
}

/// The door of a stack, once it serves.
fn way_to(name: &str) -> Result<PathBuf, Failure> {
    let until = Instant::now() + SERVES_WITHIN;
    loop {
        let found = run_dir::find(Some(name)).map_err(|e| Failure::running(e.to_string()))?;
        if found.path.join(run_dir::READY).exists() {
            return Ok(serving::control(&found.path));
        }
        let pid = found.pid;
        if !serving::control(&found.path).exists() && Instant::now() + SERVES_WITHIN > until + LOOK_EVERY {
            return Err(Failure::running(format!(
                "the stack \"{name}\" of process {pid} has no door for programs: it is not one of ginnel up or ginnel run"
            )));
        }
        if Instant::now() > until {
            return Err(Failure::running(format!(
                "the stack \"{name}\" of process {pid} does not become ready"
            )));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

fn on_own(options: &RunOptions) -> Result<(), Failure> {
    let config = options.stack.to_config()?;
    let library = library()?;
    if let Some(cause) = options.program.why_not() {
        return Err(options.program.without_stack(&cause));
    }
    let made = match Made::new(config, "run", 0) {
        Ok(made) => made,
        // What is wrong with the command line is wrong in any case.
        Err(failure) if failure.is_usage() => return Err(failure),
        Err(cause) => return Err(options.program.without_stack(&cause)),
    };
    let stop = StopFlag::new().map_err(|e| Failure::running(format!("stop flag: {e}")))?;
    let status = made.serve(&stop, |serving| {
        let child = options.program.start(&library, &serving.control())?;
        follow(child, serving)
    })?;
    if status.success() { Ok(()) } else { Err(Failure::program(code(status))) }
}

/// Hands signals on, until the program and all that came of it have ended.
fn follow(mut child: Child, serving: &Serving<'_>) -> Result<ExitStatus, Failure> {
    let running = |e| Failure::running(format!("program: {e}"));
    let signals = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT];
    let mut signals = Signals::new(signals).map_err(running)?;
    let status = loop {
        for signal in signals.pending() {
            hand_on(signal, child.id());
        }
        if let Some(status) = child.try_wait().map_err(running)? {
            break status;
        }
        std::thread::sleep(LOOK_EVERY);
    };
    // A program that went to the background left others behind: the stack is theirs until they end. The first of them is the one that others would send signals.
    let mut asked = 0;
    while serving.door.processes() > 0 && !serving.has_ended() {
        for signal in signals.pending() {
            asked += u32::from(matches!(signal, SIGINT | SIGTERM));
            if let Some(first) = serving.door.users().iter().find(|user| user.pid != 0) {
                hand_on(signal, first.pid);
            }
        }
        // Whoever asks twice does not want to wait.
        if asked > 1 {
            break;
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(status)
}

fn hand_on(signal: i32, pid: u32) {
    if let (Some(pid), Some(signal)) = (Pid::from_raw(pid.cast_signed()), Signal::from_named_raw(signal)) {
        // It may have ended.
        let _ = kill_process(pid, signal);
    }
}

/// As a shell has it: of a program that a signal ended, 128 and the signal.
fn code(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
    u8::try_from(code & 0xff).unwrap_or(1)
}
