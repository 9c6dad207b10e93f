//! The statistics line: once a second, what all shards have counted since the last one.

use crate::commands::stat::StatSource;
use crate::failure::Failure;
use core::time::Duration;
use ginnel::{Instant, clock, run_dir};
use std::collections::HashMap;
use std::io::Write;
use std::str::FromStr;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;

/// Interval between lines.
const INTERVAL: Duration = Duration::from_secs(1);

/// The CPU of the thread that prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrinterCpu {
    /// Any CPU.
    Any,
    /// This one.
    Pinned(u32),
}

impl FromStr for PrinterCpu {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(cpu @ 0..=1023) => Ok(Self::Pinned(cpu)),
            _ if text == "any" => Ok(Self::Any),
            _ => Err("must be a CPU, 0 to 1023, or any".to_owned()),
        }
    }
}

/// The sums of counters of all shards and devices.
#[derive(Clone, Debug, Default)]
struct Totals {
    at: Instant,
    sums: HashMap<String, u64>,
}

impl Totals {
    fn read(source: &StatSource) -> Result<Self, Failure> {
        let sample = source.take()?;
        let mut sums = HashMap::new();
        for (index, (_, name)) in source.names.iter().enumerate() {
            let sum: u64 = source.values(&sample, index).flatten().sum();
            *sums.entry(name_of_sum(name)).or_default() += sum;
        }
        Ok(Self { at: sample.at, sums })
    }

    fn get(&self, name: &str) -> u64 {
        self.sums.get(name).copied().unwrap_or_default()
    }
}

/// Returns the name under which a counter is added: those of all devices, and all received frames that were
/// dropped, wherever that was, are one sum each.
fn name_of_sum(counter: &str) -> String {
    match counter.split('.').collect::<Vec<_>>()[..] {
        ["drop", _]
        | ["shard", "forwards_dropped"]
        | ["tcp", "pool_exhausted"]
        | ["device", _, "dpdk_rx_missed" | "dpdk_rx_dropped" | "xdp_rx_dropped"] => "drops".to_owned(),
        ["shard", item] if item.ends_with("_shed") => "drops".to_owned(),
        ["device", _, item] => format!("device.{item}"),
        _ => counter.to_owned(),
    }
}

/// Returns the line for the time between two readings. Gauges are those of the second one.
fn line(before: &Totals, now: &Totals) -> String {
    let since = |name: &str| now.get(name).saturating_sub(before.get(name));
    let seconds = now.at.saturating_since(before.at).as_secs_f64().max(1e-3);
    let megabits = |name: &str| since(name) as f64 * 8.0 / 1e6 / seconds;
    let (messages, urgent) = (since("iot.messages"), since("iot.urgent"));
    format!(
        "packets {} in, {} out; messages {messages}: {urgent} high, {} low; requests {}: {} high, {} low; \
         responses {}; failed {}; flows {}; backlog {}; events {}; drops {}; retransmissions {}; \
         {:.1} Mbit/s in, {:.1} out",
        since("device.rx_frames"),
        since("device.tx_frames"),
        messages.saturating_sub(urgent),
        since("iot.requests"),
        since("iot.urgent_requests"),
        since("iot.requests").saturating_sub(since("iot.urgent_requests")),
        since("iot.answers"),
        since("iot.failed_deadline") + since("iot.failed_shed") + since("iot.failed_redis"),
        now.get("iot.open"),
        now.get("iot.waiting"),
        since("shard.events"),
        since("drops"),
        since("tcp.retransmitted"),
        megabits("device.rx_bytes"),
        megabits("device.tx_bytes"),
    )
}

/// A thread that prints lines until the value is dropped.
pub struct StatPrinter {
    /// The thread ends when this is dropped.
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl StatPrinter {
    /// Starts the thread.
    pub fn start(cpu: PrinterCpu) -> Result<Self, Failure> {
        let (stop, stopped) = mpsc::channel();
        if let PrinterCpu::Pinned(cpu) = cpu {
            check_cpu(cpu)?;
        }
        let thread = std::thread::Builder::new().name("stat_print".into());
        let thread = thread.spawn(move || {
            if let PrinterCpu::Pinned(cpu) = cpu {
                let mut set = rustix::thread::CpuSet::new();
                set.set(cpu as usize);
                // The CPU was in the affinity mask a moment ago.
                let _ = rustix::thread::sched_setaffinity(None, &set);
            }
            print_until(&stopped);
        });
        let thread = thread.map_err(|e| Failure::running(format!("thread of --stat-print: {e}")))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for StatPrinter {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic was reported already.
            let _ = thread.join();
        }
    }
}

fn check_cpu(cpu: u32) -> Result<(), Failure> {
    let allowed = rustix::thread::sched_getaffinity(None);
    if allowed.is_ok_and(|set| set.is_set(cpu as usize)) {
        return Ok(());
    }
    Err(Failure::usage(format!("--stat-print={cpu}: CPU {cpu} is not in the affinity mask of this process")))
}

/// Prints lines until the other end of the channel is dropped.
fn print_until(stop: &mpsc::Receiver<()>) {
    let mut before: Option<Totals> = None;
    let mut next = clock::now() + INTERVAL;
    while stop.recv_timeout(next.saturating_since(clock::now())) == Err(RecvTimeoutError::Timeout) {
        next = (next + INTERVAL).max(clock::now());
        // The counters of a shard can be read as soon as it is built.
        let own = run_dir::running()
            .ok()
            .and_then(|all| all.into_iter().find(|running| running.pid == std::process::id()));
        let Some(totals) = own.and_then(|own| StatSource::open(own).ok()).and_then(|s| Totals::read(&s).ok())
        else {
            continue;
        };
        let text = line(before.as_ref().unwrap_or(&Totals::default()), &totals);
        if before.is_some() && writeln!(std::io::stdout(), "{text}").is_err() {
            // Nobody reads any more.
            return;
        }
        before = Some(totals);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn line_has_differences_and_gauges() {
        let totals = |at_ms, counts: &[(&str, u64)]| Totals {
            at: Instant::from_millis(at_ms),
            sums: counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect(),
        };
        let before = totals(1000, &[("device.rx_frames", 10), ("iot.messages", 5), ("iot.open", 9)]);
        let now = totals(
            3000,
            &[
                ("device.rx_frames", 110),
                ("device.tx_frames", 60),
                ("device.rx_bytes", 1_000_000),
                ("iot.messages", 105),
                ("iot.urgent", 7),
                ("iot.requests", 6),
                ("iot.urgent_requests", 4),
                ("iot.answers", 3),
                ("iot.failed_shed", 2),
                ("iot.open", 20),
                ("iot.waiting", 1),
                ("shard.events", 300),
                ("drops", 8),
                ("tcp.retransmitted", 2),
            ],
        );
        // Each counter that the line reads exists.
        let counters = include_str!("../../metrics/counters.tsv");
        let sums: HashSet<String> =
            counters.lines().filter_map(|line| Some(name_of_sum(line.split_once('\t')?.0))).collect();
        assert_eq!(now.sums.keys().filter(|name| !sums.contains(*name)).collect::<Vec<_>>(), [""; 0]);
        assert_eq!(
            line(&before, &now),
            "packets 100 in, 60 out; messages 100: 7 high, 93 low; requests 6: 4 high, 2 low; responses 3; \
             failed 2; flows 20; backlog 1; events 300; drops 8; retransmissions 2; 4.0 Mbit/s in, 0.0 out"
        );
    }

    #[test]
    fn drops_are_those_of_devices_priorities_and_memory_too() {
        let drops =
            ["drop.no_route", "shard.priority0_shed", "shard.priority7_shed", "shard.forwards_dropped"];
        assert!(drops.iter().all(|name| name_of_sum(name) == "drops"));
        let drops = ["tcp.pool_exhausted", "device.eth0.dpdk_rx_missed", "device.a.xdp_rx_dropped"];
        assert!(drops.iter().all(|name| name_of_sum(name) == "drops"));
        assert_eq!(name_of_sum("device.eth0.rx_frames"), "device.rx_frames");
        assert_eq!(name_of_sum("iot.failed_shed"), "iot.failed_shed");
    }

    #[test]
    fn cpu_is_a_number_or_any() {
        assert_eq!("any".parse(), Ok(PrinterCpu::Any));
        assert_eq!("3".parse(), Ok(PrinterCpu::Pinned(3)));
        assert!(["1024", "-1", "x", ""].iter().all(|bad| bad.parse::<PrinterCpu>().is_err()));
    }
}
