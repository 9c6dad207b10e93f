//! A stack for programs in other processes: its shards, its broker, and its directory.

use crate::descriptor_limit;
use crate::failure::Failure;
use crate::interface_watch::InterfaceWatch;
use crate::limit_watch::LimitWatch;
use crate::supervisor::{OnStackDeath, ShardProcess, StartedShards};
use crate::{log, programs, start_entries};
use core::time::Duration;
use ginnel::broker::{self, Attachment, Broker, NOT_PINNED, SavedState, ShardState, StackInfo};
use ginnel::channel::ChannelServer;
use ginnel::config::{ChannelConfig, DeviceKind, Loopback, Placement};
use ginnel::shards::{OpenedShards, Shards};
use ginnel::{Commander, Config, KeptTaps, PublishedStack, Shard, StopFlag};
use ginnel_devices::memory::{self, MemoryConfig};
use rustix::process::Pid;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Interval at which the CLI polls for the end of a process or of a stack.
pub const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Longest time to wait until a stack is ready. Duplicate address detection (RFC 4862 §5.4) takes a second or
/// two.
const READY_TIMEOUT: Duration = Duration::from_secs(10);

/// A stack whose devices and directory are open; its shards do not run yet.
pub struct OpenedStack {
    shards: ShardThreads,
    broker: Broker,
    published: Arc<PublishedStack>,
    interfaces: InterfaceWatch,
}

/// The shards of a stack.
pub enum ShardThreads {
    One(Box<Shard<ChannelServer>>),
    Several(OpenedShards, ChannelConfig),
    /// The shards run in a process of their own.
    Child(Arc<ShardProcess>),
}

impl ShardThreads {
    /// Has `gate` called when all shards are built, before the first turn of any of them.
    pub fn before_first_turn(self, gate: impl FnOnce() + Send + 'static) -> Self {
        match self {
            Self::Several(shards, config) => Self::Several(shards.before_first_turn(gate), config),
            built => {
                gate();
                built
            }
        }
    }

    /// Runs the shards until they end; a single shard runs on the calling thread.
    pub fn run(self, stop: &StopFlag) -> Result<(), Failure> {
        match self {
            Self::Child(process) => process.run(|| stop.is_set())?,
            Self::One(mut shard) => shard.run(stop)?,
            Self::Several(shards, config) => {
                shards.run(stop, |_| ChannelServer::for_processes(&config), |_, _| ())?;
            }
        }
        Ok(())
    }
}

/// Checks that a configuration has no threads of an application.
pub fn check_placement(config: &Config) -> Result<(), Failure> {
    if config.shard.placement == Placement::Inline && config.shard.workers == 0 {
        return Ok(());
    }
    Err(Failure::usage(
        "shard.placement and shard.workers have no effect with ginnel run and ginnel up, whose programs are separate processes: remove them",
    ))
}

/// Opens the devices and the shards that `config` describes; `taps` are open already. The shards continue
/// with `state`. Returns the shards and the senders of their commands.
pub fn open_shards(
    config: Config,
    published: Arc<PublishedStack>,
    taps: KeptTaps,
    state: Option<SavedState>,
) -> Result<(ShardThreads, Vec<Commander>), Failure> {
    descriptor_limit::raise();
    let (channel, count) = (config.channel.clone(), config.shards.count);
    let memory_devices = config.devices.iter().filter(|device| device.kind == DeviceKind::Memory);
    // Memory devices need a peer. The other end of these cables is dropped, so frames sent to it are lost.
    let memory_devices: Vec<_> = memory_devices
        .map(|device| {
            let mtu = device.mtu.map_or(MemoryConfig::default().mtu, |mtu| mtu as usize);
            let cable = || memory::pair(MemoryConfig { mtu, ..MemoryConfig::default() }).0;
            (device.name.clone(), (0..count).map(|_| cable()).collect())
        })
        .collect();
    let shards = Shards::new(config).published(Some(published)).delivers_locally(true).taps(taps);
    let shards =
        memory_devices.into_iter().fold(shards, |shards, (name, queues)| shards.device(name, queues));
    let mut opened = shards.open()?;
    if let Some(state) = state {
        let loaded: io::Result<Vec<_>> = state.into_shards().into_iter().map(ShardState::load).collect();
        let saved = loaded.map_err(|e| Failure::running(format!("saved state of the shards: {e}")))?;
        opened = opened.restore(saved).map_err(Failure::running)?;
    }
    if count > 1 {
        let commanders = opened.commanders();
        return Ok((ShardThreads::Several(opened, channel), commanders));
    }
    let shard = opened.build(|_| ChannelServer::for_processes(&channel))?.remove(0);
    let commander = shard.commander();
    Ok((ShardThreads::One(Box::new(shard)), vec![commander]))
}

/// Stops the shards when it is dropped, also by a panic: the scope of their threads ends only after them.
struct StopShards<'a>(&'a StopFlag);

impl Drop for StopShards<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// A running stack. It exists during [`OpenedStack::serve`].
pub struct ServedStack<'a> {
    /// The broker, which admits programs to the stack.
    pub broker: &'a Broker,
    /// The directory in which the stack is published.
    pub published: &'a PublishedStack,
    has_ended: &'a dyn Fn() -> bool,
    shard_process: Option<Arc<ShardProcess>>,
}

impl OpenedStack {
    /// Opens the stack that `config` describes. `command` becomes a part of its name if the configuration
    /// gives no name. Any user may bind ports from `unprivileged_port_start` on, unless the configuration
    /// sets another limit. The shards run in a process of their own, unless `on_death` is
    /// [`OnStackDeath::Fail`].
    pub fn new(
        config: Config,
        command: &str,
        unprivileged_port_start: u16,
        on_death: OnStackDeath,
    ) -> Result<Self, Failure> {
        let cpu = |index: u32| {
            let own = config.shards.cpus.get(index as usize).copied().or(config.shard.cpu);
            own.and_then(|cpu| u16::try_from(cpu).ok()).unwrap_or(NOT_PINNED)
        };
        let terms = StackInfo {
            shard_cpus: (0..config.shards.count).map(cpu).collect(),
            loopback: config.loopback == Loopback::Stack,
            unprivileged_port_start: config.run.unprivileged_port_start.unwrap_or(unprivileged_port_start),
            congestion_control: config.tcp.congestion_control,
        };
        check_placement(&config)?;
        descriptor_limit::raise();
        let publish = match on_death {
            OnStackDeath::Fail => PublishedStack::new,
            OnStackDeath::Restart | OnStackDeath::Kill => PublishedStack::for_supervisor,
        };
        let published = publish(&config.run, command)?;
        let published = published.ok_or_else(|| {
            Failure::usage(
                "run.directory: programs on the stack find it by its directory, so it has to have one",
            )
        })?;
        log::open(published.dir().path(), &config.run);
        start_entries::write(&config, published.dir().name(), &format!("ginnel {command}"));
        programs::publish_listen_spawn(published.dir().path(), config.run.listen_spawn)?;
        Self::open(config, published, terms, on_death)
            .map_err(|failure| log::record_last_failure("the stack was not started", failure))
    }

    fn open(
        config: Config,
        published: Arc<PublishedStack>,
        info: StackInfo,
        on_death: OnStackDeath,
    ) -> Result<Self, Failure> {
        start_entries::write_machine_limits(&config);
        let interfaces = InterfaceWatch::new(&config);
        if on_death != OnStackDeath::Fail {
            let StartedShards { process, link, restart, upgrade } =
                ShardProcess::start(&config, published.dir().path(), on_death)?;
            let broker = Broker::open_supervising(&published, link, restart, upgrade, info)?;
            return Ok(Self { shards: ShardThreads::Child(process), broker, published, interfaces });
        }
        let (shards, commanders) = open_shards(config, published.clone(), Vec::new(), None)?;
        let broker = Broker::open_for(&published, commanders, info)?;
        Ok(Self { shards, broker, published, interfaces })
    }

    /// Runs the stack until `stop` is set or `act` returns, and returns after both the stack and `act`. `act`
    /// starts when programs can attach to the stack.
    pub fn serve<T>(
        self,
        stop: &StopFlag,
        act: impl FnOnce(&ServedStack<'_>) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let Self { shards, broker, published, interfaces } = self;
        let mut interfaces = interfaces.until(stop);
        // The devices are open, so what happens to their interfaces from now on is a change.
        interfaces.update();
        let limit_watch = LimitWatch::start(published.dir().path(), interfaces);
        let shard_process = match &shards {
            ShardThreads::Child(process) => Some(process.clone()),
            ShardThreads::One(_) | ShardThreads::Several(..) => None,
        };
        let result = std::thread::scope(|scope| {
            let shards = scope.spawn(|| shards.run(stop));
            let has_ended = || shards.is_finished();
            let (broker, published) = (&broker, &*published);
            let served = ServedStack { broker, published, has_ended: &has_ended, shard_process };
            let stop_shards = StopShards(stop);
            let outcome = served.wait_until_ready(stop).and_then(|()| act(&served));
            drop(stop_shards);
            match shards.join() {
                Ok(result) => result.and(outcome),
                Err(_) => Err(Failure::running("a shard panicked")),
            }
        });
        drop(limit_watch);
        match result {
            Err(failure) if !failure.is_silent() => Err(log::record_last_failure("the stack stops", failure)),
            result => {
                tracing::info!("the stack has ended");
                result
            }
        }
    }
}

impl ServedStack<'_> {
    /// Returns the path of the control socket, by which programs reach the broker.
    pub fn control_socket(&self) -> PathBuf {
        control_socket(self.published.dir().path())
    }

    /// Returns true once the shards have ended.
    pub fn has_ended(&self) -> bool {
        (self.has_ended)()
    }

    /// Returns true if the process runs the shards, or may be about to.
    pub fn is_shard_process(&self, pid: Pid) -> bool {
        self.shard_process.as_ref().is_some_and(|process| process.child_id().is_none_or(|child| child == pid))
    }

    fn wait_until_ready(&self, stop: &StopFlag) -> Result<(), Failure> {
        let mut first = match Attachment::connect(&self.control_socket(), "") {
            // The shards have ended already, because the stack is being stopped.
            Err(_) if stop.is_set() => return Ok(()),
            attached => attached?,
        };
        let until = Instant::now() + READY_TIMEOUT;
        let is_ready = |first: &mut Attachment| first.clients().iter().all(|client| client.is_ready());
        while !is_ready(&mut first) && Instant::now() < until && !stop.is_set() && !self.has_ended() {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.published.mark_ready()?;
        tracing::info!("programs can attach");
        Ok(())
    }
}

/// Returns the path of the control socket in a stack's directory.
pub fn control_socket(directory: &Path) -> PathBuf {
    directory.join(broker::SOCKET_NAME)
}
