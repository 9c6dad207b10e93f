//! The benches. Each is a function that returns its results.

mod client_programs;
mod connections;
mod corpus;
mod dpdk;
mod httpd_vs_kernel;
pub mod idle;
mod idle_cpu;
pub mod instructions;
mod iot;
mod kernel;
mod kernel_lane;
mod load_sink;
mod loss;
mod memif;
mod monitor;
mod placement;
mod priority;
mod priority_off_cost;
pub mod scaling;
mod server_programs;
mod short_100k;
mod throughput;
mod vs_smoltcp;

use crate::harness::result::BenchResult;
use crate::harness::{MeasureError, Options};

/// Requirements of a bench.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// None: the bench does not measure real time.
    Nothing,
    /// A quiet machine.
    Machine,
    /// A quiet machine, and a network namespace with the Linux kernel at the other end.
    Namespace,
}

/// A bench.
pub struct Bench {
    /// Name on the command line.
    pub name: &'static str,
    /// Description of what is measured.
    pub about: &'static str,
    /// Requirements.
    pub needs: Needs,
    /// Runs the bench.
    pub run: fn(&Options) -> Result<Vec<BenchResult>, MeasureError>,
}

/// All benches, in the order in which they run.
pub const ALL: &[Bench] = &[
    Bench {
        name: "short-vs-smoltcp",
        about: "HTTP connections/s, 64 bytes each, 16 at a time, against smoltcp over the same rings",
        needs: Needs::Machine,
        run: vs_smoltcp::short,
    },
    Bench {
        name: "keepalive-vs-smoltcp",
        about: "HTTP requests/s, 64 bytes each, on 16 connections, against smoltcp over the same rings",
        needs: Needs::Machine,
        run: vs_smoltcp::keep_alive,
    },
    Bench {
        name: "short-100k",
        about: "HTTP connections/s with 100,000 open; the server closes, and all stay in TIME_WAIT for 60 s",
        needs: Needs::Machine,
        run: short_100k::short_100k,
    },
    Bench {
        name: "corpus",
        about: "Gbit/s of static pages, 500 of them, from ginnel httpd over memory",
        needs: Needs::Machine,
        run: corpus::run,
    },
    Bench {
        name: "placement-inline",
        about: "HTTP connections/s and the round trip of one connection, the application in the shard's thread",
        needs: Needs::Machine,
        run: placement::inline,
    },
    Bench {
        name: "placement-paired",
        about: "as placement-inline, with the application in its own thread on the shard's CPU, against inline",
        needs: Needs::Machine,
        run: placement::paired,
    },
    Bench {
        name: "placement-split",
        about: "as placement-inline with the application in a thread on another CPU (of two CPUs: the client's), against inline",
        needs: Needs::Machine,
        run: placement::split,
    },
    Bench {
        name: "wake-latency",
        about: "response time of an idle stack that sleeps until the request, median (and p99), in each placement, against a thread without a stack",
        needs: Needs::Machine,
        run: placement::wake_latency,
    },
    Bench {
        name: "priority-overload",
        about: "99th percentile of urgent messages at 1.5 times the load that a server can answer, against the server without priorities",
        needs: Needs::Machine,
        run: priority::overload,
    },
    Bench {
        name: "priority-off-cost",
        about: "instructions per request that priorities cost while they are off, against a build without them",
        needs: Needs::Nothing,
        run: priority_off_cost::run,
    },
    Bench {
        name: "memif-rate",
        about: "packets/s of 64 and 1500 bytes over memif, against two processes of DPDK's testpmd",
        needs: Needs::Machine,
        run: memif::rate,
    },
    Bench {
        name: "tap-bulk",
        about: "Gbit/s of one connection to and from the Linux kernel over TAP with offloads",
        needs: Needs::Namespace,
        run: kernel::bulk,
    },
    Bench {
        name: "tap-short",
        about: "HTTP connections/s of a client on the Linux kernel over TAP; the client is the bottleneck",
        needs: Needs::Namespace,
        run: kernel::short,
    },
    Bench {
        name: "short-vs-kernel",
        about: "HTTP connections/s of ginnel httpd on AF_XDP over veth, against nginx on the kernel over an equal veth; server and receive processing on one core, generator on another",
        needs: Needs::Namespace,
        run: httpd_vs_kernel::short,
    },
    Bench {
        name: "keepalive-vs-kernel",
        about: "HTTP requests/s of ginnel httpd on AF_XDP over veth, against nginx on the kernel over an equal veth; server and receive processing on one core, generator on another",
        needs: Needs::Namespace,
        run: httpd_vs_kernel::keep_alive,
    },
    Bench {
        name: "nginx-short-vs-kernel",
        about: "HTTP connections/s of nginx (ginnel run) on AF_XDP over veth, against nginx on the kernel over an equal veth; server and receive processing on one core, generator on another",
        needs: Needs::Namespace,
        run: httpd_vs_kernel::nginx_short,
    },
    Bench {
        name: "nginx-keepalive-vs-kernel",
        about: "HTTP requests/s of nginx (ginnel run) on AF_XDP over veth, against nginx on the kernel over an equal veth; server and receive processing on one core, generator on another",
        needs: Needs::Namespace,
        run: httpd_vs_kernel::nginx_keep_alive,
    },
    Bench {
        name: "dpdk-vs-af-xdp",
        about: "HTTP connections/s of ginnel httpd over DPDK's net_af_xdp (/af_xdp) and net_af_packet (/af_packet) on veth, each against the AF_XDP device on an equal veth; server and receive processing on one core, generator on another",
        needs: Needs::Namespace,
        run: dpdk::run,
    },
    Bench {
        name: "kernel-lane",
        about: "HTTP connections/s of nginx on the kernel over loopback, a worker per CPU, each with a listener of its own (ginnel run --stack kernel --listen-spawn auto), against one that all workers share; the client uses the same CPUs",
        needs: Needs::Namespace,
        run: kernel_lane::run,
    },
    Bench {
        name: "nginx-short-memory",
        about: "HTTP connections/s of nginx (ginnel run) over memif, with nginx on the kernel over veth as context; server and receive processing on one core, generator on another",
        needs: Needs::Namespace,
        run: httpd_vs_kernel::nginx_memory,
    },
    Bench {
        name: "rtt-vs-kernel",
        about: "median round trip of one connection to nginx (ginnel run), /memory over memif, where the shard polls, and /af_xdp over veth, each against nginx on the kernel over veth (ratio: kernel's/ours); server and receive processing on one core, generator on another",
        needs: Needs::Namespace,
        run: httpd_vs_kernel::round_trip,
    },
    Bench {
        name: "redis-vs-kernel",
        about: "GET/s of redis (ginnel run), 50 connections, /memory over memif and /af_xdp over veth, each against redis on the kernel over veth; server and receive processing on one core, generator on another",
        needs: Needs::Namespace,
        run: server_programs::redis,
    },
    Bench {
        name: "memcached-vs-kernel",
        about: "get/s of memcached (ginnel run), 50 connections, /memory over memif and /af_xdp over veth, each against memcached on the kernel over veth; server and receive processing on one core, generator on another",
        needs: Needs::Namespace,
        run: server_programs::memcached,
    },
    Bench {
        name: "haproxy-vs-kernel",
        about: "HTTP connections/s of HAProxy in front of nginx, both on one stack (ginnel up) with AF_XDP over veth, against both on the kernel over the same; both servers and receive work on one core, generator on another",
        needs: Needs::Namespace,
        run: server_programs::haproxy,
    },
    Bench {
        name: "iperf-vs-kernel",
        about: "Gbit/s of iperf3, server and client each on a stack (ginnel run) with a memif with GSO between them, against both on the kernel with veth with offloads between two namespaces; server on one core, client on another (veth receives whole super-segments on the sender's core, not in its thread)",
        needs: Needs::Namespace,
        run: client_programs::iperf,
    },
    Bench {
        name: "client-vs-kernel",
        about: "requests/s of ab (short connections) and wrk (keep-alive) on a stack (ginnel run), asking ginnel httpd over memif, against the same on the kernel, asking ginnel httpd on AF_XDP over veth; client and its receive work on one core, httpd on another",
        needs: Needs::Namespace,
        run: client_programs::http,
    },
    Bench {
        name: "loss-table",
        about: "goodput over a gigabit link with loss, against the Linux kernel's CUBIC as sender",
        needs: Needs::Namespace,
        run: loss::run,
    },
    Bench {
        name: "idle-bytes",
        about: "resident memory per idle connection, with a million open and a limit of ten million",
        needs: Needs::Nothing,
        run: idle::bytes,
    },
    Bench {
        name: "task-bytes",
        about: "resident memory per idle task with its connection, with a million tasks",
        needs: Needs::Nothing,
        run: idle::task_bytes,
    },
    Bench {
        name: "idle-cpu",
        about: "percent of a core that ginnel httpd uses while a million connections are open and idle",
        needs: Needs::Nothing,
        run: idle_cpu::run,
    },
    Bench {
        name: "connections-1m",
        about: "memory of a pair of connections, both ends and their applications included (ginnel echo, ginnel load echo), with a million open and alive",
        needs: Needs::Machine,
        run: connections::one_million,
    },
    Bench {
        name: "connections-10m",
        about: "as connections-1m, with 10,368,000 connections",
        needs: Needs::Machine,
        run: connections::ten_million,
    },
    Bench {
        name: "connections-max",
        about: "as connections-1m, with as many connections as the free memory permits",
        needs: Needs::Machine,
        run: connections::most,
    },
    Bench {
        name: "establish-rate",
        about: "connections/s until 10,368,000 are open between two shards on a core each, /usual and with tables that were touched before (/prefault)",
        needs: Needs::Machine,
        run: connections::establish_rate,
    },
    Bench {
        name: "keepalive-cpu",
        about: "percent of a core for keepalive probes of 10,368,000 idle connections every 600 s, at the end that probes",
        needs: Needs::Machine,
        run: connections::keepalive_cpu,
    },
    Bench {
        name: "iot-1m",
        about: "a million devices that send 16,667 messages/s to ginnel iot with Redis, observed by ginnel monitor, with priorities (/nominal, /overload) and without (/nominal-off, /overload-off)",
        needs: Needs::Machine,
        run: iot::one_million,
    },
    Bench {
        name: "iot-10m",
        about: "as iot-1m, with 10,368,000 devices and 172,800 messages/s",
        needs: Needs::Machine,
        run: iot::ten_million,
    },
    Bench {
        name: "throughput-at-10m",
        about: "HTTP requests/s on random ones of 10,368,000 connections, against 1,000 connections; 256 requests in flight",
        needs: Needs::Machine,
        run: throughput::at_10m,
    },
    Bench {
        name: "load-sink",
        about: "HTTP connections/s that one core of ginnel load http --stack light makes against a responder without connections",
        needs: Needs::Machine,
        run: load_sink::run,
    },
    Bench {
        name: "monitor-rate",
        about: "packets/s that ginnel monitor examines on one core, with a million connections",
        needs: Needs::Machine,
        run: monitor::rate,
    },
    Bench {
        name: "sim-scaling",
        about: "instructions, messages between shards and memory of ginnel demo-server, naive and as a proxy, on 1 to 64 simulated shards; not valid if instructions grow by more than 2 %",
        needs: Needs::Nothing,
        run: scaling::run,
    },
    Bench {
        name: "instructions",
        about: "instructions of the server per connection, request and megabyte; fails if there are more than bench/instructions.json accepts",
        needs: Needs::Nothing,
        run: instructions::run,
    },
];

/// Returns an error if less than `bytes` bytes of memory are available.
fn require_memory(bytes: u64) -> Result<(), MeasureError> {
    let available = available_memory();
    if available >= bytes {
        return Ok(());
    }
    let [needed, available] = [bytes, available].map(|bytes| bytes as f64 / f64::from(1 << 30));
    Err(MeasureError::Skipped(format!(
        "needs {needed:.1} GiB of memory, but {available:.1} GiB are available"
    )))
}

/// Returns the memory in bytes that is available without swapping.
fn available_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|l| l.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}
