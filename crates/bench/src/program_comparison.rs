//! Compares servers on the kernel and on a stack, in processes of their own or in this process, with equal
//! load from the same generator.

use crate::harness::machine::{Cpus, pin};
use crate::harness::pairs::{self, Arm, Better, Bound, Measurement};
use crate::harness::result::BenchResult;
use crate::harness::{CoreLayout, MeasureError, Options};
use crate::http;
use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind, DpdkOptions};
use ginnel::{Config, Error, Shard, StopFlag};
use ginnel_apps::httpd::{self, Httpd};
use ginnel_apps::load::Report;
use ginnel_measure::cpu_account::{CpuAccount, Participants, this_thread};
use ginnel_measure::generator::{ANSWER_TIMEOUT, LoadSpec, parse};
use ginnel_measure::program::{NetworkStack, OUTPUT_INTRODUCTION, RunningPrograms, ginnel_path};
use ginnel_measure::testbed::{Medium, Testbed};
use ginnel_measure::watched_group::WatchedGroup;
use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use tempfile::TempDir;

/// The server's address in both arms.
pub const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);

/// Runs `ginnel httpd` for the files of a directory on the server's core in this process while `act` runs.
/// `act` gets the path of the server thread's directory in /proc.
pub fn run_beside_httpd<R>(
    testbed: &Testbed,
    site: &Path,
    act: impl FnOnce(String) -> Result<R, MeasureError>,
) -> Result<R, MeasureError> {
    run_beside_configured_httpd(testbed, testbed.server_config()?, site, act)
}

/// Runs `ginnel httpd` as [`run_beside_httpd`] does, on the stack that `config` describes.
fn run_beside_configured_httpd<R>(
    testbed: &Testbed,
    config: Config,
    site: &Path,
    act: impl FnOnce(String) -> Result<R, MeasureError>,
) -> Result<R, MeasureError> {
    let words = [site.to_string_lossy().into_owned(), "--listen".into(), "0.0.0.0:80".into()];
    let options: httpd::HttpdOptions = parse(&words)?;
    let stop = StopFlag::new().map_err(MeasureError::failed)?;
    let cpu = testbed.cpus.server;
    std::thread::scope(|scope| {
        let (started, ready) = mpsc::channel();
        let server = scope.spawn({
            let stop = stop.clone();
            move || -> Result<(), Error> {
                pin(cpu).map_err(|e| Error::application(e.to_string()))?;
                let mut shard = Shard::builder(config).handler(Httpd::new(&options)?).build()?;
                // The receiver is gone if the measurement has failed in the meantime.
                let _ = started.send(this_thread());
                shard.run(&stop)
            }
        });
        let result = match ready.recv_timeout(ANSWER_TIMEOUT) {
            Ok(thread) => act(thread),
            Err(_) => Err(MeasureError::Failed("the server did not start".into())),
        };
        stop.stop();
        server.join().expect("the server does not panic").map_err(MeasureError::failed)?;
        result
    })
}

/// Creates a site with one file, "64", which has 64 bytes, and returns its directory.
pub fn create_site(folder: &Path) -> Result<PathBuf, MeasureError> {
    let site = folder.join("site");
    std::fs::create_dir_all(&site)?;
    std::fs::write(site.join("64"), [b'x'; http::BODY_BYTES])?;
    Ok(site)
}

/// The figure that is taken from a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// Requests per second; with short connections these are connections per second.
    Rate,
    /// Median time from a request to its response in microseconds. The server need not be the bottleneck.
    RoundTrip,
}

/// A comparison of servers under load.
pub struct ProgramComparison<'a> {
    name: String,
    unit: &'static str,
    figure: Figure,
    options: &'a Options,
    load: LoadSpec,
    cpus: Cpus,
    folder: TempDir,
    /// The processes of the servers, which do not outlive this one.
    group: WatchedGroup,
}

impl<'a> ProgramComparison<'a> {
    /// Creates a comparison with this name.
    ///
    /// # Errors
    /// This machine does not permit the measurement.
    pub fn new(
        name: impl Into<String>,
        unit: &'static str,
        figure: Figure,
        options: &'a Options,
        load: LoadSpec,
    ) -> Result<Self, MeasureError> {
        if !rustix::process::geteuid().is_root() {
            return Err(MeasureError::Skipped(
                "needs root: it loads BPF programs and pins kernel threads".into(),
            ));
        }
        let mut cpus = Cpus::choose()?;
        if options.layout == CoreLayout::One {
            cpus.client = cpus.server;
        }
        let folder = tempfile::tempdir()?;
        let group = WatchedGroup::start(&ginnel_path()?, folder.path())?;
        Ok(Self { name: name.into(), unit, figure, options, load, cpus, folder, group })
    }

    /// Returns a directory for files of the servers.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Runs the pairs of measurements.
    pub fn run(&self, ours: Arm<'_>, theirs: Option<Arm<'_>>) -> Result<BenchResult, MeasureError> {
        let better = match self.figure {
            Figure::Rate => Better::Higher,
            Figure::RoundTrip => Better::Lower,
        };
        pairs::run_for(better, &self.name, self.unit, self.options, Bound::Machine, ours, theirs)
    }

    fn testbed(&self, medium: Medium) -> Testbed {
        let folder = self.folder.path().to_owned();
        // A server that polls is never idle, and a rate is valid only if idle time shows which side was the
        // bottleneck. Over a veth pair, polling would also take the core on which the kernel receives.
        let polls = self.figure == Figure::RoundTrip && medium == Medium::Memif;
        Testbed {
            medium,
            cpus: self.cpus,
            layout: self.options.layout,
            polls,
            address: ADDRESS,
            folder,
            process_group: Some(self.group.id()),
        }
    }

    /// Measures programs on the kernel.
    pub fn on_kernel(&self, programs: &[Vec<OsString>]) -> Result<Measurement, MeasureError> {
        self.programs("theirs", programs, NetworkStack::Kernel, Medium::Veth)
    }

    /// Measures programs on a stack.
    pub fn on_stack(&self, programs: &[Vec<OsString>], medium: Medium) -> Result<Measurement, MeasureError> {
        // Fails before anything is measured if the executable is missing.
        ginnel_path()?;
        self.programs("ours", programs, NetworkStack::Ginnel, medium)
    }

    fn programs(
        &self,
        arm: &str,
        programs: &[Vec<OsString>],
        stack: NetworkStack,
        medium: Medium,
    ) -> Result<Measurement, MeasureError> {
        let testbed = self.testbed(medium);
        testbed.set_up(stack == NetworkStack::Kernel)?;
        let mut running = RunningPrograms::start(programs, stack, &testbed)?;
        let with_output = |running: &RunningPrograms, failure| match failure {
            MeasureError::Failed(why) if !why.contains(OUTPUT_INTRODUCTION) => {
                MeasureError::Failed(why + &running.last_output())
            }
            other => other,
        };
        self.load
            .wait_for_answer(&testbed, ANSWER_TIMEOUT, || running.check())
            .map_err(|e| with_output(&running, e))?;
        let measured = self.measure(&testbed, arm, |parts| running.add_to(parts))?;
        running.check()?;
        Ok(measured)
    }

    /// Measures `ginnel httpd` for the files of a directory, in this process over AF_XDP.
    pub fn on_httpd(&self, site: &Path) -> Result<Measurement, MeasureError> {
        let testbed = self.testbed(Medium::Veth);
        testbed.set_up(false)?;
        run_beside_httpd(&testbed, site, |thread| {
            self.measure(&testbed, "ours", |parts| parts.add_thread("server", thread))
        })
    }

    /// Measures `ginnel httpd` as [`ProgramComparison::on_httpd`] does, with a driver of DPDK at the server's
    /// end of the veth pair instead of the AF_XDP device.
    pub fn on_httpd_over_dpdk(&self, site: &Path, driver: &str) -> Result<Measurement, MeasureError> {
        let testbed = self.testbed(Medium::Veth);
        testbed.set_up(false)?;
        let mut config = testbed.server_config()?;
        // The link keeps the name of its device.
        for device in &mut config.devices {
            // An idle shard leaves its core to the thread that receives for the interface, as over AF_XDP,
            // and looks again before the rings are full.
            let keys = format!("args=iface={},poll_us=10", device.name);
            let dpdk: DpdkOptions = keys.parse().map_err(MeasureError::Failed)?;
            *device = DeviceConfig {
                interface: Some(format!("{driver}0")),
                dpdk: Some(dpdk),
                ..DeviceConfig::new(device.name.as_str(), DeviceKind::Dpdk)
            };
        }
        run_beside_configured_httpd(&testbed, config, site, |thread| {
            self.measure(&testbed, "dpdk", |parts| parts.add_thread("server", thread))
        })
    }

    fn measure(
        &self,
        testbed: &Testbed,
        arm: &str,
        add: impl FnOnce(&mut Participants) + Send,
    ) -> Result<Measurement, MeasureError> {
        let (report, account) = self.load.measure(testbed, self.options.seconds(5.0), add)?;
        Ok(self.check_run(arm, &report, &account))
    }

    fn check_run(&self, arm: &str, report: &Report, account: &CpuAccount) -> Measurement {
        let rate = report.achieved.requests_per_second;
        let median = Duration::from_nanos(report.latency_ns.total.p50).as_secs_f64() * 1e6;
        let mut measured = Measurement::new(match self.figure {
            Figure::Rate => rate,
            Figure::RoundTrip => median,
        });
        measured.kernel_time = account.kernel_time;
        println!("    {arm}: {rate:.0}/s, median {median:.1} µs; {}", account.line);
        let facts = &mut measured.facts;
        facts.extend(account.shares.iter().map(|(role, share)| ((*role).to_string(), *share)));
        facts.insert("median_us".into(), median);
        facts.insert("p99_us".into(), report.latency_ns.total.p99 as f64 / 1e3);
        let answered = report.requests.completed.max(1) as f64;
        if account.packets > 0 {
            facts.insert("packets_per_request".into(), account.packets as f64 / answered);
        }
        let failures = report.failures.values().sum::<u64>() + report.unsuccessful();
        facts.insert("failures".into(), failures as f64);
        if failures > 0 {
            let (failures, statuses) = (&report.failures, &report.statuses);
            measured.problems.push(format!("{} failed of {arm}: {failures:?}, {statuses:?}", self.name));
        }
        if self.figure == Figure::Rate && !account.bottleneck.is_server() {
            measured.problems.push(format!("{arm}: the server was not the {}", account.line));
        }
        measured
    }
}
