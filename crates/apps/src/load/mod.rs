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
//! Both stacks are driven by the same session, so what differs between two runs is the stack. Workers share nothing: each has a thread, a
//! session, its part of the plan, and with Ginnel's TCP a stack and a device of its own; only what they measured is added up. A connection takes 48 bytes, 16 for each
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
use ginnel::{Error, Handler, StopFlag};
use stats::{Progress, ProgressNow, Stats};
use std::sync::{Arc, Condvar, Mutex};

/// Runs the program and returns its report. Ginnel's TCP needs a stack for each of [`Options::workers`]; the kernel has its own. A run that
/// `stop` ends early reports what it has.
///
/// # Errors
/// What is wrong with the options, or the first worker that failed; the others are stopped then.
pub fn measure<S: Run + Send>(options: &Options, stop: &StopFlag, stacks: Vec<S>) -> Result<Report, Error> {
    let job = options.job()?;
    let workers = options.workers();
    let progress: Vec<Arc<Progress>> = (0..workers).map(|_| Arc::default()).collect();
    if options.stack == StackKind::Kernel {
        kernel::raise_descriptors(job.plan.connections.into())?;
    } else if stacks.len() != workers as usize {
        return Err(Error::application(format!("{} stacks for {workers} workers", stacks.len())));
    }
    let mut stacks: Vec<Option<S>> = stacks.into_iter().map(Some).collect();
    stacks.resize_with(workers as usize, || None);
    let stats = watched(options, &progress, || {
        let works = (0..workers).zip(&progress).zip(stacks).map(|((worker, progress), stack)| {
            let (job, progress) = (&job, Arc::clone(progress));
            move || match stack {
                Some(stack) => on_shard(job, worker, workers, progress, stack),
                None => kernel::run(job, worker, workers, progress, stop),
            }
        });
        in_parallel(works.collect(), stop)
    })?;
    Ok(Report::new(options, &stats))
}

/// [`measure`] with the kernel's TCP, for options that ask for it.
///
/// # Errors
/// As there.
pub fn measure_on_kernel(options: &Options, stop: &StopFlag) -> Result<Report, Error> {
    enum NoStack {}
    impl Run for NoStack {
        fn run<H: Handler + Send + 'static>(self, _: H) -> Result<(), Error> {
            match self {}
        }
    }
    measure::<NoStack>(options, stop, Vec::new())
}

/// Does all the work at the same time, each on a thread of its own, and adds up what came of it. Fails with the error that came first.
fn in_parallel<W>(works: Vec<W>, stop: &StopFlag) -> Result<Stats, Error>
where
    W: FnOnce() -> Result<Stats, Error> + Send,
{
    let first_error = Mutex::new(None);
    let fail = |error: Error| {
        if let Ok(mut first) = first_error.lock() {
            first.get_or_insert(error);
        }
        // There will be no report, so nobody need finish.
        stop.stop();
        Stats::default()
    };
    let mut total = Stats::default();
    std::thread::scope(|scope| {
        let work = |work: W| scope.spawn(|| work().unwrap_or_else(fail));
        let threads: Vec<_> = works.into_iter().map(work).collect();
        for thread in threads {
            let panicked = |_| fail(Error::application("a thread of the generator panicked"));
            total.add(&thread.join().unwrap_or_else(panicked));
        }
    });
    match first_error.into_inner() {
        Ok(Some(error)) => Err(error),
        _ => Ok(total),
    }
}

fn on_shard(
    job: &Job,
    worker: u32,
    workers: u32,
    progress: Arc<Progress>,
    stack: impl Run,
) -> Result<Stats, Error> {
    let outcome = Outcome::default();
    stack.run(LoadHandler::new(job.clone(), worker, workers, progress, Arc::clone(&outcome)))?;
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
