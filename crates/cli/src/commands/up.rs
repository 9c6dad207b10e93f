//! `ginnel up` and `ginnel down`: start and stop a stack for several programs.

use super::run::KERNEL;
use crate::failure::Failure;
use crate::orphans::reap_orphans;
use crate::served_stack::{OpenedStack, POLL_INTERVAL};
use crate::stack_options::StackOptions;
use crate::supervisor::{self, DeathOptions};
use crate::{executable_check, log, output, sd_notify, signals};
use clap::Args;
use ginnel::inspect;
use ginnel::run_dir::{self, RunningStack};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal, setsid, test_kill_process};
use std::io::{BufRead, BufReader, ErrorKind};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Options of `ginnel up`.
#[derive(Clone, Debug, Args)]
pub struct UpOptions {
    /// Name of the stack, for ginnel run --stack NAME and ginnel down NAME.
    #[arg(value_name = "NAME")]
    stack_name: String,

    /// Return as soon as the stack is ready, and keep it running in the background. Its warnings and errors
    /// are then in its log only, which ginnel log NAME shows.
    #[arg(long, short)]
    background: bool,

    /// Set in the background process.
    #[arg(long, hide = true)]
    detached: bool,

    #[command(flatten)]
    death: DeathOptions,

    #[command(flatten)]
    stack: StackOptions,
}

/// Options of `ginnel down`.
#[derive(Clone, Debug, Args)]
pub struct DownOptions {
    /// Name of the stack.
    #[arg(value_name = "NAME")]
    stack_name: String,

    /// Stop the stack even if programs use it. Their connections are lost.
    #[arg(long, short)]
    force: bool,
}

/// First port that any user may bind, as on Linux.
const UNPRIVILEGED_PORT_START: u16 = 1024;
/// Longest time to wait for a stack to end. A stack closes its connections before it ends.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest time to wait for the socket of a stack that has just been started.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Runs a stack until it is stopped.
pub fn up(options: &UpOptions) -> Result<(), Failure> {
    if options.stack_name == KERNEL {
        return Err(Failure::usage(format!(
            "NAME cannot be \"{KERNEL}\": \"ginnel run --stack {KERNEL}\" means the kernel's network; choose another name"
        )));
    }
    if options.stack.own.name.as_ref().is_some_and(|name| *name != options.stack_name) {
        return Err(Failure::usage(
            "--name cannot be combined with ginnel up: the argument NAME is the name of the stack",
        ));
    }
    let config = options.stack.to_config();
    let mut config = match &options.death.shards_of {
        Some(directory) => config.map_err(|failure| supervisor::log_start_failure(directory, failure))?,
        None => config?,
    };
    config.run.name = Some(options.stack_name.clone());
    config.validate().map_err(|e| Failure::usage(e.to_string()))?;
    if options.death.check_shards {
        return output::print(executable_check::check_own(&config)?);
    }
    if let Some(directory) = &options.death.shards_of {
        return supervisor::run_shards(config, directory, options.detached);
    }
    if options.background && !options.detached {
        return start_in_background(&options.stack_name);
    }
    if options.detached {
        // `setsid` fails only for the leader of a process group, and this process was just forked.
        let _ = setsid();
        signals::ignore_hangup()?;
    }
    let stop = signals::stop_on_signal("the stack")?;
    OpenedStack::new(config, "up", UNPRIVILEGED_PORT_START, options.death.action())?.serve(&stop, |served| {
        if options.detached {
            log::redirect_output()?;
        }
        sd_notify::notify(sd_notify::READY);
        while !stop.is_set() && !served.has_ended() {
            reap_orphans(|pid| served.is_shard_process(pid));
            std::thread::sleep(POLL_INTERVAL);
        }
        sd_notify::notify(sd_notify::STOPPING);
        Ok(())
    })
}

/// Runs the same command line again in a background process, and waits until that process serves or exits.
/// The background process closes standard error in either case.
fn start_in_background(name: &str) -> Result<(), Failure> {
    let failed = |e| Failure::running(format!("background process: {e}"));
    let program = std::env::current_exe().map_err(failed)?;
    let mut command = Command::new(program);
    // Directly after "up": what follows "--" is no option.
    let mut words = std::env::args_os().skip(1);
    command.args(words.next()).arg("--detached").args(words);
    // The background process leaves the terminal, which does not stop it then. It must not be left alone if
    // this process is interrupted before it exists.
    let background = Arc::new(BackgroundProcess::default());
    let of_handler = background.clone();
    let interrupted = signals::on_interrupt(move |signal| of_handler.interrupt(signal))?;
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().map_err(failed)?;
    match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
        Ok(process) => background.set(process),
        Err(error) => {
            child.kill().and_then(|()| child.wait()).map_err(failed)?;
            return Err(failed(error.into()));
        }
    }
    if let Some(errors) = child.stderr.take() {
        for line in BufReader::new(errors).lines().map_while(Result::ok) {
            output::note(line);
        }
    }
    let status = loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            break status;
        }
        let serves =
            |running: RunningStack| running.pid == child.id() && running.path.join(run_dir::READY).exists();
        if !interrupted.is_set() && run_dir::find(Some(name)).is_ok_and(serves) {
            return Ok(());
        }
        std::thread::sleep(POLL_INTERVAL);
    };
    let code = match status.code() {
        Some(code) if code != 0 => code,
        // The process may have had no handlers yet.
        _ if background.exit_code() != 0 => background.exit_code(),
        code => code.unwrap_or_else(|| 128 + status.signal().unwrap_or_default()),
    };
    if code == 0 { Ok(()) } else { Err(Failure::program(u8::try_from(code & 0xff).unwrap_or(1))) }
}

/// A process that is to end if a signal interrupts this one.
#[derive(Debug, Default)]
struct BackgroundProcess(Mutex<Interruption>);

/// The process, once it runs, and the first signal.
#[derive(Debug, Default)]
struct Interruption {
    process: Option<OwnedFd>,
    signal: Option<i32>,
}

impl BackgroundProcess {
    fn lock(&self) -> MutexGuard<'_, Interruption> {
        // No code panics while it holds the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the process, now or when it is [set](Self::set).
    fn interrupt(&self, signal: i32) {
        let mut state = self.lock();
        state.signal.get_or_insert(signal);
        state.process.iter().for_each(terminate);
    }

    fn set(&self, process: OwnedFd) {
        let mut state = self.lock();
        if state.signal.is_some() {
            terminate(&process);
        }
        state.process = Some(process);
    }

    /// Returns the exit code that shells report for a process that the first signal has ended, or 0.
    fn exit_code(&self) -> i32 {
        self.lock().signal.map_or(0, |signal| 128 + signal)
    }
}

fn terminate(process: &OwnedFd) {
    // The process may have ended.
    let _ = pidfd_send_signal(process, Signal::TERM);
}

/// Stops a stack.
pub fn down(options: &DownOptions) -> Result<(), Failure> {
    let find = || run_dir::find(Some(&options.stack_name)).map_err(|e| Failure::running(e.to_string()));
    let running = find()?;
    let (owner, process) = open_pidfd(&running)?;
    if !options.force {
        check_unused(&running, owner)?;
    }
    let signals =
        if options.force { &[Signal::TERM, Signal::TERM, Signal::KILL][..] } else { &[Signal::TERM] };
    for signal in signals {
        match pidfd_send_signal(&process, *signal) {
            // The process may have ended.
            Ok(()) | Err(Errno::SRCH) => {}
            Err(e) => {
                return Err(Failure::running(format!(
                    "cannot stop the stack \"{}\" (process {owner}): {e}",
                    running.name
                )));
            }
        }
        let until = Instant::now() + EXIT_TIMEOUT / signals.len() as u32;
        while Instant::now() < until {
            let now = run_dir::running().map_err(|e| Failure::running(e.to_string()))?;
            if !now.iter().any(|other| other.name == running.name && other.pid == running.pid) {
                return Ok(());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
    let hint = if options.force { "" } else { ": use --force" };
    Err(Failure::running(format!(
        "the stack \"{}\" (process {owner}) did not end within {} s{hint}",
        running.name,
        EXIT_TIMEOUT.as_secs()
    )))
}

/// Returns the number and a pidfd of the process that owns the stack. The kernel names the process:
/// `running.pid` is its number in the PID namespace of the stack, and may be that of another process here.
fn open_pidfd(running: &RunningStack) -> Result<(i32, OwnedFd), Failure> {
    let name = &running.name;
    let gone = || Failure::running(format!("the stack \"{name}\" has just ended"));
    let pid = find_owner(running)?.ok_or_else(|| {
        Failure::running(format!(
            "the stack \"{name}\" runs in another PID namespace (container), from which this one sees no processes: run \"ginnel down {name}\" there"
        ))
    })?;
    let process = pidfd_open(pid, PidfdFlags::empty()).map_err(|_| gone())?;
    // The process id could have been reused between the two lookups; from here on the pidfd identifies the
    // process.
    if find_owner(running)? != Some(pid) {
        return Err(Failure::running(format!(
            "the stack \"{name}\" has just been replaced by another process: try again"
        )));
    }
    Ok((pid.as_raw_nonzero().get(), process))
}

/// Returns the process that owns the stack, or `None` if it is not visible in this PID namespace. Waits for
/// the socket of a stack that has just been started.
fn find_owner(running: &RunningStack) -> Result<Option<Pid>, Failure> {
    let since = Instant::now();
    loop {
        match inspect::owner_pid(&running.path) {
            // Nobody listens yet, or any more.
            Err(e)
                if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused)
                    && since.elapsed() < ANSWER_TIMEOUT =>
            {
                run_dir::find(Some(&running.name)).map_err(|e| Failure::running(e.to_string()))?;
                std::thread::sleep(POLL_INTERVAL);
            }
            owner => {
                return owner.map_err(|e| {
                    let RunningStack { name, pid, .. } = running;
                    Failure::running(format!(
                        "the stack \"{name}\" (process {pid}) accepts no connection: {e}"
                    ))
                });
            }
        }
    }
}

/// Checks that no program uses the stack. A stack without a broker has no programs.
fn check_unused(running: &RunningStack, owner: i32) -> Result<(), Failure> {
    let name = &running.name;
    let users = inspect::list_processes(&running.path).map_err(|e| {
        Failure::running(format!(
            "the stack \"{name}\" (process {owner}) does not tell which programs use it: {e}: use --force to end it anyway"
        ))
    })?;
    if users.is_empty() {
        return Ok(());
    }
    let comm = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/comm"));
    let users: Vec<String> = users.into_iter().map(|user| describe(user.pid, comm(user.pid).ok())).collect();
    Err(Failure::running(format!(
        "the stack \"{name}\" is in use by {}: stop them first, or use --force",
        users.join(", ")
    )))
}

/// Returns the name and the number of a process that uses a stack. `comm` is the name, if it can be read.
fn describe(pid: u32, comm: Option<String>) -> String {
    let Some(process) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
        return "a program without the library or of another PID namespace".into();
    };
    match comm {
        Some(name) => format!("{} ({pid})", name.trim_end()),
        // The stack does not know yet: it may be overloaded.
        None if test_kill_process(process) == Err(Errno::SRCH) => format!("process {pid}, which has ended"),
        // Processes of others are hidden (`hidepid` of /proc).
        None => format!("process {pid}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_users_have_not_ended() {
        let own = std::process::id();
        assert_eq!(describe(own, Some("web\n".into())), format!("web ({own})"));
        assert_eq!(describe(own, None), format!("process {own}"));
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert_eq!(describe(child.id(), None), format!("process {}, which has ended", child.id()));
        assert!(describe(0, None).contains("PID namespace"));
    }

    #[test]
    fn an_early_signal_ends_the_background_process() {
        let background = BackgroundProcess::default();
        assert_eq!(background.exit_code(), 0);
        background.interrupt(15);
        background.interrupt(2);
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        background.set(pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap());
        assert_eq!(child.wait().unwrap().signal(), Some(15));
        assert_eq!(background.exit_code(), 128 + 15);
    }
}
