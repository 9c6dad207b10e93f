//! The servers of the demonstration, their loads, and the measurement of both network stacks.

use crate::failure::Failure;
use core::net::Ipv4Addr;
use ginnel::StopFlag;
use ginnel_apps::load::Report;
use ginnel_measure::cpu_account::CpuAccount;
use ginnel_measure::generator::{ANSWER_TIMEOUT, LoadProtocol, LoadSpec};
use ginnel_measure::machine::Cpus;
use ginnel_measure::program::{NetworkStack, OUTPUT_INTRODUCTION, RunningPrograms};
use ginnel_measure::testbed::{Medium, Testbed};
use ginnel_measure::{CoreLayout, MeasureError, servers};
use rustix::process::Pid;
use std::ffi::OsString;
use std::net::TcpListener;
use std::path::Path;

/// The server's address on a stack of its own, and on the kernel in a network namespace of its own.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);

/// A load, which is a row of the table.
#[derive(Debug)]
pub struct Load {
    /// Text of the row.
    pub row: &'static str,
    /// Plural of what the server handles under this load, for a sentence.
    pub handled: &'static str,
    /// The server.
    pub server: Server,
    /// Options of `ginnel load`.
    options: &'static [&'static str],
}

/// An unmodified server program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    Nginx,
    Redis,
}

const NGINX_LOADS: &[Load] = &[
    Load {
        row: "nginx, a connection per request",
        handled: "short connections",
        server: Server::Nginx,
        options: &["--connections", "64"],
    },
    Load {
        row: "nginx, 64 connections kept alive",
        handled: "requests on open connections",
        server: Server::Nginx,
        options: &["--connections", "64", "--keep-alive"],
    },
];

const REDIS_LOADS: &[Load] = &[Load {
    row: "redis, GET by 50 clients",
    handled: "GET requests",
    server: Server::Redis,
    options: &["--connections", "50", "--size", "64"],
}];

impl Server {
    /// All servers, in the order of the table.
    pub const ALL: [Self; 2] = [Self::Nginx, Self::Redis];

    /// Returns the name for messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nginx => "nginx",
            Self::Redis => "redis",
        }
    }

    /// Returns the loads of the server.
    pub const fn loads(self) -> &'static [Load] {
        match self {
            Self::Nginx => NGINX_LOADS,
            Self::Redis => REDIS_LOADS,
        }
    }

    /// Returns how to install the server, or `None` if it is installed.
    pub fn missing(self) -> Option<String> {
        let (program, package) = match self {
            Self::Nginx => ("nginx", "nginx-light"),
            Self::Redis => ("redis-server", "redis-server"),
        };
        let hint = format!("{program} is not installed (on Debian and Ubuntu: apt-get install {package})");
        servers::find(program).is_err().then_some(hint)
    }

    fn command_line(self, testbed: &Testbed, port: u16) -> Result<Vec<OsString>, MeasureError> {
        match self {
            Self::Nginx => servers::nginx(&testbed.folder, testbed.address, port),
            Self::Redis => servers::redis(&testbed.folder, testbed.address, port),
        }
    }
}

impl Load {
    fn spec(&self, address: Ipv4Addr, port: u16, stop: &StopFlag) -> LoadSpec {
        let (protocol, target) = match self.server {
            Server::Nginx => (LoadProtocol::Http, format!("http://{address}:{port}/")),
            Server::Redis => (LoadProtocol::Redis, format!("{address}:{port}")),
        };
        let mut arguments = vec![target.as_str()];
        arguments.extend(self.options);
        LoadSpec { stop: Some(stop.clone()), ..LoadSpec::new(protocol, &arguments) }
    }
}

/// The figures of one measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DemoFigures {
    /// Requests per second of CPU time of the server's side.
    pub per_core: f64,
    /// 99th percentile of the latency in nanoseconds.
    pub p99_ns: u64,
    /// Requests without a successful answer.
    pub errors: u64,
    /// Share of both cores that other programs used.
    pub other_programs: f64,
}

impl DemoFigures {
    fn new(report: &Report, account: &CpuAccount) -> Self {
        Self {
            per_core: report.achieved.requests_per_second / account.server_share(),
            p99_ns: report.latency_ns.total.p99,
            errors: report.failures.values().sum::<u64>() + report.unsuccessful(),
            other_programs: account.other_programs_share,
        }
    }
}

/// The conditions of all measurements.
pub struct DemoTestbed<'a> {
    /// The server's address on the kernel.
    pub kernel_address: Ipv4Addr,
    pub cpus: Cpus,
    /// A directory for the files of the servers.
    pub folder: &'a Path,
    /// The process group of the servers.
    pub group: Pid,
    /// Length of a measurement.
    pub seconds: f64,
    pub stop: &'a StopFlag,
}

/// A server that runs on both stacks at the same time. One is idle while the other is measured.
pub struct ServerPair {
    port: u16,
    kernel: ServerOnStack,
    ginnel: ServerOnStack,
}

struct ServerOnStack {
    name: String,
    testbed: Testbed,
    running: RunningPrograms,
}

impl DemoTestbed<'_> {
    /// Starts a server on both stacks and waits until both answer.
    pub fn start(&self, server: Server) -> Result<ServerPair, Failure> {
        let kernel = self.testbed(server, "kernel", Medium::Loopback, self.kernel_address)?;
        let ginnel = self.testbed(server, "ginnel", Medium::Memif, ADDRESS)?;
        kernel.set_up(true).map_err(to_failure)?;
        ginnel.set_up(false).map_err(to_failure)?;
        let port = free_port(self.kernel_address)?;
        let mut pair = ServerPair {
            port,
            kernel: ServerOnStack::start(server, NetworkStack::Kernel, kernel, port)?,
            ginnel: ServerOnStack::start(server, NetworkStack::Ginnel, ginnel, port)?,
        };
        for on in [&mut pair.kernel, &mut pair.ginnel] {
            let spec = server.loads()[0].spec(on.testbed.address, port, self.stop);
            let waited = spec.wait_for_answer(&on.testbed, ANSWER_TIMEOUT, || on.running.check());
            waited.map_err(|error| on.failure(error))?;
        }
        Ok(pair)
    }

    /// Measures one load on the kernel and on Ginnel, and returns the figures in this order.
    pub fn measure(
        &self,
        pair: &mut ServerPair,
        load: &Load,
        ginnel_first: bool,
    ) -> Result<[DemoFigures; 2], Failure> {
        let measure = |on: &mut ServerOnStack| {
            let spec = load.spec(on.testbed.address, pair.port, self.stop);
            on.measure(&spec, self.seconds)
        };
        if ginnel_first {
            let figures = measure(&mut pair.ginnel)?;
            Ok([measure(&mut pair.kernel)?, figures])
        } else {
            Ok([measure(&mut pair.kernel)?, measure(&mut pair.ginnel)?])
        }
    }

    fn testbed(
        &self,
        server: Server,
        stack: &str,
        medium: Medium,
        address: Ipv4Addr,
    ) -> Result<Testbed, Failure> {
        let folder = self.folder.join(format!("{}-{stack}", server.name()));
        std::fs::create_dir(&folder).map_err(|e| Failure::running(format!("{}: {e}", folder.display())))?;
        Ok(Testbed {
            medium,
            cpus: self.cpus,
            layout: CoreLayout::Sender,
            polls: false,
            address,
            folder,
            process_group: Some(self.group),
        })
    }
}

impl ServerOnStack {
    fn start(server: Server, stack: NetworkStack, testbed: Testbed, port: u16) -> Result<Self, Failure> {
        let on = if stack == NetworkStack::Kernel { "the kernel" } else { "Ginnel" };
        let program = server.command_line(&testbed, port).map_err(to_failure)?;
        let running = RunningPrograms::start(&[program], stack, &testbed).map_err(to_failure)?;
        Ok(Self { name: format!("{} on {on}", server.name()), testbed, running })
    }

    fn measure(&mut self, spec: &LoadSpec, seconds: f64) -> Result<DemoFigures, Failure> {
        let measured = spec.measure(&self.testbed, seconds, |participants| self.running.add_to(participants));
        let (report, account) = measured.map_err(|error| self.failure(error))?;
        self.running.check().map_err(|error| self.failure(error))?;
        if report.requests.completed == 0 {
            let kinds: Vec<&str> = report.failures.keys().copied().collect();
            let reason = format!("answered no request ({})", kinds.join(", "));
            return Err(self.failure(MeasureError::Failed(reason)));
        }
        Ok(DemoFigures::new(&report, &account))
    }

    /// Returns an error that names the server and quotes its last output.
    fn failure(&self, error: MeasureError) -> Failure {
        let (MeasureError::Skipped(reason) | MeasureError::Failed(reason)) = error;
        let quoted =
            if reason.contains(OUTPUT_INTRODUCTION) { String::new() } else { self.running.last_output() };
        Failure::running(format!("{}: {reason}{quoted}", self.name))
    }
}

/// Converts an error that names what it is about.
pub fn to_failure(error: MeasureError) -> Failure {
    let (MeasureError::Skipped(reason) | MeasureError::Failed(reason)) = error;
    Failure::running(reason)
}

/// Returns a TCP port that no program uses.
fn free_port(address: Ipv4Addr) -> Result<u16, Failure> {
    let port = TcpListener::bind((address, 0)).and_then(|listener| listener.local_addr());
    Ok(port.map_err(|e| Failure::running(format!("a free port of {address}: {e}")))?.port())
}
