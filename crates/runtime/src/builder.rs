//! Builds a shard from a configuration.

use crate::channel::control::SameThread;
use crate::channel::remote::RemoteEngine;
use crate::channel::{ChannelServer, Client};
use crate::classifier::{ClassifierFactory, FrameDirection, PriorityFunctionFactory};
use crate::clock::{self, SimulatedClock, TurnClock};
use crate::command::{self, Commander, Mailbox};
use crate::config::{
    Config, DeviceConfig, DeviceKind, LinkConfig, Loopback, OpenedSteering, Placement, PriorityConfig,
};
use crate::context::{CoreSlot, ShardCore};
use crate::cross_shard::CrossShardInbox;
use crate::device_rss::DeviceTables;
use crate::devices;
use crate::dispatch::EventDispatcher;
use crate::engine::Engine;
use crate::error::Error;
use crate::handler::Handler;
use crate::placement::{Affinity, CoShard, Role};
use crate::prioritized_rx::{DeviceCheck, Priorities};
use crate::published_stack::PublishedStack;
use crate::relay::DeviceUsers;
use crate::saved_shard::state_config;
use crate::shard::{RxPort, Shard};
use crate::shard_router::ShardRouter;
use crate::stats::{ShardStats, StatsWriter};
use crate::steering_rules::SteeringRules;
use crate::table_memory;
use crate::timers::Timers;
use crate::wait::WaitSet;
use crate::yield_policy::YieldPolicy;
use core::net::{Ipv4Addr, Ipv6Addr};
use core::time::Duration;
use ginnel_devices::backlog_limit;
use ginnel_devices::memory;
use ginnel_devices::random::Random;
use ginnel_matcher::Packet;
use ginnel_stack::device::{Device, TxQueue};
use ginnel_stack::error::ConfigError;
use ginnel_stack::handle::{LinkId, PortId};
use ginnel_stack::ip::RouteConfig;
use ginnel_stack::stack::{Stack, StackConfig};
use ginnel_stack::steering::Steering;
use ginnel_stack::steering::policy::SteeringPolicy;
use ginnel_stack::time::Instant;
use ginnel_stack::wire::MacAddr;
use std::sync::{Arc, Mutex};

/// Collects the parts of a shard.
#[must_use]
pub struct ShardBuilder<H> {
    handler: H,
    parts: ShardParts,
}

/// All parts of a shard except its handler.
#[derive(Default)]
struct ShardParts {
    config: Config,
    devices: Vec<(String, Device)>,
    seed: Option<[u8; 32]>,
    now: Option<Instant>,
    member: Option<ShardMember>,
    channel: Option<Client>,
    co_shard: Option<CoShard>,
    published: Option<(Arc<PublishedStack>, String)>,
    position: ThreadPosition,
    local_delivery: bool,
    priority_functions: Option<PriorityFunctionFactory>,
    clock: Option<SimulatedClock>,
}

/// An engine, and what belongs to it.
struct EngineParts {
    stack: Engine,
    ports: Vec<RxPort>,
    links: Vec<LinkId>,
    /// Creates classifiers, if there are rules or a function for priorities.
    classifiers: Option<ClassifierFactory>,
}

impl EngineParts {
    /// Wraps an engine in another thread, which has the devices.
    fn remote(stack: Engine) -> Self {
        Self { stack, ports: Vec::new(), links: Vec::new(), classifiers: None }
    }
}

/// The position of a shard in the arrangement of threads.
pub(crate) struct ThreadPosition {
    pub(crate) role: Role,
    /// Index of the shard that it is, or to which it belongs.
    pub(crate) shard: u8,
    /// The command channel for other threads, if there is one already. A member of several shards whose
    /// application has a shard of its own has two channels: this is the application's.
    pub(crate) commands: Option<(Commander, Mailbox)>,
}

impl Default for ThreadPosition {
    fn default() -> Self {
        Self { role: Role::Stack, shard: 0, commands: None }
    }
}

/// Parts that one of several shards gets besides its handler.
pub(crate) struct ShardMember {
    pub(crate) index: u8,
    pub(crate) count: u8,
    pub(crate) steering: Option<Arc<SteeringRules>>,
    /// The shards that serve each device, if not all shards serve all devices.
    pub(crate) device_users: Option<Arc<DeviceUsers>>,
    /// How devices distribute frames to their queues, if they have a hash or tables of their own.
    pub(crate) device_tables: Option<Arc<DeviceTables>>,
    pub(crate) router: ShardRouter,
    pub(crate) inbox: Box<CrossShardInbox>,
    pub(crate) commander: Commander,
    pub(crate) mailbox: Mailbox,
    pub(crate) stats: StatsWriter,
}

impl ShardMember {
    /// Returns whether the shard relays what it sends on a device to a shard that serves the device.
    fn relays(&self, device: usize) -> bool {
        self.device_users.as_ref().is_some_and(|users| users.is_relayed(device, self.index))
    }
}

impl Shard<()> {
    /// Begins to build a shard: `Shard::builder(config).handler(application).build()`.
    pub fn builder(config: Config) -> ShardBuilder<()> {
        ShardBuilder { handler: (), parts: ShardParts { config, ..ShardParts::default() } }
    }
}

impl<H> ShardBuilder<H> {
    /// Sets the application.
    pub fn handler<T: Handler>(self, handler: T) -> ShardBuilder<T> {
        ShardBuilder { handler, parts: self.parts }
    }

    /// Supplies the device of this name in the configuration. A memory device has to be supplied; other
    /// devices are opened if they are not.
    pub fn device(mut self, name: impl Into<String>, device: Device) -> Self {
        self.parts.devices.push((name.into(), device));
        self
    }

    /// Makes the shard use the engine at the other end of this channel, in another thread. Such a shard has
    /// no devices, links and routes of its own and ignores those of the configuration.
    pub fn channel(mut self, client: Client) -> Self {
        self.parts.channel = Some(client);
        self.parts.position.role = Role::Application;
        self
    }

    /// Sets a fixed seed, for simulations. Without one, the kernel's random numbers are used: sequence
    /// numbers, ports and cookies must not be predictable.
    pub fn seed(mut self, seed: [u8; 32]) -> Self {
        self.parts.seed = Some(seed);
        self
    }

    /// Publishes the shard's counters to other processes, with the name `label` within its stack. Not for
    /// simulations: this does I/O.
    pub fn published(mut self, stack: Option<Arc<PublishedStack>>, label: impl Into<String>) -> Self {
        self.parts.published = stack.map(|stack| (stack, label.into()));
        self
    }

    /// Makes packets that the stack sends to its own addresses return to it, as on a host; without this there
    /// is no route to them. Implied by `loopback = "stack"`.
    pub fn delivers_locally(mut self, on: bool) -> Self {
        self.parts.local_delivery = on;
        self
    }

    /// Sets a function that gives frames their priorities, after the rules of `[priority]`. `create` is
    /// called once for the frames that each device and the loopback link receive, and once for the frames
    /// sent by each device that carries labels. With several shards, each has functions of its own, and one
    /// more for frames that other shards should process: see
    /// [`Shards::priority_function`](crate::Shards::priority_function).
    ///
    /// ```
    /// # use ginnel::{Config, Shard};
    /// let builder = Shard::builder(Config::default()).priority_function(|_direction| {
    ///     |packet: &ginnel::Packet<'_>, usual: u8| match packet.payload() {
    ///         Some([.., 0x02]) => 6,
    ///         _ => usual,
    ///     }
    /// });
    /// ```
    pub fn priority_function<F>(
        mut self,
        create: impl Fn(FrameDirection) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: FnMut(&Packet<'_>, u8) -> u8 + Send + 'static,
    {
        self.parts.priority_functions = Some(Arc::new(move |direction| Box::new(create(direction))));
        self
    }

    /// Sets the factory of [`ShardBuilder::priority_function`], if there is one.
    pub(crate) fn priority_functions(mut self, functions: Option<PriorityFunctionFactory>) -> Self {
        self.parts.priority_functions = functions;
        self
    }

    /// Makes the shard one of several.
    pub(crate) fn member(mut self, member: Option<ShardMember>) -> Self {
        self.parts.member = member;
        self
    }

    /// Sets the position in the arrangement of threads, if this is not a shard by itself.
    pub(crate) fn position(mut self, position: ThreadPosition) -> Self {
        self.parts.position = position;
        self
    }

    /// Sets the shard through which this one reaches the engine.
    pub(crate) fn co_shard(mut self, co_shard: CoShard) -> Self {
        self.parts.co_shard = Some(co_shard);
        self
    }

    /// Sets the clock of a simulation, which shows the time while a turn lasts, so that handlers can take
    /// time. Without it, a simulation's time stands still during a turn.
    pub fn simulated_clock(mut self, clock: SimulatedClock) -> Self {
        self.parts.clock = Some(clock);
        self
    }

    /// Sets the time at which a simulation starts. Without it, the machine's clock is used.
    pub fn now(mut self, now: Instant) -> Self {
        self.parts.now = Some(now);
        self
    }
}

impl<H: Handler> ShardBuilder<H> {
    /// Opens the devices, and sets up links and routes. Nothing is received or sent before the shard runs.
    ///
    /// # Errors
    /// Returns the first key of the configuration that cannot be used, or the device that cannot be opened.
    pub fn build(self) -> Result<Shard<H>, Error> {
        self.parts.config.validate()?;
        if self.parts.member.is_none() && self.parts.config.shards.count > 1 {
            let problem = "requires a program that runs several shards (Shards)";
            return Err(ConfigError::new("shards.count", problem).into());
        }
        if self.parts.config.shard.workers > 0 && self.parts.channel.is_none() {
            let problem = "requires a program that creates an application for each thread (Shards)";
            return Err(ConfigError::new("shard.workers", problem).into());
        }
        self.build_with_placement()
    }

    /// Builds a shard, and the stack's shard if `shard.placement` separates the two.
    pub(crate) fn build_with_placement(mut self) -> Result<Shard<H>, Error> {
        if self.parts.config.shard.placement != Placement::Inline && self.parts.channel.is_none() {
            self.add_co_shard()?;
        }
        self.build_shard()
    }

    /// Builds the stack's shard, which this one reaches through a channel.
    fn add_co_shard(&mut self) -> Result<(), Error> {
        // The application's shard has no function, so this tells it whether priorities are in use.
        let priority = &mut self.parts.config.priority;
        priority.enabled = Some(priority.is_enabled(self.parts.priority_functions.is_some()));
        let parts = ShardParts {
            config: self.parts.config.clone(),
            devices: core::mem::take(&mut self.parts.devices),
            seed: self.parts.seed,
            now: self.parts.now,
            member: self.parts.member.take(),
            published: self.parts.published.clone(),
            position: ThreadPosition { shard: self.parts.position.shard, ..ThreadPosition::default() },
            local_delivery: self.parts.local_delivery,
            priority_functions: self.parts.priority_functions.take(),
            clock: self.parts.clock.clone(),
            ..ShardParts::default()
        };
        let stack = ShardBuilder { handler: ChannelServer::new(&self.parts.config.channel)?, parts };
        let stack = SameThread(Arc::new(Mutex::new(stack.build_shard()?)));
        if let Some((_, label)) = &mut self.parts.published {
            label.push_str(".app");
        }
        self.parts.channel = Some(stack.attach()?);
        self.parts.co_shard = Some(CoShard::new(stack));
        self.parts.position.role = Role::Application;
        Ok(())
    }

    fn build_shard(mut self) -> Result<Shard<H>, Error> {
        let now = self.parts.now.unwrap_or_else(clock::now);
        let seed = match self.parts.seed {
            Some(seed) => seed,
            None => random_seed()?,
        };
        let distribution = match &self.parts.member {
            Some(ShardMember { index, count, .. }) => {
                format!("{index} of {count}: {}", state_config::distribution(&self.parts.config))
            }
            None => String::new(),
        };
        let interfaces = state_config::interfaces(&self.parts.config);
        let EngineParts { stack, ports, links, classifiers } = match self.parts.channel.take() {
            Some(client) => EngineParts::remote(Engine::Channel(Box::new(RemoteEngine::new(client, now)))),
            None => self.build_engine(&seed, now)?,
        };

        let (router, inbox, (commander, mailbox), stats) =
            match (self.parts.member, self.parts.position.commands) {
                (Some(member), _) => {
                    let ShardMember { mut router, inbox, commander, mailbox, stats, .. } = member;
                    if let Some(classifiers) = &classifiers {
                        router.set_classifier(Some(classifiers.classifier(FrameDirection::Receive)?));
                    }
                    router.set_class_limits(self.parts.config.priority.class_limits(classifiers.is_some()));
                    (Some(Box::new(router)), Some(inbox), (commander, mailbox), stats)
                }
                (None, Some(commands)) => (None, None, commands, StatsWriter::new()),
                (None, None) => (None, None, command_channel(&self.parts.config)?, StatsWriter::new()),
            };
        let ThreadPosition { role, shard, .. } = self.parts.position;
        let worker = match role {
            Role::Worker(number) => number,
            Role::Stack | Role::Application => 0,
        };
        let priority = &self.parts.config.priority;
        let has_priorities = priority.is_enabled(classifiers.is_some());
        let class_limits = priority.class_limits(classifiers.is_some());
        let clock = match (self.parts.now, self.parts.clock) {
            (_, Some(clock)) => TurnClock::Simulated(clock),
            (Some(now), None) => TurnClock::Simulated(SimulatedClock::new(now)),
            (None, None) => TurnClock::Machine,
        };
        let device_check = has_priorities
            .then(|| DeviceCheck::new(clock, Duration::from_micros(priority.check_interval_us.into()), now));
        // Where the engine is reached through a channel, the shard at its other end has the receive queues.
        let is_local = stack.local().is_some();
        let priorities = (has_priorities && is_local).then(|| Box::new(Priorities::new(priority)));
        let core = ShardCore {
            now,
            stack,
            timers: Timers::new(now, self.parts.config.shard.timers_max),
            commander: commander.clone(),
            // Each worker has its own sequence of random numbers.
            rng: Random::new(u64::from_le_bytes(first_eight(&seed)) ^ u64::from(worker) << 32),
            stats: ShardStats::default(),
            resume_reading: Vec::new(),
            closing: None,
            delivering: None,
            is_stopping: false,
            save_request: None,
            router,
            kernel_fds: None,
            priority_counters: classifiers.map(|classifiers| classifiers.counters),
            shard_and_worker: (shard, worker),
            device_check,
            lower_share_percent: self.parts.config.priority.lower_share_percent,
            class_limits,
        };
        let mut shard = Shard {
            affinity: Affinity::new(&self.parts.config.shard, role),
            core: CoreSlot::new(core),
            handler: self.handler,
            dispatch: EventDispatcher::new(),
            ports,
            links,
            cross_shard_inbox: inbox,
            mailbox,
            commander,
            config: self.parts.config.shard,
            stats,
            started: None,
            last_published: now,
            idle_since: None,
            counts_before: ShardStats::default(),
            is_pinned: false,
            co_shard: self.parts.co_shard,
            barrier: None,
            publisher: None,
            watch: WaitSet::default(),
            yields: YieldPolicy::default(),
            priorities,
            distribution: distribution.into(),
            interfaces: interfaces.into(),
        };
        if let Some((published, label)) = self.parts.published {
            shard.start_publishing(published, &label)?;
        }
        Ok(shard)
    }
}

impl<H> ShardBuilder<H> {
    /// Builds an engine with its devices, links and routes.
    fn build_engine(&mut self, seed: &[u8; 32], now: Instant) -> Result<EngineParts, Error> {
        let config = &self.parts.config;
        let classifiers = ClassifierFactory::new(&config.priority, self.parts.priority_functions.clone())?;
        let stack = StackConfig { network: config.network.clone(), tcp: config.tcp.clone() };
        table_memory::check_address_space(&stack)?;
        let mut stack = Stack::new(stack, *seed, now)?;
        table_memory::advise(&stack);
        stack.set_lower_share_percent(config.priority.lower_share_percent);
        if let Some(limits) = config.priority.class_limits(classifiers.is_some()) {
            stack.set_class_limits(limits);
        }
        if config.shard.prefault {
            table_memory::prefault(&stack)?;
        }
        let mut has_tables = false;
        if let Some(ShardMember {
            index, count, steering: rules, device_users, device_tables, router, ..
        }) = &self.parts.member
        {
            let mut steering = Steering::new(*index, *count, &config.network);
            if let Some(rules) = rules {
                let rules: Arc<dyn SteeringPolicy> = rules.clone();
                steering.set_policy(rules, config.tcp.local_port_first..=config.tcp.local_port_last);
            }
            if config.steering.opened == OpenedSteering::PortBits {
                steering.set_port_bits(config.tcp.local_port_first..=config.tcp.local_port_last);
            }
            if let Some(users) = device_users {
                match device_tables {
                    Some(tables) => {
                        tables.apply(&mut steering, &users.shards);
                        has_tables = true;
                    }
                    None => steering.set_device_shards(users.shards.iter().cloned()),
                }
            }
            if let Some(ports) = router.ephemeral_udp_ports() {
                steering.set_ephemeral_udp_ports(ports);
            }
            stack.network_mut().set_steering(steering);
        }
        let mut ports = Vec::new();
        for (number, device) in config.devices.iter().enumerate() {
            let device_halves = take_or_open(&mut self.parts.devices, device, config)?;
            let Device { rx, tx } = match &classifiers {
                Some(classifiers) => classifiers.wrap(device_halves)?,
                None => device_halves,
            };
            let is_relayed = self.parts.member.as_ref().is_some_and(|member| member.relays(number));
            let tx = match config.priority.is_enabled(classifiers.is_some()) {
                true => limit_backlog(&mut stack, tx, is_relayed, &config.priority),
                false => tx,
            };
            // Hashes of labels have the stack's own key.
            debug_assert!(!has_tables || !tx.capabilities().labels, "device {} carries labels", device.name);
            ports.push(RxPort {
                id: stack.add_port(tx),
                name: device.name.clone(),
                rx,
                is_gone: false,
                is_loopback: false,
                is_mirrored: false,
                rx_frames: 0,
                rx_bytes: 0,
            });
        }
        if let Some((name, _)) = self.parts.devices.first() {
            let problem = format!("the configuration has no device named \"{name}\"");
            return Err(ConfigError::new("device", problem).into());
        }
        stack
            .network_mut()
            .set_trusts_hashes(!ports.is_empty() && ports.iter().all(|port| port.rx.computes_hashes()));
        let links = add_links(&mut stack, config, &ports)?;
        if self.parts.local_delivery || config.loopback == Loopback::Stack {
            ports.push(add_loopback_link(&mut stack, config.loopback, classifiers.as_ref())?);
        }
        Ok(EngineParts { stack: Engine::Local(stack), ports, links, classifiers })
    }
}

/// Limits the frames that wait in a device which reports its backlog, so that few frames are in front of an
/// urgent one. A relay refuses frames by their class itself.
fn limit_backlog(
    stack: &mut Stack,
    mut tx: Box<dyn TxQueue + Send>,
    is_relayed: bool,
    priority: &PriorityConfig,
) -> Box<dyn TxQueue + Send> {
    let reports_backlog = tx.has_backlog(0);
    if reports_backlog || is_relayed {
        stack.set_refused_by_class();
    }
    if !reports_backlog {
        return tx;
    }
    backlog_limit::wrap_tx(tx, priority.transmit_backlog_frames as usize)
}

/// Creates the channel through which other threads send commands.
pub(crate) fn command_channel(config: &Config) -> Result<(Commander, Mailbox), Error> {
    command::mailbox(config.shard.commands_max as usize).map_err(|e| Error::io("eventfd of the mailbox", e))
}

fn take_or_open(
    supplied: &mut Vec<(String, Device)>,
    config: &DeviceConfig,
    full_config: &Config,
) -> Result<Device, Error> {
    let device = match supplied.iter().position(|(name, _)| *name == config.name) {
        Some(i) => supplied.swap_remove(i).1,
        None => devices::open(config, full_config)?,
    };
    devices::wrap(device, config)
}

fn add_links(stack: &mut Stack, config: &Config, ports: &[RxPort]) -> Result<Vec<LinkId>, Error> {
    let mut links: Vec<LinkId> = Vec::new();
    for (i, link) in config.links.iter().enumerate() {
        let device = config.devices.iter().position(|d| d.name == link.device);
        // An XDP program redirects packets to the stack's addresses only.
        let kernel_has_groups = device.is_some_and(|d| config.devices[d].kind == DeviceKind::AfXdp);
        let port: PortId = device.and_then(|d| ports.get(d)).map(|p| p.id).unwrap_or_default();
        let id = stack
            .add_link(port, &stack_link_config(link, kernel_has_groups))
            .map_err(|e| with_table_key(e, format!("link[{i}]")))?;
        links.push(id);
    }
    for (i, route) in config.routes.iter().enumerate() {
        let link = config.links.iter().position(|l| l.name == route.link);
        let link = link.and_then(|l| links.get(l)).copied().unwrap_or_default();
        let route = RouteConfig {
            destination: route.destination.address,
            prefix: route.destination.len,
            gateway: route.gateway,
            link,
            metric: route.metric,
        };
        stack.add_route(route).map_err(|e| with_table_key(e, format!("route[{i}]")))?;
    }
    Ok(links)
}

/// Name of the loopback link.
const LOOPBACK_LINK: &str = "lo";

/// Adds a link on which the stack's packets return to it.
fn add_loopback_link(
    stack: &mut Stack,
    loopback: Loopback,
    classifiers: Option<&ClassifierFactory>,
) -> Result<RxPort, Error> {
    let Device { rx, tx } = memory::loopback(LOOPBACK_RING_BYTES);
    let rx = match classifiers {
        Some(classifiers) => classifiers.wrap_rx(rx)?,
        None => rx,
    };
    let id = stack.add_port(tx);
    let addresses = match loopback {
        Loopback::Kernel => Vec::new(),
        Loopback::Stack => vec![(Ipv4Addr::LOCALHOST.into(), 8), (Ipv6Addr::LOCALHOST.into(), 128)],
    };
    let link = ginnel_stack::link::LinkConfig {
        name: LOOPBACK_LINK.into(),
        addresses,
        loopback: true,
        ..ginnel_stack::link::LinkConfig::default()
    };
    stack.add_link(id, &link)?;
    Ok(RxPort {
        id,
        name: LOOPBACK_LINK.into(),
        rx,
        is_gone: false,
        is_loopback: true,
        is_mirrored: false,
        rx_frames: 0,
        rx_bytes: 0,
    })
}

/// Capacity of the loopback link: some 30 of the longest packets.
const LOOPBACK_RING_BYTES: usize = 2 << 20;

/// Replaces the key of an engine's error: the engine names a link or route by its contents, `table` by its
/// position in the file.
fn with_table_key(e: ConfigError, table: String) -> ConfigError {
    let key = match e.key.rsplit_once('.') {
        Some((_, key)) if e.key.starts_with("link.") => format!("{table}.{key}"),
        _ => table,
    };
    ConfigError::new(key, e.problem)
}

fn stack_link_config(link: &LinkConfig, kernel_has_groups: bool) -> ginnel_stack::link::LinkConfig {
    ginnel_stack::link::LinkConfig {
        name: link.name.clone(),
        addresses: link.addresses.iter().map(|p| (p.address, p.len)).collect(),
        local_networks: link.local_networks.iter().map(|p| (p.address, p.len)).collect(),
        mtu: link.mtu.map(|mtu| mtu as usize),
        vlan: link.vlan,
        accept_ra: link.accept_ra,
        loopback: false,
        kernel_has_groups,
        static_neighbours: link.neighbours.iter().map(|n| (n.address, MacAddr(n.mac.0))).collect(),
    }
}

pub(crate) fn random_seed() -> Result<[u8; 32], Error> {
    let mut seed = [0; 32];
    let filled = rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::io("getrandom", e))?;
    // The kernel always returns up to 256 bytes at once.
    debug_assert_eq!(filled, seed.len());
    Ok(seed)
}

fn first_eight(seed: &[u8; 32]) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&seed[..8]);
    bytes
}
