//! `ginnel run`: runs an unmodified program on a stack of its own, or on a stack that `ginnel up` started.

use crate::executable_check;
use crate::failure::Failure;
use crate::orphans::reap_orphans;
use crate::output;
use crate::programs::{ProgramOptions, find_kernel_library, find_library, is_for_programs};
use crate::served_stack::{self, OpenedStack, POLL_INTERVAL, ServedStack};
use crate::signals;
use crate::stack_options::StackOptions;
use crate::supervisor::{self, DeathOptions};
use clap::Args;
use ginnel::{StopFlag, run_dir};
use ginnel_kernel_lane::Mode;
use ginnel_posix_ops::ffi;
use rustix::process::{Pid, Signal, getpid, kill_process, pidfd_send_signal};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithRawSiginfo;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

/// The stack name that stands for the kernel's network.
pub const KERNEL: &str = "kernel";
/// Longest time to wait for the file which says that a stack is for programs. `ginnel up` writes it shortly
/// after it has created the stack's directory.
const ANNOUNCE_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest time to wait for a stack that has just been started.
const SERVE_TIMEOUT: Duration = Duration::from_secs(12);
/// Signals that are passed on to the program.
const PROGRAM_SIGNALS: [i32; 8] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT];
/// `si_code` of a signal that the kernel sent.
const SI_KERNEL: i32 = 0x80;

/// The signals that this process has received, with their senders.
type ProgramSignals = SignalsInfo<WithRawSiginfo>;

/// Text after the options in `ginnel run --help`.
const HELP: &str = "\
Exit status:
  That of the program; 128 plus the number of the signal that ended it.
  125  the program cannot use the stack, and --on-missing is \"fail\"; or the program's own stack has ended it
       (--on-stack-death kill). With --stack, the program takes the place of \"ginnel run\": it ends by the
       signal of the stack (143 for SIGTERM, 137 for SIGKILL), and \"ginnel log NAME\" tells the cause
  126  the program cannot be executed
  127  the program was not found
  2    wrong options or configuration
  1    any other failure of \"ginnel run\"

With a stack of its own, \"ginnel run\" passes SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH \
and SIGCONT on to the program. If the program leaves processes \
behind when it exits, as a daemon does, \"ginnel run\" serves them until the last has ended, and passes \
signals on to the first of them; a second SIGINT or SIGTERM then ends the stack without waiting. A signal of \
the terminal (Ctrl-C) is not passed on to a process that has got it from the terminal, nor does a process get \
back a signal that it has sent. A signal that another process sends to the whole process group \
(kill -- -PGID, or timeout without --foreground) reaches the program twice: directly and through \"ginnel \
run\".";

/// Options of `ginnel run`.
#[derive(Clone, Debug, Args)]
#[command(after_long_help = HELP)]
pub struct RunOptions {
    /// Run the program on this stack, which "ginnel up" started. "--stack kernel" runs it on the kernel's
    /// network and ignores all stack options, so that it can be added to any command line. --listen-spawn
    /// has a meaning of its own with "--stack kernel".
    /// Without --stack the program gets a stack of its own, which the stack options below describe and which
    /// ends with the program.
    #[arg(long = "stack", value_name = "NAME")]
    stack_name: Option<String>,

    #[command(flatten)]
    death: DeathOptions,

    #[command(flatten)]
    program: ProgramOptions,

    #[command(flatten)]
    stack: StackOptions,
}

/// Runs the program, as a child or in place of this process. A child's exit status other than 0 is a failure
/// with that code ([`Failure::program`]).
pub fn run(options: &RunOptions) -> Result<(), Failure> {
    match options.stack_name.as_deref() {
        None => run_on_own_stack(options),
        // Stack options are ignored here, so that `--stack kernel` can be added to any command line.
        Some(KERNEL) => match options.program.kernel_lane() {
            None => Err(options.program.exec_on_kernel("started with --stack kernel")),
            Some(mode) => run_in_kernel_lane(options, mode),
        },
        Some(name) => run_on_named_stack(options, name),
    }
}

fn run_in_kernel_lane(options: &RunOptions, mode: Mode) -> Result<(), Failure> {
    let library = match find_kernel_library().and_then(|library| options.program.check_preloadable(library)) {
        Ok(library) => library,
        Err(cause) => return Err(options.program.handle_missing_stack(&cause)),
    };
    Err(options.program.exec_in_kernel_lane(&library, mode))
}

fn run_on_named_stack(options: &RunOptions, name: &str) -> Result<(), Failure> {
    let on_death = options.death.on_stack_death.map(|_| "--on-stack-death");
    if let Some(option) = options.stack.first_given().or(on_death) {
        return Err(Failure::usage(format!(
            "{option} cannot be combined with --stack {name}: that stack was configured by \"ginnel up\""
        )));
    }
    let library = find_library().and_then(|library| options.program.check_preloadable(library));
    let control = || wait_for_control_socket(name).and_then(ProgramOptions::check_control_socket);
    match library.and_then(|library| Ok((library, control()?))) {
        Ok((library, control)) => Err(options.program.exec_on_stack(&library, &control)),
        Err(cause) => Err(options.program.handle_missing_stack(&cause)),
    }
}

/// Waits until the stack is ready and returns the path of its control socket.
///
/// # Errors
/// No stack of this name runs, it admits no programs, or it is not ready within [`SERVE_TIMEOUT`].
fn wait_for_control_socket(name: &str) -> Result<PathBuf, Failure> {
    let since = Instant::now();
    loop {
        let running = run_dir::find(Some(name)).map_err(|e| Failure::running(e.to_string()))?;
        if running.path.join(run_dir::READY).exists() {
            return Ok(served_stack::control_socket(&running.path));
        }
        let pid = running.pid;
        // Other commands have stacks, too, which serve no programs.
        if !is_for_programs(&running.path) && since.elapsed() > ANNOUNCE_TIMEOUT {
            return Err(Failure::running(format!(
                "the stack \"{name}\" (process {pid}) does not admit programs: start one with \"ginnel up NAME\""
            )));
        }
        if since.elapsed() > SERVE_TIMEOUT {
            let opens_devices = !served_stack::control_socket(&running.path).exists();
            let state = if opens_devices { "opens its devices" } else { "waits for its addresses" };
            return Err(Failure::running(format!(
                "the stack \"{name}\" (process {pid}) still {state} after {} seconds: see \"ginnel log {name}\"",
                SERVE_TIMEOUT.as_secs()
            )));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn run_on_own_stack(options: &RunOptions) -> Result<(), Failure> {
    if let Some(directory) = &options.death.shards_of {
        let config = options.stack.to_config();
        let config = config.map_err(|failure| supervisor::log_start_failure(directory, failure))?;
        return supervisor::run_shards(config, directory, false);
    }
    let config = options.stack.to_config()?;
    if options.death.check_shards {
        return output::print(executable_check::check_own(&config)?);
    }
    let library = match find_library().and_then(|library| options.program.check_preloadable(library)) {
        Ok(library) => library,
        Err(cause) => return Err(options.program.handle_missing_stack(&cause)),
    };
    let stack = match OpenedStack::new(config, "run", 0, options.death.action()) {
        Ok(stack) => stack,
        // A usage error is reported even with `--on-missing kernel`.
        Err(failure) if failure.is_usage() => return Err(failure),
        Err(cause) => return Err(options.program.handle_missing_stack(&cause)),
    };
    let stop = StopFlag::new().map_err(|e| Failure::running(format!("stop flag: {e}")))?;
    let mut is_tried = false;
    let status = stack.serve(&stop, |served| {
        let control = ProgramOptions::check_control_socket(served.control_socket())?;
        is_tried = true;
        // Before the program exists: nothing else would end it if a signal ended this process. Signals that
        // are ignored are handled afterwards, because the program must ignore them, too.
        let (ignored, handled): (Vec<_>, Vec<_>) =
            PROGRAM_SIGNALS.into_iter().partition(|signal| signals::is_ignored(*signal));
        let failed = |e| Failure::running(format!("signal handlers: {e}"));
        let signals = ProgramSignals::new(&handled).map_err(failed)?;
        signals::set_handled(&handled);
        let child = options.program.spawn_on_stack(&library, &control)?;
        ignored.into_iter().try_for_each(|signal| signals.handle().add_signal(signal)).map_err(failed)?;
        supervise(child, signals, served)
    });
    let status = match status {
        // A usage error is reported even with `--on-missing kernel`, here as above.
        Err(cause) if !is_tried && !cause.is_usage() => {
            return Err(options.program.handle_missing_stack(&cause));
        }
        status => status?,
    };
    if status.success() { Ok(()) } else { Err(Failure::program(exit_code(status))) }
}

/// Forwards signals to the program, and waits until it and all its descendants on the stack have ended. Does
/// not wait for descendants if the stack has ended, or after a second SIGINT or SIGTERM. Returns the exit
/// status of the program.
fn supervise(
    mut child: Child,
    mut signals: ProgramSignals,
    served: &ServedStack<'_>,
) -> Result<ExitStatus, Failure> {
    let running = |e| Failure::running(format!("program: {e}"));
    let program = Pid::from_child(&child);
    // The terminal may have sent the first signals before the program existed.
    let mut may_precede = true;
    let status = loop {
        for signal in signals.pending() {
            let signal = ReceivedSignal::new(signal.si_signo, signal.si_code, ffi::sender_of(&signal));
            let signal = ReceivedSignal { from_kernel: signal.from_kernel && !may_precede, ..signal };
            // The process may have ended.
            forward_signal(signal, Some(program), |signal| _ = kill_process(program, signal));
        }
        may_precede = false;
        reap_orphans(|pid| pid == program || served.is_shard_process(pid));
        if let Some(status) = child.try_wait().map_err(running)? {
            tracing::info!("the program has ended ({})", supervisor::describe(status));
            break status;
        }
        std::thread::sleep(POLL_INTERVAL);
    };
    // A program that became a daemon left other processes behind, and the stack serves them until they end.
    // Signals go to the first of them.
    let mut stop_signals = 0;
    while served.broker.processes() > 0 && !served.has_ended() {
        for signal in signals.pending() {
            let signal = ReceivedSignal::new(signal.si_signo, signal.si_code, ffi::sender_of(&signal));
            stop_signals += u32::from(matches!(signal.number, SIGINT | SIGTERM));
            if let Some((first, process)) = served.broker.oldest_process() {
                let pid = Pid::from_raw(first.pid.cast_signed());
                // Not by its id, which is unknown in some PID namespaces. The process may have ended.
                forward_signal(signal, pid, |signal| _ = pidfd_send_signal(&*process, signal));
            }
        }
        reap_orphans(|pid| served.is_shard_process(pid));
        // A second SIGINT or SIGTERM stops the stack without waiting.
        if stop_signals > 1 {
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(status)
}

/// A signal that this process has received.
#[derive(Clone, Copy)]
struct ReceivedSignal {
    number: i32,
    /// The kernel sent the signal. Those of a terminal, as for Ctrl-C, are sent to all processes of the
    /// foreground process group.
    from_kernel: bool,
    /// The process that sent the signal.
    sender: Option<i32>,
}

impl ReceivedSignal {
    /// Returns a signal with the given `si_signo`, `si_code` and `si_pid` (sigaction(2)).
    const fn new(number: i32, code: i32, sender: Option<i32>) -> Self {
        Self { number, from_kernel: code == SI_KERNEL, sender }
    }
}

/// Passes a signal to `send`, which sends it to the process `pid`, unless the terminal has sent it to that
/// process already: programs like redis-server take a second SIGINT as the wish to end at once. Nor does a
/// process get its own signal back: if it has signalled its process group, it has the signal already. A
/// process whose id is unknown gets every signal.
fn forward_signal(signal: ReceivedSignal, pid: Option<Pid>, send: impl FnOnce(Signal)) {
    let Some(number) = Signal::from_named_raw(signal.number) else { return };
    let Some(pid) = pid else { return send(number) };
    // A terminal that hangs up sends SIGHUP and SIGCONT to the session leader alone.
    let is_hang_up = matches!(signal.number, SIGHUP | SIGCONT) && ffi::session() == getpid().as_raw_pid();
    let is_from_terminal =
        signal.from_kernel && !is_hang_up && ffi::process_group(pid.as_raw_pid()) == ffi::process_group(0);
    if is_from_terminal || signal.sender == Some(pid.as_raw_pid()) {
        return;
    }
    send(number);
}

/// Returns the exit code that a shell reports: 128 plus the signal for a program that a signal ended.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
    u8::try_from(code & 0xff).unwrap_or(1)
}
