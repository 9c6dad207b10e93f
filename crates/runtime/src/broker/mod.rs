//! The door: how other processes come to use a stack's connections (docs/adr/0012-holders-and-placeholders.md).
//!
//! ```text
//!   another process                         the stack's process
//!   ┌─────────────────────┐   control    ┌──────────────────┐  errands  ┌──────────────────────────┐
//!   │ Process             │◄────────────►│ Door, a thread   │──────────►│ ChannelServer of a shard │
//!   │   Client per shard  │              │   who holds what │           │                          │
//!   │                     │◄═════════════╪══════════════════╪══════════►│                          │
//!   └─────────────────────┘    region    └──────────────────┘           └──────────────────────────┘
//! ```
//!
//! The door is a thread of the stack's process that is no shard. It lets processes in, gives them the regions of all shards, hears when they fork, start
//! programs and die, and carries their rare requests. Bytes, bells and offers pass it by.

mod admission;
mod attached;
mod attachment;
pub mod codec;
mod control_listener;
mod message;
mod requests;
mod seqpacket;
#[cfg(all(test, not(loom)))]
mod tests;
mod thread;

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
use control_listener::ControlListener;
use rustix::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use thread::{BrokerCommand, BrokerShared, BrokerThread};

/// Name of the door's socket in the directory of its stack.
pub const SOCKET_NAME: &str = "control";

/// What the door has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BrokerStats {
    /// Processes that were let in.
    pub admitted: u64,
    /// Connections of other users, of other versions, of those who said nothing that could be understood, and of users who have too many at the door.
    pub rejected: u64,
    /// Processes that found no room.
    pub limit_reached: u64,
    /// Requests that were refused: malformed ones, and such about what the process does not hold.
    pub requests_refused: u64,
    /// Processes that went, or were killed, and were cleaned up after.
    pub reaped: u64,
}

/// The counters, written by the door's thread.
#[derive(Debug, Default)]
struct BrokerCounters {
    admitted: AtomicU64,
    rejected: AtomicU64,
    limit_reached: AtomicU64,
    requests_refused: AtomicU64,
    reaped: AtomicU64,
}

/// The way in for other processes, served by a thread of its own until it is dropped. Whoever is attached then finds the stack gone.
#[derive(Debug)]
pub struct Broker {
    handle: Arc<BrokerHandle>,
    counters: Arc<BrokerCounters>,
    attached: Arc<AttachedProcesses>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread has to look at besides the sockets.
#[derive(Debug)]
struct BrokerHandle {
    commands: Mutex<Sender<BrokerCommand>>,
    wake: Arc<EventFd>,
}

impl BrokerHandle {
    fn send(&self, command: BrokerCommand) {
        // If the thread has ended there is nobody to be told.
        let _ = self.commands.lock().unwrap_or_else(PoisonError::into_inner).send(command);
        self.wake.signal();
    }
}

impl Broker {
    /// Opens the door to these shards, each of which runs a [`ChannelServer`](crate::channel::ChannelServer). With a path, processes of the same user
    /// and of root find it there; others are [handed in](Door::hand_in).
    ///
    /// # Errors
    /// No such socket can be made there; no descriptors or thread.
    pub fn open(path: Option<&Path>, shards: Vec<Commander>) -> Result<Self, Error> {
        Self::open_with(path, shards, StackInfo::default())
    }

    fn open_with(path: Option<&Path>, shards: Vec<Commander>, stack_info: StackInfo) -> Result<Self, Error> {
        let listener = path.map(|path| {
            ControlListener::new(path).map_err(|e| Error::io(format!("control socket {}", path.display()), e))
        });
        let io = |e| Error::io("door for other processes", e);
        let (wake, counts) = (Arc::new(EventFd::new().map_err(io)?), Arc::new(BrokerCounters::default()));
        let ((handed, command_receiver), users) = (channel(), Arc::<AttachedProcesses>::default());
        let shared = BrokerShared { counters: counts.clone(), attached: users.clone(), stack_info };
        let broker_thread =
            BrokerThread::new(listener.transpose()?, shards, command_receiver, wake.clone(), shared)
                .map_err(io)?;
        let thread = std::thread::Builder::new().name("door".into()).spawn(move || broker_thread.run());
        let handle = Arc::new(BrokerHandle { commands: Mutex::new(handed), wake });
        Ok(Self { handle, counters: counts, attached: users, thread: Some(thread.map_err(io)?) })
    }

    /// Opens the door of a stack that shows itself: [`Process::find`] finds it by the stack's name, and [`inspect::users`](crate::inspect::users) says who came in. These terms hold for the programs there.
    ///
    /// # Errors
    /// As [`Door::open`].
    pub fn open_for(
        presence: &PublishedStack,
        shards: Vec<Commander>,
        stack_info: StackInfo,
    ) -> Result<Self, Error> {
        let broker = Self::open_with(Some(&presence.dir().path().join(SOCKET_NAME)), shards, stack_info)?;
        presence.set_broker(AttachedQuery::new(broker.attached.clone(), broker.handle.clone()));
        Ok(broker)
    }

    /// A connection without an address, for a program that this process starts: its end is to be inherited, and goes to [`Process::over`]. The program
    /// belongs to the domain of this name.
    ///
    /// # Errors
    /// No descriptors.
    pub fn open_connection(&self, domain: &str) -> Result<OwnedFd, Error> {
        let (broker_end, program_end) =
            seqpacket::pair().map_err(|e| Error::io("connection for a program", e))?;
        self.handle.send(BrokerCommand::Connection(broker_end, domain.into()));
        Ok(program_end)
    }

    /// Processes that are attached, and those that were announced and have not said a word yet: children in their first moment, and programs that do not know
    /// the library.
    pub fn processes(&self) -> usize {
        self.attached.count()
    }

    /// The same one by one, in the order in which they came.
    pub fn attached_processes(&self) -> Vec<AttachedProcess> {
        self.attached.all()
    }

    /// What was counted.
    pub fn stats(&self) -> BrokerStats {
        let BrokerCounters {
            admitted,
            rejected: turned_away,
            limit_reached: no_room,
            requests_refused: refused,
            reaped: buried,
        } = &*self.counters;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        BrokerStats {
            admitted: read(admitted),
            rejected: read(turned_away),
            limit_reached: read(no_room),
            requests_refused: read(refused),
            reaped: read(buried),
        }
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.handle.send(BrokerCommand::Close);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was told where it happened.
            let _ = thread.join();
        }
    }
}
