//! Several shards of one stack: threads that share its devices, a queue each, and nothing else. What crosses goes through mailboxes.
//!
//! ```no_run
//! # use ginnel::{Config, Context, Conn, Error, Handler, ListenOptions, Shards, StopFlag};
//! # struct App;
//! # impl Handler for App {
//! #     fn start(&mut self, _: &mut Context<'_>) -> Result<(), Error> { Ok(()) }
//! #     fn data(&mut self, _: &mut Context<'_>, _: Conn, data: &[u8]) -> usize { data.len() }
//! # }
//! # fn main() -> Result<(), Error> {
//! let mut config = Config::from_toml("example", "shards.count = 2").unwrap();
//! // … devices and links …
//! let stop = StopFlag::new().map_err(|e| Error::io("event descriptor", e))?;
//! let served = Shards::new(config).open()?.run(&stop, |_shard| Ok(App), |_shard, ended| *ended.stats())?;
//! # Ok(())
//! # }
//! ```

use crate::bell::Bell;
use crate::board::Board;
use crate::builder::{Member, commands, random_seed};
use crate::command::Commander;
use crate::config::Config;
use crate::departure::{Departure, Leave};
use crate::error::Error;
use crate::handler::Handler;
use crate::mailbox::{Inbox, Outbox, mailbox};
use crate::peers::Peers;
use crate::presence::Presence;
use crate::shard::Shard;
use crate::stats::{StatsReader, StatsWriter};
use crate::stop::StopFlag;
use crate::{devices, pin};
use core::any::Any;
use ginnel_stack::device::Device;
use ginnel_stack::error::ConfigError;
use ginnel_stack::time::Instant;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Collects what `shards.count` shards are made of.
#[must_use]
pub struct Shards {
    config: Config,
    devices: Vec<(String, Vec<Device>)>,
    seed: Option<[u8; 32]>,
    now: Option<Instant>,
    presence: Option<Arc<Presence>>,
}

impl Shards {
    /// Starts with a configuration.
    pub fn new(config: Config) -> Self {
        Self { config, devices: Vec::new(), seed: None, now: None, presence: None }
    }

    /// Supplies the queues of the device of this name, one for each shard. A memory device must be supplied, others are opened where none is.
    pub fn device(mut self, name: impl Into<String>, queues: Vec<Device>) -> Self {
        self.devices.push((name.into(), queues));
        self
    }

    /// A fixed seed, for simulations: see [`ShardBuilder::seed`](crate::ShardBuilder::seed).
    pub fn seed(mut self, seed: [u8; 32]) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Shows the shards to other processes, by number. Not for simulations: it does I/O.
    pub fn presence(mut self, presence: Option<Arc<Presence>>) -> Self {
        self.presence = presence;
        self
    }

    /// The time at which a simulation starts. Without one it is the machine's clock.
    pub fn now(mut self, now: Instant) -> Self {
        self.now = Some(now);
        self
    }

    /// Opens the devices and lays the mailboxes. What is wrong with devices and CPUs is found here, before a thread is started.
    ///
    /// # Errors
    /// The first key of the configuration that cannot be used, or the device that cannot be opened or has not a queue for each shard.
    pub fn open(mut self) -> Result<Opened, Error> {
        self.config.validate()?;
        let count = self.config.shards.count as usize;
        for (i, &cpu) in self.config.shards.cpus.iter().enumerate() {
            pin::check(cpu, &format!("shards.cpus[{i}]"))?;
        }
        let seed = match self.seed {
            Some(seed) => seed,
            None => random_seed()?,
        };
        let mut parts = Vec::new();
        for (index, member) in members(&self.config)?.into_iter().enumerate() {
            let mut seed = seed;
            // Cannot truncate: 64 shards at the most. Shards share no secret that peers could compare, for they share no flow.
            seed[0] ^= index as u8;
            parts.push(Part {
                config: config_of(&self.config, index),
                devices: Vec::new(),
                seed,
                now: self.now,
                member,
                presence: self.presence.clone().map(|presence| (presence, index.to_string())),
            });
        }
        for device in &self.config.devices {
            let queues = match self.devices.iter().position(|(name, _)| *name == device.name) {
                Some(i) => self.devices.swap_remove(i).1,
                None => devices::open_queues(device, &self.config, count)?,
            };
            if queues.len() != count {
                let problem = format!(
                    "device \"{}\" has {} queue(s), and {count} shard(s) need one each",
                    device.name,
                    queues.len()
                );
                return Err(ConfigError::new("shards.count", problem).into());
            }
            for (part, queue) in parts.iter_mut().zip(queues) {
                part.devices.push((device.name.clone(), queue));
            }
        }
        if let Some((name, _)) = self.devices.first() {
            let problem = format!("the configuration has no device named \"{name}\"");
            return Err(ConfigError::new("device", problem).into());
        }
        Ok(Opened { parts })
    }
}

/// The configuration of one shard: its CPU, and what must not be the same for two queues of a device.
fn config_of(config: &Config, index: usize) -> Config {
    let mut config = config.clone();
    config.shard.cpu = config.shards.cpus.get(index).copied().or(config.shard.cpu);
    config.shards.cpus = Vec::new();
    config.shards.count = 1;
    for device in config.devices.iter_mut().filter(|_| index > 0) {
        device.faults_seed = device.faults_seed.wrapping_add(index as u64);
        if let Some(path) = &mut device.capture {
            let mut name = path.as_os_str().to_owned();
            name.push(format!(".{index}"));
            *path = name.into();
        }
    }
    config
}

/// What each shard has of the mailboxes; nothing if there is only one.
fn members(config: &Config) -> Result<Vec<Option<Member>>, Error> {
    // Cannot truncate: checked to be 64 at the most.
    let count = config.shards.count as u8;
    if count == 1 {
        return Ok(vec![None]);
    }
    let board = Arc::new(Board::default());
    let ways = (0..count).map(|_| commands(config)).collect::<Result<Vec<_>, Error>>()?;
    let bells: Vec<Arc<Bell>> = ways.iter().map(|(commander, _)| Arc::clone(commander.bell())).collect();
    let (frames, told) = (config.shards.mailbox_bytes as usize, config.shards.control_bytes as usize);
    let mut inboxes: Vec<Vec<Inbox>> = (0..count).map(|_| Vec::new()).collect();
    let mut outboxes: Vec<Vec<Option<Outbox>>> = Vec::new();
    for from in 0..usize::from(count) {
        let mut out = Vec::new();
        for to in 0..usize::from(count) {
            out.push((from != to).then(|| {
                let (outbox, inbox) = mailbox(frames, told, Arc::clone(&bells[to]));
                inboxes[to].push(inbox);
                outbox
            }));
        }
        outboxes.push(out);
    }
    let parts = ways.into_iter().zip(outboxes).zip(inboxes);
    let member = |(index, (((commander, mailbox), out), inboxes)): (u8, _)| {
        let peers = Peers::new(index, out, Arc::clone(&board));
        Some(Member { index, count, peers, inboxes, commander, mailbox, stats: StatsWriter::new() })
    };
    Ok((0..count).zip(parts).map(member).collect())
}

/// What one shard is made of but its handler, which is made on the shard's own thread.
struct Part {
    config: Config,
    devices: Vec<(String, Device)>,
    seed: [u8; 32],
    now: Option<Instant>,
    member: Option<Member>,
    presence: Option<(Arc<Presence>, String)>,
}

impl Part {
    fn build<H: Handler>(self, handler: H) -> Result<Shard<H>, Error> {
        let mut builder = Shard::builder(self.config).handler(handler).seed(self.seed).member(self.member);
        if let Some((presence, label)) = self.presence {
            builder = builder.presence(Some(presence), label);
        }
        for (name, device) in self.devices {
            builder = builder.device(name, device);
        }
        match self.now {
            Some(now) => builder.now(now).build(),
            None => builder.build(),
        }
    }
}

/// Shards whose devices are open. Their handlers are still to come.
#[must_use]
pub struct Opened {
    parts: Vec<Part>,
}

impl Opened {
    /// How many shards there are.
    pub fn count(&self) -> usize {
        self.parts.len()
    }

    /// The ways in for other threads, by shard. Empty if there is only one shard, which has its own after [`Opened::build`].
    pub fn commanders(&self) -> Vec<Commander> {
        self.parts.iter().filter_map(|part| Some(part.member.as_ref()?.commander.clone())).collect()
    }

    /// The ways to see the shards' counters from other threads, by shard. Empty if there is only one shard.
    pub fn stats_readers(&self) -> Vec<StatsReader> {
        self.parts.iter().filter_map(|part| Some(part.member.as_ref()?.stats.reader())).collect()
    }

    /// The shards, to be driven by the caller, on one thread or on several: for simulations.
    ///
    /// # Errors
    /// As of [`ShardBuilder::build`](crate::ShardBuilder::build), or the first that `handler` returns.
    pub fn build<H: Handler>(
        self,
        mut handler: impl FnMut(usize) -> Result<H, Error>,
    ) -> Result<Vec<Shard<H>>, Error> {
        let parts = self.parts.into_iter().enumerate();
        parts.map(|(index, part)| part.build(handler(index)?)).collect()
    }

    /// Runs each shard on a thread of its own, pinned if `shards.cpus` says so, until all have ended, and returns what `finish` makes of them, by
    /// shard. Each handler is made, and stays, on its shard's thread. A single shard runs on the calling thread.
    ///
    /// They begin together, once all are built, and end together: when one ends, be it because its handler stops it, by an error or by a panic,
    /// `stop` is set and the others take their leave. Until the last has, those that have ended do for it what a link needs: the first answers
    /// ARP, and each passes on what arrives for others.
    ///
    /// # Errors
    /// That of the first shard that failed: [`Error::Shard`].
    pub fn run<H: Handler, R: Send>(
        self,
        stop: &StopFlag,
        handler: impl Fn(usize) -> Result<H, Error> + Sync,
        finish: impl Fn(usize, Shard<H>) -> R + Sync,
    ) -> Result<Vec<R>, Error> {
        let count = self.parts.len();
        if count == 1 {
            let mut shards = self.build(&handler)?;
            let Some(mut shard) = shards.pop() else { return Ok(Vec::new()) };
            shard.run(stop)?;
            return Ok(vec![finish(0, shard)]);
        }
        let members = self.parts.iter().filter_map(|part| part.member.as_ref());
        let departure = Departure::new(members.map(|member| Arc::clone(member.commander.bell())).collect());
        let together = Together {
            departure,
            building: Mutex::new(Building { left: count, failed: false }),
            changed: Condvar::new(),
            stop,
        };
        let (handler, finish, together) = (&handler, &finish, &together);
        let ends = thread::scope(|scope| {
            let spawn = |(index, part): (usize, Part)| {
                thread::Builder::new()
                    .name(format!("shard-{index}"))
                    .spawn_scoped(scope, move || together.run_one(index, part, handler, finish))
            };
            let mut threads = Vec::new();
            let mut refused = None;
            for part in self.parts.into_iter().enumerate() {
                match spawn(part) {
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
                Ok(result) => results.push(result),
                Err(End::NotBegun) => {}
                Err(End::Failed(error)) => {
                    first.get_or_insert(Error::Shard(index, Box::new(error)));
                }
            }
        }
        first.map_or(Ok(results), Err)
    }
}

/// Why a shard's thread has nothing to give back.
enum End {
    Failed(Error),
    /// Another shard could not be built.
    NotBegun,
}

/// How far the shards have come.
struct Building {
    /// Shards that are not built yet.
    left: usize,
    /// One of them could not be: none begins.
    failed: bool,
}

/// What threads of shards share.
struct Together<'a> {
    building: Mutex<Building>,
    changed: Condvar,
    departure: Arc<Departure>,
    stop: &'a StopFlag,
}

impl Together<'_> {
    /// One shard was built, or could not be.
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

    fn run_one<H: Handler, R>(
        &self,
        index: usize,
        part: Part,
        handler: &(impl Fn(usize) -> Result<H, Error> + Sync),
        finish: &(impl Fn(usize, Shard<H>) -> R + Sync),
    ) -> Result<R, End> {
        // Pinned before it is built: memory is taken near the CPU that first touches it.
        let cpu = part.config.shard.cpu;
        let leave = Leave::new(&self.departure);
        let built = caught(|| {
            cpu.map_or(Ok(()), |cpu| pin::pin("shards.cpus", cpu))?;
            part.build(handler(index)?)
        });
        let begins = self.wait_for_all(built.is_ok());
        let mut shard = built.map_err(End::Failed)?;
        if !begins {
            return Err(End::NotBegun);
        }
        shard.leave = Some(leave);
        let ended = caught(|| shard.run(self.stop));
        self.stop.stop();
        ended.map_err(End::Failed)?;
        Ok(finish(index, shard))
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

#[cfg(all(test, not(loom)))]
mod tests;
