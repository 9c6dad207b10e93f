//! `ginnel stat`: shows the counters of a running stack. They are read from its published page, without a
//! request to the stack.

pub mod sample;
mod show;
mod watch;

use crate::failure::Failure;
use clap::Args;
use core::time::Duration;
use ginnel::run_dir::{self, RunningStack};
pub use sample::StatSource;
pub use show::quoted;
use std::io::{self, Write};

/// Options of `ginnel stat`.
#[derive(Clone, Debug, Args)]
pub struct StatOptions {
    /// Name of the stack, if several run (see --list).
    name: Option<String>,

    /// List the running stacks.
    #[arg(long, conflicts_with_all = ["name", "filter", "all", "watch"])]
    list: bool,

    /// Show only counters whose name contains this text or matches this pattern: "tcp", "pool.*.used". May be
    /// given several times.
    #[arg(long, short, value_name = "PATTERN")]
    filter: Vec<String>,

    /// Show counters that are zero, too.
    #[arg(long, short)]
    all: bool,

    /// Repeat every SECONDS (default 1) and show rates.
    #[arg(long, short, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "1", value_parser = seconds)]
    watch: Option<Duration>,

    /// Print JSON; with --watch one line per interval.
    #[arg(long)]
    json: bool,
}

/// Parses an interval.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|s: &f64| (0.05..=86_400.0).contains(s));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "not 0.05 to 86400 seconds".into())
}

/// Prints the counters, or the list of stacks.
pub fn run(options: &StatOptions) -> Result<(), Failure> {
    let shown = if options.list {
        list(options)
    } else {
        let running = run_dir::find(options.name.as_deref()).map_err(|e| Failure::running(e.to_string()))?;
        let source = StatSource::open(running)?;
        match options.watch {
            None => {
                let sample = source.take()?;
                let text = if options.json {
                    show::json(&source, &sample, &options.filter)
                } else {
                    show::table(&source, &sample, None, &options.filter, options.all).to_string()
                };
                io::stdout().write_all(text.as_bytes()).map_err(Failure::from)
            }
            Some(every) => watch::run(options, &source, every),
        }
    };
    // The reader closed the pipe: that is no error.
    shown.or_else(|failure| if failure.is_closed_pipe() { Ok(()) } else { Err(failure) })
}

fn list(options: &StatOptions) -> Result<(), Failure> {
    let running = run_dir::running().map_err(|e| Failure::running(e.to_string()))?;
    let mut out = io::stdout().lock();
    if options.json {
        let stack = |RunningStack { name, pid, path }: &RunningStack| {
            let path = show::quoted(&path.display().to_string());
            format!("{{\"name\":{},\"pid\":{pid},\"directory\":{path}}}", show::quoted(name))
        };
        let stacks: Vec<String> = running.iter().map(stack).collect();
        writeln!(out, "[{}]", stacks.join(","))?;
    } else {
        for RunningStack { name, pid, path } in running {
            writeln!(out, "{name:<24} {pid:>8}  {}", path.display())?;
        }
    }
    Ok(())
}
