//! Measures Ginnel and other stacks in pairs: `ginnel-bench NAME…`, or `make bench BENCH=NAME`.
//!
//! ```text
//! benches/            one file per kind of question
//! two_threads         a server and the client on two CPUs, joined by memory
//! interleaved         two servers and their clients on two CPUs, in alternating slices of milliseconds
//! placed_server       a server that runs by itself, with its application in a given placement
//! single_thread       server and client on one thread, step by step
//! generator           a server and `ginnel load http` on one thread; either can be the measured side
//! iot_case            a program of its own: `ginnel iot` and `ginnel load iot` on one thread
//! server/             the servers: the engine, the runtime and programs on top of it, smoltcp, a sink
//! program_comparison  a server and the generator in two processes, on the kernel and on a stack
//! program_pair        two processes of `ginnel` over shared memory, with their memory and CPU time
//! client              a TCP client that is cheaper than any of the servers
//! harness/            the machine, pairs of measurements, results
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
mod mirrored_device;
mod namespace;
mod placed_server;
mod program_comparison;
mod program_options;
mod program_pair;
mod scaled_server;
mod server;
mod single_thread;
mod tap;
mod two_threads;

use benches::{ALL, Bench, Needs};
use clap::Parser;
use harness::result::BenchResult;
use harness::{MeasureError, Options, lock};
use std::process::ExitCode;

/// Paired measurements of Ginnel and other stacks.
#[derive(Debug, Parser)]
#[command(name = "ginnel-bench", version)]
struct Arguments {
    /// Benches to run; all if none is named.
    #[arg(value_name = "NAME")]
    names: Vec<String>,

    /// List the names of all benches.
    #[arg(long)]
    list: bool,

    /// Run one case of the bench "instructions", to be counted by valgrind.
    #[arg(long, hide = true, value_name = "CASE")]
    count_case: Option<String>,

    /// Number of operations of the case.
    #[arg(long, hide = true, value_name = "N", default_value_t = 10_000)]
    operations: u64,

    /// Fail if this program was built with priorities.
    #[arg(long, hide = true)]
    without_priorities: bool,

    /// Run the child process of the bench "idle-bytes".
    #[arg(long, hide = true, value_name = "N")]
    idle_connections: Option<u32>,

    /// Run the child process of the bench "task-bytes".
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
        eprintln!("unknown bench {name:?}: --list shows all names");
        return ExitCode::from(2);
    }
    if arguments.without_priorities && ginnel_stack::priority::COMPILED {
        eprintln!("built with priorities, without --cfg ginnel_without_priorities");
        return ExitCode::FAILURE;
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

/// Runs the named benches. A failure of one does not stop the others.
fn run(arguments: &Arguments) -> Result<(), MeasureError> {
    let options = &arguments.options;
    let wanted = |name: &str| arguments.names.is_empty() || arguments.names.iter().any(|n| n == name);
    let benches: Vec<_> = ALL.iter().filter(|b| wanted(b.name)).collect();
    // The process outside of the namespace holds the lock.
    let inside = namespace::is_inside();
    if inside {
        namespace::end_with_parent()?;
    }
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
            // The process inside prints and records its results.
            namespace::run(bench.name)?;
            return Ok(Vec::new());
        }
    }
    (bench.run)(options)
}
