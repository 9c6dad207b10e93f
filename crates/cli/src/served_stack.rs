//! A stack for programs of other processes: its shards, its door, and its directory.

use crate::failure::Failure;
use crate::publish;
use core::time::Duration;
use ginnel::broker::{self, Attachment, Broker, NOT_PINNED, StackInfo};
use ginnel::channel::ChannelServer;
use ginnel::config::{ChannelConfig, DeviceKind, Loopback, Placement};
use ginnel::shards::{OpenedShards, Shards};
use ginnel::{Config, PublishedStack, Shard, StopFlag};
use ginnel_devices::memory::{self, MemoryConfig};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// How often it is looked whether something has ended.
pub const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Addresses are checked before they are used, which takes a second or two (RFC 4862 §5.4); what takes longer than this is not waited for.
const READY_TIMEOUT: Duration = Duration::from_secs(10);

/// A stack that is made and does not run yet.
pub struct OpenedStack {
    shards: ShardThreads,
    broker: Broker,
    published: Arc<PublishedStack>,
}

/// Its shards.
enum ShardThreads {
    One(Box<Shard<ChannelServer>>),
    Several(OpenedShards, ChannelConfig),
}

impl ShardThreads {
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
pub struct ServedStack<'a> {
    /// The way in for programs.
    pub broker: &'a Broker,
    /// Its directory.
    pub published: &'a PublishedStack,
    has_ended: &'a dyn Fn() -> bool,
}

impl OpenedStack {
    /// Makes the stack that a configuration describes; `command` is a part of its name if that has none. Ports from `unprivileged_port_start` on are free, unless the
    /// configuration says otherwise.
    pub fn new(config: Config, command: &str, unprivileged_port_start: u16) -> Result<Self, Failure> {
        let cpu = |index: u32| {
            let own = config.shards.cpus.get(index as usize).copied().or(config.shard.cpu);
            own.and_then(|cpu| u16::try_from(cpu).ok()).unwrap_or(NOT_PINNED)
        };
        let terms = StackInfo {
            shard_cpus: (0..config.shards.count).map(cpu).collect(),
            loopback: config.loopback == Loopback::Stack,
            unprivileged_port_start: config.run.unprivileged_port_start.unwrap_or(unprivileged_port_start),
        };
        if config.shard.placement != Placement::Inline || config.shard.workers > 0 {
            let problem = "programs of other processes are beside their stack in any case";
            return Err(Failure::usage(format!("shard.placement, shard.workers: {problem}")));
        }
        let channel = config.channel.clone();
        let published = publish::publish_stack(&config.run, command)?.ok_or_else(|| {
            Failure::usage(
                "run.directory: programs on the stack find it by its directory, so it has to have one",
            )
        })?;
        let count = config.shards.count;
        let memory_devices = config.devices.iter().filter(|device| device.kind == DeviceKind::Memory);
        // A cable whose other end nobody holds: what is sent there vanishes.
        let memory_devices: Vec<_> = memory_devices
            .map(|device| {
                let mtu = device.mtu.map_or(MemoryConfig::default().mtu, |mtu| mtu as usize);
                let cable = || memory::pair(MemoryConfig { mtu, ..MemoryConfig::default() }).0;
                (device.name.clone(), (0..count).map(|_| cable()).collect())
            })
            .collect();
        let shards = Shards::new(config).presence(Some(published.clone())).delivers_locally(true);
        let shards =
            memory_devices.into_iter().fold(shards, |shards, (name, queues)| shards.device(name, queues));
        let opened = shards.open()?;
        let (shards, commanders) = if count > 1 {
            let commanders = opened.commanders();
            (ShardThreads::Several(opened, channel), commanders)
        } else {
            let shard = opened.build(|_| ChannelServer::for_processes(&channel))?.remove(0);
            let commander = shard.commander();
            (ShardThreads::One(Box::new(shard)), vec![commander])
        };
        let broker = Broker::open_for(&published, commanders, terms)?;
        Ok(Self { shards, broker, published: published })
    }

    /// Runs the stack until `stop`, or until `act`, which begins when programs can use it, is done.
    pub fn serve<T>(
        self,
        stop: &StopFlag,
        act: impl FnOnce(&ServedStack<'_>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let Self { shards, broker, published } = self;
        std::thread::scope(|scope| {
            let shards = scope.spawn(|| shards.run(stop));
            let has_ended = || shards.is_finished();
            let served = ServedStack { broker: &broker, published: &published, has_ended: &has_ended };
            let outcome = served.wait_until_ready(stop).and_then(|()| act(&served));
            stop.stop();
            match shards.join() {
                Ok(result) => result.and(outcome),
                Err(_) => Err(Failure::running("a shard panicked")),
            }
        })
    }
}

impl ServedStack<'_> {
    /// Where programs find the door.
    pub fn control_socket(&self) -> PathBuf {
        control_socket(self.published.dir().path())
    }

    /// Whether the shards do not run any more.
    pub fn has_ended(&self) -> bool {
        (self.has_ended)()
    }

    fn wait_until_ready(&self, stop: &StopFlag) -> Result<(), Failure> {
        let mut first = Attachment::connect(&self.control_socket(), "")?;
        let until = Instant::now() + READY_TIMEOUT;
        let is_ready = |first: &mut Attachment| first.clients().iter().all(|client| client.is_ready());
        while !is_ready(&mut first) && Instant::now() < until && !stop.is_set() && !self.has_ended() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(self.published.mark_ready()?)
    }
}

/// The door in the directory of a stack.
pub fn control_socket(directory: &Path) -> PathBuf {
    directory.join(broker::SOCKET_NAME)
}
