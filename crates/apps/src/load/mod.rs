//! `ginnel load http`: asks a server for pages, and measures how it answers.
//!
//! ```text
//! options ─► plan, requests, sources                ┌─► kernel (epoll, threads)
//!                 │                                 │
//!                 └─► session ◄─► network ◄─────────┴─► handler (a shard of Ginnel)
//!                        │
//!                        ├─ arrivals (when requests are due)    response (where answers end)
//!                        └─► stats ─► report
//! ```
//!
//! Both stacks are driven by the same session, so what differs between two runs is the stack. A connection takes 48 bytes, 16 for each
//! request it may have in flight and 8–20 of the network's; requests are written once, and in steady state nothing is allocated.

pub mod arrivals;
mod handler;
mod kernel;
pub mod latency;
pub mod options;
pub mod plan;
pub mod report;
pub mod response;
pub mod session;
pub mod sources;
pub mod stats;
pub mod urls;

pub use handler::{LoadHandler, Outcome};
pub use options::{Job, Options, StackKind};
pub use report::Report;

use crate::Run;
use core::time::Duration;
use ginnel::{Error, StopFlag};
use stats::{Progress, ProgressNow, Stats};
use std::sync::{Arc, Condvar, Mutex};

/// Runs the program and prints its report. `stack` is only used if the options ask for Ginnel's TCP. A run that `stop` ends early reports
/// what it has.
pub fn run(options: &Options, stop: &StopFlag, stack: impl Run) -> Result<(), Error> {
    let report = measure(options, stop, stack)?;
    if options.json {
        println!("{}", report.to_json());
    } else {
        print!("{report}");
    }
    Ok(())
}

/// Runs the program and returns its report.
pub fn measure(options: &Options, stop: &StopFlag, stack: impl Run) -> Result<Report, Error> {
    let job = options.job()?;
    let threads =
        if options.stack == StackKind::Kernel { options.threads.min(options.connections) } else { 1 };
    let progress: Vec<Arc<Progress>> = (0..threads).map(|_| Arc::default()).collect();
    let stats = watched(options, &progress, || match options.stack {
        StackKind::Kernel => kernel::run(&job, threads, &progress, stop),
        StackKind::Ginnel => on_shard(&job, &progress[0], stack),
    })?;
    Ok(Report::new(options, &stats))
}

fn on_shard(job: &Job, progress: &Arc<Progress>, stack: impl Run) -> Result<Stats, Error> {
    let outcome = Outcome::default();
    stack.run(LoadHandler::new(job.clone(), 0, 1, Arc::clone(progress), Arc::clone(&outcome)))?;
    let stats = outcome.lock().ok().and_then(|mut o| o.take());
    stats.ok_or_else(|| Error::application("the run ended before anything was measured"))
}

/// Runs `work` while another thread prints a line of progress each second.
fn watched<R>(options: &Options, progress: &[Arc<Progress>], work: impl FnOnce() -> R) -> R {
    if options.quiet {
        return work();
    }
    let (ended, wake) = (Mutex::new(false), Condvar::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut before = ProgressNow::default();
            let Ok(mut guard) = ended.lock() else { return };
            for second in 1u64.. {
                match wake.wait_timeout(guard, Duration::from_secs(1)) {
                    Ok((g, _)) if !*g => guard = g,
                    _ => return,
                }
                let now = Progress::sum(progress.iter().map(|p| &**p));
                eprintln!("{}", line(second, &before, &now));
                before = now;
            }
        });
        let result = work();
        if let Ok(mut ended) = ended.lock() {
            *ended = true;
        }
        wake.notify_all();
        result
    })
}

/// What happened within the last second.
fn line(second: u64, before: &ProgressNow, now: &ProgressNow) -> String {
    const STAGES: [&str; 5] = ["set-up", "warm-up", "measuring", "draining", "done"];
    let stage = STAGES.get(now.stage as usize).unwrap_or(&"");
    format!(
        "{second:>4} s  {stage:<9}  {:>9} requests/s  {:>9} connections/s  {:>8.1} MB/s  {:>8} open  {} failed",
        now.completed - before.completed,
        now.connected - before.connected,
        (now.bytes - before.bytes) as f64 / 1e6,
        now.open,
        now.failed
    )
}
