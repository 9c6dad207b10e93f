//! `ginnel run`: an unmodified program on a stack of its own, or on one that `ginnel up` keeps.

use crate::failure::Failure;
use crate::programs::{ProgramOptions, find_library};
use crate::served_stack::{self, OpenedStack, POLL_INTERVAL, ServedStack};
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
const SERVE_TIMEOUT: Duration = Duration::from_secs(12);

/// Options of `ginnel run`.
#[derive(Clone, Debug, Args)]
pub struct RunOptions {
    /// The stack to run on, which ginnel up keeps; "kernel" for none, which is how the same command line rolls back. Default: one of the program's own, which
    /// the options below describe.
    #[arg(long = "stack", value_name = "NAME")]
    stack_name: Option<String>,

    #[command(flatten)]
    program: ProgramOptions,

    #[command(flatten)]
    stack: StackOptions,
}

/// Runs the program, and ends as it ended.
pub fn run(options: &RunOptions) -> Result<(), Failure> {
    match options.stack_name.as_deref() {
        None => run_on_own_stack(options),
        // With the options of a stack or without: those of the command line that is rolled back.
        Some(KERNEL) => Err(options.program.exec_on_kernel()),
        Some(name) => run_on_named_stack(options, name),
    }
}

fn run_on_named_stack(options: &RunOptions, name: &str) -> Result<(), Failure> {
    if let Some(option) = options.stack.first_given() {
        return Err(Failure::usage(format!("{option}: the stack \"{name}\" is as ginnel up made it")));
    }
    let library = find_library()?;
    if let Some(cause) = options.program.check_preloadable() {
        return Err(options.program.handle_missing_stack(&cause));
    }
    match wait_for_control_socket(name) {
        Ok(control) => Err(options.program.exec_on_stack(&library, &control)),
        Err(cause) => Err(options.program.handle_missing_stack(&cause)),
    }
}

/// The door of a stack, once it serves.
fn wait_for_control_socket(name: &str) -> Result<PathBuf, Failure> {
    let until = Instant::now() + SERVE_TIMEOUT;
    loop {
        let running = run_dir::find(Some(name)).map_err(|e| Failure::running(e.to_string()))?;
        if running.path.join(run_dir::READY).exists() {
            return Ok(served_stack::control_socket(&running.path));
        }
        let pid = running.pid;
        if !served_stack::control_socket(&running.path).exists()
            && Instant::now() + SERVE_TIMEOUT > until + POLL_INTERVAL
        {
            return Err(Failure::running(format!(
                "the stack \"{name}\" of process {pid} has no door for programs: it is not one of ginnel up or ginnel run"
            )));
        }
        if Instant::now() > until {
            return Err(Failure::running(format!(
                "the stack \"{name}\" of process {pid} does not become ready"
            )));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn run_on_own_stack(options: &RunOptions) -> Result<(), Failure> {
    let config = options.stack.to_config()?;
    let library = find_library()?;
    if let Some(cause) = options.program.check_preloadable() {
        return Err(options.program.handle_missing_stack(&cause));
    }
    let stack = match OpenedStack::new(config, "run", 0) {
        Ok(stack) => stack,
        // What is wrong with the command line is wrong in any case.
        Err(failure) if failure.is_usage() => return Err(failure),
        Err(cause) => return Err(options.program.handle_missing_stack(&cause)),
    };
    let stop = StopFlag::new().map_err(|e| Failure::running(format!("stop flag: {e}")))?;
    let status = stack.serve(&stop, |served| {
        let child = options.program.spawn_on_stack(&library, &served.control_socket())?;
        supervise(child, served)
    })?;
    if status.success() { Ok(()) } else { Err(Failure::program(exit_code(status))) }
}

/// Hands signals on, until the program and all that came of it have ended.
fn supervise(mut child: Child, served: &ServedStack<'_>) -> Result<ExitStatus, Failure> {
    let running = |e| Failure::running(format!("program: {e}"));
    let signals = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT];
    let mut signals = Signals::new(signals).map_err(running)?;
    let status = loop {
        for signal in signals.pending() {
            forward_signal(signal, child.id());
        }
        if let Some(status) = child.try_wait().map_err(running)? {
            break status;
        }
        std::thread::sleep(POLL_INTERVAL);
    };
    // A program that went to the background left others behind: the stack is theirs until they end. The first of them is the one that others would send signals.
    let mut stop_signals = 0;
    while served.broker.processes() > 0 && !served.has_ended() {
        for signal in signals.pending() {
            stop_signals += u32::from(matches!(signal, SIGINT | SIGTERM));
            if let Some(first) = served.broker.attached_processes().iter().find(|user| user.pid != 0) {
                forward_signal(signal, first.pid);
            }
        }
        // Whoever asks twice does not want to wait.
        if stop_signals > 1 {
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(status)
}

fn forward_signal(signal: i32, pid: u32) {
    if let (Some(pid), Some(signal)) = (Pid::from_raw(pid.cast_signed()), Signal::from_named_raw(signal)) {
        // It may have ended.
        let _ = kill_process(pid, signal);
    }
}

/// As a shell has it: of a program that a signal ended, 128 and the signal.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
    u8::try_from(code & 0xff).unwrap_or(1)
}
