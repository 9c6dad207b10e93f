//! `ginnel load`.

mod messages;
mod replay;
mod workers;

use self::workers::CableEnds;
use super::serve;
use crate::failure::Failure;
use crate::output;
use crate::publish;
use crate::signals;
use crate::stack_options::{DeviceName, OwnStackOptions};
use crate::table::{Table, with_thousands_separators};
use clap::{Args, Subcommand};
use core::net::SocketAddr;
use core::time::Duration;
use ginnel::config::{DeviceConfig, DeviceKind, LinkConfig, Prefix};
use ginnel::{Config, Error, Handler, PublishedStack, Shard, ShardStats, Shards, StopFlag};
use ginnel_apps::RunHandler;
use ginnel_apps::httpd::Httpd;
use ginnel_apps::load::light::WorkerStack;
use ginnel_apps::load::messages::{EchoLoadOptions, IotLoadOptions};
use ginnel_apps::load::run::LoadJob;
use ginnel_apps::load::{self, CommonOptions, LoadOptions, Report, StackKind};
use ginnel_devices::memory::{MemoryConfig, RssMode, multi_queue, pair};
use ginnel_stack::device::Device;
use messages::MessageCommandOptions;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

/// Most source addresses that a stack gets.
const SOURCES_MAX: u64 = 16_384;

/// The kinds of load.
#[derive(Debug, Subcommand)]
pub enum LoadCommand {
    /// Request pages from a web server, and measure throughput and latency
    ///
    /// A measurement describes the server only if the server was the bottleneck. The report warns if the
    /// generator was busy all the time; with --serve it also shows how long the server was idle.
    ///
    /// --stack chooses the TCP of the generator. "light" is a minimal client TCP: one core of it can overload
    /// a server that runs on one core of Ginnel. It offers no SACK, drops segments that arrive out of order,
    /// and keeps no TIME-WAIT state; a port is used again after all 32,768 ports of its address. "ginnel"
    /// (the default) runs a complete TCP for each connection; use it on links with loss or reordering, and
    /// for realistic clients. One core of it generates about as many requests as one core of Ginnel serves,
    /// so it needs two or more cores (--workers) for each core of the server. "kernel" uses the kernel's
    /// sockets and makes some ten thousand connections per second on a core.
    ///
    /// The exit status is 1 if no request was answered, or none at the end of the run although requests
    /// failed then: the server has vanished. Other failures are only reported.
    Http(Box<HttpCommandOptions>),

    /// Request a value from a Redis server on persistent connections, and measure throughput and latency
    ///
    /// Each connection first stores the value; these requests are not counted. The stacks and the exit status
    /// are described in "ginnel load http --help".
    Redis(Box<ValueCommandOptions<load::RedisOptions>>),

    /// Request a value from a memcached server on persistent connections, and measure throughput and latency
    ///
    /// Each connection first stores the value; these requests are not counted. The stacks and the exit status
    /// are described in "ginnel load http --help".
    Memcached(Box<ValueCommandOptions<load::MemcachedOptions>>),

    /// Send messages of many devices to "ginnel iot", and measure the latency of its answers
    ///
    /// Every connection stands for a device and sends one message in each epoch. Messages have due times,
    /// which do not depend on the server, and latency counts from them. Few messages are urgent requests;
    /// most are heartbeats without an answer. At the end every message is accounted for: those sent are the
    /// answered ones, the heartbeats and the unanswered ones. The exit status is 1 if the connections or the
    /// rate that were asked for were not reached. docs/load.md explains the modes.
    ///
    /// The short options are those of MCC, QStack's generator. Of these, -r and -t mean something else in
    /// "load http": a rate, and a timeout; -w is its warm-up.
    Iot(Box<MessageCommandOptions<IotLoadOptions>>),

    /// Send messages of many devices to an echo service, and measure and compare what comes back
    ///
    /// As "load iot", but every message is answered, with its own bytes, and messages may have random
    /// lengths.
    Echo(Box<MessageCommandOptions<EchoLoadOptions>>),

    /// Send what the clients of a capture sent to another server, at the recorded times
    ///
    /// Each TCP connection of the capture becomes a connection to the server. Nothing waits for answers, and
    /// latency counts from the intended time of a request's last byte to the first byte of its answer.
    /// Connections of whose clients bytes are missing are left out, and counted. The exit status is 1 if
    /// connections could not be established or no request was answered. docs/load.md has the definitions.
    Replay(Box<replay::ReplayCommandOptions>),
}

/// Options of `ginnel load http`.
#[derive(Clone, Debug, Args)]
pub struct HttpCommandOptions {
    /// Options of the generator.
    #[command(flatten)]
    pub load: load::HttpOptions,
    /// Options of the generator's stack.
    #[command(flatten)]
    pub stack: OwnStackOptions,
    /// With --device memory: serve this directory with ginnel httpd at the other end of the cable, on a
    /// thread of its own.
    #[arg(long, value_name = "ROOT", help_heading = "Stack")]
    pub serve: Option<PathBuf>,
    /// CPU to pin the thread of that server to.
    #[arg(long, value_name = "N", requires = "serve", help_heading = "Stack", value_parser = clap::value_parser!(u32).range(0..=1023))]
    pub serve_cpu: Option<u32>,
}

/// Options of `ginnel load redis` and `ginnel load memcached`.
#[derive(Clone, Debug, Args)]
pub struct ValueCommandOptions<A: Args> {
    /// Options of the generator.
    #[command(flatten)]
    pub load: A,
    /// Options of the generator's stack.
    #[command(flatten)]
    pub stack: OwnStackOptions,
}

impl LoadCommand {
    /// Runs the generator and prints its report.
    pub fn run(self) -> Result<(), Failure> {
        let stop = signals::stop_on_signal("the measurement")?;
        let (json, (report, server)) = match self {
            Self::Http(options) => (options.load.common.json, measure(&options, &stop)?),
            Self::Redis(options) => (
                options.load.common().json,
                (measure_without_server(&options.load, &options.stack, false, &stop)?, None),
            ),
            Self::Memcached(options) => (
                options.load.common().json,
                (measure_without_server(&options.load, &options.stack, false, &stop)?, None),
            ),
            Self::Iot(options) => return messages::run(&options, &stop),
            Self::Echo(options) => return messages::run(&options, &stop),
            Self::Replay(options) => return replay::run(&options, &stop),
        };
        if json {
            output::print(format_args!("{}\n", report.to_json()))?;
            return check_answered(&report);
        }
        output::print(&report)?;
        if let Some(server) = server {
            let mut table = Table::new(&["server (--serve)", ""]);
            table.add_row(["responses".into(), with_thousands_separators(server.responses)]);
            table.add_row(["idle time".into(), format!("{:.1} %", server.idle_percent)]);
            output::print(format_args!("\n{table}"))?;
        }
        check_answered(&report)
    }
}

/// Returns an error if no request was answered, or none at the end, or the run was given up, so that scripts
/// see it in the exit status.
fn check_answered(report: &Report) -> Result<(), Failure> {
    let last_answer = report.answered_until_seconds;
    if report.requests.completed > 0 && report.gave_up_after_seconds.is_none() && last_answer.is_none() {
        return Ok(());
    }
    let failures: Vec<&str> = report.failures.keys().copied().collect();
    let why = if failures.is_empty() { String::new() } else { format!(": {}", failures.join(", ")) };
    let when = match (report.gave_up_after_seconds, last_answer) {
        (Some(seconds), _) => format!(" for {seconds} s, so the run was given up"),
        (None, Some(seconds)) => format!(" after {seconds:.1} s"),
        (None, None) => String::new(),
    };
    Err(Failure::running(format!("{} answered no request{when}{why}", report.server)))
}

/// Measurements of the server of `--serve`.
#[derive(Clone, Copy, Debug)]
struct ServerSummary {
    /// Requests answered.
    responses: u64,
    /// Percentage of the time that the server was idle; near zero if the server was the bottleneck.
    idle_percent: f64,
}

/// Runs the generator, and the server of `--serve`.
fn measure(
    options: &HttpCommandOptions,
    stop: &StopFlag,
) -> Result<(Report, Option<ServerSummary>), Failure> {
    let Some(root) = &options.serve else {
        return Ok((measure_without_server(&options.load, &options.stack, true, stop)?, None));
    };
    check_kernel_options(&options.load.common, &options.stack)?;
    if options.load.common.stack == StackKind::Kernel {
        return Err(Failure::usage(
            "--serve cannot be combined with --stack kernel: use --stack ginnel or --stack light",
        ));
    }
    if options.stack.device != Some(DeviceName::Memory) {
        return Err(Failure::usage("--serve needs --device memory, whose other end the server uses"));
    }
    measure_with_server(options, root, stop)
}

/// Refuses options of Ginnel's stack, and `--shards`, with the kernel's TCP.
fn check_kernel_options(common: &CommonOptions, stack: &OwnStackOptions) -> Result<(), Failure> {
    refuse_stack_options(common.stack, stack)?;
    if common.stack == StackKind::Kernel && common.shards.is_some() {
        return Err(Failure::usage("--shards needs --stack ginnel: use --workers instead"));
    }
    Ok(())
}

/// Refuses options of Ginnel's stack with the kernel's TCP.
fn refuse_stack_options(kind: StackKind, stack: &OwnStackOptions) -> Result<(), Failure> {
    match stack.first_given().filter(|_| kind == StackKind::Kernel) {
        Some(option) => Err(Failure::usage(format!(
            "{option} cannot be combined with --stack kernel: it configures the stack of --stack ginnel and --stack light"
        ))),
        None => Ok(()),
    }
}

/// Runs the generator against a server outside of this process. `can_serve` tells whether the kind of load
/// has the option --serve.
fn measure_without_server(
    options: &impl LoadOptions,
    stack: &OwnStackOptions,
    can_serve: bool,
    stop: &StopFlag,
) -> Result<Report, Failure> {
    let common = options.common();
    check_kernel_options(common, stack)?;
    if common.stack == StackKind::Kernel {
        return Ok(load::measure_on_kernel(&options.job()?, stop)?);
    }
    if stack.device == Some(DeviceName::Memory) {
        return Err(Failure::usage(
            "--device memory needs --serve ROOT, the files for a server at the other end of the cable",
        ));
    }
    run_on_stacks(&options.job()?, stack.to_config()?, can_serve, stop)
}

/// Runs a job on the stacks of a configuration. `can_serve` tells whether the kind of load has the option
/// --serve.
fn run_on_stacks<J: LoadJob>(
    job: &J,
    config: Config,
    can_serve: bool,
    stop: &StopFlag,
) -> Result<J::Report, Failure> {
    let common = job.common();
    let published = publish::publish_stack(&config.run, "load")?;
    if let Some(count) = shard_count(common, &config)? {
        check_ports(job, &config, 1)?;
        return run_on_shards(job, count, config, None, published, stop);
    }
    let shares = workers::split_config(&config, common.workers(), can_serve)?;
    check_ports(job, &config, common.workers())?;
    let stacks =
        add_source_addresses(shares, common)?.into_iter().map(|config| WorkerStack { config, device: None });
    Ok(run_on_devices(job, stop, stacks.collect(), published)?)
}

/// Runs the generator's workers and the server, each on a thread, with a memory cable from each worker to the
/// server.
fn measure_with_server(
    options: &HttpCommandOptions,
    root: &Path,
    stop: &StopFlag,
) -> Result<(Report, Option<ServerSummary>), Failure> {
    let target = options.load.url.resolve().map_err(Failure::usage)?;
    let mut load_options = options.load.clone();
    let load = &mut load_options.common;
    let ends = if load.shards.is_some() || load.workers() == 1 {
        let end = workers::sole_cable(&options.stack, target.ip())?;
        if let Some(count) = shard_count(load, &end.worker)? {
            return measure_shards_with_server(options, root, stop, end, target, count);
        }
        vec![end]
    } else {
        workers::worker_cables(&options.stack, load, target.ip())?
    };
    let (worker_devices, server_devices): (Vec<_>, Vec<_>) =
        ends.iter().map(|end| pair(cable_config(end.worker.devices.first()))).unzip();
    let published = publish_load_stack(ends.first())?;
    let server = build_server(&ends, target, root, server_devices, options.serve_cpu, published.clone())?;
    let configs = add_source_addresses(ends.into_iter().map(|end| end.worker).collect(), load)?;
    let stacks = configs
        .into_iter()
        .zip(worker_devices)
        .map(|(config, cable)| WorkerStack { config, device: Some(cable) });
    let stacks = stacks.collect();
    run_beside_server(server, stop, || Ok(run_on_devices(&load_options.job()?, stop, stacks, published)?))
}

/// Runs a generator whose shards share one cable to the server.
fn measure_shards_with_server(
    options: &HttpCommandOptions,
    root: &Path,
    stop: &StopFlag,
    end: CableEnds,
    target: SocketAddr,
    count: u32,
) -> Result<(Report, Option<ServerSummary>), Failure> {
    let (server_devices, worker_devices) =
        multi_queue(&cable_config(end.worker.devices.first()), count as usize, RssMode::Hash);
    let published = publish_load_stack(Some(&end))?;
    let ends = core::slice::from_ref(&end);
    let server =
        build_server(ends, target, root, vec![server_devices], options.serve_cpu, published.clone())?;
    let job = options.load.job()?;
    run_beside_server(server, stop, || {
        run_on_shards(&job, count, end.worker, Some(worker_devices), published, stop)
    })
}

/// Runs `measure` while the server runs on another thread.
fn run_beside_server(
    mut server: Shard<Httpd>,
    stop: &StopFlag,
    measure: impl FnOnce() -> Result<Report, Failure>,
) -> Result<(Report, Option<ServerSummary>), Failure> {
    let (server_stop, stats) = (StopFlag::new()?, server.stats_reader());
    let flag = server_stop.clone();
    let thread = thread::Builder::new().name("server".into()).spawn(move || {
        let result = server.run(&flag);
        (server, result)
    })?;
    // The server does not listen before duplicate address detection of its IPv6 addresses ends; an earlier
    // connect would be refused.
    while stats.snapshot().running_ns == 0 && !thread.is_finished() && !stop.is_set() {
        thread::sleep(Duration::from_millis(1));
    }
    let measured = measure();
    server_stop.stop();
    let (server, result) = thread.join().map_err(|_| Failure::running("the server's thread panicked"))?;
    result?;
    let idle_percent = 100.0 * server.stats().idle_share();
    let responses = server.handler().server().counters().responses;
    Ok((measured?, Some(ServerSummary { responses, idle_percent })))
}

/// Builds one shard that serves `root` on a link for each cable.
fn build_server(
    ends: &[CableEnds],
    address: SocketAddr,
    root: &Path,
    cables: Vec<Device>,
    cpu: Option<u32>,
    published: Option<Arc<PublishedStack>>,
) -> Result<Shard<Httpd>, Failure> {
    let httpd = serve::httpd_options(root, &address.to_string())?;
    let mut config = Config::default();
    if let Some(CableEnds { worker, .. }) = ends.first() {
        (config.network, config.tcp, config.shard) =
            (worker.network.clone(), worker.tcp.clone(), worker.shard.clone());
    }
    config.shard.cpu = cpu;
    let names: Vec<String> = (0..ends.len()).map(|n| format!("memory{n}")).collect();
    for (end, name) in ends.iter().zip(&names) {
        config.devices.push(DeviceConfig::new(name, DeviceKind::Memory));
        config.links.push(LinkConfig::new(name, name, vec![end.server]));
    }
    let builder = Shard::builder(config).handler(Httpd::new(&httpd)?).published(published, "server");
    Ok(names.into_iter().zip(cables).fold(builder, |b, (name, cable)| b.device(name, cable)).build()?)
}

/// Returns the cable's parameters from the device's configuration.
fn cable_config(device: Option<&DeviceConfig>) -> MemoryConfig {
    let mut cable = MemoryConfig::default();
    if let Some(device) = device {
        cable.mtu = device.mtu.map_or(cable.mtu, |mtu| mtu as usize);
        if !device.offload {
            cable = cable.without_offloads();
        }
    }
    cable
}

/// Adds each worker's share of the source addresses to its stack.
fn add_source_addresses(mut configs: Vec<Config>, options: &CommonOptions) -> Result<Vec<Config>, Failure> {
    let count: u64 = options.source.iter().map(|range| range.count()).sum();
    if count > SOURCES_MAX {
        return Err(Failure::usage(format!(
            "--source: {count} addresses are too many: at most {SOURCES_MAX}, except with --stack kernel"
        )));
    }
    if (1..u64::from(options.workers())).contains(&count) {
        return Err(Failure::usage(format!(
            "--source: {count} addresses are too few for {} workers: each needs an address of its own",
            options.workers()
        )));
    }
    for (worker, config) in (0..).zip(&mut configs) {
        let Some(link) = config.links.first_mut() else { continue };
        for source in options.sources(worker).all() {
            let same = link.addresses.iter().find(|p| p.address.is_ipv4() == source.is_ipv4());
            let len = same.map_or(if source.is_ipv4() { 32 } else { 128 }, |p| p.len);
            if !link.addresses.iter().any(|p| p.address == source) {
                link.addresses.push(Prefix { address: source, len });
            }
        }
    }
    Ok(configs)
}

/// Refuses more connections than the source addresses have ports. Without `--source`, each of `links` has one
/// address.
fn check_ports(job: &impl LoadJob, config: &Config, links: u32) -> Result<(), Failure> {
    let options = job.common();
    let given: u64 = options.source.iter().map(|range| range.count()).sum();
    let addresses = if given > 0 { given } else { links.into() };
    let (ports, servers) = match options.stack {
        StackKind::Kernel => return Ok(()),
        // Each link has a table of ports of its own.
        StackKind::Light => (load::light::ports_of_address(addresses.div_ceil(links.into())).into(), 1),
        StackKind::Ginnel => {
            let ports = config.tcp.local_port_first..=config.tcp.local_port_last;
            (ports.len() as u64, job.targets().len() as u64)
        }
    };
    // Several agents share the connections.
    let connections = options.connections.div_ceil(job.share(0, 1).workers);
    if u64::from(connections) <= addresses * ports * servers {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "{connections} connections need more ports than there are: source addresses: {addresses}, with {ports} ports each{}; give more with --source",
        if servers > 1 { format!(" for each of {servers} servers") } else { String::new() }
    )))
}

/// Returns the number of shards of the generator's stack if it has several, else `None`.
fn shard_count(options: &CommonOptions, config: &Config) -> Result<Option<u32>, Failure> {
    let count = options.shards.unwrap_or(config.shards.count);
    if count > 1 && options.stack == StackKind::Light {
        return Err(Failure::usage("--shards needs --stack ginnel: use --workers instead"));
    }
    if count > 1 && options.workers > 1 {
        return Err(Failure::usage(
            "--workers cannot be combined with a configuration of several shards: each shard is a worker",
        ));
    }
    if options.connections < count {
        let problem = format!(
            "--shards {count} needs at least {count} connections, but --connections is {}",
            options.connections
        );
        return Err(Failure::usage(problem));
    }
    Ok((count > 1).then_some(count))
}

/// Runs the generator on `count` shards of one stack. `queues` replaces the device that the configuration
/// would open.
fn run_on_shards<J: LoadJob>(
    job: &J,
    count: u32,
    config: Config,
    queues: Option<Vec<Device>>,
    published: Option<Arc<PublishedStack>>,
    stop: &StopFlag,
) -> Result<J::Report, Failure> {
    let mut job = job.clone();
    job.common_mut().shards = Some(count);
    // Every shard has all addresses of the stack, and opens connections from its share of them.
    let alone = CommonOptions { shards: None, workers: 1, ..job.common().clone() };
    let mut config = add_source_addresses(vec![config], &alone)?.remove(0);
    config.shards.count = count;
    config.validate().map_err(|e| Failure::usage(e.to_string()))?;
    let name = config.devices.first().map(|device| device.name.clone()).unwrap_or_default();
    let mut shards = Shards::new(config).published(published);
    if let Some(queues) = queues {
        shards = shards.device(name, queues);
    }
    Ok(load::measure_on_shards(&job, stop, shards.open()?)?)
}

/// Runs the generator on Ginnel's TCP or on the light TCP.
fn run_on_devices<J: LoadJob>(
    job: &J,
    stop: &StopFlag,
    stacks: Vec<WorkerStack>,
    published: Option<Arc<PublishedStack>>,
) -> Result<J::Report, Error> {
    if job.common().stack == StackKind::Light {
        return load::measure_light(job, stop, stacks);
    }
    let stack = |(index, stack)| ShardRunner { stack, stop, index, published: published.clone() };
    let stacks = stacks.into_iter().enumerate().map(stack).collect();
    load::measure(job, stop, stacks)
}

/// Publishes the generator's stacks under one name.
fn publish_load_stack(end: Option<&CableEnds>) -> Result<Option<Arc<PublishedStack>>, Failure> {
    end.map_or(Ok(None), |end| publish::publish_stack(&end.worker.run, "load"))
}

/// Runs a worker on a shard of its own.
struct ShardRunner<'a> {
    stack: WorkerStack,
    stop: &'a StopFlag,
    index: usize,
    published: Option<Arc<PublishedStack>>,
}

impl RunHandler for ShardRunner<'_> {
    fn run_handler<H: Handler + Send + 'static>(self, handler: H) -> Result<ShardStats, Error> {
        let WorkerStack { config, device } = self.stack;
        let name = config.devices.first().map(|device| device.name.clone()).unwrap_or_default();
        let label = self.index.to_string();
        let mut builder = Shard::builder(config).handler(handler).published(self.published, label);
        if let Some(device) = device {
            builder = builder.device(name, device);
        }
        let mut shard = builder.build()?;
        shard.run(self.stop)?;
        Ok(*shard.stats())
    }
}
