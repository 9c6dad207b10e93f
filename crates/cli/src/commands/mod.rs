//! The subcommands.

mod bench;
mod check;
mod corpus;
mod demo;
mod load;
mod log;
mod run;
mod serve;
mod ss;
mod stat;
mod up;

use crate::failure::Failure;
use clap::Subcommand;

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Echo TCP data (and UDP datagrams) back to the sender
    Echo(serve::EchoArgs),
    /// Serve the files of a directory over HTTP
    Httpd(serve::HttpdArgs),
    /// Run an unmodified program on a stack of its own, or on a stack that "ginnel up" started
    Run(run::RunOptions),
    /// Start a stack that several programs can use
    Up(up::UpOptions),
    /// Stop a stack that "ginnel up" started
    Down(up::DownOptions),
    /// Show whether a process runs on a stack, and for each of its sockets whether the stack or the kernel
    /// handles it and why
    Check(check::CheckOptions),
    /// Generate load for a server and measure its throughput and latency
    #[command(subcommand)]
    Load(load::LoadCommand),
    /// Compare a server program on Ginnel and on the kernel
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Show the sockets of a running stack
    Ss(ss::SsOptions),
    /// Show the log of a stack, which may have ended
    Log(log::LogOptions),
    /// Show the counters of a running stack
    Stat(stat::StatOptions),
    /// Demonstrate Ginnel: serve a site over memory and over TAP, load it, and print a table of results
    Demo(demo::DemoOptions),
    /// Write 500 synthetic web pages with the size distribution of popular front pages, for httpd and load
    /// http
    Corpus(ginnel_apps::corpus::CorpusOptions),
}

impl Command {
    /// Runs the subcommand.
    pub fn run(self) -> Result<(), Failure> {
        match self {
            Self::Echo(options) => serve::echo(&options),
            Self::Httpd(options) => serve::httpd(&options),
            Self::Run(options) => run::run(&options),
            Self::Up(options) => up::up(&options),
            Self::Down(options) => up::down(&options),
            Self::Check(options) => check::run(&options),
            Self::Load(command) => command.run(),
            Self::Bench(command) => command.run(),
            Self::Ss(options) => ss::run(&options),
            Self::Log(options) => log::run(&options),
            Self::Stat(options) => stat::run(&options),
            Self::Demo(options) => demo::run(&options),
            Self::Corpus(options) => corpus::run(&options),
        }
    }
}
