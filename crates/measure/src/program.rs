//! Unmodified programs as servers: on the kernel, on a stack of their own (`ginnel run`), or several on one
//! stack (`ginnel up`, `ginnel run --stack`).

use crate::MeasureError;
use crate::cpu_account::{Participants, descendants};
use crate::machine::pin;
use crate::testbed::Testbed;
use rustix::process::{Pid, Signal, kill_process};
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long a program may take to end after SIGTERM.
const TERMINATION_TIMEOUT: Duration = Duration::from_secs(5);
/// Time between two checks whether a program has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// How long a shared stack may take to become ready.
const READY_TIMEOUT: Duration = Duration::from_secs(10);
/// The name of the stack that several programs share.
const SHARED_STACK_NAME: &str = "measured";
/// Text between an error and the quoted output. A caller that finds it does not quote the output again.
pub const OUTPUT_INTRODUCTION: &str = "; it output: ";
/// Number of output lines that are quoted when a program fails.
const OUTPUT_LINES_KEPT: usize = 5;

/// Returns the path of the `ginnel` command, which is in the directory of this program.
///
/// # Errors
/// If the command or its library is missing.
pub fn ginnel_path() -> Result<PathBuf, MeasureError> {
    let own = std::env::current_exe()?;
    // The library may be elsewhere; the environment variable tells `ginnel run` where.
    let elsewhere = std::env::var_os("GINNEL_LIBRARY").is_some();
    for (file, package, needed) in
        [("ginnel", "ginnel-cli", true), ("libginnel.so", "ginnel-posix", !elsewhere)]
    {
        let path = own.with_file_name(file);
        if needed && !path.exists() {
            let built = "cargo build --release -p";
            return Err(MeasureError::Skipped(format!("{} is missing: {built} {package}", path.display())));
        }
    }
    Ok(own.with_file_name("ginnel"))
}

/// The network stack of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkStack {
    /// The kernel's.
    Kernel,
    /// Ginnel's.
    Ginnel,
}

/// Running server programs. Dropping the value terminates them.
#[derive(Debug)]
pub struct RunningPrograms {
    processes: Vec<ChildProcess>,
    log: PathBuf,
}

/// A started process.
#[derive(Debug)]
struct ChildProcess {
    child: Child,
    /// True if the process is the stack.
    is_stack: bool,
}

impl RunningPrograms {
    /// Starts programs on the server's core, in this order. Several programs on Ginnel share a stack.
    ///
    /// # Errors
    /// If a program cannot be started.
    pub fn start(
        programs: &[Vec<OsString>],
        stack: NetworkStack,
        testbed: &Testbed,
    ) -> Result<Self, MeasureError> {
        let log = testbed.folder.join("output");
        File::create(&log)?;
        let mut running = Self { processes: Vec::new(), log };
        let with_stack = |arguments: &[&str], program: &[OsString]| -> Result<Vec<OsString>, MeasureError> {
            let mut line: Vec<OsString> = vec![ginnel_path()?.into()];
            line.extend(arguments.iter().map(Into::into));
            line.push("--".into());
            line.extend(program.iter().cloned());
            Ok(line)
        };
        match (stack, programs) {
            (NetworkStack::Kernel, _) => {
                for program in programs {
                    running.add(program, false, testbed)?;
                }
            }
            (NetworkStack::Ginnel, [program]) => {
                let options = testbed.stack_options()?;
                let arguments: Vec<&str> =
                    ["run"].into_iter().chain(options.iter().map(String::as_str)).collect();
                running.add(&with_stack(&arguments, program)?, true, testbed)?;
            }
            (NetworkStack::Ginnel, _) => {
                let mut line: Vec<OsString> =
                    vec![ginnel_path()?.into(), "up".into(), SHARED_STACK_NAME.into()];
                line.extend(testbed.stack_options()?.into_iter().map(Into::into));
                running.add(&line, true, testbed)?;
                running.wait_for_stack(testbed)?;
                for program in programs {
                    // `ginnel run --stack` replaces itself by the program, so this process is not the stack.
                    let line = with_stack(&["run", "--stack", SHARED_STACK_NAME], program)?;
                    running.add(&line, false, testbed)?;
                }
            }
        }
        Ok(running)
    }

    fn add(&mut self, line: &[OsString], is_stack: bool, testbed: &Testbed) -> Result<(), MeasureError> {
        let Some((program, arguments)) = line.split_first() else {
            return Err(MeasureError::failed("no program was given"));
        };
        let output = File::options().append(true).open(&self.log)?;
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        // Stacks are found by their run directories, so a private one is used.
        command.env("GINNEL_RUN_DIR", testbed.folder.join("stacks"));
        if let Some(group) = testbed.process_group {
            command.process_group(group.as_raw_pid());
        }
        let cpu = testbed.cpus.server;
        let spawn = || -> Result<Child, MeasureError> {
            // A child inherits the affinity of the thread that starts it.
            pin(cpu)?;
            command.spawn().map_err(|e| MeasureError::Failed(format!("{}: {e}", program.display())))
        };
        let child = std::thread::scope(|scope| {
            scope.spawn(spawn).join().expect("the spawning thread does not panic")
        })?;
        self.processes.push(ChildProcess { child, is_stack });
        Ok(())
    }

    fn wait_for_stack(&mut self, testbed: &Testbed) -> Result<(), MeasureError> {
        let deadline = Instant::now() + READY_TIMEOUT;
        loop {
            self.check()?;
            let mut stat = Command::new(ginnel_path()?);
            stat.args(["stat", SHARED_STACK_NAME]).env("GINNEL_RUN_DIR", testbed.folder.join("stacks"));
            if stat.output()?.status.success() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(MeasureError::Failed(format!(
                    "the stack is not ready within {} s{}",
                    READY_TIMEOUT.as_secs(),
                    self.last_output()
                )));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Adds the threads of all programs to the participants.
    pub fn add_to(&self, participants: &mut Participants) {
        for process in &self.processes {
            let pid = process.child.id();
            participants.add_process(if process.is_stack { "stack" } else { "program" }, pid);
            participants.add_descendants("program", pid);
        }
    }

    /// Returns an error if a program has ended.
    pub fn check(&mut self) -> Result<(), MeasureError> {
        for process in &mut self.processes {
            if let Some(status) = process.child.try_wait()? {
                return Err(MeasureError::Failed(format!(
                    "the program has ended: {}{}",
                    display_status(status),
                    self.last_output()
                )));
            }
        }
        Ok(())
    }

    /// Returns the last lines of the programs' output, with an introduction, or an empty string.
    pub fn last_output(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        let last = &lines[lines.len().saturating_sub(OUTPUT_LINES_KEPT)..];
        if last.is_empty() { String::new() } else { format!("{OUTPUT_INTRODUCTION}{}", last.join(" / ")) }
    }
}

fn display_status(status: ExitStatus) -> String {
    status.code().map_or_else(|| status.to_string(), |code| format!("exit status {code}"))
}

impl Drop for RunningPrograms {
    fn drop(&mut self) {
        // Terminates in reverse order, because later programs use the stack that the first one provides.
        for process in self.processes.iter_mut().rev() {
            terminate(&mut process.child);
        }
    }
}

/// Terminates a program. If it ignores SIGTERM, it is killed with all descendants that it had before.
fn terminate(child: &mut Child) {
    let children = descendants(child.id());
    send_signal(child.id(), Signal::TERM);
    let deadline = Instant::now() + TERMINATION_TIMEOUT;
    while Instant::now() < deadline {
        if !matches!(child.try_wait(), Ok(None)) {
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    if matches!(child.try_wait(), Ok(None)) {
        let _ = child.kill();
        let _ = child.wait();
        // Their parent has ended. Their process IDs are not reused within this short time, because the kernel
        // hands out all others first.
        for pid in children.into_iter().filter(|pid| Path::new(&format!("/proc/{pid}")).exists()) {
            send_signal(pid, Signal::KILL);
        }
    }
}

fn send_signal(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
        // The process may have ended by itself.
        let _ = kill_process(pid, signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CoreLayout;
    use crate::machine::Cpus;
    use crate::testbed::Medium;

    fn testbed(name: &str) -> Testbed {
        let folder = std::env::temp_dir().join(format!("ginnel-measure-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let cpus = Cpus::choose().unwrap_or(Cpus { server: 0, client: 0 });
        let address = "10.77.0.1".parse().unwrap();
        Testbed {
            medium: Medium::Veth,
            cpus,
            layout: CoreLayout::Charged,
            polls: false,
            address,
            folder,
            process_group: None,
        }
    }

    fn start(name: &str, script: &str) -> (RunningPrograms, Testbed) {
        let testbed = testbed(name);
        let line = ["sh", "-c", script].map(OsString::from).to_vec();
        (RunningPrograms::start(&[line], NetworkStack::Kernel, &testbed).unwrap(), testbed)
    }

    #[test]
    fn exited_program_is_reported_with_its_output() {
        let (mut running, testbed) = start("ends", "echo no such file >&2; exit 3");
        let deadline = Instant::now() + Duration::from_secs(20);
        let failure = loop {
            if let Err(failure) = running.check() {
                break failure.to_string();
            }
            assert!(Instant::now() < deadline);
            std::thread::sleep(POLL_INTERVAL);
        };
        assert!(failure.contains("exit status 3") && failure.contains("no such file"), "{failure}");
        std::fs::remove_dir_all(testbed.folder).unwrap();
    }

    #[test]
    fn dropping_terminates_the_program_and_its_children() {
        let (running, testbed) = start("children", "trap '' TERM; sleep 600 & wait; wait");
        let deadline = Instant::now() + Duration::from_secs(20);
        let pid = running.processes[0].child.id();
        let children = loop {
            let children = descendants(pid);
            if !children.is_empty() {
                break children;
            }
            assert!(Instant::now() < deadline);
            std::thread::sleep(POLL_INTERVAL);
        };
        drop(running);
        // A process that has not been waited for is a zombie until init reaps it.
        let lives = |pid: &u32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            !stat.is_empty() && !stat.contains(") Z ")
        };
        let deadline = Instant::now() + Duration::from_secs(20);
        while children.iter().any(lives) {
            assert!(Instant::now() < deadline, "{children:?}");
            std::thread::sleep(POLL_INTERVAL);
        }
        assert!(!lives(&pid));
        std::fs::remove_dir_all(testbed.folder).unwrap();
    }
}
