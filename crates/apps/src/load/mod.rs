//! `ginnel load`: requests pages (`http`) or values (`redis`, `memcached`) from a server, or sends it
//! messages by a calendar (`iot`, `echo`) or what the clients of a capture sent (`replay`), and measures
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
//! A session does not know on which stack it runs, so two runs differ in nothing but the stack. Requests,
//! messages ([`messages`]) and replays ([`replay`]) have a kind of session each; [`run::LoadSession`] is what
//! a stack sees of all three. Workers share nothing, except that they may be shards of one stack. Each has a
//! thread, a session, its share of the plan and, unless the TCP is the kernel's, a stack and a device of its
//! own; only the results are added up. With requests a connection takes 48 bytes, 16 bytes for each request
//! that it may have in flight, and 8 to 68 bytes of the network. Requests are written once, and in steady
//! state nothing is allocated.

pub mod agents;
pub mod arrivals;
pub mod busy_time;
mod handler;
pub(crate) mod kernel;
pub mod latency;
pub mod light;
pub mod messages;
pub mod options;
pub mod plan;
pub mod replay;
pub mod report;
pub mod response;
pub mod run;
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
use ginnel::shards::OpenedShards;
use ginnel::{Error, StopFlag};
use plan::WorkerShare;
use run::{LoadJob, WorkerStats};
use stats::{LiveProgress, ProgressSnapshot};
use std::io::Write;
use std::sync::{Arc, Condvar, Mutex};

/// Runs the generator on Ginnel's TCP and returns its report. `stacks` has one stack for each of
/// [`CommonOptions::workers()`], each with this `stop`. A run that ends early reports what it has measured.
///
/// # Errors
/// The number of stacks is not [`CommonOptions::workers()`]; or the error of the worker that failed first,
/// after which `stop` is set.
pub fn measure<J: LoadJob, S: RunHandler + Send>(
    job: &J,
    stop: &StopFlag,
    stacks: Vec<S>,
) -> Result<J::Report, Error> {
    run_workers(job, stop, stacks, |job, share, progress, stack| run_on_shard(job, share, progress, stack))
}

/// Runs the generator on the shards of one stack and returns its report. Each shard gets its share of the
/// plan. The shards start together, and none stops before all have finished.
///
/// # Errors
/// The error of a shard; or the number of shards is not [`CommonOptions::workers()`], there are fewer
/// connections than shards, or the run ended before anything was measured.
pub fn measure_on_shards<J: LoadJob>(
    job: &J,
    stop: &StopFlag,
    shards: OpenedShards,
) -> Result<J::Report, Error> {
    let options = job.common();
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
    let measured = with_progress_lines(job, &progress, || {
        let handler = |index: usize| {
            // Cannot truncate: there are at most 64 shards.
            let worker = LoadHandler::of_share(
                job.clone(),
                job.share(index as u32, workers),
                Arc::clone(&progress[index]),
                SharedStats::default(),
            );
            Ok(worker.in_group(Arc::clone(&running)))
        };
        shards.run(stop, handler, |_, shard| {
            let busy = Some(1.0 - shard.stats().idle_share());
            let mut stats = shard.handler().measured()?;
            stats.set_busy(busy);
            Some(stats)
        })
    })?;
    let mut total = J::Stats::default();
    for stats in measured {
        total.add(&stats.ok_or_else(nothing_measured)?);
    }
    Ok(job.report(&total))
}

/// Runs the generator on the TCP in [`light`], with one stack for each worker, and returns its report.
///
/// # Errors
/// The errors of [`measure`].
pub fn measure_light<J: LoadJob>(
    job: &J,
    stop: &StopFlag,
    stacks: Vec<light::WorkerStack>,
) -> Result<J::Report, Error> {
    run_workers(job, stop, stacks, |job, share, progress, stack| {
        light::run(job, share, progress, stack, stop)
    })
}

/// Runs the generator on the kernel's TCP and returns its report.
///
/// # Errors
/// The process may not have enough open descriptors; or the error of the worker that failed first, after
/// which `stop` is set.
pub fn measure_on_kernel<J: LoadJob>(job: &J, stop: &StopFlag) -> Result<J::Report, Error> {
    let common = job.common();
    kernel::raise_descriptor_limit(common.connections.into(), common.workers().into())?;
    let sockets = vec![(); common.workers() as usize];
    run_workers(job, stop, sockets, |job, share, progress, ()| kernel::run(job, share, progress, stop))
}

/// Runs `work` for each worker with its stack.
fn run_workers<J: LoadJob, T: Send>(
    job: &J,
    stop: &StopFlag,
    stacks: Vec<T>,
    work: impl Fn(&J, WorkerShare, Arc<LiveProgress>, T) -> Result<J::Stats, Error> + Sync,
) -> Result<J::Report, Error> {
    let workers = job.common().workers();
    if stacks.len() != workers as usize {
        return Err(Error::application(format!("{} stacks for {workers} workers", stacks.len())));
    }
    let progress: Vec<Arc<LiveProgress>> = (0..workers).map(|_| Arc::default()).collect();
    let stats = with_progress_lines(job, &progress, || {
        let works = (0..workers).zip(&progress).zip(stacks).map(|((worker, progress), stack)| {
            let (work, progress) = (&work, Arc::clone(progress));
            move || work(job, job.share(worker, workers), progress, stack)
        });
        run_in_parallel(works.collect(), stop)
    })?;
    Ok(job.report(&stats))
}

/// Runs all workers in parallel, each on a thread of its own, and adds up their results. Returns the error
/// that occurred first, if any.
fn run_in_parallel<S, W>(works: Vec<W>, stop: &StopFlag) -> Result<S, Error>
where
    S: WorkerStats,
    W: FnOnce() -> Result<S, Error> + Send,
{
    let first_error = Mutex::new(None);
    let fail = |error: Error| {
        if let Ok(mut first) = first_error.lock() {
            first.get_or_insert(error);
        }
        // Without a report the other workers need not finish.
        stop.stop();
        S::default()
    };
    let mut total = S::default();
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

fn run_on_shard<J: LoadJob>(
    job: &J,
    share: WorkerShare,
    progress: Arc<LiveProgress>,
    stack: impl RunHandler,
) -> Result<J::Stats, Error> {
    let outcome = SharedStats::default();
    let shard =
        stack.run_handler(LoadHandler::of_share(job.clone(), share, progress, Arc::clone(&outcome)))?;
    let stats = outcome.lock().ok().and_then(|mut o| o.take());
    let mut stats = stats.ok_or_else(nothing_measured)?;
    stats.set_busy(Some(1.0 - shard.idle_share()));
    Ok(stats)
}

fn nothing_measured() -> Error {
    Error::application("the run ended before anything was measured")
}

/// Runs `work` while another thread prints a progress line at each interval of the job.
fn with_progress_lines<J: LoadJob, R>(
    job: &J,
    progress: &[Arc<LiveProgress>],
    work: impl FnOnce() -> R,
) -> R {
    if job.common().quiet {
        return work();
    }
    let (ended, wake) = (Mutex::new(false), Condvar::new());
    let interval = job.progress_interval();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut before = ProgressSnapshot::default();
            let Ok(mut guard) = ended.lock() else { return };
            for count in 1u32.. {
                match wake.wait_timeout_while(guard, interval, |has_ended| !*has_ended) {
                    Ok((g, timeout)) if timeout.timed_out() => guard = g,
                    _ => return,
                }
                let now = LiveProgress::sum(progress.iter().map(|p| &**p));
                // Without standard error nobody follows the progress.
                let line = job.progress_line(interval * count, &before, &now);
                let _ = writeln!(std::io::stderr(), "{line}");
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
