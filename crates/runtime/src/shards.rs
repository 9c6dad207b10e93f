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

mod supervisor;
mod workers;

use crate::builder::{ShardMember, ThreadPosition, command_channel, random_seed};
use crate::command::{Commander, Mailbox};
use crate::config::{Config, Placement};
use crate::cross_shard::{CrossShardReceiver, CrossShardSender, cross_shard_queue};
use crate::doorbell::Doorbell;
use crate::error::Error;
use crate::handler::Handler;
use crate::listener_registry::ListenerRegistry;
use crate::published_stack::PublishedStack;
use crate::shard::Shard;
use crate::shard_router::ShardRouter;
use crate::stats::{StatsReader, StatsWriter};
use crate::stop::StopFlag;
use crate::{devices, pin};
use ginnel_stack::device::Device;
use ginnel_stack::error::ConfigError;
use ginnel_stack::time::Instant;
use std::sync::Arc;

/// Collects what `shards.count` shards are made of.
#[must_use]
pub struct Shards {
    config: Config,
    devices: Vec<(String, Vec<Device>)>,
    seed: Option<[u8; 32]>,
    now: Option<Instant>,
    published: Option<Arc<PublishedStack>>,
    local_delivery: bool,
}

impl Shards {
    /// Starts with a configuration.
    pub fn new(config: Config) -> Self {
        Self { config, devices: Vec::new(), seed: None, now: None, published: None, local_delivery: false }
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
    pub fn presence(mut self, presence: Option<Arc<PublishedStack>>) -> Self {
        self.published = presence;
        self
    }

    /// What the stack sends to an address of its own comes back to it: see [`ShardBuilder::talks_to_itself`](crate::ShardBuilder::talks_to_itself).
    pub fn delivers_locally(mut self, on: bool) -> Self {
        self.local_delivery = on;
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
    pub fn open(mut self) -> Result<OpenedShards, Error> {
        self.config.validate()?;
        let count = self.config.shards.count as usize;
        let Config { shard, shards, .. } = &self.config;
        for (key, cpus) in [
            ("shards.cpus", &shards.cpus),
            ("shards.application_cpus", &shards.application_cpus),
            ("shard.worker_cpus", &shard.worker_cpus),
        ] {
            for (i, &cpu) in cpus.iter().enumerate() {
                pin::check_allowed(cpu, &format!("{key}[{i}]"))?;
            }
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
            parts.push(ShardPart {
                // Cannot truncate either.
                index: index as u8,
                app_mailboxes: app_mailboxes(&self.config)?,
                config: shard_config(&self.config, index),
                devices: Vec::new(),
                seed,
                now: self.now,
                member,
                published: self.published.clone().map(|published| (published, index.to_string())),
                local_delivery: self.local_delivery,
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
        Ok(OpenedShards { parts })
    }
}

/// The configuration of one shard: its CPU, and what must not be the same for two queues of a device.
fn shard_config(config: &Config, index: usize) -> Config {
    let mut config = config.clone();
    let nth = |cpus: &[u32]| cpus.get(index).copied();
    config.shard.cpu = nth(&config.shards.cpus).or(config.shard.cpu);
    config.shard.application_cpu = nth(&config.shards.application_cpus).or(config.shard.application_cpu);
    let workers = config.shard.workers as usize;
    config.shard.worker_cpus =
        config.shard.worker_cpus.chunks(workers.max(1)).nth(index).unwrap_or_default().to_vec();
    config.shards.cpus = Vec::new();
    config.shards.application_cpus = Vec::new();
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

/// The ways to a shard's applications, if they are not its own: the mailbox that it has as one of several is for what the others send it.
fn app_mailboxes(config: &Config) -> Result<Vec<(Commander, Mailbox)>, Error> {
    let has_own_threads = config.shards.count > 1 && config.shard.placement != Placement::Inline;
    let count = (config.shard.workers as usize).max(usize::from(has_own_threads));
    (0..count).map(|_| command_channel(config)).collect()
}

/// What each shard has of the mailboxes; nothing if there is only one.
fn members(config: &Config) -> Result<Vec<Option<ShardMember>>, Error> {
    // Cannot truncate: checked to be 64 at the most.
    let count = config.shards.count as u8;
    if count == 1 {
        return Ok(vec![None]);
    }
    let registry = Arc::new(ListenerRegistry::default());
    let mailboxes = (0..count).map(|_| command_channel(config)).collect::<Result<Vec<_>, Error>>()?;
    let doorbells: Vec<Arc<Doorbell>> =
        mailboxes.iter().map(|(commander, _)| Arc::clone(commander.doorbell())).collect();
    let (frames, broadcast_bytes) =
        (config.shards.mailbox_bytes as usize, config.shards.control_bytes as usize);
    let mut receivers: Vec<Vec<CrossShardReceiver>> = (0..count).map(|_| Vec::new()).collect();
    let mut senders: Vec<Vec<Option<CrossShardSender>>> = Vec::new();
    for from in 0..usize::from(count) {
        let mut row = Vec::new();
        for to in 0..usize::from(count) {
            row.push((from != to).then(|| {
                let (sender, receiver) =
                    cross_shard_queue(frames, broadcast_bytes, Arc::clone(&doorbells[to]));
                receivers[to].push(receiver);
                sender
            }));
        }
        senders.push(row);
    }
    let parts = mailboxes.into_iter().zip(senders).zip(receivers);
    let member = |(index, (((commander, mailbox), row), receivers)): (u8, _)| {
        let peers = ShardRouter::new(index, row, Arc::clone(&registry));
        Some(ShardMember {
            index,
            count,
            router: peers,
            receivers,
            commander,
            mailbox,
            stats: StatsWriter::new(),
        })
    };
    Ok((0..count).zip(parts).map(member).collect())
}

/// What one shard is made of but its handler, which is made on the thread it runs on.
struct ShardPart {
    config: Config,
    devices: Vec<(String, Device)>,
    seed: [u8; 32],
    now: Option<Instant>,
    member: Option<ShardMember>,
    published: Option<(Arc<PublishedStack>, String)>,
    /// It talks to itself.
    local_delivery: bool,
    /// Which shard.
    index: u8,
    /// The ways in for other threads to its applications, if these have shards of their own and there are several of them.
    app_mailboxes: Vec<(Commander, Mailbox)>,
}

impl ShardPart {
    fn workers(&self) -> usize {
        self.config.shard.workers as usize
    }

    fn build<H: Handler>(mut self, handler: H) -> Result<Shard<H>, Error> {
        let mailbox = self.app_mailboxes.pop();
        let position = ThreadPosition { shard: self.index, commands: mailbox, ..ThreadPosition::default() };
        let mut builder = Shard::builder(self.config).handler(handler).seed(self.seed).member(self.member);
        builder = builder.delivers_locally(self.local_delivery);
        if let Some((presence, label)) = self.published {
            builder = builder.published(Some(presence), label);
        }
        for (name, device) in self.devices {
            builder = builder.device(name, device);
        }
        if let Some(now) = self.now {
            builder = builder.now(now);
        }
        builder.position(position).build_with_placement()
    }
}

/// Shards whose devices are open. Their handlers are still to come.
#[must_use]
pub struct OpenedShards {
    parts: Vec<ShardPart>,
}

impl OpenedShards {
    /// How many shards there are.
    pub fn count(&self) -> usize {
        self.parts.len()
    }

    /// How many applications there are: one for each shard, or `shard.workers` of them. They are numbered from 0, those of the first shard
    /// first.
    pub fn applications(&self) -> usize {
        self.parts.iter().map(|part| part.workers().max(1)).sum()
    }

    /// The ways in for other threads, by application. Empty if there is only one shard without workers, which has its own after
    /// [`Opened::build`].
    pub fn commanders(&self) -> Vec<Commander> {
        let commanders = |part: &ShardPart| -> Vec<Commander> {
            match &part.member {
                Some(member) if part.app_mailboxes.is_empty() => vec![member.commander.clone()],
                _ => part.app_mailboxes.iter().map(|(commander, _)| commander.clone()).collect(),
            }
        };
        self.parts.iter().flat_map(commanders).collect()
    }

    /// The ways to see the shards' counters from other threads, by shard. Empty if there is only one shard.
    pub fn stats_readers(&self) -> Vec<StatsReader> {
        self.parts.iter().filter_map(|part| Some(part.member.as_ref()?.stats.reader())).collect()
    }

    /// The shards, to be driven by the caller, on one thread or on several: for simulations. With workers one for each of these, of which the first
    /// of a shard takes the stack along.
    ///
    /// # Errors
    /// As of [`ShardBuilder::build`](crate::ShardBuilder::build), or the first that `handler` returns.
    pub fn build<H: Handler>(
        self,
        mut handler: impl FnMut(usize) -> Result<H, Error>,
    ) -> Result<Vec<Shard<H>>, Error> {
        let mut shards = Vec::new();
        for part in self.parts {
            if part.workers() > 0 {
                workers::build_workers(part, &mut shards, &mut handler)?;
            } else {
                shards.push(part.build(handler(shards.len())?)?);
            }
        }
        Ok(shards)
    }

    /// Runs each shard on a thread of its own, pinned if `shards.cpus` says so, and each application where `shard.placement` and `shard.workers`
    /// say, until all have ended, and returns what `finish` makes of them, by application. Each handler is made, and stays, on the thread that
    /// it runs on. A single shard without workers runs on the calling thread.
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
        if self.applications() == 1 && self.parts.iter().all(|part| part.workers() == 0) {
            let mut shards = self.build(&handler)?;
            let Some(mut shard) = shards.pop() else { return Ok(Vec::new()) };
            shard.run(stop)?;
            return Ok(vec![finish(0, shard)]);
        }
        supervisor::run(self.parts, stop, &handler, &finish)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
