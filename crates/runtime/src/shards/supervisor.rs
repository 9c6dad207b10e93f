//! Starts shards and workers on threads together, and ends them together.

use super::workers::{self, WorkerPart};
use super::{Gate, ShardPart};
use crate::channel::{ChannelServer, Client};
use crate::error::Error;
use crate::handler::Handler;
use crate::pin;
use crate::placement::CoShard;
use crate::shard::Shard;
use crate::shutdown::{BarrierMember, ShutdownBarrier};
use crate::stop::StopFlag;
use crate::wait::EventFd;
use core::any::Any;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Why a thread has no result.
enum ThreadFailure {
    Failed(Error),
    /// Another shard or worker could not be built.
    NotStarted,
}

/// Progress of building shards and workers.
struct BuildProgress {
    /// Shards and workers that are not built yet.
    pending: usize,
    /// True if a shard or worker could not be built, so none starts.
    failed: bool,
    /// Called when all are built, before one starts.
    gate: Option<Gate>,
}

/// State that all threads share.
struct Supervisor<'a, F, E> {
    barrier: Arc<ShutdownBarrier>,
    progress: Mutex<BuildProgress>,
    changed: Condvar,
    stop: &'a StopFlag,
    handler: &'a F,
    finish: &'a E,
}

/// Runs all shards, each on its own thread.
pub(super) fn run<H: Handler, R: Send>(
    parts: Vec<ShardPart>,
    gate: Option<Gate>,
    stop: &StopFlag,
    handler: &(impl Fn(usize) -> Result<H, Error> + Sync),
    finish: &(impl Fn(usize, Shard<H>) -> R + Sync),
) -> Result<Vec<R>, Error> {
    let pending = parts.iter().map(|part| 1 + part.workers()).sum();
    let members = parts.iter().filter_map(|part| part.member.as_ref());
    let barrier =
        ShutdownBarrier::new(members.map(|member| Arc::clone(member.commander.doorbell())).collect());
    let progress = Mutex::new(BuildProgress { pending, failed: false, gate });
    let supervisor = Supervisor { barrier, progress, changed: Condvar::new(), stop, handler, finish };
    let supervisor = &supervisor;
    let outcomes = thread::scope(|scope| {
        let mut threads = Vec::new();
        let mut spawn_error = None;
        let mut next_application = 0;
        for (index, part) in parts.into_iter().enumerate() {
            let first_application = next_application;
            next_application += part.workers().max(1);
            let thread = thread::Builder::new().name(format!("shard-{index}"));
            match thread.spawn_scoped(scope, move || match part.workers() {
                0 => supervisor.run_shard(index, part),
                _ => supervisor.run_hub(index, first_application, part),
            }) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    drop(supervisor.report_built(false));
                    spawn_error = Some(error);
                    break;
                }
            }
        }
        let outcomes: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        match spawn_error {
            Some(error) => Err(Error::io("thread of a shard", error)),
            None => Ok(outcomes),
        }
    })?;
    let mut results = Vec::new();
    let mut first_error = None;
    for (index, outcome) in outcomes.into_iter().enumerate() {
        match outcome.unwrap_or_else(|panic| Err(ThreadFailure::Failed(panic_error(&*panic)))) {
            Ok(values) => results.extend(values),
            Err(ThreadFailure::NotStarted) => {}
            Err(ThreadFailure::Failed(error)) => {
                first_error.get_or_insert(Error::Shard(index, Box::new(error)));
            }
        }
    }
    first_error.map_or(Ok(results), Err)
}

impl<F, E> Supervisor<'_, F, E> {
    /// Records that a shard or worker was built, or could not be built.
    fn report_built(&self, succeeded: bool) -> MutexGuard<'_, BuildProgress> {
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.pending = progress.pending.saturating_sub(1);
        progress.failed |= !succeeded;
        if progress.pending == 0
            && !progress.failed
            && let Some(gate) = progress.gate.take()
        {
            gate();
        }
        self.changed.notify_all();
        progress
    }

    /// Records that a shard or worker was built, or could not be built, and waits for the others. Returns
    /// false if one could not be built.
    fn wait_for_all(&self, succeeded: bool) -> bool {
        let progress = self.report_built(succeeded);
        let is_waiting = |progress: &mut BuildProgress| progress.pending > 0 && !progress.failed;
        let progress = self.changed.wait_while(progress, is_waiting).unwrap_or_else(PoisonError::into_inner);
        !progress.failed
    }

    /// Waits until all shards and workers are built.
    fn await_start<T>(&self, built: Result<T, Error>) -> Result<T, ThreadFailure> {
        let may_start = self.wait_for_all(built.is_ok());
        let built = built.map_err(ThreadFailure::Failed)?;
        if may_start { Ok(built) } else { Err(ThreadFailure::NotStarted) }
    }

    /// Returns a shard's membership in the shutdown barrier, if there are several shards.
    fn barrier_member(&self, part: &ShardPart) -> Option<BarrierMember> {
        part.member.as_ref().map(|_| BarrierMember::new(&self.barrier))
    }

    /// Runs a shard without workers.
    fn run_shard<H: Handler, R>(&self, index: usize, part: ShardPart) -> Result<Vec<R>, ThreadFailure>
    where
        F: Fn(usize) -> Result<H, Error>,
        E: Fn(usize, Shard<H>) -> R,
    {
        // Pinned while it is built, so that its memory is allocated near its CPU.
        let cpu = part.config.shard.cpu;
        let barrier_member = self.barrier_member(&part);
        let built =
            catch_panic(|| pin::with_pinned("shards.cpus", cpu, || part.build((self.handler)(index)?)));
        let mut shard = self.await_start(built)?;
        shard.join_barrier(barrier_member);
        let ended = catch_panic(|| shard.run(self.stop));
        self.stop.stop();
        ended.map_err(ThreadFailure::Failed)?;
        Ok(vec![(self.finish)(index, shard)])
    }

    /// Runs a shard with workers; the first worker has the number `first` among all applications.
    fn run_hub<H: Handler, R: Send>(
        &self,
        index: usize,
        first: usize,
        part: ShardPart,
    ) -> Result<Vec<R>, ThreadFailure>
    where
        F: Fn(usize) -> Result<H, Error> + Sync,
        E: Fn(usize, Shard<H>) -> R + Sync,
    {
        let cpu = part.config.shard.cpu;
        let barrier_member = self.barrier_member(&part);
        let built = catch_panic(|| {
            pin::with_pinned("shards.cpus", cpu, || {
                let (mut hub, workers) = workers::build_hub(part)?;
                let control = || Box::new(hub.commander());
                let controls: Vec<_> = workers.iter().map(|_| control()).collect();
                let clients = controls.into_iter().map(|control| hub.handler_mut().attach(control));
                let clients = clients.collect::<Result<Vec<_>, Error>>()?;
                Ok((ThreadGroup::new(&clients)?, hub, workers.into_iter().zip(clients)))
            })
        });
        let (group, mut hub, workers) = match built {
            Ok((group, hub, workers)) => (&{ group }, hub, workers),
            Err(error) => return self.await_start(Err(error)),
        };
        hub.join_barrier(barrier_member);
        let stats = hub.stack_stats_reader();
        thread::scope(|scope| {
            let mut threads = Vec::new();
            let mut spawn_error = None;
            for (number, worker) in workers.enumerate() {
                let hub = CoShard::running(stats.clone(), group.hub_ended.clone());
                let thread = thread::Builder::new().name(format!("worker-{index}-{number}"));
                let run = move || self.run_worker(group, first + number, worker, hub);
                match thread.spawn_scoped(scope, run) {
                    Ok(thread) => threads.push(thread),
                    Err(error) => {
                        spawn_error = Some(Error::io("thread of a worker", error));
                        break;
                    }
                }
            }
            let hub_outcome = self.run_hub_loop(group, hub, spawn_error.map_or(Ok(()), Err));
            let panicked = |panic: Box<dyn Any + Send>| Err(ThreadFailure::Failed(panic_error(&*panic)));
            let outcomes = threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked));
            let (mut results, mut not_started) = (Vec::new(), false);
            // If the hub failed, the workers ended because of that.
            let mut failed = None;
            for outcome in
                core::iter::once(hub_outcome.map(|()| None)).chain(outcomes.map(|end| end.map(Some)))
            {
                match outcome {
                    Ok(result) => results.extend(result),
                    Err(ThreadFailure::NotStarted) => not_started = true,
                    Err(ThreadFailure::Failed(error)) => _ = failed.get_or_insert(error),
                }
            }
            match failed {
                Some(error) => Err(ThreadFailure::Failed(error)),
                None if not_started => Err(ThreadFailure::NotStarted),
                None => Ok(results),
            }
        })
    }

    /// Runs a hub until its workers have ended.
    fn run_hub_loop(
        &self,
        group: &ThreadGroup,
        mut hub: Shard<ChannelServer>,
        built: Result<(), Error>,
    ) -> Result<(), ThreadFailure> {
        self.await_start(built)?;
        let ended = catch_panic(|| hub.run(&group.stop));
        group.hub_exited();
        self.stop.stop();
        ended.map_err(ThreadFailure::Failed)
    }

    fn run_worker<H: Handler, R>(
        &self,
        group: &ThreadGroup,
        index: usize,
        worker: (WorkerPart, Client),
        hub: CoShard,
    ) -> Result<R, ThreadFailure>
    where
        F: Fn(usize) -> Result<H, Error>,
        E: Fn(usize, Shard<H>) -> R,
    {
        // If the handler cannot be created, the client is dropped after `await_start`: it asks the hub to
        // detach it, and the hub answers nothing before it knows whether all workers are built.
        let mut worker = Some(worker);
        let built = catch_panic(|| {
            let handler = (self.handler)(index)?;
            match worker.take() {
                Some((worker, client)) => worker.build(client, handler, Some(hub)),
                None => unreachable!("a worker is built once"),
            }
        });
        let mut shard = self.await_start(built)?;
        let ended = catch_panic(|| shard.run(self.stop));
        self.stop.stop();
        group.worker_exited();
        ended.map_err(ThreadFailure::Failed)?;
        Ok((self.finish)(index, shard))
    }
}

/// A hub and its workers. The hub runs until all workers have ended.
struct ThreadGroup {
    /// Stops the hub.
    stop: StopFlag,
    /// Workers that have not ended.
    workers: AtomicUsize,
    hub_ended: Arc<AtomicBool>,
    has_hub_exited: Mutex<bool>,
    changed: Condvar,
    /// Event that the workers sleep on.
    wakes: Vec<Arc<EventFd>>,
}

impl ThreadGroup {
    fn new(workers: &[Client]) -> Result<Self, Error> {
        Ok(Self {
            stop: StopFlag::new().map_err(|e| Error::io("stop flag of workers", e))?,
            workers: AtomicUsize::new(workers.len()),
            hub_ended: Arc::default(),
            has_hub_exited: Mutex::new(false),
            changed: Condvar::new(),
            wakes: workers.iter().map(Client::wake_event).collect(),
        })
    }

    /// Records that the hub has ended, and wakes the workers; if they still run, the hub has failed.
    fn hub_exited(&self) {
        self.hub_ended.store(true, Ordering::Release);
        self.wakes.iter().for_each(|wake| wake.signal());
        *self.has_hub_exited.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// Records that a worker has ended, and waits for the hub, so that the worker's application sees the
    /// final counters.
    fn worker_exited(&self) {
        if self.workers.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.stop.stop();
        }
        let ended = self.has_hub_exited.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_while(ended, |ended| !*ended).unwrap_or_else(PoisonError::into_inner));
    }
}

/// Calls a function of the application and converts a panic to an error. Its state is not used after a panic.
fn catch_panic<T>(call: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| Err(panic_error(&*panic)))
}

fn panic_error(panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    Error::Panicked(text.unwrap_or("with a payload that is not a string").into())
}
