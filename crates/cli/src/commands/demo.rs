//! `ginnel demo`, which `make demo` runs: unmodified servers on the kernel and on Ginnel, under equal load.
//! The command needs no root.

mod progress;
mod server;
mod summary;

use crate::failure::Failure;
use crate::output;
use crate::signals;
use clap::Args;
use core::net::Ipv4Addr;
use ginnel_measure::machine::Cpus;
use ginnel_measure::namespace;
use ginnel_measure::program::ginnel_path;
use ginnel_measure::watched_group::WatchedGroup;
use progress::Progress;
use server::{ADDRESS, DemoTestbed, Server, to_failure};
use summary::DemoSummary;

/// Options of `ginnel demo`.
#[derive(Clone, Debug, Args)]
pub struct DemoOptions {
    /// Length of each measurement in seconds. A warm-up of the same length, at most 2 s, comes before.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = super::bench::parse_seconds)]
    seconds: f64,

    /// Number of rounds. Each measures every load once on the kernel and once on Ginnel; the table has the
    /// medians.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
}

/// Measures, and prints the table of results.
pub fn run(options: &DemoOptions) -> Result<(), Failure> {
    let mut kernel_address = ADDRESS;
    if namespace::is_inside() {
        // Without these settings short measurements succeed as well.
        if let Err(reason) = namespace::prepare() {
            output::note(format_args!("note: {reason}"));
        }
    } else {
        let reason = match namespace::check(&["ip", "link", "set", "lo", "up"]) {
            Ok(()) => namespace::enter(std::env::args_os().skip(1)),
            Err(reason) => reason,
        };
        output::note(format_args!(
            "note: no network namespace is available ({reason}): using the loopback interface of the host"
        ));
        kernel_address = Ipv4Addr::LOCALHOST;
    }
    let stop = signals::stop_and_clean_up_on_signal()?;
    let result = measure(options, kernel_address, &stop);
    if stop.is_set() {
        return Err(Failure::running("interrupted"));
    }
    let summary = result?;
    output::print(format_args!("\n{summary}\n"))?;
    match summary.errors() {
        0 => Ok(()),
        errors => Err(Failure::running(format!("{errors} requests had no successful answer"))),
    }
}

fn measure(
    options: &DemoOptions,
    kernel_address: Ipv4Addr,
    stop: &ginnel::StopFlag,
) -> Result<DemoSummary, Failure> {
    let cpus = Cpus::choose().map_err(to_failure)?;
    let folder = tempfile::tempdir().map_err(|e| Failure::running(format!("temporary directory: {e}")))?;
    let group =
        WatchedGroup::start(&ginnel_path().map_err(to_failure)?, folder.path()).map_err(to_failure)?;
    let testbed = DemoTestbed {
        kernel_address,
        cpus,
        folder: folder.path(),
        group: group.id(),
        seconds: options.seconds,
        stop,
    };
    let mut servers = Vec::new();
    let mut missing = Vec::new();
    for server in Server::ALL {
        match server.missing() {
            None => servers.push(server),
            Some(hint) => missing.push(hint),
        }
    }
    if servers.is_empty() {
        return Err(Failure::running(missing.join("; ")));
    }
    for hint in missing {
        output::note(format_args!("note: {hint}; it is left out"));
    }
    let loads: usize = servers.iter().map(|server| server.loads().len()).sum();
    let mut progress = Progress::new(loads * options.rounds as usize);
    let mut summary = DemoSummary::new(cpus, options.rounds);
    for server in servers {
        let mut pair = testbed.start(server)?;
        for round in 0..options.rounds {
            for load in server.loads() {
                progress.begin(load.row);
                // The order alternates, so that a machine that becomes slower or faster favours neither.
                let [kernel, ginnel] = testbed.measure(&mut pair, load, round % 2 == 1)?;
                progress.end(load.row, kernel.per_core, ginnel.per_core);
                summary.add(load, kernel, ginnel);
            }
        }
    }
    Ok(summary)
}
