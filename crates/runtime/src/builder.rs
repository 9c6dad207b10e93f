//! From a configuration to a shard.

use crate::channel::control::SameThread;
use crate::channel::remote::Remote;
use crate::channel::{ChannelServer, Client};
use crate::clock;
use crate::command::{self, Commander, Mailbox};
use crate::config::{Config, DeviceConfig, LinkConfig, Loopback, Placement};
use crate::context::{Core, Lent};
use crate::devices;
use crate::dispatch::Dispatch;
use crate::engine::Engine;
use crate::error::Error;
use crate::handler::Handler;
use crate::huge_pages;
use crate::mailbox::Inbox;
use crate::peers::Peers;
use crate::placement::{Beside, Role, Seat};
use crate::presence::Presence;
use crate::shard::{Port, Shard};
use crate::stats::{ShardStats, StatsWriter};
use crate::timers::Timers;
use crate::wait::Watch;
use crate::yields::Yields;
use core::net::{Ipv4Addr, Ipv6Addr};
use ginnel_devices::memory;
use ginnel_devices::random::Random;
use ginnel_stack::device::Device;
use ginnel_stack::error::ConfigError;
use ginnel_stack::handle::{LinkId, PortId};
use ginnel_stack::ip::RouteConfig;
use ginnel_stack::stack::{Stack, StackConfig};
use ginnel_stack::steering::Steering;
use ginnel_stack::time::Instant;
use ginnel_stack::wire::MacAddr;
use std::sync::{Arc, Mutex};

/// Collects what a shard is made of.
#[must_use]
pub struct ShardBuilder<H> {
    config: Config,
    handler: H,
    devices: Vec<(String, Device)>,
    seed: Option<[u8; 32]>,
    now: Option<Instant>,
    member: Option<Member>,
    channel: Option<Client>,
    beside: Option<Beside>,
    presence: Option<(Arc<Presence>, String)>,
    place: Place,
    loops: bool,
}

/// Which part of the thread arrangement a shard is.
pub(crate) struct Place {
    pub(crate) role: Role,
    /// Which of several shards it is, or belongs to.
    pub(crate) shard: u8,
    /// The way in for other threads, if there is one already. One of several shards that has its application beside it has two: this is the
    /// application's.
    pub(crate) way: Option<(Commander, Mailbox)>,
}

impl Default for Place {
    fn default() -> Self {
        Self { role: Role::Stack, shard: 0, way: None }
    }
}

/// What one of several shards is given beside its handler.
pub(crate) struct Member {
    pub(crate) index: u8,
    pub(crate) count: u8,
    pub(crate) peers: Peers,
    pub(crate) inboxes: Vec<Inbox>,
    pub(crate) commander: Commander,
    pub(crate) mailbox: Mailbox,
    pub(crate) stats: StatsWriter,
}

impl Shard<()> {
    /// Starts to build a shard: `Shard::builder(config).handler(application).build()`.
    pub fn builder(config: Config) -> ShardBuilder<()> {
        ShardBuilder {
            config,
            handler: (),
            devices: Vec::new(),
            seed: None,
            now: None,
            member: None,
            channel: None,
            beside: None,
            presence: None,
            place: Place::default(),
            loops: false,
        }
    }
}

impl<H> ShardBuilder<H> {
    /// The application.
    pub fn handler<T: Handler>(self, handler: T) -> ShardBuilder<T> {
        let Self { config, devices, seed, now, member, channel, beside, presence, place, loops, .. } = self;
        ShardBuilder { config, handler, devices, seed, now, member, channel, beside, presence, place, loops }
    }

    /// Supplies the device of this name of the configuration. A memory device must be supplied, others are opened where none is.
    pub fn device(mut self, name: impl Into<String>, device: Device) -> Self {
        self.devices.push((name.into(), device));
        self
    }

    /// The application's engine is the one at the other end of this channel, in another thread. Such a shard has no devices, links and routes of
    /// its own: those of the configuration are left alone.
    pub fn channel(mut self, client: Client) -> Self {
        self.channel = Some(client);
        self.place.role = Role::Application;
        self
    }

    /// A fixed seed, for simulations. Without one the kernel's random numbers are taken: sequence numbers, ports and cookies must
    /// not be predictable.
    pub fn seed(mut self, seed: [u8; 32]) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Shows the shard to other processes, as the one called `label` of its stack. Not for simulations: it does I/O.
    pub fn presence(mut self, presence: Option<Arc<Presence>>, label: impl Into<String>) -> Self {
        self.presence = presence.map(|presence| (presence, label.into()));
        self
    }

    /// What the stack sends to an address of its own comes back to it, as on a host: without this, it has no route there. Implied by `loopback = "stack"`.
    pub fn talks_to_itself(mut self, on: bool) -> Self {
        self.loops = on;
        self
    }

    /// One of several shards.
    pub(crate) fn member(mut self, member: Option<Member>) -> Self {
        self.member = member;
        self
    }

    /// Which part of the thread arrangement this is, if it is not a shard by itself.
    pub(crate) fn place(mut self, place: Place) -> Self {
        self.place = place;
        self
    }

    /// The shard behind this one, through which it reaches the engine.
    pub(crate) fn beside(mut self, beside: Beside) -> Self {
        self.beside = Some(beside);
        self
    }

    /// The time at which a simulation starts. Without one it is the machine's clock.
    pub fn now(mut self, now: Instant) -> Self {
        self.now = Some(now);
        self
    }
}

impl<H: Handler> ShardBuilder<H> {
    /// Opens the devices, sets up links and routes. Nothing is received or sent before the shard runs.
    ///
    /// # Errors
    /// The first key of the configuration that cannot be used, or the device that cannot be opened.
    pub fn build(self) -> Result<Shard<H>, Error> {
        self.config.validate()?;
        if self.member.is_none() && self.config.shards.count > 1 {
            let problem = "is for programs that run several shards: this one runs one";
            return Err(ConfigError::new("shards.count", problem).into());
        }
        if self.config.shard.workers > 0 && self.channel.is_none() {
            let problem =
                "is for programs that make an application for each thread (Shards): this one made one";
            return Err(ConfigError::new("shard.workers", problem).into());
        }
        self.build_placed()
    }

    /// The same for a part of an arrangement.
    pub(crate) fn build_placed(mut self) -> Result<Shard<H>, Error> {
        if self.config.shard.placement != Placement::Inline && self.channel.is_none() {
            self.place_beside()?;
        }
        self.build_here()
    }

    /// A shard for the stack, which this one reaches through a channel.
    fn place_beside(&mut self) -> Result<(), Error> {
        let stack = ShardBuilder {
            config: self.config.clone(),
            handler: ChannelServer::new(&self.config.channel)?,
            devices: core::mem::take(&mut self.devices),
            seed: self.seed,
            now: self.now,
            member: self.member.take(),
            channel: None,
            beside: None,
            presence: self.presence.clone(),
            place: Place { shard: self.place.shard, ..Place::default() },
            loops: self.loops,
        };
        let stack = SameThread(Arc::new(Mutex::new(stack.build_here()?)));
        if let Some((_, label)) = &mut self.presence {
            label.push_str(".app");
        }
        self.channel = Some(stack.attach()?);
        self.beside = Some(Beside::new(stack));
        self.place.role = Role::Application;
        Ok(())
    }

    fn build_here(mut self) -> Result<Shard<H>, Error> {
        let now = self.now.unwrap_or_else(clock::now);
        let seed = match self.seed {
            Some(seed) => seed,
            None => random_seed()?,
        };
        let (stack, ports, links) = match self.channel.take() {
            Some(client) => (Engine::Channel(Box::new(Remote::new(client, now))), Vec::new(), Vec::new()),
            None => self.engine(&seed, now)?,
        };

        let (peers, inboxes, (commander, mailbox), stats) = match (self.member, self.place.way) {
            (Some(member), _) => {
                let Member { peers, inboxes, commander, mailbox, stats, .. } = member;
                (Some(Box::new(peers)), inboxes, (commander, mailbox), stats)
            }
            (None, Some(way)) => (None, Vec::new(), way, StatsWriter::new()),
            (None, None) => (None, Vec::new(), commands(&self.config)?, StatsWriter::new()),
        };
        let Place { role, shard, .. } = self.place;
        let worker = match role {
            Role::Worker(number) => number,
            Role::Stack | Role::Application => 0,
        };
        let core = Core {
            now,
            stack,
            timers: Timers::new(now, self.config.shard.timers_max),
            commander: commander.clone(),
            // Each worker draws numbers of its own.
            rng: Random::new(u64::from_le_bytes(first_eight(&seed)) ^ u64::from(worker) << 32),
            stats: ShardStats::default(),
            resume: Vec::new(),
            closing: None,
            shown: None,
            stopping: false,
            peers,
            number: (shard, worker),
        };
        let mut shard = Shard {
            seat: Seat::new(&self.config.shard, role),
            core: Lent::new(core),
            handler: self.handler,
            dispatch: Dispatch::new(),
            ports,
            links,
            inboxes,
            mailbox,
            commander,
            config: self.config.shard,
            stats,
            started: None,
            published: now,
            idle_since: None,
            beside: self.beside,
            leave: None,
            page: None,
            watch: Watch::default(),
            yields: Yields::default(),
        };
        if let Some((presence, label)) = self.presence {
            shard.show(presence, &label)?;
        }
        Ok(shard)
    }
}

impl<H> ShardBuilder<H> {
    /// An engine with its devices, links and routes.
    fn engine(&mut self, seed: &[u8; 32], now: Instant) -> Result<(Engine, Vec<Port>, Vec<LinkId>), Error> {
        let config = &self.config;
        let stack = StackConfig { network: config.network.clone(), tcp: config.tcp.clone() };
        let mut stack = Stack::new(stack, *seed, now)?;
        huge_pages::ask_for(&stack);
        if let Some(Member { index, count, .. }) = self.member {
            stack.network_mut().set_steering(Steering::new(index, count, &config.network));
        }
        let mut ports = Vec::new();
        for device in &config.devices {
            let Device { rx, tx } = take_or_open(&mut self.devices, device, config)?;
            ports.push(Port {
                id: stack.add_port(tx),
                name: device.name.clone(),
                rx,
                is_gone: false,
                rx_frames: 0,
                rx_bytes: 0,
            });
        }
        if let Some((name, _)) = self.devices.first() {
            let problem = format!("the configuration has no device named \"{name}\"");
            return Err(ConfigError::new("device", problem).into());
        }
        let links = add_links(&mut stack, config, &ports)?;
        if self.loops || config.loopback == Loopback::Stack {
            ports.push(add_loop(&mut stack, config.loopback)?);
        }
        Ok((Engine::Here(stack), ports, links))
    }
}

/// The way in for other threads, and its end.
pub(crate) fn commands(config: &Config) -> Result<(Commander, Mailbox), Error> {
    command::mailbox(config.shard.commands_max as usize)
        .map_err(|e| Error::io("event descriptor of the mailbox", e))
}

fn take_or_open(
    supplied: &mut Vec<(String, Device)>,
    config: &DeviceConfig,
    whole: &Config,
) -> Result<Device, Error> {
    let device = match supplied.iter().position(|(name, _)| *name == config.name) {
        Some(i) => supplied.swap_remove(i).1,
        None => devices::open(config, whole)?,
    };
    devices::wrap(device, config)
}

fn add_links(stack: &mut Stack, config: &Config, ports: &[Port]) -> Result<Vec<LinkId>, Error> {
    let mut links: Vec<LinkId> = Vec::new();
    for (i, link) in config.links.iter().enumerate() {
        let device = config.devices.iter().position(|d| d.name == link.device);
        let port: PortId = device.and_then(|d| ports.get(d)).map(|p| p.id).unwrap_or_default();
        let id = stack.add_link(port, &engine_link(link)).map_err(|e| keyed(e, format!("link[{i}]")))?;
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
        stack.add_route(route).map_err(|e| keyed(e, format!("route[{i}]")))?;
    }
    Ok(links)
}

/// Name of the link from the stack to itself.
const LOOP: &str = "lo";

/// A link over which the stack reaches itself.
fn add_loop(stack: &mut Stack, loopback: Loopback) -> Result<Port, Error> {
    let Device { rx, tx } = memory::to_itself(LOOP_RING_BYTES);
    let id = stack.add_port(tx);
    let addresses = match loopback {
        Loopback::Kernel => Vec::new(),
        Loopback::Stack => vec![(Ipv4Addr::LOCALHOST.into(), 8), (Ipv6Addr::LOCALHOST.into(), 128)],
    };
    let link = ginnel_stack::link::LinkConfig {
        name: LOOP.into(),
        addresses,
        loopback: true,
        ..ginnel_stack::link::LinkConfig::default()
    };
    stack.add_link(id, &link)?;
    Ok(Port { id, name: LOOP.into(), rx, is_gone: false, rx_frames: 0, rx_bytes: 0 })
}

/// Room for what is on its way from the stack to itself: some 30 of the longest packets.
const LOOP_RING_BYTES: usize = 2 << 20;

/// The engine names links and routes by their contents; a file's author knows them by their place.
fn keyed(e: ConfigError, table: String) -> ConfigError {
    let key = match e.key.rsplit_once('.') {
        Some((_, key)) if e.key.starts_with("link.") => format!("{table}.{key}"),
        _ => table,
    };
    ConfigError::new(key, e.problem)
}

fn engine_link(link: &LinkConfig) -> ginnel_stack::link::LinkConfig {
    ginnel_stack::link::LinkConfig {
        name: link.name.clone(),
        addresses: link.addresses.iter().map(|p| (p.address, p.len)).collect(),
        own_networks: link.own_networks.iter().map(|p| (p.address, p.len)).collect(),
        mtu: link.mtu.map(|mtu| mtu as usize),
        vlan: link.vlan,
        accept_ra: link.accept_ra,
        loopback: false,
        static_neighbours: link.neighbours.iter().map(|n| (n.address, MacAddr(n.mac.0))).collect(),
    }
}

pub(crate) fn random_seed() -> Result<[u8; 32], Error> {
    let mut seed = [0; 32];
    let filled = rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::io("random numbers of the kernel", e))?;
    // Up to 256 bytes always come at once.
    debug_assert_eq!(filled, seed.len());
    Ok(seed)
}

fn first_eight(seed: &[u8; 32]) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&seed[..8]);
    bytes
}
