//! The CPU account of a measurement: CPU time of each participant, and whose core was saturated.

use crate::machine::{CpuTimes, Cpus, process_cpu_time};
use crate::{CoreLayout, MeasureError, veth};
use rustix::io::Errno;
use rustix::thread::{CpuSet, Pid, sched_setaffinity};
use std::collections::BTreeMap;
use std::fs;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long the kernel may take to start its NAPI threads.
const NAPI_THREAD_TIMEOUT: Duration = Duration::from_secs(5);
/// The directory of this process's threads.
const OWN_THREADS: &str = "/proc/self/task/";

/// A set of threads that have one role.
#[derive(Clone, Debug)]
enum ThreadSet {
    /// A single thread: its directory below /proc.
    Thread(String),
    /// All threads of a process.
    Process(u32),
    /// All threads of all descendants of a process, without the process itself.
    Descendants(u32),
}

/// The threads that take part in a measurement, by role, and the cores assigned to them.
#[derive(Clone, Debug)]
pub struct Participants {
    parts: Vec<(&'static str, ThreadSet)>,
    cpus: Cpus,
    layout: CoreLayout,
}

impl Participants {
    /// Creates an empty set.
    pub fn new(cpus: Cpus, layout: CoreLayout) -> Self {
        Self { parts: Vec::new(), cpus, layout }
    }

    /// Pins the NAPI threads of the veth pair to the cores that the layout assigns, and adds them. Does
    /// nothing in the layout `Sender`. Both interfaces must already be in use, because the kernel starts the
    /// threads only then.
    ///
    /// # Errors
    /// If an interface has no NAPI thread after `NAPI_THREAD_TIMEOUT`, or a thread cannot be pinned.
    pub fn place_napi_threads(&mut self) -> Result<(), MeasureError> {
        if self.layout == CoreLayout::Sender {
            return Ok(());
        }
        let interfaces = [
            (veth::server(), "server_receives", self.cpus.server),
            (veth::generator(), "generator_receives", self.cpus.client),
        ];
        for (interface, role, cpu) in interfaces {
            let mut one = CpuSet::new();
            one.set(cpu);
            let deadline = Instant::now() + NAPI_THREAD_TIMEOUT;
            let mut placed = Vec::new();
            while placed.is_empty() {
                if Instant::now() > deadline {
                    return Err(MeasureError::Failed(format!(
                        "the kernel has no NAPI thread for {interface}"
                    )));
                }
                for pid in veth::napi_threads(interface) {
                    match sched_setaffinity(Pid::from_raw(pid), &one) {
                        Ok(()) => placed.push(pid),
                        // The thread has ended since it was listed.
                        Err(Errno::SRCH) => {}
                        Err(error) => {
                            let reason =
                                format!("cannot pin the NAPI thread of {interface} to CPU {cpu}: {error}");
                            return Err(MeasureError::Failed(reason));
                        }
                    }
                }
                if placed.is_empty() {
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            for pid in placed {
                self.add_thread(role, format!("/proc/{pid}"));
            }
        }
        Ok(())
    }

    /// Adds the thread `ksoftirqd` of the server's core. It processes softirqs if there are too many to
    /// process on top of the thread that is running. Over loopback it receives for the server.
    pub fn add_softirq_thread(&mut self) {
        let name = format!("ksoftirqd/{}\n", self.cpus.server);
        for pid in all_processes() {
            if fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm == name) {
                self.add_thread("server_receives", format!("/proc/{pid}"));
            }
        }
    }

    /// Adds a thread. `path` is its directory below /proc.
    pub fn add_thread(&mut self, role: &'static str, path: String) {
        self.parts.push((role, ThreadSet::Thread(path)));
    }

    /// Adds a process without its children.
    pub fn add_process(&mut self, role: &'static str, pid: u32) {
        self.parts.push((role, ThreadSet::Process(pid)));
    }

    /// Adds all descendants of a process, without the process itself.
    pub fn add_descendants(&mut self, role: &'static str, pid: u32) {
        self.parts.push((role, ThreadSet::Descendants(pid)));
    }

    /// Returns the CPU time of each role.
    fn times(&self) -> BTreeMap<&'static str, Duration> {
        let mut times = BTreeMap::new();
        for (role, threads) in &self.parts {
            *times.entry(*role).or_default() += match threads {
                ThreadSet::Thread(path) => thread_time(path),
                ThreadSet::Process(pid) => process_time(*pid),
                ThreadSet::Descendants(pid) => {
                    descendants(*pid).into_iter().map(process_time).sum::<Duration>()
                }
            };
        }
        times
    }

    /// Returns the CPU time of the participants that are threads of this process.
    fn own_time(&self) -> Duration {
        let own = self.parts.iter().filter_map(|(_, threads)| match threads {
            ThreadSet::Thread(path) if path.starts_with(OWN_THREADS) => Some(thread_time(path)),
            _ => None,
        });
        own.sum()
    }

    /// Returns the CPU time of the kernel threads that receive: NAPI threads and `ksoftirqd`.
    fn kernel_time(times: &BTreeMap<&'static str, Duration>) -> Duration {
        times.iter().filter(|(role, _)| role.ends_with("_receives")).map(|(_, time)| *time).sum()
    }
}

/// Returns the CPU time of a thread; zero if the thread has ended.
fn thread_time(path: &str) -> Duration {
    let text = fs::read_to_string(format!("{path}/schedstat")).unwrap_or_default();
    Duration::from_nanos(text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0))
}

/// Returns the CPU time of the current threads of a process.
fn process_time(pid: u32) -> Duration {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.map(|thread| thread_time(&thread.path().to_string_lossy())).sum()
}

/// Returns the parent of a process, if the process exists.
fn parent_of(pid: u32) -> Option<u32> {
    // proc(5): the name in parentheses may contain anything; the parent is the second word after it.
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// Returns the IDs of all visible processes.
fn all_processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns all descendants of a process, zombies included, children before grandchildren.
pub fn descendants(pid: u32) -> Vec<u32> {
    let pairs: Vec<(u32, u32)> =
        all_processes().filter_map(|child| Some((child, parent_of(child)?))).collect();
    let mut found = Vec::new();
    let mut generation = vec![pid];
    while !generation.is_empty() {
        let next = pairs.iter().filter(|(_, parent)| generation.contains(parent)).map(|(child, _)| *child);
        generation = next.collect();
        found.extend(&generation);
    }
    found
}

/// Returns the directory below /proc of the calling thread.
pub fn this_thread() -> String {
    format!("{OWN_THREADS}{}", rustix::thread::gettid().as_raw_nonzero())
}

/// A CPU that is busy for at least this share of the time is saturated.
const BUSY: f64 = 0.95;

/// The part whose core limited a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    /// The server, as intended.
    Server,
    /// The generator: the server was not saturated.
    Generator,
    /// Both cores were saturated.
    Both,
    /// Neither core was saturated.
    Neither,
}

impl Bottleneck {
    fn of(server: f64, generator: f64) -> Self {
        match (server >= BUSY, generator >= BUSY) {
            (true, false) => Self::Server,
            (false, true) => Self::Generator,
            (true, true) => Self::Both,
            (false, false) => Self::Neither,
        }
    }

    /// Returns whether the server's core was saturated.
    pub const fn is_server(self) -> bool {
        matches!(self, Self::Server | Self::Both)
    }

    /// Returns whether the core of the generator, or of a client in its place, was saturated.
    pub const fn is_generator(self) -> bool {
        matches!(self, Self::Generator | Self::Both)
    }

    /// Returns the name for reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Server => "server",
            Self::Generator => "generator",
            Self::Both => "both",
            Self::Neither => "neither",
        }
    }
}

/// The roles of the server's side.
const SERVER_ROLES: [&str; 4] = ["server", "stack", "program", "server_receives"];

/// The CPU account of a measurement.
#[derive(Clone, Debug)]
pub struct CpuAccount {
    /// CPU time of each role as a share of the elapsed time. `server_cpu` and `generator_cpu` are the busy
    /// shares of the two cores.
    pub shares: BTreeMap<&'static str, f64>,
    /// The part whose core was saturated.
    pub bottleneck: Bottleneck,
    /// A summary in one line.
    pub line: String,
    /// CPU time of the kernel threads that receive: NAPI threads and `ksoftirqd`.
    pub kernel_time: Duration,
    /// Share of the cores' time in which they executed anything but the participants: other threads, and
    /// interrupts that the kernel accounts separately.
    pub other_programs_share: f64,
    /// Share of the cores' time that the hypervisor gave to others.
    pub stolen_share: f64,
    /// Packets received and sent at the generator's interface; 0 without one.
    pub packets: u64,
}

impl CpuAccount {
    /// Returns the CPU time of the server's side as a share of the elapsed time: the program, its stack, and
    /// the kernel threads that receive for it. It is below 1 if the server waited, or if other programs ran
    /// on its core.
    pub fn server_share(&self) -> f64 {
        SERVER_ROLES.iter().filter_map(|role| self.shares.get(role)).sum()
    }
}

/// The part of a run that an account covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuWindow {
    /// Time from the start of the run to the start of the window.
    pub start: Duration,
    /// Length of the window. It ends earlier if the run does.
    pub length: Duration,
}

/// All counters at one time.
struct CpuCounters {
    at: Instant,
    times: BTreeMap<&'static str, Duration>,
    /// CPU time of the threads of this process that are not servers.
    own: Duration,
    packets: u64,
    cpus: CpuTimes,
}

impl CpuCounters {
    fn read(participants: &Participants) -> Result<Self, MeasureError> {
        Ok(Self {
            times: participants.times(),
            own: own_time(participants),
            packets: veth::packets(veth::generator()),
            cpus: CpuTimes::read()?,
            at: Instant::now(),
        })
    }

    /// Returns the account of the time since `earlier`.
    fn account_since(mut self, earlier: &Self, participants: &Participants) -> CpuAccount {
        let elapsed = (self.at - earlier.at).as_secs_f64();
        let cpus = self.cpus.since(&earlier.cpus);
        let (busy, stolen) = (cpus.busy_shares(), cpus.stolen_shares());
        let kernel_time =
            Participants::kernel_time(&self.times).saturating_sub(Participants::kernel_time(&earlier.times));
        // All threads of this process belong to the generator, except those that are servers. `earlier` has
        // no entry of this role, so the difference is inserted.
        self.times.insert("generator", self.own.saturating_sub(earlier.own));
        let used = |(role, time): (&&'static str, &Duration)| {
            let used = time.saturating_sub(earlier.times.get(role).copied().unwrap_or_default());
            (*role, used.as_secs_f64() / elapsed)
        };
        let mut shares: BTreeMap<_, _> = self.times.iter().map(used).collect();
        let of = |shares: &[f64], cpu: usize| shares.get(cpu).copied().unwrap_or(0.0);
        let [server_cpu, client_cpu] = [participants.cpus.server, participants.cpus.client];
        let (server, generator) = (of(&busy, server_cpu), of(&busy, client_cpu));
        let cores = if server_cpu == client_cpu { vec![server_cpu] } else { vec![server_cpu, client_cpu] };
        let sum = |shares: &[f64]| cores.iter().map(|cpu| of(shares, *cpu)).sum::<f64>();
        let other_programs_share = (sum(&busy) - shares.values().sum::<f64>()).max(0.0) / cores.len() as f64;
        let stolen_share = sum(&stolen) / cores.len() as f64;
        shares.extend([("server_cpu", server), ("generator_cpu", generator)]);
        let bottleneck = Bottleneck::of(server, generator);
        let each: Vec<String> =
            shares.iter().map(|(role, share)| format!("{role} {:.0} %", 100.0 * share)).collect();
        let line = format!(
            "bottleneck: {} ({}; layout {:?})",
            bottleneck.name(),
            each.join(", "),
            participants.layout
        )
        .to_lowercase();
        let packets = self.packets.saturating_sub(earlier.packets);
        CpuAccount { shares, bottleneck, line, kernel_time, other_programs_share, stolen_share, packets }
    }
}

/// Runs `work`, in which threads of this process act as the generator, and returns its result with the CPU
/// account.
///
/// # Errors
/// If the kernel's counters cannot be read.
pub fn measure_cpu<R>(
    participants: &Participants,
    work: impl FnOnce() -> R,
) -> Result<(R, CpuAccount), MeasureError> {
    let before = CpuCounters::read(participants)?;
    let result = work();
    Ok((result, CpuCounters::read(participants)?.account_since(&before, participants)))
}

/// Runs `work` as [`measure_cpu`] does, and returns the CPU account of a part of the run.
///
/// # Errors
/// If the kernel's counters cannot be read.
pub fn measure_cpu_in<R>(
    participants: &Participants,
    window: CpuWindow,
    work: impl FnOnce() -> R,
) -> Result<(R, CpuAccount), MeasureError> {
    let (running, end) = mpsc::channel::<()>();
    // The receiver is notified when `work` has ended, because the sender is dropped then.
    let read_counters = move || -> Result<CpuAccount, MeasureError> {
        let _ = end.recv_timeout(window.start);
        let before = CpuCounters::read(participants)?;
        let _ = end.recv_timeout(window.length);
        Ok(CpuCounters::read(participants)?.account_since(&before, participants))
    };
    std::thread::scope(|scope| {
        let reader = scope.spawn(read_counters);
        let result = work();
        drop(running);
        Ok((result, reader.join().expect("reading the counters does not panic")?))
    })
}

/// Returns the CPU time of this process without that of its threads that are servers.
fn own_time(parts: &Participants) -> Duration {
    process_cpu_time().saturating_sub(parts.own_time())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARTS: Participants =
        Participants { parts: Vec::new(), cpus: Cpus { server: 0, client: 0 }, layout: CoreLayout::One };

    fn spin() {
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(50) {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn bottleneck_is_the_side_with_a_full_core() {
        assert_eq!(Bottleneck::of(0.99, 0.7), Bottleneck::Server);
        assert_eq!(Bottleneck::of(0.7, 0.99), Bottleneck::Generator);
        assert_eq!(Bottleneck::of(0.96, 0.96), Bottleneck::Both);
        assert_eq!(Bottleneck::of(0.5, 0.94), Bottleneck::Neither);
    }

    #[test]
    fn thread_time_is_not_charged_to_the_generator() {
        let mut participants = PARTS;
        participants.add_thread("server", this_thread());
        let (_, account) = measure_cpu(&participants, spin).expect("the kernel's counters are readable");
        assert!(account.shares["server"] > 0.0, "{}", account.line);
        assert!(account.shares["generator"] < account.shares["server"], "{}", account.line);
        assert!(account.line.starts_with("bottleneck: ") && account.line.contains("layout one"));
    }

    #[test]
    fn account_covers_the_window_only() {
        let mut participants = PARTS;
        participants.add_thread("server", this_thread());
        let window = CpuWindow { start: Duration::from_millis(100), length: Duration::from_millis(50) };
        let work = || {
            std::thread::sleep(Duration::from_secs(2));
            spin();
        };
        // This thread sleeps during the whole window.
        let (_, account) = measure_cpu_in(&participants, window, work).unwrap();
        // In the whole run its share is 0.025.
        assert!(account.server_share() < 0.02, "{}", account.line);
        // The run ends long before the window begins.
        let start = Instant::now();
        let window = CpuWindow { start: Duration::from_secs(3600), length: Duration::from_secs(3600) };
        measure_cpu_in(&participants, window, || ()).unwrap();
        assert!(start.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn process_and_children_are_charged_separately() {
        let script = "(while :; do :; done) & wait";
        let mut child = std::process::Command::new("sh").args(["-c", script]).spawn().unwrap();
        let mut participants = PARTS;
        participants.add_process("parent", child.id());
        participants.add_descendants("children", child.id());
        // Even on a busy machine, the shell must have started the loop, and the loop must have run.
        let deadline = Instant::now() + Duration::from_secs(20);
        let used = loop {
            let (_, account) =
                measure_cpu(&participants, || std::thread::sleep(Duration::from_millis(50))).unwrap();
            if account.shares["children"] > 0.0 || Instant::now() > deadline {
                break account.shares;
            }
        };
        for pid in descendants(child.id()) {
            let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        }
        child.wait().unwrap();
        assert!(used["children"] > used["parent"], "{used:?}");
    }
}
