//! A cable of two veth interfaces in the namespace of the bench, a server at one end and a generator at the other, and fair charging: on veth the kernel receives on the core
//! of whoever sends, unless it has threads for that, which can be put where the receiver runs.

use crate::harness::machine::{CpuTimes, Cpus, process_cpu_time};
use crate::harness::{Failure, Layout};
use rustix::thread::{CpuSet, Pid, sched_setaffinity};
use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

/// The server's interface.
pub const SERVER: &str = "srv0";
/// The generator's.
pub const GENERATOR: &str = "gen0";

/// How long the kernel may take to start its threads.
const PATIENCE: Duration = Duration::from_secs(5);

/// Runs a program that sets something up.
fn run(command: &str) -> Result<(), Failure> {
    let mut words = command.split_whitespace();
    let output = Command::new(words.next().unwrap_or_default())
        .args(words)
        .output()
        .map_err(|e| Failure::Skipped(format!("{command}: {e}")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(Failure::Failed(format!("{command}: {}", String::from_utf8_lossy(&output.stderr).trim())))
}

/// Lays the cable anew: nothing is left of the one before. `address`, with its prefix length, is the kernel's at the server's end.
pub fn lay(address: Option<&str>, layout: Layout) -> Result<(), Failure> {
    // There is none the first time.
    let _ = run(&format!("ip link del {SERVER}"));
    // Whoever asks a server of the same namespace goes through it.
    run("ip link set lo up")?;
    run(&format!("ip link add {SERVER} type veth peer name {GENERATOR}"))?;
    if fs::metadata(format!("/sys/class/net/{SERVER}")).is_err() {
        // Interfaces of a namespace are only to be seen in a view of /sys that was made inside.
        run("mount -t sysfs sysfs /sys")?;
    }
    for interface in [SERVER, GENERATOR] {
        fs::write(format!("/proc/sys/net/ipv6/conf/{interface}/disable_ipv6"), "1")?;
        // Checksums and segments that the kernel leaves undone are none to a device that is no kernel. GRO makes veth receive as a network card's driver does.
        run(&format!("ethtool -K {interface} tx off tso off gso off gro on"))?;
        run(&format!("ip link set {interface} up"))?;
        if layout != Layout::Sender {
            fs::write(format!("/sys/class/net/{interface}/threaded"), "1")?;
        }
    }
    if let Some(address) = address {
        run(&format!("ip addr add {address} dev {SERVER}"))?;
        // The kernel's default may be another one; a namespace cannot choose it, a route can.
        let network = format!("{}.0/24", address.rsplit_once('.').map_or(address, |(network, _)| network));
        run(&format!("ip route replace {network} dev {SERVER} congctl cubic"))?;
    }
    Ok(())
}

/// The kernel's threads that receive for an interface.
fn receivers(interface: &str) -> Vec<i32> {
    let name = format!("napi/{interface}");
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| {
            let comm = fs::read_to_string(format!("/proc/{pid}/comm"));
            comm.is_ok_and(|comm| comm.starts_with(&name))
        })
        .collect()
}

/// Threads that take part in a measurement, by what they do, and where they were told to run.
pub struct Parts {
    threads: Vec<(&'static str, String)>,
    cpus: Cpus,
    layout: Layout,
}

impl Parts {
    /// Puts the kernel's threads where the layout wants them. Both interfaces must be in use by now: the kernel starts threads for those that receive.
    pub fn place(cpus: Cpus, layout: Layout) -> Result<Self, Failure> {
        let mut parts = Self { threads: Vec::new(), cpus, layout };
        if layout == Layout::Sender {
            return Ok(parts);
        }
        let ends = [(SERVER, "server_receives", cpus.server), (GENERATOR, "generator_receives", cpus.client)];
        for (interface, role, cpu) in ends {
            let deadline = Instant::now() + PATIENCE;
            let mut pids = receivers(interface);
            while pids.is_empty() {
                if Instant::now() > deadline {
                    return Err(Failure::Failed(format!(
                        "the kernel has no thread that receives for {interface}"
                    )));
                }
                std::thread::sleep(Duration::from_millis(10));
                pids = receivers(interface);
            }
            for pid in pids {
                let mut one = CpuSet::new();
                one.set(cpu);
                sched_setaffinity(Pid::from_raw(pid), &one).map_err(std::io::Error::from)?;
                parts.add(role, format!("/proc/{pid}"));
            }
        }
        Ok(parts)
    }

    /// Takes a thread into the account. `path` is its folder below /proc.
    pub fn add(&mut self, role: &'static str, path: String) {
        self.threads.push((role, path));
    }

    /// CPU time of each part.
    fn times(&self) -> BTreeMap<&'static str, Duration> {
        let mut times = BTreeMap::new();
        for (role, path) in &self.threads {
            *times.entry(*role).or_default() += cpu_time(path);
        }
        times
    }
}

/// CPU time of a thread; none of one that is gone.
fn cpu_time(path: &str) -> Duration {
    let text = fs::read_to_string(format!("{path}/schedstat")).unwrap_or_default();
    Duration::from_nanos(text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0))
}

/// Where the threads of this process are.
const OWN_THREADS: &str = "/proc/self/task/";

/// The folder below /proc of the calling thread.
pub fn this_thread() -> String {
    format!("{OWN_THREADS}{}", rustix::thread::gettid().as_raw_nonzero())
}

/// A CPU is the bottleneck if it is busy for this share of the time.
const BUSY: f64 = 0.95;

/// Who kept a measurement from being faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bottleneck {
    Server,
    Generator,
    Both,
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
}

/// What the cores did during a measurement.
pub struct Account {
    /// CPU time of each part, as a share of the time that passed.
    pub shares: BTreeMap<&'static str, f64>,
    pub bottleneck: Bottleneck,
    /// One line for whoever watches.
    pub line: String,
}

/// Lets the generator do its `work`, on threads of this process, and says what that cost whom.
pub fn account<R>(parts: &Parts, work: impl FnOnce() -> R) -> Result<(R, Account), Failure> {
    let (times, own) = (parts.times(), process_cpu_time());
    let (cpus, begun) = (CpuTimes::read()?, Instant::now());
    let result = work();
    let passed = begun.elapsed().as_secs_f64();
    let (mut after, own) = (parts.times(), process_cpu_time() - own);
    // All threads of this process are the generator's but one that may be the server.
    let of_server = |path: &&String| path.starts_with(OWN_THREADS);
    let server = parts
        .threads
        .iter()
        .map(|(_, path)| path)
        .find(of_server)
        .map_or(Duration::ZERO, |_| after["server"].saturating_sub(times["server"]));
    after.insert("generator", own.saturating_sub(server));
    let busy = CpuTimes::read()?.since(&cpus).busy_shares();
    let used = |role: &'static str| {
        let used = after[role].saturating_sub(times.get(role).copied().unwrap_or_default());
        (role, used.as_secs_f64() / passed)
    };
    let mut shares: BTreeMap<_, _> = after.keys().copied().map(used).collect();
    let of = |cpu: usize| busy.get(cpu).copied().unwrap_or(0.0);
    let (server, generator) = (of(parts.cpus.server), of(parts.cpus.client));
    shares.extend([("server_cpu", server), ("generator_cpu", generator)]);
    let bottleneck = Bottleneck::of(server, generator);
    let each: Vec<String> =
        shares.iter().map(|(role, share)| format!("{role} {:.0} %", 100.0 * share)).collect();
    let line =
        format!("bottleneck: {bottleneck:?} ({}; layout {:?})", each.join(", "), parts.layout).to_lowercase();
    Ok((result, Account { shares, bottleneck, line }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whose_core_is_full_is_the_bottleneck() {
        assert_eq!(Bottleneck::of(0.99, 0.7), Bottleneck::Server);
        assert_eq!(Bottleneck::of(0.7, 0.99), Bottleneck::Generator);
        assert_eq!(Bottleneck::of(0.96, 0.96), Bottleneck::Both);
        assert_eq!(Bottleneck::of(0.5, 0.94), Bottleneck::Neither);
    }

    #[test]
    fn the_time_of_a_thread_is_what_it_worked() {
        let parts = Parts {
            threads: vec![("server", this_thread())],
            cpus: Cpus { server: 0, client: 0 },
            layout: Layout::One,
        };
        let (_, account) = account(&parts, || {
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(50) {
                std::hint::spin_loop();
            }
        })
        .expect("the kernel's counters");
        assert!(account.shares["server"] > 0.0, "{}", account.line);
        assert!(account.line.starts_with("bottleneck: ") && account.line.contains("layout one"));
    }
}
