//! The subcommands.

mod bench;
mod capture;
mod check;
mod corpus;
mod demo;
mod demo_server;
mod doctor;
mod generate;
mod iot;
mod listeners;
mod load;
mod log;
mod metrics;
mod monitor;
mod route;
mod run;
mod serve;
mod ss;
mod stat;
mod top;
mod up;
mod upgrade;
mod watch_group;
mod with_parent;

pub use stat::StatSource;

use crate::failure::Failure;
use clap::Subcommand;

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Echo TCP data (and UDP datagrams) back to the sender
    Echo(serve::EchoCommandOptions),
    /// Serve the files of a directory over HTTP
    Httpd(serve::HttpdCommandOptions),
    /// Answer each HTTP request with a fixed page, or relay it to other servers (Fastsocket's demo server)
    ///
    /// Prints the requests of each second. A proxy (-x) opens a connection to a backend for each client, in
    /// turn over the backends; with -k it keeps both connections open. Without -k every connection ends
    /// after one response. Responses always have a length, or end with the connection.
    ///
    /// With --stack kernel the server runs on the kernel's sockets, so both stacks can be compared.
    DemoServer(demo_server::DemoServerCommandOptions),
    /// Serve devices that send heartbeats and urgent requests, with Redis (QStack's iotepserver)
    Iot(iot::IotCommandOptions),
    /// Run an unmodified program on a stack of its own, or on a stack that "ginnel up" started
    Run(run::RunOptions),
    /// Start a stack that several programs can use
    Up(up::UpOptions),
    /// Stop a stack that "ginnel up" started
    Down(up::DownOptions),
    /// Have this version of ginnel run the shards of a running stack
    ///
    /// The programs on the stack go on: their listeners and UDP sockets serve again after some tens of
    /// milliseconds, and their connections are reset, as after a crash of the shards. The new version first
    /// checks the options and the configuration of the stack, and is refused if the programs on the stack do
    /// not understand its messages. If it cannot start the shards, the former version starts them again.
    Upgrade(upgrade::UpgradeOptions),
    /// Show whether a process runs on a stack, and for each of its sockets whether the stack or the kernel
    /// handles it and why
    Check(check::CheckOptions),
    /// Examine this machine and an interface for a stack, change what slows it down, and undo that
    Doctor(doctor::DoctorOptions),
    /// Generate load for a server and measure its throughput and latency
    #[command(subcommand)]
    Load(load::LoadCommand),
    /// Measure how long servers take to answer, from their traffic alone (QStack's HCMonitor)
    Monitor(monitor::MonitorOptions),
    /// Write the frames of a running stack, also those of its loopback, to a pcapng file or a pipe
    Capture(capture::CaptureOptions),
    /// Compare a server program on Ginnel and on the kernel
    #[command(subcommand)]
    Bench(bench::BenchCommand),
    /// Export the counters of running stacks to Prometheus, over HTTP
    Metrics(metrics::MetricsOptions),
    /// Show the listeners and workers of programs under "ginnel run --stack kernel --listen-spawn"
    ///
    /// One line for each worker and listener: the worker's process id, the CPU whose connections it gets, and
    /// how many it has accepted. "-" instead of a worker: it has ended, and its accept queue waits for the
    /// next one. "-" instead of a CPU: connections of CPUs without a worker of their own.
    Listeners(listeners::ListenersOptions),
    /// Show or change the routes of a running stack, in the words of "ip route"
    ///
    /// Connections use changed routes at once. Changes stay until the stack ends, also if its shards are
    /// started again; the configuration file is not changed. Only the stack's own user and root may change
    /// routes.
    Route(route::RouteOptions),
    /// Show the sockets of a running stack
    Ss(ss::SsOptions),
    /// Show the log of a stack, which may have ended
    Log(log::LogOptions),
    /// Show the counters of a running stack
    Stat(stat::StatOptions),
    /// Show what a running stack does, live: shards, connections, rates, latencies, drops
    Top(top::TopOptions),
    /// Compare unmodified nginx and redis on the kernel and on Ginnel in less than a minute, without root
    ///
    /// On the kernel, server and client use the loopback interface, in a network namespace if one can be
    /// created. On Ginnel, the server runs under "ginnel run" over a memif (shared memory), and the client
    /// has a TCP of its own. The client is "ginnel load" in both cases, on one CPU; the server has another
    /// CPU. Figures are divided by the CPU time of the server's side: the program, its stack, and the kernel
    /// thread that receives for it. Over loopback the kernel receives a packet on the CPU of its sender, so
    /// that much of the work for a new connection to the kernel's server is done on the client's CPU and is
    /// not counted.
    Demo(demo::DemoOptions),
    /// Write 500 synthetic web pages with the size distribution of popular front pages, for httpd and load
    /// http
    Corpus(ginnel_apps::corpus::CorpusOptions),
    /// Write the manual pages and the completions of shells, for packages
    #[command(hide = true)]
    Generate(generate::GenerateOptions),
    /// Run a program that ends with the process that started it
    #[command(hide = true)]
    WithParent(with_parent::WithParentOptions),
    /// Lead a process group that is killed when the process that started this one dies
    #[command(hide = true)]
    WatchGroup(watch_group::WatchGroupOptions),
}

impl Command {
    /// Returns whether the command starts processes that it waits for, or becomes another program. It must
    /// run in the first thread then. `ginnel run` and `ginnel up` reap orphans themselves.
    pub fn has_children(&self) -> bool {
        matches!(
            self,
            Self::Run(_)
                | Self::Up(_)
                | Self::Upgrade(_)
                | Self::Bench(_)
                | Self::Demo(_)
                | Self::WithParent(_)
                | Self::WatchGroup(_)
        )
    }

    /// Runs the subcommand.
    pub fn run(self) -> Result<(), Failure> {
        match self {
            Self::Echo(options) => serve::echo(&options),
            Self::Httpd(options) => serve::httpd(&options),
            Self::DemoServer(options) => demo_server::run(&options),
            Self::Iot(options) => iot::run(options),
            Self::Run(options) => run::run(&options),
            Self::Up(options) => up::up(&options),
            Self::Down(options) => up::down(&options),
            Self::Upgrade(options) => upgrade::run(&options),
            Self::Check(options) => check::run(&options),
            Self::Doctor(options) => doctor::run(&options),
            Self::Load(command) => command.run(),
            Self::Monitor(options) => monitor::run(&options),
            Self::Capture(options) => capture::run(&options),
            Self::Bench(command) => command.run(),
            Self::Metrics(options) => metrics::run(&options),
            Self::Listeners(options) => listeners::run(&options),
            Self::Route(options) => route::run(&options),
            Self::Ss(options) => ss::run(&options),
            Self::Log(options) => log::run(&options),
            Self::Stat(options) => stat::run(&options),
            Self::Top(options) => top::run(&options),
            Self::Demo(options) => demo::run(&options),
            Self::Corpus(options) => corpus::run(&options),
            Self::Generate(options) => generate::run(&options),
            Self::WithParent(options) => with_parent::run(&options),
            Self::WatchGroup(options) => watch_group::run(&options),
        }
    }
}
