//! A process at the door: what a program, or the library in it, has of the stack.

mod guest;
mod heirs;
mod travel;

pub use guest::Guest;
pub use heirs::Expected;

use super::NAME;
use super::codec::Code;
use super::line::{self, Received};
use super::listen::connect_to;
use super::message::{Answer, Ask, Hello, MAGIC, Refusal, Terms, VERSION, decode, encode};
use crate::channel::Client;
use crate::channel::client::ClientParts;
use crate::channel::control::{Control, Reply, Request};
use crate::error::Error;
use crate::own_fd::OwnFd;
use crate::run_dir;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long the stack may take to answer. A request costs a turn of its shard, so this is long.
const PATIENCE: Duration = Duration::from_secs(10);

/// A connection to the door, on which one question is asked at a time.
#[derive(Debug)]
struct Line {
    fd: OwnFd,
    /// Of the last question.
    number: u32,
    /// Room for an answer, once something is asked: most children never do.
    buffer: Vec<u8>,
}

impl Line {
    fn new(fd: OwnedFd) -> Self {
        Self::of(OwnFd::new(fd))
    }

    fn of(fd: OwnFd) -> Self {
        Self { fd, number: 0, buffer: Vec::new() }
    }

    /// The first word, and what comes of it: what wakes this process, and its places on the shards.
    fn greet(&mut self, domain: &str) -> Result<(OwnedFd, Vec<Seat>, Terms), Error> {
        let malformed = || Error::Refused(Refusal::Malformed);
        let this = pidfd_open(getpid(), PidfdFlags::empty());
        let this = this.map_err(|e| Error::io("descriptor of this process", e))?;
        let hello = Hello { magic: MAGIC, version: VERSION, domain: domain.into() };
        let (Answer::Welcome(shards, terms), mut wake) = self.ask(&hello, &[this.as_fd()])? else {
            return Err(malformed());
        };
        let wake = wake.pop().ok_or_else(malformed)?;
        let mut seats = Vec::new();
        for shard in 0..shards {
            let (Answer::Seat(number), descriptors) = self.ask(&Ask::Attach(shard), &[])? else {
                return Err(malformed());
            };
            let [region, stack] = <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| malformed())?;
            seats.push(Seat { number, region, stack });
        }
        Ok((wake, seats, terms))
    }

    /// Asks, and leaves the answer to whoever asks next.
    fn tell(&mut self, what: &impl Code, with: &[BorrowedFd<'_>]) -> Result<(), Error> {
        if self.buffer.is_empty() {
            self.buffer = line::buffer();
        }
        self.number = self.number.wrapping_add(1);
        line::send(&self.fd, &encode(self.number, what), with)
            .map_err(|_| last_word(&self.fd, &mut self.buffer))
    }

    /// Asks, and waits for the answer, which may come with descriptors.
    fn ask(&mut self, what: &impl Code, with: &[BorrowedFd<'_>]) -> Result<(Answer, Vec<OwnedFd>), Error> {
        self.tell(what, with)?;
        let until = Instant::now() + PATIENCE;
        loop {
            // It comes from another thread, so it is never there yet.
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            // Interrupted or not: there is something, or there is not.
            let _ = poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&left));
            match line::receive(&self.fd, &mut self.buffer) {
                Received::Packet(bytes, descriptors) => match decode::<Answer>(&self.buffer[..bytes]) {
                    (number, Some(answer)) if number == self.number || number == 0 => match answer {
                        Answer::Refused(why) => return Err(Error::Refused(why)),
                        answer => return Ok((answer, descriptors)),
                    },
                    // To a question that nobody waits for any more.
                    (_, Some(_)) => {}
                    (_, None) => return Err(Error::Refused(Refusal::Malformed)),
                },
                Received::Nothing if Instant::now() >= until => {
                    return Err(Error::io("answer of the stack", std::io::ErrorKind::TimedOut));
                }
                Received::Nothing => {}
                Received::Closed | Received::TooLong => return Err(last_word(&self.fd, &mut self.buffer)),
            }
        }
    }
}

/// Why the stack has hung up, if it said so.
fn last_word(line: &OwnFd, buffer: &mut [u8]) -> Error {
    // The kernel may say first that what was sent did not arrive.
    for _ in 0..2 {
        if let Received::Packet(bytes, _) = line::receive(line, buffer)
            && let (_, Some(Answer::Refused(why))) = decode::<Answer>(&buffer[..bytes])
        {
            return Error::Refused(why);
        }
    }
    Error::StackGone
}

/// A place on a shard.
struct Seat {
    number: u32,
    region: OwnedFd,
    stack: OwnedFd,
}

/// How clients ask: all shards over the same connection.
struct Asker {
    line: Arc<Mutex<Line>>,
    shard: u16,
}

impl Control for Asker {
    fn ask(&mut self, _client: usize, request: Request) -> Result<Reply, Error> {
        match request {
            // The hang-up says it, and nothing else does: a child must not say it for its parent.
            Request::Detach => Ok(Reply::Done),
            Request::Counters => Err(Error::application("channel: counters are not told at the door")),
            request => match locked(&self.line).ask(&Ask::Shard(self.shard, request), &[])?.0 {
                Answer::Reply(reply) => Ok(reply),
                _ => Err(Error::Refused(Refusal::Malformed)),
            },
        }
    }

    fn tell(&mut self, _client: usize, request: Request) -> Result<(), Error> {
        locked(&self.line).tell(&Ask::Shard(self.shard, request), &[])
    }
}

fn locked(line: &Mutex<Line>) -> std::sync::MutexGuard<'_, Line> {
    // A thread that panicked left a question without an answer, which the next recognises by its number.
    line.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A process that is attached to a stack: a client for each shard. All are woken by the same descriptor.
pub struct Process {
    line: Arc<Mutex<Line>>,
    clients: Vec<Client>,
    terms: Terms,
}

impl Process {
    /// Attaches to the stack whose door is at `path`, in the domain of this name: what processes of the same user that gave the same name hold, they may share.
    ///
    /// # Errors
    /// Nobody is there, or [`Error::Refused`].
    pub fn connect(path: &Path, domain: &str) -> Result<Self, Error> {
        let line = connect_to(path).map_err(|e| Error::io(format!("stack at {}", path.display()), e))?;
        Self::greet(line, domain)
    }

    /// Attaches to the stack of this name, or to the only one of this user that runs.
    ///
    /// # Errors
    /// There is none, or more than one and no name was given; as [`Process::connect`].
    pub fn find(stack: Option<&str>, domain: &str) -> Result<Self, Error> {
        Self::connect(&run_dir::find(stack)?.path.join(NAME), domain)
    }

    /// Attaches over a connection that was [handed in](super::Door::hand_in) for this process.
    ///
    /// # Errors
    /// As [`Process::connect`].
    pub fn over(line: OwnedFd) -> Result<Self, Error> {
        Self::greet(line, "")
    }

    fn greet(line: OwnedFd, domain: &str) -> Result<Self, Error> {
        let mut line = Line::new(line);
        let (wake, seats, terms) = line.greet(domain)?;
        let line = Arc::new(Mutex::new(line));
        let mut clients = Vec::new();
        for (shard, Seat { number, region, stack }) in seats.into_iter().enumerate() {
            // Cannot truncate: it was counted by a number of as many bits.
            let asker = Asker { line: line.clone(), shard: shard as u16 };
            let wake = wake.try_clone().map_err(|e| Error::io("descriptor of this process", e))?;
            clients.push(Client::open(ClientParts { region, stack, wake, number }, Box::new(asker))?);
        }
        Ok(Self { line, clients, terms })
    }

    /// What holds for programs on this stack.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Whether the stack has hung up: its process ended, or closed the door.
    pub fn is_gone(&self) -> bool {
        let line = locked(&self.line);
        let mut fds = [PollFd::new(&line.fd, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut fds, Some(&now)), Ok(1)) && fds[0].revents().contains(PollFlags::HUP)
    }

    /// The descriptor of the connection to the stack.
    pub fn line(&self) -> RawFd {
        locked(&self.line).fd.as_raw_fd()
    }

    /// See [`OwnFd::make_way`].
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn make_way(&self, number: RawFd) -> Result<Option<RawFd>, Errno> {
        locked(&self.line).fd.make_way(number)
    }

    /// Takes the next client, in the order of shards. This must be kept: when it is dropped the stack takes the process for gone.
    pub fn take_client(&mut self) -> Option<Client> {
        if self.clients.is_empty() { None } else { Some(self.clients.remove(0)) }
    }

    /// The clients, one for each shard.
    pub fn clients(&mut self) -> &mut [Client] {
        &mut self.clients
    }
}
