//! Shards and workers on threads: they begin together and end together.

use super::Part;
use super::workers::{self, Worker};
use crate::channel::{ChannelServer, Client};
use crate::departure::{Departure, Leave};
use crate::error::Error;
use crate::handler::Handler;
use crate::pin;
use crate::placement::Beside;
use crate::shard::Shard;
use crate::stop::StopFlag;
use crate::wait::EventFd;
use core::any::Any;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Why a thread has nothing to give back.
enum End {
    Failed(Error),
    /// Another could not be built.
    NotBegun,
}

/// How far they have come.
struct Building {
    /// Shards and workers that are not built yet.
    left: usize,
    /// One of them could not be: none begins.
    failed: bool,
}

/// What all threads share.
struct Together<'a, F, E> {
    departure: Arc<Departure>,
    building: Mutex<Building>,
    changed: Condvar,
    stop: &'a StopFlag,
    handler: &'a F,
    finish: &'a E,
}

/// Runs all, each on a thread of its own.
pub(super) fn run<H: Handler, R: Send>(
    parts: Vec<Part>,
    stop: &StopFlag,
    handler: &(impl Fn(usize) -> Result<H, Error> + Sync),
    finish: &(impl Fn(usize, Shard<H>) -> R + Sync),
) -> Result<Vec<R>, Error> {
    let left = parts.iter().map(|part| 1 + part.workers()).sum();
    let members = parts.iter().filter_map(|part| part.member.as_ref());
    let departure = Departure::new(members.map(|member| Arc::clone(member.commander.bell())).collect());
    let building = Mutex::new(Building { left, failed: false });
    let together = Together { departure, building, changed: Condvar::new(), stop, handler, finish };
    let together = &together;
    let ends = thread::scope(|scope| {
        let mut threads = Vec::new();
        let mut refused = None;
        let mut first = 0;
        for (index, part) in parts.into_iter().enumerate() {
            let own = first;
            first += part.workers().max(1);
            let thread = thread::Builder::new().name(format!("shard-{index}"));
            match thread.spawn_scoped(scope, move || match part.workers() {
                0 => together.shard(index, part),
                _ => together.front(index, own, part),
            }) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    drop(together.built(false));
                    refused = Some(error);
                    break;
                }
            }
        }
        let ends: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        match refused {
            Some(error) => Err(Error::io("thread of a shard", error)),
            None => Ok(ends),
        }
    })?;
    let mut results = Vec::new();
    let mut first = None;
    for (index, end) in ends.into_iter().enumerate() {
        match end.unwrap_or_else(|panic| Err(End::Failed(panicked(&*panic)))) {
            Ok(several) => results.extend(several),
            Err(End::NotBegun) => {}
            Err(End::Failed(error)) => {
                first.get_or_insert(Error::Shard(index, Box::new(error)));
            }
        }
    }
    first.map_or(Ok(results), Err)
}

impl<F, E> Together<'_, F, E> {
    /// One was built, or could not be.
    fn built(&self, well: bool) -> MutexGuard<'_, Building> {
        let mut building = self.building.lock().unwrap_or_else(PoisonError::into_inner);
        building.left = building.left.saturating_sub(1);
        building.failed |= !well;
        self.changed.notify_all();
        building
    }

    /// The same; then waits for the others. False if one could not be built.
    fn wait_for_all(&self, well: bool) -> bool {
        let building = self.built(well);
        let waits = |building: &mut Building| building.left > 0 && !building.failed;
        let building = self.changed.wait_while(building, waits).unwrap_or_else(PoisonError::into_inner);
        !building.failed
    }

    /// Waits for the others to be built, too.
    fn begin<T>(&self, built: Result<T, Error>) -> Result<T, End> {
        let begins = self.wait_for_all(built.is_ok());
        let built = built.map_err(End::Failed)?;
        if begins { Ok(built) } else { Err(End::NotBegun) }
    }

    /// A shard's part in the common end, if there are several.
    fn leave(&self, part: &Part) -> Option<Leave> {
        part.member.as_ref().map(|_| Leave::new(&self.departure))
    }

    /// One shard without workers.
    fn shard<H: Handler, R>(&self, index: usize, part: Part) -> Result<Vec<R>, End>
    where
        F: Fn(usize) -> Result<H, Error>,
        E: Fn(usize, Shard<H>) -> R,
    {
        // Pinned while it is built: memory is taken near the CPU that first touches it.
        let cpu = part.config.shard.cpu;
        let leave = self.leave(&part);
        let built = caught(|| pin::during("shards.cpus", cpu, || part.build((self.handler)(index)?)));
        let mut shard = self.begin(built)?;
        shard.leave_with_others(leave);
        let ended = caught(|| shard.run(self.stop));
        self.stop.stop();
        ended.map_err(End::Failed)?;
        Ok(vec![(self.finish)(index, shard)])
    }

    /// A shard with workers, of which the first has the number `first` among all applications.
    fn front<H: Handler, R: Send>(&self, index: usize, first: usize, part: Part) -> Result<Vec<R>, End>
    where
        F: Fn(usize) -> Result<H, Error> + Sync,
        E: Fn(usize, Shard<H>) -> R + Sync,
    {
        let cpu = part.config.shard.cpu;
        let leave = self.leave(&part);
        let built = caught(|| {
            pin::during("shards.cpus", cpu, || {
                let (mut front, workers) = workers::front(part)?;
                let control = || Box::new(front.commander());
                let controls: Vec<_> = workers.iter().map(|_| control()).collect();
                let clients = controls.into_iter().map(|control| front.handler_mut().attach(control));
                let clients = clients.collect::<Result<Vec<_>, Error>>()?;
                Ok((Crew::new(&clients)?, front, workers.into_iter().zip(clients)))
            })
        });
        let (crew, mut front, workers) = match built {
            Ok((crew, front, workers)) => (&{ crew }, front, workers),
            Err(error) => return self.begin(Err(error)),
        };
        front.leave_with_others(leave);
        let stats = front.stack_stats_reader();
        thread::scope(|scope| {
            let mut threads = Vec::new();
            let mut refused = None;
            for (number, worker) in workers.enumerate() {
                let front = Beside::elsewhere(stats.clone(), crew.front_ended.clone());
                let thread = thread::Builder::new().name(format!("worker-{index}-{number}"));
                let run = move || self.worker(crew, first + number, worker, front);
                match thread.spawn_scoped(scope, run) {
                    Ok(thread) => threads.push(thread),
                    Err(error) => {
                        refused = Some(Error::io("thread of a worker", error));
                        break;
                    }
                }
            }
            let mine = self.run_front(crew, front, refused.map_or(Ok(()), Err));
            let panicked = |panic: Box<dyn Any + Send>| Err(End::Failed(panicked(&*panic)));
            let ends = threads.into_iter().map(|thread| thread.join().unwrap_or_else(panicked));
            let (mut results, mut not_begun) = (Vec::new(), false);
            // If the front failed, the workers ended because of that.
            let mut failed = None;
            for end in core::iter::once(mine.map(|()| None)).chain(ends.map(|end| end.map(Some))) {
                match end {
                    Ok(result) => results.extend(result),
                    Err(End::NotBegun) => not_begun = true,
                    Err(End::Failed(error)) => _ = failed.get_or_insert(error),
                }
            }
            match failed {
                Some(error) => Err(End::Failed(error)),
                None if not_begun => Err(End::NotBegun),
                None => Ok(results),
            }
        })
    }

    /// Runs a front until its workers have ended.
    fn run_front(
        &self,
        crew: &Crew,
        mut front: Shard<ChannelServer>,
        built: Result<(), Error>,
    ) -> Result<(), End> {
        self.begin(built)?;
        let ended = caught(|| front.run(&crew.stop));
        crew.leave_front();
        self.stop.stop();
        ended.map_err(End::Failed)
    }

    fn worker<H: Handler, R>(
        &self,
        crew: &Crew,
        index: usize,
        worker: (Worker, Client),
        front: Beside,
    ) -> Result<R, End>
    where
        F: Fn(usize) -> Result<H, Error>,
        E: Fn(usize, Shard<H>) -> R,
    {
        // It outlives the news that its handler could not be made: it takes its leave of the front, which must not wait for that news.
        let mut worker = Some(worker);
        let built = caught(|| {
            let handler = (self.handler)(index)?;
            match worker.take() {
                Some((worker, client)) => worker.build(client, handler, Some(front)),
                None => unreachable!("it is built once"),
            }
        });
        let mut shard = self.begin(built)?;
        let ended = caught(|| shard.run(self.stop));
        self.stop.stop();
        crew.leave_worker();
        ended.map_err(End::Failed)?;
        Ok((self.finish)(index, shard))
    }
}

/// A front and its workers: it goes on until all of them have ended.
struct Crew {
    /// Ends the front.
    stop: StopFlag,
    /// Workers that have not ended.
    workers: AtomicUsize,
    front_ended: Arc<AtomicBool>,
    ended: Mutex<bool>,
    changed: Condvar,
    /// What the workers sleep on.
    wakes: Vec<Arc<EventFd>>,
}

impl Crew {
    fn new(workers: &[Client]) -> Result<Self, Error> {
        Ok(Self {
            stop: StopFlag::new().map_err(|e| Error::io("stop flag of workers", e))?,
            workers: AtomicUsize::new(workers.len()),
            front_ended: Arc::default(),
            ended: Mutex::new(false),
            changed: Condvar::new(),
            wakes: workers.iter().map(Client::wake).collect(),
        })
    }

    /// The front ended. Workers learn of it, for if they still run it failed.
    fn leave_front(&self) {
        self.front_ended.store(true, Ordering::Release);
        self.wakes.iter().for_each(|wake| wake.signal());
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// A worker ended. It waits for the front, so that its application sees all that was counted.
    fn leave_worker(&self) {
        if self.workers.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.stop.stop();
        }
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_while(ended, |ended| !*ended).unwrap_or_else(PoisonError::into_inner));
    }
}

/// Calls something of the application's, and makes an error of a panic. What it worked on is not used any more after one.
fn caught<T>(act: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    catch_unwind(AssertUnwindSafe(act)).unwrap_or_else(|panic| Err(panicked(&*panic)))
}

fn panicked(panic: &(dyn Any + Send)) -> Error {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    Error::Panicked(text.unwrap_or("with something that is no text").into())
}
