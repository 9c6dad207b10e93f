//! A server and a generator as users run them, `ginnel echo` or `ginnel iot` and `ginnel load`: two processes
//! over shared memory, in a control group that counts their memory.

use crate::harness::MeasureError;
use crate::harness::machine::Cpus;
use crate::harness::memory_group::{GroupMemory, MemoryGroup};
use ginnel_measure::program::ginnel_path;
use ginnel_measure::watched_group::WatchedGroup;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Address of the server; the generator's addresses are in the same network.
pub const SERVER_ADDRESS: &str = "10.0.0.1";
/// First address of the generator.
const GENERATOR_ADDRESS: &str = "10.1.0.1";
/// Connections of each source address. An address has 64,512 ports here, or 32,768 on the light TCP.
const CONNECTIONS_OF_ADDRESS: u32 = 32_000;
/// Time between two samples of the processes.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);
/// How long the server may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a process may take to end after SIGTERM.
const END_TIMEOUT: Duration = Duration::from_secs(60);
/// Lines of output that are quoted if a process fails.
const QUOTED_LINES: usize = 3;

/// Stage of a generator that has ended; the server still runs.
pub const ENDED: &str = "ended";

/// Programs and options of a run.
#[derive(Clone, Debug)]
pub struct ProgramPair {
    /// Command of the server with its options, without those of its stack.
    pub server: Vec<String>,
    /// Kind of load and its options, without those of the stack and of the connections.
    pub load: Vec<String>,
    /// Connections.
    pub connections: u32,
    /// Limit on connections of both stacks.
    pub connections_max: u32,
    /// Further keys of the table `[shard]` of both stacks.
    pub shard_keys: String,
    /// Further keys of the table `[tcp]` of the server.
    pub server_tcp_keys: String,
}

/// State of a run at one time.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Time since the start of the generator.
    pub at: Duration,
    /// Stage of the generator, as in its line of progress: `set-up`, `waiting`, `sending`, `draining` or
    /// `closing`; [`ENDED`] in the last sample.
    pub stage: String,
    /// Memory of both processes and their children.
    pub memory: GroupMemory,
    /// CPU time of the server's process.
    pub server: Duration,
    /// CPU time of the server's children.
    pub children: Duration,
    /// CPU time of the generator.
    pub generator: Duration,
}

/// Result of a run.
#[derive(Clone, Debug)]
pub struct PairReport {
    /// The generator's report.
    pub report: Value,
    /// Samples in the order of their times.
    pub samples: Vec<Sample>,
    /// Sentences of the generator about goals that were not reached.
    pub missed: Vec<String>,
}

impl PairReport {
    /// Returns the first and the last sample of a stage.
    pub fn stage(&self, stage: &str) -> Option<(&Sample, &Sample)> {
        let mut samples = self.samples.iter().filter(|sample| sample.stage == stage);
        let first = samples.next()?;
        Some((first, samples.next_back().unwrap_or(first)))
    }

    /// Returns a number of the report, by the names that lead to it.
    pub fn number(&self, path: &[&str]) -> f64 {
        path.iter().fold(&self.report, |value, name| &value[*name]).as_f64().unwrap_or(f64::NAN)
    }
}

/// A process that is ended when the value is dropped.
pub struct Process {
    child: Child,
}

impl Process {
    /// Starts a process.
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        Ok(Self { child: command.spawn()? })
    }

    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the process has ended, and returns its status; `None` if it still runs after `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> io::Result<Option<ExitStatus>> {
        let deadline = Instant::now() + timeout;
        loop {
            let status = self.child.try_wait()?;
            if status.is_some() || Instant::now() >= deadline {
                return Ok(status);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(pid) = Pid::from_raw(self.child.id().cast_signed()) {
            _ = kill_process(pid, Signal::TERM);
        }
        _ = self.wait(END_TIMEOUT);
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

impl ProgramPair {
    /// Runs both programs until the generator ends. `on_sample` is called with each sample and the directory
    /// of the run, whose subdirectory `stacks` is the run directory of the stacks (`GINNEL_RUN_DIR`).
    ///
    /// # Errors
    /// A program could not be started, the server ended before the generator, or the generator has no report.
    pub fn run(&self, mut on_sample: impl FnMut(&Sample, &Path)) -> Result<PairReport, MeasureError> {
        let cpus = Cpus::choose()?;
        let folder = tempfile::tempdir()?;
        let watched = WatchedGroup::start(&ginnel_path()?, folder.path())?;
        let group = MemoryGroup::create("pair")?;
        let mut server = self.start_server(&folder, &group, &watched, cpus)?;
        let mut generator = self.start_generator(&folder, &group, &watched, cpus)?;
        let started = Instant::now();
        let mut samples = Vec::new();
        let status = loop {
            let ended = generator.child.try_wait()?;
            if let Some(status) = server.child.try_wait()? {
                let log = last_lines(&folder.path().join("server.log"));
                return Err(MeasureError::Failed(format!("the server has ended ({status}): {log}")));
            }
            let log = folder.path().join("generator.log");
            let sample = Sample {
                at: started.elapsed(),
                stage: if ended.is_some() { ENDED.to_owned() } else { stage(&log) },
                memory: group.memory()?,
                server: cpu_time(server.child.id()),
                children: children_time(server.child.id()),
                generator: cpu_time(generator.child.id()),
            };
            on_sample(&sample, folder.path());
            samples.push(sample);
            if let Some(status) = ended {
                break status;
            }
            std::thread::sleep(SAMPLE_INTERVAL);
        };
        let text = fs::read(folder.path().join("report.json"))?;
        let report: Value = serde_json::from_slice(&text).map_err(|e| {
            let log = last_lines(&folder.path().join("generator.log"));
            MeasureError::Failed(format!("the generator has no report ({status}, {e}): {log}"))
        })?;
        let missed = report["missed"].as_array().into_iter().flatten();
        let missed = missed.map(|reason| reason.as_str().unwrap_or_default().to_owned()).collect();
        drop(generator);
        // Before the group, which must be empty when it is removed.
        drop(server);
        Ok(PairReport { report, samples, missed })
    }

    fn start_server(
        &self,
        folder: &TempDir,
        group: &MemoryGroup,
        watched: &WatchedGroup,
        cpus: Cpus,
    ) -> Result<Process, MeasureError> {
        let keys = &self.server_tcp_keys;
        let config = self.write_config(folder, "server", cpus.server, SERVER_ADDRESS, keys)?;
        let mut line = self.server.clone();
        line.extend(["--config".to_owned(), config.to_string_lossy().into_owned()]);
        let mut process = spawn(folder, group, watched, &line, ["server.log", "server.log"])?;
        let deadline = Instant::now() + START_TIMEOUT;
        while !folder.path().join("lan").exists() {
            if process.child.try_wait()?.is_some() || Instant::now() > deadline {
                let log = last_lines(&folder.path().join("server.log"));
                return Err(MeasureError::Failed(format!("the server did not start: {log}")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(process)
    }

    fn start_generator(
        &self,
        folder: &TempDir,
        group: &MemoryGroup,
        watched: &WatchedGroup,
        cpus: Cpus,
    ) -> Result<Process, MeasureError> {
        let config = self.write_config(folder, "client", cpus.client, GENERATOR_ADDRESS, "")?;
        let mut line = vec!["load".to_owned()];
        line.extend(self.load.iter().cloned());
        let sources = self.connections.div_ceil(CONNECTIONS_OF_ADDRESS);
        line.extend(
            [
                "--config",
                &config.to_string_lossy(),
                "--connections",
                &self.connections.to_string(),
                "--source",
                &sources.to_string(),
                "--report-interval",
                "250ms",
                "--json",
                SERVER_ADDRESS,
            ]
            .map(str::to_owned),
        );
        spawn(folder, group, watched, &line, ["report.json", "generator.log"])
    }

    /// Writes the configuration of a stack.
    fn write_config(
        &self,
        folder: &TempDir,
        role: &str,
        cpu: usize,
        address: &str,
        tcp_keys: &str,
    ) -> Result<PathBuf, MeasureError> {
        let path = folder.path().join(format!("{role}.toml"));
        let (max, shard_keys) = (self.connections_max, &self.shard_keys);
        let socket = folder.path().join("lan");
        let text = format!(
            "[run]\nname = \"{role}\"\n\
             [shard]\ncpu = {cpu}\n{shard_keys}\n\
             [tcp]\nconnections_max = {max}\nlocal_port_first = 1024\nlocal_port_last = 65535\n{tcp_keys}\n\
             [[device]]\nname = \"m\"\nkind = \"memif\"\nmemif = \"socket={},role={role}\"\n\
             [[link]]\nname = \"lan\"\ndevice = \"m\"\naddresses = [\"{address}/8\"]\n",
            socket.display()
        );
        fs::write(&path, text)?;
        Ok(path)
    }
}

fn spawn(
    folder: &TempDir,
    group: &MemoryGroup,
    watched: &WatchedGroup,
    words: &[String],
    [output, errors]: [&str; 2],
) -> Result<Process, MeasureError> {
    let mut line: Vec<OsString> = vec![ginnel_path()?.into()];
    line.extend(words.iter().map(Into::into));
    let open = |name: &str| File::options().create(true).append(true).open(folder.path().join(name));
    let mut command = group.command(&line);
    command.stdin(Stdio::null()).stdout(open(output)?).stderr(open(errors)?);
    command.process_group(watched.id().as_raw_pid());
    // Stacks are found by their run directories, so a private one is used.
    command.env("GINNEL_RUN_DIR", folder.path().join("stacks"));
    Process::spawn(&mut command).map_err(|e| MeasureError::Failed(format!("{}: {e}", words.join(" "))))
}

/// Returns the stage in the last line of progress.
fn stage(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let words = text.lines().rev().find_map(|line| line.split_once(" s ").map(|(_, rest)| rest.to_owned()));
    words.and_then(|rest| rest.split_whitespace().next().map(str::to_owned)).unwrap_or_default()
}

fn last_lines(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(QUOTED_LINES)..].join(" / ")
}

/// Returns the CPU time of all threads of a process; zero if it has ended.
pub fn cpu_time(pid: u32) -> Duration {
    // proc(5): the name in parentheses may contain anything; utime and stime are fields 14 and 15, in ticks
    // of 10 ms.
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = text.rsplit_once(") ").map(|(_, rest)| rest).unwrap_or_default();
    let ticks = fields.split(' ').skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum::<u64>();
    Duration::from_millis(10 * ticks)
}

/// Returns the CPU time of all descendants of a process.
fn children_time(pid: u32) -> Duration {
    ginnel_measure::cpu_account::descendants(pid).into_iter().map(cpu_time).sum()
}

/// Returns the counters of the server's stack.
pub fn server_counters(folder: &Path) -> Option<Value> {
    let mut command = Command::new(ginnel_path().ok()?);
    command.args(["stat", "server", "--json", "--all"]).env("GINNEL_RUN_DIR", folder.join("stacks"));
    serde_json::from_slice(&command.output().ok()?.stdout).ok()
}

/// Returns the sum of a counter over all shards.
pub fn counter(values: &Value, name: &str) -> f64 {
    let shards = values["shards"].as_array().into_iter().flatten();
    shards.filter_map(|shard| shard["counters"][name].as_f64()).sum()
}

/// Splits a command line at white space; quotes have no meaning.
pub fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}
