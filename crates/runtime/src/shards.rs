//! Several shards of one stack: threads, each with its own queue of every device. They share no state on the
//! path of a packet; frames that belong to another shard go through a queue to that shard.
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
use crate::classifier::{FrameDirection, PriorityFunctionFactory};
use crate::command::{Commander, Mailbox};
use crate::config::{Config, Placement, SteeringMode};
use crate::cross_shard::{CrossShardInbox, CrossShardSender};
use crate::device_rss::{self, DeviceTables};
use crate::devices::KeptTaps;
use crate::error::Error;
use crate::handler::Handler;
use crate::listener_registry::ListenerRegistry;
use crate::published_stack::PublishedStack;
use crate::relay::{self, DeviceUsers};
use crate::saved_shard::SavedShard;
use crate::shard::Shard;
use crate::shard_router::ShardRouter;
use crate::stats::{StatsReader, StatsWriter};
use crate::steering_rules::{ProgramRule, SteerConnection, SteeringRules};
use crate::stop::StopFlag;
use crate::{devices, pin};
use ginnel_devices::rss::{self, Rss};
use ginnel_matcher::Packet;
use ginnel_stack::device::{Capabilities, Device};
use ginnel_stack::error::ConfigError;
use ginnel_stack::handle::PortId;
use ginnel_stack::priority::ClassLimits;
use ginnel_stack::tcp::fastopen;
use ginnel_stack::time::Instant;
use std::sync::Arc;

/// Builder of `shards.count` shards.
#[must_use]
pub struct Shards {
    config: Config,
    devices: Vec<(String, Vec<Device>)>,
    seed: Option<[u8; 32]>,
    now: Option<Instant>,
    published: Option<Arc<PublishedStack>>,
    local_delivery: bool,
    taps: KeptTaps,
    priority_functions: Option<PriorityFunctionFactory>,
    steering_rules: Vec<ProgramRule>,
    /// How the devices distribute frames to their queues; `None` asks their drivers.
    device_tables: Option<DeviceTables>,
    /// Asks the driver of an interface how it distributes frames.
    hash_reader: fn(&str) -> Result<Rss, String>,
}

impl Shards {
    /// Starts with a configuration.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            devices: Vec::new(),
            seed: None,
            now: None,
            published: None,
            local_delivery: false,
            taps: Vec::new(),
            priority_functions: None,
            steering_rules: Vec::new(),
            device_tables: None,
            hash_reader: rss::read,
        }
    }

    /// Supplies the queues of the device of this name, one for each shard that serves it. Memory devices must
    /// be supplied; other devices that are not supplied are opened.
    pub fn device(mut self, name: impl Into<String>, queues: Vec<Device>) -> Self {
        self.devices.push((name.into(), queues));
        self
    }

    /// Sets a fixed seed, for simulations: see [`ShardBuilder::seed`](crate::ShardBuilder::seed).
    pub fn seed(mut self, seed: [u8; 32]) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Sets how the devices distribute frames to their queues, instead of asking their drivers.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn device_tables(mut self, tables: DeviceTables) -> Self {
        self.device_tables = Some(tables);
        self
    }

    /// Sets what is asked instead of the drivers of interfaces.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn hash_reader(mut self, reader: fn(&str) -> Result<Rss, String>) -> Self {
        self.hash_reader = reader;
        self
    }

    /// Publishes the shards to other processes, labelled by their index. Not for simulations, because it does
    /// I/O.
    pub fn published(mut self, published: Option<Arc<PublishedStack>>) -> Self {
        self.published = published;
        self
    }

    /// Uses TAP devices whose descriptors are open already.
    pub fn taps(mut self, taps: KeptTaps) -> Self {
        self.taps = taps;
        self
    }

    /// Delivers packets to the stack's own addresses inside of the stack: see
    /// [`ShardBuilder::delivers_locally`](crate::ShardBuilder::delivers_locally).
    pub fn delivers_locally(mut self, on: bool) -> Self {
        self.local_delivery = on;
        self
    }

    /// Sets a function that gives frames their priorities. `create` is called for each shard: see
    /// [`ShardBuilder::priority_function`](crate::ShardBuilder::priority_function).
    pub fn priority_function<F>(
        mut self,
        create: impl Fn(FrameDirection) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: FnMut(&Packet<'_>, u8) -> u8 + Send + 'static,
    {
        self.priority_functions = Some(Arc::new(move |direction| Box::new(create(direction))));
        self
    }

    /// Adds a rule that chooses the shards of connections. Rules that continue are asked before those that
    /// stop, and each kind in the order of these calls; the rules of the configuration prevail.
    pub fn steering_rule(mut self, mode: SteeringMode, rule: impl SteerConnection + 'static) -> Self {
        self.steering_rules.push(ProgramRule { mode, rule: Arc::new(rule) });
        self
    }

    /// Sets the time at which a simulation starts. By default it is the time of the machine's clock.
    pub fn now(mut self, now: Instant) -> Self {
        self.now = Some(now);
        self
    }

    /// Checks what [`open`](Self::open) finds out before it opens a device: the configuration, that this
    /// process may use its CPUs, and that its devices have a queue for each shard.
    ///
    /// # Errors
    /// As of [`open`](Self::open).
    pub fn check(&self) -> Result<(), Error> {
        self.check_cpus()?;
        let supplied = |name: &String| self.devices.iter().any(|(device, _)| device == name);
        let mut opened = self.config.devices.iter().filter(|device| !supplied(&device.name));
        opened.try_for_each(|device| devices::check(device, self.config.shards_of(device).len()))
    }

    /// Checks the configuration, and that this process may use its CPUs.
    fn check_cpus(&self) -> Result<(), Error> {
        self.config.validate()?;
        let Config { shard, shards, .. } = &self.config;
        for (key, cpu) in [("shard.cpu", shard.cpu), ("shard.application_cpu", shard.application_cpu)] {
            if let Some(cpu) = cpu {
                pin::check_allowed(cpu, key)?;
            }
        }
        for (key, cpus) in [
            ("shards.cpus", &shards.cpus),
            ("shards.application_cpus", &shards.application_cpus),
            ("shard.worker_cpus", &shard.worker_cpus),
        ] {
            for (i, &cpu) in cpus.iter().enumerate() {
                pin::check_allowed(cpu, &format!("{key}[{i}]"))?;
            }
        }
        Ok(())
    }

    /// Opens the devices and creates the queues between shards. Finds errors in devices and CPUs before any
    /// thread is started.
    ///
    /// # Errors
    /// The first key of the configuration that cannot be used, or a device that cannot be opened or does not
    /// have a queue for each shard.
    pub fn open(mut self) -> Result<OpenedShards, Error> {
        self.check_cpus()?;
        let seed = match self.seed {
            Some(seed) => seed,
            None => random_seed()?,
        };
        let is_fastopen_key_derived = self.config.tcp.fastopen_key.is_empty();
        if is_fastopen_key_derived {
            // A cookie of one shard is valid on each shard that serves the peer's next connection.
            self.config.tcp.fastopen_key = fastopen::key_of_seed(&seed);
        }
        let supplied = !self.devices.is_empty();
        let devices = self.open_devices()?;
        let mut parts = Vec::new();
        let device_shards = self.config.devices.iter().map(|device| self.config.shards_of(device)).collect();
        let tables = match self.device_tables.take() {
            // The interface of a device that the program supplies does not deliver its frames.
            None if !supplied => device_rss::read(&self.config, self.hash_reader),
            tables => tables,
        };
        let tables = tables.map(Arc::new);
        let needs_device_shards = self.config.has_device_shards() || tables.is_some();
        let users = needs_device_shards.then(|| Arc::new(DeviceUsers::new(device_shards)));
        let members = members(&self.config, &self.steering_rules, users.as_ref(), tables.as_ref())?;
        for (index, member) in members.into_iter().enumerate() {
            let mut seed = seed;
            // Cannot truncate: there are at most 64 shards. The seeds may be related, because shards share no
            // flow whose secrets a peer could compare.
            seed[0] ^= index as u8;
            parts.push(ShardPart {
                // Cannot truncate, as above.
                index: index as u8,
                saved: None,
                app_mailboxes: app_mailboxes(&self.config)?,
                config: shard_config(&self.config, index),
                devices: Vec::new(),
                seed,
                now: self.now,
                member,
                published: self.published.clone().map(|published| (published, index.to_string())),
                local_delivery: self.local_delivery,
                priority_functions: self.priority_functions.clone(),
            });
        }
        let class_limits = self.config.priority.class_limits(self.priority_functions.is_some());
        for (number, (device, queues)) in self.config.devices.iter().zip(devices).enumerate() {
            let shards = self.config.shards_of(device);
            let capabilities = queues.first().map(|queue| queue.tx.capabilities());
            for (&shard, queue) in shards.iter().zip(queues) {
                parts[usize::from(shard)].devices.push((device.name.clone(), queue));
            }
            if let (Some(users), Some(capabilities)) = (&users, capabilities) {
                // Cannot truncate: the engine numbers devices with 16 bits, and the configuration is in
                // memory.
                let port = (PortId(number as u16), &*device.name);
                add_relays(&mut parts, &shards, port, &capabilities, users, class_limits)?;
            }
        }
        Ok(OpenedShards { parts, is_fastopen_key_derived, gate: None })
    }

    /// Opens the devices of the configuration, as far as they are not supplied. Returns the queues of each.
    fn open_devices(&mut self) -> Result<Vec<Vec<Device>>, Error> {
        let mut opened = Vec::new();
        for (number, device) in self.config.devices.iter().enumerate() {
            let shards = self.config.shards_of(device);
            let queues = match self.devices.iter().position(|(name, _)| *name == device.name) {
                Some(i) => self.devices.swap_remove(i).1,
                None => {
                    let kept = self.taps.iter().position(|(name, _)| *name == device.name);
                    let kept = kept.map(|at| self.taps.swap_remove(at).1);
                    devices::open_queues(device, &self.config, shards.len(), kept)?
                }
            };
            if queues.len() != shards.len() {
                let problem = format!(
                    "device \"{}\" has {} queue(s), and {} shard(s) need one each",
                    device.name,
                    queues.len(),
                    shards.len()
                );
                let key = match device.shards {
                    None => "shards.count".into(),
                    Some(_) => format!("device[{number}].shards"),
                };
                return Err(ConfigError::new(key, problem).into());
            }
            opened.push(queues);
        }
        if let Some((name, _)) = self.devices.first() {
            let problem = format!("the configuration has no device named \"{name}\"");
            return Err(ConfigError::new("device", problem).into());
        }
        Ok(opened)
    }
}

/// Gives each shard that is not in `shards`, and so does not serve the device, a device that relays its
/// frames to a shard that does.
fn add_relays(
    parts: &mut [ShardPart],
    shards: &[u8],
    (port, name): (PortId, &str),
    capabilities: &Capabilities,
    users: &Arc<DeviceUsers>,
    class_limits: Option<ClassLimits>,
) -> Result<(), Error> {
    for index in 0..parts.len() {
        // Cannot truncate: there are at most 64 shards.
        let shard = index as u8;
        if shards.contains(&shard) {
            continue;
        }
        let target = shards[index % shards.len()];
        let frame_bytes = parts[index].config.shards.mailbox_bytes as usize;
        let member = parts[usize::from(target)].member.as_mut();
        let Some(ShardMember { inbox, .. }) = member else { continue };
        // The target's queues are in the order of the other shards.
        let sender = inbox.add_relay(shard - u8::from(shard > target), frame_bytes);
        let relay = relay::device(sender, capabilities, (port, shard), Arc::clone(users), class_limits)
            .map_err(|e| Error::io(format!("device {name}"), e))?;
        let part = &mut parts[index];
        part.devices.push((name.into(), relay));
        if let Some(device) = part.config.devices.get_mut(usize::from(port.0)) {
            // The shard that sends the frames has the faults and the capture.
            (device.faults, device.capture) = (None, None);
        }
    }
    Ok(())
}

/// Returns the configuration of one shard: its CPUs, and files and seeds that two queues of a device must not
/// share.
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

/// Creates mailboxes for the applications of a shard if they have shards of their own: the mailbox of the
/// shard itself receives the commands for its [`ChannelServer`](crate::channel::ChannelServer).
fn app_mailboxes(config: &Config) -> Result<Vec<(Commander, Mailbox)>, Error> {
    let has_own_threads = config.shards.count > 1 && config.shard.placement != Placement::Inline;
    let count = (config.shard.workers as usize).max(usize::from(has_own_threads));
    (0..count).map(|_| command_channel(config)).collect()
}

/// Creates the queues between shards, and each shard's part of them; `None` if there is only one shard.
fn members(
    config: &Config,
    rules: &[ProgramRule],
    users: Option<&Arc<DeviceUsers>>,
    tables: Option<&Arc<DeviceTables>>,
) -> Result<Vec<Option<ShardMember>>, Error> {
    // Cannot truncate: `validate` has checked that there are at most 64.
    let count = config.shards.count as u8;
    if count == 1 {
        return Ok(vec![None]);
    }
    let registry = Arc::new(match users {
        Some(_) => ListenerRegistry::with_ephemeral_ports(),
        None => ListenerRegistry::default(),
    });
    let steering = SteeringRules::new(&config.steering, rules);
    let mailboxes = (0..count).map(|_| command_channel(config)).collect::<Result<Vec<_>, Error>>()?;
    let mut inboxes: Vec<CrossShardInbox> = mailboxes
        .iter()
        .map(|(commander, _)| CrossShardInbox::new(Arc::clone(commander.doorbell())))
        .collect();
    let (frame_bytes, broadcast_bytes) =
        (config.shards.mailbox_bytes as usize, config.shards.control_bytes as usize);
    let mut senders: Vec<Vec<Option<CrossShardSender>>> = Vec::new();
    for from in 0..usize::from(count) {
        let to_all = inboxes.iter_mut().enumerate();
        let row =
            to_all.map(|(to, inbox)| (from != to).then(|| inbox.add_queue(frame_bytes, broadcast_bytes)));
        senders.push(row.collect());
    }
    let parts = mailboxes.into_iter().zip(senders).zip(inboxes);
    let member = |(index, (((commander, mailbox), row), inbox)): (u8, _)| {
        let (device_users, device_tables) = (users.cloned(), tables.cloned());
        let router = ShardRouter::new(index, row, Arc::clone(&registry), device_users.clone());
        let (steering, stats) = (steering.clone(), StatsWriter::new());
        let inbox = Box::new(inbox);
        Some(ShardMember {
            index,
            count,
            steering,
            device_users,
            device_tables,
            router,
            inbox,
            commander,
            mailbox,
            stats,
        })
    };
    Ok((0..count).zip(parts).map(member).collect())
}

/// Everything that one shard is built from except its handler, which is created on the shard's thread.
struct ShardPart {
    config: Config,
    devices: Vec<(String, Device)>,
    seed: [u8; 32],
    now: Option<Instant>,
    member: Option<ShardMember>,
    published: Option<(Arc<PublishedStack>, String)>,
    /// See [`Shards::delivers_locally`].
    local_delivery: bool,
    priority_functions: Option<PriorityFunctionFactory>,
    /// Index of the shard.
    index: u8,
    /// State with which the shard continues.
    saved: Option<SavedShard>,
    /// Mailboxes of the shard's applications, if they have shards of their own.
    app_mailboxes: Vec<(Commander, Mailbox)>,
}

impl ShardPart {
    fn workers(&self) -> usize {
        self.config.shard.workers as usize
    }

    fn build<H: Handler>(mut self, handler: H) -> Result<Shard<H>, Error> {
        let mailbox = self.app_mailboxes.pop();
        let saved = self.saved.take();
        let position = ThreadPosition { shard: self.index, commands: mailbox, ..ThreadPosition::default() };
        let mut builder = Shard::builder(self.config).handler(handler).seed(self.seed).member(self.member);
        builder = builder.delivers_locally(self.local_delivery).priority_functions(self.priority_functions);
        // A shard that continues with a state publishes no counters before it has those of the state.
        let published_later = match (self.published, &saved) {
            (Some((stack, label)), None) => {
                builder = builder.published(Some(stack), label);
                None
            }
            (published, _) => published,
        };
        for (name, device) in self.devices {
            builder = builder.device(name, device);
        }
        if let Some(now) = self.now {
            builder = builder.now(now);
        }
        let mut shard = builder.position(position).build_with_placement()?;
        if let Some(saved) = saved {
            shard.restore(saved).map_err(Error::application)?;
        }
        if let Some((stack, label)) = published_later {
            shard.start_publishing(stack, &label)?;
        }
        Ok(shard)
    }
}

/// Shards whose devices are open and whose handlers are not created yet.
#[must_use]
pub struct OpenedShards {
    parts: Vec<ShardPart>,
    /// The key of fast open cookies follows from the seed: the configuration has none.
    is_fastopen_key_derived: bool,
    gate: Option<Gate>,
}

/// Called once when all shards are built, before the first turn of any of them.
pub(super) type Gate = Box<dyn FnOnce() + Send>;

impl OpenedShards {
    /// Makes the shards continue with saved states, one for each shard in their order. They are taken over
    /// when the shards are built, before the first frame is looked at.
    ///
    /// # Errors
    /// There are not as many states as shards, or shards have workers.
    pub fn restore(mut self, saved: Vec<SavedShard>) -> Result<Self, String> {
        if self.parts.iter().any(|part| part.workers() > 0) {
            return Err("shards with workers (shard.workers) cannot be restored".into());
        }
        if self.parts.len() != saved.len() {
            let count = self.parts.len();
            return Err(format!("{} shard(s) were saved, and shards.count is {count} now", saved.len()));
        }
        for (part, state) in self.parts.iter_mut().zip(saved) {
            part.saved = Some(state);
            if self.is_fastopen_key_derived {
                // All shards have saved the same key, with which cookies stay valid.
                part.config.tcp.fastopen_key.clear();
            }
        }
        Ok(self)
    }

    /// Returns the number of shards.
    pub fn count(&self) -> usize {
        self.parts.len()
    }

    /// Returns the number of applications: one for each shard, or `shard.workers`. They are numbered from 0,
    /// those of the first shard first.
    pub fn applications(&self) -> usize {
        self.parts.iter().map(|part| part.workers().max(1)).sum()
    }

    /// Returns the command senders by application. Empty for a single shard without workers; it has its own
    /// after [`OpenedShards::build`].
    pub fn commanders(&self) -> Vec<Commander> {
        let commanders = |part: &ShardPart| -> Vec<Commander> {
            match &part.member {
                Some(member) if part.app_mailboxes.is_empty() => vec![member.commander.clone()],
                _ => part.app_mailboxes.iter().map(|(commander, _)| commander.clone()).collect(),
            }
        };
        self.parts.iter().flat_map(commanders).collect()
    }

    /// Returns the readers of the shards' counters, by shard. Empty if there is only one shard.
    pub fn stats_readers(&self) -> Vec<StatsReader> {
        self.parts.iter().filter_map(|part| Some(part.member.as_ref()?.stats.reader())).collect()
    }

    /// Builds the shards for simulations; the caller drives them. With workers there is a shard for each
    /// worker, and the first worker of each shard drives the stack's shard, too.
    ///
    /// # Errors
    /// As of [`ShardBuilder::build`](crate::ShardBuilder::build), or the first error that `handler` returns.
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

    /// Has [`OpenedShards::run`] call `gate` when all shards are built, and wait for its return before the
    /// first of them looks at a frame or at a region.
    pub fn before_first_turn(self, gate: impl FnOnce() + Send + 'static) -> Self {
        Self { gate: Some(Box::new(gate)), ..self }
    }

    /// Runs each shard on its own thread, pinned according to `shards.cpus`, and each application where
    /// `shard.placement` and `shard.workers` say, until all have ended. Returns the results of `finish` by
    /// application. Each handler is created on the thread that it runs on, and stays there. A single shard
    /// without workers runs on the calling thread.
    ///
    /// The shards start when all are built. If one ends, because its handler stops it, by an error or by a
    /// panic, `stop` is set and the others stop, too. Until the last application has ended, the other shards
    /// serve its link: the primary shard answers ARP, and each shard forwards frames that belong to others.
    ///
    /// # Errors
    /// The error of the failed shard with the lowest index, as [`Error::Shard`]. A single shard without
    /// workers returns its error as it is. [`Error::Io`] if a shard's thread cannot be started.
    pub fn run<H: Handler, R: Send>(
        mut self,
        stop: &StopFlag,
        handler: impl Fn(usize) -> Result<H, Error> + Sync,
        finish: impl Fn(usize, Shard<H>) -> R + Sync,
    ) -> Result<Vec<R>, Error> {
        let gate = self.gate.take();
        if self.applications() == 1 && self.parts.iter().all(|part| part.workers() == 0) {
            let mut shards = self.build(&handler)?;
            let Some(mut shard) = shards.pop() else { return Ok(Vec::new()) };
            gate.into_iter().for_each(|gate| gate());
            shard.run(stop)?;
            return Ok(vec![finish(0, shard)]);
        }
        supervisor::run(self.parts, gate, stop, &handler, &finish)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
