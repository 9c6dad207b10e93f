//! `ginnel echo` and `ginnel httpd`: programs that run until a signal.

use crate::failure::Failure;
use crate::signals;
use crate::stack_options::{DeviceName, StackOptions};
use crate::table::{Table, grouped};
use clap::{Args, Parser};
use ginnel::{Config, Handler, Shard, ShardStats};
use ginnel_apps::echo::Echo;
use ginnel_apps::httpd::Httpd;
use std::path::Path;

/// Options of `ginnel echo`.
#[derive(Clone, Debug, Args)]
pub struct EchoOptions {
    #[command(flatten)]
    echo: ginnel_apps::echo::Options,
    #[command(flatten)]
    stack: StackOptions,
}

/// Options of `ginnel httpd`.
#[derive(Clone, Debug, Args)]
pub struct HttpdOptions {
    #[command(flatten)]
    httpd: ginnel_apps::httpd::Options,
    #[command(flatten)]
    stack: StackOptions,
}

/// Runs the echo server.
pub fn echo(options: &EchoOptions) -> Result<(), Failure> {
    let config = server_config(&options.stack)?;
    println!("echo on {}", list(&options.echo.listen));
    let shard = run(config, Echo::new(&options.echo))?;
    print_shard(shard.stats());
    Ok(())
}

/// Runs the web server.
pub fn httpd(options: &HttpdOptions) -> Result<(), Failure> {
    let config = server_config(&options.stack)?;
    let server = Httpd::new(&options.httpd)?;
    println!("{}", server.describe());
    let shard = run(config, server)?;
    let counters = shard.handler().server().counters();
    let mut table = Table::new(&["httpd", "count"]);
    for (name, count) in [
        ("connections", counters.connections),
        ("responses", counters.responses),
        ("of these errors", counters.errors),
        ("connections ended by a time-out", counters.timeouts),
        ("connections still open", counters.open),
    ] {
        table.row([name.into(), grouped(count)]);
    }
    print!("\n{table}");
    print_shard(shard.stats());
    Ok(())
}

/// The options of a web server for these files, everything else as on the command line by default.
pub fn httpd_options(root: &Path, listen: &str) -> Result<ginnel_apps::httpd::Options, Failure> {
    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        options: ginnel_apps::httpd::Options,
    }
    let listen = format!("--listen={listen}");
    let parsed = Arguments::try_parse_from(["httpd".as_ref(), listen.as_ref(), root.as_os_str()]);
    parsed.map(|a| a.options).map_err(|e| Failure::usage(e.to_string()))
}

/// A server alone at one end of a cable inside its own process would wait for ever.
fn server_config(options: &StackOptions) -> Result<Config, Failure> {
    if options.device == Some(DeviceName::Memory) {
        let problem =
            "--device memory: nobody is at the other end (see ginnel load http --serve and ginnel demo)";
        return Err(Failure::usage(problem));
    }
    options.to_config()
}

/// Runs an application until a signal, and returns its shard.
fn run<H: Handler>(config: Config, handler: H) -> Result<Shard<H>, Failure> {
    let stop = signals::stop_on_signal()?;
    let mut shard = Shard::builder(config).handler(handler).build()?;
    shard.run(&stop)?;
    Ok(shard)
}

fn list(addresses: &[core::net::SocketAddr]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

fn print_shard(stats: &ShardStats) {
    let mut table = Table::new(&["shard", "count"]);
    for (name, count) in stats.iter() {
        table.row([name.replace('_', " "), grouped(count)]);
    }
    print!("\n{table}");
}
