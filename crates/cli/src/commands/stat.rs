//! `ginnel stat`: shows the counters of a running stack. They are read from its published page, without a
//! request to the stack.

mod baseline;
mod fastsocket;
pub mod sample;
mod show;
mod watch;

use crate::failure::Failure;
use baseline::Baseline;
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

    /// Count from now on: other calls of "ginnel stat" show what has happened since, until the stack ends.
    /// The stack's own counters, and what "ginnel metrics" exports, do not change.
    #[arg(long, conflicts_with_all = ["list", "filter", "all", "watch", "json", "fastsocket", "since_start"])]
    reset: bool,

    /// Show the counters since the start of the stack, also after --reset.
    #[arg(long, conflicts_with = "list")]
    since_start: bool,

    /// Show the counters of Fastsocket: lookups, accepts, steering, pools and cached routes
    /// (docs/many-cores.md).
    #[arg(long, conflicts_with_all = ["list", "filter", "all", "watch"])]
    fastsocket: bool,

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
        if let Some(pattern) = unmatched(&source, &options.filter) {
            return Err(Failure::running(format!(
                "--filter {pattern}: stack \"{}\" has no such counter (docs/statistics.md lists them)",
                source.running.name
            )));
        }
        match options.watch {
            None if options.reset => Baseline::save(&source, &source.take()?),
            None => show_once(options, &source),
            Some(every) => watch::run(options, &source, every),
        }
    };
    // The reader closed the pipe: that is no error.
    shown.or_else(|failure| if failure.is_closed_pipe() { Ok(()) } else { Err(failure) })
}

/// Returns the first pattern that no counter matches.
fn unmatched<'a>(source: &StatSource, patterns: &'a [String]) -> Option<&'a String> {
    let names = || source.names.iter().map(|(_, name)| name.as_str()).chain(["busy", "restarts"]);
    patterns
        .iter()
        .find(|pattern| !names().any(|name| sample::is_wanted(name, core::slice::from_ref(*pattern))))
}

/// Prints the counters since the start of the stack, or since the last reset.
fn show_once(options: &StatOptions, source: &StatSource) -> Result<(), Failure> {
    let mut sample = source.take()?;
    let baseline = if options.since_start { None } else { Baseline::load(source)? };
    let mut head = "counter".to_owned();
    if let Some(baseline) = baseline {
        head = format!("reset {:.1} s ago", baseline.age(&sample).as_secs_f64());
        baseline.subtract(source, &mut sample);
    }
    let text = match (options.fastsocket, options.json) {
        (false, true) => show::json(source, &sample, &options.filter),
        (false, false) => show::table(source, &sample, None, &options.filter, options.all, &head).to_string(),
        (true, true) => fastsocket::json(source, &sample),
        (true, false) => fastsocket::table(source, &sample, &head).to_string(),
    };
    io::stdout().write_all(text.as_bytes()).map_err(Failure::from)
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
