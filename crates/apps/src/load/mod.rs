//! `ginnel load`: requests pages (`http`) or values (`redis`, `memcached`) from a server, and measures
//! latency and throughput.
//!
//! ```text
//! options ─► plan, requests, sources                ┌─► kernel (epoll, threads)
//!                 │                                 ├─► light (a client's TCP on a device)
//!                 └─► session ◄─► network ◄─────────┴─► handler (a shard of Ginnel)
//!                        │
//!                        ├─ arrivals (when requests are due)    response (where responses end)
//!                        └─► stats ─► report
//! ```
//!
//! The same session drives all three stacks, so two runs differ in nothing but the stack. Workers share
//! nothing, except that they may be shards of one stack. Each has a thread, a session, its share of the plan
//! and, unless the TCP is the kernel's, a stack and a device of its own; only the results are added up. A
//! connection takes 48 bytes, 16 bytes for each request that it may have in flight, and 8 to 20 bytes of the
//! network. Requests are written once, and in steady state nothing is allocated.

pub mod arrivals;
pub mod busy_time;
mod handler;
mod kernel;
pub mod latency;
pub mod light;
pub mod options;
pub mod plan;
pub mod report;
pub mod response;
pub mod session;
pub mod sources;
pub mod stats;
pub mod urls;
pub mod values;

pub use handler::{LoadHandler, SharedStats};
pub use options::{CommonOptions, HttpOptions, Job, LoadOptions, StackKind};
pub use report::Report;
pub use values::{MemcachedOptions, RedisOptions};

use crate::RunHandler;
use core::sync::atomic::AtomicU32;
use core::time::Duration;
use ginnel::shards::OpenedShards;
use ginnel::{Error, StopFlag};
use plan::WorkerShare;
use stats::{LiveProgress, ProgressSnapshot, Stats};
use std::sync::{Arc, Condvar, Mutex};

/// Runs the generator on Ginnel's TCP and returns its report. `stacks` has one stack for each of
/// [`CommonOptions::workers`]. A run that `stop` ends early reports what it has measured.
///
/// # Errors
/// An error in the options, or the error of the first worker that failed; the other workers are stopped then.
pub fn measure<S: RunHandler + Send>(job: &Job, stop: &StopFlag, stacks: Vec<S>) -> Result<Report, Error> {
    run_workers(job, stop, stacks, |job, share, progress, stack| run_on_shard(job, share, progress, stack))
}

/// Runs [`measure`] on the shards of one stack. Each shard gets its share of the plan. The shards start
/// together, and none stops before all have finished.
///
/// # Errors
/// The errors of [`measure`]; or the number of shards differs from [`CommonOptions::workers`].
pub fn measure_on_shards(job: &Job, stop: &StopFlag, shards: OpenedShards) -> Result<Report, Error> {
    let options = &job.common;
    let workers = options.workers();
    if shards.count() != workers as usize {
        return Err(Error::application(format!("{} shards for {workers} workers", shards.count())));
    }
    if options.connections < workers {
        let problem = format!(
            "--shards {workers} needs at least {workers} connections, but --connections is {}",
            options.connections
        );
        return Err(Error::application(problem));
    }
    let progress: Vec<Arc<LiveProgress>> = (0..workers).map(|_| Arc::default()).collect();
    let running = Arc::new(AtomicU32::new(workers));
    let measured = with_progress_lines(options, &progress, || {
        let handler = |index: usize| {
            // Cannot truncate: there are at most 64 shards.
            let worker = LoadHandler::new(
                job.clone(),
                index as u32,
                workers,
                Arc::clone(&progress[index]),
                SharedStats::default(),
            );
            Ok(worker.in_group(Arc::clone(&running)))
        };
        shards.run(stop, handler, |_, shard| {
            let busy = Some(1.0 - shard.stats().idle_share());
            shard.handler().measured().map(|stats| Stats { busy, ..stats })
        })
    })?;
    let mut total = Stats::default();
    for stats in measured {
        total.add(&stats.ok_or_else(nothing_measured)?);
    }
    Ok(Report::new(job, &total))
}

/// Runs [`measure`] on the TCP in [`light`], with one stack for each worker.
///
/// # Errors
/// The errors of [`measure`].
pub fn measure_light(job: &Job, stop: &StopFlag, stacks: Vec<light::WorkerStack>) -> Result<Report, Error> {
    run_workers(job, stop, stacks, |job, share, progress, stack| {
        light::run(job, share, progress, stack, stop)
    })
}

/// Runs [`measure`] on the kernel's TCP.
///
/// # Errors
/// The errors of [`measure`].
pub fn measure_on_kernel(job: &Job, stop: &StopFlag) -> Result<Report, Error> {
    kernel::raise_descriptor_limit(job.common.connections.into())?;
    let sockets = vec![(); job.common.workers() as usize];
    run_workers(job, stop, sockets, |job, WorkerShare { worker, workers }, progress, ()| {
        kernel::run(job, worker, workers, progress, stop)
    })
}

/// Runs `work` for each worker with its stack.
fn run_workers<T: Send>(
    job: &Job,
    stop: &StopFlag,
    stacks: Vec<T>,
    work: impl Fn(&Job, WorkerShare, Arc<LiveProgress>, T) -> Result<Stats, Error> + Sync,
) -> Result<Report, Error> {
    let workers = job.common.workers();
    if stacks.len() != workers as usize {
        return Err(Error::application(format!("{} stacks for {workers} workers", stacks.len())));
    }
    let progress: Vec<Arc<LiveProgress>> = (0..workers).map(|_| Arc::default()).collect();
    let stats = with_progress_lines(&job.common, &progress, || {
        let works = (0..workers).zip(&progress).zip(stacks).map(|((worker, progress), stack)| {
            let (work, progress) = (&work, Arc::clone(progress));
            move || work(job, WorkerShare { worker, workers }, progress, stack)
        });
        run_in_parallel(works.collect(), stop)
    })?;
    Ok(Report::new(job, &stats))
}

/// Runs all workers in parallel, each on a thread of its own, and adds up their results. Returns the error
/// that occurred first, if any.
fn run_in_parallel<W>(works: Vec<W>, stop: &StopFlag) -> Result<Stats, Error>
where
    W: FnOnce() -> Result<Stats, Error> + Send,
{
    let first_error = Mutex::new(None);
    let fail = |error: Error| {
        if let Ok(mut first) = first_error.lock() {
            first.get_or_insert(error);
        }
        // Without a report the other workers need not finish.
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

fn run_on_shard(
    job: &Job,
    WorkerShare { worker, workers }: WorkerShare,
    progress: Arc<LiveProgress>,
    stack: impl RunHandler,
) -> Result<Stats, Error> {
    let outcome = SharedStats::default();
    let shard =
        stack.run_handler(LoadHandler::new(job.clone(), worker, workers, progress, Arc::clone(&outcome)))?;
    let stats = outcome.lock().ok().and_then(|mut o| o.take());
    let stats = stats.ok_or_else(nothing_measured)?;
    Ok(Stats { busy: Some(1.0 - shard.idle_share()), ..stats })
}

fn nothing_measured() -> Error {
    Error::application("the run ended before anything was measured")
}

/// Runs `work` while another thread prints a progress line every second.
fn with_progress_lines<R>(
    options: &CommonOptions,
    progress: &[Arc<LiveProgress>],
    work: impl FnOnce() -> R,
) -> R {
    if options.quiet {
        return work();
    }
    let (ended, wake) = (Mutex::new(false), Condvar::new());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut before = ProgressSnapshot::default();
            let Ok(mut guard) = ended.lock() else { return };
            for second in 1u64.. {
                match wake.wait_timeout(guard, Duration::from_secs(1)) {
                    Ok((g, _)) if !*g => guard = g,
                    _ => return,
                }
                let now = LiveProgress::sum(progress.iter().map(|p| &**p));
                eprintln!("{}", progress_line(second, &before, &now));
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

/// Formats the progress of the last second.
fn progress_line(second: u64, before: &ProgressSnapshot, now: &ProgressSnapshot) -> String {
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
