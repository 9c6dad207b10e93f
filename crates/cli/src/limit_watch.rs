//! Writes an entry to the log when a limit of the stack is reached: which one, how often, and the keys that
//! raise it. Reads the published counters once a second, so that a limit costs nothing where it is enforced.
//! Looks at the interfaces of the stack as often.

use crate::interface_watch::InterfaceWatch;
use ginnel::stats::pages;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval between two looks at the counters.
const INTERVAL: Duration = Duration::from_secs(1);
/// Shortest time between two entries about one limit.
const REPEAT_INTERVAL: Duration = Duration::from_secs(60);

/// A limit whose counter says how often it was reached.
struct Limit {
    counter: &'static str,
    /// Effect of the limit, for the entry.
    effect: &'static str,
    /// Keys of the configuration, or arguments of the program, that raise the limit. Empty for a constant.
    keys: &'static str,
}

impl Limit {
    /// Returns the entry for a limit that was reached `reached` times.
    fn entry(&self, reached: u64) -> String {
        let Self { counter, effect, keys } = self;
        let times = if reached == 1 { "once".into() } else { format!("{reached} times") };
        let remedy = if keys.is_empty() { String::new() } else { format!("; to raise: {keys}") };
        format!("limit reached {times}: {effect} ({counter}){remedy}")
    }
}

/// Counter of dropped frames whose checksum their sender left to a device.
const PARTIAL_CHECKSUMS: &str = "drop.partial_transport_checksum";

/// Frames with partial checksums that have an entry: fewer may be damaged, or somebody's test.
const PARTIAL_CHECKSUMS_MIN: u64 = 3;

/// Shortest time between two entries about them.
const PARTIAL_CHECKSUMS_INTERVAL: Duration = Duration::from_secs(24 * 3600);

/// Returns the entry about frames that were dropped because of their partial checksums.
fn partial_checksums_entry(frames: u64) -> String {
    format!(
        "{frames} frame(s) without complete checksums were dropped ({PARTIAL_CHECKSUMS}): their sender seems to be local, and leaves checksums to the device. Set partial_checksums=on for an AF_XDP or DPDK device, or \"ethtool -K\" the sender's interface \"tx off\""
    )
}

/// Keys of the queues of received frames, and of what is reserved in queues of all priorities.
const PRIORITY_QUEUE_KEYS: &str = "priority.queue_frames, priority.queue_bytes, priority.reserve_percent";

/// The limits in the order of docs/limits.md. Counters of limits that ordinary traffic reaches, and that only
/// make it slower, are not here.
const LIMITS: &[Limit] = &[
    Limit {
        counter: "tcp.connection_overflows",
        effect: "connections were not accepted",
        keys: "tcp.connections_max",
    },
    Limit {
        counter: "tcp.connects_refused",
        effect: "connections could not be opened",
        keys: "tcp.connections_max",
    },
    Limit {
        counter: "tcp.ports_exhausted",
        effect: "connections found no free local port towards their peer",
        keys: "tcp.local_port_first, tcp.local_port_last",
    },
    Limit { counter: "tcp.listeners_refused", effect: "listeners were refused", keys: "tcp.listeners_max" },
    Limit {
        counter: "tcp.half_open_overflows",
        effect: "SYNs were answered with cookies, or dropped",
        keys: "tcp.half_open_max, or the backlog of the listener",
    },
    Limit {
        counter: "tcp.accept_overflows",
        effect: "SYNs were dropped because the program does not accept fast enough",
        keys: "the backlog of the listener, or channel.backlog_max",
    },
    Limit {
        counter: "tcp.time_wait_overflows",
        effect: "entries in TIME_WAIT were removed early",
        keys: "tcp.time_wait_max",
    },
    Limit {
        counter: "tcp.challenge_acks_limited",
        effect: "challenge ACKs were not sent",
        keys: "tcp.challenge_acks_per_second",
    },
    Limit {
        counter: "tcp.pool_exhausted",
        effect: "segments were dropped for lack of buffers",
        keys: "tcp.buffer_pool_bytes",
    },
    Limit {
        counter: "ip.neighbours_evicted",
        effect: "neighbours were removed",
        keys: "network.neighbours_max",
    },
    Limit {
        counter: "ip.neighbours_exhausted",
        effect: "packets to new neighbours were refused",
        keys: "network.neighbours_max",
    },
    Limit {
        counter: "ip.tx_pending_overflow",
        effect: "packets that waited for the address of a neighbour were dropped",
        keys: "network.neighbour_pending_bytes, network.neighbour_pending_total_bytes",
    },
    Limit {
        counter: "ip.errors_overflow",
        effect: "ICMP errors were not reported to applications",
        keys: "network.errors_max",
    },
    Limit {
        counter: "ip.reassembly_evicted",
        effect: "incomplete datagrams were dropped",
        keys: "network.fragment_bytes",
    },
    Limit {
        counter: "ip.path_mtu_evicted",
        effect: "path MTUs were forgotten",
        keys: "network.path_mtu_entries",
    },
    Limit {
        counter: "ip.icmp_errors_limited",
        effect: "ICMP errors were not sent",
        keys: "network.icmp_errors_per_second, network.icmp_errors_burst",
    },
    Limit {
        counter: "ip.router_advertisement_limits",
        effect: "prefixes or routers of advertisements were ignored",
        keys: "network.autoconf_addresses_max, network.autoconf_routes_max",
    },
    Limit {
        counter: "udp.sockets_refused",
        effect: "UDP sockets were refused",
        keys: "network.udp_sockets_max",
    },
    Limit {
        counter: "udp.ports_exhausted",
        effect: "UDP sockets found no free port",
        keys: "network.udp_port_first, network.udp_port_last",
    },
    Limit {
        counter: "udp.memberships_refused",
        effect: "sockets could not join groups",
        keys: "network.group_memberships_max",
    },
    Limit {
        counter: "ip.looped_back_dropped",
        effect: "datagrams to groups did not reach members on other shards",
        keys: "",
    },
    Limit {
        counter: "udp.receive_overflow",
        effect: "datagrams were dropped because the program does not read fast enough",
        keys: "network.udp_receive_bytes, network.udp_receive_total_bytes",
    },
    Limit { counter: "shard.timers_refused", effect: "timers were refused", keys: "shard.timers_max" },
    Limit {
        counter: "shard.forwards_dropped",
        effect: "frames for a slow shard were dropped",
        keys: "shards.mailbox_bytes",
    },
    Limit {
        counter: "shard.relays_refused",
        effect: "frames on devices that other shards serve were delayed or dropped",
        keys: "shards.mailbox_bytes",
    },
    Limit {
        counter: "shard.broadcasts_refused",
        effect: "frames for all shards were dropped",
        keys: "shards.control_bytes",
    },
    Limit {
        counter: "shard.priority0_shed",
        effect: "frames or datagrams of priority 0 were dropped or refused under overload",
        keys: PRIORITY_QUEUE_KEYS,
    },
    Limit {
        counter: "shard.priority1_shed",
        effect: "frames or datagrams of priority 1 were dropped or refused under overload",
        keys: PRIORITY_QUEUE_KEYS,
    },
    Limit {
        counter: "shard.priority2_shed",
        effect: "frames or datagrams of priority 2 were dropped or refused under overload",
        keys: PRIORITY_QUEUE_KEYS,
    },
    Limit {
        counter: "shard.priority3_shed",
        effect: "frames or datagrams of priority 3 were dropped or refused under overload",
        keys: PRIORITY_QUEUE_KEYS,
    },
    Limit {
        counter: "shard.priority4_shed",
        effect: "frames or datagrams of priority 4 were dropped or refused under overload",
        keys: PRIORITY_QUEUE_KEYS,
    },
    Limit {
        counter: "shard.priority5_shed",
        effect: "frames or datagrams of priority 5 were dropped or refused under overload",
        keys: PRIORITY_QUEUE_KEYS,
    },
    Limit {
        counter: "shard.priority6_shed",
        effect: "frames or datagrams of priority 6 were dropped or refused under overload",
        keys: PRIORITY_QUEUE_KEYS,
    },
    Limit {
        counter: "shard.priority7_shed",
        effect: "frames or datagrams of priority 7 were dropped or refused under overload",
        keys: PRIORITY_QUEUE_KEYS,
    },
    Limit {
        counter: "channel.domains_refused",
        effect: "programs were turned away",
        keys: "channel.domains_max",
    },
    Limit {
        counter: "channel.sockets_refused",
        effect: "connections waited, or sockets were refused",
        keys: "channel.sockets_max, channel.buffer_bytes_max",
    },
    Limit {
        counter: "channel.clients_refused",
        effect: "processes were turned away",
        keys: "channel.clients_max",
    },
    Limit {
        counter: "channel.datagrams_dropped",
        effect: "datagrams for programs were dropped",
        keys: "channel.datagram_bytes_max",
    },
    Limit {
        counter: "channel.filters_refused",
        effect: "filters of sockets were refused",
        keys: "channel.filter_bytes_max",
    },
    Limit {
        counter: "channel.listeners_refused",
        effect: "listeners were refused",
        keys: "channel.listeners_max",
    },
];

/// Returns whether a counter says how often a limit was reached.
pub fn is_limit(counter: &str) -> bool {
    LIMITS.iter().any(|limit| limit.counter == counter)
}

/// Watches the limits of a stack on a thread of its own until the value is dropped.
#[derive(Debug)]
pub struct LimitWatch {
    /// Ends the thread when it is dropped.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl LimitWatch {
    /// Starts to watch the stack with this directory. Without a thread its limits are counted only.
    pub fn start(directory: &Path, mut interfaces: InterfaceWatch) -> Self {
        let (stop, stopped) = channel();
        let mut counts = LimitCounts::new(directory.to_owned());
        let thread = std::thread::Builder::new().name("limit-watch".into()).spawn(move || {
            while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                counts.update(Instant::now());
                interfaces.update();
            }
            // At the end the entries about all limits are due.
            counts.update(Instant::now() + REPEAT_INTERVAL);
        });
        Self { stop: Some(stop), thread: thread.ok() }
    }
}

impl Drop for LimitWatch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread is in the log.
            let _ = thread.join();
        }
    }
}

/// How often the limits were reached, and after them in each list the frames with partial checksums.
struct LimitCounts {
    directory: PathBuf,
    /// Last values of the counters of each shard, by its index and that of the limit.
    values: HashMap<(usize, usize), u64>,
    /// For each limit: how often it was reached since its last entry, and the time of that entry.
    pending: Vec<(u64, Option<Instant>)>,
}

impl LimitCounts {
    fn new(directory: PathBuf) -> Self {
        Self { directory, values: HashMap::new(), pending: vec![(0, None); LIMITS.len() + 1] }
    }

    /// Reads the counters and writes the entries that are due.
    fn update(&mut self, now: Instant) {
        // Pages appear and disappear with the process of the shards.
        for (shard, page) in pages(&self.directory).unwrap_or_default().iter().enumerate() {
            let Ok(snapshot) = page.read() else { continue };
            let counters = LIMITS.iter().map(|limit| limit.counter).chain([PARTIAL_CHECKSUMS]);
            for (index, counter) in counters.enumerate() {
                let at = page.names().iter().position(|(_, name)| name == counter);
                if let Some(value) = at.and_then(|at| snapshot.values.get(at)) {
                    self.add(shard, index, *value);
                }
            }
        }
        for (index, reached) in self.due(now).into_iter().enumerate().filter(|(_, reached)| *reached > 0) {
            let entry = LIMITS.get(index).map(|limit| limit.entry(reached));
            tracing::warn!("{}", entry.unwrap_or_else(|| partial_checksums_entry(reached)));
        }
    }

    /// Takes note of the value of a counter. A lower value than before is that of a new process.
    fn add(&mut self, shard: usize, limit: usize, value: u64) {
        let before = self.values.insert((shard, limit), value).unwrap_or(0);
        self.pending[limit].0 += value.checked_sub(before).unwrap_or(value);
    }

    /// Returns for each limit how often it was reached since its last entry, or 0 if no entry is due.
    fn due(&mut self, now: Instant) -> Vec<u64> {
        let take = |(index, (reached, last)): (usize, &mut (u64, Option<Instant>))| {
            let (least, interval) = match index < LIMITS.len() {
                true => (1, REPEAT_INTERVAL),
                false => (PARTIAL_CHECKSUMS_MIN, PARTIAL_CHECKSUMS_INTERVAL),
            };
            let is_due = *reached >= least && last.is_none_or(|last| now - last >= interval);
            if !is_due {
                return 0;
            }
            *last = Some(now);
            core::mem::take(reached)
        };
        self.pending.iter_mut().enumerate().map(take).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_about_one_limit_are_a_minute_apart() {
        let mut counts = LimitCounts::new(PathBuf::new());
        let start = Instant::now();
        let due = |counts: &mut LimitCounts, seconds| counts.due(start + Duration::from_secs(seconds))[1];
        assert_eq!(due(&mut counts, 0), 0);
        counts.add(0, 1, 5);
        counts.add(1, 1, 2);
        assert_eq!((due(&mut counts, 1), due(&mut counts, 2)), (7, 0));
        counts.add(0, 1, 6);
        assert_eq!((due(&mut counts, 60), due(&mut counts, 61)), (0, 1));
        // Another limit is reported at once.
        counts.add(0, 2, 1);
        assert_eq!(counts.due(start + Duration::from_secs(62))[2], 1);
        // The counter of a new process begins at 0.
        counts.add(0, 1, 3);
        assert_eq!(due(&mut counts, 200), 3);
    }

    #[test]
    fn partial_checksums_have_an_entry_each_day() {
        let (mut counts, index, now) = (LimitCounts::new(PathBuf::new()), LIMITS.len(), Instant::now());
        counts.add(0, index, PARTIAL_CHECKSUMS_MIN - 1);
        assert_eq!(counts.due(now)[index], 0);
        counts.add(0, index, PARTIAL_CHECKSUMS_MIN);
        assert_eq!(counts.due(now)[index], PARTIAL_CHECKSUMS_MIN);
        counts.add(0, index, 2 * PARTIAL_CHECKSUMS_MIN);
        assert_eq!(counts.due(now + 10 * REPEAT_INTERVAL)[index], 0);
        assert_eq!(counts.due(now + PARTIAL_CHECKSUMS_INTERVAL)[index], PARTIAL_CHECKSUMS_MIN);
    }

    #[test]
    fn an_entry_names_only_keys_that_exist() {
        let entry = |name: &str| LIMITS.iter().find(|limit| limit.counter == name).unwrap().entry(2);
        assert_eq!(
            entry("shard.timers_refused"),
            "limit reached 2 times: timers were refused (shard.timers_refused); to raise: shard.timers_max"
        );
        assert!(entry("ip.looped_back_dropped").ends_with("(ip.looped_back_dropped)"));
    }

    /// The table of limits, without those that a call reports to its caller, or that a peer cannot notice.
    #[test]
    fn every_counted_limit_with_a_key_is_watched() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/limits.md");
        let page = std::fs::read_to_string(path).unwrap();
        let sections = ["## Connections", "## Buffers", "## Network", "## Shard"];
        let mut watched = 0;
        let mut is_stack = false;
        for line in page.lines() {
            if line.starts_with("## ") {
                is_stack = sections.contains(&line);
            }
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let (Some(name), Some(counted)) = (cells.first(), cells.last()) else { continue };
            let key = name.trim_matches('`');
            let is_key = key.contains('.') && name.starts_with('`') && !key.contains(' ');
            if !is_stack || !is_key || !counted.starts_with('`') {
                continue;
            }
            let counter = counted.split('`').nth(1).unwrap();
            // These make traffic slower, and ordinary traffic reaches them.
            let slower = [
                "device_full",
                "large_buffers_refused",
                "cookies_sent",
                "fastopen_cookies_evicted",
                "sockets_deferred",
                "priority_flows_replaced",
            ];
            if slower.contains(&counter) {
                continue;
            }
            let is_watched = |limit: &&Limit| limit.counter.split('.').nth(1) == Some(counter);
            let limits: Vec<&Limit> = LIMITS.iter().filter(is_watched).collect();
            assert!(limits.iter().any(|limit| limit.keys.contains(key)), "{key} ({counter})");
            watched += 1;
        }
        assert!(watched > 15, "{watched}");
    }
}
