//! One case: a stack on a TAP device, the kernel on the other side, and what is to happen between them.

use crate::ginnel_end::{Describe, GinnelEnd, Role};
use crate::kernel_end::KernelEnd;
use crate::plan::{Ended, Finish, Outcome, Plan};
use crate::stream::Stream;
use ginnel::config::{DeviceConfig, DeviceKind, Prefix};
use ginnel::{Commander, Config, Shard, SocketOptions, StopFlag};
use ginnel_devices::capture::{self, CaptureConfig, FileRing};
use ginnel_devices::faults::{self, Counters, FaultStats, LinkSpec};
use ginnel_devices::tap::TapConfig;
use ginnel_stack::device::Device;
use ginnel_testkit::interop::Namespace;
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Port of whoever is the server.
const PORT: u16 = 7000;
/// Bytes of each frame that a capture keeps: all headers.
const SNAPLEN: u32 = 160;
/// A capture keeps the last frames of a case: about 300,000 of them.
const RING: FileRing = FileRing { file_bytes: 32 << 20, files: 2 };

/// Address family of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
}

/// Who opens the connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    Ginnel,
    Kernel,
}

/// A case. Everything it does follows from its values, but for the kernel's timing.
#[derive(Clone)]
pub struct Case {
    /// Names it in reports; its seed is made from it.
    pub name: String,
    pub family: Family,
    pub mtu: usize,
    pub client: Client,
    pub ginnel: Plan,
    pub kernel: Plan,
    /// How connections end for Ginnel and for the kernel.
    pub ends: (Ended, Ended),
    pub count: usize,
    pub parallel: usize,
    /// Ginnel sends nothing before all connections are open.
    pub all_open: bool,
    /// Somebody listens where the client connects to.
    pub listens: bool,
    /// What the link does. Empty is a perfect link without any layer between.
    pub link: &'static str,
    /// Checksums and segmentation are left to the device.
    pub offload: bool,
    /// Writes a capture, which stays if the case fails.
    pub capture: bool,
    /// The kernel's congestion control. Not what the machine has by default, so that all machines are alike.
    pub congestion: &'static str,
    /// Settings of the kernel.
    pub sysctls: Vec<(&'static str, &'static str)>,
    /// Settings of the stack.
    pub config: fn(&mut Config),
    /// Options of Ginnel's sockets.
    pub options: SocketOptions,
    /// What both ends must say about themselves.
    pub check: fn(&Outcome, &Outcome) -> Result<(), String>,
    /// The case fails if it is not over by then.
    pub limit: Duration,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            name: String::new(),
            family: Family::V4,
            mtu: 1500,
            client: Client::Kernel,
            ginnel: Plan::default(),
            kernel: Plan::default(),
            ends: (Ended::Fin, Ended::Fin),
            count: 1,
            parallel: 1,
            all_open: false,
            listens: true,
            link: "",
            offload: true,
            capture: true,
            congestion: "cubic",
            sysctls: Vec::new(),
            config: |_| {},
            options: SocketOptions::default(),
            check: |_, _| Ok(()),
            limit: Duration::from_secs(120),
        }
    }
}

/// What a case that succeeded reports.
pub struct Passed {
    pub ginnel: Vec<Outcome>,
    pub kernel: Vec<Outcome>,
    pub took: Duration,
    pub frames_lost: u64,
}

impl Case {
    /// The seed of the stack and of the faults: the same in each run unless `GINNEL_SEED` says otherwise.
    fn seed(&self) -> u64 {
        static GIVEN: OnceLock<Option<u64>> = OnceLock::new();
        let given = GIVEN.get_or_init(|| std::env::var("GINNEL_SEED").ok()?.parse().ok());
        // FNV-1a
        let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        given.unwrap_or_else(|| self.name.bytes().fold(0xcbf2_9ce4_8422_2325, hash))
    }

    /// A folder for the capture alone.
    fn capture_folder(&self) -> PathBuf {
        let name: String =
            self.name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("interop").join(name)
    }

    /// Addresses of the kernel and of Ginnel.
    pub fn addresses(&self) -> (IpAddr, IpAddr) {
        match self.family {
            Family::V4 => ([10, 9, 0, 1].into(), [10, 9, 0, 2].into()),
            Family::V6 => ([0xfd09, 0, 0, 0, 0, 0, 0, 1].into(), [0xfd09, 0, 0, 0, 0, 0, 0, 2].into()),
        }
    }

    fn prefix(&self) -> u8 {
        if self.family == Family::V4 { 24 } else { 64 }
    }

    /// Runs it.
    ///
    /// # Errors
    /// Everything known about what went wrong.
    pub fn run(&self) -> Result<Passed, String> {
        let start = Instant::now();
        let mut run = Run::start(self).map_err(|e| format!("{}: setting up: {e}", self.name))?;
        let result = run.wait(start).and_then(|()| run.judge());
        let description = result.as_ref().err().map(|_| run.describe());
        let frames_lost = run.faults.up.dropped() + run.faults.down.dropped();
        let (ginnel, kernel) = (std::mem::take(&mut run.ginnel), std::mem::take(&mut run.kernel));
        let stopped = run.stop();
        match result.and(stopped) {
            Ok(()) => {
                // There is none if the case was to do without.
                let _ = std::fs::remove_dir_all(self.capture_folder());
                Ok(Passed { ginnel, kernel, took: start.elapsed(), frames_lost })
            }
            Err(problem) => {
                let text = description.unwrap_or_default();
                Err(format!("{}: {problem}\n{self:?}\n{text}", self.name))
            }
        }
    }

    /// The TAP device with its layers, in the namespace.
    fn device(&self, namespace: &Namespace) -> Result<(Device, FaultStats), String> {
        let (kernel, _) = self.addresses();
        let config = TapConfig {
            mtu: Some(self.mtu),
            kernel_addresses: vec![(kernel, self.prefix())],
            without_offloads: !self.offload,
            ..TapConfig::default()
        };
        let mut device = namespace.open_tap(&config, self.congestion).map_err(|e| e.to_string())?;
        let mut stats = FaultStats::default();
        if !self.link.is_empty() {
            let spec = LinkSpec::parse(self.link).map_err(|e| e.to_string())?;
            (device, stats) = faults::wrap_counted(device, &spec, self.seed());
        }
        if self.capture {
            let folder = self.capture_folder();
            std::fs::create_dir_all(&folder).map_err(|e| e.to_string())?;
            let path = folder.join("frames.pcapng");
            let config = CaptureConfig { snaplen: SNAPLEN, ring: Some(RING), ..CaptureConfig::new(path) };
            device = capture::wrap(device, &config).map_err(|e| e.to_string())?;
        }
        Ok((device, stats))
    }

    fn shard(&self, device: Device, end: GinnelEnd) -> Result<Shard<GinnelEnd>, String> {
        let (_, own) = self.addresses();
        let prefix = Prefix { address: own, len: self.prefix() };
        let mut config = Config::single(DeviceConfig::new("tap", DeviceKind::Tap), &[prefix], &[]);
        // Many shards run beside each other here, so none spins.
        config.shard.spin_us = 0;
        // Nobody else is on the link, and the second that the question takes is better spent.
        config.network.dad_transmits = 0;
        (self.config)(&mut config);
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&self.seed().to_le_bytes());
        let shard = Shard::builder(config).handler(end).device("tap", device).seed(seed);
        shard.build().map_err(|e| e.to_string())
    }
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Case")
            .field("seed", &self.seed())
            .field("family", &self.family)
            .field("mtu", &self.mtu)
            .field("client", &self.client)
            .field("ginnel", &self.ginnel)
            .field("kernel", &self.kernel)
            .field("count", &self.count)
            .field("parallel", &self.parallel)
            .field("link", &self.link)
            .field("offload", &self.offload)
            .field("congestion", &self.congestion)
            .field("sysctls", &self.sysctls)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// A case under way.
struct Run<'a> {
    case: &'a Case,
    faults: FaultStats,
    kernel_end: KernelEnd,
    commander: Commander,
    stop: StopFlag,
    shard: JoinHandle<Result<(), String>>,
    from_ginnel: Receiver<Outcome>,
    from_kernel: Receiver<Outcome>,
    ginnel: Vec<Outcome>,
    kernel: Vec<Outcome>,
}

impl<'a> Run<'a> {
    fn start(case: &'a Case) -> Result<Self, String> {
        let namespace = Arc::new(Namespace::new().map_err(|e| e.to_string())?);
        for (name, value) in &case.sysctls {
            namespace.sysctl(name, value).map_err(|e| e.to_string())?;
        }
        let (device, faults) = case.device(&namespace)?;
        let (to_ginnel, from_ginnel) = channel();
        let (to_kernel, from_kernel) = channel();
        let (kernel, ginnel) = case.addresses();
        let (kernel, ginnel) = (SocketAddr::new(kernel, PORT), SocketAddr::new(ginnel, PORT));
        let kernel_end = KernelEnd::new(case, to_kernel);
        let role = match case.client {
            Client::Kernel if case.listens => Role::Server(ginnel),
            Client::Kernel => Role::Bystander,
            Client::Ginnel => {
                if case.listens {
                    kernel_end.serve(&namespace, kernel).map_err(|e| e.to_string())?;
                }
                Role::Client { remote: kernel, count: case.count, parallel: case.parallel }
            }
        };
        let mut shard = case.shard(device, GinnelEnd::new(role, case, to_ginnel))?;
        let commander = shard.commander();
        let stop = StopFlag::new().map_err(|e| e.to_string())?;
        let flag = stop.clone();
        let shard = thread::Builder::new()
            .name(case.name.clone())
            .spawn(move || shard.run(&flag).map_err(|e| e.to_string()))
            .map_err(|e| e.to_string())?;
        if case.client == Client::Kernel {
            kernel_end.connect(&namespace, ginnel, case.count, case.parallel).map_err(|e| e.to_string())?;
        }
        let (ginnel, kernel) = (Vec::new(), Vec::new());
        Ok(Self {
            case,
            faults,
            kernel_end,
            commander,
            stop,
            shard,
            from_ginnel,
            from_kernel,
            ginnel,
            kernel,
        })
    }

    /// Until every connection has ended at both ends.
    fn wait(&mut self, start: Instant) -> Result<(), String> {
        let case = self.case;
        let (ginnel, kernel) = (Client::Ginnel, Client::Kernel);
        for (outcomes, from, client, who) in [
            (&mut self.ginnel, &self.from_ginnel, ginnel, "Ginnel"),
            (&mut self.kernel, &self.from_kernel, kernel, "the kernel"),
        ] {
            // A server that does not exist sees no connections.
            let count = if case.listens || case.client == client { case.count } else { 0 };
            while outcomes.len() < count {
                let left = case.limit.saturating_sub(start.elapsed());
                match from.recv_timeout(left) {
                    Ok(outcome) => outcomes.push(outcome),
                    Err(RecvTimeoutError::Timeout) => {
                        let (done, all) = (outcomes.len(), count);
                        return Err(format!("{who} had ended {done} of {all} connections in time"));
                    }
                    Err(RecvTimeoutError::Disconnected) => return Err(format!("{who} is gone")),
                }
            }
        }
        Ok(())
    }

    /// Compares what happened with what was to happen.
    fn judge(&self) -> Result<(), String> {
        let (request, response) = (Stream::Request, Stream::Response);
        let (to_ginnel, to_kernel) =
            if self.case.client == Client::Kernel { (request, response) } else { (response, request) };
        let case = self.case;
        for outcome in &self.ginnel {
            judge(outcome, case.ends.0, &case.ginnel, &case.kernel, to_ginnel)
                .map_err(|e| format!("Ginnel: {e}"))?;
        }
        for outcome in &self.kernel {
            judge(outcome, case.ends.1, &case.kernel, &case.ginnel, to_kernel)
                .map_err(|e| format!("kernel: {e}"))?;
        }
        match (self.ginnel.first(), self.kernel.first()) {
            (Some(ginnel), Some(kernel)) => (case.check)(ginnel, kernel),
            _ => Ok(()),
        }
    }

    /// Everything there is to know, for a report about a failure.
    fn describe(&self) -> String {
        let mut text = String::new();
        let (reply, description) = channel();
        let asked = self.commander.send(Box::new(Describe(reply)));
        let described = match asked {
            Ok(()) => description.recv_timeout(Duration::from_secs(5)).ok(),
            Err(_) => None,
        };
        let described = described.unwrap_or_else(|| "  the shard does not answer".into());
        let _ = writeln!(text, "Ginnel:\n{described}\nkernel:\n{}", self.kernel_end.describe());
        for (who, outcomes) in [("Ginnel", &self.ginnel), ("kernel", &self.kernel)] {
            for outcome in outcomes.iter().rev().take(2) {
                let _ = writeln!(
                    text,
                    "{who} ended one: {:?}, sent {}, received {}, {}",
                    outcome.ended, outcome.sent, outcome.received, outcome.info.text
                );
            }
        }
        for (direction, counters) in [("to the kernel", &self.faults.up), ("to Ginnel", &self.faults.down)] {
            let _ = writeln!(text, "link {direction}: {}", counts(counters));
        }
        if self.case.capture {
            let _ = writeln!(text, "capture: {}", self.case.capture_folder().display());
        }
        text
    }

    fn stop(self) -> Result<(), String> {
        self.kernel_end.stop();
        self.stop.stop();
        let (done, wait): (Sender<()>, _) = channel();
        let shard = self.shard;
        let joiner = thread::spawn(move || {
            let result = shard.join().unwrap_or_else(|_| Err("the shard panicked".into()));
            drop(done);
            result
        });
        if wait.recv_timeout(Duration::from_secs(10)) == Err(RecvTimeoutError::Timeout) {
            return Err("the shard did not stop".into());
        }
        joiner.join().unwrap_or_else(|_| Err("the shard panicked".into()))
    }
}

fn judge(outcome: &Outcome, ended: Ended, own: &Plan, peer: &Plan, stream: Stream) -> Result<(), String> {
    if let Some(position) = outcome.mismatch {
        return Err(format!("byte {position} is not what was sent"));
    }
    if outcome.ended != ended {
        return Err(format!("ended with {:?} instead of {ended:?}", outcome.ended));
    }
    if ended == Ended::Fin {
        if outcome.received != peer.send || outcome.sent != own.send {
            let (got, gave) = (outcome.received, outcome.sent);
            return Err(format!("received {got} of {} bytes and sent {gave} of {}", peer.send, own.send));
        }
        if outcome.digest != stream.digest(peer.send) {
            return Err("SHA-256 differs".into());
        }
    } else if matches!(own.finish, Finish::Close | Finish::Reset)
        && matches!(ended, Ended::Closed | Ended::Aborted)
        && outcome.received < own.finish_after
    {
        return Err(format!("finished after {} of {} bytes", outcome.received, own.finish_after));
    }
    Ok(())
}

fn counts(counters: &Counters) -> String {
    let all = [
        ("offered", &counters.offered),
        ("delivered", &counters.delivered),
        ("lost", &counters.lost),
        ("duplicated", &counters.duplicated),
        ("reordered", &counters.reordered),
        ("corrupted", &counters.corrupted),
        ("queue full", &counters.queue_full),
        ("out of memory", &counters.out_of_memory),
        ("malformed", &counters.malformed),
    ];
    let mut text = String::new();
    for (name, count) in all {
        let _ = write!(text, "{name} {} ", count.load(Ordering::Relaxed));
    }
    text
}
