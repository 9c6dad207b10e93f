//! `ginnel load`: asks a server for pages (`http`) or values (`redis`, `memcached`), and measures how it answers.
//!
//! ```text
//! options ─► plan, requests, sources                ┌─► kernel (epoll, threads)
//!                 │                                 ├─► light (a client's TCP on a device)
//!                 └─► session ◄─► network ◄─────────┴─► handler (a shard of Ginnel)
//!                        │
//!                        ├─ arrivals (when requests are due)    response (where answers end)
//!                        └─► stats ─► report
//! ```
//!
//! All three stacks are driven by the same session, so what differs between two runs is the stack. Workers share nothing (but a stack, if they are its shards): each has a thread,
//! a session, its part of the plan, and unless the TCP is the kernel's a stack and a device of its own; only what they measured is added up. A connection takes 48 bytes, 16 for each
//! request it may have in flight and 8–20 of the network's; requests are written once, and in steady state nothing is allocated.

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
use stats::{LiveProgress, ProgressSnapshot, Stats};
use std::sync::{Arc, Condvar, Mutex};

/// Runs the program on Ginnel's TCP and returns its report. There is a stack for each of [`Common::workers`]. A run that `stop` ends early
/// reports what it has.
///
/// # Errors
/// What is wrong with the options, or the first worker that failed; the others are stopped then.
pub fn measure<S: RunHandler + Send>(job: &Job, stop: &StopFlag, stacks: Vec<S>) -> Result<Report, Error> {
    run_workers(job, stop, stacks, |job, share, progress, stack| run_on_shard(job, share, progress, stack))
}

/// [`measure`] on the shards of one stack. Each has its share; they begin together, and none leaves before all are through.
///
/// # Errors
/// As there; and if there are not as many shards as [`Common::workers`].
pub fn measure_on_shards(job: &Job, stop: &StopFlag, shards: OpenedShards) -> Result<Report, Error> {
    let options = &job.common;
    let workers = options.workers();
    if shards.count() != workers as usize {
        return Err(Error::application(format!("{} shards for {workers} workers", shards.count())));
    }
    if options.connections < workers {
        let problem = format!("--shards: {workers} for {} connection(s)", options.connections);
        return Err(Error::application(problem));
    }
    let progress: Vec<Arc<LiveProgress>> = (0..workers).map(|_| Arc::default()).collect();
    let running = Arc::new(AtomicU32::new(workers));
    let measured = with_progress_lines(options, &progress, || {
        let handler = |index: usize| {
            // Cannot truncate: 64 shards at the most.
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

/// [`measure`] on the TCP in [`light`], with a place for each worker.
///
/// # Errors
/// As there.
pub fn measure_light(job: &Job, stop: &StopFlag, stacks: Vec<light::WorkerStack>) -> Result<Report, Error> {
    run_workers(job, stop, stacks, |job, share, progress, place| {
        light::run(job, share, progress, place, stop)
    })
}

/// [`measure`] on the kernel's TCP.
///
/// # Errors
/// As there.
pub fn measure_on_kernel(job: &Job, stop: &StopFlag) -> Result<Report, Error> {
    kernel::raise_descriptor_limit(job.common.connections.into())?;
    let sockets = vec![(); job.common.workers() as usize];
    run_workers(job, stop, sockets, |job, (worker, workers), progress, ()| {
        kernel::run(job, worker, workers, progress, stop)
    })
}

/// Runs `work` for each worker, with what it runs on.
fn run_workers<T: Send>(
    job: &Job,
    stop: &StopFlag,
    stacks: Vec<T>,
    work: impl Fn(&Job, (u32, u32), Arc<LiveProgress>, T) -> Result<Stats, Error> + Sync,
) -> Result<Report, Error> {
    let workers = job.common.workers();
    if stacks.len() != workers as usize {
        return Err(Error::application(format!("{} stacks for {workers} workers", stacks.len())));
    }
    let progress: Vec<Arc<LiveProgress>> = (0..workers).map(|_| Arc::default()).collect();
    let stats = with_progress_lines(&job.common, &progress, || {
        let works = (0..workers).zip(&progress).zip(stacks).map(|((worker, progress), stack)| {
            let (work, progress) = (&work, Arc::clone(progress));
            move || work(job, (worker, workers), progress, stack)
        });
        run_in_parallel(works.collect(), stop)
    })?;
    Ok(Report::new(job, &stats))
}

/// Does all the work at the same time, each on a thread of its own, and adds up what came of it. Fails with the error that came first.
fn run_in_parallel<W>(works: Vec<W>, stop: &StopFlag) -> Result<Stats, Error>
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

fn run_on_shard(
    job: &Job,
    (worker, workers): (u32, u32),
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

/// Runs `work` while another thread prints a line of progress each second.
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

/// What happened within the last second.
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
