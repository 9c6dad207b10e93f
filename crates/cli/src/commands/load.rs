//! `ginnel load http`.

use super::serve;
use crate::failure::Failure;
use crate::signals;
use crate::stack_options::{DeviceName, StackOptions};
use crate::table::{Table, grouped};
use clap::{Args, Subcommand};
use core::net::{IpAddr, SocketAddr};
use ginnel::config::{DeviceConfig, DeviceKind, Prefix};
use ginnel::{Config, Error, Handler, Shard, StopFlag};
use ginnel_apps::Run;
use ginnel_apps::httpd::Httpd;
use ginnel_apps::load::{self, Report, StackKind};
use ginnel_devices::memory::{MemoryConfig, pair};
use ginnel_stack::device::Device;
use std::path::{Path, PathBuf};
use std::thread;

/// Source addresses that are given to the stack at the most.
const SOURCES_MAX: u64 = 16_384;

/// What to load.
#[derive(Debug, Subcommand)]
pub enum LoadCommand {
    /// Ask a web server for pages, and measure how it answers
    Http(Box<HttpOptions>),
}

/// Options of `ginnel load http`.
#[derive(Clone, Debug, Args)]
pub struct HttpOptions {
    /// Options of the generator.
    #[command(flatten)]
    pub load: load::Options,
    /// Options of its stack.
    #[command(flatten)]
    pub stack: StackOptions,
    /// With --device memory: the files that a ginnel httpd at the other end of the cable serves, on a thread of its own.
    #[arg(long, value_name = "ROOT", help_heading = "Stack")]
    pub serve: Option<PathBuf>,
    /// Pin the thread of that server to this CPU.
    #[arg(long, value_name = "N", requires = "serve", help_heading = "Stack", value_parser = clap::value_parser!(u32).range(0..=1023))]
    pub serve_cpu: Option<u32>,
}

impl LoadCommand {
    /// Runs the generator and prints its report.
    pub fn run(self) -> Result<(), Failure> {
        let Self::Http(options) = self;
        let stop = signals::stop_on_signal()?;
        let (report, server) = measure(&options, &stop)?;
        if options.load.json {
            println!("{}", report.to_json());
            return Ok(());
        }
        print!("{report}");
        if let Some(server) = server {
            let mut table = Table::new(&["server at the other end", ""]);
            table.row(["responses".into(), grouped(server.responses)]);
            table.row(["time without work".into(), format!("{:.1} %", server.idle_percent)]);
            print!("\n{table}");
        }
        Ok(())
    }
}

/// What the server in the same process says about the run.
#[derive(Clone, Copy, Debug)]
pub struct ServerSide {
    /// Requests answered.
    pub responses: u64,
    /// Share of the time in which it had nothing to do: near zero if the server was what limited the run.
    pub idle_percent: f64,
}

/// Runs the generator, and the server if one was asked for.
pub fn measure(options: &HttpOptions, stop: &StopFlag) -> Result<(Report, Option<ServerSide>), Failure> {
    if options.load.stack == StackKind::Kernel {
        if let Some(option) = options.stack.first_given() {
            return Err(Failure::usage(format!("{option} is for --stack ginnel")));
        }
        return Ok((load::measure(&options.load, stop, NoStack)?, None));
    }
    let Some(root) = &options.serve else {
        if options.stack.device == Some(DeviceName::Memory) {
            return Err(Failure::usage(
                "--device memory needs --serve ROOT: a server at the other end of the cable",
            ));
        }
        let config = with_sources(options.stack.to_config()?, &options.load)?;
        return Ok((load::measure(&options.load, stop, OnStack { config, device: None, stop })?, None));
    };
    if options.stack.device != Some(DeviceName::Memory) {
        return Err(Failure::usage("--serve needs --device memory"));
    }
    with_server(options, root, stop)
}

/// The generator on this thread, the server on another, a cable between them.
fn with_server(
    options: &HttpOptions,
    root: &Path,
    stop: &StopFlag,
) -> Result<(Report, Option<ServerSide>), Failure> {
    let target = options.load.url.resolve().map_err(Failure::usage)?;
    let mut stack = options.stack.clone();
    if stack.address.is_empty() && stack.config.is_none() {
        stack.address.push(neighbour_of(target.ip()));
    }
    let config = with_sources(stack.to_config()?, &options.load)?;
    let (near, far) = pair(cable(config.devices.first()));
    let mut server = server_on_cable(&config, target, root, far, options.serve_cpu)?;

    let server_stop = StopFlag::new()?;
    let flag = server_stop.clone();
    let thread = thread::Builder::new().name("server".into()).spawn(move || {
        let result = server.run(&flag);
        (server, result)
    })?;
    let measured = load::measure(&options.load, stop, OnStack { config, device: Some(near), stop });
    server_stop.stop();
    let (server, result) = thread.join().map_err(|_| Failure::running("the server's thread panicked"))?;
    result?;
    let idle_percent = 100.0 * server.stats().idle_share();
    let responses = server.handler().server().counters().responses;
    Ok((measured?, Some(ServerSide { responses, idle_percent })))
}

fn server_on_cable(
    client: &Config,
    address: SocketAddr,
    root: &Path,
    device: Device,
    cpu: Option<u32>,
) -> Result<Shard<Httpd>, Failure> {
    let httpd = serve::httpd_options(root, &address.to_string())?;
    let same_link =
        client.links.iter().flat_map(|l| &l.addresses).find(|p| p.address.is_ipv4() == address.is_ipv4());
    let Some(near) = same_link else {
        return Err(Failure::usage(format!("--address: none of the family of {}", address.ip())));
    };
    let own = Prefix { address: address.ip(), len: near.len };
    let mut config = Config::single(DeviceConfig::new("memory", DeviceKind::Memory), &[own], &[]);
    (config.network, config.tcp, config.shard) =
        (client.network.clone(), client.tcp.clone(), client.shard.clone());
    config.shard.cpu = cpu;
    Ok(Shard::builder(config).handler(Httpd::new(&httpd)?).device("memory", device).build()?)
}

/// The cable as the device's configuration describes it.
fn cable(device: Option<&DeviceConfig>) -> MemoryConfig {
    let mut cable = MemoryConfig::default();
    if let Some(device) = device {
        cable.mtu = device.mtu.map_or(cable.mtu, |mtu| mtu as usize);
        if !device.offload {
            cable = cable.without_offloads();
        }
    }
    cable
}

/// An address beside this one, in a network that holds both.
fn neighbour_of(address: IpAddr) -> Prefix {
    match address {
        IpAddr::V4(v4) => {
            let [a, b, c, d] = v4.octets();
            Prefix { address: [a, b, c, if d < 254 { d + 1 } else { d - 1 }].into(), len: 8 }
        }
        IpAddr::V6(v6) => {
            let mut octets = v6.octets();
            octets[15] ^= 0x80;
            Prefix { address: octets.into(), len: 64 }
        }
    }
}

/// Gives the generator's source addresses to its stack.
fn with_sources(mut config: Config, options: &load::Options) -> Result<Config, Failure> {
    let count: u64 = options.source.iter().map(|range| range.count()).sum();
    if count > SOURCES_MAX {
        return Err(Failure::usage(format!(
            "--source: {count} addresses, at most {SOURCES_MAX} with --stack ginnel"
        )));
    }
    let Some(link) = config.links.first_mut() else { return Ok(config) };
    for source in options.source.iter().flat_map(|range| (0..range.count()).map(|n| range.nth(n))) {
        let same = link.addresses.iter().find(|p| p.address.is_ipv4() == source.is_ipv4());
        let len = same.map_or(if source.is_ipv4() { 32 } else { 128 }, |p| p.len);
        if !link.addresses.iter().any(|p| p.address == source) {
            link.addresses.push(Prefix { address: source, len });
        }
    }
    Ok(config)
}

/// Ginnel's stack for the generator.
struct OnStack<'a> {
    config: Config,
    device: Option<Device>,
    stop: &'a StopFlag,
}

impl Run for OnStack<'_> {
    fn run<H: Handler + Send + 'static>(self, handler: H) -> Result<(), Error> {
        let mut builder = Shard::builder(self.config).handler(handler);
        if let Some(device) = self.device {
            builder = builder.device("memory", device);
        }
        builder.build()?.run(self.stop)
    }
}

/// The kernel has its own.
struct NoStack;

impl Run for NoStack {
    fn run<H: Handler + Send + 'static>(self, _: H) -> Result<(), Error> {
        Err(Error::application("no stack was set up"))
    }
}
