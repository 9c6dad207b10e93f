//! `ginnel demo-server`: a server and proxy for measurements, on Ginnel or on the kernel.

mod rates;

use super::serve;
use crate::failure::Failure;
use crate::output;
use crate::signals;
use crate::stack_options::OwnStackOptions;
use crate::table::{Table, with_thousands_separators};
use clap::{Args, ValueEnum};
use ginnel::{Config, raw};
use ginnel_apps::demo_server::counters::{WorkerCounters, WorkerCounts};
use ginnel_apps::demo_server::kernel::{KernelWorker, raise_descriptor_limit};
use ginnel_apps::demo_server::{DemoServer, DemoServerOptions};
use rates::{LineSink, RatePrinter};
use std::sync::Arc;

/// Options of `ginnel demo-server`.
#[derive(Clone, Debug, Args)]
pub struct DemoServerCommandOptions {
    #[command(flatten)]
    server: DemoServerOptions,

    /// TCP implementation of the server. Everything else is equal for both.
    #[arg(long, value_name = "STACK", value_enum, default_value_t = ServerStack::Ginnel)]
    stack: ServerStack,

    #[command(flatten)]
    stack_options: OwnStackOptions,
}

/// The TCP that the server uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ServerStack {
    /// Ginnel's TCP, on the given device; each worker is a shard.
    Ginnel,
    /// The kernel's sockets.
    Kernel,
}

/// Runs the server.
pub fn run(options: &DemoServerCommandOptions) -> Result<(), Failure> {
    options.server.validate().map_err(Failure::usage)?;
    match options.stack {
        ServerStack::Ginnel => run_on_ginnel(options),
        ServerStack::Kernel => run_on_kernel(options),
    }
}

fn run_on_ginnel(options: &DemoServerCommandOptions) -> Result<(), Failure> {
    let server = &options.server;
    serve::refuse_memory(&options.stack_options)?;
    let mut config = options.stack_options.to_config()?;
    config.shards.count = server.workers.unwrap_or(config.shards.count);
    pin_shards(server, &mut config)?;
    config.validate().map_err(|e| Failure::usage(e.to_string()))?;
    let per_shard = config.shard.workers.max(1);
    let counters = worker_counters(config.shards.count * per_shard);
    let sink = LineSink::open(server.log.as_deref())?;
    announce(options)?;
    let printer = RatePrinter::start(counters.clone(), sink.clone(), server.verbose)?;
    let handler = |worker: usize| {
        Ok(DemoServer::new(server, worker, Arc::clone(&counters[worker]), sink.trace(server.debug)))
    };
    let ended = serve::run("demo-server", config, handler, |_, shard| shard.stack_stats());
    drop(printer);
    let served = ended?;
    print_workers(&counters)?;
    serve::print_shards(&served, per_shard)
}

/// Pins the shards as `--first-core` says.
fn pin_shards(server: &DemoServerOptions, config: &mut Config) -> Result<(), Failure> {
    if server.first_core.is_none() {
        return Ok(());
    }
    if config.shard.cpu.is_some() || !config.shards.cpus.is_empty() {
        let problem =
            "--first-core cannot be combined with --cpu, shard.cpu and shards.cpus: remove one of them";
        return Err(Failure::usage(problem));
    }
    config.shards.cpus = (0..config.shards.count as usize).filter_map(|worker| server.cpu(worker)).collect();
    check_cpus(server, config.shards.count)
}

/// Checks that the process may use the CPUs of all workers.
fn check_cpus(server: &DemoServerOptions, workers: u32) -> Result<(), Failure> {
    let Ok(allowed) = rustix::thread::sched_getaffinity(None) else { return Ok(()) };
    let refused = (0..workers as usize)
        .filter_map(|worker| server.cpu(worker))
        .find(|cpu| *cpu as usize >= rustix::thread::CpuSet::MAX_CPU || !allowed.is_set(*cpu as usize));
    match (refused, server.first_core) {
        (Some(cpu), Some(first)) => Err(Failure::usage(format!(
            "--first-core {first}: with {workers} worker(s) it needs CPU {cpu}, which is not in the affinity mask of this process"
        ))),
        _ => Ok(()),
    }
}

fn run_on_kernel(options: &DemoServerCommandOptions) -> Result<(), Failure> {
    let server = &options.server;
    if let Some(option) = options.stack_options.first_given() {
        return Err(Failure::usage(format!(
            "{option} cannot be combined with --stack kernel: it configures the stack of --stack ginnel"
        )));
    }
    let workers = server.workers.unwrap_or(1);
    check_cpus(server, workers)?;
    raise_descriptor_limit()?;
    let stop = signals::stop_on_signal("the server")?;
    let counters = worker_counters(workers);
    let sink = LineSink::open(server.log.as_deref())?;
    // All workers listen (SO_REUSEPORT) before the first connection, so that each gets its share.
    let opened: Result<Vec<KernelWorker>, ginnel::Error> = counters
        .iter()
        .enumerate()
        .map(|(worker, counts)| {
            KernelWorker::open(server, worker, Arc::clone(counts), sink.trace(server.debug))
        })
        .collect();
    let mut opened = opened?;
    announce(options)?;
    let printer = RatePrinter::start(counters.clone(), sink, server.verbose)?;
    let result = std::thread::scope(|scope| {
        let threads: Vec<_> = opened
            .iter_mut()
            .enumerate()
            .map(|(index, worker)| {
                let (stop, cpu) = (&stop, server.cpu(index));
                scope.spawn(move || {
                    let ended = cpu.map_or(Ok(()), raw::pin).and_then(|()| worker.run(stop));
                    // One worker less would be another measurement.
                    stop.stop();
                    ended
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(result) => result.map_err(Failure::from),
            Err(_) => Err(Failure::running("a worker panicked")),
        })
    });
    drop(printer);
    result?;
    print_workers(&counters)
}

fn worker_counters(count: u32) -> Vec<Arc<WorkerCounters>> {
    (0..count).map(|_| Arc::default()).collect()
}

/// Prints what the server does.
fn announce(options: &DemoServerCommandOptions) -> Result<(), Failure> {
    let server = &options.server;
    let listen = serve::join_addresses(&server.listen());
    let stack = if options.stack == ServerStack::Kernel { "the kernel" } else { "Ginnel" };
    let keepalive = if server.keepalive { ", connections are kept open" } else { "" };
    match &server.backend[..] {
        [] => output::print(format_args!("demo-server on {listen}, on {stack}{keepalive}\n")),
        backends => {
            let backends = serve::join_addresses(backends);
            output::print(format_args!(
                "demo-server on {listen}, proxy for {backends}, on {stack}{keepalive}\n"
            ))
        }
    }
}

/// Prints a column for each worker.
fn print_workers(counters: &[Arc<WorkerCounters>]) -> Result<(), Failure> {
    let counts: Vec<WorkerCounts> = counters.iter().map(|worker| worker.counts()).collect();
    let head: Vec<String> = (0..counts.len()).map(|index| index.to_string()).collect();
    let head: Vec<&str> = core::iter::once("worker").chain(head.iter().map(String::as_str)).collect();
    let mut table = Table::new(&head);
    for (at, (name, _)) in WorkerCounts::default().iter().enumerate() {
        let row = counts.iter().filter_map(|worker| worker.iter().nth(at));
        let row = row.map(|(_, count)| with_thousands_separators(count));
        table.add_row(core::iter::once(name.replace('_', " ")).chain(row));
    }
    output::print(format_args!("\n{table}"))
}
