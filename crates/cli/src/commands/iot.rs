//! `ginnel iot`: the server for many devices, with Redis.

mod file_keys;
mod servers;
mod stat_line;

use super::serve::{self, ShardsOptions};
use crate::failure::Failure;
use crate::output;
use crate::stack_options::OwnStackOptions;
use crate::table::{Table, with_thousands_separators};
use clap::{Args, ValueEnum};
use ginnel::config::{Placement, PriorityRule};
use ginnel::{Config, Shard, ShardStats};
use ginnel_apps::iot::counters::IotCounters;
use ginnel_apps::iot::message::{ANSWER, URGENT};
use ginnel_apps::iot::{Iot, IotOptions, RedisAddress};
use servers::RedisServers;
use stat_line::{PrinterCpu, StatPrinter};
use std::collections::BTreeSet;
use std::ffi::OsString;

/// Priority of urgent messages and answers with `--priorities`.
const LABEL_PRIORITY: u8 = 6;

/// Options of `ginnel iot`.
#[derive(Clone, Debug, Args)]
#[command(mut_arg("config", |config| config.short('f')))]
pub struct IotCommandOptions {
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

    /// Give frames that begin with an urgent message, and answers, priority 6 in the whole stack: adds the
    /// rules of docs/iot.md to those of `[priority]`. Without it, urgent messages overtake others only before
    /// Redis.
    #[arg(long)]
    priorities: bool,
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
pub fn run(options: IotCommandOptions) -> Result<(), Failure> {
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
    let addresses = serve::join_addresses(&iot.listen);
    output::print(format_args!("iot on {addresses}, with {}\n", join(&redis)))?;
    let workers = config.shard.workers;
    let printer = options.program.stat_print.map(StatPrinter::start).transpose()?;
    let finish = |_, shard: Shard<Iot>| {
        let server = shard.handler();
        (*server.counters(), server.waiting(), shard.stack_stats())
    };
    let ended = serve::run("iot", config, |_| Iot::new(iot, &redis), finish);
    drop(printer);
    print_counters(&ended?, workers)
}

/// Returns the configuration of the stack: a file's, overridden by the options.
fn complete(options: &IotCommandOptions, config: Config) -> Result<Config, Failure> {
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
        if options.program.priorities {
            config.priority.rules.extend(label_rules(&options.program.iot));
        }
    })
}

/// Returns rules that give urgent messages and answers a priority by their label, if a segment begins with
/// them.
fn label_rules(options: &IotOptions) -> Vec<PriorityRule> {
    let ports: BTreeSet<String> = options.listen.iter().map(|address| address.port().to_string()).collect();
    let ports = Vec::from_iter(ports).join(", ");
    let rule = |side: &str, label: u8| {
        format!(
            "[[priority.rules]]\npriority = {LABEL_PRIORITY}\nprotocol = \"tcp\"\n{side}_ports = [{ports}]\n\
             payload = {{ offset_bytes = 6, value = \"{label:02x}\" }}\n"
        )
    };
    let text = rule("destination", URGENT) + &rule("source", ANSWER);
    Config::from_toml("--priorities", &text).expect("the text is that of a configuration").priority.rules
}

fn join(redis: &[RedisAddress]) -> String {
    redis.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

/// Prints the counters of the server and of its shards.
fn print_counters(ended: &[(IotCounters, u64, ShardStats)], workers: u32) -> Result<(), Failure> {
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
    output::print(format_args!("\n{table}"))?;
    serve::print_shards(&ended.iter().map(|(.., stats)| *stats).collect::<Vec<_>>(), workers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct IotCommand {
        #[command(flatten)]
        options: IotCommandOptions,
    }

    fn config(more: &[&str]) -> Config {
        let stack = ["iot", "--device", "tap:x", "--address", "10.0.0.1/24"];
        let options = IotCommand::try_parse_from([&stack, more].concat()).unwrap().options;
        complete(&options, Config::default()).unwrap()
    }

    #[test]
    fn priorities_are_rules_for_the_listeners() {
        assert!(config(&[]).priority.rules.is_empty());
        let rules = config(&["--priorities", "--listen", "0.0.0.0:81", "--listen", "[::]:81"]).priority.rules;
        let text = "[[priority.rules]]\npriority = 6\nprotocol = \"tcp\"\ndestination_ports = 81\n\
                    payload = { offset_bytes = 6, value = \"02\" }\n\
                    [[priority.rules]]\npriority = 6\nprotocol = \"tcp\"\nsource_ports = 81\n\
                    payload = { offset_bytes = 6, value = \"03\" }\n";
        assert_eq!(rules, Config::from_toml("x", text).unwrap().priority.rules);
    }

    #[test]
    fn options_choose_threads() {
        let config = config(&["--placement", "paired", "-w", "3", "--shards", "2"]);
        assert_eq!(
            (config.shard.placement, config.shard.workers, config.shards.count),
            (Placement::Paired, 3, 2)
        );
    }
}
