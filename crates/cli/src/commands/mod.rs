//! The subcommands.

mod bench;
mod check;
mod corpus;
mod demo;
mod load;
mod run;
mod serve;
mod ss;
mod stat;
mod up;

use crate::failure::Failure;
use clap::Subcommand;

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Send back whatever comes
    Echo(serve::EchoOptions),
    /// Serve the files of a directory over HTTP
    Httpd(serve::HttpdOptions),
    /// Run an unmodified program on a stack of its own, or on one that ginnel up keeps
    Run(run::RunOptions),
    /// Keep a stack that several programs use
    Up(up::UpOptions),
    /// End a stack that ginnel up keeps
    Down(up::DownOptions),
    /// Say whether a process is accelerated, and which of its sockets are where, and why
    Check(check::CheckOptions),
    /// Put load on a server and measure it
    #[command(subcommand)]
    Load(load::LoadCommand),
    /// Measure a program of your own on Ginnel and on the kernel
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Show the sockets of a running stack
    Ss(ss::SsOptions),
    /// Show what a running stack counts
    Stat(stat::StatOptions),
    /// Show it all: serve a site over memory and over TAP, load it, and print a table
    Demo(demo::DemoOptions),
    /// Write 500 synthetic front pages with the sizes of popular ones, for httpd and load http
    Corpus(ginnel_apps::corpus::Options),
}

impl Command {
    /// Does it.
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
            Self::Stat(options) => stat::run(&options),
            Self::Demo(options) => demo::run(&options),
            Self::Corpus(options) => corpus::run(&options),
        }
    }
}
