//! `ginnel httpd` over AF_XDP and nginx on the kernel, over the same cable, with the same generator, CUBIC on both, and both charged for what it costs to receive.

use crate::harness::machine::{Cpus, pin};
use crate::harness::pairs::{self, Bound, Measured};
use crate::harness::result::BenchResult;
use crate::harness::{Failure, Layout, Options};
use crate::http;
use crate::veth::{self, Bottleneck, Parts};
use clap::{Args, Parser};
use core::time::Duration;
use ginnel::config::{AfXdpKeys, Config, DeviceConfig, DeviceKind};
use ginnel::{Error, Shard, StopFlag};
use ginnel_apps::httpd::{self, Httpd};
use ginnel_apps::load::light::Place;
use ginnel_apps::load::{self, Report};
use ginnel_stack::tcp::config::TcpConfig;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Instant;

/// The server's address in either arm.
const ADDRESS: &str = "10.77.0.1";
/// Sources of the generator: with 32,768 ports each they last longer than TIME_WAIT.
const SOURCES: &str = "10.77.0.50-10.77.0.249";
/// Connections at the same time.
const CONNECTIONS: &str = "64";
/// Room for all who wait.
const TIME_WAIT_MAX: u32 = 6_000_000;
/// How long a server may take to start.
const PATIENCE: Duration = Duration::from_secs(10);

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::Failed(error.to_string())
}

/// Short connections.
pub fn short(options: &Options) -> Result<Vec<BenchResult>, Failure> {
    run("short-vs-kernel", "connections/s", options, false)
}

/// Requests on connections that stay.
pub fn keep_alive(options: &Options) -> Result<Vec<BenchResult>, Failure> {
    run("keepalive-vs-kernel", "requests/s", options, true)
}

fn run(
    name: &'static str,
    unit: &str,
    options: &Options,
    keep_alive: bool,
) -> Result<Vec<BenchResult>, Failure> {
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::Skipped("needs root: BPF programs, and the kernel's threads".into()));
    }
    if let Err(e) = Command::new("nginx").arg("-v").stderr(Stdio::null()).status() {
        return Err(Failure::Skipped(format!("nginx: {e}")));
    }
    let mut cpus = Cpus::choose()?;
    if options.layout == Layout::One {
        cpus.client = cpus.server;
    }
    let site = tempfile::tempdir()?;
    std::fs::write(site.path().join("64"), [b'x'; http::BODY_BYTES])?;
    let plan = Plan {
        name,
        cpus,
        layout: options.layout,
        seconds: options.seconds(5.0),
        keep_alive,
        site: site.path(),
    };
    let ours = || plan.ours();
    let theirs = || plan.theirs();
    Ok(vec![pairs::run(name, unit, options, Bound::Machine, Box::new(ours), Some(Box::new(theirs)))?])
}

/// What both arms have in common.
struct Plan<'a> {
    name: &'static str,
    cpus: Cpus,
    layout: Layout,
    seconds: f64,
    keep_alive: bool,
    site: &'a Path,
}

/// The command line of a program.
#[derive(Parser)]
struct CommandLine<T: Args> {
    #[command(flatten)]
    options: T,
}

fn parse<T: Args>(words: &[&str]) -> Result<T, Failure> {
    let parsed = CommandLine::try_parse_from([&["program"], words].concat());
    parsed.map(|line| line.options).map_err(failed)
}

/// An interface for one shard, which sleeps when there is nothing to do: the thread that receives for it has the same core.
fn config(interface: &str, keys: &str, address: &str) -> Result<Config, Failure> {
    let keys: AfXdpKeys = keys.parse().map_err(Failure::Failed)?;
    let device = DeviceConfig { af_xdp: Some(keys), ..DeviceConfig::new(interface, DeviceKind::AfXdp) };
    let prefix = format!("{address}/24").parse().map_err(Failure::Failed)?;
    let mut config = Config {
        tcp: TcpConfig { time_wait_max: TIME_WAIT_MAX, ..TcpConfig::default() },
        ..Config::single(device, &[prefix], &[])
    };
    config.shard.spin_us = 0;
    Ok(config)
}

impl Plan<'_> {
    fn ours(&self) -> Result<Measured, Failure> {
        veth::lay(None, self.layout)?;
        let site = self.site.to_string_lossy();
        let options: httpd::Options = parse(&[&site, "--listen", "0.0.0.0:80"])?;
        let config = config(veth::SERVER, "", ADDRESS)?;
        let stop = StopFlag::new()?;
        let cpu = self.cpus.server;
        std::thread::scope(|scope| {
            let (started, ready) = mpsc::channel();
            let server = scope.spawn({
                let stop = stop.clone();
                move || -> Result<(), Error> {
                    pin(cpu).map_err(|e| Error::application(e.to_string()))?;
                    let mut shard = Shard::builder(config).handler(Httpd::new(&options)?).build()?;
                    // Nobody waits for it if the measurement has failed meanwhile.
                    let _ = started.send(veth::this_thread());
                    shard.run(&stop)
                }
            });
            let measured = match ready.recv_timeout(PATIENCE) {
                Ok(thread) => self.measure("ours", thread),
                Err(_) => Err(Failure::Failed("the server did not start".into())),
            };
            stop.stop();
            server.join().expect("the server does not panic").map_err(failed)?;
            measured
        })
    }

    fn theirs(&self) -> Result<Measured, Failure> {
        veth::lay(Some(&format!("{ADDRESS}/24")), self.layout)?;
        let server = Nginx::start(self.cpus.server)?;
        self.measure("theirs", format!("/proc/{}", server.child.id()))
    }

    /// Lets the generator ask a server that runs. `server` is its thread's folder below /proc.
    fn measure(&self, arm: &str, server: String) -> Result<Measured, Failure> {
        let url = format!("http://{ADDRESS}/64");
        let (duration, warm_up) = (self.milliseconds(1.0), self.milliseconds(0.2));
        let mut words = vec![&*url, "--connections", CONNECTIONS, "--source", SOURCES];
        words.extend(["--duration", &duration, "--warmup", &warm_up, "--stack", "light"]);
        words.extend(self.keep_alive.then_some("--keep-alive"));
        let options: load::Options = parse(&words)?;
        let config = config(veth::GENERATOR, "take=all", "10.77.0.50")?;
        let stop = StopFlag::new()?;
        let cpu = self.cpus.client;
        let device = std::thread::scope(|scope| {
            let open = || -> Result<_, Failure> {
                pin(cpu)?;
                // The kernel's threads are there once both devices are.
                let device = ginnel::raw::open(&config.devices[0], &config, None).map_err(failed)?;
                let mut parts = Parts::place(self.cpus, self.layout)?;
                parts.add("server", server);
                let places = vec![Place { config: config.clone(), device: Some(device) }];
                veth::account(&parts, || load::measure_light(&options, &stop, places))
            };
            scope.spawn(open).join().expect("the generator does not panic")
        });
        let (report, account) = device?;
        let report: Report = report.map_err(failed)?;
        let mut measured = Measured::new(report.achieved.requests_per_second);
        println!("    {arm}: {:.0}/s; {}", measured.value, account.line);
        measured.facts.extend(account.shares.iter().map(|(role, share)| ((*role).to_string(), *share)));
        let failures: u64 = report.failures.values().sum();
        measured.facts.insert("failures".into(), failures as f64);
        if failures > 0 {
            measured.complaints.push(format!("{} failed of {arm}: {:?}", self.name, report.failures));
        }
        if !matches!(account.bottleneck, Bottleneck::Server | Bottleneck::Both) {
            measured.complaints.push(format!("{arm}: the server was not the {}", account.line));
        }
        Ok(measured)
    }

    fn milliseconds(&self, share: f64) -> String {
        format!("{:.0}ms", 1000.0 * share * self.seconds)
    }
}

/// nginx with one worker and a response from memory, on the kernel's stack.
struct Nginx {
    child: Child,
    _folder: tempfile::TempDir,
}

impl Nginx {
    fn start(cpu: usize) -> Result<Self, Failure> {
        let folder = tempfile::tempdir()?;
        let at = folder.path().display();
        let body = "x".repeat(http::BODY_BYTES);
        let config = format!(
            "daemon off; master_process off; error_log stderr crit; pid {at}/pid;\n\
             events {{ worker_connections 4096; multi_accept on; }}\n\
             http {{\n access_log off; keepalive_requests 1000000000; tcp_nodelay on;\n\
             client_body_temp_path {at}/1; proxy_temp_path {at}/2; fastcgi_temp_path {at}/3; uwsgi_temp_path {at}/4; scgi_temp_path {at}/5;\n\
             server {{ listen {ADDRESS}:80 backlog=4096; location / {{ return 200 \"{body}\"; }} }}\n}}\n"
        );
        let path = folder.path().join("nginx.conf");
        std::fs::write(&path, config)?;
        let spawn = || -> Result<Child, Failure> {
            // A child runs where the thread did that started it.
            pin(cpu)?;
            let mut command = Command::new("nginx");
            command.arg("-c").arg(&path).arg("-p").arg(folder.path()).stdout(Stdio::null());
            Ok(command.spawn()?)
        };
        let child = std::thread::scope(|scope| scope.spawn(spawn).join().expect("it does not panic"))?;
        let server = Self { child, _folder: folder };
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect((ADDRESS, 80)).is_err() {
            if Instant::now() > deadline {
                return Err(Failure::Failed("nginx does not answer".into()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }
}

impl Drop for Nginx {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
