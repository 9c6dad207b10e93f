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

mod codec;
mod crowd;
mod line;
mod listen;
mod message;
mod process;
mod requests;
mod serve;
#[cfg(all(test, not(loom)))]
mod tests;
mod users;

#[doc(hidden)]
pub use message::fuzz;
pub use message::{Held, NOT_PINNED, Refusal, Terms, VERSION};
pub use process::{Expected, Guest, Process};
pub(crate) use users::Roll;
pub use users::User;
use users::Users;

use crate::command::Commander;
use crate::error::Error;
use crate::presence::Presence;
use crate::wait::EventFd;
use listen::Knocker;
use rustix::fd::OwnedFd;
use serve::{Books, Handed, Porter};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Name of the door's socket in the directory of its stack.
pub const NAME: &str = "control";

/// What the door has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DoorStats {
    /// Processes that were let in.
    pub admitted: u64,
    /// Connections of other users, of other versions, of those who said nothing that could be understood, and of users who have too many at the door.
    pub turned_away: u64,
    /// Processes that found no room.
    pub no_room: u64,
    /// Requests that were refused: malformed ones, and such about what the process does not hold.
    pub refused: u64,
    /// Processes that went, or were killed, and were cleaned up after.
    pub buried: u64,
}

/// The counters, written by the door's thread.
#[derive(Debug, Default)]
struct Counts {
    admitted: AtomicU64,
    turned_away: AtomicU64,
    no_room: AtomicU64,
    refused: AtomicU64,
    buried: AtomicU64,
}

/// The way in for other processes, served by a thread of its own until it is dropped. Whoever is attached then finds the stack gone.
#[derive(Debug)]
pub struct Door {
    teller: Arc<Teller>,
    counts: Arc<Counts>,
    users: Arc<Users>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread has to look at besides the sockets.
#[derive(Debug)]
struct Teller {
    handed: Mutex<Sender<Handed>>,
    wake: Arc<EventFd>,
}

impl Teller {
    fn tell(&self, what: Handed) {
        // If the thread has ended there is nobody to be told.
        let _ = self.handed.lock().unwrap_or_else(PoisonError::into_inner).send(what);
        self.wake.signal();
    }
}

impl Door {
    /// Opens the door to these shards, each of which runs a [`ChannelServer`](crate::channel::ChannelServer). With a path, processes of the same user
    /// and of root find it there; others are [handed in](Door::hand_in).
    ///
    /// # Errors
    /// No such socket can be made there; no descriptors or thread.
    pub fn open(path: Option<&Path>, shards: Vec<Commander>) -> Result<Self, Error> {
        Self::open_with(path, shards, Terms::default())
    }

    fn open_with(path: Option<&Path>, shards: Vec<Commander>, terms: Terms) -> Result<Self, Error> {
        let knocker = path.map(|path| {
            Knocker::new(path).map_err(|e| Error::io(format!("control socket {}", path.display()), e))
        });
        let io = |e| Error::io("door for other processes", e);
        let (wake, counts) = (Arc::new(EventFd::new().map_err(io)?), Arc::new(Counts::default()));
        let ((handed, inbox), users) = (channel(), Arc::<Users>::default());
        let books = Books { counts: counts.clone(), users: users.clone(), terms };
        let porter = Porter::new(knocker.transpose()?, shards, inbox, wake.clone(), books).map_err(io)?;
        let thread = std::thread::Builder::new().name("door".into()).spawn(move || porter.serve());
        let teller = Arc::new(Teller { handed: Mutex::new(handed), wake });
        Ok(Self { teller, counts, users, thread: Some(thread.map_err(io)?) })
    }

    /// Opens the door of a stack that shows itself: [`Process::find`] finds it by the stack's name, and [`inspect::users`](crate::inspect::users) says who came in. These terms hold for the programs there.
    ///
    /// # Errors
    /// As [`Door::open`].
    pub fn open_for(presence: &Presence, shards: Vec<Commander>, terms: Terms) -> Result<Self, Error> {
        let door = Self::open_with(Some(&presence.dir().path().join(NAME)), shards, terms)?;
        presence.introduce(Roll::new(door.users.clone(), door.teller.clone()));
        Ok(door)
    }

    /// A connection without an address, for a program that this process starts: its end is to be inherited, and goes to [`Process::over`]. The program
    /// belongs to the domain of this name.
    ///
    /// # Errors
    /// No descriptors.
    pub fn hand_in(&self, domain: &str) -> Result<OwnedFd, Error> {
        let (ours, its) = line::pair().map_err(|e| Error::io("connection for a program", e))?;
        self.teller.tell(Handed::Line(ours, domain.into()));
        Ok(its)
    }

    /// Processes that are attached, and those that were announced and have not said a word yet: children in their first moment, and programs that do not know
    /// the library.
    pub fn processes(&self) -> usize {
        self.users.count()
    }

    /// The same one by one, in the order in which they came.
    pub fn users(&self) -> Vec<User> {
        self.users.all()
    }

    /// What was counted.
    pub fn stats(&self) -> DoorStats {
        let Counts { admitted, turned_away, no_room, refused, buried } = &*self.counts;
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        DoorStats {
            admitted: read(admitted),
            turned_away: read(turned_away),
            no_room: read(no_room),
            refused: read(refused),
            buried: read(buried),
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.teller.tell(Handed::Close);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was told where it happened.
            let _ = thread.join();
        }
    }
}
