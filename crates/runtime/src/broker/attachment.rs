//! A process at the door: what a program, or the library in it, has of the stack.

mod fd_passing;
mod inherit;
mod unattached;

pub use inherit::PreparedProcess;
pub use unattached::UnattachedProcess;

use super::SOCKET_NAME;
use super::codec::Codec;
use super::control_listener::connect_to;
use super::message::{
    ControlReply, ControlRequest, Hello, MAGIC, PROTOCOL_VERSION, Refusal, StackInfo, decode, encode,
};
use super::seqpacket::{self, RecvResult};
use crate::channel::Client;
use crate::channel::client::ClientParts;
use crate::channel::control::{ChannelReply, ChannelRequest, ControlPath};
use crate::error::Error;
use crate::internal_fd::InternalFd;
use crate::run_dir;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long the stack may take to answer. A request costs a turn of its shard, so this is long.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to the door, on which one question is asked at a time.
#[derive(Debug)]
struct ControlConnection {
    fd: InternalFd,
    /// Of the last question.
    last_request: u32,
    /// Room for an answer, once something is asked: most children never do.
    buffer: Vec<u8>,
}

impl ControlConnection {
    fn new(fd: OwnedFd) -> Self {
        Self::from_internal_fd(InternalFd::new(fd))
    }

    fn from_internal_fd(fd: InternalFd) -> Self {
        Self { fd, last_request: 0, buffer: Vec::new() }
    }

    /// The first word, and what comes of it: what wakes this process, and its places on the shards.
    fn greet(&mut self, domain: &str) -> Result<(OwnedFd, Vec<ShardAttachment>, StackInfo), Error> {
        let malformed = || Error::Refused(Refusal::Malformed);
        let pidfd = pidfd_open(getpid(), PidfdFlags::empty());
        let pidfd = pidfd.map_err(|e| Error::io("descriptor of this process", e))?;
        let hello = Hello { magic: MAGIC, version: PROTOCOL_VERSION, domain: domain.into() };
        let (ControlReply::Welcome(shards, stack_info), mut wake) = self.request(&hello, &[pidfd.as_fd()])?
        else {
            return Err(malformed());
        };
        let wake = wake.pop().ok_or_else(malformed)?;
        let mut attachments = Vec::new();
        for shard in 0..shards {
            let (ControlReply::Attached(request_id), descriptors) =
                self.request(&ControlRequest::Attach(shard), &[])?
            else {
                return Err(malformed());
            };
            let [region, stack] = <[OwnedFd; 2]>::try_from(descriptors).map_err(|_| malformed())?;
            attachments.push(ShardAttachment { client: request_id, region, stack_wake: stack });
        }
        Ok((wake, attachments, stack_info))
    }

    /// Asks, and leaves the answer to whoever asks next.
    fn send_request(&mut self, message: &impl Codec, descriptors: &[BorrowedFd<'_>]) -> Result<(), Error> {
        if self.buffer.is_empty() {
            self.buffer = seqpacket::buffer();
        }
        self.last_request = self.last_request.wrapping_add(1);
        seqpacket::send(&self.fd, &encode(self.last_request, message), descriptors)
            .map_err(|_| hangup_reason(&self.fd, &mut self.buffer))
    }

    /// Asks, and waits for the answer, which may come with descriptors.
    fn request(
        &mut self,
        message: &impl Codec,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(ControlReply, Vec<OwnedFd>), Error> {
        self.send_request(message, descriptors)?;
        let deadline = Instant::now() + REPLY_TIMEOUT;
        loop {
            // It comes from another thread, so it is never there yet.
            let remaining = deadline.saturating_duration_since(Instant::now());
            let remaining =
                Timespec { tv_sec: remaining.as_secs() as i64, tv_nsec: remaining.subsec_nanos().into() };
            // Interrupted or not: there is something, or there is not.
            let _ = poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&remaining));
            match seqpacket::receive(&self.fd, &mut self.buffer) {
                RecvResult::Packet(bytes, descriptors) => match decode::<ControlReply>(&self.buffer[..bytes])
                {
                    (request_id, Some(answer)) if request_id == self.last_request || request_id == 0 => {
                        match answer {
                            ControlReply::Refused(refusal) => return Err(Error::Refused(refusal)),
                            answer => return Ok((answer, descriptors)),
                        }
                    }
                    // To a question that nobody waits for any more.
                    (_, Some(_)) => {}
                    (_, None) => return Err(Error::Refused(Refusal::Malformed)),
                },
                RecvResult::WouldBlock if Instant::now() >= deadline => {
                    return Err(Error::io("answer of the stack", std::io::ErrorKind::TimedOut));
                }
                RecvResult::WouldBlock => {}
                RecvResult::Closed | RecvResult::Oversized => {
                    return Err(hangup_reason(&self.fd, &mut self.buffer));
                }
            }
        }
    }
}

/// Why the stack has hung up, if it said so.
fn hangup_reason(connection: &InternalFd, buffer: &mut [u8]) -> Error {
    // The kernel may say first that what was sent did not arrive.
    for _ in 0..2 {
        if let RecvResult::Packet(bytes, _) = seqpacket::receive(connection, buffer)
            && let (_, Some(ControlReply::Refused(refusal))) = decode::<ControlReply>(&buffer[..bytes])
        {
            return Error::Refused(refusal);
        }
    }
    Error::StackGone
}

/// A place on a shard.
struct ShardAttachment {
    client: u32,
    region: OwnedFd,
    stack_wake: OwnedFd,
}

/// How clients ask: all shards over the same connection.
struct BrokerControl {
    connection: Arc<Mutex<ControlConnection>>,
    shard: u16,
}

impl ControlPath for BrokerControl {
    fn call(&mut self, _client: usize, request: ChannelRequest) -> Result<ChannelReply, Error> {
        match request {
            // The hang-up says it, and nothing else does: a child must not say it for its parent.
            ChannelRequest::Detach => Ok(ChannelReply::Done),
            ChannelRequest::Counters => Err(Error::application("channel: counters are not told at the door")),
            request => match lock_connection(&self.connection)
                .request(&ControlRequest::Shard(self.shard, request), &[])?
                .0
            {
                ControlReply::Reply(reply) => Ok(reply),
                _ => Err(Error::Refused(Refusal::Malformed)),
            },
        }
    }

    fn post(&mut self, _client: usize, request: ChannelRequest) -> Result<(), Error> {
        lock_connection(&self.connection).send_request(&ControlRequest::Shard(self.shard, request), &[])
    }
}

fn lock_connection(connection: &Mutex<ControlConnection>) -> std::sync::MutexGuard<'_, ControlConnection> {
    // A thread that panicked left a question without an answer, which the next recognises by its number.
    connection.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A process that is attached to a stack: a client for each shard. All are woken by the same descriptor.
pub struct Attachment {
    connection: Arc<Mutex<ControlConnection>>,
    clients: Vec<Client>,
    stack_info: StackInfo,
}

impl Attachment {
    /// Attaches to the stack whose door is at `path`, in the domain of this name: what processes of the same user that gave the same name hold, they may share.
    ///
    /// # Errors
    /// Nobody is there, or [`Error::Refused`].
    pub fn connect(path: &Path, domain: &str) -> Result<Self, Error> {
        let connection =
            connect_to(path).map_err(|e| Error::io(format!("stack at {}", path.display()), e))?;
        Self::greet(connection, domain)
    }

    /// Attaches to the stack of this name, or to the only one of this user that runs.
    ///
    /// # Errors
    /// There is none, or more than one and no name was given; as [`Process::connect`].
    pub fn find(stack: Option<&str>, domain: &str) -> Result<Self, Error> {
        Self::connect(&run_dir::find(stack)?.path.join(SOCKET_NAME), domain)
    }

    /// Attaches over a connection that was [handed in](super::Door::hand_in) for this process.
    ///
    /// # Errors
    /// As [`Process::connect`].
    pub fn from_connection(connection: OwnedFd) -> Result<Self, Error> {
        Self::greet(connection, "")
    }

    fn greet(connection: OwnedFd, domain: &str) -> Result<Self, Error> {
        let mut connection = ControlConnection::new(connection);
        let (wake, attachments, stack_info) = connection.greet(domain)?;
        let connection = Arc::new(Mutex::new(connection));
        let mut clients = Vec::new();
        for (shard, ShardAttachment { client: request_id, region, stack_wake: stack }) in
            attachments.into_iter().enumerate()
        {
            // Cannot truncate: it was counted by a number of as many bits.
            let control = BrokerControl { connection: connection.clone(), shard: shard as u16 };
            let wake = wake.try_clone().map_err(|e| Error::io("descriptor of this process", e))?;
            clients.push(Client::open(
                ClientParts { region, stack_wake: stack, client_wake: wake, client: request_id },
                Box::new(control),
            )?);
        }
        Ok(Self { connection, clients, stack_info })
    }

    /// What holds for programs on this stack.
    pub fn stack_info(&self) -> &StackInfo {
        &self.stack_info
    }

    /// Whether the stack has hung up: its process ended, or closed the door.
    pub fn is_disconnected(&self) -> bool {
        let connection = lock_connection(&self.connection);
        let mut fds = [PollFd::new(&connection.fd, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut fds, Some(&now)), Ok(1)) && fds[0].revents().contains(PollFlags::HUP)
    }

    /// The descriptor of the connection to the stack.
    pub fn connection_fd(&self) -> RawFd {
        lock_connection(&self.connection).fd.as_raw_fd()
    }

    /// See [`OwnFd::make_way`].
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn relocate_from(&self, request_id: RawFd) -> Result<Option<RawFd>, Errno> {
        lock_connection(&self.connection).fd.relocate_from(request_id)
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
