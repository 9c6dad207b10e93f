//! The broker: admits other processes to the connections of a stack
//! (docs/adr/0012-owners-and-proxy-descriptors.md).
//!
//! ```text
//!   another process                         the stack's process
//!   ┌─────────────────────┐   control    ┌──────────────────┐  requests ┌──────────────────────────┐
//!   │ Attachment          │◄────────────►│ Broker, a thread │──────────►│ ChannelServer of a shard │
//!   │   Client per shard  │  connection  │   who owns what  │           │                          │
//!   │                     │◄═════════════╪══════════════════╪══════════►│                          │
//!   └─────────────────────┘    region    └──────────────────┘           └──────────────────────────┘
//! ```
//!
//! The broker is a thread of the stack's process that runs no shard. It admits processes, passes them the
//! memory regions of all shards, is told when they fork and execute programs, notices when they die, and
//! relays their rare requests. Payload, doorbells and accept offers do not pass through the broker.

mod admission;
mod attached;
mod attachment;
pub mod codec;
mod control_listener;
mod message;
#[cfg(all(test, not(loom)))]
mod protocol_tests;
mod requests;
mod saved_state;
mod seqpacket;
mod shard_link;
#[cfg(all(test, not(loom)))]
mod tests;
mod thread;
mod unreachable;
mod upgrade;

pub use attached::AttachedProcess;
use attached::AttachedProcesses;
pub(crate) use attached::AttachedQuery;
pub use attachment::{Attachment, PreparedProcess, UnattachedProcess};
#[doc(hidden)]
pub use message::fuzz;
pub use message::{GlobalSocketId, NOT_PINNED, PROTOCOL_VERSION, Refusal, StackInfo};

use crate::command::Commander;
use crate::error::Error;
use crate::published_stack::PublishedStack;
use crate::wait::EventFd;
use admission::AdmissionLimits;
use control_listener::ControlListener;
use rustix::fd::OwnedFd;
pub use saved_state::{RunningShards, SaveShards, SavedState, ShardState};
use shard_link::ShardLink;
pub use shard_link::{
    ChildLink, ChildStart, NotSaved, NotServing, await_permission, await_shards, link_pair, receive_start,
    send_start, serve_broker,
};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
pub use thread::{AfterDeath, HAND_OVER_TIMEOUT, HandOver, HandOverInProgress, UpgradeShards};
use thread::{BrokerCommand, BrokerShared, BrokerThread, Supervision};
pub use unreachable::UnreachableStack;
pub(crate) use unreachable::owner_of;
pub use upgrade::{ConnectionPolicy, Upgraded, upgrade};

/// File name of the broker's socket in the directory of its stack.
pub const SOCKET_NAME: &str = "control";

/// Counters of a broker since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BrokerStats {
    /// Processes that were admitted.
    pub admitted: u64,
    /// Connections that were rejected: the user is not permitted or has too many connections, the protocol
    /// version differs, or the first message is malformed.
    pub rejected: u64,
    /// Requests and processes that were refused because a limit was reached (clients, domains, proxy
    /// descriptors).
    pub limit_reached: u64,
    /// Requests that were refused: malformed ones, and requests about a socket that the process does not own.
    pub requests_refused: u64,
    /// Processes that disconnected or died, and whose references were released.
    pub reaped: u64,
}

/// The counters as the broker's thread writes them.
#[derive(Debug, Default)]
struct BrokerCounters {
    admitted: AtomicU64,
    rejected: AtomicU64,
    limit_reached: AtomicU64,
    requests_refused: AtomicU64,
    reaped: AtomicU64,
}

/// Admits other processes to a stack. A thread serves it until the value is dropped; attached processes then
/// find the stack gone.
#[derive(Debug)]
pub struct Broker {
    handle: Arc<BrokerHandle>,
    counters: Arc<BrokerCounters>,
    attached: Arc<AttachedProcesses>,
    thread: Option<JoinHandle<()>>,
}

/// Sends commands to the broker's thread.
#[derive(Debug)]
struct BrokerHandle {
    commands: Mutex<Sender<BrokerCommand>>,
    wake: Arc<EventFd>,
}

impl BrokerHandle {
    fn send(&self, command: BrokerCommand) {
        // Fails only if the thread has ended.
        let _ = self.commands.lock().unwrap_or_else(PoisonError::into_inner).send(command);
        self.wake.signal();
    }
}

impl Broker {
    /// Starts a broker for `shards`, each of which runs a [`ChannelServer`](crate::channel::ChannelServer).
    /// With a path, processes of the stack's own user and of root connect to a socket there; other processes
    /// get a connection from [`Broker::open_connection`].
    ///
    /// # Errors
    /// The socket cannot be created at `path`, or the process has no descriptor or thread left.
    pub fn open(path: Option<&Path>, shards: Vec<Commander>) -> Result<Self, Error> {
        let shards = shards.into_iter().map(ShardLink::InProcess).collect();
        Self::open_with(path, shards, StackInfo::default(), AdmissionLimits::default())
    }

    fn open_with(
        path: Option<&Path>,
        shards: Vec<ShardLink>,
        stack_info: StackInfo,
        limits: AdmissionLimits,
    ) -> Result<Self, Error> {
        let listener = path.map(|path| {
            ControlListener::new(path).map_err(|e| Error::io(format!("control socket {}", path.display()), e))
        });
        let io = |e| Error::io("broker for other processes", e);
        let (wake, counters) = (Arc::new(EventFd::new().map_err(io)?), Arc::new(BrokerCounters::default()));
        let ((command_sender, command_receiver), attached) = (channel(), Arc::<AttachedProcesses>::default());
        let shared =
            BrokerShared { counters: counters.clone(), attached: attached.clone(), stack_info, limits };
        let commands = (command_sender.clone(), command_receiver);
        let broker_thread =
            BrokerThread::new(listener.transpose()?, shards, commands, wake.clone(), shared).map_err(io)?;
        let thread = std::thread::Builder::new().name("broker".into()).spawn(move || broker_thread.run());
        let handle = Arc::new(BrokerHandle { commands: Mutex::new(command_sender), wake });
        Ok(Self { handle, counters, attached, thread: Some(thread.map_err(io)?) })
    }

    /// Starts the broker of a published stack: [`Attachment::find`] finds it by the name of the stack, and
    /// [`inspect::list_processes`](crate::inspect::list_processes) lists the attached processes. Programs
    /// that attach are told `stack_info`.
    ///
    /// # Errors
    /// As [`Broker::open`].
    pub fn open_for(
        published: &PublishedStack,
        shards: Vec<Commander>,
        stack_info: StackInfo,
    ) -> Result<Self, Error> {
        let shards = shards.into_iter().map(ShardLink::InProcess).collect();
        Self::open_published(published, shards, stack_info)
    }

    /// As [`Broker::open_for`], for shards in the child process at the other end of `link`. When that process
    /// is gone, `restart` starts the next one and waits until it runs; the attached processes continue there.
    /// `upgrade` is called for [`upgrade()`].
    ///
    /// # Errors
    /// As [`Broker::open`].
    pub fn open_supervising(
        published: &PublishedStack,
        link: ChildLink,
        restart: impl FnMut() -> AfterDeath + Send + 'static,
        upgrade: Arc<UpgradeShards>,
        stack_info: StackInfo,
    ) -> Result<Self, Error> {
        let link = Arc::new(link);
        let shards = (0..link.shards()).map(|shard| ShardLink::Child(link.clone(), shard)).collect();
        let broker = Self::open_published(published, shards, stack_info)?;
        let supervision = Supervision { link, restart: Box::new(restart), upgrade };
        broker.handle.send(BrokerCommand::Supervise(supervision));
        Ok(broker)
    }

    fn open_published(
        published: &PublishedStack,
        shards: Vec<ShardLink>,
        stack_info: StackInfo,
    ) -> Result<Self, Error> {
        let path = published.dir().path().join(SOCKET_NAME);
        let broker = Self::open_with(Some(&path), shards, stack_info, AdmissionLimits::default())?;
        published.set_broker(AttachedQuery::new(broker.attached.clone(), broker.handle.clone()));
        Ok(broker)
    }

    /// Returns the program's end of a new control connection. A program that this process starts inherits it
    /// and passes it to [`Attachment::from_connection`]; it joins the domain of this name.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub fn open_connection(&self, domain: &str) -> Result<OwnedFd, Error> {
        let (broker_end, program_end) =
            seqpacket::pair().map_err(|e| Error::io("connection for a program", e))?;
        self.handle.send(BrokerCommand::Connection(broker_end, domain.into()));
        Ok(program_end)
    }

    /// Returns the number of attached processes, including those that were announced and have not sent a
    /// message yet: children right after fork, and programs that do not load the library.
    pub fn processes(&self) -> usize {
        self.attached.count()
    }

    /// Returns the attached processes in the order of their admission.
    pub fn attached_processes(&self) -> Vec<AttachedProcess> {
        self.attached.all()
    }

    /// Returns the attached process that was admitted first, and its pidfd. Processes that have not sent a
    /// message yet are left out.
    pub fn oldest_process(&self) -> Option<(AttachedProcess, Arc<OwnedFd>)> {
        self.attached.oldest()
    }

    /// Returns the counters.
    pub fn stats(&self) -> BrokerStats {
        let BrokerCounters { admitted, rejected, limit_reached, requests_refused, reaped } = &*self.counters;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        BrokerStats {
            admitted: read(admitted),
            rejected: read(rejected),
            limit_reached: read(limit_reached),
            requests_refused: read(requests_refused),
            reaped: read(reaped),
        }
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.handle.send(BrokerCommand::Close);
        if let Some(thread) = self.thread.take() {
            // The panic hook has reported a panic of the thread.
            let _ = thread.join();
        }
    }
}
