//! A stack for programs of other processes: its shards, its door, and its directory.

use crate::failure::Failure;
use crate::presence;
use core::time::Duration;
use ginnel::channel::ChannelServer;
use ginnel::config::{ChannelConfig, DeviceKind, Loopback, Placement};
use ginnel::door::{self, Door, NOT_PINNED, Process, Terms};
use ginnel::shards::{Opened, Shards};
use ginnel::{Config, Presence, Shard, StopFlag};
use ginnel_devices::memory::{self, MemoryConfig};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// How often it is looked whether something has ended.
pub const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Addresses are checked before they are used, which takes a second or two (RFC 4862 §5.4); what takes longer than this is not waited for.
const READY_WITHIN: Duration = Duration::from_secs(10);

/// A stack that is made and does not run yet.
pub struct Made {
    shards: Threads,
    door: Door,
    presence: Arc<Presence>,
}

/// Its shards.
enum Threads {
    One(Box<Shard<ChannelServer>>),
    Several(Opened, ChannelConfig),
}

impl Threads {
    /// Runs them until they end; a single one on this thread.
    fn run(self, stop: &StopFlag) -> Result<(), Failure> {
        match self {
            Self::One(mut shard) => shard.run(stop)?,
            Self::Several(shards, config) => {
                shards.run(stop, |_| ChannelServer::for_processes(&config), |_, _| ())?;
            }
        }
        Ok(())
    }
}

/// One that runs, while [`Made::serve`] does.
pub struct Serving<'a> {
    /// The way in for programs.
    pub door: &'a Door,
    /// Its directory.
    pub presence: &'a Presence,
    has_ended: &'a dyn Fn() -> bool,
}

impl Made {
    /// Makes the stack that a configuration describes; `command` is a part of its name if that has none. Ports from `unprivileged_port_start` on are free, unless the
    /// configuration says otherwise.
    pub fn new(config: Config, command: &str, unprivileged_port_start: u16) -> Result<Self, Failure> {
        let cpu = |index: u32| {
            let own = config.shards.cpus.get(index as usize).copied().or(config.shard.cpu);
            own.and_then(|cpu| u16::try_from(cpu).ok()).unwrap_or(NOT_PINNED)
        };
        let terms = Terms {
            shard_cpus: (0..config.shards.count).map(cpu).collect(),
            loopback: config.loopback == Loopback::Stack,
            unprivileged_port_start: config.run.unprivileged_port_start.unwrap_or(unprivileged_port_start),
        };
        if config.shard.placement != Placement::Inline || config.shard.workers > 0 {
            let problem = "programs of other processes are beside their stack in any case";
            return Err(Failure::usage(format!("shard.placement, shard.workers: {problem}")));
        }
        let channel = config.channel.clone();
        let presence = presence::of(&config.run, command)?.ok_or_else(|| {
            Failure::usage(
                "run.directory: programs on the stack find it by its directory, so it has to have one",
            )
        })?;
        let count = config.shards.count;
        let ends = config.devices.iter().filter(|device| device.kind == DeviceKind::Memory);
        // A cable whose other end nobody holds: what is sent there vanishes.
        let ends: Vec<_> = ends
            .map(|device| {
                let mtu = device.mtu.map_or(MemoryConfig::default().mtu, |mtu| mtu as usize);
                let cable = || memory::pair(MemoryConfig { mtu, ..MemoryConfig::default() }).0;
                (device.name.clone(), (0..count).map(|_| cable()).collect())
            })
            .collect();
        let shards = Shards::new(config).presence(Some(presence.clone())).talks_to_itself(true);
        let shards = ends.into_iter().fold(shards, |shards, (name, queues)| shards.device(name, queues));
        let opened = shards.open()?;
        let (shards, ways) = if count > 1 {
            let ways = opened.commanders();
            (Threads::Several(opened, channel), ways)
        } else {
            let shard = opened.build(|_| ChannelServer::for_processes(&channel))?.remove(0);
            let way = shard.commander();
            (Threads::One(Box::new(shard)), vec![way])
        };
        let door = Door::open_for(&presence, ways, terms)?;
        Ok(Self { shards, door, presence })
    }

    /// Runs the stack until `stop`, or until `act`, which begins when programs can use it, is done.
    pub fn serve<T>(
        self,
        stop: &StopFlag,
        act: impl FnOnce(&Serving<'_>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let Self { shards, door, presence } = self;
        std::thread::scope(|scope| {
            let shards = scope.spawn(|| shards.run(stop));
            let has_ended = || shards.is_finished();
            let serving = Serving { door: &door, presence: &presence, has_ended: &has_ended };
            let acted = serving.wait_until_ready(stop).and_then(|()| act(&serving));
            stop.stop();
            match shards.join() {
                Ok(result) => result.and(acted),
                Err(_) => Err(Failure::running("a shard panicked")),
            }
        })
    }
}

impl Serving<'_> {
    /// Where programs find the door.
    pub fn control(&self) -> PathBuf {
        control(self.presence.dir().path())
    }

    /// Whether the shards do not run any more.
    pub fn has_ended(&self) -> bool {
        (self.has_ended)()
    }

    fn wait_until_ready(&self, stop: &StopFlag) -> Result<(), Failure> {
        let mut first = Process::connect(&self.control(), "")?;
        let until = Instant::now() + READY_WITHIN;
        let is_ready = |first: &mut Process| first.clients().iter().all(|client| client.is_ready());
        while !is_ready(&mut first) && Instant::now() < until && !stop.is_set() && !self.has_ended() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(self.presence.announce()?)
    }
}

/// The door in the directory of a stack.
pub fn control(directory: &Path) -> PathBuf {
    directory.join(door::NAME)
}
