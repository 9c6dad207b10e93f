//! `ginnel iot`: the server for many devices, with Redis.

mod file_keys;
mod servers;
mod stat_line;

use super::serve::{self, ShardsOptions};
use crate::failure::Failure;
use crate::stack_options::OwnStackOptions;
use crate::table::{Table, with_thousands_separators};
use clap::{Args, ValueEnum};
use ginnel::config::Placement;
use ginnel::{Config, Shard, ShardStats};
use ginnel_apps::iot::counters::IotCounters;
use ginnel_apps::iot::{Iot, IotOptions, RedisAddress};
use servers::RedisServers;
use stat_line::{PrinterCpu, StatPrinter};
use std::ffi::OsString;

/// Options of `ginnel iot`.
#[derive(Clone, Debug, Args)]
#[command(mut_arg("config", |config| config.short('f')))]
pub struct IotArgs {
    #[command(flatten)]
    program: ProgramOptions,
    #[command(flatten)]
    stack: OwnStackOptions,
    #[command(flatten)]
    shards: ShardsOptions,
    #[command(flatten)]
    place: PlaceOptions,
}

/// Options that are also keys of the table `[iot]`.
#[derive(Clone, Debug, Args)]
struct ProgramOptions {
    #[command(flatten)]
    iot: IotOptions,

    /// Print a line with the counters of all shards every second, in a thread that is pinned to this CPU if
    /// one is given: as in --stat-print=3.
    #[arg(long, value_name = "CPU", num_args = 0..=1, require_equals = true, default_missing_value = "any")]
    stat_print: Option<PrinterCpu>,
}

/// Options that say in which threads the application runs.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Stack")]
struct PlaceOptions {
    /// Thread of the application, relative to its shard (shard.placement).
    #[arg(long, value_name = "PLACE", value_enum)]
    placement: Option<PlaceName>,

    /// Number of worker threads of each shard, each with an application of its own (shard.workers). 0: none.
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=64))]
    workers: Option<u32>,
}

/// Where an application runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PlaceName {
    /// In the shard's thread.
    Inline,
    /// In a thread of its own on the shard's CPU.
    Paired,
    /// In a thread of its own on another CPU.
    Split,
}

/// Runs the server.
pub fn run(options: IotArgs) -> Result<(), Failure> {
    let (options, config) = match &options.stack.config {
        None => (options, Config::default()),
        Some(path) => {
            let read = Config::from_file_with_program(path, "iot");
            let (config, keys) = read.map_err(|e| Failure::usage(e.to_string()))?;
            // Without the name of the command.
            let command_line: Vec<OsString> = std::env::args_os().skip(1).collect();
            (file_keys::apply(&command_line, path, &keys)?, config)
        }
    };
    let config = complete(&options, config)?;
    if options.program.stat_print.is_some() && !config.run.directory {
        let problem = "--stat-print needs the published counters: set run.directory to true";
        return Err(Failure::usage(problem));
    }
    let iot = &options.program.iot;
    let started = iot.start_redis.map(RedisServers::start).transpose()?;
    let redis = started.as_ref().map_or_else(|| iot.redis.clone(), RedisServers::addresses);
    println!("iot on {}, with {}", serve::join_addresses(&iot.listen), join(&redis));
    let workers = config.shard.workers;
    let printer = options.program.stat_print.map(StatPrinter::start).transpose()?;
    let finish = |_, shard: Shard<Iot>| {
        let server = shard.handler();
        (*server.counters(), server.waiting(), shard.stack_stats())
    };
    let ended = serve::run("iot", config, |_| Ok(Iot::new(iot, &redis)), finish);
    drop(printer);
    print_counters(&ended?, workers);
    Ok(())
}

/// Returns the configuration of the stack: a file's, overridden by the options.
fn complete(options: &IotArgs, config: Config) -> Result<Config, Failure> {
    serve::refuse_memory(&options.stack)?;
    options.stack.complete(config, |config| {
        config.shards.count = options.shards.shards.unwrap_or(config.shards.count);
        config.shard.workers = options.place.workers.unwrap_or(config.shard.workers);
        config.shard.placement = match options.place.placement {
            Some(PlaceName::Inline) => Placement::Inline,
            Some(PlaceName::Paired) => Placement::Paired,
            Some(PlaceName::Split) => Placement::Split,
            None => config.shard.placement,
        };
    })
}

fn join(redis: &[RedisAddress]) -> String {
    redis.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

/// Prints the counters of the server and of its shards.
fn print_counters(ended: &[(IotCounters, u64, ShardStats)], workers: u32) {
    let (mut sum, mut waiting) = (IotCounters::default(), 0);
    for (counters, left, _) in ended {
        sum += *counters;
        waiting += left;
    }
    let mut table = Table::new(&["iot", "count"]);
    for (name, count) in [
        ("connections", sum.connections),
        ("messages", sum.messages),
        ("of these urgent", sum.urgent),
        ("of these requests", sum.requests),
        ("done", sum.done),
        ("failed: deadline", sum.failed_deadline),
        ("failed: queue full", sum.failed_shed),
        ("failed: error of Redis", sum.failed_redis),
        ("not ended", waiting),
        ("answers", sum.answers),
        ("of these errors", sum.answers_error),
        ("malformed messages", sum.malformed),
    ] {
        table.add_row([name.into(), with_thousands_separators(count)]);
    }
    print!("\n{table}");
    serve::print_shards(&ended.iter().map(|(.., stats)| *stats).collect::<Vec<_>>(), workers);
}
