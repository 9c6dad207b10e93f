//! The process of the shards, and its supervisor (docs/adr/0021-restart-of-the-shards.md).
//!
//! ```text
//!   ginnel up, ginnel run: supervisor                     child, the same program
//!   ┌───────────────────────────────────────────┐  link  ┌──────────────────────────┐
//!   │ directory, control socket, broker         │───────►│ devices, shards, regions │
//!   │ starts the child, and again when it dies  │        │ ends with its supervisor │
//!   └───────────────────────────────────────────┘        └──────────────────────────┘
//! ```

mod interface_changes;
mod upgrade;

use crate::descriptor_limit;
use crate::executable_check::StackLayout;
use crate::failure::Failure;
use crate::served_stack::{POLL_INTERVAL, open_shards};
use crate::{log, signals};
use clap::{Args, ValueEnum};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use ginnel::broker::{
    AfterDeath, ChildLink, ChildStart, NotServing, RunningShards, SavedState, UpgradeShards,
    await_permission, await_shards, link_pair, receive_start, send_start, serve_broker,
};
use ginnel::config::RunConfig;
use ginnel::inspect::restore_routes;
use ginnel::run_dir::restarts;
use ginnel::{Config, KeptTaps, PublishedStack, STATE_FORMAT, StateConfig, StateFormat, StopFlag, open_taps};
use interface_changes::LastInterfaces;
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::set_name;
use std::ffi::CStr;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;
pub use upgrade::UPGRADE_TIMEOUT;
use upgrade::Upgrade;

/// Longest time for a child to open its devices.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest time for a child to close its connections.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// A child that lived for less time is started again only after a pause: [`FIRST_PAUSE`], doubled each time
/// up to [`LONGEST_PAUSE`].
const SHORT_LIFE: Duration = Duration::from_millis(500);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Name of the process of the shards, as tools show it.
const PROCESS_NAME: &CStr = c"ginnel";

/// Options for the death of the process of the shards.
#[derive(Clone, Debug, Default, Args)]
pub struct DeathOptions {
    /// Action if the process that runs the stack's shards (the threads that receive and send) dies. Default:
    /// restart.
    #[arg(long, value_name = "ACTION", value_enum)]
    pub on_stack_death: Option<OnStackDeath>,

    /// Set in the process of the shards: the directory of the stack.
    #[arg(long, hide = true, value_name = "DIRECTORY")]
    pub shards_of: Option<PathBuf>,

    /// Only check the other options and the configuration, and print the version.
    #[arg(long, hide = true)]
    pub check_shards: bool,
}

/// Action if the process of the shards dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnStackDeath {
    /// Start the shards again. Connections are reset; listeners and UDP sockets serve again.
    Restart,
    /// End the programs on the stack with SIGTERM, after five seconds with SIGKILL.
    Kill,
    /// Leave the programs running; their calls fail. The shards then run in the process of this command, and
    /// not in a process of their own.
    Fail,
}

impl DeathOptions {
    /// Returns the action, [`OnStackDeath::Restart`] unless another one is given.
    pub fn action(&self) -> OnStackDeath {
        self.on_stack_death.unwrap_or(OnStackDeath::Restart)
    }
}

/// The child that runs the shards.
#[derive(Debug)]
pub struct ShardProcess {
    /// The child that runs now.
    child: Mutex<Child>,
    /// The executable of this child and of the next one.
    executable: Mutex<Arc<Executable>>,
    /// The directory of the stack.
    directory: PathBuf,
    taps: Mutex<KeptTaps>,
    interfaces: Mutex<LastInterfaces>,
    /// The layout that the shards of an upgrade must have, too.
    layout: StackLayout,
    /// Locked during an upgrade.
    upgrading: Mutex<()>,
    /// The upgrade for which the child is being ended.
    upgrade: Mutex<Option<Upgrade>>,
    /// Locked while the state of the shards passes from one child to the next.
    exchange: Mutex<()>,
    /// Set if the end of the child is not that of a stack that dies: the programs are not ended.
    is_end_wanted: AtomicBool,
    is_stopping: AtomicBool,
    /// How often the shards were started without the state of those before.
    restarts: AtomicU64,
    /// Why the stack has ended.
    end: Mutex<Option<String>>,
}

/// A child that does not run the shards.
struct NotStarted {
    failure: Failure,
    /// True if its shards may have had turns, so that the saved state is out of date.
    has_used_state: bool,
}

/// An executable that runs shards.
#[derive(Debug)]
struct Executable {
    /// Its path may name another file by now, or none.
    file: File,
    /// Format of the states that it saves and restores; `None` if it does neither.
    state_format: Option<StateFormat>,
}

impl ShardProcess {
    /// Starts the child for the stack with this directory. Returns the child, its connection, and what the
    /// broker calls for a restart and for an upgrade.
    pub fn start(
        config: &Config,
        directory: &Path,
        action: OnStackDeath,
    ) -> Result<StartedShards<impl FnMut() -> AfterDeath + Send + 'static>, Failure> {
        let taps = open_taps(config)?;
        let executable = File::open("/proc/self/exe")
            .map_err(|e| Failure::running(format!("executable of this process: {e}")))?;
        let (mut child, link) = spawn(&executable, directory, &taps, None)?;
        let link = ChildLink::open(link, None, START_TIMEOUT)
            .map_err(|failed| end_failed_child(&mut child, failed.error))?;
        let executable = Executable { file: executable, state_format: Some(STATE_FORMAT) };
        let layout = StackLayout::of(config);
        let interfaces = LastInterfaces::read(config);
        let process =
            Arc::new(Self::new(child, executable, directory.to_owned(), (taps, interfaces), layout));
        let restarting = process.clone();
        let mut history = History { started: Instant::now(), pause: FIRST_PAUSE };
        let upgrading = process.clone();
        Ok(StartedShards {
            process,
            link,
            restart: move || restarting.restart(action, &mut history),
            upgrade: Arc::new(move |executable, policy, hand_over| {
                upgrading.upgrade(executable, policy, hand_over)
            }),
        })
    }

    fn new(
        child: Child,
        executable: Executable,
        directory: PathBuf,
        (taps, interfaces): (KeptTaps, LastInterfaces),
        layout: StackLayout,
    ) -> Self {
        Self {
            child: Mutex::new(child),
            executable: Mutex::new(Arc::new(executable)),
            directory,
            taps: Mutex::new(taps),
            interfaces: Mutex::new(interfaces),
            layout,
            upgrading: Mutex::default(),
            upgrade: Mutex::default(),
            exchange: Mutex::default(),
            is_end_wanted: AtomicBool::new(false),
            is_stopping: AtomicBool::new(false),
            restarts: AtomicU64::new(0),
            end: Mutex::default(),
        }
    }

    fn executable(&self) -> Arc<Executable> {
        lock(&self.executable).clone()
    }

    fn child(&self) -> MutexGuard<'_, Child> {
        lock(&self.child)
    }

    /// Returns the id of the last child, which may have ended; `None` while a thread waits for its end or
    /// creates the next one.
    pub fn child_id(&self) -> Option<Pid> {
        self.child.try_lock().ok().map(|child| Pid::from_child(&child))
    }

    fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    /// Returns why the stack has ended; `None` as long as it serves.
    pub fn end(&self) -> Option<String> {
        lock(&self.end).clone()
    }

    /// Records that shards run which do not have the state of those before.
    fn count_restart(&self) {
        let count = self.restarts.fetch_add(1, Ordering::Relaxed) + 1;
        if let Err(error) = restarts::record(&self.directory, count) {
            tracing::warn!("the number of restarts was not written: {error}");
        }
        self.record_failed(false);
    }

    /// Records whether the shards could not be started again, for commands that read it.
    fn record_failed(&self, failed: bool) {
        if let Err(error) = restarts::record_failed(&self.directory, failed) {
            tracing::warn!("the state of the shards was not written: {error}");
        }
    }

    fn set_end(&self, cause: String) {
        *lock(&self.end) = Some(cause);
    }

    /// Starts the next child after the death of this one, unless `action` ends the programs.
    fn restart(&self, action: OnStackDeath, history: &mut History) -> AfterDeath {
        // The programs are not ended because of an upgrade that fails.
        let mut has_upgraded = false;
        loop {
            let status = self.child().wait();
            if self.is_stopping() {
                return AfterDeath::Ended;
            }
            // Locked until the new child runs, so that no other upgrade kills it.
            let mut pending = lock(&self.upgrade);
            has_upgraded |= self.is_end_wanted.swap(false, Ordering::AcqRel);
            if let Some(upgrade) = pending.take() {
                has_upgraded = true;
                if let Some(link) = self.start_upgraded(upgrade) {
                    history.started = Instant::now();
                    return AfterDeath::Restarted(link);
                }
            }
            drop(pending);
            let cause = status.map_or_else(|error| error.to_string(), describe);
            if action == OnStackDeath::Kill && !has_upgraded {
                tracing::error!(
                    "the process of the shards has ended ({cause}): the programs are ended (--on-stack-death=kill)"
                );
                self.set_end(cause);
                return AfterDeath::EndPrograms;
            }
            history.wait(|| self.is_stopping());
            let started = Instant::now();
            let executable = self.executable();
            let next = self.start_next(&executable.file, None, START_TIMEOUT);
            match next {
                Ok(link) => {
                    let took = started.elapsed().as_millis();
                    self.count_restart();
                    tracing::warn!(
                        "the process of the shards has ended ({cause}) and was started again in {took} ms"
                    );
                    return AfterDeath::Restarted(link);
                }
                Err(NotStarted { failure, .. }) => {
                    if !self.is_stopping() {
                        self.record_failed(true);
                        tracing::error!(
                            "the process of the shards could not be started again ({failure}); the next attempt follows"
                        );
                    }
                    // A child that hangs must not keep its devices, nor be waited for.
                    let _ = self.child().kill();
                }
            }
        }
    }

    /// Creates the next child, and waits until it runs the shards, which continue with `state`.
    ///
    /// # Errors
    /// The stack is being stopped, the child cannot be created, or it does not run the shards within
    /// `timeout`. In the last case it may still exist.
    fn start_next(
        &self,
        executable: &File,
        state: Option<&SavedState>,
        timeout: Duration,
    ) -> Result<ChildLink, NotStarted> {
        let not_created = |failure| NotStarted { failure, has_used_state: false };
        let link = {
            // Locked until the new child is stored, so that `run` either prevents it or ends it.
            let mut child = self.child();
            if self.is_stopping() {
                return Err(not_created(Failure::running("the stack is being stopped")));
            }
            let mut taps = lock(&self.taps);
            reopen_deleted_taps(&mut taps).map_err(not_created)?;
            let (next, link) = spawn(executable, &self.directory, &taps, state).map_err(not_created)?;
            *child = next;
            link
        };
        let opened =
            ChildLink::open(link, state, timeout).map_err(|NotServing { error, has_used_state }| {
                let failure = match error {
                    ginnel::Error::StackGone => Failure::running("it has ended"),
                    error => Failure::from(error),
                };
                NotStarted { failure, has_used_state }
            })?;
        // The shards have opened and configured the interfaces.
        lock(&self.interfaces).update().iter().for_each(|change| tracing::warn!("{change}"));
        Ok(opened)
    }

    /// Kills the child and waits for its end, so that it has no devices any more.
    fn end_child(&self) {
        let mut child = self.child();
        // Both fail only if it has ended and was waited for.
        let _ = child.kill();
        let _ = child.wait();
    }

    /// Waits until `stop` returns true. Then ends the child, which closes its connections, and waits for it;
    /// kills it after [`STOP_TIMEOUT`].
    ///
    /// # Errors
    /// The stack has ended by itself.
    pub fn run(&self, stop: impl Fn() -> bool) -> Result<(), Failure> {
        while !stop() && self.end().is_none() {
            std::thread::sleep(POLL_INTERVAL);
        }
        if let Some(cause) = self.end() {
            return Err(Failure::no_stack(format!("the stack has ended: {cause}")));
        }
        let until = Instant::now() + STOP_TIMEOUT;
        // Only a child can close the connections, and during an exchange there may be none.
        let no_exchange = loop {
            match self.exchange.try_lock() {
                Err(TryLockError::WouldBlock) if Instant::now() < until => {}
                Err(TryLockError::WouldBlock) => break None,
                Ok(no_exchange) => break Some(no_exchange),
                Err(TryLockError::Poisoned(poisoned)) => break Some(poisoned.into_inner()),
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        self.is_stopping.store(true, Ordering::Release);
        // From now on no exchange begins.
        drop(no_exchange);
        let until = Instant::now() + STOP_TIMEOUT;
        if !terminate(&mut self.child()) {
            return Ok(());
        }
        while Instant::now() < until {
            if !matches!(self.child().try_wait(), Ok(None)) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = self.child().kill();
        Ok(())
    }
}

/// The process of the shards, and what the broker needs to supervise it.
pub struct StartedShards<R> {
    /// The process.
    pub process: Arc<ShardProcess>,
    /// The connection to the child.
    pub link: ChildLink,
    /// Starts the next child when one has died.
    pub restart: R,
    /// Exchanges the executable of the child.
    pub upgrade: Arc<UpgradeShards>,
}

/// Ends a child that does not run the shards because of `error`. Returns its exit code if it has failed by
/// itself and so has reported why, otherwise `error`.
fn end_failed_child(child: &mut Child, error: ginnel::Error) -> Failure {
    // The child may hang. The exit code of a child that is exiting already stays as it is.
    let _ = child.kill();
    match child.wait().ok().and_then(|status| status.code()) {
        Some(code @ 1..) => Failure::program(u8::try_from(code).unwrap_or(1)),
        _ => Failure::from(error),
    }
}

/// Sends SIGTERM to a child. Returns false if it has ended: its id may then be that of another process.
fn terminate(child: &mut Child) -> bool {
    let is_running = matches!(child.try_wait(), Ok(None));
    if is_running {
        // A child that ends now keeps its id until it is waited for.
        let _ = kill_process(Pid::from_child(child), Signal::TERM);
    }
    is_running
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// When the child was started, and the pause before the next start.
#[derive(Debug)]
struct History {
    started: Instant,
    pause: Duration,
}

impl History {
    /// Waits before the next start if the child lived for less than [`SHORT_LIFE`]; not any longer once
    /// `is_stopping` returns true. Records the start.
    fn wait(&mut self, is_stopping: impl Fn() -> bool) {
        if self.started.elapsed() < SHORT_LIFE {
            let until = Instant::now() + self.pause;
            while Instant::now() < until && !is_stopping() {
                std::thread::sleep(POLL_INTERVAL.min(self.pause));
            }
            self.pause = (2 * self.pause).min(LONGEST_PAUSE);
        } else {
            self.pause = FIRST_PAUSE;
        }
        self.started = Instant::now();
    }
}

/// Describes the end of a process.
pub fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "unknown cause".into(),
    }
}

/// Opens TAP devices whose interfaces were deleted again, as the start of a stack does.
fn reopen_deleted_taps(taps: &mut KeptTaps) -> Result<(), Failure> {
    for (device, tap) in taps {
        match tap.reopen_if_deleted() {
            Ok(false) => {}
            Ok(true) => tracing::warn!("TAP interface {} was deleted, and is opened again", tap.name),
            Err(error) => return Err(Failure::running(format!("device {device}: {error}"))),
        }
    }
    Ok(())
}

/// Starts a child with the command line of this process and `--shards-of`. Returns the child, and the
/// supervisor's end of the connection to it.
/// Forking alone is not possible: this process has threads.
fn spawn(
    executable: &File,
    directory: &Path,
    taps: &KeptTaps,
    state: Option<&SavedState>,
) -> Result<(Child, OwnedFd), Failure> {
    let failed = |e| Failure::running(format!("process of the shards: {e}"));
    let (link, child_end) = link_pair()?;
    send_start(&link, taps, state)?;
    if let Err(error) = StateConfig::forget(directory) {
        tracing::warn!("what saved states depend on was not removed: {error}");
    }
    let mut command = same_command(executable, |command| _ = command.arg("--shards-of").arg(directory));
    // Signals of the terminal are for the supervisor and its programs.
    command.process_group(0).stdin(Stdio::from(child_end));
    Ok((command.spawn().map_err(failed)?, link))
}

/// Returns a command that runs an executable with the command line of this process and further options.
pub fn same_command(executable: &File, add_options: impl FnOnce(&mut Command)) -> Command {
    let mut arguments = std::env::args_os();
    // By its descriptor: a package may have replaced the file since this process was started.
    let mut command = Command::new(format!("/proc/self/fd/{}", executable.as_raw_fd()));
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    // Options precede the program of `ginnel run`.
    command.args(arguments.next());
    add_options(&mut command);
    command.args(arguments);
    command
}

/// Writes to the log that the child cannot run the shards.
pub fn log_start_failure(directory: &Path, failure: Failure) -> Failure {
    log::open(directory, &RunConfig::default());
    log::record_last_failure("the shards cannot be started", failure)
}

/// Runs the shards of the stack with this directory, in the child. Standard input is the connection to the
/// supervisor, whose hang-up ends this process. With `logs_to_file`, standard output and standard error go to
/// the stack's log once the shards are open.
pub fn run_shards(mut config: Config, directory: &Path, logs_to_file: bool) -> Result<(), Failure> {
    // The kernel has named this process after the number of a descriptor.
    let _ = set_name(PROCESS_NAME);
    signals::ignore_hangup()?;
    let stop = signals::stop_on_signal("the stack")?;
    let failed = |e: rustix::io::Errno| Failure::running(format!("connection to the supervisor: {e}"));
    let link = rustix::io::fcntl_dupfd_cloexec(std::io::stdin().as_fd(), 3).map_err(failed)?;
    let published = PublishedStack::join(directory, &config.run)?;
    log::open(directory, &config.run);
    match restore_routes(directory, &mut config) {
        Ok(refused) => refused.iter().for_each(|route| tracing::warn!("a route was not restored: {route}")),
        Err(e) => tracing::warn!("the routes before the restart were not restored: {e}"),
    }
    serve_shards(config, (published, directory), link, &stop, logs_to_file)
        .map_err(|failure| log::record_last_failure("the stack was not started, or stops", failure))
}

fn serve_shards(
    config: Config,
    (published, directory): (Arc<PublishedStack>, &Path),
    link: OwnedFd,
    stop: &StopFlag,
    logs_to_file: bool,
) -> Result<(), Failure> {
    descriptor_limit::raise();
    let ChildStart { taps, state } = receive_start(&link)?;
    let is_restored = state.is_some();
    let state_config = StateConfig::of(&config);
    let (mut shards, commanders) = open_shards(config, published, taps, state)?;
    if let Err(error) = state_config.record(directory) {
        tracing::warn!("what saved states depend on was not written: {error}");
    }
    if logs_to_file {
        log::redirect_output()?;
    }
    let link = Arc::new(link);
    if is_restored {
        let link = link.clone();
        shards = shards.before_first_turn(move || {
            if !await_permission(&link) {
                // The supervisor is gone, or has given up.
                std::process::exit(0);
            }
        });
    }
    let served = std::thread::Builder::new().name("broker-link".into()).spawn(move || {
        if is_restored && !await_shards(&commanders) {
            // The main thread says why, and ends the process.
            std::thread::sleep(START_TIMEOUT);
            std::process::exit(1);
        }
        serve_broker(&link, &commanders, &mut RunningShards::new(commanders.clone()));
        log::write_omitted();
        // The process ends at once, so that programs see that the stack is gone.
        std::process::exit(0);
    });
    served.map_err(|e| Failure::running(format!("thread: {e}")))?;
    shards.run(stop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(program: &str, arguments: &[&str]) -> Child {
        Command::new(program).args(arguments).stdin(Stdio::null()).spawn().unwrap()
    }

    #[test]
    fn hanging_child_is_killed_after_a_failed_start() {
        let mut child = start("sleep", &["60"]);
        let began = Instant::now();
        let failure = end_failed_child(&mut child, ginnel::Error::application("it hangs"));
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
        assert!(failure.to_string().contains("it hangs"), "{failure}");
    }

    #[test]
    fn failed_child_keeps_its_exit_code() {
        for _ in 0..20 {
            let (link, child_end) = link_pair().unwrap();
            let mut command = Command::new("sh");
            command.args(["-c", "exit 3"]).stdin(Stdio::from(child_end));
            let mut child = command.spawn().unwrap();
            drop(command);
            let failed = ChildLink::open(link, None, Duration::from_secs(30)).unwrap_err();
            let failure = end_failed_child(&mut child, failed.error);
            assert!(failure.is_silent(), "{failure}");
            assert_eq!(failure.exit_code(), std::process::ExitCode::from(3));
        }
    }

    #[test]
    fn ended_child_is_not_signalled() {
        let mut child = start("sleep", &["60"]);
        assert!(terminate(&mut child));
        assert_eq!(child.wait().unwrap().signal(), Some(Signal::TERM.as_raw()));
        assert!(!terminate(&mut child));
    }

    #[test]
    fn no_child_is_started_while_the_stack_stops() {
        let child = start("true", &[]);
        let id = Pid::from_child(&child);
        let executable = Executable { file: File::open("/bin/true").unwrap(), state_format: None };
        let process = Arc::new(ShardProcess::new(
            child,
            executable,
            "/nonexistent".into(),
            (Vec::new(), LastInterfaces::read(&Config::default())),
            StackLayout::of(&Config::default()),
        ));
        let restarting = process.clone();
        let restart = std::thread::spawn(move || {
            // The child has a short life however long the test takes to reap it: no time has passed.
            let started = Instant::now() + Duration::from_secs(600);
            let mut history = History { started, pause: Duration::from_secs(60) };
            restarting.restart(OnStackDeath::Restart, &mut history)
        });
        // Once the child is reaped, the thread waits before the next start.
        while Path::new(&format!("/proc/{}", id.as_raw_pid())).exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(100));
        process.run(|| true).unwrap();
        assert!(matches!(restart.join().unwrap(), AfterDeath::Ended));
        assert_eq!(process.child_id(), Some(id), "another child was started");
    }
}
