//! A case: a stack on a TAP device, the kernel on the other side, and the connections between them.

use crate::ginnel_end::{Describe, GinnelEnd, Role};
use crate::kernel_end::KernelEnd;
use crate::network::{Network, Node};
use crate::plan::{Ended, Finish, Outcome, Plan};
use crate::stream::Stream;
use ginnel::{Config, SocketOptions};
use ginnel_devices::faults::LinkCounters;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Port of the server.
const PORT: u16 = 7000;
/// Address family of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
}

/// The side that opens the connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Client {
    Ginnel,
    Kernel,
}

/// A case. Its course depends only on its fields, except for the kernel's timing.
#[derive(Clone)]
pub struct Case {
    /// Name in reports; the seed is derived from it.
    pub name: String,
    pub family: Family,
    pub mtu: usize,
    /// MTU of the link between two routers, which are between Ginnel and the kernel's host.
    pub narrow: Option<u32>,
    pub client: Client,
    pub ginnel: Plan,
    pub kernel: Plan,
    /// Expected end of connections at Ginnel and at the kernel.
    pub ends: (Ended, Ended),
    pub count: usize,
    pub parallel: usize,
    /// Ginnel sends nothing before all connections are open.
    pub all_open: bool,
    /// True if the server listens.
    pub listens: bool,
    /// Link specification of the faults; empty for no fault layer.
    pub link: &'static str,
    /// True if the device has checksum and segmentation offloads.
    pub offload: bool,
    /// True if a capture is written, which is kept if the case fails.
    pub capture: bool,
    /// The kernel's congestion control, set explicitly so that all machines behave alike.
    pub congestion: &'static str,
    /// Sysctls of the kernel.
    pub sysctls: Vec<(&'static str, &'static str)>,
    /// Changes to the configuration of the stack.
    pub config: fn(&mut Config),
    /// Options of Ginnel's sockets.
    pub options: SocketOptions,
    /// Additional check of the outcomes of Ginnel and the kernel.
    pub check: fn(&Outcome, &Outcome) -> Result<(), String>,
    /// Time limit of the case.
    pub limit: Duration,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            name: String::new(),
            family: Family::V4,
            mtu: 1500,
            narrow: None,
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

/// Report of a case that passed.
pub struct CaseReport {
    pub ginnel: Vec<Outcome>,
    pub kernel: Vec<Outcome>,
    pub took: Duration,
    pub frames_lost: u64,
}

impl Case {
    /// Returns the seed of the stack and of the faults: derived from the name unless `GINNEL_SEED` is set.
    pub fn seed(&self) -> u64 {
        static GIVEN: OnceLock<Option<u64>> = OnceLock::new();
        let given = GIVEN.get_or_init(|| std::env::var("GINNEL_SEED").ok()?.parse().ok());
        // FNV-1a
        let hash = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        given.unwrap_or_else(|| self.name.bytes().fold(0xcbf2_9ce4_8422_2325, hash))
    }

    /// Returns the directory of the capture.
    pub fn capture_folder(&self) -> PathBuf {
        let name: String =
            self.name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("interop").join(name)
    }

    /// Runs the case.
    ///
    /// # Errors
    /// A description of the failure and of the connections.
    pub fn run(&self) -> Result<CaseReport, String> {
        let start = Instant::now();
        let mut run = RunningCase::start(self).map_err(|e| format!("{}: setting up: {e}", self.name))?;
        let result = run.wait(start).and_then(|()| run.judge());
        let description = result.as_ref().err().map(|_| run.describe());
        let frames_lost = run.network.faults.up.dropped() + run.network.faults.down.dropped();
        let (ginnel, kernel) = (std::mem::take(&mut run.ginnel), std::mem::take(&mut run.kernel));
        let stopped = run.stop();
        match result.and(stopped) {
            Ok(()) => {
                // The directory is missing if the case writes no capture.
                let _ = std::fs::remove_dir_all(self.capture_folder());
                Ok(CaseReport { ginnel, kernel, took: start.elapsed(), frames_lost })
            }
            Err(problem) => {
                let text = description.unwrap_or_default();
                Err(format!("{}: {problem}\n{self:?}\n{text}", self.name))
            }
        }
    }
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Case")
            .field("seed", &self.seed())
            .field("family", &self.family)
            .field("mtu", &self.mtu)
            .field("narrow", &self.narrow)
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

/// A running case.
struct RunningCase<'a> {
    case: &'a Case,
    network: Network,
    kernel_end: KernelEnd,
    node: Node,
    from_ginnel: Receiver<Outcome>,
    from_kernel: Receiver<Outcome>,
    ginnel: Vec<Outcome>,
    kernel: Vec<Outcome>,
}

impl<'a> RunningCase<'a> {
    fn start(case: &'a Case) -> Result<Self, String> {
        let (network, device) = Network::new(case)?;
        let (to_ginnel, from_ginnel) = channel();
        let (to_kernel, from_kernel) = channel();
        let (kernel, ginnel) = (SocketAddr::new(network.kernel, PORT), SocketAddr::new(network.ginnel, PORT));
        let kernel_end = KernelEnd::new(case, to_kernel);
        let role = match case.client {
            Client::Kernel if case.listens => Role::Server(ginnel),
            Client::Kernel => Role::Idle,
            Client::Ginnel => {
                if case.listens {
                    kernel_end.serve(&network.host, kernel).map_err(|e| e.to_string())?;
                }
                Role::Client { remote: kernel, count: case.count, parallel: case.parallel }
            }
        };
        let node = Node::start(case, &network, device, GinnelEnd::new(role, case, to_ginnel))?;
        if case.client == Client::Kernel {
            kernel_end
                .connect(&network.host, ginnel, case.count, case.parallel)
                .map_err(|e| e.to_string())?;
        }
        let (ginnel, kernel) = (Vec::new(), Vec::new());
        Ok(Self { case, network, kernel_end, node, from_ginnel, from_kernel, ginnel, kernel })
    }

    /// Waits until every connection has ended at both ends.
    fn wait(&mut self, start: Instant) -> Result<(), String> {
        let case = self.case;
        let (ginnel, kernel) = (Client::Ginnel, Client::Kernel);
        for (outcomes, from, client, who) in [
            (&mut self.ginnel, &self.from_ginnel, ginnel, "Ginnel"),
            (&mut self.kernel, &self.from_kernel, kernel, "the kernel"),
        ] {
            // A server that does not listen sees no connections.
            let count = if case.listens || case.client == client { case.count } else { 0 };
            while outcomes.len() < count {
                let left = case.limit.saturating_sub(start.elapsed());
                match from.recv_timeout(left) {
                    Ok(outcome) => outcomes.push(outcome),
                    Err(RecvTimeoutError::Timeout) => {
                        let (done, all) = (outcomes.len(), count);
                        return Err(format!("{who} had ended {done} of {all} connections in time"));
                    }
                    Err(RecvTimeoutError::Disconnected) => {
                        return Err(format!("{who} has ended without a result"));
                    }
                }
            }
        }
        Ok(())
    }

    /// Compares the outcomes with the plans.
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

    /// Describes both ends for a failure report.
    fn describe(&self) -> String {
        let mut text = String::new();
        let (reply, description) = channel();
        let described = match self.node.commander.send(Box::new(Describe(reply))) {
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
        for (direction, counters) in
            [("to the kernel", &self.network.faults.up), ("to Ginnel", &self.network.faults.down)]
        {
            let _ = writeln!(text, "link {direction}: {}", counts(counters));
        }
        if self.case.capture {
            let _ = writeln!(text, "capture: {}", self.case.capture_folder().display());
        }
        text
    }

    fn stop(self) -> Result<(), String> {
        self.kernel_end.stop();
        self.node.stop()
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

fn counts(counters: &LinkCounters) -> String {
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
