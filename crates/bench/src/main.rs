//! Measures Ginnel beside other stacks, as honestly as the machine allows: `ginnel-bench NAME…`, or `make bench BENCH=NAME`.
//!
//! ```text
//! benches/   one file per kind of question
//! duel       a server and the client on two CPUs, joined by memory
//! alternate  two servers and their clients on two CPUs, by turns of milliseconds
//! placed     a server that runs by itself, with its application where a placement says
//! solo       both on one thread, step by step
//! generator  the same with `ginnel load http` as the client, which is then what is measured
//! server/    the servers: the engine, the runtime on top of it, smoltcp
//! contest    a server and the generator in two processes, on the kernel and on a stack
//! programs   unmodified servers and how they are configured
//! client     a TCP client that is cheaper than any of them
//! harness/   the machine, A B A B, results
//! ```

mod benches;
mod bulk;
mod client;
mod frames;
mod generator;
mod harness;
mod host;
mod http;
mod interleaved;
mod kernel_client;
mod namespace;
mod placed_server;
mod program_comparison;
mod programs;
mod server;
mod single_thread;
mod tap;
mod two_threads;

use benches::{ALL, Bench, Needs};
use clap::Parser;
use harness::result::BenchResult;
use harness::{MeasureError, Options, lock};
use std::process::ExitCode;

/// Paired measurements of Ginnel against other stacks.
#[derive(Debug, Parser)]
#[command(name = "ginnel-bench", version)]
struct Arguments {
    /// Benches to run; all if none is named.
    #[arg(value_name = "NAME")]
    names: Vec<String>,

    /// Prints the names of all benches.
    #[arg(long)]
    list: bool,

    /// Does the work of one case of `instructions`, to be counted from outside.
    #[arg(long, hide = true, value_name = "CASE")]
    count_case: Option<String>,

    /// How often.
    #[arg(long, hide = true, value_name = "N", default_value_t = 10_000)]
    operations: u64,

    /// Does the work of `idle-bytes`, in a process of its own.
    #[arg(long, hide = true, value_name = "N")]
    idle_connections: Option<u32>,

    /// Does the work of `task-bytes`, in a process of its own.
    #[arg(long, hide = true, value_name = "N")]
    idle_tasks: Option<u32>,

    #[command(flatten)]
    options: Options,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.list {
        for bench in ALL {
            println!("{:<22} {}", bench.name, bench.about);
        }
        return ExitCode::SUCCESS;
    }
    if let Some(name) = arguments.names.iter().find(|n| ALL.iter().all(|b| b.name != **n)) {
        eprintln!("there is no bench {name:?}; --list names them all");
        return ExitCode::from(2);
    }
    let outcome = if let Some(case) = &arguments.count_case {
        benches::instructions::run_case(case, arguments.operations)
    } else if let Some(connections) = arguments.idle_connections {
        benches::idle::print_connection_memory(connections)
    } else if let Some(tasks) = arguments.idle_tasks {
        benches::idle::print_task_memory(tasks)
    } else {
        run(&arguments)
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the benches that were named. One that fails does not keep the others from running.
fn run(arguments: &Arguments) -> Result<(), MeasureError> {
    let options = &arguments.options;
    let wanted = |name: &str| arguments.names.is_empty() || arguments.names.iter().any(|n| n == name);
    let benches: Vec<_> = ALL.iter().filter(|b| wanted(b.name)).collect();
    // Whoever started the process inside of a namespace holds the lock for it.
    let inside = namespace::is_inside();
    let timed = benches.iter().any(|b| b.needs != Needs::Nothing);
    let _lock = if timed && !inside { Some(lock::lock_machine()?) } else { None };
    let mut failed = Vec::new();
    for bench in benches {
        if !inside {
            println!("== {}: {}", bench.name, bench.about);
        }
        match run_one(bench, options, inside) {
            Ok(results) => {
                for result in &results {
                    result.print();
                    result.record()?;
                }
            }
            Err(failure) => {
                println!("{}: {failure}", bench.name);
                if let MeasureError::Failed(_) = failure {
                    failed.push(bench.name);
                }
            }
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(MeasureError::Failed(failed.join(", "))) }
}

fn run_one(bench: &Bench, options: &Options, inside: bool) -> Result<Vec<BenchResult>, MeasureError> {
    match bench.needs {
        Needs::Nothing => {}
        Needs::Machine => lock::wait_until_quiet(options)?,
        Needs::Namespace if inside => namespace::prepare()?,
        Needs::Namespace => {
            lock::wait_until_quiet(options)?;
            // It prints and records its results itself.
            namespace::run(bench.name)?;
            return Ok(Vec::new());
        }
    }
    (bench.run)(options)
}
