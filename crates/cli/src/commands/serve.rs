//! `ginnel echo` and `ginnel httpd`: servers that run until a signal stops them.

use crate::failure::Failure;
use crate::interface_watch::InterfaceWatch;
use crate::limit_watch::LimitWatch;
use crate::output;
use crate::stack_options::{DeviceName, OwnStackOptions};
use crate::table::{Table, with_thousands_separators};
use crate::{log, publish, signals, start_entries};
use clap::{Args, Parser};
use ginnel::{Config, Error, Handler, Shard, ShardStats, Shards};
use ginnel_apps::echo::Echo;
use ginnel_apps::httpd::Httpd;
use ginnel_apps::httpd::server::ServerCounters;
use std::path::Path;

/// Options of `ginnel echo`.
#[derive(Clone, Debug, Args)]
pub struct EchoCommandOptions {
    #[command(flatten)]
    echo: ginnel_apps::echo::EchoOptions,
    #[command(flatten)]
    stack: OwnStackOptions,
    #[command(flatten)]
    shards: ShardsOptions,
}

/// Options of `ginnel httpd`.
#[derive(Clone, Debug, Args)]
pub struct HttpdCommandOptions {
    #[command(flatten)]
    httpd: ginnel_apps::httpd::HttpdOptions,
    #[command(flatten)]
    stack: OwnStackOptions,
    #[command(flatten)]
    shards: ShardsOptions,
}

/// Options of servers that can run on several shards.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Stack")]
pub struct ShardsOptions {
    /// Number of shards, 1 to 64. Each shard is a thread with a queue of its own on every device and serves a
    /// part of the connections.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub shards: Option<u32>,
}

/// Runs the echo server.
pub fn echo(options: &EchoCommandOptions) -> Result<(), Failure> {
    let config = server_config(&options.stack, &options.shards)?;
    output::print(format_args!("echo on {}\n", join_addresses(&options.echo.listen)))?;
    let workers = config.shard.workers;
    let served = run("echo", config, |_| Ok(Echo::new(&options.echo)), |_, shard| shard.stack_stats())?;
    print_shards(&served, workers)
}

/// Runs the web server.
pub fn httpd(options: &HttpdCommandOptions) -> Result<(), Failure> {
    let config = server_config(&options.stack, &options.shards)?;
    let workers = config.shard.workers;
    // Each application keeps its own copy of the pages in memory.
    let handler = |index| {
        let server = Httpd::new(&options.httpd)?;
        if index == 0 {
            // The server does not depend on its output.
            let _ = output::print(format_args!("{}\n", server.describe()));
        }
        Ok(server)
    };
    let finish = |_, shard: Shard<Httpd>| (*shard.handler().server().counters(), shard.stack_stats());
    let (counters, served): (Vec<ServerCounters>, Vec<ShardStats>) =
        run("httpd", config, handler, finish)?.into_iter().unzip();
    let sum = |counter: fn(&ServerCounters) -> u64| counters.iter().map(counter).sum::<u64>();
    let mut table = Table::new(&["httpd", "count"]);
    for (name, count) in [
        ("connections", sum(|c| c.connections)),
        ("responses", sum(|c| c.responses)),
        ("of these errors", sum(|c| c.errors)),
        ("connections ended by a time-out", sum(|c| c.timeouts)),
        ("connections still open", sum(|c| c.open)),
    ] {
        table.add_row([name.into(), with_thousands_separators(count)]);
    }
    output::print(format_args!("\n{table}"))?;
    print_shards(&served, workers)
}

/// Returns the options of a web server for the files below `root`; the options that are not given have their
/// defaults.
pub fn httpd_options(root: &Path, listen: &str) -> Result<ginnel_apps::httpd::HttpdOptions, Failure> {
    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        options: ginnel_apps::httpd::HttpdOptions,
    }
    let listen = format!("--listen={listen}");
    let parsed = Arguments::try_parse_from(["httpd".as_ref(), listen.as_ref(), root.as_os_str()]);
    parsed.map(|a| a.options).map_err(|e| Failure::usage(e.to_string()))
}

/// Rejects a memory device, because nothing would be at its other end.
pub fn refuse_memory(options: &OwnStackOptions) -> Result<(), Failure> {
    if options.device == Some(DeviceName::Memory) {
        let problem = "--device memory has nothing at its other end: use another device, or ginnel load http --serve ROOT";
        return Err(Failure::usage(problem));
    }
    Ok(())
}

/// Returns the configuration of a server. Rejects a memory device, because nothing would be at its other end.
fn server_config(options: &OwnStackOptions, shards: &ShardsOptions) -> Result<Config, Failure> {
    refuse_memory(options)?;
    let mut config = options.to_config()?;
    config.shards.count = shards.shards.unwrap_or(config.shards.count);
    config.validate().map_err(|e| Failure::usage(e.to_string()))?;
    Ok(config)
}

/// Runs an application on each of the configured shards or workers until a signal arrives. Returns the result
/// of `finish` for each application.
pub fn run<H: Handler, R: Send>(
    program: &str,
    config: Config,
    handler: impl Fn(usize) -> Result<H, Error> + Sync,
    finish: impl Fn(usize, Shard<H>) -> R + Sync,
) -> Result<Vec<R>, Failure> {
    let stop = signals::stop_on_signal("the stack")?;
    let published = publish::publish_stack(&config.run, program)?;
    let limit_watch = published.as_ref().map(|published| {
        log::open(published.dir().path(), &config.run);
        start_entries::write(&config, published.dir().name(), &format!("ginnel {program}"));
        LimitWatch::start(published.dir().path(), InterfaceWatch::new(&config).until(&stop))
    });
    let shards = Shards::new(config).published(published).open();
    let result = shards.and_then(|shards| shards.run(&stop, handler, finish)).map_err(Failure::from);
    drop(limit_watch);
    result
        .inspect(|_| tracing::info!("the stack has ended"))
        .map_err(|failure| log::record_last_failure("the stack stops", failure))
}

pub fn join_addresses(addresses: &[core::net::SocketAddr]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

/// Prints a column for each shard. `applications` has the counters of each application's shard; the `workers`
/// applications of a shard follow each other.
pub fn print_shards(applications: &[ShardStats], workers: u32) -> Result<(), Failure> {
    let shards: Vec<_> = applications.iter().step_by(workers.max(1) as usize).collect();
    let mut head = vec!["shard".to_string()];
    match &shards[..] {
        [_] => head.push("count".into()),
        several => head.extend((0..several.len()).map(|index| index.to_string())),
    }
    let mut table = Table::new(&head.iter().map(String::as_str).collect::<Vec<_>>());
    let names = ShardStats::default();
    for (at, (name, _)) in names.iter().enumerate() {
        let counts = shards
            .iter()
            .filter_map(|stats| stats.iter().nth(at))
            .map(|(_, count)| with_thousands_separators(count));
        table.add_row(core::iter::once(name.replace('_', " ")).chain(counts));
    }
    output::print(format_args!("\n{table}"))
}
